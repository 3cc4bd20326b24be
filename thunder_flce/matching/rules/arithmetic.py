"""Pointwise arithmetic on logits, and on numbers of each row."""

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any, TypeVar

import torch

from thunder_flce.matching.algebra import (
    ONE,
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
    require,
    value,
)
from thunder_flce.matching.interpreter import Interpreter, rule
from thunder_flce.matching.program import COPIES, Op, Tensor, constant_of, hint, is_number, same, same_shape
from thunder_flce.matching.rules.distributions import common_labels, in_one_frame, sum_of_classes, weighted
from thunder_flce.matching.rules.shapes import with_step


@rule("mul")
def _mul(interpreter: Interpreter, op: Op, input: Any, other: Any) -> Value:
    a, b = interpreter.get(input), interpreter.get(other)
    if isinstance(a, Class) and isinstance(b, Class):
        return weighted(op, a, b)
    described, factor = (a, other) if a is not None else (b, input)
    if not isinstance(described, Class | Row):
        raise Unknown
    if isinstance(described, Class) and (at_labels := at_one_hot(interpreter, op, described, factor)) is not None:
        return at_labels
    scaled = _with_factor(interpreter, op, described, factor)
    return scaled or times(described, _as_fraction(factor, interpreter))


def _with_factor(interpreter: Interpreter, op: Op, input: Class | Row, factor: Any) -> Class | None:
    """Returns logits with a tensor of factors, one for each row or for all, such as temperatures; None for others.

    The region multiplies the hidden states by the factors, which rounds them, so the logits must have no bias. A number
    for which Dynamo has a symbol, such as an argument that changes, or a length, is treated alike.
    """
    logits = input.logits
    if not isinstance(input, Class) or not input.is_logits or logits.bias is not None or logits.softcap is not None:
        return None
    if isinstance(factor, torch.SymFloat | torch.SymInt) and factor.node.has_hint():
        step = RowStep(op.name, (factor.node.expr,), operands=(factor,))
        return with_step(input, step, input.rows_shape)
    is_factor = isinstance(factor, Tensor) and factor.dtype.is_floating_point and not factor.needs_grad
    if not is_factor or factor.ndim > len(input.shape) or interpreter.depends_on(factor, logits):
        return None
    shape = (*(1,) * (len(input.shape) - factor.ndim), *factor.shape)
    if not all(same(size, 1) or same(size, row) for size, row in zip(shape, input.kept_shape, strict=True)):
        return None
    step = RowStep(
        op.name, (interpreter.program.number_at(factor, op),), operands=(factor,),
        factor_shape=(*shape[: input.dim], *shape[input.dim + 1 :], 1), read_at=op.position,
    )  # fmt: skip
    return with_step(input, step, input.rows_shape)


def at_one_hot(interpreter: Interpreter, product: Op, input: Class, one_hot: Any) -> Class | None:
    """Returns the product with one-hot vectors of labels; None if the factor is not that."""
    copies = [one_hot] if isinstance(one_hot, Tensor) else []
    while copies and (producer := copies[-1].op) is not None and producer.name in COPIES:
        copies.append(producer.operands[0])
    op = copies[-1].op if copies and interpreter.program.changed.isdisjoint(copies) else None
    if op is None or op.name != "one_hot" or not same_shape(one_hot.shape, input.shape):
        return None
    if input.form not in ("", "exp") or input.labels.are_given:
        return None
    index = op.operands[0]
    if input.dim != len(input.shape) - 1 or interpreter.depends_on(index, input.logits):
        return None
    number = interpreter.program.number_at(index, op)
    return replace(input, labels=Labels((index,), (number,), op.position, product.source))


@rule("div")
def _div(interpreter: Interpreter, op: Op, input: Any, other: Any, *, rounding_mode: str | None = None) -> Value:
    a, b = interpreter.get(input), interpreter.get(other)
    require(rounding_mode is None)
    if isinstance(a, Class) and isinstance(b, Row):
        # exp(s) / exp(t), as in a softmax that is written out.
        require(a.form == b.form == "exp" and interpreter.is_row_of(b, a) and op.output.dtype == input.dtype)
        return replace(a, sum=added((1, a.sum), (-1, b.sum)), factor=a.factor / b.factor)
    if not isinstance(a, Class | Row):
        raise Unknown
    if (scaled := _with_factor(interpreter, op, a, other)) is not None:
        return scaled
    number = _as_fraction(other, interpreter)
    require(number != 0)
    return times(a, 1 / number)


@rule("neg")
def _neg(interpreter: Interpreter, op: Op, input: Class | Row) -> Value:
    return times(input, Fraction(-1))


_Scaled = TypeVar("_Scaled", bound=Class | Row)


def times(input: _Scaled, factor: Fraction) -> _Scaled:
    """Returns a description times a number that is not 0; for logits alone, the number becomes their factor."""
    require(factor != 0 and input.form != "isinf")
    if input.form == "exp":
        return replace(input, factor=input.factor * factor)
    if isinstance(input, Row):
        return replace(input, sum=added((factor, input.sum)))
    is_u_alone = input.is_shifted_logits and atoms(input.rest) <= {"M", "1"}
    if not is_u_alone or (factor < 0 and (input.rest or input.logits.softcap is not None)):
        return replace(input, sum=added((factor, input.sum)))
    constant = value(input.rest).get("1", 0)
    name = "scale" if input.logits.softcap is None else "softcap"
    logits = replace(input.logits, **{name: getattr(input.logits, name) * factor})
    return replace(input, logits=logits, sum=added((1, input.sum), ((factor - 1) * constant, ONE)))


def _as_fraction(number: Any, interpreter: Interpreter) -> Fraction:
    if isinstance(number, Tensor):
        require(not number.needs_grad, "with a tensor that requires a gradient")
        require(same(number.numel, 1))
        number = constant_of(number, interpreter.program)
    require(is_number(number), "with a number that is not known when the program is compiled")
    return Fraction(number)


@rule("add", "sub")
def _add(interpreter: Interpreter, op: Op, input: Any, other: Any, *, alpha: Any = 1) -> Value:
    require(alpha == 1)
    sign = 1 if op.name == "add" else -1
    a, b = interpreter.get(input), interpreter.get(other)
    if isinstance(a, Row) and isinstance(b, Row):
        return _sum_of_rows(op, a, b, sign)
    if isinstance(a, Class) and isinstance(b, Row):
        require(interpreter.is_row_of(b, a) and not (b.form or a.form or b.labels.are_given or a.labels.tensors))
        return replace(a, sum=added((1, a.sum), (sign, b.sum)))
    if isinstance(a, Class) and isinstance(b, Class):
        is_linear = a.logits != b.logits and a.is_logits and b.is_logits and sign == 1
        return _sum_of_linears(interpreter, a, b, op) if is_linear else sum_of_classes(op, a, b, sign)
    classes, bias = (a, other) if isinstance(a, Class) else (b, input)
    if not isinstance(classes, Class) or not (sign == 1 or classes is a):
        raise Unknown
    if isinstance(bias, Tensor) and (constant := constant_of(bias, interpreter.program)) is not None:
        bias = constant
    if is_number(bias):
        require(not classes.form and not classes.labels.tensors)
        return replace(classes, sum=added((1, classes.sum), (sign * Fraction(bias), ONE)))
    require(isinstance(bias, Tensor) and sign == 1)
    return _with_bias(interpreter, op, classes, bias)


def _sum_of_rows(op: Op, a: Row, b: Row, sign: int) -> Row:
    b = _in_terms_of(b, a.logits) or b
    a = a if a.logits == b.logits else _in_terms_of(a, b.logits) or a
    has_two_heads = a.logits != b.logits
    a, b = in_one_frame(op, a, b)
    labels, shape = common_labels(a.labels, b.labels), next((row for row in (a, b) if row.labels.are_given), a).shape
    # A number of each row is broadcast to those of its several labels.
    row_shape = shape if same(labels.per_row, 1) else (*shape[:-1], 1)
    have_shape = all(same_shape(row.shape, shape if row.labels.are_given else row_shape) for row in (a, b))
    require(not a.form and not b.form and have_shape and a.reduction == b.reduction)
    row_sum = added((1, a.sum), (sign, b.sum))
    # Without u_y, it has a number for each label that is the same for all.
    require(row_shape is shape or "y" in atoms(row_sum))
    total = replace(a, shape=shape, sum=row_sum, labels=labels)
    require(total.divergence is not None or not has_two_heads)
    return total


def _in_terms_of(row: Row, logits: Logits) -> Row | None:
    """Returns u_y, a mean or a maximum in terms of the same logits with another factor; None if not possible."""
    row_logits = row.logits
    if row_logits.softcap is not None or replace(row_logits, scale=logits.scale) != logits:
        return None
    ratio = row_logits.scale / logits.scale
    if ratio == 1 or not atoms(row.sum) <= ({"y", "U"} if ratio < 0 else {"y", "U", "M"}):
        return row if ratio == 1 else None
    return replace(row, logits=logits, sum=added((ratio, row.sum)))


def _with_bias(interpreter: Interpreter, op: Op, input: Class, bias: Tensor) -> Class:
    logits, changes = input.logits, interpreter.program.changes_before(op, bias)
    is_plain = input.is_logits and input.dim == len(input.shape) - 1 and logits.is_linear and len(input.shape) > 1
    row_shape = [input.columns if dim == input.dim else 1 for dim in range(len(input.shape))]
    is_row = same_shape((*[1] * (len(input.shape) - bias.ndim), *bias.shape), row_shape)
    require(is_row, "with a tensor that is no bias, which has one number for each column")
    require(is_plain)
    require(logits.bias is None and logits.scale == 1, "with a bias after another or after a factor")
    require(logits.group is None, "with a bias that is not divided among ranks")
    terms = tuple(
        replace(term, has_grad=term.has_grad and has_grad(input.sum), changes=term.changes + changes)
        for term in logits.terms
    )
    logits = replace(logits, terms=terms, bias=bias, bias_has_grad=bias.needs_grad, bias_read_at=op.position)
    return replace(input, logits=logits, sum=poly(u=1))


def _sum_of_linears(interpreter: Interpreter, a: Class, b: Class, op: Op) -> Class:
    """Returns the logits with the terms of both, such as x @ W.T + y @ B.T, a head and its low-rank adapter."""
    summands = (a, b)
    alike = a.dim == b.dim == len(a.shape) - 1 and same_shape(a.shape, b.shape) and a.logits.group == b.logits.group
    is_plain = all(each.is_logits and each.logits.is_linear and not each.logits.rows for each in summands)
    require(alike and is_plain)
    with_bias = [each for each in summands if each.logits.bias is not None]
    require(len(with_bias) < 2, "of two linears that each have a bias")
    scale = a.logits.scale
    if scale != b.logits.scale:
        # The factor of a term multiplies its input, and rounds it; a bias has no factor.
        require(all(each.logits.scale == 1 for each in with_bias), "of a linear whose bias has a factor")
        scale = Fraction(1)
    terms: Sequence[Term] = [
        replace(term, factor=term.factor * each.logits.scale / scale, has_grad=term.has_grad and has_grad(each.sum))
        for each in summands
        for term in each.logits.terms
    ]
    head = max(terms, key=lambda term: hint(term.features))
    biased = with_bias[0] if with_bias else a
    bias_has_grad = biased.logits.bias_has_grad and has_grad(biased.sum)
    terms = (head, *(term for term in terms if term is not head))
    logits = replace(biased.logits, terms=terms, scale=scale, bias_has_grad=bias_has_grad)
    return replace(a, logits=logits, sum=poly(u=1))


@rule("tanh", "sigmoid")
def _capped(interpreter: Interpreter, op: Op, input: Class) -> Class:
    """sigmoid(u) is (1 + tanh(u / 2)) / 2."""
    logits, shift = input.logits, value(input.rest).get("1", Fraction(0))
    is_known = input.is_shifted_logits and atoms(input.rest) <= {"1"} and logits.softcap is None
    require(is_known, "after their maximum was subtracted" if "M" in atoms(input.sum) else "")
    # A region adds it in the linear's dtype, and each rank has only a part of the vocabulary.
    may_shift = op.operands[0].dtype == logits.dtype and logits.group is None
    require(not shift or may_shift, "after a constant was added")
    if op.name == "tanh":
        return replace(input, logits=replace(logits, softcap=Fraction(1), shift=shift), sum=input.u)
    half = Fraction(1, 2)
    logits = replace(logits, scale=half * logits.scale, shift=half * shift, softcap=half)
    return replace(input, logits=logits, sum=added((1, input.u), (half, ONE)))


@rule("exp")
def _exp(interpreter: Interpreter, op: Op, input: Class | Row) -> Value:
    require(not input.form and (isinstance(input, Row) or input.is_shifted_logits))
    return replace(input, form="exp")


@rule("log")
def _log(interpreter: Interpreter, op: Op, input: Class | Row) -> Value:
    """If a probability underflows, the region has the finite log_softmax, and PyTorch minus infinity."""
    require(input.form == "exp" and input.factor == 1 and not (isinstance(input, Class) and input.labels.tensors))
    return replace(input, form="")


@rule("clamp", "clamp_min")
def _clamp(interpreter: Interpreter, op: Op, input: Class, min: Any = None, max: Any = None) -> Class:
    """Describes a clamp of -inf alone, as in `Categorical.entropy`, where 0 times -inf would be NaN."""
    require(max is None and isinstance(min, float) and min == torch.finfo(op.output.dtype).min)
    return input
