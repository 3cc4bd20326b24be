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
    yield from _print_call(bsym, *printables)
    settings = settings_of(bsym.kwargs)
    yield from _region_comments(bsym, settings, {}, settings.result_names, "forward")


def print_backward(bsym: BoundSymbol, *printables: Any) -> Iterator[str]:
    """`python_printer` of `flce_linear_cross_entropy_bwd`."""
    yield from _print_call(bsym, *printables)
    settings, (upstream, saved, _) = settings_of(bsym.kwargs), bsym.args
    names = ("grad", *(f"{name}_grad" for name in settings.loss.differentiable_outputs), *settings.saved_names)
    named_tensors = dict(zip(names, (*upstream, *saved), strict=True))
    yield from _region_comments(bsym, settings, named_tensors, map(gradient_name, settings.needs_grad), "backward")


def print_scaling(bsym: BoundSymbol, *printables: Any) -> Iterator[str]:
    """`python_printer` of `flce_scale_gradients`."""
    yield from _print_call(bsym, *printables)
    _, _, *gradients = bsym.args
    names, spec = [gradient.name for gradient in gradients], spec_of(gradients[0])
    yield from _as_comments(scaling_lines(names, spec, has_expected=bool(bsym.kwargs)))


def type_of(proxy: TensorProxy) -> str:
    """Returns a tensor's dtype and shape, such as "bf16[2, 4096]"."""
    return f"{dtypes.to_strong_dtype(proxy.dtype).shortname()}[{', '.join(map(str, proxy.shape))}]"


def _print_call(bsym: BoundSymbol, *printables: Any) -> Iterator[str]:
    """Prints the call; if its line is too long, the arguments follow on lines of their own."""
    line = default_python_printer(bsym, *printables)
    if len(line) <= WIDTH:
        yield line
        return
    statement: Any = ast.parse(line).body[0]
    node = statement.value
    arguments = [ast.get_source_segment(line, argument) or "" for argument in (*node.args, *node.keywords)]
    # Column offsets of Python's syntax trees count bytes.
    yield line.encode()[: node.func.end_col_offset].decode() + "("
    *lines, last = _fill_lines(arguments)
    yield from (f"  {text}" for text in (*lines, f"{last})"))


def _region_comments(
    bsym: BoundSymbol, settings: Settings, named_tensors: Mapping[str, Any], outputs: Iterable[str], direction: str
) -> Iterator[str]:
    if settings.options is not None:
        return  # The operator plans when it runs, so the program is unknown here.
    call = settings.call(bsym.args[-1])
    tensors = {**{letter(name): tensor for name, tensor in call.tensors.items()}, **named_tensors}
    operands = [f"{name} = {getattr(tensor, 'name', tensor)}" for name, tensor in tensors.items()]
    results = [f"{name} = {proxy.name}: {type_of(proxy)}" for name, proxy in zip(outputs, bsym.output, strict=True)]
    lines = getattr(program(specs(call), settings.plan), direction)
    yield from _as_comments([*_fill_lines(operands), *_fill_lines(results), *lines])


def _fill_lines(parts: Sequence[str]) -> list[str]:
    """Joins parts by commas, in as few lines as possible."""
    lines: list[str] = []
    for part in parts:
        if not lines or len(lines[-1]) + len(part) + 2 > WIDTH:
            lines.append(part)
        else:
            lines[-1] += f", {part}"
    return [f"{line}," for line in lines[:-1]] + lines[-1:]


def _as_comments(lines: Sequence[str]) -> Iterator[str]:
    return (f"  # {line}" for line in lines)
