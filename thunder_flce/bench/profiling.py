"""What profilers say of a step: how long it waits for collectives, and what it calls."""

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from thunder_flce.bench.measuring import Step


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
            step(lambda phase: None)
        torch.cuda.synchronize()
    collectives: list[tuple[float, float]] = []
    others: list[tuple[float, float]] = []
    for event in _on_device(profiler):
        kind = collectives if event.name.startswith("nccl") else others
        kind.append((event.time_range.start, event.time_range.end))
    return exposed(collectives, others) / 1e3 / calls


def _on_device(profiler: profile) -> Iterator[Any]:
    """The kernels, copies and fills. An annotation spans kernels of others."""
    for event in profiler.events() or ():
        # Device types are equal, but not the same object.
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation:
            yield event


def device_operations(run: Callable[[], object], *, device: str) -> int | None:
    """How many kernels, copies and fills something starts, which has run before; None on a CPU."""
    if device != "cuda":
        return None
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    return sum(1 for _ in _on_device(profiler))


def python_calls(run: Callable[[], object]) -> int:
    """How many functions Python calls, its own and those in C, in the forward and the backward of something."""
    calls = 0

    def seen(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    # Otherwise the backward of a GPU runs on a thread of its own, which nobody would watch.
    with torch.autograd.set_multithreading_enabled(False):
        sys.setprofile(seen)
        try:
            run()
        finally:
            sys.setprofile(before)
    # The last is sys.setprofile.
    return calls - 1


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
