"""What a plan is predicted to take: a sum over its steps, for comparing plans before one is run.

    time = operations of the products / product rate + bytes of the row passes / bandwidth + chunks × chunk cost

The products are taken at the rate that the three of a loss region reach together, and everything else at the speed of
memory; nothing overlaps. Ignored rows are counted as if they were computed, since their number is not known. On the
H200 that the constants are from, predictions are within 4% of the measurements, or 8% where the device waits for the
host between products of a tenth of a millisecond (tests/test_cost.py).
"""

from dataclasses import dataclass, replace

import torch

from thunder_flce.execution.row_kernels.interface import runs_nvfuser
from thunder_flce.options import Options
from thunder_flce.planning.plan import Problem, make_plan, products_end_early
from thunder_flce.planning.steps import PlannedRegion, backward_stages, forward_stages


@dataclass(frozen=True, kw_only=True)
class DeviceRates:
    """What a device reaches on the steps of a loss region, in 16 bits."""

    product_rate: float
    """Operations a second."""

    bandwidth: float
    """Bytes a second, read and written."""

    chunk_seconds: float
    """What each repetition of a stage costs beside its products and passes."""


# By the name that CUDA reports. product_rate is 6·T·H·V over the time of "three products" in traces/h200/regions.jsonl
# (644e12 to 686e12); bandwidth is what nvFuser's in-place gradient reaches on its own, on the same device;
# chunk_seconds is fitted to what is then left of the times of "flce" in the same file.
DEVICE_RATES = {
    "NVIDIA H200": DeviceRates(product_rate=680e12, bandwidth=4.1e12, chunk_seconds=25e-6),
}


def predicted_seconds(region: PlannedRegion, device_name: str | None) -> float | None:
    """Time of forward and backward of the region, in seconds.

    None, "unknown", where there are no rates: on a CPU, for other devices than those of `DEVICE_RATES`, where nvFuser
    is missing, for float32 and float64, and for products that end early, on the device.

    Args:
        region: the region and how it runs.
        device_name: as `torch.cuda.get_device_name` has it; None for none.
    """
    rates = DEVICE_RATES.get(device_name)
    problem = region.problem
    is_known = problem.dtype.itemsize == 2 and runs_nvfuser(dtype=problem.dtype, device_type=problem.device_type)
    if rates is None or not is_known or products_end_early(problem, region.plan):
        return None
    directions = (forward_stages(region), backward_stages(region))
    steps = [step for stages in directions for stage in stages for step in stage.steps]
    products = sum(step.operations for step in steps) / rates.product_rate
    passes = sum(step.bytes for step in steps) / rates.bandwidth
    # Stages of one title go over the same chunk or slabs, one after another.
    parts = [{stage.title: stage.repeats for stage in stages if stage.title} for stages in directions]
    return products + passes + sum(sum(part.values()) for part in parts) * rates.chunk_seconds


def device_name(device_type: str) -> str | None:
    """The name of the device that is there; None for a CPU, and where a trace was compiled without its device."""
    return torch.cuda.get_device_name() if device_type == "cuda" and torch.cuda.is_available() else None


def alternatives(region: PlannedRegion) -> list[PlannedRegion]:
    """Other ways to run a region: half and twice the chunk, and the other strategies, each with its own chunks.

    They keep what its plan does with ignored rows, and heed no memory budget. A smaller chunk may come with tokens
    whose logits lie in the memory of dW.
    """
    problem, plan = region.problem, region.plan
    chosen = Options(ignored_rows=plan.ignored_rows)
    others = [Options(ignored_rows=chosen.ignored_rows, strategy=strategy) for strategy in _strategies(problem)]
    keeps_strategy = chosen if plan.strategy == "loss_only" else replace(chosen, strategy=plan.strategy)
    if plan.strategy != "save_logits":
        sizes = {plan.chunk_rows // 2, min(plan.chunk_rows * 2, problem.tokens)}
        others = [replace(keeps_strategy, chunk_rows=rows) for rows in sorted(sizes) if rows] + others
    plans = [make_plan(problem, options) for options in others]
    return [replace(region, plan=other) for at, other in enumerate(plans) if other not in (plan, *plans[:at])]


def _strategies(problem: Problem) -> list[str]:
    """The strategies that can give the gradients that are needed."""
    if not problem.needs_grad:
        return []
    in_forward = ["gradients_in_forward"] if not problem.row_gradients else []
    return [*in_forward, "save_logits", "recompute_logits"]
