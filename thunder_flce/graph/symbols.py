"""The executor `flce`, the symbols of a region, and what runs them on torch tensors.

=============================  ===================================================================================
symbol                         what it stands for
=============================  ===================================================================================
linear_cross_entropy           the region; it consists of its forward, without gradients, and has a rule for autograd
flce_linear_cross_entropy_fwd  its forward: what `operation.call.result_names` names
flce_linear_cross_entropy_bwd  its backward, for plans that compute the gradients there
flce_scale_gradients           its backward, for plans that computed the gradients in the forward
=============================  ===================================================================================

All but the first belong to the executor `flce` and are primitives: opaque to every pass, and tagged so that no pass
computes a forward again in the backward. `operators` runs them, whether or not the executor is listed.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import thunder.torch as ltorch
from thunder.core import devices, dtypes
from thunder.core.prims import OpTags
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.extend import OperatorExecutor, register_executor
from torch import Tensor
from torch.utils._pytree import tree_flatten

from thunder_flce import calls, functional, operators
from thunder_flce.engine.kernels.scaling import graph_is_kept, scaled_gradients
from thunder_flce.engine.plan import LOSS_ONLY, Plan
from thunder_flce.graph import trace_printer
from thunder_flce.graph.distributed import agreement_on
from thunder_flce.graph.reading import is_static, may_need_grad
from thunder_flce.graph.thunder_private import get_grad, put_grad, register_grad
from thunder_flce.graph.trace_arguments import (
    OUTPUT_GRADS,
    POSITIONAL,
    call_of,
    plan_arguments,
    region_arguments,
    specs,
)
from thunder_flce.matching.decisions import PlannedRegion
from thunder_flce.operation.call import ARGUMENTS, Spec, named_tensors, operand_names, result_specs
from thunder_flce.operation.checks import check_call
from thunder_flce.operators import Settings, plan_for
from thunder_flce.options import Options

executor = OperatorExecutor("flce", version="0.1")
register_executor(executor)

# No pass may run a forward again in the backward: nvFuser's rematerialisation skips REDUCTION_OP, thunder's own skips
# DONT_RECOMPUTE_IN_BACKWARD.
FORWARD_TAGS = (OpTags.REDUCTION_OP, OpTags.DONT_RECOMPUTE_IN_BACKWARD)


# The arguments after the tensors are the fields of a `Loss` and of a `Plan`, spelled out, since a trace prints and
# hashes plain values only. Further tensors come by name, since they are hardly ever there. The metas declare only what
# is always given: what is declared is printed even where it has its default.


def _proxy(spec: Spec) -> TensorProxy:
    device, dtype = devices.to_device(spec.device), dtypes.to_dtype(spec.dtype)
    return TensorProxy(shape=spec.shape, device=device, dtype=dtype, requires_grad=False)


def _forward_meta(*tensors: Any, needs_grad: tuple[str, ...], **settings: Any) -> tuple[TensorProxy, ...]:
    call, dtype = specs(call_of(region_arguments(*tensors, **settings), needs_grad)), settings.get("dtype")
    loss, *others = map(_proxy, result_specs(call, Plan.of(settings)).values())
    return loss if dtype is None else TensorProxy(like=loss, dtype=dtype), *others


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
        (name, tuple(value.items()) if name in ("shard", "options") else value)
        for name, value in settings.items()
        if name not in ARGUMENTS and name != "terms"
    )
    return _settings_of(tuple(given), plain), list(given.values())


@lru_cache(maxsize=1024)
def _settings_of(names: tuple[str, ...], plain: tuple[tuple[str, Any], ...]) -> Settings:
    """The operators' settings: from the names of the tensors, and plain values of a symbol, dictionaries in pairs."""
    region = dict(plain)
    call = call_of({**region, "shard": dict(region.get("shard", ()))})
    options = Options(**dict(region["options"])) if "options" in region else None
    return Settings(
        names=names, loss=call.loss, needs_grad=call.needs_grad, plan=Plan.of(region), options=options, shard=call.shard
    )


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


# The region.

_SIGNATURE = inspect.signature(functional.linear_cross_entropy)


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
    needs_grad: tuple[str, ...] | None = None,
    dtype: dtypes.dtype | None = None,
    plan: dict[str, Any] | None = None,
    shard: dict[str, Any] | None = None,
    **arguments: Any,
) -> TensorProxy | tuple[TensorProxy, ...]:
    """`functional.linear_cross_entropy` in a trace. What it consists of is its forward, without gradients.

    `FuseLinearCrossEntropy` sets the names of the tensors that need a gradient, the loss's dtype (None: as in
    `functional.linear_cross_entropy`), the fields of a `Plan` and, where ranks divide the vocabulary, those of a
    `Shard`. `vocab_parallel` is a `VocabParallel` by `as_literal`.
    """
    region = dict(_SIGNATURE.bind(input, linear_weight, target, **arguments).arguments)
    if region.pop("options", None) is not None:
        raise ValueError("options is for eager calls; inside thunder.jit, give them to thunder_flce.jit")
    given = {"dtype": dtype, "plan": plan, "shard": shard}
    region = _with_plan(region | {name: value for name, value in given.items() if value is not None}, ())
    of_gradients: dict[str, Any] = {"saved_rows": None, "float32_accumulator": False, "float32_rows": 0}
    return _run(region, (), replace(Plan.of(region["plan"]), strategy=LOSS_ONLY, **of_gradients))


def _linear_cross_entropy_grad(*tensors: TensorProxy, **settings: Any) -> TensorProxy | tuple[TensorProxy, ...]:
    """The region with gradients."""
    region = region_arguments(*tensors, **settings)
    needs_grad = settings.get("needs_grad")
    if needs_grad is None:
        # Only the transform knows which operands need a gradient. Without it, arguments of the program say so.
        given = named_tensors(region)
        needs_grad = tuple(name for name in operand_names(given) if may_need_grad(given[name]))
    region = _with_plan(region, needs_grad)
    return _run(region, needs_grad, Plan.of(region["plan"]))


register_grad(linear_cross_entropy.id, _linear_cross_entropy_grad)


def _with_plan(region: Mapping[str, Any], needs_grad: tuple[str, ...]) -> dict[str, Any]:
    """The region with the plan that it has, or with one by default options."""
    if region.get("plan") is not None:
        return dict(region)
    if is_static(*tree_flatten(dict(region))[0]):
        return {**region, **plan_arguments(plan_region(region, needs_grad, Options()))}
    # The operator makes the plan when it runs.
    settings = calls.unplanned(specs(call_of(region, needs_grad)), Options())
    options = settings.options or Options()
    return {**region, "plan": settings.plan.non_defaults(), "options": options.non_defaults()}


def plan_region(region: Mapping[str, Any], needs_grad: tuple[str, ...], options: Options) -> PlannedRegion:
    """Plans a `linear_cross_entropy` in a trace, from its arguments and the names of those that need a gradient.

    Where ranks divide the vocabulary, they exchange what they have to agree on.
    """
    call, agreement = call_of(region, needs_grad), agreement_on(region, needs_grad, options)
    check_call(region, loss=call.loss, vocab=None if agreement is None else agreement.weight_rows)
    if agreement is not None:
        call = replace(call, shard=agreement.shard)
    call = specs(call)
    return PlannedRegion(call, plan_for(call, options, device=None if agreement is None else agreement.device))


def add_region(
    region: Mapping[str, Any], needs_grad: tuple[str, ...], options: Options
) -> tuple[tuple[TensorProxy, ...], PlannedRegion]:
    """Adds a region to a trace, with its plan; returns its loss and outputs, and how it runs."""
    planned = plan_region(region, needs_grad, options)
    found = linear_cross_entropy(**{**region, "needs_grad": needs_grad, **plan_arguments(planned)})
    return found if isinstance(found, tuple) else (found,), planned


def _run(region: Mapping[str, Any], needs_grad: tuple[str, ...], plan: Plan) -> TensorProxy | tuple[TensorProxy, ...]:
    """Calls the forward symbol and, where a gradient is needed, the backward symbol that the plan asks for."""
    call = call_of(region, needs_grad)
    loss, known = call.loss, calls.settings_of_call(call, plan)
    tensors = [region.get(name) for name in POSITIONAL]
    terms, token_inputs = tuple(map(tuple, region.get("terms", ()))), tuple(region.get("token_inputs", ()))
    given = {"shard": region.get("shard"), "options": region.get("options")}
    given |= {"terms": terms or None, "token_inputs": token_inputs or None}
    given |= {name: value for name, value in call.tensors.items() if "[" not in name and name not in POSITIONAL}
    if not known.finishes_in_forward:
        given.pop("expected_gradient", None)
    given = {name: value for name, value in given.items() if value is not None}
    shared = {**loss.non_defaults(), "needs_grad": needs_grad, **plan.non_defaults(), **given}
    dtype = {} if region.get("dtype") is None else {"dtype": region["dtype"]}
    results = dict(zip(known.result_names, linear_cross_entropy_fwd(*tensors, **dtype, **shared), strict=True))
    if needs_grad:
        grad, saved = get_grad(results["loss"]), [results[name] for name in known.saved_names]
        if known.finishes_in_forward:
            expected = {name: value for name, value in given.items() if name == "expected_gradient"}
            gradients = scale_gradients(grad, *saved, **expected)
        else:
            of_outputs = {f"{name}_grad": get_grad(results[name]) for name in loss.differentiable_outputs}
            gradients = linear_cross_entropy_bwd(grad, *tensors, *saved, **of_outputs, **shared)
        for name, gradient in zip(needs_grad, gradients, strict=True):
            put_grad(call.tensors[name], gradient)
    values = [results[name] for name in ("loss", *loss.outputs)]
    return tuple(values) if loss.outputs else values[0]


def is_region(bsym: BoundSymbol) -> bool:
    """Whether a bound symbol is a `linear_cross_entropy`, called by the user or put there by the transform."""
    return bsym.sym.id == linear_cross_entropy.id
