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

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from thunder.core import dtypes
from thunder.core.devices import to_torch_device
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol

from thunder_flce.execution import engine
from thunder_flce.execution.plan import GradientsInForward, Plan, SaveLogits
from thunder_flce.execution.record import Stage, Step, Tape, Value, on_values
from thunder_flce.graph.thunder_private import default_python_printer
from thunder_flce.graph.trace_arguments import POSITIONAL, loss_of, region_arguments, region_problem
from thunder_flce.operation.loss import LogitMap
from thunder_flce.operation.token_loss import input_name
from thunder_flce.operators import OUTPUT_GRADS
from thunder_flce.planning.program import program, term_names

STATISTICS = ("row_max", "row_log_sum", "valid_count")
# From the arguments of the symbols, which have PyTorch's names, to the engine's names.
_LETTERS = {
    "input": "x",
    "linear_weight": "W",
    "target": "y",
    "linear_bias": "b",
    "weight": "w",
    "token_weights": "w_t",
    "target_weights": "q",
    "num_items": "num_items",
    "expected_gradient": "expected_gradient",
}
# Further arguments of the backward.
_BACKWARD = ("grad", *OUTPUT_GRADS, "row_max", "row_log_sum", "entropy", "kept")


def _gradient_name(operand: str) -> str:
    """What the engine calls the gradient of an operand, by its name in `needs_grad`: such as dX, dW or dX1."""
    if operand.startswith("terms["):
        number, _, kind = operand.removeprefix("terms[").partition("].")
        return f"{'dX' if kind == 'input' else 'dW'}{int(number) + 1}"
    return {"input": "dX", "linear_weight": "dW", "linear_bias": "db"}[operand]


def output_names(settings: Mapping[str, Any]) -> list[str]:
    """What `linear_cross_entropy_fwd` returns, in order, by its keyword arguments."""
    names = ["loss", *settings.get("outputs", ()), *STATISTICS]
    if settings["strategy"] == GradientsInForward.strategy:
        names += map(_gradient_name, settings["needs_grad"])
    elif settings["strategy"] == SaveLogits.strategy:
        names.append(_kept_name(settings))
    return names


def _kept_name(settings: Mapping[str, Any]) -> str:
    """The name that steps have for what the forward keeps: dX, the logits, or the linear's output z."""
    if settings["strategy"] == GradientsInForward.strategy:
        return "dX"
    return "logits" if loss_of(settings).logit_map == LogitMap() else "z"


def print_forward(bsym: BoundSymbol, *printables: Any) -> Iterator[str]:
    """The python_printer of `linear_cross_entropy_fwd`."""
    yield default_python_printer(bsym, *printables)
    region = region_arguments(*bsym.args, **bsym.kwargs)
    yield from _region_comments(bsym, region, output_names(region), "forward")


def print_backward(bsym: BoundSymbol, *printables: Any) -> Iterator[str]:
    """The python_printer of `linear_cross_entropy_bwd`."""
    yield default_python_printer(bsym, *printables)
    grad, *tensors = bsym.args
    saved = dict(zip((*STATISTICS, "kept"), tensors[len(POSITIONAL) :], strict=True))
    region = region_arguments(*tensors, **bsym.kwargs, **saved, grad=grad)
    yield from _region_comments(bsym, region, map(_gradient_name, region["needs_grad"]), "backward")


def print_scaling(bsym: BoundSymbol, *printables: Any) -> Iterator[str]:
    """The python_printer of `scale_gradients`."""
    yield default_python_printer(bsym, *printables)
    tape = Tape(to_torch_device(bsym.args[0].device))

    def value(proxy: Any) -> Any:
        if not isinstance(proxy, TensorProxy):
            return proxy
        return Value(tape, proxy.name, shape=proxy.shape, dtype=dtypes.to_torch_dtype(proxy.dtype))

    with on_values():
        engine.scale_gradients(*map(value, bsym.args), **{name: value(given) for name, given in bsym.kwargs.items()})
    yield from _commented(stage_lines(tape.take_stages()))


def stage_rows(stages: Sequence[Stage]) -> list[tuple[str, str]]:
    """Stages as rows of two cells: a title, or a step and what runs it. Steps that repeat are indented."""
    rows = []
    for stage in stages:
        if stage.title:
            rows.append((f"{stage.title}:", ""))
        rows += [("  " * bool(stage.title) + str(step), _runner(step)) for step in stage.steps]
    return rows


def _runner(step: Step) -> str:
    """The library, and what nvFuser runs in its fusions, such as "nvFuser: gradient"."""
    methods = dict.fromkeys(work.method for work in step.fusions)
    return f"{step.runs_in}: {', '.join(methods)}" if methods else step.runs_in


def stage_lines(stages: Sequence[Stage]) -> list[str]:
    """Stages as lines of text, with what runs a step in a column of its own."""
    rows = stage_rows(stages)
    width = max((len(text) for text, runner in rows if runner), default=0)
    return [f"{text:{width}}  {runner}" if runner else text for text, runner in rows]


def type_of(proxy: TensorProxy) -> str:
    """A tensor's dtype and shape, such as "bf16[2, 4096]"."""
    return f"{dtypes.to_strong_dtype(proxy.dtype).shortname()}[{', '.join(map(str, proxy.shape))}]"


def _region_comments(
    bsym: BoundSymbol, region: Mapping[str, Any], outputs: Iterable[str], direction: str
) -> Iterator[str]:
    letters = {name: region[operand] for operand, name in _LETTERS.items()}
    for number, term in enumerate(region["terms"], start=1):
        letters |= zip(term_names(number), term, strict=True)
    letters |= {input_name(number): tensor for number, tensor in enumerate(region["token_inputs"])}
    letters |= {_kept_name(region) if name == "kept" else name: region.get(name) for name in _BACKWARD}
    operands = [f"{name} = {getattr(given, 'name', given)}" for name, given in letters.items() if given is not None]
    named = [f"{name} = {proxy.name}: {type_of(proxy)}" for name, proxy in zip(outputs, bsym.output, strict=True)]
    plan = Plan.of(region)
    problem = region_problem(region, region["needs_grad"], float32_logits=plan.float32_logits)
    stages = program(problem, plan).directions.get(direction, ())
    yield from _commented([", ".join(operands), ", ".join(named), *stage_lines(stages)])


def _commented(lines: Sequence[str]) -> Iterator[str]:
    return (f"  # {line}" for line in lines)
