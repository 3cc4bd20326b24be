"""Output of rows: JSON with the machine, versions and commit, tables in Markdown, and pictures."""

import datetime
import json
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

Row = dict[str, Any]
Columns = Mapping[str, tuple[str, str]]
"""For fields of rows, the title in tables, and the format for str.format"""

TIME, GB, ERROR = "{:.3f}", "{:.4g}", "{:.1e}"

# Times are medians; "…_p20" and "…_p80" beside them are percentiles. GB are 10⁹ bytes above the inputs, or above the
# parameters and the optimizer's state. Errors are ‖result − reference‖ / ‖reference‖.
COLUMNS: Columns = {
    "ranks": ("ranks", "{}"),
    "time_ms": ("time, ms", TIME),
    "forward_ms": ("forward", TIME),
    "backward_ms": ("backward", TIME),
    "optimizer_ms": ("optimizer", TIME),
    "host_ms": ("host, ms", TIME),  # until the host has launched everything
    "ratio": ("× matmuls", "{:.3f}"),  # ratio to the time of `matmuls` matmuls alone
    "memory_gb": ("peak, GB", GB),
    "above_outputs_gb": ("peak − gradients, GB", GB),
    **{f"{of.lower()}_error": (f"{of} error", ERROR) for of in ("loss", "dX", "dW", "dbias")},
    "first_call_s": ("first call, s", "{:.1f}"),  # including compilation
    "second_length_s": ("second length, s", "{:.1f}"),  # likewise
    "new_length_ms": ("new length, ms", TIME),  # median first step of each length after the second
    "fused": ("fused", "{}"),  # whether this project fused the loss
}

_PACKAGES = (
    "torch", "lightning-thunder", "triton", "litgpt", "transformers", "liger-kernel", "cut-cross-entropy",
    "quack-kernels", "trl", "nvidia-cutlass-dsl", "cuda-tile", "nvfuser-cu128-torch210", "nvfuser-cu130-torch210",
)  # fmt: skip


def context(command: str, *, device: str, commit: str | None = None) -> dict[str, str]:
    """Returns fields of all rows: device, versions, commit (by default `commit_of` this package), date and command."""
    commit = commit or commit_of(Path(__file__).parents[1])
    installed = {}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            installed[name] = version(name)
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()} (CPU)",
        "cuda": (device == "cuda" and torch.version.cuda) or "",
        "python": platform.python_version(),
        **installed,
        **({"commit": commit} if commit else {}),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "command": command,
    }


def commit_of(package: Path) -> str | None:
    """Returns the commit at which a package's folder is checked out; None if git does not track the folder.

    The commit ends in "-dirty" if a file of the package, or of the folder `lab` beside it, is changed or new.
    """

    def git(*arguments: str) -> str | None:
        try:
            return subprocess.run(["git", *arguments], cwd=package, capture_output=True, text=True, check=True).stdout
        except (FileNotFoundError, subprocess.CalledProcessError):
            return None

    # A folder that git ignores does not belong to the commit of the repository around it.
    head = git("rev-parse", "--short=12", "HEAD") if git("ls-files", ".") else None
    is_clean = git("status", "--porcelain", "--", ".", "../lab") == ""
    return head and head.strip() + ("" if is_clean else "-dirty")


def append(path: Path, row: Row) -> None:
    """Appends a row to a file as a line of JSON, and closes the file."""
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def markdown(title: str, rows: Sequence[Row], columns: Columns = COLUMNS) -> str:
    """Returns a table with a line for each method, then a list of failures.

    A cell has the median and, unless there is a single timing, half the range from the 20th to the 80th percentile.
    """
    measured = [row for row in rows if "failed" not in row]
    shown = _shown(measured, columns)
    lines = [["method", *(columns[name][0] for name in shown)]]
    lines += [[row["method"], *(_cell(row, name, columns) for name in shown)] for row in measured]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    lines = [[f"{first:{widths[0]}}", *map(str.rjust, others, widths[1:])] for first, *others in lines]
    lines.insert(1, ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])])
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    failed = "\n".join(f"- {row['method']}: {row['failed']}" for row in rows if "failed" in row)
    return "\n\n".join(part for part in (f"**{title}**", table if measured else "", failed) if part)


def draw(title: str, rows: Sequence[Row], folder: Path, *, columns: Columns = COLUMNS) -> Path:
    """Draws the columns in ms and GB as bars, one panel each, into a PNG file named after the title; returns its path.

    The picture is empty if nothing was measured.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    measured = [row for row in rows if "failed" not in row]
    drawn = [name for name in _shown(measured, columns) if columns[name][0].endswith((", ms", ", GB"))]
    figure = Figure(figsize=(4 * len(drawn) + 2, 1.2 + 0.3 * len(measured)), layout="constrained")
    FigureCanvasAgg(figure)
    for number, name in enumerate(drawn, start=1):
        heading, template = columns[name]
        axes = figure.add_subplot(1, len(drawn), number)
        drawn_rows = [row for row in measured[::-1] if name in row]
        bars = axes.barh(range(len(drawn_rows)), [row[name] for row in drawn_rows])
        axes.set_yticks(range(len(drawn_rows)), labels=[row["method"] for row in drawn_rows])
        axes.bar_label(bars, [template.format(bar.get_width()) for bar in bars], padding=3)
        axes.set_xlabel(heading)
        axes.margins(x=0.15)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title)
    # "phi-4 8192 × 100352, NVIDIA H200" becomes "phi-4-8192-100352-NVIDIA-H200".
    path = folder / (re.sub(r"[^\w.=]+", "-", title, flags=re.ASCII).strip("-") + ".png")
    figure.savefig(path, dpi=110)
    return path


def _shown(rows: Sequence[Row], columns: Columns) -> list[str]:
    """Returns the columns in which at least one row has a value."""
    return [name for name in columns if any(name in row for row in rows)]


def _cell(row: Row, name: str, columns: Columns) -> str:
    if name not in row:
        return ""
    half = (row.get(f"{name}_p80", 0) - row.get(f"{name}_p20", 0)) / 2
    return columns[name][1].format(row[name]) + (f" ±{half:.2g}" if half else "")
