"""The region in thunder's own operations, by the definition in `loss`: what its symbol consists of in a trace.

It runs where the executor is not used, and is the plainest statement of what the region computes. Legend: N rows, K
columns of the vocabulary.
"""

import thunder.torch as ltorch
from thunder.core import dtypes
from thunder.core.proxies import TensorProxy

from thunder_flce.operation.loss import Loss


def logits(
    input: TensorProxy, weight: TensorProxy, bias: TensorProxy | None, loss: Loss, dtype: dtypes.dtype
) -> TensorProxy:
    """(N, K) logits in `dtype`, from input (..., H), weight (V, H) and bias (V,)."""
    z = ltorch.linear(input, weight, bias)
    if dtypes.to_strong_dtype(z.dtype) is not dtype:
        z = ltorch.to(z, dtype)
    z = ltorch.reshape(z, (-1, weight.shape[0]))
    if loss.vocab_size is not None and loss.vocab_size != weight.shape[0]:
        z = z[:, : loss.vocab_size]
    if loss.softcap is not None:
        return ltorch.tanh(z * (loss.logit_scale / loss.softcap)) * loss.softcap
    return z if loss.logit_scale == 1 else z * loss.logit_scale


def loss_and_outputs(
    logits: TensorProxy,
    target: TensorProxy,
    weight: TensorProxy | None,
    num_items: TensorProxy | float | None,
    loss: Loss,
) -> tuple[TensorProxy, ...]:
    """The loss, () or (N,), and the outputs that it names; target is (N,) int64."""
    if weight is not None and weight.shape[0] != logits.shape[1]:
        weight = weight[: logits.shape[1]]
    plain = Loss(
        reduction=loss.reduction,
        ignore_index=loss.ignore_index,
        logit_scale=loss.logit_scale,
        softcap=loss.softcap,
        vocab_size=loss.vocab_size,
    )
    if loss == plain and num_items is None and logits.numel:
        # thunder's own decomposition is wrong for label smoothing with ignored rows, and PyTorch refuses the backward
        # of its "sum"; that of an empty batch has no gradient.
        reduction = "none" if loss.reduction == "sum" else loss.reduction
        value = ltorch.cross_entropy(logits, target, weight, ignore_index=loss.ignore_index, reduction=reduction)
        return (ltorch.sum(value) if loss.reduction == "sum" else value,)
    valid = ltorch.ne(target, loss.ignore_index)
    count = ltorch.sum(ltorch.to(valid, logits.dtype))
    column = ltorch.where(valid, target, 0)
    log_probs = ltorch.log_softmax(logits, 1)
    log_prob = ltorch.squeeze(ltorch.gather(log_probs, 1, ltorch.unsqueeze(column, 1)), 1)
    class_weight = None if weight is None else ltorch.to(weight, logits.dtype)
    row_weight = None if class_weight is None else ltorch.index_select(class_weight, 0, column)

    cross_entropy = -log_prob if row_weight is None else -log_prob * row_weight
    if loss.label_smoothing:
        weighted = log_probs if class_weight is None else log_probs * class_weight
        smooth = -ltorch.sum(weighted, 1) * (loss.label_smoothing / logits.shape[1])
        cross_entropy = cross_entropy * (1 - loss.label_smoothing) + smooth
    terms = [(ltorch.where(valid, cross_entropy, 0.0), count)]
    if row_weight is not None:
        terms = [(terms[0][0], ltorch.sum(ltorch.where(valid, row_weight, 0.0)))]
    if loss.z_loss:
        z_term = ltorch.square(ltorch.logsumexp(logits, 1)) * loss.z_loss
        terms.append((ltorch.where(valid, z_term, 0.0), count))
    if num_items is not None:
        if not isinstance(num_items, TensorProxy):
            num_items = ltorch.full((), num_items, device=logits.device, dtype=logits.dtype)
        num_items = ltorch.to(num_items, logits.dtype)
        num_items = ltorch.where(ltorch.eq(num_items, 0), float("inf"), num_items)
        terms = [(term, num_items) for term, _ in terms]
    if loss.reduction != "none":
        terms = [(ltorch.sum(term), divisor) for term, divisor in terms]
    if loss.reduction == "mean":
        terms = [(term / divisor, None) for term, divisor in terms]
    value = terms[0][0] if len(terms) == 1 else terms[0][0] + terms[1][0]

    def output(name: str) -> TensorProxy:
        if name == "log_prob":
            return ltorch.where(valid, log_prob, 0.0)
        if name == "entropy":
            probability = ltorch.exp(log_probs)
            # p log p is 0 where p is, though the logit be -inf.
            finite = ltorch.where(ltorch.eq(probability, 0.0), 0.0, log_probs)
            return ltorch.where(valid, -ltorch.sum(probability * finite, 1), 0.0)
        argmax = ltorch.argmax(logits, 1)
        if name == "argmax":
            return argmax
        argmax = ltorch.where(valid, argmax, -1)
        if name == "valid_argmax":
            return argmax
        return ltorch.sum(ltorch.to(ltorch.eq(argmax, target) & valid, logits.dtype)) / count

    return value, *(output(name) for name in loss.outputs)
