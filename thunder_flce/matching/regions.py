"""A region: a call of `linear_cross_entropy` that replaces operations of a program.

It has one or more parts of the same head, which then gets one gradient. The rows of the parts are concatenated, or are
the same rows with several labels each.
"""

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

import torch

from thunder_flce.matching.algebra import Logits, Row, row_operands
from thunder_flce.matching.parts import Part, have_same_rows, steps_beside
from thunder_flce.matching.program import Op, Tensor, tensors_in
from thunder_flce.matching.sums import TokenSum


@dataclass(eq=False)
class Region:
    """A call of `linear_cross_entropy` that replaces operations of the program."""

    parts: list[Part]
    """In order"""
    total: TokenSum | None = None
    """The sum over tokens that the region computes from its parts' results, if it computes one"""
    note: str = ""
    """Why its gradients wait for the backward, if they do"""

    @property
    def loss(self) -> Tensor | None:
        """The cross-entropy, if it is the only result except for argmaxes; else None."""
        (part, tensor), *others = ((part, tensor) for part in self.parts for tensor in part.rows)
        is_loss = not others and part.rows[tensor].labels.has_ignored and part.as_loss(tensor) is not None
        return tensor if is_loss else None

    @property
    def teacher(self) -> Logits | None:
        """Logits of the teacher, those of the first part; None without a teacher."""
        return next((part.teacher for part in self.parts if part.teacher is not None), None)

    @property
    def needs_grad(self) -> bool:
        """See `Part.needs_grad`."""
        return any(part.needs_grad for part in self.parts)

    @property
    def ignore_index(self) -> int:
        """`Labels.ignore_index`; parts that ignore nothing, the least, may share rows with one that ignores a label."""
        return max(part.labels.ignore_index for part in self.parts)

    @cached_property
    def keeps_ignored(self) -> bool:
        """Whether rows whose label is ignored are computed, too."""
        if self.teacher is not None:
            return True

        def is_needed(part: Part) -> bool:
            if self.total is None:
                return self.loss is None
            return not all(row.labels.has_ignored for row in part.rows.values()) or self.total.counts_ignored(part)

        return any(is_needed(part) for part in self.parts if part.labels.has_ignored)

    @property
    def has_only_sum(self) -> bool:
        """Whether the sum is its only result."""
        return self.total is not None and not self.total.kept and not any(part.argmaxes for part in self.parts)

    @cached_property
    def plain_losses(self) -> tuple[list[Fraction], Fraction] | None:
        """Factors of the parts' losses and their label smoothing, if the sum is of plain losses alone; else None."""
        # Beside several labels of each row there may be other results: they cannot become a token loss.
        has_only_losses = self.has_only_sum or any(part.has_several_labels for part in self.parts)
        may_be_plain = self.teacher is not None or (has_only_losses and not self.keeps_ignored)
        return self.total.as_losses if self.total is not None and may_be_plain else None

    @property
    def row_groups(self) -> list[list[Part]]:
        """The parts; those in one list have the same rows, which are computed once, with the labels of all.

        A cross-entropy may have some of the rows of a divergence, which comes first.
        """
        losses = self.plain_losses
        has_several_labels = losses is not None and losses[1] == 0 and self.parts[0].class_weight is None
        if self.teacher is None and not has_several_labels:
            return [[part] for part in self.parts]
        groups: list[list[Part]] = []
        for part in sorted(self.parts, key=lambda part: part.teacher is None):
            for group in groups:
                if have_same_rows(group[0], part) or steps_beside(group[0], part) is not None:
                    group.append(part)
                    break
            else:
                groups.append([part])
        return groups

    @property
    def reads_again(self) -> bool:
        """Whether the backward may read its operands again: if gradients wait for it, or in float16.

        The program's own linear does not read its input in the backward if its weight is frozen, so the program may
        change that input in place.
        """
        return (bool(self.note) or self.parts[0].logits.dtype is torch.float16) and self.needs_grad

    @property
    def place(self) -> Op:
        """The operation whose place the region takes, unless it reads tensors that are computed later."""
        place = self.parts[0].first if self.total is None else self.total.place
        return place.op  # type: ignore[return-value]

    @property
    def returned(self) -> list[Tensor]:
        """The tensors of the program that it returns."""
        place = [] if self.total is None else [self.total.place]
        return place + [tensor for part in self.parts for tensor in (*self.kept_rows(part), *part.argmaxes)]

    def kept_rows(self, part: Part) -> dict[Tensor, Row]:
        """Returns the rows of a part that it returns."""
        total = self.total
        return {tensor: row for tensor, row in part.rows.items() if total is None or tensor in total.kept}

    @property
    def read_at(self) -> dict[Tensor, int]:
        """The tensors that it reads, each with the position of the operation that reads it in the program."""
        positions: dict[Tensor, int] = {}

        def add(position: int, *values: Any) -> None:
            for tensor in tensors_in(values):
                positions.setdefault(tensor, position)

        for part in self.parts:
            for logits in part.heads:
                for term in logits.terms:
                    add(term.outputs[0].position, term.input, term.weight)
                add(logits.bias_read_at, logits.bias)
                for tensor, position in row_operands(logits.rows).items():
                    add(position, tensor)
            add(part.labels.read_at, *part.labels.tensors, part.class_weight)
        if self.total is not None:
            made = {out for op in self.total.ops for out in op.outs} | {each.tensor for each in self.total.summands}
            for op in self.total.ops:
                add(op.position, *(operand for operand in op.operands if operand not in made), *op.numbers)
            for input in (input for summand in self.total.summands for input in summand.inputs):
                add(input.read_at, input.value)
        return positions
