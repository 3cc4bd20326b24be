"""The operation: cross-entropy of a linear layer's output. What it computes, as formulas.

As PyTorch operations, for the mean over targets that are not ignored:

    def linear_cross_entropy(x, W, b, y, *, ignore_index, label_smoothing, scale, softcap, z_loss):
        u = F.linear(x, W, b).float() * scale
        u = u if softcap is None else softcap * torch.tanh(u / softcap)
        loss = F.cross_entropy(u, y, ignore_index=ignore_index, label_smoothing=label_smoothing)
        return loss + z_loss * u.logsumexp(1)[y != ignore_index].square().mean()

For the linear's output z (N, V), the logits u (N, V), the targets y (N,), class weights w (V,) (1 where there are
none), label smoothing ε and z-loss ζ:

    u = softcap · tanh(scale · z / softcap)                           scale · z without a softcap
    m = max_v u_v,  l = log Σ_v exp(u_v − m),  p_v = exp(u_v − m − l)
    cross_entropy = (1 − ε) w_y (l − (u_y − m)) + ε/V (l Σ_v w_v − Σ_v w_v (u_v − m))
    z_term = ζ (m + l)²
    loss = (Σ cross_entropy) / D + (Σ z_term) / N     for "mean": D = Σ w_y, without class weights N; or both num_items

A token loss f(log p_y, entropy, m + l, ū), with ū = Σ_v u_v / V, takes the place of the cross-entropy, whose g is then
g f' in g_p, g_e, g_l and g_u.

Token weights multiply each row's cross_entropy and z_term; then D is the sum of their products with w_y, N their sum.
The first is `torch.nn.functional.cross_entropy`'s own definition. With g, g_z, g_p, g_e, g_l and g_u the upstream
gradients of a row's cross-entropy, z term, log-probability, entropy, log-sum-exp and mean logit, the gradient of z is

    dz_v = (p_v (A − g_e (u_v − m)) − C w_v − B [v = y]) · scale · (1 − (u_v / softcap)²)
    A = g ((1 − ε) w_y + ε/V Σ w) + 2 ζ g_z (m + l) − g_p + g_e E + g_l,   B = g (1 − ε) w_y − g_p,   C = g ε/V
    E = Σ_v p_v (u_v − m)

and g_u / V is taken from C; w_v is 1 there without smoothing, and g_u 0 with both smoothing and class weights. So a
kernel needs at most four numbers a row. With target weights q, a row has targets y_1 … y_K, and neither class
weights nor smoothing:

    cross_entropy = Σ_k q_k (l − (u_{y_k} − m))
    A = g Σ_k q_k + 2 ζ g_z (m + l) + g_e E + g_l,   B [v = y] becomes Σ_k g q_k [v = y_k]

With `target_rest`, what the weights leave of 1 is the weight of all other columns together, as of one class, whose
probability is r. P sums over the columns that are targets, each once:

    r = 1 − Σ_P p_v,  q_r = max(1 − Σ_k q_k, 0),   cross_entropy = Σ_k q_k (l − (u_{y_k} − m)) − q_r log r
    A = g (Σ_k q_k + q_r − q_r / r) + …,   B [v = y] becomes Σ_k g q_k [v = y_k] − g p_v q_r / r for v in P

Everything is relative to m, so that the loss keeps its digits when all logits share a large offset. Kernels compute l
as log1p of the sum without m's own 1, and p_y A − B as (p_y − 1) A + (A − B) with expm1, so that loss and gradient keep
them where one column dominates.

The functions below are these formulas. Legend: N rows, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch

from thunder_flce.operation.divergence import Divergence
from thunder_flce.operation.pointwise import VARIABLES, TokenLoss, uses
from thunder_flce.options import PlainValues


@dataclass(frozen=True)
class LogitMap:
    """From the linear's output z to the logits u = softcap · tanh(scale · z / softcap)."""

    scale: float = 1.0
    softcap: float | None = None
    """None: u = scale · z"""

    def __call__(self, z: torch.Tensor) -> torch.Tensor:
        """u; z itself where nothing changes it."""
        if self.softcap is not None:
            return torch.tanh(z * (self.scale / self.softcap)) * self.softcap
        return z if self.scale == 1 else z * self.scale

    def slope(self, z: torch.Tensor) -> torch.Tensor | None:
        """1 − (u / softcap)², the factor of a softcap in the gradient; None without a softcap. `Loss` has the scale.

        From z, as 1 / cosh², which keeps its digits where u is near the softcap.
        """
        return None if self.softcap is None else (z * (self.scale / self.softcap)).cosh().square().reciprocal()


class Row(NamedTuple):
    """Numbers of each row of logits, (N,) each; None where the loss does not need them."""

    max: Any
    """m"""
    log_sum: Any
    """l, so that m + l is the row's log-sum-exp"""
    target_logit: Any
    """u_y; (N, K) with target weights"""
    moments: dict[str, Any]
    """By their names in `moments.MOMENTS`"""
    argmax: Any | None = None
    """The column of the largest logit"""


@dataclass(frozen=True)
class Output:
    """Something of each row that can be returned beside the loss; 0 in ignored rows unless it says otherwise."""

    of: Callable[[Row, int], Any]
    """From the row and the number of columns."""
    moments: tuple[str, ...] = ()
    """Which sums over the row it needs, by their names in `moments.MOMENTS`."""
    is_index: bool = False
    """Whether it is a column of the vocabulary, int64."""
    is_mean: bool = False
    """Whether it is the mean over the valid rows, of True and False, in place of something of each row."""
    ignored: int | None = 0
    """Its value in ignored rows; None where these are computed, too."""


OUTPUTS = {
    "log_prob": Output(lambda row, columns: row.target_logit - row.max - row.log_sum),
    "entropy": Output(lambda row, columns: row.log_sum - row.moments["expected"], ("expected",)),
    "log_sum_exp": Output(lambda row, columns: row.max + row.log_sum),
    "argmax": Output(lambda row, columns: row.argmax, is_index=True, ignored=None),
    "valid_argmax": Output(lambda row, columns: row.argmax, is_index=True, ignored=-1),
    "accuracy": Output(lambda row, columns: row.argmax, is_mean=True),
    "mean_logit": Output(lambda row, columns: row.max + row.moments["shifted_sum"] / columns, ("shifted_sum",)),
    "log_sum_sq_probs": Output(lambda row, columns: torch.log(row.moments["sum_sq"]), ("sum_sq",)),
}
DIFFERENTIABLE_OUTPUTS = VARIABLES
"""What a token loss may read: its gradient comes through these."""
NOTHING_IGNORED = -(2**62) - 1
"""The `ignore_index` of losses that ignore nothing: a number of 64 bits that no program has for its own."""


@dataclass(frozen=True, kw_only=True)
class Loss(PlainValues):
    """Which loss: everything that is a plain value, as `functional.linear_cross_entropy` describes it."""

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
    """Outputs through which no gradient flows though it could, as of what is only logged."""
    token_loss: TokenLoss = ""
    """What each row adds to the loss in place of its cross-entropy; "" for that."""
    target_rest: bool = False
    """Whether what target weights leave of 1 is the weight of all other columns together."""
    divergence: Divergence | None = None
    """Of a student from a teacher, in place of the cross-entropy."""

    @cached_property
    def logit_map(self) -> LogitMap:
        """From the linear's output to the logits."""
        return LogitMap(scale=self.logit_scale, softcap=self.softcap)

    @cached_property
    def maps_logits(self) -> bool:
        """Whether the logits are others than the linear's output."""
        return self.softcap is not None or self.logit_scale != 1

    @cached_property
    def is_plain(self) -> bool:
        """Whether there is nothing that asks more of a row than its statistics: smoothing, a z-loss, outputs.

        Then C is 0, and A and B are known before the statistics.
        """
        others = self.token_loss or self.target_rest or self.divergence
        return not (self.label_smoothing or self.z_loss or self.moments or self.needs_argmax or others)

    @cached_property
    def needs_gradients_in_forward(self) -> str | None:
        """The field for which gradients can only be computed in the forward; None where they need not."""
        return "token_loss" if self.token_loss else "target_rest" if self.target_rest else None

    @cached_property
    def differentiable_outputs(self) -> tuple[str, ...]:
        """The outputs through which a gradient may flow."""
        if self.needs_gradients_in_forward:
            return ()
        return tuple(name for name in DIFFERENTIABLE_OUTPUTS if name in self.outputs and name not in self.detached)

    @cached_property
    def has_parallel_row_gradients(self) -> bool:
        """Whether a row's gradients of all results are one vector times a number each: A = B, and C and g_e are 0."""
        others = set(self.differentiable_outputs) - {"log_prob"}
        return not (self.label_smoothing or self.z_loss or others or self.divergence)

    @cached_property
    def ignores_rows(self) -> bool:
        """Whether there is a target that means that a row is ignored."""
        return self.ignore_index != NOTHING_IGNORED

    @cached_property
    def has_row_gradients(self) -> bool:
        """Whether upstream gradients are one number a row, to be known before anything is summed over rows."""
        return self.reduction == "none" or bool(self.differentiable_outputs)

    @cached_property
    def moments(self) -> tuple[str, ...]:
        """The sums over each row that the loss and its outputs need, by their names in `moments.MOMENTS`."""
        needed = [moment for name in self.outputs for moment in OUTPUTS[name].moments]
        needed += ["weighted_sum"] if self.label_smoothing else []
        needed += [moment for name in VARIABLES if uses(self.token_loss, name) for moment in OUTPUTS[name].moments]
        return tuple(dict.fromkeys(needed))

    @cached_property
    def needs_argmax(self) -> bool:
        """Whether each row's largest logit must be found by its column."""
        return any(OUTPUTS[name].is_index or OUTPUTS[name].is_mean for name in self.outputs)

    @cached_property
    def needs_every_row(self) -> bool:
        """Whether something is asked for of ignored rows, too, so that they have to be computed."""
        return any(OUTPUTS[name].ignored is None for name in self.outputs)

    def cross_entropy(
        self, row: Row, columns: int, *, at_target: Any = None, total: Any = None, target_weights: Any = None,
        rest: "Rest | None" = None,
    ) -> Any:  # fmt: skip
        """(N,) each row's cross-entropy over so many columns.

        With class weights, `at_target` is (N,) w_y; for smoothing, `total` is Σ w, without them `columns`. The weights
        of K targets are (N, K), 0 for ignored ones.
        """
        if target_weights is not None:
            of_targets = Row(row.max.unsqueeze(-1), row.log_sum.unsqueeze(-1), row.target_logit, {})
            value = (target_weights * self.cross_entropy(of_targets, columns)).sum(-1)
            return value if rest is None else value - rest.weight * torch.log(rest.probability)
        # In this order the loss keeps its digits when all logits share a large offset. A kernel's softcap may differ
        # from PyTorch's in its last digit, which must not make a loss negative.
        value = row.log_sum - (row.target_logit - row.max).clamp(max=0)
        if at_target is not None:
            value = at_target * value
        if self.label_smoothing:
            smooth = row.log_sum * total - row.moments["weighted_sum"]
            value = (1 - self.label_smoothing) * value + self.label_smoothing / columns * smooth
        return value

    def z_term(self, row: Row) -> Any | None:
        """(N,) what the z-loss adds to each row; None without one."""
        return self.z_loss * (row.max + row.log_sum).square() if self.z_loss else None


# The largest float32 below 1: the probability of all columns but a row's targets is no less than what is left of it.
_LARGEST_SUM = 1 - 2.0**-24


class Rest(NamedTuple):
    """All columns of a row but its targets, with `Loss.target_rest`."""

    probability: Any
    """(N,) r"""
    weight: Any
    """(N,) q_r"""
    of_targets: Any
    """(N, K) p at each target, 0 for ignored ones and for further ones in the same column"""

    @classmethod
    def of(cls, row: Row, weights: Any, first: Any) -> "Rest":
        """From the row, with u at its targets, their weights, and 1 for the first target in each column, (N, K)."""
        log_probability = row.target_logit - row.max.unsqueeze(-1) - row.log_sum.unsqueeze(-1)
        of_targets = first * torch.exp(log_probability)
        total, weight = of_targets.sum(-1), weights.sum(-1)
        probability = torch.where(total < _LARGEST_SUM, 1 - total, 1 - _LARGEST_SUM)
        return cls(probability, torch.where(weight < 1, 1 - weight, 0.0), of_targets)


class RowCoefficients(NamedTuple):
    """What a row's gradient takes beside its logits and statistics, in the terms of the formula above."""

    probability: Any
    """A"""
    one_hot: Any
    """B; with target weights (N, K), of each target"""
    uniform: Any | None = None
    """C; None without label smoothing, and without an upstream gradient of the mean logit"""
    entropy: Any | None = None
    """g_e; None where the entropy has no upstream gradient"""


def row_coefficients(
    loss: Loss, upstream: Any, columns: int, *, at_target: Any, total: Any, target_weights: Any
) -> RowCoefficients:
    """A, B and C as far as they follow from the upstream gradient of each row's cross-entropy, (N,), alone.

    The others are as for `Loss.cross_entropy`.
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


def rest_coefficients(upstream: Any, weights: Any, rest: Rest) -> tuple[Any, Any]:
    """A and B with `Loss.target_rest`, as far as they follow from the upstream gradient of each row's cross-entropy."""
    ratio = rest.weight / rest.probability
    probability = upstream * (weights.sum(-1) + rest.weight - ratio)
    return probability, upstream.unsqueeze(-1) * (weights - ratio.unsqueeze(-1) * rest.of_targets)
