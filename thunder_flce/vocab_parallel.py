"""The vocabulary divided among ranks: which rank has which part, and the check that all ranks make the same call.

Ranks that disagree about a call would run different collectives, or collectives of different sizes, and hang. So each
call begins with an all-gather of fixed size, before any collective whose size depends on the call. Every rank
contributes a hash of its arguments and the few numbers in which ranks may differ, such as its rows of the weight. Every
rank then has the numbers of all ranks, and only these decide what comes next:

- If all hashes are equal, the agreement is computed from the numbers alone. If hashes of devices differ, ranks also
  exchange descriptions of their devices.
- If hashes of arguments differ, or a rank has refused its arguments, all ranks exchange descriptions in words, and all
  raise an error.

An agreement does not depend on earlier calls, so no rank can be wrong about what another rank knows. The host waits for
the numbers: for the other ranks if the group communicates on the CPU (gloo, also beside NCCL), or for the device with
NCCL alone. While a CUDA graph is captured, it cannot wait for the device. The ranks must then have agreed on such a
call before, and an assertion on the device checks at each replay that the hashes are equal.
"""

import ast
import operator
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from hashlib import blake2b
from math import prod
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeGuard
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from thunder_flce.device import Device
from thunder_flce.importing import when_imported
from thunder_flce.operation.call import COLUMN, OF_TOKENS, Call, Shard, argument, is_tensor
from thunder_flce.operation.checks import check_call, check_is_dense
from thunder_flce.operation.loss import Loss
from thunder_flce.options import Options, PlainValues

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh, ProcessGroup
    from torch.distributed.tensor import DTensor

ONLY_EAGER = (
    "DTensors and VocabParallel.data_parallel work in eager calls only: torch.compile breaks the graph there, or fails "
    "with fullgraph=True; torch.export and thunder cannot trace them. Call linear_cross_entropy outside of the traced "
    "program, or pass to_local() of DTensors and a vocab_parallel without data_parallel"
)

# Environment variable: any value but "" and "0" makes ranks also compare the values of target and of num_items.
CHECK_EVERY_CALL = "THUNDER_FLCE_CHECK_RANKS"


@dataclass(frozen=True, kw_only=True)
class VocabParallel(PlainValues):
    """How the ranks of a group divide the vocabulary of `linear_cross_entropy`.

    Raises:
        TypeError, ValueError: if a field has a wrong type or value; the message names it.
    """

    group: "ProcessGroup | DeviceMesh"
    """The ranks: a process group, or a device mesh of one dimension."""

    start: int | None = None
    """Index, in the whole weight, of the first row that this rank has. None, on all ranks: the parts follow each other
    in the order of ranks. Parts may differ in size, and may be empty."""

    sequence_parallel: bool = False
    """Whether input, target, token_weights and token_inputs are this rank's part of the tokens. Parts are in the order
    of ranks and of equal size. The loss is that of all tokens; with reduction "none", the loss and the outputs are
    those of this rank's tokens. The input's gradient is that of this rank's tokens."""

    data_parallel: bool = False
    """Whether each rank has tokens of its own, any number of them, and the gradients of the layers before are averaged
    over the ranks, as by FSDP and DDP. The loss is the mean over ranks of their losses, so that averaged gradients are
    its gradients: input's gradient is that of this rank's loss, and linear_weight's is averaged already. "mean" is the
    mean over the tokens of all ranks; num_items, if given, is the same on all ranks, as `count_items` computes it."""

    input_grad: str = "reduced"
    """"reduced": the gradients of input and of the inputs of terms are summed over the ranks. "partial": each rank gets
    the contribution of its columns, and the caller has to sum them."""

    input_grad_dtype: torch.dtype | None = None
    """Dtype in which the ranks sum the gradient of input: None for float32 (float64 for float64), or input's dtype,
    which moves half as many bytes."""

    def __post_init__(self) -> None:
        group_of("group", self.group)
        if self.start is not None and (isinstance(self.start, bool) or not isinstance(self.start, int)):
            raise TypeError(f"start must be None or an int, but got {type(self.start).__name__}")
        if self.start is not None and not 0 <= self.start < 2**63:
            raise ValueError(f"start must be the index of a row of the whole weight, but got {self.start}")
        flags = ("sequence_parallel", "data_parallel")
        for name, choices in (*((flag, (False, True)) for flag in flags), ("input_grad", ("reduced", "partial"))):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {choices}, but got {getattr(self, name)!r}")
        if self.sequence_parallel and self.data_parallel:
            raise ValueError("sequence_parallel must be False with data_parallel: set only one of them")
        if self.divides_tokens and self.input_grad == "partial":
            name = flags[self.data_parallel]
            raise ValueError(f'input_grad must be "reduced" with {name}: each rank has tokens of its own')

    @property
    def process_group(self) -> "ProcessGroup":
        """The process group of the ranks."""
        return group_of("group", self.group)

    @property
    def divides_tokens(self) -> bool:
        """Whether a rank has only some of the tokens."""
        return self.sequence_parallel or self.data_parallel

    @classmethod
    def of(cls, vocab_parallel: Any) -> "VocabParallel":
        """Returns the `VocabParallel` of an argument of `linear_cross_entropy`, or of a literal from `as_literal`."""
        if isinstance(vocab_parallel, str) and vocab_parallel.startswith("{"):
            return _from_literal(vocab_parallel)
        if isinstance(vocab_parallel, VocabParallel):
            return vocab_parallel
        group_of("vocab_parallel", vocab_parallel)
        return cls(group=vocab_parallel)


_FIELDS = tuple(field.name for field in fields(VocabParallel))


class _Contribution(NamedTuple):
    """A rank's contribution to the first collective of a call: 64-bit numbers."""

    digest: int = 0
    """Hash of everything that must be equal on all ranks, or of the error if the rank has refused its arguments"""
    rows: int = 0
    """Rows of its part of the weight"""
    start: int = 0
    tokens: int = 0
    """Number of its tokens, with `data_parallel`"""
    device: int = 0
    """Hash of its device"""


# Stands for None in a `_Contribution`.
_NONE = -1

# Agreements of earlier calls, by this rank's contribution, for captured CUDA graphs. None if the same contribution has
# led to different agreements.
_agreements: "WeakKeyDictionary[ProcessGroup, dict[_Contribution, Shard | None]]" = WeakKeyDictionary()
_REMEMBERED = 256


def is_dtensor(value: Any) -> TypeGuard["DTensor"]:
    """Whether a value is a DTensor. This imports nothing: if there is a DTensor, its module has been imported."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def has_dtensor(values: Sequence[Any]) -> bool:
    """Whether there is a DTensor among some values, or in lists and tuples, such as terms, among them."""
    if sys.modules.get("torch.distributed.tensor") is None:
        return False
    return any([has_dtensor(each) if isinstance(each, (list, tuple)) else is_dtensor(each) for each in values])


def agreed_call(call: Call, vocab_parallel: str, options: Options) -> Call:
    """Has the ranks agree on a call in a graph; returns it with this rank's shard, checked."""
    parallel = VocabParallel.of(vocab_parallel)
    call = replace(call, shard=agreement_on(parallel, call, options)())
    check_call(call)
    return call


def agreement_on(parallel: VocabParallel, call: Call, options: Options) -> Callable[[], Shard]:
    """Returns a function that has the ranks agree on a call; it compares their calls and returns this rank's `Shard`.

    Errors before that function is called are errors of this rank alone, so `tell` must tell the other ranks.

    Args:
        parallel: the ranks.
        call: a call of tensors or specs, not checked yet; a weight that is a DTensor has its rows divided among the
            ranks. `needs_grad` is set for the call of a program; in an eager call, the operands' `requires_grad` holds.
        options: the options of the call.

    Raises:
        ValueError: on all ranks, by the returned function, if their calls differ; the message names the difference.
    """
    group, weight, input = parallel.process_group, call.tensors.get("linear_weight"), call.tensors.get("input")
    device = Device.of(weight.device) if is_tensor(weight) else None
    words = _described(parallel, call, options)
    if os.environ.get(CHECK_EVERY_CALL, "") not in ("", "0"):
        words |= _values(parallel, call.tensors)
    told = _Contribution(
        digest=_digest(sorted(words.items())),
        rows=_rows(weight),
        start=_NONE if parallel.start is None else parallel.start,
        tokens=prod(input.shape[:-1]) if parallel.data_parallel and is_tensor(input) else 0,
        device=_digest(device),
    )

    def agree() -> Shard:
        if _is_capturing(group):
            return _agreed_before(group, told)
        given = _gathered_contributions(group, told, weight.device if is_tensor(weight) else None)
        if any(each.digest != told.digest for each in given):
            _raise_difference(_gathered_objects(group, words))
        is_one = all(each.device == told.device for each in given)
        devices = [device] if is_one else _gathered_objects(group, device)
        of_input = getattr(input, "dtype", None)
        if parallel.input_grad_dtype not in (None, torch.float32, of_input):
            raise ValueError(
                f"input_grad_dtype must be None, torch.float32 or input's dtype, {of_input}, but got "
                f"{parallel.input_grad_dtype}"
            )
        least = None if device is None else min(filter(None, devices), key=lambda it: (it.memory or 0, repr(it)))
        shard = replace(_shard(parallel, call.loss, given), device=least)
        _remember(group, told, shard)
        return shard

    return agree


def tell(error: Exception, parallel: VocabParallel | None, weight: Any) -> None:
    """Tells the other ranks, which wait for an agreement, of an error in this rank's arguments; they raise it, too."""
    group = None if parallel is None else parallel.process_group
    if group is None and is_dtensor(weight):
        at = next((at for at, placement in enumerate(weight.placements) if placement.is_shard(0)), None)
        group = None if at is None else weight.device_mesh.get_group(at)
    if group is not None and torch._guards.detect_fake_mode() is None and not _is_capturing(group):
        _gathered_contributions(group, _Contribution(digest=_digest(str(error))))
        _gathered_objects(group, str(error))


# Exchange among ranks.


def _digest(value: Any) -> int:
    """Returns a 64-bit hash that is the same in all processes."""
    return int.from_bytes(blake2b(repr(value).encode(), digest_size=8).digest(), "big", signed=True)


def _exchange_device(group: "ProcessGroup") -> torch.device:
    """Returns the device of exchanged numbers, which depends on the group alone, not on a rank's arguments."""
    return torch.device(dist.distributed_c10d._get_object_coll_device(group))


def _is_capturing(group: "ProcessGroup") -> bool:
    """Whether the host cannot read the exchanged numbers, because a CUDA graph is being captured."""
    return _exchange_device(group).type == "cuda" and torch.cuda.is_current_stream_capturing()


def _gathered(group: "ProcessGroup", mine: Tensor) -> Tensor:
    """Returns the numbers of all R ranks, (R, numbers)."""
    found = mine.new_empty(dist.get_world_size(group) * mine.numel())
    dist.all_gather_into_tensor(found, mine, group=group)
    return found.view(-1, mine.numel())


def _gathered_contributions(
    group: "ProcessGroup", told: _Contribution, device: torch.device | None = None
) -> list[_Contribution]:
    where = _exchange_device(group)
    # The copy from pinned memory is asynchronous, so that the host waits only once, for the result.
    mine = torch.tensor(told, device="cpu", pin_memory=where.type == "cuda")
    mine = mine.to(device if device is not None and device.type == where.type else where, non_blocking=True)
    return [_Contribution(*numbers) for numbers in _gathered(group, mine).tolist()]


def _agreed_before(group: "ProcessGroup", told: _Contribution) -> Shard:
    """Returns an earlier agreement. Each replay takes part in the collective, which other ranks may run eagerly."""
    shard = _agreements[group].get(told) if group in _agreements else None
    if shard is None:
        raise RuntimeError(
            "ranks cannot agree on a new call with vocab_parallel while a CUDA graph is captured: make the call once "
            "before the capture. If this rank has equally many rows of two weights, but other ranks have not, create "
            'the process group with a backend for the CPU, too, such as "cpu:gloo,cuda:nccl"'
        )
    mine = torch.stack([torch.full((), number, dtype=torch.int64, device=_exchange_device(group)) for number in told])
    is_same = (_gathered(group, mine)[:, 0] == told.digest).all()
    torch._assert_async(is_same, "all ranks of vocab_parallel must be given the same")
    return shard


def _remember(group: "ProcessGroup", told: _Contribution, shard: Shard) -> None:
    if _exchange_device(group).type == "cuda":
        known = _agreements.setdefault(group, {})
        known[told] = shard if known.pop(told, shard) == shard else None
        if len(known) > _REMEMBERED:
            known.pop(next(iter(known)))


def _gathered_objects(group: "ProcessGroup", words: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, words, group=group)
    return found


def _raise_difference(words: list[Any]) -> NoReturn:
    for rank, told in enumerate(words):
        if isinstance(told, str):
            raise ValueError(f"rank {rank} of vocab_parallel has refused its arguments: {told}")
    for rank, call in enumerate(words):
        for name in {**words[0], **call}:
            first, other = (each.get(name, "None") for each in (words[0], call))
            if first != other:
                raise ValueError(
                    f"all ranks of vocab_parallel must be given the same, but {name} is {first} on rank 0 and {other} "
                    f"on rank {rank}"
                )
    raise AssertionError("ranks have described equal calls with different hashes")


# Descriptions of calls.


def _described(parallel: VocabParallel, call: Call, options: Options) -> dict[str, str]:
    """Describes everything that must be equal on all ranks, in words, by the names of arguments."""
    for name, value in call.tensors.items():
        check_is_dense(name, value)
    input = call.tensors.get("input")
    tokens = input.shape[:-1] if parallel.data_parallel and is_tensor(input) else None
    rows, device = _rows(call.tensors.get("linear_weight")), getattr(input, "device", None)
    words: dict[str, str] = {}
    others: dict[str, str] = {}
    for name, value in call.tensors.items():
        if not is_tensor(value):
            words[name] = type(value).__name__
            if isinstance(value, Real):
                others[f"the value of {name}"] = str(value)
            continue
        known, shape = argument(name), tuple[Any, ...](value.shape)
        if known.role == COLUMN and (is_dtensor(value) or _rows(value) == rows):
            shape = ("V", *shape[1:])
        elif tokens is not None and known.role in OF_TOKENS and shape[: len(tokens)] == tokens:
            shape = ("T", *shape[len(tokens) :])
        needs = value.requires_grad and (torch.is_grad_enabled() or not known.differentiable)
        needs = needs or name in call.needs_grad
        kind, dtype = "a DTensor, " if is_dtensor(value) else "", str(value.dtype).removeprefix("torch.")
        where = value.device.type if device == value.device else value.device
        gradient = ", which requires a gradient" if needs else ""
        words[name] = f"{kind}{dtype} ({', '.join(map(str, shape))}) on {where}{gradient}"
        if is_dtensor(value):
            others[f"the placement of {name}"] = f"{value.placements} on {value.device_mesh}"
    # A compiled program agrees again in its backward; ranks that run eagerly would not take part.
    others["whether a program computes gradients"] = str(bool(call.needs_grad))
    settings = {name: getattr(parallel, name) for name in _FIELDS if name not in ("group", "start")}
    of_loss = {field.name: getattr(call.loss, field.name) for field in fields(call.loss)}
    plain = {**of_loss, "options": options, **settings}
    return {**words, **others, **{name: repr(value) for name, value in plain.items()}}


def _values(parallel: VocabParallel, tensors: Mapping[str, Any]) -> dict[str, str]:
    """Describes the values of tensors that must be equal on all ranks. In words, since a NaN does not equal itself."""
    target, number = tensors.get("target"), tensors.get("num_items")
    values = {}
    # Not for DTensors, and not for a trace's stand-ins for tensors, which have no values.
    if type(target) is Tensor and not parallel.divides_tokens:
        weights = torch.arange(1, target.numel() + 1, device=target.device)
        values["the values of target"] = str(int((target.reshape(-1).long() * weights).sum()))
    if type(number) is Tensor:
        values["the value of num_items"] = str(number.tolist())
    return values


def _rows(weight: Any) -> int:
    """Returns the number of rows in this rank's part of a weight; 0 if it is no tensor with rows."""
    local = weight.to_local() if is_dtensor(weight) else weight
    return local.shape[0] if is_tensor(local) and len(local.shape) else 0


# Parts of the vocabulary.


def _starts(all_rows: Sequence[int], starts: Sequence[int]) -> Sequence[int]:
    """Returns the first row of each rank's part, after a check of given ones."""
    if set(starts) == {_NONE}:
        return [sum(all_rows[:rank]) for rank in range(len(all_rows))]
    parts = sorted((start, start + rows) for start, rows in zip(starts, all_rows, strict=True) if rows)
    if _NONE not in starts and [start for start, _ in parts] == [0, *(stop for _, stop in parts)][: len(parts)]:
        return starts
    given = ["None" if start == _NONE else str(start) for start in starts]
    of_ranks = ", ".join(f"{start} with {rows} rows" for start, rows in zip(given, all_rows, strict=True))
    raise ValueError(
        f"start must be None on all ranks, or the parts must cover the rows from 0 on without gap or overlap, but the "
        f"ranks have {of_ranks}"
    )


def _shard(parallel: VocabParallel, loss: Loss, given: Sequence[_Contribution]) -> Shard:
    rank, size, all_rows = dist.get_rank(parallel.process_group), loss.vocab_size, [each.rows for each in given]
    vocab = size if isinstance(size, int) else sum(all_rows)
    starts = _starts(all_rows, [each.start for each in given])
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
        weight_rows=sum(all_rows),
        most_tokens=max(each.tokens for each in given),
    )


# `VocabParallel` as a literal in a graph.


def as_literal(vocab_parallel: Any) -> str:
    """Returns the argument vocab_parallel of `linear_cross_entropy` as a literal for a graph, with the group's name.

    Raises:
        NotImplementedError: with `data_parallel`.
        TypeError, ValueError: see `VocabParallel`.
    """
    if not isinstance(vocab_parallel, VocabParallel):
        return _as_literal(group=vocab_parallel)
    given = {name: getattr(vocab_parallel, name) for name in _FIELDS}
    if given["start"] is not None:
        given["start"] = operator.index(given["start"])  # In Dynamo it may be a symbol.
    return _as_literal(**given)


def _as_literal(**fields: Any) -> str:
    parallel = VocabParallel.of(fields["group"]) if len(fields) == 1 else VocabParallel(**fields)
    if parallel.data_parallel:
        raise NotImplementedError(ONLY_EAGER)
    changed = parallel.non_defaults()
    if parallel.input_grad_dtype is not None:
        changed["input_grad_dtype"] = str(parallel.input_grad_dtype).removeprefix("torch.")
    return repr({**changed, "group": parallel.process_group.group_name})


# Dynamo calls this function with constants instead of tracing it; it does trace the caller.
when_imported("torch._dynamo", lambda: torch.compiler.assume_constant_result(_as_literal))


def _from_literal(literal: str) -> VocabParallel:
    values = ast.literal_eval(literal)
    dtype = values.pop("input_grad_dtype", None)
    group = dist.distributed_c10d._resolve_process_group(values.pop("group"))
    return VocabParallel(group=group, input_grad_dtype=None if dtype is None else getattr(torch, dtype), **values)


def group_of(name: str, group: Any) -> "ProcessGroup":
    """Returns the process group of an argument: the argument itself, or the group of a device mesh.

    Raises:
        TypeError, ValueError: if the argument is no group of ranks; the message names it.
    """
    if dist.is_available() and isinstance(group, dist.DeviceMesh) and group.get_coordinate() is not None:
        if group.ndim != 1:
            raise ValueError(
                f"{name} must be a device mesh of one dimension, but has {group.ndim}, {group.mesh_dim_names}: pass "
                'one of them, such as mesh["tp"]'
            )
        group = group.get_group()
    if not dist.is_available() or not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"{name} must be a ProcessGroup or a DeviceMesh that this rank belongs to, but got {type(group).__name__}"
        )
    return group
