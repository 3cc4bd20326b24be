"""Row kernels as PyTorch operations: for a CPU, float64, and CUDA without nvFuser."""

import torch
from torch import Tensor

from thunder_flce.row_kernels import LogitsBuffer, RowStatistics

# Rows are taken a block at a time, so that the temporaries stay in a CPU's cache and small beside the chunk on CUDA.
BLOCK_BYTES = {"cpu": 2 * 2**20, "cuda": 64 * 2**20}


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that rows of `dtype` are computed in."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def _row_blocks(logits: Tensor):
    """Slices over the rows of logits (C, V), each of about BLOCK_BYTES once converted."""
    row_bytes = max(logits.shape[1], 1) * statistics_dtype(logits.dtype).itemsize
    rows = max(BLOCK_BYTES.get(logits.device.type, BLOCK_BYTES["cuda"]) // row_bytes, 1)
    for start in range(0, logits.shape[0], rows):
        yield slice(start, start + rows)


class TorchRowKernels:
    """See `RowKernels`."""

    def statistics(self, buffer: LogitsBuffer, target_logit: Tensor) -> tuple[RowStatistics, Tensor]:
        """See `RowKernels.statistics`."""
        logits = buffer.logits
        row_max = torch.empty(logits.shape[0], dtype=statistics_dtype(logits.dtype), device=logits.device)
        row_sum = torch.empty_like(row_max)
        for rows in _row_blocks(logits):
            block = logits[rows]
            block_max = torch.amax(block, 1, keepdim=True).to(row_max.dtype)
            shifted = block - block_max if block.dtype == row_max.dtype else block.to(row_max.dtype).sub_(block_max)
            row_max[rows] = block_max.squeeze(1)
            torch.sum(shifted.exp_(), 1, out=row_sum[rows])
        row_logsumexp = row_sum.log_()
        # In this order the loss keeps its digits when all logits share a large offset.
        row_loss = row_logsumexp - (target_logit.to(row_max.dtype) - row_max)
        return RowStatistics(row_max, row_logsumexp), row_loss

    def gradient_(
        self, buffer: LogitsBuffer, statistics: RowStatistics, scale: Tensor, *, column_sums: bool = False
    ) -> Tensor | None:
        """See `RowKernels.gradient_`."""
        logits = buffer.logits
        sums = logits.new_zeros(logits.shape[1], dtype=scale.dtype) if column_sums else None
        for rows in _row_blocks(logits):
            block = logits[rows]
            gradient = block.to(scale.dtype)
            gradient.sub_(statistics.row_max[rows, None]).sub_(statistics.row_logsumexp[rows, None])
            gradient.exp_().mul_(scale[rows, None])
            if sums is not None:
                sums.add_(gradient.sum(0))
            if gradient is not block:
                block.copy_(gradient)
        return sums

    def target_gradient(
        self, target_logit: Tensor, statistics: RowStatistics, scale: Tensor, one_hot_scale: Tensor
    ) -> Tensor:
        """See `RowKernels.target_gradient`."""
        probability = (target_logit.to(scale.dtype) - statistics.row_max - statistics.row_logsumexp).exp_()
        return torch.addcmul(-one_hot_scale, probability, scale).to(target_logit.dtype)


KERNELS = TorchRowKernels()
