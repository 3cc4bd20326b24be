"""The executor `flce`: which symbols it takes and how they are differentiated. All registration happens here.

Checkers and rules mirror the signatures of the symbols they serve, because thunder calls them with those arguments.
"""

from typing import Any

import thunder.torch as ltorch
from thunder.core import devices, dtypes
from thunder.core.jit_ext import (
    ensure_recursive_proxies,
    interpreter_needs_wrap,
    record_source_loc_in_symbol_header,
    register_general_jit_lookaside,
)
from thunder.core.proxies import NumberProxy, TensorProxy
from thunder.core.transforms import get_grad, put_grad
from thunder.executors.nvfuserex import nvfuser_available
from thunder.extend import register_executor

from thunder_flce import functional, symbols
from thunder_flce.options import Options
from thunder_flce.plan import Plan, make_plan
from thunder_flce.proxies import region_problem
from thunder_flce.symbols import executor


def plan_region(region: dict[str, Any], needs_grad: tuple[str, ...], options: Options) -> Plan:
    """The plan of a `linear_cross_entropy` in a trace.

    Args:
        region: the arguments of `symbols.linear_cross_entropy`, by name.
        needs_grad: the names of those that need a gradient.
        options: the user's choices.
    """
    device = devices.to_torch_device(region["linear_weight"].device)
    is_fraction = isinstance(options.memory_budget, float)
    problem = region_problem(region, needs_grad)
    return make_plan(problem, options, device_bytes=functional.device_bytes(device) if is_fraction else None)


def _forward(
    region: dict[str, Any], needs_grad: tuple[str, ...], plan: dict[str, Any]
) -> tuple[tuple[TensorProxy, ...], dict[str, Any]]:
    """Calls the forward symbol; returns its outputs and the keyword arguments that the backward shares with it."""
    shared = {
        "reduction": region.get("reduction", "mean"),
        "ignore_index": region.get("ignore_index", -100),
        "needs_grad": needs_grad,
        **plan,
    }
    tensors = (region["input"], region["linear_weight"], region["target"], region.get("linear_bias"))
    dtype = {} if region.get("dtype") is None else {"dtype": region["dtype"]}
    return symbols.linear_cross_entropy_fwd(*tensors, **dtype, **shared), shared


def _linear_cross_entropy_transform(
    input: TensorProxy, linear_weight: TensorProxy, target: TensorProxy, **settings: Any
) -> TensorProxy:
    """Without gradients: the forward symbol, for the loss alone."""
    region = {"input": input, "linear_weight": linear_weight, "target": target, **settings}
    plan = settings.get("plan") or plan_region(region, (), Options()).chosen()
    outputs, _ = _forward(region, (), {**plan, "strategy": "loss_only"})
    return outputs[0]


def _linear_cross_entropy_grad(
    input: TensorProxy, linear_weight: TensorProxy, target: TensorProxy, **settings: Any
) -> TensorProxy:
    """With gradients: the forward symbol, and the backward symbol that the plan calls for."""
    region = {"input": input, "linear_weight": linear_weight, "target": target, **settings}
    needs_grad = settings.get("needs_grad")
    if needs_grad is None:
        # Without the transform, nobody has looked at the whole trace: every floating-point operand may need one.
        needs_grad = ("input", "linear_weight", *(("linear_bias",) if settings.get("linear_bias") is not None else ()))
    plan = settings.get("plan") or plan_region(region, needs_grad, Options()).chosen()
    (loss, *statistics_and_saved), shared = _forward(region, needs_grad, plan)
    statistics, saved = statistics_and_saved[:3], statistics_and_saved[3:]
    if needs_grad:
        grad = get_grad(loss)
        if plan["strategy"] == "gradients_in_forward":
            gradients = symbols.scale_gradients(grad, statistics[2], *saved)
        else:
            logits = saved[0] if saved else None
            gradients = symbols.linear_cross_entropy_bwd(
                grad, input, linear_weight, target, settings.get("linear_bias"), *statistics, logits, **shared
            )
        for name, gradient in zip(needs_grad, gradients, strict=True):
            put_grad(region[name], gradient)
    return loss


def is_static(*values: Any) -> bool:
    """Whether all shapes and numbers are known when a trace is compiled; not so with thunder's symbolic values.

    Reads `_shape`, since to read `shape` would add a symbol to the trace.
    """
    sizes = [size for value in values if isinstance(value, TensorProxy) for size in value._shape]
    return not any(isinstance(value, NumberProxy) for value in (*values, *sizes))


def _linear_cross_entropy_checker(*tensors: Any, **settings: Any) -> bool:
    return is_static(*tensors, *settings.values())


def _cross_entropy_checker(
    a: TensorProxy,
    /,
    target: TensorProxy,
    weight: TensorProxy | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> bool:
    """Class indices for (N, V) logits, without class weights or label smoothing."""
    if not is_static(a, target, ignore_index, label_smoothing):
        return False
    if a.ndim != 2 or target.ndim != 1 or a.numel == 0:
        return False
    if dtypes.is_float_dtype(target.dtype):
        return False
    if weight is not None or label_smoothing != 0.0:
        return False
    return size_average is None and reduce is None


def _cross_entropy_transform(
    a: TensorProxy,
    /,
    target: TensorProxy,
    weight: TensorProxy | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> TensorProxy:
    loss, *_ = symbols.cross_entropy_fwd(a, target, reduction=reduction, ignore_index=ignore_index)
    return loss


def _cross_entropy_grad(
    a: TensorProxy,
    /,
    target: TensorProxy,
    weight: TensorProxy | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> TensorProxy:
    settings = {"reduction": reduction, "ignore_index": ignore_index}
    loss, *statistics = symbols.cross_entropy_fwd(a, target, **settings)
    put_grad(a, symbols.cross_entropy_bwd(get_grad(loss), a, target, *statistics, **settings))
    return loss


register_executor(executor)
executor.register_implementation(
    symbols.linear_cross_entropy,
    checker=_linear_cross_entropy_checker,
    execution_transform=_linear_cross_entropy_transform,
    grad_transform=_linear_cross_entropy_grad,
)
executor.register_implementation(
    ltorch.cross_entropy,
    checker=_cross_entropy_checker,
    execution_transform=_cross_entropy_transform,
    grad_transform=_cross_entropy_grad,
)
# torchsymbol alone is not enough here: thunder copies its table of functions when it is imported.
register_general_jit_lookaside(functional.linear_cross_entropy)(
    ensure_recursive_proxies(interpreter_needs_wrap(record_source_loc_in_symbol_header(symbols.linear_cross_entropy)))
)
if nvfuser_available():
    from thunder_flce import nvfuser_translation

    nvfuser_translation.register()
