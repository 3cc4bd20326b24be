"""Sums over a row of logits that only some losses and outputs need, beside the row's maximum and log-sum-exp.

Each moment is stated once, as plain arithmetic. The row kernels call it with their own values: PyTorch's tensors,
Triton's blocks, nvFuser's symbolic values. So a new moment is a new entry of `MOMENTS`. Legend: V vocabulary; u the
logits of a row, m their maximum, p their softmax, w the class weights (1 if there are none).
"""


def _expected(shifted, finite, probability, weight):
    return probability * finite


def _shifted_sum(shifted, finite, probability, weight):
    return shifted


def _sum_sq(shifted, finite, probability, weight):
    return probability * probability


def _weighted_sum(shifted, finite, probability, weight):
    return shifted * weight


MOMENTS = {
    # Σ p (u - m): the row's entropy is log Σ exp(u - m) minus this.
    "expected": _expected,
    # Σ w (u - m), for label smoothing.
    "weighted_sum": _weighted_sum,
    # Σ (u - m): the mean of the logits is m plus this sum divided by the number of columns.
    "shifted_sum": _shifted_sum,
    # Σ p²
    "sum_sq": _sum_sq,
}
"""Functions from (u - m, u - m made finite, p, w) of a column to its summand. They use only `+`, `-`, `*` and numbers,
since Triton compiles them. For a logit of -inf, the second argument is the lowest finite number, whose product with the
probability 0 is 0.
"""
