"""The executor `flce`: which symbols it takes and how they are differentiated. All registration happens here.

Checkers and rules mirror the signatures of the symbols they serve, because thunder calls them with those arguments.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

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
from thunder.transforms.autocast import maybe_downcast_to, register_autocast_rule

from thunder_flce import functional
from thunder_flce.graph import symbols
from thunder_flce.graph.symbols import executor
from thunder_flce.graph.trace_arguments import cross_entropy_arguments, from_settings, region_problem
from thunder_flce.operation.loss import DIFFERENTIABLE_OUTPUTS, Loss
from thunder_flce.options import Options
from thunder_flce.planning.plan import Plan


def plan_region(region: dict[str, Any], needs_grad: tuple[str, ...], options: Options) -> Plan:
    """The plan of a `linear_cross_entropy` in a trace.

    Args:
        region: the arguments of `symbols.linear_cross_entropy`, by name.
        needs_grad: the names of those that need a gradient.
        options: the user's choices.
    """
    weight = region["linear_weight"]
    device, dtype = devices.to_torch_device(weight.device), dtypes.to_torch_dtype(weight.dtype)
    problem = region_problem(region, needs_grad, float32_logits=options.has_float32_logits(dtype))
    return functional.cached_plan(problem, options, device)


class _Forward(NamedTuple):
    """What the forward symbol returned, and the arguments that the backward shares with it."""

    outputs: tuple[TensorProxy, ...]
    """The loss and its further outputs"""
    statistics: tuple[TensorProxy, ...]
    saved: tuple[TensorProxy, ...]
    """Logits or gradients, as planned"""
    shared: dict[str, Any]


def _forward(region: dict[str, Any], needs_grad: tuple[str, ...], plan: dict[str, Any]) -> _Forward:
    """Calls the forward symbol."""
    loss = from_settings(Loss, region)
    shared = {**loss.chosen(), "needs_grad": needs_grad, **plan}
    shared.update({name: region[name] for name in ("weight", "num_items") if region.get(name) is not None})
    tensors = (region["input"], region["linear_weight"], region["target"], region.get("linear_bias"))
    dtype = {} if region.get("dtype") is None else {"dtype": region["dtype"]}
    results = symbols.linear_cross_entropy_fwd(*tensors, **dtype, **shared)
    count = 1 + len(loss.outputs)
    return _Forward(results[:count], results[count : count + 3], results[count + 3 :], shared)


def _result(forward: _Forward) -> TensorProxy | tuple[TensorProxy, ...]:
    return forward.outputs if len(forward.outputs) > 1 else forward.outputs[0]


def _linear_cross_entropy_transform(
    input: TensorProxy, linear_weight: TensorProxy, target: TensorProxy, **settings: Any
) -> TensorProxy | tuple[TensorProxy, ...]:
    """Without gradients: the forward symbol, for the loss alone."""
    region = {"input": input, "linear_weight": linear_weight, "target": target, **settings}
    plan = settings.get("plan") or plan_region(region, (), Options()).chosen()
    return _result(_forward(region, (), {**plan, "strategy": "loss_only"}))


def _linear_cross_entropy_grad(
    input: TensorProxy, linear_weight: TensorProxy, target: TensorProxy, **settings: Any
) -> TensorProxy | tuple[TensorProxy, ...]:
    """With gradients: the forward symbol, and the backward symbol that the plan calls for."""
    region = {"input": input, "linear_weight": linear_weight, "target": target, **settings}
    needs_grad = settings.get("needs_grad")
    if needs_grad is None:
        # Without the transform, nobody has looked at the whole trace: every floating-point operand may need one.
        needs_grad = ("input", "linear_weight", *(("linear_bias",) if settings.get("linear_bias") is not None else ()))
    plan = settings.get("plan") or plan_region(region, needs_grad, Options()).chosen()
    forward = _forward(region, needs_grad, plan)
    if needs_grad:
        outputs = dict(zip(("loss", *region.get("outputs", ())), forward.outputs, strict=True))
        grad = get_grad(outputs["loss"])
        if plan["strategy"] == "gradients_in_forward":
            gradients = symbols.scale_gradients(grad, forward.statistics[2], *forward.saved)
        else:
            of_outputs = {f"{name}_grad": get_grad(outputs[name]) for name in DIFFERENTIABLE_OUTPUTS if name in outputs}
            if "entropy" in outputs:
                of_outputs["entropy"] = outputs["entropy"]
            logits = forward.saved[0] if forward.saved else None
            gradients = symbols.linear_cross_entropy_bwd(
                grad, input, linear_weight, target, settings.get("linear_bias"), *forward.statistics, logits,
                **of_outputs, **forward.shared,
            )  # fmt: skip
        for name, gradient in zip(needs_grad, gradients, strict=True):
            put_grad(region[name], gradient)
    return _result(forward)


def is_static(*values: Any) -> bool:
    """Whether all shapes and numbers are known when a trace is compiled; not so with thunder's symbolic values.

    Reads `_shape`, since to read `shape` would add a symbol to the trace.
    """
    sizes = [size for value in values if isinstance(value, TensorProxy) for size in value._shape]
    return not any(isinstance(value, NumberProxy) for value in (*values, *sizes))


def _linear_cross_entropy_checker(*tensors: Any, **settings: Any) -> bool:
    return is_static(*tensors, *settings.values())


@dataclass(frozen=True)
class _CrossEntropy:
    """A call of `torch.nn.functional.cross_entropy` in a trace, for logits (N, V), (V,) or (B, V, …)."""

    logits: TensorProxy
    target: TensorProxy
    weight: TensorProxy | None
    ignore_index: int
    reduction: str
    label_smoothing: float
    is_deprecated: bool

    @classmethod
    def call(cls, *args: Any, **kwargs: Any) -> "_CrossEntropy":
        """From the arguments as thunder passes them on."""
        arguments = cross_entropy_arguments(*args, **kwargs)
        deprecated = arguments.pop("size_average"), arguments.pop("reduce")
        return cls(**arguments, is_deprecated=deprecated != (None, None))

    @property
    def has_probabilities(self) -> bool:
        """Whether the targets are class probabilities."""
        return tuple(self.logits.shape) == tuple(self.target.shape)

    def is_supported(self) -> bool:
        """Whether the symbols compute it."""
        logits, target = self.logits, self.target
        if self.is_deprecated or not is_static(logits, target, self.ignore_index, self.label_smoothing):
            return False
        if logits.ndim == 0 or logits.numel == 0 or not dtypes.is_float_dtype(logits.dtype):
            return False
        if dtypes.is_float_dtype(target.dtype) != self.has_probabilities:
            return False
        classes = 0 if logits.ndim == 1 else 1
        rows = tuple(size for dim, size in enumerate(logits.shape) if dim != classes)
        return self.has_probabilities or tuple(target.shape) == rows

    def settings(self) -> dict[str, Any]:
        """The arguments that the symbols share; class weights and label smoothing are hardly ever there."""
        settings: dict[str, Any] = {"reduction": self.reduction}
        if not self.has_probabilities:
            settings["ignore_index"] = self.ignore_index
        if self.weight is not None:
            settings["weight"] = self.weight
        if self.label_smoothing:
            settings["label_smoothing"] = self.label_smoothing
        return settings

    def in_rows(self, tensor: TensorProxy) -> TensorProxy:
        """(B, V, …) to (N, V)."""
        if tensor.ndim > 2:
            tensor = ltorch.permute(tensor, (0, *range(2, tensor.ndim), 1))
        return tensor if tensor.ndim == 2 else ltorch.reshape(tensor, (-1, tensor.shape[-1]))

    def from_rows(self, rows: TensorProxy, like: TensorProxy) -> TensorProxy:
        """The inverse of `in_rows`."""
        if like.ndim == 2:
            return rows
        if like.ndim == 1:
            return ltorch.reshape(rows, tuple(like.shape))
        batch, classes, *others = like.shape
        last = ltorch.reshape(rows, (batch, *others, classes))
        return ltorch.permute(last, (0, like.ndim - 1, *range(1, like.ndim - 1)))

    def loss_shaped(self, loss: TensorProxy) -> TensorProxy:
        """The loss of reduction "none" in the shape of the tokens."""
        if self.reduction != "none":
            return loss
        shape = tuple(self.logits.shape)
        return ltorch.reshape(loss, () if len(shape) == 1 else (shape[0], *shape[2:]))

    def forward(self) -> tuple[TensorProxy, tuple[TensorProxy, ...], dict[str, Any]]:
        """The loss; what the backward symbol takes after the incoming gradient; and its settings."""
        rows = self.in_rows(self.logits)
        if self.has_probabilities:
            target = self.in_rows(self.target)
            loss, *statistics = symbols.cross_entropy_probabilities_fwd(rows, target, **self.settings())
        else:
            target = self.target if self.target.ndim == 1 else ltorch.reshape(self.target, (-1,))
            loss, *statistics = symbols.cross_entropy_fwd(rows, target, **self.settings())
        return self.loss_shaped(loss), (rows, target, *statistics), self.settings()


def _cross_entropy_checker(*args: Any, **kwargs: Any) -> bool:
    return _CrossEntropy.call(*args, **kwargs).is_supported()


def _cross_entropy_transform(*args: Any, **kwargs: Any) -> TensorProxy:
    loss, _, _ = _CrossEntropy.call(*args, **kwargs).forward()
    return loss


def _cross_entropy_grad(*args: Any, **kwargs: Any) -> TensorProxy:
    call = _CrossEntropy.call(*args, **kwargs)
    loss, saved, settings = call.forward()
    grad = get_grad(loss)
    grad = ltorch.reshape(grad, (-1,)) if call.reduction == "none" and grad.ndim != 1 else grad
    if call.has_probabilities:
        gradient, target_gradient = symbols.cross_entropy_probabilities_bwd(grad, *saved, **settings)
        put_grad(call.target, call.from_rows(target_gradient, call.target))
    else:
        gradient = symbols.cross_entropy_bwd(grad, *saved, **settings)
    put_grad(call.logits, call.from_rows(gradient, call.logits))
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


@register_autocast_rule(symbols.linear_cross_entropy.id)
def _autocast(
    input: TensorProxy,
    linear_weight: TensorProxy,
    target: TensorProxy,
    *,
    linear_bias: TensorProxy | None = None,
    dtype: dtypes.dtype,
    **settings: Any,
) -> TensorProxy | tuple[TensorProxy, ...]:
    """Under `torch.autocast`, the linear's operands in its dtype; the loss stays what it is."""
    input, linear_weight = maybe_downcast_to(dtype, (input, linear_weight))
    if linear_bias is not None:
        (linear_bias,) = maybe_downcast_to(dtype, (linear_bias,))
    return symbols.linear_cross_entropy(input, linear_weight, target, linear_bias=linear_bias, **settings)


if nvfuser_available():
    from thunder_flce.graph.unfused_cross_entropy import nvfuser_impl

    nvfuser_impl.register()
