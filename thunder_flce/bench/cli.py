"""`python -m thunder_flce bench`: time, memory and error of the loss on this device, against other implementations."""

import argparse
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from thunder_flce.bench import (
    against,
    convergence,
    distributed,
    kernels,
    lengths,
    losses,
    methods,
    models,
    predictions,
    rates,
    records,
    regions,
    small,
    soak,
    sweep,
    torchrun,
)
from thunder_flce.bench.measuring import DeviceLost, Schedule, Session
from thunder_flce.bench.other_copy import PACKAGE
from thunder_flce.bench.shapes import DTYPES, SHAPES, parse_shape

PROGRAM = "python -m thunder_flce bench"


@dataclass(frozen=True)
class Case:
    """One thing to measure, by all methods in turn."""

    text: str
    """What stands for it on the command line."""

    title: str
    measure: Callable[[list[str], Session], None]


@dataclass(frozen=True)
class Run:
    """What a command line asks for."""

    case_option: str
    """The option that takes `Case.text`."""

    cases: list[Case]
    methods: list[str]
    row: type
    """Of its table"""


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns the exit status.

    Args:
        arguments: what comes after `bench`. Without the name of a subset they are for `regions`; `--rates` is the
            subset `rates`.
    """
    arguments = list(arguments)
    if arguments and arguments[0] == "--rates":
        arguments[0] = "rates"
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-h", "--help")):
        arguments.insert(0, "regions")
    parser = _parser()
    parsed = parser.parse_args(arguments)
    if parsed.subset == "figures":
        return _figures(parsed, parser)
    if parsed.subset == "rates":
        return _rates(parsed, arguments)
    try:
        run = _RUNS[parsed.subset](parsed)
    except ValueError as error:
        parser.error(str(error))
    if parsed.json and not parsed.json.parent.is_dir():
        parser.error(f"--json: there is no folder {parsed.json.parent}")
    _need("rich", parser)
    if not torchrun.has_joined():
        return _measure(run, parsed, arguments)
    if dist.get_rank() == 0:
        _measure(run, parsed, arguments)
    else:
        # The first rank prints and writes.
        silent = Session(device=parsed.device, schedule=_schedule(parsed), progress=_ignore, write=_ignore)
        for case in run.cases:
            case.measure(run.methods, silent)
    torchrun.end()
    return 0


def _measure(run: Run, parsed: argparse.Namespace, arguments: list[str]) -> int:
    from thunder_flce.bench import terminal

    context = records.context(shlex.join([*PROGRAM.split(), *arguments]), device=parsed.device, commit=parsed.commit)
    rows: list[Any] = []

    def write(row: Any) -> None:
        rows.append(row)
        if parsed.json:
            records.append(parsed.json, {**records.as_record(parsed.subset, row), **context})

    lost, finished = None, 0
    with terminal.progress_bar(len(run.cases)) as show:
        session = Session(
            device=parsed.device,
            schedule=_schedule(parsed),
            progress=lambda words: show(description=words),
            write=write,
        )
        for case in run.cases:
            show(case=case.title)
            rows.clear()
            try:
                case.measure(run.methods, session)
            except DeviceLost as error:
                lost = error.method
            rows.sort(key=lambda row: run.methods.index(row.method) if row.method in run.methods else -1)
            terminal.print_table(case.title, run.row, rows)
            if lost is not None:
                break
            finished += 1
            show(advance=1)
    if lost is None:
        return 0
    # Of an option given twice, the last one counts. The memory budgets are among the methods already.
    more = ["--memory-budgets"] if parsed.subset == "regions" else []
    return _go_on_without(lost, replace(run, cases=run.cases[finished:]), [*arguments, *more])


def _schedule(parsed: argparse.Namespace) -> Schedule:
    """How long the methods of a subset are measured that take turns."""
    if "rounds" not in parsed:
        return Schedule()
    settle_ms = {"settle_ms": 0.0} if parsed.device == "cpu" else {}
    return replace(parsed.default_schedule, rounds=parsed.rounds, calls=parsed.calls, **settle_ms)


def _ignore(told: Any) -> None:
    pass


def _go_on_without(method: str, run: Run, arguments: list[str]) -> int:
    """Measures what is left, this case too, in a new process: in this one, the device does not answer any more."""
    rest = [name for name in run.methods if name != method]
    if not rest or method not in run.methods:
        print(f"{method} has left the device unusable", file=sys.stderr)
        return 1
    print(f"{method} has left the device unusable; going on without it in a new process", file=sys.stderr)
    options = [f"--{run.case_option}", *dict.fromkeys(case.text for case in run.cases), "--methods", *rest]
    sys.stdout.flush()
    # In place of this process, which would keep its memory on the device.
    os.execv(sys.executable, [sys.executable, "-m", "thunder_flce", "bench", *arguments, *options])


def _figures(parsed: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    _need("matplotlib", parser)
    from thunder_flce.bench import figures

    for path in figures.draw(records.read(parsed.data), parsed.output):
        print(path)
    return 0


def _rates(parsed: argparse.Namespace, arguments: list[str]) -> int:
    """Prints the report as it is made; needs nothing that is not there."""
    context = records.context(shlex.join([*PROGRAM.split(), *arguments]), device=parsed.device, commit=parsed.commit)
    *_, everything = _printed(rates.report(parsed.device, context, _ignore))
    if parsed.json:
        records.append(parsed.json, json.loads(everything))
    return 0


def _printed(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        print(line, flush=True)
        yield line


def _need(package: str, parser: argparse.ArgumentParser) -> None:
    if find_spec(package) is None:
        parser.exit(2, f"{PROGRAM} needs {package}: pip install 'thunder-flce[bench]'\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=PROGRAM, description=__doc__, epilog="Without a subset: regions.")
    subsets = parser.add_subparsers(dest="subset", required=True, metavar="SUBSET")

    subset = _subset(
        subsets, "regions", "time, energy, memory and error of loss regions, against every peer", regions.SCHEDULE
    )
    _shape_option(subset)
    _region_options(subset)
    subset.add_argument("--dtype", choices=DTYPES, help="instead of the shapes' own")
    subset.add_argument("--bias", action=argparse.BooleanOptionalAction, help="instead of the shapes' own")
    subset.add_argument("--ignored", type=_fraction, help="fraction of targets that are ignore_index")
    subset.add_argument(
        "--memory-budgets", nargs="*", default=[], metavar="BUDGET", help="flce within them: bytes, or a fraction"
    )

    subset = _subset(subsets, "sweep", "time and memory of loss regions over context length and vocabulary")
    subset.add_argument(
        "--points", nargs="+", default=list(sweep.AXES), metavar="POINT", help="context, vocabulary, context=N, …"
    )
    subset.add_argument("--base", metavar="SHAPE", help=f"what is changed: a name, or {_CUSTOM} (default: S1)")
    _region_options(subset)

    subset = _subset(
        subsets, "against", "time and memory against another checkout, or a method, in turns", against.SCHEDULE
    )
    subset.add_argument("base", help="a folder with another checkout of this project, or a method")
    subset.add_argument("--base-commit", metavar="COMMIT", help="what is checked out there, where git cannot tell")
    _shape_option(subset)
    subset.add_argument("--methods", nargs="+", default=["flce"], metavar="METHOD", help="; ".join(methods.METHODS))

    subset = _subset(subsets, "predictions", "predicted and measured memory of every way to run a region", None)
    _shape_option(subset, predictions.SHAPES)
    subset.add_argument(
        "--methods", nargs="+", choices=predictions.WAYS, default=list(predictions.WAYS), metavar="METHOD"
    )

    subset = _subset(subsets, "models", "training steps of whole models, and the time to the first one")
    subset.add_argument("--models", nargs="+", choices=models.MODELS, metavar="MODEL", help=", ".join(models.MODELS))
    subset.add_argument("--layers", type=_positive, help="instead of the models' own, which thunder takes minutes for")
    subset.add_argument("--tokens", nargs="+", type=_positive, help="in a batch, instead of the models' own")
    subset.add_argument("--lengths", nargs="+", choices=("one", "changing"), default=["one"], help="of the sequences")
    names = list(models.METHODS)
    subset.add_argument(
        "--methods", nargs="+", choices=names, default=models.DEFAULT, metavar="METHOD", help="; ".join(names)
    )

    subset = _subset(subsets, "convergence", "loss curves of training runs from several seeds", None)
    subset.add_argument("--models", nargs="+", choices=convergence.SETUPS, metavar="MODEL", help="which is trained")
    subset.add_argument("--methods", nargs="+", default=["eager", "flce", "liger"], metavar="METHOD")
    subset.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="SEED")
    subset.add_argument("--steps", type=_positive, default=2000, help="of each run (default: %(default)s)")

    subset = _subset(subsets, "soak", "growth of memory, time and kernels while token counts change", None)
    _shape_option(subset)
    subset.add_argument("--methods", nargs="+", default=["flce"], metavar="METHOD")
    subset.add_argument("--steps", type=_positive, default=5000, help="of each method (default: %(default)s)")

    subset = _subset(subsets, "lengths", "numbers of tokens that are new at each step, then again", None)
    _shape_option(subset, lengths.SHAPES)
    names = list(lengths.METHODS)
    subset.add_argument("--methods", nargs="+", choices=names, default=names, metavar="METHOD", help="; ".join(names))

    subset = _subset(subsets, "small", "time of host and device, and calls, where regions are small", small.SCHEDULE)
    _shape_option(subset, small.SHAPES)
    names = list(small.METHODS)
    subset.add_argument("--methods", nargs="+", choices=names, default=names, metavar="METHOD", help="; ".join(names))

    subset = _subset(subsets, "kernels", "bandwidth of the row kernels, against a device copy")
    subset.add_argument("--vocabs", nargs="+", type=_positive, metavar="V", help="columns of the logits")
    subset.add_argument("--dtype", choices=DTYPES, help="of the logits (default: bfloat16; float32 on a CPU)")
    subset.add_argument("--methods", nargs="+", choices=kernels.KERNELS, default=kernels.KERNELS, metavar="KERNEL")

    subset = _subset(subsets, "losses", "GRPO, preference losses, weighted tokens, log-probabilities", losses.SCHEDULE)
    _shape_option(subset, losses.SHAPES)
    names = list(losses.METHODS)
    subset.add_argument("--methods", nargs="+", choices=names, default=names, metavar="METHOD", help="; ".join(names))

    subset = _subset(subsets, "distributed", "a loss region whose vocabulary several GPUs of this machine divide")
    _shape_option(subset)
    subset.add_argument("--ranks", type=_positive, help="processes, a GPU each (default: torchrun's, or 2)")
    names = list(distributed.METHODS)
    subset.add_argument("--methods", nargs="+", choices=names, default=names, metavar="METHOD", help="; ".join(names))

    subset = _subset(subsets, "rates", "what this device reaches, and which options would be better on it", None)

    subset = subsets.add_parser("figures", help="draws figures from what the other subsets have written")
    subset.add_argument("data", nargs="+", type=Path, help="JSON lines")
    subset.add_argument("--output", type=Path, default=Path("figures"), help="a folder (default: %(default)s)")
    return parser


_SCHEDULE = Schedule()
_CUSTOM = "tokens=…,vocab=…,hidden=…[,bias=1][,ignored=…][,dtype=…][,frozen=1][,rank=…][,data=peaked]"


def _subset(subsets: Any, name: str, help: str, default: Schedule | None = _SCHEDULE) -> argparse.ArgumentParser:
    """A subset whose methods take turns by a schedule, or, with None, each run once."""
    subset = subsets.add_parser(name, help=help, description=help)
    subset.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
    if default is not None:
        subset.set_defaults(default_schedule=default)
        subset.add_argument("--rounds", type=_positive, default=default.rounds, help="turns (default: %(default)s)")
        calls = "timings a turn (default: %(default)s)"
        subset.add_argument("--calls", type=_positive, default=default.calls, help=calls)
    subset.add_argument("--json", type=Path, help="append the results to this file, a line each")
    subset.add_argument("--commit", help="what is measured, where git cannot tell")
    return subset


_SHAPES = {"cuda": ["S1"], "cpu": ["cpu"]}


def _shape_option(subset: argparse.ArgumentParser, default: dict[str, list[str]] = _SHAPES) -> None:
    subset.set_defaults(default_shapes=default)
    described = f"{', '.join(SHAPES)}, or {_CUSTOM}; or both, as in S1,data=peaked"
    subset.add_argument("--shapes", nargs="+", metavar="SHAPE", help=described)


def _region_options(subset: argparse.ArgumentParser) -> None:
    subset.add_argument("--methods", nargs="+", metavar="METHOD", help="; ".join(methods.METHODS))
    subset.add_argument("--profile", type=Path, metavar="FOLDER", help="write traces and memory snapshots there")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"must be a positive integer, but got {text!r}")
    return int(text)


def _fraction(text: str) -> float:
    if not 0 <= (value := float(text)) <= 1:
        raise argparse.ArgumentTypeError(f"must be between 0 and 1, but got {text!r}")
    return value


def _shape_texts(parsed: argparse.Namespace) -> list[str]:
    return parsed.shapes or parsed.default_shapes[parsed.device]


def _known(names: list[str]) -> list[str]:
    if unknown := [name for name in names if not methods.is_method(name)]:
        raise ValueError(f"unknown methods {unknown}; there are {'; '.join(methods.METHODS)}")
    return names


def _shape_cases(parsed: argparse.Namespace, measure: Callable[..., None], *, suffix: str = "") -> list[Case]:
    """A case for each shape, which `measure` takes first, and what is added to its title."""
    shapes = {text: parse_shape(text) for text in _shape_texts(parsed)}
    return [Case(text, f"{shape}{suffix}", partial(measure, shape)) for text, shape in shapes.items()]


def _regions(parsed: argparse.Namespace) -> Run:
    chosen = parsed.methods or [name for name in methods.METHODS if name not in methods.ONLY_WHEN_NAMED]
    budgets = [methods.budget_method(methods.parse_budget(text)) for text in parsed.memory_budgets]
    changes = {"bias": parsed.bias, "ignored": parsed.ignored, "dtype": parsed.dtype and DTYPES[parsed.dtype]}
    changes = {name: value for name, value in changes.items() if value is not None}
    cases = []
    for text in _shape_texts(parsed):
        shape = replace(parse_shape(text), **changes)
        cases.append(Case(text, str(shape), partial(regions.measure, shape, profile=parsed.profile)))
    return Run("shapes", cases, _known([*chosen, *budgets]), regions.Row)


def _sweep(parsed: argparse.Namespace) -> Run:
    base = parse_shape(parsed.base or ("S1" if parsed.device == "cuda" else "tiny"))
    cases = []
    for axis, size in sweep.parse_points(parsed.points, parsed.device):
        change: dict[str, Any] = {sweep.AXES[axis]: size}
        shape = replace(base, **change)
        measure = partial(regions.measure, shape, axis=axis, profile=parsed.profile)
        cases.append(Case(f"{axis}={size}", str(shape), measure))
    return Run("points", cases, _known(parsed.methods or sweep.METHODS), regions.Row)


def _against(parsed: argparse.Namespace) -> Run:
    base, names = _base(parsed.base, parsed.base_commit), _known(parsed.methods)
    if base.folder is not None and (others := [name for name in names if not methods.is_ours(name)]):
        raise ValueError(f"only this project's methods are in another checkout, not {others}")
    cases = _shape_cases(parsed, partial(against.measure, base=base), suffix=f", against {base.name}")
    return Run("shapes", cases, names, against.Row)


def _base(text: str, commit: str | None) -> against.Base:
    if methods.is_method(text):
        return against.Base(name=text)
    folder = Path(text).resolve()
    package = folder / PACKAGE
    if not package.is_dir():
        raise ValueError(f"the base must be a method or a folder with the folder {PACKAGE}, but got {text!r}")
    return against.Base(name=commit or records.commit_of(package) or folder.name, folder=folder)


def _predictions(parsed: argparse.Namespace) -> Run:
    return Run("shapes", _shape_cases(parsed, predictions.measure), parsed.methods, predictions.Row)


def _models(parsed: argparse.Namespace) -> Run:
    sizes = ["litgpt-llama-3.2-1b", "transformers-llama-3.2-1b"]
    names = parsed.models or (sizes if parsed.device == "cuda" else ["litgpt-tiny", "transformers-tiny"])
    cases = [
        Case(
            name,
            f"{name}{f', {tokens} tokens' if tokens else ''}{', lengths change' if lengths == 'changing' else ''}",
            partial(models.measure, name, layers=parsed.layers, tokens=tokens, lengths=lengths),
        )
        for name in names
        for tokens in parsed.tokens or [None]
        for lengths in parsed.lengths
    ]
    return Run("models", cases, parsed.methods, models.Row)


def _convergence(parsed: argparse.Namespace) -> Run:
    names = parsed.models or ["llama-100m" if parsed.device == "cuda" else "tiny"]
    measure = partial(convergence.measure, seeds=parsed.seeds, steps=parsed.steps)
    cases = [Case(name, name, partial(measure, name)) for name in names]
    return Run("models", cases, _known(parsed.methods), convergence.Row)


def _soak(parsed: argparse.Namespace) -> Run:
    cases = _shape_cases(parsed, partial(soak.measure, steps=parsed.steps))
    return Run("shapes", cases, _known(parsed.methods), soak.Row)


def _lengths(parsed: argparse.Namespace) -> Run:
    return Run("shapes", _shape_cases(parsed, lengths.measure), parsed.methods, lengths.Row)


def _small(parsed: argparse.Namespace) -> Run:
    return Run("shapes", _shape_cases(parsed, small.measure), parsed.methods, small.Row)


def _kernels(parsed: argparse.Namespace) -> Run:
    dtype = DTYPES[parsed.dtype or ("bfloat16" if parsed.device == "cuda" else "float32")]
    vocabs = parsed.vocabs or kernels.VOCABS[parsed.device]
    cases = [
        Case(str(vocab), f"vocabulary of {vocab}", partial(kernels.measure, vocab, dtype=dtype)) for vocab in vocabs
    ]
    return Run("vocabs", cases, parsed.methods, kernels.Row)


def _losses(parsed: argparse.Namespace) -> Run:
    for text in _shape_texts(parsed):
        losses.check_shape(parse_shape(text))
    return Run("shapes", _shape_cases(parsed, losses.measure), parsed.methods, losses.Row)


def _distributed(parsed: argparse.Namespace) -> Run:
    started = torchrun.ranks()
    if started is not None and parsed.ranks not in (None, started):
        raise ValueError(
            f"--ranks must be those that torchrun has started, {started}, or left out, but got {parsed.ranks}"
        )
    ranks = started or parsed.ranks or 2
    cases = _shape_cases(parsed, partial(distributed.measure, ranks=ranks), suffix=f", over {ranks} ranks")
    if started is not None:
        torchrun.join(parsed.device, distributed.TIMEOUT)
    return Run("shapes", cases, parsed.methods, distributed.Row)


_RUNS = {
    "distributed": _distributed,
    "regions": _regions,
    "sweep": _sweep,
    "against": _against,
    "predictions": _predictions,
    "models": _models,
    "convergence": _convergence,
    "soak": _soak,
    "lengths": _lengths,
    "small": _small,
    "kernels": _kernels,
    "losses": _losses,
}
