"""What a loss region is compared with: the right gradients, and the time of its three matmuls."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from thunder_flce.bench.measuring import Mark, Step
from thunder_flce.bench.shapes import Inputs


@dataclass(frozen=True)
class Reference:
    """The right results for some inputs."""

    loss: Tensor
    """() the mean loss"""

    gradients: dict[str, Tensor]
    """By the names of `Inputs.named_operands`, those of a frozen weight included."""


def row_slices(x: Tensor, rows: int = 512) -> Iterator[slice]:
    """The rows of x, some at a time."""
    return (slice(start, start + rows) for start in range(0, x.shape[0], rows))


def summed(inputs: Inputs, loss_of: Callable[[slice], Tensor], rows: int = 512) -> Reference:
    """The sum of the losses of some rows at a time, and its gradients, which are collected in the inputs."""
    loss = inputs.x.new_zeros(())
    for chunk in row_slices(inputs.x, rows):
        share = loss_of(chunk)
        share.backward()
        loss += share.detach()
    operands = inputs.named_operands().items()
    return Reference(loss, {name: tensor.grad for name, tensor in operands if tensor.grad is not None})


def _mean_loss(inputs: Inputs, logits: Tensor, rows: slice) -> Tensor:
    """What some rows contribute to the mean over all valid tokens."""
    return F.cross_entropy(logits, inputs.target[rows], reduction="sum") / (inputs.target != -100).sum()


def make_reference(inputs: Inputs, *, rows: int = 512) -> Reference:
    """Mean loss and gradients from the inputs as they are, by the definition, a few rows at a time."""
    wide = inputs.widened()
    return summed(wide, lambda chunk: _mean_loss(wide, wide.logits(chunk), chunk), rows)


def relative_error(result: Tensor, reference: Tensor) -> float:
    """‖result − reference‖ / ‖reference‖."""
    difference = torch.linalg.vector_norm(result.to(reference.dtype) - reference)
    return (difference / torch.linalg.vector_norm(reference)).item()


@torch.no_grad()
def matmuls(inputs: Inputs, count: int, *, rows: int = 512) -> Step:
    """The first `count` of logits, dX, dW and a teacher's logits as matmuls over all tokens, to compare times with.

    The logits are the phase "forward", the others "backward". The operands are x and W, frozen or not, and not those of
    an adapter. An odd vocabulary is rounded down to a multiple of 8, where cuBLAS is fast. dlogits is that of the loss:
    at the limit of its power, a chip multiplies some numbers faster than others.
    """
    vocab = inputs.weight.shape[0]
    vocab = vocab - vocab % 8 or vocab
    x, weight = inputs.x.detach(), inputs.weight.detach()[:vocab]
    dlogits = torch.empty(x.shape[0], vocab, dtype=x.dtype, device=x.device)
    for chunk in row_slices(x, rows):
        logits = inputs.logits(chunk).float().requires_grad_()
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(_mean_loss(inputs, logits, chunk), logits)
        dlogits[chunk] = gradient[:, :vocab]
    dx, dweight = torch.empty_like(x), torch.empty_like(weight)

    def step(mark: Mark) -> None:
        torch.mm(x, weight.t())
        mark("forward")
        if count > 1:
            torch.mm(dlogits, weight, out=dx)
        if count > 2:
            torch.mm(dlogits.t(), x, out=dweight)
        if count > 3:
            torch.mm(x, weight.t())
        mark("backward")

    return step
