"""Statistics, alone or together with the gradient, and the gradient with its sums over rows, in Triton.

For statistics, a program has a row to itself and goes over it in blocks. Each group of neighbouring elements, those 16
bytes that a thread loads at once, keeps a running maximum and a sum of exponentials relative to it; the groups are
merged once, at the end of the row. A gradient made at once goes over the row again from its end, so that what was read
last, and is still in L2, comes first. With sums over rows, a program has a block of columns of many rows instead.

For 512 MiB of bfloat16 in rows of 128256 on an H200, statistics take 0.126 ms (nvFuser's fusions, which view a row as
parts that fit in registers, 0.159), nvFuser's gradient takes 0.250 ms, and both together take 0.334 ms (traces/h200/
kernels.jsonl). Holding a part of the row in registers, persistent programs and asynchronous copies gained 3% at most.
The gradient with sums over rows takes 0.281 ms, nvFuser's 0.299 (0.381 and 0.778 in rows of 1000).
"""

import math
import time
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from thunder_flce.plan import ROW_MULTIPLE
from thunder_flce.row_kernels import LogitMap, LogitsBuffer, RowCoefficients, RowStatistics

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _exp(x, IS_EXACT: tl.constexpr):
    # exp2 errs by about |x| · 1e-7, which float32 logits would notice and 16-bit logits do not.
    return libdevice.exp(x) if IS_EXACT else tl.exp2(x * _LOG2_E)


@triton.jit
def _logits(products, SCALE: tl.constexpr, SOFTCAP: tl.constexpr, IS_EXACT: tl.constexpr):
    """The logits u, float32."""
    z = products.to(tl.float32)
    if SOFTCAP is None:
        u = z * SCALE
    elif IS_EXACT:
        u = SOFTCAP * libdevice.tanh(z * (SCALE / SOFTCAP))
    else:
        # tanh x = 1 - 2 / (exp 2x + 1)
        u = SOFTCAP - 2 * SOFTCAP / (tl.exp2(z * (2 * SCALE / SOFTCAP * _LOG2_E)) + 1)
    return u


@triton.jit
def _add_groups(u, group_max, group_sum, IS_EXACT: tl.constexpr):
    u = tl.reshape(u, [group_max.shape[0], u.shape[0] // group_max.shape[0]])
    new_max = tl.maximum(group_max, tl.max(u, 1))
    # A group of only -inf must give the sum 0, not exp(-inf - -inf).
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    block_sum = tl.sum(_exp(u - shift[:, None], IS_EXACT), 1)
    return new_max, group_sum * _exp(group_max - shift, IS_EXACT) + block_sum


@triton.jit
def _statistics(
    row,
    STRIDE: tl.constexpr,
    VOCAB: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """row_max and row_logsumexp of one row; a row of only -inf gives NaN, as log_softmax does."""
    IS_EXACT: tl.constexpr = row.dtype.element_ty == tl.float32
    GROUPS: tl.constexpr = BLOCK // (4 if IS_EXACT else 8)
    group_max = tl.full([GROUPS], float("-inf"), tl.float32)
    group_sum = tl.zeros([GROUPS], tl.float32)
    WHOLE: tl.constexpr = VOCAB // BLOCK
    for block in range(0, WHOLE):
        columns = block * BLOCK + tl.arange(0, BLOCK)
        u = _logits(tl.load(row + columns, eviction_policy="evict_last"), SCALE, SOFTCAP, IS_EXACT)
        group_max, group_sum = _add_groups(u, group_max, group_sum, IS_EXACT)
    if WHOLE * BLOCK < VOCAB:
        columns = WHOLE * BLOCK + tl.arange(0, BLOCK)
        u = _logits(tl.load(row + columns, mask=columns < STRIDE, other=0.0), SCALE, SOFTCAP, IS_EXACT)
        u = tl.where(columns < VOCAB, u, float("-inf"))
        group_max, group_sum = _add_groups(u, group_max, group_sum, IS_EXACT)
    row_max = tl.max(group_max, 0)
    row_sum = tl.sum(group_sum * _exp(group_max - row_max, IS_EXACT), 0)
    return row_max, tl.log(row_sum)


@triton.jit
def _gradient(
    products,
    row_max,
    row_logsumexp,
    probability,
    one_hot,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    IS_EXACT: tl.constexpr,
):
    """(p · probability - one_hot) · slope, float32."""
    u = _logits(products, SCALE, SOFTCAP, IS_EXACT)
    gradient = _exp(u - row_max - row_logsumexp, IS_EXACT) * probability - one_hot
    if SOFTCAP is not None:
        tanh = u / SOFTCAP
        gradient *= 1 - tanh * tanh
    return gradient


@triton.jit
def _statistics_kernel(
    products,
    row_max,
    row_logsumexp,
    STRIDE: tl.constexpr,
    VOCAB: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0)
    row = products + index.to(tl.int64) * STRIDE
    largest, logsumexp = _statistics(row, STRIDE, VOCAB, SCALE, SOFTCAP, BLOCK)
    tl.store(row_max + index, largest)
    tl.store(row_logsumexp + index, logsumexp)


# These are slices of longer vectors: how they are aligned must not ask for another compilation.
@triton.jit(do_not_specialize_on_alignment=["target", "probability", "one_hot"])
def _statistics_and_gradient_kernel(
    products,
    target,
    probability,
    one_hot,
    row_max,
    row_logsumexp,
    target_product,
    STRIDE: tl.constexpr,
    VOCAB: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    IS_EXACT: tl.constexpr = products.dtype.element_ty == tl.float32
    index = tl.program_id(0)
    row = products + index.to(tl.int64) * STRIDE
    at_target = row + tl.load(target + index)
    z_target = tl.load(at_target)
    tl.store(target_product + index, z_target)
    largest, logsumexp = _statistics(row, STRIDE, VOCAB, SCALE, SOFTCAP, BLOCK)
    tl.store(row_max + index, largest)
    tl.store(row_logsumexp + index, logsumexp)

    share = tl.load(probability + index)
    WHOLE: tl.constexpr = VOCAB // BLOCK
    if WHOLE * BLOCK < VOCAB:
        columns = WHOLE * BLOCK + tl.arange(0, BLOCK)
        z = tl.load(row + columns, mask=columns < STRIDE, other=0.0)
        gradient = _gradient(z, largest, logsumexp, share, 0.0, SCALE, SOFTCAP, IS_EXACT)
        tl.store(row + columns, gradient.to(z.dtype), mask=columns < STRIDE)
    for count in range(0, WHOLE):
        columns = (WHOLE - 1 - count) * BLOCK + tl.arange(0, BLOCK)
        z = tl.load(row + columns, eviction_policy="evict_first")
        gradient = _gradient(z, largest, logsumexp, share, 0.0, SCALE, SOFTCAP, IS_EXACT)
        tl.store(row + columns, gradient.to(z.dtype), eviction_policy="evict_first")
    # The target's entry is written once more, after all others.
    tl.debug_barrier()
    gradient = _gradient(z_target, largest, logsumexp, share, tl.load(one_hot + index), SCALE, SOFTCAP, IS_EXACT)
    tl.store(at_target, gradient.to(z_target.dtype))


@triton.jit(
    do_not_specialize=["rows", "rows_each"],
    do_not_specialize_on_alignment=["row_max", "row_logsumexp", "probability"],
)
def _gradient_with_column_sums_kernel(
    products,
    row_max,
    row_logsumexp,
    probability,
    column_sums,
    rows,
    rows_each,
    STRIDE: tl.constexpr,
    VOCAB: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    IS_EXACT: tl.constexpr = products.dtype.element_ty == tl.float32
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # A multiple of ROWS, so that nothing but the end of all rows falls between two blocks.
    first = tl.program_id(1) * rows_each
    end = tl.minimum(first + rows_each, rows)
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(first, end, ROWS):
        index = start + tl.arange(0, ROWS)
        is_row = index < rows
        largest = tl.load(row_max + index, mask=is_row, other=0.0)[:, None]
        logsumexp = tl.load(row_logsumexp + index, mask=is_row, other=0.0)[:, None]
        share = tl.load(probability + index, mask=is_row, other=0.0)[:, None]
        at = products + index.to(tl.int64)[:, None] * STRIDE + columns[None, :]
        mask = is_row[:, None] & (columns < STRIDE)[None, :]
        z = tl.load(at, mask=mask, other=0.0)
        gradient = _gradient(z, largest, logsumexp, share, 0.0, SCALE, SOFTCAP, IS_EXACT)
        tl.store(at, gradient.to(z.dtype), mask=mask)
        sums += tl.sum(gradient, 0)
    tl.store(column_sums + tl.program_id(1) * VOCAB + columns, sums, mask=columns < VOCAB)


class _Block(NamedTuple):
    """How a program goes over its row."""

    largest_vocab: float
    """Up to which the choice holds"""
    elements: int
    warps: int


# The fastest of those tried on an H200 with 0.5 GiB of bfloat16 logits. Statistics then reach 1.02 to 1.07 times the
# bandwidth of a copy from a vocabulary of 4099 on (0.79 at 1000). What does both at once reads its row from L2 the
# second time, and has as many bytes in flight as can be, at the price of registers.
_STATISTICS_BLOCKS = (_Block(16383, 1024, 2), _Block(math.inf, 4096, 8))
_GRADIENT_BLOCKS = (_Block(2047, 1024, 2), _Block(16383, 2048, 4), _Block(57343, 4096, 16), _Block(math.inf, 8192, 32))
# With sums over rows, a program has a block of columns and some rows, of which it takes a few at a time, each thread
# the same columns of all of them. Programs are enough to fill the device a few times; each writes its sums, and has so
# many rows, where there are so many, that these are a thirtieth of the gradient at most.
_SUMS_BLOCK = _Block(math.inf, 1024, 4)
_SUMS_ROWS = 8
_SUMS_PROGRAMS = 2048
_SUMS_FEWEST_ROWS = 64


def statistics(buffer: LogitsBuffer, logit_map: LogitMap) -> RowStatistics:
    """See `RowKernels.statistics`; logits in 16 or 32 bits, in rows of a multiple of `ROW_MULTIPLE` elements."""
    rows = buffer.padded.shape[0]
    result = RowStatistics(*(buffer.padded.new_empty(rows, dtype=torch.float32) for _ in range(2)))
    block = _block_for(buffer, _STATISTICS_BLOCKS)
    _launch(_statistics_kernel, (rows,), buffer, logit_map, [*result], block)
    return result


def statistics_and_gradient(
    buffer: LogitsBuffer, target: Tensor, coefficients: RowCoefficients, logit_map: LogitMap
) -> tuple[RowStatistics, Tensor]:
    """See `RowKernels.statistics_and_gradient`; logits as for `statistics`."""
    padded = buffer.padded
    rows = padded.shape[0]
    result = RowStatistics(*(padded.new_empty(rows, dtype=torch.float32) for _ in range(2)))
    target_product = padded.new_empty(rows)
    vectors = [coefficients.probability.contiguous(), coefficients.one_hot.contiguous()]
    arguments = [target.contiguous(), *vectors, *result, target_product]
    block = _block_for(buffer, _GRADIENT_BLOCKS)
    _launch(_statistics_and_gradient_kernel, (rows,), buffer, logit_map, arguments, block)
    return result, target_product


def gradient_with_column_sums(
    buffer: LogitsBuffer, statistics: RowStatistics, probability: Tensor, logit_map: LogitMap
) -> Tensor:
    """See `RowKernels.gradient`, where coefficients consist of `probability` but for the one_hot term; in place.

    Returns:
        (V,) float32: the sums over the rows, each of the same terms in the same order from one run to the next.
    """
    rows, vocab = buffer.padded.shape[0], buffer.layout.vocab
    blocks = triton.cdiv(buffer.layout.row_stride, _SUMS_BLOCK.elements)
    rows_each = max(triton.cdiv(rows * blocks, _SUMS_PROGRAMS * _SUMS_ROWS) * _SUMS_ROWS, _SUMS_FEWEST_ROWS)
    sums = buffer.padded.new_empty(triton.cdiv(rows, rows_each), vocab, dtype=torch.float32)
    arguments = [*(vector.contiguous() for vector in (*statistics, probability)), sums, rows, rows_each]
    grid = (blocks, sums.shape[0])
    _launch(_gradient_with_column_sums_kernel, grid, buffer, logit_map, arguments, _SUMS_BLOCK, ROWS=_SUMS_ROWS)
    return sums.sum(0)


def _block_for(buffer: LogitsBuffer, blocks: tuple[_Block, ...]) -> _Block:
    return next(block for block in blocks if buffer.layout.vocab <= block.largest_vocab)


_first_run_seconds: dict[tuple, float] = {}
"""By what a kernel was compiled for."""


def _launch(
    kernel: Any,
    grid: tuple[int, ...],
    buffer: LogitsBuffer,
    logit_map: LogitMap,
    arguments: list[Any],
    block: _Block,
    **more: int,
) -> None:
    """Runs a kernel over the buffer, which is its first argument.

    Args:
        kernel: one of the above.
        grid: how many programs; none are run where a number is 0.
        buffer: the logits.
        logit_map: what they are mapped by.
        arguments: the kernel's other arguments.
        block: how it goes over columns.
        more: further constants.
    """
    padded, layout = buffer.padded, buffer.layout
    if layout.row_stride % ROW_MULTIPLE:
        raise ValueError(f"row_stride must be a multiple of {ROW_MULTIPLE}, but is {layout.row_stride}")
    if 0 in grid:
        return
    constants = {
        "STRIDE": layout.row_stride,
        "VOCAB": layout.vocab,
        "SCALE": logit_map.scale,
        "SOFTCAP": logit_map.softcap,
        "BLOCK": block.elements,
        **more,
    }
    start = time.perf_counter()
    with torch.cuda.device(padded.device) if padded.is_cuda else nullcontext():
        kernel[grid](padded, *arguments, **constants, num_warps=block.warps)
    _first_run_seconds.setdefault(
        (kernel.__name__, padded.device, padded.dtype, *constants.values()), time.perf_counter() - start
    )


def compile_seconds() -> float:
    """What the first runs of all kernels have taken in this process, which is when Triton compiles or loads them."""
    return sum(_first_run_seconds.values())
