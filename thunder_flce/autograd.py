"""Derivatives of the operators: with autograd and torch.func, eagerly, traced, and in exported programs."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from thunder_flce import inductor, operators
from thunder_flce.execution import engine
from thunder_flce.execution.operands import Operands
from thunder_flce.execution.plan import LossOnly
from thunder_flce.operation.arguments import named_operands
from thunder_flce.operation.loss import DIFFERENTIABLE_OUTPUTS
from thunder_flce.operators import OUTPUT_GRADS, Settings, is_traced, needs_operator

_NO_SECOND_DERIVATIVE = "linear_cross_entropy has no second derivative"
_NO_VMAP = "linear_cross_entropy has no vmap; call it once with all rows: input may be (..., H), and target (...)"


def requires_grad(tensor: Tensor) -> bool:
    """Whether a tensor requires a gradient, in any of the transforms of torch.func that are at work."""
    while not tensor.requires_grad and torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor.requires_grad


def _is_batched(upstream: Tensor | None) -> bool:
    """Whether an upstream gradient stands for several, as with is_grads_batched=True."""
    return upstream is not None and torch._C._functorch.is_legacy_batchedtensor(upstream)


def differentiable_forward(settings: Settings, operands: Operands) -> tuple[Tensor, ...]:
    """What `torch.ops.thunder_flce.linear_cross_entropy` returns; the loss and its outputs can be differentiated."""
    head, *others = operands.terms
    tensors = (
        *(operands.target, operands.class_weight, operands.token_weights, operands.target_weights),
        *(operands.num_items, operands.expected_gradient),
        *(head.x, head.weight, operands.bias),
        *(tensor for term in others for tensor in (term.x, term.weight)),
    )
    is_direct = settings.plan is not None and not needs_operator((*tensors, *operands.token_inputs))
    return _apply(settings, tensors, operands.token_inputs, operands if is_direct else None)


_NAMES = (
    *("target", "weight", "token_weights", "target_weights", "num_items", "expected_gradient"),
    *("input", "linear_weight", "linear_bias"),
)


def _apply(
    settings: Settings,
    tensors: Sequence[Tensor | None],
    token_inputs: Sequence[Tensor],
    operands: Operands | None = None,
) -> tuple[Tensor, ...]:
    """The results of the autograd function.

    Args:
        settings: the settings of the operator.
        tensors: those that `_NAMES` names, then input and weight of each further term.
        token_inputs: what the token loss reads.
        operands: the same tensors for the engine, where it may run without the operator; None where it may not.
    """
    is_transformed = torch._C._are_functorch_transforms_active()
    # `Function.apply` also prepares for torch.func, which takes the host as long as a few kernel launches. The
    # `apply` of its base class does not.
    function: Any = _LinearCrossEntropy if operands is None else super(torch.autograd.Function, _LinearCrossEntropy)
    return function.apply(settings, is_transformed, operands, len(token_inputs), *token_inputs, *tensors)


def _by_name(tensors: Sequence[Tensor | None]) -> dict[str, Any]:
    # Dynamo of torch 2.8, in compiled autograd, takes strict=False for True.
    return {**dict(zip(_NAMES, tensors[: len(_NAMES)], strict=True)), "terms": tensors[len(_NAMES) :]}


class _LinearCrossEntropy(torch.autograd.Function):
    """Returns the tensors that are saved for the backward as further results, as torch.func requires."""

    @staticmethod
    def forward(
        settings: Settings, is_transformed: bool, operands: Operands | None, count: int, *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        with torch._C._AutoDispatchBelowAutograd():
            if operands is not None and settings.plan is not None:
                return tuple(operators.results(settings, engine.forward(operands, settings.plan)))
            given = {**_by_name(tensors[count:]), "token_inputs": tensors[:count] or None}
            return tuple(torch.ops.thunder_flce.linear_cross_entropy(**given, settings=str(settings)))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], results: tuple[Tensor, ...]) -> None:
        ctx.settings, ctx.is_transformed, _, token_inputs, *tensors = inputs
        tensors = tensors[token_inputs:]
        ctx.count, ctx.first = len(inputs), 4 + token_inputs
        names = ctx.settings.loss.outputs
        outputs, saved = dict(zip(names, results[1:], strict=False)), results[1 + len(names) :]
        ctx.set_materialize_grads(False)
        differentiable = ctx.settings.loss.differentiable_outputs
        ctx.mark_non_differentiable(*(o for n, o in outputs.items() if n not in differentiable), *saved)
        if ctx.settings.finishes_in_forward:
            # torch.func records each backward. It has to find the operands there, or a second derivative would miss a
            # part instead of raising an error.
            expected_gradient = tensors[_NAMES.index("expected_gradient")]
            ctx.save_for_backward(expected_gradient, *saved, *(tensors if ctx.is_transformed else ()))
        elif ctx.settings.strategy != LossOnly.strategy:
            kept = saved[3] if len(saved) > 3 else None
            tensors[_NAMES.index("expected_gradient")] = None
            entropy = outputs["entropy"] if "entropy" in differentiable else None
            ctx.save_for_backward(*saved[:3], kept, entropy, *tensors)

    @staticmethod
    def backward(ctx: Any, grad: Any, *others: Tensor | None) -> tuple[Tensor | None, ...]:
        is_recorded = torch.is_grad_enabled()
        if is_recorded and not ctx.is_transformed:
            raise RuntimeError(f"{_NO_SECOND_DERIVATIVE}; call backward without create_graph=True")
        if not torch.compiler.is_compiling() and any(map(_is_batched, (grad, *others))):
            raise RuntimeError("linear_cross_entropy has no vmap; call backward without is_grads_batched=True")
        names = ctx.settings.loss.outputs
        of_outputs = dict(zip(names, others[: len(names)], strict=True))
        upstream = (grad, *(of_outputs.get(name) for name in DIFFERENTIABLE_OUTPUTS))
        if all(each is None for each in upstream):
            return (None,) * ctx.count
        run = _Backward.apply if is_recorded else _Backward.forward
        found = run(ctx.settings, *upstream, *ctx.saved_tensors)
        # The positions of the operands among the inputs.
        first = ctx.first + _NAMES.index("input")
        pairs = [(at, at + 1) for at in range(first + 3, ctx.count, 2)]
        positions = named_operands(first, first + 1, first + 2, pairs)
        gradients: list[Tensor | None] = [None] * ctx.count
        for name, gradient in zip(ctx.settings.needs_grad, found, strict=True):
            gradients[positions[name]] = gradient
        return tuple(gradients)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
        raise RuntimeError(_NO_VMAP)


class _Backward(torch.autograd.Function):
    """The backward as an autograd function: where autograd records it, a second derivative is an error."""

    @staticmethod
    def forward(settings: Settings, grad: Any, *others: Any) -> Any:
        of_outputs, saved = others[: len(DIFFERENTIABLE_OUTPUTS)], others[len(DIFFERENTIABLE_OUTPUTS) :]
        if settings.finishes_in_forward:
            expected_gradient, valid_count, *gradients = saved[: 2 + len(settings.needs_grad)]
            scale = inductor.scaled if is_traced(valid_count) else engine.scale_gradients
            return tuple(scale(grad, valid_count, *gradients, expected_gradient=expected_gradient))
        row_max, row_log_sum, valid_count, kept, entropy, *tensors = saved
        arguments = {
            "grad": grad,
            **dict(zip(OUTPUT_GRADS, of_outputs, strict=True)),
            "row_max": row_max,
            "row_log_sum": row_log_sum,
            "valid_count": valid_count,
            "kept": kept,
            "entropy": entropy,
            **_by_name(tensors),
        }
        if is_traced(valid_count):
            return tuple(torch.ops.thunder_flce.linear_cross_entropy_backward(**arguments, settings=str(settings)))
        return tuple(operators.differentiate(settings, arguments))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, outputs: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(_NO_SECOND_DERIVATIVE)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
        raise RuntimeError(_NO_VMAP)


def check_needed(operands: Mapping[str, Tensor], settings: Settings) -> None:
    """Raises a RuntimeError for an operand that requires a gradient which an operator of these settings has not."""
    for name, operand in operands.items():
        if operand.requires_grad and name not in settings.needs_grad:
            raise RuntimeError(
                f"{name} requires a gradient, but this operator was traced with {name} that did not; trace or export "
                "it with one that does"
            )


def _autograd_kernel(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, terms: Sequence[Tensor], settings: str, **optional: Any
) -> list[Tensor]:
    """Runs a direct call of the operator, such as those in exported programs."""
    bias, known = optional.get("linear_bias"), Settings.parse(settings)
    operands = named_operands(input, linear_weight, bias, list(zip(terms[::2], terms[1::2], strict=True)))
    if not torch.is_grad_enabled() or not any(operand.requires_grad for operand in operands.values()):
        with torch._C._AutoDispatchBelowAutograd():
            call = torch.ops.thunder_flce.linear_cross_entropy
            return call(input, linear_weight, target, terms=terms, settings=settings, **optional)
    check_needed(operands, known)
    given = {"input": input, "linear_weight": linear_weight, "target": target, **optional}
    return list(_apply(known, (*map(given.get, _NAMES), *terms), optional.get("token_inputs") or ()))


operators.library.impl("linear_cross_entropy", _autograd_kernel, "Autograd")
