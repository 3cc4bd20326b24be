"""Gradients are sums over chunks of tokens: in their own dtype or, where rounding would add up, in float32.

Legend: T tokens, N rows computed, C rows in a chunk, H hidden size, V vocabulary.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from thunder_flce.engine.rows import Rows

if TYPE_CHECKING:
    from thunder_flce.engine.primitives import Primitives


class GradientSums:
    """Accumulates dX, dW and db over chunks of tokens; allocates only gradients that are needed.

    Beside a dW in 16 bits, the rows of dW that receive the largest updates may be accumulated in float32. Token
    frequencies are Zipfian: a few rows of dW receive most updates, and most of the rounding error. With
    Zipf-distributed targets, 8192 × 128256 × 4096 and four chunks, the error of dW without these rows is 2.4e-3, and
    1.5e-3 for a single matmul.
    """

    def __init__(self, ops: "Primitives", rows: Rows, *, one_hot: Tensor):
        """`one_hot` is the coefficient of that name, (N,) or (N, K): how much each row adds to dW at its target."""
        call = ops.call
        self._ops, self._rows, self._is_first = ops, rows, True
        # dX for an upstream gradient of 1 stays in float32 until the backward has multiplied it by each row's upstream
        # gradient. Rounded to 16 bits before, its error was up to 1.4 times PyTorch's (DPO, 8192 × 128256 × 4096).
        is_unit = ops.region.saves_unit_gradients
        # dX and dW by the names of their operands.
        self._sums: dict[str, Tensor] = {}
        for linear in call.linears:
            shape = call.tensors[linear.x].shape
            if linear.x in call.needs_grad:
                self._sums[linear.x] = ops.empty(shape, call.row_dtype if is_unit else call.dtype)
            if linear.weight in call.needs_grad:
                dtype = ops.plan.sum_dtype(call, shape[1], rows=rows.count)
                weight_sum = self._sums[linear.weight] = ops.empty(call.tensors[linear.weight].shape, dtype)
                if call.vocab < weight_sum.shape[0]:
                    # Zeros the rows of dW beyond the vocabulary: they are no columns of the logits.
                    weight_sum[call.vocab :] = 0
        self._bias_sum: Tensor | None = None
        self._one_hot = one_hot
        # The frequent rows of dW, (F,), and their sums by the names of the weights.
        self._frequent_rows: Any = None
        self._frequent_sums: dict[str, Tensor] = {}

    def input_buffers(self, chunk: slice) -> list[Tensor | None]:
        """Returns a (C, H) buffer for each linear into which its rows of x are gathered: the chunk's part of dX.

        dX overwrites them later. None if there is no dX of x's dtype, or if no rows are skipped and a view suffices.
        """
        call = self._ops.call
        if self._rows.order is None:
            return [None] * len(call.linears)
        sums = (self._sums.get(linear.x) for linear in call.linears)
        return [None if buffer is None or buffer.dtype != call.dtype else buffer[chunk] for buffer in sums]

    def add(self, dlogits: Tensor, xs: list[Tensor], chunk: slice, bias_grad: Tensor | None) -> None:
        """Adds the gradients of `chunk`, from dlogits (C, V) and their sum over rows, (V,), for db.

        `xs` are each linear's gathered rows of x, (C, H); dX may overwrite them.
        """
        ops, columns, accumulate = self._ops, None, not self._is_first
        if self._is_first and ops.plan.float32_rows and ops.call.vocab:
            # Not in `__init__`: now the device is busy with the first logits while the host launches a dozen kernels.
            self._choose_frequent_rows()
        if self._frequent_sums:
            # gather: index_select takes three times as long along this dimension.
            columns = dlogits.gather(1, self._frequent_rows.expand(dlogits.shape[0], -1))
        for linear, x in zip(ops.call.linears, xs, strict=True):
            input_sum, weight_sum = self._sums.get(linear.x), self._sums.get(linear.weight)
            finish_input = None
            if input_sum is not None:
                # The collective that sums dX over the ranks overlaps with the matmul of dW.
                finish_input = ops.start_input_gradient(dlogits, linear)
            if weight_sum is not None:
                out = weight_sum if weight_sum.shape[0] == dlogits.shape[1] else weight_sum[: dlogits.shape[1]]
                ops.weight_gradient_(out, dlogits, x, linear=linear, accumulate=accumulate)
                if columns is not None and (frequent := self._frequent_sums.get(linear.weight)) is not None:
                    ops.weight_gradient_(frequent, columns, x, linear=linear, accumulate=accumulate, frequent=True)
            if input_sum is not None and finish_input is not None:
                part = self._rows.own_slice(chunk)
                is_all = part.start == 0 and part.stop == input_sum.shape[0]
                finish_input(input_sum if is_all else input_sum[part])
        if bias_grad is not None:
            self._bias_sum = bias_grad if self._bias_sum is None else self._bias_sum.add_(bias_grad)
        self._is_first = False

    def _choose_frequent_rows(self) -> None:
        """Finds the rows of dW with the largest updates, and allocates their sums beside each dW in 16 bits."""
        ops, target = self._ops, self._rows.target
        column, is_local = ops.local_columns(target)
        updates = self._one_hot.abs().float()
        updates = updates if is_local is None else torch.where(is_local, updates, 0)
        update_sums = torch.zeros(ops.call.vocab, dtype=torch.float32, device=target.device)
        update_sums.scatter_add_(0, column.reshape(-1), updates.reshape(-1))
        count = min(ops.plan.float32_rows, ops.call.vocab)
        self._frequent_rows = update_sums.topk(count, sorted=False).indices
        for linear in ops.call.linears:
            if linear.weight in self._sums and (dw := self._sums[linear.weight]).dtype.itemsize == 2:
                self._frequent_sums[linear.weight] = ops.empty((count, dw.shape[1]), torch.float32)

    def finish(self) -> dict[str, Tensor]:
        """Returns the gradients by operand names, in the operands' dtypes; zeros if no chunk was added."""
        call, gradients = self._ops.call, {}
        for linear in call.linears:
            if linear.x in self._sums:
                gradients[linear.x] = self._sums.pop(linear.x)
                self._rows.scatter_(gradients[linear.x])
            if linear.weight in self._sums:
                weight_sum = self._sums.pop(linear.weight)
                if self._is_first:
                    weight_sum.zero_()
                elif linear.weight in self._frequent_sums:
                    rounded = self._frequent_sums[linear.weight].to(weight_sum.dtype)
                    weight_sum.index_copy_(0, self._frequent_rows, rounded)
                gradients[linear.weight] = self._ops.rounded(weight_sum, call.dtype)
        if call.bias_grad:
            bias, total = call.tensors["linear_bias"], self._bias_sum
            if total is None or total.shape != bias.shape:
                # The bias has elements beyond the vocabulary, or no chunk was added.
                bias_sum = bias.new_empty(0) if total is None else total
                total = torch.nn.functional.pad(bias_sum, (0, bias.shape[0] - bias_sum.shape[0]))
            gradients["linear_bias"] = total.to(bias.dtype)
        return gradients
