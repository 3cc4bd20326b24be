"""How logits derive from a linear: one rule for each operation that may stand between the two.

A rule takes the description of its operand, a `LogitsPath`, and returns that of its result, or raises `NotFusable`. To
recognise one more way to write a loss is to add a rule to `RULES`.

Operations on rows (slices, permutations) are collected, since they can be done to the hidden states instead: what they
do to the rows of (..., V) logits, they do to the rows of an (..., H) input.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import thunder.torch as ltorch
from thunder.core import dtypes
from thunder.core.prims import PrimIDs
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol

from thunder_flce.graph.matching.reasons import NotFusable, Reason
from thunder_flce.graph.matching.trace_index import Program, carries_grad
from thunder_flce.graph.rules import is_static


@dataclass(frozen=True)
class RowStep:
    """One operation on the rows of logits, given by what it does to the shape without the vocabulary."""

    kind: str
    """"reshape", "permute" or "index"."""
    argument: tuple[Any, ...]
    """The new shape, the order of the dimensions, or an index (an int or a slice) for each of them."""

    def __call__(self, hidden: TensorProxy) -> TensorProxy:
        """Does the same to the rows of an (..., H) tensor; adds operations to the trace."""
        if self.kind == "reshape":
            return ltorch.reshape(hidden, (*self.argument, hidden.shape[-1]))
        if self.kind == "permute":
            return ltorch.permute(hidden, (*self.argument, len(self.argument)))
        return ltorch.getitem(hidden, self.argument)


@dataclass(frozen=True, eq=False)
class Product:
    """A linear without its bias: input @ weight.T, multiplied by a factor."""

    input: TensorProxy
    """(..., H)"""
    weight: TensorProxy
    """(V, H), or (H, V) where `transposed`."""
    transposed: bool = False
    factor: Fraction = Fraction(1)
    carries_grad: bool = True
    """Whether gradients flow to the operands: not where the product was computed under `torch.no_grad`."""


@dataclass(frozen=True, eq=False)
class LogitsPath:
    """A tensor of the program as logits: softcap * tanh(scale * z), or scale * z without a softcap; some rows of it.

    z is the sum of the products and the bias. Factors are fractions, so that z / 49 * 49 is z.
    """

    tensor: TensorProxy
    products: tuple[Product, ...]
    """More than one where linears are added, as a low-rank adapter does it."""
    class_dimension: int
    """Where the vocabulary is in the tensor's shape."""
    bsyms: tuple[BoundSymbol, ...]
    """All operations from the linear to the tensor, that of a transposed weight included."""
    bias: TensorProxy | None = None
    scale: Fraction = Fraction(1)
    softcap: Fraction | None = None
    vocab_size: int | None = None
    """Where only the first columns of the vocabulary are kept: their number."""
    is_log_softmax: bool = False
    """Whether the tensor is the log_softmax of all that."""
    rows: tuple[RowStep, ...] = ()
    carries_grad: bool = True
    """Whether gradients flow from the tensor to the products."""
    bias_carries_grad: bool = True
    """Whether gradients flow from the tensor to the bias, which may be added after the products were detached."""

    @property
    def vocab(self) -> int:
        """Length of the vocabulary's dimension."""
        return self.tensor.shape[self.class_dimension]

    @property
    def selection(self) -> tuple[RowStep, ...]:
        """The row operations up to the last that is no reshape: after it, rows keep their number and their order."""
        last = max((i for i, step in enumerate(self.rows, start=1) if step.kind != "reshape"), default=0)
        return self.rows[:last]

    @property
    def has_float_factors(self) -> bool:
        """Whether its factors are finite and not 0 as floats, as which the region takes them."""
        softcap = Fraction(1) if self.softcap is None else self.softcap
        factors = (softcap, self.scale * softcap, *(product.factor for product in self.products))
        return all(map(_is_float, factors))

    @property
    def logit_map(self) -> dict[str, float | int]:
        """How the logits follow from the linear's output, as arguments of `linear_cross_entropy`; no defaults."""
        scale = self.scale if self.softcap is None else self.scale * self.softcap
        arguments = {"softcap": self.softcap and float(self.softcap), "vocab_size": self.vocab_size}
        if scale != 1:
            arguments["logit_scale"] = float(scale)
        return {name: value for name, value in arguments.items() if value is not None}

    def then(self, bsym: BoundSymbol, **changes: Any) -> "LogitsPath":
        """The description of what `bsym` makes of the tensor."""
        return replace(
            self,
            tensor=bsym.output,
            bsyms=(*self.bsyms, *changes.pop("bsyms", ()), bsym),
            carries_grad=self.carries_grad and carries_grad(bsym.output),
            bias_carries_grad=changes.pop("bias_carries_grad", self.bias_carries_grad) and carries_grad(bsym.output),
            **changes,
        )

    def then_rows(self, bsym: BoundSymbol, class_dimension: int, *steps: RowStep, **changes: Any) -> "LogitsPath":
        """The same for an operation on rows."""
        return self.then(bsym, class_dimension=class_dimension, rows=(*self.rows, *steps), **changes)


def paths_to(logits: TensorProxy, program: Program) -> list[LogitsPath]:
    """The descriptions of all tensors on the way from a linear to the logits; the last is that of the logits.

    Raises:
        NotFusable: where the logits come from no linear, or in another way than the rules have it.
    """
    way: list[BoundSymbol] = []
    current: Proxy = logits
    while (producer := program.producers.get(current.name)) is not None and producer.sym.id not in LINEARS:
        inputs = [arg for arg in producer.flat_proxy_args if isinstance(arg, TensorProxy)]
        if not inputs:
            raise NotFusable(Reason.NO_LINEAR)
        if not is_static(current, *inputs):
            raise NotFusable(Reason.DYNAMIC)
        way.append(producer)
        # A tensor that has been changed is the first argument of what changed it, or has at least its size.
        same_size = [arg for arg in inputs if arg.numel == current.numel]
        current = next((arg for arg in same_size if arg.name in program.producers), (same_size or inputs)[0])
    # A loss whose logits come from no linear at all is no missed fusion, whatever else was done to them.
    if producer is None:
        raise NotFusable(Reason.NO_LINEAR)
    if not is_static(*producer.flat_proxy_args, *producer.flat_proxy_outs):
        raise NotFusable(Reason.DYNAMIC)
    paths = [LINEARS[producer.sym.id](program, producer, *producer.args, **producer.kwargs)]
    for bsym in reversed(way):
        paths.append(step(paths[-1], bsym, program))
    return paths


def step(path: LogitsPath, bsym: BoundSymbol, program: Program) -> LogitsPath:
    """The description of what one more operation makes of logits.

    Raises:
        NotFusable: where no rule has it.
    """
    if bsym.sym.id is PrimIDs.UPDATE_ALIASES:
        raise NotFusable(Reason.OPERAND_MODIFIED, "the logits, or what shares their memory")
    rule = RULES.get(bsym.sym.id)
    if rule is None or not isinstance(bsym.output, TensorProxy) or bsym.output.device != path.tensor.device:
        raise _changed(bsym)
    return rule(program, path, bsym)


def _changed(bsym: BoundSymbol, how: str = "") -> NotFusable:
    return NotFusable(Reason.TRANSFORMED_LOGITS, f"by {bsym.sym.name}{how}")


def _without(shape: tuple[int, ...], dimension: int) -> tuple[int, ...]:
    return (*shape[:dimension], *shape[dimension + 1 :])


# The linears, where a path begins. Their arguments are those of the symbols.


def _linear(
    program: Program, bsym: BoundSymbol, input: TensorProxy, weight: TensorProxy, bias: TensorProxy | None = None
) -> LogitsPath:
    return _begin(bsym, Product(input, weight), bias)


def _matmul(program: Program, bsym: BoundSymbol, input: TensorProxy, weight: TensorProxy) -> LogitsPath:
    """A linear where the second operand is a matrix, (H, V)."""
    if weight.ndim != 2:
        raise _changed(bsym, f" with an operand of shape {tuple(weight.shape)}")
    producer = program.producers.get(weight.name)
    if producer is not None and _swaps_two_dimensions(producer) and carries_grad(weight):
        # The matrix is a transposed weight, most likely a parameter: take it as it is.
        return _begin(bsym, Product(input, producer.args[0]), None, producer)
    return _begin(bsym, Product(input, weight, transposed=True), None)


def _addmm(
    program: Program, bsym: BoundSymbol, bias: TensorProxy, input: TensorProxy, weight: TensorProxy, **factors: Any
) -> LogitsPath:
    if any(factor != 1 for factor in factors.values()) or tuple(bias.shape) != (weight.shape[1],):
        raise _changed(bsym)
    return replace(_matmul(program, bsym, input, weight), bias=bias)


def _begin(bsym: BoundSymbol, product: Product, bias: TensorProxy | None, *before: BoundSymbol) -> LogitsPath:
    return LogitsPath(
        tensor=bsym.output,
        products=(product,),
        class_dimension=bsym.output.ndim - 1,
        bsyms=(*before, bsym),
        bias=bias,
        carries_grad=carries_grad(bsym.output),
        bias_carries_grad=carries_grad(bsym.output),
    )


# The rules.


def _same_values(program: Program, path: LogitsPath, bsym: BoundSymbol) -> LogitsPath:
    """A copy or a cast. 16 bits may be widened to float32, and nothing else.

    To narrow would round the logits once more, and float64 is more than the loss of float32 operands is computed in.
    """
    before, after = dtypes.to_strong_dtype(path.tensor.dtype), dtypes.to_strong_dtype(bsym.output.dtype)
    if before != after and not (before.bytes < 4 and after is dtypes.float32):
        raise _changed(bsym)
    return path.then(bsym)


def _detach(program: Program, path: LogitsPath, bsym: BoundSymbol) -> LogitsPath:
    return replace(path.then(bsym), carries_grad=False, bias_carries_grad=False)


def _reshape(program: Program, path: LogitsPath, bsym: BoundSymbol) -> LogitsPath:
    """Anything that keeps the elements' order, as long as the vocabulary stays a dimension of its own."""
    before, after = path.tensor.shape, bsym.output.shape
    rows_before = math.prod(before[: path.class_dimension])
    for dimension in reversed(range(len(after))):
        same_vocab = after[dimension] == path.vocab and math.prod(after[:dimension]) == rows_before
        if same_vocab and math.prod(after) == math.prod(before):
            return path.then_rows(bsym, dimension, RowStep("reshape", _without(after, dimension)))
    raise _changed(bsym)


def _permute(program: Program, path: LogitsPath, bsym: BoundSymbol) -> LogitsPath:
    order = _permutation(bsym)
    if order is None:
        raise _changed(bsym)
    order = tuple(dimension % len(order) for dimension in order)
    class_dimension = order.index(path.class_dimension)
    rows = tuple(d - (d > path.class_dimension) for d in order if d != path.class_dimension)
    steps = () if rows == tuple(range(len(rows))) else (RowStep("permute", rows),)
    return path.then_rows(bsym, class_dimension, *steps)


def _permutation(bsym: BoundSymbol) -> tuple[int, ...] | None:
    """Of `permute`, `transpose`, `movedim` and the like: the one that they decompose into."""
    if bsym.sym.id is PrimIDs.TRANSPOSE:
        return tuple(bsym.args[1])
    found = [order for inner in bsym.subsymbols if (order := _permutation(inner)) is not None]
    return found[0] if len(found) == 1 else None


def _swaps_two_dimensions(bsym: BoundSymbol) -> bool:
    order = _permutation(bsym) if bsym.sym.id in _PERMUTATIONS else None
    return order is not None and tuple(dimension % len(order) for dimension in order) == (1, 0)


def _getitem(program: Program, path: LogitsPath, bsym: BoundSymbol) -> LogitsPath:
    _, key = bsym.args
    key = key if isinstance(key, tuple) else (key,)
    if not all(part is Ellipsis or _is_integer(part) or _is_static_slice(part) for part in key):
        raise _changed(bsym, " with an index that is neither an integer nor a slice")
    # Neither `in` nor `index`, which would ask proxies whether they are equal.
    dots = next((i for i, part in enumerate(key) if part is Ellipsis), len(key))
    head, tail = key[:dots], key[dots + 1 :]
    between = (slice(None),) * (path.tensor.ndim - len(head) - len(tail))
    return _index(path, bsym, (*head, *between, *tail))


def _narrow(program: Program, path: LogitsPath, bsym: BoundSymbol) -> LogitsPath:
    dimension, start, length = (lambda input, dim, start, length: (dim, start, length))(*bsym.args, **bsym.kwargs)
    if not (_is_integer(start) and _is_integer(length)):
        raise _changed(bsym)
    start %= path.tensor.shape[dimension]
    return _index(path, bsym, _key(path, dimension, slice(start, start + length)))


def _select(program: Program, path: LogitsPath, bsym: BoundSymbol) -> LogitsPath:
    _, dimension, position = bsym.args
    if not _is_integer(position):
        raise _changed(bsym)
    return _index(path, bsym, _key(path, dimension, position))


def _key(path: LogitsPath, dimension: int, index: int | slice) -> tuple[int | slice, ...]:
    dimension %= path.tensor.ndim
    return tuple(index if d == dimension else slice(None) for d in range(path.tensor.ndim))


def _index(path: LogitsPath, bsym: BoundSymbol, key: tuple[int | slice, ...]) -> LogitsPath:
    """Takes some of the rows, or the first columns of the vocabulary."""
    columns = key[path.class_dimension]
    changes = {}
    if isinstance(columns, slice):
        start, stop, stride = columns.indices(path.vocab)
    if not isinstance(columns, slice) or (start, stride) != (0, 1) or stop < 1:
        raise _changed(bsym, " along the vocabulary")
    if stop < path.vocab:
        if path.is_log_softmax:
            raise _changed(bsym, " along the vocabulary after log_softmax")
        changes["vocab_size"] = stop
    rows = _without(key, path.class_dimension)
    takes_all = all(isinstance(part, slice) and part == slice(None) for part in rows)
    class_dimension = sum(isinstance(part, slice) for part in key[: path.class_dimension])
    return path.then_rows(bsym, class_dimension, *(() if takes_all else (RowStep("index", rows),)), **changes)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool | Proxy)


def _is_static_slice(value: Any) -> bool:
    return isinstance(value, slice) and all(
        part is None or _is_integer(part) for part in (value.start, value.stop, value.step)
    )


def _multiply(program: Program, path: LogitsPath, bsym: BoundSymbol) -> LogitsPath:
    a, b = bsym.args
    return _scale(path, bsym, _factor(bsym, b if isinstance(a, TensorProxy) else a))


def _divide(program: Program, path: LogitsPath, bsym: BoundSymbol) -> LogitsPath:
    a, b = bsym.args
    if not isinstance(a, TensorProxy) or bsym.kwargs.get("rounding_mode") is not None:
        raise _changed(bsym)
    return _scale(path, bsym, 1 / _factor(bsym, b))


def _factor(bsym: BoundSymbol, value: Any) -> Fraction:
    if not isinstance(value, int | float) or isinstance(value, bool | Proxy):
        raise _changed(bsym, " with something that is not a number known when the trace is compiled")
    if not math.isfinite(value) or value == 0:
        raise _changed(bsym, f" with {value}")
    return Fraction(value)


def _is_float(factor: Fraction) -> bool:
    """Whether a factor is a number other than 0 and infinity as a float, too."""
    try:
        return float(factor) != 0
    except OverflowError:
        return False


def _scale(path: LogitsPath, bsym: BoundSymbol, factor: Fraction) -> LogitsPath:
    if path.is_log_softmax:
        raise _changed(bsym, " after log_softmax")
    if path.softcap is None:
        return path.then(bsym, scale=path.scale * factor)
    if factor < 0:
        raise _changed(bsym, " with a negative number after tanh")
    return path.then(bsym, softcap=path.softcap * factor)


def _tanh(program: Program, path: LogitsPath, bsym: BoundSymbol) -> LogitsPath:
    if path.softcap is not None or path.is_log_softmax:
        raise _changed(bsym)
    return path.then(bsym, softcap=Fraction(1))


def _log_softmax(program: Program, path: LogitsPath, bsym: BoundSymbol) -> LogitsPath:
    _, dimension = bsym.args
    if dimension % path.tensor.ndim != path.class_dimension:
        raise NotFusable(Reason.CLASS_DIMENSION, f"log_softmax over dimension {dimension}")
    return replace(_same_values(program, path, bsym), is_log_softmax=True)


def _add(program: Program, path: LogitsPath, bsym: BoundSymbol) -> LogitsPath:
    """A bias, or another linear."""
    a, b = bsym.args
    other = b if isinstance(a, TensorProxy) and a.name == path.tensor.name else a
    if bsym.kwargs.get("alpha", 1) != 1 or not isinstance(other, TensorProxy) or other.name == path.tensor.name:
        raise _changed(bsym)
    if path.class_dimension != path.tensor.ndim - 1:
        raise _changed(bsym)
    if path.softcap is not None or path.is_log_softmax or path.vocab_size is not None:
        raise _changed(bsym)
    if tuple(other.shape) == (path.vocab,) and path.tensor.ndim > 1:
        if path.bias is not None or path.scale != 1:
            raise _changed(bsym, ", a bias after another or after a factor")
        return path.then(bsym, bias=other, bias_carries_grad=True)
    return _sum_of_linears(program, path, bsym, other)


def _sum_of_linears(program: Program, path: LogitsPath, bsym: BoundSymbol, other: TensorProxy) -> LogitsPath:
    """x @ W.T + y @ B.T, as low-rank adapters have it, is one product of [x, y] and [W, B]."""
    try:
        paths = paths_to(other, program)
    except NotFusable:
        raise _changed(bsym) from None
    summand = paths[-1]
    if any(len(program.users(each.tensor)) > 1 for each in paths):
        raise NotFusable(Reason.LOGITS_USED, f"one of the summands of {bsym.sym.name}")
    plain = (
        tuple(other.shape) == tuple(path.tensor.shape)
        and summand.class_dimension == path.class_dimension
        and not (path.rows or summand.rows)
        and summand.softcap is None
        and summand.vocab_size is None
        and not summand.is_log_softmax
        and (path.bias is None or summand.bias is None)
    )
    if not plain:
        raise _changed(bsym)
    scale = path.scale
    products = (*path.products, *summand.products)
    if path.scale != summand.scale:
        # A factor of one of them goes to its input, and is rounded there; that of a bias could not.
        if any(part.bias is not None and part.scale != 1 for part in (path, summand)):
            raise _changed(bsym)
        scale = Fraction(1)
    products = tuple(
        replace(
            product,
            factor=product.factor * part.scale / scale,
            carries_grad=product.carries_grad and part.carries_grad,
        )
        for part in (path, summand)
        for product in part.products
    )
    return replace(
        path.then(bsym, bsyms=summand.bsyms),
        products=products,
        scale=scale,
        bias=path.bias if summand.bias is None else summand.bias,
        carries_grad=carries_grad(bsym.output),
        bias_carries_grad=(path if summand.bias is None else summand).bias_carries_grad and carries_grad(bsym.output),
    )


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

RULES: dict[Any, Callable[[Program, LogitsPath, BoundSymbol], LogitsPath]] = {
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
    ltorch.tanh.id: _tanh,
    ltorch.add.id: _add,
    ltorch.log_softmax.id: _log_softmax,
}
