"""Derivatives of the operators: with autograd and torch.func, eagerly, traced, and in exported programs."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from thunder_flce import operators
from thunder_flce.engine.kernels.scaling import factor_of, graph_is_kept, scaled_gradients
from thunder_flce.inductor import scale_gradient
from thunder_flce.operators import Settings

_NO_SECOND_DERIVATIVE = "linear_cross_entropy has no second derivative"
_NO_FORWARD_MODE = "linear_cross_entropy has no forward-mode derivative: call backward, or torch.func.grad"
_NO_VMAP = "linear_cross_entropy has no vmap; call it once with all rows: input may be (..., H), and target (...)"


def requires_grad(tensor: Tensor) -> bool:
    """Whether a tensor requires a gradient, in any of the transforms of torch.func that are at work."""
    while not tensor.requires_grad and torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor.requires_grad


def differentiable_forward(settings: Settings, tensors: Sequence[Tensor], *, is_direct: bool) -> Sequence[Tensor]:
    """What `torch.ops.thunder_flce.linear_cross_entropy` returns, or only the loss and its outputs, differentiable.

    Args:
        settings: of the call.
        tensors: of the call.
        is_direct: whether the engine may run without the dispatcher, which compilers, modes and subclasses listen to.
    """
    _check_no_tangents(tensors)
    if torch._C._are_functorch_transforms_active():
        return _TransformedLinearCrossEntropy.apply(settings, *tensors)
    if torch._C._is_tracing():  # By torch.jit.trace, which does not look into an autograd function.
        return torch.ops.thunder_flce.linear_cross_entropy(list(tensors), str(settings))
    if settings.needs_grad:
        return _LinearCrossEntropy.apply(settings, is_direct, *tensors)
    # A teacher's weight, which gets no gradient, may require one.
    with torch.no_grad():
        return _run(settings, is_direct, tensors)


def _check_no_tangents(tensors: Sequence[Tensor]) -> None:
    """Raises for a forward-mode derivative: what runs below autograd would leave it out."""
    is_in_level = forward_ad._current_level >= 0
    if is_in_level and any(forward_ad.unpack_dual(each).tangent is not None for each in tensors):
        raise RuntimeError(_NO_FORWARD_MODE)


def _run(settings: Settings, is_direct: bool, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    if is_direct:
        return operators.forward(settings, tensors)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.thunder_flce.linear_cross_entropy(list(tensors), str(settings))


def _save(ctx: Any, settings: Settings, tensors: Sequence[Tensor], results: Sequence[Tensor], *, returned: int) -> None:
    """Notes what the backward reads, and which of the `returned` first results have no gradient."""
    # Dynamo, which compiles the backward with compiled autograd, cannot fill a cached property.
    ctx.settings, ctx.grad_positions, upstream_names = settings, settings.grad_positions, settings.upstream_names
    ctx.set_materialize_grads(False)
    found = dict(zip(settings.result_names, results, strict=True))
    if constant := [found[name] for name in settings.result_names[:returned] if name not in upstream_names]:
        ctx.mark_non_differentiable(*constant)
    if settings.plan.strategy != "loss_only":
        ctx.save_for_backward(*[found[name] for name in settings.saved_names], *tensors)


def _no_second_derivative(ctx: Any, *grads: Any) -> Any:
    raise RuntimeError(_NO_SECOND_DERIVATIVE)


def _no_vmap(*_: Any) -> Any:
    raise RuntimeError(_NO_VMAP)


class _LinearCrossEntropy(torch.autograd.Function):
    """A call of the operator."""

    @staticmethod
    def forward(ctx: Any, settings: Settings, is_direct: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        results = tuple(_run(settings, is_direct, tensors))
        kept = tensors
        if settings.finishes_in_forward:
            # The operands are in finished gradients.
            kept = _expected(settings, tensors)
            if not is_direct and operators.is_traced(tensors[0]):
                # AOTAutograd notices second derivatives by what the backward reads of the program's own inputs, whose
                # node is an `Error`. These are there anyway.
                needed = [tensors[position] for position in settings.grad_positions]
                kept += tuple([each for each in needed if type(each.grad_fn).__name__ in ("NoneType", "Error")])
        # The operator returns what is saved, too.
        returned = 1 + len(settings.loss.outputs) if is_direct else len(results)
        _save(ctx, settings, kept, results, returned=returned)
        return results[:returned]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(f"{_NO_SECOND_DERIVATIVE}; call backward without create_graph=True")
        return None, None, *_gradients(ctx, grads, _backward)


class _TransformedLinearCrossEntropy(torch.autograd.Function):
    """The same inside transforms of torch.func."""

    @staticmethod
    def forward(settings: Settings, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(_run(settings, False, tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], results: tuple[Tensor, ...]) -> None:
        settings, *tensors = inputs
        # torch.func records each backward. It has to find the operands there, or a second derivative would miss a part
        # instead of raising an error.
        kept = (*_expected(settings, tensors), *tensors) if settings.finishes_in_forward else tensors
        # What is saved has to be among the results, too.
        _save(ctx, settings, kept, results, returned=len(results))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *_gradients(ctx, grads, _Backward.apply if torch.is_grad_enabled() else _backward)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise RuntimeError(_NO_FORWARD_MODE)

    vmap = staticmethod(_no_vmap)


def _expected(settings: Settings, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The expected gradient, as a tuple, which is empty where there is none."""
    names = settings.names
    return (tensors[names.index("expected_gradient")],) if "expected_gradient" in names else ()


def _gradients(ctx: Any, grads: Sequence[Tensor | None], run: Callable[..., Any]) -> list[Tensor | None]:
    """Those of a call's tensors, from the upstream gradients of its results; `run` is `_backward`, recorded or not."""
    settings = ctx.settings
    gradients: list[Tensor | None] = [None] * len(settings.names)
    if all([grad is None for grad in grads]):
        return gradients
    of_results = dict(zip(settings.result_names, grads, strict=False))
    found = run(settings, *[of_results[name] for name in settings.upstream_names], *ctx.saved_tensors)
    for position, gradient in zip(ctx.grad_positions, found, strict=True):
        gradients[position] = gradient
    return gradients


def _backward(settings: Settings, *tensors: Any) -> Any:
    """The needed gradients, from the upstream ones of `Settings.upstream_names`, and from what is saved."""
    count = len(settings.upstream_names)
    upstream, known = tensors[:count], tensors[count:]
    is_traced = torch.compiler.is_compiling() or type(known[0]) is not Tensor or known[0].is_meta
    # By `make_fx`, also with tensors that have values.
    is_traced = is_traced or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None
    # One that stands for several, as with is_grads_batched=True.
    is_batch = torch._C._functorch.is_legacy_batchedtensor
    if not is_traced and any([is_batch(each) for each in upstream if each is not None]):
        raise RuntimeError("linear_cross_entropy has no vmap; call backward without is_grads_batched=True")
    may_overwrite = not is_traced and not graph_is_kept()
    if settings.finishes_in_forward:
        needed = 1 + len(settings.needs_grad)
        valid_count, gradients = known[0], known[1:needed]
        expected = known[needed] if "expected_gradient" in settings.names else None
        if is_traced:
            factor = factor_of(upstream[0], None, expected)
            return tuple(scale_gradient(each, factor, valid_count, known[needed:]) for each in gradients)
        return scaled_gradients(
            gradients, upstream[0], valid_count=valid_count, expected=expected, may_overwrite=may_overwrite
        )
    saved, operands = known[: len(settings.saved_names)], known[len(settings.saved_names) :]
    if is_traced:
        call = torch.ops.thunder_flce.linear_cross_entropy_backward
        return tuple(call(list(upstream), list(saved), list(operands), str(settings)))
    return tuple(operators.backward(settings, upstream, saved, operands, may_overwrite=may_overwrite))


class _Backward(torch.autograd.Function):
    """The backward as an autograd function: where autograd records it, a second derivative is an error."""

    forward = staticmethod(_backward)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, outputs: Any) -> None:
        pass

    backward = staticmethod(_no_second_derivative)
    vmap = staticmethod(_no_vmap)


def _autograd_kernel(tensors: list[Tensor], settings: str) -> list[Tensor]:
    """Runs a direct call of the operator, such as those in exported programs."""
    _check_no_tangents(tensors)
    known, needed = Settings.parse(settings), []
    if torch.is_grad_enabled():
        operands = dict(zip(known.names, tensors, strict=True))
        needed = [name for name, each in operands.items() if each.requires_grad and name != "teacher_weight"]
    if not needed:
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.thunder_flce.linear_cross_entropy(tensors, settings)
    for name in needed:
        if name not in known.needs_grad:
            raise RuntimeError(
                f"{name} requires a gradient, but this operator was traced with {name} that did not; trace or export "
                "it with one that does, or run and compile it under torch.no_grad()"
            )
    return list(_LinearCrossEntropy.apply(known, False, *tensors))


operators.library.impl("linear_cross_entropy", _autograd_kernel, "Autograd")


# Graphs that `make_fx` traces of a whole step call these on tensors that require gradients.
for _name in ("linear_cross_entropy_backward", "scale_gradient"):
    torch.library.register_autograd(f"thunder_flce::{_name}", _no_second_derivative, lib=operators.library)
