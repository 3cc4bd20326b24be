"""The interface of the row kernels: statistics, moments and, in place, the gradient of each row of logits.

Three complete backends implement it: `torch_rows`, `triton_rows` and `nvfuser_rows`; `dispatch` chooses one. The
formulas are those of `operation.loss`. Legend: C rows, V vocabulary. Kernels read the linear's output z (C, V) and map
it to logits u (`LogitMap`) in the row dtype, float32 (float64 for float64).

Rows of z are `z.stride(0)` elements apart, and the last dimension is contiguous. The padding, between V and the stride,
belongs to the same memory, so kernels may write there.
"""

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from thunder_flce.device import PADDED_ROW_MULTIPLE, ROW_MULTIPLE
from thunder_flce.operation.loss import LogitMap, RowCoefficients


class RowStatistics(NamedTuple):
    """Two numbers a row that add up to its log-sum-exp, apart so that the loss keeps digits under a large offset."""

    row_max: Tensor
    """(C,) the largest logit"""
    row_log_sum: Tensor
    """(C,) log of the sum of exp(logit - row_max): the log-sum-exp relative to the maximum. Accurate near 0, too: it is
    the log1p of the sum without the maximum's own exponential, 1"""

    def rows(self, rows: Any) -> "RowStatistics":
        """Returns the statistics of some rows, given as an index of a vector."""
        return RowStatistics(self.row_max[rows], self.row_log_sum[rows])


class LabelTerm(NamedTuple):
    """A cross-entropy beside a divergence, (C,) each."""

    target: Tensor
    """Column of each row"""
    statistics: RowStatistics
    """Those of the student's logits at temperature 1"""
    factors: Tensor
    """The factor of each row's gradient"""


class TokenVectors(NamedTuple):
    """Vectors that depend on the targets of all tokens but not on their logits."""

    target: Tensor
    """(T,) or (T, K) int64 in [0, V); 0 for ignored targets, arbitrary where only the token weight is 0"""
    row_factor: Tensor
    """(T,) the factor of a row's loss: its token weight or 1; 0 for ignored rows"""
    s: Tensor
    """(T,) upstream · row_factor / D; 0 for ignored rows"""
    at_target: Tensor | None
    """(T,) the class weight of each row's target; None without class weights"""
    target_weights: Tensor | None
    """(T, K) the weight of each of a row's targets, 0 for ignored ones; None without target weights"""
    divisors: tuple[Tensor, Tensor] | Tensor | None
    """D and D_z, () each: the divisors of the sums of cross-entropies and of z terms, for "mean"; None for 1"""
    counts: Tensor
    """(2,) int64 number of valid rows, and of rows with a wrong target"""
    is_right: Tensor | None
    """One element, not 0 if no target is wrong; None: see the counts"""


PER_TOKEN = 5
"""The number of first fields of `TokenVectors` that have an entry for each token."""


class RowKernels(Protocol):
    """Row-wise computations on at least one row and one column. Row vectors are (C,), in the row dtype.

    Statistics belong to the same rows as the logits. Class weights are (V,) in the row dtype; None stands for ones.
    """

    logit_map: LogitMap

    def statistics(self, z: Tensor, target: Tensor | None = None) -> tuple[RowStatistics, Tensor | None]:
        """Returns each row's maximum, and the log of the sum of exponentials relative to it.

        With a `target` (C,) int64, a column for each row, also returns z there, (C,) in z's dtype.
        """

    def moments(
        self, z: Tensor, statistics: RowStatistics, class_weight: Tensor | None, names: tuple[str, ...]
    ) -> dict[str, Tensor]:
        """Returns sums over each row, (C,) each, by their `names` in `operation.moments.MOMENTS`, at least one."""

    def gradient_(
        self, z: Tensor, statistics: RowStatistics, coefficients: RowCoefficients, *,
        class_weight: Tensor | None = None, out: Tensor, target: Tensor | None = None, column_sums: bool = False,
    ) -> Tensor | None:  # fmt: skip
        """Writes the gradient of `RowCoefficients` without the one_hot term to `out` (C, V), and sums it over the rows.

        `out` is z itself, or another tensor; z then stays as it is. With a `target` (C,) int64, -1 for none of these
        columns, the target's entry has the one_hot term, too: see `gradient`. With `column_sums`, returns the sums,
        (V,) in the row dtype, of the entries before they are rounded, otherwise None.
        """

    def one_pass_(self, z: Tensor, target: Tensor, coefficients: RowCoefficients) -> tuple[RowStatistics, Tensor]:
        """Computes statistics and gradient at once, for coefficients that consist of `probability` and `one_hot`.

        The gradient, with the one_hot term, overwrites z. `target` is (C,) int64, a column for each row. Returns the
        statistics, and z at each row's target, (C,) in z's dtype or the row dtype.
        """


def gradient(
    z: Tensor, logit_map: LogitMap, statistics: RowStatistics, coefficients: RowCoefficients, *,
    class_weight: Tensor | None = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Returns the gradient of `RowCoefficients` by PyTorch's operations; z has the row dtype, other vectors broadcast.

    With `coefficients.one_hot`, z is the entry at each row's target, and p - 1 keeps its digits where A = B. Without,
    the result is written to `out`, if given, which may be z.
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
    """Writes each row's entry (C,) into out (C, V) at the row's target (C,), unless the target is -1."""
    column = target.clamp(min=0)[:, None]
    out.scatter_(1, column, torch.where(target[:, None] < 0, out.gather(1, column), entry[:, None].to(out.dtype)))


def at_columns(z: Tensor, column: Tensor) -> Tensor:
    """Returns z (C, V) at one column of each row, (C,)."""
    return z.gather(1, column[:, None]).squeeze(1)


def finite(shifted: Tensor) -> Tensor:
    """Returns a copy with -inf replaced by the lowest finite number, whose product with the probability 0 is 0."""
    return shifted.clamp(min=torch.finfo(shifted.dtype).min)


def padded_weight(class_weight: Tensor | None, stride: int) -> Tensor | None:
    """Returns class weights (V,) padded to the stride of a row of logits: (stride,), contiguous."""
    if class_weight is None:
        return None
    padding = stride - class_weight.shape[0]
    return (torch.nn.functional.pad(class_weight, (0, padding)) if padding else class_weight).contiguous()


def row_stride(vocab: int, *, dtype: torch.dtype, device_type: str) -> int:
    """Returns the stride of rows of logits with which the kernels for this dtype and device are fastest.

    Rows are padded only if V is no multiple of `ROW_MULTIPLE`, and only on CUDA for dtypes other than float64.
    """
    is_aligned = vocab % ROW_MULTIPLE == 0 or device_type != "cuda" or dtype is torch.float64
    return vocab if is_aligned else -(-vocab // PADDED_ROW_MULTIPLE) * PADDED_ROW_MULTIPLE


def empty_logits(
    rows: int, vocab: int, *, dtype: torch.dtype, device: torch.device | str, device_type: str | None = None
) -> Tensor:
    """Returns an uninitialised (rows, V) tensor, laid out for `device_type` if `device` is another, such as "meta"."""
    stride = row_stride(vocab, dtype=dtype, device_type=device_type or torch.device(device).type)
    memory = torch.empty(rows, stride, dtype=dtype, device=device)
    return memory if stride == vocab else memory[:, :vocab]


def whole_rows(z: Tensor) -> Tensor:
    """Returns the logits with their padding: (C, stride), contiguous."""
    stride = z.stride(0)
    return z if stride == z.shape[1] else z.as_strided((z.shape[0], stride), (stride, 1))
