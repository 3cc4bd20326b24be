"""What compiling kernels takes: the time of each kind's first run in this process, when it is compiled or loaded."""

import time
from collections import defaultdict
from collections.abc import Hashable

_first_runs: defaultdict[str, dict[Hashable, float]] = defaultdict(dict)
"""Seconds, by what was compiled and what for."""


def note_first_run(kernels: str, kind: Hashable, start: float) -> None:
    """Adds what began at `start`, by `time.perf_counter`, to `compile_seconds`, if it is the first of its kind."""
    first_runs = _first_runs[kernels]
    if kind not in first_runs:
        first_runs[kind] = time.perf_counter() - start


def compile_seconds() -> dict[str, float]:
    """Seconds by the name of kernels, of all that have run in this process."""
    return {kernels: sum(seconds.values()) for kernels, seconds in _first_runs.items()}
