"""The protocol by which ranks that divide the vocabulary agree on a call before it runs.

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

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from hashlib import blake2b
from math import prod
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from thunder_flce.device import Device
from thunder_flce.operation.call import COLUMN, TOKEN_ROLES, Call, Shard, argument, is_tensor
from thunder_flce.operation.checks import check_call, check_is_dense
from thunder_flce.operation.loss import Loss
from thunder_flce.options import Options
from thunder_flce.vocab_parallel import VocabParallel, is_dtensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Environment variable: any value but "" and "0" makes ranks also compare the values of target and of num_items.
CHECK_EVERY_CALL = "THUNDER_FLCE_CHECK_RANKS"


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


def agreed_call(call: Call, vocab_parallel: str, options: Options) -> Call:
    """Has the ranks agree on a call in a graph; returns it with this rank's shard, checked."""
    parallel = VocabParallel.of(vocab_parallel)
    call = replace(call, shard=agreement_on(parallel, call, options)())
    check_call(call)
    return call


def agreement_on(parallel: VocabParallel, call: Call, options: Options) -> Callable[[], Shard]:
    """Returns a function that has the ranks agree on a call; it compares their calls and returns this rank's `Shard`.

    Errors before that function is called are errors of this rank alone, so `share_error` must tell the other ranks.

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


def share_error(error: Exception, parallel: VocabParallel | None, weight: Any) -> None:
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
        elif tokens is not None and known.role in TOKEN_ROLES and shape[: len(tokens)] == tokens:
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
    names = [field.name for field in fields(parallel) if field.name not in ("group", "start")]
    settings = {name: getattr(parallel, name) for name in names}
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
