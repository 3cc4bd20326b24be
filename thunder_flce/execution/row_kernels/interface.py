"""What is computed row by row on a chunk's logits: statistics and, in place, the gradient.

Two lowerings with one interface: `torch_rows` everywhere, `nvfuser_rows`, with the help of `triton_rows`, on CUDA. The
formulas are those of `loss`. Legend: C rows, V vocabulary; a chunk's products z lie in a `LogitsBuffer`, whose rows may
be padded (`plan.VocabLayout`), and are mapped to logits u (`LogitMap`) wherever they are read, in float32 (float64 for
float64).
"""

import importlib.util
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from thunder_flce.execution.slabs import LogitsInSlabs
from thunder_flce.planning.plan import VocabLayout

# Elements of rows, padding included, whose gradient is Triton's where it is a plain loss's and made in place: nvFuser
# reaches 82% to 84% of a copy's speed at 1000 to 3000 columns, and 97% to 103% elsewhere; Triton 96% (one H200).
SHORT_ROWS = range(512, 4097)


@dataclass(frozen=True)
class LogitMap:
    """From the products z of the linear to the logits u = softcap · tanh(scale · z / softcap)."""

    scale: float = 1.0
    softcap: float | None = None
    """None: u = scale · z"""

    def __call__(self, z: Tensor) -> Tensor:
        """u, of z's shape and dtype; z itself where nothing changes it."""
        if self.softcap is not None:
            return torch.tanh(z * (self.scale / self.softcap)).mul_(self.softcap)
        return z if self.scale == 1 else z * self.scale

    def slope(self, u: Tensor) -> Tensor | None:
        """1 - (u / softcap)², what a softcap makes of a gradient; None without one. `loss` takes care of the scale."""
        return None if self.softcap is None else 1 - (u / self.softcap).square_()


class RowStatistics(NamedTuple):
    """Two numbers a row, kept apart so that the loss keeps its digits when all logits share a large offset."""

    row_max: Tensor
    """(C,) the largest logit"""

    row_log_sum: Tensor
    """(C,) log of the sum of exp(logit - row_max): the log-sum-exp relative to the maximum"""


class RowMoments(NamedTuple):
    """What only some losses need of a row, relative to its maximum."""

    expected: Tensor | None = None
    """(C,) Σ_v p_v (u_v - row_max): for the entropy"""

    weighted_sum: Tensor | None = None
    """(C,) Σ_v w_v (u_v - row_max), with w_v = 1 where there are no class weights: for label smoothing"""


class RowCoefficients(NamedTuple):
    """The gradient of a row: (p_v (probability - entropy (u_v - row_max)) - uniform w_v - one_hot [v = y]) · slope."""

    probability: Tensor
    """(C,)"""
    one_hot: Tensor
    """(C,)"""
    uniform: Tensor | None = None
    """(C,); None without label smoothing"""
    entropy: Tensor | None = None
    """(C,); None where no gradient arrives at the entropy"""


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

    @property
    def buffers(self) -> "tuple[LogitsBuffer, ...]":
        """This one: as `SlabbedLogits.buffers`."""
        return (self,)

    @property
    def columns(self) -> list[slice]:
        """All columns: as `SlabbedLogits.columns`."""
        return [slice(0, self.layout.vocab)]

    def rows(self, rows: slice) -> "LogitsBuffer":
        """Some rows of the buffer, as a view."""
        return LogitsBuffer(self.padded[rows], self.layout)


@dataclass(frozen=True)
class SlabbedLogits:
    """The logits of a chunk in slabs of the vocabulary."""

    slabs: LogitsInSlabs

    buffers: tuple[LogitsBuffer, ...]
    """Of each slab, (C, w): those in dW's memory follow each other at `slabs.slab_elements`, and so do the others."""

    @classmethod
    def lay_out(cls, slabs: LogitsInSlabs, borrowed: Tensor, own: Tensor, last: VocabLayout) -> "SlabbedLogits":
        """Slabs for all `slabs.rows` rows.

        Args:
            slabs: how the logits are divided.
            borrowed: the memory of dW, one-dimensional, of the logits' dtype.
            own: the other memory, at least `slabs.own_elements`.
            last: the layout of the last slab.
        """
        step, width = slabs.slab_elements, VocabLayout.contiguous(slabs.width)
        starts = [(borrowed, slabs.free_elements + number * step) for number in range(slabs.borrowed)]
        starts += [(own, number * step) for number in range(slabs.count - slabs.borrowed)]
        layouts = [*[width] * (slabs.count - 1), last]
        sizes = [(slabs.rows, layout.row_stride) for layout in layouts]
        memory = [of[start : start + rows * stride] for (of, start), (rows, stride) in zip(starts, sizes, strict=True)]
        buffers = zip(memory, sizes, layouts, strict=True)
        return cls(slabs, tuple(LogitsBuffer(flat.view(size), layout) for flat, size, layout in buffers))

    @property
    def columns(self) -> list[slice]:
        """The columns of each slab."""
        return self.slabs.columns

    def rows(self, rows: slice) -> "SlabbedLogits":
        """Some rows, as a view."""
        return SlabbedLogits(self.slabs, tuple(buffer.rows(rows) for buffer in self.buffers))


class TargetColumns(NamedTuple):
    """Where targets are in a slab of the vocabulary."""

    column: Tensor
    """(C,) columns of the slab"""

    is_here: Tensor
    """(C,) bool, False where the target lies in another slab; `column` is then any column"""

    @classmethod
    def of(cls, target: Tensor, slab: slice) -> "TargetColumns":
        """target: (C,); slab: its columns, a slice with both ends."""
        column, last = target - slab.start, slab.stop - slab.start - 1
        return cls(column.clamp(0, last), (column >= 0) & (column <= last))


class RowKernels(Protocol):
    """Row-wise computations on a `LogitsBuffer`. Row vectors are (C,), in float32 (float64 for float64 logits)."""

    logit_map: LogitMap

    def statistics(self, buffer: LogitsBuffer) -> RowStatistics:
        """The maximum and the log-sum-exp of each row."""

    def moments(
        self,
        buffer: LogitsBuffer,
        statistics: RowStatistics,
        class_weight: Tensor | None,
        *,
        expected: bool,
        weighted_sum: bool,
    ) -> RowMoments:
        """Those of `RowMoments` that are asked for; class_weight: (V,) in the row vectors' dtype, None for ones."""

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
        """The gradient of `RowCoefficients` without its one_hot term, and its sums over the rows.

        Returns:
            The gradient in `dtype`, in place of the logits where that is their dtype and in new memory where it is not;
            the sums, (V,), of what was written before it was rounded, or None unless `column_sums`.
        """

    def statistics_and_gradient(
        self, logits: LogitsBuffer | SlabbedLogits, target: Tensor, coefficients: RowCoefficients
    ) -> tuple[RowStatistics, Tensor]:
        """Everything at once, where coefficients need no statistics and consist of `probability` and `one_hot`.

        The gradient, with its one_hot term, takes the place of the logits. A row is read again while a cache holds
        most of it.

        Args:
            logits: of C rows.
            target: (C,) int64, each row's column.
            coefficients: of (C,).

        Returns:
            The statistics and, (C,) in the logits' dtype, the product z at each row's target.
        """

    def target_gradient(
        self,
        target_logit: Tensor,
        statistics: RowStatistics,
        coefficients: RowCoefficients,
        class_weight: Tensor | None,
        *,
        dtype: torch.dtype,
    ) -> Tensor:
        """(C,) the gradient with its one_hot term, in `dtype`: what belongs in the target's column.

        Args:
            target_logit: (C,) the product z at each row's target.
            statistics: two (C,).
            coefficients: of (C,).
            class_weight: (C,) at each row's target, or None.
            dtype: of the gradient.
        """


@cache
def fusions_available() -> bool:
    """Whether nvFuser's direct bindings are installed, and Triton, which torch brings along on Linux."""
    return all(importlib.util.find_spec(name) is not None for name in ("nvfuser_direct", "triton"))


def runs_nvfuser(*, dtype: torch.dtype, device_type: str) -> bool:
    """Whether the row kernels for logits of this dtype are nvFuser's fusions and Triton's kernels."""
    return device_type == "cuda" and dtype is not torch.float64 and fusions_available()


def kernels_for(*, dtype: torch.dtype, device_type: str, logit_map: LogitMap) -> RowKernels:
    """nvFuser's kernels on CUDA where it is installed, PyTorch's operations everywhere else."""
    if runs_nvfuser(dtype=dtype, device_type=device_type):
        from thunder_flce.execution.row_kernels.nvfuser_rows import NvFuserRowKernels

        return NvFuserRowKernels(logit_map)
    from thunder_flce.execution.row_kernels.torch_rows import TorchRowKernels

    return TorchRowKernels(logit_map)
