"""Row kernels as nvFuser fusions, compiled once per definition.

Statistics take two fusions: the first reads the logits as parts of a row that fit in the registers of a block, the
second merges the parts of each row. The padding behind the vocabulary is filled so that its logits are -inf, which
neither the maximum nor the sum sees. A softcap would bring it back, so there a mask leaves it out, at half the speed.

The gradient is one pointwise fusion that writes where it reads. Its vectors come in as (C, 1) and (1, row_stride),
because a broadcast inside the fusion would make nvFuser add a copy of the whole chunk before writing in place. For the
same reason the target's entry is a fusion over (C,), and PyTorch scatters it. Each execution takes the host tens of
microseconds; so where coefficients do not wait for statistics, that fusion is the one that merges the parts.

Legend: C rows of logits, z the linear's output, S parts of L elements in a row, so that a row is S · L elements long.
"""

import math
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partialmethod
from typing import Any

import torch
from nvfuser_direct import DataType, FusionDefinition
from torch import Tensor

from thunder_flce.device import ROW_MULTIPLE
from thunder_flce.execution.compile_times import note_first_run
from thunder_flce.execution.layout import VocabLayout
from thunder_flce.execution.row_kernels.interface import (
    LogitMap,
    LogitsBuffer,
    LogitsInBlocks,
    RowCoefficients,
    RowStatistics,
    RowWork,
    TargetColumns,
    padded_weight,
    reads_class_weight,
)
from thunder_flce.execution.row_kernels.torch_rows import TorchRowKernels
from thunder_flce.operation.moments import MOMENTS

_NVFUSER_DTYPES = {torch.float32: DataType.Float, torch.float16: DataType.Half, torch.bfloat16: DataType.BFloat16}
# Elements of a part: as many as nvFuser keeps in registers.
_MAX_PART = 16384


def parts_of(row_stride: int) -> int:
    """S: as few parts as are short enough and aligned; 1 where there are none such below three times as many."""
    fewest = -(-row_stride // _MAX_PART)
    return next((s for s in range(fewest, 3 * fewest + 1) if row_stride % (s * ROW_MULTIPLE) == 0), 1)


class _Expression:
    """A value of a fusion, with arithmetic as `operation.moments.Moment.term` asks for it."""

    def __init__(self, fd: FusionDefinition, value: Any):
        self._fd = fd
        self.value = value

    def raw(self, name: str, *settings: Any) -> "_Expression":
        """An operation of nvFuser on this value."""
        return _Expression(self._fd, getattr(self._fd.ops, name)(self.value, *settings))

    def apply(self, name: str, *others: Any) -> "_Expression":
        """The same with further values; numbers become float32 constants."""
        return self.raw(name, *(self._of(other).value for other in others))

    def _of(self, other: Any) -> "_Expression":
        if isinstance(other, _Expression):
            return other
        return _Expression(self._fd, self._fd.define_scalar(other, DataType.Float))

    def __rsub__(self, other: Any) -> "_Expression":
        return self._of(other) - self

    __add__ = __radd__ = partialmethod(apply, "add")
    __mul__ = __rmul__ = partialmethod(apply, "mul")
    __sub__ = partialmethod(apply, "sub")


class _Builder:
    """A fusion being defined, of z in `dtype`; `rows` is C where that is 1, which nvFuser has to know, or -1."""

    def __init__(self, fd: FusionDefinition, logit_map: LogitMap, dtype: torch.dtype, rows: int):
        self.fd, self.logit_map, self.dtype, self.rows = fd, logit_map, dtype, rows

    def input(self, *shape: int, dtype: torch.dtype = torch.float32) -> _Expression:
        # Dimensions of size 1 have no contiguity.
        contiguity = [None if size == 1 else True for size in shape]
        tensor = self.fd.define_tensor(shape=list(shape), contiguity=contiguity, dtype=_NVFUSER_DTYPES[dtype])
        return _Expression(self.fd, tensor)

    def output(self, result: _Expression, dtype: torch.dtype = torch.float32, alias: _Expression | None = None) -> None:
        """In the memory of the input `alias`, if there is one."""
        if dtype != torch.float32:
            result = result.raw("cast", _NVFUSER_DTYPES[dtype])
        self.fd.add_output(result.value, *([] if alias is None else [alias.value]))

    def logits(self, z: _Expression) -> tuple[_Expression, _Expression | None]:
        """u, and tanh(scale · z / softcap), which is None without a softcap."""
        u, scale, softcap = z.raw("cast", DataType.Float), self.logit_map.scale, self.logit_map.softcap
        if softcap is None:
            return (u if scale == 1 else u * scale), None
        if self.dtype == torch.float32:
            tanh = (u * (scale / softcap)).raw("tanh")
        else:
            # tanh x = 1 - 2 / (exp 2x + 1) errs by 1e-7, nothing beside logits rounded to 16 bits; twice as fast.
            tanh = 1.0 - ((u * (2 * scale / softcap)).raw("exp") + 1.0).raw("reciprocal") * 2.0
        return tanh * softcap, tanh

    def masked(self, values: _Expression, vocab: int, shape: tuple[int, ...], other: float) -> _Expression:
        """`other` where an element (C, *shape) is none of the vocabulary's; shape is (row_stride,) or (S, L)."""
        ops, columns = self.fd.ops, None
        for dim, size in enumerate(shape):
            if size == 1:
                continue
            length = math.prod(shape[dim + 1 :])
            count, start, step = (self.fd.define_scalar(number, DataType.Int) for number in (size, 0, length))
            steps = ops.iota(count, start, step, dtype=DataType.Int)
            steps = ops.broadcast(steps, [at != dim + 1 for at in range(len(shape) + 1)])
            columns = steps if columns is None else ops.add(columns, steps)
        is_column = ops.lt(columns, self.fd.define_scalar(vocab, DataType.Int))
        return _Expression(self.fd, is_column).apply("where", values, other)

    def gradient(self, z: _Expression, given: dict[str, _Expression]) -> _Expression:
        """The gradient of `RowCoefficients`, float32, with the terms whose vectors are given."""
        u, tanh = self.logits(z)
        shifted = u - given["row_max"]
        p = (shifted - given["row_log_sum"]).raw("exp")
        gradient = p * given["probability"]
        if "entropy" in given:
            gradient = gradient - p * _finite(shifted) * given["entropy"]
        if "uniform" in given:
            uniform, weight = given["uniform"], given.get("class_weight")
            gradient = gradient - (uniform if weight is None else uniform * weight)
        if "one_hot" in given:
            gradient = gradient - given["one_hot"]
        return gradient if tanh is None else gradient * (1.0 - tanh * tanh)


def _finite(shifted: _Expression) -> _Expression:
    """Logits of -inf become the lowest finite number: their probability, 0, times it is 0."""
    return shifted.apply("eq", -math.inf).apply("where", torch.finfo(torch.float32).min, shifted)


def part_statistics(build: _Builder, layout: VocabLayout) -> None:
    """(C, S, L) z to the maximum and the sum of exp(logit - maximum) of each part, two float32 (C, S)."""
    parts = parts_of(layout.row_stride)
    shape = (parts, layout.row_stride // parts)
    u, _ = build.logits(build.input(build.rows, *shape, dtype=build.dtype))
    if _is_masked(layout, build.logit_map):
        u = build.masked(u, layout.vocab, shape, -math.inf)
    part_max = u.raw("max", [2])
    # A part of only -inf must give the sum 0, not exp(-inf - -inf).
    shift = part_max.apply("eq", -math.inf).apply("where", 0.0, part_max).raw("broadcast", [False, False, True])
    build.output(part_max)
    build.output((u - shift).raw("exp").raw("sum", [2]))


def merge_parts(build: _Builder, parts: int, has_entry: bool = False) -> None:
    """Statistics of (C, S) parts to row_max and row_log_sum, two float32 (C,); NaN for a row of only -inf.

    With `has_entry`, also z at the targets, A and B of `RowCoefficients`, (C,) each, to the gradient there, (C,).
    """
    part_max, part_sum = build.input(build.rows, parts), build.input(build.rows, parts)
    row_max = part_max.raw("max", [1])
    shifted = part_max - row_max.raw("broadcast", [False, True])
    row_log_sum = (part_sum * shifted.raw("exp")).raw("sum", [1]).raw("log")
    build.output(row_max)
    build.output(row_log_sum)
    if has_entry:
        z, given = build.input(build.rows, dtype=build.dtype), {"row_max": row_max, "row_log_sum": row_log_sum}
        given |= {name: build.input(build.rows) for name in ("probability", "one_hot")}
        build.output(build.gradient(z, given), build.dtype)


def moments(build: _Builder, layout: VocabLayout, names: tuple[str, ...], has_class_weight: bool) -> None:
    """(C, row_stride) z, row_max, row_log_sum and class weights to sums by `names`, float32 (C,)."""
    z = build.input(build.rows, layout.row_stride, dtype=build.dtype)
    row_max, row_log_sum = build.input(build.rows, 1), build.input(build.rows, 1)
    weight = build.input(1, layout.row_stride) if has_class_weight else 1.0
    shifted = build.logits(z)[0] - row_max
    p = (shifted - row_log_sum).raw("exp")
    for moment in (MOMENTS[name] for name in names):
        term = moment.term(shifted if moment.keeps_infinity else _finite(shifted), p, weight)
        if layout.padding:
            term = build.masked(term, layout.vocab, (layout.row_stride,), 0.0)
        build.output(term.raw("sum", [1]))


def gradient(
    build: _Builder, layout: VocabLayout, out_dtype: torch.dtype, names: tuple[str, ...], outputs: tuple[str, ...]
) -> None:
    """(C, row_stride) z and what `names` says to the gradient without its one_hot term, in place if the dtype stays.

    `outputs` are "gradient", "column_sums", which are its sums over the rows, float32 (row_stride,), or both.
    """
    z, column = build.input(build.rows, layout.row_stride, dtype=build.dtype), (build.rows, 1)
    shapes = {name: (1, layout.row_stride) if name == "class_weight" else column for name in names}
    result = build.gradient(z, {name: build.input(*shape) for name, shape in shapes.items()})
    if "column_sums" in outputs:
        build.output(result.raw("sum", [0]))
    if "gradient" in outputs:
        build.output(result, out_dtype, alias=z if out_dtype == build.dtype else None)


def _gradient_passes(dtype: torch.dtype, out_dtype: torch.dtype, column_sums: bool) -> tuple[tuple[str, ...], ...]:
    """The outputs of each fusion of a gradient.

    A fusion that sums over one or five rows of float32 and writes over them gave wrong gradients (nvFuser 0.2.36, one
    H200; 16 bits did not), so float32 in place takes a fusion for each.
    """
    if not column_sums:
        return (("gradient",),)
    if dtype == out_dtype == torch.float32:
        return ("column_sums",), ("gradient",)
    return (("column_sums", "gradient"),)


def target_gradient(build: _Builder, out_dtype: torch.dtype, names: tuple[str, ...]) -> None:
    """z at the targets and what `names` says to the gradient there, all (C,)."""
    z = build.input(build.rows, dtype=build.dtype)
    build.output(build.gradient(z, {name: build.input(build.rows) for name in names}), out_dtype)


def fusion(
    define: Callable[..., None], logit_map: LogitMap, dtype: torch.dtype, rows: int, *settings: Any
) -> FusionDefinition:
    """One of the definitions above, with its settings."""
    with FusionDefinition() as fd:
        define(_Builder(fd, logit_map, dtype, rows), *settings)
    return fd


def definitions(work: RowWork, logit_map: LogitMap) -> dict[str, FusionDefinition]:
    """The fusions that such work takes, by name; of several vocabulary blocks, those of the first and of the last."""
    method, out_dtype = work.method, work.out_dtype or work.dtype
    given = {"one_hot": method == "target_gradient", "uniform": work.uniform, "entropy": work.entropy}
    names = tuple(name for name in _NAMES if given.get(name, name != "class_weight" or work.has_class_weight))
    ends = dict.fromkeys((*work.layouts[:1], *work.layouts[-1:]))
    blocks = dict(zip(("", "_of_last_block"), ends, strict=False))
    parts = sum(parts_of(layout.row_stride) for layout in work.layouts)
    fusions: dict[str, tuple[Any, ...]] = {}
    if method == "moments":
        fusions["moments"] = (moments, work.layouts[0], work.moments, work.has_class_weight)
    if method == "target_gradient":
        fusions["target_gradient"] = (target_gradient, out_dtype, names)
    if method in ("statistics", "statistics_and_gradient"):
        fusions |= {f"part_statistics{end}": (part_statistics, layout) for end, layout in blocks.items()}
    if method == "statistics":
        fusions["merge_parts"] = (merge_parts, parts)
    if method == "statistics_and_gradient":
        fusions["merge_parts_and_target_gradient"] = (merge_parts, parts, True)
    if method in ("gradient", "statistics_and_gradient"):
        for outputs in _gradient_passes(work.dtype, out_dtype, work.column_sums):
            name, settings = "_with_".join(reversed(outputs)), (out_dtype, names, outputs)
            fusions |= {name + end: (gradient, layout, *settings) for end, layout in blocks.items()}
    return {name: fusion(define, logit_map, work.dtype, -1, *rest) for name, (define, *rest) in fusions.items()}


_NAMES = (*RowStatistics._fields, *RowCoefficients._fields, "class_weight")


def _given(*vectors: Any) -> dict[str, Any]:
    """What the gradient takes beside z, by name: those of `_NAMES` that are there, in this order."""
    return {name: vector for name, vector in zip(_NAMES, vectors, strict=False) if vector is not None}


# Autograd runs backward on threads of its own, one a device, and a definition compiles at its first execution.
_lock = threading.Lock()


@dataclass(frozen=True)
class NvFuserRowKernels:
    """See `RowKernels`; logits in 16 or 32 bits. Without a row there is nothing to fuse."""

    logit_map: LogitMap = LogitMap()
    _fusions: dict[Hashable, FusionDefinition] = field(default_factory=dict, repr=False, compare=False)

    def _run(
        self, inputs: list[Tensor], define: Callable[..., None], dtype: torch.dtype, *settings: Any, fast: bool = False
    ) -> list[Tensor]:
        """Executes one of the definitions above, which is compiled when it is first needed.

        `fast` lets exponentials err by about 2e-7 relative, which float32 logits would notice.
        """
        key = (define, dtype, 1 if inputs[0].shape[0] == 1 else -1, *settings)
        options, start = ["fast_math"] if fast and dtype != torch.float32 else [], time.perf_counter()
        with _lock:
            if key not in self._fusions:
                self._fusions[key] = fusion(define, self.logit_map, *key[1:])
            outputs = self._fusions[key].execute(inputs, _enable_options=options)
        note_first_run("nvFuser row kernels", self._fusions[key], start)
        return outputs

    def statistics(self, buffer: LogitsBuffer) -> RowStatistics:
        if not buffer.padded.shape[0]:
            return TorchRowKernels(self.logit_map).statistics(buffer)
        parts = self._part_statistics((buffer,))
        return RowStatistics(*self._run(parts, merge_parts, buffer.padded.dtype, parts[0].shape[1]))

    def _part_statistics(self, blocks: tuple[LogitsBuffer, ...]) -> list[Tensor]:
        """Of rows in one or more vocabulary blocks."""
        found = []
        for padded, layout in ((block.padded, block.layout) for block in blocks):
            if layout.padding and not _is_masked(layout, self.logit_map):
                padded[:, layout.vocab :] = math.copysign(math.inf, -self.logit_map.scale)
            parts = parts_of(layout.row_stride)
            in_parts = padded.view(-1, parts, layout.row_stride // parts)
            found.append(self._run([in_parts], part_statistics, padded.dtype, layout, fast=True))
        return found[0] if len(found) == 1 else [torch.cat(of, 1) for of in zip(*found, strict=True)]

    def moments(
        self, buffer: LogitsBuffer, statistics: RowStatistics, class_weight: Tensor | None, names: tuple[str, ...]
    ) -> dict[str, Tensor]:
        padded, layout = buffer.padded, buffer.layout
        if not padded.shape[0]:
            return TorchRowKernels(self.logit_map).moments(buffer, statistics, class_weight, names)
        inputs = [padded, *(vector.unsqueeze(1) for vector in statistics)]
        weight = padded_weight(class_weight, layout, is_read=reads_class_weight(names))
        if weight is not None:
            inputs.append(weight.unsqueeze(0))
        sums = self._run(inputs, moments, padded.dtype, layout, names, weight is not None, fast=True)
        return dict(zip(names, sums, strict=True))

    def gradient(
        self, buffer: LogitsBuffer, statistics: RowStatistics, coefficients: RowCoefficients,
        class_weight: Tensor | None, *, dtype: torch.dtype, column_sums: bool = False,
    ) -> tuple[LogitsBuffer, Tensor | None]:  # fmt: skip
        padded, layout = buffer.padded, buffer.layout
        if not padded.shape[0]:
            kernels, settings = TorchRowKernels(self.logit_map), {"column_sums": column_sums}
            return kernels.gradient(buffer, statistics, coefficients, class_weight, dtype=dtype, **settings)
        vectors = _given(*statistics, coefficients.probability, None, coefficients.uniform, coefficients.entropy)
        inputs, names = [padded, *(vector.unsqueeze(1) for vector in vectors.values())], tuple(vectors)
        weight = padded_weight(class_weight, layout, is_read=coefficients.uniform is not None)
        if weight is not None:
            inputs, names = [*inputs, weight.unsqueeze(0)], (*names, "class_weight")
        outputs = []
        for of_pass in _gradient_passes(padded.dtype, dtype, column_sums):
            outputs += self._run(inputs, gradient, padded.dtype, layout, dtype, names, of_pass, fast=True)
        out = buffer if dtype == padded.dtype else LogitsBuffer(outputs[-1], layout)
        return out, outputs[0][: layout.vocab] if column_sums else None

    def target_gradient(
        self, z: Tensor, statistics: RowStatistics, coefficients: RowCoefficients,
        class_weight: Tensor | None, *, dtype: torch.dtype,
    ) -> Tensor:  # fmt: skip
        if not z.shape[0]:
            return z.new_empty(0, dtype=dtype)
        vectors = _given(*statistics, *coefficients, None if coefficients.uniform is None else class_weight)
        return self._run([z, *vectors.values()], target_gradient, z.dtype, dtype, tuple(vectors))[0]

    def statistics_and_gradient(
        self, logits: LogitsBuffer | LogitsInBlocks, target: Tensor, coefficients: RowCoefficients
    ) -> tuple[RowStatistics, Tensor]:
        """The target's entry is computed first and written last."""
        blocks, dtype, at = logits.buffers, logits.buffers[0].padded.dtype, target.unsqueeze(1)
        if not target.shape[0]:
            return TorchRowKernels(self.logit_map).statistics_and_gradient(logits, target, coefficients)
        places = [TargetColumns.of(at, columns) for columns in logits.columns] if len(blocks) > 1 else []
        z = blocks[0].padded.gather(1, places[0].column if places else at)
        for block, place in zip(blocks[1:], places[1:], strict=True):
            z = torch.where(place.is_here, block.padded.gather(1, place.column), z)
        z = z.squeeze(1)
        parts = self._part_statistics(blocks)
        inputs = [*parts, z, coefficients.probability, coefficients.one_hot]
        row_max, row_log_sum, entry = self._run(inputs, merge_parts, dtype, parts[0].shape[1], True)
        statistics, entry = RowStatistics(row_max, row_log_sum), entry.unsqueeze(1)
        for block in blocks:
            self.gradient(block, statistics, coefficients, None, dtype=dtype)
        if not places:
            blocks[0].padded.scatter_(1, at, entry)
        for block, (column, is_here) in zip(blocks, places, strict=False):
            # A row whose target is elsewhere keeps what it has at any column.
            block.padded.scatter_(1, column, torch.where(is_here, entry, block.padded.gather(1, column)))
        return statistics, z


def _is_masked(layout: VocabLayout, logit_map: LogitMap) -> bool:
    """Whether no z in the padding makes its logit -inf."""
    return layout.padding > 0 and (logit_map.softcap is not None or logit_map.scale == 0)
