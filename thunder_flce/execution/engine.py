"""The region itself: linear and cross-entropy, forward and backward, as a `Plan` says. One function a strategy.

For inputs x (T, H), weights W (V, H), bias b (V,) and targets y (T,):

    z = Σ x Wᵀ + b               over the terms; rounded to x's dtype as an unfused model does, or float32 if so planned
    loss, dz = …                 row by row, from statistics of z's rows: `operation.loss`
    dX = dz W,  dW = dzᵀ x,  db = Σ_t dz

This is ordinary code on tensors. Run on the values of `record`, it writes its steps down instead of launching them;
traces, `explain` and the planner read these steps. Legend: T tokens, N of them not ignored, C tokens in a chunk, H
hidden size, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from thunder_flce.execution import steps
from thunder_flce.execution.gradient_accumulation import (
    BlockSums,
    GradientSums,
    SavedPart,
    rounded_bias,
    zero_unused_rows,
)
from thunder_flce.execution.gradient_scaling import graph_is_kept
from thunder_flce.execution.operands import ForwardResult, Gradients, Operands, SavedStatistics, UpstreamGradients
from thunder_flce.execution.plan import GradientsInForward, LossOnly, Plan, RecomputeLogits, SaveLogits, SaveSomeLogits
from thunder_flce.execution.region import Region
from thunder_flce.execution.row_kernels.interface import LogitsBuffer, LogitsInBlocks, RowStatistics
from thunder_flce.execution.row_loss import ChunkResult, RowGradients, RowScales, chunk_result, finish_loss
from thunder_flce.execution.row_selection import Rows, Selection, reselect_rows, select_rows
from thunder_flce.execution.token_parts import every_row, of_all_parts
from thunder_flce.operation.loss import RowCoefficients


def forward(operands: Operands, plan: Plan) -> ForwardResult:
    """The loss, the rows' statistics and what else `plan` keeps for the backward.

    Raises:
        IndexError: where a target is neither in [0, V) nor ignore_index (on CUDA without host synchronisation, a
            device-side assertion instead).
    """
    region = Region(operands, plan)
    if isinstance(plan, GradientsInForward):
        return _forward_with_gradients(region, plan)
    if isinstance(plan, SaveLogits):
        return _forward_for_backward(region, max(operands.tokens, 1), operands.tokens)
    assert isinstance(plan, RecomputeLogits | LossOnly)
    return _forward_for_backward(region, plan.chunk_rows, _saved_rows(plan, operands.tokens))


def _forward_with_gradients(region: Region, plan: GradientsInForward) -> ForwardResult:
    """Turns the logits of each chunk into gradients at once, and keeps only the gradients.

    Where each row has an upstream gradient of its own, the result is dX for an upstream gradient of 1 at each row. Such
    a plan is made only where neither dW nor db is needed.
    """
    selection = select_rows(region)
    sums = GradientSums(region, plan)
    staged = sums.staged_logits()
    first = plan.chunk_rows if plan.staged is None else plan.staged[0]
    buffer = staged.rest if staged else steps.logits_buffer(region, min(first, region.operands.tokens))
    first_logits = staged.logits if staged else buffer
    # Where ignored rows are skipped, the first rows of x are copied into the memory of dX. Where that is not there, or
    # is float32, the copies take memory of their own, so they are no more than a chunk.
    room = sums.room_for_x
    largest = first if all(memory is not None for memory in room) else min(first, plan.chunk_rows)
    computed = _start_first_logits(region, selection, first_logits, largest=largest, outs=room)
    rows = of_all_parts(region, selection.rows(), plan.chunk_rows)

    scales = RowScales.of(region, rows)
    has_units = region.loss.has_row_gradients
    expected = None if has_units else region.operands.expected_gradient
    upstream = UpstreamGradients(region.scalar(1.0) if expected is None else expected)
    row_gradients = RowGradients(region, RowScales(rows) if has_units else scales, upstream)
    sums.begin(rows)
    results = []
    if staged and rows.count:
        chunk = slice(0, min(first, rows.count))
        xs, blocks = sums.gather_staged(chunk), staged.logits.rows(chunk)
        _fill(region, blocks, xs, slice(computed, xs[0].shape[0]))
        results.append(_gradient_in_one_pass(region, rows, row_gradients, blocks, chunk))
        sums.add_staged(blocks, xs, chunk)
        del xs, blocks
    chunks = rows.chunks(plan.chunk_rows, first)
    if staged:
        next(chunks, None)
    for chunk in region.loop(chunks, "chunk"):
        xs, logits = sums.gather(chunk), steps.first_rows(buffer, chunk.stop - chunk.start)
        _fill(region, logits, xs, slice(0 if chunk.start else computed, xs[0].shape[0]))
        if _takes_one_pass(region):
            results.append(_gradient_in_one_pass(region, rows, row_gradients, logits, chunk))
            dlogits, bias_grad = LogitsBuffer(steps.named(logits.padded, "dlogits"), logits.layout), None
        else:
            result = chunk_result(region, scales, logits, chunk)
            results.append(result)
            coefficients = row_gradients.coefficients(
                chunk, result.statistics, token_loss=result.token_loss, target_entry=result.target_entry
            )
            assert result.targets is not None
            dlogits, bias_grad = steps.gradient_(
                region, logits, result.statistics, coefficients, result.targets, scales.class_weight
            )
        sums.add(dlogits, xs, chunk, bias_grad)
        # Otherwise these tensors would be alive while those of the next chunk are allocated.
        del xs, logits, dlogits
    # Before dW is rounded out of a float32 accumulator, the chunk's memory goes.
    del first_logits, buffer, staged
    found, gradients = finish_loss(region, scales, results), sums.finish()
    return found._replace(kept=gradients.inputs[0]) if has_units else found._replace(gradients=gradients)


def _forward_for_backward(region: Region, chunk_rows: int, saved_rows: int | None) -> ForwardResult:
    """The statistics of each chunk's logits; those of the first `saved_rows` rows are kept."""
    selection = select_rows(region)
    first = min(chunk_rows, region.operands.tokens) if saved_rows is None else saved_rows
    buffer = steps.logits_buffer(region, first)
    saved_logits = None if saved_rows is None else buffer.padded
    # Copies of the first rows of x take memory, so they are no more than a chunk's.
    largest = min(first, chunk_rows)
    outs: list[Tensor | None] = [None] * len(region.terms)
    computed = _start_first_logits(region, selection, buffer, largest=largest, outs=outs)
    rows = of_all_parts(region, selection.rows(), chunk_rows)

    scales = RowScales.of(region, rows)
    results = []
    for chunk in region.loop(rows.chunks(chunk_rows, first), "chunk"):
        if chunk.start and buffer.padded is saved_logits:
            # Saved logits must not be written over. All later chunks share a buffer of their own.
            buffer = steps.logits_buffer(region, chunk.stop - chunk.start)
        xs, logits = _gathered(region, rows, chunk), steps.first_rows(buffer, chunk.stop - chunk.start)
        _fill(region, logits, xs, slice(0 if chunk.start else computed, xs[0].shape[0]))
        results.append(chunk_result(region, scales, logits, chunk))
        del xs, logits
    del buffer
    return finish_loss(region, scales, results)._replace(kept=saved_logits)


def backward(
    operands: Operands,
    plan: Plan,
    saved: SavedStatistics,
    kept: Tensor | None,
    upstream: UpstreamGradients,
    *,
    may_overwrite: bool = True,
) -> Gradients:
    """The gradients, for the plans that finish them in the backward.

    `saved` and `kept` are what the forward returned. Logits that were kept are overwritten, unless the graph is kept
    (`retain_graph`) or `may_overwrite` is False.
    """
    region, logits = Region(operands, plan), kept
    if isinstance(plan, GradientsInForward):
        assert kept is not None
        return _scaled_units(region, kept, saved.valid_count, upstream)
    rows = of_all_parts(region, reselect_rows(region, saved.valid_count))
    if rows.count == 0:
        return GradientSums(region, plan, rows).finish()
    known = _known_rows(region, rows, saved, upstream)
    if isinstance(plan, RecomputeLogits) and logits is None:
        return _backward_in_blocks(region, known, None, plan.block_columns)
    assert logits is not None
    saved_rows = slice(0, min(_saved_rows(plan, operands.tokens) or 0, rows.count))
    # Where the logits are overwritten but the graph is kept, autograd will read them again. A plan counts on neither.
    is_overwritten = region.logits_dtype == operands.dtype
    is_kept = region.tape is None and is_overwritten and (not may_overwrite or graph_is_kept())
    padded = logits.clone() if is_kept else logits
    buffer = steps.first_rows(LogitsBuffer(padded, region.layout(operands.vocab)), saved_rows.stop)
    steps.name_logits(region, buffer)
    targets = steps.targets(region, rows.target[saved_rows])
    statistics, coefficients = known.statistics.rows(saved_rows), known.coefficients_of(saved_rows)
    is_all = saved_rows.stop == rows.count
    dlogits, bias_grad = steps.gradient_(
        region, buffer, statistics, coefficients, targets, known.scales.class_weight,
        name="dlogits" if is_all else "saved_dlogits",
    )  # fmt: skip
    if isinstance(plan, RecomputeLogits) and not is_all:
        part = SavedPart(saved_rows, dlogits.logits, bias_grad)
        return _backward_in_blocks(region, known, part, plan.block_columns)
    sums = GradientSums(region, plan, rows)
    sums.add(dlogits, sums.gather(saved_rows), saved_rows, bias_grad)
    return sums.finish()


def scale_gradients(
    grad: Tensor, valid_count: Tensor, *gradients: Tensor | None, expected_gradient: Tensor | float | None = None
) -> tuple[Tensor | None, ...]:
    """Backward of `GradientsInForward`: the gradients times the upstream gradient, grad (), over the expected one.

    Gradients are overwritten, unless the graph is kept (`retain_graph`), so that autograd may read them again.
    """
    factor = gradient_factor(grad, valid_count, expected_gradient)
    return tuple(None if gradient is None else steps.scaled(gradient, factor) for gradient in gradients)


def gradient_factor(grad: Tensor, valid_count: Tensor, expected_gradient: Tensor | float | None) -> Tensor:
    """() the number that finished gradients are multiplied by.

    Without a valid row it is 0, even for an upstream gradient of NaN: the mean over no rows is NaN, and a function of
    it may pass NaN back.
    """
    if expected_gradient is not None:
        grad = grad.to(torch.promote_types(grad.dtype, torch.float32)) / expected_gradient
    return torch.where(valid_count == 0, 0, grad)


def _scaled_units(region: Region, kept: Tensor, valid_count: Tensor, upstream: UpstreamGradients) -> Gradients:
    """dX for the upstream gradients, from `kept`, which is dX for an upstream gradient of 1 at each row."""
    rows = every_row(region, valid_count)
    factors = rows.returned(RowGradients(region, RowScales.of(region, rows), upstream).factors)
    return Gradients((steps.scaled_rows(region, kept, factors),), (None,), None)


def _backward_in_blocks(region: Region, known: "_KnownRows", saved: SavedPart | None, block_columns: int) -> Gradients:
    """The logits that were not saved are computed again, a vocabulary block at a time, for all their tokens.

    The statistics make each block independent of the others. So the first one comes last where its dW has the memory
    in which dX is summed until then.
    """
    rows, operands, class_weight = known.scales.rows, region.operands, known.scales.class_weight
    others = slice(0 if saved is None else saved.rows.stop, rows.count)
    xs = _gathered(region, rows, slice(0, rows.count))
    vocab, width = operands.vocab, max(min(block_columns, operands.vocab), 1)
    blocks = [slice(start, min(start + width, vocab)) for start in range(0, vocab, width)]
    first = slice(0, min(width, vocab))
    sums = [BlockSums(region, at, x, rows=rows, saved=saved, first=first) for at, x in enumerate(xs)]
    if any(each.needs_first_block for each in sums):
        blocks = [*blocks[1:], first]
    x_others, target_others = [each.x for each in sums], rows.target[others]
    statistics, coefficients = known.statistics.rows(others), known.coefficients_of(others)
    bias_grad = None
    if operands.bias_grad:
        bias_grad = region.empty("db", (operands.weight_rows,), operands.row_dtype)
        zero_unused_rows(bias_grad, operands)
    for block in region.loop(blocks, "block"):
        logits = steps.logits_buffer(region, others.stop - others.start, block.stop - block.start)
        steps.logits_(region, logits, x_others, columns=block)
        targets = steps.targets(region, target_others, block)
        of_columns = None if class_weight is None else class_weight[block]
        dlogits, column_sums = steps.gradient_(region, logits, statistics, coefficients, targets, of_columns)
        for each in sums:
            each.add(block, dlogits.logits, is_last=block == blocks[-1])
        if bias_grad is not None and column_sums is not None:
            of_saved = None if saved is None else saved.bias_grad
            bias_grad[block] = column_sums if of_saved is None else column_sums + of_saved[block]
        # Otherwise this block would be alive while the next one is allocated.
        del logits, dlogits
    inputs = tuple(each.finish_input() for each in sums)
    return Gradients(inputs, tuple(each.weight for each in sums), rounded_bias(bias_grad, operands))


class _KnownRows(NamedTuple):
    """What the backward knows of all rows."""

    scales: RowScales
    row_gradients: RowGradients
    statistics: RowStatistics
    """Two (N,)"""
    entropy: Tensor | None
    """(N,)"""

    def coefficients_of(self, chunk: slice) -> RowCoefficients:
        """(C,) those of the rows of `chunk`."""
        entropy = None if self.entropy is None else self.entropy[chunk]
        return self.row_gradients.coefficients(chunk, self.statistics.rows(chunk), entropy)


def _known_rows(region: Region, rows: Rows, saved: SavedStatistics, upstream: UpstreamGradients) -> _KnownRows:
    scales = RowScales.of(region, rows)
    row_gradients = RowGradients(region, scales, upstream)
    row_max = steps.let(region, "row_max", rows.mask_ignored(rows.gather(saved.row_max)))
    # An ignored row's logits need not match the saved statistics: exp(z - the largest number) is 0.
    largest = torch.finfo(region.operands.row_dtype).max
    row_log_sum = steps.let(region, "row_log_sum", rows.mask_ignored(rows.gather(saved.row_log_sum), fill=largest))
    entropy = None if saved.entropy is None else steps.let(region, "entropy", rows.received(saved.entropy))
    return _KnownRows(scales, row_gradients, RowStatistics(row_max, row_log_sum), entropy)


def _takes_one_pass(region: Region) -> bool:
    """Whether one kernel makes the statistics of a chunk's rows and, in place of its logits, their gradient.

    Not where the gradient needs new memory, where the loss asks more of a row than its statistics, where ranks have to
    combine these, or where db is needed: a sum over the rows, of which the kernel sees one at a time. Nor where a row's
    log-probability must have the bits that it has without gradients: the kernel adds in another order.
    """
    in_place = region.logits_dtype == region.operands.dtype
    is_plain = region.loss.is_plain and region.shard is None and not region.plan.batch_invariant
    return in_place and is_plain and not region.operands.bias_grad


def _gradient_in_one_pass(region: Region, rows: Rows, row_gradients: RowGradients, logits, chunk: slice) -> ChunkResult:
    coefficients = row_gradients.coefficients(chunk, None)
    found, z_y = steps.statistics_and_gradient_(region, logits, rows.target[chunk], coefficients)
    return ChunkResult(found, z_y, {})


def _start_first_logits(
    region: Region, selection: Selection, logits: LogitsBuffer | LogitsInBlocks, *, largest: int,
    outs: list[Tensor | None],
) -> int:  # fmt: skip
    """How many rows' logits are computed, to keep the device busy while the host waits for the number of rows.

    0 where ranks divide the tokens: which rows all of them compute is not known yet.
    """
    xs = None if region.has_token_parts else selection.first_rows(largest, outs)
    if xs is None:
        return 0
    count = xs[0].shape[0]
    _fill(region, logits, xs, slice(0, count))
    return count


def _fill(region: Region, logits: LogitsBuffer | LogitsInBlocks, xs: list[Tensor], rows: slice) -> None:
    """Fills some rows of the logits of a chunk, from all rows of the terms' inputs, (C, H)."""
    if rows.start >= rows.stop:
        return
    if rows.start:
        xs = [x[rows] for x in xs]
    if isinstance(logits, LogitsBuffer):
        steps.logits_(region, logits.rows(rows), xs)
        return
    for block, buffer in zip(region.loop(logits.columns, "block"), logits.buffers, strict=True):
        steps.logits_(region, buffer.rows(rows), xs, columns=block)


def _gathered(region: Region, rows: Rows, chunk: slice) -> list[Tensor]:
    """The rows of each term's x that belong to `chunk` of the rows."""
    return [rows.gather_chunk(term.x, chunk) for term in region.terms]


def _saved_rows(plan: Plan, tokens: int) -> int | None:
    """How many rows of logits are kept for the backward, 0 without tokens; None for plans that keep none."""
    if isinstance(plan, SaveLogits):
        return tokens
    return plan.saved_rows if isinstance(plan, SaveSomeLogits) else None
