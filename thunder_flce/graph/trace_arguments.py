"""What the arguments of a region's symbols say about it: plain values and thunder's proxies."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from thunder.core import devices, dtypes
from thunder.core.proxies import TensorProxy

from thunder_flce.operation.arguments import named_operands
from thunder_flce.operation.loss import Loss
from thunder_flce.operation.problem import Problem, TermShape


def region_arguments(*tensors: TensorProxy, **settings: Any) -> dict[str, Any]:
    """The arguments of a call of `symbols.linear_cross_entropy` by name: what `region` is in all functions here."""
    return {**dict(zip(("input", "linear_weight", "target"), tensors, strict=False)), **settings}


def loss_of(settings: Mapping[str, Any]) -> Loss:
    """The loss, from those of its fields that are among the arguments of a symbol."""
    return Loss(**{field.name: settings[field.name] for field in fields(Loss) if field.name in settings})


def region_operands(region: Mapping[str, Any]) -> dict[str, TensorProxy]:
    """The operands of the linears, by their names in `needs_grad`."""
    terms = region.get("terms", ())
    return named_operands(region["input"], region["linear_weight"], region.get("linear_bias"), terms)


def region_problem(region: Mapping[str, Any], needs_grad: Sequence[str], *, float32_logits: bool) -> Problem:
    """The problem; `float32_logits` says whether the logits of 16-bit operands stay in float32."""
    weight, loss = region["linear_weight"], loss_of(region)
    pairs = [(name, operand) for name, operand in region_operands(region).items() if name != "linear_bias"]
    return Problem(
        tokens=int(region["target"].numel),
        terms=tuple(
            TermShape(
                hidden=int(term_weight.shape[1]),
                input_grad=of_input in needs_grad,
                weight_grad=of_weight in needs_grad,
            )
            for (of_input, _), (of_weight, term_weight) in zip(pairs[::2], pairs[1::2], strict=True)
        ),
        vocab=int(loss.vocab_size or weight.shape[0]),
        weight_rows=int(weight.shape[0]),
        dtype=dtypes.to_torch_dtype(weight.dtype),
        device_type=devices.to_torch_device(weight.device).type,
        loss=loss,
        has_bias=region.get("linear_bias") is not None,
        bias_grad="linear_bias" in needs_grad,
        has_class_weight=region.get("weight") is not None,
        has_num_items=region.get("num_items") is not None,
        float32_logits=float32_logits,
    )
