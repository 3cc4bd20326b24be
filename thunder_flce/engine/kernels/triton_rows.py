"""Row kernels in Triton.

For statistics and moments, each program computes one row, block by block. For statistics, each group of neighbouring
elements, the 16 bytes that a thread loads at once, keeps a running maximum and a sum of exponentials relative to it.
The groups are merged once, at the end of the row. If one column dominates, its group is read again without that column.

A kernel that computes statistics and gradient reads the row a second time from its end, so that the elements read last,
which are still in L2, come first. Long rows are divided among programs, which exchange their statistics in between. For
a gradient alone, each program computes a block of columns of one row or, with sums over the rows, of many rows.
"""

import math
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from thunder_flce.device import PADDED_ROW_MULTIPLE, ROW_MULTIPLE, Device
from thunder_flce.engine.kernels.interface import RowStatistics, padded_weight
from thunder_flce.engine.kernels.launch import contiguous, kernel, launch
from thunder_flce.operation.loss import LogitMap, RowCoefficients
from thunder_flce.operation.moments import MOMENTS

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _exp(x, IS_EXACT: tl.constexpr):
    # exp2 has a relative error of about |x| · 1e-7, which matters for float32 logits, but not for 16-bit ones.
    return libdevice.exp(x) if IS_EXACT else tl.exp2(x * _LOG2_E)


@triton.jit
def _logits(z, SCALE: tl.constexpr, SOFTCAP: tl.constexpr, IS_EXACT: tl.constexpr):
    """Returns the logits u, float32."""
    z = z.to(tl.float32)
    if SOFTCAP is None:
        u = z * SCALE
    elif IS_EXACT:
        u = SOFTCAP * libdevice.tanh(z * (SCALE / SOFTCAP))
    else:
        # tanh x = 1 - 2 / (exp 2x + 1)
        u = SOFTCAP - 2 * SOFTCAP / (tl.exp2(z * (2 * SCALE / SOFTCAP * _LOG2_E)) + 1)
    return u


@triton.jit
def _shift(largest):
    """Returns the maximum, or 0 if it is -inf, so that the exponentials are 0 and not NaN, exp(-inf - -inf)."""
    return tl.where(largest == float("-inf"), 0.0, largest)


@triton.jit
def _add_groups(u, group_max, group_sum, IS_EXACT: tl.constexpr):
    u = tl.reshape(u, [group_max.shape[0], u.shape[0] // group_max.shape[0]])
    new_max = tl.maximum(group_max, tl.max(u, 1))
    shift = _shift(new_max)
    block_sum = tl.sum(_exp(u - shift[:, None], IS_EXACT), 1)
    return new_max, group_sum * _exp(group_max - shift, IS_EXACT) + block_sum


@triton.jit
def _relative(maxima, sums, largest, IS_EXACT: tl.constexpr):
    """Rescales sums of exponentials relative to `maxima` so that they are relative to `largest`."""
    return sums * _exp(maxima - _shift(largest), IS_EXACT)


@triton.jit
def _sum_below(row, vocab, group, largest, SCALE: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr,
               WIDTH: tl.constexpr):  # fmt: skip
    """Sums the exponentials of a group, WIDTH elements in each block, without the largest, far above the others.

    The group is read again, 64 blocks at a time.
    """
    IS_EXACT: tl.constexpr = row.dtype.element_ty == tl.float32
    number = tl.arange(0, 64 * WIDTH)
    sums = tl.zeros([64 * WIDTH], tl.float32)
    for block in range(0, vocab // BLOCK + 1, 64):
        columns = (block + number // WIDTH) * BLOCK + group * WIDTH + number % WIDTH
        z = tl.load(row + columns, mask=columns < vocab, other=0.0)
        exponential = _exp(_logits(z, SCALE, SOFTCAP, IS_EXACT) - _shift(largest), IS_EXACT)
        sums += tl.where((columns < vocab) & (exponential < 0.75), exponential, 0.0)
    return tl.sum(sums, 0)


@triton.jit
def _last_block(row, vocab, stride, BLOCK: tl.constexpr):
    """Returns columns and values z of a row's last, partial block."""
    columns = vocab // BLOCK * BLOCK + tl.arange(0, BLOCK)
    return columns, tl.load(row + columns, mask=columns < stride, other=0.0)


@triton.jit
def _statistics(row, vocab, rest_columns, rest, SCALE: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr):
    """Returns the maximum of a row, or of a part of one, and the sum of the other columns' exponentials relative to it.

    The maximum's own exponential, 1, is left out: beside it, a small sum would lose digits in float32.
    """
    IS_EXACT: tl.constexpr = row.dtype.element_ty == tl.float32
    WIDTH: tl.constexpr = 4 if IS_EXACT else 8
    GROUPS: tl.constexpr = BLOCK // WIDTH
    group_max = tl.full([GROUPS], float("-inf"), tl.float32)
    group_sum = tl.zeros([GROUPS], tl.float32)
    for block in range(0, vocab // BLOCK):
        columns = block * BLOCK + tl.arange(0, BLOCK)
        u = _logits(tl.load(row + columns, eviction_policy="evict_last"), SCALE, SOFTCAP, IS_EXACT)
        group_max, group_sum = _add_groups(u, group_max, group_sum, IS_EXACT)
    if rest is not None:
        u = tl.where(rest_columns < vocab, _logits(rest, SCALE, SOFTCAP, IS_EXACT), float("-inf"))
        group_max, group_sum = _add_groups(u, group_max, group_sum, IS_EXACT)
    largest = tl.max(group_max, 0)
    relative = _relative(group_max, group_sum, largest, IS_EXACT)
    other_sum = tl.sum(relative, 0) - 1.0
    if other_sum < 0.5:
        # No other exponential is above 0.5. Only the sum of the maximum's group, which includes the 1, has lost digits.
        has_largest = group_max == largest
        group = tl.sum(tl.where(has_largest, tl.arange(0, GROUPS), 0), 0)
        other_sum = tl.sum(tl.where(has_largest, 0.0, relative), 0)
        other_sum += _sum_below(row, vocab, group, largest, SCALE, SOFTCAP, BLOCK, WIDTH)
    return largest, other_sum


@triton.jit
def _merge_parts(largest, other_sum, slots, part, PARTS: tl.constexpr, SLOTS: tl.constexpr, IS_EXACT: tl.constexpr):
    """Returns the statistics of a row from its parts', which other programs write to their slots; waits for them.

    Maximum and sum are packed into one number of 64 bits, which is written at once. The sum's sign bit is set to 1, so
    that the number is never 0, the value of an empty slot.
    """
    packed = largest.to(tl.int32, bitcast=True).to(tl.int64) << 32
    packed |= other_sum.to(tl.int32, bitcast=True).to(tl.int64) & 0x7FFFFFFF | 0x80000000
    tl.atomic_xchg(slots + part, packed, sem="relaxed")
    number = tl.arange(0, SLOTS)
    is_part = number < PARTS
    packed = tl.load(slots + number, mask=is_part, other=1, volatile=True)
    while tl.min((packed != 0).to(tl.int32), 0) == 0:
        packed = tl.load(slots + number, mask=is_part, other=1, volatile=True)
    part_max = (packed >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    part_sum = (packed & 0x7FFFFFFF).to(tl.int32).to(tl.float32, bitcast=True)
    part_max = tl.where(is_part, part_max, float("-inf"))
    largest = tl.max(part_max, 0)
    has_largest = part_max == largest
    other_sums = tl.where(has_largest, part_sum, _relative(part_max, 1.0 + part_sum, largest, IS_EXACT))
    return largest, tl.sum(other_sums, 0) + (tl.sum(has_largest.to(tl.float32), 0) - 1.0)


@triton.jit
def _finite(shifted):
    """Replaces -inf by the lowest finite number, whose product with the probability 0 is 0."""
    return tl.where(shifted == float("-inf"), -3.4028234663852886e38, shifted)


@triton.jit
def _gradient(
    z, row_max, row_log_sum, probability, SCALE: tl.constexpr, SOFTCAP: tl.constexpr, IS_EXACT: tl.constexpr,
    one_hot=None, uniform=None, entropy=None, weight=None,
):  # fmt: skip
    """Returns the gradient of `RowCoefficients`, float32; operands broadcast, None for an absent term.

    With `one_hot`, z is the target's entry, for which p - 1 keeps its digits.
    """
    u = _logits(z, SCALE, SOFTCAP, IS_EXACT)
    shifted = u - row_max
    p = _exp(shifted - row_log_sum, IS_EXACT)
    gradient = p * probability
    if one_hot is not None:
        near_one = libdevice.expm1(shifted - row_log_sum) * probability + (probability - one_hot)
        gradient = tl.where(p > 0.5, near_one, gradient - one_hot)
    if entropy is not None:
        gradient -= p * _finite(shifted) * entropy
    if uniform is not None:
        gradient -= uniform if weight is None else uniform * weight
    if SOFTCAP is not None:
        tanh = libdevice.tanh(z.to(tl.float32) * (SCALE / SOFTCAP)) if IS_EXACT else u / SOFTCAP
        gradient *= 1 - tanh * tanh
    return gradient


@triton.jit
def _load_rows(vector, index, mask):
    """Loads one number for each row of a tile, as a column, 0 where `mask` is False; None if `vector` is None."""
    numbers = None
    if vector is not None:
        numbers = tl.load(vector + index, mask=mask, other=0.0)[:, None]
    return numbers


@triton.jit
def _row_statistics(row, VOCAB: tl.constexpr, STRIDE: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr,
                    BLOCK: tl.constexpr):  # fmt: skip
    """Returns the maximum of a whole row, and the logarithm of its sum of exponentials relative to the maximum."""
    columns, rest = None, None
    if VOCAB % BLOCK:
        columns, rest = _last_block(row, VOCAB, STRIDE, BLOCK)
    largest, other_sum = _statistics(row, VOCAB, columns, rest, SCALE, SOFTCAP, BLOCK)
    return largest, libdevice.log1p(other_sum)


@kernel(1)
def _statistics_kernel(
    z, target, row_max, row_log_sum, z_target,
    STRIDE: tl.constexpr, VOCAB: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    row = z + index.to(tl.int64) * STRIDE
    if target is not None:
        tl.store(z_target + index, tl.load(row + tl.load(target + index)))
    largest, log_sum = _row_statistics(row, VOCAB, STRIDE, SCALE, SOFTCAP, BLOCK)
    tl.store(row_max + index, largest)
    tl.store(row_log_sum + index, log_sum)


@kernel(2)
def _moments_kernel(
    z, class_weight, row_max, row_log_sum, moments,
    STRIDE: tl.constexpr, VOCAB: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr,
    TERMS: tl.constexpr, KEY: tl.constexpr,
):  # fmt: skip
    """moments: (number of TERMS, rows). KEY: distinguishes terms with the same name, which Triton would confuse."""
    IS_EXACT: tl.constexpr = z.dtype.element_ty == tl.float32
    index = tl.program_id(0)
    row = z + index.to(tl.int64) * STRIDE
    largest, log_sum = tl.load(row_max + index), tl.load(row_log_sum + index)
    sums = ()
    for _ in tl.static_range(len(TERMS)):
        sums = sums + (tl.zeros([BLOCK], tl.float32),)  # type: ignore[assignment]
    for start in range(0, VOCAB, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        is_column = columns < VOCAB
        shifted = _logits(tl.load(row + columns, mask=columns < STRIDE, other=0.0), SCALE, SOFTCAP, IS_EXACT) - largest
        p = _exp(shifted - log_sum, IS_EXACT)
        weight = 1.0
        if class_weight is not None:
            weight = tl.load(class_weight + columns, mask=columns < STRIDE, other=0.0)
        new_sums = ()
        for i in tl.static_range(len(TERMS)):
            term = TERMS[i](shifted, _finite(shifted), p, weight)
            new_sums = new_sums + (sums[i] + tl.where(is_column, term, 0.0),)  # type: ignore[assignment]
        sums = new_sums
    for i in tl.static_range(len(TERMS)):
        tl.store(moments + i * tl.num_programs(0) + index, tl.sum(sums[i], 0))


@kernel(1)
def _one_pass_kernel(
    z, target, probability, one_hot, results, exchange,
    STRIDE: tl.constexpr, VOCAB: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr,
    PARTS: tl.constexpr, PART: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """results: row_max, row_log_sum and z at the targets, (3, rows).

    PART: columns of each part but the last, with padding. SLOTS: slots of each row in `exchange`, after the counter.
    """
    IS_EXACT: tl.constexpr = z.dtype.element_ty == tl.float32
    rows = tl.num_programs(0) // PARTS
    if PARTS == 1:
        index, part = tl.program_id(0), 0
        start, vocab, stride = 0, VOCAB, STRIDE
        row = z + index.to(tl.int64) * STRIDE
    else:
        # Programs are numbered in the order in which they start, not by program_id, so a program waits only for
        # programs that run already or are the next to start.
        number = tl.atomic_add(exchange, 1, sem="relaxed").to(tl.int32)
        index, part = number // PARTS, number % PARTS
        start = part * PART
        vocab = tl.minimum(VOCAB - start, PART)
        stride = tl.multiple_of(tl.minimum(STRIDE - start, PART), 8)
        row = z + tl.multiple_of(index.to(tl.int64) * STRIDE + start, 8)
    offset = tl.load(target + index) - start
    has_target = (offset >= 0) & (offset < vocab)
    at_target = tl.load(row + offset, mask=has_target, other=0.0)
    tl.store(results + 2 * rows + index, at_target.to(tl.float32), mask=has_target)
    # The partial block stays in registers until the gradient: loading it again took 5% longer.
    rest_columns, rest = None, None
    if PARTS > 1 or VOCAB % BLOCK:
        rest_columns, rest = _last_block(row, vocab, stride, BLOCK)
    largest, other_sum = _statistics(row, vocab, rest_columns, rest, SCALE, SOFTCAP, BLOCK)
    if PARTS > 1:
        slots = exchange + 1 + index * SLOTS
        largest, other_sum = _merge_parts(largest, other_sum, slots, part, PARTS, SLOTS, IS_EXACT)
    log_sum = libdevice.log1p(other_sum)
    tl.store(results + index, largest, mask=part == 0)
    tl.store(results + rows + index, log_sum, mask=part == 0)

    factor = tl.load(probability + index)
    if rest is not None:
        gradient = _gradient(rest, largest, log_sum, factor, SCALE, SOFTCAP, IS_EXACT)
        tl.store(row + rest_columns, gradient.to(rest.dtype), mask=rest_columns < stride)
    for count in range(0, vocab // BLOCK):
        columns = (vocab // BLOCK - 1 - count) * BLOCK + tl.arange(0, BLOCK)
        block = tl.load(row + columns, eviction_policy="evict_first")
        gradient = _gradient(block, largest, log_sum, factor, SCALE, SOFTCAP, IS_EXACT)
        tl.store(row + columns, gradient.to(block.dtype), eviction_policy="evict_first")
    # The target's entry is overwritten after all others are written.
    tl.debug_barrier()
    gradient = _gradient(at_target, largest, log_sum, factor, SCALE, SOFTCAP, IS_EXACT, tl.load(one_hot + index))
    tl.store(row + offset, gradient.to(at_target.dtype), mask=has_target)


@kernel(3, "rows", "rows_each")
def _gradient_kernel(
    z, out, class_weight, row_max, row_log_sum, probability, one_hot, uniform, entropy, target, column_sums,
    rows, rows_each,
    STRIDE: tl.constexpr, OUT_STRIDE: tl.constexpr, VOCAB: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A program computes a block of columns of `rows_each` rows, a multiple of ROWS: only the last tile is partial."""
    IS_EXACT: tl.constexpr = z.dtype.element_ty == tl.float32
    # Padding that both z and out have is written, too, so that whole vectors are stored.
    WIDTH: tl.constexpr = STRIDE if STRIDE < OUT_STRIDE else OUT_STRIDE
    BLOCKS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    group = tl.program_id(0) // BLOCKS
    columns = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    is_column = (columns < WIDTH)[None, :]
    weight = None if class_weight is None else tl.load(class_weight + columns[None, :], mask=is_column, other=0.0)
    first = group * rows_each
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(first, tl.minimum(first + rows_each, rows), ROWS):
        index = start + tl.arange(0, ROWS)
        is_row = index < rows
        row = index.to(tl.int64)[:, None]
        mask = is_row[:, None] & is_column
        largest, log_sum = _load_rows(row_max, index, is_row), _load_rows(row_log_sum, index, is_row)
        factor = _load_rows(probability, index, is_row)
        # Two statements, because Triton cannot unpack a tuple that contains None.
        row_uniform = _load_rows(uniform, index, is_row)
        row_entropy = _load_rows(entropy, index, is_row)
        gradient = _gradient(
            tl.load(z + row * STRIDE + columns[None, :], mask=mask, other=0.0),
            largest, log_sum, factor, SCALE, SOFTCAP, IS_EXACT, None, row_uniform, row_entropy, weight,
        )  # fmt: skip
        if target is not None:
            column = tl.load(target + index, mask=is_row, other=-1)[:, None]
            is_here = (column >= 0) & (column // BLOCK == tl.program_id(0) % BLOCKS)
            # Most blocks contain no row's target.
            if tl.max(is_here.to(tl.int32)) > 0:
                at_target = None
                if class_weight is not None:
                    at_target = tl.load(class_weight + column, mask=is_here, other=0.0)
                entry = _gradient(
                    tl.load(z + row * STRIDE + column, mask=is_here, other=0.0),
                    largest, log_sum, factor, SCALE, SOFTCAP, IS_EXACT,
                    _load_rows(one_hot, index, is_row), row_uniform, row_entropy, at_target,
                )  # fmt: skip
                gradient = tl.where(columns[None, :] == column, entry, gradient)
                # Ensures that all threads have read z at the target before a thread overwrites it.
                tl.debug_barrier()
        tl.store(out + row * OUT_STRIDE + columns[None, :], gradient.to(out.dtype.element_ty), mask=mask)
        if column_sums is not None:
            sums += tl.sum(gradient, 0)
    if column_sums is not None:
        tl.store(column_sums + group * VOCAB + columns, sums, mask=columns < VOCAB)


class _Block(NamedTuple):
    """The block size and the number of threads of a kernel's programs."""

    largest_vocab: float
    """The largest V for which the choice holds"""
    elements: int
    threads: int
    """Threads of a program; `on` halves them if a multiprocessor has too few for two programs"""
    programs: int | None = None
    """Number of programs that are to fit on a multiprocessor at a time, by a limit of registers; None for no limit"""

    def on(self, device: Device) -> "_Block":
        """Returns the block with the threads and programs for which a device's multiprocessors have room."""
        if self.programs is None:
            return self
        threads = self.threads if 2 * self.threads <= device.resident_threads else self.threads // 2
        programs = min(self.programs * self.threads, device.resident_threads) // threads
        return self._replace(threads=threads, programs=programs)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of a launch."""
        # The number of registers of a thread is a multiple of 8.
        registers = None if self.programs is None else _REGISTERS // (self.threads * self.programs) // 8 * 8
        return {"BLOCK": self.elements, "threads": self.threads, "registers": registers}


# Registers of a multiprocessor, on all GPUs of NVIDIA.
_REGISTERS = 65536
# The fastest of the blocks tried on an H200 with 0.5 GiB of bfloat16 logits. Statistics then reach 0.95 to 1.05 times
# the bandwidth of a copy for vocabularies from 4099 on (0.79 at 1000). Statistics and gradient in one kernel take 1.05
# to 1.2 times as long as a copy: a multiprocessor must have enough programs, two to four, that some load while others
# compute, but the rows that all programs work on, and read a second time, must stay in L2.
_STATISTICS_BLOCKS = (_Block(16383, 1024, 64), _Block(math.inf, 4096, 256))
_ONE_PASS_BLOCKS = (
    _Block(16383, 2048, 128),
    _Block(40959, 4096, 512, programs=4),
    _Block(math.inf, 8192, 1024, programs=2),
)
_MOMENTS_BLOCK = _Block(math.inf, 2048, 256)
# Rows above _LARGEST_ROW_BYTES are divided, 128256 columns into three parts. Odd numbers of parts were the faster ones.
_PART_BLOCK = _Block(math.inf, 4096, 512, programs=3)
_LARGEST_ROW_BYTES = 160 * 2**10
_LARGEST_PART_BYTES = 90 * 2**10
_MOST_PARTS = 15
# For the gradient alone. A row takes whole blocks, even if it has few columns.
_GRADIENT_BLOCK = _Block(math.inf, 4096, 256)
# With sums over rows, a program computes a block of columns of some rows, _SUMS_ROWS at a time, and a thread has the
# same columns in all of them. About _SUMS_PROGRAMS programs fill the device a few times. Each writes its sums: with
# _SUMS_FEWEST_ROWS rows or more for a program, all sums take at most a thirtieth of the gradient's memory.
_SUMS_BLOCK, _SUMS_ROWS = _Block(math.inf, 1024, 128), 8
_SUMS_PROGRAMS, _SUMS_FEWEST_ROWS = 2048, 64


class TritonRowKernels:
    """See `RowKernels`; for logits in 16 or 32 bits, whose row stride is a multiple of `ROW_MULTIPLE`.

    Every sum adds the same terms in the same order in each run.
    """

    def __init__(self, logit_map: LogitMap = LogitMap()):  # noqa: B008
        self.logit_map = logit_map
        # Settings of launches, by the operation and everything they depend on, to save the host's time.
        self._settings: dict[tuple[Any, ...], Any] = {}

    def statistics(self, z: Tensor, target: Tensor | None = None) -> tuple[RowStatistics, Tensor | None]:
        (rows, vocab), stride = z.shape, z.stride(0)
        settings = self._settings.get(key := ("statistics", vocab, stride))
        if settings is None:
            settings = self._make_settings(key, _block_for(vocab, _STATISTICS_BLOCKS), STRIDE=stride, VOCAB=vocab)
        statistics = RowStatistics(*torch.empty(2, rows, dtype=torch.float32, device=z.device).unbind())
        z_y = None if target is None else torch.empty(rows, dtype=z.dtype, device=z.device)
        launch(_statistics_kernel, rows, [z, *contiguous(target), *statistics, z_y], settings)
        return statistics, z_y

    def moments(
        self, z: Tensor, statistics: RowStatistics, class_weight: Tensor | None, names: tuple[str, ...]
    ) -> dict[str, Tensor]:
        (rows, vocab), stride = z.shape, z.stride(0)
        settings = self._settings.get(key := ("moments", vocab, stride, names))
        if settings is None:
            settings = self._make_settings(key, _MOMENTS_BLOCK, STRIDE=stride, VOCAB=vocab, **_terms(names))
        sums = torch.empty(len(names), rows, dtype=torch.float32, device=z.device)
        weight = padded_weight(class_weight, stride)
        launch(_moments_kernel, rows, [z, weight, *contiguous(*statistics), sums], settings)
        return dict(zip(names, sums, strict=True))

    def gradient_(
        self, z: Tensor, statistics: RowStatistics, coefficients: RowCoefficients, *,
        class_weight: Tensor | None = None, out: Tensor, target: Tensor | None = None, column_sums: bool = False,
    ) -> Tensor | None:  # fmt: skip
        (rows, vocab), stride, out_stride = z.shape, z.stride(0), out.stride(0)
        settings = self._settings.get(key := ("gradient_", vocab, stride, out_stride, column_sums))
        if settings is None:
            block, at_once = (_SUMS_BLOCK, _SUMS_ROWS) if column_sums else (_GRADIENT_BLOCK, 1)
            constants = {"STRIDE": stride, "OUT_STRIDE": out_stride, "VOCAB": vocab, "ROWS": at_once}
            settings = self._make_settings(key, block, **constants)
        programs, rows_each, sums = _ceil(min(stride, out_stride), settings["BLOCK"]), 1, None
        if column_sums:
            rows_each = max(_ceil(rows * programs, _SUMS_PROGRAMS * _SUMS_ROWS) * _SUMS_ROWS, _SUMS_FEWEST_ROWS)
            sums = torch.empty(_ceil(rows, rows_each), vocab, dtype=torch.float32, device=z.device)
        weight = padded_weight(class_weight, stride)
        one_hot = None if target is None else coefficients.one_hot
        vectors = contiguous(*statistics, *coefficients._replace(one_hot=one_hot), target)
        launched = _ceil(rows, rows_each) * programs
        launch(_gradient_kernel, launched, [z, out, weight, *vectors, sums], settings, rows, rows_each)
        return None if sums is None else sums[0] if sums.shape[0] == 1 else sums.sum(0)

    def one_pass_(self, z: Tensor, target: Tensor, coefficients: RowCoefficients) -> tuple[RowStatistics, Tensor]:
        (rows, vocab), stride = z.shape, z.stride(0)
        settings = self._settings.get(key := ("one_pass_", vocab, stride, z.dtype, z.device))
        if settings is None:
            device = Device.of(z.device)
            parts = _parts(stride, z.element_size(), device)
            block = (_PART_BLOCK if parts["PARTS"] > 1 else _block_for(vocab, _ONE_PASS_BLOCKS)).on(device)
            settings = self._make_settings(key, block, STRIDE=stride, VOCAB=vocab, **parts)
        parts_each, exchange = settings["PARTS"], None
        if parts_each > 1:
            exchange = _exchange(rows, settings["SLOTS"], z.device)
        results = torch.empty(3, rows, dtype=torch.float32, device=z.device)
        vectors = contiguous(target, coefficients.probability, coefficients.one_hot)
        launch(_one_pass_kernel, rows * parts_each, [z, *vectors, results, exchange], settings)
        row_max, row_log_sum, z_y = results.unbind()
        return RowStatistics(row_max, row_log_sum), z_y

    def _make_settings(self, key: tuple[Any, ...], block: _Block, **constants: Any) -> dict[str, Any]:
        for name in ("STRIDE", "OUT_STRIDE"):
            if constants.get(name, 0) % ROW_MULTIPLE:
                raise ValueError(f"the stride of rows must be a multiple of {ROW_MULTIPLE}, but is {constants[name]}")
        map_constants = {"SCALE": self.logit_map.scale, "SOFTCAP": self.logit_map.softcap}
        self._settings[key] = constants | map_constants | block.settings
        return self._settings[key]


def _parts(stride: int, itemsize: int, device: Device) -> dict[str, int]:
    """Returns the kernel's constants that say how a row is divided among programs."""
    row_bytes, total = stride * itemsize, 1
    if row_bytes > _LARGEST_ROW_BYTES:
        total = min(_ceil(row_bytes, _LARGEST_PART_BYTES) | 1, _MOST_PARTS)
    # Programs wait for the others of their row. They are numbered as they start, so those of the first unfinished row
    # run or start next: that row makes progress if the device can run all its parts at a time, by their threads and
    # registers: 396 on an H200. On AMD's GPUs rows are whole: their compiler hoists the load out of the waiting loop
    # (tests/kernels), and chiplets have caches of their own.
    if device.is_hip or total > device.multiprocessors * (_PART_BLOCK.on(device).programs or 1):
        total = 1
    columns = _ceil(stride, total * PADDED_ROW_MULTIPLE) * PADDED_ROW_MULTIPLE
    return {"PARTS": total, "PART": columns, "SLOTS": 1 << (total - 1).bit_length()}  # Slots are a power of two.


def _exchange(rows: int, slots: int, device: torch.device) -> Tensor:
    """Returns the zeroed memory through which programs get their numbers and exchange the statistics of their row."""
    return torch.zeros(1 + rows * slots, dtype=torch.int64, device=device)


@cache
def _terms(names: tuple[str, ...]) -> dict[str, Any]:
    """Returns the constants of the kernel for moments."""
    terms = [MOMENTS[name] for name in names]
    compiled = [triton.jit(term) for term in terms]
    # Triton's interpreter calls plain functions; `triton.jit` of one would need `tl` among its module's names.
    functions = tuple(c if isinstance(c, triton.JITFunction) else t for c, t in zip(compiled, terms, strict=True))
    return {"TERMS": functions, "KEY": "".join(getattr(t, "cache_key", "") for t in functions)}


def _block_for(vocab: int, blocks: tuple[_Block, ...]) -> _Block:
    return next(block for block in blocks if vocab <= block.largest_vocab)


def _ceil(number: int, by: int) -> int:
    # Not triton.cdiv, which takes the host a microsecond.
    return -(-number // by)
