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

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import thunder.torch as ltorch
import torch
from thunder.core import dtypes
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from torch import Tensor

from thunder_flce import functional
from thunder_flce.execution import engine
from thunder_flce.execution.layout import layout_for
from thunder_flce.execution.operands import Gradients, Operands, SavedStatistics, UpstreamGradients
from thunder_flce.execution.plan import GradientsInForward, Plan, SaveLogits, SaveSomeLogits
from thunder_flce.graph import decomposition, trace_printer
from thunder_flce.graph.executor import FORWARD_TAGS, executor
from thunder_flce.graph.matching.trace_index import loss_dtype
from thunder_flce.graph.trace_arguments import POSITIONAL, loss_of, region_arguments, region_operands, shard_of
from thunder_flce.operation.arguments import check_linear_cross_entropy
from thunder_flce.operation.loss import OUTPUTS, Loss
from thunder_flce.operators import OUTPUT_GRADS, with_all_tokens


@ltorch.torchsymbol(
    functional.linear_cross_entropy,
    inspect.unwrap(functional.linear_cross_entropy),  # In Dynamo's graphs.
    id="thunder_flce.linear_cross_entropy",
    tags=FORWARD_TAGS,
)
def linear_cross_entropy(
    input: TensorProxy,
    linear_weight: TensorProxy,
    target: TensorProxy,
    *,
    linear_bias: TensorProxy | None = None,
    terms: Sequence[tuple[TensorProxy, TensorProxy]] = (),
    weight: TensorProxy | None = None,
    token_weights: TensorProxy | None = None,
    target_weights: TensorProxy | None = None,
    token_inputs: Sequence[TensorProxy] = (),
    num_items: TensorProxy | float | None = None,
    expected_gradient: TensorProxy | float | None = None,
    options: None = None,
    vocab_parallel: str | None = None,
    dtype: dtypes.dtype | None = None,
    needs_grad: tuple[str, ...] | None = None,
    plan: dict[str, Any] | None = None,
    **settings: Any,
) -> TensorProxy | tuple[TensorProxy, ...]:
    """`functional.linear_cross_entropy` in a trace. What it calls is what runs where the executor is not used.

    `settings` are the fields of a `Loss`. `FuseLinearCrossEntropy` sets the loss's dtype (None: as in
    `functional.linear_cross_entropy`), the names of the tensors that need a gradient, the fields of a `Plan` and, where
    ranks divide the vocabulary, those of a `Shard`. `vocab_parallel` is a `VocabParallel` by
    `as_literal`; only the executor knows what to do then.
    """
    settings.pop("shard", None)
    loss = Loss(**{**settings, "token_loss": settings.get("token_loss") or ()})
    if vocab_parallel is not None:
        results = _results_meta(input, loss, dtype)
        return tuple(results) if loss.outputs else results[0]
    given: dict[str, Any] = {"weight": weight, "token_weights": token_weights, "target_weights": target_weights}
    given |= {"token_inputs": token_inputs, "num_items": num_items}
    check_linear_cross_entropy(
        input,
        linear_weight,
        target,
        linear_bias=linear_bias,
        terms=terms,
        expected_gradient=expected_gradient,
        loss=loss,
        **given,
    )
    if options is not None:
        raise ValueError("options is for eager calls; inside thunder.jit, give them to thunder_flce.jit")
    linears = ((input, linear_weight), *terms)
    logits = decomposition.logits(linears, linear_bias, loss=loss, dtype=loss_dtype(input))
    flat_target = ltorch.reshape(target, (-1,) if target_weights is None else (-1, target.shape[-1]))
    flat_target = converted(flat_target, dtypes.int64)
    value, *others = decomposition.loss_and_outputs(logits, flat_target, loss=loss, **given)
    value = value if dtype is None else converted(value, dtype)
    shape = tuple(input.shape[:-1])
    results = [ltorch.reshape(value, shape) if loss.reduction == "none" else value]
    # Reshaped in any case: thunder differentiates nothing of an operation that returns what was computed without grad.
    results += [ltorch.reshape(other, shape if other.ndim else ()) for other in others]
    return tuple(results) if loss.outputs else results[0]


def converted(tensor: TensorProxy, dtype: dtypes.dtype) -> TensorProxy:
    """A tensor in a dtype: itself, without an operation in the trace, where it has that."""
    return tensor if dtypes.to_strong_dtype(tensor.dtype) is dtype else ltorch.to(tensor, dtype)


# The arguments after the tensors are the fields of a `Loss` and of a `Plan`, spelled out, since a trace prints and
# hashes plain values only. Further tensors come by name, since they are hardly ever there. The metas do not declare
# these arguments: what is declared is printed even where it has its default.


def _results_meta(input: TensorProxy, loss: Loss, dtype: dtypes.dtype | None) -> list[TensorProxy]:
    """The loss and its outputs."""
    row_dtype, of_tokens = loss_dtype(input), tuple(input.shape[:-1])
    results = [_new(input, of_tokens if loss.reduction == "none" else (), dtype or row_dtype)]
    for output in (OUTPUTS[name] for name in loss.outputs):
        results.append(_new(input, () if output.is_mean else of_tokens, dtypes.int64 if output.is_index else row_dtype))
    return results


def _new(like: TensorProxy, shape: Sequence[int], dtype: dtypes.dtype) -> TensorProxy:
    return TensorProxy(shape=tuple(shape), device=like.device, dtype=dtype, requires_grad=False)


def _linear_cross_entropy_fwd_meta(
    *tensors: TensorProxy | None, needs_grad: tuple[str, ...], **settings: Any
) -> tuple[TensorProxy, ...]:
    """Mirrors `_linear_cross_entropy_fwd_impl`."""
    region = region_arguments(*tensors, **settings)
    loss, plan, operands = loss_of(region), Plan.of(region), region_operands(region)
    input = region["input"]
    row_dtype, shard = loss_dtype(input), shard_of(region)
    tokens = math.prod(input.shape[:-1]) * (1 if shard is None else shard.token_parts)
    statistics = [_new(input, (tokens,), row_dtype), _new(input, (tokens,), row_dtype), _new(input, (), dtypes.int64)]
    results = _results_meta(input, loss, region.get("dtype")) + statistics
    if isinstance(plan, GradientsInForward):
        gradients = _gradients_meta(operands, needs_grad)
        results += [_new(input, each.shape, row_dtype) for each in gradients] if loss.has_row_gradients else gradients
    if isinstance(plan, SaveLogits | SaveSomeLogits):
        dtype = torch.float32 if plan.float32_logits else dtypes.to_torch_dtype(input.dtype)
        columns = (loss.vocab_size or operands["linear_weight"].shape[0]) if shard is None else shard.columns
        layout = layout_for(columns, dtype=dtype, device_type=input.device.type)
        rows = min(plan.saved_rows, tokens) if isinstance(plan, SaveSomeLogits) else tokens
        results.append(_new(input, (rows, layout.row_stride), dtypes.to_dtype(dtype)))
    return tuple(results)


def _gradients_meta(operands: Mapping[str, TensorProxy], needs_grad: tuple[str, ...]) -> tuple[TensorProxy, ...]:
    return tuple(TensorProxy(like=operands[name], requires_grad=False) for name in needs_grad)


def _needed(gradients: Gradients, region: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """The gradients that were computed, in the shapes of their operands."""
    found = [gradient for gradient in gradients.in_order() if gradient is not None]
    operands = region_operands(region)
    shapes = [operands[name].shape for name in region["needs_grad"]]
    return tuple(gradient.view(shape) for gradient, shape in zip(found, shapes, strict=True))


def _operands(region: Mapping[str, Any]) -> Operands:
    """The operands of a region as the engine takes them."""
    shard = shard_of(region)
    tensors = region if shard is None else with_all_tokens(region, shard)
    return functional.operands_of(tensors, loss_of(region), region["needs_grad"], shard=shard)


def _linear_cross_entropy_fwd_impl(*tensors: Tensor | None, **settings: Any) -> tuple[Tensor, ...]:
    """See `engine.forward`: the loss, its further outputs, the statistics, and what is kept or the needed gradients."""
    region = region_arguments(*tensors, **settings)
    plan = Plan.of(region)
    result = engine.forward(_operands(region), plan)
    value, *outputs = functional.in_shape(region["input"].shape[:-1], (result.loss, *result.outputs))
    if "dtype" in region:
        value = value.to(dtypes.to_torch_dtype(region["dtype"]))
    kept = [] if result.kept is None else [result.kept]
    if isinstance(plan, GradientsInForward):
        kept = [tensor.view(region["input"].shape) for tensor in kept]
    gradients = () if result.gradients is None else _needed(result.gradients, region)
    return (value, *outputs, *result.statistics[:3], *kept, *gradients)


def _linear_cross_entropy_bwd_meta(
    grad: TensorProxy, *tensors: TensorProxy | None, needs_grad: tuple[str, ...], **settings: Any
) -> tuple[TensorProxy, ...]:
    """Mirrors `_linear_cross_entropy_bwd_impl`."""
    return _gradients_meta(region_operands(region_arguments(*tensors, **settings)), needs_grad)


def _linear_cross_entropy_bwd_impl(grad: Tensor, *tensors: Any, **settings: Any) -> tuple[Tensor, ...]:
    """See `engine.backward`: the needed gradients, from the region's tensors and what the forward has saved."""
    region = region_arguments(*tensors, **settings)
    row_max, row_log_sum, valid_count, kept = tensors[len(POSITIONAL) :]
    plan = Plan.of(region)
    if isinstance(plan, GradientsInForward):
        kept = kept.view(-1, kept.shape[-1])
    entropy = region["entropy"].reshape(-1) if "entropy" in region else None
    statistics = SavedStatistics(row_max, row_log_sum, valid_count, entropy)
    upstream = UpstreamGradients(grad, *map(region.get, OUTPUT_GRADS))
    return _needed(engine.backward(_operands(region), plan, statistics, kept, upstream), region)


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
    meta=lambda grad, valid_count, *gradients, **expected: tuple(TensorProxy(like=each) for each in gradients),
    fn=engine.scale_gradients,
    python_printer=trace_printer.print_scaling,
)


def is_region(bsym: BoundSymbol) -> bool:
    """Whether a bound symbol is a `linear_cross_entropy`, called by the user or put there by the transform."""
    return bsym.sym.id == linear_cross_entropy.id
