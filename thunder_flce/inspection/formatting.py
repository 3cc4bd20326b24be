"""Headings, text and tables, as plain text and, where rich is installed, for a terminal."""

import importlib.util
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Heading:
    """A line that opens a section."""

    text: str


@dataclass(frozen=True)
class Text:
    """Lines of text."""

    text: str
    indent: int = 0
    style: str = ""
    """One of rich's styles, for terminals."""


@dataclass(frozen=True)
class Table:
    """Rows of cells; plain text has no lines between them."""

    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    right: tuple[int, ...] = ()
    """The columns that are aligned to the right."""


Block = Heading | Text | Table


def plain(blocks: Iterable[Block]) -> str:
    """The blocks as text without any markup."""
    return "\n".join(_plain(block) for block in blocks)


def rich_terminal() -> bool:
    """Whether standard output is a terminal, and rich installed to print to it."""
    return sys.stdout.isatty() and importlib.util.find_spec("rich") is not None


def print_blocks(blocks: Iterable[Block]) -> None:
    """Prints with rich to a terminal, if it is installed, and plain text otherwise."""
    if rich_terminal():
        from rich.console import Console

        Console(highlight=False).print(rich_group(blocks))
    else:
        print(plain(blocks))


def rich_group(blocks: Iterable[Block]):
    """The blocks as something that rich prints."""
    from rich.console import Group

    return Group(*map(_rich, blocks))


def format_bytes(size: float) -> str:
    """1536 as "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"


def _plain(block: Block) -> str:
    if isinstance(block, Heading):
        return f"\n{block.text}\n{'─' * len(block.text)}"
    if isinstance(block, Text):
        return textwrap.indent(block.text, "  " * block.indent)
    widths = [max(map(len, cells)) for cells in zip(block.columns, *block.rows, strict=True)]

    def line(cells: tuple[str, ...]) -> str:
        padded = (
            cell.rjust(width) if at in block.right else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "  " + "  ".join(padded).rstrip()

    return "\n".join(map(line, (block.columns, *block.rows)))


def _rich(block: Block):
    from rich import box, padding, table, text

    if isinstance(block, Heading):
        return text.Text(f"\n{block.text}", style="bold underline")
    if isinstance(block, Text):
        return padding.Padding(text.Text(block.text, style=block.style), (0, 0, 0, 2 * block.indent))
    grid = table.Table(box=box.SIMPLE_HEAD)
    for at, column in enumerate(block.columns):
        grid.add_column(column, justify="right" if at in block.right else "left")
    for row in block.rows:
        grid.add_row(*(text.Text(cell) for cell in row))
    return grid
