"""PyTorch's own losses."""

from dataclasses import replace
from fractions import Fraction
from typing import Any

import torch

from thunder_flce.matching.algebra import LOG_PROBABILITY, Class, Labels, Row, added, require, value, with_u_as
from thunder_flce.matching.decisions import NotFused, Reason
from thunder_flce.matching.interpreter import Interpreter, rule
from thunder_flce.matching.program import Op, Tensor, has_elements
from thunder_flce.matching.rules.arithmetic import times
from thunder_flce.matching.rules.distributions import sum_of_classes, weighted
from thunder_flce.matching.rules.reductions import wrong_dimension
from thunder_flce.operation.loss import NOTHING_IGNORED


@rule("cross_entropy", "nll_loss")
def _loss(
    interpreter: Interpreter, op: Op, input: Tensor, target: Tensor, weight: Tensor | None = None,
    size_average: Any = None, ignore_index: Any = -100, reduce: Any = None, reduction: Any = "mean",
    label_smoothing: Any = 0.0,
) -> Row:  # fmt: skip
    classes = interpreter.get(input)
    if not isinstance(classes, Class):
        raise interpreter.why_unknown(input)
    if any(each.is_reshaped for each in (*op.operands, *op.outs)):
        raise NotFused(Reason.OPERAND_MODIFIED, "by a reshape or detach")
    # AOTAutograd has Dynamo trace again, with a number in place of the symbol, and this graph is dropped.
    require(not isinstance(label_smoothing, torch.SymFloat))
    if isinstance(ignore_index, torch.SymInt):
        ignore_index = int(ignore_index)  # This adds a guard: for another one, the program is compiled anew.
    # That number would say that these are no losses. No row has either of them as its label.
    ignore_index = NOTHING_IGNORED - 1 if ignore_index == NOTHING_IGNORED else ignore_index
    if size_average is not None or reduce is not None:
        raise NotFused(Reason.DEPRECATED_ARGUMENT)
    teacher = interpreter.get(target)
    is_distribution = target.dtype.is_floating_point or target.ndim == input.ndim
    if is_distribution and (not isinstance(teacher, Class) or weight is not None or label_smoothing):
        raise NotFused(Reason.CLASS_PROBABILITIES)
    if classes.dim != min(1, input.ndim - 1):
        raise wrong_dimension(classes, f"logits of shape {input.shape}")
    if classes.form:
        raise NotFused(Reason.TRANSFORMED_LOGITS, "by softmax" if classes.is_probability else "by exp")
    is_nll = op.name == "nll_loss"
    if is_nll and value(classes.sum) != value(LOG_PROBABILITY):
        raise NotFused(Reason.NOT_LOG_PROBABILITIES)
    if not classes.is_shifted_logits:
        raise NotFused(Reason.TRANSFORMED_LOGITS, "by a factor after log_softmax")
    if isinstance(teacher, Class):
        losses = replace(classes, sum=added((-1, classes.u), (1, with_u_as("L", classes.u))))
        return replace(weighted(op, teacher, losses).summed(classes.rows_shape), reduction=reduction)
    if weight is not None and classes.logits.vocab_size is not None:
        raise NotFused(Reason.CLASS_WEIGHTS, "for a part of the linear's vocabulary")
    number = interpreter.program.number_at(target, op)
    labels = Labels((target,), (number,), op.position, op.source, ignore_index=ignore_index)
    smoothing = Fraction(label_smoothing)
    if is_nll:
        # Its gradient is that of its input, even if the log-sum-exp was detached.
        row_sum = added((-1, with_u_as("y", classes.sum)))
    else:
        factors = {"L": 1, "y": smoothing - 1, "U": -smoothing}
        row_sum = added(*((factor, with_u_as(name, classes.u)) for name, factor in factors.items()))
    return Row(classes.logits, target.shape, row_sum, labels=labels, class_weight=weight, reduction=reduction)


@rule("kl_div")
def _kl_div(
    interpreter: Interpreter, op: Op, input: Class, target: Class, size_average: Any = None, reduce: Any = None,
    reduction: str = "mean", log_target: bool = False,
) -> Class | Row:  # fmt: skip
    """Describes target * (log(target) - input), or a reduction of it; `log_target` says that target is a logarithm."""
    is_last = input.dim == len(input.shape) - 1 and len(input.shape) > 1
    require(size_average is None and reduce is None and is_last and target.form == ("" if log_target else "exp"))
    # `torch.kl_div` has numbers for the reductions.
    require(target.factor == 1 and reduction in ("none", "mean", "batchmean", "sum"))
    product = weighted(op, replace(target, form="exp"), sum_of_classes(op, replace(target, form=""), input, -1))
    if reduction == "none":
        return product
    total = product.summed(input.rows_shape)
    if reduction == "sum":
        return replace(total, reduction="sum")
    if reduction == "batchmean" and len(input.rows_shape) > 1:
        sequences = input.shape[0]
        require(type(sequences) is int and sequences, "over a number of sequences that changes")
        return replace(times(total, Fraction(1, sequences)), reduction="sum")
    require(has_elements(op.operands[0]))
    columns = input.known_columns if reduction == "mean" else 1
    return replace(times(total, Fraction(1, columns)), reduction="mean")
