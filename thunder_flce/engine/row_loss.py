"""Computes the loss and the coefficients of its gradient from the row results, by the formulas of `Loss`.

Legend: T tokens, N rows computed, C rows in a chunk, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thunder_flce.engine.kernels.interface import RowStatistics
from thunder_flce.engine.rows import Rows
from thunder_flce.operation.call import Call
from thunder_flce.operation.loss import OUTPUTS, Row, RowCoefficients, row_coefficients
from thunder_flce.operation.pointwise import VARIABLES, evaluate, input_name, uses, value_and_derivatives


class RowResults(NamedTuple):
    """Results of the forward for some rows, (C,) each; None for a result that the loss does not need."""

    statistics: Any = None
    """`RowStatistics`; None for a divergence without label weights, which has no z_y either"""
    z_y: Any = None
    """The linear's output at each row's target; (C, K) with target weights; None in a backward with saved statistics"""
    moments: dict[str, Tensor] = {}
    argmax: Tensor | None = None
    row_losses: Tensor | None = None
    """Each row's token loss, or its loss with a teacher, in place of its cross-entropy"""
    coefficients: RowCoefficients | None = None
    """Coefficients of a token loss's gradient"""
    divergence: Tensor | None = None

    def row(self, call: Call) -> Row:
        """Returns the results as the `Row` that the formulas of `Loss` take."""
        if self.statistics is None:
            return Row(None, None, target_logit=None, moments={}, divergence=self.divergence)
        u_y = call.loss.logit_map(self.z_y.to(call.row_dtype))
        row_max, row_log_sum = self.statistics
        return Row(row_max, row_log_sum, u_y, self.moments, self.argmax, self.divergence)


class Coefficients:
    """Computes the coefficients of the gradient for each chunk of rows.

    Args:
        call: a flat call.
        rows: the rows that are computed.
        upstream: by name, the upstream gradients of outputs, or None; the loss's is already in the rows' s.
        entropy: (N,) the entropies, if they have an upstream gradient.
    """

    def __init__(
        self, call: Call, rows: Rows, upstream: Mapping[str, Tensor | None] | None = None, *,
        entropy: Tensor | None = None,
    ):  # fmt: skip
        self._rows, self._scale, self._entropy = rows, call.loss.logit_scale, entropy
        loss, s = call.loss, rows.s
        if call.whole_vocab == 1 and not loss.token_loss:
            # With one column, p is 1 and the gradient of the cross-entropy 0, however the exponentials are rounded.
            s = torch.zeros_like(s)
        result = row_coefficients(
            loss, s, call.whole_vocab, at_target=rows.at_target, total=class_total(call),
            target_weights=rows.target_weights,
        )  # fmt: skip
        for name, grad in (upstream or {}).items():
            if name == "loss" or grad is None:
                continue
            row_grad = rows.received(grad.reshape(shape_of(call, name)).to(call.row_dtype))
            row_grad = _masked(call, rows, row_grad)
            if name == "log_prob":
                probability = result.probability - (row_grad if row_grad.ndim == 1 else row_grad.sum(1))
                result = result._replace(probability=probability, one_hot=result.one_hot - row_grad)
            elif name == "log_sum_exp":
                result = result._replace(probability=result.probability + row_grad)
            elif name == "entropy":
                result = result._replace(entropy=row_grad)
            else:
                uniform = row_grad / -call.whole_vocab
                result = result._replace(uniform=uniform if result.uniform is None else result.uniform + uniform)
        # The coefficients of all rows, (N,) each, without the terms that depend on the rows' statistics.
        self.all_rows, self._z_factors = result, None
        if loss.z_loss:
            z_factors = rows.s
            if rows.at_target is not None and rows.divisors is not None and "num_items" not in call.tensors:
                # With class weights, the divisor of the cross-entropies is not that of the z terms.
                z_factors = rows.masked(z_factors * (rows.divisors[0] / rows.divisors[1]))
            self._z_factors = 2 * loss.z_loss * z_factors

    def of_chunk(self, chunk: slice, results: RowResults | None = None) -> RowCoefficients:
        """Returns the chunk's coefficients, (C,) each; `results` are its row results, None in one pass."""
        scale, coefficients = self._scale, self.all_rows
        if chunk.stop - chunk.start < self._rows.count:
            coefficients = RowCoefficients(*[None if vector is None else vector[chunk] for vector in coefficients])
        if results is not None:
            row_max, log_sum = results.statistics
            coefficients = results.coefficients or coefficients
            if self._z_factors is not None:
                z_term = self._z_factors[chunk] * (row_max + log_sum)
                coefficients = coefficients._replace(probability=coefficients.probability + z_term)
            if coefficients.entropy is not None and self._entropy is not None:
                expected_term = coefficients.entropy * (log_sum - self._entropy[chunk])
                coefficients = coefficients._replace(probability=coefficients.probability + expected_term)
        if scale == 1:
            return coefficients
        return RowCoefficients(*[None if vector is None else vector * scale for vector in coefficients])


def token_loss(
    call: Call, results: RowResults, inputs: Sequence[Tensor], s: Tensor | None
) -> tuple[Tensor, RowCoefficients | None]:
    """Returns the token losses of some rows, (C,), from their results and the token `inputs`, (C,) each.

    With the upstream gradient of each row's loss, `s` (C,), also returns the coefficients of its gradient.
    """
    text, row, columns = call.loss.token_loss, results.row(call), call.whole_vocab
    values = {name: OUTPUTS[name].compute(row, columns) for name in VARIABLES if uses(text, name)}
    values |= {input_name(number): vector for number, vector in enumerate(inputs)}
    if s is None:
        return evaluate(text, values), None
    value, derivatives = value_and_derivatives(text, values)

    def times(name: str) -> Tensor | None:
        # With one column, the log-probability and the entropy are 0, however the exponentials are rounded.
        derivative = None if columns == 1 and name in ("log_prob", "entropy") else derivatives[name]
        # One factor may be infinite or NaN where the other is 0, as in an ignored row; the product is 0 there.
        return None if derivative is None else torch.where((s == 0) | (derivative == 0), 0.0, s * derivative)

    g_p, g_e, g_l, g_u = map(times, VARIABLES)
    one_hot = torch.zeros_like(s) if g_p is None else -g_p
    probability = one_hot if g_l is None else one_hot + g_l
    if g_e is not None:
        probability = probability + g_e * (row.log_sum - values["entropy"])
    return value, RowCoefficients(probability, one_hot, None if g_u is None else g_u / -columns, g_e)


def with_teacher(
    call: Call, results: RowResults, divergence_weights: Tensor | None, label_weights: Tensor | None
) -> Tensor:
    """Returns the losses of some rows, (C,), from their divergences and cross-entropies, and the weights of both."""

    def weighted(losses: Any, weights: Tensor) -> Tensor:
        # A loss may be infinite where its weight is 0.
        return torch.where(weights == 0, 0.0, weights * losses)

    losses: Any = results.divergence
    if divergence_weights is not None:
        losses = weighted(losses, divergence_weights)
    if label_weights is not None:
        cross_entropies = call.loss.cross_entropy(results.row(call), call.whole_vocab)
        losses = losses + weighted(cross_entropies, label_weights)
    return losses


def joined(call: Call, rows: Rows, chunks: list[RowResults]) -> RowResults:
    """Returns the row results of all chunks as those of all rows."""
    if len(chunks) == 1:
        return chunks[0]
    if not chunks:
        nothing = torch.empty(0, dtype=call.row_dtype, device=call.device)
        z_y = nothing if rows.target_weights is None else rows.target_weights
        moments = dict.fromkeys(call.loss.moments, nothing)
        argmax = nothing.to(torch.int64)
        return RowResults(RowStatistics(nothing, nothing), z_y, moments, argmax, nothing, divergence=nothing)

    def cat(vectors: list[Any]) -> Any:
        return None if vectors[0] is None else torch.cat(vectors)

    statistics = [chunk.statistics for chunk in chunks]
    return RowResults(
        statistics[0] and RowStatistics(*(torch.cat(vectors) for vectors in zip(*statistics, strict=True))),
        cat([chunk.z_y for chunk in chunks]),
        {name: torch.cat([chunk.moments[name] for chunk in chunks]) for name in chunks[0].moments},
        cat([chunk.argmax for chunk in chunks]),
        cat([chunk.row_losses for chunk in chunks]),
        divergence=cat([chunk.divergence for chunk in chunks]),
    )


def class_weights(call: Call) -> Tensor:
    """Returns the class weights of all columns, (V,), in the row dtype."""
    return call.tensors["weight"][: call.whole_vocab].to(call.row_dtype)


def class_total(call: Call) -> Any:
    """Returns Σ w over all columns, for label smoothing with class weights; otherwise the number of columns."""
    is_weighted = call.loss.label_smoothing and "weight" in call.tensors
    return class_weights(call).sum() if is_weighted else call.whole_vocab


def cross_entropy(call: Call, rows: Rows, row: Row) -> Tensor:
    """Returns (N,) each row's cross-entropy, with class weights, smoothing and target weights."""
    return call.loss.cross_entropy(
        row, call.whole_vocab, at_target=rows.at_target, total=class_total(call), target_weights=rows.target_weights
    )


def reduced(call: Call, rows: Rows, row_losses: Tensor, z_term: Tensor | None = None) -> Tensor:
    """Returns the loss, () or (N,) for reduction "none", from each row's loss `row_losses` and z term, (N,) each.

    The mean over no valid row is NaN, as in `torch.nn.functional`.
    """
    loss_divisor, z_divisor = (None, None) if rows.divisors is None else rows.divisors

    def total(term: Tensor, divisor: Tensor | None) -> Tensor:
        term = rows.masked(term * rows.row_factor)
        value = term if call.loss.reduction == "none" else term.sum()
        return value if divisor is None else value / divisor

    loss = total(row_losses, loss_divisor)
    return loss if z_term is None else loss + total(z_term, z_divisor)


def shape_of(call: Call, name: str) -> tuple[int, ...]:
    """Returns the shape of an output, or of the losses, of this rank's tokens: (T,), or (T, K) for K targets each."""
    is_per_target = name in OUTPUTS and OUTPUTS[name].is_per_target
    return call.own_tokens, *(call.tensors["target"].shape[1:] if is_per_target else ())


def _masked(call: Call, rows: Rows, numbers: Tensor, fill: float = 0) -> Tensor:
    """Returns numbers of rows (N,), or of their targets (N, K), with `fill` in ignored rows and at ignored targets."""
    if numbers.ndim == 1:
        return rows.masked(numbers, fill)
    is_target = rows.gather(call.tensors["target"]).long() != call.loss.ignore_index
    return torch.where(is_target & (rows.row_factor != 0)[:, None], numbers, fill)


def output(call: Call, rows: Rows, name: str, row: Row) -> Tensor:
    """Returns one of the loss's outputs, for each of the caller's tokens, or () for a mean."""
    description = OUTPUTS[name]
    value = description.compute(row, call.whole_vocab)
    if description.is_mean:
        hits = rows.masked(value, fill=-1) == rows.target
        return hits.sum().to(call.row_dtype) / rows.valid_count
    if description.ignored is None:
        return rows.returned(value)
    return rows.returned(_masked(call, rows, value, description.ignored), description.ignored)
