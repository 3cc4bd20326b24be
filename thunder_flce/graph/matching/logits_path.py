"""How logits derive from a linear: one rule for each operation that is allowed between the two.

A rule takes the description of its operand, a `LogitsPath`, and returns that of its result, or raises `NotFused`. To
recognise another way to write a loss, add a rule to `RULES`.

Operations on rows (slices, permutations) are collected, because the same operations on the rows of the (..., H) input
have the same effect as on the rows of the (..., V) logits.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from sys import float_info
from typing import Any

import thunder.torch as ltorch
from thunder.core import dtypes
from thunder.core.prims import PrimIDs
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol
from torch.distributed import ProcessGroup

from thunder_flce.graph.matching.reasons import NotFused, Reason
from thunder_flce.graph.matching.trace_index import TraceIndex, argument, carries_grad, is_static, tensors_written
from thunder_flce.graph.thunder_private import DistributedPrimIDs, TensorParallelLayerType


@dataclass(frozen=True)
class RowStep:
    """One operation on the rows of logits, given by what it does to the shape without the vocabulary."""

    kind: str
    """"reshape", "permute", "index" or "part"."""
    argument: tuple[Any, ...]
    """The new shape, the order of the dimensions, or an index (an int or a slice) for each of them. Of a part: its
    number, how many there are, and along which dimension; a region takes it only together with the others."""

    def __call__(self, hidden: TensorProxy) -> TensorProxy:
        """Applies the operation to the rows of an (..., H) tensor; adds operations to the trace."""
        if self.kind == "reshape":
            return ltorch.reshape(hidden, (*self.argument, hidden.shape[-1]))
        if self.kind == "permute":
            return ltorch.permute(hidden, (*self.argument, len(self.argument)))
        return ltorch.getitem(hidden, self.argument)


@dataclass(frozen=True, eq=False)
class Term:
    """A linear without its bias, times a factor: factor * input @ weight.T."""

    input: TensorProxy
    """(..., H)"""
    weight: TensorProxy
    """(V, H), or (H, V) where `transposed`."""
    transposed: bool = False
    factor: Fraction = Fraction(1)
    carries_grad: bool = True
    """Whether gradients flow to the operands: not where the linear was detached, or computed under `torch.no_grad`."""


@dataclass(frozen=True, eq=False)
class LogitsPath:
    """A tensor of the program as logits: softcap * tanh(scale * z), or scale * z without a softcap; some rows of it.

    z is the sum of the terms and the bias. Factors are fractions, so that z / 49 * 49 is z.
    """

    tensor: TensorProxy
    terms: tuple[Term, ...]
    """More than one where linears are added, as a low-rank adapter does it; the one with the largest H is the first."""
    class_dimension: int
    """Where the vocabulary is in the tensor's shape."""
    bsyms: tuple[BoundSymbol, ...]
    """All operations from the linear to the tensor, the transposition of a weight included."""
    bias: TensorProxy | None = None
    scale: Fraction = Fraction(1)
    softcap: Fraction | None = None
    vocab_size: int | None = None
    """The number of columns, where only the first columns of the vocabulary are kept."""
    normalised: str = ""
    """"log_softmax" or "softmax" where the tensor is this function of the logits; "exp" on the way to the latter."""
    rows: tuple[RowStep, ...] = ()
    bias_carries_grad: bool = True
    """Whether gradients flow to the bias, which may be added after the terms were detached."""
    shift: str = ""
    """The name of the rows' maximum, where that was subtracted: what is then asked for must not depend on it."""
    inner: tuple[BoundSymbol, ...] = ()
    """Of `bsyms`, what computes that maximum, and the sum in a log_softmax or softmax that is spelled out."""
    group: ProcessGroup | None = None
    """The ranks among which the rows of the weights and of the bias are divided; the tensor has the columns of all."""

    @property
    def operands(self) -> list[TensorProxy]:
        """The inputs, weights and bias of the linears."""
        tensors = [tensor for term in self.terms for tensor in (term.input, term.weight)]
        return tensors if self.bias is None else [*tensors, self.bias]

    @property
    def vocab(self) -> int:
        """Length of the vocabulary's dimension."""
        return self.tensor.shape[self.class_dimension]

    @property
    def kept_shape(self) -> tuple[int, ...]:
        """The shape of what is one number for each row, with the dimension of the classes."""
        return (*self.tensor.shape[: self.class_dimension], 1, *self.tensor.shape[self.class_dimension + 1 :])

    @property
    def selection(self) -> tuple[RowStep, ...]:
        """The row operations up to the last that is not a reshape: after it, rows keep their number and their order."""
        last = max((i for i, step in enumerate(self.rows, start=1) if step.kind != "reshape"), default=0)
        return self.rows[:last]

    @property
    def is_linear(self) -> bool:
        """Whether the tensor is all of the linears' columns, times a factor at most."""
        return self.softcap is None and self.vocab_size is None and not self.normalised

    @property
    def has_float_factors(self) -> bool:
        """Whether scale, softcap and the factors of the terms, which may be products, are in the range of floats."""
        softcap = Fraction(1) if self.softcap is None else self.softcap
        factors = (softcap, self.scale * softcap, *(term.factor for term in self.terms))
        return all(float_info.min <= abs(factor) <= float_info.max for factor in factors)

    @property
    def logit_map(self) -> dict[str, Any]:
        """The map from z to the logits, as fields of a `Loss`."""
        if self.softcap is None:
            return {"logit_scale": float(self.scale), "softcap": None, "vocab_size": self.vocab_size}
        scale = float(self.scale * self.softcap)
        return {"logit_scale": scale, "softcap": float(self.softcap), "vocab_size": self.vocab_size}

    @property
    def carries_grad(self) -> bool:
        """Whether gradients flow to any operand."""
        return any(term.carries_grad for term in self.terms) or (self.bias is not None and self.bias_carries_grad)

    def detached(self) -> "LogitsPath":
        """The same without gradients."""
        terms = tuple(replace(term, carries_grad=False) for term in self.terms)
        return replace(self, terms=terms, bias_carries_grad=False)

    def then(self, bsym: BoundSymbol, *rows: RowStep, **changes: Any) -> "LogitsPath":
        """The description of the result of `bsym`, applied to the tensor; `rows` is what it does to these."""
        changes["bsyms"] = (*self.bsyms, *changes.get("bsyms", ()), bsym)
        path = replace(self, **{"tensor": bsym.output, "rows": (*self.rows, *rows), **changes})
        return path if carries_grad(path.tensor) else path.detached()


def paths_to(logits: TensorProxy, index: TraceIndex) -> list[LogitsPath]:
    """The descriptions of all tensors from a linear to the logits; the last is that of the logits.

    Raises:
        NotFused: where the logits do not come from a linear, or no rule describes an operation between the two.
    """
    between: list[tuple[BoundSymbol, Proxy]] = []
    current: Proxy = logits
    while (producer := index.producers.get(current.name)) is not None and producer.sym.id not in LINEARS:
        inputs = [arg for arg in producer.flat_proxy_args if isinstance(arg, TensorProxy)]
        if not inputs:
            raise NotFused(Reason.NO_LINEAR)
        if not is_static(current, *inputs):
            raise NotFused(Reason.DYNAMIC)
        between.append((producer, current))
        # Of several arguments, follow one of the result's size, if possible one that the program computes.
        same_size = [arg for arg in inputs if arg.numel == current.numel]
        current = next((arg for arg in same_size if arg.name in index.producers), (same_size or inputs)[0])
    # Without a linear there is nothing to fuse, whatever else was done to the logits.
    if producer is None:
        raise NotFused(Reason.NO_LINEAR)
    if not is_static(*producer.flat_proxy_args, *producer.flat_proxy_outs):
        raise NotFused(Reason.DYNAMIC)
    try:
        paths = [LINEARS[producer.sym.id](index, producer, *producer.args, **producer.kwargs)]
    except TypeError:
        # Such as mat1=, which thunder does not know either.
        raise _changed(producer, " with arguments by other names") from None
    for bsym, result in reversed(between):
        several = [path for path in steps(paths[-1], bsym, index) if path.tensor.name == result.name]
        if not several:
            raise _changed(bsym)
        paths += several
    if paths[-1].normalised == "exp":
        raise NotFused(Reason.TRANSFORMED_LOGITS, "by exp")
    return paths


def steps(path: LogitsPath, bsym: BoundSymbol, index: TraceIndex) -> list[LogitsPath]:
    """The descriptions of all results of one more operation that are logits.

    Raises:
        NotFused: where no rule describes the operation.
    """
    if bsym.sym.id in SPLITS:
        return [_part(path, bsym, result) for result in bsym.output]
    if bsym.sym.id == BROADCAST:
        return [_beside_labels(index, path, bsym)]
    if bsym.sym.id is PrimIDs.UPDATE_ALIASES or tensors_written(bsym):
        raise NotFused(Reason.OPERAND_MODIFIED, "the logits, or what shares their memory")
    rule = RULES.get(bsym.sym.id)
    if path.shift and bsym.sym.id not in _SHIFT_INVARIANT:
        raise _changed(bsym, " after their maximum was subtracted")
    if rule is None or not isinstance(bsym.output, TensorProxy) or bsym.output.device != path.tensor.device:
        raise _changed(bsym)
    return [rule(index, path, bsym)]


def _changed(bsym: BoundSymbol, how: str = "") -> NotFused:
    return NotFused(Reason.TRANSFORMED_LOGITS, f"by {bsym.sym.name}{how}")


def _without(parts: tuple[Any, ...], dimension: int) -> tuple[Any, ...]:
    return (*parts[:dimension], *parts[dimension + 1 :])


# The linears, at which a path begins. The arguments are those of the symbols.


def _linear(
    index: TraceIndex, bsym: BoundSymbol, input: TensorProxy, weight: TensorProxy, bias: TensorProxy | None = None
) -> LogitsPath:
    return _begin(bsym, Term(input, weight), bias)


def _begin(bsym: BoundSymbol, term: Term, bias: TensorProxy | None, *before: BoundSymbol) -> LogitsPath:
    nothing = LogitsPath(term.input, (term,), class_dimension=bsym.output.ndim - 1, bsyms=before, bias=bias)
    return nothing.then(bsym)


def _matmul(
    index: TraceIndex, bsym: BoundSymbol, input: TensorProxy, weight: TensorProxy, bias: TensorProxy | None = None
) -> LogitsPath:
    """A linear where the second operand is a matrix, (H, V)."""
    if weight.ndim != 2:
        raise _changed(bsym, f" with an operand of shape {tuple(weight.shape)}")
    producer = index.producers.get(weight.name)
    if producer is not None and producer.sym.id in _PERMUTATIONS and carries_grad(weight):
        # The matrix is a transposed weight, most likely a parameter: use the weight itself.
        if _permutation(producer) == (1, 0):
            return _begin(bsym, Term(input, producer.args[0]), bias, producer)
    return _begin(bsym, Term(input, weight, transposed=True), bias)


def _addmm(
    index: TraceIndex, bsym: BoundSymbol, bias: TensorProxy, input: TensorProxy, weight: TensorProxy, **factors: Any
) -> LogitsPath:
    if any(factor != 1 for factor in factors.values()) or tuple(bias.shape) != (weight.shape[1],):
        raise _changed(bsym)
    return _matmul(index, bsym, input, weight, bias)


# The rules.


def _same_values(index: TraceIndex, path: LogitsPath, bsym: BoundSymbol) -> LogitsPath:
    """A copy or a cast, from 16 bits to float32: others would round the logits once more, or need a wider loss."""
    before, after = dtypes.to_strong_dtype(path.tensor.dtype), dtypes.to_strong_dtype(bsym.output.dtype)
    if before != after and not (before.bytes < 4 and after is dtypes.float32):
        raise _changed(bsym)
    return path.then(bsym)


def _detach(index: TraceIndex, path: LogitsPath, bsym: BoundSymbol) -> LogitsPath:
    return path.detached().then(bsym)


def _reshape(index: TraceIndex, path: LogitsPath, bsym: BoundSymbol) -> LogitsPath:
    """Any operation that keeps the elements' order and the vocabulary as a dimension of its own."""
    before, after = path.tensor.shape, bsym.output.shape
    rows_before = math.prod(before[: path.class_dimension])
    for dimension in reversed(range(len(after))):
        same_vocab = after[dimension] == path.vocab and math.prod(after[:dimension]) == rows_before
        if same_vocab and math.prod(after) == math.prod(before):
            return path.then(bsym, RowStep("reshape", _without(after, dimension)), class_dimension=dimension)
    raise _changed(bsym)


def _permute(index: TraceIndex, path: LogitsPath, bsym: BoundSymbol) -> LogitsPath:
    order = _permutation(bsym)
    if order is None:
        raise _changed(bsym)
    rows = tuple(d - (d > path.class_dimension) for d in order if d != path.class_dimension)
    steps = () if rows == tuple(range(len(rows))) else (RowStep("permute", rows),)
    return path.then(bsym, *steps, class_dimension=order.index(path.class_dimension))


def _permutation(bsym: BoundSymbol) -> tuple[int, ...] | None:
    """The permutation into which `permute`, `transpose`, `movedim` and the like decompose."""
    if bsym.sym.id is PrimIDs.TRANSPOSE:
        return tuple(dimension % len(bsym.args[1]) for dimension in bsym.args[1])
    found = [order for inner in bsym.subsymbols if (order := _permutation(inner)) is not None]
    return found[0] if len(found) == 1 else None


def _getitem(index: TraceIndex, path: LogitsPath, bsym: BoundSymbol) -> LogitsPath:
    _, key = bsym.args
    key = key if isinstance(key, tuple) else (key,)
    if not all(part is Ellipsis or _is_integer(part) or _is_static_slice(part) for part in key):
        raise _changed(bsym, " with an index that is neither an integer nor a slice")
    # `in` and `index` would compare proxies, which adds operations to the trace.
    dots = next((i for i, part in enumerate(key) if part is Ellipsis), len(key))
    head, tail = key[:dots], key[dots + 1 :]
    between = (slice(None),) * (path.tensor.ndim - len(head) - len(tail))
    return _index(path, bsym, (*head, *between, *tail))


def _narrow(index: TraceIndex, path: LogitsPath, bsym: BoundSymbol) -> LogitsPath:
    dimension, start, length = (argument(bsym, name, at=at) for at, name in enumerate(("dim", "start", "length"), 1))
    if not (_is_integer(start) and _is_integer(length)):
        raise _changed(bsym)
    start %= path.tensor.shape[dimension]
    return _index(path, bsym, _key(path, dimension, slice(start, start + length)))


def _select(index: TraceIndex, path: LogitsPath, bsym: BoundSymbol) -> LogitsPath:
    _, dimension, position = bsym.args
    if not _is_integer(position):
        raise _changed(bsym)
    return _index(path, bsym, _key(path, dimension, position))


def _key(path: LogitsPath, dimension: int, index: int | slice) -> tuple[int | slice, ...]:
    return tuple(index if d == dimension % path.tensor.ndim else slice(None) for d in range(path.tensor.ndim))


def _index(path: LogitsPath, bsym: BoundSymbol, key: tuple[int | slice, ...]) -> LogitsPath:
    """Selects some of the rows, or the first columns of the vocabulary."""
    columns = key[path.class_dimension]
    start, stop, stride = columns.indices(path.vocab) if isinstance(columns, slice) else (0, 0, 1)
    if (start, stride) != (0, 1) or stop < 1:
        raise _changed(bsym, " along the vocabulary")
    if stop < path.vocab and path.normalised:
        raise _changed(bsym, f" along the vocabulary after {path.normalised}")
    rows = _without(key, path.class_dimension)
    takes_all = all(isinstance(part, slice) and part == slice(None) for part in rows)
    class_dimension = sum(isinstance(part, slice) for part in key[: path.class_dimension])
    vocab_size = stop if stop < path.vocab else path.vocab_size
    steps = () if takes_all else (RowStep("index", rows),)
    return path.then(bsym, *steps, class_dimension=class_dimension, vocab_size=vocab_size)


def _part(path: LogitsPath, bsym: BoundSymbol, part: TensorProxy) -> LogitsPath:
    """One of the tensors that a split returns."""
    dimension = split_dimension(bsym) % path.tensor.ndim
    if dimension == path.class_dimension:
        raise _changed(bsym, " along the vocabulary")
    number = [result.name for result in bsym.output].index(part.name)
    dropped = dimension < path.class_dimension and part.ndim < path.tensor.ndim
    row = RowStep("part", (number, len(bsym.output), dimension - (dimension > path.class_dimension)))
    return path.then(bsym, row, tensor=part, class_dimension=path.class_dimension - dropped)


def _beside_labels(index: TraceIndex, path: LogitsPath, bsym: BoundSymbol) -> LogitsPath:
    """Logits beside labels that are given their shape, as in `Categorical.log_prob`: the logits stay as they are."""
    results = dict(zip((arg.name for arg in bsym.args), bsym.output, strict=True))
    result = results.pop(path.tensor.name)
    columns = [user.output for other in results.values() for user in index.users(other)]
    are_read = all(
        isinstance(column, TensorProxy)
        and before_broadcast(column, index) is not column
        and all(user.sym.id in _GATHERS for user in index.users(column))
        for column in columns
    )
    if result.shape != path.tensor.shape or not are_read:
        raise _changed(bsym)
    return path.then(bsym, tensor=result)


def before_broadcast(labels: TensorProxy, index: TraceIndex) -> TensorProxy:
    """The labels before they were given the shape of the logits, where the first column of that is read."""
    column = index.producers.get(labels.name)
    if column is None or column.sym.id != ltorch.getitem.id or not isinstance(column.args[1], tuple):
        return labels
    is_first = [part is Ellipsis or _is_static_slice(part) for part in column.args[1]]
    if not all(is_first) or column.args[1] != (Ellipsis, slice(None, 1, None)):
        return labels
    broadcast = index.producers.get(column.args[0].name)
    if broadcast is None or broadcast.sym.id != BROADCAST:
        return labels
    source = broadcast.args[[each.name for each in broadcast.output].index(column.args[0].name)]
    return source if source.shape[-1] == 1 else labels


def split_dimension(split: BoundSymbol) -> int:
    """The dimension of a bound symbol that is one of `SPLITS`."""
    return argument(split, "dim", at=1 if split.sym.id == ltorch.unbind.id else 2, default=0)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool | Proxy)


def _is_static_slice(value: Any) -> bool:
    return isinstance(value, slice) and all(
        part is None or _is_integer(part) for part in (value.start, value.stop, value.step)
    )


def _multiply(index: TraceIndex, path: LogitsPath, bsym: BoundSymbol) -> LogitsPath:
    a, b = bsym.args
    return _scale(path, bsym, _factor(bsym, b if isinstance(a, TensorProxy) else a))


def _divide(index: TraceIndex, path: LogitsPath, bsym: BoundSymbol) -> LogitsPath:
    a, b = bsym.args
    if not isinstance(a, TensorProxy) or bsym.kwargs.get("rounding_mode") is not None:
        raise _changed(bsym)
    if path.normalised == "exp":
        return _softmax_of_exponentials(index, path, bsym)
    return _scale(path, bsym, 1 / _factor(bsym, b))


def _softmax_of_exponentials(index: TraceIndex, path: LogitsPath, bsym: BoundSymbol) -> LogitsPath:
    """The exponentials of the logits divided by their sums, which may be of the same computed once more."""
    exponentials, total = bsym.args
    producer = index.producers.get(total.name) if isinstance(total, TensorProxy) else None
    if exponentials.name != path.tensor.name or producer is None or producer.sym.id != ltorch.sum.id:
        raise _changed(bsym)
    inner: tuple[BoundSymbol, ...] = (producer,)
    if producer.args[0].name != exponentials.name:
        own, again = index.producers[exponentials.name], index.producers.get(producer.args[0].name)
        if again is None or not again.sym.id == own.sym.id == ltorch.exp.id or again.args[0].name != own.args[0].name:
            raise _changed(bsym)
        inner = (again, producer)
    is_in_one_dtype = path.tensor.dtype == total.dtype == bsym.output.dtype
    if not is_in_one_dtype or tuple(total.shape) != path.kept_shape:
        raise _changed(bsym)
    if carries_grad(bsym.output) and not (path.carries_grad and all(carries_grad(each.output) for each in inner)):
        raise _changed(bsym)
    return path.then(bsym, normalised="softmax", shift="", bsyms=inner, inner=(*path.inner, *inner))


def _factor(bsym: BoundSymbol, value: Any) -> Fraction:
    if not isinstance(value, int | float) or isinstance(value, bool | Proxy):
        raise _changed(bsym, " with something that is not a number known when the trace is compiled")
    if not math.isfinite(value) or value == 0:
        raise _changed(bsym, f" with {value}")
    return Fraction(value)


def _scale(path: LogitsPath, bsym: BoundSymbol, factor: Fraction) -> LogitsPath:
    if path.normalised:
        raise _changed(bsym, f" after {path.normalised}")
    if path.softcap is None:
        return path.then(bsym, scale=path.scale * factor)
    if factor < 0:
        raise _changed(bsym, " with a negative number after tanh")
    return path.then(bsym, softcap=path.softcap * factor)


def _subtract(index: TraceIndex, path: LogitsPath, bsym: BoundSymbol) -> LogitsPath:
    """The logits less their log-sum-exp are their log_softmax; less their maximum, they still have the same one."""
    logits, subtracted = bsym.args
    if not all(isinstance(arg, TensorProxy) for arg in bsym.args) or tuple(subtracted.shape) != path.kept_shape:
        raise _changed(bsym)
    if logits.name != path.tensor.name or path.normalised or bsym.kwargs.get("alpha", 1) != 1:
        raise _changed(bsym)
    operand, inner = _before_maximum(subtracted, index)
    if inner and operand.name == path.tensor.name:
        return path.then(bsym, shift=subtracted.name, bsyms=inner, inner=(*path.inner, *inner))
    operand, inner = before_log_sum_exp(subtracted, index)
    has_grad = path.carries_grad and carries_grad(bsym.output)
    is_cut = has_grad and not all(carries_grad(each.output) for each in inner)
    if not inner or operand.name != path.tensor.name or is_cut:
        raise _changed(bsym)
    return path.then(bsym, normalised="log_softmax", shift="", bsyms=inner, inner=(*path.inner, *inner))


def before_log_sum_exp(tensor: TensorProxy, index: TraceIndex) -> tuple[TensorProxy, tuple[BoundSymbol, ...]]:
    """What a tensor is a log-sum-exp of, by one operation or by three, and these; none where it is not."""
    producer = index.producers.get(tensor.name)
    if producer is not None and producer.sym.id == ltorch.logsumexp.id:
        return producer.args[0], (producer,)
    found: list[BoundSymbol] = []
    for function in (ltorch.log.id, ltorch.sum.id, ltorch.exp.id):
        if producer is None or producer.sym.id != function or producer.output.dtype != tensor.dtype:
            return tensor, ()
        found.insert(0, producer)
        operand = producer.args[0]
        producer = index.producers.get(operand.name)
    return operand, tuple(found)


def _before_maximum(tensor: TensorProxy, index: TraceIndex) -> tuple[TensorProxy, tuple[BoundSymbol, ...]]:
    """The tensor whose maximum this one is, detached or not, and the operations; none where it is none."""
    found: list[BoundSymbol] = []
    has_maximum = False
    while (producer := index.producers.get(tensor.name)) is not None:
        is_maximum = producer.sym.id in (ltorch.amax.id, ltorch.torch_max.id)
        if producer.sym.id != ltorch.detach.id and (has_maximum or not is_maximum):
            break
        has_maximum = has_maximum or is_maximum
        tensor = producer.args[0]
        found.insert(0, producer)
    return tensor, tuple(found) if has_maximum else ()


def _tanh(index: TraceIndex, path: LogitsPath, bsym: BoundSymbol) -> LogitsPath:
    if path.softcap is not None or path.normalised:
        raise _changed(bsym)
    return path.then(bsym, softcap=Fraction(1))


def _normalise(index: TraceIndex, path: LogitsPath, bsym: BoundSymbol, *, function: str) -> LogitsPath:
    """The `function` of the logits, "log_softmax" or "softmax"."""
    dimension = argument(bsym, "dim", at=1)
    if dimension % path.tensor.ndim != path.class_dimension:
        raise NotFused(Reason.CLASS_DIMENSION, f"{function} over dimension {dimension}")
    # A softmax of log-probabilities is that of the logits; one of probabilities is another.
    if path.normalised in ("softmax", "exp"):
        raise _changed(bsym, f" after {path.normalised}")
    return replace(_same_values(index, path, bsym), normalised=function, shift="")


def _exp(index: TraceIndex, path: LogitsPath, bsym: BoundSymbol) -> LogitsPath:
    if path.normalised not in ("log_softmax", ""):
        raise _changed(bsym)
    return path.then(bsym, normalised="softmax" if path.normalised else "exp")


def _log(index: TraceIndex, path: LogitsPath, bsym: BoundSymbol) -> LogitsPath:
    """Of probabilities. Where one underflows, the region has the finite log_softmax, and PyTorch minus infinity."""
    if path.normalised != "softmax":
        raise _changed(bsym)
    return path.then(bsym, normalised="log_softmax")


def _add(index: TraceIndex, path: LogitsPath, bsym: BoundSymbol) -> LogitsPath:
    """A bias, or another linear."""
    a, b = bsym.args
    other = b if isinstance(a, TensorProxy) and a.name == path.tensor.name else a
    if bsym.kwargs.get("alpha", 1) != 1 or not isinstance(other, TensorProxy) or other.name == path.tensor.name:
        raise _changed(bsym)
    if path.class_dimension != path.tensor.ndim - 1 or not path.is_linear:
        raise _changed(bsym)
    if tuple(other.shape) == (path.vocab,) and path.tensor.ndim > 1:
        if path.group is not None:
            raise _changed(bsym, ", a bias that is not divided among ranks")
        if path.bias is not None or path.scale != 1:
            raise _changed(bsym, ", a bias after another or after a factor")
        return path.then(bsym, bias=other, bias_carries_grad=True)
    return _sum_of_linears(index, path, bsym, other)


def _sum_of_linears(index: TraceIndex, path: LogitsPath, bsym: BoundSymbol, other: TensorProxy) -> LogitsPath:
    """Such as x @ W.T + y @ B.T, a head and its low-rank adapter: the terms of both."""
    try:
        paths = paths_to(other, index)
    except NotFused:
        raise _changed(bsym) from None
    summand = paths[-1]
    if any(len(index.users(each.tensor)) > 1 for each in paths):
        raise NotFused(Reason.LOGITS_USED, f"one of the summands of {bsym.sym.name}")
    alike = tuple(other.shape) == tuple(path.tensor.shape) and summand.class_dimension == path.class_dimension
    has_two_biases = path.bias is not None and summand.bias is not None
    if not alike or not summand.is_linear or path.rows or summand.rows or has_two_biases or path.group != summand.group:
        raise _changed(bsym)
    scale = path.scale
    if path.scale != summand.scale:
        # The factor of a term multiplies its input, which rounds it; that of a bias has no such place.
        if any(part.bias is not None and part.scale != 1 for part in (path, summand)):
            raise _changed(bsym)
        scale = Fraction(1)
    terms = [replace(term, factor=term.factor * part.scale / scale) for part in (path, summand) for term in part.terms]
    head = max(terms, key=lambda term: term.input.shape[-1])
    with_bias = path if summand.bias is None else summand
    return path.then(
        bsym,
        bsyms=summand.bsyms,
        terms=(head, *(term for term in terms if term is not head)),
        scale=scale,
        bias=with_bias.bias,
        bias_carries_grad=with_bias.bias_carries_grad,
    )


def _columns_of_all_ranks(index: TraceIndex, path: LogitsPath, bsym: BoundSymbol) -> LogitsPath:
    """What `thunder.distributed.column_parallel` puts after a linear: it gathers the columns of all ranks.

    Before the linear it has put what sums the input's gradient over the ranks. A region does that itself.
    """
    _, group, layer_type = bsym.args
    (term,) = path.terms
    summed = index.producers.get(term.input.name)
    if layer_type is not TensorParallelLayerType.COLUMN_PARALLEL_LINEAR or summed is None:
        raise NotFused(Reason.TENSOR_PARALLEL)
    if summed.sym.id is not DistributedPrimIDs.SYNCHRONIZE_TENSOR_PARALLEL_INPUT:
        raise NotFused(Reason.TENSOR_PARALLEL)
    return path.then(bsym, terms=(replace(term, input=summed.args[0]),), group=group)


# Under autocast, thunder puts the primitive in place of torch's linear. torch.mm has the name of its sparse sister.
LINEARS: dict[Any, Callable[..., LogitsPath]] = {
    ltorch.linear.id: _linear,
    PrimIDs.LINEAR: _linear,
    ltorch.matmul.id: _matmul,
    PrimIDs.MATMUL: _matmul,
    "torch.mm": _matmul,
    "torch.spmm": _matmul,
    "torch.addmm": _addmm,
}

COPIES = {
    ltorch.to.id,
    "Tensor.float",
    "torch.Tensor.type",
    ltorch.type_as.id,
    ltorch.clone.id,
    ltorch.contiguous.id,
    PrimIDs.CONVERT_ELEMENT_TYPE,
    PrimIDs.SHALLOW_COPY,
}

_PERMUTATIONS = {ltorch.permute.id, ltorch.transpose.id, ltorch.movedim.id, ltorch.t.id, PrimIDs.TRANSPOSE}

RESHAPES = {
    ltorch.view.id,
    ltorch.view_as.id,
    ltorch.reshape.id,
    "Tensor.reshape_as",
    ltorch.flatten.id,
    ltorch.unflatten.id,
    ltorch.squeeze.id,
    ltorch.unsqueeze.id,
    PrimIDs.RESHAPE,
    PrimIDs.SQUEEZE,
}

SPLITS = {ltorch.unbind.id, ltorch.split.id, ltorch.chunk.id, ltorch.tensor_split.id}
BROADCAST = "torch.broadcast_tensors"
_GATHERS = (ltorch.gather.id, ltorch.take_along_dim.id)

RULES: dict[Any, Callable[[TraceIndex, LogitsPath, BoundSymbol], LogitsPath]] = {
    **dict.fromkeys(COPIES, _same_values),
    **dict.fromkeys(_PERMUTATIONS, _permute),
    **dict.fromkeys(RESHAPES, _reshape),
    ltorch.detach.id: _detach,
    ltorch.getitem.id: _getitem,
    "torch.narrow": _narrow,
    ltorch.select.id: _select,
    ltorch.mul.id: _multiply,
    ltorch.true_divide.id: _divide,
    ltorch.div.id: _divide,
    ltorch.sub.id: _subtract,
    ltorch.tanh.id: _tanh,
    ltorch.add.id: _add,
    ltorch.log_softmax.id: partial(_normalise, function="log_softmax"),
    "torch.softmax": partial(_normalise, function="softmax"),
    ltorch.exp.id: _exp,
    ltorch.log.id: _log,
    DistributedPrimIDs.SYNCHRONIZE_TENSOR_PARALLEL_OUTPUT: _columns_of_all_ranks,
}

_SHIFT_INVARIANT = {
    *(COPIES | _PERMUTATIONS | RESHAPES),
    *(ltorch.detach.id, ltorch.getitem.id, ltorch.sub.id, ltorch.log_softmax.id, "torch.softmax"),
    *(ltorch.exp.id, ltorch.div.id, ltorch.true_divide.id),
}
"""What may follow where the maximum of each row was subtracted."""
