"""Whole loss regions: forward, backward and both; time, peak memory and error of all methods in one run."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from thunder_flce.bench.measuring import (
    TOTAL,
    DeviceLost,
    Mark,
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
from thunder_flce.bench.reference import reference_gradients, relative_error, three_products
from thunder_flce.bench.shapes import Inputs, Shape, dtype_name

FLOOR = "three products"


@dataclass(frozen=True, kw_only=True)
class Row:
    """What was measured of one method on one shape."""

    shape: str
    name: str
    tokens: int
    vocab: int
    hidden: int
    bias: bool
    ignored: float
    dtype: str
    axis: str | None = None
    """What a sweep changes: "context" or "vocabulary"."""
    method: str
    time_ms: float | None = None
    """Median of forward + backward; with the 20th and 80th percentile, as for the two alone."""
    time_ms_p20: float | None = None
    time_ms_p80: float | None = None
    forward_ms: float | None = None
    forward_ms_p20: float | None = None
    forward_ms_p80: float | None = None
    backward_ms: float | None = None
    backward_ms_p20: float | None = None
    backward_ms_p80: float | None = None
    ratio: float | None = None
    """Time over that of the three products alone."""
    tflops: float | None = None
    """10¹² operations a second, counting the three products over the tokens that are not ignored, and nothing else."""
    memory_gb: float | None = None
    """Peak above the inputs, in 10⁹ bytes."""
    above_outputs_gb: float | None = None
    """The same, less the gradients themselves."""
    forward_memory_gb: float | None = None
    """As memory_gb, of the forward alone."""
    backward_memory_gb: float | None = None
    dx_error: float | None = None
    """‖dX − reference‖ / ‖reference‖, the reference being float32 (float64 for float32 and float64 inputs)."""
    dw_error: float | None = None
    dbias_error: float | None = None
    first_call_s: float | None = None
    """The first forward + backward, with all that is compiled for it."""
    failed: str | None = None


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
    region = _Region(shape, settings)
    try:
        yield from region.rows(methods, progress)
    except DeviceLost as lost:
        yield region.row(lost.method, failed=lost.reason)
        raise


class _Region:
    """The inputs of one shape, and what is measured with them."""

    def __init__(self, shape: Shape, settings: Settings):
        self._shape = shape
        self._settings = settings
        # What was compiled for an earlier shape would make torch.compile try symbolic sizes, or give up.
        torch.compiler.reset()
        release(settings.device)
        self._inputs = Inputs.random(shape, settings.device)

    def rows(self, methods: list[str], progress: Progress) -> Iterator[Row]:
        settings, shape = self._settings, self._shape
        progress("reference")
        reference = reference_gradients(self._inputs) if settings.errors else None
        steps: dict[str, Step] = {}
        numbers: dict[str, dict[str, float]] = {FLOOR: {}}
        for name in methods:
            progress(f"{name}: first call")
            with attempt(name, settings.device) as tried:
                method = build(name)
                numbers[name] = self._first_calls(method, reference)
                steps[name] = partial(self._step, method)
            method = None
            if tried.failed is not None:
                yield self.row(name, failed=tried.failed)
        del reference

        steps = {FLOOR: three_products(self._inputs), **steps}
        outcomes = take_turns(steps, settings.schedule, device=settings.device, progress=progress)
        floor_ms = outcomes[FLOOR].median(TOTAL)
        for name, outcome in outcomes.items():
            if outcome.failed is not None:
                yield self.row(name, failed=outcome.failed)
                continue
            time_ms = outcome.median(TOTAL)
            yield self.row(
                name,
                **outcome.spread(TOTAL, "time_ms"),
                **outcome.spread("forward", "forward_ms"),
                **outcome.spread("backward", "backward_ms"),
                ratio=floor_ms and time_ms / floor_ms,
                tflops=shape.operations / time_ms / 1e9,
                **numbers[name],
            )
        if settings.profile is not None:
            for name, step in steps.items():
                progress(f"{name}: profile")
                write_profile(step, settings.profile, f"{shape} {name}", device=settings.device)

    def _first_calls(self, method: Method, reference: list[Tensor] | None) -> dict[str, float]:
        """Compiles; then errors, once, and memory, once."""
        device = self._settings.device
        start = time.perf_counter()
        gradients = self._step(method, lambda phase: None)
        synchronize(device)
        numbers = {"first_call_s": time.perf_counter() - start}
        if reference is not None:
            for name, got, right in zip(("dx_error", "dw_error", "dbias_error"), gradients, reference, strict=False):
                numbers[name] = relative_error(got, right)
        del gradients
        peaks = peak_bytes(partial(self._step, method), device)
        return {
            **numbers,
            "memory_gb": peaks[TOTAL] / 1e9,
            "above_outputs_gb": (peaks[TOTAL] - self._shape.output_bytes) / 1e9,
            "forward_memory_gb": peaks["forward"] / 1e9,
            "backward_memory_gb": peaks["backward"] / 1e9,
        }

    def _step(self, method: Method, mark: Mark) -> list[Tensor]:
        """Forward and backward; returns the gradients, which it takes away from the inputs."""
        operands = self._inputs.operands()
        try:
            loss = method(self._inputs)
            mark("forward")
            loss.backward()
            mark("backward")
            gradients = [tensor.grad for tensor in operands]
        finally:
            for tensor in operands:
                tensor.grad = None
        if any(gradient is None for gradient in gradients):
            raise RuntimeError("not all of x, weight and bias got a gradient")
        return gradients

    def row(self, method: str, **numbers: object) -> Row:
        shape = self._shape
        return Row(
            shape=str(shape),
            name=shape.name,
            tokens=shape.tokens,
            vocab=shape.vocab,
            hidden=shape.hidden,
            bias=shape.bias,
            ignored=shape.ignored,
            dtype=dtype_name(shape.dtype),
            axis=self._settings.axis,
            method=method,
            **numbers,
        )
