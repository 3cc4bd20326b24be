"""The loss of each row and its gradient, as formulas over vectors of one number a row.

Definition, for the products z (N, V), their map to logits u (N, V), the targets y (N,), class weights w (V,) (1 where
there are none), label smoothing ε over K columns and z-loss ζ:

    u = softcap · tanh(scale · z / softcap)                           scale · z without a softcap
    m = max_v u_v,  l = log Σ_v exp(u_v − m),  p_v = exp(u_v − m − l)
    cross_entropy = (1 − ε) w_y (l − (u_y − m)) + ε/K (l Σ_v w_v − Σ_v w_v (u_v − m))
    z_term = ζ (m + l)²
    loss = (Σ cross_entropy) / D + (Σ z_term) / N     for "mean": D = Σ w_y without class weights N; or both num_items
    log_prob = u_y − m − l
    entropy = l − E,  E = Σ_v p_v (u_v − m)

The first is `torch.nn.functional.cross_entropy`'s own definition. With g, g_z, g_p and g_e the gradients that arrive at
a row's four terms, the gradient of z is

    dz_v = (p_v (A − g_e (u_v − m)) − C w_v − B [v = y]) · scale · (1 − (u_v / softcap)²)
    A = g ((1 − ε) w_y + ε/K Σ w) + 2 ζ g_z (m + l) − g_p + g_e E,   B = g (1 − ε) w_y − g_p,   C = g ε/K

so that a kernel needs at most four numbers a row: `RowCoefficients`. Everything is relative to m, so that the loss
keeps its digits when all logits share a large offset. Legend: N rows, V vocabulary.
"""

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thunder_flce.execution.row_kernels.interface import LogitMap, RowCoefficients, RowStatistics
from thunder_flce.execution.row_selection import Rows

DIFFERENTIABLE_OUTPUTS = ("log_prob", "entropy")
INDEX_OUTPUTS = ("argmax", "valid_argmax")
OUTPUTS = (*DIFFERENTIABLE_OUTPUTS, *INDEX_OUTPUTS, "accuracy")


@dataclass(frozen=True, kw_only=True)
class Loss:
    """Which loss: everything that is a plain value, as `functional.linear_cross_entropy` describes it."""

    reduction: str = "mean"
    ignore_index: int = -100
    label_smoothing: float = 0.0
    logit_scale: float = 1.0
    softcap: float | None = None
    z_loss: float = 0.0
    vocab_size: int | None = None
    outputs: tuple[str, ...] = ()

    def chosen(self) -> dict[str, Any]:
        """What a trace carries: the reduction, ignore_index, and the other fields that differ from their defaults."""
        always = ("reduction", "ignore_index")
        return {f.name: v for f in fields(self) if (v := getattr(self, f.name)) != f.default or f.name in always}

    @property
    def logit_map(self) -> LogitMap:
        """From the products to the logits."""
        return LogitMap(scale=self.logit_scale, softcap=self.softcap)

    @property
    def is_plain(self) -> bool:
        """Whether there is neither smoothing, nor a z-loss, nor any further output.

        Then C is 0, A and B are known before the statistics, and nothing else is asked of a row.
        """
        return not (self.label_smoothing or self.z_loss or self.outputs)

    @property
    def has_row_gradients(self) -> bool:
        """Whether incoming gradients are one number a row, to be known before anything is summed over rows."""
        return self.reduction == "none" or any(name in DIFFERENTIABLE_OUTPUTS for name in self.outputs)

    @property
    def needs_entropy(self) -> bool:
        """Whether each row's entropy is asked for."""
        return "entropy" in self.outputs

    @property
    def needs_argmax(self) -> bool:
        """Whether each row's largest logit must be found by its column."""
        return any(name in (*INDEX_OUTPUTS, "accuracy") for name in self.outputs)

    @property
    def needs_every_row(self) -> bool:
        """Whether something is asked for of ignored rows, too, so that they have to be computed."""
        return "argmax" in self.outputs


class ClassWeights(NamedTuple):
    """Weights of the classes, in the dtype of the rows."""

    columns: Tensor
    """(V,)"""
    at_target: Tensor
    """(N,) each row's weight, that of its target"""
    total: Tensor
    """() the sum over the vocabulary"""

    @classmethod
    def of(cls, weight: Tensor | None, target: Tensor, dtype: torch.dtype) -> "ClassWeights | None":
        """From the argument `weight`, (V,), and the rows' targets, (N,)."""
        if weight is None:
            return None
        columns = weight.detach().to(dtype)
        return cls(columns, columns[target], columns.sum())


class Divisors(NamedTuple):
    """What the sums over rows are divided by; None for reductions "sum" and "none"."""

    cross_entropy: Tensor | None
    """()"""
    z_term: Tensor | None
    """()"""

    @classmethod
    def of(cls, loss: Loss, rows: Rows, weights: ClassWeights | None, num_items: Tensor | None) -> "Divisors":
        """num_items, () or None, takes the place of both; where it is 0, everything divided becomes 0."""
        if loss.reduction != "mean":
            return cls(None, None)
        if num_items is not None:
            divisor = torch.where(num_items == 0, float("inf"), num_items)
            return cls(divisor, divisor)
        if weights is None:
            return cls(rows.valid_count, rows.valid_count)
        return cls(rows.only_valid(weights.at_target).sum(), rows.valid_count)


class RowTerms(NamedTuple):
    """The terms of each row's loss."""

    cross_entropy: Tensor
    """(N,)"""
    z_term: Tensor | None
    """(N,); None without z-loss"""


def row_terms(
    loss: Loss,
    rows: Rows,
    statistics: RowStatistics,
    target_logit: Tensor,
    weighted_sum: Tensor | None,
    weights: ClassWeights | None,
    vocab: int,
) -> RowTerms:
    """The terms of each row's loss, 0 where a row is ignored.

    Args:
        loss: which loss.
        rows: the rows that are computed.
        statistics: two (N,).
        target_logit: (N,) u_y.
        weighted_sum: (N,) Σ_v w_v (u_v − m); only with label smoothing.
        weights: the class weights, if there are any.
        vocab: K, the number of columns.
    """
    row_max, row_log_sum = statistics
    # In this order the loss keeps its digits when all logits share a large offset. A kernel's softcap may differ from
    # PyTorch's in its last digit, which must not make a loss negative.
    cross_entropy = row_log_sum - (target_logit - row_max).clamp(max=0)
    if weights is not None:
        cross_entropy = cross_entropy * weights.at_target
    if loss.label_smoothing:
        total = vocab if weights is None else weights.total
        smooth = row_log_sum * total - weighted_sum
        cross_entropy = (1 - loss.label_smoothing) * cross_entropy + loss.label_smoothing / vocab * smooth
    z_term = rows.only_valid(loss.z_loss * (row_max + row_log_sum).square()) if loss.z_loss else None
    return RowTerms(rows.only_valid(cross_entropy), z_term)


def reduce_terms(loss: Loss, terms: RowTerms, divisors: Divisors) -> Tensor:
    """() the loss or, for reduction "none", (N,); the mean over no row is NaN, as in `torch.nn.functional`."""
    if loss.reduction == "none":
        return terms.cross_entropy if terms.z_term is None else terms.cross_entropy + terms.z_term
    sums = [None if term is None else term.sum() for term in terms]
    if loss.reduction == "mean":
        sums = [None if s is None else s / divisor for s, divisor in zip(sums, divisors, strict=True)]
    cross_entropy, z_term = sums
    return cross_entropy if z_term is None else cross_entropy + z_term


class IncomingGradients(NamedTuple):
    """What arrives from behind; None where nothing does."""

    loss: Tensor | None
    """() or, for reduction "none", (T,)"""
    log_prob: Tensor | None = None
    """(T,)"""
    entropy: Tensor | None = None
    """(T,)"""


class RowGradients:
    """Gives each chunk of rows its `RowCoefficients`.

    Args:
        loss: which loss.
        rows: the rows that are computed.
        incoming: gradients of the region's outputs.
        divisors: as in the forward.
        weights: the class weights, if there are any.
        vocab: K, the number of columns.
        dtype: of everything that is one number a row.
    """

    def __init__(
        self,
        loss: Loss,
        rows: Rows,
        incoming: IncomingGradients,
        divisors: Divisors,
        weights: ClassWeights | None,
        vocab: int,
        dtype: torch.dtype,
    ):
        self._loss = loss

        def of_rows(grad: Tensor | None, divisor: Tensor | None = None) -> Tensor:
            """(N,) an incoming gradient, 0 where rows are ignored."""
            if grad is None:
                return torch.zeros(rows.count, dtype=dtype, device=rows.target.device)
            grad = grad.to(dtype)
            grad = grad.expand(rows.count) if grad.ndim == 0 else rows.gather(grad.reshape(-1))
            return rows.only_valid(grad if divisor is None else grad / divisor).contiguous()

        smoothing = loss.label_smoothing
        grad = of_rows(incoming.loss, divisors.cross_entropy)
        self._probability = self._one_hot = grad
        if weights is not None:
            self._one_hot = grad * weights.at_target
            self._probability = self._one_hot
        if smoothing:
            self._one_hot = (1 - smoothing) * self._one_hot
            if weights is not None:
                self._probability = self._one_hot + grad * (weights.total * (smoothing / vocab))
        self._uniform = grad * (smoothing / vocab) if smoothing else None
        self._z_term = 2 * loss.z_loss * of_rows(incoming.loss, divisors.z_term) if loss.z_loss else None
        if incoming.log_prob is not None:
            log_prob = of_rows(incoming.log_prob)
            self._probability = self._probability - log_prob
            self._one_hot = self._one_hot - log_prob
        self._entropy = None if incoming.entropy is None else of_rows(incoming.entropy)

    def coefficients(
        self, chunk: slice, statistics: RowStatistics | None, entropy: Tensor | None = None
    ) -> RowCoefficients:
        """The chunk's coefficients.

        Args:
            chunk: which rows.
            statistics: (C,) of these rows; may be None where `Loss.is_plain`.
            entropy: (C,) of these rows; None where no gradient arrives at the entropy.
        """
        probability, one_hot = self._probability[chunk], self._one_hot[chunk]
        uniform = None if self._uniform is None else self._uniform[chunk]
        entropy_grad = None if self._entropy is None else self._entropy[chunk]
        if self._z_term is not None:
            probability = probability + self._z_term[chunk] * (statistics.row_max + statistics.row_log_sum)
        if entropy_grad is not None:
            probability = probability + entropy_grad * (statistics.row_log_sum - entropy)
        scale = self._loss.logit_scale
        coefficients = RowCoefficients(probability, one_hot, uniform, entropy_grad)
        if scale == 1:
            return coefficients
        return RowCoefficients(*(None if vector is None else vector * scale for vector in coefficients))
