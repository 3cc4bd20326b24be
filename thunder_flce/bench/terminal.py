"""What a terminal shows: a progress bar while it runs, then a table for each case."""

import sys
from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text


class Column(NamedTuple):
    """A column of numbers."""

    field: str
    """The field of the row."""
    title: str
    form: str
    """As in str.format, with a trailing percentile where there is a `FIELD_p20` and a `FIELD_p80`."""


_TIME = "{:.2f}"
_GB = "{:.3f}"
_ERROR = "{:.1e}"

REGION_COLUMNS = [
    Column("time_ms", "both, ms", _TIME),
    Column("forward_ms", "forward", _TIME),
    Column("backward_ms", "backward", _TIME),
    Column("ratio", "× products", "{:.3f}"),
    Column("tflops", "TFLOP/s", "{:.4g}"),
    Column("memory_gb", "peak, GB", _GB),
    Column("above_outputs_gb", "− gradients", _GB),
    Column("dx_error", "dX error", _ERROR),
    Column("dw_error", "dW error", _ERROR),
    Column("dbias_error", "db error", _ERROR),
    Column("first_call_s", "first call, s", "{:.1f}"),
]
MODEL_COLUMNS = [
    Column("time_ms", "step, ms", _TIME),
    Column("forward_ms", "forward", _TIME),
    Column("backward_ms", "backward", _TIME),
    Column("optimizer_ms", "optimizer", _TIME),
    Column("memory_gb", "peak, GB", _GB),
    Column("first_call_s", "first step, s", "{:.1f}"),
    Column("loss_error", "loss error", _ERROR),
]
KERNEL_COLUMNS = [
    Column("time_ms", "time, ms", "{:.3f}"),
    Column("gb_per_s", "GB/s", "{:.0f}"),
    Column("copy_gb_per_s", "copy, GB/s", "{:.0f}"),
    Column("ratio", "of the copy", "{:.1%}"),
]


def print_table(title: str, columns: Sequence[Column], rows: Sequence[Any]) -> None:
    """One row for each method; a failure is told in words. Columns in which no row has a number are left out."""
    columns = [column for column in columns if any(getattr(row, column.field) is not None for row in rows)]
    failures = any(row.failed for row in rows)
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("method", no_wrap=True)
    for column in columns:
        table.add_column(column.title, justify="right", no_wrap=True)
    if failures:
        table.add_column("", overflow="fold")
    for row in rows:
        table.add_row(
            row.method, *(_cell(row, column) for column in columns), *([row.failed or ""] if failures else [])
        )
    # A file, or a log, gets whole lines: what is cut off there cannot be widened.
    width = None if sys.stdout.isatty() else 200
    Console(width=width, highlight=False).print(table)


def _cell(row: Any, column: Column) -> Text:
    value = getattr(row, column.field)
    if value is None:
        return Text("")
    text = Text(column.form.format(value))
    low, high = getattr(row, f"{column.field}_p20", None), getattr(row, f"{column.field}_p80", None)
    if low is not None:
        text.append(f" ±{(high - low) / 2:.2g}", style="dim")
    return text


@contextmanager
def progress_bar(cases: int):
    """Gives two functions: one to say what is next, one to say that a case is done."""
    columns = (TextColumn("{task.fields[case]}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(
        *columns, TextColumn("{task.description}"), console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        yield ProgressBar(bar, bar.add_task("", total=cases, case=""))


class ProgressBar:
    """The bar, which moves by cases and tells of steps."""

    def __init__(self, bar: Progress, task: Any):
        self._bar = bar
        self._task = task

    def case(self, name: str) -> None:
        """Begins a case."""
        self._bar.update(self._task, case=name)

    def step(self, words: str) -> None:
        """Begins a step of the case."""
        self._bar.update(self._task, description=words)

    def done(self) -> None:
        """Ends a case."""
        self._bar.advance(self._task)
