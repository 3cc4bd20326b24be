"""What each operation makes of what is known of its operands: one rule for each way that PyTorch has.

A rule is called with the arguments of the operation: the description of an operand where its annotation is that of a
description, and otherwise the tensor. It returns the description of its result, or of each of them. Where an operand
is not what the annotation says, there is no rule, and a rule raises `Unknown` for what else cannot be described.
`interpreter` then asks for the operands themselves.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from string import ascii_letters, digits
from sys import float_info
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.utils._pytree import tree_map_only

from thunder_flce.matching.algebra import (
    LOG_PROBABILITY,
    ONE,
    Argmax,
    Class,
    Labels,
    Logits,
    Row,
    RowStep,
    Term,
    Unknown,
    Value,
    added,
    atoms,
    has_grad,
    poly,
    value,
    with_u_as,
    without_grad,
)
from thunder_flce.matching.decisions import NotFused, Reason
from thunder_flce.matching.program import (
    COPIES,
    PERMUTATIONS,
    RESHAPES,
    SPLITS,
    Op,
    Tensor,
    agree,
    has_elements,
    hint,
    is_number,
    is_plain,
    keeps_elements,
    order_of,
    same,
    same_shape,
    split_indices,
    tensors_in,
)

if TYPE_CHECKING:
    from thunder_flce.matching.interpreter import Interpreter


RULES: dict[str, Callable[..., Any]] = {}
LINEARS = ("linear", "inner", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "tensordot", "conv1d")


def rule(*names: str) -> Callable[[Callable], Callable]:
    """Registers a rule for operations of some names."""

    def registered(function: Callable) -> Callable:
        RULES.update(dict.fromkeys(names, function))
        return function

    return registered


def _over_classes(of: Class, dims: Any) -> None:
    """Raises unless the dimensions are the one of the classes."""
    if dims is None and len(of.shape) == 1:
        return
    dims = dims if isinstance(dims, list | tuple) else (dims,)
    if not all(type(dim) is int for dim in dims) or [dim % len(of.shape) for dim in dims] != [of.dim]:
        raise Unknown("over other dimensions than the classes")


# The linears, at which logits begin.


def _product(
    known: "Interpreter", op: Op, equation: str, input: Tensor, weight: Tensor, *, bias: Tensor | None = None
) -> Class:
    """A linear of each row, as an equation such as "bth,vh->btv" has it: one matrix, and no sum over rows."""
    if any(isinstance(known.get(each), Row | Argmax) for each in (input, weight)):
        raise Unknown  # They are asked for.
    names, _, result = equation.partition("->")
    of_input, _, of_weight = names.partition(",")
    out = op.output
    while (before := weight.op) is not None and before.name in (*PERMUTATIONS, "expand"):
        source = before.operands[0]
        if out.needs_grad and weight.needs_grad != source.needs_grad:
            break
        if before.name in PERMUTATIONS:
            # Square, or permuted to what it was: only the order of the dimensions tells.
            by_dim = dict(zip(order_of(before), of_weight, strict=True))
            of_weight = "".join(by_dim[dim] for dim in range(source.ndim))
        else:
            of_weight = of_weight[weight.ndim - source.ndim :]
        weight = source
    classes = [name for name in of_weight if name not in of_input and name in result]
    features = [name for name in of_weight if name in of_input and name not in result]
    if (len(classes), len(features)) != (1, 1):
        raise Unknown
    rows, out_rows = of_input.replace(features[0], ""), result.replace(classes[0], "")
    sizes = dict(zip(of_input, input.shape, strict=True))
    dim = result.index(classes[0])
    # Not of one row that is expanded to all classes, either.
    of_matrix = {features[0]: sizes[features[0]], classes[0]: out.shape[dim]}
    is_one = all(same(size, of_matrix.get(name, 1)) for name, size in zip(of_weight, weight.shape, strict=True))
    is_of_rows = sorted(rows) == sorted(out_rows) and len(set(of_input)) == len(of_input)
    out_shape = (*out.shape[:dim], *out.shape[dim + 1 :])
    if not is_one or not is_of_rows or not same_shape(out_shape, [sizes[name] for name in out_rows]):
        raise Unknown
    dims = of_weight.index(classes[0]), of_weight.index(features[0])
    term = Term(
        known.first_of(input, op), known.first_of(weight, op), of_input.index(features[0]), dims, input.dtype,
        has_grad=out.needs_grad, changes=known.program.changes_before(op, *op.operands), outputs=(out,),
    )  # fmt: skip
    steps = () if rows == out_rows else (RowStep("permute", tuple(map(rows.index, out_rows)), out_shape),)
    bias = None if bias is None else known.first_of(bias, op)
    logits = Logits((term,), bias, bias_has_grad=out.needs_grad, rows=steps)
    return Class(logits, dim, out.shape, poly(u=1))


@rule("linear", "inner")
def _linear(known: "Interpreter", op: Op, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Class:
    rows = ascii_letters[: input.ndim - 1]
    if weight.ndim != 2:
        raise Unknown
    return _product(known, op, f"{rows}H,VH->{rows}V", input, weight, bias=bias)


@rule("matmul", "mm", "bmm")
def _matmul(known: "Interpreter", op: Op, input: Tensor, other: Tensor, *, bias: Tensor | None = None) -> Class:
    """A linear where the second operand is a matrix, (H, V), or that for each item of a batch."""
    if not isinstance(other, Tensor) or not isinstance(input, Tensor) or not 2 <= other.ndim <= max(2, input.ndim):
        raise Unknown
    rows = ascii_letters[: input.ndim - 1]
    return _product(known, op, f"{rows}H,{rows[input.ndim - other.ndim : -1]}HV->{rows}V", input, other, bias=bias)


@rule("addmm", "baddbmm")
def _addmm(
    known: "Interpreter", op: Op, input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: Any = 1, alpha: Any = 1
) -> Class:
    if (beta, alpha) != (1, 1) or not same_shape(input.shape, (mat2.shape[-1],)):
        raise Unknown
    return _matmul(known, op, mat1, mat2, bias=input)


@rule("tensordot")
def _tensordot(known: "Interpreter", op: Op, a: Tensor, b: Tensor, dims: Any = 2, out: None = None) -> Class:
    of_a, of_b = list(ascii_letters[: a.ndim]), list(ascii_letters[a.ndim : a.ndim + b.ndim])
    both = (range(a.ndim - dims, a.ndim), range(dims)) if isinstance(dims, int) else dims
    for dim, other in zip(*both, strict=True):
        of_b[other] = of_a[dim]
    result = "".join(name for name in of_a + of_b if (name in of_a) != (name in of_b))
    return _product(known, op, f"{''.join(of_a)},{''.join(of_b)}->{result}", a, b)


@rule("conv1d")
def _conv1d(
    known: "Interpreter", op: Op, input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1,
    padding: Any = 0, dilation: Any = 1, groups: Any = 1,
) -> Class:  # fmt: skip
    """With a kernel of one token."""
    if (stride, padding, groups) not in ((1, 0, 1), ((1,), (0,), 1)):
        raise Unknown
    batch = "B" if input.ndim == 3 else ""
    return _product(known, op, f"{batch}HT,VHK->{batch}VT", input, weight, bias=bias)


@rule("einsum")
def _einsum(known: "Interpreter", op: Op, equation: str, *operands: Any) -> Class | Row:
    """A linear, or Σ p log p as in `einsum("btv,btv->bt", p, log_p)`."""
    tensors = operands[0] if len(operands) == 1 and isinstance(operands[0], list | tuple) else operands
    if len(tensors) != 2 or not isinstance(equation, str):
        raise Unknown
    names, arrow, result = equation.replace(" ", "").partition("->")
    if not arrow:
        once = sorted(name for name in set(names) - set(".,") if names.count(name) == 1)
        result = "..." * ("..." in names) + "".join(once)
    # The dimensions that dots stand for are aligned to the right.
    of_a, of_b, result = (
        each.replace("...", digits[10 - tensor.ndim + len(each.replace("...", "")) :])
        for each, tensor in zip((*names.split(","), result), (*tensors, op.output), strict=True)
    )
    a, b = map(known.get, tensors)
    if isinstance(a, Class) and isinstance(b, Class) and (a.form or b.form):
        of = _weighted(a, b) if a.form == "exp" else _weighted(b, a)
        if of_a != of_b or len(set(of_a)) < len(of_a) or result != of_a[: of.dim] + of_a[of.dim + 1 :]:
            raise Unknown
        return _summed(of, op.output.shape)
    for known_of, one_hot in ((a, tensors[1]), (b, tensors[0])):
        found = _at_one_hot(known, known_of, one_hot) if isinstance(known_of, Class) and of_a == of_b else None
        if found is not None and result == of_a[: found.dim]:
            return _summed(found, op.output.shape)
    if any(isinstance(of, Class) and not of.is_logits for of in (a, b)):
        raise Unknown
    ways = [(f"{of_a},{of_b}->{result}", *tensors), (f"{of_b},{of_a}->{result}", *tensors[::-1])]
    # Of two matrices, that one has the classes whose dimension is the last.
    first, second = ways if result[-1:] in of_b else ways[::-1]
    try:
        return _product(known, op, *first)
    except Unknown:
        return _product(known, op, *second)


# Shapes.


@rule(*COPIES, "detach")
def _copied(known: "Interpreter", op: Op, input: Value, *args: Any, **kwargs: Any) -> Value:
    tensor, after = op.operands[0], op.output.dtype
    # Others would round the logits once more, or need a wider loss.
    is_exact = tensor.dtype == after or (tensor.dtype.itemsize < 4 and after is torch.float32)
    is_number = after.is_floating_point and (is_exact or not isinstance(input, Class))
    if not is_number or op.output.device != tensor.device:
        raise Unknown
    return input


@rule(*RESHAPES, "expand", "expand_as", "broadcast_in_dim", "atleast_1d")
def _reshape(known: "Interpreter", op: Op, input: Class | Row | Argmax, *args: Any, **kwargs: Any) -> Value:
    """Any operation that keeps the elements' order and the classes as a dimension of their own."""
    shape = op.output.shape
    if not same(math.prod(shape), op.operands[0].numel):
        raise Unknown
    return _in_shape(input, shape) if isinstance(input, Class) else replace(input, shape=shape)


def _in_shape(of: Class, shape: tuple[Any, ...]) -> Class:
    rows_before = math.prod(of.shape[: of.dim])
    for dim in reversed(range(len(shape))):
        if same(shape[dim], of.columns) and same(math.prod(shape[:dim]), rows_before):
            return replace(of, dim=dim, shape=shape)
    raise Unknown


def _with_step(of: Class, step: RowStep, rows_shape: tuple[Any, ...]) -> Logits:
    """The logits after one more operation on the rows, which come in the shape of `of`."""
    return replace(of.logits, rows=(*_rows_in_shape(of), replace(step, shape=rows_shape)))


def _rows_in_shape(of: Class | Row) -> tuple[RowStep, ...]:
    """The operations that give the rows in the shape of `of`."""
    rows, shape = of.logits.rows, of.rows_shape if isinstance(of, Class) else of.shape
    return rows if same_shape(of.logits.rows_shape, shape) else (*rows, RowStep("reshape", shape, shape))


@rule(*PERMUTATIONS)
def _permute(known: "Interpreter", op: Op, input: Class, *args: Any, **kwargs: Any) -> Class:
    order, shape = order_of(op), op.output.shape
    rows, dim = tuple(d - (d > input.dim) for d in order if d != input.dim), order.index(input.dim)
    logits = input.logits
    if rows != tuple(range(len(rows))):
        logits = _with_step(input, RowStep("permute", rows), (*shape[:dim], *shape[dim + 1 :]))
    return replace(input, logits=logits, dim=dim, shape=shape)


@rule("getitem")
def _getitem(known: "Interpreter", op: Op, input: Class | Row | Argmax, key: Any) -> Value:
    if not isinstance(input, Class) and keeps_elements(op):
        return replace(input, shape=op.output.shape)
    key = key if isinstance(key, tuple) else (key,)
    if isinstance(input, Argmax):
        # As if the classes were still there, behind the rows.
        columns, dots = input.logits.terms[0].columns, () if any(part is Ellipsis for part in key) else (Ellipsis,)
        of = Class(input.logits, len(input.shape), (*input.shape, columns), poly(u=1))
        picked = _at_index(of, (*key, *dots, slice(None)), (*op.output.shape, columns))
        return Argmax(picked.logits, op.output.shape)
    if isinstance(input, Row):
        raise Unknown
    of = input
    if len(key) == len(of.shape) and isinstance(key[-1], Tensor) and of.dim == len(of.shape) - 1:
        if key[:-1] and all(type(part) is int for part in key[:-1]):
            of, key = _pick(of, (*key[:-1], slice(None)), (of.columns,)), key[-1:]
        return _indexed(known, op, of, key)
    return _at_index(of, key, op.output.shape) if is_plain(key) else _at_tensors(known, op, of, key)


def _at_tensors(known: "Interpreter", op: Op, of: Class, key: tuple[Any, ...]) -> Class:
    """The rows that tensors pick, such as the last token of each sequence, or those that a mask has."""
    tensors, ends = tensors_in(key), key[-1] is Ellipsis or (isinstance(key[-1], slice) and key[-1] == slice(None))
    # A mask is of as many dimensions as it has.
    masks = [each for each in tensors if each.dtype in (torch.bool, torch.uint8)]
    sizes = (each.ndim if each in masks else each is not None for each in key)
    is_of_rows = ends if any(each is Ellipsis for each in key) else sum(sizes) < len(of.shape) + ends
    is_known = all(isinstance(each, Tensor) or is_plain((each,)) for each in key) and tensors
    if not is_of_rows or not is_known or of.dim != len(of.shape) - 1:
        raise Unknown("with an index that is neither an integer nor a slice")
    if any(known.hangs_on(each, of.logits) for each in tensors):
        raise Unknown("at rows that depend on the logits")
    number_at = known.program.number_at
    numbers = repr(tree_map_only(Tensor, lambda each: (number_at(each, op), each.shape, each.dtype), key))
    step = RowStep("take", (numbers,), given=key, read_at=op.position)
    return replace(of, logits=_with_step(of, step, op.output.shape[:-1]), shape=op.output.shape, dim=op.output.ndim - 1)


@rule("index_select")
def _index_select(known: "Interpreter", op: Op, input: Class, dim: int, index: Tensor) -> Class:
    if dim % len(input.shape) == input.dim:
        raise Unknown
    return _at_tensors(known, op, input, (*(slice(None),) * (dim % len(input.shape)), index))


def _at_index(of: Class, key: tuple[Any, ...], new_shape: tuple[Any, ...]) -> Class:
    """What an index picks, of the shape that comes out."""
    if not is_plain(key):
        raise Unknown("with an index that is neither an integer nor a slice")
    full = _of_all_dims(key, len(of.shape))
    sizes = iter(new_shape)
    shape = tuple(size for part in full if not isinstance(part, int) for size in [next(sizes)] if part is not None)
    picked = _pick(of, tuple(part for part in full if part is not None), shape)
    return picked if None not in full else _in_shape(picked, new_shape)


def _of_all_dims(key: tuple[Any, ...], ndim: int) -> tuple[Any, ...]:
    """An index with a part for each dimension."""
    dots = next((at for at, part in enumerate(key) if part is Ellipsis), len(key))
    head, tail = key[:dots], key[dots + 1 :]
    given = sum(part is not None for part in (*head, *tail))
    return (*head, *(slice(None),) * (ndim - given), *tail)


def _pick(of: Class, key: tuple[Any, ...], shape: tuple[Any, ...]) -> Class:
    """The rows, and the first columns, that numbers and slices pick, one for each dimension."""
    columns, logits = key[of.dim], of.logits
    if not isinstance(columns, slice) or columns.step not in (None, 1) or columns.start not in (None, 0):
        raise Unknown("along the vocabulary")
    dim = of.dim - sum(not isinstance(part, slice) for part in key[: of.dim])
    if columns.stop is not None and not same(shape[dim], of.columns):
        # To ask adds the guard that there are so many columns in every call.
        is_part = type(columns.stop) is int and columns.stop > 0 and bool(columns.stop <= of.columns)
        kept = columns.stop if is_part else shape[dim]
        if type(kept) is not int or not of.is_shifted_logits or of.rest or not kept:
            raise Unknown
        logits = replace(logits, vocab_size=kept)
        shape = (*shape[:dim], kept, *shape[dim + 1 :])
    rows = (*key[: of.dim], *key[of.dim + 1 :])
    if not all(isinstance(part, slice) and (part.start, part.stop, part.step) in _ALL for part in rows):
        step = RowStep("index", tuple(rows))
        logits = _with_step(replace(of, logits=logits), step, (*shape[:dim], *shape[dim + 1 :]))
        return replace(of, logits=logits, dim=dim, shape=shape)
    return replace(of, logits=logits, shape=shape)


_ALL = ((None, None, None), (0, None, None), (None, None, 1), (0, None, 1))


@rule("narrow")
def _narrow(known: "Interpreter", op: Op, input: Class, dim: int, start: Any, length: Any) -> Class:
    size = input.shape[dim]
    if isinstance(start, Tensor) or (type(start) is int and start < 0 and type(size) is not int):
        raise Unknown
    start = start % size if type(start) is int and start < 0 else start
    return _pick(input, _at(input, dim, slice(start, start + length)), op.output.shape)


@rule("select")
def _select(known: "Interpreter", op: Op, input: Class | Row | Argmax, dim: int, index: Any) -> Value:
    return _getitem(known, op, input, _at(input, dim, index))


def _at(of: Class | Row | Argmax, dim: int, part: Any) -> tuple[Any, ...]:
    """An index into one dimension."""
    if isinstance(part, Tensor):
        raise Unknown
    key: list[Any] = [slice(None)] * len(of.shape)
    key[dim % len(of.shape)] = part
    return tuple(key)


@rule(*SPLITS)
def _split(known: "Interpreter", op: Op, input: Class, *args: Any, **kwargs: Any) -> tuple[Class, ...]:
    indices = split_indices(op)
    if indices is None:
        raise Unknown("at indices that are not in order")
    if any(index[input.dim] != slice(None) for index in indices):
        raise Unknown("along the vocabulary")
    return tuple(_pick(input, index, out.shape) for index, out in zip(indices, op.outs, strict=True))


@rule("stack", "cat")
def _join(known: "Interpreter", op: Op, tensors: Sequence[Tensor], dim: int = 0) -> Class | Row:
    """Rows of the same logits put together, such as the sequences of a batch, or those of the token before each."""
    found: list[Any] = [known.get(each) for each in tensors]
    if not all(isinstance(each, Class | Row) for each in found):
        raise Unknown("with other tensors")
    are_of_one = len({each.logits.terms[0].input for each in found}) == 1
    found = found if are_of_one else [_of_whole_input(known, each) for each in found]
    first, shape = found[0], op.output.shape

    def without_rows(of: Any) -> Any:
        bare = replace(of, logits=replace(of.logits, rows=()), shape=(), labels=None)
        return bare, of.labels is None, len(of.shape)

    if any(without_rows(each) != without_rows(first) for each in found):
        raise Unknown("with other tensors")
    of_each = [part.logits.rows for part in found]
    if any(of_each.count(rows) > 1 for rows in of_each):
        raise Unknown("of the same rows twice")  # A region would compute them twice.
    terms = (
        replace(of[0], outputs=tuple(out for term in of for out in term.outputs))
        for of in zip(*(part.logits.terms for part in found), strict=True)
    )
    whole = replace(first.logits, terms=tuple(terms))
    dim, one = dim % len(shape), (1,) * (op.name == "stack")
    parts = [replace(part, shape=(*part.shape[:dim], *one, *part.shape[dim:])) for part in found]
    rows_dim, rows_shape = dim, shape
    if isinstance(first, Class):
        classes = first.dim + (bool(one) and dim <= first.dim)
        if dim == classes:
            raise Unknown
        parts = [replace(part, dim=classes) for part in parts]
        rows_dim, rows_shape = dim - (dim > classes), _without(shape, classes)
    rows = _all_rows(found, rows_dim)
    if rows is None or not are_of_one:
        known.has_joined = True
        if not known.joins:
            raise Unknown
    if rows is None:
        rows = (RowStep("cat", (rows_dim, *map(_rows_in_shape, parts)), rows_shape),)
    return replace(parts[0], logits=replace(whole, rows=rows), shape=shape, labels=_joined_labels(parts, dim))


def _joined_labels(parts: Sequence[Class | Row], dim: int) -> Labels | None:
    pairs = [(part.labels, part.shape) for part in parts if part.labels is not None]
    for labels, shape in pairs:
        # What was joined before must have been so along the same dimension.
        is_same = all(same_shape(_without(each, dim), _without(shape, dim)) for each in labels.shapes)
        if labels.wraps != pairs[0][0].wraps or (labels.shapes and not (is_same and labels.dim == dim)):
            raise Unknown
    if not pairs:
        return None
    return replace(
        min((labels for labels, _ in pairs), key=lambda each: each.read_at),
        tensors=tuple(each for labels, _ in pairs for each in labels.tensors),
        numbers=tuple(each for labels, _ in pairs for each in labels.numbers),
        shapes=tuple(each for labels, shape in pairs for each in labels.shapes or (shape,)),
        dim=dim,
    )


def _without(shape: tuple[Any, ...], dim: int) -> tuple[Any, ...]:
    return (*shape[:dim], *shape[dim + 1 :])


def _of_whole_input(known: "Interpreter", of: Class | Row) -> Class | Row:
    """Logits of some rows of a tensor, such as a chunk, as some of the logits of all its rows."""
    (term, *others), rows = of.logits.terms, of.logits.rows
    input = term.input
    while (before := input.op) is not None and before.operands and before.operands[0].needs_grad == input.needs_grad:
        source = before.operands[0]
        if before.name in COPIES:
            is_exact = input.dtype in (source.dtype, term.dtype) and input.device == source.device
            if not is_exact or any(map(known.program.may_have_changed, (source, input))):
                break
        elif (index := _index_of(input)) and index[-1] == slice(None):
            rows = (RowStep("index", index[:-1], input.shape[:-1]), *rows)
        else:
            break
        input = source
    if others or term.hidden_dim != term.input.ndim - 1:
        return of
    term = replace(term, input=input, hidden_dim=input.ndim - 1)
    return replace(of, logits=replace(of.logits, terms=(term,), rows=rows))


def _index_of(picked: Tensor) -> tuple[Any, ...] | None:
    """The index into another tensor that a tensor is, of numbers and slices; None where it is none."""
    op = picked.op
    if op is None or op.name not in ("getitem", *SPLITS):
        return None
    if op.name in SPLITS:
        indices = split_indices(op)
        return indices and indices[op.outs.index(picked)]  # type: ignore[return-value]
    key = op.args[1] if isinstance(op.args[1], tuple) else (op.args[1],)
    is_known = is_plain(key) and all(part is not None for part in key)
    return _of_all_dims(key, op.operands[0].ndim) if is_known else None


def _all_rows(parts: Sequence[Class | Row], dim: int) -> tuple[RowStep, ...] | None:
    """What gives the rows that were divided along a dimension into parts; None where the parts are not these."""
    before = parts[0].logits.rows[:-1]
    end: Any = 0
    for number, part in enumerate(parts):
        *others, own = part.logits.rows or (None,)
        if own is None or own.kind != "index" or tuple(others) != before or dim >= len(own.argument):
            return None
        index, rest = own.argument[dim], (*own.argument[:dim], *own.argument[dim + 1 :])
        is_number, has_step = type(index) is int, isinstance(index, slice) and index.step not in (None, 1)
        are_all = all(isinstance(each, slice) and (each.start, each.stop, each.step) in _ALL for each in rest)
        is_next = index == number if is_number else isinstance(index, slice) and same(index.start or 0, end)
        # What is cut may have been reshaped before, but not since.
        shape = part.rows_shape if isinstance(part, Class) else part.shape
        if not are_all or not is_next or has_step or not same_shape(shape, own.shape):
            return None
        end = number + 1 if is_number else end + own.shape[dim]
    whole = replace(parts[0].logits, rows=before)
    if not same(end, whole.rows_shape[dim]):
        return None
    # Before a reshape, others have read the same rows.
    return before[:-1] if before and before[-1].kind == "reshape" else before


@rule("broadcast_tensors")
def _broadcast_tensors(known: "Interpreter", op: Op, *tensors: Any) -> tuple[Class | None, ...]:
    """Logits beside labels that are given their shape, as in `Categorical.log_prob`: the logits stay as they are."""
    operands = op.operands
    found: list[Class | None] = []
    for operand, out in zip(operands, op.output, strict=True):
        of = known.get(operand)
        if of is not None and not (isinstance(of, Class) and same_shape(out.shape, operand.shape)):
            raise Unknown
        found.append(of if isinstance(of, Class) else None)
        if of is None:
            # Who reads the whole of it, and not only its first column, needs the logits' shape, which all know.
            known.broadcast[out] = operand
    return tuple(found)


# Arithmetic.


_Scaled = TypeVar("_Scaled", bound=Class | Row)


def _scaled(of: _Scaled, factor: Fraction) -> _Scaled:
    if factor == 0:
        raise Unknown
    if isinstance(of, Row):
        return replace(of, factor=of.factor * factor) if of.is_exp else replace(of, sum=added((factor, of.sum)))
    if of.form == "exp":
        return replace(of, factor=of.factor * factor)
    is_u_alone = of.is_shifted_logits and atoms(of.rest) <= {"M", "1"}
    if not is_u_alone or (factor < 0 and (of.rest or of.logits.softcap is not None)):
        return replace(of, sum=added((factor, of.sum)))
    constant = value(of.rest).get("1", 0)
    name = "scale" if of.logits.softcap is None else "softcap"
    logits = replace(of.logits, **{name: getattr(of.logits, name) * factor})
    return replace(of, logits=logits, sum=added((1, of.sum), ((factor - 1) * constant, ONE)))


def _number(given: Any) -> Fraction:
    if isinstance(given, Tensor):
        if given.needs_grad:
            raise Unknown("with a tensor that requires a gradient")
        if not same(given.numel, 1):
            raise Unknown
    if not is_number(given):
        raise Unknown("with a number that is not known when the program is compiled")
    return Fraction(given)


@rule("mul")
def _mul(known: "Interpreter", op: Op, input: Any, other: Any) -> Value:
    a, b = known.get(input), known.get(other)
    if isinstance(a, Class) and isinstance(b, Class):
        return _weighted(a, b) if a.form == "exp" else _weighted(b, a)
    found, factor = (a, other) if a is not None else (b, input)
    if not isinstance(found, Class | Row):
        raise Unknown
    if isinstance(found, Class) and all(user.name == "sum" for user in op.output.users):
        if (of_labels := _at_one_hot(known, found, factor)) is not None:
            return of_labels
    return _with_factor(known, op, found, factor) or _scaled(found, _number(factor))


def _with_factor(known: "Interpreter", op: Op, of: Class | Row, factor: Any) -> Class | None:
    """Logits times a tensor of one number for each row, or for all, or over it, such as the temperatures of sequences.

    It is a factor of the rows of hidden states, which it rounds: a bias would not have it. So is a number that Dynamo
    has a symbol for, such as an argument that changes, or a length.
    """
    logits = of.logits
    if not isinstance(of, Class) or not of.is_logits or logits.bias is not None or logits.softcap is not None:
        return None
    if isinstance(factor, torch.SymFloat | torch.SymInt) and factor.node.has_hint():
        step = RowStep(op.name, (factor.node.expr,), given=(factor,))
        return replace(of, logits=_with_step(of, step, of.rows_shape))
    is_factor = isinstance(factor, Tensor) and factor.dtype.is_floating_point and not factor.needs_grad
    if not is_factor or factor.ndim > len(of.shape) or known.hangs_on(factor, logits):
        return None
    shape = (*(1,) * (len(of.shape) - factor.ndim), *factor.shape)
    if not all(same(size, 1) or same(size, row) for size, row in zip(shape, of.kept_shape, strict=True)):
        return None
    step = RowStep(
        op.name, (known.program.number_at(factor, op),), given=(factor,),
        factor_shape=(*shape[: of.dim], *shape[of.dim + 1 :], 1), read_at=op.position,
    )  # fmt: skip
    return replace(of, logits=_with_step(of, step, of.rows_shape))


def _at_one_hot(known: "Interpreter", of: Class, one_hot: Any) -> Class | None:
    """The product with the one-hot vectors of labels."""
    made = [one_hot] if isinstance(one_hot, Tensor) else []
    while made and (before := made[-1].op) is not None and before.name in COPIES:
        made.append(before.operands[0])
    op = made[-1].op if made and not any(map(known.program.may_have_changed, made)) else None
    if op is None or op.name != "one_hot" or of.form == "p" or not same_shape(one_hot.shape, of.shape):
        return None
    index = op.operands[0]
    if of.dim != len(of.shape) - 1 or known.hangs_on(index, of.logits):
        return None
    return replace(of, labels=Labels((index,), (known.program.number_at(index, op),), op.position))


def _weighted(p: Class, of: Class) -> Class:
    """The product p (a u + r)."""
    is_p = replace(p, factor=Fraction(1)).is_probability
    if not is_p or p.logits != of.logits or p.dim != of.dim or of.form or not same_shape(p.shape, of.shape):
        raise Unknown
    return replace(of, form="p", sum=added((p.factor, of.sum)), p_has_grad=has_grad(p.sum))


@rule("div")
def _div(known: "Interpreter", op: Op, input: Any, other: Any, *, rounding_mode: str | None = None) -> Value:
    a, b = known.get(input), known.get(other)
    if rounding_mode is not None or a is None:
        raise Unknown
    if isinstance(a, Class) and isinstance(b, Row):
        # exp(s) / exp(t), as in a softmax that is spelled out.
        if a.form != "exp" or not b.is_exp or not known.is_row_of(b, a) or op.output.dtype != input.dtype:
            raise Unknown
        return replace(a, sum=added((1, a.sum), (-1, b.sum)), factor=a.factor / b.factor)
    if not isinstance(a, Class | Row):
        raise Unknown
    if (found := _with_factor(known, op, a, other)) is not None:
        return found
    number = _number(other)
    if number == 0:
        raise Unknown
    return _scaled(a, 1 / number)


@rule("neg")
def _neg(known: "Interpreter", op: Op, input: Class | Row) -> Value:
    return _scaled(input, Fraction(-1))


@rule("add", "sub")
def _add(known: "Interpreter", op: Op, input: Any, other: Any, *, alpha: Any = 1) -> Value:
    if alpha != 1:
        raise Unknown
    sign = 1 if op.name == "add" else -1
    a, b = known.get(input), known.get(other)
    if isinstance(a, Row) and isinstance(b, Row):
        return _sum_of_rows(a, b, sign)
    if isinstance(a, Class) and isinstance(b, Row):
        if not known.is_row_of(b, a) or b.is_exp or a.form or b.labels is not None:
            raise Unknown
        return replace(a, sum=added((1, a.sum), (sign, b.sum)))
    if isinstance(a, Class) and isinstance(b, Class):
        if a.logits == b.logits and a.dim == b.dim and not a.form and not b.form and same_shape(a.shape, b.shape):
            return replace(a, sum=added((1, a.sum), (sign, b.sum)))
        if sign == 1:
            return _sum_of_linears(known, a, b, op)
        raise Unknown
    of, bias = (a, other) if isinstance(a, Class) else (b, input)
    if isinstance(of, Class) and not of.form and is_number(bias) and (sign == 1 or of is a):
        return replace(of, sum=added((1, of.sum), (sign * Fraction(bias), ONE)))
    if not isinstance(of, Class) or not isinstance(bias, Tensor) or sign != 1:
        raise Unknown
    return _with_bias(of, bias, known.program.changes_before(op, bias))


def _sum_of_rows(a: Row, b: Row, sign: int) -> Row:
    b = _in_terms_of(b, a.logits) or b
    a = a if a.logits == b.logits else _in_terms_of(a, b.logits) or a
    labels = [row.labels for row in (a, b) if row.labels is not None]
    is_one = len(set(labels)) <= 1
    if a.logits != b.logits or a.is_exp or b.is_exp or not is_one or not same_shape(a.shape, b.shape):
        raise Unknown
    first = min(labels, key=lambda each: each.read_at, default=None)
    return replace(a, sum=added((1, a.sum), (sign, b.sum)), labels=first)


def _in_terms_of(row: Row, logits: Logits) -> Row | None:
    """u_y, a mean or a maximum, of the same logits without their last factor; None where that can't be said."""
    own = row.logits
    if own.softcap is not None or replace(own, scale=logits.scale) != logits:
        return None
    ratio = own.scale / logits.scale
    if ratio == 1 or not atoms(row.sum) <= ({"y", "U"} if ratio < 0 else {"y", "U", "M"}):
        return row if ratio == 1 else None
    return replace(row, logits=logits, sum=added((ratio, row.sum)))


def _with_bias(of: Class, bias: Tensor, changes: int) -> Class:
    logits = of.logits
    is_plain = of.is_logits and of.dim == len(of.shape) - 1 and logits.is_linear and len(of.shape) > 1
    is_row = bias.ndim <= len(of.shape) and same_shape(bias.shape, (*[1] * (bias.ndim - 1), of.columns))
    if not is_plain or not is_row:
        raise Unknown
    if logits.bias is not None or logits.scale != 1:
        raise Unknown("with a bias after another or after a factor")
    if logits.group is not None:
        raise Unknown("with a bias that is not divided among ranks")
    terms = tuple(
        replace(term, has_grad=term.has_grad and has_grad(of.sum), changes=term.changes + changes)
        for term in logits.terms
    )
    logits = replace(logits, terms=terms, bias=bias, bias_has_grad=bias.needs_grad)
    return replace(of, logits=logits, sum=poly(u=1))


def _sum_of_linears(known: "Interpreter", a: Class, b: Class, op: Op) -> Class:
    """Such as x @ W.T + y @ B.T, a head and its low-rank adapter: the terms of both."""
    both = (a, b)
    alike = a.dim == b.dim == len(a.shape) - 1 and same_shape(a.shape, b.shape) and a.logits.group == b.logits.group
    is_plain = all(of.is_logits and of.logits.is_linear and not of.logits.rows for of in both)
    if not alike or not is_plain or all(of.logits.bias is not None for of in both):
        raise Unknown
    scale = a.logits.scale
    if scale != b.logits.scale:
        # The factor of a term multiplies its input, which rounds it; that of a bias has no such place.
        if any(of.logits.bias is not None and of.logits.scale != 1 for of in both):
            raise Unknown
        scale = Fraction(1)
    terms = [
        replace(term, factor=term.factor * of.logits.scale / scale, has_grad=term.has_grad and has_grad(of.sum))
        for of in both
        for term in of.logits.terms
    ]
    head = max(terms, key=lambda term: hint(term.features))
    with_bias = a if b.logits.bias is None else b
    logits = replace(
        a.logits,
        terms=(head, *(term for term in terms if term is not head)),
        scale=scale,
        bias=with_bias.logits.bias,
        bias_has_grad=with_bias.logits.bias_has_grad and has_grad(with_bias.sum),
    )
    return replace(a, logits=logits, sum=poly(u=1))


@rule("tanh", "sigmoid")
def _capped(known: "Interpreter", op: Op, input: Class) -> Class:
    """sigmoid(u) is (1 + tanh(u / 2)) / 2."""
    logits, shift = input.logits, value(input.rest).get("1", Fraction(0))
    if not input.is_shifted_logits or not atoms(input.rest) <= {"1"} or logits.softcap is not None:
        raise Unknown("after their maximum was subtracted" if "M" in atoms(input.sum) else "")
    if shift and (op.operands[0].dtype != logits.dtype or logits.group is not None):
        # A region adds it in the linear's dtype, and ranks have parts of the vocabulary.
        raise Unknown("after a constant was added")
    if op.name == "tanh":
        return replace(input, logits=replace(logits, softcap=Fraction(1), shift=shift), sum=input.u)
    half = Fraction(1, 2)
    logits = replace(logits, scale=half * logits.scale, shift=half * shift, softcap=half)
    return replace(input, logits=logits, sum=added((1, input.u), (half, ONE)))


@rule("exp")
def _exp(known: "Interpreter", op: Op, input: Class | Row) -> Value:
    if isinstance(input, Row) and not input.is_exp:
        return replace(input, is_exp=True)
    if not isinstance(input, Class) or not input.is_shifted_logits:
        raise Unknown
    return replace(input, form="exp")


@rule("log")
def _log(known: "Interpreter", op: Op, input: Class | Row) -> Value:
    """Where a probability underflows, the region has the finite log_softmax, and PyTorch minus infinity."""
    if input.factor != 1:
        raise Unknown
    if isinstance(input, Row) and input.is_exp:
        return replace(input, is_exp=False)
    if not isinstance(input, Class) or input.form != "exp":
        raise Unknown
    return replace(input, form="")


@rule("clamp", "clamp_min")
def _clamp(known: "Interpreter", op: Op, input: Class, min: Any = None, max: Any = None) -> Class:
    """Only -inf is changed, as by `Categorical.entropy`, lest its product with a probability of 0 be NaN."""
    if max is not None or not isinstance(min, float) or min != torch.finfo(op.output.dtype).min:
        raise Unknown
    return input


# From logits to log-probabilities, and to one number of each row.


def _wrong_dimension(known: "Interpreter", of: Class, detail: str) -> Exception:
    """Why a loss is not over the classes; a contrastive loss compares all pairs both ways."""
    return Unknown() if known.is_similarity(of.logits) else NotFused(Reason.CLASS_DIMENSION, detail)


@rule("log_softmax")
def _log_softmax(
    known: "Interpreter", op: Op, input: Class, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None
) -> Class:
    dim = int(len(input.shape) not in (0, 1, 3)) if dim is None else dim
    if dim % len(input.shape) != input.dim:
        raise _wrong_dimension(known, input, f"{op.name} over dimension {dim}")
    _copied(known, op, input)
    if not input.is_shifted_logits:
        raise Unknown(f"after {'softmax' if input.form else 'a factor'}")
    return replace(input, sum=added((1, input.u), (-1, with_u_as("L", input.u))))


@rule("softmax")
def _softmax(known: "Interpreter", op: Op, input: Class, dim: int | None = None, *args: Any, **kwargs: Any) -> Class:
    return replace(_log_softmax(known, op, input, dim), form="exp")


@rule("logsumexp")
def _logsumexp(known: "Interpreter", op: Op, input: Class, dim: Any, keepdim: bool = False) -> Row:
    _over_classes(input, dim)
    if not input.is_shifted_logits:
        raise Unknown
    return Row(input.logits, op.output.shape, with_u_as("L", input.sum))


@rule("sum")
def _sum(
    known: "Interpreter", op: Op, input: Class, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Row:
    _copied(known, op, input)
    if dim is None and len(input.shape) > 1 and not keepdim and (found := _summed(input, input.rows_shape)).is_whole:
        return replace(found, reduction="sum")
    _over_classes(input, dim)
    return _summed(input, op.output.shape)


@rule("mean")
def _mean(
    known: "Interpreter", op: Op, input: Class, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Row:
    found = _scaled(_sum(known, op, input, dim, keepdim), 1 / Fraction(_columns(input)))
    if found.reduction == "none":
        return found
    if not has_elements(op.operands[0]):
        raise Unknown("of no tokens, or of as many as values say")
    return replace(found, reduction="mean")


def _columns(of: Class) -> int:
    # A symbol would have to become a number, and the program would be compiled for each.
    if type(of.columns) is not int:
        raise Unknown("over a number of classes that is not known when the program is compiled")
    return of.columns


def _summed(of: Class, shape: tuple[Any, ...]) -> Row:
    """Σ exp(u + r), Σ p (a u + r), or Σ (a u + r); or the only summand that is not 0."""
    if of.labels is not None:
        of_label = with_u_as("y", of.sum)
        return Row(of.logits, shape, of_label, is_exp=of.form == "exp", factor=of.factor, labels=of.labels)
    if not of.form:
        return Row(of.logits, shape, added((_columns(of), with_u_as("U", of.sum))))
    if of.form == "exp" and of.of_u == 1:
        return Row(of.logits, shape, with_u_as("L", of.sum), is_exp=True, factor=of.factor)
    if of.form != "p":
        raise Unknown
    # Σ p u = E. Without p's gradient, that of Σ p u is p, which is L's; without u's, it is what is left of E's.
    expected = poly(E=1) if of.p_has_grad else without_grad(poly(E=1))
    own, log_sum = of.of_u * (has_grad(of.u) - of.p_has_grad), poly(L=1)
    of_row = added((1, of.rest), (of.of_u, expected), (own, log_sum), (-own, without_grad(log_sum)))
    return Row(of.logits, shape, of_row)


@rule("entr")
def _entr(known: "Interpreter", op: Op, input: Class) -> Class:
    return _scaled(_xlogy(known, op, input, input), Fraction(-1))


@rule("xlogy")
def _xlogy(known: "Interpreter", op: Op, input: Class, other: Class) -> Class:
    if other.form != "exp" or other.factor != 1:
        raise Unknown
    return _weighted(input, replace(other, form=""))


@rule("amax")
def _amax(known: "Interpreter", op: Op, input: Class, dim: Any = (), keepdim: bool = False) -> Row:
    _over_classes(input, dim)
    if input.form == "p" or input.of_u <= 0 or input.factor <= 0:
        raise Unknown
    maximum = with_u_as("M", input.sum)
    return Row(input.logits, op.outs[0].shape, maximum, is_exp=input.form == "exp", factor=input.factor)


@rule("max")
def _max(known: "Interpreter", op: Op, input: Class, dim: Any = None, keepdim: bool = False) -> tuple[Value, ...]:
    if dim is None or isinstance(dim, Tensor):
        raise Unknown
    values, indices = op.output
    found = _argmax(known, op, input, dim), _amax(known, op, input, dim)
    return replace(found[1], shape=values.shape), replace(found[0], shape=indices.shape)


@rule("argmax")
def _argmax(known: "Interpreter", op: Op, input: Class, dim: Any = None, keepdim: bool = False) -> Argmax:
    _over_classes(input, dim)
    # Several exponentials may be infinite.
    if input.form == "p" or (input.form == "exp" and not input.detached().is_probability) or not input.of_u:
        raise Unknown
    order = input.logits.in_order
    return Argmax(order if input.of_u > 0 else replace(order, scale=-order.scale), op.outs[-1].shape)


@rule("gather")
def _gather(known: "Interpreter", op: Op, input: Class, dim: int, index: Tensor, **kwargs: Any) -> Row:
    _over_classes(input, dim)
    is_one = index.ndim == len(input.shape) and same(index.shape[input.dim], 1)
    sizes = [size for at, size in enumerate(index.shape) if at != input.dim]
    if not is_one or not all(map(agree, sizes, input.rows_shape)):
        raise Unknown(f"labels of shape {_text(index.shape)} for logits of shape {_text(input.shape)}")
    return _at_labels(known, op, input, index)


@rule("take_along_dim")
def _take_along_dim(known: "Interpreter", op: Op, input: Class, indices: Tensor, dim: int | None = None) -> Row:
    if dim is None:
        raise Unknown
    return _gather(known, op, input, dim, indices)


def _text(shape: Sequence[Any]) -> str:
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"


def _at_labels(known: "Interpreter", op: Op, of: Class, index: Tensor, *, wraps: bool = False) -> Row:
    """What is known of each class at one label of each row."""
    index = known.labels_of(index)
    if of.form == "p":
        raise Unknown
    if known.hangs_on(index, of.logits):
        # Such as a gate's experts, or a sampled token.
        raise Unknown("at a choice that depends on the logits")
    number = known.program.number_at(index, op)
    labels = Labels((index,), (number,), op.position, wraps, fills=_fills(known, index))
    of_label = with_u_as("y", of.sum)
    return Row(of.logits, op.output.shape, of_label, is_exp=of.form == "exp", factor=of.factor, labels=labels)


def _fills(known: "Interpreter", index: Tensor) -> tuple[tuple[int, int], int | None] | None:
    """`Labels.fills`, as of `labels.clamp(min=0)` or `where(labels != -100, labels, 0)`."""
    op = known.program.origin(index)
    if op is None or op.name not in ("clamp", "clamp_min", "masked_fill", "where"):
        return None
    args, number_at = [*op.args, *op.kwargs.values()], known.program.number_at
    if op.writes or len(args) < 2 or "max" in op.kwargs:
        return None
    if len(args) == 2:
        return (number_at(op.operands[0], op), None) if args[1] == 0 else None
    labels, mask, filled = args if op.name == "masked_fill" else (args[1], args[0], args[2])
    is_first = op.name == "where" and isinstance(labels, Tensor)
    if not isinstance(labels, Tensor):
        labels, filled = filled, labels
    compares = mask.op if isinstance(mask, Tensor) else None
    if compares is None or compares.name != ("ne" if is_first else "eq") or type(filled) is not int or filled:
        return None
    compared, label = compares.args
    number = number_at(labels, op)
    is_same = type(label) is int and number_at(compared, compares) == number
    return (number, label) if is_same else None


def _indexed(known: "Interpreter", op: Op, of: Class, key: tuple[Any, ...]) -> Row:
    """Logits [arange(N), labels] or [arange(B)[:, None], arange(T), labels]."""
    *rows, labels = key
    shape, rows_shape = op.output.shape, of.rows_shape
    is_of_rows = len(shape) == len(rows_shape) and all(map(agree, shape, rows_shape))
    if labels.dtype in (torch.bool, torch.uint8) or not is_of_rows:
        raise Unknown("rows picked by an index")
    if not all(known.is_every_index(part, dim, of.rows_shape) for dim, part in enumerate(rows)):
        raise Unknown("rows picked by an index")
    if not all(map(agree, labels.shape, of.rows_shape[len(of.rows_shape) - labels.ndim :])) or labels.ndim < len(rows):
        raise Unknown(f"labels of shape {_text(labels.shape)} for logits of shape {_text(of.shape)}")
    return _at_labels(known, op, of, labels, wraps=True)


# Losses.


@rule("cross_entropy", "nll_loss")
def _loss(
    known: "Interpreter", op: Op, input: Tensor, target: Tensor, weight: Tensor | None = None, size_average: Any = None,
    ignore_index: Any = -100, reduce: Any = None, reduction: Any = "mean", label_smoothing: Any = 0.0,
) -> Row:  # fmt: skip
    of = known.get(input)
    if not isinstance(of, Class):
        raise known.why_unknown(input)
    if isinstance(label_smoothing, torch.SymFloat):
        # AOTAutograd makes Dynamo trace again, with a number, and this graph is dropped.
        raise Unknown
    if isinstance(ignore_index, torch.SymInt):
        ignore_index = int(ignore_index)  # With a guard: another one compiles anew.
    if size_average is not None or reduce is not None:
        raise NotFused(Reason.DEPRECATED_ARGUMENT)
    if target.dtype.is_floating_point or target.ndim == input.ndim:
        raise NotFused(Reason.CLASS_PROBABILITIES)
    if of.dim != min(1, input.ndim - 1):
        raise _wrong_dimension(known, of, f"logits of shape {_text(input.shape)}")
    if of.form:
        raise NotFused(Reason.TRANSFORMED_LOGITS, "by softmax" if of.is_probability else "by exp")
    is_nll = op.name == "nll_loss"
    if is_nll and value(of.sum) != value(LOG_PROBABILITY):
        raise NotFused(Reason.NOT_LOG_PROBABILITIES)
    if not of.is_shifted_logits:
        raise NotFused(Reason.TRANSFORMED_LOGITS, "by a factor after log_softmax")
    if weight is not None:
        _check_class_weights(weight, of.logits)
    labels = Labels((target,), (known.program.number_at(target, op),), op.position, ignore_index=ignore_index)
    smoothing = Fraction(label_smoothing)
    if is_nll:
        # Its gradient is that of its input, also where a log-sum-exp was detached.
        of_row = added((-1, with_u_as("y", of.sum)))
    else:
        factors = {"L": 1, "y": smoothing - 1, "U": -smoothing}
        of_row = added(*((factor, with_u_as(name, of.u)) for name, factor in factors.items()))
    return Row(of.logits, target.shape, of_row, labels=labels, class_weight=weight, reduction=reduction)


def _check_class_weights(weight: Tensor, logits: Logits) -> None:
    if weight.needs_grad:
        raise NotFused(Reason.CLASS_WEIGHTS, "they require a gradient")
    if logits.vocab_size is not None:
        raise NotFused(Reason.CLASS_WEIGHTS, "for a part of the linear's vocabulary")
    if weight.dtype != logits.dtype and (weight.dtype is not torch.float32 or logits.dtype is torch.float64):
        raise NotFused(Reason.CLASS_WEIGHTS, str(weight.dtype).removeprefix("torch."))


def has_float_factors(logits: Logits) -> bool:
    """Whether scale, softcap and the factors of the terms, which may be products, and what is added are finite."""
    softcap = Fraction(1) if logits.softcap is None else logits.softcap
    factors = (softcap, logits.scale * softcap, *(term.factor for term in logits.terms))
    are_floats = all(float_info.min <= abs(factor) <= float_info.max for factor in factors)
    return are_floats and abs(logits.shift / logits.scale) <= torch.finfo(logits.dtype).max
