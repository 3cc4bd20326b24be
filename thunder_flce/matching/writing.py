"""Writes regions: the arguments of `linear_cross_entropy`, and the program's tensors from its results.

All of it is written in PyTorch's functions, which a `Writer` adds to its graph.
"""

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from thunder_flce.matching.algebra import Row, RowStep, Term, scaled
from thunder_flce.matching.decisions import Decision, PlannedRegion
from thunder_flce.matching.interpreter import Interpreter
from thunder_flce.matching.parts import Part, TokenInput, steps_beside
from thunder_flce.matching.program import (
    COPIES,
    PERMUTATIONS,
    RESHAPES,
    Op,
    Program,
    Tensor,
    indices_of,
    is_number,
    keeps_elements,
    order_of,
    same,
    same_shape,
    without_tensors,
)
from thunder_flce.matching.regions import Region
from thunder_flce.matching.sums import PRODUCTS, Summand, TokenSum
from thunder_flce.operation.call import Call, named_tensors, operand_names
from thunder_flce.operation.loss import DIFFERENTIABLE_OUTPUTS, NOTHING_IGNORED, Loss
from thunder_flce.options import RECOMPUTE_LOGITS, SAVE_LOGITS, Options


class Writer(Protocol):
    """Adds operations to a graph."""

    def call(self, function: Callable, *args: Any, **kwargs: Any) -> Tensor:
        """Adds a call of a PyTorch function, with tensors and sizes of the program; returns its result."""

    def weights(
        self, ops: Sequence[Op], operands: Sequence[Tensor], result: Tensor, *, values: Sequence[Tensor | None] | None
    ) -> list[Tensor]:
        """Adds the derivatives of `result`, a scalar, with respect to `operands`, in which `ops` are linear.

        With `values` of the operands, where None stands for zeros, the scalar's value for them is returned last.
        """

    def region(self, call: Call, group: Any) -> tuple[list[Tensor], PlannedRegion]:
        """Adds a call, of tensors and numbers; returns the loss and its outputs, and the call with its plan."""


def write(
    region: Region, writer: Writer, interpreter: Interpreter, options: Options
) -> tuple[dict[Tensor, Tensor], Decision]:
    """Adds a region to a graph; returns a new tensor for each of the program's that it replaces, and the decision."""
    return _Writing(region, writer, interpreter, options).write()


class _Writing:
    def __init__(self, region: Region, writer: Writer, interpreter: Interpreter, options: Options):
        self._region, self._interpreter, self._options = region, interpreter, options
        self._writer = writer
        self._logits = region.parts[0].logits
        self._rows_dtype = torch.float64 if self._logits.dtype is torch.float64 else torch.float32
        self._loss = region.loss if region.total is None else None
        """The program's result that is the region's loss; None if that is a sum, or if results are computed from it"""
        self._keeps_ignored, self._losses, self._groups = region.keeps_ignored, region.plain_losses, region.row_groups
        self._is_joined = len(region.parts) > 1
        most_labels = max(sum(part.labels.per_row for part in group) for group in self._groups)
        self._most_labels = most_labels if region.teacher is None else 1
        """Number of labels of a row, of those that have most"""
        self._constants: list[Tensor] = []
        """Numbers to add to the sum: 0, or NaN if no token counts and the sum is divided by their number"""
        self._other_losses: list[tuple[Tensor, Tensor]] = []
        """Other losses that the program adds between the terms of the sum, with their factors"""

    def write(self) -> tuple[dict[Tensor, Tensor], Decision]:
        region, logits = self._region, self._logits
        inputs, labels = self._inputs_and_labels()
        self._rows_shape = tuple(inputs[0].shape[:-1])
        arguments: dict[str, Any] = {
            "input": inputs[0],
            "linear_weight": self._weight(logits.terms[0]),
            "target": labels,
            "linear_bias": self._bias(),
            "terms": tuple((x, self._weight(t)) for x, t in zip(inputs[1:], logits.terms[1:], strict=True)),
            "weight": region.parts[0].class_weight,
        }
        settings = self._settings_of_logits() if region.teacher is None else self._settings_of_teacher(arguments)
        settings |= self._settings_of_rows(arguments) if region.total is None else self._settings_of_sum(arguments)
        outputs = self._outputs()
        detached = tuple(name for name, has_grad in outputs.items() if name in DIFFERENTIABLE_OUTPUTS and not has_grad)
        loss = Loss(outputs=tuple(outputs), detached=detached, **settings)
        tensors = named_tensors(arguments)
        needs_grad = tuple(name for name in operand_names(tensors) if tensors[name].needs_grad)
        needs_grad = needs_grad if region.needs_grad else ()
        if needs_grad:
            tensors = named_tensors({**arguments, "expected_gradient": self._expected_gradient()})
        call = Call(tensors=tensors, loss=loss, needs_grad=needs_grad)
        results, planned = self._writer.region(call, logits.group)
        outputs_by_name = dict(zip(("loss", *outputs), results, strict=True))
        waits = planned.plan.strategy in (SAVE_LOGITS, RECOMPUTE_LOGITS)
        part = region.parts[0]
        note = region.note if waits else ""
        is_example = not all(isinstance(size, int) for size in tensors["input"].shape)
        decision = Decision(part.line, planned, kind=part.kind, note=note, is_example=is_example)
        return self._results(outputs_by_name), decision

    def _call(self, function: Callable, *args: Any, **kwargs: Any) -> Tensor:
        """Adds a call as `Writer.call` does, unless it would change nothing."""
        tensor, *options = args
        is_same = (
            (function is torch.detach and not tensor.needs_grad)
            or (function is torch.reshape and same_shape(tensor.shape, *options))
            or (function is torch.Tensor.to and [tensor.dtype] == options)
        )
        return tensor if is_same else self._writer.call(function, *args, **kwargs)

    # Operands.

    def _inputs_and_labels(self) -> tuple[list[Tensor], Tensor]:
        """Returns each term's input, (..., H), and the labels of all parts, (...), or (..., K) if rows have several."""
        part_operands = {part: self._operands_of(part) for part in self._region.parts}
        # Beside a divergence, which has no labels, a row has those of its cross-entropy.
        labelled = self._region.parts if self._region.teacher is None else [group[-1] for group in self._groups]
        labels = self._of_labels([self._spread(part_operands[part][1], part) for part in labelled])
        inputs = [part_operands[group[0]][0] for group in self._groups]
        if not self._is_joined:
            return inputs[0], labels
        return [self._joined([self._flat(each, 2) for each in column]) for column in zip(*inputs, strict=True)], labels

    def _of_labels(self, tensors: Sequence[Tensor], *, are_weights: bool = False) -> Tensor:
        """Returns numbers of each part's labels as those of the region: (T,), or (T, K) if rows have several.

        A row with fewer labels than others has its last one again, with the weight 0.
        """
        if not self._is_joined:
            return tensors[0]
        if same(self._most_labels, 1):
            return self._joined([self._flat(each) for each in tensors])
        of_part, rows = dict(zip(self._region.parts, tensors, strict=True)), []
        for group in self._groups:
            columns = [self._call(torch.reshape, of_part[part], (part.count, part.labels.per_row)) for part in group]
            last, missing = columns[-1], self._most_labels - sum(part.labels.per_row for part in group)
            if not same(missing, 0):
                more = self._call(operator.getitem, last, (slice(None), slice(-1, None)))
                more = self._call(torch.zeros_like, more) if are_weights else more
                columns.append(self._call(torch.Tensor.expand, more, (last.shape[0], missing)))
            rows.append(self._call(torch.cat, columns, -1) if len(columns) > 1 else last)
        return self._joined(rows)

    def _operands_of(self, part: Part) -> tuple[list[Tensor], Tensor]:
        inputs = [self._input(term, part.logits.rows) for term in part.logits.terms]
        rows = inputs[0].shape[:-1]
        if not part.labels.tensors:
            zeros = self._call(torch.zeros, rows, dtype=torch.int64, device=inputs[0].device)
            return inputs, zeros
        shape = part.labels_shape(rows)
        labels = _before_reshapes(part.labels.tensors[0], shape, self._interpreter)
        if shapes := part.labels.shapes:
            pairs = zip(part.labels.tensors, shapes, strict=True)
            labels = self._call(torch.cat, [self._call(torch.reshape, *each) for each in pairs], part.labels.dim)
        if self._keeps_ignored and part.labels.has_ignored:
            is_valid = self._call(torch.ne, labels, part.labels.ignore_index)
            labels = self._call(torch.where, is_valid, labels, 0)
        if part.labels.wraps:
            vocab = part.logits.vocab_size or part.logits.terms[0].columns
            if part.labels.wraps == "modulo":
                labels = self._call(torch.remainder, labels, vocab)
            else:
                is_negative = self._call(torch.lt, labels, 0)
                labels = self._call(torch.where, is_negative, self._call(torch.add, labels, vocab), labels)
        if not same_shape(labels.shape, shape):
            labels = self._flat(labels, 1 + part.has_several_labels)
            inputs = [self._flat(each, 2) for each in inputs]
        return inputs, labels

    def _numbers_beside(self, part: Part) -> Tensor | None:
        """Returns the numbers of a part's rows among those of a divergence beside it; None if it has all in order."""
        divergence = next(group[0] for group in self._groups if part in group)
        shape, selection = steps_beside(divergence, part) or ((), ())
        if all(step.kind == "reshape" for step in selection):
            return None
        numbers = self._call(torch.arange, divergence.count, device=self._logits.terms[0].input.device)
        return self._flat(reduce(self._apply_step, selection, self._call(torch.reshape, numbers, (*shape, 1))))

    def _spread(self, tensor: Tensor, part: Part) -> Tensor:
        """Returns numbers of a part's rows as those of the divergence beside it: 0 in other rows."""
        numbers = self._numbers_beside(part)
        if numbers is None:
            return tensor
        count = next(group[0].count for group in self._groups if part in group)
        zeros = self._call(torch.zeros, (count,), dtype=tensor.dtype, device=tensor.device)
        return self._call(torch.scatter, zeros, 0, numbers, self._flat(tensor))

    def _flat(self, tensor: Tensor, ndim: int = 1) -> Tensor:
        """Returns a tensor in `ndim` dimensions, 1 or 2: its first dimensions are flattened."""
        if tensor.ndim == ndim:
            return tensor
        if tensor.ndim < ndim:
            return self._call(torch.unsqueeze, tensor, 0)
        return self._call(torch.flatten, tensor, 0, tensor.ndim - ndim)

    def _input(self, term: Term, rows: Sequence[RowStep]) -> Tensor:
        input = self._operand(self._call(torch.Tensor.to, term.input, term.dtype), term.has_grad)
        if (dim := term.hidden_dim) != input.ndim - 1:
            input = self._call(torch.permute, input, (*range(dim), *range(dim + 1, input.ndim), dim))
        input = reduce(self._apply_step, rows, input)
        return input if term.factor == 1 else self._call(torch.mul, input, float(term.factor))

    def _apply_step(self, hidden: Tensor, step: RowStep) -> Tensor:
        if step.kind == "cat":
            dim, *parts = step.argument
            return self._call(torch.cat, [reduce(self._apply_step, part, hidden) for part in parts], dim)
        if step.kind == "reshape":
            return self._call(torch.reshape, hidden, (*step.argument, hidden.shape[-1]))
        if step.kind == "permute":
            return self._call(torch.permute, hidden, (*step.argument, len(step.argument)))
        if step.kind == "take":
            return self._call(operator.getitem, hidden, step.operands)
        if step.operands:
            (factor,) = step.operands
            if isinstance(factor, Tensor):
                factor = self._call(torch.reshape, factor, step.factor_shape)
            product = self._call(getattr(torch, step.kind), hidden, factor)
            return self._call(torch.Tensor.to, product, hidden.dtype)
        return self._call(operator.getitem, hidden, step.argument)

    def _operand(self, tensor: Tensor, has_grad: bool) -> Tensor:
        """Detaches an operand if no gradient flows to it, but to others; the region knows it if none does to any."""
        return tensor if has_grad or not self._logits.has_grad else self._call(torch.detach, tensor)

    def _weight(self, term: Term) -> Tensor:
        weight = self._operand(term.weight, term.has_grad)
        weight = self._call(torch.reshape, weight, tuple(weight.shape[dim] for dim in sorted(term.weight_dims)))
        return weight if term.weight_dims[0] < term.weight_dims[1] else self._call(torch.transpose, weight, 0, 1)

    def _bias(self) -> Tensor | None:
        logits = self._logits
        bias = None if logits.bias is None else self._flat(self._operand(logits.bias, logits.bias_has_grad))
        if not logits.shift:
            return bias
        shift = self._full((logits.terms[0].columns,), float(logits.shift / logits.scale), logits.dtype)
        return shift if bias is None else self._call(torch.add, bias, shift)

    # What the region computes.

    def _settings_of_logits(self) -> dict[str, Any]:
        logits, softcap = self._logits, self._logits.softcap
        # The scale of a `Loss` includes the softcap.
        scale = float(logits.scale if softcap is None else logits.scale * softcap)
        return {
            "logit_scale": scale,
            "softcap": None if softcap is None else float(softcap),
            "vocab_size": logits.vocab_size,
        }

    def _settings_of_teacher(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Returns the divergence from a teacher; adds the teacher's operands to the arguments."""
        inputs = []
        for part, *_ in self._groups:
            assert part.teacher is not None
            (term,) = part.teacher.terms
            input = self._call(torch.detach, self._input(term, part.teacher.rows))
            inputs.append(self._flat(input, 2))
        input = self._joined(inputs)
        arguments["teacher_input"] = self._call(torch.reshape, input, (*self._rows_shape, input.shape[-1]))
        arguments["teacher_weight"] = self._call(torch.detach, self._weight(term))
        return {"divergence": part.divergence}

    @property
    def _has_label_weights(self) -> bool:
        """Whether a call with a teacher takes weights of cross-entropies; without them it returns no argmax either."""
        has_argmax = any(part.argmaxes for part in self._region.parts)
        return self._region.teacher is not None and (has_argmax or any(len(group) > 1 for group in self._groups))

    def _add_weights_beside_teacher(self, arguments: dict[str, Any], weights: Sequence[Tensor]) -> dict[str, Any]:
        """Adds the weights of divergences and of cross-entropies, given for each part, to the arguments."""
        of_part = dict(zip(self._region.parts, weights, strict=True))
        for part in (part for part in of_part if part.labels.has_ignored):
            is_valid = self._in_rows(self._is_valid(part), part)
            of_part[part] = self._call(torch.where, is_valid, of_part[part], 0.0)
        columns = {"divergence_weights": [of_part[first] for first, *_ in self._groups]}
        if self._has_label_weights:
            columns["label_weights"] = [
                self._spread(of_part[others[0]], others[0]) if others else self._call(torch.zeros_like, of_part[first])
                for first, *others in self._groups
            ]
        for name, column in columns.items():
            arguments[name] = self._call(torch.reshape, self._joined(column), self._rows_shape)
        if not self._region.has_only_sum:
            return {}
        # Rows whose weights are all 0 are ignored.
        counts = (self._call(torch.ne, arguments[name], 0.0) for name in columns)
        is_counted = reduce(partial(self._call, torch.logical_or), counts)
        arguments["target"] = self._call(torch.where, is_counted, arguments["target"], _IGNORED)
        return {"ignore_index": _IGNORED}

    def _settings_of_rows(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Returns the settings of the loss for a region without a sum; several labels of each row need weights, too."""
        if self._region.parts[0].has_several_labels:
            arguments["target_weights"] = self._call(torch.zeros_like, arguments["target"], dtype=self._rows_dtype)
        if self._has_label_weights:
            # The loss of a row is its divergence, and the cross-entropy beside it an output.
            arguments["label_weights"] = self._call(torch.zeros_like, arguments["target"], dtype=self._rows_dtype)
        if self._loss is None:
            return {"reduction": "none", "ignore_index": NOTHING_IGNORED}
        (part,) = self._region.parts
        _, smoothing = part.as_loss(self._loss)  # type: ignore[misc]
        return {
            "reduction": part.rows[self._loss].reduction,
            "ignore_index": part.labels.ignore_index,
            "label_smoothing": float(smoothing),
        }

    def _settings_of_sum(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Returns the settings of the loss for a sum over tokens; adds its weights and inputs to the arguments."""
        region, total = self._region, self._region.total
        assert total is not None
        starts = [*(summand.tensor for summand in total.summands), *total.other_losses]
        operands = [*map(self._start, total.summands), *total.other_losses]
        ignored: list[Tensor | None] = [*map(self._mean_of_ignored, total.summands), *[None] * len(total.other_losses)]
        is_divided = self._leaves_out_tokens and any(op.name in ("div", *PRODUCTS) for op in total.ops)
        has_constant = total.has_constant or any(each is not None for each in ignored)
        is_followed = total.ops and (is_divided or has_constant)
        gradients = [self._full((), 1.0, self._rows_dtype)]
        if total.ops:
            gradients = self._writer.weights(total.ops, operands, total.place, values=ignored if is_followed else None)
        self._constants = [gradients.pop()] if is_followed else [each for each in ignored if each is not None]
        derivatives = dict(zip(starts, gradients, strict=True))
        self._other_losses = [(other, derivatives[other]) for other in total.other_losses]
        weights = [
            [
                self._token_weights(group, [derivatives[each.tensor] for each in group])
                for group in total.groups_of(part)
            ]
            for part in region.parts
        ]
        ignore_index = NOTHING_IGNORED if self._keeps_ignored else region.ignore_index
        settings: dict[str, Any] = {"reduction": "sum", "ignore_index": ignore_index}
        if self._losses is not None:
            factors, smoothing = self._losses
            settings["label_smoothing"] = float(smoothing)
            all_weights = []
            for part, factor, part_weights in zip(region.parts, factors, weights, strict=True):
                # Each weight has the shape that the program gave its tokens.
                in_rows = [self._in_rows(weight, part) if weight.ndim else weight for weight in part_weights]
                weight = reduce(partial(self._call, torch.add), in_rows or [self._full((), 0.0, self._rows_dtype)])
                all_weights.append(self._per_token(scaled(weight, factor, self._call), part))
            if region.teacher is not None:
                return settings | self._add_weights_beside_teacher(arguments, all_weights)
            name = "token_weights" if same(self._most_labels, 1) else "target_weights"
            arguments[name] = self._of_labels(all_weights, are_weights=True)
            return settings
        token_losses = (self._token_loss(part, total, each) for part, each in zip(region.parts, weights, strict=True))
        texts, inputs, token_weights = zip(*token_losses, strict=True)
        (settings["token_loss"],) = set(texts)
        arguments["token_inputs"] = tuple(map(self._joined, zip(*inputs, strict=True)))
        if token_weights[0] is not None:
            arguments["token_weights"] = self._joined(token_weights)
        return settings

    def _start(self, summand: Summand) -> Tensor:
        """Returns the tensor of a summand, with one class in place of all if the program sums over these later."""
        row = summand.part.rows.get(summand.tensor)
        return replace(summand.tensor, shape=row.shape) if row is not None and row.is_summed_later else summand.tensor

    @property
    def _leaves_out_tokens(self) -> bool:
        """Whether a weight that is infinite or NaN, as after a division by 0, may be that of no token that counts."""
        total, ignore_index = self._region.total, self._region.ignore_index
        is_selected = total is not None and any(op.name in ("where", "masked_fill") for op in total.ops)
        is_reduced = any(row.reduction != "none" for part in self._region.parts for row in part.rows.values())
        is_left_out = is_reduced or not self._keeps_ignored or self._region.teacher is not None
        return is_selected or (is_left_out and ignore_index != NOTHING_IGNORED)

    def _mean_of_ignored(self, summand: Summand) -> Tensor | None:
        """Returns what ignored rows add to a mean: 0, or NaN if all rows are ignored; None for other summands."""
        row = summand.part.rows.get(summand.tensor)
        if row is None or row.reduction != "mean" or not row.labels.has_ignored or summand.selections:
            return None
        return self._call(torch.mul, self._mean_weight(summand.part), 0.0)

    def _mean_weight(self, part: Part) -> Tensor:
        """Returns the weight of each row in a mean over the rows that are not ignored."""
        count = self._call(torch.Tensor.to, self._call(torch.sum, self._is_valid(part)), self._rows_dtype)
        return self._call(torch.reciprocal, count)

    def _joined(self, tensors: Sequence[Tensor]) -> Tensor:
        """Concatenates tensors that have a number for each token of one part."""
        return self._call(torch.cat, tensors) if len(tensors) > 1 else tensors[0]

    def _token_loss(
        self, part: Part, total: TokenSum, weights: Sequence[Tensor]
    ) -> tuple[str, tuple[Tensor, ...], Tensor | None]:
        """Returns the token loss of one part, the tensors that it reads, and the weights of the tokens."""
        factors = [self._per_token(weight, part) for weight in weights]
        token_weights: Tensor | None = None
        if self._region.has_only_sum:
            token_weights, *others = factors
            if others:
                counts = (self._call(torch.ne, each, 0.0) for each in factors)
                either = reduce(partial(self._call, torch.logical_or), counts)
                token_weights = self._call(torch.Tensor.to, either, self._rows_dtype)
        text, read = total.loss_of(part, has_weights=factors[0] is not token_weights)
        inputs = (factors[each] if isinstance(each, int) else self._token_input(each, part) for each in read)
        return text, tuple(inputs), token_weights

    def _token_input(self, inputs: Sequence[TokenInput], part: Part) -> Tensor:
        """Returns a tensor that a token loss reads, which may differ for selected tokens."""
        expanded, selections = [*map(self._expanded, inputs)], [each.selections for each in inputs]
        return self._in_rows(self._scattered(expanded, selections), part)

    def _expanded(self, input: TokenInput) -> Tensor:
        if not isinstance(input.value, Tensor):
            return self._full(input.shape, input.value, input.dtype)
        if input.ignored is not None:
            tensor = self._call(torch.ne, input.value, input.ignored)
        else:
            tensor = self._call(torch.detach, input.value)
        if not same_shape(tensor.shape, input.shape):
            tensor = self._call(torch.Tensor.expand, tensor, input.shape)
        return tensor

    def _scattered(self, tensors: Sequence[Tensor], selections: Sequence[Sequence[Tensor]]) -> Tensor:
        """Returns a number for each token in order, from tensors of selected tokens; tokens that none selects get 0."""
        value, *others = tensors
        if not selections[0]:
            return value
        first: Any = selections[0][0].op
        count = first.operands[0].numel
        token_numbers = self._call(torch.arange, count, device=value.device)
        numbers = [self._select(token_numbers, selection) for selection in selections]
        number, value = numbers[0], self._call(torch.flatten, value)
        if others:
            number = self._call(torch.cat, numbers)
            value = self._call(torch.cat, [value, *(self._call(torch.flatten, each) for each in others)])
        zeros = self._call(torch.zeros, (count,), dtype=value.dtype, device=value.device)
        return self._call(torch.scatter, zeros, 0, number, value)

    def _select(self, numbers: Tensor, selections: Sequence[Tensor]) -> Tensor:
        """Returns the numbers of the selected tokens, from those of all tokens."""
        for selected in selections:
            op: Any = selected.op
            numbers = self._call(torch.reshape, numbers, op.operands[0].shape)
            if op.name in PERMUTATIONS:
                numbers = self._call(torch.permute, numbers, order_of(op))
            elif indices := indices_of(op):
                numbers = self._call(operator.getitem, numbers, indices[op.outs.index(selected)])
            else:
                arguments, options = without_tensors(op)
                numbers = self._call(getattr(torch.Tensor, op.name), numbers, *arguments, **options)
        return self._call(torch.flatten, numbers)

    def _token_weights(self, group: Sequence[Summand], weights: Sequence[Tensor]) -> Tensor:
        """Returns the weights of the tokens, from the weights of a group's summands."""
        (summand, *_), (weight, *_) = group, weights
        if summand.selections:
            return self._scattered(weights, [each.selections for each in group])
        part, row = summand.part, summand.part.rows.get(summand.tensor)
        if row is None or row.reduction == "none":
            return weight
        if not row.labels.has_ignored:
            return weight if row.reduction == "sum" else self._call(torch.div, weight, part.count)
        if row.reduction == "mean":
            weight = self._call(torch.mul, self._mean_weight(part), weight)
        # Ignored rows get weight 0, even if all rows are ignored and the weight is a division by 0.
        return self._call(torch.where, self._is_valid(part), weight, 0.0)

    def _is_valid(self, part: Part) -> Tensor:
        """Returns a mask of the rows whose label is not ignored."""
        return self._call(torch.ne, part.labels.tensors[0], part.labels.ignore_index)

    def _full(self, shape: Sequence[Any], value: Any, dtype: torch.dtype) -> Tensor:
        return self._call(torch.full, tuple(shape), value, dtype=dtype, device=self._logits.terms[0].input.device)

    def _per_token(self, weight: Tensor, part: Part) -> Tensor:
        """Returns a weight for each token, from one that may be a number for all."""
        if weight.ndim == 0:
            weight = self._call(torch.Tensor.expand, weight, part.labels_shape(part.logits.rows_shape))
        return self._in_rows(self._call(torch.Tensor.to, weight, self._rows_dtype), part)

    def _in_rows(self, tensor: Tensor, part: Part) -> Tensor:
        """Returns numbers of a part's labels in the shape of the input's rows, which are flat if parts are joined."""
        rows = (part.count,) if self._is_joined else self._rows_shape
        return self._call(torch.reshape, tensor, part.labels_shape(rows))

    # Results.

    def _outputs(self) -> dict[str, bool]:
        """Returns the outputs that the region needs beside the loss, and whether a gradient flows back to them."""
        flows: dict[str, bool] = {}
        total = self._region.total
        for part in self._region.parts:
            for tensor, row in self._region.kept_rows(part).items():
                for name, (factor, _) in row.variables.items():
                    name = name if part.teacher is None else "divergence"
                    follows = name == ("log_prob" if self._region.teacher is None else "divergence")
                    if total is None and (self._loss is not None or (follows and not part.has_several_labels)):
                        continue  # It follows from the loss.
                    flows[name] = flows.get(name, False) or (factor != 0 and tensor.needs_grad and total is None)
            if part.argmaxes:
                flows[self._argmax_output(part)] = False
        return flows

    def _argmax_output(self, part: Part) -> str:
        """Returns the name of an argmax's output; valid_argmax is -1 in ignored rows, so -1 must not be their label."""
        is_free = not -1 <= part.labels.ignore_index < part.logits.terms[0].columns
        program = self._interpreter.program
        compared = (
            not part.steps_to(argmax) and _is_compared_with_labels(tensor, part, program)
            for tensor, argmax in part.argmaxes.items()
        )  # fmt: skip
        return "valid_argmax" if is_free and all(compared) else "argmax"

    def _results(self, outputs: dict[str, Tensor]) -> dict[Tensor, Tensor]:
        region, total = self._region, self._region.total
        results: dict[Tensor, Tensor] = {}
        if total is not None:
            loss = outputs["loss"]
            for constant in self._constants:
                loss = self._call(torch.add, loss, constant)
            for other, factor in self._other_losses:
                loss = self._call(torch.add, loss, self._call(torch.mul, other, factor))
            results[total.place] = self._like(total.place, loss)
        for part in region.parts:
            part_outputs = self._part_outputs(outputs, part)
            for tensor, argmax in part.argmaxes.items():
                indices = part_outputs[self._argmax_output(part)]
                if steps := part.steps_to(argmax):
                    indices = self._call(torch.reshape, indices, (*part.logits.rows_shape, 1))
                    indices = reduce(self._apply_step, steps, indices)
                results[tensor] = self._like(tensor, indices)
            for tensor in region.kept_rows(part):
                result = self._result(tensor, part_outputs, part)
                if part.rows[tensor].is_summed_later:
                    result = self._as_classes(result, tensor.shape, part.rows[tensor].shape)
                results[tensor] = self._like(tensor, result)
        read_again = [outputs["entropy"]] if "entropy" in outputs else []  # By the operator's backward.
        returned: dict[Tensor, Tensor] = {}
        for tensor in region.returned:
            new = results[tensor]
            # The program's own results may be changed in place by its caller. They have memory of their own: see
            # `Interpreter._is_seen_as_view`.
            others = *returned.values(), *read_again
            is_returned = any(map(tensor.shares_memory, self._interpreter.program.results))
            if is_returned and any(map(new.shares_memory, others)):
                new = self._call(torch.clone, new)
            returned[tensor] = new
        return returned

    def _part_outputs(self, outputs: dict[str, Tensor], part: Part) -> dict[str, Tensor]:
        """Returns the outputs of one part's rows and labels."""
        if part.teacher is not None and self._region.kept_rows(part):
            divergence = outputs.get("divergence", outputs["loss"])
            outputs = {**outputs, "log_prob": self._call(torch.neg, divergence)}
        if not self._is_joined:
            return outputs
        at = next(number for number, group in enumerate(self._groups) if part in group)
        start: Any = sum(group[0].count for group in self._groups[:at])
        rows = slice(start, start + self._groups[at][0].count)
        values = {name: self._call(operator.getitem, each, (rows,)) for name, each in outputs.items() if each.ndim}
        if (numbers := self._numbers_beside(part)) is not None:
            values = {name: self._call(operator.getitem, each, (numbers,)) for name, each in values.items()}
        if "log_prob" in values and not same(self._most_labels, 1):
            group = self._groups[at]
            first: Any = sum(other.labels.per_row for other in group[: group.index(part)])
            labels = slice(first, first + part.labels.per_row) if part.has_several_labels else first
            values["log_prob"] = self._call(operator.getitem, values["log_prob"], (slice(None), labels))
        return values

    def _result(self, result: Tensor, outputs: dict[str, Tensor], part: Part) -> Tensor:
        """Returns a result of the program, from what the region returns."""
        if result is self._loss:
            return outputs["loss"]
        row = part.rows[result]
        row_values, reduction = self._row_values(row, outputs), row.reduction
        if not row.labels.has_ignored:
            return row_values if reduction == "none" else self._call(getattr(torch, reduction), row_values)
        is_valid = self._is_valid(part)
        row_values = self._call(torch.where, is_valid, self._call(torch.reshape, row_values, is_valid.shape), 0.0)
        if reduction == "none":
            return row_values
        total = self._call(torch.sum, row_values)
        return total if reduction == "sum" else self._call(torch.div, total, self._call(torch.sum, is_valid))

    def _row_values(self, row: Row, outputs: dict[str, Tensor]) -> Tensor:
        """Returns a number of each row, before a reduction, from what the region returns."""
        if not row.variables:  # All atoms cancel, as in the sum of a softmax.
            return self._full(row.shape, row.constant, self._rows_dtype)
        if self._region.total is None and "log_prob" in row.variables and "log_prob" not in outputs:
            outputs = {"log_prob": self._call(torch.neg, outputs["loss"]), **outputs}
        if not same(row.labels.per_row, 1):
            outputs = {
                name: outputs[name] if name == "log_prob" else self._call(torch.unsqueeze, outputs[name], -1)
                for name in row.variables
            }
        return row.evaluate(outputs, self._call)

    def _as_classes(self, sums: Tensor, shape: Sequence[Any], kept_shape: Sequence[Any]) -> Tensor:
        """Returns a tensor of classes with the given sums, which the program computes of it: the first has all."""
        padding = [
            pad for size, kept in zip(shape[::-1], kept_shape[::-1], strict=True)
            for pad in (0, 0 if same(size, kept) else size - 1)
        ]  # fmt: skip
        return self._call(F.pad, self._call(torch.reshape, sums, kept_shape), padding)

    def _like(self, original: Tensor, tensor: Tensor) -> Tensor:
        """Returns a tensor in the shape and dtype of the program's, and detached if that needs no gradient."""
        if not original.needs_grad:
            tensor = self._call(torch.detach, tensor)
        tensor = self._call(torch.Tensor.to, self._call(torch.reshape, tensor, original.shape), original.dtype)
        # Other results may share the tensor, and the operator's backward may read it: it must not change in place.
        return self._call(torch.clone, tensor) if original in self._interpreter.program.changed else tensor

    # The upstream gradient.

    def _expected_gradient(self) -> Tensor | float | None:
        """Returns the upstream gradient to expect, from the program and the options; None for 1."""
        total, dtype, expected = self._region.total, self._logits.dtype, self._options.expected_gradient
        # The program's tensor that is the region's loss; None if that is computed from numbers of each row.
        result = self._loss if total is None else total.place
        # float16 needs a loss scale, and the factors that follow the loss do not give one.
        if dtype is torch.float16 and expected is None:
            return None
        number: float = expected or 1.0
        tensor: Tensor | None = None
        result_logits = [each.logits for each in self._interpreter.results.values()]
        for factor, divides in factors_after(result) if result is not None else ():
            if not isinstance(factor, Tensor):
                number = number / factor if divides else number * factor
            elif (
                not self._interpreter.depends_on(factor, *result_logits)
                and factor.position <= self._region.place.position
            ):
                factor = self._call(torch.reshape, self._call(torch.detach, factor), ())
                factor = self._call(torch.Tensor.to, factor, self._rows_dtype)
                factor = self._call(torch.div, 1.0, factor) if divides else factor
                tensor = factor if tensor is None else self._call(torch.mul, tensor, factor)
        if tensor is not None:
            # The tensor may be 0 when the program runs. Then gradients are computed for 1.
            tensor = tensor if number == 1 else self._call(torch.mul, tensor, number)
            size = self._call(torch.abs, tensor)
            limits = self._call(torch.ge, size, _LEAST_FACTOR), self._call(torch.le, size, 1 / _LEAST_FACTOR)
            return self._call(torch.where, self._call(torch.logical_and, *limits), tensor, 1.0)
        if number == 1 or not _LEAST_FACTOR <= abs(number) <= 1 / _LEAST_FACTOR:
            return None
        # A loss in 16 bits rounds its upstream gradient.
        return number if result is None or result.dtype.itemsize >= 4 else _rounded(number, result.dtype)


_IGNORED = -100
"""A label that is in no vocabulary"""


def _before_reshapes(labels: Tensor, rows: Sequence[Any], interpreter: Interpreter) -> Tensor:
    """Returns the labels, in the shape of the rows if they had it before reshapes."""
    base = labels
    # A cast, to eight bits or from floats, may have changed the labels. A reshape may be a copy, which a later change
    # of the base does not reach.
    while base.dtype == labels.dtype and base not in interpreter.program.changed:
        if same_shape(base.shape, rows):
            return base
        # Another region returns its argmax only as the program needs it.
        if base in interpreter.results or base.op is None or not keeps_elements(base.op):
            break
        base = base.op.operands[0]
    return labels


def _is_compared_with_labels(indices: Tensor, part: Part, program: Program) -> bool:
    """Whether an argmax is only compared with the labels of its rows."""

    def compares(user: Op) -> bool:
        if user.operands[0] is indices and keeps_elements(user):
            return _is_compared_with_labels(user.output, part, program)
        others = [operand for operand in user.operands if operand is not indices]
        if user.name not in ("eq", "ne") or len(others) != 1 or not same_shape(others[0].shape, indices.shape):
            return False
        return (program.number_at(others[0], user),) == part.labels.numbers

    return indices not in program.results and all(map(compares, indices.users))


def factors_after(loss: Tensor) -> list[tuple[Tensor | float, bool]]:
    """Returns the factors that follow a scalar loss, as in `loss * 0.5 / steps + other_loss`, up to a second use.

    Returns:
        Numbers, and tensors of one element; and whether the loss is divided by them.
    """
    factors: list[tuple[Tensor | float, bool]] = []
    tensor = loss
    while len(users := [user for user in tensor.users if any(out.needs_grad for out in user.outs)]) == 1:
        (user,) = users
        others = [each for each in user.args if each is not tensor]
        is_second = bool(others) and others[0] is user.args[0]
        is_divided = user.name == "div" and not is_second
        if user.name == "mul" or is_divided:
            is_tensor = len(others) == 1 and isinstance(others[0], Tensor) and same(others[0].numel, 1)
            if len(others) != 1 or not (is_tensor or (is_number(others[0]) and others[0] != 0)):
                break
            factors.append((others[0], is_divided))
        elif user.name == "neg" or (user.name == "sub" and is_second):
            factors.append((-1.0, False))
        elif user.name not in ("add", "sub", *COPIES, *RESHAPES):
            break
        tensor = user.outs[0]
    return factors


# Least upstream gradient for which gradients are computed in the forward; the largest is its reciprocal. Between the
# two, gradients neither underflow nor overflow in float32.
_LEAST_FACTOR = 2.0**-60


def _rounded(number: float, dtype: torch.dtype) -> float:
    """Rounds a normal number to a dtype, without a tensor, which may be fake while a program is compiled."""
    unit, (significand, exponent) = torch.finfo(dtype).eps / 2, math.frexp(number)
    return math.ldexp(round(significand / unit) * unit, exponent)
