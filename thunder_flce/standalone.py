"""Cross-entropy on logits that are there anyway: what `cross_entropy_fwd` and `cross_entropy_bwd` run in PyTorch.

On CUDA, thunder's nvFuser executor translates the two symbols instead (`nvfuser_translation`), together with the casts
and reshapes around them. Legend: N rows, V vocabulary.
"""

import torch
from torch import Tensor

from thunder_flce.plan import VocabLayout
from thunder_flce.row_kernels import LogitsBuffer, RowStatistics
from thunder_flce.row_kernels.torch_ops import KERNELS
from thunder_flce.rows import RowSelection


def forward_impl(
    logits: Tensor, target: Tensor, *, reduction: str, ignore_index: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The loss and the rows' statistics.

    Args:
        logits: (N, V) floating point.
        target: (N,) integers in [0, V), or ignore_index.
        reduction: "mean", "sum" or "none".
        ignore_index: targets of this value contribute nothing.

    Returns:
        loss, () or (N,), in the logits' dtype; row_max (N,), row_logsumexp (N,), relative to row_max, and valid_count
        (), in float32 (float64 for float64 logits).

    Raises:
        IndexError: where a target is neither in [0, V) nor ignore_index.
    """
    rows = RowSelection(target, logits.shape[1], ignore_index, skip=not logits.is_cuda).rows()
    target = target.long()
    valid = target != ignore_index
    safe_target = torch.where(valid, target, 0)[:, None]
    statistics, row_loss = KERNELS.statistics(_as_buffer(logits), logits.gather(1, safe_target).squeeze(1))
    loss = torch.where(valid, row_loss, 0)
    valid_count = rows.valid_count.to(loss.dtype)
    if reduction != "none":
        loss = loss.sum() / valid_count if reduction == "mean" else loss.sum()
    return loss.to(logits.dtype), *statistics, valid_count


def backward_impl(
    grad: Tensor,
    logits: Tensor,
    target: Tensor,
    row_max: Tensor,
    row_logsumexp: Tensor,
    valid_count: Tensor,
    *,
    reduction: str,
    ignore_index: int,
) -> Tensor:
    """The logits' gradient, (N, V) in the logits' dtype; grad is () or, for reduction "none", (N,)."""
    target = target.long()
    valid = target != ignore_index
    scale = grad.to(row_max.dtype)
    if reduction == "mean":
        scale = scale / valid_count
    # Without a valid row the division gave inf, which no row takes.
    scale = torch.where(valid, scale, 0)
    safe_target = torch.where(valid, target, 0)[:, None]
    statistics = RowStatistics(row_max, row_logsumexp)
    at_target = KERNELS.target_gradient(logits.gather(1, safe_target).squeeze(1), statistics, scale, scale)
    buffer = _as_buffer(logits.clone(memory_format=torch.contiguous_format))
    KERNELS.gradient_(buffer, statistics, scale)
    return buffer.logits.scatter_(1, safe_target, at_target[:, None])


def _as_buffer(logits: Tensor) -> LogitsBuffer:
    return LogitsBuffer(logits, VocabLayout.contiguous(logits.shape[1]))
