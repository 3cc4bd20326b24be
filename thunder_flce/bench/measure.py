"""Time and memory of steps that take turns, and the handling of steps that fail.

A GPU is power-limited: a method runs faster if its predecessor left the chip cool. Each method therefore runs for
`Run.settle_ms` before it is timed, methods take turns, and only numbers of the same run can be compared.
"""

import gc
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

Mark = Callable[[str], None]
Step = Callable[[Mark], Any]
"""Runs a step once; calls its argument with a phase's name at the end of that phase, as in mark("forward")."""

Laps = list[dict[str, float]]
"""For each call of a step, the milliseconds of each phase, and of the whole call as `TOTAL`"""
TOTAL = "total"

MATMULS = {1: "one matmul", 2: "two matmuls", 3: "three matmuls", 4: "four matmuls"}
"""Names of the methods that times are compared with: matmuls alone, by their number"""


def no_mark(phase: str) -> None:
    """A `Mark` for steps that are not timed."""


class Unavailable(Exception):
    """Raised by a method that does not support a case; the message has the reason."""


def progress(text: str) -> None:
    """Overwrites the last line of a terminal; writes nothing if stderr is not a terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def synchronize(device: str) -> None:
    """Waits until the device has finished all work."""
    if device == "cuda":
        torch.cuda.synchronize()


def release(device: str) -> None:
    """Frees all unreferenced memory."""
    gc.collect()
    synchronize(device)
    if device == "cuda":
        torch.cuda.empty_cache()


@dataclass(kw_only=True)
class Run:
    """Methods that are measured together on one case."""

    device: str  # "cuda" or "cpu"
    rounds: int = 4  # turns of each method
    calls: int = 5  # timings per turn, at most
    turn_ms: float = 500  # time for all timings of a turn; there are at least two
    settle_ms: float = 250  # how long a method runs on a GPU before it is timed; on a CPU, two calls suffice
    strict: bool = False  # whether failures are raised, except `Unavailable` and missing packages
    write: Callable[[dict[str, Any]], object] | None = None  # called with each row as soon as it is known
    fields: dict[str, Any] = field(default_factory=dict)  # fields that all rows have
    rows: list[dict[str, Any]] = field(default_factory=list)  # rows known so far, as in JSON
    # Methods that `report` times: a step, which has run before, and further fields of the row. With "matmuls", the row
    # gets the "ratio" to the time of that number of matmuls, if these were added, too.
    added: dict[str, tuple[Step, dict[str, Any]]] = field(default_factory=dict)

    def row(self, method: str, **numbers: Any) -> None:
        """Adds a row, without numbers that are None."""
        fields = {name: number for name, number in numbers.items() if number is not None}
        self.rows.append({**self.fields, "method": method, **fields})
        if self.write is not None:
            self.write(self.rows[-1])

    @contextmanager
    def attempt(self, method: str) -> Iterator[None]:
        """Turns a failure inside the context into a row of the method, and frees the memory it held."""
        progress(method)
        try:
            yield
        # A peer may raise anything; its row has the message, and other methods continue.
        except Exception as error:
            is_available = not isinstance(error, Unavailable | ImportError)
            if self.strict and is_available:
                raise
            message = f"{type(error).__name__}: {error}" if is_available else str(error)
            is_full = isinstance(error, torch.OutOfMemoryError)
            self.row(method, failed="out of memory" if is_full else message.partition("\n")[0])
            # The tracebacks keep the local variables of the failed functions alive.
            chain: BaseException | None = error
            while chain is not None:
                traceback.clear_frames(chain.__traceback__)
                chain = chain.__context__
            release(self.device)

    def report(self, turn: Callable[[Step], Laps] | None = None) -> None:
        """Times the added methods, by `turn` or by default `Run.turn`, and adds their rows."""
        laps = self.in_turns({name: step for name, (step, _) in self.added.items()}, turn or self.turn)
        for name, method_laps in laps.items():
            numbers = self.added[name][1]
            times: dict[str, float] = {}
            for phase in (TOTAL, *method_laps[0]):
                times |= spread((lap[phase] for lap in method_laps), "time_ms" if phase == TOTAL else f"{phase}_ms")
            if (floor := MATMULS.get(numbers.get("matmuls", 0))) in laps:
                times["ratio"] = times["time_ms"] / statistics.median(lap[TOTAL] for lap in laps[floor])
            self.row(name, **times, **numbers)

    def in_turns(self, steps: Mapping[str, Any], turn: Callable[[Any], list[Any]]) -> dict[str, list[Any]]:
        """Returns the results of `turn` for each step, of all rounds; a step that fails is dropped."""
        results: dict[str, list[Any]] = {name: [] for name in steps}
        for number in range(1, self.rounds + 1):
            for name in list(results):
                with self.attempt(name):
                    progress(f"round {number} of {self.rounds}: {name}")
                    results[name] += turn(steps[name])
                    continue
                del results[name]
        return results

    def turn(self, step: Step) -> Laps:
        """Returns the times of one turn's calls."""
        return laps_ms((step for _ in self.repetitions(step)), self.device)

    def repetitions(self, *steps: Step) -> Iterator[int]:
        """Runs the steps until the chip has settled; then yields a number for each timing of a turn."""
        settled = time.perf_counter() + (self.settle_ms / 1e3 if self.device == "cuda" else 0)
        while True:
            call_ms = sum(lap[TOTAL] for lap in laps_ms(steps, self.device))
            if time.perf_counter() >= settled:
                break
        # The first call after a synchronisation finds the device idle; the timed calls follow it without a gap.
        for step in steps:
            step(no_mark)
        yield from range(max(min(self.calls, int(self.turn_ms / max(call_ms, 1e-3))), 2))


# The queue of a GPU holds about a thousand kernels; these steps stay below that.
_STEPS_AHEAD = 8


def laps_ms(steps: Iterable[Step], device: str) -> Laps:
    """Returns the times of steps that follow each other without synchronisation, as in training.

    On a GPU, "host" is the time that the host needs to launch a step: the median of the first steps, since later the
    host may have to wait for room in the device's queue.
    """
    is_cuda = device == "cuda"

    def now() -> Any:
        if not is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ms(start: Any, end: Any) -> float:
        return start.elapsed_time(end) if is_cuda else (end - start) * 1e3

    marks: list[list[tuple[str, Any]]] = []
    host_ms: list[float] = []
    for step in steps:
        marks.append([("start", now())])
        start = time.perf_counter()
        step(lambda phase: marks[-1].append((phase, now())))
        host_ms.append((time.perf_counter() - start) * 1e3)
    synchronize(device)
    laps = []
    for step_marks in marks:
        lap = {phase: ms(before, end) for (_, before), (phase, end) in pairwise(step_marks)}
        lap |= {"host": statistics.median(host_ms[:_STEPS_AHEAD])} if is_cuda else {}
        laps.append({**lap, TOTAL: ms(step_marks[0][1], step_marks[-1][1])})
    return laps


def spread(values: Iterable[float], name: str) -> dict[str, float]:
    """Returns the median and the 20th and 80th percentile, as `name` with "", "_p20" and "_p80"."""
    ordered = sorted(values)
    low, high = (ordered[round(share * (len(ordered) - 1))] for share in (0.2, 0.8))
    return {name: statistics.median(ordered), f"{name}_p20": low, f"{name}_p80": high}


def peak_bytes(call: Callable[[], object], device: str) -> int:
    """Returns the peak memory of a call in bytes, beyond the memory that was in use before.

    Counts all memory that PyTorch allocates on the device, whether Python, autograd or a compiled function asks for it,
    including tensors that the call returns or leaves behind, such as gradients.
    """
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    # The CPU's allocator keeps no peak, but reports every allocation and release to the profiler.
    with torch.autograd.profiler.profile(profile_memory=True) as profiler:
        call()
    held = peak = 0
    for event in profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak
