"""Derivatives of the operators, for autograd and torch.func, in eager, traced and exported programs."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from thunder_flce import operators
from thunder_flce.engine.kernels.scaling import factor_of, graph_is_kept, scaled_gradients
from thunder_flce.engine.plan import LOSS_ONLY
from thunder_flce.inductor import scale_gradient
from thunder_flce.operation.call import is_traced, operand_names
from thunder_flce.operators import Settings

_NO_SECOND_DERIVATIVE = "linear_cross_entropy has no second derivative"
_NO_FORWARD_MODE = "linear_cross_entropy has no forward-mode derivative: call backward, or torch.func.grad"
_NO_VMAP = "linear_cross_entropy has no vmap; call it once with all rows: input may be (..., H), and target (...)"


def _requires_grad(tensor: Tensor) -> bool:
    """Whether a tensor requires a gradient in any of the active transforms of torch.func."""
    while not tensor.requires_grad and torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor.requires_grad


def names_needing_grad(tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Returns the names of the tensors whose gradient is needed."""
    if not torch.is_grad_enabled():
        return ()
    return tuple(name for name in operand_names(tensors) if _requires_grad(tensors[name]))


def differentiable_forward(settings: Settings, tensors: Sequence[Tensor], *, is_direct: bool) -> Sequence[Tensor]:
    """Runs the forward of a call, and records its backward.

    Returns the results of `torch.ops.thunder_flce.linear_cross_entropy`. If `is_direct`, returns only the loss and its
    outputs, and the engine runs without the dispatcher, on which compilers, modes and subclasses depend.
    """
    _check_no_tangents(tensors)
    if torch._C._are_functorch_transforms_active():
        return _TransformedLinearCrossEntropy.apply(settings, *tensors)
    if torch._C._is_tracing():  # torch.jit.trace does not trace into an autograd function.
        return torch.ops.thunder_flce.linear_cross_entropy(list(tensors), str(settings))
    if settings.needs_grad:
        return _LinearCrossEntropy.apply(settings, is_direct, *tensors)
    # Without no_grad, autograd would record the call if a teacher's weight requires a gradient, though it gets none.
    with torch.no_grad():
        return _run(settings, is_direct, tensors)


def _check_no_tangents(tensors: Sequence[Tensor]) -> None:
    """Raises an error for forward-mode derivatives, which code that runs below autograd would silently drop."""
    is_in_level = forward_ad._current_level >= 0
    if is_in_level and any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
        raise RuntimeError(_NO_FORWARD_MODE)


def _run(settings: Settings, is_direct: bool, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    if is_direct:
        return operators.forward(settings, tensors)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.thunder_flce.linear_cross_entropy(list(tensors), str(settings))


def _save(ctx: Any, settings: Settings, tensors: Sequence[Tensor], results: Sequence[Tensor], *, returned: int) -> None:
    """Saves what the backward reads, and marks those of the first `returned` results that have no gradient."""
    # For compiled autograd, Dynamo traces the backward; it cannot fill a cached property.
    ctx.settings, ctx.grad_positions, upstream_names = settings, settings.grad_positions, settings.upstream_names
    ctx.set_materialize_grads(False)
    named_results = dict(zip(settings.result_names, results, strict=True))
    if constant := [named_results[name] for name in settings.result_names[:returned] if name not in upstream_names]:
        ctx.mark_non_differentiable(*constant)
    if settings.plan.strategy != LOSS_ONLY:
        ctx.save_for_backward(*[named_results[name] for name in settings.saved_names], *tensors)


def _no_second_derivative(ctx: Any, *grads: Any) -> Any:
    raise RuntimeError(_NO_SECOND_DERIVATIVE)


def _no_vmap(*_: Any) -> Any:
    raise RuntimeError(_NO_VMAP)


class _LinearCrossEntropy(torch.autograd.Function):
    """A call of the operator, as an autograd function."""

    @staticmethod
    def forward(ctx: Any, settings: Settings, is_direct: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        results = tuple(_run(settings, is_direct, tensors))
        kept = tensors
        if settings.backward_only_scales:
            # With finished gradients, the backward does not read the operands.
            kept = _expected_gradient(settings, tensors)
            if not is_direct and is_traced(tensors[0]):
                # AOTAutograd detects second derivatives by those of the program's inputs that the backward reads. Their
                # node is an `Error`. They are alive anyway, so saving them takes no memory.
                needed = [tensors[position] for position in settings.grad_positions]
                kept += tuple([tensor for tensor in needed if type(tensor.grad_fn).__name__ in ("NoneType", "Error")])
        # The operator also returns the tensors that are saved.
        returned = 1 + len(settings.loss.outputs) if is_direct else len(results)
        _save(ctx, settings, kept, results, returned=returned)
        return results[:returned]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(f"{_NO_SECOND_DERIVATIVE}; call backward without create_graph=True")
        return None, None, *_gradients(ctx, grads, _backward)


class _TransformedLinearCrossEntropy(torch.autograd.Function):
    """A call of the operator inside transforms of torch.func, as an autograd function."""

    @staticmethod
    def forward(settings: Settings, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(_run(settings, False, tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], results: tuple[Tensor, ...]) -> None:
        settings, *tensors = inputs
        # torch.func records each backward. Without the operands among its inputs, a second derivative would miss a part
        # instead of raising an error.
        kept = (*_expected_gradient(settings, tensors), *tensors) if settings.backward_only_scales else tensors
        # All results are returned, since saved tensors must be inputs or results.
        _save(ctx, settings, kept, results, returned=len(results))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *_gradients(ctx, grads, _Backward.apply if torch.is_grad_enabled() else _keeping_backward)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise RuntimeError(_NO_FORWARD_MODE)

    vmap = staticmethod(_no_vmap)


def _expected_gradient(settings: Settings, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Returns the tensor expected_gradient in a tuple, which is empty if there is none."""
    names = settings.names
    return (tensors[names.index("expected_gradient")],) if "expected_gradient" in names else ()


def _gradients(ctx: Any, grads: Sequence[Tensor | None], run: Callable[..., Any]) -> list[Tensor | None]:
    """Returns the gradient of each tensor of a call, or None; `run` is `_backward` or its autograd function."""
    settings = ctx.settings
    gradients: list[Tensor | None] = [None] * len(settings.names)
    if all([grad is None for grad in grads]):
        return gradients
    upstream = dict(zip(settings.result_names, grads, strict=False))
    needed = run(settings, *[upstream[name] for name in settings.upstream_names], *ctx.saved_tensors)
    for position, gradient in zip(ctx.grad_positions, needed, strict=True):
        gradients[position] = gradient
    return gradients


def _backward(settings: Settings, *tensors: Any, may_overwrite: bool = True) -> Any:
    """Returns the needed gradients from the upstream gradients of `Settings.upstream_names`, then the saved tensors."""
    count = len(settings.upstream_names)
    upstream, saved_tensors = tensors[:count], tensors[count:]
    is_recorded = torch.compiler.is_compiling() or type(saved_tensors[0]) is not Tensor or saved_tensors[0].is_meta
    # `make_fx` also traces with tensors that have values.
    is_recorded = is_recorded or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None
    # With is_grads_batched=True, an upstream gradient is a batch of several.
    is_batch = torch._C._functorch.is_legacy_batchedtensor
    if not is_recorded and any([is_batch(grad) for grad in upstream if grad is not None]):
        raise RuntimeError("linear_cross_entropy has no vmap; call backward without is_grads_batched=True")
    may_overwrite = may_overwrite and not is_recorded and not graph_is_kept()
    if settings.backward_only_scales:
        needed = 1 + len(settings.needs_grad)
        valid_count, gradients = saved_tensors[0], saved_tensors[1:needed]
        expected = saved_tensors[needed] if "expected_gradient" in settings.names else None
        if is_recorded:
            factor = factor_of(upstream[0], None, expected)
            return tuple(scale_gradient(each, factor, valid_count, saved_tensors[needed:]) for each in gradients)
        return scaled_gradients(
            gradients, upstream[0], valid_count=valid_count, expected=expected, may_overwrite=may_overwrite
        )
    saved, operands = saved_tensors[: len(settings.saved_names)], saved_tensors[len(settings.saved_names) :]
    if is_recorded:
        call = torch.ops.thunder_flce.linear_cross_entropy_backward
        return tuple(call(list(upstream), list(saved), list(operands), str(settings)))
    return tuple(operators.backward(settings, upstream, saved, operands, may_overwrite=may_overwrite))


_keeping_backward = partial(_backward, may_overwrite=False)
"""The backward inside transforms of torch.func, of which each has saved the same tensors"""


class _Backward(torch.autograd.Function):
    """The backward as an autograd function, so that a second derivative through a recorded backward raises an error."""

    forward = staticmethod(_keeping_backward)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, outputs: Any) -> None:
        pass

    backward = staticmethod(_no_second_derivative)
    vmap = staticmethod(_no_vmap)


def _autograd_kernel(tensors: list[Tensor], settings: str) -> list[Tensor]:
    """Implements autograd for calls of the operator itself, such as those in exported programs."""
    _check_no_tangents(tensors)
    parsed, needed = Settings.parse(settings), []
    if torch.is_grad_enabled():
        operands = dict(zip(parsed.names, tensors, strict=True))
        needed = [name for name, tensor in operands.items() if tensor.requires_grad and name != "teacher_weight"]
    if not needed:
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.thunder_flce.linear_cross_entropy(tensors, settings)
    for name in needed:
        if name not in parsed.needs_grad:
            raise RuntimeError(
                f"{name} requires a gradient, but did not when this program was traced; trace or export the program "
                "with one that does, or run and compile it under torch.no_grad()"
            )
    return list(_LinearCrossEntropy.apply(parsed, False, *tensors))


operators.library.impl("linear_cross_entropy", _autograd_kernel, "Autograd")


# A graph that `make_fx` traces of a whole training step calls these operators on tensors that require gradients.
for _name in ("linear_cross_entropy_backward", "scale_gradient"):
    torch.library.register_autograd(f"thunder_flce::{_name}", _no_second_derivative, lib=operators.library)
