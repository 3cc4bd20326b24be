"""How traces print a region: its line and, beneath it as comments, what one chunk of it runs.

    (t2, t3, t4, t5, t6, t7) = linear_cross_entropy_fwd(hidden, weight, t1, None, …, chunk_rows=2048)
      # x = hidden, W = weight, y = t1
      # loss = t2: bf16[], row_max = t3: f32[8192], …, dX = t6: bf16[2, 4096, 4096], dW = t7: bf16[128256, 4096]
      # for each chunk of 2048 tokens, 4 in all:
      #   logits bf16[2048, 128256] = x @ W.t()                      cuBLAS
      #   …

thunder prints the contents of a fusion in this way, from its subsymbols. A region has none: it is opaque to every pass,
so its symbols print their comments themselves, at every print depth.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from thunder.core import dtypes
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol, default_python_printer

from thunder_flce.graph.trace_arguments import from_settings, planned_region
from thunder_flce.planning.plan import Plan
from thunder_flce.planning.steps import PlannedRegion, Stage, backward_stages, forward_stages

_OPERANDS = ("input", "linear_weight", "target", "linear_bias")
STATISTICS = ("row_max", "row_log_sum", "valid_count")
# The engine's names of what the symbols call by PyTorch's.
_LETTERS = {
    "input": "x",
    "linear_weight": "W",
    "target": "y",
    "linear_bias": "b",
    "weight": "w",
    "num_items": "num_items",
}
_GRADIENTS = {"input": "dX", "linear_weight": "dW", "linear_bias": "db"}


def output_names(settings: Mapping[str, Any]) -> list[str]:
    """What `linear_cross_entropy_fwd` returns, in order, by its keyword arguments."""
    names = ["loss", *settings.get("outputs", ()), *STATISTICS]
    if settings["strategy"] == "gradients_in_forward":
        names += [_GRADIENTS[name] for name in settings["needs_grad"]]
    elif settings["strategy"] == "save_logits":
        names.append("logits")
    return names


def print_forward(bsym: BoundSymbol, *printables: Any) -> Iterator[str]:
    """The python_printer of `linear_cross_entropy_fwd`."""
    yield default_python_printer(bsym, *printables)
    region = {**dict(zip(_OPERANDS, bsym.args, strict=True)), **bsym.kwargs}
    yield from _region_comments(bsym, region, output_names(bsym.kwargs), forward_stages)


def print_backward(bsym: BoundSymbol, *printables: Any) -> Iterator[str]:
    """The python_printer of `linear_cross_entropy_bwd`."""
    yield default_python_printer(bsym, *printables)
    region = {**dict(zip(("grad", *_OPERANDS), bsym.args[:5], strict=True)), **bsym.kwargs}
    yield from _region_comments(bsym, region, [_GRADIENTS[name] for name in region["needs_grad"]], backward_stages)


def print_scaling(bsym: BoundSymbol, *printables: Any) -> Iterator[str]:
    """The python_printer of `scale_gradients`."""
    yield default_python_printer(bsym, *printables)
    grad, _, *gradients = (proxy.name for proxy in bsym.flat_proxy_args)
    yield from _commented([f"{', '.join(gradients)} of the forward *= {grad}, where that is not 1"])


def stage_rows(stages: Sequence[Stage]) -> list[tuple[str, str]]:
    """Stages as rows of two cells: a title, or a step and what runs it. Steps that repeat are indented."""
    rows = []
    for stage in stages:
        if stage.title:
            rows.append((f"{stage.title}:", ""))
        rows += [("  " * bool(stage.title) + str(step), step.runner) for step in stage.steps]
    return rows


def stage_lines(stages: Sequence[Stage]) -> list[str]:
    """The same as lines, with what runs a step in a column of its own."""
    rows = stage_rows(stages)
    width = max((len(text) for text, runner in rows if runner), default=0)
    return [f"{text:{width}}  {runner}" if runner else text for text, runner in rows]


def type_of(proxy: TensorProxy) -> str:
    """A tensor's dtype and shape, such as "bf16[2, 4096]"."""
    return f"{dtypes.to_strong_dtype(proxy.dtype).shortname()}[{', '.join(map(str, proxy.shape))}]"


def _region_comments(
    bsym: BoundSymbol,
    region: Mapping[str, Any],
    outputs: Sequence[str],
    stages: Callable[[PlannedRegion], Sequence[Stage]],
) -> Iterator[str]:
    given = {letter: region[name] for name, letter in _LETTERS.items() if region.get(name) is not None}
    operands = [f"{letter} = {getattr(value, 'name', value)}" for letter, value in given.items()]
    named = [f"{name} = {proxy.name}: {type_of(proxy)}" for name, proxy in zip(outputs, bsym.output, strict=True)]
    planned = planned_region(region, region["needs_grad"], from_settings(Plan, region))
    yield from _commented([", ".join(operands), ", ".join(named), *stage_lines(stages(planned))])


def _commented(lines: Sequence[str]) -> Iterator[str]:
    return (f"  # {line}" for line in lines)
