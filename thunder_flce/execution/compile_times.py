"""What compiling kernels takes: the time of each kind's first run in this process, when it is compiled or loaded."""

import time
from collections import defaultdict
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

_first_runs: defaultdict[str, dict[Hashable, float]] = defaultdict(dict)
"""Seconds, by what was compiled and what for."""


@contextmanager
def first_run_timed(kernels: str, kind: Hashable) -> Iterator[None]:
    """Adds what runs inside to `compile_seconds`, under a name, where nothing of its `kind` ran before."""
    start = time.perf_counter()
    yield
    note_first_run(kernels, kind, start)


def note_first_run(kernels: str, kind: Hashable, start: float) -> None:
    """The same for what began at `start`, by `time.perf_counter`, and has run."""
    first_runs = _first_runs[kernels]
    if kind not in first_runs:
        first_runs[kind] = time.perf_counter() - start


def compile_seconds() -> dict[str, float]:
    """Seconds by the name of kernels, of all that have run in this process."""
    return {kernels: sum(seconds.values()) for kernels, seconds in _first_runs.items()}
