"""The region in thunder's own operations, by the formulas of `operation.loss`: what its symbol consists of in a trace.

It runs where the executor is not used. Legend: N rows, K columns of the vocabulary.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import thunder.torch as ltorch
from thunder.core import dtypes
from thunder.core.proxies import TensorProxy

from thunder_flce.graph.thunder_private import get_compile_data
from thunder_flce.operation.loss import OUTPUTS, Loss, Rest, Row, RowWeights, SoftTargets
from thunder_flce.operation.moments import MOMENTS
from thunder_flce.operation.pointwise import VARIABLES, input_name, interpret, uses


def logits(
    terms: Sequence[tuple[TensorProxy, TensorProxy]], bias: TensorProxy | None, *, loss: Loss, dtype: dtypes.dtype
) -> TensorProxy:
    """(N, K) logits in `dtype`, from inputs (..., H_i) with weights (V, H_i), and bias (V,)."""
    (input, weight), *others = terms
    z = ltorch.linear(input, weight, bias)
    for input, weight in others:
        z = ltorch.add(z, ltorch.linear(input, weight))
    if dtypes.to_strong_dtype(z.dtype) is not dtype:
        z = ltorch.to(z, dtype)
    z = ltorch.reshape(z, (-1, weight.shape[0]))
    if loss.vocab_size is not None and loss.vocab_size != weight.shape[0]:
        z = z[:, : loss.vocab_size]
    return loss.logit_map(z, ltorch.tanh)


def loss_and_outputs(
    logits: TensorProxy,
    target: TensorProxy,
    *,
    loss: Loss,
    weight: TensorProxy | None,
    token_weights: TensorProxy | None,
    target_weights: TensorProxy | None = None,
    token_inputs: Sequence[TensorProxy] = (),
    num_items: TensorProxy | float | None,
) -> tuple[TensorProxy, ...]:
    """The loss, () or (N,), and the outputs that it names; target is (N,) int64, with target_weights (N, K)."""
    columns = logits.shape[1]
    if weight is not None and weight.shape[0] != columns:
        weight = weight[:columns]
    weight = None if weight is None else ltorch.to(weight, logits.dtype)
    has_weights = token_weights is not None or target_weights is not None
    is_plain = loss.is_plain and not loss.outputs and num_items is None and not has_weights
    if is_plain and logits.numel:
        # Executors have kernels for it. PyTorch refuses the backward of thunder's "sum"; that of an empty batch has no
        # gradient.
        reduction = "none" if loss.reduction == "sum" else loss.reduction
        value = ltorch.cross_entropy(logits, target, weight, ignore_index=loss.ignore_index, reduction=reduction)
        return (ltorch.sum(value) if loss.reduction == "sum" else value,)
    valid = is_label = ltorch.ne(target, loss.ignore_index)
    if target_weights is not None:
        target_weights = ltorch.to(ltorch.reshape(target_weights, target.shape), logits.dtype)
        target_weights, target = ltorch.where(is_label, target_weights, 0.0), ltorch.where(is_label, target, 0)
        valid = ltorch.gt(ltorch.sum(ltorch.to(is_label, logits.dtype), 1), 0.0)
    if token_weights is not None:
        token_weights = ltorch.to(ltorch.reshape(token_weights, (-1,)), logits.dtype)
        valid = valid & ltorch.ne(token_weights, 0)
    column = ltorch.where(valid, target, 0) if target_weights is None else target
    weights = None if weight is None else RowWeights(ltorch.index_select(weight, 0, column), ltorch.sum(weight))
    row = _row(logits, column, weight, loss)

    z_divisor = divisor = count = ltorch.sum(ltorch.to(valid, logits.dtype))
    if token_weights is not None:
        z_divisor = divisor = ltorch.sum(ltorch.where(valid, token_weights, 0.0))
    if num_items is not None:
        if not isinstance(num_items, TensorProxy):
            num_items = ltorch.full((), num_items, device=logits.device, dtype=logits.dtype)
        num_items = ltorch.to(num_items, logits.dtype)
        z_divisor = divisor = ltorch.where(ltorch.eq(num_items, 0), float("inf"), num_items)
    elif weights is not None:
        at_target = weights.at_target if token_weights is None else weights.at_target * token_weights
        divisor = ltorch.sum(ltorch.where(valid, at_target, 0.0))
    if loss.token_loss:
        known = {name: OUTPUTS[name].of(row, columns, ltorch.log) for name in VARIABLES if uses(loss.token_loss, name)}
        known |= {input_name(number): _token_input(each, logits) for number, each in enumerate(token_inputs)}
        of_rows = interpret(loss.token_loss, known, ltorch)
    else:
        rest = None
        if loss.target_rest:
            first = ltorch.to(_first_in_column(target, is_label), logits.dtype)
            rest = Rest.of(row, target_weights, first, library=ltorch)
        targets = None if target_weights is None else SoftTargets(target_weights, rest)
        of_rows = loss.cross_entropy(row, weights, columns, targets=targets, exact=True, log=ltorch.log)
    terms = [(of_rows, divisor)]
    if loss.z_loss:
        terms.append((loss.z_term(row), z_divisor))
    if token_weights is not None:
        terms = [(term * token_weights, divisor) for term, divisor in terms]
    value = loss.reduce([(ltorch.where(valid, term, 0.0), divisor) for term, divisor in terms])

    def computed(name: str) -> TensorProxy:
        output = OUTPUTS[name]
        with _no_grad(name not in loss.differentiable_outputs):
            result = output.of(row, columns, ltorch.log)
            if output.is_mean:
                return ltorch.sum(ltorch.to(ltorch.eq(result, target) & valid, logits.dtype)) / count
            return result if output.ignored is None else ltorch.where(valid, result, output.ignored)

    return value, *map(computed, loss.outputs)


def _first_in_column(target: TensorProxy, is_label: TensorProxy) -> TensorProxy:
    """(N, K) whether a target is the first of its row in a column, of those that are labels."""
    numbers = ltorch.arange(target.shape[1], device=target.device)
    is_before = ltorch.lt(ltorch.unsqueeze(numbers, 0), ltorch.unsqueeze(numbers, 1))
    is_same = ltorch.eq(ltorch.unsqueeze(target, 2), ltorch.unsqueeze(target, 1)) & ltorch.unsqueeze(is_label, 1)
    return is_label & ltorch.eq(ltorch.sum(ltorch.to(is_same & is_before, target.dtype), 2), 0)


def _token_input(tensor: TensorProxy, logits: TensorProxy) -> TensorProxy:
    flat = ltorch.reshape(tensor, (-1,))
    return ltorch.to(flat, logits.dtype) if dtypes.is_float_dtype(flat.dtype) else flat


def _row(logits: TensorProxy, column: TensorProxy, weight: TensorProxy | None, loss: Loss) -> Row:
    """What is known of the rows of logits (N, K), with column (N,) or (N, K) for targets and class weights (K,)."""
    with _no_grad():
        # Everything is relative to it, and does not depend on it.
        row_max = ltorch.amax(logits, 1, keepdim=True)
        argmax = ltorch.argmax(logits, 1) if loss.needs_argmax else None
    shifted = logits - row_max
    log_sum = ltorch.log(ltorch.sum(ltorch.exp(shifted), 1, keepdim=True))
    moments = {}
    if loss.moments:
        probability = ltorch.exp(shifted - log_sum)
        # p (u - m) is 0 where p is, though the logit be -inf, and so is its gradient.
        finite = ltorch.where(ltorch.eq(probability, 0.0), 0.0, shifted)
        for name in loss.moments:
            moment, of_columns = MOMENTS[name], 1.0 if weight is None else weight
            term = moment.term(shifted if moment.keeps_infinity else finite, probability, of_columns)
            moments[name] = ltorch.sum(term, 1)
    target_logit = ltorch.gather(logits, 1, column if column.ndim > 1 else ltorch.unsqueeze(column, 1))
    if column.ndim == 1:
        target_logit = ltorch.squeeze(target_logit, 1)
    row_max, log_sum = ltorch.squeeze(row_max, 1), ltorch.squeeze(log_sum, 1)
    return Row(row_max, log_sum, target_logit, moments, argmax)


@contextmanager
def _no_grad(is_wanted: bool = True) -> Iterator[None]:
    """As `torch.no_grad` in a trace."""
    compile_data = get_compile_data()
    before = compile_data.is_grad_enabled
    compile_data.is_grad_enabled = before and not is_wanted
    try:
        yield
    finally:
        compile_data.is_grad_enabled = before
