"""What is asked for of the same rows of logits, for the same labels: a `Part`."""

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from thunder_flce.matching.algebra import Labels, Logits, Row, value
from thunder_flce.matching.decisions import PLURALS, NotFused
from thunder_flce.matching.interpreter import Interpreter, Result
from thunder_flce.matching.program import Op, Tensor
from thunder_flce.operation.loss import NOTHING_IGNORED
from thunder_flce.operation.pointwise import Handle, Recorder


@dataclass(eq=False)
class TokenInput:
    """A tensor that a token loss reads."""

    tensor: Tensor | None
    """None where it says which tokens were picked"""
    shape: tuple[Any, ...]
    """What it is expanded to, of one element a token"""
    read_at: int
    """The position of the operation that reads it"""
    ignored: int | None = None
    """Where it is labels: the loss reads whether they are not this one"""
    picks: tuple[Tensor, ...] = ()
    """Where it is for some tokens alone, or in another order: see `sums.Summand`"""

    @property
    def dtype(self) -> torch.dtype:
        """That of what the loss reads."""
        return torch.bool if self.tensor is None or self.ignored is not None else self.tensor.dtype


@dataclass(eq=False)
class Part:
    """What reads the same rows of the same logits for the same labels."""

    logits: Logits
    labels: Labels | None
    class_weight: Tensor | None
    """Of a cross-entropy, which is then all that it gives"""
    rows: list[Result] = field(default_factory=list)
    argmaxes: list[Result] = field(default_factory=list)
    problem: NotFused | None = None
    recorder: Recorder = field(default_factory=Recorder)
    """What is computed token by token of its results"""
    inputs: dict[Handle, TokenInput] = field(default_factory=dict)
    """What that reads beside them"""
    own: dict[Tensor, Handle] = field(default_factory=dict)
    """What each result is in the recorder"""

    @property
    def count(self) -> Any:
        """How many rows there are."""
        return math.prod(self.logits.rows_shape)

    @property
    def results(self) -> list[Result]:
        """All tensors of the program that it gives."""
        return [*self.rows, *self.argmaxes]

    @property
    def kind(self) -> str:
        """What a user would call it."""
        kinds = {result.row.kind for result in self.rows}
        return next(kind for kind in PLURALS if kind in kinds)

    @property
    def ignore_index(self) -> int:
        """The label of the rows that a cross-entropy leaves out."""
        found = None if self.labels is None else self.labels.ignore_index
        return NOTHING_IGNORED if found is None else found

    @property
    def is_mean_of_logits(self) -> bool:
        """Whether it has nothing but means of logits, which any layer may be asked for."""
        return all(set(value(each.row.sum)) - {"1"} == {"U"} for each in self.rows)

    @property
    def has_grad(self) -> bool:
        """Whether a gradient comes back to any of its results."""
        return any(result.tensor.needs_grad for result in self.results)

    @property
    def first(self) -> Op:
        """The first operation of its cross-entropies, or of all results where it has none."""
        ops = [result.op for result in self.rows if result.row.kind == "cross-entropy"]
        return min(ops or [result.op for result in self.rows], key=lambda op: op.position)


def parts_of(interpreter: Interpreter) -> list[Part]:
    """The parts of a program, in order."""
    parts: list[Part] = []
    rows = [result for result in interpreter.results.values() if isinstance(result.value, Row)]
    for result in rows:
        row, labels = result.row, result.row.labels
        if row.class_weight is None and labels and labels.ignore_index is not None and labels.ignore_index < 0:
            # What else reads these rows at their labels takes no negative one.
            plain = replace(labels, ignore_index=None)
            if any(each.row.labels == plain and each.row.logits == row.logits for each in rows):
                result.value = replace(row, labels=plain)
    # An entropy has no labels of its own, so the others come first, and cross-entropies before them.
    for result in sorted(
        rows, key=lambda each: (each.row.labels is None, each.row.ignore_index is None, each.op.position)
    ):
        row = result.row
        part = next((each for each in parts if _takes(each, row)), None)
        if part is None:
            part = Part(row.logits, row.labels, row.class_weight)
            parts.append(part)
        part.rows.append(result)
    for part in parts:
        part.rows.sort(key=lambda each: each.op.position)
    return sorted(parts, key=lambda part: part.first.position)


def _takes(part: Part, row: Row) -> bool:
    """Whether a part can give another number of its rows, too: of all of them, with its labels."""
    has_weights = part.class_weight is not None or row.class_weight is not None
    has_labels = row.labels in (None, part.labels) or (row.labels is not None and row.labels.are_filled(part.labels))
    return part.logits == row.logits and has_labels and not has_weights
