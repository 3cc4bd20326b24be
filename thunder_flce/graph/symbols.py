"""The thunder symbols of this project and what runs them on torch tensors.

==========================  ======================================================================================
symbol                      what it stands for
==========================  ======================================================================================
linear_cross_entropy        the region; its subsymbols are the plain decomposition, linear then cross_entropy
linear_cross_entropy_fwd    its forward: the loss, the rows' statistics, and what else the plan keeps
linear_cross_entropy_bwd    its backward, for plans that compute the gradients there
scale_gradients             its backward, for plans that computed the gradients in the forward
==========================  ======================================================================================

All but the first belong to the executor `flce` and are primitives: opaque to every pass, and tagged so that no pass
computes a forward again in the backward.

The forwards return the loss, row_max, row_log_sum (relative to row_max) and valid_count; see `engine`.
"""

from collections.abc import Sequence
from typing import Any

import thunder.torch as ltorch
import torch
from thunder.core import dtypes
from thunder.core.proxies import TensorProxy
from torch import Tensor

from thunder_flce import functional
from thunder_flce.execution import engine
from thunder_flce.execution.layout import layout_for
from thunder_flce.execution.operands import Gradients, Operands, SavedStatistics, Term, UpstreamGradients
from thunder_flce.execution.plan import GradientsInForward, Plan, SaveLogits, SaveSomeLogits
from thunder_flce.execution.row_kernels.torch_rows import statistics_dtype
from thunder_flce.graph import decomposition, trace_printer
from thunder_flce.graph.executor import FORWARD_TAGS, executor, loss_dtype
from thunder_flce.graph.trace_arguments import loss_of
from thunder_flce.operation.arguments import check_linear_cross_entropy, named_operands
from thunder_flce.operation.loss import OUTPUTS, Loss


@ltorch.torchsymbol(functional.linear_cross_entropy, id="thunder_flce.linear_cross_entropy", tags=FORWARD_TAGS)
def linear_cross_entropy(
    input: TensorProxy,
    linear_weight: TensorProxy,
    target: TensorProxy,
    *,
    linear_bias: TensorProxy | None = None,
    terms: Sequence[tuple[TensorProxy, TensorProxy]] = (),
    weight: TensorProxy | None = None,
    num_items: TensorProxy | float | None = None,
    options: None = None,
    dtype: dtypes.dtype | None = None,
    needs_grad: tuple[str, ...] | None = None,
    plan: dict[str, Any] | None = None,
    **settings: Any,
) -> TensorProxy | tuple[TensorProxy, ...]:
    """`functional.linear_cross_entropy` in a trace. What it calls is what runs where the executor is not used.

    `settings` are the fields of a `Loss`. `FuseLinearCrossEntropy` sets the loss's dtype (None: as in
    `functional.linear_cross_entropy`), the names of the tensors that need a gradient, and the fields of a `Plan`.
    """
    loss = Loss(**settings)
    tensors = {"linear_bias": linear_bias, "terms": terms, "weight": weight, "num_items": num_items}
    check_linear_cross_entropy(input, linear_weight, target, **tensors, loss=loss)
    if options is not None:
        raise ValueError("options is for eager calls; inside thunder.jit, give them to thunder_flce.jit")
    linears = ((input, linear_weight), *terms)
    logits = decomposition.logits(linears, linear_bias, loss=loss, dtype=loss_dtype(input))
    flat_target = ltorch.reshape(target, (-1,))
    if dtypes.to_strong_dtype(target.dtype) is not dtypes.int64:
        flat_target = ltorch.to(flat_target, dtypes.int64)
    value, *others = decomposition.loss_and_outputs(logits, flat_target, weight, num_items, loss)
    if dtype is not None and dtype != value.dtype:
        value = ltorch.to(value, dtype)
    results = [ltorch.reshape(value, target.shape) if loss.reduction == "none" else value]
    # Reshaped in any case: thunder differentiates nothing of an operation that returns what was computed without grad.
    results += [ltorch.reshape(other, target.shape if other.ndim else ()) for other in others]
    return tuple(results) if loss.outputs else results[0]


# The arguments after the tensors are the fields of a `Loss` and of a `Plan`, spelled out, since a trace prints and
# hashes plain values only. Class weights and num_items come by name, since they are hardly ever there.


def _linear_cross_entropy_fwd_meta(
    input: TensorProxy,
    linear_weight: TensorProxy,
    target: TensorProxy,
    linear_bias: TensorProxy | None,
    *,
    needs_grad: tuple[str, ...],
    **settings: Any,
) -> tuple[TensorProxy, ...]:
    """Mirrors `_linear_cross_entropy_fwd_impl`; a trace prints optional arguments only where they are not declared."""
    loss, plan = loss_of(settings), Plan.of(settings)
    row_dtype, tokens = loss_dtype(input), target.numel

    def new(shape: Sequence[int], dtype: dtypes.dtype = row_dtype) -> TensorProxy:
        return TensorProxy(shape=tuple(shape), device=input.device, dtype=dtype, requires_grad=False)

    results = [new(target.shape if loss.reduction == "none" else (), settings.get("dtype") or row_dtype)]
    for output in map(OUTPUTS.__getitem__, loss.outputs):
        results.append(new(() if output.is_mean else target.shape, dtypes.int64 if output.is_index else row_dtype))
    results += [new((tokens,)), new((tokens,)), new((), dtypes.int64)]
    if isinstance(plan, GradientsInForward):
        tensors = named_operands(input, linear_weight, linear_bias, settings.get("terms", ()))
        results += [TensorProxy(like=tensors[name], requires_grad=False) for name in needs_grad]
    elif isinstance(plan, SaveLogits | SaveSomeLogits):
        dtype = torch.float32 if plan.float32_logits else dtypes.to_torch_dtype(input.dtype)
        layout = layout_for(loss.vocab_size or linear_weight.shape[0], dtype=dtype, device_type=input.device.type)
        rows = min(plan.saved_rows, tokens) if isinstance(plan, SaveSomeLogits) else tokens
        results.append(new((rows, layout.row_stride), dtypes.to_dtype(dtype)))
    return tuple(results)


def _operands(
    pairs: Sequence[tuple[Tensor, Tensor]],
    target: Tensor,
    bias: Tensor | None,
    *,
    weight: Tensor | None,
    num_items: Tensor | float | None,
    needs_grad: tuple[str, ...],
    loss: Loss,
) -> Operands:
    """The engine's operands, from the inputs and weights of the linears and what else the symbols take."""
    names = ["input", "linear_weight"]
    names += [f"terms[{number}].{kind}" for number in range(len(pairs) - 1) for kind in ("input", "weight")]
    needed = iter([name in needs_grad for name in names])
    return Operands(
        terms=tuple(
            Term(
                x=x.reshape(target.numel(), x.shape[-1]),
                weight=of_x,
                input_grad=next(needed),
                weight_grad=next(needed),
            )
            for x, of_x in pairs
        ),
        bias=bias,
        target=target.reshape(-1),
        loss=loss,
        class_weight=weight,
        num_items=functional.as_row_scalar(num_items, target, dtype=statistics_dtype(pairs[0][0].dtype)),
        bias_grad="linear_bias" in needs_grad,
    )


def _needed(gradients: Gradients, pairs: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """The gradients that are there, those of the inputs in their shapes."""
    shaped = tuple(None if dx is None else dx.view(x.shape) for dx, (x, _) in zip(gradients.inputs, pairs, strict=True))
    return [gradient for gradient in gradients._replace(inputs=shaped).in_order() if gradient is not None]


def _linear_cross_entropy_fwd_impl(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    *,
    terms: Sequence[tuple[Tensor, Tensor]] = (),
    weight: Tensor | None = None,
    num_items: Tensor | float | None = None,
    needs_grad: tuple[str, ...],
    dtype: dtypes.dtype | None = None,
    **settings: Any,
) -> tuple[Tensor, ...]:
    """See `engine.forward`: the loss, its further outputs, the statistics, and the logits or the needed gradients."""
    loss, plan = loss_of(settings), Plan.of(settings)
    pairs = ((input, linear_weight), *terms)
    operands = _operands(
        pairs, target, linear_bias, weight=weight, num_items=num_items, needs_grad=needs_grad, loss=loss
    )
    result = engine.forward(operands, plan)
    value = result.loss.reshape(target.shape) if loss.reduction == "none" else result.loss
    outputs = [value if dtype is None else value.to(dtypes.to_torch_dtype(dtype))]
    outputs += [output.reshape(target.shape) if output.ndim else output for output in result.outputs]
    outputs += result.statistics[:3]
    if result.logits is not None:
        outputs.append(result.logits)
    if result.gradients is not None:
        outputs += _needed(result.gradients, pairs)
    return tuple(outputs)


def _linear_cross_entropy_bwd_meta(
    grad: TensorProxy,
    input: TensorProxy,
    linear_weight: TensorProxy,
    target: TensorProxy,
    linear_bias: TensorProxy | None,
    *statistics_and_logits: TensorProxy | None,
    needs_grad: tuple[str, ...],
    **settings: Any,
) -> tuple[TensorProxy, ...]:
    """Mirrors `_linear_cross_entropy_bwd_impl`."""
    tensors = named_operands(input, linear_weight, linear_bias, settings.get("terms", ()))
    return tuple(TensorProxy(like=tensors[name], requires_grad=False) for name in needs_grad)


def _linear_cross_entropy_bwd_impl(
    grad: Tensor,
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    row_max: Tensor,
    row_log_sum: Tensor,
    valid_count: Tensor,
    logits: Tensor | None,
    *,
    terms: Sequence[tuple[Tensor, Tensor]] = (),
    weight: Tensor | None = None,
    num_items: Tensor | float | None = None,
    log_prob_grad: Tensor | None = None,
    entropy_grad: Tensor | None = None,
    entropy: Tensor | None = None,
    needs_grad: tuple[str, ...],
    **settings: Any,
) -> tuple[Tensor, ...]:
    """See `engine.backward`. Returns the needed gradients."""
    loss, plan = loss_of(settings), Plan.of(settings)
    pairs = ((input, linear_weight), *terms)
    operands = _operands(
        pairs, target, linear_bias, weight=weight, num_items=num_items, needs_grad=needs_grad, loss=loss
    )
    statistics = SavedStatistics(row_max, row_log_sum, valid_count, None if entropy is None else entropy.reshape(-1))
    upstream = UpstreamGradients(grad, log_prob_grad, entropy_grad)
    gradients = engine.backward(operands, plan, statistics, logits, upstream)
    return tuple(_needed(gradients, pairs))


def _scale_gradients_meta(
    grad: TensorProxy, valid_count: TensorProxy, *gradients: TensorProxy
) -> tuple[TensorProxy, ...]:
    """Mirrors `engine.scale_gradients`."""
    return tuple(TensorProxy(like=gradient) for gradient in gradients)


linear_cross_entropy_fwd = executor.register_operator(
    "linear_cross_entropy_fwd",
    meta=_linear_cross_entropy_fwd_meta,
    fn=_linear_cross_entropy_fwd_impl,
    tags=FORWARD_TAGS,
    python_printer=trace_printer.print_forward,
)
linear_cross_entropy_bwd = executor.register_operator(
    "linear_cross_entropy_bwd",
    meta=_linear_cross_entropy_bwd_meta,
    fn=_linear_cross_entropy_bwd_impl,
    python_printer=trace_printer.print_backward,
)
scale_gradients = executor.register_operator(
    "scale_gradients",
    meta=_scale_gradients_meta,
    fn=engine.scale_gradients,
    python_printer=trace_printer.print_scaling,
)
