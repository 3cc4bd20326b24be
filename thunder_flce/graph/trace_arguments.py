"""What the arguments of a region's symbols say about it: plain values and thunder's proxies."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

from thunder.core import devices, dtypes
from thunder.core.proxies import TensorProxy

from thunder_flce.operation.loss import Loss
from thunder_flce.planning.plan import Plan, Problem
from thunder_flce.planning.steps import PlannedRegion

_Values = TypeVar("_Values", Loss, Plan)


def from_settings(cls: type[_Values], settings: Mapping[str, Any]) -> _Values:
    """A `Loss` or a `Plan` from those of its fields that stand among the arguments of a symbol."""
    return cls(**{field.name: settings[field.name] for field in fields(cls) if field.name in settings})


def cross_entropy_arguments(
    logits: TensorProxy,
    target: TensorProxy,
    weight: TensorProxy | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> dict[str, Any]:
    """By name, the arguments of `torch.nn.functional.cross_entropy` as a trace has them."""
    return dict(locals())


def region_problem(region: Mapping[str, Any], needs_grad: Sequence[str], *, float32_logits: bool) -> Problem:
    """The problem of a `linear_cross_entropy` in a trace.

    Args:
        region: the arguments of `symbols.linear_cross_entropy`, by name.
        needs_grad: the names of those that need a gradient.
        float32_logits: whether the logits of 16-bit operands stay in float32.
    """
    weight = region["linear_weight"]
    loss = from_settings(Loss, region)
    return Problem(
        tokens=int(region["target"].numel),
        hidden=int(weight.shape[1]),
        vocab=int(loss.vocab_size or weight.shape[0]),
        dtype=dtypes.to_torch_dtype(weight.dtype),
        device_type=devices.to_torch_device(weight.device).type,
        row_gradients=loss.has_row_gradients,
        every_row=loss.needs_every_row,
        is_plain_loss=loss.is_plain,
        input_grad="input" in needs_grad,
        weight_grad="linear_weight" in needs_grad,
        bias_grad="linear_bias" in needs_grad,
        float32_logits=float32_logits,
    )


def planned_region(region: Mapping[str, Any], needs_grad: Sequence[str], plan: Plan) -> PlannedRegion:
    """A `linear_cross_entropy` in a trace and its plan; region and needs_grad as in `region_problem`."""
    return PlannedRegion(
        problem=region_problem(region, needs_grad, float32_logits=plan.float32_logits),
        plan=plan,
        loss=from_settings(Loss, region),
        has_bias=region.get("linear_bias") is not None,
        has_class_weight=region.get("weight") is not None,
        has_num_items=region.get("num_items") is not None,
    )
