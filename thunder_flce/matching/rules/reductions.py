"""Normalisations of logits, and reductions over the classes to a number of each row."""

from dataclasses import replace
from fractions import Fraction
from typing import Any

from thunder_flce.matching.algebra import (
    Argmax,
    Class,
    Row,
    Unknown,
    Value,
    added,
    require,
    with_u_as,
)
from thunder_flce.matching.decisions import NotFused, Reason
from thunder_flce.matching.interpreter import Interpreter, rule
from thunder_flce.matching.program import Op, Tensor, has_elements, same_shape
from thunder_flce.matching.rules.arithmetic import times
from thunder_flce.matching.rules.distributions import weighted
from thunder_flce.matching.rules.shapes import check_over_classes, copied


@rule("log_softmax")
def _log_softmax(
    interpreter: Interpreter, op: Op, input: Class, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None
) -> Class:
    dim = int(len(input.shape) not in (0, 1, 3)) if dim is None else dim
    if dim % len(input.shape) != input.dim:
        raise wrong_dimension(input, f"{op.name} over dimension {dim}")
    copied(interpreter, op, input)
    require(input.is_shifted_logits, f"after {'softmax' if input.form else 'a factor'}")
    return replace(input, sum=added((1, input.u), (-1, with_u_as("L", input.u))))


@rule("softmax")
def _softmax(
    interpreter: Interpreter, op: Op, input: Class, dim: int | None = None, *args: Any, **kwargs: Any
) -> Class:
    return replace(_log_softmax(interpreter, op, input, dim), form="exp")


def wrong_dimension(input: Class, detail: str) -> Exception:
    """Returns the exception for a loss that is not over the classes; a contrastive loss has pairs both ways."""
    return Unknown() if input.logits.is_similarity else NotFused(Reason.CLASS_DIMENSION, detail)


@rule("logsumexp")
def _logsumexp(interpreter: Interpreter, op: Op, input: Class, dim: Any, keepdim: bool = False) -> Class | Row:
    if input.labels.share and same_shape(input.shape, op.output.shape):
        return input  # This is how its operand, a stack, is described: see `distributions.is_for_logsumexp`.
    check_over_classes(input, dim)
    require(input.is_shifted_logits)
    return input.row("L", op.output.shape)


@rule("sum")
def _sum(
    interpreter: Interpreter, op: Op, input: Class, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Row:
    copied(interpreter, op, input)
    if dim is None and len(input.shape) > 1 and not keepdim and (total := input.summed(input.rows_shape)).is_whole:
        return replace(total, reduction="sum")
    check_over_classes(input, dim)
    return input.summed(op.output.shape)


@rule("mean")
def _mean(
    interpreter: Interpreter, op: Op, input: Class, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Row:
    mean = times(_sum(interpreter, op, input, dim, keepdim), Fraction(1, input.known_columns))
    if mean.reduction == "none":
        return mean
    detail = "over no tokens, or over a number of tokens that depends on the values of a tensor"
    require(has_elements(op.operands[0]), detail)
    return replace(mean, reduction="mean")


@rule("entr")
def _entr(interpreter: Interpreter, op: Op, input: Class) -> Class:
    return times(_xlogy(interpreter, op, input, input), Fraction(-1))


@rule("xlogy")
def _xlogy(interpreter: Interpreter, op: Op, input: Class, other: Class) -> Class:
    require(other.form == "exp" and other.factor == 1)
    return weighted(op, input, replace(other, form=""))


@rule("amax")
def _amax(interpreter: Interpreter, op: Op, input: Class, dim: Any = (), keepdim: bool = False) -> Row:
    check_over_classes(input, dim)
    require(input.factor_of_u > 0 and input.factor > 0)
    return input.row("M", op.outs[0].shape)


@rule("max")
def _max(interpreter: Interpreter, op: Op, input: Class, dim: Any = None, keepdim: bool = False) -> tuple[Value, ...]:
    require(dim is not None and not isinstance(dim, Tensor))
    values, indices = op.output
    results = _argmax(interpreter, op, input, dim), _amax(interpreter, op, input, dim)
    return replace(results[1], shape=values.shape), replace(results[0], shape=indices.shape)


@rule("topk")
def _topk(
    interpreter: Interpreter, op: Op, input: Class, k: Any, dim: Any = -1, largest: bool = True, sorted: bool = True
) -> tuple[Value, ...]:
    require(k == 1 and largest is True)
    return _max(interpreter, op, input, dim)


@rule("argmax")
def _argmax(interpreter: Interpreter, op: Op, input: Class, dim: Any = None, keepdim: bool = False) -> Argmax:
    check_over_classes(input, dim)
    # Exponentials may overflow to infinity in several columns, which then have no single maximum.
    require(input.form == "" or (input.form == "exp" and input.detached().is_probability))
    require(input.factor_of_u and not input.labels.are_given)
    order = input.logits.argmax_key
    return Argmax(order if input.factor_of_u > 0 else replace(order, scale=-order.scale), op.outs[-1].shape)
