"""Decides which regions a program has: of which results, with which sums; and what is not fused, and why."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

import thunder_flce.matching.rules  # noqa: F401
from thunder_flce.matching.algebra import Argmax, Class, Logits, Row, atoms
from thunder_flce.matching.decisions import Decision, NotFused, Reason
from thunder_flce.matching.interpreter import Interpreter
from thunder_flce.matching.order import find_stuck
from thunder_flce.matching.parts import Part, have_same_rows, parts_of, steps_beside
from thunder_flce.matching.program import Op, Program, hint
from thunder_flce.matching.regions import Region
from thunder_flce.matching.sums import NotASum, TokenSum, find_sum
from thunder_flce.options import GRADIENTS_IN_FORWARD, Options


def match(program: Program, options: Options) -> tuple[Interpreter, list[Region], list[Decision]]:
    """Returns the interpreted program, its regions in order, and decisions about losses that are not fused."""
    interpreter = Interpreter(program)
    joined = _regions_of(interpreter, options)
    if interpreter.has_joined:
        # Regions may be better without joins, such as for an argmax of one of the joined parts, or for a loss of each.
        apart = Interpreter(program, joins=False)
        separate = _regions_of(apart, options)
        if separate[0] and _cost(*separate) < _cost(*joined):
            return apart, *separate
    return interpreter, *joined


def _cost(regions: Sequence[Region], refused: Sequence[Decision]) -> tuple[int, int, int]:
    """Returns the cost by which regions are compared; less is better."""
    # A loss that is not fused may have no decision: so fused linears count, or its rows would look like a saving.
    linears = {linear for region in regions for part in region.parts for linear in part.logits.linears}
    rows = 0
    for region in regions:
        # Logits, dX, dW and, if gradients wait, the logits once more.
        matmuls = 3 + bool(region.note) if region.needs_grad else 1
        rows += matmuls * sum(hint(part.count) for part in region.parts)
    return len(refused), -len(linears), rows


def _regions_of(interpreter: Interpreter, options: Options) -> tuple[list[Region], list[Decision]]:
    parts = parts_of(interpreter)
    for part in parts:
        part.problem = _problem(part, interpreter)
    _assign_argmaxes(parts, interpreter)
    _refuse_beside_teachers(parts, options)
    _refuse_logits(parts)
    _refuse_together(parts)
    regions = _join_parts([part for part in parts if part.problem is None], interpreter, options)
    regions = _without_refused(regions, parts)
    while (stuck := find_stuck(regions, interpreter)) is not None:
        _split_or_refuse(*stuck, regions, options=options)
        regions = _without_refused(regions, parts)
    refused = [
        part.problem.at(part.line, part.kind) for part in parts if part.problem is not None and _is_reported(part)
    ]
    return regions, list(dict.fromkeys([*refused, *interpreter.refusals, *_decisions_on_escapes(interpreter, parts)]))


def _without_refused(regions: Sequence[Region], parts: Sequence[Part]) -> list[Region]:
    """Returns the regions of which no part is refused, or has to be together with another."""
    _refuse_together(parts)
    return [region for region in regions if all(part.problem is None for part in region.parts)]


def _is_reported(part: Part) -> bool:
    # A gate may have a loss of its own, of the log-sum-exp of its scores, and attention gathers relative positions.
    is_loss = part.kind != "log-sum-exp" and not (part.has_several_labels and part.is_gathered_logits)
    return not part.logits.is_similarity and not part.has_only_logits and (is_loss or part.logits.is_head)


# Parts.


def _problem(part: Part, interpreter: Interpreter) -> NotFused | None:
    """Returns why a part cannot be fused, whatever the other parts are; None if it can."""
    logits = part.logits
    escapes = [escape for escape in interpreter.escapes if not part.linears.isdisjoint(escape.linears)]
    if escapes:
        return min(escapes, key=lambda each: each.user is not None).problem
    if part.is_gathered_logits:
        return NotFused(Reason.NOT_A_LOG_PROBABILITY, "by gather without log_softmax")
    if part.class_weight is not None and None in map(part.as_loss, part.rows):
        # A region with class weights returns weighted losses, and no log-probabilities from which to compute others.
        return NotFused(Reason.CLASS_WEIGHTS, "of a loss without the gradient of a cross-entropy")
    if part.teacher is not None and (problem := _problem_with_teacher(part, part.teacher, interpreter)):
        return NotFused(Reason.CLASS_PROBABILITIES, problem)
    if part.needs_grad and not any(row.variables for row in part.rows.values()):
        # Their gradient is 0, and a region would give them none.
        return NotFused(Reason.NOT_FOLLOWED, "a number that does not depend on the logits")
    if not logits.has_float_factors:
        return NotFused(Reason.TRANSFORMED_LOGITS, "by factors whose product overflows or underflows")
    if not all(tensor.is_plain for tensor in Region([part]).read_at):
        return NotFused(Reason.DISTRIBUTED)
    dtypes = {dtype for term in logits.terms for dtype in (term.dtype, term.weight.dtype)}
    dtypes |= set() if logits.bias is None else {logits.bias.dtype}
    if len(dtypes) > 1 or not all(dtype.is_floating_point and dtype.itemsize > 1 for dtype in dtypes):
        names = sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)
        return NotFused(Reason.DTYPE, ", ".join(names))
    return None


def _problem_with_teacher(part: Part, teacher: Logits, interpreter: Interpreter) -> str:
    """Returns why a region cannot compute a divergence from a teacher; empty if it can."""
    if any(len(head.terms) > 1 or head.bias is not None or head.group is not None for head in part.heads):
        return "of heads with a bias or an adapter, or that are divided among ranks"
    if not all(head.is_linear for head in part.heads):
        return "of heads with a softcap, or of a part of the vocabulary"
    if part.logits.scale != teacher.scale or teacher.scale < 0:
        return "from a teacher at another temperature"
    if part.divergence is None or None in map(part.as_loss, part.rows):
        return "from a teacher, in a way that is no divergence"
    return ""


def _refuse_beside_teachers(parts: Sequence[Part], options: Options) -> None:
    """Refuses divergences beside results of the student's logits that one call cannot compute with them."""
    for part in (part for part in parts if part.teacher is not None):
        if options.strategy not in (None, GRADIENTS_IN_FORWARD) or options.row_kernels == "nvfuser":
            chosen = f"with strategy={options.strategy!r} and row_kernels={options.row_kernels!r}"
            part.problem = part.problem or NotFused(Reason.CLASS_PROBABILITIES, f"from a teacher, {chosen}")
        others = [
            each for each in parts
            if each is not part and (
                have_same_rows(each, part)  # Also of another call of the same linear.
                or (each.teacher is None and not each.logits.linears.isdisjoint(part.logits.linears))
            )
        ]  # fmt: skip
        if others and (len(others) > 1 or not _is_beside(others[0], part)):
            part.problem = part.problem or NotFused(
                Reason.CLASS_PROBABILITIES, "from a teacher, beside further results of the student"
            )


def _is_beside(part: Part, divergence: Part) -> bool:
    """Whether a part has rows of a divergence from a teacher, and is computed in one call with it."""
    is_plain = part.teacher is None and part.class_weight is None and not part.has_several_labels
    return is_plain and part.logits.scale == 1 and steps_beside(divergence, part) is not None


def _assign_argmaxes(parts: Sequence[Part], interpreter: Interpreter) -> None:
    """Gives each argmax to a part that computes its rows; if there is none, its logits are not fused."""
    for tensor, argmax in interpreter.results.items():
        if not isinstance(argmax, Argmax):
            continue
        steps = {part: steps for part in parts if (steps := part.steps_to(argmax)) is not None}
        if steps:
            min(steps, key=lambda part: len(steps[part])).argmaxes[tensor] = argmax
            continue
        for part in parts:
            if not part.linears.isdisjoint(argmax.logits.linears):
                part.problem = part.problem or NotFused(Reason.LOGITS_USED, f"by {tensor.op.name}")  # type: ignore[union-attr]


def _refuse_logits(parts: Sequence[Part]) -> None:
    """Leaves means and maxima of logits to the program if no loss reads the same logits."""
    losses = [part.logits.linears for part in parts if not part.has_only_logits]
    for part in parts:
        if part.has_only_logits and all(map(part.logits.linears.isdisjoint, losses)):
            part.problem = NotFused(Reason.LOGITS_USED, "by a mean or a maximum")


def _refuse_together(parts: Sequence[Part]) -> None:
    """Refuses parts whose logits a refused part reads, too: all parts of a linear are fused, or none."""
    refused = {tensor for part in parts if part.problem is not None for tensor in part.linears}
    while broken := [part for part in parts if part.problem is None and not part.linears.isdisjoint(refused)]:
        for part in broken:
            part.problem = NotFused(Reason.LOGITS_USED, "by another result that is not fused")
            refused |= part.linears


def _decisions_on_escapes(interpreter: Interpreter, parts: Sequence[Part]) -> list[Decision]:
    """Returns decisions about a head's log-probabilities that become no known loss, for logits that no part has."""
    reported = {tensor for part in parts for tensor in part.logits.linears}
    decisions = []
    for escape in interpreter.escapes:
        value: Any = escape.value
        linears = value.logits.linears
        if not reported.isdisjoint(linears) or not value.logits.is_head:
            continue
        if escape.user is not None and interpreter.starts_logits(escape.user.output):
            continue
        form = value.form if isinstance(value, Class) else ""
        is_normalised = value.labels.teacher is not None or (
            "L" in atoms(value.sum) and (form != "exp" or value.factor_of_u == 1)
        )
        if not is_normalised or not escape.tensor.needs_grad:
            continue
        reported |= linears
        kind = {"exp": "probability", "product": "entropy"}.get(form, "log-probability")
        kind = kind if value.labels.teacher is None else "divergence"
        if escape.user is None:
            producer: Any = escape.tensor.op
            decisions.append(Decision(producer.source, reason=Reason.LOGITS_RETURNED, kind=kind))
            continue
        name, detail = escape.user.name, escape.detail.strip()
        reason, text = Reason.NOT_FOLLOWED, f"by {name} {detail}".strip()
        if isinstance(value, Row):
            text = f"a maximum over the classes with a gradient, {text}"
        elif escape.user.is_change:
            reason = Reason.OPERAND_MODIFIED
        elif value.labels.are_given:
            reason = Reason.CLASS_PROBABILITIES
        elif form:
            reason = Reason.TRANSFORMED_LOGITS
        elif name in ("mul", "where", "masked_fill", "kl_div", "einsum", "matmul"):
            reason = Reason.CLASS_PROBABILITIES
        elif name in ("gather", "take_along_dim", "index_select", "take", "getitem", "view", "reshape", "flatten"):
            reason, text = Reason.NOT_A_LOG_PROBABILITY, detail or text
        operands = map(interpreter.get, escape.user.operands)
        has_two_heads = any(isinstance(each, Class) and each.logits != value.logits for each in operands)
        if name == "kl_div" or (name in ("mul", "sub") and (has_two_heads or value.labels.teacher is not None)):
            text += "; `linear_kl_divergence` takes a teacher's hidden states and head"
        decisions.append(Decision(escape.user.source, reason=reason, detail=text, kind=kind))
    return decisions


# Regions.

_WAITS = "its gradients wait for the backward, because"
_IN_FLOAT16 = (
    "in float16 the forward computes them only with Options(expected_gradient=...), such as a GradScaler's scale"
)


def _join_parts(parts: Sequence[Part], interpreter: Interpreter, options: Options) -> list[Region]:
    """Returns one region for all parts of a head if they become one sum, and otherwise one for each part."""
    by_head: dict[Any, list[Part]] = {}
    for part in parts:
        # Labels at which numbers are gathered are never negative, so a negative label may be ignored among them, too.
        indices = [each.labels.ignore_index for each in parts if part.has_several_labels and each.logits == part.logits]
        ignored = max((index for index in indices if index < 0), default=part.labels.ignore_index)
        key: Any = ignored, _head_key(part)
        divergence = next((each for each in parts if _is_beside(part, each)), part)
        if divergence.teacher is not None:
            key = divergence.divergence, _head_key(divergence), _without_rows(divergence.teacher)
        by_head.setdefault(key, []).append(part)
    regions: list[Region] = []
    for head_parts in by_head.values():
        joined = _with_sum(head_parts, interpreter, options)
        if joined.teacher is not None:
            if joined.needs_grad and joined.total is None:
                # Nothing would save the logits of student and teacher, and computing both again takes long.
                _refuse(joined, NotFused(Reason.CLASS_PROBABILITIES, f"from a teacher: {joined.note}"))
            regions.append(joined)
            continue
        if joined.total is not None or len(head_parts) == 1 or _has_large_gradients(head_parts, options):
            regions.append(joined)
            continue
        separate = [_with_sum([part], interpreter, options) for part in head_parts]
        # Parts whose gradients wait share a region even without a sum, so that the head has one gradient.
        waiting = [region for region in separate if region.total is None and _has_only_rows(region.parts[0])]
        shares_region = len(waiting) > 1 and head_parts[0].needs_grad
        if shares_region:
            parts = [part for region in waiting for part in region.parts]
            # The note of one part alone would call the other parts' numbers factors that need a gradient.
            regions.append(Region(parts, note=(joined if len(waiting) == len(separate) else waiting[0]).note))
        regions += [region for region in separate if not shares_region or region not in waiting]
    taken: set[Op] = set()
    for region in list(regions):
        ops = set() if region.total is None else {*region.total.ops}
        if taken & ops:
            _leave_sum_to_program(
                region,
                "its terms and those of another loss are added in turns: first add up the terms of each loss",
                regions,
                options=options,
            )
        else:
            taken |= ops
    return sorted(regions, key=lambda region: region.place.position)


def _has_large_gradients(parts: Sequence[Part], options: Options) -> bool:
    """Whether one gradient of the head for each part would take more memory than the logits of all.

    That is so for many sequences whose losses are not one sum: then their gradients wait together.
    """
    first, rows = parts[0], sum(hint(part.count) for part in parts)
    term, may_wait = first.logits.terms[0], options.strategy != GRADIENTS_IN_FORWARD and first.class_weight is None
    is_trained = term.has_grad and term.weight.needs_grad and first.needs_grad
    may_wait = may_wait and not any(part.has_several_labels for part in parts)
    return may_wait and is_trained and (len(parts) - 1) * hint(term.features) > rows


def _has_only_rows(part: Part) -> bool:
    """Whether a part only has one number of each row: no reduction, no class weights and no argmax."""
    is_reduced = any(row.reduction != "none" for row in part.rows.values())
    return not is_reduced and part.class_weight is None and not part.argmaxes and not part.has_several_labels


def _head_key(part: Part) -> Any:
    """Returns a key that is equal for parts whose rows can be computed in one call."""
    inputs_need_grad = tuple(term.input.needs_grad for term in part.logits.terms)
    return _without_rows(part.logits), inputs_need_grad, part.class_weight, part.needs_grad


def _without_rows(logits: Logits) -> Logits:
    """Returns logits that are equal for the same head, whatever its input."""
    # Each input becomes the weight, which stands for any.
    terms = tuple(replace(term, input=term.weight, hidden_dim=0, changes=0) for term in logits.terms)
    return replace(logits, terms=terms, rows=(), group=str(logits.group))


def _with_sum(parts: list[Part], interpreter: Interpreter, options: Options) -> Region:
    """Returns a region of parts, with the sum that the program computes from them unless gradients have to wait."""
    plain = Region(parts)
    if not plain.needs_grad:
        return plain  # Without a search, which takes time.
    has_no_scale = parts[0].logits.dtype is torch.float16 and options.expected_gradient is None
    float16_note = f"{_WAITS} {_IN_FLOAT16}" if has_no_scale and options.strategy is None else ""
    if plain.loss is not None and parts[0].rows[plain.loss].reduction != "none":
        return replace(plain, note=float16_note)
    try:
        if options.strategy not in (None, GRADIENTS_IN_FORWARD):
            raise NotASum(f"the options choose the strategy {options.strategy!r}")
        total = find_sum(parts, interpreter)
        region = Region(parts, total, note=float16_note)
        _check_sum(region, total, has_no_scale=has_no_scale)
        return region
    except NotASum as problem:
        return replace(plain, note=f"{_WAITS} {problem}")


def _check_sum(region: Region, total: TokenSum, *, has_no_scale: bool) -> None:
    """Raises `NotASum` for a sum that a region cannot compute."""
    parts = region.parts
    # Only for a plain loss is the scale of the upstream gradient known. With other results it becomes a token loss.
    is_plain = total.as_losses is not None and region.has_only_sum
    if has_no_scale and (not is_plain or region.loss is None):
        raise NotASum(_IN_FLOAT16)
    if parts[0].class_weight is not None:
        is_mean = any(row.reduction == "mean" for part in parts for row in part.rows.values())
        if not is_plain or is_mean:
            raise NotASum("the losses have class weights")
    if region.teacher is not None or any(part.has_several_labels for part in parts):
        if region.plain_losses is None or region.plain_losses[1] != 0:
            if region.teacher is not None:
                raise NotASum("the loss is not one weighted sum of divergences and cross-entropies")
            raise NotASum(
                "its tokens have several labels, and the loss is not one weighted sum of their log-probabilities"
            )
    elif len(parts) > 1 and not is_plain:
        losses = [
            (text, [each if isinstance(each, int) else (each[0].dtype, each[0].ignored) for each in inputs])
            for text, inputs in map(total.loss_of, parts)
        ]
        if any(loss != losses[0] for loss in losses):
            raise NotASum("the same head has losses of different kinds")


def _split_or_refuse(region: Region, problem: NotFused, regions: list[Region], *, options: Options) -> None:
    """Leaves a region's sum to the program, or divides it into its parts; otherwise refuses it."""
    if region.teacher is None and (region.total is not None or len(region.parts) > 1):
        why = "a tensor that it may depend on is changed in place"
        if problem.reason is Reason.LOGITS_USED:
            is_by = problem.detail.startswith("by ")
            why = f"its results are used {problem.detail}" if is_by else "its tokens' weights depend on its own results"
        _leave_sum_to_program(region, why, regions, options=options)
        return
    _refuse(region, problem)


def _refuse(region: Region, problem: NotFused) -> None:
    for part in region.parts:
        part.problem = problem


def _leave_sum_to_program(region: Region, why: str, regions: list[Region], *, options: Options) -> None:
    """Leaves a region's sum to the program; a region without a sum becomes one region for each part.

    Refuses divergences: nothing would save the logits of student and teacher, and computing both again takes long.
    """
    if region.teacher is not None:
        _refuse(region, NotFused(Reason.CLASS_PROBABILITIES, f"from a teacher: {_WAITS} {why}"))
        return
    has_only_rows = region.needs_grad and all(map(_has_only_rows, region.parts))
    shares_region = region.total is not None and (has_only_rows or _has_large_gradients(region.parts, options))
    position, groups = regions.index(region), [region.parts] if shares_region else [[part] for part in region.parts]
    regions[position : position + 1] = [Region(parts, note=f"{_WAITS} {why}") for parts in groups]
