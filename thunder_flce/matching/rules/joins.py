"""Joins of rows of the same logits, such as the chunks of a batch or the sequences of packed tokens."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from thunder_flce.matching.algebra import NO_LABELS, Class, Labels, Row, RowStep, require
from thunder_flce.matching.interpreter import Interpreter, rule
from thunder_flce.matching.program import COPIES, Op, Tensor, agree, indices_of, same, same_shape
from thunder_flce.matching.rules.distributions import is_for_logsumexp, logaddexp
from thunder_flce.matching.rules.selections import ALL
from thunder_flce.matching.rules.shapes import rows_in_shape


@rule("stack", "cat")
def _join(interpreter: Interpreter, op: Op, tensors: Sequence[Tensor], dim: int = 0) -> Class | Row:
    """Describes joined rows of the same logits, such as the sequences of a batch, or those of the token before each."""
    operands: list[Any] = [interpreter.get(each) for each in tensors]
    if is_for_logsumexp(op, interpreter.program):
        require(len(operands) == 2 and all(isinstance(each, Class) for each in operands))
        return logaddexp(interpreter, op, *operands)
    are_plain = all(isinstance(each, Class | Row) and each.labels.teacher is None for each in operands)
    require(are_plain, "with other tensors")
    have_one_input = len({each.logits.terms[0].input for each in operands}) == 1
    operands = operands if have_one_input else [_as_rows_of_whole_input(interpreter, each) for each in operands]
    first, shape = operands[0], op.output.shape

    def without_rows(part: Any) -> Any:
        bare = replace(part, logits=replace(part.logits, rows=()), shape=(), labels=NO_LABELS)
        return bare, bool(part.labels.tensors), len(part.shape)

    require(all(without_rows(each) == without_rows(first) for each in operands), "with other tensors")
    row_steps = [part.logits.rows for part in operands]
    # A region would compute their logits twice.
    require(all(row_steps.count(rows) == 1 for rows in row_steps), "of the same rows twice")
    terms = (
        replace(group[0], outputs=tuple(out for term in group for out in term.outputs))
        for group in zip(*(part.logits.terms for part in operands), strict=True)
    )
    whole = replace(first.logits, terms=tuple(terms))
    dim, new_size = dim % len(shape), (1,) * (op.name == "stack")
    parts = [replace(part, shape=(*part.shape[:dim], *new_size, *part.shape[dim:])) for part in operands]
    rows_dim, rows_shape = dim, shape
    if isinstance(first, Class):
        classes = first.dim + (bool(new_size) and dim <= first.dim)
        require(dim != classes)
        parts = [replace(part, dim=classes) for part in parts]
        rows_dim, rows_shape = dim - (dim > classes), _without(shape, classes)
    rows = _undivided_rows(operands, rows_dim)
    if rows is None or not have_one_input:
        interpreter.has_joined = True
        require(interpreter.joins)
    if rows is None:
        steps = (rows_in_shape(part.logits, _rows_shape(part)) for part in parts)
        rows = (RowStep("cat", (rows_dim, *steps), rows_shape),)
    return replace(parts[0], logits=replace(whole, rows=rows), shape=shape, labels=_joined_labels(parts, dim))


def _joined_labels(parts: Sequence[Class | Row], dim: int) -> Labels:
    pairs = [(part.labels, part.shape) for part in parts if part.labels.tensors]
    for labels, shape in pairs:
        # Labels that were joined before must have been joined along the same dimension.
        is_same = all(same_shape(_without(each, dim), _without(shape, dim)) for each in labels.shapes)
        require(same(labels.per_row, 1) and labels.wraps == pairs[0][0].wraps)
        require(not labels.shapes or (is_same and labels.dim == dim))
    if not pairs:
        return NO_LABELS
    return replace(
        min((labels for labels, _ in pairs), key=lambda each: each.read_at),
        tensors=tuple(each for labels, _ in pairs for each in labels.tensors),
        numbers=tuple(each for labels, _ in pairs for each in labels.numbers),
        shapes=tuple(each for labels, shape in pairs for each in labels.shapes or (shape,)),
        dim=dim,
    )


def _rows_shape(part: Class | Row) -> tuple[Any, ...]:
    return part.rows_shape if isinstance(part, Class) else part.shape


def _without(shape: tuple[Any, ...], dim: int) -> tuple[Any, ...]:
    return (*shape[:dim], *shape[dim + 1 :])


def _as_rows_of_whole_input(interpreter: Interpreter, part: Class | Row) -> Class | Row:
    """Describes logits of some rows of a tensor, such as a chunk, as rows of the logits of the whole tensor."""
    (term, *others), rows = part.logits.terms, part.logits.rows
    input = term.input
    while (op := input.op) is not None and op.operands and op.operands[0].needs_grad == input.needs_grad:
        source = interpreter.first_of(op.operands[0], op)
        if op.name in COPIES:
            is_exact = input.dtype in (source.dtype, term.dtype) and input.device == source.device
            if not is_exact or not interpreter.program.changed.isdisjoint((source, input)):
                break
        else:
            indices = indices_of(op)
            index = indices[op.outs.index(input)] if indices else (None,)
            if None in index or index[-1] != slice(None):
                break
            rows = (RowStep("index", index[:-1], input.shape[:-1]), *rows)
        input = source
    if others or term.hidden_dim != term.input.ndim - 1:
        return part
    term = replace(term, input=input, hidden_dim=input.ndim - 1)
    return replace(part, logits=replace(part.logits, terms=(term,), rows=rows))


def _undivided_rows(parts: Sequence[Class | Row], dim: int) -> tuple[RowStep, ...] | None:
    """Returns the steps to the undivided rows, if the parts are all of these, in order along a dimension; else None."""
    common = parts[0].logits.rows[:-1]
    end: Any = 0
    for number, part in enumerate(parts):
        *earlier, step = part.logits.rows or (None,)
        if step is None or step.kind != "index" or tuple(earlier) != common or dim >= len(step.argument):
            return None
        index, rest = step.argument[dim], (*step.argument[:dim], *step.argument[dim + 1 :])
        is_number, has_step = type(index) is int, isinstance(index, slice) and index.step not in (None, 1)
        are_all = all(isinstance(each, slice) and (each.start, each.stop, each.step) in ALL for each in rest)
        is_next = index == number if is_number else isinstance(index, slice) and agree(index.start or 0, end)
        # The rows may have been reshaped before they were divided, but since then only got dimensions of size 1 behind.
        shape = _rows_shape(part)
        is_in_shape = same_shape(shape, (*step.shape, *(1,) * (len(shape) - len(step.shape))))
        if not are_all or not is_next or has_step or not is_in_shape:
            return None
        end = number + 1 if is_number else end + step.shape[dim]
    whole = replace(parts[0].logits, rows=common)
    if not agree(end, whole.rows_shape[dim]):
        return None
    # Without a reshape at the end, these are the rows that other operations read.
    return common[:-1] if common and common[-1].kind == "reshape" else common
