"""Formulas of the operation, the cross-entropy of a linear layer's output.

In PyTorch's operations, the mean over targets that are not ignored is:

    def linear_cross_entropy(x, W, b, y, *, ignore_index, label_smoothing, scale, softcap, z_loss):
        u = F.linear(x, W, b).float() * scale
        u = u if softcap is None else softcap * torch.tanh(u / softcap)
        loss = F.cross_entropy(u, y, ignore_index=ignore_index, label_smoothing=label_smoothing)
        return loss + z_loss * u.logsumexp(1)[y != ignore_index].square().mean()

For the linear's output z (N, V), the logits u (N, V), the targets y (N,), class weights w (V,) (1 if there are none),
label smoothing ε and z-loss ζ:

    u = softcap · tanh(scale · z / softcap)                           scale · z without a softcap
    m = max_v u_v,  l = log Σ_v exp(u_v − m),  p_v = exp(u_v − m − l)
    cross_entropy = (1 − ε) w_y (l − (u_y − m)) + ε/V (l Σ_v w_v − Σ_v w_v (u_v − m))
    z_term = ζ (m + l)²
    loss = (Σ cross_entropy) / D + (Σ z_term) / N     for "mean": D = Σ w_y, without class weights N; or both num_items

A token loss f(log p_y, entropy, m + l, ū), with ū = Σ_v u_v / V, replaces the cross-entropy. The upstream gradient g of
the cross-entropy then contributes g times the derivatives of f to g_p, g_e, g_l and g_u.

Token weights multiply each row's cross_entropy and z_term. D is then the sum of their products with w_y, and N is their
sum. cross_entropy, and D without token weights, are as `torch.nn.functional.cross_entropy` defines them. Let g, g_z,
g_p, g_e, g_l and g_u be the upstream gradients of a row's cross-entropy, z term, log-probability, entropy, log-sum-exp
and mean logit. The gradient of z is

    dz_v = (p_v (A − g_e (u_v − m)) − C w_v − B [v = y]) · scale · (1 − (u_v / softcap)²)
    A = g ((1 − ε) w_y + ε/V Σ w) + 2 ζ g_z (m + l) − g_p + g_e E + g_l,   B = g (1 − ε) w_y − g_p,   C = g ε/V
    E = Σ_v p_v (u_v − m)

where g_u / V is subtracted from C; w_v is 1 in C w_v without smoothing, and g_u is 0 with both smoothing and class
weights. So a kernel needs at most four numbers per row. With target weights q, a row has targets y_1 … y_K, and neither
class weights nor smoothing:

    cross_entropy = Σ_k q_k (l − (u_{y_k} − m))
    A = g Σ_k q_k + 2 ζ g_z (m + l) + g_e E + g_l,   B [v = y] becomes Σ_k g q_k [v = y_k]

All terms are relative to m, so that the loss keeps its digits when all logits share a large offset. So that loss and
gradient keep their digits if one column dominates, kernels compute l as log1p of the sum without m's own term, 1, and
p_y A − B as (p_y − 1) A + (A − B) with expm1.

The functions below are these formulas. Legend: N rows, V vocabulary.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from typing import Any, ClassVar, NamedTuple

import torch

from thunder_flce.operation.divergence import Divergence
from thunder_flce.operation.pointwise import VARIABLES, TokenLoss, uses
from thunder_flce.options import PlainValues, plain


@dataclass(frozen=True)
class LogitMap:
    """Maps the linear's output z to the logits u = softcap · tanh(scale · z / softcap)."""

    scale: float = 1.0
    softcap: float | None = None
    """None: u = scale · z"""

    def __call__(self, z: torch.Tensor) -> torch.Tensor:
        """Returns u; z itself if there is neither a softcap nor a scale."""
        if self.softcap is not None:
            return torch.tanh(z * (self.scale / self.softcap)) * self.softcap
        return z if self.scale == 1 else z * self.scale

    def slope(self, z: torch.Tensor) -> torch.Tensor | None:
        """Returns 1 − (u / softcap)², the softcap's factor of the gradient, without the scale; None without a softcap.

        It is computed from z as 1 / cosh², which keeps its digits for u near the softcap.
        """
        return None if self.softcap is None else (z * (self.scale / self.softcap)).cosh().square().reciprocal()


class Row(NamedTuple):
    """Statistics of rows of logits, (N,) each; None if the loss does not need them."""

    max: Any
    """m"""
    log_sum: Any
    """l, so that m + l is the row's log-sum-exp"""
    target_logit: Any
    """u_y; (N, K) with target weights"""
    moments: dict[str, Any]
    """Sums over the row, by their names in `moments.MOMENTS`"""
    argmax: Any | None = None
    """Column of the largest logit"""
    divergence: Any | None = None
    """Divergence from the teacher"""

    def of_targets(self) -> "Row":
        """Returns the row with its statistics in the shape of the target logits, of which there may be K."""
        if self.target_logit.ndim == self.max.ndim:
            return self
        return self._replace(max=self.max.unsqueeze(-1), log_sum=self.log_sum.unsqueeze(-1))


@dataclass(frozen=True)
class Output:
    """A result that can be returned with the loss, computed from each row's statistics."""

    compute: Callable[[Row, int], Any]
    """Computes it from the row's statistics and the number of columns."""
    moments: tuple[str, ...] = ()
    """Sums over the row that it needs, by their names in `moments.MOMENTS`."""
    is_index: bool = False
    """Whether it is a column of the vocabulary, int64."""
    is_mean: bool = False
    """Whether it is one number, the mean over the valid rows of whether the target is the argmax."""
    ignored: int | None = 0
    """Value in ignored rows; None if ignored rows are computed, too."""
    is_per_target: bool = False
    """Whether it has a number for each of a row's K targets."""


def _log_prob(row: Row, columns: int) -> Any:
    row = row.of_targets()
    return row.target_logit - row.max - row.log_sum


def _max_logit(row: Row, columns: int) -> Any:
    # Triton's maximum leaves out NaN, which the sum has. The sum is also NaN beside an infinite maximum.
    return torch.where(row.log_sum.isnan() & (row.max != math.inf), row.log_sum, row.max)


OUTPUTS = {
    "log_prob": Output(_log_prob, is_per_target=True),
    "entropy": Output(lambda row, columns: row.log_sum - row.moments["expected"], ("expected",)),
    "log_sum_exp": Output(lambda row, columns: row.max + row.log_sum),
    "argmax": Output(lambda row, columns: row.argmax, is_index=True, ignored=None),
    "valid_argmax": Output(lambda row, columns: row.argmax, is_index=True, ignored=-1),
    "accuracy": Output(lambda row, columns: row.argmax, is_mean=True),
    "mean_logit": Output(lambda row, columns: row.max + row.moments["shifted_sum"] / columns, ("shifted_sum",)),
    "max_logit": Output(_max_logit),
    "divergence": Output(lambda row, columns: row.divergence),
    "log_sum_sq_probs": Output(lambda row, columns: torch.log(row.moments["sum_sq"]), ("sum_sq",)),
}
DIFFERENTIABLE_OUTPUTS = VARIABLES
"""Outputs with a gradient. They are the variables of a token loss, whose gradient is computed through them."""
NOTHING_IGNORED = -(2**62) - 1
"""The `ignore_index` of losses that ignore nothing: a 64-bit number that no program uses as a target."""


@dataclass(frozen=True, kw_only=True)
class Loss(PlainValues):
    """All arguments of the loss that are plain values, as `functional.linear_cross_entropy` describes them."""

    written_always: ClassVar = ("reduction", "ignore_index")

    reduction: str = "mean"
    ignore_index: int = -100
    label_smoothing: float = 0.0
    logit_scale: float = 1.0
    softcap: float | None = None
    z_loss: float = 0.0
    vocab_size: int | None = None
    outputs: tuple[str, ...] = ()
    detached: tuple[str, ...] = ()
    """Differentiable outputs through which no gradient flows, for example because they are only logged."""
    token_loss: TokenLoss = ""
    """Function of a row that replaces its cross-entropy; "" for the cross-entropy."""
    divergence: Divergence | None = None
    """Divergence of a student from a teacher that replaces the cross-entropy; None for the cross-entropy."""

    @cached_property
    def logit_map(self) -> LogitMap:
        """The map from the linear's output to the logits."""
        return LogitMap(scale=self.logit_scale, softcap=self.softcap)

    @cached_property
    def maps_logits(self) -> bool:
        """Whether the logits differ from the linear's output."""
        return self.softcap is not None or self.logit_scale != 1

    @cached_property
    def is_plain(self) -> bool:
        """Whether A and B are known before a row's statistics, C is 0, and no output needs more than these."""
        replacement = self.token_loss or self.divergence
        return not (self.label_smoothing or self.z_loss or self.moments or self.needs_argmax or replacement)

    @cached_property
    def differentiable_outputs(self) -> tuple[str, ...]:
        """Names of the outputs through which a gradient may flow."""
        if self.token_loss:
            return ()
        return tuple(name for name in DIFFERENTIABLE_OUTPUTS if name in self.outputs and name not in self.detached)

    @cached_property
    def has_parallel_row_gradients(self) -> bool:
        """Whether a row's gradients of all results are multiples of one vector: A = B, and C and g_e are 0.

        Log-probabilities of K targets have one vector for each.
        """
        other_outputs = set(self.differentiable_outputs) - {"log_prob"}
        return not (self.label_smoothing or self.z_loss or other_outputs or self.divergence)

    @cached_property
    def ignores_rows(self) -> bool:
        """Whether there is a value of the target for which a row is ignored."""
        return self.ignore_index != NOTHING_IGNORED

    @cached_property
    def has_row_gradients(self) -> bool:
        """Whether upstream gradients are one number per row, which must be known before sums over rows."""
        return self.reduction == "none" or bool(self.differentiable_outputs)

    @cached_property
    def moments(self) -> tuple[str, ...]:
        """Names in `moments.MOMENTS` of the sums over each row that the loss and its outputs need."""
        needed = [moment for name in self.outputs for moment in OUTPUTS[name].moments]
        needed += ["weighted_sum"] if self.label_smoothing else []
        needed += [moment for name in VARIABLES if uses(self.token_loss, name) for moment in OUTPUTS[name].moments]
        return tuple(dict.fromkeys(needed))

    @cached_property
    def needs_argmax(self) -> bool:
        """Whether the column of each row's largest logit is needed."""
        return any(OUTPUTS[name].is_index or OUTPUTS[name].is_mean for name in self.outputs)

    @cached_property
    def needs_every_row(self) -> bool:
        """Whether ignored rows have to be computed, because an output has their values, too."""
        return any(OUTPUTS[name].ignored is None for name in self.outputs)

    def cross_entropy(
        self, row: Row, columns: int, *, at_target: Any = None, total: Any = None, target_weights: Any = None
    ) -> Any:
        """Returns each row's cross-entropy, (N,).

        Args:
            row: statistics of the rows.
            columns: number of columns.
            at_target: (N,) w_y; None without class weights.
            total: Σ w, or `columns` without class weights; needed for smoothing only.
            target_weights: (N, K) weights of K targets, 0 for ignored ones.
        """
        if target_weights is not None:
            # The loss of a target of weight 0 may be infinite.
            losses = torch.where(target_weights == 0, 0.0, self.cross_entropy(row.of_targets(), columns))
            return (target_weights * losses).sum(-1)
        # In this order, the loss keeps its digits when all logits share a large offset. It is clamped because a
        # kernel's softcap may differ from PyTorch's in the last digit, which must not make a loss negative.
        value = row.log_sum - (row.target_logit - row.max).clamp(max=0)
        if at_target is not None:
            value = at_target * value
        if self.label_smoothing:
            smooth = row.log_sum * total - row.moments["weighted_sum"]
            value = (1 - self.label_smoothing) * value + self.label_smoothing / columns * smooth
        return value

    def z_term(self, row: Row) -> Any | None:
        """Returns the z-loss of each row, (N,); None without a z-loss."""
        return self.z_loss * (row.max + row.log_sum).square() if self.z_loss else None


LOSS_ARGUMENTS = tuple(field.name for field in fields(Loss) if field.name != "divergence")
"""Names of the arguments of `functional.linear_cross_entropy` that are fields of `Loss`"""

_loss = lru_cache(maxsize=4096, typed=True)(Loss)
_PLAIN_TYPES = frozenset((int, float, bool, str, tuple, type(None)))


def loss_of(**fields: Any) -> Loss:
    """Returns the loss with these fields: the same object for equal fields of the same types."""
    if not _PLAIN_TYPES.issuperset(map(type, fields.values())):
        fields = {name: plain(value) for name, value in fields.items()}
    try:
        return _loss(**fields)
    except TypeError:  # A field is not hashable; the checks will name it.
        return Loss(**fields)


class RowCoefficients(NamedTuple):
    """Coefficients of a row's gradient in the formula above; the other inputs are its logits and statistics."""

    probability: Any
    """A"""
    one_hot: Any
    """B; with target weights (N, K), one for each target"""
    uniform: Any | None = None
    """C; None without label smoothing and without an upstream gradient of the mean logit"""
    entropy: Any | None = None
    """g_e; None without an upstream gradient of the entropy"""


def row_coefficients(
    loss: Loss, upstream: Any, columns: int, *, at_target: Any, total: Any, target_weights: Any
) -> RowCoefficients:
    """Returns the terms of A, B and C that depend only on the upstream gradient of each row's cross-entropy, (N,).

    The other arguments are as for `Loss.cross_entropy`.
    """
    if target_weights is not None:
        return RowCoefficients(upstream * target_weights.sum(-1), upstream.unsqueeze(-1) * target_weights)
    one_hot = probability = upstream if at_target is None else upstream * at_target
    if not loss.label_smoothing:
        return RowCoefficients(probability, one_hot)
    one_hot = (1 - loss.label_smoothing) * one_hot
    if at_target is not None:
        probability = one_hot + upstream * (total * (loss.label_smoothing / columns))
    return RowCoefficients(probability, one_hot, upstream * (loss.label_smoothing / columns))
