"""Long runs of one loss region with changing token counts and ignored tokens: whether memory, time or kernels grow.

A pass has a step of each token count, in random order, so that all passes compute about the same. The fraction of
ignored tokens belongs to the count, but which tokens they are, and so how many, is drawn at each step.
"""

import resource
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from thunder_flce.bench.cli import Subset, positive
from thunder_flce.bench.measure import Run, no_mark, progress, release, synchronize
from thunder_flce.bench.methods import Method, maker
from thunder_flce.bench.output import GB, TIME
from thunder_flce.bench.regions import run_step
from thunder_flce.bench.shapes import Inputs, Shape
from thunder_flce.engine.matmul.algorithms import tunings

COUNTS = 64
"""Token counts of a pass: evenly spaced from a sixteenth of the shape's tokens to all of them."""

IGNORED = (0.0, 0.1, 0.5, 0.9)
"""Fractions of ignored tokens, which token counts have in turn."""


COLUMNS = {
    "steps": ("steps", "{}"),
    "time_ms": ("step, ms", TIME),  # the mean of a pass, the median of the second half of the passes
    "drift": ("drift", "{:.3f}"),  # time of the last quarter of the passes over that of the second quarter, medians
    "growth_gb": ("growth, GB", GB),  # of what the device holds, from the second pass to the last one; CUDA only
    "peak_growth_gb": ("of the peak", GB),  # of the most memory that PyTorch's allocator ever had reserved
    "host_growth_gb": ("of the host", GB),  # of the most memory that the process ever had on the host
    "compilations": ("compilations", "{}"),  # Triton kernels compiled or loaded, and matmuls that were measured
    "last_compilation": ("last at step", "{}"),  # from 1
}
"""Rows also have what was "compiled", each with the number of its step, and "passes_ms", the mean step of each."""


def measure(shape: Shape, methods: list[str], run: Run, *, steps: int) -> None:
    """Runs each method for so many steps, rounded up to whole passes, of which there are four or more.

    Args:
        shape: its tokens are the most of a step.
        methods: names that `methods.maker` knows.
        run: where.
        steps: of each method.
    """
    torch.compiler.reset()
    passes = max(-(-steps // COUNTS), 4)
    run.fields |= {**shape.as_record(), "steps": passes * COUNTS}
    for name in methods:
        progress(name)
        release(run.device)
        with run.attempt(name):
            run.row(name, **_run(maker(name)(), Inputs.random(shape, run.device), passes))


def _run(method: Method, inputs: Inputs, passes: int) -> dict[str, Any]:
    device, tokens = inputs.x.device, inputs.x.shape[0]
    generator = torch.Generator().manual_seed(0)
    counts = torch.linspace(tokens / 16, tokens, COUNTS).round().int().tolist()
    passes_ms: list[float] = []
    held: list[list[float]] = []
    compiled: list[tuple[int, str]] = []
    with _compilations() as compilations:
        for number in range(passes):
            start = time.perf_counter()
            for place, index in enumerate(torch.randperm(COUNTS, generator=generator).tolist(), start=1):
                before = compilations()
                run_step(_some(inputs, counts[index], IGNORED[index % len(IGNORED)]), method, no_mark)
                compiled += [(number * COUNTS + place, what) for what in (compilations() - before).elements()]
            synchronize(device.type)
            passes_ms.append((time.perf_counter() - start) / COUNTS * 1e3)
            held.append(_memory_gb(device.type))
    quarter = passes // 4
    growth = [last - second for last, second in zip(held[-1], held[1], strict=True)]
    return {
        "time_ms": statistics.median(passes_ms[passes // 2 :]),
        "drift": statistics.median(passes_ms[-quarter:]) / statistics.median(passes_ms[quarter : 2 * quarter]),
        **dict(zip(("host_growth_gb", "growth_gb", "peak_growth_gb"), growth, strict=False)),
        "compilations": len(compiled),
        "last_compilation": compiled[-1][0] if compiled else None,
        "compiled": [f"{step}: {what}" for step, what in compiled],
        "passes_ms": [round(pass_ms, 3) for pass_ms in passes_ms],
    }


def _some(inputs: Inputs, count: int, ignored: float) -> Inputs:
    """The first tokens, of which about a fraction is ignored."""
    target = inputs.target[:count]
    target = torch.where(torch.rand(count, device=target.device) < ignored, -100, target)
    return inputs._replace(x=inputs.x.detach()[:count].requires_grad_(), target=target)


def _memory_gb(device: str) -> list[float]:
    """What the process had on the host at most, what the device holds, and what it had reserved at most."""
    of_host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    on_device = [torch.cuda.memory_allocated(), torch.cuda.max_memory_reserved()] if device == "cuda" else []
    return [size / 1e9 for size in (of_host, *on_device)]


@contextmanager
def _compilations() -> Iterator[Callable[[], Counter[str]]]:
    """A function that says what was compiled since the beginning of the body."""
    from triton import knobs

    kernels: list[str] = []
    before = knobs.runtime.jit_post_compile_hook
    knobs.runtime.jit_post_compile_hook = lambda **what: kernels.append(what["repr"])
    try:
        yield lambda: Counter(kernels) + Counter(f"{tuning.product} {tuning.sizes}" for tuning in tunings())
    finally:
        knobs.runtime.jit_post_compile_hook = before


SUBSET = Subset(
    help="growth of memory, time and kernels while token counts change",
    measure=measure,
    columns=COLUMNS,
    methods=["function"],
    check_method=maker,
    turns=None,
    options={"steps": {"type": positive, "default": 5000, "help": "of each method (default: %(default)s)"}},
)
