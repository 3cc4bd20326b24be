"""`cross_entropy_fwd` and `cross_entropy_bwd`: cross-entropy on logits that have other users.

They are primitives of the executor `flce`, for targets that are indices of classes. The forward returns the loss and
what `torch_impl` calls the statistics.
"""

from typing import Any

from thunder.core import dtypes
from thunder.core.proxies import TensorProxy

from thunder_flce.graph.executor import FORWARD_TAGS, executor
from thunder_flce.graph.matching.trace_index import loss_dtype
from thunder_flce.graph.unfused_cross_entropy.torch_impl import backward_impl, forward_impl


def _cross_entropy_fwd_meta(
    logits: TensorProxy, target: TensorProxy, *, reduction: str, **settings: Any
) -> tuple[TensorProxy, ...]:
    """Mirrors `forward_impl`."""
    rows = (logits.shape[0],)
    loss = TensorProxy(like=logits, shape=rows if reduction == "none" else (), requires_grad=False)
    row_max, row_log_sum = (
        TensorProxy(shape=rows, device=logits.device, dtype=loss_dtype(logits), requires_grad=False) for _ in range(2)
    )
    valid_count = TensorProxy(shape=(), device=logits.device, dtype=dtypes.int64, requires_grad=False)
    return loss, row_max, row_log_sum, valid_count


def _cross_entropy_bwd_meta(
    grad: TensorProxy, logits: TensorProxy, *others: TensorProxy, **settings: Any
) -> TensorProxy:
    """Mirrors `backward_impl`."""
    return TensorProxy(like=logits, requires_grad=False)


cross_entropy_fwd = executor.register_operator(
    "cross_entropy_fwd", meta=_cross_entropy_fwd_meta, fn=forward_impl, tags=FORWARD_TAGS
)
cross_entropy_bwd = executor.register_operator("cross_entropy_bwd", meta=_cross_entropy_bwd_meta, fn=backward_impl)
