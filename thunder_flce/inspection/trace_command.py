"""`python -m thunder_flce trace`: a program's final traces, with and without the executor.

The program is compiled on fake tensors, and not run: traces for a GPU need no GPU.
"""

import argparse
import importlib
import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import thunder
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from thunder_flce.engine.kernels.dispatch import check_available
from thunder_flce.graph.plugin import jit
from thunder_flce.inspection import programs
from thunder_flce.inspection.explain import explain
from thunder_flce.inspection.trace_text import commented, compile_only, readable, renumbered
from thunder_flce.matching.decisions import PLURALS, NotFusedWarning
from thunder_flce.options import ROW_KERNELS, Options

_DTYPES = {"cpu": "float32", "cuda": "bfloat16"}
_SIZES = {"batch": "sequences", "sequence": "tokens in a sequence", "hidden": "hidden size", "vocab": "vocabulary"}
_EPILOG = f"""\
examples: {", ".join(programs.EXAMPLES)}

module:function is one of two things:
  a loss with arguments named hidden, weight, bias, labels and so on, which are created in the given sizes
  a function without arguments that returns a pair: a function or module, and a tuple of its arguments
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m thunder_flce trace",
        description=__doc__.partition("\n")[0],
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("example", help="an example, or module:function")
    parser.add_argument("--device", choices=list(_DTYPES), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=["float16", "bfloat16", "float32", "float64"], help="bfloat16 on a GPU")
    for name, meaning in _SIZES.items():
        default = getattr(programs.Sizes, name)
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{meaning} (default: {default})")
    parser.add_argument("--row-kernels", choices=ROW_KERNELS, default="auto", help="library that runs the row kernels")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns the exit status."""
    parser = _parser()
    parsed = parser.parse_args(arguments)
    with FakeTensorMode(), warnings.catch_warnings():
        # The printed decisions have the reason already.
        warnings.simplefilter("ignore", NotFusedWarning)
        program, tensors = _program_and_arguments(parsed, parser)
        before = thunder.jit(program)
        compile_only(before, tensors)
        print(_traces_text("before", ["before: thunder.jit"], before))
        after = jit(program, options=Options(row_kernels=parsed.row_kernels))
        compile_only(after, tensors)
        report = explain(after)
        decisions = [str(decision) for decision in report.decisions] or [f"no {', '.join(PLURALS)}"]
        print(_traces_text("after", ["after: thunder_flce.jit", *decisions], after))
    return 0


def _traces_text(name: str, header: list[str], jitted: Callable) -> str:
    traces = {"forward": thunder.last_traces(jitted)[-1]}
    # If nothing needs a gradient, there is no backward.
    if backward := thunder.last_backward_traces(jitted):
        traces["backward"] = backward[-1]
    body = (f"{commented(f'{name}, {direction}')}\n{readable(trace)}" for direction, trace in traces.items())
    return renumbered(commented("\n".join(header)), "\n\n\n".join(body))


def _program_and_arguments(parsed: argparse.Namespace, parser: argparse.ArgumentParser) -> tuple[Callable, Any]:
    program = programs.EXAMPLES.get(parsed.example) or _import_function(parsed.example, parser)
    names = list(inspect.signature(program).parameters)
    if not names:
        returned = program()
        is_pair = isinstance(returned, tuple) and len(returned) == 2
        if not is_pair or not callable(returned[0]) or not isinstance(returned[1], tuple):
            parser.error(f"{parsed.example} must return a function or module and a tuple of its arguments")
        return returned
    if unknown := set(names) - programs.SHAPES.keys():
        known = ", ".join(sorted(programs.SHAPES))
        parser.error(f"{parsed.example} has arguments {sorted(unknown)}, but can only have {known}")
    sizes = programs.Sizes(**{name: getattr(parsed, name) for name in _SIZES})
    if min(vars(sizes).values()) < 1:
        parser.error(f"--{', --'.join(_SIZES)} must be positive")
    dtype = getattr(torch, parsed.dtype or _DTYPES[parsed.device])
    try:
        check_available(parsed.row_kernels, dtype=dtype, device_type=parsed.device)
    except ValueError as error:
        parser.error(str(error))
    return program, programs.arguments(program, sizes, device=parsed.device, dtype=dtype)


def _import_function(name: str, parser: argparse.ArgumentParser) -> Callable:
    module, _, function = name.partition(":")
    if not module or not function:
        parser.error(f"an example must be one of {', '.join(programs.EXAMPLES)}, or module:function, but got {name!r}")
    try:
        program = getattr(importlib.import_module(module), function)
    except (ModuleNotFoundError, AttributeError) as error:
        parser.error(f"{name}: {error}")
    if not callable(program):
        parser.error(f"{name} is no function, but a {type(program).__name__}")
    return program
