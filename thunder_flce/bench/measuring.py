"""Time and memory of anything that runs in phases, and what to do when it fails.

A GPU is power-limited: a method is the faster the cooler its predecessor left the chip. Each is therefore run for
`Schedule.settle_ms` before it is timed, methods take turns, and only numbers of one run compare.
"""

import gc
import statistics
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch

Mark = Callable[[str], None]
Step = Callable[[Mark], object]
"""Runs once and calls its argument with the name of each phase where that ends, as in mark("forward")."""


def no_mark(phase: str) -> None:
    """Of a step that nobody times."""


Progress = Callable[[str], None]
"""Called with a few words before each thing that takes a while."""

TOTAL = "total"
"""The phase from the start of a step to its last mark."""


TIME = "{:.3f}"
GB = "{:.4g}"
ERROR = "{:.1e}"
"""Formats of columns"""


def column(title: str, form: str = "{}") -> Any:
    """A field of a row, by default None, which tables show under a title and in a format as in str.format."""
    return field(default=None, metadata={"title": title, "form": form})


@dataclass(frozen=True, kw_only=True)
class TimedRow:
    """The fields of a record that say which method was timed, and how long it took."""

    method: str
    time_ms: float | None = column("both, ms", TIME)
    """Median of a whole step; with the 20th and 80th percentile, as for phases."""
    time_ms_p20: float | None = None
    time_ms_p80: float | None = None
    failed: str | None = None
    """Why nothing was measured; None where it was."""


@dataclass(frozen=True, kw_only=True)
class PhasedRow(TimedRow):
    """The same with the time of the forward and of the backward."""

    forward_ms: float | None = column("forward", TIME)
    forward_ms_p20: float | None = None
    forward_ms_p80: float | None = None
    backward_ms: float | None = column("backward", TIME)
    backward_ms_p20: float | None = None
    backward_ms_p80: float | None = None


class Unavailable(Exception):
    """A method that is not installed, or cannot do what it is asked for; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How long each method is measured."""

    rounds: int = 4
    """Turns of each method."""

    calls: int = 5
    """Timings a turn, at most."""

    turn_ms: float = 500
    """How long the timings of a turn may take together; two are always made."""

    settle_ms: float = 250
    """For how long a method runs before it is timed, at least once."""


def _reason(error: Exception) -> str:
    if isinstance(error, Unavailable):
        return str(error)
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def _forget_frames(error: BaseException | None) -> None:
    """Lets go of what the functions that failed had in their variables, which the traceback holds on to."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


def synchronize(device: str) -> None:
    """Waits until the device has done what it was asked to."""
    if device == "cuda":
        torch.cuda.synchronize()


def release(device: str) -> None:
    """Gives back the memory that nobody refers to."""
    gc.collect()
    synchronize(device)
    if device == "cuda":
        torch.cuda.empty_cache()


def laps_ms(steps: Iterable[Step], device: str) -> list[dict[str, float]]:
    """The times of the phases of steps that follow each other without waiting for the device, as in training."""
    laps: list[list[tuple[str, Any]]] = []
    for step in steps:
        marks = [("start", _now(device))]
        laps.append(marks)

        def mark(phase: str, marks: list[tuple[str, Any]] = marks) -> None:
            marks.append((phase, _now(device)))

        step(mark)
    synchronize(device)
    return [
        {
            **{phase: _ms(before, end) for (_, before), (phase, end) in pairwise(marks)},
            TOTAL: _ms(marks[0][1], marks[-1][1]),
        }
        for marks in laps
    ]


def _now(device: str) -> torch.cuda.Event | float:
    if device != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _ms(start: Any, end: Any) -> float:
    return start.elapsed_time(end) if isinstance(start, torch.cuda.Event) else (end - start) * 1e3


def settle(steps: Sequence[Step], schedule: Schedule, device: str) -> int:
    """Runs steps in turns before they are timed; returns how often all of them can be timed in a turn."""
    settled = time.perf_counter() + schedule.settle_ms / 1e3
    while True:
        call_ms = sum(lap[TOTAL] for lap in laps_ms(steps, device))
        if time.perf_counter() >= settled:
            break
    # The first call after waiting for the device finds it idle; the timed ones follow it without a gap.
    for step in steps:
        step(no_mark)
    return max(min(schedule.calls, int(schedule.turn_ms / max(call_ms, 1e-3))), 2)


def timed_turn(step: Step, schedule: Schedule, device: str) -> list[dict[str, float]]:
    """The times of the phases of each call of a turn."""
    return laps_ms([step] * settle([step], schedule, device), device)


def spread(values: Iterable[float], name: str) -> dict[str, float]:
    """Median and 20th and 80th percentile, under `name` with "", "_p20" and "_p80"."""
    ordered = sorted(values)
    last = len(ordered) - 1
    return {
        name: statistics.median(ordered),
        f"{name}_p20": ordered[round(0.2 * last)],
        f"{name}_p80": ordered[round(0.8 * last)],
    }


@dataclass(frozen=True)
class Outcome:
    """What the timing of one method gave."""

    laps_ms: list[dict[str, float]]
    """The time of each phase of each call"""

    def median(self, phase: str) -> float:
        """Milliseconds."""
        return statistics.median(lap[phase] for lap in self.laps_ms)

    def spread(self, *phases: str) -> dict[str, float]:
        """Median and 20th and 80th percentile of a whole step, and of phases, as fields of a row."""
        names = {TOTAL: "time_ms", **{phase: f"{phase}_ms" for phase in phases}}
        spreads = (spread((lap[phase] for lap in self.laps_ms), name) for phase, name in names.items())
        return {name: value for spread in spreads for name, value in spread.items()}


@dataclass
class Attempt:
    """What became of something that may fail."""

    failed: bool = False


@dataclass(frozen=True, kw_only=True)
class Session:
    """Where and for how long methods are measured, and who is told of it."""

    device: str
    """"cuda" or "cpu"."""

    progress: Progress

    write: Callable[[Any], None]
    """Called with each row as soon as it is known."""

    schedule: Schedule = Schedule()

    row: Callable[..., Any] = TimedRow
    """Makes a row of the fields that are reported."""

    def with_fields(self, **fields: Any) -> "Session":
        """The same session, all of whose rows have these fields."""
        return replace(self, row=partial(self.row, **fields))

    def report(self, **fields: Any) -> None:
        """Writes a row."""
        self.write(self.row(**fields))

    @contextmanager
    def attempt(self, *methods: str) -> Iterator[Attempt]:
        """Turns any failure inside into a row of each of these methods, and frees what the failed one held."""
        tried = Attempt()
        try:
            yield tried
        # A peer may fail in any way; its row says so and the others go on.
        except Exception as error:
            tried.failed = True
            for method in methods:
                self.report(method=method, failed=_reason(error))
            _forget_frames(error)
        if tried.failed:
            release(self.device)

    def take_turns(self, steps: Mapping[str, Step], turn: Callable[..., Any] = timed_turn) -> dict[str, Outcome]:
        """Times methods that take turns; one that fails is left out from there on."""
        found = self.rounds(steps, turn)
        return {name: Outcome([lap for turn in turns for lap in turn]) for name, turns in found.items()}

    def rounds(self, steps: Mapping[str, Any], turn: Callable[[Any, Schedule, str], Any]) -> dict[str, list[Any]]:
        """What `turn` gave in each round, of methods that take turns; nothing of those that failed."""
        found: dict[str, list[Any]] = {name: [] for name in steps}
        for number in range(1, self.schedule.rounds + 1):
            for name in list(found):
                self.progress(f"round {number} of {self.schedule.rounds}: {name}")
                with self.attempt(name) as tried:
                    found[name].append(turn(steps[name], self.schedule, self.device))
                if tried.failed:
                    del found[name]
        return found


def peak_bytes(step: Step, device: str) -> dict[str, int]:
    """The most memory that each phase of a step holds at a time, in bytes, on top of what was held before the step.

    Counts what PyTorch allocates on the device, whether Python, autograd or a compiled function asks for it. What the
    step leaves behind until its last mark, such as gradients, counts as well.
    """
    peaks = _cuda_peaks(step) if device == "cuda" else _cpu_peaks(step)
    return {**peaks, TOTAL: max(peaks.values())}


def _cuda_peaks(step: Step) -> dict[str, int]:
    peaks: dict[str, int] = {}

    def mark(phase: str) -> None:
        torch.cuda.synchronize()
        peaks[phase] = torch.cuda.max_memory_allocated() - before
        torch.cuda.reset_peak_memory_stats()

    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step(mark)
    return peaks


def _cpu_peaks(step: Step) -> dict[str, int]:
    """The CPU's allocator keeps no peak, but tells the profiler of every block that it gives out or takes back."""

    def started() -> Any:
        return torch.autograd.profiler.profile(profile_memory=True).__enter__()

    peaks: dict[str, int] = {}
    held, profiler = 0, started()

    def mark(phase: str) -> None:
        nonlocal held, profiler
        profiler.__exit__(None, None, None)
        peak = held
        for event in profiler.kineto_results.events():
            if event.name() == "[memory]":
                held += event.nbytes()
                peak = max(peak, held)
        peaks[phase] = peak
        profiler = started()

    try:
        step(mark)
    finally:
        profiler.__exit__(None, None, None)
    return peaks
