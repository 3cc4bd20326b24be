"""The region itself: linear and cross-entropy, forward and backward, over chunks of tokens as a `Plan` says.

Definition, for input x (T, H), weight W (V, H), bias b (V,) and target y (T,):

    z = x Wᵀ + b                                          the logits, rounded to x's dtype as an unfused model does
    row_max = max_v z_v,  row_logsumexp = log Σ_v exp(z_v − row_max)
    loss_t = row_logsumexp − (z_y − row_max)              0 where y is ignore_index
    dz_v = (exp(z_v − row_max − row_logsumexp) − [v = y]) · s        s: the row's share of the incoming gradient
    dX = dz W,  dW = dzᵀ x,  db = Σ_t dz

Legend: T tokens, N of them not ignored, C tokens in a chunk, H hidden size, V vocabulary.

One buffer holds the logits of one chunk, which become dz in place. The target's entry is written afterwards, from the
logit gathered before: (p − 1) in float32 keeps the digits that p, rounded to bf16, has lost near 1.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from thunder_flce import products
from thunder_flce.gradient_scaling import graph_is_kept, scale_gradient
from thunder_flce.plan import Plan, layout_for
from thunder_flce.row_kernels import LogitsBuffer, RowKernels, RowStatistics, kernels_for
from thunder_flce.row_kernels.torch_ops import statistics_dtype
from thunder_flce.rows import Rows, RowSelection, reselect_rows


@dataclass(frozen=True)
class Operands:
    """The region's inputs and which of them need a gradient."""

    x: Tensor
    """(T, H)"""
    weight: Tensor
    """(V, H), x's dtype"""
    bias: Tensor | None
    """(V,), x's dtype"""
    target: Tensor
    """(T,) integers in [0, V), or ignore_index"""
    ignore_index: int
    reduction: str
    """"mean", "sum" or "none"."""
    input_grad: bool = False
    weight_grad: bool = False
    bias_grad: bool = False

    @property
    def vocab(self) -> int:
        """V."""
        return self.weight.shape[0]

    @property
    def row_dtype(self) -> torch.dtype:
        """The dtype of the loss and of everything that is one number a row."""
        return statistics_dtype(self.x.dtype)

    @property
    def kernels(self) -> RowKernels:
        """The row kernels for this dtype and device."""
        return kernels_for(dtype=self.x.dtype, device_type=self.x.device.type)

    def buffer(self, rows: int, columns: int | None = None) -> LogitsBuffer:
        """Memory for the logits of `rows` rows, over the vocabulary or `columns` columns of it."""
        layout = layout_for(columns or self.vocab, dtype=self.x.dtype, device_type=self.x.device.type)
        return LogitsBuffer.allocate(rows, layout, dtype=self.x.dtype, device=self.x.device)


class Gradients(NamedTuple):
    """None for what needs no gradient."""

    input: Tensor | None
    """(T, H)"""
    weight: Tensor | None
    """(V, H)"""
    bias: Tensor | None
    """(V,)"""


class SavedStatistics(NamedTuple):
    """What the forward saves for the backward, beside its inputs."""

    row_max: Tensor
    """(T,) 0 in ignored rows"""
    row_logsumexp: Tensor
    """(T,) relative to row_max; 0 in ignored rows"""
    valid_count: Tensor
    """() int64, the number of targets that are not ignore_index"""


class ForwardResult(NamedTuple):
    """What the forward returns; everything but the loss may be saved for the backward."""

    loss: Tensor
    """() or, for reduction "none", (T,)"""
    statistics: SavedStatistics
    logits: Tensor | None
    """(T, row stride), the first N rows of them written: only strategy "save_logits" keeps them"""
    gradients: Gradients
    """For an incoming gradient of 1; only strategy "gradients_in_forward" has them"""


def forward(operands: Operands, plan: Plan) -> ForwardResult:
    """The loss, the rows' statistics and what else `plan` keeps for the backward.

    Raises:
        IndexError: where a target is neither in [0, V) nor ignore_index (on CUDA without host synchronisation, a
            device-side assertion instead).
    """
    selection = RowSelection(operands.target, operands.vocab, operands.ignore_index, skip=plan.skip_ignored_rows)
    buffer = operands.buffer(min(plan.chunk_rows, operands.target.shape[0]))
    # The first product keeps the device busy while the host waits for the number of rows.
    first_rows = selection.first_rows(operands.x, plan.chunk_rows)
    computed = 0
    if first_rows is not None:
        computed = first_rows.shape[0]
        products.logits_(buffer.rows(slice(0, computed)).logits, first_rows, operands.weight, operands.bias)
        del first_rows
    rows = selection.rows()

    per_row: list[tuple[Tensor, Tensor, Tensor]] = []
    in_forward = plan.strategy == "gradients_in_forward"
    scale = _row_scale(rows, operands, None) if in_forward else None
    gradients = GradientSums(operands, rows, plan) if in_forward else None
    for chunk in rows.chunks(plan.chunk_rows):
        x, target = rows.take(operands.x, chunk), rows.target[chunk]
        logits = buffer.rows(slice(0, x.shape[0]))
        if computed < x.shape[0]:
            missing = slice(computed, x.shape[0])
            products.logits_(logits.rows(missing).logits, x[missing], operands.weight, operands.bias)
        computed = 0
        target_logit = _target_logits(logits, target)
        statistics, row_loss = operands.kernels.statistics(logits, target_logit)
        per_row.append((*statistics, row_loss))
        if in_forward:
            bias_grad = _logits_to_gradients_(operands, logits, statistics, target, target_logit, scale[chunk])
            gradients.add(logits.logits, bias_grad, x, chunk)
    saved_logits = buffer.padded if plan.strategy == "save_logits" else None
    # Before dW is rounded out of a float32 accumulator, the chunk's memory goes.
    buffer = logits = None
    if not per_row:
        per_row.append((operands.x.new_empty(0, dtype=operands.row_dtype),) * 3)
    row_max, row_logsumexp, row_loss = (torch.cat(vectors) for vectors in zip(*per_row, strict=True))
    if rows.valid is not None:
        row_loss = torch.where(rows.valid, row_loss, 0)
    return ForwardResult(
        loss=_reduce(row_loss, rows, operands),
        statistics=SavedStatistics(rows.scatter(row_max), rows.scatter(row_logsumexp), rows.valid_count),
        logits=saved_logits,
        gradients=gradients.finish() if in_forward else Gradients(None, None, None),
    )


def backward(operands: Operands, plan: Plan, saved: SavedStatistics, logits: Tensor | None, grad: Tensor) -> Gradients:
    """The gradients, for the strategies that compute them in the backward.

    Args:
        operands: as in the forward.
        plan: as in the forward.
        saved: as returned by the forward.
        logits: as returned by the forward; used up, unless the graph is kept.
        grad: () or, for reduction "none", (T,): the incoming gradient.
    """
    if logits is not None:
        return _backward_from_logits(operands, plan, saved, logits, grad)
    return _backward_by_slabs(operands, plan, saved, grad)


def scale_gradients(grad: Tensor, valid_count: Tensor, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    """Backward of "gradients_in_forward": the gradients times the incoming gradient, grad ().

    What autograd will read again, because the graph is kept, is left as it is. Without a valid row the gradients are
    zeros even for an incoming gradient of NaN, which a function of the NaN that is the mean of nothing may have.
    """
    grad = torch.where(valid_count == 0, 0, grad)
    may_overwrite = not graph_is_kept()
    return tuple(None if g is None else scale_gradient(g, grad, may_overwrite=may_overwrite) for g in gradients)


def _backward_from_logits(
    operands: Operands, plan: Plan, saved: SavedStatistics, logits: Tensor, grad: Tensor
) -> Gradients:
    """Backward of "save_logits": dlogits take the place of the logits."""
    rows = reselect_rows(operands.target, operands.ignore_index, saved.valid_count, skip=plan.skip_ignored_rows)
    scale = _row_scale(rows, operands, grad)
    row_max, row_logsumexp = rows.gather(saved.row_max), rows.gather(saved.row_logsumexp)
    buffer = LogitsBuffer(
        logits.clone() if graph_is_kept() else logits,
        layout_for(operands.vocab, dtype=operands.x.dtype, device_type=operands.x.device.type),
    )
    gradients = GradientSums(operands, rows, plan)
    for chunk in rows.chunks(plan.chunk_rows):
        chunk_logits, target = buffer.rows(chunk), rows.target[chunk]
        statistics = RowStatistics(row_max[chunk], row_logsumexp[chunk])
        target_logit = _target_logits(chunk_logits, target)
        bias_grad = _logits_to_gradients_(operands, chunk_logits, statistics, target, target_logit, scale[chunk])
        gradients.add(chunk_logits.logits, bias_grad, rows.take(operands.x, chunk), chunk)
    return gradients.finish()


def _backward_by_slabs(operands: Operands, plan: Plan, saved: SavedStatistics, grad: Tensor) -> Gradients:
    """Backward of "recompute_logits": the logits again, a slab of the vocabulary at a time, for all tokens.

    Each row of dW belongs to one slab, so it is written once and needs no accumulator. dX is summed over slabs in
    float32. The statistics make each slab independent of the others.
    """
    rows = reselect_rows(operands.target, operands.ignore_index, saved.valid_count, skip=plan.skip_ignored_rows)
    scale = _row_scale(rows, operands, grad)
    statistics = RowStatistics(rows.gather(saved.row_max), rows.gather(saved.row_logsumexp))
    x = rows.take(operands.x, slice(None))
    width = min(plan.slab_columns, operands.vocab)

    def empty(needed: bool, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        return torch.empty(shape, dtype=dtype, device=x.device) if needed else None

    input_sum = empty(operands.input_grad, x.shape, operands.row_dtype)
    weight_grad = empty(operands.weight_grad, operands.weight.shape, operands.weight.dtype)
    bias_grad = empty(operands.bias_grad, (operands.vocab,), operands.row_dtype)
    for start in range(0, operands.vocab, width):
        slab = slice(start, min(start + width, operands.vocab))
        weight = operands.weight[slab]
        logits = operands.buffer(rows.count, weight.shape[0])
        products.logits_(logits.logits, x, weight, None if operands.bias is None else operands.bias[slab])
        target = rows.target - slab.start
        in_slab = (target >= 0) & (target < weight.shape[0])
        target = target.clamp(0, weight.shape[0] - 1)
        target_logit = _target_logits(logits, target)
        column_sums = _logits_to_gradients_(
            operands, logits, statistics, target, target_logit, scale, is_target=in_slab
        )
        if input_sum is not None:
            products.input_gradient_(input_sum, logits.logits, weight, accumulate=start > 0)
        if weight_grad is not None:
            products.weight_gradient_(weight_grad[slab], logits.logits, x, accumulate=False)
        if bias_grad is not None:
            bias_grad[slab] = column_sums
        del logits
    return Gradients(
        None if input_sum is None else rows.scatter(input_sum.to(operands.x.dtype)),
        weight_grad,
        None if bias_grad is None else bias_grad.to(operands.bias.dtype),
    )


class GradientSums:
    """dX, dW and db while chunks of tokens add to them; no memory for those that are not needed."""

    def __init__(self, operands: Operands, rows: Rows, plan: Plan):
        self._operands = operands
        self._rows = rows
        self._is_first = True
        x, weight = operands.x, operands.weight
        # Rows that are skipped get no product: their gradient is 0.
        allocate = torch.empty if rows.index is None else torch.zeros
        self._input = allocate(x.shape, dtype=x.dtype, device=x.device) if operands.input_grad else None
        accumulator = torch.float32 if plan.float32_accumulator else weight.dtype
        self._weight = torch.empty(weight.shape, dtype=accumulator, device=x.device) if operands.weight_grad else None
        self._hot = None
        if self._weight is not None and plan.float32_rows:
            self._hot = HotRows(rows.target, operands, plan.float32_rows)
        self._bias = (
            torch.zeros(operands.vocab, dtype=operands.row_dtype, device=x.device) if operands.bias_grad else None
        )

    def add(self, dlogits: Tensor, bias_grad: Tensor | None, x: Tensor, chunk: slice) -> None:
        """Adds what the rows of `chunk` contribute: dlogits (C, V), their sum over rows (V,), x (C, H) as taken."""
        if self._weight is not None:
            products.weight_gradient_(self._weight, dlogits, x, accumulate=not self._is_first)
        if self._hot is not None:
            self._hot.add(dlogits, x)
        if self._bias is not None:
            self._bias.add_(bias_grad)
        if self._input is not None and self._rows.index is None:
            products.input_gradient_(self._input[chunk], dlogits, self._operands.weight)
        elif self._input is not None:
            # Where rows are skipped, x is a copy that nobody needs any more: its memory takes dX.
            products.input_gradient_(x, dlogits, self._operands.weight)
            self._input.index_copy_(0, self._rows.index[chunk], x)
        self._is_first = False

    def finish(self) -> Gradients:
        """The gradients in the dtypes of what they belong to; zeros where no chunk was added."""
        if self._weight is not None and self._is_first:
            self._weight.zero_()
        elif self._hot is not None:
            self._hot.write(self._weight)
        weight, bias = self._operands.weight, self._operands.bias
        return Gradients(
            self._input,
            None if self._weight is None else self._weight.to(weight.dtype),
            None if self._bias is None else self._bias.to(bias.dtype),
        )


class HotRows:
    """The rows of dW with the most targets, summed in float32 beside a dW that is summed in 16 bits.

    Words are not spread evenly: a few columns of the vocabulary are the target of many tokens, get a large share from
    every chunk, and hold most of what dW loses by rounding. With Zipf-distributed targets, 8192 × 128256 × 4096 and
    four chunks, dW errs by 2.4e-3 without them, against 1.5e-3 of a single product.
    """

    def __init__(self, target: Tensor, operands: Operands, count: int):
        occurrences = torch.zeros(operands.vocab, dtype=torch.float32, device=target.device)
        occurrences.scatter_add_(0, target, torch.ones_like(target, dtype=torch.float32))
        self._columns = occurrences.topk(min(count, operands.vocab), sorted=False).indices
        hidden = operands.weight.shape[1]
        self._sum = torch.zeros(self._columns.shape[0], hidden, dtype=torch.float32, device=target.device)

    def add(self, dlogits: Tensor, x: Tensor) -> None:
        """Adds what a chunk contributes: dlogits (C, V), x (C, H)."""
        # gather, since index_select takes three times as long along this dimension.
        hot = dlogits.gather(1, self._columns.expand(dlogits.shape[0], -1))
        products.weight_gradient_(self._sum, hot, x, accumulate=True)

    def write(self, weight_grad: Tensor) -> None:
        """Puts the sums into dW (V, H), rounded once."""
        weight_grad.index_copy_(0, self._columns, self._sum.to(weight_grad.dtype))


def _target_logits(buffer: LogitsBuffer, target: Tensor) -> Tensor:
    """(C,) the logit of each row's target, from the same product as the statistics."""
    return buffer.logits.gather(1, target[:, None]).squeeze(1)


def _logits_to_gradients_(
    operands: Operands,
    buffer: LogitsBuffer,
    statistics: RowStatistics,
    target: Tensor,
    target_logit: Tensor,
    scale: Tensor,
    *,
    is_target: Tensor | None = None,
) -> Tensor | None:
    """Turns a chunk's logits into dz, in place; returns dz summed over the rows, (V,), if the bias needs a gradient.

    Args:
        operands: the region's inputs.
        buffer: logits of (C, V), or of a slab of the vocabulary.
        statistics: two (C,).
        target: (C,) columns of the buffer.
        target_logit: (C,) the logits at `target`.
        scale: (C,) each row's share of the incoming gradient.
        is_target: (C,) False in rows whose target lies in another slab; `target` is then any column.
    """
    kernels = operands.kernels
    column_sums = kernels.gradient_(buffer, statistics, scale, column_sums=operands.bias_grad)
    one_hot_scale = scale if is_target is None else torch.where(is_target, scale, 0)
    at_target = kernels.target_gradient(target_logit, statistics, scale, one_hot_scale)
    buffer.logits.scatter_(1, target[:, None], at_target[:, None])
    if column_sums is not None:
        column_sums.index_add_(0, target, one_hot_scale, alpha=-1)
    return column_sums


def _row_scale(rows: Rows, operands: Operands, grad: Tensor | None) -> Tensor:
    """(N,) what each row's gradient is multiplied by: grad (1 if None), over the number of valid rows for "mean"."""
    dtype = operands.row_dtype
    if operands.reduction == "none":
        scale = rows.gather(grad.reshape(-1).to(dtype))
    else:
        scale = torch.ones((), dtype=dtype, device=operands.x.device) if grad is None else grad.to(dtype)
        if operands.reduction == "mean":
            scale = scale / rows.valid_count
        scale = scale.expand(rows.count)
    if rows.valid is not None:
        scale = torch.where(rows.valid, scale, 0)
    return scale.contiguous()


def _reduce(row_loss: Tensor, rows: Rows, operands: Operands) -> Tensor:
    """The loss; the mean over no row is NaN, as torch.nn.functional.cross_entropy has it."""
    if operands.reduction == "none":
        return rows.scatter(row_loss)
    total = row_loss.sum()
    return total / rows.valid_count if operands.reduction == "mean" else total
