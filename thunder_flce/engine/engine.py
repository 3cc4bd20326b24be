"""Forward and backward of a region, a linear and its loss, as one loop over chunks of tokens.

For inputs x (T, H), weights W (V, H), bias b (V,) and targets y (T,):

    z = Σ x Wᵀ + b               summed over the linears; rounded to x's dtype as an unfused model does, or float32
    loss, dz = …                 row by row, from statistics of z's rows: `operation.loss`
    dX = dz W,  dW = dzᵀ x,  db = Σ_t dz

`run` is the loop. The forward calls it with an upstream gradient if the plan computes gradients in the forward, and
without one otherwise. The backward calls it with the tensors that the forward saved. Legend: T tokens, N of them
computed, C tokens in a chunk, H hidden size, V vocabulary.
"""

from collections.abc import Mapping
from copy import copy
from functools import cached_property

import torch
from torch import Tensor

from thunder_flce.engine import row_loss
from thunder_flce.engine.kernels.interface import LabelTerm, RowStatistics
from thunder_flce.engine.kernels.scaling import usable
from thunder_flce.engine.plan import LOSS_ONLY
from thunder_flce.engine.primitives import Primitives
from thunder_flce.engine.row_loss import Coefficients, RowResults
from thunder_flce.engine.rows import Rows
from thunder_flce.engine.sums import GradientSums
from thunder_flce.operation.call import TEACHER, Linear, gradient_name
from thunder_flce.options import RECOMPUTE_LOGITS, SAVE_LOGITS


def forward(ops: Primitives) -> dict[str, Tensor]:
    """Returns the results of a flat call by the names of `Plan.result_names`; dX is (T, H).

    Raises:
        IndexError: if a target is neither in [0, V) nor ignore_index. On CUDA without host synchronisation, a
            device-side assertion fails instead.
    """
    call, plan, logits = ops.call, ops.plan, _Logits(ops, ops.call.linears)
    expected = call.tensors.get("expected_gradient")
    rows = ops.select_rows(None if expected is None else usable(expected), meanwhile=logits.start)
    gradient_rows = rows
    if ops.region.saves_unit_gradients:
        # The backward multiplies rows by factors that include the class weights, but not the target weights.
        gradient_rows = copy(rows)
        gradient_rows.at_target, gradient_rows.s = None, torch.ones_like(rows.s)
    coefficients = Coefficients(call, gradient_rows) if plan.finishes_in_forward else None
    chunk_results, gradients = run(ops, rows, coefficients, logits=logits)
    return _results(ops, rows, row_loss.joined(call, rows, chunk_results), gradients, logits)


def backward(ops: Primitives, saved: Mapping[str, Tensor], upstream: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Returns the gradients by the names of their operands, for plans that finish gradients in the backward.

    Args:
        ops: the region's primitives.
        saved: by name, the tensors that the forward returned after its outputs, and the entropy if it has an upstream
            gradient. The logits are overwritten.
        upstream: by name, the upstream gradients of the loss and the outputs: (), or for each of the caller's tokens
            one number, or K; None for a result without an upstream gradient.
    """
    call = ops.call
    if ops.region.token_shard is not None:
        # Each rank may use other results of its tokens than the others do, but they all have to gather the same.
        unused = {
            name: torch.zeros(row_loss.shape_of(call, name), dtype=call.row_dtype, device=call.device)
            for name, grad in upstream.items()
            if grad is None and (name != "loss" or call.loss.reduction == "none")
        }
        upstream = {**upstream, **unused}
    loss_grad = upstream["loss"]
    if loss_grad is None:
        loss_grad = torch.zeros((), dtype=call.row_dtype, device=call.device)
    if ops.plan.finishes_in_forward:
        rows = ops.select_rows_again(loss_grad, call.tokens)
        rows.target_weights = None
        # The loss has parallel row gradients: coefficient A multiplies dX for an upstream gradient of 1.
        factors = Coefficients(call, rows, upstream).all_rows.probability
        return {"input": ops.scaled_rows(saved["dX"], rows.returned(factors))}
    rows = ops.select_rows_again(loss_grad, ops.count_of(saved["computed_rows"]))
    entropy = rows.received(saved["entropy"].reshape(-1)) if "entropy" in saved else None
    coefficients = Coefficients(call, rows, upstream, entropy=entropy)
    statistics = None
    if "row_max" in saved:
        statistics = RowStatistics(rows.gather(saved["row_max"]), rows.gather(saved["row_log_sum"]))
    logits = _Logits(ops, call.linears, saved.get("logits"))
    return run(ops, rows, coefficients, logits=logits, statistics=statistics)[1]


def run(
    ops: Primitives, rows: Rows, coefficients: Coefficients | None, *, logits: "_Logits",
    statistics: RowStatistics | None = None,
) -> tuple[list[RowResults], dict[str, Tensor]]:  # fmt: skip
    """Runs the loop over chunks, and returns each chunk's row results and the gradients by their operands' names.

    Without `coefficients`, no gradient is computed. `statistics` are (N,), if the forward saved them.
    """
    sums = None if coefficients is None else GradientSums(ops, rows, one_hot=coefficients.all_rows.one_hot)
    chunk_results: list[RowResults] = []
    teacher_logits = None if ops.call.loss.divergence is None else _Logits(ops, (TEACHER,))
    for chunk in ops.chunks(rows):
        buffers = (None,) * len(ops.call.linears) if sums is None else sums.input_buffers(chunk)
        xs = [
            ops.gather(rows, ops.call.tensors[linear.x], chunk, out)
            for linear, out in zip(ops.call.linears, buffers, strict=True)
        ]
        z = logits.of_chunk(chunk, xs)
        if teacher_logits is None:
            results, dlogits, bias_grad = _row_work(ops, rows, chunk, z, coefficients, statistics)
        else:
            teacher = teacher_logits.of_chunk(chunk, [ops.gather(rows, ops.call.tensors[TEACHER.x], chunk)])
            results, dlogits, bias_grad = _row_work_with_teacher(ops, rows, chunk, z, teacher, coefficients)
        chunk_results.append(results)
        if sums is not None:
            sums.add(dlogits, xs, chunk, bias_grad)
        # Otherwise these tensors would stay alive while the next chunk's are allocated.
        del xs, z, dlogits
    # Frees the chunk's memory before a float32 accumulator is rounded to a new dW.
    logits.free()
    teacher_logits = None
    return chunk_results, {} if sums is None else sums.finish()


class _Logits:
    """Computes the logits of each chunk, in a buffer that chunks share or in one that is kept for the backward."""

    def __init__(self, ops: Primitives, linears: tuple[Linear, ...], saved: Tensor | None = None):
        """Logits are the sum of `linears`; in a backward, `saved` are those that the forward saved, (S, stride)."""
        self._ops, self._linears = ops, linears
        self._keeps_first = ops.plan.rows_saved(ops.call.tokens) > 0
        self._buffer: Tensor | None = None
        self._started = 0
        """Number of first rows whose logits were saved, or computed before the number of valid rows was known"""
        if saved is not None:
            # Rows may be padded. The host makes no view if they are not.
            self.kept = saved if saved.shape[1] == ops.call.vocab else saved[:, : ops.call.vocab]
            self._started = saved.shape[0]

    @cached_property
    def kept(self) -> Tensor:
        """(S, V) the logits of the first chunk, if the backward needs them."""
        return self._ops.logits_buffer(self._ops.plan.rows_saved(self._ops.call.tokens))

    def start(self, order: Tensor) -> None:
        """Computes the logits of the tokens in `order`, (C,), before it is known which of them are valid."""
        ops, self._started = self._ops, order.shape[0]
        xs = [ops.call.tensors[linear.x].index_select(0, order) for linear in self._linears]
        ops.logits_(self._buffer_for(0, ops.plan.first_rows(ops.call.tokens))[: self._started], xs, self._linears)

    def of_chunk(self, chunk: slice, xs: list[Tensor]) -> Tensor:
        """Returns the logits (C, V) of a chunk, computed from its `xs`, (C, H) each, unless they exist already."""
        ops, count, started = self._ops, chunk.stop - chunk.start, 0 if chunk.start else self._started
        buffer = self._buffer_for(chunk.start, count)
        z = buffer if buffer.shape[0] == count else buffer[:count]
        if started < count:
            rest = [x[started:] for x in xs] if started else xs
            ops.logits_(z[started:] if started else z, rest, self._linears)
        return z

    def _buffer_for(self, start: int, count: int) -> Tensor:
        """Returns a buffer of at least `count` rows for the chunk whose first row is `start`."""
        ops = self._ops
        if self._keeps_first and not start:
            return self.kept
        # After the first chunk, all chunks have the same size, except for a smaller last one.
        if self._buffer is None or self._buffer.shape[0] < count:
            self._buffer = ops.logits_buffer(count, ops.plan.logits_dtype(ops.call.tensors[self._linears[0].x].dtype))
        return self._buffer

    def free(self) -> None:
        """Frees the buffer that chunks share."""
        self._buffer = None


def _row_work(
    ops: Primitives, rows: Rows, chunk: slice, z: Tensor, coefficients: Coefficients | None,
    statistics: RowStatistics | None,
) -> tuple[RowResults, Tensor, Tensor | None]:  # fmt: skip
    """Returns a chunk's row results, its dlogits, in place of z or in new memory, and their sum over rows, for db.

    `statistics` are (N,), if the forward saved them.
    """
    target = rows.of_chunk(rows.target, chunk)
    if coefficients is not None and statistics is None and ops.region.takes_one_pass:
        return ops.one_pass_(z, target, coefficients.of_chunk(chunk)), z, None
    if statistics is not None:
        chunk_statistics = statistics if chunk.stop - chunk.start == rows.count else statistics.rows(chunk)
        results = RowResults(chunk_statistics, None)
    else:
        results = ops.results(z, target)
        if ops.call.loss.token_loss:
            inputs = [rows.of_chunk(rows.gather(vector), chunk) for vector in ops.call.token_inputs]
            s = None if coefficients is None else rows.of_chunk(rows.s, chunk)
            row_losses, token_coefficients = ops.token_loss(results, inputs, s)
            results = results._replace(row_losses=row_losses, coefficients=token_coefficients)
    if coefficients is None:
        return results, z, None
    return results, *ops.gradient_(z, results, coefficients.of_chunk(chunk, results), target)


def _row_work_with_teacher(
    ops: Primitives, rows: Rows, chunk: slice, z: Tensor, teacher: Tensor, coefficients: Coefficients | None
) -> tuple[RowResults, Tensor, None]:
    """Returns what `_row_work` does, from the logits of the student, z, and of the teacher; there is no db."""
    call, target = ops.call, rows.of_chunk(rows.target, chunk)
    divergence_weights, label_weights = (
        rows.of_chunk(rows.gather(call.tensors[name]), chunk) if name in call.tensors else None
        for name in ("divergence_weights", "label_weights")
    )
    results, factors, labels = RowResults(), None, None
    if label_weights is not None:
        results = ops.results(z, target)
    if coefficients is not None:
        factors = s = rows.of_chunk(coefficients.all_rows.probability, chunk)
        if divergence_weights is not None:
            factors = s * divergence_weights
        if label_weights is not None:
            labels = LabelTerm(target, results.statistics, s * label_weights)
    divergence, dlogits = ops.divergence_(z, teacher, factors, labels)
    results = results._replace(divergence=divergence)
    row_losses = row_loss.with_teacher(call, results, divergence_weights, label_weights)
    return results._replace(row_losses=row_losses), dlogits, None


def _results(
    ops: Primitives, rows: Rows, row_results: RowResults, gradients: dict[str, Tensor], logits: _Logits
) -> dict[str, Tensor]:
    call, plan = ops.call, ops.plan
    loss, outputs = ops.loss(rows, row_results)
    results = {"loss": rows.returned(loss) if call.loss.reduction == "none" else loss}
    results |= {name: rows.returned(output) for name, output in outputs.items()}
    if len(outputs) < len(call.loss.outputs):
        row = row_results.row(call)
        results |= {name: row_loss.output(call, rows, name, row) for name in call.loss.outputs if name not in outputs}
    if plan.strategy != LOSS_ONLY:
        results["valid_count"] = rows.valid_count
    if ops.region.reads_statistics:
        row_max, row_log_sum = map(rows.scatter, row_results.statistics)
        results |= {"row_max": row_max, "row_log_sum": row_log_sum}
    if plan.strategy in (SAVE_LOGITS, RECOMPUTE_LOGITS):
        results["computed_rows"] = torch.tensor(rows.count)
    if plan.strategy == SAVE_LOGITS:
        shape = plan.saved_logits_shape(call)
        # Whole rows, with their padding, are contiguous for any number of rows.
        results["logits"] = logits.kept.as_strided(shape, (shape[1], 1))
    for name, gradient in gradients.items():
        results[gradient_name(name)] = gradient
    return results
