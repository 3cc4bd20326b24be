"""Multiplying finished gradients by the upstream gradient, for nothing where it is 1 (as after `loss.backward()`)."""

import time
from functools import cache

import torch
from torch import Tensor

from thunder_flce.device import multiprocessors, on_device, triton_available
from thunder_flce.execution.compile_times import note_first_run


def scale_gradient(gradient: Tensor, factor: Tensor, *, may_overwrite: bool) -> Tensor:
    """gradient · factor, computed in float32 or float64 and rounded to gradient's dtype.

    Args:
        gradient: any shape, as saved by the forward.
        factor: () the upstream gradient.
        may_overwrite: whether nobody will read `gradient` again. The product then takes its place, and on CUDA a
            factor of 1 ends the kernel before it touches memory, without the host knowing the factor.
    """
    if not factor.is_cuda and factor == 1 and may_overwrite:
        return gradient
    result = gradient if may_overwrite else torch.empty_like(gradient, memory_format=torch.contiguous_format)
    if may_overwrite and gradient.is_contiguous() and library(gradient.dtype, gradient.device) == "Triton":
        _multiply_unless_one_(gradient, factor)
    else:
        _multiply(gradient, factor.to(gradient.device), result)
    return result


def library(dtype: torch.dtype, device: torch.device) -> str:
    """Who multiplies a contiguous gradient that may be overwritten: "Triton" or "PyTorch"."""
    is_small_float = dtype in (torch.float32, torch.bfloat16, torch.float16)
    return "Triton" if device.type == "cuda" and is_small_float and triton_available() else "PyTorch"


# Elements converted at a time: temporary memory of 64 MiB.
_FLOAT32_BLOCK = 2**24


def _multiply(gradient: Tensor, factor: Tensor, out: Tensor) -> None:
    """out = gradient · factor, in float32 at least: torch.mul would round the factor to 16 bits first."""
    if gradient.dtype.itemsize >= 4:
        torch.mul(gradient, factor.to(gradient.dtype), out=out)
        return
    for source, target in zip(
        gradient.reshape(-1).split(_FLOAT32_BLOCK), out.view(-1).split(_FLOAT32_BLOCK), strict=True
    ):
        target.copy_(source.float().mul_(factor))


def graph_is_kept() -> bool:
    """Whether the backward pass that is running keeps its graph (`retain_graph`), so that saved tensors are read again.

    True outside a backward pass, where nothing is known.
    """
    return torch._C._autograd._get_current_graph_task_keep_graph()


@cache
def _kernel():
    import triton
    import triton.language as tl

    @triton.jit
    def multiply_unless_one(gradient, factor, size, BLOCK: tl.constexpr):
        value = tl.load(factor).to(tl.float32)
        if value != 1.0:
            start = tl.program_id(0).to(tl.int64) * BLOCK
            step = tl.num_programs(0).to(tl.int64) * BLOCK
            for block in range(start, size, step):
                offsets = block + tl.arange(0, BLOCK)
                mask = offsets < size
                old = tl.load(gradient + offsets, mask=mask)
                tl.store(gradient + offsets, (old.to(tl.float32) * value).to(old.dtype), mask=mask)

    return multiply_unless_one


# A few thousand programs saturate the memory of any device, and cost 3 µs where all of them end at once.
_PROGRAMS_PER_MULTIPROCESSOR = 8
_BLOCK = 4096


def _multiply_unless_one_(gradient: Tensor, factor: Tensor) -> None:
    size = gradient.numel()
    if size == 0:
        return
    programs = min(-(-size // _BLOCK), multiprocessors(gradient.device) * _PROGRAMS_PER_MULTIPROCESSOR)
    start = time.perf_counter()
    with on_device(gradient.device):
        _kernel()[(programs,)](gradient, factor, size, BLOCK=_BLOCK, num_warps=8)
    note_first_run("Triton gradient scaling", (gradient.device, gradient.dtype), start)
