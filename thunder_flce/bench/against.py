"""Methods against a base, the two in turns, call by call: what a change gains or costs.

The base is the same method of another checkout, or one method for all. This project's are called without thunder
(`methods.our_function`), so that both sides take the same way.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from thunder_flce.bench.measuring import (
    TOTAL,
    DeviceLost,
    Progress,
    Schedule,
    Step,
    attempt,
    peak_bytes,
    release,
    synchronize,
    take_paired_turns,
)
from thunder_flce.bench.methods import Method, build_without_thunder, our_function
from thunder_flce.bench.regions import run_step
from thunder_flce.bench.shapes import Inputs, Shape, ShapeRow

SCHEDULE = Schedule(rounds=4, calls=50, turn_ms=800, settle_ms=300)
"""At 8192 × 128256 × 4096, 40 pairs of a step of 40 ms in 5 seconds."""


@dataclass(frozen=True, kw_only=True)
class Base:
    """What methods are compared with."""

    name: str
    """What records call it: a commit, a folder or a method."""

    folder: Path | None = None
    """The folder of another checkout, whose method of the same name is meant; None: `name` is a method."""


@dataclass(frozen=True, kw_only=True)
class Row(ShapeRow):
    """What was measured of one method and its base on one shape."""

    base: str
    method: str
    time_ms: float | None = None
    """Median of forward + backward."""
    base_time_ms: float | None = None
    ratio: float | None = None
    """Median of the ratios of two calls that followed each other, with the 20th and 80th percentile."""
    ratio_p20: float | None = None
    ratio_p80: float | None = None
    pairs: int | None = None
    """How many ratios those are of."""
    above_outputs_gb: float | None = None
    """Peak above the inputs and the gradients, in 10⁹ bytes."""
    base_above_outputs_gb: float | None = None
    memory_ratio: float | None = None
    """The first over the second; None where the second is not above 0."""
    failed: str | None = None


def measure(
    shape: Shape, methods: list[str], base: Base, *, device: str, schedule: Schedule, progress: Progress
) -> Iterator[Row]:
    """Measures methods and their bases on one shape.

    Args:
        shape: what to measure.
        methods: names that `methods.build` knows; with another checkout as the base, of this project only.
        base: what they are compared with.
        device: "cuda" or "cpu".
        schedule: how long; a call is one of both.
        progress: called before each step.

    Raises:
        DeviceLost: where a method, whose row has come, makes further measurements in this process impossible.
    """
    row = partial(Row, **ShapeRow.fields_of(shape), base=base.name)
    torch.compiler.reset()
    pairs: dict[str, tuple[Step, Step]] = {}
    memory: dict[str, dict[str, Any]] = {}
    try:
        with attempt("inputs", device) as tried:
            release(device)
            inputs = Inputs.random(shape, device)
        if tried.failed is not None:
            yield row(method="inputs", failed=tried.failed)
            return
        for name in methods:
            progress(f"{name}: first calls")
            with attempt(name, device) as tried:
                one, other = (partial(run_step, inputs, method) for method in _methods(name, base))
                memory[name] = _memory(one, other, shape, device)
                pairs[name] = one, other
            if tried.failed is not None:
                yield row(method=name, failed=tried.failed)
        outcomes = take_paired_turns(pairs, schedule, device=device, progress=progress)
    except DeviceLost as lost:
        yield row(method=lost.method, failed=lost.reason)
        raise
    for name, outcome in outcomes.items():
        if outcome.failed is not None:
            yield row(method=name, failed=outcome.failed)
        else:
            yield row(method=name, **outcome.spread(), **memory[name])


def _methods(name: str, base: Base) -> tuple[Method, Method]:
    """The method and the one that it is compared with."""
    other = build_without_thunder(base.name) if base.folder is None else our_function(name, base.folder)
    return build_without_thunder(name), other


def _memory(one: Step, other: Step, shape: Shape, device: str) -> dict[str, Any]:
    """Calls both once, then once more for their memory."""
    peaks = []
    for step in (one, other):
        step(lambda phase: None)
        synchronize(device)
        peaks.append((peak_bytes(step, device)[TOTAL] - shape.output_bytes) / 1e9)
    return {
        "above_outputs_gb": peaks[0],
        "base_above_outputs_gb": peaks[1],
        "memory_ratio": peaks[0] / peaks[1] if peaks[1] > 0 else None,
    }
