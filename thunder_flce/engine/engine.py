"""The region itself: linear and cross-entropy, forward and backward, as one loop over chunks of tokens.

For inputs x (T, H), weights W (V, H), bias b (V,) and targets y (T,):

    z = Σ x Wᵀ + b               over the linears; rounded to x's dtype as an unfused model does, or float32
    loss, dz = …                 row by row, from statistics of z's rows: `operation.loss`
    dX = dz W,  dW = dzᵀ x,  db = Σ_t dz

`run` is the loop. The forward calls it with an upstream gradient where the plan computes gradients at once, and without
one otherwise; the backward calls it with what the forward has saved. Legend: T tokens, N of them computed, C tokens in
a chunk, H hidden size, V vocabulary.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from thunder_flce.engine import row_loss
from thunder_flce.engine.kernels.interface import RowStatistics
from thunder_flce.engine.plan import RECOMPUTE_LOGITS, SAVE_LOGITS
from thunder_flce.engine.primitives import Primitives
from thunder_flce.engine.row_loss import Coefficients, RowResults, UpstreamGradients
from thunder_flce.engine.rows import Rows, remember
from thunder_flce.engine.sums import GradientSums
from thunder_flce.operation.call import gradient_name


class Saved(NamedTuple):
    """What a forward returned, and a backward goes on with."""

    valid_count: Tensor
    """() int64"""
    row_max: Tensor | None = None
    """(T,) 0 in ignored rows"""
    row_log_sum: Tensor | None = None
    """(T,) log Σ exp(logit - row_max); 0 in ignored rows"""
    computed_rows: Tensor | None = None
    """() int64 how many rows the forward has computed"""
    entropy: Tensor | None = None
    """The output, where a gradient comes back to it"""
    logits: Tensor | None = None
    """(S, row stride) the logits of the first S rows that were computed"""
    unit_gradient: Tensor | None = None
    """(T, H) dX for an upstream gradient of 1 at each row"""


class Outcome(NamedTuple):
    """What a run over all chunks gives."""

    found: RowResults
    """Of all rows; only without `known`"""
    logits: Tensor | None
    """(S, V) those that are kept"""
    gradients: dict[str, Tensor]
    """By the names of their operands"""


def forward(ops: Primitives) -> dict[str, Tensor]:
    """The results of a flat call, by the names of `operation.call.result_specs` and more; gradients are (T, H).

    Raises:
        IndexError: where a target is neither in [0, V) nor ignore_index (on CUDA without host synchronisation, a
            device-side assertion instead).
    """
    call, plan, upstream = ops.call, ops.plan, None
    if plan.finishes_in_forward:
        expected = usable(call.get("expected_gradient"))
        # Where each row has an upstream gradient of its own, dX is computed for 1 at each row.
        upstream = None if expected is None or call.loss.has_row_gradients else expected
    rows = ops.prepare(upstream)
    coefficients = None
    if plan.finishes_in_forward and call.loss.has_row_gradients:
        # Class weights are among the factors that the backward multiplies rows by; the weights of targets are not.
        ones = torch.ones(rows.count, dtype=call.row_dtype, device=rows.target.device)
        coefficients = Coefficients(ops, replace(rows, at_target=None), UpstreamGradients(ones), s=ones)
    elif plan.finishes_in_forward:
        coefficients = Coefficients(ops, rows, UpstreamGradients(upstream), s=rows.s)
    outcome = run(ops, rows, coefficients)
    return _results(ops, rows, outcome)


def backward(ops: Primitives, saved: Saved, upstream: UpstreamGradients) -> dict[str, Tensor]:
    """The gradients by the names of their operands, for the plans that finish them in the backward.

    Saved logits are overwritten.
    """
    call = ops.call
    if ops.plan.finishes_in_forward:
        assert saved.unit_gradient is not None
        rows = ops.prepare(None, computed_rows=saved.valid_count.new_full((), call.tokens, device="cpu"))
        factors = rows.returned(Coefficients(ops, replace(rows, target_weights=None), upstream).factors)
        return {"input": ops.scaled_rows(saved.unit_gradient, factors)}
    grad = upstream.loss
    has_scalar = grad is not None and grad.ndim == 0
    rows = ops.prepare(grad.to(call.row_dtype) if has_scalar and grad is not None else None, saved.computed_rows)
    entropy = None if saved.entropy is None else rows.received(saved.entropy.reshape(-1))
    coefficients = Coefficients(ops, rows, upstream, s=rows.s if has_scalar else None, entropy=entropy)
    return run(ops, rows, coefficients, known=saved).gradients


def run(ops: Primitives, rows: Rows, coefficients: Coefficients | None, *, known: Saved | None = None) -> Outcome:
    """One run over the chunks of the rows.

    Args:
        ops: of the region.
        rows: those that are computed.
        coefficients: of the rows' gradients; None where no gradient is computed.
        known: what the forward has saved, in a backward.
    """
    call, plan = ops.call, ops.plan
    has_statistics = known is not None and known.row_max is not None
    sums = None if coefficients is None else GradientSums(ops, rows, weights=coefficients.at_target)
    saved_rows = 0
    if plan.strategy == SAVE_LOGITS:
        saved_rows = rows.count if plan.saved_rows is None else min(plan.saved_rows, rows.count)
    statistics = _known_statistics(rows, known) if has_statistics and known is not None else None
    found: list[RowResults] = []
    kept = buffer = teacher = None
    for chunk in ops.chunks(rows, saved_rows):
        count = chunk.stop - chunk.start
        xs = [ops.gather(rows, call.tensors[linear.x], chunk) for linear in call.linears] if sums is None else (
            sums.gather(chunk)
        )  # fmt: skip
        if chunk.stop <= saved_rows and known is not None:
            assert known.logits is not None
            z = known.logits[:count, : call.vocab]
        else:
            if chunk.stop <= saved_rows:
                kept = ops.logits_buffer(plan.saved_logits_shape(call)[0])
                z = kept[:count]
            else:
                # Chunks but the first are equal, and the last one is smaller.
                buffer = ops.logits_buffer(count) if buffer is None or buffer.shape[0] < count else buffer
                z = buffer if buffer.shape[0] == count else buffer[:count]
            ops.logits_(z, xs)
        dlogits, of_rows, bias_grad = z, None, None
        target = rows.target if count == rows.count else rows.target[chunk]
        if call.divergence is not None:
            teacher = ops.teacher_logits(ops.gather(rows, call.tensors["teacher_input"], chunk), teacher)
            factors = None if coefficients is None else coefficients.factors[chunk]
            value, dlogits = ops.divergence_(z, teacher[:count], factors)
            of_rows = RowResults(RowStatistics(value, value), value)
        elif coefficients is not None and ops.takes_one_pass and statistics is None:
            of_rows = ops.both_(z, target, coefficients.of(chunk))
        elif statistics is not None and coefficients is not None:
            of_rows = RowResults(statistics.rows(chunk), ops.target_entries(z, target))
            dlogits, bias_grad = ops.gradient_(z, of_rows, coefficients.of(chunk, of_rows), target)
        else:
            of_rows = ops.results(z, target)
            if call.loss.token_loss:
                inputs = [rows.gather(vector)[chunk] for vector in call.token_inputs]
                of_rows = row_loss.with_token_loss(ops, of_rows, inputs, is_needed=coefficients is not None)
            if coefficients is not None:
                dlogits, bias_grad = ops.gradient_(z, of_rows, coefficients.of(chunk, of_rows), target)
        found.append(of_rows)
        if sums is not None:
            sums.add(dlogits, xs, chunk, bias_grad)
        # Otherwise these tensors would be alive while those of the next chunk are allocated.
        del xs, z, dlogits
    # Before dW is rounded out of a float32 accumulator, the chunk's memory goes.
    del buffer, teacher
    gradients = {} if sums is None else sums.finish()
    return Outcome(row_loss.joined(ops, rows, [] if has_statistics else found), kept, gradients)


def _known_statistics(rows: Rows, saved: Saved) -> RowStatistics:
    """(N,) those that the forward has saved."""
    assert saved.row_max is not None and saved.row_log_sum is not None
    row_max, log_sum = rows.masked(rows.gather(saved.row_max)), rows.gather(saved.row_log_sum)
    # An ignored row's logits need not match the saved statistics: exp(z - the largest number) is 0.
    return RowStatistics(row_max, rows.masked(log_sum, fill=torch.finfo(log_sum.dtype).max))


def _results(ops: Primitives, rows: Rows, outcome: Outcome) -> dict[str, Tensor]:
    call, plan, found = ops.call, ops.plan, outcome.found
    if call.divergence is not None:
        value = row_loss.reduced(ops, rows, found.z_y)
    else:
        value = ops.loss(rows, found)
    results = {"loss": rows.returned(value) if call.loss.reduction == "none" else value}
    if call.loss.outputs:
        row = found.row(ops)
        results |= {name: row_loss.output(ops, rows, name, row) for name in call.loss.outputs}
    results["valid_count"] = rows.valid_count
    if call.divergence is None:
        results |= {"row_max": found.statistics.row_max, "row_log_sum": found.statistics.row_log_sum}
        if rows.order is not None and (plan.strategy in (SAVE_LOGITS, RECOMPUTE_LOGITS)):
            results |= {name: rows.scatter(results[name]) for name in ("row_max", "row_log_sum")}
    if plan.strategy in (SAVE_LOGITS, RECOMPUTE_LOGITS):
        computed = results["computed_rows"] = rows.valid_count.new_full((), rows.count)
        remember(computed, rows.count)
    if plan.strategy == SAVE_LOGITS:
        results["logits"] = _padded(ops, outcome.logits)
    return results | {gradient_name(name): gradient for name, gradient in outcome.gradients.items()}


def _padded(ops: Primitives, logits: Tensor | None) -> Tensor:
    """(S, row stride) the memory of kept logits (S, V), which is one piece for any number of rows."""
    rows, stride = ops.plan.saved_logits_shape(ops.call)
    if logits is None:
        return ops.empty((rows, stride), ops.logits_dtype)
    return logits.as_strided((logits.shape[0], stride), (stride, 1))


def usable(expected: Tensor | None) -> Tensor | None:
    """() the upstream gradient that gradients are finished for: 1 in place of 0 and of what is not finite."""
    if expected is None:
        return None
    return torch.where(expected.isfinite() & (expected != 0), expected, 1)
