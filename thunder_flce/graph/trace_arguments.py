"""What the arguments of a region's symbols say about it: plain values and thunder's proxies.

`region` is the same everywhere: the arguments of `symbols.linear_cross_entropy`, or of a symbol that it becomes, by
name.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any

from thunder.core import devices, dtypes

from thunder_flce.operation.arguments import named_operands
from thunder_flce.operation.loss import Loss
from thunder_flce.operation.problem import Problem, TermShape
from thunder_flce.operation.shard import Shard

POSITIONAL = ("input", "linear_weight", "target", "linear_bias")
BY_NAME = ("weight", "token_weights", "target_weights", "num_items", "expected_gradient")
"""Further tensors or numbers, None where they are not given."""


def region_arguments(*tensors: Any, **settings: Any) -> dict[str, Any]:
    """The region: tensors that are given by position are the `POSITIONAL` ones; any after these are passed over."""
    optional = dict.fromkeys(("linear_bias", *BY_NAME))
    return {**optional, "terms": (), "token_inputs": (), **dict(zip(POSITIONAL, tensors, strict=False)), **settings}


def loss_of(region: Mapping[str, Any]) -> Loss:
    """The loss, from those of its fields that are among the arguments; None is the default of all that may be None."""
    return Loss(**{field.name: region[field.name] for field in fields(Loss) if region.get(field.name) is not None})


def plain_values(shard: Shard) -> dict[str, Any]:
    """The fields of a shard that differ from their defaults, by name."""
    return {f.name: value for f in fields(shard) if (value := getattr(shard, f.name)) != f.default}


def shard_of(region: Mapping[str, Any]) -> Shard | None:
    """This rank's columns, where ranks divide the vocabulary."""
    return Shard(**region["shard"]) if "shard" in region else None


def region_operands(region: Mapping[str, Any]) -> dict[str, Any]:
    """The operands of the linears, by their names in `needs_grad`."""
    return named_operands(region["input"], region["linear_weight"], region["linear_bias"], region["terms"])


def region_problem(region: Mapping[str, Any], needs_grad: Collection[str], *, float32_logits: bool) -> Problem:
    """The problem; `float32_logits` says whether the logits of 16-bit operands stay in float32."""
    weight, loss, shard = region["linear_weight"], loss_of(region), shard_of(region)
    linears = [(name, operand) for name, operand in region_operands(region).items() if name != "linear_bias"]
    return Problem(
        tokens=math.prod(map(int, region["input"].shape[:-1])) * (1 if shard is None else shard.token_parts),
        terms=tuple(
            TermShape(hidden=int(x.shape[-1]), input_grad=of_input in needs_grad, weight_grad=of_weight in needs_grad)
            for (of_input, x), (of_weight, _) in zip(linears[::2], linears[1::2], strict=True)
        ),
        vocab=int(loss.vocab_size or weight.shape[0]) if shard is None else shard.columns,
        weight_rows=int(weight.shape[0]),
        dtype=dtypes.to_torch_dtype(weight.dtype),
        device_type=devices.to_torch_device(weight.device).type,
        loss=loss,
        has_bias=region["linear_bias"] is not None,
        bias_grad="linear_bias" in needs_grad,
        has_class_weight=region["weight"] is not None,
        has_num_items=region["num_items"] is not None,
        has_token_weights=region["token_weights"] is not None,
        targets_per_token=None if region["target_weights"] is None else int(region["target"].shape[-1]),
        token_inputs=len(region["token_inputs"]),
        has_expected_gradient=region["expected_gradient"] is not None,
        float32_logits=float32_logits,
        shard=shard,
    )
