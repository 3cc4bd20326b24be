"""Products with a head's probabilities p or a teacher's q, such as the summands of entropies and of divergences."""

import math
from dataclasses import replace
from fractions import Fraction
from typing import Any, TypeVar

import torch

from thunder_flce.matching.algebra import (
    NO_LABELS,
    ONE,
    Atom,
    Class,
    Labels,
    Row,
    Unknown,
    added,
    has_grad,
    linears_of,
    require,
    value,
)
from thunder_flce.matching.interpreter import Interpreter, rule
from thunder_flce.matching.program import Op, Program, is_number, same_shape


def have_same_shape(a: Class, b: Class) -> bool:
    """Whether tensors have the same shape, and the classes as the same dimension."""
    return a.dim == b.dim and same_shape(a.shape, b.shape)


def weighted(op: Op, a: Class, b: Class) -> Class:
    """Returns the product of p or q, which may have a factor, and numbers of each class, by its sum over these."""
    probabilities, other = (a, b) if a.form == "exp" else (b, a)
    require(replace(probabilities, factor=Fraction(1)).is_probability and have_same_shape(probabilities, other))
    require(not other.form and not other.labels.tensors)
    p_has_grad = has_grad(probabilities.sum)
    if probabilities.logits == other.logits:
        product = other.times_p(p_has_grad=p_has_grad)
    elif p_has_grad:
        product = _in_frame_of(op, probabilities, other).times_p(p_has_grad=True)
    else:
        labels = other.labels if other.labels.are_given else _labels_of_teacher(op, probabilities)
        require(labels.teacher == probabilities.logits)
        product = other.times_q(labels)
    return replace(product, sum=added((probabilities.factor, product.sum)))


def _labels_of_teacher(op: Op, teacher: Class | Row, share: float = 0.0) -> Labels:
    """Returns a teacher's distribution as the labels of a student."""
    return Labels((), (), op.position, op.source, teacher=teacher.logits, share=share)


_Described = TypeVar("_Described", bound=Class | Row)


def _in_frame_of(op: Op, student: Class | Row, teacher: _Described) -> _Described:
    """Describes a teacher's numbers, a multiple of its log-probabilities or of its entropy, beside a student."""
    require(not has_grad(teacher.sum), "of two heads that both require a gradient")
    are_log_probabilities = isinstance(teacher, Class) and not teacher.form
    teachers = (teacher.logits, None) if are_log_probabilities else (teacher.logits,)
    require(not (teacher.labels.are_given or student.labels.tensors) and student.labels.teacher in teachers)
    name, expected = ("log q", {"u": 1, "L": -1}) if are_log_probabilities else ("q log q", {"E": 1, "L": -1})
    factor = -value(teacher.sum).get("L", Fraction(0))
    require(factor and value(teacher.sum) == {atom: factor * each for atom, each in expected.items()})
    labels, atom = _labels_of_teacher(op, teacher), Atom(name, has_grad=False)
    return replace(teacher, logits=student.logits, sum=((atom, factor),), labels=labels)


def in_one_frame(op: Op, a: _Described, b: _Described) -> tuple[_Described, _Described]:
    """Describes two tensors as numbers of one student, if one of them is a teacher's; `Unknown` if none can be."""
    if a.logits == b.logits:
        return a, b
    try:
        return _in_frame_of(op, b, a), b
    except Unknown:
        return a, _in_frame_of(op, a, b)


def common_labels(a: Labels, b: Labels) -> Labels:
    """Returns the labels of a sum, from those of its summands."""
    given = [labels for labels in (a, b) if labels.are_given] or [a]
    # Log-probabilities of a teacher have no mixture.
    labels = next((each for each in given if each.share), min(given, key=lambda each: each.read_at))
    require(all(each == labels or each == replace(labels, share=0.0) for each in given))
    return labels


def sum_of_classes(op: Op, a: Class, b: Class, sign: int) -> Class:
    """Returns the sum of numbers, or of products, of each class, or the difference if `sign` is -1."""
    require(have_same_shape(a, b) and a.form == b.form)
    if a.form == "exp":
        factor = a.factor + b.factor
        require(sign == 1 and factor)
        shares = (float(a.factor / factor), float(b.factor / factor))
        return replace(_log_mixture(op, replace(a, form=""), replace(b, form=""), shares), form="exp", factor=factor)
    require(a.form in ("", "product"))
    a, b = in_one_frame(op, a, b)
    require(a.form or not (a.labels.tensors or b.labels.tensors) or a.labels == b.labels)
    return replace(a, sum=added((1, a.sum), (sign, b.sum)), labels=common_labels(a.labels, b.labels))


@rule("logaddexp")
def logaddexp(interpreter: Interpreter, op: Op, input: Class, other: Class) -> Class:
    """Describes log m, as of log q + log β and log p + log(1 - β)."""
    constants = [value(each.sum).get("1", Fraction(0)) for each in (input, other)]
    require(max(constants) < 0)
    a, b = (
        replace(each, sum=added((1, each.sum), (-constant, ONE)))
        for each, constant in zip((input, other), constants, strict=True)
    )
    shares = math.exp(constants[0]), math.exp(constants[1])
    # The program may have rounded them to float32.
    require(math.isclose(sum(shares), 1, abs_tol=1e-6))
    return _log_mixture(op, a, b, shares)


def is_for_logsumexp(stack: Op, program: Program) -> bool:
    """Whether all that a program computes of a stack of tensors is their logsumexp."""
    if stack.name != "stack" or len(stack.output.users) != 1 or stack.output in program.results:
        return False
    (user,), dim = stack.output.users, (*stack.args[1:], *stack.kwargs.values(), 0)[0]
    return user.name == "logsumexp" and (*user.args[1:], *user.kwargs.values()) in [(dim,), ((dim,),), ([dim],)]


def _log_mixture(op: Op, a: Class, b: Class, shares: tuple[float, float]) -> Class:
    """Returns log m, from the log-probabilities of two distributions, one of which is a teacher's, and their shares."""
    require(have_same_shape(a, b) and a.logits != b.logits and a.are_log_probabilities and b.are_log_probabilities)
    teacher, student, share = (b, a, shares[1]) if has_grad(a.sum) else (a, b, shares[0])
    require(not has_grad(teacher.sum) and 0 < share < 1)
    log_m = ((Atom("log m", has_grad(student.sum)), Fraction(1)),)
    return replace(student, sum=log_m, labels=_labels_of_teacher(op, teacher, share))


@rule("isinf")
def _isinf(interpreter: Interpreter, op: Op, input: Class) -> Class:
    require(input.is_logits)
    return replace(input, form="isinf")


@rule("or_", "bitwise_or", "logical_or")
def _or(interpreter: Interpreter, op: Op, input: Class, other: Class) -> Class:
    require(input.form == other.form == "isinf" and have_same_shape(input, other))
    return input


@rule("masked_fill")
def _masked_fill(interpreter: Interpreter, op: Op, input: Class, mask: Class, value: Any) -> Class:
    """Describes a summand of a divergence with 0 where a logit is infinite, as DistiLLM and torchtune have it.

    A region does not fill it: only an overflow makes a head's logits infinite, except in float16.
    """
    linears = linears_of(mask.logits, NO_LABELS)
    is_known = mask.form == "isinf" and linears <= linears_of(input.logits, input.labels) and is_number(value)
    require(is_known and value == 0 and same_shape(mask.shape, input.shape))
    require(input.logits.dtype is not torch.float16 and (input.form == "product" or bool(input.labels.tensors)))
    return input
