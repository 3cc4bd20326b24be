"""Groups the results that a program needs by their rows of logits and their labels, as `Part`s."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import torch

from thunder_flce.matching.algebra import (
    NO_LABELS,
    Argmax,
    Labels,
    Logits,
    Row,
    RowStep,
    atoms,
    has_grad,
    linears_of,
    value,
)
from thunder_flce.matching.decisions import PLURALS, NotFused
from thunder_flce.matching.interpreter import Interpreter
from thunder_flce.matching.program import Source, Tensor, same, same_shape
from thunder_flce.operation.divergence import Divergence
from thunder_flce.operation.loss import NOTHING_IGNORED
from thunder_flce.operation.pointwise import Handle, Recorder


@dataclass(eq=False)
class TokenInput:
    """A tensor that a token loss reads."""

    value: Any
    """A tensor; a symbolic number that all tokens share, such as an argument that changes; or True, for a mask of the
    tokens that `selections` select"""
    dtype: torch.dtype
    """Dtype of the values that the loss reads"""
    shape: tuple[Any, ...]
    """The shape to which it is expanded, with one element for each token"""
    read_at: int
    """Position of the operation that reads it"""
    ignored: int | None = None
    """If given, the tensor has labels, and the loss reads whether they differ from this one"""
    selections: tuple[Tensor, ...] = ()
    """Set if it belongs to selected tokens, or to all in another order: see `sums.Summand`"""
    key: str = ""
    """If given, equal for inputs that are equal if they have one shape"""


@dataclass(eq=False)
class Part:
    """All results that have the same rows of the same logits, and the same labels."""

    logits: Logits
    labels: Labels
    class_weight: Tensor | None
    """The class weights of a cross-entropy, which is then the only one of `rows`"""
    rows: dict[Tensor, Row] = field(default_factory=dict)
    """Numbers of its rows, in order"""
    argmaxes: dict[Tensor, Argmax] = field(default_factory=dict)
    problem: NotFused | None = None
    recorder: Recorder = field(default_factory=Recorder)
    """Records the operations that compute token by token from its results"""
    inputs: dict[Handle, TokenInput] = field(default_factory=dict)
    """Further tensors that these operations read"""
    handles: dict[Tensor, Handle] = field(default_factory=dict)
    """Handle of each result in the recorder"""
    line: Source = Source()
    """`Labels.line`; without labels, the line of the first result"""

    @property
    def count(self) -> Any:
        """Number of rows."""
        return math.prod(self.logits.rows_shape)

    @property
    def teacher(self) -> Logits | None:
        """The teacher's logits, if its results are divergences from a teacher, or cross-entropies from it."""
        return self.labels.teacher

    @property
    def heads(self) -> list[Logits]:
        """Its logits, and those of a teacher."""
        return [self.logits, *([] if self.teacher is None else [self.teacher])]

    @property
    def linears(self) -> set[Tensor]:
        """Outputs of the linears from which its results are computed, also of a teacher's."""
        return linears_of(self.logits, self.labels)

    @property
    def divergence(self) -> Divergence | None:
        """The divergence from its teacher that its results are, if they are of one kind; else None."""
        kinds = {None if row.divergence is None else row.divergence[1] for row in self.rows.values()}
        kind = kinds.pop()
        if kind is None or kinds:
            return None
        plain = Divergence(kind=kind, temperature=float(1 / self.logits.scale))
        return plain if kind != "jensen_shannon" else replace(plain, beta=self.labels.share)

    @property
    def has_several_labels(self) -> bool:
        """Whether each row has several labels."""
        return not same(self.labels.per_row, 1)

    def labels_shape(self, rows: Sequence[Any]) -> tuple[Any, ...]:
        """Returns the shape of its labels, for rows of a shape."""
        return (*rows, self.labels.per_row) if self.has_several_labels else (*rows,)

    @property
    def kind(self) -> str:
        """What messages call it: one of `PLURALS`."""
        kinds = {row.kind for row in self.rows.values()}
        return next(kind for kind in PLURALS if kind in kinds)

    @property
    def has_only_logits(self) -> bool:
        """Whether all its results are means and maxima of logits, which a program may also take of other layers."""
        return all(set(value(row.sum)) - {"1"} in ({"U"}, {"M"}) for row in self.rows.values())

    @property
    def is_gathered_logits(self) -> bool:
        """Whether all its results are logits at its labels, without a normalisation."""
        return all(atoms(row.sum) - {"1"} == {"y"} for row in self.rows.values())

    @property
    def needs_grad(self) -> bool:
        """Whether a gradient flows back to any of its results."""
        return any(tensor.needs_grad for tensor in self.rows)

    @property
    def first(self) -> Tensor:
        """The first of its rows' results."""
        return next(iter(self.rows))

    def as_loss(self, tensor: Tensor) -> tuple[Fraction, Fraction] | None:
        """`Row.as_loss` of a result, if the description has a gradient just as the program's tensor has; else None."""
        row = self.rows[tensor]
        return row.as_loss if has_grad(row.sum) == tensor.needs_grad else None

    def add_input(self, new: TokenInput) -> Handle:
        """Returns the recorder's handle of an input; equal inputs have one."""
        for handle, input in self.inputs.items():
            if new.key and new.key == input.key and same_shape(new.shape, input.shape):
                return handle
        handle = self.recorder.add_input(new.dtype)
        self.inputs[handle] = new
        return handle

    def steps_to(self, argmax: Argmax) -> tuple[RowStep, ...] | None:
        """Returns the steps from the part's rows to those of an argmax; None if they are no slices and reshapes."""
        rows, count = argmax.logits.rows, len(self.logits.rows)
        has_rows = rows[:count] == self.logits.rows and replace(self.logits.argmax_key, rows=rows) == argmax.logits
        is_plain = all(step.kind in _SLICES for step in rows[count:])
        return rows[count:] if has_rows and is_plain else None


def parts_of(interpreter: Interpreter) -> list[Part]:
    """Returns the parts of a program, in order."""
    parts: list[Part] = []
    rows = {tensor: value for tensor, value in interpreter.results.items() if isinstance(value, Row)}
    for tensor, row in rows.items():
        if row.class_weight is None and row.labels.ignore_index < 0:
            # Another result gathers these rows at the same labels: none may be negative, so none is ignored.
            plain = replace(row.labels, ignore_index=NOTHING_IGNORED)
            if any(other.labels == plain and other.logits == row.logits for other in rows.values()):
                rows[tensor] = replace(row, labels=plain)

    def priority(result: tuple[Tensor, Row]) -> tuple[bool, bool, int]:
        # An entropy has no labels, and joins a part that has: so cross-entropies come first, then others with labels.
        tensor, row = result
        return not row.labels.are_given, not row.labels.has_ignored, tensor.position

    for tensor, row in sorted(rows.items(), key=priority):
        part = next((other for other in parts if _can_return(other, row)), None)
        if part is None:
            part = Part(row.logits, row.labels, row.class_weight)
            parts.append(part)
        part.rows[tensor] = row
    for part in parts:
        part.rows = dict(sorted(part.rows.items(), key=lambda result: result[0].position))
        part.line = part.labels.line if part.labels.are_given else part.first.op.source  # type: ignore[union-attr]
    return sorted(parts, key=lambda part: part.first.position)


def _can_return(part: Part, row: Row) -> bool:
    """Whether a part can return this number, too: it has the same rows, labels that fit, and no class weights."""
    has_weights = part.class_weight is not None or row.class_weight is not None
    # What is computed from a teacher gives no entropies beside it.
    others = () if part.teacher is not None else (NO_LABELS,)
    has_labels = row.labels in (*others, part.labels) or row.labels.are_filled(part.labels)
    return part.logits == row.logits and has_labels and not has_weights


def have_same_rows(a: Part, b: Part) -> bool:
    """Whether parts have the same logits; beside a divergence, the temperature may differ."""
    if a.teacher is None and b.teacher is None:
        return a.logits == b.logits
    return replace(a.logits, scale=Fraction(1)) == replace(b.logits, scale=Fraction(1))


def steps_beside(divergence: Part, part: Part) -> tuple[tuple[Any, ...], tuple[RowStep, ...]] | None:
    """Returns the steps, slices and reshapes, that select a part's rows among those of a divergence, and their shape.

    None if they are no such rows: of the same logits, but for the temperature.
    """
    bare, other = (replace(each.logits, scale=Fraction(1), rows=()) for each in (divergence, part))
    start, steps = divergence.logits.selection, part.logits.rows
    order, rest = divergence.logits.rows[len(start) :], steps[len(start) :]
    are_slices = steps[: len(start)] == start and all(step.kind in _SLICES for step in rest)
    is_in_order = all(step.kind == "reshape" for step in order)
    if divergence.teacher is None or part.teacher is not None or bare != other or not (are_slices and is_in_order):
        return None
    return (start[-1].shape if start else divergence.logits.terms[0].rows_shape), rest


_SLICES = ("index", "reshape", "permute")
