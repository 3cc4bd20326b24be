"""A loop over chunks of tokens with `torch.func.grad_and_value`: what plain PyTorch can do about the memory."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from thunder_flce.bench.shapes import Inputs

CHUNK_ROWS = 2048


def chunked_loop(*, compiled: bool = False) -> Callable[[Inputs], Tensor]:
    """A function of the inputs that returns the mean loss; the gradients of a chunk are compiled, or not."""
    gradients = _chunk_gradients
    if compiled:
        gradients = torch.compile(gradients, dynamic=False)
    return lambda inputs: _ChunkedLoop.apply(*inputs.named_operands().values(), inputs.target, gradients)


def _chunk_gradients(operands: tuple[Tensor, ...], target: Tensor, count: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    def share_of_loss(operands: tuple[Tensor, ...]) -> Tensor:
        return F.cross_entropy(F.linear(*operands).float(), target, reduction="sum") / count

    return torch.func.grad_and_value(share_of_loss)(operands)


class _ChunkedLoop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, *others: Any) -> Tensor:
        *bias, target, gradients = others
        parameters = (weight, *bias)
        count = (target != -100).sum()
        dx, sums = torch.empty_like(x), [torch.zeros_like(parameter) for parameter in parameters]
        loss = x.new_zeros((), dtype=torch.float32)
        for start in range(0, x.shape[0], CHUNK_ROWS):
            chunk = slice(start, start + CHUNK_ROWS)
            (dx[chunk], *dparameters), share = gradients((x[chunk], *parameters), target[chunk], count)
            for total, gradient in zip(sums, dparameters, strict=True):
                total.add_(gradient)
            loss.add_(share)
        ctx.save_for_backward(dx, *sums)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # In place, as the forward's memory is not needed again: `grad` is 1 in training, but that is for the caller.
        return *(tensor.mul_(grad.to(tensor.dtype)) for tensor in ctx.saved_tensors), None, None
