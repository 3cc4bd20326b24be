"""What is computed row by row on a chunk's logits: statistics and, in place, the gradient.

Two lowerings with one interface: `torch_ops` everywhere, `nvfuser` on CUDA. Legend: C rows, V vocabulary; a chunk's
logits lie in a `LogitsBuffer`, whose rows may be padded (`plan.VocabLayout`).
"""

import importlib.util
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from thunder_flce.plan import VocabLayout


class RowStatistics(NamedTuple):
    """Two numbers a row, kept apart so that the loss keeps its digits when all logits share a large offset."""

    row_max: Tensor
    """(C,) the largest logit."""

    row_logsumexp: Tensor
    """(C,) log of the sum of exp(logit - row_max): the log-sum-exp relative to the maximum."""


@dataclass(frozen=True)
class LogitsBuffer:
    """Memory for the logits of a chunk."""

    padded: Tensor
    """(C, row_stride), contiguous."""

    layout: VocabLayout

    @classmethod
    def allocate(cls, rows: int, layout: VocabLayout, *, dtype: torch.dtype, device: torch.device) -> "LogitsBuffer":
        """Uninitialised memory for `rows` rows."""
        return cls(torch.empty(rows, layout.row_stride, dtype=dtype, device=device), layout)

    @property
    def logits(self) -> Tensor:
        """(C, V), the view without the padding."""
        return self.padded[:, : self.layout.vocab]

    def rows(self, rows: slice) -> "LogitsBuffer":
        """Some rows of the buffer, as a view."""
        return LogitsBuffer(self.padded[rows], self.layout)


class RowKernels(Protocol):
    """Row-wise computations on a `LogitsBuffer`."""

    def statistics(self, buffer: LogitsBuffer, target_logit: Tensor) -> tuple[RowStatistics, Tensor]:
        """Statistics and loss of each row, three (C,) in float32 (float64 for float64 logits); logits are only read.

        Args:
            buffer: the logits.
            target_logit: (C,) each row's logit at its target, in the logits' dtype.
        """

    def gradient_(
        self, buffer: LogitsBuffer, statistics: RowStatistics, scale: Tensor, *, column_sums: bool = False
    ) -> Tensor | None:
        """Replaces each logit z by exp(z - row_max - row_logsumexp) · scale; scale is (C,), one factor a row.

        Returns the sums over the rows, (V,) in the statistics' dtype, of what was written before it was rounded; None
        unless `column_sums`.
        """

    def target_gradient(
        self, target_logit: Tensor, statistics: RowStatistics, scale: Tensor, one_hot_scale: Tensor
    ) -> Tensor:
        """exp(target_logit - row_max - row_logsumexp) · scale - one_hot_scale, (C,) in the logits' dtype.

        What belongs in the target's column in place of what `gradient_` wrote there; one_hot_scale is scale, or 0
        where the target lies in another slab.
        """


@cache
def nvfuser_available() -> bool:
    """Whether nvFuser's direct bindings are installed."""
    return importlib.util.find_spec("nvfuser_direct") is not None


def runs_nvfuser(*, dtype: torch.dtype, device_type: str) -> bool:
    """Whether the row kernels for this dtype and device are nvFuser's fusions."""
    return device_type == "cuda" and dtype is not torch.float64 and nvfuser_available()


def kernels_for(*, dtype: torch.dtype, device_type: str) -> RowKernels:
    """nvFuser's kernels on CUDA where it is installed, PyTorch's operations everywhere else."""
    if runs_nvfuser(dtype=dtype, device_type=device_type):
        from thunder_flce.row_kernels import nvfuser

        return nvfuser.KERNELS
    from thunder_flce.row_kernels import torch_ops

    return torch_ops.KERNELS
