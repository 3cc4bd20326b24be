"""What thunder's proxies say about a region."""

from collections.abc import Mapping, Sequence
from typing import Any

from thunder.core import devices, dtypes

from thunder_flce.plan import Problem


def region_problem(region: Mapping[str, Any], needs_grad: Sequence[str]) -> Problem:
    """The problem of a `linear_cross_entropy` in a trace.

    Args:
        region: the arguments of `symbols.linear_cross_entropy`, by name.
        needs_grad: the names of those that need a gradient.
    """
    weight = region["linear_weight"]
    return Problem(
        tokens=int(region["target"].numel),
        hidden=int(weight.shape[1]),
        vocab=int(weight.shape[0]),
        dtype=dtypes.to_torch_dtype(weight.dtype),
        device_type=devices.to_torch_device(weight.device).type,
        reduction=region.get("reduction", "mean"),
        has_bias=region.get("linear_bias") is not None,
        input_grad="input" in needs_grad,
        weight_grad="linear_weight" in needs_grad,
        bias_grad="linear_bias" in needs_grad,
    )
