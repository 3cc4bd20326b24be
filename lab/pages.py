"""Tables and pictures of README.md and docs/performance.md, made from the measured rows in traces/.

    python lab/pages.py            lists the pages that are out of date
    python lab/pages.py --write    rewrites the tables, and draws the pictures

A table stands between two comments of its page, `<!-- NAME: python lab/pages.py -->` and `<!-- end of NAME -->`. All
numbers come from rows, except memory that is called computed: this is the memory of the plan for an H200.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from thunder_flce.device import ABSENT_DEVICE
from thunder_flce.engine.choose import choose, temporary_bytes
from thunder_flce.operation.call import Call
from thunder_flce.options import Options

ROOT = Path(__file__).parent.parent
DATA = ROOT / "traces" / "measurements"
PICTURES = ROOT / "docs" / "pictures"
H200 = replace(ABSENT_DEVICE, memory=150 * 10**9)
REGIONS, WITH_OWN_CHUNKS = "regions.jsonl", "torch-2.15.jsonl"

Row = dict[str, Any]

MODELS = {
    "GPT-2 XL": (50257, 1600),
    "Llama 3.2 1B": (128256, 2048),
    "Llama 3.1 8B": (128256, 4096),
    "Qwen 3 8B": (151936, 4096),
    "Gemma 2 2B": (256000, 2304),
    "DeepSeek V3": (129280, 7168),
}
"""Vocabulary and hidden size"""

# Names of methods in tables, by their names in `python -m thunder_flce bench`
LABELS = {
    "three matmuls": "the three matmuls alone, by cuBLAS",
    "flce": "**thunder_flce**",
    "flce, chunk_rows=512": "thunder_flce, `chunk_rows=512`",
    "function, chunk_rows=256, accumulate=parameter": 'thunder_flce, `chunk_rows=256`, `accumulate="parameter"`',
    "liger, chunk 8": "Liger 0.8.5, `chunk_mem_const=8`",
    "liger, hopper": "Liger 0.8.5, for Hopper",
    "liger": "Liger 0.8.5, default",
    "quack": "quack 0.6.5, chunks of 2048",
    "trl": "TRL 1.16, its trainers' head",
    "torch linear_cross_entropy": "PyTorch 2.15's `F.linear_cross_entropy`",
    "torch linear_cross_entropy, 2048 rows": "PyTorch 2.15's, chunks of 2048",
    "cut-cross-entropy": "cut-cross-entropy 25.1.1, default",
    "eager": "eager PyTorch",
}


def rows(file: str, **wanted: Any) -> list[Row]:
    """Returns the rows of a file that have a time and these values of fields."""
    found = [json.loads(line) for line in (DATA / file).read_text(encoding="utf-8").splitlines()]
    return [row for row in found if "time_ms" in row and all(row.get(k) == v for k, v in wanted.items())]


def of_methods(**wanted: Any) -> dict[str, Row]:
    """Returns such rows of `REGIONS`, by method."""
    return {row["method"]: row for row in rows(REGIONS, **wanted)}


def table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, ["---"] * len(header), *lines))


def source(found: Iterable[Row], path: Path = DATA / REGIONS) -> str:
    """Returns a sentence on the origin of rows: file, commits, device, version and dtype."""
    listed = list(found)
    commits, row = dict.fromkeys(row["commit"] for row in listed), listed[0]
    file = path.relative_to(ROOT).as_posix()
    return f"`{file}` at {', '.join(commits)}: one {row['device']}, torch {row['torch']}, {row['dtype']}."


def gb(number: float | None) -> str:
    return "–" if number is None else f"{number:.2f} GB"


# README.md and its picture.

OF_README = [
    "three matmuls", "flce", "flce, chunk_rows=512", "function, chunk_rows=256, accumulate=parameter", "torch.compile",
    "liger, hopper", "liger, chunk 8", "quack", "torch linear_cross_entropy, 2048 rows", "eager", "trl", "liger",
    "torch linear_cross_entropy", "cut-cross-entropy",
]  # fmt: skip


def of_readme() -> dict[str, Row]:
    """Returns the rows of Llama 3.1 8B's head, by method."""
    head = {"tokens": 8192, "vocab": 128256, "hidden": 4096}
    own = [row for row in rows(WITH_OWN_CHUNKS, **head) if "nvidia-cutlass-dsl" in row]
    return {row["method"]: row for row in own} | of_methods(**head, ignored=0.0)


def one_shape() -> str:
    """Table of every method at Llama 3.1 8B's head, in one run."""
    found = of_readme()
    lines = []
    for method in OF_README:
        row = found[method]
        error = f"{row['dw_error']:.1e}".replace("e-0", "e-") if "dw_error" in row else "–"
        lines.append((LABELS.get(method, method), f"{row['time_ms']:.1f} ms", gb(row.get("above_outputs_gb")), error))
    text = table(("", "time", "memory above the gradients", "error of dW"), lines)
    return f"{text}\n\n{source(found[method] for method in OF_README if not method.startswith('torch linear'))}"


TOKENS = 2048, 8192, 32768


def savings() -> str:
    """Table of each model's loss: computed memory, and times that were measured call by call in turns."""
    lines = []
    for model, (vocab, hidden) in MODELS.items():
        cells = []
        for tokens in TOKENS:
            call = Call.of_mean(tokens, vocab, hidden, dtype=torch.bfloat16, device=torch.device("cuda"))
            held = temporary_bytes(call, choose(call, Options(), H200), H200)
            cell = f"{tokens * vocab * 2 / 1e9:.2f} → {held / 1e9:.2f} GB"
            (row,) = rows("in-turns.jsonl", tokens=tokens, vocab=vocab, hidden=hidden, base="torch.compile")
            cells.append(f"{cell}, {row['base_time_ms']:.1f} → {row['time_ms']:.1f} ms")
        lines.append((f"{model}, {vocab} × {hidden}", *cells))
    return table(("head: vocabulary × hidden size", *(f"{tokens:,} tokens" for tokens in TOKENS)), lines)


# docs/performance.md

SHAPES = {
    "Llama 3.1 8B": (8192, 128256, 4096, 0.0),
    "the same, 60% of the targets ignored": (8192, 128256, 4096, 0.6),
    "Gemma 2 2B": (8192, 256000, 2304, 0.0),
    "Qwen 2.5 7B": (4096, 152064, 3584, 0.0),
    "DeepSeek V3": (4096, 129280, 7168, 0.0),
    "GPT-2 XL, an odd vocabulary": (8192, 50257, 1600, 0.0),
    "hidden size 768, with a bias": (32768, 128256, 768, 0.0),
}
PEERS = ["three matmuls", "flce", "torch.compile", "liger, chunk 8", "liger, hopper", "cut-cross-entropy"]


def shapes() -> str:
    """Table of this project and its peers at several heads, in one run."""
    lines, shown = [], []
    for name, (tokens, vocab, hidden, ignored) in SHAPES.items():
        found = of_methods(tokens=tokens, vocab=vocab, hidden=hidden, ignored=ignored)
        first = found["flce"]
        shown.append(first)
        cells = []
        for method in PEERS:
            row = found.get(method)
            memory = f" / {row['above_outputs_gb']:.2f}" if row and "above_outputs_gb" in row else ""
            cells.append(f"{row['time_ms']:.1f}{memory}" if row else "–")
        lines.append((f"{name}: {tokens} × {vocab} × {hidden}", *cells))
    header = ("tokens × vocabulary × hidden size", *(LABELS.get(method, method).split(", by")[0] for method in PEERS))
    return f"{table(header, lines)}\n\n{source(shown)}"


OF_TORCH = {
    "function": "**thunder_flce**",
    "function, chunk_rows=512": "thunder_flce, `chunk_rows=512`",
    "torch.compile": "torch.compile",
    "torch linear_cross_entropy, 2048 rows": "`F.linear_cross_entropy`, `batch_chunk_size=2048`",
    "torch linear_cross_entropy": "`F.linear_cross_entropy`, default options",
}


def torch_chunks() -> str:
    """Table of PyTorch's own loss in chunks, which torch 2.15 has."""
    cases: dict[tuple[int, ...], dict[str, Row]] = {}
    for row in rows(WITH_OWN_CHUNKS):
        if row["method"] in OF_TORCH and "nvidia-cutlass-dsl" in row:
            cases.setdefault((row["tokens"], row["vocab"], row["hidden"]), {})[row["method"]] = row
    lines = []
    for case, found in sorted(cases.items()):
        cells = [f"{found[method]['time_ms']:.1f} / {found[method]['above_outputs_gb']:.2f}" for method in OF_TORCH]
        lines.append((" × ".join(map(str, case)), *cells))
    header = ("tokens × vocabulary × hidden size", *OF_TORCH.values())
    return f"{table(header, lines)}\n\n{source(found.values(), DATA / WITH_OWN_CHUNKS)}"


LOSSES = {
    "mean": "mean",
    "GRPO": "GRPO",
    "tokens with weights": "weighted tokens",
    "DPO": "DPO",
    "DPO, frozen head": "DPO",
    "log-probabilities alone": "log-probabilities alone",
    "a teacher's 64 largest": "top-64 teacher",
    "forward KL from a teacher": "KL from a teacher",
    "half of it, and half of the mean": "KL and labels",
}
WAYS = {
    "thunder_flce": ("function", "flce backend"),
    "torch.compile": ("torch.compile",),
    "Liger": ("liger", "liger, per token"),
    "TRL": ("trl",),
}


def losses() -> str:
    """Table of losses other than the mean, at Llama 3.1 8B's head."""
    lines, listed = [], rows("losses.jsonl")
    for name, loss in LOSSES.items():
        found = {row["method"]: row for row in listed if row["frozen"] == name.endswith("frozen head")}
        cells = []
        for ways in WAYS.values():
            row = next((found[key] for way in ways if (key := f"{loss}, {way}") in found), None)
            cells.append(f"{row['time_ms']:.1f} / {row['above_outputs_gb']:.2f}" if row else "–")
        lines.append((name, *cells))
    return f"{table(('loss', *WAYS), lines)}\n\n{source(listed, DATA / 'losses.jsonl')}"


def small() -> str:
    """Table of small heads: time of a call, and time that the host is busy with it."""
    methods = ["eager", "torch.compile", "flce backend", "function"]
    cases: dict[tuple[int, ...], dict[str, Row]] = {}
    for row in rows("small.jsonl"):
        cases.setdefault((row["tokens"], row["vocab"], row["hidden"]), {})[row["method"]] = row
    lines = []
    for case, found in sorted(cases.items()):
        cells = [f"{found[method]['time_ms']:.2f} / {found[method]['host_ms']:.2f}" for method in methods]
        lines.append((" × ".join(map(str, case)), *cells))
    header = ("tokens × vocabulary × hidden size", "eager", "torch.compile", "backend thunder_flce", "function")
    return f"{table(header, lines)}\n\n{source(found.values(), DATA / 'small.jsonl')}"


def steps() -> str:
    """Table of whole steps: numbers of tokens, changing lengths, CUDA graphs; shows the last row of each case."""
    names = ("litgpt-pythia-160m", "litgpt-smollm2-135m", "litgpt-qwen2.5-0.5b", "litgpt-llama-3.2-1b")
    methods = ["torch.compile", "flce backend", "torch.compile, reduce-overhead", "flce backend, reduce-overhead"]
    found = rows("models.jsonl", layers=4)
    found.sort(key=lambda row: (row["lengths"] != "one", row["batch"] * row["length"], names.index(row["model"])))
    cases: dict[str, dict[str, Row]] = {}
    for row in found:
        if row["method"] in methods:
            changing = ", lengths that change" if row["lengths"] == "changing" else ""
            case = f"{row['model'].removeprefix('litgpt-')}{changing} | {row['batch'] * row['length']}"
            cases.setdefault(case, {})[row["method"]] = row
    lines = []
    for case, got in cases.items():
        cells = [f"{r['time_ms']:.2f} / {r['memory_gb']:.2f}" if (r := got.get(method)) else "–" for method in methods]
        lines.append((case, *cells))
    header = ("model", "tokens", "torch.compile", "backend thunder_flce", "torch.compile, graphs", "backend, graphs")
    return f"{table(header, lines)}\n\n{source(found, DATA / 'models.jsonl')}"


TABLES: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"savings": savings},
    "docs/performance.md": {
        "methods": one_shape, "shapes": shapes, "torch": torch_chunks, "losses": losses, "steps": steps, "small": small,
    },
}  # fmt: skip


def written(page: str) -> str:
    """Returns the text of a page with current tables."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for name, make in TABLES[page].items():
        between = re.compile(rf"(<!-- {name}: [^\n]*-->\n).*?(<!-- end of {name} -->)", re.DOTALL)
        text, count = between.subn(lambda match, make=make: f"{match[1]}{make()}\n{match[2]}", text)
        assert count == 1, f"{page} has {count} tables {name}"
    return text


# Pictures.


def draw() -> None:
    """Draws the README's picture, and the sweep over the number of tokens."""
    import matplotlib

    matplotlib.use("Agg")
    PICTURES.mkdir(exist_ok=True)
    _draw_methods(PICTURES / "methods.png")
    _draw_sweep(PICTURES / "tokens.png")


def _draw_methods(path: Path) -> None:
    """Draws time and memory of each method; a line marks the matmuls alone, a lower bound of the time."""
    from matplotlib import pyplot as plt

    found = of_readme()
    least = found["three matmuls"]["time_ms"]
    methods = [method for method in OF_README if method != "three matmuls"][::-1]
    names = [LABELS.get(method, method).replace("*", "").replace("`", "") for method in methods]
    colours = ["tab:blue" if method.startswith(("flce", "function")) else "lightgrey" for method in methods]
    figure, panels = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained", sharey=True)
    for axes, field, label, style in (
        (panels[0], "time_ms", "forward + backward of the loss, ms", "{:.1f}"),
        (panels[1], "above_outputs_gb", "memory above the gradients, GB", "{:.2f}"),
    ):
        bars = axes.barh(names, [found[method][field] for method in methods], color=colours)
        axes.bar_label(bars, fmt=style, padding=3, fontsize="small")
        axes.set_xlabel(label)
        axes.margins(x=0.12)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].axvline(least, color="black", linestyle="--", linewidth=1)
    panels[0].set_title(f"dashed: the three matmuls alone, {least:.1f} ms", fontsize="small")
    panels[1].set_title("all logits in bfloat16 are 2.10 GB", fontsize="small")
    figure.suptitle(f"Llama 3.1 8B's head and loss: 8192 × 128256 × 4096, {found['flce']['device']}", fontsize="medium")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw_sweep(path: Path) -> None:
    """Draws time, divided by that of the matmuls, and memory against the number of tokens."""
    from matplotlib import pyplot as plt

    figure, (time, memory) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    found = rows(REGIONS, vocab=128256, hidden=4096, ignored=0.0)
    counts = sorted({row["tokens"] for row in found})
    for method, colour in {"flce": "tab:blue", "torch.compile": "tab:orange", "liger, chunk 8": "tab:green"}.items():
        by_tokens = {row["tokens"]: row for row in found if row["method"] == method}
        of_method = [by_tokens[tokens] for tokens in counts]
        label = LABELS.get(method, method).replace("*", "").replace("`", "")
        time.plot(counts, [row["ratio"] for row in of_method], "o-", color=colour, label=label)
        memory.plot(counts, [row["above_outputs_gb"] for row in of_method], "o-", color=colour)
    logits = [count * 128256 * 2 / 1e9 for count in counts]
    memory.plot(counts, logits, ":", color="grey", label="all logits in bfloat16")
    memory.set_yscale("log")
    time.set_ylabel("time over that of the three matmuls")
    memory.set_ylabel("memory above the gradients, GB")
    for axes in (time, memory):
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, [f"{count // 1024}k" for count in counts])
        axes.set_xlabel("tokens")
        axes.legend(fontsize="small")
    figure.suptitle(f"128256 × 4096, {found[0]['device']}", fontsize="medium")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description="Lists the pages that are out of date.")
    parser.add_argument("--write", action="store_true", help="rewrite the tables, and draw the pictures")
    parsed = parser.parse_args()
    stale = [page for page in TABLES if written(page) != (ROOT / page).read_text(encoding="utf-8")]
    if parsed.write:
        for page in stale:
            (ROOT / page).write_text(written(page), encoding="utf-8")
        draw()
        return 0
    print("\n".join(f"{page} is out of date" for page in stale) or "all pages are up to date")
    return len(stale)


if __name__ == "__main__":
    sys.exit(main())
