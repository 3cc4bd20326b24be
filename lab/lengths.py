"""Numbers of tokens that change with each step, as in batches of whole texts; then a second pass over the same numbers.

The host waits for the device after each step. The first pass of a method includes all compilation and tuning that no
earlier method of the process has done. To measure a method's own first pass, run it alone.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from thunder_flce.bench import methods
from thunder_flce.bench.cli import Subset
from thunder_flce.bench.measure import Run, no_mark, synchronize
from thunder_flce.bench.methods import Method, maker, ours
from thunder_flce.bench.output import TIME
from thunder_flce.bench.regions import prepared, run_step
from thunder_flce.bench.shapes import Inputs, Shape
from thunder_flce.engine.matmul.algorithms import tunings
from thunder_flce.options import Options

SHAPES = {"cuda": ["tokens=2000,vocab=128256,hidden=4096", "tokens=600,vocab=32000,hidden=768"], "cpu": ["tiny"]}
"""Default shapes of each device; their tokens are about the mean number"""

COUNTS = 60
"""How many numbers of tokens a pass has, between three and five quarters of the shape's tokens"""

BUDGET = 0.25
"""`memory_budget` as a fraction of the size of all logits"""


COLUMNS = {
    "counts": ("counts", "{}"),
    "first_s": ("first pass, s", TIME),
    "first_without_tuning_s": ("− tuning", TIME),  # without measuring matmuls
    "first_ms": ("step, ms", TIME),  # the median step
    "second_s": ("second pass, s", TIME),
    "second_ms": ("step, ms", TIME),
    "ratio": ("first / second", "{:.2f}"),  # of the passes, without tuning
}
"""Rows also have "tuning_s", and "passes_ms" with the time of each step of both passes"""


def _in_budget(shape: Shape) -> Method:
    return ours(Options(memory_budget=int(BUDGET * shape.tokens * shape.vocab * shape.dtype.itemsize)))


METHODS: dict[str, Callable[[Shape], Method]] = {
    "eager": lambda shape: maker("eager")(),
    "torch.compile, dynamic": lambda shape: methods.METHODS["torch.compile"](dynamic=True),
    "flce": lambda shape: ours(),
    "flce, memory budget": _in_budget,
    "flce, 512 rows": lambda shape: ours(Options(chunk_rows=512)),
    "flce, none": lambda shape: ours(reduction="none"),
}


def counts_of(tokens: int) -> list[int]:
    """Returns different numbers of tokens, in random order."""
    generator = torch.Generator().manual_seed(0)
    near = torch.arange(3 * tokens // 4, 5 * tokens // 4 + 1)
    return near[torch.randperm(len(near), generator=generator)][:COUNTS].tolist()


def measure(shape: Shape, names: list[str], run: Run) -> None:
    """Runs methods, by names of `METHODS`, twice through all numbers of tokens, around that of the shape."""
    counts = counts_of(shape.tokens)
    inputs = prepared(replace(shape, tokens=max(counts)), run)
    run.fields |= shape.as_record()
    for name in names:
        with run.attempt(name):
            run.row(name, counts=len(counts), **_run(METHODS[name](shape), inputs, counts))


def _run(method: Method, inputs: Inputs, counts: list[int]) -> dict[str, Any]:
    known = tunings()
    first = _pass_ms(method, inputs, counts)
    tuning_s = sum(tuning.seconds for tuning in tunings() if tuning not in known)
    second = _pass_ms(method, inputs, counts)
    first_s, second_s = sum(first) / 1e3, sum(second) / 1e3
    return {
        "first_s": first_s,
        "tuning_s": tuning_s,
        "first_without_tuning_s": first_s - tuning_s,
        "first_ms": statistics.median(first),
        "second_s": second_s,
        "second_ms": statistics.median(second),
        "ratio": (first_s - tuning_s) / second_s,
        "passes_ms": [[round(step_ms, 3) for step_ms in steps_ms] for steps_ms in (first, second)],
    }


def _pass_ms(method: Method, inputs: Inputs, counts: list[int]) -> list[float]:
    device = inputs.x.device.type
    upstream = torch.ones(max(counts), device=device)
    times = []
    for count in counts:
        x, target = inputs.x.detach()[:count].requires_grad_(), inputs.target[:count]
        some = inputs._replace(x=x, target=target)
        synchronize(device)
        start = time.perf_counter()
        run_step(some, method, no_mark, upstream=upstream[:count])
        synchronize(device)
        times.append((time.perf_counter() - start) * 1e3)
    return times


SUBSET = Subset(
    help="numbers of tokens that change with each step, then the same again",
    measure=measure,
    columns=COLUMNS,
    methods=METHODS,
    cases=SHAPES,
    turns=None,
)
