"""`cross_entropy_fwd` and `cross_entropy_bwd`: cross-entropy on logits that have other users, and what runs in PyTorch.

They are primitives of the executor `flce`, for targets that are indices of classes. On CUDA, thunder's nvFuser executor
translates them instead (`nvfuser_impl`), together with the casts and reshapes around them, where there are neither
class weights nor label smoothing. Legend: N rows, V vocabulary.
"""

from typing import Any

import torch
from thunder.core import dtypes
from thunder.core.proxies import TensorProxy
from torch import Tensor

from thunder_flce.execution import steps
from thunder_flce.execution.layout import VocabLayout
from thunder_flce.execution.operands import Operands, Term, UpstreamGradients
from thunder_flce.execution.plan import LossOnly
from thunder_flce.execution.region import Region
from thunder_flce.execution.row_kernels.interface import LogitsBuffer, RowStatistics
from thunder_flce.execution.row_loss import RowGradients, RowScales, chunk_result, finish_loss
from thunder_flce.execution.row_selection import reselect_rows, select_rows
from thunder_flce.graph.executor import FORWARD_TAGS, executor
from thunder_flce.graph.matching.trace_index import loss_dtype
from thunder_flce.operation.loss import Loss


def _forward_impl(
    logits: Tensor, target: Tensor, *, weight: Tensor | None = None, **settings: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The loss, () or (N,) in the logits' dtype; row_max and row_log_sum, (N,); valid_count, () int64.

    The logits are (N, V), the targets (N,), class weights (V,); `settings` are fields of a `Loss`. row_log_sum is
    relative to row_max; both are float32, or float64 for float64 logits.

    Raises:
        IndexError: where a target is neither in [0, V) nor ignore_index.
    """
    region = _region(logits, target, weight, settings)
    scales = RowScales.of(region, select_rows(region).rows())
    of_rows = chunk_result(region, scales, _as_buffer(logits), slice(0, logits.shape[0]))
    result = finish_loss(region, scales, [of_rows])
    return result.loss.to(logits.dtype), *result.statistics[:3]


def _backward_impl(
    grad: Tensor,
    logits: Tensor,
    target: Tensor,
    row_max: Tensor,
    row_log_sum: Tensor,
    valid_count: Tensor,
    *,
    weight: Tensor | None = None,
    **settings: Any,
) -> Tensor:
    """The logits' gradient, (N, V) in the logits' dtype; grad is () or, for reduction "none", (N,)."""
    region = _region(logits, target, weight, settings)
    scales = RowScales.of(region, reselect_rows(region, valid_count))
    statistics = RowStatistics(row_max, row_log_sum)
    row_gradients = RowGradients(region, scales, UpstreamGradients(grad))
    coefficients = row_gradients.coefficients(slice(0, logits.shape[0]), statistics)
    buffer = _as_buffer(logits.clone(memory_format=torch.contiguous_format))
    targets = steps.Targets(scales.rows.target)
    dlogits, _ = steps.gradient_(region, buffer, statistics, coefficients, targets, scales.class_weight)
    return dlogits.logits


def _region(logits: Tensor, target: Tensor, weight: Tensor | None, settings: dict[str, Any]) -> Region:
    """A region whose logits are there: that of a linear without inputs, all of whose rows PyTorch computes."""
    head = Term(x=logits.new_empty(logits.shape[0], 0), weight=logits.new_empty(logits.shape[1], 0))
    operands = Operands(terms=(head,), bias=None, target=target, loss=Loss(**settings), class_weight=weight)
    return Region(operands, LossOnly(chunk_rows=logits.shape[0], ignored_rows="compute", row_kernels="torch"))


def _as_buffer(logits: Tensor) -> LogitsBuffer:
    return LogitsBuffer(logits, VocabLayout.contiguous(logits.shape[1]))


def _cross_entropy_fwd_meta(
    logits: TensorProxy, target: TensorProxy, *, reduction: str, **settings: Any
) -> tuple[TensorProxy, ...]:
    """Mirrors `_forward_impl`."""
    rows = (logits.shape[0],)
    loss = TensorProxy(like=logits, shape=rows if reduction == "none" else (), requires_grad=False)
    row_max, row_log_sum = (
        TensorProxy(shape=rows, device=logits.device, dtype=loss_dtype(logits), requires_grad=False) for _ in range(2)
    )
    valid_count = TensorProxy(shape=(), device=logits.device, dtype=dtypes.int64, requires_grad=False)
    return loss, row_max, row_log_sum, valid_count


cross_entropy_fwd = executor.register_operator(
    "cross_entropy_fwd", meta=_cross_entropy_fwd_meta, fn=_forward_impl, tags=FORWARD_TAGS
)
cross_entropy_bwd = executor.register_operator(
    "cross_entropy_bwd",
    meta=lambda grad, logits, *others, **settings: TensorProxy(like=logits, requires_grad=False),
    fn=_backward_impl,
)
