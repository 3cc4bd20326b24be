"""`linear_cross_entropy` for eager PyTorch, with autograd."""

from typing import Any

import torch
from torch import Tensor

from thunder_flce import engine
from thunder_flce.arguments import check_linear_cross_entropy
from thunder_flce.engine import Operands, SavedStatistics
from thunder_flce.options import Options
from thunder_flce.plan import Plan, Problem, make_plan


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
    options: Options | None = None,
) -> Tensor:
    """Cross-entropy of a linear layer's output, without ever holding all of that output.

    Computes ``cross_entropy(linear(input, linear_weight, linear_bias).float(), target, ...)`` a chunk of tokens at a
    time. Works eagerly, with autograd, and inside `thunder.jit`.

    Args:
        input: (..., H) float16, bfloat16, float32 or float64: the hidden states.
        linear_weight: (V, H), input's dtype and device.
        target: (...) integers in [0, V), or ignore_index.
        linear_bias: (V,), input's dtype and device.
        weight: (V,) class weights. Not supported yet.
        reduction: "mean" over the targets that are not ignored, "sum" or "none".
        ignore_index: targets of this value contribute neither to the loss nor to a gradient; may lie in [0, V).
        label_smoothing: Not supported yet.
        softcap: Not supported yet.
        logit_scale: Not supported yet.
        z_loss: Not supported yet.
        options: choices about time and memory; eager calls only. Inside `thunder.jit`, give them to `thunder_flce.jit`
            or to `FuseLinearCrossEntropy`.

    Returns:
        float32 (float64 for float64 input): () or, for reduction "none", (...). With "mean" and no valid target, NaN,
        with gradients of zeros, as `torch.nn.functional.cross_entropy`.

    Raises:
        IndexError: where a target is neither in [0, V) nor ignore_index.
        TypeError, ValueError, NotImplementedError: see `arguments.check_linear_cross_entropy`.
    """
    check_linear_cross_entropy(
        input,
        linear_weight,
        target,
        linear_bias=linear_bias,
        weight=weight,
        reduction=reduction,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        softcap=softcap,
        logit_scale=logit_scale,
        z_loss=z_loss,
    )
    needs_grad = [
        tensor is not None and tensor.requires_grad and torch.is_grad_enabled()
        for tensor in (input, linear_weight, linear_bias)
    ]
    operands = Operands(
        input.reshape(target.numel(), input.shape[-1]),
        linear_weight,
        linear_bias,
        target.reshape(-1),
        ignore_index=int(ignore_index),
        reduction=reduction,
        input_grad=needs_grad[0],
        weight_grad=needs_grad[1],
        bias_grad=needs_grad[2],
    )
    plan = plan_for(operands, options or Options())
    loss = _LinearCrossEntropy.apply(operands.x, operands.weight, operands.bias, operands, plan)
    return loss.reshape(target.shape) if reduction == "none" else loss


def plan_for(operands: Operands, options: Options) -> Plan:
    """The plan for tensors that are there."""
    x = operands.x
    problem = Problem(
        tokens=x.shape[0],
        hidden=x.shape[1],
        vocab=operands.vocab,
        dtype=x.dtype,
        device_type=x.device.type,
        reduction=operands.reduction,
        input_grad=operands.input_grad,
        weight_grad=operands.weight_grad,
        bias_grad=operands.bias_grad,
        has_bias=operands.bias is not None,
    )
    return make_plan(problem, options, device_bytes=device_bytes(x.device))


def device_bytes(device: torch.device) -> int | None:
    """Total memory of a CUDA device, in bytes; None for any other device."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, operands: Operands, plan: Plan) -> Tensor:
        result = engine.forward(operands, plan)
        ctx.plan = plan
        ctx.settings = {
            name: getattr(operands, name)
            for name in ("ignore_index", "reduction", "input_grad", "weight_grad", "bias_grad")
        }
        if plan.strategy == "gradients_in_forward":
            ctx.save_for_backward(result.statistics.valid_count, *result.gradients)
        elif plan.strategy != "loss_only":
            ctx.save_for_backward(x, weight, bias, operands.target, *result.statistics, result.logits)
        return result.loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # Under create_graph, once_differentiable would return gradients that silently lack their own.
        if torch.is_grad_enabled():
            raise RuntimeError("linear_cross_entropy has no second derivative; call backward without create_graph=True")
        if ctx.plan.strategy == "gradients_in_forward":
            gradients = engine.scale_gradients(grad, *ctx.saved_tensors)
        else:
            x, weight, bias, target, *statistics, logits = ctx.saved_tensors
            operands = Operands(x, weight, bias, target, **ctx.settings)
            gradients = engine.backward(operands, ctx.plan, SavedStatistics(*statistics), logits, grad)
        return *gradients, None, None
