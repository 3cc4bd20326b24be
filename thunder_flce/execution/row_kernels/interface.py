"""What the row kernels compute on a chunk's logits, row by row: statistics, moments and, in place, the gradient.

Three complete backends have this interface: `torch_rows`, `triton_rows` and `nvfuser_rows`; `dispatch` says which one
runs what. The formulas are those of `operation.loss`. Legend: C rows, V vocabulary. What the linear gives for a chunk,
z (C, V), lies in a `LogitsBuffer`, whose rows may be padded (`VocabLayout`); it is mapped to logits u (`LogitMap`)
wherever it is read, in float32 (float64 for float64).
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from thunder_flce.execution.layout import VocabLayout
from thunder_flce.execution.staged_logits import BlockLayout
from thunder_flce.operation.loss import LogitMap, RowCoefficients
from thunder_flce.operation.moments import MOMENTS


class RowStatistics(NamedTuple):
    """Two numbers a row, kept apart so that the loss keeps its digits when all logits share a large offset."""

    row_max: Tensor
    """(C,) the largest logit"""
    row_log_sum: Tensor
    """(C,) log of the sum of exp(logit - row_max): the log-sum-exp relative to the maximum. With all its digits near 0,
    where the maximum's own 1 would hide the rest of the sum"""

    def rows(self, rows: Any) -> "RowStatistics":
        """Those of some rows, by an index of vectors."""
        return RowStatistics(self.row_max[rows], self.row_log_sum[rows])


@dataclass(frozen=True)
class LogitsBuffer:
    """Memory for the logits of a chunk."""

    padded: Tensor
    """(C, row_stride), contiguous."""
    layout: VocabLayout

    @property
    def logits(self) -> Tensor:
        """(C, V), the view without the padding."""
        return self.padded[:, : self.layout.vocab] if self.layout.padding else self.padded

    @property
    def buffers(self) -> "tuple[LogitsBuffer, ...]":
        """One block: as `LogitsInBlocks.buffers`."""
        return (self,)

    @property
    def columns(self) -> list[slice]:
        """All columns: as `LogitsInBlocks.columns`."""
        return [slice(0, self.layout.vocab)]

    def rows(self, rows: slice) -> "LogitsBuffer":
        """Some rows of the buffer, as a view."""
        is_all = rows.start == 0 and rows.stop == self.padded.shape[0]
        return self if is_all else LogitsBuffer(self.padded[rows], self.layout)

    def in_dtype(self, dtype: torch.dtype) -> "LogitsBuffer":
        """Memory of that dtype: its own or, where that is of another, as much of uninitialised memory."""
        return self if dtype == self.padded.dtype else replace(self, padded=torch.empty_like(self.padded, dtype=dtype))


@dataclass(frozen=True)
class LogitsInBlocks:
    """The logits of a chunk in blocks of the vocabulary."""

    layout: BlockLayout
    buffers: tuple[LogitsBuffer, ...]
    """Of each block, (C, w): those in dW's memory follow each other at `layout.block_elements`; so do the others."""

    @classmethod
    def lay_out(cls, layout: BlockLayout, borrowed: Tensor, own: Tensor, last: VocabLayout) -> "LogitsInBlocks":
        """Blocks for all rows in dW's memory and other memory, one-dimensional, the last block with its own layout."""
        buffers, step = [], layout.block_elements
        for number, of_block in enumerate([*[VocabLayout.contiguous(layout.width)] * (layout.count - 1), last]):
            memory, start = borrowed, layout.free_elements + number * step
            if number >= layout.borrowed:
                memory, start = own, (number - layout.borrowed) * step
            flat = memory[start : start + layout.rows * of_block.row_stride]
            buffers.append(LogitsBuffer(flat.view(layout.rows, of_block.row_stride), of_block))
        return cls(layout, tuple(buffers))

    @property
    def columns(self) -> list[slice]:
        """The columns of each block."""
        return self.layout.columns

    def rows(self, rows: slice) -> "LogitsInBlocks":
        """Some rows, as a view."""
        return LogitsInBlocks(self.layout, tuple(buffer.rows(rows) for buffer in self.buffers))


class TargetColumns(NamedTuple):
    """Where targets are in a block of the vocabulary."""

    column: Tensor
    """(C,) columns of the block"""
    is_here: Tensor
    """(C,) bool, False where the target lies in another block; `column` is then any column"""

    @classmethod
    def of(cls, target: Tensor, block: slice) -> "TargetColumns":
        """In a block of columns, a slice with both ends."""
        column, last = target - block.start, block.stop - block.start - 1
        return cls(column.clamp(0, last), (column >= 0) & (column <= last))


def padded_weight(class_weight: Tensor | None, layout: VocabLayout, *, is_read: bool) -> Tensor | None:
    """Class weights (V,) as a row of logits lies in memory: (row_stride,), contiguous; None where they are not read."""
    if class_weight is None or not is_read:
        return None
    padded = torch.nn.functional.pad(class_weight, (0, layout.padding)) if layout.padding else class_weight
    return padded.contiguous()


def reads_class_weight(names: tuple[str, ...]) -> bool:
    """Whether some of `operation.moments.MOMENTS` need the class weights."""
    return any(MOMENTS[name].is_weighted for name in names)


@dataclass(frozen=True, kw_only=True)
class RowWork:
    """What one call of a row kernel asks for, without its tensors."""

    method: str
    """Of `RowKernels`."""
    layouts: tuple[VocabLayout, ...] = ()
    """Of the rows of each vocabulary block; one for a `LogitsBuffer`, none for "target_gradient"."""
    dtype: torch.dtype
    """Of z."""
    out_dtype: torch.dtype | None = None
    """Of the gradient; None without one."""
    moments: tuple[str, ...] = ()
    """Names of `operation.moments.MOMENTS`."""
    optional: tuple[str, ...] = ()
    """Which of "uniform" and "entropy", of `RowCoefficients`, and "class_weight" are read, in this order."""
    column_sums: bool = False

    @classmethod
    def of(
        cls, method: str, logits: LogitsBuffer | LogitsInBlocks | Tensor, coefficients: RowCoefficients | None = None,
        *, class_weight: Tensor | None = None, dtype: torch.dtype | None = None, names: tuple[str, ...] = (),
        column_sums: bool = False,
    ) -> "RowWork":  # fmt: skip
        """Of a call of `method` with such arguments; `logits` is z (C,) for "target_gradient"."""
        buffers = () if isinstance(logits, Tensor) else logits.buffers
        terms = ("uniform", "entropy") if coefficients is not None else ()
        optional = tuple(name for name in terms if getattr(coefficients, name) is not None)
        if class_weight is not None and ("uniform" in optional or reads_class_weight(names)):
            optional = (*optional, "class_weight")
        return cls(
            method=method, layouts=tuple(buffer.layout for buffer in buffers),
            dtype=logits.dtype if isinstance(logits, Tensor) else buffers[0].padded.dtype, out_dtype=dtype,
            moments=names, optional=optional, column_sums=column_sums,
        )  # fmt: skip


class RowKernels(Protocol):
    """Row-wise computations, of one row at least. Row vectors are (C,), contiguous, in float32 (float64 for float64).

    Statistics are of the same rows as the logits; class weights are (V,) in the row vectors' dtype, None for ones.
    """

    logit_map: LogitMap

    def statistics(self, buffer: LogitsBuffer) -> RowStatistics:
        """The maximum of each row, and the log of the sum of exponentials relative to it."""

    def moments(
        self, buffer: LogitsBuffer, statistics: RowStatistics, class_weight: Tensor | None, names: tuple[str, ...]
    ) -> dict[str, Tensor]:
        """Sums over each row, (C,) by name, at least one of `operation.moments.MOMENTS`."""

    def gradient(
        self, buffer: LogitsBuffer, statistics: RowStatistics, coefficients: RowCoefficients,
        class_weight: Tensor | None, *, dtype: torch.dtype, column_sums: bool = False,
    ) -> tuple[LogitsBuffer, Tensor | None]:  # fmt: skip
        """The gradient of `RowCoefficients` without its one_hot term, and its sums over the rows.

        It is in `dtype`, in place of the logits where that is their dtype and in new memory where it is not. The sums,
        (V,), are of what was written before it was rounded; None unless `column_sums`.
        """

    def statistics_and_gradient(
        self, logits: LogitsBuffer | LogitsInBlocks, target: Tensor, coefficients: RowCoefficients
    ) -> tuple[RowStatistics, Tensor]:
        """Everything at once, where coefficients need no statistics and consist of `probability` and `one_hot`.

        The gradient, with its one_hot term, takes the place of the logits. `target` is (C,) int64, each row's column.
        Returned are the statistics and, (C,) in the logits' dtype, z at each row's target.
        """

    def target_gradient(
        self, z: Tensor, statistics: RowStatistics, coefficients: RowCoefficients,
        class_weight: Tensor | None, *, dtype: torch.dtype,
    ) -> Tensor:  # fmt: skip
        """(C,) the gradient with its one_hot term, in `dtype`, from z and class weights at each row's target, (C,).

        Where A = B, it keeps the digits of p - 1.
        """
