"""Multiplies finished gradients by the upstream gradient; skipped if that is 1, as after `loss.backward()`."""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from thunder_flce.engine.kernels import dispatch

# Elements converted at a time: temporary memory of 64 MiB.
_FLOAT32_BLOCK = 2**24


def scaled_gradients(
    gradients: Sequence[Tensor], grad: Tensor, *, valid_count: Tensor | None = None, expected: Tensor | None = None,
    may_overwrite: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Returns gradient · grad / expected for each, computed in float32 or float64, in the gradient's dtype.

    Without a valid row the factor is 0, even for an upstream gradient of NaN: the mean over no rows is NaN, and a
    function of it may pass NaN back.

    Args:
        gradients: any shapes, of one dtype, as saved by the forward.
        grad: () the upstream gradient.
        valid_count: () the number of valid rows; None if it is known to be positive.
        expected: () the upstream gradient for which the gradients were computed; None for 1. A number that is not
            `usable` also counts as 1.
        may_overwrite: whether `gradients` will not be read again. The products then overwrite them. On CUDA, a factor
            of 1 then ends the kernel before it touches memory, and the host need not know the factor.
    """
    first = gradients[0]
    if may_overwrite and library(first.dtype, first.device) == "Triton" and all([g.is_contiguous() for g in gradients]):
        from thunder_flce.engine.kernels.triton_vectors import scale_

        scale_(gradients, grad.to(first.device), valid_count, expected)
        return tuple(gradients)
    factor = factor_of(grad, valid_count, expected)
    if may_overwrite and not factor.is_cuda and factor == 1:
        return tuple(gradients)
    results = []
    for gradient in gradients:
        result = gradient if may_overwrite else torch.empty_like(gradient, memory_format=torch.contiguous_format)
        _multiply(gradient, factor.to(gradient.device), result)
        results.append(result)
    return tuple(results)


def factor_of(grad: Tensor, valid_count: Tensor | None, expected: Tensor | None) -> Tensor:
    """Returns () grad / expected, or 0 without a valid row, in float32 or float64."""
    factor = grad.to(torch.promote_types(grad.dtype, torch.float32))
    factor = factor if expected is None else factor / usable(expected.to(factor.dtype))
    return factor if valid_count is None else torch.where(valid_count == 0, 0, factor)


def usable(expected: Tensor) -> Tensor:
    """Returns () the expected upstream gradient, with 1 in place of 0 and of numbers that are not finite."""
    # Three operations on the device; choosing between two numbers by a condition takes eight.
    finite = expected.nan_to_num(nan=1.0, posinf=1.0, neginf=1.0)
    return finite.masked_fill_(finite == 0, 1.0)


@cache
def library(dtype: torch.dtype, device: torch.device) -> str:
    """Returns the library that multiplies a contiguous gradient that may be overwritten: "Triton" or "PyTorch"."""
    return "Triton" if dispatch.runs("triton", dtype, device.type) else "PyTorch"


def graph_is_kept() -> bool:
    """Whether the running backward pass keeps its graph (`retain_graph`), so that saved tensors may be read again.

    True outside a backward pass, to be safe.
    """
    return torch._C._autograd._get_current_graph_task_keep_graph()


def _multiply(gradient: Tensor, factor: Tensor, out: Tensor) -> None:
    """out = gradient · factor, in float32 at least: torch.mul would round the factor to 16 bits first."""
    if gradient.dtype.itemsize >= 4:
        torch.mul(gradient, factor.to(gradient.dtype), out=out)
        return
    for source, target in zip(
        gradient.reshape(-1).split(_FLOAT32_BLOCK), out.view(-1).split(_FLOAT32_BLOCK), strict=True
    ):
        target.copy_(source.float().mul_(factor))
