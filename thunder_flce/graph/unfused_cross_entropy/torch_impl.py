"""Cross-entropy on logits that are there anyway: what `cross_entropy_fwd` and `cross_entropy_bwd` run in PyTorch.

On CUDA, thunder's nvFuser executor translates the two symbols instead (`nvfuser_translation`), together with the casts
and reshapes around them, where there are neither class weights nor label smoothing. Legend: N rows, V vocabulary.
"""

import torch
from torch import Tensor

from thunder_flce.execution.row_kernels.interface import LogitsBuffer, RowStatistics
from thunder_flce.execution.row_kernels.torch_rows import TorchRowKernels, statistics_dtype
from thunder_flce.execution.row_selection import RowPolicy, Rows, RowSelection, reselect_rows
from thunder_flce.operation.loss import (
    ClassWeights,
    Divisors,
    IncomingGradients,
    Loss,
    RowGradients,
    reduce_terms,
    row_terms,
)
from thunder_flce.planning.plan import VocabLayout

_KERNELS = TorchRowKernels()


def forward_impl(
    logits: Tensor,
    target: Tensor,
    *,
    reduction: str,
    ignore_index: int,
    weight: Tensor | None = None,
    label_smoothing: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The loss and the rows' statistics.

    Args:
        logits: (N, V) floating point.
        target: (N,) integers in [0, V), or ignore_index.
        reduction: "mean", "sum" or "none".
        ignore_index: targets of this value contribute nothing.
        weight: (V,) class weights.
        label_smoothing: between 0 and 1.

    Returns:
        loss, () or (N,), in the logits' dtype; row_max (N,), row_log_sum (N,), relative to row_max, and valid_count
        (), in float32 (float64 for float64 logits).

    Raises:
        IndexError: where a target is neither in [0, V) nor ignore_index.
    """
    loss = Loss(reduction=reduction, ignore_index=ignore_index, label_smoothing=label_smoothing)
    policy = RowPolicy(ignored_rows="compute" if logits.is_cuda else "skip", every_row=True)
    checked = RowSelection(target, logits.shape[1], ignore_index, policy).rows()
    rows, weights, divisors = _all_rows(loss, logits, target, checked.valid_count, weight)
    buffer = _as_buffer(logits)
    statistics = _KERNELS.statistics(buffer)
    weighted_sum = None
    if label_smoothing:
        columns = None if weights is None else weights.columns
        moments = _KERNELS.moments(buffer, statistics, columns, expected=False, weighted_sum=True)
        weighted_sum = moments.weighted_sum
    target_logit = logits.gather(1, rows.target[:, None]).squeeze(1).to(statistics.row_max.dtype)
    terms = row_terms(loss, rows, statistics, target_logit, weighted_sum, weights, logits.shape[1])
    valid_count = rows.valid_count.to(statistics.row_max.dtype)
    return reduce_terms(loss, terms, divisors).to(logits.dtype), *statistics, valid_count


def backward_impl(
    grad: Tensor,
    logits: Tensor,
    target: Tensor,
    row_max: Tensor,
    row_log_sum: Tensor,
    valid_count: Tensor,
    *,
    reduction: str,
    ignore_index: int,
    weight: Tensor | None = None,
    label_smoothing: float = 0.0,
) -> Tensor:
    """The logits' gradient, (N, V) in the logits' dtype; grad is () or, for reduction "none", (N,)."""
    loss = Loss(reduction=reduction, ignore_index=ignore_index, label_smoothing=label_smoothing)
    rows, weights, divisors = _all_rows(loss, logits, target, valid_count, weight)
    statistics = RowStatistics(row_max, row_log_sum)
    row_gradients = RowGradients(loss, rows, IncomingGradients(grad), divisors, weights, logits.shape[1], row_max.dtype)
    coefficients = row_gradients.coefficients(slice(None), statistics)
    columns = None if weights is None else weights.columns
    at_target = _KERNELS.target_gradient(
        logits.gather(1, rows.target[:, None]).squeeze(1),
        statistics,
        coefficients,
        None if weights is None else weights.at_target,
        dtype=logits.dtype,
    )
    buffer = _as_buffer(logits.clone(memory_format=torch.contiguous_format))
    _KERNELS.gradient(buffer, statistics, coefficients, columns, dtype=logits.dtype)
    return buffer.logits.scatter_(1, rows.target[:, None], at_target[:, None])


def probabilities_forward_impl(
    logits: Tensor, target: Tensor, *, reduction: str, weight: Tensor | None = None, label_smoothing: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss for class probabilities, Σ_v q_v w_v (lse - logit_v) with q = (1 - ε) target + ε / V, and statistics.

    Args:
        logits: (N, V) floating point.
        target: (N, V) floating point.
        reduction: "mean" over the N rows, "sum" or "none".
        weight: (V,) class weights.
        label_smoothing: ε, between 0 and 1.

    Returns:
        loss, () or (N,), in the logits' dtype; row_max and row_log_sum, (N,), as in `forward_impl`.
    """
    statistics = _KERNELS.statistics(_as_buffer(logits))
    smooth = _smooth(target, weight, label_smoothing, statistics.row_max.dtype)
    row_loss = (smooth * _negative_log_softmax(logits, statistics)).sum(1)
    if reduction != "none":
        row_loss = row_loss.sum()
    if reduction == "mean":
        row_loss = row_loss / logits.shape[0]
    return row_loss.to(logits.dtype), *statistics


def probabilities_backward_impl(
    grad: Tensor,
    logits: Tensor,
    target: Tensor,
    row_max: Tensor,
    row_log_sum: Tensor,
    *,
    reduction: str,
    weight: Tensor | None = None,
    label_smoothing: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The gradients of logits and target, both (N, V); grad is () or, for reduction "none", (N,)."""
    statistics = RowStatistics(row_max, row_log_sum)
    scale = grad.to(row_max.dtype)
    if reduction == "mean":
        scale = scale / logits.shape[0]
    scale = scale.expand(logits.shape[0])[:, None]
    smooth = _smooth(target, weight, label_smoothing, row_max.dtype)
    log_loss = _negative_log_softmax(logits, statistics)
    logits_grad = ((-log_loss).exp_().mul_(smooth.sum(1, keepdim=True)) - smooth) * scale
    target_grad = log_loss.mul_(scale * (1 - label_smoothing))
    if weight is not None:
        target_grad.mul_(weight)
    return logits_grad.to(logits.dtype), target_grad.to(target.dtype)


def _all_rows(
    loss: Loss, logits: Tensor, target: Tensor, valid_count: Tensor, weight: Tensor | None
) -> tuple[Rows, ClassWeights | None, Divisors]:
    rows = reselect_rows(target, loss.ignore_index, valid_count, RowPolicy(every_row=True))
    weights = ClassWeights.of(weight, rows.target, statistics_dtype(logits.dtype))
    return rows, weights, Divisors.of(loss, rows, weights, None)


def _smooth(target: Tensor, weight: Tensor | None, label_smoothing: float, dtype: torch.dtype) -> Tensor:
    """(N, V) the weights of the classes' losses."""
    smooth = target.to(dtype)
    if label_smoothing:
        smooth = smooth * (1 - label_smoothing) + label_smoothing / target.shape[1]
    return smooth if weight is None else smooth * weight


def _negative_log_softmax(logits: Tensor, statistics: RowStatistics) -> Tensor:
    row_max, row_log_sum = (vector[:, None] for vector in statistics)
    return row_log_sum - (logits.to(row_max.dtype) - row_max)


def _as_buffer(logits: Tensor) -> LogitsBuffer:
    return LogitsBuffer(logits, VocabLayout.contiguous(logits.shape[1]))
