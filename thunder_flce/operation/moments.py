"""Sums over a row of logits that only some losses and outputs need, beside the row's maximum and log-sum-exp.

Each is stated once, as plain arithmetic. The row kernels put their own values into it: PyTorch's tensors, Triton's
blocks, nvFuser's symbolic values. So a further sum is a further entry of `MOMENTS`. Legend: V vocabulary; u the logits
of a row, m their maximum, p their softmax, w the class weights (1 where there are none).
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
    # Σ p (u - m): the row's entropy is its log Σ exp(u - m) less this.
    "expected": _expected,
    # Σ w (u - m), for label smoothing.
    "weighted_sum": _weighted_sum,
    # Σ (u - m): the mean of the logits is m plus this by the number of columns.
    "shifted_sum": _shifted_sum,
    # Σ p²
    "sum_sq": _sum_sq,
}
"""(u - m, the same, p, w) of each column to what is summed: `+`, `-`, `*` and numbers only, so that Triton can compile
it. Where a logit is -inf, the second is the lowest finite number, whose product with p = 0 is 0."""
