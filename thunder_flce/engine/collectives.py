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

from thunder_flce.operation.call import TOKEN, Call, Shard, argument

# The column of an argmax where a rank has no columns: above every other.
NO_COLUMN = 2**31 - 1


def process_group(shard: Shard) -> dist.ProcessGroup:
    """The group of a shard."""
    return dist.distributed_c10d._resolve_process_group(cast(Any, shard.group))


def combined(
    shard: Shard, statistics: Sequence[Tensor], z_y: Tensor, *, largest: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """What all columns say about C rows, from what each rank's do: row_max, row_log_sum, z at the target, the argmax.

    One all-gather, and one more of columns for the argmax. Entries at several targets are summed by a collective of
    their own. Its order makes no difference: one rank alone has another number than 0.

    Args:
        shard: of this rank.
        statistics: row_max and row_log_sum, (C,) each, of this rank's columns; -inf without any.
        z_y: (C,), or (C, K) of several targets; 0 where a target is another rank's.
        largest: the argmax of this rank, (C,) int64, and z there, or -z where the smallest is looked for; None where
            nobody asks for it.
    """
    has_several = z_y.ndim > 1
    numbers = [*statistics, *([] if has_several else [z_y]), *([] if largest is None else largest[1:])]
    maxima, log_sums, *others = all_gathered(shard, numbers)
    if has_several:
        z_y = z_y.contiguous()
        dist.all_reduce(z_y, group=process_group(shard))
    else:
        z_y = others.pop(0).sum(0)
    row_max = maxima.amax(0)
    # A part without columns, or whose logits are all -inf, adds nothing, though -inf - -inf is NaN.
    sums = torch.where(maxima == float("-inf"), 0, torch.exp(maxima - row_max + log_sums))
    # Without the maximum's own 1, beside which a small sum of the rest would lose its digits.
    rank = maxima.argmax(0, keepdim=True)
    rest = sums.scatter_(0, rank, log_sums.gather(0, rank).expm1_()).sum(0)
    if largest is None:
        return row_max, rest.log1p_(), z_y, None
    (values,), (columns,) = others, all_gathered(shard, largest[:1])
    # NaN is the largest number, as in torch.argmax; of equals, the first column is taken.
    is_largest = (values == values.amax(0)) | values.isnan()
    return row_max, rest.log1p_(), z_y, torch.where(is_largest, columns, NO_COLUMN).amin(0)


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
