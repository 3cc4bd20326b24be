"""`flce_cross_entropy_fwd` and `flce_cross_entropy_bwd` for thunder's nvFuser executor.

nvFuser fuses both symbols with the operations around them, such as casts: a kernel reads logits in the dtype that the
linear wrote, and writes their gradient in the dtype that its users read.

A target that is neither in [0, V) nor ignore_index makes the loss and its row's gradient NaN: a fusion cannot raise.
Legend: N rows, V vocabulary.
"""

import math
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import nvfuser_direct
from nvfuser_direct import DataType, FusionDefinition
from thunder.core import dtypes
from thunder.core.proxies import TensorProxy

from thunder_flce.engine.kernels.nvfuser_rows import Expression
from thunder_flce.graph.unfused_cross_entropy import symbols

_FUSED_DTYPES = (dtypes.float32, dtypes.bfloat16, dtypes.float16)


def forward_fusion(
    fd: FusionDefinition, logits: Any, target: Any, *, rows: int, vocab: int, dtype: DataType, reduction: str,
    ignore_index: int,
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    """Adds the forward to a fusion definition; mirrors `symbols._forward_impl`."""
    z, column, valid, wrong = _operands(fd, logits, target, vocab, ignore_index)
    column = valid.apply("logical_not").apply("logical_or", wrong).apply("where", 0, column)
    column = column.apply("broadcast_in_dim", shape=[rows, 1], broadcast_dims=[0])
    z_y = z.apply("take_along_axis", column, dim=1).apply("reshape", new_shape=[rows]).apply("cast", DataType.Float)
    z = z.apply("cast", DataType.Float)
    row_max = z.apply("max", [1])
    row_log_sum = (z - _as_column(row_max)).apply("exp").apply("sum", [1]).apply("log")
    loss = wrong.apply("where", math.nan, valid.apply("where", row_log_sum - (z_y - row_max), 0.0))
    valid_count = valid.apply("cast", DataType.Int).apply("sum", [0])
    if reduction != "none":
        loss = loss.apply("sum", [0])
    if reduction == "mean":
        loss = loss.apply("div", valid_count.apply("cast", DataType.Float))
    return loss.apply("cast", dtype).value, row_max.value, row_log_sum.value, valid_count.value


def backward_fusion(
    fd: FusionDefinition, grad: Any, logits: Any, target: Any, row_max: Any, row_log_sum: Any, valid_count: Any, *,
    rows: int, vocab: int, dtype: DataType, reduction: str, ignore_index: int,
) -> Any:  # fmt: skip
    """Adds the backward to a fusion definition; mirrors `symbols._backward_impl`."""
    z, column, valid, wrong = _operands(fd, logits, target, vocab, ignore_index)
    row_grad = Expression(fd, grad).apply("cast", DataType.Float)
    if reduction == "mean":
        row_grad = row_grad.apply("div", Expression(fd, valid_count).apply("cast", DataType.Float))
    if reduction != "none":
        row_grad = row_grad.apply("broadcast_in_dim", shape=[rows], broadcast_dims=[])
    row_grad = wrong.apply("where", math.nan, valid.apply("where", row_grad, 0.0))
    shifted = z.apply("cast", DataType.Float) - _as_column(Expression(fd, row_max))
    probability = (shifted - _as_column(Expression(fd, row_log_sum))).apply("exp")
    size, start, step = (fd.define_scalar(number, DataType.Int) for number in (vocab, 0, 1))
    columns = Expression(fd, fd.ops.iota(size, start, step, dtype=DataType.Int)).apply("broadcast", [True, False])
    one_hot = columns.apply("eq", _as_column(column)).apply("where", 1.0, 0.0)
    return ((probability - one_hot) * _as_column(row_grad)).apply("cast", dtype).value


def _operands(fd: FusionDefinition, logits: Any, target: Any, vocab: int, ignore_index: int) -> tuple[Expression, ...]:
    """Returns logits and targets, (N,) masks of targets that are not ignored, and of those outside the vocabulary."""
    column = Expression(fd, target).apply("cast", DataType.Int)
    valid = column.apply("ne", ignore_index)
    outside = column.apply("lt", 0).apply("logical_or", column.apply("ge", vocab))
    return Expression(fd, logits), column, valid, valid.apply("logical_and", outside)


def _as_column(vector: Expression) -> Expression:
    """Returns a view of (N,) as (N, 1)."""
    return vector.apply("broadcast", [False, True])


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
