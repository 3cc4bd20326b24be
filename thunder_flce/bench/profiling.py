"""What torch's profiler says of a step: a trace and a memory snapshot, and how long it waits for collectives."""

import re
from collections.abc import Iterable
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from thunder_flce.bench.measuring import Step, synchronize

HISTORY = 100_000
"""Allocations that a memory snapshot remembers."""


def write_profile(step: Step, directory: Path, name: str, *, device: str) -> None:
    """Runs a step again, and writes what it did.

    Writes `NAME.trace.json`, for Perfetto or chrome://tracing, and on CUDA `NAME.memory.pickle`, for
    https://pytorch.org/memory_viz.

    Args:
        step: what to profile; it has run before, so that nothing is compiled any more.
        directory: where to write, made if it is not there.
        name: the stem of the file names, made fit for them.
        device: "cuda" or "cpu".
    """
    directory.mkdir(parents=True, exist_ok=True)
    stem, on_cuda = directory / slug(name), device == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    with profile(activities=activities, profile_memory=True, record_shapes=True) as profiler:
        step(profiler_mark)
        synchronize(device)
    profiler.export_chrome_trace(f"{stem}.trace.json")
    if on_cuda:
        torch.cuda.memory._record_memory_history(max_entries=HISTORY)
        try:
            step(profiler_mark)
            torch.cuda.synchronize()
            torch.cuda.memory._dump_snapshot(f"{stem}.memory.pickle")
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)


def exposed_collectives_ms(step: Step, *, device: str, calls: int = 3) -> float | None:
    """How long of a step a collective of NCCL runs and no other kernel does; None on a CPU.

    Args:
        step: what to profile; it has run before.
        device: "cuda" or "cpu".
        calls: of the step, one right after the other; the result is their mean.
    """
    if device != "cuda":
        return None
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(calls):
            step(profiler_mark)
        torch.cuda.synchronize()
    collectives: list[tuple[float, float]] = []
    others: list[tuple[float, float]] = []
    for event in profiler.events() or ():
        # An annotation spans kernels of others. Device types are equal, but not the same object.
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation:
            kind = collectives if event.name.startswith("nccl") else others
            kind.append((event.time_range.start, event.time_range.end))
    return exposed(collectives, others) / 1e3 / calls


def exposed(intervals: Iterable[tuple[float, float]], others: Iterable[tuple[float, float]]) -> float:
    """How much of the union of intervals (start, end) is outside of the union of others."""
    others = list(others)
    return _covered([*intervals, *others]) - _covered(others)


def _covered(intervals: Iterable[tuple[float, float]]) -> float:
    """The length of the union."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(end - max(start, reached), 0)
        reached = max(reached, end)
    return total


def profiler_mark(phase: str) -> None:
    """Shows where a phase ends in the trace."""
    with torch.profiler.record_function(f"end of {phase}"):
        pass


def slug(text: str) -> str:
    """Makes "S1 8192 × 128256 flce, 512 rows" into "S1-8192-128256-flce-512-rows"."""
    return re.sub(r"[^\w.%=]+", "-", text, flags=re.ASCII).strip("-").replace("%", "pct")
