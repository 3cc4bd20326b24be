"""Traces as text to read and compare, without parts that change from run to run."""

import re
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import thunder
from thunder.core.trace import TraceCtx


def compile_only(jitted: Callable, arguments: Sequence[Any]) -> None:
    """Compiles a function returned by `thunder.jit` without running it; under `FakeTensorMode`, it needs no memory."""
    thunder.compile_data(jitted).get_computation_and_inputs(*arguments)


def readable(trace: TraceCtx) -> str:
    """Returns a trace as thunder prints it, without timings and file names; only fusions and regions show contents."""
    lines: list[str] = []
    is_fusion, source = None, None
    for line in trace.python(print_depth=2).splitlines():
        if line.startswith("    #"):
            if not is_fusion:
                continue
        elif not line.startswith("    "):  # A line that is indented more continues a call.
            is_fusion = re.search(r"= (nvFusion\d+|TorchCompile\d+|flce_\w+)\(", line)
        line = re.sub(r" \(took \d+ milliseconds\)", "", line).rstrip()
        if match := re.match(r"  # .*\.py:\d+: \t\s*(.*)", line):
            if match[1] == source:
                # thunder repeats the source after an operation without one: drop the repetition and its blank line.
                lines.pop()
                continue
            source = match[1]
            line = f"  # {source}"
        lines.append(line)
    return re.sub(r"_torch_memory_format_\d+", "_torch_memory_format", "\n".join(lines))


def renumbered(header: str, body: str) -> str:
    """Numbers the proxies from 0, in the order in which the traces name them, across forward and backward."""
    pattern = re.compile(r"\b([tC])(\d+)\b")
    numbers: dict[str, dict[str, int]] = {"t": {}, "C": {}}
    for prefix, number in pattern.findall(body):
        numbers[prefix].setdefault(number, len(numbers[prefix]))
    # A word of the header, such as a folder's name, may look like a proxy: without a number it stays.
    text = pattern.sub(lambda match: f"{match[1]}{numbers[match[1]].get(match[2], match[2])}", f"{header}\n\n{body}")
    return text.rstrip() + "\n"


def commented(text: str) -> str:
    """Returns the text as Python comments."""
    return textwrap.indent(text, "# ", lambda line: True).replace("# \n", "#\n")
