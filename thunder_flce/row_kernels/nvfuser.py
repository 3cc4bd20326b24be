"""Row kernels as nvFuser fusions, compiled once per dtype and vocabulary and cached for the process.

Legend: C rows of logits, S parts of L elements in a row (`VocabLayout`), so that a row is S · L elements long; the
padding behind the vocabulary holds -inf, which neither the maximum nor the sum sees.

Statistics take two fusions. The first reads the logits as (C · S, L), once, since a part fits in registers; the second
merges the S parts of each row. The gradient is one pointwise fusion that writes where it reads. Its row vectors come in
with shape (C, 1), because a broadcast inside the fusion would make nvFuser add a copy of the whole chunk before writing
in place.
"""

import threading
from functools import cache

import torch
from nvfuser_direct import DataType, FusionDefinition
from torch import Tensor

from thunder_flce.row_kernels import LogitsBuffer, RowStatistics, torch_ops

_NVFUSER_DTYPES = {
    torch.float32: DataType.Float,
    torch.float16: DataType.Half,
    torch.bfloat16: DataType.BFloat16,
}

# Fast exponentials err by about 2e-7 relative, which float32 logits would notice and 16-bit logits do not.
_FAST_MATH = ["fast_math"]
_NEGATIVE_INFINITY = float("-inf")


def part_statistics_fusion(part_length: int, dtype: torch.dtype) -> FusionDefinition:
    """(C · S, L) logits to the maximum and the sum of exp(logit - maximum) of each part, two float32 (C · S,)."""
    with FusionDefinition() as fd:
        logits = fd.define_tensor(shape=[-1, part_length], contiguity=[True, True], dtype=_NVFUSER_DTYPES[dtype])
        logits = fd.ops.cast(logits, DataType.Float)
        part_max = fd.ops.max(logits, [1])
        # A part of only -inf must give the sum 0, not exp(-inf - -inf).
        is_empty = fd.ops.eq(part_max, fd.define_scalar(_NEGATIVE_INFINITY, DataType.Float))
        shift = fd.ops.where(is_empty, fd.define_scalar(0.0, DataType.Float), part_max)
        shifted = fd.ops.sub(logits, fd.ops.broadcast(shift, [False, True]))
        fd.add_output(part_max)
        fd.add_output(fd.ops.sum(fd.ops.exp(shifted), [1]))
    return fd


def merge_parts_fusion(parts: int, dtype: torch.dtype) -> FusionDefinition:
    """Statistics of (C, S) parts and the target's logit (C,) to row_max, row_logsumexp and loss, three float32 (C,).

    A row of only -inf gives NaN, as log_softmax does.
    """
    with FusionDefinition() as fd:
        part_max = fd.define_tensor(shape=[-1, parts], contiguity=[True, True], dtype=DataType.Float)
        part_sum = fd.define_tensor(shape=[-1, parts], contiguity=[True, True], dtype=DataType.Float)
        target_logit = fd.define_tensor(shape=[-1], contiguity=[True], dtype=_NVFUSER_DTYPES[dtype])
        row_max = fd.ops.max(part_max, [1])
        shifted = fd.ops.sub(part_max, fd.ops.broadcast(row_max, [False, True]))
        row_sum = fd.ops.sum(fd.ops.mul(part_sum, fd.ops.exp(shifted)), [1])
        row_logsumexp = fd.ops.log(row_sum)
        target_logit = fd.ops.cast(target_logit, DataType.Float)
        fd.add_output(row_max)
        fd.add_output(row_logsumexp)
        fd.add_output(fd.ops.sub(row_logsumexp, fd.ops.sub(target_logit, row_max)))
    return fd


def target_gradient_fusion(dtype: torch.dtype) -> FusionDefinition:
    """exp(target_logit - row_max - row_logsumexp) · scale - one_hot_scale, all (C,), in the logits' dtype."""
    with FusionDefinition() as fd:
        target_logit = fd.define_tensor(shape=[-1], contiguity=[True], dtype=_NVFUSER_DTYPES[dtype])
        row_max, row_logsumexp, scale, one_hot_scale = (
            fd.define_tensor(shape=[-1], contiguity=[True], dtype=DataType.Float) for _ in range(4)
        )
        shifted = fd.ops.sub(fd.ops.sub(fd.ops.cast(target_logit, DataType.Float), row_max), row_logsumexp)
        gradient = fd.ops.sub(fd.ops.mul(fd.ops.exp(shifted), scale), one_hot_scale)
        fd.add_output(fd.ops.cast(gradient, _NVFUSER_DTYPES[dtype]))
    return fd


def gradient_fusion(row_stride: int, dtype: torch.dtype, *, column_sums: bool) -> FusionDefinition:
    """(C, row_stride) logits z to exp(z - row_max - row_logsumexp) · scale, in place; row vectors are (C, 1).

    With `column_sums`, also its sums over the rows, float32 (row_stride,), in the same pass: 0.31 ms for 2048 × 128256
    against 0.26 ms without, where a pass of its own takes 0.13 ms.
    """
    with FusionDefinition() as fd:
        logits = fd.define_tensor(shape=[-1, row_stride], contiguity=[True, True], dtype=_NVFUSER_DTYPES[dtype])
        row_max, row_logsumexp, scale = (
            fd.define_tensor(shape=[-1, 1], contiguity=[True, None], dtype=DataType.Float) for _ in range(3)
        )
        shifted = fd.ops.sub(fd.ops.sub(fd.ops.cast(logits, DataType.Float), row_max), row_logsumexp)
        gradient = fd.ops.mul(fd.ops.exp(shifted), scale)
        if column_sums:
            fd.add_output(fd.ops.sum(gradient, [0]))
        fd.add_output(fd.ops.cast(gradient, _NVFUSER_DTYPES[dtype]), logits)
    return fd


_part_statistics = cache(part_statistics_fusion)
_merge_parts = cache(merge_parts_fusion)
_gradient = cache(gradient_fusion)
_target_gradient = cache(target_gradient_fusion)

# Autograd runs backward on threads of its own, one a device, and a definition compiles at its first execution.
_lock = threading.Lock()


def _execute(fusion: FusionDefinition, inputs: list[Tensor], *, fast_math: bool = False) -> list[Tensor]:
    with _lock:
        return fusion.execute(inputs, _enable_options=_FAST_MATH if fast_math else [])


class NvFuserRowKernels:
    """See `RowKernels`."""

    def statistics(self, buffer: LogitsBuffer, target_logit: Tensor) -> tuple[RowStatistics, Tensor]:
        """See `RowKernels.statistics`."""
        layout, padded = buffer.layout, buffer.padded
        rows = padded.shape[0]
        if _is_too_small(buffer):
            return torch_ops.KERNELS.statistics(buffer, target_logit)
        if layout.padding:
            padded[:, layout.vocab :] = _NEGATIVE_INFINITY
        part_max, part_sum = _execute(
            _part_statistics(layout.part_length, padded.dtype),
            [padded.view(rows * layout.parts, layout.part_length)],
            fast_math=padded.element_size() == 2,
        )
        if layout.parts == 1:
            row_logsumexp = part_sum.log_()
            return RowStatistics(part_max, row_logsumexp), row_logsumexp - (target_logit.float() - part_max)
        shape = (rows, layout.parts)
        inputs = [part_max.view(shape), part_sum.view(shape), target_logit]
        row_max, row_logsumexp, row_loss = _execute(_merge_parts(layout.parts, padded.dtype), inputs)
        return RowStatistics(row_max, row_logsumexp), row_loss

    def gradient_(
        self, buffer: LogitsBuffer, statistics: RowStatistics, scale: Tensor, *, column_sums: bool = False
    ) -> Tensor | None:
        """See `RowKernels.gradient_`."""
        if _is_too_small(buffer):
            return torch_ops.KERNELS.gradient_(buffer, statistics, scale, column_sums=column_sums)
        padded = buffer.padded
        row_vectors = [vector.contiguous()[:, None] for vector in (*statistics, scale)]
        fusion = _gradient(padded.shape[1], padded.dtype, column_sums=column_sums)
        outputs = _execute(fusion, [padded, *row_vectors], fast_math=padded.element_size() == 2)
        return outputs[0][: buffer.layout.vocab] if column_sums else None

    def target_gradient(
        self, target_logit: Tensor, statistics: RowStatistics, scale: Tensor, one_hot_scale: Tensor
    ) -> Tensor:
        """See `RowKernels.target_gradient`."""
        if target_logit.shape[0] < 2:
            return torch_ops.KERNELS.target_gradient(target_logit, statistics, scale, one_hot_scale)
        inputs = [tensor.contiguous() for tensor in (target_logit, *statistics, scale, one_hot_scale)]
        return _execute(_target_gradient(target_logit.dtype), inputs)[0]


def _is_too_small(buffer: LogitsBuffer) -> bool:
    """nvFuser's definitions are for sizes above 1: a dimension of size 1 has no contiguity."""
    return buffer.padded.shape[0] < 2 or buffer.layout.part_length < 2


KERNELS = NvFuserRowKernels()
