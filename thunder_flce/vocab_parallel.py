"""The vocabulary divided among ranks: who has which part, and that all ranks mean the same call.

Ranks that disagree about a call would run another number of collectives, or with other sizes, and hang. So before the
first call with some shapes and settings they tell each other what they were given, and any difference is an error on
all of them. What they agree on then holds for every such call: nothing more is exchanged.
"""

import ast
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.tensor import DTensor

from thunder_flce.device import DeviceMemory
from thunder_flce.operation.loss import Loss
from thunder_flce.operation.shard import Shard
from thunder_flce.options import Options

ONLY_EAGER = (
    "DTensors and VocabParallel.data_parallel work in eager calls only: torch.compile breaks the graph there, unless "
    "with fullgraph=True; torch.export and thunder cannot trace them. Call linear_cross_entropy outside of such a "
    "program, or with to_local() and another vocab_parallel"
)

# Any value but "" and "0" makes ranks compare every call, not only the first of its kind.
CHECK_EVERY_CALL = "THUNDER_FLCE_CHECK_RANKS"


@dataclass(frozen=True, kw_only=True)
class VocabParallel:
    """How the ranks of a group divide the vocabulary of `linear_cross_entropy`.

    Raises:
        TypeError, ValueError: for a field that has no meaning; the message names it.
    """

    group: ProcessGroup | DeviceMesh
    """The ranks: a process group, or a device mesh of one dimension."""

    start: int | None = None
    """The first row of the whole weight that this rank has. None, on all ranks: the parts follow each other in the
    order of ranks. Parts may differ in size, and may be empty."""

    sequence_parallel: bool = False
    """Whether input, target, token_weights and token_inputs are this rank's part of the tokens, in the order of ranks
    and of equal size. Their loss is that of all tokens; with reduction "none", loss and outputs are those of this
    rank's tokens. The input's gradient is that of this rank's part."""

    data_parallel: bool = False
    """Whether each rank has tokens of its own, as many as it likes, and the gradients of what comes before are averaged
    over the ranks, as FSDP and DDP do. The loss is the mean over ranks of their losses, so that averaged gradients are
    its own: input's gradient is that of this rank's loss, and linear_weight's is already averaged. "mean" is the mean
    over the tokens of all ranks; with num_items, the same on all ranks, as `count_items` has it. The host waits for
    the number of tokens on other ranks."""

    input_grad: str = "reduced"
    """"reduced": the gradient of input, and of the inputs of terms, is summed over the ranks. "partial": each rank gets
    what its columns contribute, to be summed by whoever asked for it."""

    input_grad_dtype: torch.dtype | None = None
    """What it is summed in: None for float32 (float64 for float64), or input's dtype, which moves half as much."""

    def __post_init__(self) -> None:
        _check_group("group", self.group)
        if self.start is not None and (isinstance(self.start, bool) or not isinstance(self.start, int)):
            raise TypeError(f"start must be None or an int, but got {_name(self.start)}")
        flags = ("sequence_parallel", "data_parallel")
        for name, choices in (*((flag, (False, True)) for flag in flags), ("input_grad", ("reduced", "partial"))):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {choices}, but got {getattr(self, name)!r}")
        if self.sequence_parallel and self.data_parallel:
            raise ValueError("sequence_parallel must be False with data_parallel: each says who has which tokens")
        if self.divides_tokens and self.input_grad == "partial":
            name = flags[self.data_parallel]
            raise ValueError(f'input_grad must be "reduced" with {name}: each rank has tokens of its own')

    @property
    def process_group(self) -> ProcessGroup:
        """The ranks."""
        return self.group.get_group() if isinstance(self.group, DeviceMesh) else self.group

    @property
    def divides_tokens(self) -> bool:
        """Whether a rank has only some of the tokens."""
        return self.sequence_parallel or self.data_parallel

    @classmethod
    def of(cls, vocab_parallel: Any) -> "VocabParallel":
        """What `linear_cross_entropy` takes, or has put into a graph (`as_literal`)."""
        if isinstance(vocab_parallel, str) and vocab_parallel.startswith("{"):
            return _from_literal(vocab_parallel)
        if isinstance(vocab_parallel, VocabParallel):
            return vocab_parallel
        _check_group("vocab_parallel", vocab_parallel)
        return cls(group=vocab_parallel)


_FIELDS = tuple(field.name for field in fields(VocabParallel))


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """What all ranks know of a call."""

    shard: Shard
    weight_rows: int
    """Rows of the whole weight."""
    memory: DeviceMemory | None
    """The least total and the least free memory among all ranks; None for a CPU."""


# The agreements of each group, by what this rank was given.
_agreements: WeakKeyDictionary[ProcessGroup, dict[Any, Agreement]] = WeakKeyDictionary()


def agree(parallel: VocabParallel, arguments: Mapping[str, Any], *, loss: Loss, options: Options) -> Agreement:
    """Which rank has which part of the vocabulary. The ranks exchange this when they first meet such a call.

    Args:
        parallel: the ranks, each of which has as many tokens.
        arguments: of `linear_cross_entropy`, by name; not checked yet.
        loss: the loss.
        options: the options.

    Raises:
        ValueError: for what differs between ranks, on all of them.
    """
    group = parallel.process_group
    call = _described(parallel, arguments, loss, options)
    weight = arguments["linear_weight"]
    rows = weight.shape[0] if isinstance(weight, Tensor) and weight.ndim else 0
    key = (*call.items(), rows, parallel.start)
    known = _agreements.setdefault(group, {})
    checks_every_call = os.environ.get(CHECK_EVERY_CALL, "") not in ("", "0")
    if key in known and not checks_every_call:
        return known[key]
    values = _values(parallel, arguments) if checks_every_call else {}
    memory = DeviceMemory.of(weight.device) if isinstance(weight, Tensor) else None
    given = _told_by_all(group, (call | values, rows, parallel.start, memory))
    for rank, told in enumerate(given):
        if isinstance(told, str):
            raise ValueError(f"rank {rank} of vocab_parallel has refused its arguments: {told}")
    calls, all_rows, starts, memories = zip(*given, strict=True)
    _check_equal(calls)
    of_input = getattr(arguments["input"], "dtype", None)
    if parallel.input_grad_dtype not in (None, torch.float32, of_input):
        raise ValueError(
            f"input_grad_dtype must be None, torch.float32 or input's dtype, {of_input}, but got "
            f"{parallel.input_grad_dtype}"
        )
    if key not in known:
        known[key] = Agreement(
            shard=_shard(parallel, loss, all_rows, _starts(all_rows, starts)),
            weight_rows=sum(all_rows),
            memory=None if None in memories else DeviceMemory(*map(min, zip(*memories, strict=True))),
        )
    return known[key]


def refuse(parallel: VocabParallel, error: Exception) -> NoReturn:
    """Raises an error of this rank's arguments, once the ranks that are about to agree know of it."""
    _told_by_all(parallel.process_group, str(error))
    raise error


def _told_by_all(group: ProcessGroup, told: Any) -> list[Any]:
    given: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(given, told, group=group)
    return given


def settings_of(vocab_parallel: Any) -> dict[str, Any]:
    """The fields of what `linear_cross_entropy` takes; Dynamo looks into this."""
    if not isinstance(vocab_parallel, VocabParallel):
        return {"group": vocab_parallel}
    return {name: getattr(vocab_parallel, name) for name in _FIELDS}


def as_literal(**settings: Any) -> str:
    """The fields of a `VocabParallel` as a literal, for a graph; the group is given by its name.

    Raises:
        NotImplementedError: with `data_parallel`.
        TypeError, ValueError: see `VocabParallel`.
    """
    # Of a group that is given without a VocabParallel, `settings_of` has nothing else.
    parallel = VocabParallel.of(settings["group"]) if len(settings) == 1 else VocabParallel(**settings)
    if parallel.data_parallel:
        raise NotImplementedError(ONLY_EAGER)
    changed = {f.name: value for f in fields(parallel) if (value := getattr(parallel, f.name)) != f.default}
    if parallel.input_grad_dtype is not None:
        changed["input_grad_dtype"] = str(parallel.input_grad_dtype).removeprefix("torch.")
    return repr({**changed, "group": parallel.process_group.group_name})


def _from_literal(literal: str) -> VocabParallel:
    values = ast.literal_eval(literal)
    dtype = values.pop("input_grad_dtype", None)
    group = dist.distributed_c10d._resolve_process_group(values.pop("group"))
    return VocabParallel(group=group, input_grad_dtype=None if dtype is None else getattr(torch, dtype), **values)


def _described(parallel: VocabParallel, arguments: Mapping[str, Any], loss: Loss, options: Options) -> dict[str, Any]:
    """What must be equal on all ranks, by the name of the argument."""
    weights = ("linear_weight", "linear_bias")
    call: dict[str, Any] = {
        name: _word(value, is_part=name in weights)
        for name, value in arguments.items()
        if name not in ("terms", "token_inputs")
    }
    for number, value in enumerate(arguments["token_inputs"]):
        call[f"token_inputs[{number}]"] = _word(value, is_part=False)
    for number, term in enumerate(arguments["terms"]):
        call[f"terms[{number}]"] = tuple(_word(value, is_part=at > 0) for at, value in enumerate(term))
    names = ("sequence_parallel", "data_parallel", "input_grad", "input_grad_dtype")
    settings = {name: getattr(parallel, name) for name in names}
    return {**call, **asdict(loss), "options": repr(options), "grad mode": torch.is_grad_enabled(), **settings}


def _word(value: Any, *, is_part: bool) -> str:
    """An argument but for its numbers and, where it is a part of the vocabulary, its rows."""
    if not isinstance(value, Tensor):
        return _name(value)
    shape = ["V", *value.shape[1:]] if is_part else list(value.shape)
    dtype = str(value.dtype).removeprefix("torch.")
    gradient = ", which requires a gradient" if value.requires_grad else ""
    kind = "a DTensor, " if isinstance(value, DTensor) else ""
    return f"{kind}{dtype} ({', '.join(map(str, shape))}) on {value.device.type}{gradient}"


def _values(parallel: VocabParallel, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers that must be equal, too, in words: a NaN is not equal to itself."""
    target, number = arguments["target"], arguments["num_items"]
    values: dict[str, Any] = {}
    if isinstance(target, Tensor) and not parallel.divides_tokens:
        weights = torch.arange(1, target.numel() + 1, device=target.device)
        values["the values of target"] = int((target.reshape(-1).long() * weights).sum())
    if isinstance(number, Tensor | int | float):
        values["the value of num_items"] = str(number.tolist() if isinstance(number, Tensor) else number)
    return values


def _check_group(name: str, group: Any) -> None:
    """Raises a TypeError or a ValueError for what is no group of ranks; the message has the argument's name."""
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"{name} must be a device mesh of one dimension, but has {group.ndim}, {group.mesh_dim_names}: take "
                'the one over which the vocabulary is divided, such as mesh["tp"]'
            )
    elif not isinstance(group, ProcessGroup):
        raise TypeError(
            f"{name} must be a ProcessGroup or a DeviceMesh that this rank belongs to, but got {_name(group)}"
        )


def _name(value: Any) -> str:
    return type(value).__name__


def _check_equal(calls: tuple[dict[str, Any], ...]) -> None:
    for rank, call in enumerate(calls):
        for name in {**calls[0], **call}:
            first, other = (each.get(name) for each in (calls[0], call))
            if first != other:
                raise ValueError(
                    f"all ranks of vocab_parallel must be given the same, but {name} is {first} on rank 0 and {other} "
                    f"on rank {rank}"
                )


def _starts(all_rows: tuple[int, ...], starts: tuple[int | None, ...]) -> list[int]:
    """The first row of each rank's part."""
    in_order = [sum(all_rows[:rank]) for rank in range(len(all_rows))]
    given = [start for start in starts if start is not None]
    if not given:
        return in_order
    if len(given) == len(starts):
        parts = sorted((start, start + rows) for start, rows in zip(given, all_rows, strict=True) if rows)
        if [start for start, _ in parts] == [0, *(stop for _, stop in parts)][: len(parts)]:
            return given
    of_ranks = ", ".join(f"{start} with {rows} rows" for start, rows in zip(starts, all_rows, strict=True))
    raise ValueError(
        f"start must be None on all ranks, or the parts must follow each other from row 0 without gap or overlap, but "
        f"the ranks have {of_ranks}"
    )


def _shard(parallel: VocabParallel, loss: Loss, all_rows: tuple[int, ...], starts: list[int]) -> Shard:
    rank, size = dist.get_rank(parallel.process_group), loss.vocab_size
    vocab = size if isinstance(size, int) else sum(all_rows)
    columns = [max(min(start + rows, vocab) - start, 0) for start, rows in zip(starts, all_rows, strict=True)]
    return Shard(
        group=parallel.process_group.group_name,
        ranks=len(all_rows),
        rank=rank,
        start=starts[rank],
        columns=columns[rank],
        largest=max(columns),
        vocab=vocab,
        reduces_input_grad=parallel.input_grad == "reduced",
        float32_input_grad=parallel.input_grad_dtype in (None, torch.float32),
        sequence_parallel=parallel.divides_tokens,
        input_grad_factor=len(all_rows) if parallel.data_parallel else 1,
    )
