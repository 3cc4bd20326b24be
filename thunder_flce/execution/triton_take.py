"""Rows of a matrix in another order, with zeros in place of some, in Triton.

For 2048 rows of 4096 in bfloat16 it takes 6 µs on an H200. PyTorch takes 7 µs for the rows, and 19 for the zeros.
"""

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from thunder_flce.execution.compile_times import first_run_timed

_COLUMNS = 4096
_WARPS = 8


@triton.jit
def _take_rows_kernel(tensor, index, out, columns, row_stride, column_stride, BLOCK: tl.constexpr):
    """A program has a row."""
    row = tl.program_id(0).to(tl.int64)
    source = tl.load(index + row)
    for start in range(0, columns, BLOCK):
        column = (start + tl.arange(0, BLOCK)).to(tl.int64)
        is_read = (column < columns) & (source >= 0)
        numbers = tl.load(tensor + source * row_stride + column * column_stride, mask=is_read, other=0)
        tl.store(out + row * columns + column, numbers, mask=column < columns)


def take_rows(tensor: Tensor, index: Tensor, out: Tensor | None = None) -> Tensor:
    """Rows of a matrix, and zeros for a negative index.

    Args:
        tensor: (T, H).
        index: (N,) int64, smaller than T.
        out: (N, H) memory for the result, if there is any, contiguous, of the tensor's dtype, and no part of it.

    Returns:
        (N, H)
    """
    shape = index.shape[0], tensor.shape[1]
    out = tensor.new_empty(shape) if out is None else out
    if out.numel() == 0:
        return out
    block = min(triton.next_power_of_2(shape[1]), _COLUMNS)
    on_device = torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
    sizes = shape[1], *tensor.stride()
    with on_device, first_run_timed("Triton rows taken", (tensor.device, tensor.dtype, *sizes)):
        _take_rows_kernel[shape[:1]](tensor, index.contiguous(), out, *sizes, BLOCK=block, num_warps=_WARPS)
    return out
