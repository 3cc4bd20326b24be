"""The least that a region has to cost the host: one chunk, three small kernels, and nothing is checked or chosen.

Beside the methods of `bench small`.
"""

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from thunder_flce.bench import small
from thunder_flce.bench.cli import SUBSETS
from thunder_flce.bench.measuring import Unavailable
from thunder_flce.bench.methods import Method
from thunder_flce.bench.shapes import Inputs

_BLOCK = 4096
_SCALED = 8192


@triton.jit
def _count(target, scale, tokens, BLOCK: tl.constexpr):
    """Writes 1 / the number of targets that are not ignored."""
    counts = tl.zeros([BLOCK], tl.float32)
    for start in range(0, tokens, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        counts += (tl.load(target + rows, mask=rows < tokens, other=-100) != -100).to(tl.float32)
    tl.store(scale, 1.0 / tl.sum(counts, 0))


@triton.jit
def _row(logits, target, scale, losses, vocab, BLOCK: tl.constexpr):
    """Writes a row's share of the mean loss, and the gradient of its logits over these."""
    row = tl.program_id(0).to(tl.int64)
    z, y = logits + row * vocab, tl.load(target + row)
    largest, total = tl.full([BLOCK], float("-inf"), tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        u = tl.load(z + columns, mask=columns < vocab, other=float("-inf")).to(tl.float32)
        larger = tl.maximum(largest, u)
        # Places behind a short vocabulary keep -inf, and a sum of 0.
        shift = tl.where(larger == float("-inf"), 0.0, larger)
        total = total * tl.exp(largest - shift) + tl.exp(u - shift)
        largest = larger
    of_row = tl.max(largest, 0)
    log_sum = of_row + tl.log(tl.sum(total * tl.exp(largest - of_row), 0))
    share = tl.where(y == -100, 0.0, tl.load(scale))
    tl.store(losses + row, (log_sum - tl.load(z + tl.maximum(y, 0)).to(tl.float32)) * share)
    # Nobody overwrites the target's logit before it is read.
    tl.debug_barrier()
    for start in range(0, vocab, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        u = tl.load(z + columns, mask=columns < vocab, other=float("-inf")).to(tl.float32)
        gradient = (tl.exp(u - log_sum) - (columns == y).to(tl.float32)) * share
        tl.store(z + columns, gradient.to(logits.dtype.element_ty), mask=columns < vocab)


@triton.jit
def _scale(gradient, upstream, size, BLOCK: tl.constexpr):
    factor = tl.load(upstream)
    if factor == 1.0:
        return
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    scaled = tl.load(gradient + places, mask=places < size).to(tl.float32) * factor
    tl.store(gradient + places, scaled.to(gradient.dtype.element_ty), mask=places < size)


class _Lean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        tokens, vocab = x.shape[0], weight.shape[0]
        z = torch.mm(x, weight.t())
        scale, losses = x.new_empty((), dtype=torch.float32), x.new_empty(tokens, dtype=torch.float32)
        _count[(1,)](target, scale, tokens, 1024, num_warps=8)
        _row[(tokens,)](z, target, scale, losses, vocab, _BLOCK, num_warps=8)
        ctx.save_for_backward(torch.mm(z, weight), torch.mm(z.t(), x))
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        for gradient in ctx.saved_tensors:
            blocks = triton.cdiv(gradient.numel(), _SCALED)
            _scale[(blocks,)](gradient, grad, gradient.numel(), _SCALED, num_warps=8)
        return *ctx.saved_tensors, None


def lean(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """() the mean loss of x (T, H), weight (V, H) and target (T,) int64, -100 for ignored ones, on a GPU."""
    return _Lean.apply(x, weight, target)


def _method(inputs: Inputs) -> Method:
    if not inputs.x.is_cuda:
        raise Unavailable("runs on GPUs only")
    if inputs.bias is not None or inputs.terms:
        raise Unavailable("takes no bias and no adapter")
    return lambda inputs: lean(inputs.x, inputs.weight, inputs.target)


# Measured among the methods that are there.
small.METHODS["lean"] = _method
small.MEANS.add("lean")
SUBSET = replace(SUBSETS["small"], help="as bench small, with the least that such a region could cost")
