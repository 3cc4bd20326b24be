"""Methods against a base, the two in turns, call by call: what a change gains or costs.

The base is the same method of another checkout, or one method for all. This project's are called without thunder
(`methods.our_function`), so that both sides take the same way.
"""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from thunder_flce.bench.measuring import (
    GB,
    TIME,
    TOTAL,
    Schedule,
    Session,
    Step,
    TimedRow,
    column,
    paired_spread,
    peak_bytes,
    release,
    synchronize,
)
from thunder_flce.bench.methods import Method, build_without_thunder, our_function
from thunder_flce.bench.regions import run_step
from thunder_flce.bench.shapes import Inputs, Shape

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
class Row(TimedRow):
    """What was measured of one method and its base on one shape."""

    shape: Shape
    base: str
    base_time_ms: float | None = column("base", TIME)
    ratio: float | None = column("ratio", "{:.4f}")
    """Median of the ratios of two calls that followed each other, with the 20th and 80th percentile."""
    ratio_p20: float | None = None
    ratio_p80: float | None = None
    pairs: int | None = column("pairs")
    """How many ratios those are of."""
    above_outputs_gb: float | None = column("peak − gradients, GB", GB)
    """Peak above the inputs and the gradients, in 10⁹ bytes."""
    base_above_outputs_gb: float | None = column("base", GB)
    memory_ratio: float | None = column("ratio", "{:.3f}")
    """The first over the second; None where the second is not above 0."""


def measure(shape: Shape, methods: list[str], session: Session, *, base: Base) -> None:
    """Measures methods and their bases on one shape.

    Args:
        shape: what to measure.
        methods: names that `methods.build` knows; with another checkout as the base, of this project only.
        session: where, for how long (a call is one of both), and who is told.
        base: what they are compared with.
    """
    device, session = session.device, replace(session, row=partial(Row, shape=shape, base=base.name))
    torch.compiler.reset()
    pairs: dict[str, tuple[Step, Step]] = {}
    memory: dict[str, dict[str, Any]] = {}
    with session.attempt("inputs") as tried:
        release(device)
        inputs = Inputs.random(shape, device)
    if tried.failed:
        return
    for name in methods:
        session.progress(f"{name}: first calls")
        with session.attempt(name):
            one, other = (partial(run_step, inputs, method) for method in _methods(name, base))
            memory[name] = _memory(one, other, shape, device)
            pairs[name] = one, other
    for name, pairs_ms in session.take_paired_turns(pairs).items():
        session.report(method=name, **paired_spread(pairs_ms), **memory[name])


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
