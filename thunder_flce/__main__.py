"""`python -m thunder_flce bench` and `python -m thunder_flce trace`."""

import argparse
import json
import shlex
import sys
from pathlib import Path

import torch

from thunder_flce.inspection import trace_command


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m thunder_flce", description=__doc__)
    commands = parser.add_subparsers(required=True)
    bench = commands.add_parser("bench", help="time, memory and error of loss regions, against every installed peer")
    bench.add_argument("--shapes", nargs="+", default=None, help="names, or tokens=…,vocab=…,hidden=…")
    bench.add_argument("--methods", nargs="+", default=None, help="names; default: all")
    bench.add_argument("--rounds", type=int, default=4, help="turns of each method, of five timings each")
    bench.add_argument("--json", type=Path, default=None, help="append the results to this file, a line each")
    bench.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
    bench.set_defaults(run=_bench)
    trace_command.add_parser(commands)
    parsed = parser.parse_args(arguments)
    return parsed.run(parsed, bench, sys.argv[1:] if arguments is None else arguments)


def _bench(parsed: argparse.Namespace, parser: argparse.ArgumentParser, arguments: list[str]) -> int:
    from thunder_flce.bench.methods import METHODS
    from thunder_flce.bench.regions import as_record, measure, versions
    from thunder_flce.bench.shapes import parse_shape

    methods = parsed.methods or list(METHODS)
    if unknown := set(methods) - set(METHODS):
        parser.error(f"unknown methods {sorted(unknown)}; there are {', '.join(METHODS)}")
    try:
        shapes = [parse_shape(text) for text in parsed.shapes or (["S1"] if parsed.device == "cuda" else ["cpu"])]
    except ValueError as error:
        parser.error(str(error))
    context = {**versions(), "command": shlex.join(["python", "-m", "thunder_flce", *arguments])}
    for shape in shapes:
        rows = measure(shape, methods, device=parsed.device, rounds=parsed.rounds, progress=_progress)
        _progress("")
        _print_table(rows)
        if parsed.json:
            with parsed.json.open("a") as file:
                file.writelines(json.dumps({**as_record(row), **context}) + "\n" for row in rows)
    return 0


def _progress(step: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{step}", end="", file=sys.stderr, flush=True)


def _print_table(rows: list) -> None:
    columns = ("time_ms", "ratio", "memory_gb", "above_outputs_gb", "dx_error", "dw_error", "dbias_error")
    formats = ("{:.2f}", "{:.3f}", "{:.3f}", "{:.3f}", "{:.1e}", "{:.1e}", "{:.1e}")
    print(f"\n{rows[0].shape}")
    print(f"{'method':26}" + "".join(f"{column:>18}" for column in columns))
    for row in rows:
        values = (getattr(row, column) for column in columns)
        cells = ("" if value is None else form.format(value) for form, value in zip(formats, values, strict=True))
        print(f"{row.method:26}" + "".join(f"{cell:>18}" for cell in cells) + (row.failed or ""))


if __name__ == "__main__":
    sys.exit(main())
