"""Writing a run of the engine down instead of running it.

The engine is ordinary code on tensors. Here are stand-ins for the tensors, as thunder's proxies are: a `Value` has a
shape, a dtype and, in place of numbers, the words for what it is. Arithmetic on values gives values; the functions of
`steps`, which launch everything that counts, write a `Step` on the values' `Tape` instead. So whatever prints, counts
or predicts what a region runs reads it off a run of the engine itself.

    row_max, row_log_sum f32[2048] = max_v(logits), log(sum_v(exp(logits - row_max)))        Triton

In a step's words, v goes over the columns of the vocabulary, in a loop over blocks over those of the block, and t over
the rows; `max_v`, `sum_v` and `sum_t` are over these. A matrix indexed with targets, such as logits[y], is its entry in
each row; k goes over a row's targets where it has several. Of several results, each may use those before it. `+=` to
what is not there yet starts from 0. A name that each chunk of tokens gives its rows stands, after the loop, for all of
them, with the rows that came before the loop if it starts later.
"""

# mypy: disable-error-code="override,assignment,misc"

import math
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

SHORT_NAMES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.int64: "i64",
    torch.bool: "b8",
}


@dataclass(frozen=True, kw_only=True)
class Step:
    """One call of the engine that launches something, or a few operations of PyTorch that belong together."""

    result: str
    """The name of what it makes; of several, separated by commas."""

    expression: str
    """How, in words that can be evaluated."""

    runs_in: str
    """The library: "cuBLAS", "nvFuser", "Triton" or "PyTorch"."""

    dtype: torch.dtype | None = None
    shape: tuple[int | str, ...] = ()
    """Of the result; None and () where that says nothing. A size that differs from part to part is a letter."""

    adds: bool = False
    """Whether it is added to what the result holds."""

    note: str = ""
    """What else there is to say, such as "in place"."""

    fusions: tuple[Any, ...] = ()
    """The row work that nvFuser runs in it, as `row_kernels.dispatch.definitions` takes it."""

    operations: int = 0
    """Floating-point operations of a matmul."""

    bytes: int = 0
    """Bytes that it moves to and from memory, beside what a matmul of the whole region has to."""

    is_row_work: bool = False
    """Whether the row kernels run it."""

    @property
    def type(self) -> str:
        """Dtype and shape, such as "bf16[2048, 128256]"."""
        return type_name(self.dtype, self.shape) if self.dtype is not None else ""

    def __str__(self) -> str:
        named = f"{self.result} {self.type}" if self.type else self.result
        words = f"{named} {'+=' if self.adds else '='} {self.expression}"
        return f"{words}  ({self.note})" if self.note else words


def type_name(dtype: torch.dtype, shape: Iterable[Any]) -> str:
    """Such as "bf16[2048, 128256]"."""
    return f"{SHORT_NAMES[dtype]}[{', '.join(map(str, shape))}]"


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Steps that follow each other, once or for each part of a loop."""

    steps: tuple[Step, ...]

    over: str = ""
    """What the loop goes over: "chunk" (of tokens) or "block" (of columns of the vocabulary); "" for what runs once."""

    sizes: tuple[int, ...] = ()
    """Tokens or columns of each part, in order."""

    start: int = 0
    """The first token or column."""

    is_whole_loop: bool = True
    """Whether the loop has no other parts, which do something else."""

    part_steps: tuple[tuple[Step, ...], ...] = ()
    """The steps of each part, whose shapes and `adds` may differ from each other's."""

    @property
    def repeats(self) -> int:
        """How often the steps run."""
        return len(self.sizes) or 1

    @property
    def title(self) -> str:
        """Such as "for each chunk of 2048 tokens, 4 in all"; "" for what runs once."""
        if not self.over:
            return ""
        thing, things = ("token", "tokens") if self.over == "chunk" else ("column", "columns of the vocabulary")
        begins = f", from {thing} {self.start} on" if self.start else ""
        if len(self.sizes) == 1:
            if begins:
                return f"for a {self.over} of {self.sizes[0]} {things}{begins}"
            return f"for the {'only' if self.is_whole_loop else 'first'} {self.over}, of {self.sizes[0]} {things}"
        if len(set(self.sizes)) == 1:
            return f"for each {self.over} of {self.sizes[0]} {things}, {len(self.sizes)} in all{begins}"
        runs: list[list[int]] = []
        for size in self.sizes:
            if runs and runs[-1][0] == size:
                runs[-1][1] += 1
            else:
                runs.append([size, 1])
        words = [f"{size} ({count} times)" if count > 1 else str(size) for size, count in runs]
        return f"for each {self.over} of {', '.join(words[:-1])} and {words[-1]} {things}{begins}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for `json.dump`."""
        steps = [
            {
                "result": step.result,
                "type": step.type,
                "expression": step.expression,
                "adds": step.adds,
                "note": step.note,
                "runs_in": step.runs_in,
                "fusions": list(dict.fromkeys(work.method for work in step.fusions)),
            }
            for step in self.steps
        ]
        return {"title": self.title, "repeats": self.repeats, "sizes": list(self.sizes), "steps": steps}

    def every_step(self) -> Iterator[Step]:
        """All steps in the order in which they run."""
        for steps in self.part_steps or (self.steps,):
            yield from steps


@contextmanager
def on_values() -> Iterator[None]:
    """Has PyTorch's functions ask a `Value` what they do, also where Dynamo has that switched off.

    As torch 2.15 does while a graph runs that was traced through the stand-ins for the arguments of a token loss.
    """
    with torch._C._EnableTorchFunction():
        yield


class Tape:
    """What a run of the engine writes down: its stages, and the memory it takes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stages: list[Stage] = []
        self._steps: list[Step] = []
        self._slices: dict[str, slice] = {}
        self._allocated = 0
        self.peak_bytes = 0
        """The largest sum of what was allocated at a time, scratch memory included."""

    def take_stages(self) -> tuple[Stage, ...]:
        """What was written since this was last asked."""
        self._end_stage()
        stages, self._stages = tuple(self._stages), []
        return stages

    def write(
        self, result: Tensor | str, words: object, *, runs_in: str = "PyTorch", scratch: int = 0, **more: Any
    ) -> None:
        """Writes a `Step` down: what it makes, a name alone where dtype and shape say nothing, and how in words.

        `scratch` are bytes that are allocated while it runs, `more` further fields of the step.
        """
        if isinstance(result, Value):
            more = {"dtype": result.dtype, "shape": result.shape, **more}
        self._steps.append(Step(result=str(result), expression=str(words), runs_in=runs_in, **more))
        self.peak_bytes = max(self.peak_bytes, self._allocated + scratch)

    def loop(self, slices: Iterable[slice], over: str) -> Iterator[slice]:
        """The slices of a "chunk" or "block" loop, one after another; what is written during each makes one stage."""
        self._end_stage()
        parts, found = [], []
        for part in slices:
            self._slices[over] = part
            self._steps = []
            yield part
            parts.append(tuple(self._steps))
            found.append(part)
        self._slices.pop(over, None)
        self._steps = []
        self._stages.extend(_grouped(parts, found, over))

    def label(self, part: slice, extent: int) -> str:
        """How an index is written: "chunk" or "block" in their loops, "" where it takes everything."""
        start, stop, _ = part.indices(extent)
        if (start, stop) == (0, extent):
            return ""
        for over, current in self._slices.items():
            # The very slice: another one may only happen to have the same numbers, in another dimension.
            if part is current:
                return over
        return f"{start or ''}:{stop if stop < extent else ''}"

    def allocate(self, nbytes: int) -> "Storage":
        """Memory that counts until nobody holds it any more."""
        self._allocated += nbytes
        self.peak_bytes = max(self.peak_bytes, self._allocated)
        storage = Storage()
        weakref.finalize(storage, self._free, nbytes)
        return storage

    def _free(self, nbytes: int) -> None:
        self._allocated -= nbytes

    def _end_stage(self) -> None:
        if self._steps:
            self._stages.append(Stage(steps=tuple(self._steps)))
            self._steps = []


class Storage:
    """Memory of a `Value`, shared by its views."""


def _grouped(parts: list[tuple[Step, ...]], slices: list[slice], over: str) -> Iterator[Stage]:
    """One stage for each run of parts that do the same but for their sizes."""

    def what(steps: tuple[Step, ...]) -> list[Step]:
        return [replace(s, shape=(), adds=False, operations=0, bytes=0) for s in steps]

    start = 0
    for stop in range(1, len(parts) + 1):
        if stop < len(parts) and what(parts[stop]) == what(parts[start]):
            continue
        group = parts[start:stop]
        yield Stage(
            steps=tuple(_common(steps, over) for steps in zip(*group, strict=True)),
            over=over,
            sizes=tuple(part.stop - part.start for part in slices[start:stop]),
            start=slices[start].start,
            is_whole_loop=group == parts,
            part_steps=tuple(group),
        )
        start = stop


def _common(steps: tuple[Step, ...], over: str) -> Step:
    """One step for those of all parts: a size that differs is written as a letter."""
    letter = "C" if over == "chunk" else "K"
    shape = tuple(sizes[0] if len(set(sizes)) == 1 else letter for sizes in zip(*(s.shape for s in steps), strict=True))
    return replace(steps[0], shape=shape, adds=any(s.adds for s in steps))


_COMPARISONS = ("==", "!=", "<", "<=", ">", ">=")
_OPERATOR_RANKS = {**dict.fromkeys(_COMPARISONS, 1), "+": 2, "-": 2, "*": 3, "/": 3, "@": 3, "**": 4}
_ATOM = 5


# For a type checker, a value is what the engine takes it for.
if TYPE_CHECKING:
    from torch import Tensor as _Base
else:
    _Base = object


@dataclass(eq=False, repr=False)
class Value(_Base):
    """Stands for a tensor while a run is written down. Methods that have no docstring are a tensor's own."""

    tape: Tape
    text: str
    """A name, or the words of an expression"""
    _: KW_ONLY
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    rank: int = _ATOM
    """How tightly the outermost operator of the text binds; names and calls bind the most."""
    storage: Storage | None = None
    """Its memory, where that counts"""

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__

    @property
    def device(self) -> torch.device:
        return self.tape.device

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        return self.numel() * self.dtype.itemsize

    def named(self, text: str) -> "Value":
        """The same under another name."""
        return Value(self.tape, text, shape=self.shape, dtype=self.dtype, storage=self.storage)

    def entry(self, column: "Value") -> "Value":
        """Of a matrix of logits, its entry in each row."""
        return Value(self.tape, f"{self._atom}[{column}]", shape=column.shape, dtype=self.dtype)

    def view(self, *shape: Any) -> "Value":
        if isinstance(shape[0], torch.dtype):
            sizes, dtype = (*self.shape[:-1], self.shape[-1] * self.dtype.itemsize // shape[0].itemsize), shape[0]
        else:
            sizes, dtype = shape if isinstance(shape[0], int) else shape[0], self.dtype
            sizes = (self.numel(),) if sizes == (-1,) else sizes
        return Value(self.tape, self.text, shape=sizes, dtype=dtype, rank=self.rank, storage=self.storage)

    # What keeps a tensor's numbers keeps a value's words.

    def to(self, dtype: torch.dtype) -> "Value":
        """Another dtype. Words do not mention it, as they do not mention rounding."""
        return Value(self.tape, self.text, shape=self.shape, dtype=dtype, rank=self.rank)

    def detach(self) -> "Value":
        return self

    contiguous = detach

    def expand(self, *shape: int) -> "Value":
        return Value(self.tape, self.text, shape=shape, dtype=self.dtype, rank=self.rank)

    def reshape(self, *shape: int) -> "Value":
        """In one dimension: rows are tokens in their order."""
        return Value(self.tape, self.text, shape=(self.numel(),), dtype=self.dtype, rank=self.rank)

    def unsqueeze(self, dim: int) -> "Value":
        """Words do not mention it, as they do not mention how sizes broadcast."""
        return Value(self.tape, self.text, shape=(*self.shape, 1), dtype=self.dtype, rank=self.rank)

    def sum(self, dim: int | None = None) -> "Value":
        """Of all, or over the last dimension, that of the targets of a row."""
        function, shape = ("sum", ()) if dim is None else ("sum_k", self.shape[:-1])
        return Value(self.tape, f"{function}({self.text})", shape=shape, dtype=self.dtype)

    def __neg__(self) -> "Value":
        text = f"-{self.text}" if self.rank >= _OPERATOR_RANKS["*"] else f"-({self.text})"
        return Value(self.tape, text, shape=self.shape, dtype=self.dtype, rank=_OPERATOR_RANKS["*"])

    def square(self) -> "Value":
        return self._combined("**", self, 2)

    def clamp(self, *, max: float) -> "Value":
        return self._called("minimum", self, max)

    def __getitem__(self, index: Any) -> "Value":
        if isinstance(index, Value):
            return Value(self.tape, f"{self._atom}[{index}]", shape=(*index.shape, *self.shape[1:]), dtype=self.dtype)
        parts = index if isinstance(index, tuple) else (index,)
        labels, shape = [], list(self.shape)
        for dimension, part in enumerate(parts):
            extent = self.shape[dimension]
            labels.append(self.tape.label(part, extent) or ":")
            shape[dimension] = len(range(*part.indices(extent)))
        while labels and labels[-1] == ":":
            labels.pop()
        text = f"{self._atom}[{', '.join(labels)}]" if labels else self.text
        rank = _ATOM if labels else self.rank
        return Value(self.tape, text, shape=tuple(shape), dtype=self.dtype, rank=rank, storage=self.storage)

    def __setitem__(self, index: Any, value: Any) -> None:
        self.tape.write(self[index], value)

    @property
    def _atom(self) -> str:
        return self.text if self.rank == _ATOM else f"({self.text})"

    def _called(self, function: str, *arguments: Any) -> "Value":
        values = [argument for argument in arguments if isinstance(argument, Value)]
        text = f"{function}({', '.join(_words(argument) for argument in arguments)})"
        return Value(self.tape, text, shape=_broadcast(values), dtype=_promoted(values))

    def _combined(self, operator: str, left: Any, right: Any) -> "Value":
        rank = _OPERATOR_RANKS[operator]
        if operator == "*" and 1 in [side for side in (left, right) if not isinstance(side, Value)]:
            return self
        values = [side for side in (left, right) if isinstance(side, Value)]
        words = []
        for side, needed in ((left, rank), (right, rank + (operator in ("-", "/")))):
            text = _words(side)
            words.append(f"({text})" if isinstance(side, Value) and side.rank < needed else text)
        dtype = torch.bool if operator in _COMPARISONS else _promoted(values)
        return Value(self.tape, f" {operator} ".join(words), shape=_broadcast(values), dtype=dtype, rank=rank)

    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: tuple = (), keywords: dict | None = None) -> Any:
        """What PyTorch's functions make of values."""
        if function is torch.cat:
            parts = arguments[0]
            rows = sum(part.shape[0] for part in parts)
            return Value(parts[0].tape, parts[0].text, shape=(rows,), dtype=parts[0].dtype)
        if function not in _FUNCTIONS:
            return NotImplemented
        first = next(argument for argument in arguments if isinstance(argument, Value))
        return first._called(function.__name__, *arguments)


def _define_operators() -> None:
    for name, symbol in _OPERATORS.items():

        def combined(self: Value, other: Any, symbol: str = symbol) -> Value:
            return self._combined(symbol, self, other)

        def reflected(self: Value, other: Any, symbol: str = symbol) -> Value:
            return self._combined(symbol, other, self)

        setattr(Value, f"__{name}__", combined)
        setattr(Value, f"__r{name}__", reflected)


_OPERATORS = {"add": "+", "sub": "-", "mul": "*", "truediv": "/", "pow": "**", "matmul": "@"}
_OPERATORS |= zip(("eq", "ne", "lt", "le", "gt", "ge"), _COMPARISONS, strict=True)
_define_operators()
_FUNCTIONS = {
    *(torch.exp, torch.expm1, torch.log, torch.log1p, torch.sqrt, torch.tanh, torch.sigmoid, torch.abs, torch.sign),
    *(torch.where, torch.clamp, torch.minimum, torch.maximum),
    *(torch.logical_and, torch.logical_or, torch.logical_not),
}


def as_value(tensor: Tensor) -> Value:
    """What stands for a tensor where a run is written down."""
    assert isinstance(tensor, Value)
    return tensor


def _words(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    short = f"{value:g}"
    return short if float(short) == value else repr(value)


def _broadcast(values: list[Value]) -> tuple[int, ...]:
    """The largest of the shapes: a number a row, or a column, goes with each element of a matrix."""
    return max((value.shape for value in values), key=lambda shape: (len(shape), math.prod(shape)))


def _promoted(values: list[Value]) -> torch.dtype:
    dtype = values[0].dtype
    for value in values[1:]:
        dtype = torch.promote_types(dtype, value.dtype)
    return dtype
