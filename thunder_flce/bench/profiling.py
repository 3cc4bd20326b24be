"""A torch profiler trace and a memory snapshot of one step."""

import re
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from thunder_flce.bench.measuring import Step

HISTORY = 100_000
"""Allocations that a memory snapshot remembers."""


def write_profile(step: Step, directory: Path, name: str, *, device: str) -> list[Path]:
    """Runs a step again, and writes what it did.

    Args:
        step: what to profile; it has run before, so that nothing is compiled any more.
        directory: where to write, made if it is not there.
        name: the stem of the file names, made fit for them.
        device: "cuda" or "cpu".

    Returns:
        `NAME.trace.json`, for Perfetto or chrome://tracing, and on CUDA `NAME.memory.pickle`, for
        https://pytorch.org/memory_viz.
    """
    directory.mkdir(parents=True, exist_ok=True)
    stem = slug(name)
    trace = directory / f"{stem}.trace.json"
    on_cuda = device == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    with profile(activities=activities, profile_memory=True, record_shapes=True) as profiler:
        step(profiler_mark)
        if on_cuda:
            torch.cuda.synchronize()
    profiler.export_chrome_trace(str(trace))
    if not on_cuda:
        return [trace]
    snapshot = directory / f"{stem}.memory.pickle"
    torch.cuda.memory._record_memory_history(max_entries=HISTORY)
    try:
        step(profiler_mark)
        torch.cuda.synchronize()
        torch.cuda.memory._dump_snapshot(str(snapshot))
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    return [trace, snapshot]


def profiler_mark(phase: str) -> None:
    """Shows where a phase ends in the trace."""
    with torch.profiler.record_function(f"end of {phase}"):
        pass


def slug(text: str) -> str:
    """Makes "S1 8192 × 128256 flce, 512 rows" into "S1-8192-128256-flce-512-rows"."""
    return re.sub(r"[^\w.%=]+", "-", text, flags=re.ASCII).strip("-").replace("%", "pct")
