"""The time that a program is predicted to take: a sum over its steps.

    time = operations of the matmuls / their rate + bytes of the other steps / bandwidth + parts of loops × their cost

The matmuls are taken at the rate that the three of a loss region reach together, and everything else at the speed of
memory; nothing overlaps. It is the device's time: where the device waits for the host, more passes. On the H200 that
the constants are from, predictions are within 8% of the measurements, and for the default within 4%
(docs/performance.md).
"""

from dataclasses import dataclass

import torch

from thunder_flce.execution.plan import Plan
from thunder_flce.operation.problem import Problem
from thunder_flce.planning.program import Program, program


@dataclass(frozen=True, kw_only=True)
class DeviceRates:
    """What a device reaches on the steps of a loss region, in 16 bits."""

    matmul_rate: float
    """Operations a second."""

    bandwidth: float
    """Bytes a second, read and written."""

    part_seconds: float
    """What each part of a loop costs beside its matmuls and row work."""


# By the name that CUDA reports. matmul_rate is 6·T·H·V over the time of "three matmuls" in traces/h200/regions.jsonl
# (644e12 to 686e12); bandwidth is what nvFuser's in-place gradient reaches on its own, on the same device;
# part_seconds is fitted to what is then left of the times of "flce" in the same file.
DEVICE_RATES = {
    "NVIDIA H200": DeviceRates(matmul_rate=680e12, bandwidth=4.1e12, part_seconds=25e-6),
}
# What plans are compared by where the device's own rates are not known.
_ANY_DEVICE = DEVICE_RATES["NVIDIA H200"]


def seconds(found: Program, rates: DeviceRates = _ANY_DEVICE) -> float:
    """Time of forward and backward at these rates."""
    matmuls = sum(step.operations for step in found.steps) / rates.matmul_rate
    passes = sum(step.bytes for step in found.steps) / rates.bandwidth
    # Loops over the same parts, one after another, go over the same chunk or blocks.
    loops = {(stage.over, stage.start, stage.sizes) for stage in found.stages if stage.over}
    parts = sum(len(sizes) for _, _, sizes in loops)
    return matmuls + passes + parts * rates.part_seconds


def predicted_seconds(problem: Problem, plan: Plan, device_name: str | None) -> float | None:
    """Time of forward and backward of a region on a device that CUDA calls so, in seconds.

    None, "unknown", where there are no rates: on a CPU, for other devices than those of `DEVICE_RATES`, for float32 and
    float64, and where row work is PyTorch's.
    """
    rates = DEVICE_RATES.get(device_name or "")
    if rates is None or problem.dtype.itemsize != 2 or problem.device_type != "cuda":
        return None
    found = program(problem, plan)
    is_unknown = any(step.runs_in == "PyTorch" and step.is_row_work for step in found.steps)
    return None if is_unknown else seconds(found, rates)


def device_name(device_type: str) -> str | None:
    """The name of the device that is there; None for a CPU, and where a trace was compiled without its device."""
    return torch.cuda.get_device_name() if device_type == "cuda" and torch.cuda.is_available() else None
