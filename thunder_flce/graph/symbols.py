"""The executor `flce`, the symbols of a region, and the functions that run them on torch tensors.

=============================  ===================================================================================
symbol                         meaning
=============================  ===================================================================================
flce_linear_cross_entropy      the region; its subsymbol is the forward without gradients; has a rule for autograd
flce_linear_cross_entropy_fwd  its forward; returns the results that `Plan.result_names` lists
flce_linear_cross_entropy_bwd  its backward, for plans that compute the gradients there
flce_scale_gradients           its backward, for plans that computed the gradients in the forward
=============================  ===================================================================================

The last three belong to the executor `flce` and are primitives: opaque to every pass, and tagged so that no pass
recomputes a forward in the backward. `operators` runs them, whether or not the executor is listed. All symbols except
the last take the operators' arguments: tensors, or numbers in place of tensors, and `Settings.non_defaults`.
"""

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import thunder.torch as ltorch
from thunder.core import devices, dtypes
from thunder.core.compile_data import get_compile_data
from thunder.core.prims import OpTags
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.transforms import get_grad, put_grad, register_grad
from thunder.extend import OperatorExecutor, register_executor
from thunder.transforms.autocast import maybe_downcast_to
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import tree_flatten

from thunder_flce import calls, functional, operators
from thunder_flce.agreement import agreed_call
from thunder_flce.engine.kernels.scaling import graph_is_kept, scaled_gradients
from thunder_flce.engine.plan import LOSS_ONLY
from thunder_flce.graph import trace_printer
from thunder_flce.graph.reading import is_static, may_need_grad
from thunder_flce.graph.trace_arguments import plain, settings_of, spec_of, specs
from thunder_flce.matching.decisions import PlannedRegion
from thunder_flce.operation.call import Call, Spec, named_tensors, operand_names
from thunder_flce.operation.checks import check_call
from thunder_flce.operation.loss import LOSS_ARGUMENTS, Loss
from thunder_flce.operators import Settings, plan_for
from thunder_flce.options import Options

executor = OperatorExecutor("flce", version="0.1")
register_executor(executor)

# No pass may recompute a forward in the backward: nvFuser's rematerialisation skips REDUCTION_OP, thunder's own skips
# DONT_RECOMPUTE_IN_BACKWARD.
FORWARD_TAGS = (OpTags.REDUCTION_OP, OpTags.DONT_RECOMPUTE_IN_BACKWARD)


def _forward_meta(tensors: Sequence[TensorProxy], **settings: Any) -> tuple[TensorProxy, ...]:
    parsed = settings_of(settings)
    return tuple(map(_proxy, parsed.plan.result_specs(specs(parsed.call(tensors))).values()))


def _proxy(spec: Spec) -> TensorProxy:
    device, dtype = devices.to_device(spec.device), dtypes.to_dtype(spec.dtype)
    return TensorProxy(shape=spec.shape, device=device, dtype=dtype, requires_grad=False)


def _forward_impl(tensors: Sequence[Any], **settings: Any) -> tuple[Tensor, ...]:
    """See `operators.forward`."""
    parsed = settings_of(settings)
    return tuple(operators.forward(parsed, _as_tensors(parsed.names, tensors)))


def _as_tensors(names: Sequence[str], values: Sequence[Any]) -> list[Tensor]:
    """Returns the given values in order, numbers converted to tensors; `names` are the arguments' names."""
    return list(calls.scalars_as_tensors(dict(zip(names, values, strict=True))).values())


def _backward_meta(
    upstream: Sequence[TensorProxy], saved: Sequence[TensorProxy], tensors: Sequence[TensorProxy], **settings: Any
) -> tuple[TensorProxy, ...]:
    positions = settings_of(settings).grad_positions
    return tuple(TensorProxy(like=tensors[position], requires_grad=False) for position in positions)


def _backward_impl(
    upstream: Sequence[Tensor | None], saved: Sequence[Tensor], tensors: Sequence[Any], **settings: Any
) -> tuple[Tensor, ...]:
    """See `operators.backward`."""
    parsed = settings_of(settings)
    operands = _as_tensors(parsed.names, tensors)
    return tuple(operators.backward(parsed, upstream, saved, operands, may_overwrite=not graph_is_kept()))


def _scaling_impl(grad: Tensor, valid_count: Tensor, *gradients: Tensor, **expected: Any) -> tuple[Tensor, ...]:
    """See `scaled_gradients`; `expected` has the expected gradient, a tensor or a number, if there is one."""
    number = calls.scalars_as_tensors({"input": gradients[0], **expected}).get("expected_gradient")
    may_overwrite = not graph_is_kept()
    return scaled_gradients(gradients, grad, valid_count=valid_count, expected=number, may_overwrite=may_overwrite)


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
    meta=lambda grad, valid_count, *gradients, **expected: tuple(TensorProxy(like=gradient) for gradient in gradients),
    fn=_scaling_impl,
    tags=(OpTags.IN_PLACE,),
    python_printer=trace_printer.print_scaling,
)


# The region.


@ltorch.torchsymbol(id="thunder_flce.flce_linear_cross_entropy", tags=FORWARD_TAGS)
def flce_linear_cross_entropy(tensors: Sequence[TensorProxy], **settings: Any) -> tuple[TensorProxy, ...]:
    """Returns the loss and its outputs; as its subsymbol, it adds the forward without gradients.

    While the settings have `options`, the region has no plan yet, and which operands need a gradient is unknown.
    """
    parsed = settings_of(settings)
    no_gradients: dict[str, Any] = {"saved_rows": None, "float32_accumulator": False, "float32_rows": 0}
    plan = replace(parsed.plan, strategy=LOSS_ONLY, **no_gradients)
    return linear_cross_entropy_fwd(tensors, **replace(parsed, needs_grad=(), plan=plan).non_defaults())


def _region_grad(tensors: Sequence[TensorProxy], **settings: Any) -> tuple[TensorProxy, ...]:
    """Differentiation rule: adds the forward, and the backward or the scaling of finished gradients."""
    parsed = settings_of(settings)
    call = parsed.call(tensors)
    if parsed.options is not None:
        # Only the transform knows exactly which operands need a gradient. Without it, `may_need_grad` decides.
        needs_grad = tuple(name for name in operand_names(call.tensors) if may_need_grad(call.tensors[name]))
        parsed = _planned_settings(replace(call, needs_grad=needs_grad))
    results = dict(zip(parsed.result_names, linear_cross_entropy_fwd(tensors, **parsed.non_defaults()), strict=True))
    if parsed.needs_grad:
        upstream = tuple(get_grad(results[name]) for name in parsed.upstream_names)
        saved = tuple(results[name] for name in parsed.saved_names)
        if parsed.backward_only_scales:
            expected = {name: value for name, value in call.tensors.items() if name == "expected_gradient"}
            gradients = scale_gradients(*upstream, *saved, **expected)
        else:
            gradients = linear_cross_entropy_bwd(upstream, saved, tensors, **parsed.non_defaults())
        for position, gradient in zip(parsed.grad_positions, gradients, strict=True):
            put_grad(tensors[position], gradient)
    return tuple(results[name] for name in ("loss", *parsed.loss.outputs))


register_grad(flce_linear_cross_entropy.id, _region_grad)


def _planned_settings(call: Call) -> Settings:
    """Returns settings with a plan by default options; if sizes are unknown, the operator plans when it runs."""
    if is_static(*call.tensors.values()):
        return Settings.planned(*_plan_region(call, Options()))
    return Settings.unplanned(specs(call), Options())


def _plan_region(call: Call, options: Options) -> PlannedRegion:
    """Returns the call on specs, and its plan. Ranks that divide the vocabulary communicate here and agree on it."""
    if call.vocab_parallel is None:
        check_call(call)
        call = specs(call)
    else:
        spec_call = call.map(lambda _, value: spec_of(value) if isinstance(value, TensorProxy) else value)
        with unset_fake_temporarily():
            agreed = agreed_call(spec_call, options)
        call = replace(specs(call), shard=agreed.shard, vocab_parallel=None)
    return PlannedRegion(call, plan_for(call, options))


def add_region(call: Call, options: Options) -> tuple[tuple[TensorProxy, ...], PlannedRegion]:
    """Adds a region with its plan to a trace; returns the loss and its outputs, and the planned region."""
    planned = _plan_region(call, options)
    settings = Settings.planned(*planned)
    return flce_linear_cross_entropy(tuple(call.tensors.values()), **settings.non_defaults()), planned


def is_region(bsym: BoundSymbol) -> bool:
    """Whether a bound symbol is a region, written by the user or by the transform."""
    return bsym.sym.id == flce_linear_cross_entropy.id


# The user's call.

_SIGNATURE = inspect.signature(functional.linear_cross_entropy)


def linear_cross_entropy(
    input: TensorProxy, linear_weight: TensorProxy, target: TensorProxy, **arguments: Any
) -> TensorProxy | tuple[TensorProxy, ...]:
    """`functional.linear_cross_entropy` in a trace: adds a region. `vocab_parallel` is the string of `as_literal`."""
    try:
        bound = _SIGNATURE.bind(input, linear_weight, target, **arguments)
    except TypeError as error:
        raise TypeError(f"linear_cross_entropy() {error}") from error
    bound.apply_defaults()
    values = dict(bound.arguments)
    if values.pop("options") is not None:
        raise ValueError("options cannot be given inside thunder.jit: give them to thunder_flce.jit")
    data = get_compile_data()
    if data is not None and isinstance(input, TensorProxy):
        dtype = data.autocast_stack.get_dtype_for_device_if_enabled(input.device.type)
        for name in ("input", "linear_weight", "linear_bias", "terms") if dtype is not None else ():
            values[name] = maybe_downcast_to(dtypes.to_dtype(dtype), values[name])
    settings = {name: plain(values[name]) for name in LOSS_ARGUMENTS}
    loss = Loss(**settings | {"token_loss": settings["token_loss"] or ""})
    call = Call(tensors=named_tensors(values), loss=loss, vocab_parallel=values["vocab_parallel"])
    if call.vocab_parallel is None and is_static(*tree_flatten(values)[0]):
        check_call(call)
    unplanned = Settings.unplanned(specs(call), Options())
    results = flce_linear_cross_entropy(tuple(call.tensors.values()), **unplanned.non_defaults())
    return results if loss.outputs else results[0]
