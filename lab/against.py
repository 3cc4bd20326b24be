"""Methods against a base, in turns, call by call: the gain or cost of a change.

The base is the same call of another checkout, or one method for all. The other checkout is imported into the same
process as a copy under another name, which replaces the package's name in strings, too. The copy has an empty
`__init__.py`, so that it registers nothing with thunder. So only the function is compared, with options or without.
"""

import itertools
import re
import sys
import tempfile
from collections.abc import Callable, Iterable
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

from thunder_flce.bench import methods, output
from thunder_flce.bench.cli import Subset
from thunder_flce.bench.measure import (
    TOTAL,
    Run,
    Step,
    Unavailable,
    laps_ms,
    no_mark,
    peak_bytes,
    spread,
    synchronize,
)
from thunder_flce.bench.methods import Method, ours
from thunder_flce.bench.output import GB, TIME
from thunder_flce.bench.regions import prepared, run_step
from thunder_flce.bench.shapes import Shape

PACKAGE = "thunder_flce"


COLUMNS = {
    "base": ("base", "{}"),  # a method, or the commit or the folder of another checkout
    "time_ms": ("time, ms", TIME),
    "base_time_ms": ("base, ms", TIME),
    "ratio": ("ratio", "{:.4f}"),  # of the times of two successive calls
    "pairs": ("pairs", "{}"),  # number of such ratios
    "above_outputs_gb": ("peak − gradients, GB", GB),
    "base_above_outputs_gb": ("base, GB", GB),
    "memory_ratio": ("ratio", "{:.3f}"),  # of the two before; None if the second is not above 0
}


def measure(shape: Shape, names: list[str], run: Run, *, base: str, base_commit: str | None) -> None:
    """Measures methods and their bases on one shape.

    Args:
        shape: the shape to measure.
        names: names of methods; if the base is another checkout, "function", with options or without.
        run: the device, and how long to measure (a call is one call of each of the two).
        base: a method, or the folder of another checkout.
        base_commit: the commit of that checkout, if git cannot tell.
    """
    folder = Path(base).resolve() if (Path(base) / PACKAGE).is_dir() else None
    if folder is None:
        try:
            methods.maker(base)
        except ValueError:
            raise SystemExit(f"--base must be a method or a folder with a folder {PACKAGE}, but got {base!r}") from None
    if folder is not None:
        base = base_commit or output.commit_of(folder / PACKAGE) or folder.name
    run.fields["base"] = base
    inputs = prepared(shape, run)
    pairs: dict[str, tuple[Step, Step]] = {}
    memory: dict[str, dict[str, Any]] = {}
    for name in names:
        with run.attempt(name):
            other = methods.maker(base)() if folder is None else _of_checkout(name, folder)
            pair = partial(run_step, inputs, methods.maker(name)()), partial(run_step, inputs, other)
            memory[name] = _memory(*pair, run.device)
            pairs[name] = pair
    for name, times in run.in_turns(pairs, partial(_turn, run)).items():
        run.row(name, **paired_spread(times), **memory[name])


def _of_checkout(name: str, folder: Path) -> Method:
    way, options = methods.with_options(name)
    if way != "function":
        raise Unavailable('only "function" can be compared with another checkout')
    function, make_options = load(folder)
    try:
        return ours(make_options(**options.non_defaults()), function=function)
    except TypeError as error:
        raise Unavailable(f"no such option in this version: {error}") from None


def _turn(run: Run, pair: tuple[Step, Step]) -> list[tuple[float, float]]:
    """Returns milliseconds of both on an equally warm chip: their ratio is more precise than their times."""
    # The order is first, second, second, first, and so on, so that neither always follows the other.
    orders = (pair if number % 2 == 0 else pair[::-1] for number in run.repetitions(*pair))
    times = [lap[TOTAL] for lap in laps_ms(itertools.chain.from_iterable(orders), run.device)]
    in_turn = enumerate(zip(times[::2], times[1::2], strict=True))
    return [(one, other) if number % 2 == 0 else (other, one) for number, (one, other) in in_turn]


def paired_spread(pairs_ms: Iterable[tuple[float, float]]) -> dict[str, Any]:
    """Returns medians of both times and of the ratio of first to second, the ratio with percentiles 20 and 80."""
    first, second = zip(*pairs_ms, strict=True)
    ratios = [one / other for one, other in zip(first, second, strict=True)]
    times = {"time_ms": median(first), "base_time_ms": median(second)}
    return {**times, **spread(ratios, "ratio"), "pairs": len(ratios)}


def _memory(one: Step, other: Step, device: str) -> dict[str, Any]:
    """Calls each step once, then once more to measure its memory."""
    peaks = []
    for step in (one, other):
        outputs = sum(result.nbytes for name, result in step(no_mark).items() if name != "loss")
        synchronize(device)
        peaks.append((peak_bytes(partial(step, no_mark), device) - outputs) / 1e9)
    return {
        "above_outputs_gb": peaks[0],
        "base_above_outputs_gb": peaks[1],
        "memory_ratio": peaks[0] / peaks[1] if peaks[1] > 0 else None,
    }


_numbers = itertools.count()


@cache
def load(folder: Path) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Imports a second checkout's package into this process, beside the running one.

    Args:
        folder: the folder that contains `thunder_flce`, at any commit that has `functional` and `options`.

    Returns:
        Its `linear_cross_entropy` and its `Options`.
    """
    package = folder / PACKAGE
    # Each copy has a name of its own, since an earlier copy may still import modules.
    name = f"{PACKAGE}_other{next(_numbers)}"
    copied = Path(_holder().name)
    for source in package.rglob("*.py"):
        target = copied / name / source.relative_to(package)
        target.parent.mkdir(parents=True, exist_ok=True)
        is_root = source == package / "__init__.py"
        text = "" if is_root else re.sub(rf"\b{PACKAGE}\b", name, source.read_text(encoding="utf-8"))
        target.write_text(text, encoding="utf-8")
    if str(copied) not in sys.path:
        sys.path.append(str(copied))
    functional, options = (import_module(f"{name}.{module}") for module in ("functional", "options"))
    return functional.linear_cross_entropy, options.Options


@cache
def _holder() -> tempfile.TemporaryDirectory:
    """Returns the folder of all copies; it lasts as long as the process, since Triton rereads the kernels' source."""
    return tempfile.TemporaryDirectory(prefix=f"{PACKAGE}-copies-")


SUBSET = Subset(
    help="time and memory against another checkout, or a method, in turns",
    measure=measure,
    columns=COLUMNS,
    methods=["function"],
    check_method=methods.maker,
    # At 8192 × 128256 × 4096, this measures 40 pairs of a step of 40 ms in 5 seconds.
    turns={"calls": 50, "turn_ms": 800, "settle_ms": 300},
    options={
        "base": {"required": True, "help": "the folder of another checkout of this project, or a method"},
        "base_commit": {"metavar": "COMMIT", "help": "the commit of that checkout, if git cannot tell"},
    },
)
