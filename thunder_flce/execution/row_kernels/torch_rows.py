"""Row kernels as PyTorch operations: for a CPU, for float64, and wherever neither Triton nor nvFuser is installed."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from thunder_flce.execution.row_kernels.interface import (
    LogitMap,
    LogitsBuffer,
    LogitsInBlocks,
    RowCoefficients,
    RowStatistics,
    TargetColumns,
)
from thunder_flce.operation.moments import MOMENTS

# Rows are taken a block at a time, so that the temporaries stay in a CPU's cache and small beside the chunk on CUDA.
BLOCK_BYTES = {"cpu": 2 * 2**20, "cuda": 64 * 2**20}


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that rows of `dtype` are computed in."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def _row_blocks(logits: Tensor, columns: int | None = None) -> Iterator[slice]:
    """Slices over the rows of logits (C, V), each of about BLOCK_BYTES once converted; V may be given as `columns`."""
    row_bytes = max(columns or logits.shape[1], 1) * statistics_dtype(logits.dtype).itemsize
    rows = max(BLOCK_BYTES.get(logits.device.type, BLOCK_BYTES["cuda"]) // row_bytes, 1)
    for start in range(0, logits.shape[0], rows):
        yield slice(start, start + rows)


@dataclass(frozen=True)
class TorchRowKernels:
    """See `RowKernels`."""

    logit_map: LogitMap = LogitMap()

    def statistics(self, buffer: LogitsBuffer) -> RowStatistics:
        z = buffer.logits
        row_max = torch.empty(z.shape[0], dtype=statistics_dtype(z.dtype), device=z.device)
        others = torch.empty_like(row_max)
        for rows in _row_blocks(z):
            logits = self._logits(z[rows])
            row_max[rows], column = logits.max(1)
            exponential = torch.sub(logits, row_max[rows, None], out=self._may_overwrite(logits, z[rows])).exp_()
            # The maximum's own is 1, beside which a small sum of the others would lose its digits; or it is NaN.
            at = column[:, None]
            torch.sum(exponential.scatter_(1, at, exponential.gather(1, at) - 1), 1, out=others[rows])
        return RowStatistics(row_max, others.log1p_())

    def moments(
        self, buffer: LogitsBuffer, statistics: RowStatistics, class_weight: Tensor | None, names: tuple[str, ...]
    ) -> dict[str, Tensor]:
        z = buffer.logits
        row_max, row_log_sum = statistics
        sums = {name: torch.empty_like(row_max) for name in names}
        weight = 1.0 if class_weight is None else class_weight
        for rows in _row_blocks(z):
            shifted = self._logits(z[rows]) - row_max[rows, None]
            probability = (shifted - row_log_sum[rows, None]).exp_()
            finite = _finite(shifted)
            for name in names:
                moment = MOMENTS[name]
                term = moment.term(shifted if moment.keeps_infinity else finite, probability, weight)
                torch.sum(term, 1, out=sums[name][rows])
        return sums

    def gradient(
        self, buffer: LogitsBuffer, statistics: RowStatistics, coefficients: RowCoefficients,
        class_weight: Tensor | None, *, dtype: torch.dtype, column_sums: bool = False,
    ) -> tuple[LogitsBuffer, Tensor | None]:  # fmt: skip
        z, out = buffer.logits, buffer.in_dtype(dtype)
        row_dtype = statistics.row_max.dtype
        sums = z.new_zeros(z.shape[1], dtype=row_dtype) if column_sums else None
        for rows in _row_blocks(z):
            logits, written = self._logits(z[rows]), out.logits[rows]
            memory = written if written.dtype == row_dtype else self._may_overwrite(logits, z[rows])
            found = statistics.rows((rows, None))
            of_rows = RowCoefficients(*(None if vector is None else vector[rows, None] for vector in coefficients))
            gradient = self._gradient(logits, found, of_rows, class_weight, memory)
            if sums is not None:
                sums.add_(gradient.sum(0))
            if gradient is not written:
                written.copy_(gradient)
        return out, sums

    def statistics_and_gradient(
        self, logits: LogitsBuffer | LogitsInBlocks, target: Tensor, coefficients: RowCoefficients
    ) -> tuple[RowStatistics, Tensor]:
        blocks = [buffer.logits for buffer in logits.buffers]
        row_max = torch.empty(target.shape[0], dtype=statistics_dtype(blocks[0].dtype), device=target.device)
        others = torch.empty_like(row_max)
        z_target = blocks[0].new_empty(row_max.shape)
        columns = [TargetColumns.of(target, block) for block in logits.columns]
        for z, (column, is_here) in zip(blocks, columns, strict=True):
            torch.where(is_here, z.gather(1, column[:, None])[:, 0], z_target, out=z_target)
        for rows in _row_blocks(blocks[0], sum(z.shape[1] for z in blocks)):
            parts = [self._logits(z[rows]) for z in blocks]
            whole = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
            row_max[rows], column = whole.max(1)
            slope = self.logit_map.slope(whole)
            gradient = torch.sub(whole, row_max[rows, None], out=whole).exp_()
            # As in `statistics`; the 1 comes back for the gradient.
            at = column[:, None]
            own = gradient.gather(1, at)
            torch.sum(gradient.scatter_(1, at, own - 1), 1, out=others[rows])
            gradient.scatter_(1, at, own).mul_((coefficients.probability[rows] / (1 + others[rows]))[:, None])
            if slope is not None:
                gradient.mul_(slope)
            for z, of_block in zip(blocks, gradient.split([z.shape[1] for z in blocks], 1), strict=True):
                if of_block.data_ptr() != z[rows].data_ptr():
                    z[rows] = of_block
        statistics = RowStatistics(row_max, others.log1p_())
        entry = self._target_gradient(z_target, statistics, coefficients, None).to(z_target.dtype)
        for z, (column, is_here) in zip(blocks, columns, strict=True):
            at = column[:, None]
            z.scatter_(1, at, torch.where(is_here, entry, z.gather(1, at)[:, 0])[:, None])
        return statistics, z_target

    def target_gradient(
        self, z: Tensor, statistics: RowStatistics, coefficients: RowCoefficients,
        class_weight: Tensor | None, *, dtype: torch.dtype,
    ) -> Tensor:  # fmt: skip
        return self._target_gradient(z, statistics, coefficients, class_weight).to(dtype)

    def _target_gradient(
        self, z: Tensor, statistics: RowStatistics, coefficients: RowCoefficients, class_weight: Tensor | None
    ) -> Tensor:
        logits, (factor, one_hot, *_) = self._logits(z), coefficients
        log_probability = logits - statistics.row_max - statistics.row_log_sum
        probability = log_probability.exp()
        # p - 1 loses the digits of a p near 1.
        near_one = log_probability.expm1_().mul_(factor).add_(factor - one_hot)
        gradient = torch.where(probability > 0.5, near_one, probability * factor - one_hot)
        slope = self.logit_map.slope(logits)
        if slope is not None:
            gradient.mul_(slope)
        of_others = coefficients._replace(probability=torch.zeros_like(factor))
        return gradient.add_(self._gradient(logits, statistics, of_others, class_weight, None))

    def _logits(self, z: Tensor) -> Tensor:
        return self.logit_map(z.to(statistics_dtype(z.dtype)))

    def _may_overwrite(self, logits: Tensor, z: Tensor) -> Tensor | None:
        """The memory of mapped or converted logits, where that is not z's own and a slope won't need it."""
        is_temporary = logits.data_ptr() != z.data_ptr()
        return logits if is_temporary and self.logit_map.softcap is None else None

    def _gradient(
        self, logits: Tensor, statistics: RowStatistics, coefficients: RowCoefficients,
        class_weight: Tensor | None, out: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """The formula, without its one_hot term; whatever broadcasts. In `out`, which may be logits, if it is given."""
        shifted = torch.sub(logits, statistics.row_max, out=out)
        if coefficients.entropy is None:
            gradient = shifted.sub_(statistics.row_log_sum).exp_().mul_(coefficients.probability)
        else:
            probability = (shifted - statistics.row_log_sum).exp_()
            gradient = probability * coefficients.probability
            gradient = torch.sub(gradient, _finite(shifted).mul_(probability).mul_(coefficients.entropy), out=out)
        if coefficients.uniform is not None:
            uniform = coefficients.uniform
            gradient.sub_(uniform if class_weight is None else uniform * class_weight)
        slope = self.logit_map.slope(logits)
        return gradient if slope is None else gradient.mul_(slope)


def _finite(shifted: Tensor) -> Tensor:
    """Logits of -inf become the lowest finite number, in new memory: their probability, 0, times it is 0."""
    return shifted.clamp(min=torch.finfo(shifted.dtype).min)
