"""Whole loss regions: forward, backward and both; time, peak memory and error of all methods in one run."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from thunder_flce.bench.measuring import (
    ERROR,
    GB,
    TOTAL,
    Mark,
    PhasedRow,
    Schedule,
    Session,
    Step,
    column,
    peak_bytes,
    release,
    synchronize,
)
from thunder_flce.bench.methods import Method, build
from thunder_flce.bench.reference import Reference, make_reference, matmuls, relative_error
from thunder_flce.bench.shapes import Inputs, Shape
from thunder_flce.engine.matmul.algorithms import tunings

FLOOR = "three matmuls"

SCHEDULE = Schedule(calls=200, turn_ms=1000)

RegionStep = Callable[[Mark], tuple[Tensor, dict[str, Tensor]]]
"""As `measuring.Step`; returns the loss and the gradients by the names of `Inputs.named_operands`."""


@dataclass(frozen=True, kw_only=True)
class Row(PhasedRow):
    """What was measured of one method on one shape."""

    shape: Shape
    ratio: float | None = column("× matmuls", "{:.3f}")
    """Time over that of the three matmuls alone."""
    tflops: float | None = column("TFLOP/s", "{:.4g}")
    """10¹² operations a second, counting `Shape.operations` and nothing else."""
    memory_gb: float | None = column("peak, GB", GB)
    """Peak above the inputs, in 10⁹ bytes."""
    above_outputs_gb: float | None = column("peak − gradients, GB", GB)
    """The peak less the gradients themselves."""
    forward_memory_gb: float | None = None
    """As memory_gb, of the forward alone."""
    backward_memory_gb: float | None = None
    loss_error: float | None = column("loss error", ERROR)
    """|loss − reference| / |reference|"""
    dx_error: float | None = column("dX error", ERROR)
    """‖dX − reference‖ / ‖reference‖, the reference being float32 (float64 for float32 and float64 inputs)."""
    dw_error: float | None = column("dW error", ERROR)
    dbias_error: float | None = column("dbias error", ERROR)
    dy_error: float | None = column("dy error", ERROR)
    """Of the gradients of an adapter: y (tokens, rank) and B (vocab, rank)."""
    db_error: float | None = column("dB error", ERROR)
    first_call_s: float | None = column("first call, s", "{:.1f}")
    """The first forward + backward, with all that is compiled for it."""
    tuned_products: list[dict[str, Any]] | None = None
    """The matmuls whose algorithm was chosen during the first call: `algorithms.Tuning`."""


def measure(shape: Shape, methods: list[str], session: Session) -> None:
    """Measures methods on one shape.

    Args:
        shape: what to measure.
        methods: names that `methods.build` knows.
        session: where, for how long, and who is told.
    """
    device, session = session.device, replace(session, row=partial(Row, shape=shape))
    # What was compiled for an earlier shape would make torch.compile try symbolic sizes, or give up.
    torch.compiler.reset()
    with session.attempt("inputs") as tried:
        release(device)
        inputs = Inputs.random(shape, device)
    if tried.failed:
        return
    reference = None
    session.progress("reference")
    with session.attempt("reference"):
        reference = make_reference(inputs)
    steps: dict[str, Step] = {}
    numbers: dict[str, dict[str, Any]] = {FLOOR: {}}
    for name in methods:
        session.progress(f"{name}: first call")
        with session.attempt(name):
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
    del reference
    with session.attempt(FLOOR):
        steps = {FLOOR: matmuls(inputs, 3), **steps}

    outcomes = session.take_turns(steps)
    floor_ms = outcomes[FLOOR].median(TOTAL) if FLOOR in outcomes else None
    for name, outcome in outcomes.items():
        times = outcome.spread("forward", "backward")
        session.report(
            method=name,
            **times,
            ratio=floor_ms and times["time_ms"] / floor_ms,
            tflops=shape.operations / times["time_ms"] / 1e9,
            **numbers[name],
        )


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
