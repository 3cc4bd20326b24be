"""`linear_cross_entropy` for eager PyTorch, with autograd."""

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from thunder_flce.execution import engine
from thunder_flce.execution.engine import Operands, SavedStatistics
from thunder_flce.execution.row_kernels.torch_rows import statistics_dtype
from thunder_flce.operation.arguments import check_linear_cross_entropy
from thunder_flce.operation.loss import DIFFERENTIABLE_OUTPUTS, IncomingGradients, Loss
from thunder_flce.options import Options, as_options
from thunder_flce.planning.plan import DeviceMemory, Plan, Problem, make_plan


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
    outputs: tuple[str, ...] = (),
    options: Options | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Cross-entropy of a linear layer's output, without ever holding all of that output.

    Computes ``cross_entropy(logits, target, ...)`` a chunk of tokens at a time, for ``logits = softcap * tanh(
    logit_scale * linear(input, linear_weight, linear_bias).float() / softcap)``. Works eagerly, with autograd, and
    inside `thunder.jit`. Under `torch.autocast` it is the linear
    that is cast. The formulas are in `loss`.

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
        outputs: names of what is to be returned beside the loss, from the same pass: "log_prob", the target's
            log-probability, and "entropy", both (...) in the loss's dtype, differentiable, 0 for ignored tokens;
            "argmax", (...) int64, the column of the largest logit before a softcap, which keeps their order but may
            make equals of the largest; for it, ignored tokens are computed, too;
            "valid_argmax", the same for less, since it is -1 for ignored tokens; "accuracy", (), the fraction of the
            valid tokens whose argmax is their target. The last three have no gradient.
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
    input, linear_weight, linear_bias = _autocast(input, linear_weight, linear_bias)
    check_linear_cross_entropy(
        input, linear_weight, target, linear_bias=linear_bias, weight=weight, num_items=num_items, loss=loss
    )
    needs_grad = [
        tensor is not None and tensor.requires_grad and torch.is_grad_enabled()
        for tensor in (input, linear_weight, linear_bias)
    ]
    operands = Operands(
        x=input.reshape(target.numel(), input.shape[-1]),
        weight=linear_weight,
        bias=linear_bias,
        target=target.reshape(-1),
        loss=loss,
        class_weight=weight,
        num_items=as_row_scalar(num_items, input),
        input_grad=needs_grad[0],
        weight_grad=needs_grad[1],
        bias_grad=needs_grad[2],
    )
    plan = plan_for(operands, as_options(options))
    value, *others = _LinearCrossEntropy.apply(operands.x, operands.weight, operands.bias, operands, plan)
    results = [value.reshape(target.shape) if reduction == "none" else value]
    results += [other.reshape(target.shape) if other.ndim else other for other in others]
    return tuple(results) if outputs else results[0]


def _autocast(*operands: Any) -> tuple[Any, ...]:
    """Under `torch.autocast`, the linear's operands in its dtype, but for float64, as `torch.nn.functional.linear`."""
    device_type = operands[0].device.type if isinstance(operands[0], Tensor) else "cpu"
    if not torch.is_autocast_enabled(device_type):
        return operands
    dtype = torch.get_autocast_dtype(device_type)

    def cast(operand: Any) -> Any:
        is_cast = isinstance(operand, Tensor) and operand.is_floating_point() and operand.dtype is not torch.float64
        return operand.to(dtype) if is_cast else operand

    return tuple(map(cast, operands))


def as_row_scalar(number: Tensor | float | None, like: Tensor) -> Tensor | None:
    """num_items as a tensor of the dtype that rows of `like` are computed in, on its device."""
    if number is None:
        return None
    dtype = statistics_dtype(like.dtype)
    if isinstance(number, Tensor):
        return number.to(dtype)
    return torch.full((), number, dtype=dtype, device=like.device)


def plan_for(operands: Operands, options: Options) -> Plan:
    """The plan for tensors that are there."""
    x = operands.x
    problem = Problem(
        tokens=x.shape[0],
        hidden=x.shape[1],
        vocab=operands.vocab,
        dtype=x.dtype,
        device_type=x.device.type,
        row_gradients=operands.loss.has_row_gradients,
        every_row=operands.loss.needs_every_row,
        is_plain_loss=operands.loss.is_plain,
        input_grad=operands.input_grad,
        weight_grad=operands.weight_grad,
        bias_grad=operands.bias_grad,
        float32_logits=options.has_float32_logits(x.dtype),
    )
    return cached_plan(problem, options, x.device)


@lru_cache(maxsize=1024)
def cached_plan(problem: Problem, options: Options, device: torch.device) -> Plan:
    """`make_plan` with the memory that the device has when a problem is first met: afterwards its plan stays."""
    return make_plan(problem, options, memory=device_memory(device))


def device_memory(device: torch.device) -> DeviceMemory | None:
    """The memory of a CUDA device; None for any other device, and without a GPU."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return DeviceMemory(total, free + cached)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, operands: Operands, plan: Plan
    ) -> tuple[Tensor, ...]:
        result = engine.forward(operands, plan)
        ctx.plan = plan
        # Tensors are kept by autograd alone.
        ctx.operands = replace(operands, **dict.fromkeys(_TENSORS))
        ctx.set_materialize_grads(False)
        outputs = dict(zip(operands.loss.outputs, result.outputs, strict=True))
        ctx.mark_non_differentiable(*(out for name, out in outputs.items() if name not in DIFFERENTIABLE_OUTPUTS))
        if plan.strategy == "gradients_in_forward":
            ctx.save_for_backward(result.statistics.valid_count, *result.gradients)
        elif plan.strategy != "loss_only":
            tensors = (x, weight, bias, *(getattr(operands, name) for name in _TENSORS[3:]))
            ctx.save_for_backward(*tensors, *result.statistics, result.logits)
        return result.loss, *result.outputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *output_grads: Tensor | None) -> tuple[Tensor | None, ...]:
        # Under create_graph, once_differentiable would return gradients that silently lack their own.
        if torch.is_grad_enabled():
            raise RuntimeError("linear_cross_entropy has no second derivative; call backward without create_graph=True")
        if ctx.plan.strategy == "gradients_in_forward":
            gradients = engine.scale_gradients(grad, *ctx.saved_tensors)
        else:
            saved = ctx.saved_tensors
            tensors, (*statistics, logits) = saved[: len(_TENSORS)], saved[len(_TENSORS) :]
            operands = replace(ctx.operands, **dict(zip(_TENSORS, tensors, strict=True)))
            grads = dict(zip(operands.loss.outputs, output_grads, strict=True))
            incoming = IncomingGradients(grad, grads.get("log_prob"), grads.get("entropy"))
            gradients = engine.backward(operands, ctx.plan, SavedStatistics(*statistics), logits, incoming)
        return *gradients, None, None


_TENSORS = ("x", "weight", "bias", "target", "class_weight", "num_items")
"""The fields of `Operands` that are tensors; those that autograd differentiates come first."""
