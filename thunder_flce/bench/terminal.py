"""What a terminal shows: a progress bar while it runs, then a table for each case."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import Field, fields
from functools import partial
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text


def print_table(title: str, row_type: type, rows: Sequence[Any]) -> None:
    """A line for each method, with medians and half of what lies between the 20th and the 80th percentile.

    Its columns are the fields that are a `measuring.column`, but for those in which no row has a number; what failed is
    told below, in words.
    """
    measured = [row for row in rows if row.failed is None]
    columns = [field for field in fields(row_type) if "title" in field.metadata]
    columns = [column for column in columns if any(getattr(row, column.name) is not None for row in measured)]
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("method", no_wrap=True)
    for column in columns:
        table.add_column(column.metadata["title"], justify="right", no_wrap=True)
    for row in measured:
        table.add_row(row.method, *(_cell(row, column) for column in columns))
    # A file, or a log, gets whole lines: what is cut off there cannot be widened.
    console = Console(width=None if sys.stdout.isatty() else 200, highlight=False)
    if measured:
        console.print(table)
    else:
        console.print(Text(title, style="bold"))
    for row in rows:
        if row.failed is not None:
            console.print(Text(f"  {row.method}: {row.failed}", style="dim"))


def _cell(row: Any, column: Field) -> Text:
    value = getattr(row, column.name)
    if value is None:
        return Text("")
    text = Text(column.metadata["form"].format(value))
    low, high = getattr(row, f"{column.name}_p20", None), getattr(row, f"{column.name}_p80", None)
    if low is not None:
        text.append(f" ±{(high - low) / 2:.2g}", style="dim")
    return text


@contextmanager
def progress_bar(cases: int) -> Iterator[Callable[..., None]]:
    """A bar of so many cases, on stderr; nothing where that is no terminal.

    Yields a function that changes what it shows: case=, description= for a step of the case, or advance= cases.
    """
    columns = (TextColumn("{task.fields[case]}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(
        *columns, TextColumn("{task.description}"), console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        yield partial(bar.update, bar.add_task("", total=cases, case=""))
