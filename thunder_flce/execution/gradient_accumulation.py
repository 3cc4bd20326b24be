"""dX, dW and db while chunks of tokens add to them.

Legend: T tokens, N rows computed, C rows in a chunk, H hidden size, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from thunder_flce.execution.matmul import matmul
from thunder_flce.execution.region import Region
from thunder_flce.execution.row_kernels.interface import LogitsBuffer, SlabbedLogits
from thunder_flce.execution.row_selection import Rows


class Gradients(NamedTuple):
    """None for what needs no gradient."""

    input: Tensor | None
    """(T, H)"""
    weight: Tensor | None
    """(V, H)"""
    bias: Tensor | None
    """(V,)"""


class GradientMemory(NamedTuple):
    """Memory for what is summed over chunks; None for what is not needed."""

    input: Tensor | None
    """(T, H), x's dtype"""
    weight: Tensor | None
    """(V, H), of the dtype that dW is summed in"""

    @classmethod
    def allocate(cls, region: Region) -> "GradientMemory":
        """Uninitialised memory, but for the rows of dW that take no part."""
        operands = region.operands
        x, weight = operands.x, operands.weight
        input_grad = torch.empty(x.shape, dtype=x.dtype, device=x.device) if operands.input_grad else None
        weight_grad = None
        if operands.weight_grad:
            accumulator = torch.float32 if region.plan.float32_accumulator else weight.dtype
            weight_grad = torch.empty(weight.shape, dtype=accumulator, device=x.device)
            weight_grad[operands.vocab :] = 0
        return cls(input_grad, weight_grad)

    def weight_as(self, dtype: torch.dtype, vocab: int) -> Tensor:
        """The memory of the first `vocab` rows of dW, one-dimensional, for numbers of another dtype."""
        return self.weight[:vocab].view(-1).view(dtype)


class GradientSums:
    """dX, dW and db while chunks of tokens add to them; no memory for those that are not needed."""

    def __init__(self, region: Region, rows: Rows, memory: GradientMemory):
        operands, plan = region.operands, region.plan
        self._region = region
        self._rows = rows
        self._memory = memory
        self._is_first = True
        self._input, self._weight = memory
        self._hot = None
        if operands.weight_grad and plan.float32_rows:
            self._hot = HotRows(rows.target, region.weight, plan.float32_rows)
        self._bias = None
        if operands.bias_grad:
            device = operands.x.device
            self._bias = torch.zeros(operands.weight.shape[0], dtype=operands.row_dtype, device=device)

    def take(self, chunk: slice) -> Tensor:
        """The rows of x that belong to `chunk` of the rows, (C, H).

        Where rows are skipped, this is a copy, in the memory that takes dX of the chunk afterwards; for slabs, whose dX
        comes first, in the last rows of that memory, or elsewhere if they are not enough.
        """
        if self._input is None:
            out = None
        elif self._region.plan.first_slabs and chunk.start == 0:
            tokens = self._rows.total
            out = self._input[tokens - chunk.stop :] if 2 * chunk.stop <= tokens else None
        else:
            out = self._input[chunk]
        return self._rows.take(self._region.operands.x, chunk, out)

    def add(
        self,
        dlogits: LogitsBuffer | SlabbedLogits,
        bias_grad: Tensor | None,
        x: Tensor,
        chunk: slice,
        valid_rows: Tensor | None,
    ) -> None:
        """Adds what the rows of `chunk` contribute: dlogits (C, V), their sum over rows (V,), x (C, H) as taken.

        `x` is used up, and so are slabs; valid_rows: `Rows.valid_rows`.
        """
        if isinstance(dlogits, SlabbedLogits):
            self._begin_with_slabs(dlogits, x, chunk, valid_rows)
        else:
            self._add(dlogits.logits, x, chunk, valid_rows)
        if self._bias is not None:
            self._bias[: self._region.operands.vocab].add_(bias_grad)
        self._is_first = False

    def _add(self, dlogits: Tensor, x: Tensor, chunk: slice, valid_rows: Tensor | None) -> None:
        how = {"tune": self._region.plan.tune_products, "valid_rows": valid_rows}
        if self._weight is not None:
            out, accumulate = self._weight[: dlogits.shape[1]], not self._is_first
            matmul.weight_gradient_(out, dlogits, x, accumulate=accumulate, **how)
        if self._hot is not None:
            self._hot.add(dlogits, x)
        if self._input is not None:
            matmul.input_gradient_(self._input[chunk], dlogits, self._region.weight, **how)

    def _begin_with_slabs(self, dlogits: SlabbedLogits, x: Tensor, chunk: slice, valid_rows: Tensor | None) -> None:
        """dX first, summed where dW begins in memory, because dW is written over the slabs."""
        operands, weight = self._region.operands, self._region.weight
        how = {"tune": self._region.plan.tune_products, "valid_rows": valid_rows}
        slabs = [(slab, buffer.logits) for slab, buffer in zip(dlogits.columns, dlogits.buffers, strict=True)]
        if self._input is not None:
            out = total = self._input[chunk]
            if out.dtype != operands.row_dtype:
                total = self._memory.weight_as(operands.row_dtype, operands.vocab)[: out.numel()].view(out.shape)
            for slab, of_slab in slabs:
                matmul.input_gradient_(total, of_slab, weight[slab], accumulate=slab.start > 0, **how)
            if total is not out:
                out.copy_(total)
        for slab, of_slab in slabs:
            matmul.weight_gradient_(self._weight[slab], of_slab, x, accumulate=False, **how)
        if self._hot is not None:
            self._hot.begin(self._weight)

    def finish(self) -> Gradients:
        """The gradients in the dtypes of what they belong to; zeros where no chunk was added."""
        if self._weight is not None and self._is_first:
            self._weight.zero_()
        elif self._hot is not None:
            self._hot.write(self._weight)
        if self._input is not None:
            self._rows.spread_(self._input)
        weight, bias = self._region.operands.weight, self._region.operands.bias
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

    def __init__(self, target: Tensor, weight: Tensor, count: int):
        vocab = weight.shape[0]
        occurrences = torch.zeros(vocab, dtype=torch.float32, device=target.device)
        occurrences.scatter_add_(0, target, torch.ones_like(target, dtype=torch.float32))
        # topk goes over 8 bits at a time: 0.04 instead of 0.07 ms. With more than 255 tokens, any column is hot enough.
        occurrences = occurrences.clamp_(max=255).to(torch.uint8)
        self._columns = occurrences.topk(min(count, vocab), sorted=False).indices
        self._sum: Tensor | None = None

    def begin(self, weight_grad: Tensor) -> None:
        """Takes what the first chunk has given from dW (V, H): rounded once before it is added to."""
        self._sum = weight_grad[self._columns].float()

    def add(self, dlogits: Tensor, x: Tensor) -> None:
        """Adds what a chunk contributes: dlogits (C, V), x (C, H)."""
        # gather, since index_select takes three times as long along this dimension.
        hot = dlogits.gather(1, self._columns.expand(dlogits.shape[0], -1))
        is_first = self._sum is None
        if is_first:
            self._sum = torch.empty(self._columns.shape[0], x.shape[1], dtype=torch.float32, device=x.device)
        matmul.weight_gradient_(self._sum, hot, x, accumulate=not is_first)

    def write(self, weight_grad: Tensor) -> None:
        """Puts the sums into dW (V, H), rounded once."""
        weight_grad.index_copy_(0, self._columns, self._sum.to(weight_grad.dtype))
