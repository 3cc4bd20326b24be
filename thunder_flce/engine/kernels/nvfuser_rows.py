"""Row kernels as nvFuser fusions, compiled once per definition.

Statistics take two fusions: the first reads the logits as parts of a row that fit in the registers of a block, the
second merges the parts of each row. The padding after the vocabulary is filled so that its logits are -inf, which
change neither maximum nor sum. A softcap would make them finite; then a mask leaves the padding out, at half the speed.

The gradient is one pointwise fusion that writes in place. Its vectors are inputs of shapes (C, 1) and (1, stride),
because a broadcast inside the fusion would make nvFuser add a copy of the whole chunk before writing in place. For the
same reason, PyTorch's operations compute the targets' entries, (C,), and scatter them.

Legend: C rows of logits, z the linear's output, S parts of L elements in a row, so that a row is S · L elements long.
"""

import math
import threading
from collections.abc import Callable
from functools import partialmethod
from typing import Any, NamedTuple

import torch
from nvfuser_direct import DataType, FusionDefinition
from torch import Tensor

from thunder_flce.device import ROW_MULTIPLE
from thunder_flce.engine.kernels.interface import (
    RowStatistics,
    at_columns,
    gradient,
    padded_weight,
    whole_rows,
    write_at_targets_,
)
from thunder_flce.operation.loss import LogitMap, RowCoefficients
from thunder_flce.operation.moments import MOMENTS

_NVFUSER_DTYPES = {torch.float32: DataType.Float, torch.float16: DataType.Half, torch.bfloat16: DataType.BFloat16}
# The most elements of a part: as many as nvFuser keeps in registers.
_MAX_PART = 16384


def parts_of(stride: int) -> int:
    """Returns S: the fewest parts that are short enough and aligned; 1 if three times the minimum are not enough."""
    fewest = -(-stride // _MAX_PART)
    return next((s for s in range(fewest, 3 * fewest + 1) if stride % (s * ROW_MULTIPLE) == 0), 1)


class Expression:
    """A value of a fusion, with the arithmetic that `operation.moments.MOMENTS` needs."""

    def __init__(self, fd: FusionDefinition, value: Any):
        self._fd = fd
        self.value = value

    def apply(self, name: str, *others: Any, **settings: Any) -> "Expression":
        """Applies nvFuser's operation `name` to this value; in `others`, numbers become constants, lists stay lists."""
        return Expression(self._fd, getattr(self._fd.ops, name)(self.value, *map(self._operand, others), **settings))

    def _operand(self, other: Any) -> Any:
        if isinstance(other, Expression):
            return other.value
        if not isinstance(other, int | float):
            return other
        return self._fd.define_scalar(other, DataType.Int if isinstance(other, int) else DataType.Float)

    def __rsub__(self, other: Any) -> "Expression":
        return Expression(self._fd, self._operand(other)) - self

    __add__ = __radd__ = partialmethod(apply, "add")
    __mul__ = __rmul__ = partialmethod(apply, "mul")
    __sub__ = partialmethod(apply, "sub")


class Fusion(NamedTuple):
    """The key of a definition, for one logit map."""

    define: Callable[["_Builder"], None]
    """The function that defines it"""
    dtype: torch.dtype
    """The dtype of z"""
    stride: int
    vocab: int
    vectors: tuple[str, ...] = ()
    """Inputs of a gradient or moments beside z and the statistics, in order: of `RowCoefficients` or "class_weight" """
    moments: tuple[str, ...] = ()
    """Names of `operation.moments.MOMENTS`"""
    out_dtype: torch.dtype | None = None
    """The dtype of the gradient; None if only its sums over the rows are computed"""
    in_place: bool = False
    """Whether the gradient overwrites z"""
    column_sums: bool = False
    """Whether the gradient's sums over the rows are computed"""

    @property
    def padding(self) -> int:
        """Number of elements of padding at the end of each row."""
        return self.stride - self.vocab


class _Builder:
    """A fusion that is being defined; `rows` is 1 if C is 1, which nvFuser must know, else -1."""

    def __init__(self, fd: FusionDefinition, logit_map: LogitMap, fusion: Fusion, rows: int):
        self.fd, self.logit_map, self.fusion, self.rows = fd, logit_map, fusion, rows

    def input(self, *shape: int, dtype: torch.dtype = torch.float32) -> Expression:
        # nvFuser wants None as the contiguity of dimensions of size 1.
        contiguity = [None if size == 1 else True for size in shape]
        tensor = self.fd.define_tensor(shape=list(shape), contiguity=contiguity, dtype=_NVFUSER_DTYPES[dtype])
        return Expression(self.fd, tensor)

    def inputs(self) -> tuple[Expression, dict[str, Expression]]:
        """Defines the inputs: z (C, stride), and the statistics and vectors, (C, 1) or (1, stride)."""
        stride = self.fusion.stride
        z, vectors = self.input(self.rows, stride, dtype=self.fusion.dtype), {}
        for name in (*RowStatistics._fields, *self.fusion.vectors):
            vectors[name] = self.input(*((1, stride) if name == "class_weight" else (self.rows, 1)))
        return z, vectors

    def output(self, result: Expression, dtype: torch.dtype = torch.float32, alias: Expression | None = None) -> None:
        """Adds an output, which overwrites the input `alias`, if given."""
        if dtype != torch.float32:
            result = result.apply("cast", _NVFUSER_DTYPES[dtype])
        self.fd.add_output(result.value, *([] if alias is None else [alias.value]))

    def logits(self, z: Expression) -> tuple[Expression, Expression | None]:
        """Returns u and tanh(scale · z / softcap); the latter is None without a softcap."""
        u, scale, softcap = z.apply("cast", DataType.Float), float(self.logit_map.scale), self.logit_map.softcap
        if softcap is None:
            return (u if scale == 1 else u * scale), None
        if self.fusion.dtype == torch.float32:
            tanh = (u * (scale / softcap)).apply("tanh")
        else:
            # tanh x = 1 - 2 / (exp 2x + 1) errs by 1e-7, negligible for logits in 16 bits, and is twice as fast.
            tanh = 1.0 - ((u * (2 * scale / softcap)).apply("exp") + 1.0).apply("reciprocal") * 2.0
        return tanh * float(softcap), tanh

    def masked(self, values: Expression, shape: tuple[int, ...], other: float) -> Expression:
        """Returns the values (C, *shape) with `other` in the padding; shape is (stride,) or (S, L)."""
        ops, columns = self.fd.ops, None
        for dim, size in enumerate(shape):
            if size == 1:
                continue
            length = math.prod(shape[dim + 1 :])
            count, start, step = (self.fd.define_scalar(number, DataType.Int) for number in (size, 0, length))
            steps = ops.iota(count, start, step, dtype=DataType.Int)
            steps = ops.broadcast(steps, [at != dim + 1 for at in range(len(shape) + 1)])
            columns = steps if columns is None else ops.add(columns, steps)
        is_column = ops.lt(columns, self.fd.define_scalar(self.fusion.vocab, DataType.Int))
        return Expression(self.fd, is_column).apply("where", values, other)


def _finite(shifted: Expression) -> Expression:
    """Replaces -inf by the lowest finite number, whose product with the probability 0 is 0."""
    return shifted.apply("eq", -math.inf).apply("where", torch.finfo(torch.float32).min, shifted)


def _part_statistics(builder: _Builder) -> None:
    """From z (C, S, L): each part's maximum, Σ exp(logit - maximum), and the sum of terms below 3/4; float32 (C, S)."""
    fusion = builder.fusion
    parts = parts_of(fusion.stride)
    shape = (parts, fusion.stride // parts)
    u, _ = builder.logits(builder.input(builder.rows, *shape, dtype=fusion.dtype))
    if _is_masked(fusion.padding, builder.logit_map):
        u = builder.masked(u, shape, -math.inf)
    part_max = u.apply("max", [2])
    # The sum of a part of only -inf must be 0, not NaN, exp(-inf - -inf).
    shift = part_max.apply("eq", -math.inf).apply("where", 0.0, part_max).apply("broadcast", [False, False, True])
    builder.output(part_max)
    exponential = (u - shift).apply("exp")
    builder.output(exponential.apply("sum", [2]))
    builder.output(exponential.apply("lt", 0.75).apply("where", exponential, 0.0).apply("sum", [2]))


def _merge_parts(builder: _Builder) -> None:
    """From statistics of parts (C, S): row_max and row_log_sum, float32 (C,); NaN for a row of only -inf."""
    parts = parts_of(builder.fusion.stride)
    part_max, part_sum, part_below = (builder.input(builder.rows, parts) for _ in range(3))
    row_max = part_max.apply("max", [1])
    shifted = part_max - row_max.apply("broadcast", [False, True])
    total = (part_sum * shifted.apply("exp")).apply("sum", [1])
    # Below 1.5, the sum without the maximum's own exponential, 1, is added up anew, since it has lost digits beside the
    # 1. No other exponential is above 0.5 then.
    below = shifted.apply("lt", 0.0).apply("where", part_sum * shifted.apply("exp"), part_below).apply("sum", [1])
    row_log_sum = total.apply("lt", 1.5).apply("where", below, total - 1.0).apply("log1p")
    builder.output(row_max)
    builder.output(row_log_sum)


def _moments(builder: _Builder) -> None:
    """From z and statistics: the sums of `Fusion.moments`, float32 (C,) each."""
    z, vectors = builder.inputs()
    shifted = builder.logits(z)[0] - vectors["row_max"]
    p = (shifted - vectors["row_log_sum"]).apply("exp")
    terms = shifted, _finite(shifted), p, vectors.get("class_weight", 1.0)
    for name in builder.fusion.moments:
        term = MOMENTS[name](*terms)
        if builder.fusion.padding:
            term = builder.masked(term, (builder.fusion.stride,), 0.0)
        builder.output(term.apply("sum", [1]))


def _gradient(builder: _Builder) -> None:
    """From z and its vectors: the gradient of `RowCoefficients`, with the terms whose vectors are given.

    Outputs are its sums over the rows, (stride,), if wanted, and the gradient in `out_dtype`, if that is given.
    """
    (z, vectors), fusion = builder.inputs(), builder.fusion
    u, tanh = builder.logits(z)
    shifted = u - vectors["row_max"]
    p = (shifted - vectors["row_log_sum"]).apply("exp")
    gradient = p * vectors["probability"]
    if "entropy" in vectors:
        gradient = gradient - p * _finite(shifted) * vectors["entropy"]
    if "uniform" in vectors:
        uniform, weight = vectors["uniform"], vectors.get("class_weight")
        gradient = gradient - (uniform if weight is None else uniform * weight)
    if tanh is not None:
        gradient = gradient * (1.0 - tanh * tanh)
    if fusion.column_sums:
        builder.output(gradient.apply("sum", [0]))
    if fusion.out_dtype is not None:
        builder.output(gradient, fusion.out_dtype, alias=z if fusion.in_place else None)


def _fuse(fusion: Fusion, logit_map: LogitMap, rows: int = -1) -> FusionDefinition:
    with FusionDefinition() as fd:
        fusion.define(_Builder(fd, logit_map, fusion, rows))
    return fd


# Autograd runs backward passes on a thread for each device, and a definition compiles at its first execution.
_lock = threading.Lock()


class NvFuserRowKernels:
    """See `RowKernels`; for logits in 16 or 32 bits. A gradient that does not overwrite z is copied once."""

    def __init__(self, logit_map: LogitMap = LogitMap()):  # noqa: B008
        self.logit_map = logit_map
        self._fused: dict[tuple[Fusion, int], FusionDefinition] = {}

    def _run(self, fusion: Fusion, inputs: list[Tensor]) -> list[Tensor]:
        """Executes one of the definitions above, which is compiled at its first use.

        Fusions that read 16-bit logits use fast exponentials, with a relative error of about 2e-7, which would matter
        for float32 logits.
        """
        key = (fusion, 1 if inputs[0].shape[0] == 1 else -1)
        is_fast = fusion.dtype != torch.float32 and fusion.define is not _merge_parts
        with _lock:
            if key not in self._fused:
                self._fused[key] = _fuse(fusion, self.logit_map, key[1])
            return self._fused[key].execute(inputs, _enable_options=["fast_math"] if is_fast else [])

    def statistics(self, z: Tensor, target: Tensor | None = None) -> tuple[RowStatistics, Tensor | None]:
        layout = _, stride, vocab = _layout(z)
        padded, parts = whole_rows(z), parts_of(stride)
        if stride > vocab and not _is_masked(stride - vocab, self.logit_map):
            padded[:, vocab:] = math.copysign(math.inf, -self.logit_map.scale)
        of_parts = self._run(Fusion(_part_statistics, *layout), [padded.view(-1, parts, stride // parts)])
        statistics = RowStatistics(*self._run(Fusion(_merge_parts, *layout), of_parts))
        return statistics, None if target is None else at_columns(z, target)

    def moments(
        self, z: Tensor, statistics: RowStatistics, class_weight: Tensor | None, names: tuple[str, ...]
    ) -> dict[str, Tensor]:
        weight = padded_weight(class_weight, z.stride(0))
        fusion = Fusion(_moments, *_layout(z), () if weight is None else ("class_weight",), names)
        sums = self._run(fusion, _inputs(fusion, z, statistics, {"class_weight": weight}))
        return dict(zip(names, sums, strict=True))

    def gradient_(
        self, z: Tensor, statistics: RowStatistics, coefficients: RowCoefficients, *,
        class_weight: Tensor | None = None, out: Tensor, target: Tensor | None = None, column_sums: bool = False,
    ) -> Tensor | None:  # fmt: skip
        weight = padded_weight(class_weight, z.stride(0))
        vectors, in_place = coefficients._replace(one_hot=None)._asdict() | {"class_weight": weight}, out is z
        names = tuple(name for name, vector in vectors.items() if vector is not None)
        fusions = [whole := Fusion(_gradient, *_layout(z), names, (), out.dtype, in_place, column_sums)]
        # A fusion that sums over one or five float32 rows and overwrites them gave wrong gradients (nvFuser 0.2.36, one
        # H200; not in 16 bits). So float32 in place takes two fusions: the sums first, then the gradient.
        if column_sums and in_place and z.dtype == torch.float32:
            fusions = [whole._replace(out_dtype=None), whole._replace(column_sums=False)]
        z_y = entry = None
        if target is not None:
            column = target.clamp(min=0)
            column_weight, z_y = None if class_weight is None else class_weight[column], at_columns(z, column).float()
            entry = gradient(z_y, self.logit_map, statistics, coefficients, class_weight=column_weight)
        outputs = [each for fusion in fusions for each in self._run(fusion, _inputs(fusion, z, statistics, vectors))]
        if out is not z:
            out.copy_(outputs[-1][:, : z.shape[1]])
        sums = outputs[0][: z.shape[1]] if column_sums else None
        if target is not None and entry is not None and z_y is not None:
            write_at_targets_(out, target, entry)
            if sums is not None:
                # The fusion's sums, taken before rounding, lack the one_hot term of the entries.
                slope = self.logit_map.slope(z_y)
                change = -coefficients.one_hot if slope is None else -coefficients.one_hot * slope
                sums.index_add_(0, target.clamp(min=0), torch.where(target < 0, 0, change))
        return sums

    def one_pass_(self, z: Tensor, target: Tensor, coefficients: RowCoefficients) -> tuple[RowStatistics, Tensor]:
        statistics, z_y = self.statistics(z, target)
        assert z_y is not None
        self.gradient_(z, statistics, coefficients, out=z, target=target)
        return statistics, z_y


def _layout(z: Tensor) -> tuple[torch.dtype, int, int]:
    return z.dtype, z.stride(0), z.shape[1]


def _inputs(fusion: Fusion, z: Tensor, statistics: RowStatistics, vectors: dict[str, Any]) -> list[Tensor]:
    row_vectors = [*statistics, *(vectors[name] for name in fusion.vectors if name != "class_weight")]
    inputs = [whole_rows(z), *(vector.contiguous().unsqueeze(1) for vector in row_vectors)]
    return [*inputs, vectors["class_weight"].unsqueeze(0)] if "class_weight" in fusion.vectors else inputs


def _is_masked(padding: int, logit_map: LogitMap) -> bool:
    """Whether the padding must be masked, because no z would make its logits -inf."""
    return padding > 0 and (logit_map.softcap is not None or logit_map.scale == 0)
