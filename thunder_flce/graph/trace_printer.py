"""How traces print a region: its call and, as comments beneath, the program that it runs for each chunk.

    (t2, t3, t4, t5) = flce_linear_cross_entropy_fwd((hidden, weight, t1), names=(…), …, plan={…})
      # x = hidden, W = weight, y = t1
      # loss = t2: f32[], valid_count = t3: i64[], dX = t4: bf16[2, 4096, 4096], dW = t5: bf16[128256, 4096]
      # for each chunk of C tokens (4 × 2048):
      #   logits bf16[C, 128256] = x @ W.t()                         cuBLAS
      #   …

thunder prints the contents of a fusion in this way, from its subsymbols. A region's symbols are opaque to every pass
and have no subsymbols, so they print their comments themselves, at every print depth.
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
    """`python_printer` of `flce_linear_cross_entropy_fwd`."""
    yield from _call(bsym, *printables)
    known = settings_of(bsym.kwargs)
    yield from _region_comments(bsym, known, {}, known.result_names, "forward")


def print_backward(bsym: BoundSymbol, *printables: Any) -> Iterator[str]:
    """`python_printer` of `flce_linear_cross_entropy_bwd`."""
    yield from _call(bsym, *printables)
    known, (upstream, saved, _) = settings_of(bsym.kwargs), bsym.args
    names = ("grad", *(f"{name}_grad" for name in known.loss.differentiable_outputs), *known.saved_names)
    others = dict(zip(names, (*upstream, *saved), strict=True))
    yield from _region_comments(bsym, known, others, map(gradient_name, known.needs_grad), "backward")


def print_scaling(bsym: BoundSymbol, *printables: Any) -> Iterator[str]:
    """`python_printer` of `flce_scale_gradients`."""
    yield from _call(bsym, *printables)
    _, _, *gradients = bsym.args
    names, spec = [each.name for each in gradients], spec_of(gradients[0])
    yield from _commented(scaling_lines(names, spec, has_expected=bool(bsym.kwargs)))


def type_of(proxy: TensorProxy) -> str:
    """Returns a tensor's dtype and shape, such as "bf16[2, 4096]"."""
    return f"{dtypes.to_strong_dtype(proxy.dtype).shortname()}[{', '.join(map(str, proxy.shape))}]"


def _call(bsym: BoundSymbol, *printables: Any) -> Iterator[str]:
    """Prints the call; if its line is too long, the arguments follow on lines of their own."""
    line = default_python_printer(bsym, *printables)
    if len(line) <= WIDTH:
        yield line
        return
    statement: Any = ast.parse(line).body[0]
    call = statement.value
    arguments = [ast.get_source_segment(line, each) or "" for each in (*call.args, *call.keywords)]
    # Column offsets of Python's syntax trees count bytes.
    yield line.encode()[: call.func.end_col_offset].decode() + "("
    *lines, last = _filled(arguments)
    yield from (f"  {each}" for each in (*lines, f"{last})"))


def _region_comments(
    bsym: BoundSymbol, known: Settings, others: Mapping[str, Any], outputs: Iterable[str], direction: str
) -> Iterator[str]:
    if known.options is not None:
        return  # The operator plans when it runs, so the program is unknown here.
    call = known.call(bsym.args[-1])
    given = {**{letter(name): tensor for name, tensor in call.tensors.items()}, **others}
    operands = [f"{name} = {getattr(each, 'name', each)}" for name, each in given.items()]
    results = [f"{name} = {proxy.name}: {type_of(proxy)}" for name, proxy in zip(outputs, bsym.output, strict=True)]
    lines = getattr(program(specs(call), known.plan), direction)
    yield from _commented([*_filled(operands), *_filled(results), *lines])


def _filled(parts: Sequence[str]) -> list[str]:
    """Joins parts by commas, in as few lines as possible."""
    lines: list[str] = []
    for part in parts:
        if not lines or len(lines[-1]) + len(part) + 2 > WIDTH:
            lines.append(part)
        else:
            lines[-1] += f", {part}"
    return [f"{line}," for line in lines[:-1]] + lines[-1:]


def _commented(lines: Sequence[str]) -> Iterator[str]:
    return (f"  # {line}" for line in lines)
