"""Indexing: selects rows, the first columns of the vocabulary, or the class of one label for each row."""

from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from thunder_flce.matching.algebra import Argmax, Class, Labels, Row, RowStep, Unknown, Value, poly, require
from thunder_flce.matching.interpreter import Interpreter, rule
from thunder_flce.matching.program import (
    SPLITS,
    Op,
    Tensor,
    agree,
    depends_on_values,
    indices_of,
    is_plain,
    keeps_elements,
    same,
    tensors_in,
)
from thunder_flce.matching.rules.shapes import check_over_classes, in_shape, with_step


@rule("getitem", "select", "narrow", *SPLITS)
def _selected(
    interpreter: Interpreter, op: Op, input: Class | Row | Argmax, *args: Any, **kwargs: Any
) -> Value | tuple[Class, ...]:
    indices = indices_of(op)
    if isinstance(input, Class):
        if op.name == "getitem" and indices is None:
            return _at_tensors(interpreter, op, input, *args)
        if indices is None:
            raise Unknown("at indices that are not in order, or depend on the values of a tensor")
        return tuple(_at_index(input, index, out.shape) for index, out in zip(indices, op.outs, strict=True))
    if keeps_elements(op) and (isinstance(input, Argmax) or input.reduction == "none"):
        return replace(input, shape=op.output.shape)
    if isinstance(input, Row) or indices is None or op.name not in ("getitem", "select"):
        raise Unknown
    # Index it like logits, with the classes as the last dimension.
    columns = input.logits.terms[0].columns
    classes = Class(input.logits, len(input.shape), (*input.shape, columns), poly(u=1))
    selected = _at_index(classes, (*indices[0], slice(None)), (*op.output.shape, columns))
    return Argmax(selected.logits, op.output.shape)


@rule("index_select")
def _index_select(interpreter: Interpreter, op: Op, input: Class, dim: int, index: Tensor) -> Class:
    require(dim % len(input.shape) != input.dim)
    return _rows_at_tensors(interpreter, op, input, (*(slice(None),) * (dim % len(input.shape)), index))


def _at_tensors(interpreter: Interpreter, op: Op, input: Class, key: Any) -> Class | Row:
    key = key if isinstance(key, tuple) else (key,)
    if len(key) != len(input.shape) or not isinstance(key[-1], Tensor) or input.dim != len(input.shape) - 1:
        return _rows_at_tensors(interpreter, op, input, key)
    if key[:-1] and all(type(part) is int for part in key[:-1]):
        input, key = _select(input, (*key[:-1], slice(None)), (input.columns,)), key[-1:]
    return _indexed(interpreter, op, input, key)


def _rows_at_tensors(interpreter: Interpreter, op: Op, input: Class, key: tuple[Any, ...]) -> Class:
    """Returns the rows that tensors select, such as the last token of each sequence, or the tokens of a mask."""
    tensors = tensors_in(key)
    is_known = all(isinstance(each, Tensor) or is_plain((each,)) for each in key) and bool(tensors)
    are_rows = _keeps_last_dim(key, len(input.shape)) and is_known and input.dim == len(input.shape) - 1
    require(are_rows, "with an index that is neither an integer nor a slice, or depends on the values of a tensor")
    depends_on_logits = any(interpreter.depends_on(tensor, input.logits) for tensor in tensors)
    require(not depends_on_logits, "at rows that depend on the logits")
    number_at = interpreter.program.number_at
    numbers = repr(tree_map_only(Tensor, lambda each: (number_at(each, op), each.shape, each.dtype), key))
    # An equal mask that is computed anew gives a number of rows of its own, which is known only after that.
    step = RowStep("take", (numbers, str(op.output.shape)), operands=key, read_at=op.position)
    input = with_step(input, step, op.output.shape[:-1])
    return replace(input, shape=op.output.shape, dim=op.output.ndim - 1)


def _keeps_last_dim(key: tuple[Any, ...], ndim: int) -> bool:
    """Whether an index of a tensor of `ndim` dimensions selects nothing along the last of them."""
    ends = key[-1] is Ellipsis or (isinstance(key[-1], slice) and key[-1] == slice(None))
    # A mask indexes as many dimensions as it has.
    sizes = (each.ndim if _is_mask(each) else each is not None for each in key)
    return ends if any(each is Ellipsis for each in key) else sum(sizes) < ndim + ends


def _is_mask(index: Any) -> bool:
    """Whether an index is a mask, and no tensor of positions."""
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


def _at_index(input: Class, key: tuple[Any, ...], new_shape: tuple[Any, ...]) -> Class:
    """Returns the classes that an index of `indices_of` selects, in their new shape."""
    sizes = iter(new_shape)
    shape = tuple(size for part in key if not isinstance(part, int) for size in [next(sizes)] if part is not None)
    selected = _select(input, tuple(part for part in key if part is not None), shape)
    return selected if None not in key else in_shape(selected, new_shape)


def _select(input: Class, key: tuple[Any, ...], shape: tuple[Any, ...]) -> Class:
    """Returns the rows and first columns that numbers and slices select, one for each dimension."""
    columns, logits = key[input.dim], input.logits
    is_first = isinstance(columns, slice) and columns.step in (None, 1) and columns.start in (None, 0)
    require(is_first, "along the vocabulary")
    dim = input.dim - sum(not isinstance(part, slice) for part in key[: input.dim])
    if columns.stop is not None and not same(shape[dim], input.columns):
        # The comparison adds a guard that there are at least so many columns in every call.
        is_part = type(columns.stop) is int and columns.stop > 0 and bool(columns.stop <= input.columns)
        kept = columns.stop if is_part else shape[dim]
        require(type(kept) is int and kept and input.is_shifted_logits and not input.rest)
        logits = replace(logits, vocab_size=kept)
        shape = (*shape[:dim], kept, *shape[dim + 1 :])
    rows = (*key[: input.dim], *key[input.dim + 1 :])
    if not all(isinstance(part, slice) and (part.start, part.stop, part.step) in ALL for part in rows):
        step = RowStep("index", tuple(rows))
        input = with_step(replace(input, logits=logits), step, (*shape[:dim], *shape[dim + 1 :]))
        return replace(input, dim=dim, shape=shape)
    return replace(input, logits=logits, shape=shape)


ALL = ((None, None, None), (0, None, None), (None, None, 1), (0, None, 1))


@rule("gather")
def _gather(interpreter: Interpreter, op: Op, input: Class, dim: int, index: Tensor, **kwargs: Any) -> Row:
    check_over_classes(input, dim)
    sizes = [size for at, size in enumerate(index.shape) if at != input.dim]
    are_labels = index.ndim == len(input.shape) and all(map(agree, sizes, input.rows_shape))
    require(are_labels, f"labels of shape {index.shape} for logits of shape {input.shape}")
    row, count = _at_labels(interpreter, op, input, index), index.shape[input.dim]
    if same(count, 1):
        return row
    is_known = input.dim == len(input.shape) - 1 and not depends_on_values(count) and not same(count, 0)
    require(is_known, f"{count} labels of each row along dimension {input.dim}")
    return replace(row, labels=replace(row.labels, per_row=count))


@rule("take_along_dim")
def _take_along_dim(interpreter: Interpreter, op: Op, input: Class, indices: Tensor, dim: Any = None) -> Row:
    require(dim is not None)
    row = _gather(interpreter, op, input, dim, indices)
    if torch.__version__ < "2.10":
        return row  # For these versions, a label outside of the vocabulary is an error.
    return replace(row, labels=replace(row.labels, wraps="modulo"))


def _indexed(interpreter: Interpreter, op: Op, input: Class, key: tuple[Any, ...]) -> Row:
    """Describes logits[arange(N), labels] or logits[arange(B)[:, None], arange(T), labels]."""
    *rows, labels = key
    shape, rows_shape = op.output.shape, input.rows_shape
    keeps_rows = len(shape) == len(rows_shape) and all(map(agree, shape, rows_shape))
    require(keeps_rows and not _is_mask(labels), "rows selected by an index")
    are_all = all(interpreter.is_every_index(part, dim, rows_shape) for dim, part in enumerate(rows))
    require(are_all, "rows selected by an index")
    are_labels = labels.ndim >= len(rows) and all(map(agree, labels.shape, rows_shape[len(rows_shape) - labels.ndim :]))
    require(are_labels, f"labels of shape {labels.shape} for logits of shape {input.shape}")
    return _at_labels(interpreter, op, input, labels, wraps="end")


def _at_labels(interpreter: Interpreter, op: Op, input: Class, index: Tensor, *, wraps: str = "") -> Row:
    """Returns a number of each row: that of each class, taken at the row's label."""
    index = interpreter.labels_of(index)
    # Such as a gate's experts, or a sampled token.
    require(not interpreter.depends_on(index, input.logits), "at labels that depend on the logits")
    interpreter.demand(index, op)  # It may be another head's choice.
    number = interpreter.program.number_at(index, op)
    labels = Labels((index,), (number,), op.position, op.source, wraps, fills=_fills(interpreter, index))
    return input.row("y", op.output.shape, labels)


def _fills(interpreter: Interpreter, index: Tensor) -> tuple[tuple[int, int], int | None] | None:
    """Returns `Labels.fills`, such as of `labels.clamp(min=0)` or `where(labels != -100, labels, 0)`."""
    op = interpreter.program.origin(index)
    if op is None or op.name not in ("clamp", "clamp_min", "masked_fill", "where"):
        return None
    args, number_at = [*op.args, *op.kwargs.values()], interpreter.program.number_at
    if op.writes or len(args) < 2 or "max" in op.kwargs:
        return None
    if len(args) == 2:
        return (number_at(op.operands[0], op), None) if args[1] == 0 else None
    labels, mask, filled = args if op.name == "masked_fill" else (args[1], args[0], args[2])
    is_first = op.name == "where" and isinstance(labels, Tensor)
    if not isinstance(labels, Tensor):
        labels, filled = filled, labels
    is_as_made = isinstance(mask, Tensor) and mask not in interpreter.program.changed
    comparison = mask.op if is_as_made else None
    if comparison is None or comparison.name != ("ne" if is_first else "eq") or type(filled) is not int or filled:
        return None
    compared, label = (*comparison.args, *comparison.kwargs.values())[:2]
    number = number_at(labels, op)
    is_same = type(label) is int and number_at(compared, comparison) == number
    return (number, label) if is_same else None
