"""What a region runs, written down: the engine runs on tensors without memory, and each primitive writes a line.

    for each chunk of 2048 tokens, 4 in all:
      logits bf16[2048, 128256] = x @ W.t()                          cuBLAS

The formulas of the row work are those of `operation.loss`. Ignored rows are counted as if there were none.
Legend: T tokens, C rows in a chunk, H hidden size, V vocabulary.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thunder_flce.engine import engine, row_loss, rows
from thunder_flce.engine.engine import Saved
from thunder_flce.engine.kernels import scaling
from thunder_flce.engine.kernels.interface import RowStatistics
from thunder_flce.engine.matmul import matmul
from thunder_flce.engine.plan import LOSS_ONLY, Plan
from thunder_flce.engine.primitives import Primitives, Region
from thunder_flce.engine.row_loss import RowResults, UpstreamGradients
from thunder_flce.engine.rows import Rows
from thunder_flce.operation.call import TOKEN, Call, Linear, Spec, argument
from thunder_flce.operation.loss import DIFFERENTIABLE_OUTPUTS, RowCoefficients

WIDTH = 112
"""Characters of a line, so that one of a trace, with its indentation, has 120 at most."""

LETTERS = {
    "input": "x", "linear_weight": "W", "target": "y", "linear_bias": "b", "weight": "w", "token_weights": "w_t",
    "target_weights": "q", "num_items": "num_items", "expected_gradient": "expected_gradient",
    "teacher_input": "x'", "teacher_weight": "W'",
}  # fmt: skip
"""What the lines call the tensors of a call."""

_DTYPES = {
    torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32", torch.float64: "f64", torch.int64: "i64",
}  # fmt: skip


def letter(name: str) -> str:
    """What the lines call a tensor of a call."""
    if name in LETTERS:
        return LETTERS[name]
    number = int(name[name.index("[") + 1 : name.index("]")])
    if name.startswith("token_inputs"):
        return f"i{number}"
    return f"{'x' if name.endswith('input') else 'W'}{number + 1}"


class Line(NamedTuple):
    """One primitive."""

    primitive: str
    """Its name in `Primitives`"""
    text: str
    library: str = ""


@dataclass(frozen=True)
class Program:
    """What forward and backward run: lines of text, those of the same loop indented beneath its title."""

    forward: tuple[str, ...]
    backward: tuple[str, ...]
    primitives: tuple[str, ...]
    """The names of all primitives in the order of a run, of every chunk"""


def program(call: Call, plan: Plan) -> Program:
    """What a call of specs runs."""
    return _program(call.specs().key, plan)


@lru_cache(maxsize=256)
def _program(key: tuple[Any, ...], plan: Plan) -> Program:
    call = Call.of_key(key)
    shard, device_type = call.shard, call.device.type
    call = call.map(lambda name, spec: torch.empty(spec.shape, dtype=spec.dtype, device="meta"))
    if shard is not None and shard.sequence_parallel:
        own = len(call.shape)
        call = call.map(lambda name, t: t.new_empty(call.tokens, *t.shape[own:]) if argument(name).role == TOKEN else t)
    ops = _Writer(call.flat(), plan, device_type=device_type)
    with torch.no_grad():
        results = engine.forward(ops)
        forward = ops.take()
        if plan.finishes_in_forward and not plan.saves_unit_gradients(call):
            ops.scale(sorted(name for name in results if name[0] == "d"))
        elif plan.strategy != LOSS_ONLY:
            _run_backward(ops, results)
        backward = ops.take()
    return Program(_formatted(forward), _formatted(backward), tuple(ops.primitives))


def _run_backward(ops: "_Writer", results: dict[str, Tensor]) -> None:
    call, loss = ops.call, ops.call.loss
    # As if all ranks' tokens were here.
    shape = (call.tokens,) if loss.reduction == "none" else ()
    upstream = UpstreamGradients(
        ops.empty(shape, call.row_dtype),
        *(ops.empty((call.tokens,), call.row_dtype) if name in loss.differentiable_outputs else None
          for name in DIFFERENTIABLE_OUTPUTS),
    )  # fmt: skip
    names = ("valid_count", "row_max", "row_log_sum", "computed_rows", "logits")
    saved = Saved(**{name: results[name] for name in names if name in results})
    if "entropy" in loss.differentiable_outputs:
        saved = saved._replace(entropy=results["entropy"])
    engine.backward(ops, saved._replace(unit_gradient=results.get("dX")), upstream)


def scaling_lines(names: Sequence[str], spec: Spec, *, has_expected: bool) -> tuple[str, ...]:
    """What multiplies finished gradients, of the names and dtype of `spec`, by the upstream gradient."""
    return _formatted([_scaling(name, spec.dtype, spec.device, has_expected=has_expected) for name in names])


def _scaling(name: str, dtype: torch.dtype, device: torch.device, *, has_expected: bool) -> Line:
    library = scaling.library(dtype, device)
    where = "on the device " if library == "Triton" else ""
    factor = "grad / expected_gradient" if has_expected else "grad"
    return Line("scale", f"{name} *= {factor}    skipped {where}where that is 1", library)


class _Loop(NamedTuple):
    title: str
    lines: tuple[Line, ...]


class _Writer(Primitives):
    """Primitives that return empty tensors, and write down what they would launch."""

    def __init__(self, call: Call, plan: Plan, *, device_type: str):
        super().__init__(call, plan, region=Region(call.specs(), plan, device_type=device_type))
        self.device_type = device_type
        self.primitives: list[str] = []
        self._found: list[Line | _Loop] = []
        self._lines: list[Line] = []
        self._logits = "z" if call.loss.maps_logits else "logits"

    def take(self) -> list[Line | _Loop]:
        """What was written since the last time."""
        found, self._found, self._lines = [*self._found, *self._lines], [], []
        return found

    def _write(self, primitive: str, text: str, library: str = "") -> None:
        self.primitives.append(primitive)
        self._lines.append(Line(primitive, text, library))

    def _add(self, text: str, library: str = "") -> None:
        """Writes a further line of the same primitive."""
        self._lines.append(Line("", text, library))

    @property
    def _vector_library(self) -> str:
        return "Triton" if self.region.has_vector_kernels else "PyTorch"

    @property
    def _network(self) -> str:
        return "NCCL" if self.device_type == "cuda" else "gloo"

    # Rows.

    def prepare(self, upstream: Tensor | None, *, meanwhile: Callable[[Tensor], None] | None = None) -> Rows:
        return self._prepare(upstream, "prepare")

    def prepare_again(self, upstream: Tensor | None, count: int) -> Rows:
        return self._prepare(upstream, "prepare_again")

    def count_of(self, computed_rows: Tensor) -> int:
        return self.call.tokens

    def _prepare(self, upstream: Tensor | None, primitive: str) -> Rows:
        call, loss, is_again = self.call, self.call.loss, primitive == "prepare_again"
        conditions = [f"y != {loss.ignore_index}"] if loss.ignores_rows else []
        conditions += ["w_t != 0"] if "token_weights" in call.tensors else []
        valid = " & ".join(conditions)
        if call.shard is not None and call.shard.sequence_parallel:
            target = call.tensors["target"]
            self._add(f"y {_type(target.shape, target.dtype)} = all_gather(y)", self._network)
        count, note = f"sum({valid})" if valid else "T", "" if is_again else "    targets are checked"
        self._write(primitive, f"valid_count {_type((), torch.int64)} = {count}{note}", self._vector_library)
        if self.region.may_skip:
            names = ", ".join([*(letter(linear.x) for linear in call.linears), "y"])
            does_wait = self.device_type == "cuda" and not is_again
            ahead = " while the first logits run" if self.region.starts_early else ""
            note = f"    the host waits for their number{ahead}" if does_wait else ""
            self._add(f"{names} = rows of {names} that are valid{note}")
        found = rows.prepare(call, upstream=upstream, ordered=False)
        return rows.with_target_weights(call, rows.selected(found, call.tokens))

    def chunks(self, selected: Rows, first: int = 0) -> Iterator[slice]:
        self._found += self._lines
        parts: list[tuple[slice, tuple[Line, ...]]] = []
        for chunk in super().chunks(selected, first):
            self._lines = []
            yield chunk
            parts.append((chunk, tuple(self._lines)))
        self._lines = []
        self._found += _grouped(parts)

    def gather(self, selected: Rows, tensor: Tensor, chunk: slice, out: Tensor | None = None) -> Tensor:
        count = chunk.stop - chunk.start
        shard = self.call.shard
        if shard is not None and shard.sequence_parallel:
            self._write("gather", f"x {_type((count, tensor.shape[1]), tensor.dtype)} = all_gather(x)", self._network)
            return tensor.new_empty(count, tensor.shape[1])
        return tensor[chunk]

    # Memory.

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    # Matmuls.

    def logits_(self, out: Tensor, xs: list[Tensor]) -> None:
        call, bias = self.call, " + b" if self.call.get("linear_bias") is not None else ""
        linears = sorted(zip(call.linears, xs, strict=True), key=lambda each: each[1].shape[1])
        for number, (linear, _) in enumerate(linears):
            of, sign = f"{letter(linear.x)} @ {letter(linear.weight)}.t()", "+=" if number else "="
            self._write(
                "logits_", f"{self._named(self._logits, out)} {sign} {of}{'' if number else bias}{self._tail()}",
                matmul.library(self.device_type),
            )  # fmt: skip

    def _tail(self) -> str:
        tail = self.call.vocab % 8 if self.device_type == "cuda" and self.call.dtype.itemsize == 2 else 0
        notes = [f"the last {tail} columns apart"] if tail and self.call.vocab > 8 else []
        notes += ["in an order that no number of rows changes"] if self.plan.batch_invariant else []
        return f"    {', '.join(notes)}" if notes else ""

    def start_input_gradient(self, dlogits: Tensor, linear: Linear) -> Callable[[Tensor], None]:
        call, shard, number = self.call, self.call.shard, linear.number
        is_summed = shard is not None and shard.reduces_input_grad
        shape = (dlogits.shape[0], call.tensors[linear.weight].shape[1])

        def finish(out: Tensor) -> None:
            dtype = out.dtype
            if is_summed and shard is not None:
                dtype = call.row_dtype if shard.float32_input_grad else call.dtype
            words = f"dX{number} {_type(shape, dtype)} = dlogits @ {letter(linear.weight)}"
            self._write("start_input_gradient", words, matmul.library(self.device_type))
            if is_summed:
                self._add(f"dX{number} {_type(shape, out.dtype)} = summed over the ranks", self._network)

        return finish

    def weight_gradient_(
        self, out: Tensor, dlogits: Tensor, x: Tensor, *, linear: Linear, accumulate: bool, name: str = "dW"
    ) -> None:
        sign, of = "+=" if accumulate else "=", "dlogits" if name == "dW" else "dlogits[:, frequent]"
        name = name.replace("dW", f"dW{linear.number}")
        words = f"{self._named(name, out)} {sign} {of}.t() @ {letter(linear.x)}"
        self._write("weight_gradient_", words, matmul.library(self.device_type))

    def rounded(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        if tensor.dtype != dtype:
            self._write("rounded", f"dW {_type(tensor.shape, dtype)} = rounded once")
        return tensor.to(dtype)

    # The row work.

    def both_(self, z: Tensor, target: Tensor, coefficients: RowCoefficients) -> RowResults:
        library = self.region.row_library
        found = self._results_of(z, target)
        self._statistics("both_", z, target, library)
        note = "in place, same kernel" if library == "Triton" else "in place"
        self._add(f"{self._named('dlogits', z)} = s (softmax({self._u()}) - one_hot(y))    {note}", library)
        return found

    def _statistics(self, primitive: str, z: Tensor, target: Tensor, library: str) -> None:
        u, rows_type = self._u(), _type(z.shape[:1], self.call.row_dtype)
        self._write_map()
        words = f"row_max, row_log_sum {rows_type} = max_v({u}), log(sum_v(exp({u} - row_max)))"
        self._write(primitive, f"{words}; {self._logits}[y]", library)

    def _u(self) -> str:
        """What the lines call the mapped logits; `_write_map` says what u is."""
        return "logits" if self._logits == "logits" else "u"

    def _write_map(self) -> None:
        loss = self.call.loss
        if loss.softcap is not None:
            self._add(f"u = {loss.softcap:g} tanh(z {loss.logit_scale / loss.softcap:g})    wherever z is read")
        elif loss.logit_scale != 1:
            self._add(f"u = {loss.logit_scale:g} z    wherever z is read")

    def _results_of(self, z: Tensor, target: Tensor) -> RowResults:
        vector = self.empty(z.shape[:1], self.call.row_dtype)
        return RowResults(RowStatistics(vector, vector), self.empty(target.shape, z.dtype))

    def results(self, z: Tensor, target: Tensor) -> RowResults:
        loss, library = self.call.loss, self.region.row_library
        found = self._results_of(z, target)
        self._statistics("results", z, target, library)
        if self.call.shard is not None:
            self._add("row_max, row_log_sum = combined over the ranks", self._network)
        if loss.moments:
            names = ", ".join(loss.moments)
            self._add(f"{names} {_type(z.shape[:1], self.call.row_dtype)} = sums over {self._u()}", library)
        argmax = self.empty(z.shape[:1], torch.int64) if loss.needs_argmax else None
        if argmax is not None:
            self._add(f"argmax {_type(z.shape[:1], torch.int64)} = argmax_v({self._logits})", "PyTorch")
        return found._replace(moments=dict.fromkeys(loss.moments, found.statistics.row_max), argmax=argmax)

    def gradient_(
        self, z: Tensor, found: RowResults, coefficients: RowCoefficients, target: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        call = self.call
        out = self.dlogits_buffer(z)
        terms = [f"A softmax({self._u()})", "B one_hot(y)"]
        if coefficients.uniform is not None:
            terms.append("C w" if call.loss.label_smoothing and call.get("weight") is not None else "C")
        words = " - ".join(terms) + (" - entropy's" if coefficients.entropy is not None else "")
        note = "in place" if out is z else "in new memory"
        note += ", with its sums over the rows" if call.bias_grad else ""
        self._write("gradient_", f"{self._named('dlogits', out)} = {words}    {note}", self.region.row_library)
        return out, self.empty((call.vocab,), call.row_dtype) if call.bias_grad else None

    def token_loss(
        self, found: RowResults, inputs: Sequence[Tensor], s: Tensor | None
    ) -> tuple[Tensor, RowCoefficients | None]:
        return row_loss.token_loss(self, found, inputs, s)

    def teacher_logits_(self, out: Tensor, x: Tensor) -> None:
        self._write("teacher_logits_", f"{self._named('teacher', out)} = x' @ W'.t()", matmul.library(self.device_type))

    def divergence_(self, z: Tensor, teacher: Tensor, factors: Tensor | None) -> tuple[Tensor, Tensor]:
        assert self.call.divergence is not None
        kind, library = self.call.divergence.kind, "Triton" if self.region.row_library == "Triton" else "PyTorch"
        gradient = "" if factors is None else ", dlogits in place"
        of_rows = _type(z.shape[:1], self.call.row_dtype)
        words = f"divergence {of_rows}{gradient} = {kind} divergence of logits from teacher"
        self._write("divergence_", words, library)
        return self.empty(z.shape[:1], self.call.row_dtype), z

    # Results.

    def loss(self, selected: Rows, found: RowResults) -> tuple[Tensor, dict[str, Tensor]]:
        loss, call = self.call.loss, self.call
        kind = "token_loss" if loss.token_loss else "row_log_sum - (logits[y] - row_max)"
        terms = [kind if not loss.label_smoothing else f"{1 - loss.label_smoothing:g} ({kind}) + smoothing"]
        terms += [f"{loss.z_loss:g} lse²"] if loss.z_loss else []
        words = " + ".join(terms)
        words = f"w_t ({words})" if "token_weights" in call.tensors else words
        if loss.reduction != "none":
            words = f"sum({words})"
        if loss.reduction == "mean":
            by_weights = "sum(w_t)" if "token_weights" in call.tensors else "valid_count"
            by_weights = "sum of weights" if "weight" in call.tensors else by_weights
            words += f" / {'num_items' if 'num_items' in call.tensors else by_weights}"
        shape = (call.own_tokens,) if loss.reduction == "none" else ()
        self._write("loss", f"loss {_type(shape, call.row_dtype)} = {words}", self._vector_library)
        return self.empty((selected.count,) if loss.reduction == "none" else (), call.row_dtype), {}

    def scaled_rows(self, gradient: Tensor, factors: Tensor) -> Tensor:
        self._write("scaled_rows", f"dX {_type(gradient.shape, self.call.dtype)} = dX * grad    each row", "PyTorch")
        return self.empty(tuple(gradient.shape), self.call.dtype)

    def scale(self, names: Iterable[str]) -> None:
        """Writes down how finished gradients are multiplied by the upstream gradient."""
        for name in names:
            has_expected = "expected_gradient" in self.call.tensors
            line = _scaling(name, self.call.dtype, torch.device(self.device_type), has_expected=has_expected)
            self._write(*line)

    def _named(self, name: str, tensor: Tensor) -> str:
        return f"{name} {_type(tensor.shape, tensor.dtype)}"


def _type(shape: Iterable[int], dtype: torch.dtype) -> str:
    return f"{_DTYPES.get(dtype, str(dtype).removeprefix('torch.'))}[{', '.join(map(str, shape))}]"


def _grouped(parts: list[tuple[slice, tuple[Line, ...]]]) -> Iterator[_Loop]:
    """One loop for each run of chunks that do the same; the first may add nothing to what the others add to."""
    start = 0
    sizes = [chunk.stop - chunk.start for chunk, _ in parts]
    for stop in range(1, len(parts) + 1):
        is_like = stop < len(parts) and (sizes[stop] == sizes[start] or stop == len(parts) - 1)
        if is_like and _same(parts[stop][1], sizes[stop]) == _same(parts[start][1], sizes[start]):
            continue
        count = stop - start
        if len(parts) == 1:
            title = ""
        elif count == 1:
            title = f"for {'the first' if start == 0 else 'the last'} chunk of {sizes[start]} tokens:"
        else:
            last = "" if sizes[stop - 1] == sizes[start] else f", the last of {sizes[stop - 1]}"
            title = f"for each chunk of {sizes[start]} tokens, {count} in all{last}:"
        # Of two or more, the second adds to what the first has written.
        second = min(start + 1, stop - 1)
        size, other = f"[{sizes[start]}", f"[{sizes[second]}"
        yield _Loop(title, tuple(line._replace(text=line.text.replace(other, size)) for line in parts[second][1]))
        start = stop


def _same(lines: tuple[Line, ...], size: int) -> list[tuple[str, str]]:
    return [(line.text.replace(f"[{size}", "[C").replace("+=", "="), line.library) for line in lines]


def _formatted(found: Sequence[Line | _Loop]) -> tuple[str, ...]:
    """Lines with the library in a column of its own, where that leaves them short enough; long notes stand below."""
    texts: list[tuple[str, str]] = []
    for each in found:
        if isinstance(each, Line):
            texts.append((each.text, each.library))
            continue
        indent = "  " if each.title else ""
        texts += [(each.title, "")] if each.title else []
        texts += [(indent + line.text, line.library) for line in each.lines]
    longest = max((len(library) for _, library in texts), default=0)
    texts = [line for text, library in texts for line in _folded(text, library, WIDTH - longest - 2)]
    width = min(max((len(text) for text, library in texts if library), default=0), WIDTH - longest - 2)
    return tuple(f"{text:{width}}  {library}".rstrip() for text, library in texts)


def _folded(text: str, library: str, width: int) -> list[tuple[str, str]]:
    """A line, or two where it is too wide with its note, which stands behind four spaces."""
    words, separator, note = text.rpartition("    ")
    if not library or len(text) <= width or not words.strip():
        return [(text, library)]
    indent = " " * (len(words) - len(words.lstrip()))
    return [(words, library), (f"{indent}{separator}{note}", "")]
