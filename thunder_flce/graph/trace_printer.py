"""How traces print a region: its line and, beneath it as comments, what one chunk of it runs.

    (t2, t3, t4, t5) = flce_linear_cross_entropy_fwd((hidden, weight, t1), names=(…), …, plan={…})
      # x = hidden, W = weight, y = t1
      # loss = t2: f32[], valid_count = t3: i64[], dX = t4: bf16[2, 4096, 4096], dW = t5: bf16[128256, 4096]
      # for each chunk of C tokens (4 × 2048):
      #   logits bf16[C, 128256] = x @ W.t()                         cuBLAS
      #   …

thunder prints the contents of a fusion in this way, from its subsymbols. A region has none: it is opaque to every pass,
so its symbols print their comments themselves, at every print depth.
"""

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from thunder.core import dtypes
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol, default_python_printer

from thunder_flce.engine.printing import WIDTH, letter, program, scaling_lines
from thunder_flce.graph.trace_arguments import settings_of, spec_of, specs
from thunder_flce.operation.call import gradient_name
from thunder_flce.operators import Settings


def print_forward(bsym: BoundSymbol, *printables: Any) -> Iterator[str]:
    """The python_printer of `flce_linear_cross_entropy_fwd`."""
    yield from _call(bsym, *printables)
    known = settings_of(bsym.kwargs)
    yield from _region_comments(bsym, known, {}, known.result_names, "forward")


def print_backward(bsym: BoundSymbol, *printables: Any) -> Iterator[str]:
    """The python_printer of `flce_linear_cross_entropy_bwd`."""
    yield from _call(bsym, *printables)
    known, (upstream, saved, _) = settings_of(bsym.kwargs), bsym.args
    names = ("grad", *(f"{name}_grad" for name in known.loss.differentiable_outputs), *known.saved_names)
    others = dict(zip(names, (*upstream, *saved), strict=True))
    yield from _region_comments(bsym, known, others, map(gradient_name, known.needs_grad), "backward")


def print_scaling(bsym: BoundSymbol, *printables: Any) -> Iterator[str]:
    """The python_printer of `flce_scale_gradients`."""
    yield from _call(bsym, *printables)
    _, _, *gradients = bsym.args
    names, spec = [each.name for each in gradients], spec_of(gradients[0])
    yield from _commented(scaling_lines(names, spec, has_expected=bool(bsym.kwargs)))


def type_of(proxy: TensorProxy) -> str:
    """A tensor's dtype and shape, such as "bf16[2, 4096]"."""
    return f"{dtypes.to_strong_dtype(proxy.dtype).shortname()}[{', '.join(map(str, proxy.shape))}]"


def _call(bsym: BoundSymbol, *printables: Any) -> Iterator[str]:
    """The call that runs; where its line is long, the arguments are on lines of their own."""
    line = default_python_printer(bsym, *printables)
    if len(line) <= WIDTH:
        yield line
        return
    statement: Any = ast.parse(line).body[0]
    call = statement.value
    arguments = [ast.get_source_segment(line, each) or "" for each in (*call.args, *call.keywords)]
    # Columns of Python's syntax trees are bytes.
    yield line.encode()[: call.func.end_col_offset].decode() + "("
    *lines, last = _filled(arguments)
    yield from (f"  {each}" for each in (*lines, f"{last})"))


def _region_comments(
    bsym: BoundSymbol, known: Settings, others: Mapping[str, Any], outputs: Iterable[str], direction: str
) -> Iterator[str]:
    if known.options is not None:
        return  # Its plan is made when it runs.
    call = known.call(bsym.args[-1])
    given = {**{letter(name): tensor for name, tensor in call.tensors.items()}, **others}
    operands = [f"{name} = {getattr(each, 'name', each)}" for name, each in given.items()]
    results = [f"{name} = {proxy.name}: {type_of(proxy)}" for name, proxy in zip(outputs, bsym.output, strict=True)]
    lines = getattr(program(specs(call), known.plan), direction)
    yield from _commented([*_filled(operands), *_filled(results), *lines])


def _filled(parts: Sequence[str]) -> list[str]:
    """As few lines as these fit into, separated by commas."""
    lines: list[str] = []
    for part in parts:
        if not lines or len(lines[-1]) + len(part) + 2 > WIDTH:
            lines.append(part)
        else:
            lines[-1] += f", {part}"
    return [f"{line}," for line in lines[:-1]] + lines[-1:]


def _commented(lines: Sequence[str]) -> Iterator[str]:
    return (f"  # {line}" for line in lines)
