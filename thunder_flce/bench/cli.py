"""`python -m thunder_flce bench`: time, memory and error of the loss on this device, against other implementations."""

import argparse
import json
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from thunder_flce.bench import distributed, losses, methods, models, rates, records, regions, showing, small
from thunder_flce.bench.measuring import Schedule, Session
from thunder_flce.bench.shapes import SHAPES, parse_shape

PROGRAM = "python -m thunder_flce bench"


@dataclass(frozen=True, kw_only=True)
class Subset:
    """What one name on the command line measures: some methods on some cases, such as shapes.

    Args:
        help: a line.
        measure: called for each case with what `parse` made of it, the names of methods, a `Session`, and `options`.
        row: of its table.
        methods: their names.
        defaults: the cases that are measured where none is named, by the device.
        case: with an s, the option that takes the cases.
        parse: from the text of a case. Raises a ValueError.
        check_method: raises a ValueError for a name that is no method; by default, what is none of `methods` is none.
        schedule: by which methods take turns; None where each runs once.
        options: more arguments of the command line, for argparse, and of `measure`.
    """

    help: str
    measure: Callable[..., None]
    row: type
    methods: Collection[str]
    defaults: Mapping[str, Sequence[str]]
    case: str = "shape"
    parse: Callable[[str], Any] = parse_shape
    check_method: Callable[[str], object] | None = None
    schedule: Schedule | None = Schedule()
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def positive(text: str) -> int:
    """A positive integer of the command line."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"must be a positive integer, but got {text!r}")
    return int(text)


def one_of(names: Collection[str]) -> Callable[[str], str]:
    """A `Subset.parse` of names."""

    def parse(text: str) -> str:
        if text not in names:
            raise ValueError(f"there is no {text!r}, but {'; '.join(names)}")
        return text

    return parse


_BIG_AND_TINY = {"cuda": ["S1"], "cpu": ["cpu"]}

SUBSETS = {
    "regions": Subset(
        help="the mean loss, against every peer",
        measure=regions.measure,
        row=regions.Row,
        methods=methods.DEFAULT,
        check_method=methods.check_method,
        defaults=_BIG_AND_TINY,
        schedule=regions.SCHEDULE,
    ),
    "losses": Subset(
        help="GRPO, preference losses, weighted tokens, log-probabilities, distillation",
        measure=losses.measure,
        row=regions.Row,
        methods=losses.METHODS,
        defaults=losses.SHAPES,
        parse=losses.parse,
        schedule=losses.SCHEDULE,
    ),
    "models": Subset(
        help="training steps of whole models, and the time to the first one",
        measure=models.measure,
        row=models.Row,
        methods=models.DEFAULT,
        check_method=one_of(models.METHODS),
        case="model",
        parse=one_of(models.MODELS),
        defaults={
            "cuda": ["litgpt-llama-3.2-1b", "transformers-llama-3.2-1b"],
            "cpu": ["litgpt-tiny", "transformers-tiny"],
        },
        options={
            "layers": {"type": positive, "help": "instead of the models' own, which thunder takes minutes for"},
            "tokens": {"type": positive, "nargs": "+", "help": "in a batch, instead of the models' own"},
            "lengths": {"nargs": "+", "choices": ("one", "changing"), "default": ["one"], "help": "of the sequences"},
        },
    ),
    "small": Subset(
        help="time of host and device, and calls, where regions are small",
        measure=small.measure,
        row=regions.Row,
        methods=small.METHODS,
        defaults=small.SHAPES,
        schedule=small.SCHEDULE,
    ),
    "distributed": Subset(
        help="the mean loss over several GPUs of this machine, which divide the vocabulary or the tokens",
        measure=distributed.measure,
        parse=distributed.parse,
        row=distributed.Row,
        methods=distributed.METHODS,
        defaults=_BIG_AND_TINY,
        options={"ranks": {"type": positive, "default": 2, "help": "processes, a GPU each (default: %(default)s)"}},
    ),
}


def main(arguments: Sequence[str], subsets: Mapping[str, Subset] = SUBSETS, program: str = PROGRAM) -> int:
    """Runs the command line; returns the exit status.

    Args:
        arguments: what comes after `program`. Without the name of a subset they are for the first one; `--rates` is a
            report on the device.
        subsets: by name.
        program: what is shown as the command.
    """
    arguments = list(arguments)
    if arguments[:1] == ["--rates"] and program == PROGRAM:
        return _rates(arguments)
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-h", "--help")):
        arguments.insert(0, next(iter(subsets)))
    parser = _parser(subsets, program)
    parsed = parser.parse_args(arguments)
    subset = subsets[parsed.subset]
    names = parsed.methods or list(subset.methods)
    texts = list(dict.fromkeys(parsed.cases or subset.defaults[parsed.device]))
    option = "methods"
    try:
        for name in names:
            (subset.check_method or one_of(subset.methods))(name)
        option = f"{subset.case}s"
        cases = [subset.parse(text) for text in texts]
    except ValueError as error:
        parser.error(f"--{option}: {error}")
    _check_common_options(parser, parsed)
    if parsed.pictures and find_spec("matplotlib") is None:
        parser.error("--pictures needs matplotlib: pip install matplotlib")
    if parsed.pictures and parsed.pictures.exists() and not parsed.pictures.is_dir():
        parser.error(f"--pictures: {parsed.pictures} is no folder")
    command = shlex.join([*program.split(), *arguments])
    context = records.context(command, device=parsed.device, commit=parsed.commit)
    print(f"`{command}`\n\n{records.as_words(context)}\n", flush=True)
    measure = partial(subset.measure, **{name: getattr(parsed, name) for name in subset.options})
    for case in cases:
        rows: list[Any] = []
        measure(case, names, _session(subset, parsed, partial(_write, rows, parsed, context)))
        showing.show_progress("")
        rows.sort(key=lambda row: names.index(row.method) if row.method in names else -1)
        print(showing.markdown(str(case), subset.row, rows), end="\n\n", flush=True)
        if parsed.pictures:
            title = f"{parsed.subset}: {case}, {context['device']}"
            print(f"![{title}]({showing.draw(title, subset.row, rows, parsed.pictures)})", end="\n\n")
    return 0


def _session(subset: Subset, parsed: argparse.Namespace, write: Callable[[Any], None]) -> Session:
    schedule = subset.schedule or Schedule()
    if subset.schedule is not None:
        settle_ms = {"settle_ms": 0.0} if parsed.device == "cpu" else {}
        schedule = replace(schedule, rounds=parsed.rounds, calls=parsed.calls, **settle_ms)
    return Session(device=parsed.device, schedule=schedule, progress=showing.show_progress, write=write)


def _write(rows: list[Any], parsed: argparse.Namespace, context: dict[str, str], row: Any) -> None:
    rows.append(row)
    if parsed.json:
        records.append(parsed.json, {**records.as_record(parsed.subset, row), **context})


def _rates(arguments: list[str]) -> int:
    """Prints the report as it is made; needs nothing that is not there."""
    parser = argparse.ArgumentParser(prog=f"{PROGRAM} --rates", description=rates.__doc__)
    _common_options(parser)
    parsed = parser.parse_args(arguments[1:])
    _check_common_options(parser, parsed)
    context = records.context(shlex.join([*PROGRAM.split(), *arguments]), device=parsed.device, commit=parsed.commit)
    for line in rates.report(parsed.device, context, showing.show_progress):
        showing.show_progress("")
        print(line, flush=True)
    if parsed.json:
        records.append(parsed.json, json.loads(line))
    return 0


def _parser(subsets: Mapping[str, Subset], program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=program, description=f"Without a subset: {next(iter(subsets))}.")
    if program == PROGRAM:
        parser.add_argument("--rates", action="store_true", help="what this device reaches, and which options suit it")
    names = parser.add_subparsers(dest="subset", required=True, metavar="SUBSET")
    for name, subset in subsets.items():
        of_subset = names.add_parser(name, help=subset.help, description=subset.help)
        _common_options(of_subset)
        described = _SHAPES if subset.case == "shape" else f"as {', '.join(subset.defaults['cuda'])}"
        of_subset.add_argument(f"--{subset.case}s", dest="cases", nargs="+", metavar="CASE", help=described)
        of_subset.add_argument("--methods", nargs="+", metavar="METHOD", help="; ".join(subset.methods))
        of_subset.add_argument("--pictures", type=Path, metavar="FOLDER", help="draw times and memory as PNG files")
        if (default := subset.schedule) is not None:
            of_subset.add_argument("--rounds", type=positive, default=default.rounds, help="turns (%(default)s)")
            of_subset.add_argument("--calls", type=positive, default=default.calls, help="timings a turn (%(default)s)")
        for option, settings in subset.options.items():
            of_subset.add_argument(f"--{option.replace('_', '-')}", **settings)
    return parser


_SHAPES = (
    f"{', '.join(SHAPES)}; tokens=…,vocab=…,hidden=…[,bias=1][,ignored=…][,dtype=…][,frozen=1][,rank=…]; "
    "both, as in S1,bias=1; or a Hugging Face model's config.json,tokens=…"
)


def _common_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the results to it, a line each")
    parser.add_argument("--commit", help="what is measured, where git cannot tell")


def _check_common_options(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> None:
    if parsed.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch finds no GPU")
    if parsed.json and (parsed.json.is_dir() or not parsed.json.parent.is_dir()):
        parser.error(f"--json: {parsed.json} is no file in a folder that exists")
