"""What the row kernels compute on logits, row by row: statistics, moments and, in place, the gradient.

Three complete backends have this interface: `torch_rows`, `triton_rows` and `nvfuser_rows`; `dispatch` says which one
runs. The formulas are those of `operation.loss`. Legend: C rows, V vocabulary. What the linear gives, z (C, V), is
mapped to logits u (`LogitMap`) wherever it is read, in float32 (float64 for float64), the row dtype.

In memory, z is a view of rows that are `z.stride(0)` elements apart, the last dimension contiguous. What lies between V
and the stride, the padding, belongs to the same memory: kernels may write there.
"""

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from thunder_flce.device import PADDED_ROW_MULTIPLE, ROW_MULTIPLE
from thunder_flce.operation.loss import LogitMap, RowCoefficients


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


class Prepared(NamedTuple):
    """What follows from the targets of all tokens, before their logits are there; in the `order`, if there is one."""

    target: Tensor
    """(T,) or (T, K) int64 in [0, V), 0 where ignored, and any where only the token weight is 0"""
    weight: Tensor
    """(T,) what multiplies a row's loss: its token weight or 1, and 0 in ignored rows"""
    s: Tensor
    """(T,) upstream · weight / D, 0 in ignored rows"""
    at_target: Tensor | None
    """(T,) the class weight of each row's target; None without class weights"""
    divisors: tuple[Tensor, Tensor] | Tensor | None
    """D and D_z, () each: what "mean" divides the sums of the cross-entropies and of the z terms by; None for 1"""
    counts: Tensor
    """(2,) int64 how many rows are valid, and how many have a wrong target"""
    is_right: Tensor | None
    """One element, not 0 if no target is wrong; None: the counts say it"""
    order: Tensor | None
    """(T,) int64 the tokens, valid ones first, both kinds ascending; only where asked for"""


class RowKernels(Protocol):
    """Row-wise computations, of at least one row and one column. Row vectors are (C,), in the row dtype.

    Statistics are of the same rows as the logits; class weights are (V,) in the row dtype, None for ones.
    """

    logit_map: LogitMap

    def statistics(self, z: Tensor, target: Tensor | None = None) -> tuple[RowStatistics, Tensor | None]:
        """The maximum of each row, and the log of the sum of exponentials relative to it.

        With a `target` (C,) int64, each row's column, also z there, (C,) in z's dtype.
        """

    def moments(
        self, z: Tensor, statistics: RowStatistics, class_weight: Tensor | None, names: tuple[str, ...]
    ) -> dict[str, Tensor]:
        """Sums over each row, (C,) by name, at least one of `operation.moments.MOMENTS`."""

    def gradient_(
        self, z: Tensor, statistics: RowStatistics, coefficients: RowCoefficients, *,
        class_weight: Tensor | None = None, out: Tensor, target: Tensor | None = None, column_sums: bool = False,
    ) -> Tensor | None:  # fmt: skip
        """Writes the gradient of `RowCoefficients` without its one_hot term to `out` (C, V), and sums it over the rows.

        `out` is z itself, or other memory, and z stays. With a `target` (C,) int64, -1 for none of these columns, that
        column gets the gradient with its one_hot term: `gradient`. The sums, (V,) in the row dtype, are of what
        is written before it is rounded; None unless `column_sums`.
        """

    def both_(self, z: Tensor, target: Tensor, coefficients: RowCoefficients) -> tuple[RowStatistics, Tensor]:
        """Everything at once, where coefficients need no statistics and consist of `probability` and `one_hot`.

        The gradient, with its one_hot term, takes the place of z. `target` is (C,) int64, each row's column. Returned
        are the statistics and, (C,) in z's dtype or the row dtype, z at each row's target.
        """


def gradient(
    z: Tensor, logit_map: LogitMap, statistics: RowStatistics, coefficients: RowCoefficients, *,
    class_weight: Tensor | None = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The gradient of `RowCoefficients` by PyTorch's operations, of z in the row dtype and what broadcasts to it.

    With the one_hot term it is that at a row's target, in which p - 1 keeps its digits where A = B. In `out`, which may
    be z, if it is given.
    """
    row_max, row_log_sum = statistics
    factor, one_hot, uniform, entropy = coefficients
    slope = logit_map.slope(z)
    shifted = torch.sub(logit_map(z), row_max, out=out)
    if one_hot is None and entropy is None:
        result = shifted.sub_(row_log_sum).exp_().mul_(factor)
    else:
        log_p = shifted - row_log_sum
        p = log_p.exp()
        result = p * factor
        if one_hot is not None:
            result = torch.where(p > 0.5, log_p.expm1_() * factor + (factor - one_hot), result - one_hot)
        if entropy is not None:
            result = torch.sub(result, finite(shifted).mul_(p).mul_(entropy), out=out)
    if uniform is not None:
        result.sub_(uniform if class_weight is None else uniform * class_weight)
    return result if slope is None else result.mul_(slope)


def write_at_targets_(out: Tensor, target: Tensor, entry: Tensor) -> None:
    """Writes the entries (C,) into out (C, V), at each row's target (C,) unless that is -1."""
    at = target.clamp(min=0)[:, None]
    out.scatter_(1, at, torch.where(target[:, None] < 0, out.gather(1, at), entry[:, None].to(out.dtype)))


def at_columns(z: Tensor, column: Tensor) -> Tensor:
    """(C,) z (C, V) at a column of each row."""
    return z.gather(1, column[:, None]).squeeze(1)


def finite(shifted: Tensor) -> Tensor:
    """Logits of -inf become the lowest finite number, in new memory: their probability, 0, times it is 0."""
    return shifted.clamp(min=torch.finfo(shifted.dtype).min)


def padded_weight(class_weight: Tensor | None, stride: int) -> Tensor | None:
    """Class weights (V,) as a row of logits lies in memory: (stride,), contiguous."""
    if class_weight is None:
        return None
    padding = stride - class_weight.shape[0]
    return (torch.nn.functional.pad(class_weight, (0, padding)) if padding else class_weight).contiguous()


def row_stride(vocab: int, *, dtype: torch.dtype, device_type: str) -> int:
    """Elements from one row of logits to the next, as the kernels for this dtype and device read them fastest.

    There is padding only where V leaves no choice.
    """
    is_aligned = vocab % ROW_MULTIPLE == 0 or device_type != "cuda" or dtype is torch.float64
    return vocab if is_aligned else -(-vocab // PADDED_ROW_MULTIPLE) * PADDED_ROW_MULTIPLE


def empty_logits(
    rows: int, vocab: int, *, dtype: torch.dtype, device: torch.device | str, device_type: str | None = None
) -> Tensor:
    """(rows, V), uninitialised; `device_type` is whose layout they get, where `device` is another, as "meta" is."""
    stride = row_stride(vocab, dtype=dtype, device_type=device_type or torch.device(device).type)
    memory = torch.empty(rows, stride, dtype=dtype, device=device)
    return memory if stride == vocab else memory[:, :vocab]


def whole_rows(z: Tensor) -> Tensor:
    """(C, stride), contiguous: logits with their padding."""
    stride = z.stride(0)
    return z if stride == z.shape[1] else z.as_strided((z.shape[0], stride), (stride, 1))
