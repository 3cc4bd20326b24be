"""This project and its peers, each behind a function of the inputs that returns the mean loss, ready for backward."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

import thunder_flce
from thunder_flce import Options
from thunder_flce.bench.shapes import Inputs

Method = Callable[[Inputs], Tensor]


class Unavailable(Exception):
    """A peer that is not installed, or cannot do what the shape asks for."""


def _eager(inputs: Inputs) -> Tensor:
    return F.cross_entropy(F.linear(inputs.x, inputs.weight, inputs.bias).float(), inputs.target)


def _program(x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight, bias).float(), target)


def _compiled(compile_program: Callable) -> Method:
    program = compile_program(_program)
    return lambda inputs: program(inputs.x, inputs.weight, inputs.bias, inputs.target)


def _thunder() -> Method:
    import thunder

    return _compiled(thunder.jit)


def _ours(**options) -> Method:
    return _compiled(partial(thunder_flce.jit, options=Options(**options)))


def _liger(**settings) -> Method:
    try:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy
    except ImportError as error:
        raise Unavailable(str(error)) from None
    return lambda inputs: liger_fused_linear_cross_entropy(
        inputs.x, inputs.weight, inputs.target, bias=inputs.bias, **settings
    )


def _cut_cross_entropy() -> Method:
    try:
        from cut_cross_entropy import linear_cross_entropy
    except ImportError as error:
        raise Unavailable(str(error)) from None

    def method(inputs: Inputs) -> Tensor:
        if inputs.bias is not None:
            raise Unavailable("no bias in this version")
        return linear_cross_entropy(inputs.x, inputs.weight, inputs.target)

    return method


METHODS: dict[str, Callable[[], Method]] = {
    "eager": lambda: _eager,
    "torch.compile": lambda: _compiled(torch.compile),
    "thunder": _thunder,
    "liger": _liger,
    "liger, chunk 8": partial(_liger, chunk_mem_const=8),
    "liger, chunk 8, float32": partial(_liger, chunk_mem_const=8, accum_dtype=torch.float32),
    "cut-cross-entropy": _cut_cross_entropy,
    "flce": _ours,
    "flce, 512 rows": partial(_ours, chunk_rows=512),
    "flce, 4096 rows": partial(_ours, chunk_rows=4096),
    "flce, save_logits": partial(_ours, strategy="save_logits"),
    "flce, recompute_logits": partial(_ours, strategy="recompute_logits"),
}
"""What each name stands for; called once per shape, so that nothing compiled is shared between shapes."""


def three_products(inputs: Inputs) -> Callable[[], None]:
    """logits, dX and dW as three cuBLAS products over all tokens: the floor for time.

    An odd vocabulary is rounded down to a multiple of 8, where cuBLAS is fast.
    """
    vocab = inputs.weight.shape[0] - inputs.weight.shape[0] % 8
    x, weight = inputs.x.detach(), inputs.weight.detach()[:vocab]
    logits = torch.empty(x.shape[0], vocab, dtype=x.dtype, device=x.device)
    dlogits = torch.randn_like(logits).mul_(1e-3)
    dx, dweight = torch.empty_like(x), torch.empty_like(weight)

    def run() -> None:
        torch.mm(x, weight.t(), out=logits)
        torch.mm(dlogits, weight, out=dx)
        torch.mm(dlogits.t(), x, out=dweight)

    return run


@torch.no_grad()
def reference_gradients(inputs: Inputs, *, rows: int = 512) -> list[Tensor]:
    """dX, dW and db in float32 from the inputs as they are, by the definition, a few rows at a time."""
    x, weight = inputs.x.float(), inputs.weight.float()
    dx, dweight, dbias = torch.zeros_like(x), torch.zeros_like(weight), x.new_zeros(weight.shape[0])
    valid = inputs.target != -100
    for start in range(0, x.shape[0], rows):
        chunk = slice(start, start + rows)
        logits = F.linear(x[chunk], weight, None if inputs.bias is None else inputs.bias.float())
        dlogits = logits.softmax(1)
        targets = inputs.target[chunk].clamp(min=0)[:, None]
        dlogits.scatter_add_(1, targets, torch.full_like(targets, -1, dtype=dlogits.dtype))
        dlogits.mul_(valid[chunk, None] / valid.sum())
        dx[chunk] = dlogits @ weight
        dweight.addmm_(dlogits.t(), x[chunk])
        dbias.add_(dlogits.sum(0))
    return [dx, dweight, *([] if inputs.bias is None else [dbias])]
