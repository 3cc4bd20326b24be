"""Blocks of text: a plain string, and with colours where rich is installed and prints to a terminal."""

import importlib.util
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple


class Block(NamedTuple):
    """Lines of text, of one style."""

    text: str
    style: str = ""
    """One of rich's"""


def heading(text: str) -> Block:
    """A line that opens a section."""
    return Block(f"\n{text}\n{'─' * len(text)}", "bold")


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[int] = ()) -> Block:
    """Rows of cells below the names of the columns; those in `right` are aligned to the right."""
    lines = [columns, *rows]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    # As format specifications, such as ">8".
    specs = [f"{'>' if at in right else '<'}{width}" for at, width in enumerate(widths)]
    padded = (map(format, cells, specs) for cells in lines)
    return Block("\n".join(f"  {'  '.join(cells)}".rstrip() for cells in padded))


def print_text(text: str, as_rich: Callable[[], Any]) -> None:
    """Prints with rich to a terminal, if it is installed, what `as_rich` returns, and plain text otherwise."""
    if sys.stdout.isatty() and importlib.util.find_spec("rich") is not None:
        from rich.console import Console

        Console(highlight=False).print(as_rich())
    else:
        print(text)


def format_bytes(size: float) -> str:
    """1536 as "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"
