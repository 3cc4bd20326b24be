"""`linear_cross_entropy` for eager PyTorch, with autograd."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from thunder_flce.execution import engine
from thunder_flce.execution.operands import Operands, SavedStatistics, Term, UpstreamGradients
from thunder_flce.execution.plan import GradientsInForward, LossOnly, Plan
from thunder_flce.execution.row_kernels.torch_rows import statistics_dtype
from thunder_flce.operation.arguments import check_linear_cross_entropy, named_operands
from thunder_flce.operation.loss import DIFFERENTIABLE_OUTPUTS, Loss
from thunder_flce.operation.problem import Problem, TermShape
from thunder_flce.options import Options, as_options
from thunder_flce.planning.choose import cached_plan


# Dynamo, which torch.compile and thunderfx trace with, would trace into the engine, which depends on the data.
@torch.compiler.disable(reason="linear_cross_entropy runs as it is, between two graphs")
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    z_loss: float = 0.0,
    vocab_size: int | None = None,
    num_items: Tensor | float | None = None,
    expected_gradient: Tensor | float | None = None,
    outputs: tuple[str, ...] = (),
    terms: Sequence[tuple[Tensor, Tensor]] = (),
    options: Options | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Cross-entropy of a linear layer's output, without ever holding all of that output.

    Computes ``cross_entropy(logits, target, ...)`` a chunk of tokens at a time, for

        logits = softcap * tanh(logit_scale * linear(input, linear_weight, linear_bias).float() / softcap)

    Works eagerly, with autograd, and inside `thunder.jit`. Under `torch.autocast`, the linears' operands are cast. The
    formulas are in `operation.loss`.

    Args:
        input: (..., H) float16, bfloat16, float32 or float64: the hidden states.
        linear_weight: (V, H), input's dtype and device.
        target: (...) integers in [0, V), or ignore_index.
        linear_bias: (V,), input's dtype and device.
        weight: (V,) class weights, of input's dtype or float32; they get no gradient.
        reduction: "mean" over the targets that are not ignored (over their class weights, where there are any), "sum"
            or "none".
        ignore_index: targets of this value contribute neither to the loss nor to a gradient; may lie in [0, V).
        label_smoothing: as in `torch.nn.functional.cross_entropy`, between 0 and 1.
        softcap: positive; None for none.
        logit_scale: what the logits are multiplied by before the softcap; not 0.
        z_loss: adds z_loss · lse² for each valid token, lse being the log-sum-exp of its logits; not weighted by class
            weights, and averaged over the valid tokens for "mean".
        vocab_size: only the first vocab_size rows of linear_weight are columns of the logits (1 to V); the others, such
            as padding, get gradients of zero. None: all V.
        num_items: what "mean" divides by, in place of what it counts: such as the number of valid tokens of all
            micro-batches and ranks. A number or a tensor without dimensions, on input's device, which the host never
            waits for. Where it is 0, so are the loss and the gradients.
        outputs: names of what is to be returned beside the loss, from the same logits. (...) each in the loss's dtype
            and 0 for ignored tokens: "log_prob", the target's log-probability, and "entropy", both differentiable;
            "mean_logit", the mean of the logits over their columns (NaN where the largest is infinite), and
            "log_sum_sq_probs", the logarithm of the sum of the squared probabilities, without gradients. "argmax",
            (...) int64, the column of the largest logit before a softcap, which keeps their order but may make equals
            of the largest; for it, ignored tokens are computed, too; "valid_argmax", the same for less, since it is -1
            for ignored tokens; "accuracy", (), the fraction of the valid tokens whose argmax is their target. These
            three have no gradient, and take a pass of their own.
        terms: further linears that are added to the logits, such as a low-rank adapter beside the head: pairs of an
            input (..., H_i) and a weight (V, H_i), of input's dtype and device.
        expected_gradient: the upstream gradient of the loss that gradients in the forward are finished for, where it is
            not 1: a number, or a tensor without dimensions on input's device, such as a `GradScaler`'s scale, which the
            host never waits for; neither 0 nor infinite. Another upstream gradient is right, too, but then 16-bit
            gradients are rounded once more. With it, float16 gradients may be computed in the forward, too.
        options: choices about time and memory; eager calls only. Inside `thunder.jit`, give them to `thunder_flce.jit`
            or to `FuseLinearCrossEntropy`.

    Returns:
        The loss, float32 (float64 for float64 input): () or, for reduction "none", (...). With "mean" and no valid
        target, NaN, with gradients of zeros, as `torch.nn.functional.cross_entropy`. With outputs, a tuple of the loss
        and of these, in their order.

    Raises:
        IndexError: where a target is neither in [0, V) nor ignore_index.
        TypeError, ValueError: see `arguments.check_linear_cross_entropy`.
    """
    options = as_options(options)
    loss = Loss(
        reduction=reduction,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        logit_scale=logit_scale,
        softcap=softcap,
        z_loss=z_loss,
        vocab_size=vocab_size,
        outputs=outputs,
    )
    input, linear_weight, linear_bias, terms = _autocast((input, linear_weight, linear_bias, terms))
    arguments = {
        "input": input,
        "linear_weight": linear_weight,
        "target": target,
        "linear_bias": linear_bias,
        "terms": terms,
        "weight": weight,
        "num_items": num_items,
        "expected_gradient": options.expected_gradient if expected_gradient is None else expected_gradient,
    }
    check_linear_cross_entropy(**arguments, loss=loss)
    tensors = named_operands(input, linear_weight, linear_bias, terms)
    needs_grad = [name for name, tensor in tensors.items() if tensor.requires_grad and torch.is_grad_enabled()]
    operands = operands_of(arguments, loss, needs_grad)
    plan = plan_for(operands, options)
    results = in_shape_of(target, _LinearCrossEntropy.apply(operands, plan, *_tensors_of(operands)))
    return results if outputs else results[0]


def operands_of(arguments: Mapping[str, Any], loss: Loss, needs_grad: Collection[str]) -> Operands:
    """What the engine takes.

    Args:
        arguments: those of `linear_cross_entropy` by name; others are passed over.
        loss: the loss.
        needs_grad: of the names of `named_operands`, those whose gradient is needed.
    """
    input, target = arguments["input"], arguments["target"]
    linears = [*named_operands(input, arguments["linear_weight"], None, arguments["terms"]).items()]
    return Operands(
        terms=tuple(
            Term(
                x=x.reshape(target.numel(), x.shape[-1]),
                weight=weight,
                input_grad=of_input in needs_grad,
                weight_grad=of_weight in needs_grad,
            )
            for (of_input, x), (of_weight, weight) in zip(linears[::2], linears[1::2], strict=True)
        ),
        bias=arguments["linear_bias"],
        target=target.reshape(-1),
        loss=loss,
        class_weight=arguments["weight"],
        **{name: _as_row_scalar(arguments[name], target, statistics_dtype(input.dtype)) for name in _ROW_SCALARS},
        bias_grad="linear_bias" in needs_grad,
    )


def in_shape_of(target: Tensor, results: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Results of the engine, those with one number a token in the target's shape."""
    return tuple(result.reshape(target.shape) if result.ndim else result for result in results)


def _autocast(operands: tuple[Any, ...]) -> tuple[Any, ...]:
    """Under `torch.autocast`, the linears' operands in its dtype, but for float64, as `torch.nn.functional.linear`."""
    device_type = operands[0].device.type if isinstance(operands[0], Tensor) else "cpu"
    if not torch.is_autocast_enabled(device_type):
        return operands
    dtype = torch.get_autocast_dtype(device_type)

    def cast(operand: Any) -> Any:
        if isinstance(operand, list | tuple):
            return tuple(map(cast, operand))
        is_cast = isinstance(operand, Tensor) and operand.is_floating_point() and operand.dtype is not torch.float64
        return operand.to(dtype) if is_cast else operand

    return cast(operands)


_ROW_SCALARS = ("num_items", "expected_gradient")


def _as_row_scalar(number: Tensor | float | None, like: Tensor, dtype: torch.dtype) -> Tensor | None:
    """A number as a tensor of a dtype, on the device of `like`."""
    if number is None:
        return None
    if isinstance(number, Tensor):
        return number.to(dtype)
    return torch.full((), number, dtype=dtype, device=like.device)


def problem_of(operands: Operands, options: Options) -> Problem:
    """What is known of a call before it runs."""
    return Problem(
        tokens=operands.tokens,
        terms=tuple(
            TermShape(hidden=term.x.shape[1], input_grad=term.input_grad, weight_grad=term.weight_grad)
            for term in operands.terms
        ),
        vocab=operands.vocab,
        weight_rows=operands.weight_rows,
        dtype=operands.dtype,
        device_type=operands.device.type,
        loss=operands.loss,
        has_bias=operands.bias is not None,
        bias_grad=operands.bias_grad,
        has_class_weight=operands.class_weight is not None,
        has_num_items=operands.num_items is not None,
        has_expected_gradient=operands.expected_gradient is not None,
        float32_logits=options.has_float32_logits(operands.dtype),
    )


def plan_for(operands: Operands, options: Options) -> Plan:
    """The plan for tensors that are there."""
    return cached_plan(problem_of(operands, options), options, operands.device)


def _tensors_of(operands: Operands) -> tuple[Tensor | None, ...]:
    """All tensors, in the order that autograd sees: those of the linears first, as `Gradients.in_order` has them."""
    head, *others = operands.terms
    of_others = [tensor for term in others for tensor in (term.x, term.weight)]
    plain = (operands.target, operands.class_weight, operands.num_items)
    return (head.x, head.weight, operands.bias, *of_others, *plain)


def _with_tensors(operands: Operands, tensors: Sequence[Any]) -> Operands:
    """The operands with other tensors, in the order of `_tensors_of`."""
    x, weight, bias, *of_others, target, class_weight, num_items = tensors
    pairs = [(x, weight), *zip(of_others[::2], of_others[1::2], strict=True)]
    terms = tuple(replace(term, x=x, weight=w) for term, (x, w) in zip(operands.terms, pairs, strict=True))
    return replace(operands, terms=terms, bias=bias, target=target, class_weight=class_weight, num_items=num_items)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, operands: Operands, plan: Plan, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        result = engine.forward(operands, plan)
        ctx.plan = plan
        # Tensors are kept by autograd alone.
        ctx.operands = _with_tensors(operands, [None] * len(tensors))
        ctx.tensors = len(tensors)
        ctx.set_materialize_grads(False)
        outputs = dict(zip(operands.loss.outputs, result.outputs, strict=True))
        ctx.mark_non_differentiable(*(out for name, out in outputs.items() if name not in DIFFERENTIABLE_OUTPUTS))
        if result.gradients is not None:
            expected = operands.expected_gradient
            ctx.save_for_backward(expected, result.statistics.valid_count, *result.gradients.in_order())
        elif not isinstance(plan, LossOnly):
            ctx.save_for_backward(*tensors, *result.statistics, result.logits)
        return result.loss, *result.outputs

    @staticmethod
    def backward(ctx: Any, grad: Any, *output_grads: Tensor | None) -> tuple[Tensor | None, ...]:
        # Under create_graph, once_differentiable would return gradients that silently lack their own.
        if torch.is_grad_enabled():
            raise RuntimeError("linear_cross_entropy has no second derivative; call backward without create_graph=True")
        if isinstance(ctx.plan, GradientsInForward):
            expected, *saved = ctx.saved_tensors
            gradients = engine.scale_gradients(grad, *saved, expected_gradient=expected)
        else:
            saved = ctx.saved_tensors
            tensors, (*statistics, logits) = saved[: ctx.tensors], saved[ctx.tensors :]
            operands = _with_tensors(ctx.operands, tensors)
            grads = dict(zip(operands.loss.outputs, output_grads, strict=True))
            upstream = UpstreamGradients(grad, grads.get("log_prob"), grads.get("entropy"))
            found = engine.backward(operands, ctx.plan, SavedStatistics(*statistics), logits, upstream)
            gradients = found.in_order()
        return None, None, *gradients, None, None, None
