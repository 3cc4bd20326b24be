"""Writes a trace anew: a region in place of each linear and what is computed from its logits, each with its plan."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import thunder.torch as ltorch
import torch
from thunder.core import dtypes
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol

from thunder_flce.engine.plan import RECOMPUTE_LOGITS, SAVE_LOGITS
from thunder_flce.graph import symbols
from thunder_flce.graph.decisions import Decision, source_of
from thunder_flce.graph.matching.logits_path import LogitsPath, Term
from thunder_flce.graph.matching.losses import CrossEntropy
from thunder_flce.graph.matching.match import Match, Result
from thunder_flce.graph.matching.trace_index import TraceIndex, carries_grad, is_static, loss_dtype
from thunder_flce.graph.matching.upstream import WeightedSum, factors_after
from thunder_flce.graph.rules import PlannedRegion
from thunder_flce.graph.thunder_private import TraceSubstitutionProcessor
from thunder_flce.graph.trace_arguments import region_arguments
from thunder_flce.operation.call import named_tensors, operand_names
from thunder_flce.operation.loss import DIFFERENTIABLE_OUTPUTS, Loss
from thunder_flce.operation.pointwise import TokenLoss
from thunder_flce.options import Options
from thunder_flce.vocab_parallel import as_literal

RegionPlanner = Callable[[Mapping[str, Any], tuple[str, ...]], PlannedRegion]
"""From the arguments of a region, and the names of the operands that need a gradient, to its plan."""


class Rewrite(TraceSubstitutionProcessor):
    """Puts regions in place of matches, and gives those that are there a plan."""

    def __init__(
        self,
        index: TraceIndex,
        matches: list[Match],
        *,
        planner: RegionPlanner,
        options: Options,
        decisions: list[Decision],
    ):
        super().__init__(index.trace)
        self._matches = {id(match.place): match for match in matches}
        self._index, self._need_grad = index, index.need_grad
        self._plan, self._options = planner, options
        self._decisions = decisions
        self._replaced = {id(bsym) for match in matches for bsym in match.replaced}
        self._missing = self._further_results()
        """The names of the results after the first whose region is not written yet, and of what depends on them."""
        self._waiting: list[BoundSymbol] = []
        """Operations that use what is missing, so that they have to move after a region."""

    def process_bsym(self, bsym: BoundSymbol) -> None:
        """Called by thunder for each operation of the trace, in order."""
        if id(bsym) in self._replaced:
            return
        match = self._matches.get(id(bsym))
        if match is None:
            has_to_wait = any(arg.name in self._missing for arg in bsym.flat_proxy_args)
        else:
            has_to_wait = self._waits(match)
        if has_to_wait:
            self._missing |= {out.name for out in bsym.flat_proxy_outs}
            self._waiting.append(bsym)
        elif match is not None:
            self._fuse(self._matches.pop(id(bsym)))
        elif symbols.is_region(bsym) and is_static(*bsym.flat_args):
            self.add_bsyms_from_function(self._planned, bsym, tags=bsym.tags)
        else:
            self.add_processed_bsyms([bsym.from_bsym()])
            self.set_result(bsym.output)

    def _waits(self, match: Match) -> bool:
        """Whether a region reads what another one gives that is not written yet.

        Its first result may be computed from further ones, such as a log-sum-exp: these need not be there.
        """
        given = {name for other in self._matches.values() if other is not match for name in other.given}
        return not given.isdisjoint(self._index.computed_from(match.read, without=match.own))

    def _further_results(self) -> set[str]:
        return {name for match in self._matches.values() for name in match.further}

    def _fuse(self, match: Match) -> None:
        """Puts the region in place of its first result, and after it the operations that wait for another one.

        Those that wait for another region, too, wait again.
        """
        first, *further = self.add_bsyms_from_function(self._fused, match, tags=match.place.tags)
        self.set_result(first)
        for result, tensor in zip(match.results[1:], further, strict=True):
            # thunder reads the program's outputs before it swaps names.
            self.write(result.tensor, result.tensor)
            self.add_to_swap_map(result.tensor, tensor)
        self.add_unprocessed_bsyms(self._waiting)
        self._missing, self._waiting = self._further_results(), []

    def _fused(self, match: Match) -> tuple[TensorProxy, ...]:
        """Adds the region to the trace; returns what replaces each of the results."""
        call, path = match.arguments, match.path
        row_dtype = loss_dtype(path.terms[0].input)
        (input, weight), *terms = (_operands(term, path) for term in path.terms)
        is_detached = path.bias is not None and path.carries_grad and not path.bias_carries_grad
        reduction, token_weights = call.reduction, None
        token_loss: TokenLoss = ""
        token_inputs: tuple[TensorProxy, ...] = ()
        if match.token_sum is not None:
            is_alone = len(match.results) == 1
            written = match.token_sum.written(input.shape[:-1], row_dtype, is_alone=is_alone)
            token_loss, token_inputs, token_weights = written
            reduction = "sum"
        if match.weighted is not None:
            token_weights, reduction = _token_weights(match.weighted, row_dtype, input), "sum"
        loss = Loss(
            reduction=reduction,
            ignore_index=call.ignore_index,
            label_smoothing=call.label_smoothing,
            outputs=match.outputs,
            detached=_detached(match),
            token_loss=token_loss,
            **path.logit_map,
        )
        dtype = next((result.tensor.dtype for result in match.results if result.output == "loss"), row_dtype)
        region = region_arguments(
            input,
            weight,
            _labels(match, input),
            ltorch.detach(path.bias) if is_detached else path.bias,
            terms=tuple(terms),
            weight=call.weight,
            token_weights=token_weights,
            token_inputs=token_inputs,
            vocab_parallel=None if path.group is None else as_literal(group=path.group),
            dtype=None if dtype == row_dtype else dtypes.to_strong_dtype(dtype),
            **loss.non_defaults(),
        )
        is_differentiated = any(carries_grad(result.tensor) for result in match.results)
        needs_grad = self._operands_that_need_grad(path) if is_differentiated else ()
        given = self._region(region, match.place, needs_grad, match)
        values = dict(zip(("loss", *match.outputs), given if match.outputs else (given,), strict=True))
        of_tokens = "loss" if match.token_sum is None else "log_prob"
        if match.reduced is not None and of_tokens in values:
            values[of_tokens] = _reduced(match.reduced, values[of_tokens])
        return tuple(_result(result, values[result.output]) for result in match.results)

    def _operands_that_need_grad(self, path: LogitsPath) -> tuple[str, ...]:
        head, *others = path.terms
        operands = {
            "input": (head.input, head.carries_grad),
            "linear_weight": (head.weight, head.carries_grad),
            "linear_bias": None if path.bias is None else (path.bias, path.bias_carries_grad),
            "terms": [((each.input, each.carries_grad), (each.weight, each.carries_grad)) for each in others],
        }
        found = named_tensors(operands).items()
        return tuple(name for name, (tensor, carries) in found if carries and tensor.name in self._need_grad)

    def _planned(self, bsym: BoundSymbol) -> TensorProxy:
        region = region_arguments(*bsym.args, **bsym.kwargs)
        needed = self._need_grad if carries_grad(bsym.flat_proxy_outs[0]) else ()
        tensors = named_tensors(region)
        needs_grad = tuple(name for name in operand_names(tensors) if tensors[name].name in needed)
        return self._region(region, bsym, needs_grad)

    def _expected_gradient(self, region: Mapping[str, Any], loss: BoundSymbol) -> TensorProxy | float | None:
        """The upstream gradient that the trace and the options say; None for 1. May add operations to the trace."""
        number, tensor = self._options.expected_gradient or 1.0, None
        value, row_dtype = loss.flat_proxy_outs[0], loss_dtype(region["input"])
        # float16 needs a loss scale, and the factors that follow the loss are none.
        if region["input"].dtype == dtypes.float16 and self._options.expected_gradient is None:
            return None
        for factor, divides in factors_after(loss, self._index):
            if not isinstance(factor, TensorProxy):
                number = number / factor if divides else number * factor
            elif factor.name not in self._missing:
                factor = ltorch.detach(factor if factor.ndim == 0 else ltorch.reshape(factor, ()))
                factor = symbols.converted(factor, row_dtype)
                factor = ltorch.true_divide(1.0, factor) if divides else factor
                tensor = factor if tensor is None else ltorch.mul(tensor, factor)
        if tensor is not None:
            # The tensor may be 0 when the program runs. Then gradients are finished for 1.
            tensor = tensor if number == 1 else ltorch.mul(tensor, number)
            size = ltorch.abs(tensor)
            is_usable = ltorch.logical_and(ltorch.ge(size, _LEAST_FACTOR), ltorch.le(size, 1 / _LEAST_FACTOR))
            return ltorch.where(is_usable, tensor, 1.0)
        if number == 1 or not _LEAST_FACTOR <= abs(number) <= 1 / _LEAST_FACTOR:
            return None
        # A loss in 16 bits rounds its upstream gradient.
        return number if value.dtype.bytes >= 4 else _rounded(number, dtypes.to_torch_dtype(value.dtype))

    def _region(
        self, region: dict[str, Any], source: BoundSymbol, needs_grad: tuple[str, ...], match: Match | None = None
    ) -> Any:
        if region.get("expected_gradient") is None and needs_grad:
            region["expected_gradient"] = self._expected_gradient(region, source)
            is_float16 = region["input"].dtype == dtypes.float16
            if is_float16 and region["expected_gradient"] is None and region.get("token_loss"):
                # A token loss in float16 is matched only where the options say the upstream gradient: it is 1.
                region["expected_gradient"] = 1.0
        planned = self._plan(region, needs_grad)
        decision = Decision(source_of(source), planned)
        if match is not None:
            waits = planned.plan.strategy in (SAVE_LOGITS, RECOMPUTE_LOGITS)
            decision = replace(decision, kind=match.kind, note=match.note if waits else "")
        self._decisions.append(decision)
        region |= {"needs_grad": needs_grad, **planned.settings}
        return symbols.linear_cross_entropy(**region)


def _operands(term: Term, path: LogitsPath) -> tuple[TensorProxy, TensorProxy]:
    """A term's input, (..., H) of the rows that the loss reads, and weight, (V, H); may add operations to a trace."""
    input, weight = term.input, term.weight
    if path.carries_grad and not term.carries_grad:
        input, weight = ltorch.detach(input), ltorch.detach(weight)
    for step in path.selection:
        input = step(input)
    if term.factor != 1:
        input = ltorch.mul(input, float(term.factor))
    return input, ltorch.transpose(weight, 0, 1) if term.transposed else weight


def _detached(match: Match) -> tuple[str, ...]:
    """The outputs that could have a gradient, but are not used where one flows."""
    used = {result.output for result in match.results if carries_grad(result.tensor) and match.token_sum is None}
    return tuple(name for name in match.outputs if name in DIFFERENTIABLE_OUTPUTS and name not in used)


def _token_weights(weighted: WeightedSum, dtype: dtypes.dtype, input: TensorProxy) -> TensorProxy:
    """What multiplies each row's loss, in the shape of the input's rows."""
    weights, rows = weighted.weights(), input.shape[:-1]
    if not isinstance(weights, TensorProxy):
        return ltorch.full(rows, weights, device=input.device, dtype=dtype)
    weights = symbols.converted(weights, dtype)
    return weights if weights.shape == rows else ltorch.reshape(weights, rows)


def _labels(match: Match, input: TensorProxy) -> TensorProxy:
    """The labels in the shape of the input's rows: after the selection, rows keep their order."""
    rows, labels = input.shape[:-1], match.arguments.target
    if labels is None:
        # An entropy needs none.
        return ltorch.full(rows, 0, device=input.device, dtype=dtypes.int64)
    if (ignore_index := match.label_without_target) is not None:
        labels = ltorch.where(ltorch.ne(labels, ignore_index), labels, 0)
    if match.wraps_labels:
        labels = ltorch.where(ltorch.lt(labels, 0), ltorch.add(labels, match.path.vocab), labels)
    return labels if labels.shape == rows else ltorch.reshape(labels, rows)


def _reduced(call: CrossEntropy, losses: TensorProxy) -> TensorProxy:
    """The cross-entropy, from the losses of all rows; these are in an order and a number as the labels."""
    valid = ltorch.ne(call.target, call.ignore_index)
    losses = ltorch.where(valid, ltorch.reshape(losses, valid.shape), 0.0)
    if call.reduction == "none":
        return losses
    total = ltorch.sum(losses)
    return total if call.reduction == "sum" else ltorch.true_divide(total, ltorch.sum(valid))


def _result(result: Result, value: TensorProxy) -> TensorProxy:
    """A tensor of the program, from the output of the region that it is made of."""
    if carries_grad(value) and not carries_grad(result.tensor):
        value = ltorch.detach(value)
    if value.shape != result.tensor.shape:
        value = ltorch.reshape(value, result.tensor.shape)
    if result.factor == -1:
        value = ltorch.neg(value)
    if result.is_exponential:
        value = ltorch.exp(value)
    return symbols.converted(value, dtypes.to_strong_dtype(result.tensor.dtype))


# The least upstream gradient that gradients are finished for, and the reciprocal of the largest: between the two, they
# neither underflow nor overflow in float32.
_LEAST_FACTOR = 2.0**-60


def _rounded(number: float, dtype: torch.dtype) -> float:
    """A normal number in the precision of a dtype, without a tensor, which may be fake while a trace is made."""
    unit, (significand, exponent) = torch.finfo(dtype).eps / 2, math.frexp(number)
    return math.ldexp(round(significand / unit) * unit, exponent)
