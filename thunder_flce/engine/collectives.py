"""What the ranks that divide a vocabulary tell each other, by torch.distributed's collectives.

Each rank has the logits of its columns. A few numbers a row make them the logits of the whole: the statistics of each
part, z at the target from the rank that has it, the argmax of each part. Each rank combines those of all ranks in the
same order, so that loss and gradients are the same bits everywhere. Without torch.distributed, this module can be
imported all the same. Legend: C rows in a chunk, H hidden size, R ranks.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from thunder_flce.operation.call import TOKEN, Call, argument
from thunder_flce.operation.shard import Shard

# The column of an argmax where a rank has no columns: above every other.
NO_COLUMN = 2**31 - 1


def process_group(shard: Shard) -> dist.ProcessGroup:
    """The group of a shard."""
    return dist.distributed_c10d._resolve_process_group(cast(Any, shard.group))


class PartOfRows(NamedTuple):
    """What the logits of some columns, or of all, say about C rows, (C,) each."""

    row_max: Tensor
    row_log_sum: Tensor
    target_entry: Tensor
    """z at the target, (C, K) of several; of a rank, 0 where that is another's"""
    argmax: Tensor | None = None
    """int64; None where nobody asks for it"""
    argmax_entry: Tensor | None = None
    """Of a rank, z there, or -z where the smallest is looked for"""


def part_without_columns(target: Tensor, dtype: torch.dtype, *, has_argmax: bool) -> PartOfRows:
    """What a rank without columns knows of rows whose targets are (C,) or (C, K); `dtype` is that of rows."""
    entry = torch.zeros_like(target, dtype=dtype)
    nothing = entry.new_full(target.shape[:1], float("-inf"))
    part = PartOfRows(nothing, nothing, entry)
    if not has_argmax:
        return part
    return part._replace(argmax=torch.full_like(nothing, NO_COLUMN, dtype=torch.int64), argmax_entry=nothing)


def combined(shard: Shard, part: PartOfRows) -> PartOfRows:
    """The results for all columns, from those of each rank's. One all-gather, and one more of columns for the argmax.

    Entries at several targets are summed by a collective of their own. Its order makes no difference: one rank alone
    has another number than 0.
    """
    has_several = part.target_entry.ndim > 1
    numbers = [part.row_max, part.row_log_sum, *([] if has_several else [part.target_entry])]
    if part.argmax_entry is not None:
        numbers.append(part.argmax_entry)
    maxima, log_sums, *others = all_gathered(shard, numbers)
    if has_several:
        entry = part.target_entry.contiguous()
        dist.all_reduce(entry, group=process_group(shard))
    else:
        entry = others.pop(0).sum(0)
    row_max = maxima.amax(0)
    # A part without columns, or whose logits are all -inf, adds nothing, though -inf - -inf is NaN.
    sums = torch.where(maxima == float("-inf"), 0, torch.exp(maxima - row_max + log_sums))
    # Without the maximum's own 1, beside which a small sum of the rest would lose its digits.
    largest = maxima.argmax(0, keepdim=True)
    rest = sums.scatter_(0, largest, log_sums.gather(0, largest).expm1_()).sum(0)
    whole = PartOfRows(row_max, rest.log1p_(), entry)
    if part.argmax is None:
        return whole
    (values,), (columns,) = others, all_gathered(shard, [part.argmax])
    # NaN is the largest number, as in torch.argmax; of equals, the first column is taken.
    is_largest = (values == values.amax(0)) | values.isnan()
    return whole._replace(argmax=torch.where(is_largest, columns, NO_COLUMN).amin(0))


def all_gathered(shard: Shard, vectors: Sequence[Tensor]) -> list[Tensor]:
    """(R, C) of all ranks, of each of some vectors (C,) of one dtype."""
    packed = torch.stack(list(vectors))
    return list(start_gathering(shard, packed).wait().view(shard.ranks, *packed.shape).unbind(1))


class Pending(NamedTuple):
    """A tensor that the ranks are making, while this one does something else."""

    result: Tensor
    work: Any

    def wait(self) -> Tensor:
        """The tensor, when it is there. On CUDA the device waits for it, not the host."""
        if self.work is not None:
            self.work.wait()
        return self.result


def start_sum(shard: Shard, part: Tensor) -> Pending:
    """Starts to sum dX of some rows over the ranks, from what this rank's columns contribute, contiguous (C, H).

    That may be overwritten by the sum, (C, H). Where ranks divide the tokens, it is this rank's rows of it, (C / R, H).
    """
    group = process_group(shard)
    if not shard.sequence_parallel:
        return Pending(part, dist.all_reduce(part, group=group, async_op=True) if part.numel() else None)
    result = part.new_empty(part.shape[0] // shard.ranks, part.shape[1])
    work = dist.reduce_scatter_tensor(result, part, group=group, async_op=True) if part.numel() else None
    return Pending(result, work)


def start_gathering(shard: Shard, part: Tensor) -> Pending:
    """Starts to gather a tensor (P, …) of every rank, one after the other: (R·P, …)."""
    part = part.contiguous()
    result = part.new_empty(shard.ranks * part.shape[0], *part.shape[1:])
    group = process_group(shard)
    work = dist.all_gather_into_tensor(result, part, group=group, async_op=True) if part.numel() else None
    return Pending(result, work)


def gathered(call: Call) -> Call:
    """The call with numbers of the tokens of all ranks, (T, …), where each has its own; all collectives run at once."""
    shard, dimensions = call.shard, len(call.shape)
    if shard is None or not shard.sequence_parallel:
        return call

    def started(name: str, tensor: Tensor) -> Tensor | Pending:
        if argument(name).role != TOKEN:
            return tensor
        # gloo and NCCL do not know int16.
        tensor = tensor.int() if tensor.dtype is torch.int16 else tensor
        return start_gathering(shard, tensor.reshape(call.own_tokens, *tensor.shape[dimensions:]))

    return call.map(started).map(lambda _, each: each.wait() if isinstance(each, Pending) else each)
