"""Figures from JSON lines: latency and memory over a sweep, time against memory, kernels, models and loss curves."""

from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.ticker import NullLocator  # noqa: E402

from thunder_flce.bench.methods import METHODS  # noqa: E402
from thunder_flce.bench.profiling import slug  # noqa: E402
from thunder_flce.bench.regions import FLOOR  # noqa: E402

Record = dict[str, Any]

OURS = "flce"
_PLAIN = "{x:g}"
"""The format of numbers on a logarithmic axis."""
_MARKERS = "osD^v<>pPX*hd8"


def draw(records: Iterable[Record], output: Path) -> list[Path]:
    """Draws what the records have data for.

    Args:
        records: as `records.read` gives them; of the same thing measured twice, the last one counts.
        output: a folder, made if it is not there.

    Returns:
        The PNG files.
    """
    output.mkdir(parents=True, exist_ok=True)
    paths = []
    timed = [record for record in records if "time_ms" in record]
    for subset, (case, make) in _FIGURES.items():
        for title, group in _grouped((r for r in timed if r["subset"] == subset), case).items():
            figure = make(title, group)
            paths.append(output / f"{subset}-{slug(title)}.png")
            figure.savefig(paths[-1], dpi=150)
            plt.close(figure)
    return paths


def _grouped(records: Iterable[Record], key: Callable[[Record], str]) -> dict[str, list[Record]]:
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return groups


def _styles(methods: Collection[str]) -> dict[str, dict[str, Any]]:
    """A colour and a marker for each method, the same in all figures; this project in black, and larger."""
    colours = plt.get_cmap("tab20").colors
    known = [*METHODS, *(method for method in methods if method not in METHODS)]
    styles = {}
    for method in methods:
        index = known.index(method)
        styles[method] = {
            "color": colours[index % len(colours)],
            "marker": _MARKERS[index % len(_MARKERS)],
            "markersize": 6,
        }
    if OURS in styles:
        styles[OURS] = {"color": "black", "marker": "*", "markersize": 13, "zorder": 3}
    if FLOOR in styles:
        styles[FLOOR] = {"color": "grey", "linestyle": "--"}
    return styles


def _time_against_memory(title: str, records: list[Record]) -> Figure:
    """Every method as a point; the three matmuls as a line, since they have no memory to speak of."""
    latest = {record["method"]: record for record in records}
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    if FLOOR in latest:
        axes.axhline(latest.pop(FLOOR)["time_ms"], color="grey", linestyle="--", label=FLOOR)
    styles = _styles(latest)
    for method, record in latest.items():
        if "above_outputs_gb" in record:
            axes.plot(record["above_outputs_gb"], record["time_ms"], linestyle="none", label=method, **styles[method])
    axes.set_xscale("symlog", linthresh=0.1)
    axes.xaxis.set_major_formatter(_PLAIN)
    axes.set_xlabel("peak memory above the gradients, GB")
    axes.set_yscale("log")
    _plain_numbers(axes)
    axes.set_ylabel("forward + backward, ms")
    return _finish(figure, axes, f"{title}; {records[0]['device']}")


def _sweep(axis: str, records: list[Record]) -> Figure:
    """Latency and memory side by side; where a line ends, the method could not go on or was not run further."""
    field, label = {"context": ("tokens", "context length, tokens"), "vocabulary": ("vocab", "vocabulary")}[axis]
    figure, (latency, memory) = plt.subplots(1, 2, figsize=(13, 5), layout="constrained")
    groups = _grouped(records, lambda record: record["method"])
    styles = _styles(groups)
    for method, group in groups.items():
        latest = dict(sorted({record[field]: record for record in group}.items()))
        times = [record["time_ms"] for record in latest.values()]
        latency.plot(list(latest), times, label=method, **styles[method])
        if method != FLOOR:
            memory.plot(list(latest), [record["memory_gb"] for record in latest.values()], **styles[method])
    sizes = sorted({record[field] for record in records})
    for axes, title in ((latency, "forward + backward, ms"), (memory, "peak memory, GB")):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [f"{size // 1024}k" if size % 1024 == 0 else str(size) for size in sizes], rotation=45)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel(label)
        axes.set_yscale("log")
        _plain_numbers(axes)
        axes.set_ylabel(title)
        axes.grid(which="both", alpha=0.2)
    first = records[0]
    fixed = {"tokens": "tokens", "vocab": "vocabulary", "hidden": "hidden size"}
    sizes_of_base = ", ".join(f"{name} {first[key]}" for key, name in fixed.items() if key != field)
    return _finish(figure, latency, f"{sizes_of_base}, {first['dtype']}; {first['device']}")


def _kernels(title: str, records: list[Record]) -> Figure:
    """Bandwidth over the vocabulary, and the share of a copy's that it is; the dotted lines are the copies."""
    figure, (bandwidth, share) = plt.subplots(1, 2, figsize=(13, 5), layout="constrained")
    groups = _grouped(records, lambda record: record["method"])
    styles = _styles(groups)
    for method, group in groups.items():
        style = styles[method]
        latest = dict(sorted({record["vocab"]: record for record in group}.items()))
        bandwidth.plot(list(latest), [record["gb_per_s"] for record in latest.values()], label=method, **style)
        copies = [record["copy_gb_per_s"] for record in latest.values()]
        bandwidth.plot(list(latest), copies, color=style["color"], linestyle=":")
        share.plot(list(latest), [100 * record["ratio"] for record in latest.values()], **style)
    for axes, label in ((bandwidth, "GB/s"), (share, "% of a copy of as many bytes")):
        axes.set_xscale("log")
        axes.set_xlabel("vocabulary")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.2)
    return _finish(figure, bandwidth, f"row kernels, {title}; {records[0]['device']}")


def _models(title: str, records: list[Record]) -> Figure:
    """A training step in its parts, and the peak of its memory."""
    latest = {record["method"]: record for record in records}
    figure, (step, memory) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    left = [0.0] * len(latest)
    for phase in ("forward", "backward", "optimizer"):
        widths = [record[f"{phase}_ms"] for record in latest.values()]
        step.barh(list(latest), widths, left=left, label=phase)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    memory.barh(list(latest), [record["memory_gb"] for record in latest.values()], color="grey")
    memory.set_xlabel("peak memory above parameters and optimizer state, GB")
    step.set_xlabel("training step, ms")
    for axes in (step, memory):
        axes.invert_yaxis()
    first = records[0]
    size = f"{first['layers']} layers, {first['batch']} × {first['length']} tokens, {first['dtype']}"
    return _finish(figure, step, f"{title}: {size}; {first['device']}")


def _convergence(title: str, records: list[Record]) -> Figure:
    """Loss curves, means over the seeds with their range, and how far each run is from the first method's."""
    figure, (loss, difference) = plt.subplots(1, 2, figsize=(13, 5), layout="constrained")
    groups = _grouped(records, lambda record: record["method"])
    runs = {method: {run["seed"]: run["losses"] for run in group} for method, group in groups.items()}
    first, styles = next(iter(runs)), _styles(runs)
    count = len(records[0]["losses"])
    averaged = records[0]["steps"] // count
    steps = [averaged * (point + 1) for point in range(count)]
    for method, curves in runs.items():
        style = {"color": styles[method]["color"], "label": f"{method}, seeds {', '.join(map(str, curves))}"}
        points = list(zip(*curves.values(), strict=True))
        loss.plot(steps, [sum(point) / len(point) for point in points], linewidth=1, **style)
        loss.fill_between(steps, [min(p) for p in points], [max(p) for p in points], color=style["color"], alpha=0.2)
        for seed in curves.keys() & runs[first].keys():
            distances = [one - other for one, other in zip(curves[seed], runs[first][seed], strict=True)]
            difference.plot(steps, distances, color=style["color"], linewidth=0.5)
    loss.set_ylabel(f"loss, means of {averaged} steps; bands: range of the seeds")
    difference.set_ylabel(f"loss − loss of {first} of the same seed")
    for axes in (loss, difference):
        axes.set_xlabel("step")
        axes.grid(alpha=0.2)
    size = f"{records[0]['parameters'] / 1e6:.0f}M parameters, {records[0]['tokens']} tokens a step"
    return _finish(figure, loss, f"{title}: {size}; {records[0]['device']}")


def _plain_numbers(axes: Axes) -> None:
    axes.yaxis.set_major_formatter(_PLAIN)
    axes.yaxis.set_minor_formatter(_PLAIN)
    axes.tick_params(axis="y", which="both", labelsize="small")


def _finish(figure: Figure, axes: Axes, title: str) -> Figure:
    figure.suptitle(title)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize="small")
    return figure


_FIGURES: dict[str, tuple[Callable[[Record], str], Callable[[str, list[Record]], Figure]]] = {
    "regions": (lambda record: record["shape"], _time_against_memory),
    "sweep": (lambda record: record["axis"], _sweep),
    "kernels": (lambda record: f"{record['dtype']}, {record['backend']}", _kernels),
    "models": (lambda record: record["model"], _models),
    "convergence": (lambda record: record["model"], _convergence),
}
"""For each subset, what one figure is made of, and how."""
