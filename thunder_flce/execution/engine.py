"""The region itself: linear and cross-entropy, forward and backward, over chunks of tokens as a `Plan` says.

For input x (T, H), weight W (V, H), bias b (V,) and target y (T,):

    z = x Wᵀ + b                 the products, rounded to x's dtype as an unfused model does, or float32 if so planned
    loss, dz = …                 row by row, from statistics of z's rows: see `loss`
    dX = dz W,  dW = dzᵀ x,  db = Σ_t dz

Legend: T tokens, N of them not ignored, C tokens in a chunk, H hidden size, V vocabulary.

One buffer holds the products of one chunk, which become dz in place; those of a larger first chunk may lie in slabs, in
the memory of dW (`slabs`). The target's entry is written last, from the product as it was before: (p − 1) in float32
keeps the digits that p, rounded to bf16, has lost near 1.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from thunder_flce.execution.gradient_accumulation import GradientMemory, Gradients, GradientSums
from thunder_flce.execution.gradient_scaling import graph_is_kept, scale_gradient
from thunder_flce.execution.matmul import matmul
from thunder_flce.execution.region import Operands, Region, Targets, at_target
from thunder_flce.execution.row_kernels.interface import (
    LogitsBuffer,
    RowCoefficients,
    RowMoments,
    RowStatistics,
    SlabbedLogits,
    TargetColumns,
)
from thunder_flce.execution.row_selection import RowPolicy, Rows, RowSelection, reselect_rows
from thunder_flce.operation.loss import (
    ClassWeights,
    Divisors,
    IncomingGradients,
    RowGradients,
    reduce_terms,
    row_terms,
)
from thunder_flce.planning.plan import Plan


class SavedStatistics(NamedTuple):
    """What the forward saves for the backward, beside its inputs."""

    row_max: Tensor
    """(T,) 0 in ignored rows"""
    row_log_sum: Tensor
    """(T,) relative to row_max; 0 in ignored rows"""
    valid_count: Tensor
    """() int64, the number of targets that are not ignore_index"""
    entropy: Tensor | None = None
    """(T,) 0 in ignored rows; only where it is one of the loss's outputs"""


class ForwardResult(NamedTuple):
    """What the forward returns; everything but the loss may be saved for the backward."""

    loss: Tensor
    """() or, for reduction "none", (T,)"""
    outputs: tuple[Tensor, ...]
    """What `Loss.outputs` names, in its order: (T,), or () for the accuracy"""
    statistics: SavedStatistics
    logits: Tensor | None
    """(S, row stride) products of the first S rows, as the plan says: only strategy "save_logits" keeps them"""
    gradients: Gradients
    """For an incoming gradient of 1; only strategy "gradients_in_forward" has them"""


def forward(operands: Operands, plan: Plan) -> ForwardResult:
    """The loss, the rows' statistics and what else `plan` keeps for the backward.

    Raises:
        IndexError: where a target is neither in [0, V) nor ignore_index (on CUDA without host synchronisation, a
            device-side assertion instead).
    """
    selection = RowSelection(operands.target, operands.vocab, operands.loss.ignore_index, _row_policy(operands, plan))
    region = Region(operands, plan)
    in_forward = plan.strategy == "gradients_in_forward"
    memory = GradientMemory.allocate(region) if in_forward else None
    first = min(plan.saved_rows or plan.first_rows or plan.chunk_rows, operands.target.shape[0])
    # The first chunk needs the most memory, so it serves the others, unless it is kept.
    first_logits, buffer = _logits_memory(region, first, memory)
    saved_logits = buffer.padded if plan.saved_rows else None
    # The first products keep the device busy while the host waits for the number of rows. Rows of x that they need in
    # another order lie where dX will be; without dX they take memory, so they are no more than a chunk's.
    packed = None if memory is None else memory.input
    largest = min(first, plan.saved_rows or plan.chunk_rows) if packed is None else first
    first_rows = selection.first_rows(operands.x, largest, out=packed)
    computed = 0
    if first_rows is not None:
        computed = first_rows.shape[0]
        region.chunk_products_(first_logits.rows(slice(0, computed)), first_rows)
        del first_rows
    rows = selection.rows()

    scales = _Scales(region, rows)
    results = _RowResults(region, rows)
    one_pass = plan.takes_one_pass(is_plain_loss=operands.loss.is_plain, bias_grad=operands.bias_grad)
    if in_forward:
        row_gradients = scales.row_gradients(IncomingGradients(buffer.padded.new_ones((), dtype=operands.row_dtype)))
        gradients = GradientSums(region, rows, memory)
    for chunk in rows.chunks(first, plan.chunk_rows):
        x = gradients.take(chunk) if in_forward else rows.take(operands.x, chunk)
        target, valid_rows = rows.target[chunk], rows.valid_rows(chunk)
        if saved_logits is buffer.padded and chunk.start:
            buffer = region.buffer(min(plan.chunk_rows, rows.count - chunk.start))
        logits = (buffer if chunk.start else first_logits).rows(slice(0, x.shape[0]))
        region.chunk_products_(logits, x, computed=computed, valid_rows=valid_rows)
        computed = 0
        dlogits, bias_grad = logits, None
        if one_pass:
            coefficients = row_gradients.coefficients(chunk, None)
            results.add(*region.kernels.statistics_and_gradient(logits, target, coefficients))
        else:
            target_product = at_target(logits, target)
            statistics = region.kernels.statistics(logits)
            results.add(statistics, target_product, *region.further_vectors(logits, statistics, scales.class_weights))
            if in_forward:
                coefficients = row_gradients.coefficients(chunk, statistics)
                at = Targets(target, target_product)
                dlogits, bias_grad = region.dlogits(logits, statistics, coefficients, at, scales.class_weights)
        if in_forward:
            gradients.add(dlogits, bias_grad, x, chunk, valid_rows)
        # The next chunk's are allocated before these names are bound again.
        del x, dlogits
    # Before dW is rounded out of a float32 accumulator, the chunk's memory goes.
    first_logits = buffer = logits = None
    loss, outputs, row_statistics = results.finish(scales)
    return ForwardResult(
        loss=loss,
        outputs=outputs,
        statistics=row_statistics,
        logits=saved_logits,
        gradients=gradients.finish() if in_forward else Gradients(None, None, None),
    )


def backward(
    operands: Operands, plan: Plan, saved: SavedStatistics, logits: Tensor | None, incoming: IncomingGradients
) -> Gradients:
    """The gradients, for the strategies that compute them in the backward.

    Args:
        operands: as in the forward.
        plan: as in the forward.
        saved: as returned by the forward.
        logits: as returned by the forward; used up, unless the graph is kept.
        incoming: the gradients that arrive at the loss and its outputs.
    """
    region = Region(operands, plan)
    rows = reselect_rows(operands.target, operands.loss.ignore_index, saved.valid_count, _row_policy(operands, plan))
    scales = _Scales(region, rows)
    row_gradients = scales.row_gradients(incoming)
    # What an ignored row's products are now need not go with its statistics: exp(z - the largest number) is 0.
    logsumexp = rows.only_valid(rows.gather(saved.row_log_sum), fill=torch.finfo(operands.row_dtype).max)
    statistics = RowStatistics(rows.only_valid(rows.gather(saved.row_max)), logsumexp)
    entropy = None if saved.entropy is None else rows.gather(saved.entropy)
    gathered = _GatheredRows(rows, scales, row_gradients, statistics, entropy)
    if logits is None:
        return _backward_by_slabs(region, gathered, None)
    if rows.count == 0:
        return GradientSums(region, rows, GradientMemory.allocate(region)).finish()
    saved_rows = slice(0, min(plan.saved_rows, rows.count))
    # Where the products are overwritten but the graph is kept, autograd will read them again.
    is_overwritten = region.logits_dtype == operands.x.dtype
    buffer = LogitsBuffer(logits.clone() if is_overwritten and graph_is_kept() else logits, region.layout())
    dlogits, bias_grad = gathered.dlogits(region, buffer.rows(saved_rows), saved_rows)
    if saved_rows.stop < rows.count:
        return _backward_by_slabs(region, gathered, _SavedPart(saved_rows, dlogits.logits, bias_grad))
    gradients = GradientSums(region, rows, GradientMemory.allocate(region))
    x, valid_rows = gradients.take(saved_rows), rows.valid_rows(saved_rows)
    gradients.add(dlogits, bias_grad, x, saved_rows, valid_rows)
    return gradients.finish()


def scale_gradients(grad: Tensor, valid_count: Tensor, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    """Backward of "gradients_in_forward": the gradients times the incoming gradient, grad ().

    What autograd will read again, because the graph is kept, is left as it is. Without a valid row the gradients are
    zeros even for an incoming gradient of NaN, which a function of the NaN that is the mean of nothing may have.
    """
    grad = torch.where(valid_count == 0, 0, grad)
    may_overwrite = not graph_is_kept()
    return tuple(None if g is None else scale_gradient(g, grad, may_overwrite=may_overwrite) for g in gradients)


class _Scales:
    """What depends on all rows at once: class weights and divisors."""

    def __init__(self, region: Region, rows: Rows):
        operands, loss = region.operands, region.loss
        self._operands = operands
        self._rows = rows
        class_weight = operands.class_weight
        if class_weight is not None:
            class_weight = class_weight[: operands.vocab]
        self.class_weights = ClassWeights.of(class_weight, rows.target, operands.row_dtype)
        self.divisors = Divisors.of(loss, rows, self.class_weights, operands.num_items)

    def row_gradients(self, incoming: IncomingGradients) -> RowGradients:
        """The rows' shares of the incoming gradients."""
        operands = self._operands
        return RowGradients(
            operands.loss, self._rows, incoming, self.divisors, self.class_weights, operands.vocab, operands.row_dtype
        )


class _RowVectors(NamedTuple):
    """What the forward finds out about rows; (C,) or (N,) each, None where the loss does not need it."""

    row_max: Tensor
    row_log_sum: Tensor
    target_product: Tensor
    expected: Tensor | None
    weighted_sum: Tensor | None
    argmax: Tensor | None


class _RowResults:
    """Gathers what the chunks' rows give, and makes of it the loss, its outputs and the saved statistics."""

    def __init__(self, region: Region, rows: Rows):
        self._region = region
        self._rows = rows
        self._chunks: list[_RowVectors] = []

    def add(
        self,
        statistics: RowStatistics,
        target_product: Tensor,
        moments: RowMoments | None = None,
        argmax: Tensor | None = None,
    ) -> None:
        """Keeps what a chunk's rows have given, (C,) each."""
        self._chunks.append(_RowVectors(*statistics, target_product, *(moments or RowMoments()), argmax))

    def finish(self, scales: _Scales) -> tuple[Tensor, tuple[Tensor, ...], SavedStatistics]:
        """The loss, its further outputs and the saved statistics."""
        region, rows, loss = self._region, self._rows, self._region.loss
        vectors = self._concatenated()
        statistics = RowStatistics(vectors.row_max, vectors.row_log_sum)
        target_logit = loss.logit_map(vectors.target_product.to(vectors.row_max.dtype))
        terms = row_terms(
            loss, rows, statistics, target_logit, vectors.weighted_sum, scales.class_weights, region.operands.vocab
        )
        value = reduce_terms(loss, terms, scales.divisors)
        entropy = None
        if loss.needs_entropy:
            entropy = rows.scatter(rows.only_valid(vectors.row_log_sum - vectors.expected))
        saved = SavedStatistics(*(rows.scatter(vector) for vector in statistics), rows.valid_count, entropy)

        def output(name: str) -> Tensor:
            if name == "entropy":
                return entropy
            if name == "log_prob":
                return rows.scatter(rows.only_valid(target_logit - vectors.row_max - vectors.row_log_sum))
            if name == "argmax":
                return vectors.argmax
            argmax = rows.only_valid(vectors.argmax, fill=-1)
            if name == "valid_argmax":
                return rows.scatter(argmax, fill=-1)
            return (argmax == rows.target).sum().to(value.dtype) / rows.valid_count

        outputs = tuple(output(name) for name in loss.outputs)
        return rows.scatter(value) if loss.reduction == "none" else value, outputs, saved

    def _concatenated(self) -> _RowVectors:
        if self._chunks:
            columns = zip(*self._chunks, strict=True)
            return _RowVectors(*(None if parts[0] is None else torch.cat(parts) for parts in columns))
        operands, loss = self._region.operands, self._region.loss
        nothing = operands.x.new_empty(0, dtype=operands.row_dtype)
        expected = nothing if loss.needs_entropy else None
        weighted_sum = nothing if loss.label_smoothing else None
        argmax = nothing.long() if loss.needs_argmax else None
        return _RowVectors(nothing, nothing, nothing, expected, weighted_sum, argmax)


class _GatheredRows(NamedTuple):
    """The rows of a backward, and what the forward has found out about them."""

    rows: Rows
    scales: _Scales
    row_gradients: RowGradients
    statistics: RowStatistics
    """Two (N,)"""
    entropy: Tensor | None
    """(N,)"""

    def coefficients(self, chunk: slice) -> RowCoefficients:
        """Those of the rows of `chunk`."""
        entropy = None if self.entropy is None else self.entropy[chunk]
        return self.row_gradients.coefficients(chunk, self.chunk_statistics(chunk), entropy)

    def chunk_statistics(self, chunk: slice) -> RowStatistics:
        """Those of the rows of `chunk`."""
        return RowStatistics(*(vector[chunk] for vector in self.statistics))

    def dlogits(self, region: Region, buffer: LogitsBuffer, chunk: slice) -> tuple[LogitsBuffer, Tensor | None]:
        """See `Region.dlogits`: of the rows of `chunk`, from their products over the whole vocabulary."""
        target = self.rows.target[chunk]
        return region.dlogits(
            buffer,
            self.chunk_statistics(chunk),
            self.coefficients(chunk),
            Targets(target, at_target(buffer, target)),
            self.scales.class_weights,
        )


class _SavedPart(NamedTuple):
    """What the backward has made of the logits that were saved."""

    rows: slice
    """The first rows"""
    dlogits: Tensor
    """(S, V)"""
    bias_grad: Tensor | None
    """(V,) their sum over the rows"""


def _backward_by_slabs(region: Region, gathered: _GatheredRows, saved: _SavedPart | None) -> Gradients:
    """Backward where logits were not saved: these again, a slab of the vocabulary at a time, for all such tokens.

    Each row of dW belongs to one slab, so it is written once and needs no accumulator. dX is summed over slabs in
    float32. The statistics make each slab independent of the others.
    """
    rows, operands = gathered.rows, region.operands
    x = rows.take(operands.x, slice(None))
    others = slice(0 if saved is None else saved.rows.stop, rows.count)
    valid_others = rows.valid_rows(others)
    x_others, target_others = x[others], rows.target[others]
    statistics, coefficients = gathered.chunk_statistics(others), gathered.coefficients(others)
    vocab = operands.vocab
    width = min(region.plan.slab_columns, vocab)
    tune = region.plan.tune_products

    def empty(needed: bool, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        return torch.empty(shape, dtype=dtype, device=x.device) if needed else None

    # dX is summed in its own memory if that is wide enough.
    is_wide, shape = x.dtype == operands.row_dtype, operands.x.shape
    input_grad = empty(operands.input_grad and (is_wide or saved is not None), shape, x.dtype)
    if is_wide and operands.input_grad:
        input_sum = input_grad[others]
    else:
        input_sum = empty(operands.input_grad, x_others.shape, operands.row_dtype)
    weight_grad = empty(operands.weight_grad, operands.weight.shape, operands.weight.dtype)
    bias_grad = empty(operands.bias_grad, operands.weight.shape[:1], operands.row_dtype)
    for gradient in (weight_grad, bias_grad):
        if gradient is not None:
            gradient[vocab:] = 0
    valid_saved = None if saved is None else rows.valid_rows(saved.rows)
    if saved is not None and operands.input_grad:
        out = input_grad[saved.rows]
        matmul.input_gradient_(out, saved.dlogits, region.weight, tune=tune, valid_rows=valid_saved)
    for start in range(0, vocab, width):
        slab = slice(start, min(start + width, vocab))
        weight = region.weight[slab]
        logits = region.buffer(x_others.shape[0], weight.shape[0])
        region.products_(logits, x_others, slab, valid_rows=valid_others)
        column, is_here = TargetColumns.of(target_others, slab)
        at = Targets(column, at_target(logits, column), is_here)
        dlogits, column_sums = region.dlogits(logits, statistics, coefficients, at, gathered.scales.class_weights, slab)
        if input_sum is not None:
            matmul.input_gradient_(
                input_sum, dlogits.logits, weight, accumulate=start > 0, tune=tune, valid_rows=valid_others
            )
        if weight_grad is not None:
            # Nothing else may hold on to this slab while the next is allocated.
            parts = [matmul.Part(dlogits.logits, x_others, valid_others)]
            if saved is not None:
                parts.append(matmul.Part(saved.dlogits[:, slab], x[saved.rows], valid_saved))
            matmul.weight_gradient_of_parts_(weight_grad[slab], parts, tune=tune)
            del parts
        if bias_grad is not None:
            bias_grad[slab] = column_sums if saved is None else column_sums + saved.bias_grad[slab]
        del logits, dlogits
    if operands.input_grad:
        if not is_wide:
            input_grad = empty(True, shape, x.dtype) if input_grad is None else input_grad
            input_grad[others] = input_sum
        rows.spread_(input_grad)
    return Gradients(input_grad, weight_grad, None if bias_grad is None else bias_grad.to(operands.bias.dtype))


def _logits_memory(
    region: Region, first: int, memory: GradientMemory | None
) -> tuple[LogitsBuffer | SlabbedLogits, LogitsBuffer]:
    """Memory for the logits of the first chunk, of `first` rows, and for those of a later one; they may be the same."""
    operands, plan, layout = region.operands, region.plan, region.layout()
    tokens, hidden = operands.x.shape
    slabs = plan.logits_in_slabs(hidden=hidden, vocab=operands.vocab, dtype=operands.x.dtype)
    if slabs is None:
        buffer = region.buffer(first)
        return buffer, buffer
    rows = min(plan.chunk_rows, tokens - first)
    last = region.layout(slabs.columns[-1].stop - slabs.columns[-1].start)
    elements = max(slabs.own_elements(last.row_stride), rows * layout.row_stride)
    own = torch.empty(elements, dtype=region.logits_dtype, device=operands.x.device)
    borrowed = memory.weight_as(region.logits_dtype, operands.vocab)
    buffer = LogitsBuffer(own[: rows * layout.row_stride].view(rows, layout.row_stride), layout)
    return SlabbedLogits.lay_out(slabs, borrowed, own, last), buffer


def _row_policy(operands: Operands, plan: Plan) -> RowPolicy:
    return RowPolicy(ignored_rows=plan.ignored_rows, every_row=operands.loss.needs_every_row)
