"""`flce_cross_entropy_fwd` and `flce_cross_entropy_bwd` for thunder's nvFuser executor.

nvFuser fuses them with the operations around them, such as casts: logits are read in the dtype that the linear wrote,
and their gradient is written in the dtype that its users read.

A target that is neither in [0, V) nor ignore_index makes the loss and its row's gradient NaN: a fusion can't raise.
Legend: N rows, V vocabulary.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import nvfuser_direct
from nvfuser_direct import DataType, FusionDefinition
from thunder.core import dtypes
from thunder.core.proxies import TensorProxy

from thunder_flce.graph.unfused_cross_entropy import symbols

_FUSED_DTYPES = (dtypes.float32, dtypes.bfloat16, dtypes.float16)


def forward_fusion(
    fd: FusionDefinition,
    logits: Any,
    target: Any,
    *,
    rows: int,
    vocab: int,
    dtype: DataType,
    reduction: str,
    ignore_index: int,
) -> tuple[Any, Any, Any, Any]:
    """Adds the forward to a definition; mirrors `symbols._forward_impl`."""
    ops = fd.ops
    target = ops.cast(target, DataType.Int)
    valid, wrong = _classify(fd, target, vocab=vocab, ignore_index=ignore_index)
    zero = _scalar(fd, 0.0)

    safe_target = ops.where(ops.logical_or(ops.logical_not(valid), wrong), _scalar(fd, 0), target)
    column = ops.broadcast_in_dim(safe_target, shape=[rows, 1], broadcast_dims=[0])
    target_logit = ops.reshape(ops.take_along_axis(logits, column, dim=1), new_shape=[rows])
    target_logit = ops.cast(target_logit, DataType.Float)

    values = ops.cast(logits, DataType.Float)
    row_max = ops.max(values, [1])
    shifted = ops.sub(values, ops.broadcast(row_max, [False, True]))
    row_log_sum = ops.log(ops.sum(ops.exp(shifted), [1]))

    loss = ops.sub(row_log_sum, ops.sub(target_logit, row_max))
    loss = ops.where(wrong, _scalar(fd, float("nan")), ops.where(valid, loss, zero))
    valid_count = ops.sum(ops.cast(valid, DataType.Int), [0])
    if reduction != "none":
        loss = ops.sum(loss, [0])
    if reduction == "mean":
        loss = ops.div(loss, ops.cast(valid_count, DataType.Float))
    return ops.cast(loss, dtype), row_max, row_log_sum, valid_count


def backward_fusion(
    fd: FusionDefinition,
    grad: Any,
    logits: Any,
    target: Any,
    row_max: Any,
    row_log_sum: Any,
    valid_count: Any,
    *,
    rows: int,
    vocab: int,
    dtype: DataType,
    reduction: str,
    ignore_index: int,
) -> Any:
    """Adds the backward to a definition; mirrors `symbols._backward_impl`."""
    ops = fd.ops
    target = ops.cast(target, DataType.Int)
    valid, wrong = _classify(fd, target, vocab=vocab, ignore_index=ignore_index)
    scale = ops.cast(grad, DataType.Float)
    if reduction == "mean":
        scale = ops.div(scale, ops.cast(valid_count, DataType.Float))
    if reduction != "none":
        scale = ops.broadcast_in_dim(scale, shape=[rows], broadcast_dims=[])
    scale = ops.where(valid, scale, _scalar(fd, 0.0))
    scale = ops.where(wrong, _scalar(fd, float("nan")), scale)

    def column(vector: Any) -> Any:
        return ops.broadcast(vector, [False, True])

    shifted = ops.sub(ops.cast(logits, DataType.Float), column(row_max))
    probability = ops.exp(ops.sub(shifted, column(row_log_sum)))
    columns = ops.iota(_scalar(fd, vocab), _scalar(fd, 0), _scalar(fd, 1), dtype=DataType.Int)
    is_target = ops.eq(ops.broadcast(columns, [True, False]), column(target))
    one_hot = ops.where(is_target, _scalar(fd, 1.0), _scalar(fd, 0.0))
    return ops.cast(ops.mul(ops.sub(probability, one_hot), column(scale)), dtype)


def _classify(fd: FusionDefinition, target: Any, *, vocab: int, ignore_index: int) -> tuple[Any, Any]:
    """(N,) which targets are not ignored, and which of those are outside the vocabulary."""
    ops = fd.ops
    valid = ops.ne(target, _scalar(fd, ignore_index))
    outside = ops.logical_or(ops.lt(target, _scalar(fd, 0)), ops.ge(target, _scalar(fd, vocab)))
    return valid, ops.logical_and(valid, outside)


def _scalar(fd: FusionDefinition, value: float) -> Any:
    return fd.define_scalar(value, DataType.Int if isinstance(value, int) else DataType.Float)


def register() -> None:
    """Registers the two symbols with thunder's nvFuser executor."""
    from thunder.executors.nvfuserex_impl import getnv, lcdtype_to_nvdtype, register_supported

    # thunder 0.2.6 imports compute_tensor_descriptor from `nvfuser`, which nvFuser 0.2.36 offers as `nvfuser_direct`.
    try:
        from nvfuser import compute_tensor_descriptor  # noqa: F401
    except ImportError:
        sys.modules["nvfuser"] = nvfuser_direct

    def checker(*tensors: Any, **settings: Any) -> bool:
        if settings.get("weight") is not None or settings.get("label_smoothing"):
            return False
        logits = next(tensor for tensor in tensors if isinstance(tensor, TensorProxy) and tensor.ndim == 2)
        is_fused = dtypes.to_strong_dtype(logits.dtype) in _FUSED_DTYPES and logits.numel > 0
        return is_fused and logits.device.type == "cuda"

    def translated(
        fusion: Callable[..., Any], *tensors: TensorProxy, fd: Any, lc_to_nv_map: Any, **settings: Any
    ) -> Any:
        logits = next(tensor for tensor in tensors if tensor.ndim == 2)
        rows, vocab = logits.shape
        values = [getnv(tensor, fd, lc_to_nv_map) for tensor in tensors]
        return fusion(fd, *values, rows=rows, vocab=vocab, dtype=lcdtype_to_nvdtype(logits.dtype), **settings)

    register_supported(symbols.cross_entropy_fwd.id, partial(translated, forward_fusion), checker)
    register_supported(symbols.cross_entropy_bwd.id, partial(translated, backward_fusion), checker)
