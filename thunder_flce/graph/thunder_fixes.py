"""Fixes for faults of lightning-thunder 0.2.6 and 0.2.7.dev20260201 that affect programs which end in a loss.

The first use of the fusion applies all fixes, to every program of the process; an import alone does not. A fix can be
deleted once thunder has its own.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import thunder.torch as ltorch
import torch
import torch.nn.functional as F
from thunder import clang
from thunder.core import devices, dtypes, prims
from thunder.core.jit_ext import _general_jit_lookaside_map as general_jit_lookasides
from thunder.core.jit_ext import (
    ensure_recursive_proxies,
    interpreter_needs_wrap,
    record_source_loc_in_symbol_header,
)
from thunder.core.proxies import TensorProxy
from thunder.core.transforms import get_grad, put_grad, register_grad
from thunder.dynamo.compiler import ThunderCompiler
from thunder.executors.nvfuserex import nvfuser_available
from thunder.extend import get_executor
from thunder.torch import _torch_to_thunder_function_map as torch_to_thunder_functions
from thunder.torch.langctx import register_method
from thunder.transforms.autocast import maybe_downcast_to, register_autocast_rule
from torch import Tensor
from torch.fx._lazy_graph_module import _use_lazy_graph_module

from thunder_flce.graph.reading import may_need_grad

if nvfuser_available():
    from thunder.executors.nvfuserex_impl import register_supported
    from thunder.executors.nvfuserex_impl import reshape as nvfuser_reshape

_maybe_broadcast = clang.maybe_broadcast
traced_by = dict(general_jit_lookasides)
"""thunder's lookaside for each function (how to trace it), fixes included; those of `plugin` call these."""


@lru_cache(maxsize=1)
def apply() -> None:
    """Applies all fixes; calls after the first do nothing."""
    register_grad(prims.PrimIDs.MINIMUM, _minimum_grad)
    register_method("where", _where_method)
    # For `labels % 3`: thunder has only the function `torch.remainder`.
    register_method("mod", ltorch.remainder)
    for function, fixed in ((F.log_softmax, _log_softmax), (F.nll_loss, _nll_loss)):
        torch_to_thunder_functions[function] = fixed
        traceable = record_source_loc_in_symbol_header(fixed)
        traced_by[function] = ensure_recursive_proxies(interpreter_needs_wrap(traceable))
    clang.maybe_broadcast = _broadcast_differentiated_scalars
    torch_executor = get_executor("torch")
    torch_executor.register_implementation(ltorch.zeros, execution_transform=_zeros)
    torch_executor.register_implementation(ltorch.sum, execution_transform=_sum)
    backward = {"meta": ltorch.nll_loss_backward, "fn": _nll_loss_backward}
    torch_executor.register_implementation(
        ltorch.nll_loss_backward, torch_executor.register_operator("flce_nll_loss_backward", **backward)
    )
    # autocast computes the first two losses in float32 on every device, and the other two only on GPUs.
    for loss in (ltorch.cross_entropy, ltorch.nll_loss):
        register_autocast_rule(loss.id)(_float32_rule(loss))
    for loss in (ltorch.log_softmax, ltorch._softmax):
        register_autocast_rule(loss.id)(_float32_rule(loss, except_on=devices.DeviceType.CPU))
    if nvfuser_available():
        reshape = prims.PrimIDs.RESHAPE
        register_supported(reshape, _reshape, get_executor("nvfuser").implmap[reshape].checker)
    # A lazy graph module generates its code at its first call. thunder's interpreter would trace that call, and cannot
    # run the code generator of torch 2.13 and newer.
    ThunderCompiler.__call__ = _use_lazy_graph_module(False)(ThunderCompiler.__call__)


def _reshape(*args: Any, fd: Any, **kwargs: Any) -> Any:
    """Adds a copy after a reshape, for nvFuser 0.2.36; the copy is fused and costs nothing.

    Without the copy, operations that follow a reshape of an expanded tensor read one value everywhere. This affected
    gradients of a sum per sequence, such as DPO's `(-log_probs).view(sequences, -1).sum(-1)`: all sequences got the
    gradient of the first.
    """
    return fd.ops.set(nvfuser_reshape(*args, fd=fd, **kwargs))


_torch_zeros: Callable = get_executor("torch").implmap[ltorch.zeros.id].execution_transform
_torch_sum: Callable = get_executor("torch").implmap[ltorch.sum.id].symbol


def _zeros(*shape: int, device: Any, dtype: Any) -> TensorProxy:
    """Gradient of a tensor that nothing uses; for a scalar, thunder would call torch.zeros() without a shape."""
    return _torch_zeros(*shape, device=device, dtype=dtype) if shape else ltorch.full((), 0, device=device, dtype=dtype)


def _sum(*args: Any, dtype: Any = None, **kwargs: Any) -> TensorProxy:
    """Accepts a dtype of thunder as well as one of PyTorch: thunder's derivatives pass the former."""
    return _torch_sum(*args, dtype=dtypes.to_torch_dtype(dtype), **kwargs)


def _minimum_grad(a: TensorProxy, b: TensorProxy, /) -> TensorProxy:
    """Derivative of minimum, which thunder lacks. Equal operands share the gradient, as in thunder's maximum."""
    smaller = prims.minimum(a, b)
    grad = get_grad(smaller)
    shared = prims.where(a == b, grad / 2, grad)
    put_grad(a, prims.where(a > b, 0.0, shared))
    put_grad(b, prims.where(b > a, 0.0, shared))
    return smaller


def _where_method(self: TensorProxy, condition: TensorProxy, other: Any, /) -> TensorProxy:
    """`Tensor.where`: thunder calls `torch.where` with the same arguments, though that takes the condition first."""
    return ltorch.where(condition, self, other)


def _log_softmax(input: TensorProxy, dim: int | None = None, _stacklevel: int = 3, *, dtype: Any = None) -> TensorProxy:
    """`F.log_softmax` as `nn.LogSoftmax` calls it, with `_stacklevel` or without `dim`, which thunder lacks."""
    return ltorch.log_softmax(input, int(input.ndim not in (0, 1, 3)) if dim is None else dim, dtype=dtype)


def _nll_loss(
    input: TensorProxy, target: TensorProxy, weight: Any = None, *, ignore_index: int = -100, reduction: str = "mean"
) -> TensorProxy:
    """Passes `ignore_index`, -100 by default: without it, thunder takes -1, or fails if a gradient is needed."""
    return ltorch.nll_loss(input, target, weight, ignore_index, reduction)


def _nll_loss_backward(
    grad: Tensor, input: Tensor, /, target: Tensor, weight: Tensor | None, reduction: str, ignore_index: int,
    total_weight: Tensor | None,
) -> Tensor:  # fmt: skip
    """Backward of `nll_loss`: thunder's own fails for the reduction "sum" and for inputs of shape (B, V, …)."""
    class_dim, ignored = min(1, input.ndim - 1), target == ignore_index
    target = target.masked_fill(ignored, 0)
    scale = -grad if total_weight is None else -grad / total_weight
    scale = torch.where(ignored, 0, scale if weight is None else scale * weight[target]).to(input.dtype)
    return torch.zeros_like(input).scatter_(class_dim, target.unsqueeze(class_dim), scale.unsqueeze(class_dim))


def _broadcast_differentiated_scalars(*args: Any, treat_cpu_scalar_tensors_as_numbers: bool = True) -> Any:
    """Broadcasts CPU scalars that may need a gradient, as in `loss + losses`: thunder would not sum their gradient."""
    tensors = [tensor for tensor in args if isinstance(tensor, TensorProxy)]
    on_cpu = all(tensor.device.devicetype is devices.DeviceType.CPU for tensor in tensors)
    is_number = not (on_cpu and any(tensor.ndim == 0 and may_need_grad(tensor) for tensor in tensors))
    return _maybe_broadcast(
        *args, treat_cpu_scalar_tensors_as_numbers=treat_cpu_scalar_tensors_as_numbers and is_number
    )


def _float32_rule(loss: Callable, except_on: devices.DeviceType | None = None) -> Callable:
    """Returns an autocast rule that casts a loss's logits to float32; thunder keeps the logits' dtype."""

    def cast(input: TensorProxy, *args: Any, dtype: Any, **settings: Any) -> TensorProxy:
        # thunder passes autocast's dtype, a thunder dtype, by the same name as the loss's own `dtype` of the user.
        if isinstance(dtype, torch.dtype):
            return loss(input, *args, dtype=dtype, **settings)
        if input.device.devicetype is not except_on:
            (input,) = maybe_downcast_to(dtypes.float32, (input,))
        return loss(input, *args, **settings)

    return cast
