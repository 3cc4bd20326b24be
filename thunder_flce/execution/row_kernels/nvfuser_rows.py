"""Row kernels as nvFuser fusions, compiled once per definition and cached for the process.

The gradient is one pointwise fusion that writes where it reads. Its vectors come in as (C, 1) and (1, row_stride),
because a broadcast inside the fusion would make nvFuser add a copy of the whole chunk before writing in place.

What makes statistics is not here but in `triton_rows`: a row does not fit in the registers of a block, and where it is
cut into parts that do, nvFuser reads at 40% (a vocabulary of 1000) to 85% of a copy's speed, 73% at 50257 and 200064.
Nor is the gradient of a plain loss, where it comes with sums over rows (nvFuser: 33% to 87%) or rows are short (82%).

Legend: C rows of logits.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from nvfuser_direct import DataType, FusionDefinition
from torch import Tensor

from thunder_flce.execution.compile_times import first_run_timed
from thunder_flce.execution.row_kernels import triton_rows
from thunder_flce.execution.row_kernels.interface import (
    SHORT_ROWS,
    LogitMap,
    LogitsBuffer,
    RowCoefficients,
    RowMoments,
    RowStatistics,
    SlabbedLogits,
)
from thunder_flce.execution.row_kernels.torch_rows import TorchRowKernels
from thunder_flce.planning.plan import VocabLayout

_NVFUSER_DTYPES = {
    torch.float32: DataType.Float,
    torch.float16: DataType.Half,
    torch.bfloat16: DataType.BFloat16,
}


class _Builder:
    """A fusion being defined; the helpers that the definitions below share."""

    def __init__(self, fd: FusionDefinition, logit_map: LogitMap, dtype: torch.dtype):
        self.fd = fd
        self.ops = fd.ops
        self.logit_map = logit_map
        self.dtype = dtype

    def number(self, value: float) -> Any:
        return self.fd.define_scalar(value, DataType.Float)

    def index(self, value: int) -> Any:
        return self.fd.define_scalar(value, DataType.Int)

    def row_vector(self) -> Any:
        """(C, 1) float32: it needs no broadcast."""
        return self.fd.define_tensor(shape=[-1, 1], contiguity=[True, None], dtype=DataType.Float)

    def column_vector(self, length: int) -> Any:
        """(1, length) float32: it needs no broadcast."""
        return self.fd.define_tensor(shape=[1, length], contiguity=[None, True], dtype=DataType.Float)

    def products(self, shape: list[int]) -> Any:
        return self.fd.define_tensor(shape=shape, contiguity=[True] * len(shape), dtype=_NVFUSER_DTYPES[self.dtype])

    def logits(self, products: Any) -> tuple[Any, Any]:
        """Of z: u, and tanh(scale · z / softcap), which is None without a softcap."""
        values = self.ops.cast(products, DataType.Float)
        scale, softcap = self.logit_map.scale, self.logit_map.softcap
        if softcap is not None:
            tanh = self._tanh(values, scale / softcap)
            return self.ops.mul(tanh, self.number(softcap)), tanh
        return (values if scale == 1 else self.ops.mul(values, self.number(scale))), None

    def _tanh(self, values: Any, factor: float) -> Any:
        ops = self.ops
        if self.dtype == torch.float32:
            return ops.tanh(ops.mul(values, self.number(factor)))
        # tanh x = 1 - 2 / (exp 2x + 1) errs by 1e-7, nothing beside logits rounded to 16 bits, and is twice as fast.
        exponential = ops.exp(ops.mul(values, self.number(2 * factor)))
        quotient = ops.reciprocal(ops.add(exponential, self.number(1.0)))
        return ops.sub(self.number(1.0), ops.mul(quotient, self.number(2.0)))

    def is_column(self, layout: VocabLayout) -> Any:
        """(1, row_stride): whether an element is one of the vocabulary's columns."""
        columns = self.ops.iota(self.index(layout.row_stride), self.index(0), self.index(1), dtype=DataType.Int)
        return self.ops.lt(self.ops.broadcast(columns, [True, False]), self.index(layout.vocab))

    def times_finite(self, probability: Any, shifted: Any) -> Any:
        """probability · shifted, 0 where the probability is 0 though the logit be -inf."""
        zero = self.number(0.0)
        return self.ops.where(self.ops.eq(probability, zero), zero, self.ops.mul(probability, shifted))

    def gradient(self, products: Any, vectors: "GradientVectors") -> Any:
        """The gradient of `RowCoefficients`, float32; with one_hot, at the target."""
        ops = self.ops
        logits, tanh = self.logits(products)
        shifted = ops.sub(logits, vectors.row_max)
        probability = ops.exp(ops.sub(shifted, vectors.row_log_sum))
        gradient = ops.mul(probability, vectors.probability)
        if vectors.entropy is not None:
            gradient = ops.sub(gradient, ops.mul(self.times_finite(probability, shifted), vectors.entropy))
        if vectors.uniform is not None:
            weight = vectors.class_weight
            gradient = ops.sub(gradient, vectors.uniform if weight is None else ops.mul(vectors.uniform, weight))
        if vectors.one_hot is not None:
            gradient = ops.sub(gradient, vectors.one_hot)
        if tanh is None:
            return gradient
        return ops.mul(gradient, ops.sub(self.number(1.0), ops.mul(tanh, tanh)))


class GradientVectors(NamedTuple):
    """What the gradient takes beside the products: tensors, or what stands for them in a definition."""

    row_max: Any
    row_log_sum: Any
    probability: Any
    uniform: Any | None
    entropy: Any | None
    class_weight: Any | None
    one_hot: Any | None = None

    def given(self) -> "GradientVectors":
        """True in place of each vector that is there: what distinguishes one definition from another."""
        return self.map(lambda name, vector: True)

    def map(self, of: Callable[[str, Any], Any]) -> "GradientVectors":
        """`of(name, vector)` in place of each vector that is there."""
        return GradientVectors(
            *(of(name, vector) if vector is not None else None for name, vector in self._asdict().items())
        )

    def tensors(self) -> list[Any]:
        """Those that are there, in order."""
        return [vector for vector in self if vector is not None]


def moments_fusion(
    layout: VocabLayout,
    dtype: torch.dtype,
    logit_map: LogitMap,
    *,
    expected: bool,
    weighted_sum: bool,
    has_class_weight: bool,
) -> FusionDefinition:
    """(C, row_stride) products, row_max, row_log_sum, class weights to those of `RowMoments` that are asked for."""
    with FusionDefinition() as fd:
        build, ops = _Builder(fd, logit_map, dtype), fd.ops
        products = build.products([-1, layout.row_stride])
        row_max, row_log_sum = build.row_vector(), build.row_vector()
        class_weight = build.column_vector(layout.row_stride) if has_class_weight else None
        shifted = ops.sub(build.logits(products)[0], row_max)
        is_column = build.is_column(layout) if layout.padding else None

        def add_sum(values: Any) -> None:
            if is_column is not None:
                values = ops.where(is_column, values, build.number(0.0))
            fd.add_output(ops.sum(values, [1]))

        if expected:
            add_sum(build.times_finite(ops.exp(ops.sub(shifted, row_log_sum)), shifted))
        if weighted_sum:
            add_sum(shifted if class_weight is None else ops.mul(shifted, class_weight))
    return fd


def gradient_fusion(
    row_stride: int,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    logit_map: LogitMap,
    given: GradientVectors,
    *,
    column_sums: bool,
) -> FusionDefinition:
    """(C, row_stride) products to the gradient of `RowCoefficients`, in their place if the dtype stays.

    With `column_sums`, also its sums over the rows, float32 (row_stride,), in the same pass: 0.31 ms for 2048 × 128256
    against 0.26 ms without, where a pass of its own takes 0.13 ms.
    """
    with FusionDefinition() as fd:
        build = _Builder(fd, logit_map, dtype)
        products = build.products([-1, row_stride])
        vectors = given.map(
            lambda name, _: build.column_vector(row_stride) if name == "class_weight" else build.row_vector()
        )
        gradient = build.gradient(products, vectors)
        if column_sums:
            fd.add_output(fd.ops.sum(gradient, [0]))
        gradient = fd.ops.cast(gradient, _NVFUSER_DTYPES[out_dtype])
        if out_dtype == dtype:
            fd.add_output(gradient, products)
        else:
            fd.add_output(gradient)
    return fd


def target_gradient_fusion(
    dtype: torch.dtype, out_dtype: torch.dtype, logit_map: LogitMap, given: GradientVectors
) -> FusionDefinition:
    """The products at the targets to the gradient there, all (C,)."""
    with FusionDefinition() as fd:
        build = _Builder(fd, logit_map, dtype)
        products = build.products([-1])
        vectors = given.map(lambda name, _: fd.define_tensor(shape=[-1], contiguity=[True], dtype=DataType.Float))
        fd.add_output(fd.ops.cast(build.gradient(products, vectors), _NVFUSER_DTYPES[out_dtype]))
    return fd


_moments = cache(moments_fusion)
_gradient = cache(gradient_fusion)
_target_gradient = cache(target_gradient_fusion)

# Autograd runs backward on threads of its own, one a device, and a definition compiles at its first execution.
_lock = threading.Lock()


def _execute(fusion: FusionDefinition, inputs: list[Tensor], *, fast_math: bool = False) -> list[Tensor]:
    # Its cache keeps a definition alive, so no other has its identity.
    with _lock, first_run_timed("nvFuser row kernels", id(fusion)):
        return fusion.execute(inputs, _enable_options=["fast_math"] if fast_math else [])


@dataclass(frozen=True)
class NvFuserRowKernels:
    """See `RowKernels`."""

    logit_map: LogitMap = LogitMap()

    def statistics(self, buffer: LogitsBuffer) -> RowStatistics:
        """See `RowKernels.statistics`."""
        return triton_rows.statistics(buffer, self.logit_map)

    def moments(
        self,
        buffer: LogitsBuffer,
        statistics: RowStatistics,
        class_weight: Tensor | None,
        *,
        expected: bool,
        weighted_sum: bool,
    ) -> RowMoments:
        """See `RowKernels.moments`."""
        if _is_too_small(buffer):
            return self._torch.moments(buffer, statistics, class_weight, expected=expected, weighted_sum=weighted_sum)
        has_class_weight = weighted_sum and class_weight is not None
        fusion = _moments(
            buffer.layout,
            buffer.padded.dtype,
            self.logit_map,
            expected=expected,
            weighted_sum=weighted_sum,
            has_class_weight=has_class_weight,
        )
        inputs = [buffer.padded, *(vector.contiguous()[:, None] for vector in statistics)]
        if has_class_weight:
            inputs.append(_as_row(class_weight, buffer.layout))
        outputs = iter(_execute(fusion, inputs, fast_math=self._fast_math(buffer.padded)))
        return RowMoments(next(outputs) if expected else None, next(outputs) if weighted_sum else None)

    def gradient(
        self,
        buffer: LogitsBuffer,
        statistics: RowStatistics,
        coefficients: RowCoefficients,
        class_weight: Tensor | None,
        *,
        dtype: torch.dtype,
        column_sums: bool = False,
    ) -> tuple[LogitsBuffer, Tensor | None]:
        """See `RowKernels.gradient`."""
        is_plain = coefficients.uniform is None and coefficients.entropy is None
        if is_plain and dtype == buffer.padded.dtype:
            arguments = (buffer, statistics, coefficients.probability, self.logit_map)
            if column_sums:
                return buffer, triton_rows.gradient_with_column_sums(*arguments)
            if buffer.layout.row_stride in SHORT_ROWS:
                triton_rows.gradient(*arguments)
                return buffer, None
        if _is_too_small(buffer):
            return self._torch.gradient(
                buffer, statistics, coefficients, class_weight, dtype=dtype, column_sums=column_sums
            )
        padded, layout = buffer.padded, buffer.layout
        vectors = _vectors(statistics, coefficients, class_weight, one_hot=False)
        fusion = _gradient(
            layout.row_stride, padded.dtype, dtype, self.logit_map, vectors.given(), column_sums=column_sums
        )
        inputs = vectors.map(
            lambda name, vector: _as_row(vector, layout) if name == "class_weight" else vector.contiguous()[:, None]
        )
        outputs = _execute(fusion, [padded, *inputs.tensors()], fast_math=self._fast_math(padded))
        out = buffer if dtype == padded.dtype else LogitsBuffer(outputs[-1], layout)
        return out, outputs[0][: layout.vocab] if column_sums else None

    def statistics_and_gradient(
        self, logits: LogitsBuffer | SlabbedLogits, target: Tensor, coefficients: RowCoefficients
    ) -> tuple[RowStatistics, Tensor]:
        """See `RowKernels.statistics_and_gradient`."""
        return triton_rows.statistics_and_gradient(logits, target, coefficients, self.logit_map)

    def target_gradient(
        self,
        target_logit: Tensor,
        statistics: RowStatistics,
        coefficients: RowCoefficients,
        class_weight: Tensor | None,
        *,
        dtype: torch.dtype,
    ) -> Tensor:
        """See `RowKernels.target_gradient`."""
        if target_logit.shape[0] < 2:
            return self._torch.target_gradient(target_logit, statistics, coefficients, class_weight, dtype=dtype)
        vectors = _vectors(statistics, coefficients, class_weight, one_hot=True)
        fusion = _target_gradient(target_logit.dtype, dtype, self.logit_map, vectors.given())
        return _execute(fusion, [target_logit, *(vector.contiguous() for vector in vectors.tensors())])[0]

    @property
    def _torch(self) -> TorchRowKernels:
        """For sizes that a definition is not made for."""
        return TorchRowKernels(self.logit_map)

    def _fast_math(self, logits: Tensor) -> bool:
        """Fast exponentials err by about 2e-7 relative, which float32 logits would notice and 16-bit logits do not."""
        return logits.element_size() == 2


def _vectors(
    statistics: RowStatistics, coefficients: RowCoefficients, class_weight: Tensor | None, *, one_hot: bool
) -> GradientVectors:
    return GradientVectors(
        *statistics,
        probability=coefficients.probability,
        uniform=coefficients.uniform,
        entropy=coefficients.entropy,
        class_weight=None if coefficients.uniform is None else class_weight,
        one_hot=coefficients.one_hot if one_hot else None,
    )


def _as_row(class_weight: Tensor, layout: VocabLayout) -> Tensor:
    """(V,) to (1, row_stride): the padding's values are looked at by nobody."""
    padded = torch.nn.functional.pad(class_weight, (0, layout.padding)) if layout.padding else class_weight
    return padded.contiguous()[None, :]


def _is_too_small(buffer: LogitsBuffer) -> bool:
    """nvFuser's definitions are for sizes above 1: a dimension of size 1 has no contiguity."""
    return min(buffer.padded.shape) < 2
