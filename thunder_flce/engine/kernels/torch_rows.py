"""Row kernels in PyTorch's operations: for a CPU, for float64, and where neither Triton nor nvFuser runs."""

from collections.abc import Iterator

import torch
from torch import Tensor

from thunder_flce.device import Device
from thunder_flce.engine.kernels.interface import RowStatistics, at_columns, finite, gradient, write_at_targets_
from thunder_flce.operation.loss import LogitMap, RowCoefficients
from thunder_flce.operation.moments import MOMENTS

# Rows are computed a block at a time, so that temporaries stay small beside the chunk and, on a CPU, in the threads'
# caches, of THREAD_BYTES each.
BLOCK_BYTES = 64 * 2**20
THREAD_BYTES = 2**20
# The work on a block should take longer than its launches: a block for one thread is as large as one for two.
FEWEST_THREADS = 2
# Threads divide maxima and sums by rows only, and each operation has a fixed cost: on two threads, divergences of 64
# rows of 128256 and their matmuls take 118, 90 and 92 ms with blocks of 1, 4 and 8 rows, cross-entropies 61, 50, 54.
FEWEST_ROWS = 4
# A row's maximum is found from the maxima of blocks of _COLUMNS columns, if a row has _FEWEST_BLOCKS of them or more.
_COLUMNS, _FEWEST_BLOCKS = 512, 16


def row_blocks(logits: Tensor, tensors: int = 1) -> Iterator[slice]:
    """Yields slices of logits (C, V) so that `tensors` temporaries of a slice fit into a block, or of `FEWEST_ROWS`."""
    device = Device.of(logits.device)
    block_bytes = BLOCK_BYTES
    if device.kind == "cpu":
        block_bytes = max(device.multiprocessors, FEWEST_THREADS) * THREAD_BYTES
    row_bytes = max(logits.shape[1], 1) * tensors * torch.promote_types(logits.dtype, torch.float32).itemsize
    rows = max(block_bytes // row_bytes, FEWEST_ROWS)
    for start in range(0, logits.shape[0], rows):
        yield slice(start, start + rows)


def sums_of_rows(values: Tensor) -> Tensor:
    """Returns the sums over V, (C,), of values (C, V)."""
    # On a CPU, PyTorch divides a row's sum among threads only if the row is alone, so a single row is summed twice.
    return values.sum(1) if values.shape[0] > 1 else values.expand(2, -1).sum(1)[:1]


def largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the maximum of each row of logits (C, V) and its column, (C,) each.

    On a CPU, `Tensor.max` takes as long as exponentials, and sixteen times as long as `amax`, because of the column.
    """
    count = logits.shape[1] // _COLUMNS
    if count < _FEWEST_BLOCKS:
        row_max, column = logits.max(1)
        return row_max, column
    blocks = [logits[:, : count * _COLUMNS].unflatten(1, (count, _COLUMNS)).amax(2)]
    if count * _COLUMNS < logits.shape[1]:
        blocks.append(logits[:, count * _COLUMNS :].amax(1, keepdim=True))
    row_max, block = torch.cat(blocks, 1).max(1)
    columns = block[:, None] * _COLUMNS + torch.arange(_COLUMNS, device=logits.device)
    columns.clamp_(max=logits.shape[1] - 1)
    return row_max, columns.gather(1, logits.gather(1, columns).argmax(1, keepdim=True))[:, 0]


class TorchRowKernels:
    """See `RowKernels`. On a CPU, sums over a row have the same bits whether the row is alone or among others."""

    def __init__(self, logit_map: LogitMap = LogitMap()):  # noqa: B008
        self.logit_map = logit_map

    def statistics(self, z: Tensor, target: Tensor | None = None) -> tuple[RowStatistics, Tensor | None]:
        return self._statistics(z), None if target is None else at_columns(z, target)

    def moments(
        self, z: Tensor, statistics: RowStatistics, class_weight: Tensor | None, names: tuple[str, ...]
    ) -> dict[str, Tensor]:
        row_max, row_log_sum = statistics
        sums = {name: torch.empty_like(row_max) for name in names}
        weight = 1.0 if class_weight is None else class_weight
        for rows in row_blocks(z):
            shifted = self._logits(z[rows]) - row_max[rows, None]
            probability = (shifted - row_log_sum[rows, None]).exp_()
            operands = shifted, finite(shifted), probability, weight
            for name in names:
                sums[name][rows] = sums_of_rows(MOMENTS[name](*operands))
        return sums

    def gradient_(
        self, z: Tensor, statistics: RowStatistics, coefficients: RowCoefficients, *,
        class_weight: Tensor | None = None, out: Tensor, target: Tensor | None = None, column_sums: bool = False,
    ) -> Tensor | None:  # fmt: skip
        dtype, entry = torch.promote_types(z.dtype, torch.float32), None
        if target is not None:
            column = target.clamp(min=0)
            weight, z_y = None if class_weight is None else class_weight[column], at_columns(z, column).to(dtype)
            entry = gradient(z_y, self.logit_map, statistics, coefficients, class_weight=weight)
        sums = torch.zeros(z.shape[1], dtype=dtype, device=z.device) if column_sums else None
        coefficients = coefficients._replace(one_hot=None)
        for rows in row_blocks(z):
            block, out_block = z[rows].to(dtype), out[rows]
            buffer = out_block if out_block.dtype == dtype else block if z.dtype != dtype else None
            factors = RowCoefficients(*(None if vector is None else vector[rows, None] for vector in coefficients))
            row_statistics = statistics.rows((rows, None))
            result = gradient(block, self.logit_map, row_statistics, factors, class_weight=class_weight, out=buffer)
            if target is not None and entry is not None:
                write_at_targets_(result, target[rows], entry[rows])
            if sums is not None:
                sums.add_(result.sum(0))
            if result is not out_block:
                out_block.copy_(result)
        return sums

    def one_pass_(self, z: Tensor, target: Tensor, coefficients: RowCoefficients) -> tuple[RowStatistics, Tensor]:
        z_y = at_columns(z, target)
        statistics = self._statistics(z, coefficients.probability)
        entry = gradient(z_y.to(statistics.row_max.dtype), self.logit_map, statistics, coefficients)
        # Not scatter_: on a CPU, it would copy all of a 16-bit z to float32 and back.
        z[torch.arange(z.shape[0], device=z.device), target] = entry.to(z.dtype)
        return statistics, z_y

    def _statistics(self, z: Tensor, factors: Tensor | None = None) -> RowStatistics:
        """Returns the statistics. With `factors` (C,), overwrites z by factor · derivative of the row's log-sum-exp."""
        row_max = torch.empty(z.shape[0], dtype=torch.promote_types(z.dtype, torch.float32), device=z.device)
        other_sums = torch.empty_like(row_max)
        for rows in row_blocks(z):
            logits, slope = self._logits(z[rows]), None
            buffer = logits if logits.data_ptr() != z[rows].data_ptr() else None
            if factors is not None:
                buffer, slope = logits, self.logit_map.slope(z[rows].to(row_max.dtype))
            row_max[rows], column = largest(logits)
            exponential = torch.sub(logits, row_max[rows, None], out=buffer).exp_()
            # The maximum's own exponential is 1 (or NaN): a small sum of the others would lose digits beside it.
            index = column[:, None]
            at_max = exponential.gather(1, index)
            other_sums[rows] = sums_of_rows(exponential.scatter_(1, index, at_max - 1))
            if factors is not None:
                result = exponential.scatter_(1, index, at_max).mul_((factors[rows] / (1 + other_sums[rows]))[:, None])
                result = result if slope is None else result.mul_(slope)
                if result.data_ptr() != z[rows].data_ptr():
                    z[rows] = result
        return RowStatistics(row_max, other_sums.log1p_())

    def _logits(self, z: Tensor) -> Tensor:
        return self.logit_map(z.to(torch.promote_types(z.dtype, torch.float32)))
