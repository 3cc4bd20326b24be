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
from dataclasses import dataclass, field, replace
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

    def apply(self, name: str, *others: Any) -> "_Expression":
        """An operation of nvFuser on this value, with others and settings; numbers become float32 constants."""
        return _Expression(self._fd, getattr(self._fd.ops, name)(self.value, *map(self._operand, others)))

    def _operand(self, other: Any) -> Any:
        if isinstance(other, _Expression):
            return other.value
        return self._fd.define_scalar(other, DataType.Float) if isinstance(other, int | float) else other

    def __rsub__(self, other: Any) -> "_Expression":
        return _Expression(self._fd, self._operand(other)) - self

    __add__ = __radd__ = partialmethod(apply, "add")
    __mul__ = __rmul__ = partialmethod(apply, "mul")
    __sub__ = partialmethod(apply, "sub")


# What work takes beside z, the statistics and `RowWork.optional`.
_COEFFICIENTS = {"moments": (), "gradient": ("probability",), "target_gradient": ("probability", "one_hot")}


def _vectors_of(work: RowWork) -> tuple[str, ...]:
    """The names of what moments or a gradient take beside z, in this order."""
    return (*RowStatistics._fields, *_COEFFICIENTS[work.method], *work.optional)


class _Builder:
    """A fusion being defined, of z in `dtype`; `rows` is C where that is 1, which nvFuser has to know, or -1."""

    def __init__(self, fd: FusionDefinition, logit_map: LogitMap, dtype: torch.dtype, rows: int):
        self.fd, self.logit_map, self.dtype, self.rows = fd, logit_map, dtype, rows

    def input(self, *shape: int, dtype: torch.dtype = torch.float32) -> _Expression:
        # Dimensions of size 1 have no contiguity.
        contiguity = [None if size == 1 else True for size in shape]
        tensor = self.fd.define_tensor(shape=list(shape), contiguity=contiguity, dtype=_NVFUSER_DTYPES[dtype])
        return _Expression(self.fd, tensor)

    def inputs(self, work: RowWork) -> tuple[_Expression, dict[str, _Expression]]:
        """z and `_vectors_of` the work: for z (C, row_stride), they are (C, 1) and (1, row_stride), for z (C,) as z."""
        z_shape = (self.rows, *(layout.row_stride for layout in work.layouts))
        of_rows, of_columns = ((self.rows, 1), (1, z_shape[-1])) if work.layouts else (z_shape, z_shape)
        z = self.input(*z_shape, dtype=self.dtype)
        shapes = {name: of_columns if name == "class_weight" else of_rows for name in _vectors_of(work)}
        return z, {name: self.input(*shape) for name, shape in shapes.items()}

    def output(self, result: _Expression, dtype: torch.dtype = torch.float32, alias: _Expression | None = None) -> None:
        """In the memory of the input `alias`, if there is one."""
        if dtype != torch.float32:
            result = result.apply("cast", _NVFUSER_DTYPES[dtype])
        self.fd.add_output(result.value, *([] if alias is None else [alias.value]))

    def logits(self, z: _Expression) -> tuple[_Expression, _Expression | None]:
        """u, and tanh(scale · z / softcap), which is None without a softcap."""
        u, scale, softcap = z.apply("cast", DataType.Float), self.logit_map.scale, self.logit_map.softcap
        if softcap is None:
            return (u if scale == 1 else u * scale), None
        if self.dtype == torch.float32:
            tanh = (u * (scale / softcap)).apply("tanh")
        else:
            # tanh x = 1 - 2 / (exp 2x + 1) errs by 1e-7, nothing beside logits rounded to 16 bits; twice as fast.
            tanh = 1.0 - ((u * (2 * scale / softcap)).apply("exp") + 1.0).apply("reciprocal") * 2.0
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
        log_p = shifted - given["row_log_sum"]
        p = log_p.apply("exp")
        gradient = p * given["probability"]
        if "one_hot" in given:
            # The target's entry: p - 1 loses the digits of a p near 1.
            near_one = log_p.apply("expm1") * given["probability"] + (given["probability"] - given["one_hot"])
            gradient = p.apply("gt", 0.5).apply("where", near_one, gradient - given["one_hot"])
        if "entropy" in given:
            gradient = gradient - p * _finite(shifted) * given["entropy"]
        if "uniform" in given:
            uniform, weight = given["uniform"], given.get("class_weight")
            gradient = gradient - (uniform if weight is None else uniform * weight)
        return gradient if tanh is None else gradient * (1.0 - tanh * tanh)


def _finite(shifted: _Expression) -> _Expression:
    """Logits of -inf become the lowest finite number: their probability, 0, times it is 0."""
    return shifted.apply("eq", -math.inf).apply("where", torch.finfo(torch.float32).min, shifted)


def part_statistics(build: _Builder, layout: VocabLayout) -> None:
    """(C, S, L) z to three float32 (C, S): each part's maximum, Σ exp(logit - maximum), and that of those below 3/4."""
    parts = parts_of(layout.row_stride)
    shape = (parts, layout.row_stride // parts)
    u, _ = build.logits(build.input(build.rows, *shape, dtype=build.dtype))
    if _is_masked(layout, build.logit_map):
        u = build.masked(u, layout.vocab, shape, -math.inf)
    part_max = u.apply("max", [2])
    # A part of only -inf must give the sum 0, not exp(-inf - -inf).
    shift = part_max.apply("eq", -math.inf).apply("where", 0.0, part_max).apply("broadcast", [False, False, True])
    build.output(part_max)
    exponential = (u - shift).apply("exp")
    build.output(exponential.apply("sum", [2]))
    build.output(exponential.apply("lt", 0.75).apply("where", exponential, 0.0).apply("sum", [2]))


def merge_parts(build: _Builder, parts: int, has_entry: bool) -> None:
    """Statistics of (C, S) parts to row_max and row_log_sum, two float32 (C,); NaN for a row of only -inf.

    With `has_entry`, also z at the targets, A and B of `RowCoefficients`, (C,) each, to the gradient there, (C,).
    """
    part_max, part_sum, part_below = (build.input(build.rows, parts) for _ in range(3))
    row_max = part_max.apply("max", [1])
    shifted = part_max - row_max.apply("broadcast", [False, True])
    total = (part_sum * shifted.apply("exp")).apply("sum", [1])
    # Beside the maximum's own 1, a small sum of the others has lost its digits. None of them is above a half then.
    below = shifted.apply("lt", 0.0).apply("where", part_sum * shifted.apply("exp"), part_below).apply("sum", [1])
    row_log_sum = total.apply("lt", 1.5).apply("where", below, total - 1.0).apply("log1p")
    build.output(row_max)
    build.output(row_log_sum)
    if has_entry:
        z, given = build.input(build.rows, dtype=build.dtype), {"row_max": row_max, "row_log_sum": row_log_sum}
        given |= {name: build.input(build.rows) for name in ("probability", "one_hot")}
        build.output(build.gradient(z, given), build.dtype)


def moments(build: _Builder, work: RowWork) -> None:
    """z and statistics to the sums, float32 (C,)."""
    (layout,) = work.layouts
    z, given = build.inputs(work)
    shifted = build.logits(z)[0] - given["row_max"]
    p = (shifted - given["row_log_sum"]).apply("exp")
    for moment in (MOMENTS[name] for name in work.moments):
        term = moment.term(shifted if moment.keeps_infinity else _finite(shifted), p, given.get("class_weight", 1.0))
        if layout.padding:
            term = build.masked(term, layout.vocab, (layout.row_stride,), 0.0)
        build.output(term.apply("sum", [1]))


def gradient(build: _Builder, work: RowWork, outputs: tuple[str, ...]) -> None:
    """z and its vectors to the gradient in `work.out_dtype`, in place of whole rows if that is their dtype.

    `outputs` are "gradient", "column_sums", which are its sums over the rows, float32 (row_stride,), or both.
    """
    z, given = build.inputs(work)
    result = build.gradient(z, given)
    if "column_sums" in outputs:
        build.output(result.apply("sum", [0]))
    if "gradient" in outputs:
        in_place = work.method == "gradient" and work.out_dtype == work.dtype
        build.output(result, work.out_dtype or work.dtype, alias=z if in_place else None)


def fusions_of(work: RowWork) -> dict[str, tuple[Any, ...]]:
    """The fusions that such work takes, by name: the definition and its settings.

    Of several vocabulary blocks, those of the first and of the last.
    """
    if work.method == "moments":
        return {"moments": (moments, work)}
    if work.method == "target_gradient":
        return {"target_gradient": (gradient, work, ("gradient",))}
    if work.method == "gradient":
        # A fusion that sums over one or five rows of float32 and writes over them gave wrong gradients (nvFuser 0.2.36,
        # one H200; 16 bits did not), so float32 in place takes a fusion for each.
        if work.column_sums and work.dtype == work.out_dtype == torch.float32:
            return {name: (gradient, work, (name,)) for name in ("column_sums", "gradient")}
        name = "gradient_with_column_sums" if work.column_sums else "gradient"
        return {name: (gradient, work, tuple(name.split("_with_")))}
    blocks = dict(zip(dict.fromkeys((work.layouts[0], work.layouts[-1])), ("", "_of_last_block"), strict=False))
    parts = sum(parts_of(layout.row_stride) for layout in work.layouts)
    of_parts = {f"part_statistics{end}": (part_statistics, layout) for layout, end in blocks.items()}
    if work.method == "statistics":
        return {**of_parts, "merge_parts": (merge_parts, parts, False)}
    gradients = {
        f"gradient{end}": fusions_of(replace(work, method="gradient", layouts=(layout,)))["gradient"]
        for layout, end in blocks.items()
    }
    return {**of_parts, "merge_parts_and_target_gradient": (merge_parts, parts, True), **gradients}


def fusion(
    define: Callable[..., None], logit_map: LogitMap, dtype: torch.dtype, rows: int, *settings: Any
) -> FusionDefinition:
    """One of the definitions above, with its settings."""
    with FusionDefinition() as fd:
        define(_Builder(fd, logit_map, dtype, rows), *settings)
    return fd


def definitions(work: RowWork, logit_map: LogitMap) -> dict[str, FusionDefinition]:
    """The fusions of `fusions_of`, defined for any number of rows."""
    return {
        name: fusion(define, logit_map, work.dtype, -1, *rest) for name, (define, *rest) in fusions_of(work).items()
    }


# Autograd runs backward on threads of its own, one a device, and a definition compiles at its first execution.
_lock = threading.Lock()


@dataclass(frozen=True)
class NvFuserRowKernels:
    """See `RowKernels`; logits in 16 or 32 bits."""

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

    def _run_all(self, work: RowWork, z: Tensor, vectors: dict[str, Any]) -> list[Tensor]:
        """The outputs of all fusions of moments or a gradient; `vectors` are (C,), and class weights as long as z."""
        inputs, outputs, is_matrix = [z], [], z.ndim == 2
        for name in _vectors_of(work):
            inputs.append(vectors[name].unsqueeze(0 if name == "class_weight" else 1) if is_matrix else vectors[name])
        for define, *settings in fusions_of(work).values():
            outputs += self._run(inputs, define, work.dtype, *settings, fast=is_matrix)
        return outputs

    def statistics(self, buffer: LogitsBuffer) -> RowStatistics:
        return RowStatistics(*self._statistics((buffer,)))

    def _statistics(self, blocks: tuple[LogitsBuffer, ...], *at_target: Tensor) -> list[Tensor]:
        """Of rows in one or more vocabulary blocks; and what `merge_parts` makes of z, A and B at the targets."""
        found = []
        for padded, layout in ((block.padded, block.layout) for block in blocks):
            if layout.padding and not _is_masked(layout, self.logit_map):
                padded[:, layout.vocab :] = math.copysign(math.inf, -self.logit_map.scale)
            parts = parts_of(layout.row_stride)
            in_parts = padded.view(-1, parts, layout.row_stride // parts)
            found.append(self._run([in_parts], part_statistics, padded.dtype, layout, fast=True))
        merged = found[0] if len(found) == 1 else [torch.cat(of, 1) for of in zip(*found, strict=True)]
        settings = (blocks[0].padded.dtype, merged[0].shape[1], bool(at_target))
        return self._run([*merged, *at_target], merge_parts, *settings)

    def moments(
        self, buffer: LogitsBuffer, statistics: RowStatistics, class_weight: Tensor | None, names: tuple[str, ...]
    ) -> dict[str, Tensor]:
        work = RowWork.of("moments", buffer, class_weight=class_weight, names=names)
        weight = padded_weight(class_weight, buffer.layout, is_read=reads_class_weight(names))
        sums = self._run_all(work, buffer.padded, statistics._asdict() | {"class_weight": weight})
        return dict(zip(names, sums, strict=True))

    def gradient(
        self, buffer: LogitsBuffer, statistics: RowStatistics, coefficients: RowCoefficients,
        class_weight: Tensor | None, *, dtype: torch.dtype, column_sums: bool = False,
    ) -> tuple[LogitsBuffer, Tensor | None]:  # fmt: skip
        work = RowWork.of(
            "gradient", buffer, coefficients, class_weight=class_weight, dtype=dtype, column_sums=column_sums
        )
        weight = padded_weight(class_weight, buffer.layout, is_read=coefficients.uniform is not None)
        vectors = statistics._asdict() | coefficients._asdict() | {"class_weight": weight}
        outputs = self._run_all(work, buffer.padded, vectors)
        out = buffer if dtype == work.dtype else LogitsBuffer(outputs[-1], buffer.layout)
        return out, outputs[0][: buffer.layout.vocab] if column_sums else None

    def target_gradient(
        self, z: Tensor, statistics: RowStatistics, coefficients: RowCoefficients,
        class_weight: Tensor | None, *, dtype: torch.dtype,
    ) -> Tensor:  # fmt: skip
        work = RowWork.of("target_gradient", z, coefficients, class_weight=class_weight, dtype=dtype)
        vectors = statistics._asdict() | coefficients._asdict() | {"class_weight": class_weight}
        return self._run_all(work, z, vectors)[0]

    def statistics_and_gradient(
        self, logits: LogitsBuffer | LogitsInBlocks, target: Tensor, coefficients: RowCoefficients
    ) -> tuple[RowStatistics, Tensor]:
        """The target's entry is computed first and written last."""
        blocks, at = logits.buffers, target.unsqueeze(1)
        places = [TargetColumns.of(at, columns) for columns in logits.columns]
        z = blocks[0].padded.new_empty(at.shape)
        for block, (column, is_here) in zip(blocks, places, strict=True):
            z = torch.where(is_here, block.padded.gather(1, column), z)
        z = z.squeeze(1)
        *found, entry = self._statistics(blocks, z, coefficients.probability, coefficients.one_hot)
        statistics, entry = RowStatistics(*found), entry.unsqueeze(1)
        for block, (column, is_here) in zip(blocks, places, strict=True):
            self.gradient(block, statistics, coefficients, None, dtype=z.dtype)
            # A row whose target is elsewhere keeps what it has at any column.
            block.padded.scatter_(1, column, torch.where(is_here, entry, block.padded.gather(1, column)))
        return statistics, z


def _is_masked(layout: VocabLayout, logit_map: LogitMap) -> bool:
    """Whether no z in the padding makes its logit -inf."""
    return layout.padding > 0 and (logit_map.softcap is not None or logit_map.scale == 0)
