"""How long the fusions of other executors take when they first run, which is when they are compiled."""

import time
from collections.abc import Callable
from typing import Any

from thunder.core.trace import TraceCtx

from thunder_flce.execution.compile_times import note_first_run


class _TimedFusion:
    """A fusion that notes the time of its first run; otherwise it is what it stands for."""

    def __init__(self, fusion: Callable[..., Any], kernels: str):
        self._fusion, self._kernels, self._has_run = fusion, kernels, False

    def __call__(self, *args: Any) -> Any:
        if self._has_run:
            return self._fusion(*args)
        start, self._has_run = time.perf_counter(), True
        results = self._fusion(*args)
        note_first_run(self._kernels, object(), start)
        return results

    def __getattr__(self, name: str) -> Any:
        # Such as what `thunder.examine` reads of nvFuser's fusions; nothing while a copy is made.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._fusion, name)

    def __repr__(self) -> str:
        return repr(self._fusion)


def time_first_runs(trace: TraceCtx) -> None:
    """Has the fusions of a finished trace note how long their first runs take: `compile_times.compile_seconds`."""
    for bsym in trace.bound_symbols:
        if bsym.sym.is_fusion and bsym._call_ctx:
            kernels = f"{bsym.sym.executor.name} fusions"
            for name, fusion in bsym._call_ctx.items():
                if not isinstance(fusion, _TimedFusion):
                    bsym._call_ctx[name] = _TimedFusion(fusion, kernels)
