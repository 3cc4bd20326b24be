"""What lightning-thunder 0.2.6 and 0.2.7.dev20260201 have wrong for programs that end in a loss.

Each is mended for all programs of the process once the fusion is used, and not by an import. A version of thunder that
has a repair of its own needs none of ours.
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
"""How thunder traces each function, with what is mended here; `plugin` calls it."""


@lru_cache(maxsize=1)
def apply() -> None:
    """Mends all of them, once."""
    register_grad(prims.PrimIDs.MINIMUM, _minimum_grad)
    register_method("where", _where_method)
    # `labels % 3`: there is the function alone.
    register_method("mod", ltorch.remainder)
    for function, mended in ((F.log_softmax, _log_softmax), (F.nll_loss, _nll_loss)):
        torch_to_thunder_functions[function] = mended
        located = record_source_loc_in_symbol_header(mended)
        traced_by[function] = ensure_recursive_proxies(interpreter_needs_wrap(located))
    clang.maybe_broadcast = _broadcast_differentiated_scalars
    of_torch = get_executor("torch")
    of_torch.register_implementation(ltorch.zeros, execution_transform=_zeros)
    of_torch.register_implementation(ltorch.sum, execution_transform=_sum)
    backward = {"meta": ltorch.nll_loss_backward, "fn": _nll_loss_backward}
    of_torch.register_implementation(
        ltorch.nll_loss_backward, of_torch.register_operator("flce_nll_loss_backward", **backward)
    )
    # The losses that autocast computes in float32: on every device, and on GPUs only.
    for loss in (ltorch.cross_entropy, ltorch.nll_loss):
        register_autocast_rule(loss.id)(_in_float32(loss))
    for loss in (ltorch.log_softmax, ltorch._softmax):
        register_autocast_rule(loss.id)(_in_float32(loss, except_on=devices.DeviceType.CPU))
    if nvfuser_available():
        reshape = prims.PrimIDs.RESHAPE
        register_supported(reshape, _reshape, get_executor("nvfuser").implmap[reshape].checker)
    # A lazy graph module writes its code when it is first called. By then thunder's interpreter is at work, and it
    # cannot run what torch 2.13 and newer write it with.
    ThunderCompiler.__call__ = _use_lazy_graph_module(False)(ThunderCompiler.__call__)


def _reshape(*args: Any, fd: Any, **kwargs: Any) -> Any:
    """A reshape by nvFuser 0.2.36, with a copy behind it, which costs nothing: it is fused.

    Without it, what follows the reshape of an expanded tensor has one value everywhere. So had gradients of the sum of
    each sequence, as DPO's, `(-log_probs).view(sequences, -1).sum(-1)`: that of the first sequence.
    """
    return fd.ops.set(nvfuser_reshape(*args, fd=fd, **kwargs))


_torch_zeros: Callable = get_executor("torch").implmap[ltorch.zeros.id].execution_transform
_torch_sum: Callable = get_executor("torch").implmap[ltorch.sum.id].symbol


def _zeros(*shape: int, device: Any, dtype: Any) -> TensorProxy:
    """The gradient of what nothing uses. Of a scalar, it would be torch.zeros() without a shape."""
    return _torch_zeros(*shape, device=device, dtype=dtype) if shape else ltorch.full((), 0, device=device, dtype=dtype)


def _sum(*args: Any, dtype: Any = None, **kwargs: Any) -> TensorProxy:
    """With a dtype of thunder's, which a derivative has where the program's is PyTorch's."""
    return _torch_sum(*args, dtype=None if dtype is None else dtypes.to_torch_dtype(dtype), **kwargs)


def _minimum_grad(a: TensorProxy, b: TensorProxy, /) -> TensorProxy:
    """The derivative of minimum, which is missing. As in thunder's maximum, equal operands share the gradient."""
    smaller = prims.minimum(a, b)
    grad = get_grad(smaller)
    shared = prims.where(a == b, grad / 2, grad)
    put_grad(a, prims.where(a > b, 0.0, shared))
    put_grad(b, prims.where(b > a, 0.0, shared))
    return smaller


def _where_method(self: TensorProxy, condition: TensorProxy, other: Any, /) -> TensorProxy:
    """`Tensor.where`, for which thunder takes `torch.where`, whose first argument is the condition."""
    return ltorch.where(condition, self, other)


def _log_softmax(input: TensorProxy, dim: int | None = None, _stacklevel: int = 3, *, dtype: Any = None) -> TensorProxy:
    """As `nn.LogSoftmax` calls it: thunder knows neither `_stacklevel`, for a warning, nor a missing `dim`."""
    return ltorch.log_softmax(input, int(input.ndim not in (0, 1, 3)) if dim is None else dim, dtype=dtype)


def _nll_loss(
    input: TensorProxy, target: TensorProxy, weight: Any = None, *, ignore_index: int = -100, reduction: str = "mean"
) -> TensorProxy:
    """Without an `ignore_index`, thunder takes -1 for it, or fails where a gradient is needed."""
    return ltorch.nll_loss(input, target, weight, ignore_index, reduction)


def _nll_loss_backward(
    grad: Tensor, input: Tensor, /, target: Tensor, weight: Tensor | None, reduction: str, ignore_index: int,
    total_weight: Tensor | None,
) -> Tensor:  # fmt: skip
    """thunder's fails for sums, and for inputs (B, V, …)."""
    classes, ignored = min(1, input.ndim - 1), target == ignore_index
    target = target.masked_fill(ignored, 0)
    scale = -grad if total_weight is None else -grad / total_weight
    scale = torch.where(ignored, 0, scale if weight is None else scale * weight[target]).to(input.dtype)
    return torch.zeros_like(input).scatter_(classes, target.unsqueeze(classes), scale.unsqueeze(classes))


def _broadcast_differentiated_scalars(*args: Any, treat_cpu_scalar_tensors_as_numbers: bool = True) -> Any:
    """`loss + losses` on a CPU, where thunder takes the scalar for a number and does not sum its gradient."""
    tensors = [each for each in args if isinstance(each, TensorProxy)]
    on_cpu = all(each.device.devicetype is devices.DeviceType.CPU for each in tensors)
    is_number = not (on_cpu and any(each.ndim == 0 and may_need_grad(each) for each in tensors))
    return _maybe_broadcast(
        *args, treat_cpu_scalar_tensors_as_numbers=treat_cpu_scalar_tensors_as_numbers and is_number
    )


def _in_float32(loss: Callable, except_on: devices.DeviceType | None = None) -> Callable:
    """A loss under `torch.autocast`, which thunder computes in the dtype of the logits."""

    def cast(input: TensorProxy, *args: Any, dtype: Any, **settings: Any) -> TensorProxy:
        # thunder gives autocast's dtype, one of its own, as an argument of the name that a user's has, too.
        if isinstance(dtype, torch.dtype):
            return loss(input, *args, dtype=dtype, **settings)
        if input.device.devicetype is not except_on:
            (input,) = maybe_downcast_to(dtypes.float32, (input,))
        return loss(input, *args, **settings)

    return cast
