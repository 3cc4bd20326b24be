"""Numbers of tokens that are new at each step, as of batches of whole texts, then all of them a second time.

The host waits for the device after each step. What a method compiles or measures for the first time in the process is
in its first pass, so the first of ours has what the others find done: a method alone is one that is named alone.
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
"""What is measured on a device where nothing else is asked for; tokens are about the middle one."""

COUNTS = 60
"""Numbers of tokens of a pass, between three and five quarters of the shape's."""

BUDGET = 0.25
"""`memory_budget` as a fraction of what all logits take."""


COLUMNS = {
    "counts": ("counts", "{}"),
    "first_s": ("first pass, s", TIME),
    "first_without_tuning_s": ("− tuning", TIME),  # without measuring matmuls
    "first_ms": ("step, ms", TIME),  # the median, as of the second pass
    "second_s": ("second pass, s", TIME),
    "second_ms": ("step, ms", TIME),
    "ratio": ("first / second", "{:.2f}"),  # of the passes, without tuning
}
"""Rows also have "tuning_s" and, of each step of both passes, "passes_ms"."""


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
    """Different numbers of tokens, in random order."""
    generator = torch.Generator().manual_seed(0)
    near = torch.arange(3 * tokens // 4, 5 * tokens // 4 + 1)
    return near[torch.randperm(len(near), generator=generator)][:COUNTS].tolist()


def measure(shape: Shape, names: list[str], run: Run) -> None:
    """Runs each method, names from `METHODS`, twice through all numbers of tokens; the shape's are the middle one."""
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
    help="numbers of tokens that are new at each step, then again",
    measure=measure,
    columns=COLUMNS,
    methods=METHODS,
    cases=SHAPES,
    turns=None,
)
