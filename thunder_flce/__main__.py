"""The command line: `python -m thunder_flce COMMAND`."""

import argparse
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module

COMMANDS = {
    "bench": "thunder_flce.bench.cli",
    "trace": "thunder_flce.inspection.trace_command",
}
"""Modules whose `main` takes the arguments after the command's name, and returns the exit status."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m thunder_flce", description=__doc__)
    parser.add_argument(
        "command", choices=COMMANDS, help="bench: run the benchmark; trace: print thunder's trace of a program"
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the command; see COMMAND --help")
    parsed = parser.parse_args(arguments)
    try:
        with warnings.catch_warnings():
            # thunder warns about a missing executor, which this package does not use.
            warnings.filterwarnings("ignore", message="transformer_engine module not found")
            command = import_module(COMMANDS[parsed.command])
    except ModuleNotFoundError as error:
        if error.name != "thunder":
            raise
        parser.exit(2, f"{parser.prog} {parsed.command} needs lightning-thunder: pip install lightning-thunder\n")
    return command.main(parsed.arguments)


if __name__ == "__main__":
    sys.exit(main())
