"""Row kernels as PyTorch operations: for a CPU, float64, and CUDA without nvFuser."""

from dataclasses import dataclass

import torch
from torch import Tensor

from thunder_flce.execution.row_kernels.interface import (
    LogitMap,
    LogitsBuffer,
    RowCoefficients,
    RowMoments,
    RowStatistics,
    SlabbedLogits,
    TargetColumns,
)

# Rows are taken a block at a time, so that the temporaries stay in a CPU's cache and small beside the chunk on CUDA.
BLOCK_BYTES = {"cpu": 2 * 2**20, "cuda": 64 * 2**20}


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that rows of `dtype` are computed in."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def _row_blocks(logits: Tensor, columns: int | None = None):
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
        """See `RowKernels.statistics`."""
        products = buffer.logits
        row_max = torch.empty(products.shape[0], dtype=statistics_dtype(products.dtype), device=products.device)
        row_sum = torch.empty_like(row_max)
        for rows in _row_blocks(products):
            logits = self._logits(products[rows])
            torch.amax(logits, 1, out=row_max[rows])
            shifted = torch.sub(logits, row_max[rows, None], out=self._may_overwrite(logits, products[rows]))
            torch.sum(shifted.exp_(), 1, out=row_sum[rows])
        return RowStatistics(row_max, row_sum.log_())

    def moments(
        self,
        buffer: LogitsBuffer,
        statistics: RowStatistics,
        class_weight: Tensor | None,
        *,
        expected: bool,
        weighted_sum: bool,
    ) -> RowMoments:
        """See `RowKernels.moments`."""
        products = buffer.logits
        row_max, row_log_sum = statistics
        moments = RowMoments(
            torch.empty_like(row_max) if expected else None, torch.empty_like(row_max) if weighted_sum else None
        )
        for rows in _row_blocks(products):
            shifted = self._logits(products[rows]) - row_max[rows, None]
            if weighted_sum:
                torch.sum(
                    shifted if class_weight is None else shifted * class_weight, 1, out=moments.weighted_sum[rows]
                )
            if expected:
                probability = (shifted - row_log_sum[rows, None]).exp_()
                torch.sum(_times_finite(probability, shifted), 1, out=moments.expected[rows])
        return moments

    def gradient(
        self,
        buffer: LogitsBuffer,
        statistics: RowStatistics,
        coefficients: RowCoefficients,
        class_weight: Tensor | None,
        *,
        dtype: torch.dtype,
        column_sums: bool = False,
    ) -> tuple[LogitsBuffer, Tensor | None]:
        """See `RowKernels.gradient`."""
        products = buffer.logits
        out = buffer
        if dtype != products.dtype:
            out = LogitsBuffer.allocate(products.shape[0], buffer.layout, dtype=dtype, device=products.device)
        row_dtype = statistics.row_max.dtype
        sums = products.new_zeros(products.shape[1], dtype=row_dtype) if column_sums else None
        for rows in _row_blocks(products):
            logits, written = self._logits(products[rows]), out.logits[rows]
            memory = written if written.dtype == row_dtype else self._may_overwrite(logits, products[rows])
            gradient = self._gradient(
                logits,
                RowStatistics(*(vector[rows, None] for vector in statistics)),
                RowCoefficients(*(None if vector is None else vector[rows, None] for vector in coefficients)),
                class_weight,
                memory,
            )
            if sums is not None:
                sums.add_(gradient.sum(0))
            if gradient is not written:
                written.copy_(gradient)
        return out, sums

    def statistics_and_gradient(
        self, logits: LogitsBuffer | SlabbedLogits, target: Tensor, coefficients: RowCoefficients
    ) -> tuple[RowStatistics, Tensor]:
        """See `RowKernels.statistics_and_gradient`."""
        slabs = [buffer.logits for buffer in logits.buffers]
        row_dtype = statistics_dtype(slabs[0].dtype)
        row_max = torch.empty(slabs[0].shape[0], dtype=row_dtype, device=target.device)
        row_sum = torch.empty_like(row_max)
        target_product = slabs[0].new_empty(row_max.shape)
        columns = [TargetColumns.of(target, slab) for slab in logits.columns]
        for products, (column, is_here) in zip(slabs, columns, strict=True):
            torch.where(is_here, products.gather(1, column[:, None])[:, 0], target_product, out=target_product)
        for rows in _row_blocks(slabs[0], sum(products.shape[1] for products in slabs)):
            parts = [self._logits(products[rows]) for products in slabs]
            torch.amax(torch.stack([part.amax(1) for part in parts]), 0, out=row_max[rows])
            slopes = [self.logit_map.slope(part) for part in parts]
            gradients = [torch.sub(part, row_max[rows, None], out=part).exp_() for part in parts]
            torch.sum(torch.stack([gradient.sum(1) for gradient in gradients]), 0, out=row_sum[rows])
            share = (coefficients.probability[rows] / row_sum[rows])[:, None]
            for products, gradient, slope, (column, is_here) in zip(slabs, gradients, slopes, columns, strict=True):
                one_hot = coefficients.one_hot[rows] * is_here[rows]
                gradient.mul_(share).scatter_add_(1, column[rows, None], -one_hot[:, None])
                if slope is not None:
                    gradient.mul_(slope)
                if gradient.data_ptr() != products[rows].data_ptr():
                    products[rows] = gradient
        return RowStatistics(row_max, row_sum.log_()), target_product

    def target_gradient(
        self,
        target_logit: Tensor,
        statistics: RowStatistics,
        coefficients: RowCoefficients,
        class_weight: Tensor | None,
        *,
        dtype: torch.dtype,
    ) -> Tensor:
        """See `RowKernels.target_gradient`."""
        logits = self._logits(target_logit)
        gradient = self._gradient(logits, statistics, coefficients, class_weight, None)
        slope = self.logit_map.slope(logits)
        one_hot = coefficients.one_hot
        return gradient.sub_(one_hot if slope is None else one_hot * slope).to(dtype)

    def _logits(self, products: Tensor) -> Tensor:
        return self.logit_map(products.to(statistics_dtype(products.dtype)))

    def _may_overwrite(self, logits: Tensor, products: Tensor) -> Tensor | None:
        """The memory of mapped or converted logits, where that is not the products' own and a slope won't need it."""
        is_temporary = logits.data_ptr() != products.data_ptr()
        return logits if is_temporary and self.logit_map.softcap is None else None

    def _gradient(
        self,
        logits: Tensor,
        statistics: RowStatistics,
        coefficients: RowCoefficients,
        class_weight: Tensor | None,
        out: Tensor | None,
    ) -> Tensor:
        """The formula, without its one_hot term; whatever broadcasts. In `out`, which may be logits, if it is given."""
        shifted = torch.sub(logits, statistics.row_max, out=out)
        if coefficients.entropy is None:
            gradient = shifted.sub_(statistics.row_log_sum).exp_().mul_(coefficients.probability)
        else:
            probability = (shifted - statistics.row_log_sum).exp_()
            gradient = probability * coefficients.probability
            gradient = torch.sub(gradient, _times_finite(probability, shifted).mul_(coefficients.entropy), out=out)
        if coefficients.uniform is not None:
            uniform = coefficients.uniform
            gradient.sub_(uniform if class_weight is None else uniform * class_weight)
        slope = self.logit_map.slope(logits)
        return gradient if slope is None else gradient.mul_(slope)


def _times_finite(probability: Tensor, shifted: Tensor) -> Tensor:
    """probability · shifted, in place of shifted, and 0 where the probability is 0 though the logit be -inf."""
    return shifted.masked_fill_(probability == 0, 0).mul_(probability)
