"""What people see of rows: progress, tables in Markdown, and pictures."""

import re
import sys
from collections.abc import Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import Any


def show_progress(words: str) -> None:
    """Writes over the last line of a terminal; writes nothing to a file."""
    if sys.stderr.isatty():
        print(f"\r\033[K{words}", end="", file=sys.stderr, flush=True)


def markdown(title: str, row_type: type, rows: Sequence[Any]) -> str:
    """A table with a line for each method, then a list of what failed.

    A cell has the median, and half of what lies between the 20th and the 80th percentile.
    """
    measured = [row for row in rows if row.failed is None]
    columns = _columns(row_type, measured)
    lines = [["method", *(column.metadata["title"] for column in columns)]]
    lines += [[row.method, *(_cell(row, column) for column in columns)] for row in measured]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    padded = [
        [f"{cell:{'>' if place else '<'}{width}}" for place, (cell, width) in enumerate(zip(line, widths, strict=True))]
        for line in lines
    ]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    table = [f"| {' | '.join(line)} |" for line in (padded[0], rule, *padded[1:])] if measured else []
    failed = [f"- {row.method}: {row.failed}" for row in rows if row.failed is not None]
    return "\n".join([f"**{title}**", *([""] if table else []), *table, *([""] if failed else []), *failed])


def draw(title: str, row_type: type, rows: Sequence[Any], folder: Path) -> Path:
    """Draws times and memory as bars, a panel for each.

    Args:
        title: of the picture, which its name is made of.
        row_type: whose columns in ms and GB are drawn.
        rows: one for each method.
        folder: made if it is not there.

    Returns:
        The PNG file, which is empty where nothing was measured.
    """
    measured = [row for row in rows if row.failed is None]
    columns = [c for c in _columns(row_type, measured) if c.metadata["title"].endswith((", ms", ", GB"))]
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * len(columns) + 2, 1.2 + 0.3 * len(measured)), layout="constrained")
    FigureCanvasAgg(figure)
    for number, column in enumerate(columns, start=1):
        axes = figure.add_subplot(1, len(columns), number)
        shown = [row for row in measured[::-1] if getattr(row, column.name) is not None]
        bars = axes.barh(range(len(shown)), [getattr(row, column.name) for row in shown])
        axes.set_yticks(range(len(shown)), labels=[_label(row, measured) for row in shown])
        axes.bar_label(bars, [column.metadata["form"].format(bar.get_width()) for bar in bars], padding=3)
        axes.set_xlabel(column.metadata["title"])
        axes.margins(x=0.15)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{_file_name(title)}.png"
    figure.savefig(path, dpi=110)
    return path


def _label(row: Any, rows: Sequence[Any]) -> str:
    """The method, and what else tells it from the other rows of that method."""
    same = [other for other in rows if other.method == row.method]
    names = [
        field.name
        for field in fields(row)
        if isinstance(value := getattr(row, field.name), str | int)
        and {getattr(each, field.name) for each in same} != {value}
    ]
    return ", ".join([row.method, *(f"{name} {getattr(row, name)}" for name in names)])


def _columns(row_type: type, measured: Sequence[Any]) -> list[Field]:
    """The fields that are a `measuring.column`, but for those in which no row has anything."""
    columns = [field for field in fields(row_type) if "title" in field.metadata]
    return [column for column in columns if any(getattr(row, column.name) is not None for row in measured)]


def _cell(row: Any, column: Field) -> str:
    value = getattr(row, column.name)
    if value is None:
        return ""
    low, high = getattr(row, f"{column.name}_p20", None), getattr(row, f"{column.name}_p80", None)
    spread = "" if low is None or high is None else f" ±{(high - low) / 2:.2g}"
    return column.metadata["form"].format(value) + spread


def _file_name(text: str) -> str:
    """Makes "S1 8192 × 128256, NVIDIA H200" into "S1-8192-128256-NVIDIA-H200"."""
    return re.sub(r"[^\w.=]+", "-", text, flags=re.ASCII).strip("-")
