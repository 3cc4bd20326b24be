"""Statistics, alone or with the gradient, and the gradient alone, in short rows or with its sums over rows, in Triton.

For statistics, a program has a row to itself and goes over it in blocks. Each group of neighbouring elements, those 16
bytes that a thread loads at once, keeps a running maximum and a sum of exponentials relative to it; the groups are
merged once, at the end of the row. A gradient made at once goes over the row again from its end, so that what was read
last, and is still in L2, comes first. Long rows are divided among programs, which tell each other their statistics in
between. With sums over rows, a program has a block of columns of many rows instead.

For 512 MiB of bfloat16 in rows of 128256 on an H200, statistics take 0.125 ms (nvFuser's fusions, which view a row as
parts that fit in registers, 0.159), nvFuser's gradient takes 0.251 ms, and both together take 0.290 ms (traces/h200/
kernels.jsonl), or 0.334 without dividing rows. The gradient with sums over rows takes 0.282 ms, nvFuser's 0.299 (0.380
and 0.778 in rows of 1000). Tried in vain: to hold rows, or parts of them, in registers or in shared memory, filled
asynchronously while the row before is written (0.334 ms), and persistent programs.
"""

import math
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from thunder_flce.execution.compile_times import first_run_timed
from thunder_flce.execution.row_kernels.interface import (
    LogitMap,
    LogitsBuffer,
    RowCoefficients,
    RowStatistics,
    SlabbedLogits,
)
from thunder_flce.execution.slabs import MOST_SLABS
from thunder_flce.planning.plan import PADDED_ROW_MULTIPLE, ROW_MULTIPLE

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
def _sum_of(maxima, sums, IS_EXACT: tl.constexpr):
    """The largest of some maxima, and the sum of what is relative to each of them, relative to that."""
    largest = tl.max(maxima, 0)
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    return largest, tl.sum(sums * _exp(maxima - shift, IS_EXACT), 0)


@triton.jit
def _rest(row, vocab, stride, BLOCK: tl.constexpr):
    """What lies behind the full blocks of a row: columns and products."""
    columns = vocab // BLOCK * BLOCK + tl.arange(0, BLOCK)
    return columns, tl.load(row + columns, mask=columns < stride, other=0.0)


@triton.jit
def _statistics(
    row,
    vocab,
    rest_columns,
    rest,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The maximum of a row, or of a part of one, and the sum of exponentials relative to it."""
    IS_EXACT: tl.constexpr = row.dtype.element_ty == tl.float32
    GROUPS: tl.constexpr = BLOCK // (4 if IS_EXACT else 8)
    group_max = tl.full([GROUPS], float("-inf"), tl.float32)
    group_sum = tl.zeros([GROUPS], tl.float32)
    for block in range(0, vocab // BLOCK):
        columns = block * BLOCK + tl.arange(0, BLOCK)
        u = _logits(tl.load(row + columns, eviction_policy="evict_last"), SCALE, SOFTCAP, IS_EXACT)
        group_max, group_sum = _add_groups(u, group_max, group_sum, IS_EXACT)
    if rest is not None:
        u = tl.where(rest_columns < vocab, _logits(rest, SCALE, SOFTCAP, IS_EXACT), float("-inf"))
        group_max, group_sum = _add_groups(u, group_max, group_sum, IS_EXACT)
    return _sum_of(group_max, group_sum, IS_EXACT)


@triton.jit
def _merged(largest, total, slots, part, PARTS: tl.constexpr, SLOTS: tl.constexpr, IS_EXACT: tl.constexpr):
    """The statistics of a row from those of its parts, which other programs put into their slots; waits for them.

    Maximum and sum make one number of 64 bits, which arrives as a whole. It is never 0: a sum is 1 at least, or the
    maximum is -inf, or one of them is NaN.
    """
    packed = largest.to(tl.int32, bitcast=True).to(tl.int64) << 32
    packed |= total.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    tl.atomic_xchg(slots + part, packed, sem="relaxed")
    number = tl.arange(0, SLOTS)
    is_part = number < PARTS
    packed = tl.load(slots + number, mask=is_part, other=1, volatile=True)
    while tl.min((packed != 0).to(tl.int32), 0) == 0:
        packed = tl.load(slots + number, mask=is_part, other=1, volatile=True)
    part_max = (packed >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    part_sum = packed.to(tl.int32).to(tl.float32, bitcast=True)
    return _sum_of(tl.where(is_part, part_max, float("-inf")), part_sum, IS_EXACT)


@triton.jit
def _gradient(
    products,
    row_max,
    row_log_sum,
    probability,
    one_hot,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    IS_EXACT: tl.constexpr,
):
    """(p · probability - one_hot) · slope, float32."""
    u = _logits(products, SCALE, SOFTCAP, IS_EXACT)
    gradient = _exp(u - row_max - row_log_sum, IS_EXACT) * probability - one_hot
    if SOFTCAP is not None:
        tanh = u / SOFTCAP
        gradient *= 1 - tanh * tanh
    return gradient


@triton.jit
def _statistics_kernel(
    products,
    row_max,
    row_log_sum,
    STRIDE: tl.constexpr,
    VOCAB: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0)
    row = products + index.to(tl.int64) * STRIDE
    columns, rest = None, None
    if VOCAB % BLOCK:
        columns, rest = _rest(row, VOCAB, STRIDE, BLOCK)
    largest, total = _statistics(row, VOCAB, columns, rest, SCALE, SOFTCAP, BLOCK)
    tl.store(row_max + index, largest)
    tl.store(row_log_sum + index, tl.log(total))


# Vectors are slices of longer ones: how they are aligned must not ask for another compilation.
@triton.jit(do_not_specialize_on_alignment=["target", "probability", "one_hot"])
def _statistics_and_gradient_kernel(
    products,
    own_products,
    slab_elements,
    target,
    probability,
    one_hot,
    row_max,
    row_log_sum,
    target_product,
    exchange,
    STRIDE: tl.constexpr,
    VOCAB: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
    SLABS: tl.constexpr,
    BORROWED: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    SLOTS: tl.constexpr,
):
    IS_EXACT: tl.constexpr = products.dtype.element_ty == tl.float32
    if PARTS == 1:
        index = tl.program_id(0)
        part = 0
        start = 0
        vocab = VOCAB
        stride = STRIDE
        row = products + index.to(tl.int64) * STRIDE
    else:
        # Numbered as they start, not by program_id: who waits for others waits for programs that run already, or that
        # are the next to start.
        number = tl.atomic_add(exchange, 1, sem="relaxed").to(tl.int32)
        index = number // PARTS
        part = number % PARTS
        # A part of a slab, which is the whole row where there is one. STRIDE is the last one's.
        PARTS_OF_SLAB: tl.constexpr = PARTS // SLABS
        slab = part // PARTS_OF_SLAB
        first = part % PARTS_OF_SLAB * PART
        is_last = slab == SLABS - 1
        vocab = tl.minimum(tl.where(is_last, VOCAB - (SLABS - 1) * WIDTH, WIDTH) - first, PART)
        row_stride = tl.where(is_last, STRIDE, WIDTH)
        stride = tl.multiple_of(tl.minimum(row_stride - first, PART), 8)
        start = slab * WIDTH + first
        row = products
        if SLABS > 1:
            # Without the hint, an odd number of rows means loads of 2 bytes each.
            if slab < BORROWED:
                row = products + tl.multiple_of(slab.to(tl.int64) * slab_elements, 8)
            else:
                row = own_products + tl.multiple_of((slab - BORROWED).to(tl.int64) * slab_elements, 8)
        row += tl.multiple_of(index.to(tl.int64) * row_stride + first, 8)
    offset = tl.load(target + index) - start
    has_target = (offset >= 0) & (offset < vocab)
    z_target = tl.load(row + offset, mask=has_target, other=0.0)
    tl.store(target_product + index, z_target, mask=has_target)
    # Kept until the gradient: to wait for it a second time took 5% longer.
    rest_columns, rest = None, None
    if PARTS > 1 or VOCAB % BLOCK:
        rest_columns, rest = _rest(row, vocab, stride, BLOCK)
    largest, total = _statistics(row, vocab, rest_columns, rest, SCALE, SOFTCAP, BLOCK)
    if PARTS > 1:
        largest, total = _merged(largest, total, exchange + 1 + index * SLOTS, part, PARTS, SLOTS, IS_EXACT)
    logsumexp = tl.log(total)
    tl.store(row_max + index, largest, mask=part == 0)
    tl.store(row_log_sum + index, logsumexp, mask=part == 0)

    share = tl.load(probability + index)
    if rest is not None:
        gradient = _gradient(rest, largest, logsumexp, share, 0.0, SCALE, SOFTCAP, IS_EXACT)
        tl.store(row + rest_columns, gradient.to(rest.dtype), mask=rest_columns < stride)
    for count in range(0, vocab // BLOCK):
        columns = (vocab // BLOCK - 1 - count) * BLOCK + tl.arange(0, BLOCK)
        z = tl.load(row + columns, eviction_policy="evict_first")
        gradient = _gradient(z, largest, logsumexp, share, 0.0, SCALE, SOFTCAP, IS_EXACT)
        tl.store(row + columns, gradient.to(z.dtype), eviction_policy="evict_first")
    # The target's entry is written once more, after all others.
    tl.debug_barrier()
    gradient = _gradient(z_target, largest, logsumexp, share, tl.load(one_hot + index), SCALE, SOFTCAP, IS_EXACT)
    tl.store(row + offset, gradient.to(z_target.dtype), mask=has_target)


@triton.jit(do_not_specialize_on_alignment=["row_max", "row_log_sum", "probability"])
def _gradient_kernel(
    products,
    row_max,
    row_log_sum,
    probability,
    STRIDE: tl.constexpr,
    VOCAB: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    IS_EXACT: tl.constexpr = products.dtype.element_ty == tl.float32
    index = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    row = products + index.to(tl.int64) * STRIDE
    z = tl.load(row + columns, mask=columns < STRIDE, other=0.0)
    largest, logsumexp = tl.load(row_max + index), tl.load(row_log_sum + index)
    gradient = _gradient(z, largest, logsumexp, tl.load(probability + index), 0.0, SCALE, SOFTCAP, IS_EXACT)
    tl.store(row + columns, gradient.to(z.dtype), mask=columns < STRIDE)


@triton.jit(
    do_not_specialize=["rows", "rows_each"],
    do_not_specialize_on_alignment=["row_max", "row_log_sum", "probability"],
)
def _gradient_with_column_sums_kernel(
    products,
    row_max,
    row_log_sum,
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
        logsumexp = tl.load(row_log_sum + index, mask=is_row, other=0.0)[:, None]
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
    registers: int | None = None
    """Of a thread, at most; None for as many as the compiler likes"""


# The fastest of those tried on an H200 with 0.5 GiB of bfloat16 logits. Statistics then reach 0.95 to 1.05 times the
# bandwidth of a copy from a vocabulary of 4099 on (0.79 at 1000). Both at once take 1.05 to 1.2 times as long as a
# copy: there must be enough programs on a multiprocessor, two to four, for some to load while others compute, but what
# they all are at, and read a second time, must stay in L2.
_STATISTICS_BLOCKS = (_Block(16383, 1024, 2), _Block(math.inf, 4096, 8))
_GRADIENT_BLOCKS = (
    _Block(2047, 1024, 2),
    _Block(16383, 2048, 4),
    _Block(40959, 4096, 16, registers=32),
    _Block(math.inf, 8192, 32, registers=32),
)
# Longer rows are divided, 128256 columns into three parts: 0.290 ms instead of 0.334 (256000 into seven: 0.291 instead
# of 0.369). Odd numbers of parts were up to 5% faster than even ones, for a reason not found.
_PART_BLOCK = _Block(math.inf, 4096, 16, registers=40)
_LARGEST_ROW_BYTES = 160 * 2**10
_LARGEST_PART_BYTES = 90 * 2**10
# All parts of a row have to run at a time, and do on eight multiprocessors; on an H200, those of 28 kernels at once.
_MOST_PARTS = MOST_SLABS
# For `row_kernels.SHORT_ROWS`; a program has a row.
_SHORT_BLOCKS = (_Block(1024, 1024, 4), _Block(2048, 2048, 4), _Block(4096, 4096, 8))
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
    logits: LogitsBuffer | SlabbedLogits, target: Tensor, coefficients: RowCoefficients, logit_map: LogitMap
) -> tuple[RowStatistics, Tensor]:
    """See `RowKernels.statistics_and_gradient`; logits as for `statistics`."""
    first, last = logits.buffers[0], logits.buffers[-1]
    rows = last.padded.shape[0]
    result = RowStatistics(*(last.padded.new_empty(rows, dtype=torch.float32) for _ in range(2)))
    target_product = last.padded.new_empty(rows)
    slabs = logits.slabs if isinstance(logits, SlabbedLogits) else None
    borrowed = slabs.borrowed if slabs else 0
    own = logits.buffers[borrowed].padded, slabs.slab_elements if slabs else 0
    vectors = [coefficients.probability.contiguous(), coefficients.one_hot.contiguous()]
    parts = _parts(last, len(logits.buffers))
    exchange = None
    if parts.count == 1:
        block = _block_for(last, _GRADIENT_BLOCKS)
    else:
        block, exchange = _PART_BLOCK, _exchange(rows, parts, last.padded.device)
    constants = {
        "SLABS": len(logits.buffers),
        "BORROWED": borrowed,
        "WIDTH": first.layout.vocab,
        "PARTS": parts.count,
        "PART": parts.columns,
        "SLOTS": parts.slots,
    }
    arguments = [*own, target.contiguous(), *vectors, *result, target_product, exchange]
    whole = LogitsBuffer(first.padded, replace(last.layout, vocab=logits.columns[-1].stop))
    grid = (rows * parts.count,)
    _launch(_statistics_and_gradient_kernel, grid, whole, logit_map, arguments, block, **constants)
    return result, target_product


def gradient(buffer: LogitsBuffer, statistics: RowStatistics, probability: Tensor, logit_map: LogitMap) -> None:
    """See `RowKernels.gradient`, where coefficients consist of `probability` but for the one_hot term; in place.

    Only for rows of `row_kernels.SHORT_ROWS` elements.
    """
    vectors = [vector.contiguous() for vector in (*statistics, probability)]
    block = _block_for(buffer, _SHORT_BLOCKS)
    _launch(_gradient_kernel, (buffer.padded.shape[0],), buffer, logit_map, vectors, block)


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


class _Parts(NamedTuple):
    """How a row is divided among programs."""

    count: int
    columns: int
    """Of each but the last of a slab, padding included"""

    @property
    def slots(self) -> int:
        """Memory for the parts' statistics, in 64-bit numbers: a power of two."""
        return triton.next_power_of_2(self.count)


def _parts(buffer: LogitsBuffer, slabs: int = 1) -> _Parts:
    """Of rows in so many slabs, of which `buffer` has the widest."""
    stride, itemsize = buffer.layout.row_stride, buffer.padded.element_size()
    if slabs == 1 and stride * itemsize <= _LARGEST_ROW_BYTES:
        return _Parts(1, stride)
    of_slab = triton.cdiv(stride * itemsize, _LARGEST_PART_BYTES)
    of_slab = min(of_slab | 1 if slabs == 1 else of_slab, _MOST_PARTS // slabs)
    return _Parts(slabs * of_slab, triton.cdiv(stride, of_slab * PADDED_ROW_MULTIPLE) * PADDED_ROW_MULTIPLE)


def _exchange(rows: int, parts: _Parts, device: torch.device) -> Tensor:
    """Where programs number themselves, and leave their statistics for the others of their row."""
    return torch.zeros(1 + rows * parts.slots, dtype=torch.int64, device=device)


def _block_for(buffer: LogitsBuffer, blocks: tuple[_Block, ...]) -> _Block:
    return next(block for block in blocks if buffer.layout.vocab <= block.largest_vocab)


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
    kind = (kernel.__name__, padded.device, padded.dtype, *constants.values())
    on_device = torch.cuda.device(padded.device) if padded.is_cuda else nullcontext()
    with on_device, first_run_timed("Triton row kernels", kind):
        kernel[grid](padded, *arguments, **constants, num_warps=block.warps, maxnreg=block.registers)
