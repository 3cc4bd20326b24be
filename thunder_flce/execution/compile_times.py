"""What compiling kernels takes: the time of each kind's first run in this process, when it is compiled or loaded."""

import time
from collections import defaultdict
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

_first_runs: defaultdict[str, dict[Hashable, float]] = defaultdict(dict)
"""Seconds, by what was compiled and what for."""


@contextmanager
def first_run_timed(kernels: str, kind: Hashable) -> Iterator[None]:
    """Adds what runs inside to `compile_seconds`, where nothing of its `kind` ran before.

    Args:
        kernels: under which name.
        kind: what tells apart kernels that are compiled one by one.
    """
    start = time.perf_counter()
    yield
    _first_runs[kernels].setdefault(kind, time.perf_counter() - start)


def compile_seconds() -> dict[str, float]:
    """Seconds by the name of kernels, of all that have run in this process."""
    return {kernels: sum(seconds.values()) for kernels, seconds in _first_runs.items()}
