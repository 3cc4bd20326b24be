"""Whole loss regions: forward, backward and both; time, peak memory and error of all methods in one run."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thunder_flce.bench.measuring import (
    TOTAL,
    DeviceLost,
    Mark,
    Outcome,
    PhasedRow,
    Progress,
    Schedule,
    Step,
    attempt,
    peak_bytes,
    release,
    synchronize,
    take_turns,
)
from thunder_flce.bench.methods import Method, build
from thunder_flce.bench.profiling import write_profile
from thunder_flce.bench.reference import Reference, make_reference, matmuls, relative_error
from thunder_flce.bench.shapes import Inputs, Shape, ShapeRow
from thunder_flce.execution.matmul.tuning import tunings

FLOOR = "three matmuls"

SCHEDULE = Schedule(calls=200, turn_ms=1000)
"""Turns of a second, because the counter of energy moves every 20 to 100 ms only."""

RegionStep = Callable[[Mark], tuple[Tensor, dict[str, Tensor]]]
"""As `measuring.Step`; returns the loss and the gradients by the names of `Inputs.named_operands`."""


@dataclass(frozen=True, kw_only=True)
class Row(PhasedRow, ShapeRow):
    """What was measured of one method on one shape."""

    axis: str | None = None
    """What a sweep changes: "context" or "vocabulary"."""
    ratio: float | None = None
    """Time over that of the three matmuls alone."""
    tflops: float | None = None
    """10¹² operations a second, counting `Shape.operations` and nothing else."""
    energy_j: float | None = None
    """What forward + backward take of the device's energy: the mean power while they are timed, by their time."""
    memory_gb: float | None = None
    """Peak above the inputs, in 10⁹ bytes."""
    above_outputs_gb: float | None = None
    """The peak less the gradients themselves."""
    forward_memory_gb: float | None = None
    """As memory_gb, of the forward alone."""
    backward_memory_gb: float | None = None
    loss_error: float | None = None
    """|loss − reference| / |reference|"""
    dx_error: float | None = None
    """‖dX − reference‖ / ‖reference‖, the reference being float32 (float64 for float32 and float64 inputs)."""
    dw_error: float | None = None
    dbias_error: float | None = None
    dy_error: float | None = None
    """Of the gradients of an adapter: y (tokens, rank) and B (vocab, rank)."""
    db_error: float | None = None
    first_call_s: float | None = None
    """The first forward + backward, with all that is compiled for it."""
    tuned_products: list[dict[str, Any]] | None = None
    """The matmuls whose algorithm was chosen during the first call: `tuning.Tuning`."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How regions are measured."""

    device: str
    """"cuda" or "cpu"."""

    schedule: Schedule
    errors: bool = True
    """Whether the gradients are compared with the reference."""

    axis: str | None = None
    profile: Path | None = None
    """Where to write a trace and a memory snapshot of each method; None for none."""


def measure(shape: Shape, methods: list[str], settings: Settings, progress: Progress) -> Iterator[Row]:
    """Measures methods on one shape; a row comes as soon as it is known, those that failed early come first.

    Args:
        shape: what to measure.
        methods: names that `methods.build` knows.
        settings: how.
        progress: called before each step.

    Raises:
        DeviceLost: where a method, whose row has come, makes further measurements in this process impossible.
    """
    row = partial(Row, **ShapeRow.fields_of(shape), axis=settings.axis)
    try:
        # What was compiled for an earlier shape would make torch.compile try symbolic sizes, or give up.
        torch.compiler.reset()
        with attempt("inputs", settings.device) as tried:
            release(settings.device)
            inputs = Inputs.random(shape, settings.device)
        if tried.failed is not None:
            yield row(method="inputs", failed=tried.failed)
            return
        yield from _rows(shape, methods, settings, row=row, inputs=inputs, progress=progress)
    except DeviceLost as lost:
        yield row(method=lost.method, failed=lost.reason)
        raise


def _rows(
    shape: Shape, methods: list[str], settings: Settings, *, row: Callable[..., Row], inputs: Inputs, progress: Progress
) -> Iterator[Row]:
    device, reference = settings.device, None
    if settings.errors:
        progress("reference")
        with attempt("reference", device) as tried:
            reference = make_reference(inputs)
        if tried.failed is not None:
            yield row(method="reference", failed=tried.failed)
    steps: dict[str, Step] = {}
    numbers: dict[str, dict[str, Any]] = {FLOOR: {}}
    for name in methods:
        progress(f"{name}: first call")
        with attempt(name, device) as tried:
            step = partial(run_step, inputs, build(name))
            known = tunings()
            numbers[name], peaks, _ = first_calls(step, reference, device)
            numbers[name] |= {
                "memory_gb": peaks[TOTAL] / 1e9,
                "above_outputs_gb": (peaks[TOTAL] - shape.output_bytes) / 1e9,
                "forward_memory_gb": peaks["forward"] / 1e9,
                "backward_memory_gb": peaks["backward"] / 1e9,
            }
            if tuned := [tuning.to_dict() for tuning in tunings() if tuning not in known]:
                numbers[name]["tuned_products"] = tuned
            steps[name] = step
        if tried.failed is not None:
            yield row(method=name, failed=tried.failed)
    del reference
    with attempt(FLOOR, device) as tried:
        steps = {FLOOR: matmuls(inputs, 3), **steps}
    if tried.failed is not None:
        yield row(method=FLOOR, failed=tried.failed)

    outcomes = take_turns(steps, settings.schedule, device=device, progress=progress)
    floor_ms = outcomes[FLOOR].median(TOTAL) if FLOOR in outcomes else None
    for name, outcome in outcomes.items():
        if outcome.failed is None:
            yield row(method=name, **_times(outcome, floor_ms, shape), **numbers[name])
        else:
            yield row(method=name, failed=outcome.failed)
    if settings.profile is not None:
        for name in (name for name, outcome in outcomes.items() if outcome.failed is None):
            progress(f"{name}: profile")
            write_profile(steps[name], settings.profile, f"{shape} {name}", device=device)


def _times(outcome: Outcome, floor_ms: float | None, shape: Shape) -> dict[str, Any]:
    times = outcome.spread(TOTAL, "time_ms")
    return {
        **times,
        **outcome.spread("forward", "forward_ms"),
        **outcome.spread("backward", "backward_ms"),
        "ratio": floor_ms and times["time_ms"] / floor_ms,
        "tflops": shape.operations / times["time_ms"] / 1e9,
        "energy_j": outcome.joules(),
    }


def first_calls(
    step: RegionStep, reference: Reference | None, device: str
) -> tuple[dict[str, Any], dict[str, int], int]:
    """Compiles; then errors, once, and memory, once.

    Returns:
        The seconds and the errors by their names in a row, the peak bytes of each phase, and the gradients' bytes.
    """
    start = time.perf_counter()
    loss, gradients = step(lambda phase: None)
    synchronize(device)
    numbers = {"first_call_s": time.perf_counter() - start}
    if reference is not None:
        numbers["loss_error"] = relative_error(loss, reference.loss)
        for name, gradient in gradients.items():
            numbers[f"{name}_error"] = relative_error(gradient, reference.gradients[name])
    gradient_bytes = sum(gradient.nbytes for gradient in gradients.values())
    del loss, gradients
    return numbers, peak_bytes(step, device), gradient_bytes


def run_step(inputs: Inputs, method: Method, mark: Mark) -> tuple[Tensor, dict[str, Tensor]]:
    """Forward and backward; returns the loss and the gradients by name, which it takes away from the inputs.

    Raises:
        RuntimeError: where an operand got no gradient.
    """
    operands = inputs.named_operands()
    try:
        loss = method(inputs)
        mark("forward")
        if operands:
            loss.backward()
        mark("backward")
        gradients = {name: tensor.grad for name, tensor in operands.items() if tensor.grad is not None}
    finally:
        for tensor in operands.values():
            tensor.grad = None
    if missing := operands.keys() - gradients.keys():
        raise RuntimeError(f"no {' and no '.join(sorted(missing))} came of the backward")
    return loss.detach(), gradients
