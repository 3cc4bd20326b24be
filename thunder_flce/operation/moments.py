"""Sums over a row of logits that only some losses and outputs need, beside the row's maximum and log-sum-exp.

Each is stated once, as plain arithmetic. The row kernels put their own values into it: PyTorch's tensors, Triton's
blocks, nvFuser's symbolic values. So a further sum is a further entry of `MOMENTS`. Legend: V vocabulary; u the logits
of a row, m their maximum, p their softmax, w the class weights (1 where there are none).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Moment:
    """A sum over the columns of the vocabulary."""

    term: Callable[[Any, Any, Any], Any]
    """(u - m, p, w) to what is summed: `+`, `-`, `*` and numbers only, so that Triton can compile it. A logit of -inf
    comes as the lowest finite number instead, so that 0 · (u - m) is 0, unless `keeps_infinity`."""

    keeps_infinity: bool = False
    """Whether u - m is -inf where the logit is."""


def _expected(shifted, probability, weight):
    return probability * shifted


def _shifted_sum(shifted, probability, weight):
    return shifted


def _sum_sq(shifted, probability, weight):
    return probability * probability


def _weighted_sum(shifted, probability, weight):
    return shifted * weight


MOMENTS = {
    # Σ p (u - m): the row's entropy is its log Σ exp(u - m) less this.
    "expected": Moment(_expected),
    # Σ w (u - m), for label smoothing.
    "weighted_sum": Moment(_weighted_sum, keeps_infinity=True),
    # Σ (u - m): the mean of the logits is m plus this by the number of columns.
    "shifted_sum": Moment(_shifted_sum, keeps_infinity=True),
    # Σ p²
    "sum_sq": Moment(_sum_sq),
}
