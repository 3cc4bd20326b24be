"""What a loss region is compared with: the right gradients, and the time of its three matmuls."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

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


class _Chunk(NamedTuple):
    """What some rows of the inputs give."""

    rows: slice
    loss_sum: Tensor
    dlogits: Tensor


def _chunks(
    inputs: Inputs, linears: Iterable[tuple[Tensor, Tensor]], *, dtype: torch.dtype, rows: int
) -> Iterator[_Chunk]:
    """The loss of some rows at a time and its gradient by their logits, the sum of the bias and the linears.

    Args:
        inputs: whose bias and target they are.
        linears: pairs of input and weight; their matmuls are in their own dtype.
        dtype: of the loss and the gradient.
        rows: how many at a time.
    """
    (x, weight), *terms = linears
    bias = None if inputs.bias is None else inputs.bias.to(x.dtype)
    valid = inputs.target != -100
    for start in range(0, x.shape[0], rows):
        chunk = slice(start, start + rows)
        logits = F.linear(x[chunk], weight, bias)
        for y, b in terms:
            logits.addmm_(y[chunk], b.t())
        logits = logits.to(dtype)
        loss_sum = F.cross_entropy(logits, inputs.target[chunk], reduction="sum")
        dlogits = logits.softmax(1)
        targets = inputs.target[chunk].clamp(min=0)[:, None]
        dlogits.scatter_add_(1, targets, torch.full_like(targets, -1, dtype=dtype))
        dlogits.mul_(valid[chunk, None] / valid.sum().to(dtype))
        yield _Chunk(chunk, loss_sum, dlogits)


def reference_dtype(inputs: Inputs) -> torch.dtype:
    """What references are computed in: float32 for 16-bit inputs, and float64 otherwise."""
    return torch.float32 if inputs.x.element_size() == 2 else torch.float64


@torch.no_grad()
def make_reference(inputs: Inputs, *, rows: int = 512) -> Reference:
    """Mean loss and gradients from the inputs as they are, by the definition, a few rows at a time."""
    dtype = reference_dtype(inputs)
    linears = {("dx", "dw"): (inputs.x.to(dtype), inputs.weight.to(dtype))}
    for y, b in inputs.terms:
        linears["dy", "db"] = (y.to(dtype), b.to(dtype))
    gradients = {
        name: torch.zeros_like(tensor)
        for names, tensors in linears.items()
        for name, tensor in zip(names, tensors, strict=True)
    }
    if inputs.bias is not None:
        gradients["dbias"] = torch.zeros_like(inputs.bias, dtype=dtype)
    loss = torch.zeros((), dtype=dtype, device=inputs.x.device)
    for chunk, loss_sum, dlogits in _chunks(inputs, linears.values(), dtype=dtype, rows=rows):
        loss += loss_sum
        for (input_name, weight_name), (input, weight) in linears.items():
            gradients[input_name][chunk] = dlogits @ weight
            gradients[weight_name].addmm_(dlogits.t(), input[chunk])
        if inputs.bias is not None:
            gradients["dbias"].add_(dlogits.sum(0))
    return Reference(loss / (inputs.target != -100).sum(), gradients)


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
    for chunk in _chunks(inputs, [(inputs.x, inputs.weight), *inputs.terms], dtype=torch.float32, rows=rows):
        dlogits[chunk.rows] = chunk.dlogits[:, :vocab]
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
