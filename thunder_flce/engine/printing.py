"""Prints what a region runs: the engine runs on tensors without memory, and each primitive writes its lines.

    for each chunk of C tokens (4 × 2048):
      logits bf16[C, 128256] = x @ W.t()  cuBLAS

A, B, uniform and g_e of a row are the `RowCoefficients` of `operation.loss`, u are the logits after scale and softcap,
u′ is their derivative, p their softmax. Numbers of rows are printed as if no row was ignored.

Legend: T tokens, C rows in a chunk, H hidden size, V vocabulary.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

import torch
from torch import Tensor

from thunder_flce.engine import engine, rows
from thunder_flce.engine.kernels import scaling
from thunder_flce.engine.kernels.dispatch import BACKENDS
from thunder_flce.engine.kernels.interface import LabelTerm, RowStatistics
from thunder_flce.engine.matmul import matmul
from thunder_flce.engine.plan import LOSS_ONLY, Plan
from thunder_flce.engine.primitives import Primitives, Region
from thunder_flce.engine.row_loss import RowResults
from thunder_flce.engine.rows import Rows
from thunder_flce.operation.call import HIDDEN, TEACHER, TOKEN, Call, Linear, Spec, argument, gradient_name
from thunder_flce.operation.loss import RowCoefficients

WIDTH = 112
"""Characters of a line. In a trace, with its indentation, it then has at most 120."""

LETTERS = {
    "input": "x", "linear_weight": "W", "target": "y", "linear_bias": "b", "weight": "w", "token_weights": "w_t",
    "target_weights": "q", "teacher_input": "x'", "teacher_weight": "W'",
}  # fmt: skip
"""The letters that stand for the tensors of a call in the lines; others keep their names."""

_DTYPES = {
    torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32", torch.float64: "f64", torch.int64: "i64",
}  # fmt: skip

Line = tuple[str, str]
"""A computation, and the library that runs it"""


def letter(name: str) -> str:
    """Returns the letter that stands for a tensor of a call in the lines."""
    sequence, bracket, item = name.partition("[")
    if not bracket:
        return LETTERS.get(name, name)
    number = int(item.partition("]")[0])
    if sequence == "token_inputs":
        return f"i{number}"
    return f"{'x' if name.endswith('input') else 'W'}{number + 1}"


@dataclass(frozen=True)
class Program:
    """The printed forward and backward: lines of text, with the lines of a loop indented beneath its title."""

    forward: tuple[str, ...]
    backward: tuple[str, ...]


@lru_cache(maxsize=256)
def program(call: Call, plan: Plan) -> Program:
    """Returns the printed program of a call of specs."""
    region, dimensions = Region(call, plan), len(call.shape)

    def without_memory(name: str, spec: Spec) -> Tensor:
        is_gathered = region.token_shard is not None and argument(name).role == TOKEN
        shape = (call.tokens, *spec.shape[dimensions:]) if is_gathered else spec.shape
        return torch.empty(shape, dtype=spec.dtype, device="meta")

    ops = _Writer(call.map(without_memory).flat(), region)
    with torch.no_grad():
        results = engine.forward(ops)
        forward = _formatted(ops.take())
        if plan.finishes_in_forward and not plan.saves_unit_gradients(call):
            names, grad_spec = sorted(map(gradient_name, call.needs_grad)), Spec((), call.dtype, call.device)
            return Program(forward, scaling_lines(names, grad_spec, has_expected="expected_gradient" in call.tensors))
        if plan.strategy != LOSS_ONLY:
            # The shapes are those of all ranks' tokens, even if the tokens are divided.
            of_rows, of_targets = (call.tokens,), tuple(ops.call.tensors["target"].shape)
            shapes = {"loss": of_rows if call.loss.reduction == "none" else ()}
            shapes |= {name: of_targets if name == "log_prob" else of_rows for name in call.loss.differentiable_outputs}
            engine.backward(ops, results, {name: ops.empty(shape, call.row_dtype) for name, shape in shapes.items()})
    return Program(forward, _formatted(ops.take()))


def scaling_lines(names: Sequence[str], spec: Spec, *, has_expected: bool) -> tuple[str, ...]:
    """Returns the lines that multiply finished gradients, of `spec`'s dtype and device, by the upstream gradient."""
    library = scaling.library(spec.dtype, spec.device)
    factor = "grad / expected_gradient" if has_expected else "grad"
    return _formatted([(f"{name} *= {factor}    skipped where that is 1", library) for name in names])


class _Writer(Primitives):
    """Primitives that return empty tensors, and write a line for each launch that they stand for."""

    def __init__(self, call: Call, region: Region):
        super().__init__(call, region)
        # Without the kernel, PyTorch's operations compute the token loss, which also run on tensors without memory.
        region.token_kernel = None
        device_type = region.device_type
        self._lines: list[Line] = []
        self._row_library = BACKENDS[region.backend].library
        self._vector_library = "Triton" if self.region.vector_kernels else "PyTorch"
        self._matmul_library = matmul.library(device_type)
        is_in_triton = region.plan.batch_invariant and device_type == "cuda"
        self._logits_library = "Triton" if is_in_triton else self._matmul_library
        self._network = "NCCL" if device_type == "cuda" else "gloo"
        self._u = "u" if call.loss.maps_logits else "logits"
        self._rows = "T"
        """The number of rows in a chunk as it is printed: "C" for several chunks"""

    def take(self) -> list[Line]:
        """Returns the lines written since the last call."""
        lines, self._lines = self._lines, []
        return lines

    def _write(self, text: str, library: str = "") -> None:
        self._lines.append((text, library))

    # Rows.

    def select_rows(self, upstream: Tensor | None, *, meanwhile: Callable[[Tensor], None] | None = None) -> Rows:
        return self._select_rows(upstream, is_first=True)

    def select_rows_again(self, upstream: Tensor, count: int) -> Rows:
        return self._select_rows(upstream, is_first=False)

    def _select_rows(self, upstream: Tensor | None, *, is_first: bool) -> Rows:
        call, region = self.call, self.region
        if region.token_shard is not None:
            self._write(f"{self._typed('y', call.tensors['target'])} = all_gather(y)", self._network)
        note = "    targets are checked" if is_first else ""
        self._write(f"valid_count i64[] = count of valid rows{note}", self._vector_library)
        if region.may_skip:
            names = ", ".join([*(letter(name) for name, role in call.roles.items() if role == HIDDEN), "y"])
            ahead = " while the first logits run" if region.starts_early else ""
            note = f"    the host waits for their number{ahead}" if region.device_type == "cuda" and is_first else ""
            self._write(f"{names} = valid rows of {names}{note}")
        return Rows(rows.token_vectors(call, upstream=upstream), call.tokens)

    def chunks(self, selected: Rows) -> Iterator[slice]:
        before, parts, chunks = self.take(), [], [*super().chunks(selected)]
        self._rows = "C" if len(chunks) > 1 else str(selected.count)
        for chunk in chunks:
            yield chunk
            parts.append((chunk.stop - chunk.start, self.take()))
        self._lines = before
        for lines, group in groupby(parts, key=lambda part: part[1]):
            counts = Counter(size for size, _ in group)
            if len(chunks) > 1:
                sizes = ", ".join(f"{count} × {size}" for size, count in counts.items())
                self._write(f"for each chunk of C tokens ({sizes}):")
                lines = [(f"  {text}", library) for text, library in lines]
            self._lines += lines

    def gather(self, selected: Rows, tensor: Tensor, chunk: slice, out: Tensor | None = None) -> Tensor:
        if self.region.token_shard is None:
            return tensor[chunk]
        gathered = tensor.new_empty(chunk.stop - chunk.start, tensor.shape[1])
        self._write(f"{self._in_chunk('x', gathered)} = all_gather(x)", self._network)
        return gathered

    # Memory.

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    # Matmuls.

    def logits_(self, out: Tensor, xs: list[Tensor], linears: Sequence[Linear]) -> None:
        name = self._in_chunk("teacher" if TEACHER in linears else "logits", out)
        sign, bias = "=", " + b" if "linear_bias" in self.call.tensors else ""
        for linear, _ in sorted(zip(linears, xs, strict=True), key=lambda term: term[1].shape[1]):
            words = f"{name} {sign} {letter(linear.x)} @ {letter(linear.weight)}.t(){bias}"
            self._write(words, self._logits_library)
            sign, bias = "+=", ""

    def start_input_gradient(self, dlogits: Tensor, linear: Linear) -> Callable[[Tensor], None]:
        def finish(out: Tensor) -> None:
            name, shard, part = gradient_name(linear.x), self.call.shard, out
            if is_summed := shard is not None and shard.reduces_input_grad:
                part = out.to(self.call.row_dtype if shard.float32_input_grad else self.call.dtype)
            words = f"{self._in_chunk(name, part)} = dlogits @ {letter(linear.weight)}"
            self._write(words, self._matmul_library)
            if is_summed:
                self._write(f"{self._in_chunk(name, out)} = summed over the ranks", self._network)

        return finish

    def weight_gradient_(
        self, out: Tensor, dlogits: Tensor, x: Tensor, *, linear: Linear, accumulate: bool, frequent: bool = False
    ) -> None:
        # "+=" stands for all chunks, although the first one writes dW without adding.
        sign, matrix = "+=" if self._rows == "C" else "=", "dlogits[:, frequent]" if frequent else "dlogits"
        name = "frequent rows of " * frequent + gradient_name(linear.weight)
        words = f"{self._typed(name, out)} {sign} {matrix}.t() @ {letter(linear.x)}"
        self._write(words, self._matmul_library)

    def rounded(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        result = tensor.to(dtype)
        if tensor.dtype != dtype:
            self._write(f"{self._typed('dW', result)} = rounded once")
        return result

    # The row kernels.

    def one_pass_(self, z: Tensor, target: Tensor, coefficients: RowCoefficients) -> RowResults:
        results = self._statistics(z, target)
        how = "in place" if self._row_library == "PyTorch" else "in place, by the same kernel"
        words = f"{self._in_chunk('dlogits', z)} = s (softmax({self._u}) - one_hot(y))    {how}"
        self._write(words, self._row_library)
        return results

    def results(self, z: Tensor, target: Tensor) -> RowResults:
        loss = self.call.loss
        row_results = self._statistics(z, target)
        if self.call.shard is not None:
            self._write("row_max, row_log_sum = combined over the ranks", self._network)
        if loss.moments:
            self._write(f"{', '.join(loss.moments)} = sums over the rows of logits", self._row_library)
        if loss.needs_argmax:
            self._write("argmax = column of the largest logit", "PyTorch")
        argmax = self.empty(z.shape[:1], torch.int64) if loss.needs_argmax else None
        return row_results._replace(moments=dict.fromkeys(loss.moments, row_results.statistics.row_max), argmax=argmax)

    def _statistics(self, z: Tensor, target: Tensor) -> RowResults:
        vector = self.empty(z.shape[:1], self.call.row_dtype)
        u = self._u
        words = f"{self._in_chunk('row_max, row_log_sum', vector)} = max({u}), log(sum(exp({u} - row_max))); logits[y]"
        self._write(words, self._row_library)
        return RowResults(RowStatistics(vector, vector), self.empty(target.shape, z.dtype))

    def gradient_(
        self, z: Tensor, results: RowResults, coefficients: RowCoefficients, target: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        out, has_sums = self.dlogits_buffer(z), self.call.bias_grad
        note = "in place" if out is z else "in new memory"
        softmax = f"softmax({self._u})" if coefficients.entropy is None else "p"
        terms = f"A {softmax} - B one_hot(y)"
        terms += " - uniform" if coefficients.uniform is not None else ""
        terms += f" - g_e p ({self._u} - row_max)" if coefficients.entropy is not None else ""
        words = f"{self._in_chunk('dlogits', out)} = {f'u′ ({terms})' if self.call.loss.softcap else terms}    {note}"
        self._write(words, self._row_library)
        if not has_sums:
            return out, None
        sums, sign = self.empty((self.call.vocab,), self.call.row_dtype), "+=" if self._rows == "C" else "="
        self._write(f"{self._typed('db', sums)} {sign} sums of dlogits over the rows", self._row_library)
        return out, sums

    def divergence_(
        self, z: Tensor, teacher: Tensor, factors: Tensor | None, labels: LabelTerm | None
    ) -> tuple[Tensor, Tensor]:
        value, divergence = self.empty(z.shape[:1], self.call.row_dtype), self.call.loss.divergence
        assert divergence is not None
        out = z if factors is None else self.dlogits_buffer(z)
        gradient = "" if factors is None else f", dlogits {'in place' if out is z else 'in new memory'}"
        words = f"{self._in_chunk('divergence', value)}{gradient} = {divergence.kind}, of logits from teacher"
        words += "" if labels is None else ", + cross-entropy"
        self._write(words, "Triton" if self.region.backend == "triton" else "PyTorch")
        return value, out

    # Results.

    def loss(self, selected: Rows, results: RowResults) -> tuple[Tensor, dict[str, Tensor]]:
        call, reduction = self.call, self.call.loss.reduction
        shape = (call.own_tokens,) if reduction == "none" else ()
        row_loss = f"row_log_sum + row_max - {self._u}[y]" if call.loss.is_plain else "loss"
        if call.loss.divergence is not None:
            row_loss = "divergence + cross-entropy" if "label_weights" in call.tensors else "divergence"
        weights = ("weight", "token_weights", "divergence_weights", "label_weights")
        has_weights = any(name in call.tensors for name in weights)
        words = f"{row_loss} of each row" if reduction == "none" else f"{reduction} over valid rows of {row_loss}"
        words += ", weighted" if has_weights else ""
        self._write(f"loss {_type(shape, call.row_dtype)} = {words}", self._vector_library)
        return self.empty((selected.count,) if reduction == "none" else (), call.row_dtype), {}

    def scaled_rows(self, gradient: Tensor, factors: Tensor) -> Tensor:
        result = self.empty(tuple(gradient.shape), self.call.dtype)
        self._write(f"{self._typed('dX', result)} = dX * grad    each row", "PyTorch")
        return result

    def _typed(self, name: str, tensor: Tensor) -> str:
        return f"{name} {_type(tensor.shape, tensor.dtype)}"

    def _in_chunk(self, name: str, tensor: Tensor) -> str:
        """Returns `name` with its dtype and shape, whose first size is the printed number of rows in a chunk."""
        return f"{name} {_type((self._rows, *tensor.shape[1:]), tensor.dtype)}"


def _type(shape: Iterable[int | str], dtype: torch.dtype) -> str:
    return f"{_DTYPES.get(dtype, str(dtype).removeprefix('torch.'))}[{', '.join(map(str, shape))}]"


def _formatted(lines: Sequence[Line]) -> tuple[str, ...]:
    """Returns the lines as text, with the libraries aligned in a column."""
    width = max((len(text) for text, library in lines if library), default=0)
    return tuple(f"{text:{width}}  {library}".rstrip() for text, library in lines)
