"""A loss region's operands and plan, and what follows from them for every chunk of its tokens.

Legend: T tokens, C tokens in a chunk, H hidden size, V vocabulary.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from thunder_flce.execution.matmul import matmul
from thunder_flce.execution.row_kernels.interface import (
    LogitsBuffer,
    RowCoefficients,
    RowKernels,
    RowMoments,
    RowStatistics,
    SlabbedLogits,
    kernels_for,
)
from thunder_flce.execution.row_kernels.torch_rows import statistics_dtype
from thunder_flce.operation.loss import ClassWeights, Loss
from thunder_flce.planning.plan import Plan, VocabLayout, layout_for


@dataclass(frozen=True, kw_only=True)
class Operands:
    """The region's inputs and which of them need a gradient."""

    x: Tensor
    """(T, H)"""
    weight: Tensor
    """(V, H), x's dtype; of its rows, only the first `Loss.vocab_size` take part"""
    bias: Tensor | None
    """(V,), x's dtype"""
    target: Tensor
    """(T,) integers in [0, V), or ignore_index"""
    loss: Loss
    class_weight: Tensor | None = None
    """(V,) floating point"""
    num_items: Tensor | None = None
    """() what "mean" divides by, in place of the number of valid targets"""
    input_grad: bool = False
    weight_grad: bool = False
    bias_grad: bool = False

    @property
    def vocab(self) -> int:
        """K, the columns of the vocabulary that take part: V, or `Loss.vocab_size`."""
        return self.loss.vocab_size or self.weight.shape[0]

    @property
    def row_dtype(self) -> torch.dtype:
        """The dtype of the loss and of everything that is one number a row."""
        return statistics_dtype(self.x.dtype)


class Targets(NamedTuple):
    """Where the targets of a chunk's rows are in its buffer."""

    column: Tensor
    """(C,) columns of the buffer"""
    product: Tensor
    """(C,) the products there"""
    is_here: Tensor | None = None
    """(C,) False in rows whose target lies in another slab of the vocabulary; `column` is then any column"""


class Region:
    """Operands and a plan, and what follows from them for every chunk."""

    def __init__(self, operands: Operands, plan: Plan):
        self.operands = operands
        self.plan = plan
        self.loss = operands.loss
        self.logits_dtype = torch.float32 if plan.float32_logits else operands.x.dtype
        device_type = operands.x.device.type
        self.kernels: RowKernels = kernels_for(
            dtype=self.logits_dtype, device_type=device_type, logit_map=self.loss.logit_map
        )
        vocab = operands.vocab
        self.weight = operands.weight[:vocab]
        self.bias = None if operands.bias is None else operands.bias[:vocab]

    def layout(self, columns: int | None = None) -> VocabLayout:
        """How rows of products lie in memory, over the vocabulary or `columns` columns of it."""
        device_type = self.operands.x.device.type
        return layout_for(columns or self.operands.vocab, dtype=self.logits_dtype, device_type=device_type)

    def buffer(self, rows: int, columns: int | None = None) -> LogitsBuffer:
        """Memory for the products of `rows` rows, over the vocabulary or `columns` columns of it."""
        return LogitsBuffer.allocate(rows, self.layout(columns), dtype=self.logits_dtype, device=self.operands.x.device)

    def products_(
        self, buffer: LogitsBuffer, x: Tensor, slab: slice = slice(None), *, valid_rows: Tensor | None = None
    ) -> None:
        """Fills the buffer with z = x Wᵀ + b, over the vocabulary or a slab of it; valid_rows: `Rows.valid_rows`."""
        bias = None if self.bias is None else self.bias[slab]
        matmul.logits_(buffer.logits, x, self.weight[slab], bias, tune=self.plan.tune_products, valid_rows=valid_rows)

    def chunk_products_(
        self,
        logits: LogitsBuffer | SlabbedLogits,
        x: Tensor,
        *,
        computed: int = 0,
        valid_rows: Tensor | None = None,
    ) -> None:
        """Fills the logits of a chunk, (C, V), of which the first `computed` rows are there already."""
        missing = slice(computed, x.shape[0])
        if computed < x.shape[0]:
            for slab, buffer in zip(logits.columns, logits.buffers, strict=True):
                self.products_(buffer.rows(missing), x[missing], slab, valid_rows=valid_rows)

    def further_vectors(
        self, buffer: LogitsBuffer, statistics: RowStatistics, class_weights: ClassWeights | None
    ) -> tuple[RowMoments, Tensor | None]:
        """What else the loss needs of a chunk's rows: moments, and the columns of the largest logits, (C,)."""
        loss = self.loss
        moments = RowMoments()
        if loss.needs_entropy or loss.label_smoothing:
            class_weight = None if class_weights is None else class_weights.columns
            moments = self.kernels.moments(
                buffer,
                statistics,
                class_weight,
                expected=loss.needs_entropy,
                weighted_sum=loss.label_smoothing != 0,
            )
        argmax = None
        if loss.needs_argmax:
            # Of the products: their map keeps the order, or turns it round.
            argmax = (torch.argmax if loss.logit_scale > 0 else torch.argmin)(buffer.logits, 1)
        return moments, argmax

    def dlogits(
        self,
        buffer: LogitsBuffer,
        statistics: RowStatistics,
        coefficients: RowCoefficients,
        targets: Targets,
        class_weights: ClassWeights | None,
        slab: slice = slice(None),
    ) -> tuple[LogitsBuffer, Tensor | None]:
        """dz of a chunk (C, V), in x's dtype, and its sum over the rows, (V,), if the bias needs a gradient.

        The products are overwritten, unless their dtype is another than x's.
        """
        dtype = self.operands.x.dtype
        class_weight = None
        if class_weights is not None and coefficients.uniform is not None:
            class_weight = class_weights.columns[slab]
        dlogits, column_sums = self.kernels.gradient(
            buffer,
            statistics,
            coefficients,
            class_weight,
            dtype=dtype,
            column_sums=self.operands.bias_grad,
        )
        column, product, is_here = targets
        one_hot = coefficients.one_hot if is_here is None else torch.where(is_here, coefficients.one_hot, 0)
        at_target = self.kernels.target_gradient(
            product,
            statistics,
            coefficients._replace(one_hot=one_hot),
            None if class_weight is None else class_weight[column],
            dtype=dtype,
        )
        dlogits.logits.scatter_(1, column[:, None], at_target[:, None])
        if column_sums is not None:
            slope = self.loss.logit_map.slope(self.loss.logit_map(product.to(one_hot.dtype)))
            column_sums.index_add_(0, column, one_hot if slope is None else one_hot * slope, alpha=-1)
        return dlogits, column_sums


def at_target(buffer: LogitsBuffer, target: Tensor) -> Tensor:
    """(C,) the product at each row's target, the same one that the statistics see."""
    return buffer.logits.gather(1, target[:, None]).squeeze(1)
