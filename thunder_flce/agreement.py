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
from typing import Any, NamedTuple, NoReturn
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from thunder_flce.device import Device, is_capturing
from thunder_flce.operation.call import COLUMN, TOKEN_ROLES, Call, Shard, is_tensor, operand_names
from thunder_flce.operation.checks import check_call, check_is_dense, dtype_name
from thunder_flce.operation.loss import Loss
from thunder_flce.options import Options
from thunder_flce.vocab_parallel import VocabParallel, is_dtensor

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
_agreements: "WeakKeyDictionary[dist.ProcessGroup, dict[_Contribution, Shard | None]]" = WeakKeyDictionary()
_REMEMBERED = 256


def agreed_call(call: Call, options: Options) -> Call:
    """Has the ranks agree on a call with `vocab_parallel`; returns it with this rank's shard instead, checked."""
    shard = agreement_on(VocabParallel.of(call.vocab_parallel), call, options)()
    call = replace(call, shard=shard, vocab_parallel=None)
    check_call(call)
    return call


def agreement_on(parallel: VocabParallel, call: Call, options: Options) -> Callable[[], Shard]:
    """Returns a function that has the ranks agree on a call; it compares their calls and returns this rank's `Shard`.

    Errors before that function is called are errors of this rank alone, so `share_error` must tell the other ranks.

    Args:
        parallel: the ranks.
        call: a call of tensors, DTensors or specs, not checked yet. `needs_grad` is set for the call of a program; in
            an eager call, the operands' `requires_grad` holds.
        options: the options of the call.

    Raises:
        ValueError: on all ranks, by the returned function, if their calls differ; the message names the difference.
    """
    group, weight, input = parallel.process_group, call.tensors.get("linear_weight"), call.tensors.get("input")
    device, exchange_device = Device.of(weight.device) if is_tensor(weight) else None, _exchange_device(group, weight)
    description = _description(parallel, call, options)
    if os.environ.get(CHECK_EVERY_CALL, "") not in ("", "0"):
        description |= _value_descriptions(parallel, call.tensors)
    contribution = _Contribution(
        digest=_digest(sorted(description.items())),
        rows=_rows(weight),
        start=_NONE if parallel.start is None else parallel.start,
        tokens=prod(input.shape[:-1]) if parallel.data_parallel and is_tensor(input) else 0,
        device=_digest(device),
    )

    def agree() -> Shard:
        if is_capturing(exchange_device):
            return _remembered_agreement(group, contribution, exchange_device)
        contributions = _all_gather_contributions(group, contribution, exchange_device)
        if any(other.digest != contribution.digest for other in contributions):
            _raise_difference(_all_gather_objects(group, description))
        has_equal_devices = all(other.device == contribution.device for other in contributions)
        devices = [device] if has_equal_devices else _all_gather_objects(group, device)
        input_dtype = getattr(input, "dtype", None)
        if parallel.input_grad_dtype not in (None, torch.float32, input_dtype):
            raise ValueError(
                f"input_grad_dtype must be None, torch.float32 or input's dtype, {input_dtype}, but got "
                f"{parallel.input_grad_dtype}"
            )
        smallest = None if device is None else min(filter(None, devices), key=lambda d: (d.memory or 0, repr(d)))
        shard = replace(_shard(parallel, call.loss, contributions), device=smallest)
        if exchange_device.type == "cuda":
            _remember(group, contribution, shard)
        return shard

    return agree


def share_error(error: Exception, parallel: VocabParallel | None, weight: Any) -> None:
    """Tells the other ranks, which wait for an agreement, of an error in this rank's arguments; they raise it, too."""
    group = None if parallel is None else parallel.process_group
    if group is None and hasattr(weight, "device_mesh"):
        dim = next((dim for dim, placement in enumerate(weight.placements) if placement.is_shard(0)), None)
        group = None if dim is None else weight.device_mesh.get_group(dim)
    if group is None or torch._guards.detect_fake_mode() is not None:
        return
    device = _exchange_device(group, weight)
    if not is_capturing(device):
        _all_gather_contributions(group, _Contribution(digest=_digest(str(error))), device)
        _all_gather_objects(group, str(error))


# Exchange among ranks.


def _digest(value: Any) -> int:
    """Returns a 64-bit hash that is the same in all processes."""
    return int.from_bytes(blake2b(repr(value).encode(), digest_size=8).digest(), "big", signed=True)


def _exchange_device(group: "dist.ProcessGroup", weight: Any) -> torch.device:
    """Returns the device of exchanged numbers: its type depends on the group alone, not on a rank's arguments."""
    device = torch.device(dist.distributed_c10d._get_object_coll_device(group))
    return weight.device if is_tensor(weight) and weight.device.type == device.type else device


def _all_gather(group: "dist.ProcessGroup", numbers: Tensor) -> Tensor:
    """Returns the numbers of all R ranks, (R, numbers)."""
    gathered = numbers.new_empty(dist.get_world_size(group) * numbers.numel())
    dist.all_gather_into_tensor(gathered, numbers, group=group)
    return gathered.view(-1, numbers.numel())


def _all_gather_contributions(
    group: "dist.ProcessGroup", contribution: _Contribution, device: torch.device
) -> list[_Contribution]:
    # The copy from pinned memory is asynchronous, so that the host waits only once, for the result.
    tensor = torch.tensor(contribution, device="cpu", pin_memory=device.type == "cuda").to(device, non_blocking=True)
    return [_Contribution(*numbers) for numbers in _all_gather(group, tensor).tolist()]


def _remembered_agreement(group: "dist.ProcessGroup", contribution: _Contribution, device: torch.device) -> Shard:
    """Returns an earlier agreement. Each replay takes part in the collective, which other ranks may run eagerly."""
    shard = _agreements[group].get(contribution) if group in _agreements else None
    if shard is None:
        raise RuntimeError(
            "ranks cannot agree on a new call with vocab_parallel while a CUDA graph is captured: make the call once "
            "before the capture. If this rank has equally many rows of two weights, but other ranks have not, create "
            'the process group with a backend for the CPU, too, such as "cpu:gloo,cuda:nccl"'
        )
    numbers = torch.stack([torch.full((), number, dtype=torch.int64, device=device) for number in contribution])
    is_same = (_all_gather(group, numbers)[:, 0] == contribution.digest).all()
    torch._assert_async(is_same, "all ranks of vocab_parallel must be given the same")
    return shard


def _remember(group: "dist.ProcessGroup", contribution: _Contribution, shard: Shard) -> None:
    agreements = _agreements.setdefault(group, {})
    agreements[contribution] = shard if agreements.pop(contribution, shard) == shard else None
    if len(agreements) > _REMEMBERED:
        agreements.pop(next(iter(agreements)))


def _all_gather_objects(group: "dist.ProcessGroup", value: Any) -> list[Any]:
    objects: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(objects, value, group=group)
    return objects


def _raise_difference(descriptions: list[Any]) -> NoReturn:
    for rank, description in enumerate(descriptions):
        if isinstance(description, str):
            raise ValueError(f"rank {rank} of vocab_parallel has refused its arguments: {description}")
    for rank, call in enumerate(descriptions):
        for name in {**descriptions[0], **call}:
            first, other = (each.get(name, "None") for each in (descriptions[0], call))
            if first != other:
                raise ValueError(
                    f"all ranks of vocab_parallel must be given the same, but {name} is {first} on rank 0 and {other} "
                    f"on rank {rank}"
                )
    raise AssertionError("ranks have described equal calls with different hashes")


# Descriptions of calls.


def _description(parallel: VocabParallel, call: Call, options: Options) -> dict[str, str]:
    """Describes everything that must be equal on all ranks, in words, by the names of arguments."""
    for name, value in call.tensors.items():
        check_is_dense(name, value)
    input = call.tensors.get("input")
    tokens = input.shape[:-1] if parallel.data_parallel and is_tensor(input) else None
    rows, device = _rows(call.tensors.get("linear_weight")), getattr(input, "device", None)
    operands = operand_names(call.tensors)
    descriptions: dict[str, str] = {}
    details: dict[str, str] = {}
    for name, value in call.tensors.items():
        if not is_tensor(value):
            descriptions[name] = type(value).__name__
            if isinstance(value, Real):
                details[f"the value of {name}"] = str(value)
            continue
        role, shape = call.roles[name], tuple[Any, ...](value.shape)
        if role == COLUMN and (is_dtensor(value) or _rows(value) == rows):
            shape = ("V", *shape[1:])
        elif tokens is not None and role in TOKEN_ROLES and shape[: len(tokens)] == tokens:
            shape = ("T", *shape[len(tokens) :])
        needs_grad = value.requires_grad and (torch.is_grad_enabled() or name not in operands)
        needs_grad = needs_grad or name in call.needs_grad
        kind, dtype = "a DTensor, " if is_dtensor(value) else "", dtype_name(value.dtype)
        location = value.device.type if device == value.device else value.device
        gradient = ", which requires a gradient" if needs_grad else ""
        descriptions[name] = f"{kind}{dtype} ({', '.join(map(str, shape))}) on {location}{gradient}"
    dtensors = {name: value for name, value in call.tensors.items() if is_dtensor(value)}
    details |= {f"the placement of {name}": f"{d.placements} on {d.device_mesh}" for name, d in dtensors.items()}
    # A compiled program agrees again in its backward; ranks that run eagerly would not take part.
    details["whether a program computes gradients"] = str(bool(call.needs_grad))
    names = [field.name for field in fields(parallel) if field.name not in ("group", "start")]
    settings = {name: getattr(parallel, name) for name in names}
    loss_fields = {field.name: getattr(call.loss, field.name) for field in fields(call.loss)}
    plain_values = {**loss_fields, "options": options, **settings}
    return {**descriptions, **details, **{name: repr(value) for name, value in plain_values.items()}}


def _value_descriptions(parallel: VocabParallel, tensors: Mapping[str, Any]) -> dict[str, str]:
    """Describes the values of tensors that must be equal on all ranks. In words, since a NaN does not equal itself."""
    target, number = tensors.get("target"), tensors.get("num_items")
    values = {}
    # Specs and a trace's stand-ins for tensors have no values, and a DTensor's would have to be gathered.
    if type(target) is Tensor and not parallel.divides_tokens:
        weights = torch.arange(1, target.numel() + 1, device=target.device)
        values["the values of target"] = str(int((target.reshape(-1).long() * weights).sum()))
    if type(number) is Tensor:
        values["the value of num_items"] = str(number.tolist())
    return values


def _rows(weight: Any) -> int:
    """Returns the number of rows in this rank's part of a weight; 0 if it is no tensor with rows."""
    part = weight.to_local() if is_dtensor(weight) else weight
    return part.shape[0] if is_tensor(part) and len(part.shape) else 0


# Parts of the vocabulary.


def _starts(all_rows: Sequence[int], starts: Sequence[int]) -> Sequence[int]:
    """Returns the first row of each rank's part, after a check of given ones."""
    if set(starts) == {_NONE}:
        return [sum(all_rows[:rank]) for rank in range(len(all_rows))]
    parts = sorted((start, start + rows) for start, rows in zip(starts, all_rows, strict=True) if rows)
    if _NONE not in starts and [start for start, _ in parts] == [0, *(stop for _, stop in parts)][: len(parts)]:
        return starts
    texts = ["None" if start == _NONE else str(start) for start in starts]
    parts_of_ranks = ", ".join(f"{start} with {rows} rows" for start, rows in zip(texts, all_rows, strict=True))
    raise ValueError(
        f"start must be None on all ranks, or the parts must cover the rows from 0 on without gap or overlap, but the "
        f"ranks have {parts_of_ranks}"
    )


def _shard(parallel: VocabParallel, loss: Loss, contributions: Sequence[_Contribution]) -> Shard:
    rank, size, all_rows = dist.get_rank(parallel.process_group), loss.vocab_size, [each.rows for each in contributions]
    vocab = size if isinstance(size, int) else sum(all_rows)
    starts = _starts(all_rows, [each.start for each in contributions])
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
        most_tokens=max(each.tokens for each in contributions),
    )
