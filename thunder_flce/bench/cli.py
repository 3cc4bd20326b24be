"""`python -m thunder_flce bench`: time, memory and error of the loss on this device, against other implementations."""

import argparse
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from thunder_flce.bench import distributed, losses, methods, models, output, rates, regions
from thunder_flce.bench.measure import Run, progress
from thunder_flce.bench.shapes import GRAMMAR, parse_shape

PROGRAM = "python -m thunder_flce bench"


@dataclass(frozen=True, kw_only=True)
class Subset:
    """A benchmark that the command line knows by a name: it measures some methods on some cases, such as shapes."""

    help: str
    measure: Callable[..., None]  # called with a parsed case, methods, a `Run`, and `options`
    methods: Collection[str]  # the default
    check_method: Callable[[str], object] | None = None  # raises a ValueError; by default if not in `methods`
    cases: Mapping[str, Sequence[str]] = field(default_factory=lambda: {"cuda": ["llama-3.1-8b"], "cpu": ["cpu"]})
    case: str = "shape"  # kind of case; "shapes" is then the option that takes other cases
    parse: Callable[[str], Any] = parse_shape  # parses the text of a case; raises a ValueError
    turns: Mapping[str, Any] | None = field(default_factory=dict)  # fields of `Run`; None if methods take no turns
    columns: output.Columns = field(default_factory=lambda: output.COLUMNS)
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # further arguments, for argparse


def positive(text: str) -> int:
    """Reads a positive integer of the command line."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"must be a positive integer, but got {text!r}")
    return int(text)


def one_of(names: Collection[str]) -> Callable[[str], str]:
    """Returns a `Subset.parse` that accepts these names only."""

    def parse(text: str) -> str:
        if text not in names:
            raise ValueError(f"must be one of {'; '.join(names)}, but got {text!r}")
        return text

    return parse


# About a millisecond on a GPU: the host is as busy as the device.
_SMALL = (
    (128, 32000, 768), (512, 32000, 768), (2048, 32000, 768), (8192, 32000, 768), (1024, 32000, 1024),
    (2048, 32000, 2048), (512, 50257, 768), (2048, 50304, 768), (8192, 50304, 768), (4096, 50257, 1024),
    (512, 151936, 896), (2048, 151936, 896), (1024, 128256, 2048), (4096, 128256, 2048),
)  # fmt: skip

_REGIONS = Subset(
    help="the mean loss, against every peer",
    measure=regions.measure,
    # "quack, tuned" searches for minutes before its first result.
    methods=[name for name in methods.METHODS if name != "quack, tuned"],
    check_method=methods.maker,
    turns={"calls": 200, "turn_ms": 1000},
)
SUBSETS = {
    "regions": _REGIONS,
    "small": replace(
        _REGIONS,
        help="the mean loss for small regions",
        methods=["eager", "torch.compile", "flce backend", "function"],
        cases={"cuda": ["tokens={},vocab={},hidden={}".format(*sizes) for sizes in _SMALL], "cpu": ["tiny"]},
    ),
    "losses": Subset(
        help="GRPO, preference losses, weighted tokens, log-probabilities, distillation",
        measure=losses.measure,
        methods=losses.METHODS,
        parse=partial(parse_shape, without=("bias", "ignored")),
        turns={"rounds": 3, "turn_ms": 300},
    ),
    "models": Subset(
        help="training steps of whole models, as NAME or NAME,layers=…,tokens=…,lengths=changing",
        measure=models.measure,
        methods=models.DEFAULT,
        check_method=one_of(models.METHODS),
        cases={"cuda": ["litgpt-llama-3.2-1b", "transformers-llama-3.2-1b"], "cpu": ["litgpt-tiny"]},
        case="model",
        parse=models.parse_model,
        # In steps that wait for the host, the medians of 20 calls differed by a tenth between two runs of one program.
        turns={"rounds": 10, "calls": 40},
    ),
    "distributed": Subset(
        help="the mean loss on several GPUs of this machine, which divide the vocabulary or the tokens",
        measure=distributed.measure,
        methods=distributed.METHODS,
        parse=partial(parse_shape, without=("bias", "frozen")),
        options={"ranks": {"type": positive, "default": 2, "help": "processes, one GPU each (default: %(default)s)"}},
    ),
    "rates": Subset(
        help="rates that this device reaches, and the options that suit it",
        measure=rates.measure,
        methods=["function"],
        check_method=methods.with_options,
        cases={"cuda": ["llama-3.1-8b"], "cpu": ["tokens=256,vocab=8192,hidden=256,dtype=float32"]},
        turns={"rounds": 3, "calls": 10, "turn_ms": 400, "settle_ms": 100},
    ),
}


def main(arguments: Sequence[str], subsets: Mapping[str, Subset] = SUBSETS, program: str = PROGRAM) -> int:
    """Runs the command line; returns the exit status.

    Args:
        arguments: the words after `program`. Without a subset, the first subset runs; `--rates` stands for `rates`.
        subsets: all subsets, by name.
        program: the command that help and errors show.
    """
    command = shlex.join([*program.split(), *arguments])
    arguments = ["rates" if index == 0 and text == "--rates" else text for index, text in enumerate(arguments)]
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-h", "--help")):
        arguments.insert(0, next(iter(subsets)))
    parser = _parser(subsets, program)
    parsed = parser.parse_args(arguments)
    subset = subsets[parsed.subset]
    names = parsed.methods or list(subset.methods)
    if parsed.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch finds no GPU")
    if parsed.pictures and find_spec("matplotlib") is None:
        parser.error("--pictures needs matplotlib: pip install matplotlib")
    option = "methods"
    try:
        for name in names:
            (subset.check_method or one_of(subset.methods))(name)
        option = f"{subset.case}s"
        cases = [subset.parse(text) for text in dict.fromkeys(parsed.cases or subset.cases[parsed.device])]
        option = "json"
        if parsed.json:
            parsed.json.open("a").close()
        option = "pictures"
        if parsed.pictures:
            parsed.pictures.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        parser.error(f"--{option}: {error}")
    context = output.context(command, device=parsed.device, commit=parsed.commit)
    context_text = ", ".join(f"{name} {value}" for name, value in context.items() if value and name != "command")
    print(f"`{command}`\n\n{context_text}\n", flush=True)

    def write(row: output.Row) -> None:
        if parsed.json:
            output.append(parsed.json, {"subset": parsed.subset, **row, **context})

    turns = {**(subset.turns or {}), **{name: getattr(parsed, name) for name in ("rounds", "calls") if name in parsed}}
    for case in cases:
        run = Run(device=parsed.device, write=write, **turns)
        subset.measure(case, names, run, **{name: getattr(parsed, name) for name in subset.options})
        progress("")
        print(output.markdown(str(case), run.rows, subset.columns), end="\n\n", flush=True)
        if parsed.pictures:
            title = f"{parsed.subset}: {case}, {context['device']}"
            path = output.draw(title, run.rows, parsed.pictures, columns=subset.columns)
            print(f"![{title}]({path})", end="\n\n")
    return 0


def _parser(subsets: Mapping[str, Subset], program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program,
        description=f"Without a subset: {next(iter(subsets))}. SUBSET --help lists its options. In tables, flce is "
        "thunder_flce.jit, flce backend the backend of torch.compile, and function linear_cross_entropy.",
    )
    names = parser.add_subparsers(dest="subset", required=True, metavar="SUBSET")
    for name, subset in subsets.items():
        subset_parser = names.add_parser(name, help=subset.help, description=subset.help)
        add = subset_parser.add_argument
        case_help = GRAMMAR if subset.case == "shape" else f"as {', '.join(subset.cases['cuda'])}"
        add(f"--{subset.case}s", dest="cases", nargs="+", metavar="CASE", help=case_help)
        add("--methods", nargs="+", metavar="METHOD", help="; ".join(subset.methods))
        add("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
        add("--json", type=Path, metavar="FILE", help="append the results to this file, one line each")
        add("--pictures", type=Path, metavar="FOLDER", help="draw times and memory as PNG files")
        add("--commit", help='commit of the code (default: that of git, with "-dirty" if files are changed)')
        if subset.turns is not None:
            turns = {"rounds": Run.rounds, "calls": Run.calls, **subset.turns}
            add("--rounds", type=positive, default=turns["rounds"], help="turns of each method (default: %(default)s)")
            add("--calls", type=positive, default=turns["calls"], help="most timings per turn (default: %(default)s)")
        for option, settings in subset.options.items():
            add(f"--{option.replace('_', '-')}", **settings)
    return parser
