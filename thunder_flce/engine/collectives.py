"""Collectives of the ranks that divide a vocabulary, by torch.distributed.

Each rank has the logits of its columns. The ranks exchange a few numbers a row: the statistics and the argmax of each
rank's columns, and z at the target from the rank that has it. Every rank combines the numbers of all ranks in the same
order, so that loss and gradients have the same bits on all ranks. This module can be imported even if torch.distributed
is not available. Legend: C rows in a chunk, H hidden size, R ranks.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from thunder_flce.operation.call import TOKEN, Call, Shard, argument

# The argmax of a rank without columns: larger than every column, so that it never wins.
NO_COLUMN = 2**31 - 1


def process_group(shard: Shard) -> dist.ProcessGroup:
    """Returns the process group of a shard."""
    return dist.distributed_c10d._resolve_process_group(cast(Any, shard.group))


def combined(
    shard: Shard, statistics: Sequence[Tensor], z_y: Tensor, *, largest: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Combines the ranks' results for C rows: returns row_max, row_log_sum, z at the target and argmax of whole rows.

    One all-gather, and a second one for the columns of the argmax. With several targets, an all-reduce sums z at the
    targets. Its order makes no difference: only one rank has a number other than 0.

    Args:
        shard: this rank's shard.
        statistics: row_max and row_log_sum of this rank's columns, (C,) each; -inf if it has no columns.
        z_y: (C,), or (C, K) for several targets; 0 for targets of other ranks.
        largest: the argmax of this rank's columns, (C,) int64, and z there, or -z if the smallest z is wanted; None if
            the argmax is not needed.
    """
    has_several = z_y.ndim > 1
    numbers = [*statistics, *([] if has_several else [z_y]), *([] if largest is None else largest[1:])]
    maxima, log_sums, *remaining = all_gathered(shard, numbers)
    if has_several:
        z_y = z_y.contiguous()
        dist.all_reduce(z_y, group=process_group(shard))
    else:
        z_y = remaining.pop(0).sum(0)
    row_max = maxima.amax(0)
    # A rank without columns, or whose logits are all -inf, adds 0; the formula would give NaN, -inf - -inf.
    sums = torch.where(maxima == float("-inf"), 0, torch.exp(maxima - row_max + log_sums))
    # Leaves out the maximum's own exponential, 1, beside which a small sum of the rest would lose digits.
    rank = maxima.argmax(0, keepdim=True)
    rest = sums.scatter_(0, rank, log_sums.gather(0, rank).expm1_()).sum(0)
    if largest is None:
        return row_max, rest.log1p_(), z_y, None
    (values,), (columns,) = remaining, all_gathered(shard, largest[:1])
    # As in torch.argmax, NaN is the largest number; among equal numbers, the first column is taken.
    is_largest = (values == values.amax(0)) | values.isnan()
    return row_max, rest.log1p_(), z_y, torch.where(is_largest, columns, NO_COLUMN).amin(0)


def all_gathered(shard: Shard, vectors: Sequence[Tensor]) -> list[Tensor]:
    """Gathers some vectors (C,) of one dtype from all ranks: returns (R, C) for each."""
    packed = torch.stack(list(vectors))
    return list(start_gathering(shard, packed).wait().view(shard.ranks, *packed.shape).unbind(1))


class Pending(NamedTuple):
    """The result of a collective that may still be running."""

    result: Tensor
    work: Any

    def wait(self) -> Tensor:
        """Waits for the collective and returns its result. On CUDA the device waits, not the host."""
        if self.work is not None:
            self.work.wait()
        return self.result


def start_sum(shard: Shard, part: Tensor) -> Pending:
    """Starts to sum `part`, this rank's contribution to dX of some rows, contiguous (C, H), over the ranks.

    The result is the sum, (C, H), which overwrites `part`; if ranks divide the tokens, it is this rank's rows of the
    sum, (C / R, H), in new memory.
    """
    group = process_group(shard)
    if not shard.sequence_parallel:
        return Pending(part, dist.all_reduce(part, group=group, async_op=True) if part.numel() else None)
    result = part.new_empty(part.shape[0] // shard.ranks, part.shape[1])
    work = dist.reduce_scatter_tensor(result, part, group=group, async_op=True) if part.numel() else None
    return Pending(result, work)


def start_gathering(shard: Shard, part: Tensor) -> Pending:
    """Starts to gather a tensor (P, …) from every rank, concatenated in the order of ranks: (R·P, …)."""
    part = part.contiguous()
    result = part.new_empty(shard.ranks * part.shape[0], *part.shape[1:])
    group = process_group(shard)
    work = dist.all_gather_into_tensor(result, part, group=group, async_op=True) if part.numel() else None
    return Pending(result, work)


def gathered(call: Call) -> Call:
    """Returns the call with token tensors (T, …) gathered, at once, from all ranks, if ranks divide the tokens."""
    shard, dimensions = call.shard, len(call.shape)
    if shard is None or not shard.sequence_parallel:
        return call

    def started(name: str, tensor: Tensor) -> Tensor | Pending:
        if argument(name).role != TOKEN:
            return tensor
        # gloo and NCCL do not support int16.
        tensor = tensor.int() if tensor.dtype is torch.int16 else tensor
        return start_gathering(shard, tensor.reshape(call.own_tokens, *tensor.shape[dimensions:]))

    return call.map(started).map(lambda _, tensor: tensor.wait() if isinstance(tensor, Pending) else tensor)
