"""The executor `flce`, the symbols of a region, and what runs them on torch tensors.

=============================  ===================================================================================
symbol                         what it stands for
=============================  ===================================================================================
linear_cross_entropy           the region; its subsymbols are the plain decomposition, linear then cross_entropy
flce_linear_cross_entropy_fwd  its forward: what `operation.call.result_names` names
flce_linear_cross_entropy_bwd  its backward, for plans that compute the gradients there
flce_scale_gradients           its backward, for plans that computed the gradients in the forward
=============================  ===================================================================================

All but the first belong to the executor `flce` and are primitives: opaque to every pass, and tagged so that no pass
computes a forward again in the backward. `operators` runs them.
"""

import inspect
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import thunder.torch as ltorch
from thunder.core import devices, dtypes
from thunder.core.prims import OpTags
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.extend import OperatorExecutor, register_executor
from torch import Tensor

from thunder_flce import calls, functional, operators
from thunder_flce.engine.kernels.scaling import graph_is_kept, scaled_gradients
from thunder_flce.engine.plan import LOSS_ONLY, Plan
from thunder_flce.graph import decomposition, trace_printer
from thunder_flce.graph.reading import loss_dtype
from thunder_flce.graph.trace_arguments import OUTPUT_GRADS, POSITIONAL, call_of, region_arguments, specs
from thunder_flce.operation.call import ARGUMENTS, Call, Spec, named_tensors, result_specs
from thunder_flce.operation.checks import check_call
from thunder_flce.operation.loss import Loss
from thunder_flce.operators import Settings

executor = OperatorExecutor("flce", version="0.1")
register_executor(executor)

# No pass may run a forward again in the backward: nvFuser's rematerialisation skips REDUCTION_OP, thunder's own skips
# DONT_RECOMPUTE_IN_BACKWARD.
FORWARD_TAGS = (OpTags.REDUCTION_OP, OpTags.DONT_RECOMPUTE_IN_BACKWARD)


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
    loss = Loss(**{**settings, "token_loss": settings.get("token_loss") or ""})
    given: dict[str, Any] = {
        "linear_bias": linear_bias, "terms": terms, "weight": weight, "token_weights": token_weights,
        "target_weights": target_weights, "token_inputs": token_inputs, "num_items": num_items,
    }  # fmt: skip
    tensors = {"input": input, "linear_weight": linear_weight, "target": target, **given}
    if vocab_parallel is not None:
        call = Call(tensors=named_tensors(tensors), loss=loss)
        results = _metas(call, Plan(strategy=LOSS_ONLY), dtype)
        return results if loss.outputs else results[0]
    check_call({**tensors, "expected_gradient": expected_gradient}, loss=loss)
    if options is not None:
        raise ValueError("options is for eager calls; inside thunder.jit, give them to thunder_flce.jit")
    linears = ((input, linear_weight), *given.pop("terms"))
    logits = decomposition.logits(linears, given.pop("linear_bias"), loss=loss, dtype=loss_dtype(input))
    flat_target = ltorch.reshape(target, (-1,) if target_weights is None else (-1, target.shape[-1]))
    flat_target = converted(flat_target, dtypes.int64)
    value, *others = decomposition.loss_and_outputs(logits, flat_target, loss=loss, **given)
    value = value if dtype is None else converted(value, dtype)
    shape = tuple(input.shape[:-1])
    found = [ltorch.reshape(value, shape) if loss.reduction == "none" else value]
    # Reshaped in any case: thunder differentiates nothing of an operation that returns what was computed without grad.
    found += [ltorch.reshape(other, shape if other.ndim else ()) for other in others]
    return tuple(found) if loss.outputs else found[0]


def converted(tensor: TensorProxy, dtype: dtypes.dtype) -> TensorProxy:
    """A tensor in a dtype: itself, without an operation in the trace, where it has that."""
    return tensor if dtypes.to_strong_dtype(tensor.dtype) is dtype else ltorch.to(tensor, dtype)


# The arguments after the tensors are the fields of a `Loss` and of a `Plan`, spelled out, since a trace prints and
# hashes plain values only. Further tensors come by name, since they are hardly ever there. The metas declare only what
# is always given: what is declared is printed even where it has its default.


def _metas(call: Call, plan: Plan, dtype: dtypes.dtype | None = None) -> tuple[TensorProxy, ...]:
    """What the forward returns; `dtype` is the loss's, None for that of the rows."""
    found = result_specs(specs(call), plan)
    loss, *others = map(_proxy, found.values())
    return loss if dtype is None else TensorProxy(like=loss, dtype=dtype), *others


def _proxy(spec: Spec) -> TensorProxy:
    device, dtype = devices.to_device(spec.device), dtypes.to_dtype(spec.dtype)
    return TensorProxy(shape=spec.shape, device=device, dtype=dtype, requires_grad=False)


def _forward_meta(*tensors: Any, needs_grad: tuple[str, ...], **settings: Any) -> tuple[TensorProxy, ...]:
    call = call_of(region_arguments(*tensors, **settings), needs_grad)
    return _metas(call, Plan.of(settings), settings.get("dtype"))


def _forward_impl(*tensors: Tensor | None, dtype: dtypes.dtype | None = None, **settings: Any) -> tuple[Tensor, ...]:
    """See `operators.forward`."""
    operator_settings, given = _settings_and_tensors(tensors, settings)
    loss, *others = operators.forward(operator_settings, given)
    return loss if dtype is None else loss.to(dtypes.to_torch_dtype(dtype)), *others


def _backward_meta(
    grad: TensorProxy, *tensors: Any, needs_grad: tuple[str, ...], **settings: Any
) -> tuple[TensorProxy, ...]:
    operands = call_of(region_arguments(*tensors, **settings)).tensors
    return tuple(TensorProxy(like=operands[name], requires_grad=False) for name in needs_grad)


def _backward_impl(grad: Tensor | None, *tensors: Tensor | None, **settings: Any) -> tuple[Tensor, ...]:
    """See `operators.backward`: the needed gradients, from the region's tensors and what the forward has saved."""
    upstream = [grad, *(settings.pop(name, None) for name in OUTPUT_GRADS)]
    operator_settings, given = _settings_and_tensors(tensors, settings)
    saved: Any = tensors[len(POSITIONAL) :]
    return tuple(operators.backward(operator_settings, upstream, saved, given, may_overwrite=not graph_is_kept()))


def _settings_and_tensors(tensors: Sequence[Any], settings: dict[str, Any]) -> tuple[Settings, list[Tensor]]:
    """What `operators` take, from the arguments of a symbol."""
    given = calls.with_tensors(named_tensors(region_arguments(*tensors, **settings)))
    plain = tuple(
        (name, tuple(value.items()) if name == "shard" else value)
        for name, value in settings.items()
        if name not in ARGUMENTS and name != "terms"
    )
    return _settings_of(tuple(given), plain), list(given.values())


@lru_cache(maxsize=1024)
def _settings_of(names: tuple[str, ...], plain: tuple[tuple[str, Any], ...]) -> Settings:
    """The operators' settings: from the names of the tensors, and the plain values of a symbol; a shard is in pairs."""
    region = dict(plain)
    call = call_of({**region, "shard": dict(region.get("shard", ()))})
    return Settings(names=names, loss=call.loss, needs_grad=call.needs_grad, plan=Plan.of(region), shard=call.shard)


def _scaling_impl(
    grad: Tensor, valid_count: Tensor, *gradients: Tensor, expected_gradient: Tensor | float | None = None
) -> tuple[Tensor, ...]:
    """See `scaled_gradients`."""
    given = calls.with_tensors(named_tensors({"input": gradients[0], "expected_gradient": expected_gradient}))
    expected = given.get("expected_gradient")
    scaled = scaled_gradients(
        gradients, grad, valid_count=valid_count, expected=expected, may_overwrite=not graph_is_kept()
    )
    return tuple(scaled)


linear_cross_entropy_fwd = executor.register_operator(
    "flce_linear_cross_entropy_fwd",
    meta=_forward_meta,
    fn=_forward_impl,
    tags=FORWARD_TAGS,
    python_printer=trace_printer.print_forward,
)
linear_cross_entropy_bwd = executor.register_operator(
    "flce_linear_cross_entropy_bwd",
    meta=_backward_meta,
    fn=_backward_impl,
    python_printer=trace_printer.print_backward,
)
scale_gradients = executor.register_operator(
    "flce_scale_gradients",
    meta=lambda grad, valid_count, *gradients, **expected: tuple(TensorProxy(like=each) for each in gradients),
    fn=_scaling_impl,
    tags=(OpTags.IN_PLACE,),
    python_printer=trace_printer.print_scaling,
)


def is_region(bsym: BoundSymbol) -> bool:
    """Whether a bound symbol is a `linear_cross_entropy`, called by the user or put there by the transform."""
    return bsym.sym.id == linear_cross_entropy.id
