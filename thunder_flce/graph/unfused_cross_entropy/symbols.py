"""`flce_cross_entropy_fwd` and `flce_cross_entropy_bwd`: cross-entropy on logits that have other users.

Both are primitives of the executor `flce`, for targets that are class indices, and run the row kernels of regions on
given logits. On CUDA, without class weights and label smoothing, thunder's nvFuser executor translates them instead
(`nvfuser_impl`), together with the casts and reshapes around them. Legend: N rows, V vocabulary.
"""

from typing import Any

from thunder.core import dtypes
from thunder.core.proxies import TensorProxy
from torch import Tensor

from thunder_flce.device import ALIGNED_BYTES
from thunder_flce.engine.kernels.interface import RowStatistics
from thunder_flce.engine.plan import LOSS_ONLY, Plan
from thunder_flce.engine.primitives import Primitives, Region
from thunder_flce.engine.row_loss import Coefficients, RowResults
from thunder_flce.graph.reading import loss_dtype
from thunder_flce.graph.symbols import FORWARD_TAGS, executor
from thunder_flce.operation.call import Call
from thunder_flce.operation.loss import Loss


def _forward_impl(
    logits: Tensor, target: Tensor, *, weight: Tensor | None = None, **settings: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the loss, () or (N,) in the logits' dtype; row_max and row_log_sum, (N,); valid_count, () int64.

    The logits are (N, V), the targets (N,), class weights (V,); `settings` are fields of a `Loss`. row_log_sum is
    relative to row_max; both are float32, or float64 for float64 logits.

    Raises:
        IndexError: if a target is neither in [0, V) nor ignore_index.
    """
    ops = _primitives(logits, target, weight, settings)
    rows = ops.select_rows(None)
    z = logits if _is_aligned(logits, ops) else ops.logits_buffer(logits.shape[0]).copy_(logits)
    results = ops.results(z, rows.target)
    return ops.loss(rows, results)[0].to(logits.dtype), *results.statistics, rows.valid_count


def _backward_impl(
    grad: Tensor, logits: Tensor, target: Tensor, row_max: Tensor, row_log_sum: Tensor, valid_count: Tensor, *,
    weight: Tensor | None = None, **settings: Any,
) -> Tensor:  # fmt: skip
    """Returns the logits' gradient, (N, V) in the logits' dtype; grad is () or, for reduction "none", (N,)."""
    ops = _primitives(logits, target, weight, settings)
    rows = ops.select_rows_again(grad, logits.shape[0])
    z = ops.logits_buffer(logits.shape[0]).copy_(logits)
    results = RowResults(RowStatistics(row_max, row_log_sum), None)
    coefficients = Coefficients(ops.call, rows).of_chunk(slice(0, rows.count), results)
    return ops.gradient_(z, results, coefficients, rows.target)[0]


def _primitives(logits: Tensor, target: Tensor, weight: Tensor | None, settings: dict[str, Any]) -> Primitives:
    """Returns the primitives of a region that computes all rows, of hidden size 0 since its logits are given."""
    rows, vocab = logits.shape
    tensors = {"input": logits.new_empty(rows, 0), "linear_weight": logits.new_empty(vocab, 0), "target": target}
    tensors |= {} if weight is None else {"weight": weight}
    call = Call(tensors=tensors, loss=Loss(**settings))
    return Primitives(call, Region(call.specs(), Plan(strategy=LOSS_ONLY, ignored_rows="compute")))


def _is_aligned(logits: Tensor, ops: Primitives) -> bool:
    """Whether logits are contiguous, with the row stride and alignment that the row kernels need."""
    stride = ops.logits_buffer(0).stride(0)
    is_aligned = logits.is_contiguous() and logits.stride(0) == stride
    return is_aligned and logits.data_ptr() % ALIGNED_BYTES == 0


def _cross_entropy_fwd_meta(
    logits: TensorProxy, target: TensorProxy, *, reduction: str, **settings: Any
) -> tuple[TensorProxy, ...]:
    """Shapes and dtypes of `_forward_impl`'s results."""
    rows = (logits.shape[0],)
    loss = TensorProxy(like=logits, shape=rows if reduction == "none" else (), requires_grad=False)
    row_max, row_log_sum = (
        TensorProxy(shape=rows, device=logits.device, dtype=loss_dtype(logits), requires_grad=False) for _ in range(2)
    )
    valid_count = TensorProxy(shape=(), device=logits.device, dtype=dtypes.int64, requires_grad=False)
    return loss, row_max, row_log_sum, valid_count


cross_entropy_fwd = executor.register_operator(
    "flce_cross_entropy_fwd", meta=_cross_entropy_fwd_meta, fn=_forward_impl, tags=FORWARD_TAGS
)
cross_entropy_bwd = executor.register_operator(
    "flce_cross_entropy_bwd",
    meta=lambda grad, logits, *others, **settings: TensorProxy(like=logits, requires_grad=False),
    fn=_backward_impl,
)
