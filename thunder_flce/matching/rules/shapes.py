"""Operations that keep all elements: copies, and reshapes and permutations that keep the classes as one dimension."""

import math
from dataclasses import replace
from typing import Any

import torch

from thunder_flce.matching.algebra import Argmax, Class, Logits, Row, RowStep, Unknown, Value, require
from thunder_flce.matching.interpreter import Interpreter, rule
from thunder_flce.matching.program import COPIES, PERMUTATIONS, RESHAPES, Op, agree, order_of, same_shape


@rule(*COPIES, "detach")
def copied(interpreter: Interpreter, op: Op, input: Value, *args: Any, **kwargs: Any) -> Value:
    """Returns the input's description, for a copy; numbers of each class must not get a narrower dtype."""
    tensor, after = op.operands[0], op.output.dtype
    # Other casts would round the logits once more, or need a loss in a wider dtype.
    is_exact = tensor.dtype == after or (tensor.dtype.itemsize < 4 and after is torch.float32)
    is_number = after.is_floating_point and (is_exact or not isinstance(input, Class))
    require(is_number and op.output.device == tensor.device)
    return input


def check_over_classes(input: Class, dims: Any) -> None:
    """Raises unless `dims` is the dimension of the classes alone."""
    if dims is None and len(input.shape) == 1:
        return
    dims = dims if isinstance(dims, list | tuple) else (dims,)
    are_known = all(type(dim) is int for dim in dims)
    is_over_classes = are_known and [dim % len(input.shape) for dim in dims] == [input.dim]
    require(is_over_classes, "over other dimensions than the classes")


@rule(*RESHAPES, "expand", "expand_as", "broadcast_in_dim", "atleast_1d")
def _reshape(interpreter: Interpreter, op: Op, input: Class | Row | Argmax, *args: Any, **kwargs: Any) -> Value:
    """Describes any operation that keeps the order of the elements, and the classes as one dimension."""
    # torch.atleast_1d takes several tensors.
    is_of_rows = not isinstance(input, Row) or input.reduction == "none"
    require(is_of_rows and len(op.outs) == 1 and agree(math.prod(op.output.shape), op.operands[0].numel))
    shape = op.output.shape
    return in_shape(input, shape) if isinstance(input, Class) else replace(input, shape=shape)


def in_shape(input: Class, shape: tuple[Any, ...]) -> Class:
    """Returns the same elements in another shape; raises if the classes are no dimension of it."""
    rows_before = math.prod(input.shape[: input.dim])
    for dim in reversed(range(len(shape))):
        if agree(shape[dim], input.columns) and agree(math.prod(shape[:dim]), rows_before):
            # For one token of a symbolic length, PyTorch has the number of classes as a quotient of that length.
            return replace(input, dim=dim, shape=(*shape[:dim], input.columns, *shape[dim + 1 :]))
    raise Unknown


@rule(*PERMUTATIONS)
def _permute(interpreter: Interpreter, op: Op, input: Class, *args: Any, **kwargs: Any) -> Class:
    order, shape = order_of(op), op.output.shape
    rows, dim = tuple(d - (d > input.dim) for d in order if d != input.dim), order.index(input.dim)
    if rows != tuple(range(len(rows))):
        input = with_step(input, RowStep("permute", rows), (*shape[:dim], *shape[dim + 1 :]))
    return replace(input, dim=dim, shape=shape)


def with_step(input: Class, step: RowStep, rows_shape: tuple[Any, ...]) -> Class:
    """Returns the classes after one more step on the rows, which have the shape of `input` before it.

    A teacher's rows take the same step. The shape of the result is left to the caller.
    """
    labels, step = input.labels, replace(step, shape=rows_shape)
    require(not labels.tensors)
    if labels.teacher is not None:
        teacher = replace(labels.teacher, rows=(*rows_in_shape(labels.teacher, input.rows_shape), step))
        labels = replace(labels, teacher=teacher)
    return replace(
        input, logits=replace(input.logits, rows=(*rows_in_shape(input.logits, input.rows_shape), step)), labels=labels
    )


def rows_in_shape(logits: Logits, shape: tuple[Any, ...]) -> tuple[RowStep, ...]:
    """Returns the steps that give the rows in a shape."""
    return logits.rows if same_shape(logits.rows_shape, shape) else (*logits.rows, RowStep("reshape", shape, shape))


@rule("broadcast_tensors")
def _broadcast_tensors(interpreter: Interpreter, op: Op, *tensors: Any) -> tuple[Class | None, ...]:
    """Describes logits that are broadcast together with labels, as in `Categorical.log_prob`, and keep their shape."""
    operands = op.operands
    results: list[Class | None] = []
    for operand, out in zip(operands, op.output, strict=True):
        value = interpreter.get(operand)
        require(value is None or (isinstance(value, Class) and same_shape(out.shape, operand.shape)))
        results.append(value if isinstance(value, Class) else None)
        if value is None:
            # A user of the whole tensor, not only of its first column, needs the logits' shape, but not the logits.
            interpreter.broadcast[out] = operand
    return tuple(results)
