"""What the matcher says of a tensor that hangs on the logits of a linear.

For a row of logits u with label y, with M = max u, L = log Σ exp u and p = exp(u - L):

    of each class    a u + r,  c exp(a u + r)  or  p (a u + r)            `Class`
    of each row      r  or  c exp(r)                                      `Row`

where r is a sum of u_y, L, M, E = Σ p u, U, the mean of u, and 1, each with a factor. So log_softmax(u) is u - L, its
entry at the label u_y - L, its mean U - L, an entropy L - E, a cross-entropy L - u_y, or 0 in rows whose label is
ignored. An operation is a rule for such sums, and ways to write a loss need not be known one by one.

Each of these comes with its gradient or without: from `detach` on, and in what is computed under `torch.no_grad`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from sys import float_info
from typing import Any, NamedTuple

import torch

from thunder_flce.matching.program import Tensor, hint, same, stored, tensors_in


class Unknown(Exception):
    """Raised for what cannot be described; says what about the operation, if its name does not."""


class Atom(NamedTuple):
    """One of the numbers that sums are made of."""

    name: str
    """"u" (only of each class), "y", "L", "M", "E", "U" or "1"."""
    has_grad: bool = True


Poly = tuple[tuple[Atom, Fraction], ...]
"""A sum: each atom with its factor, which is not 0."""


def poly(**factors: Any) -> Poly:
    """A sum of atoms with gradients."""
    return tuple(sorted((Atom(name), Fraction(factor)) for name, factor in factors.items()))


def added(*summands: tuple[Any, Poly]) -> Poly:
    """The sum of some sums, each with a factor."""
    total: dict[Atom, Fraction] = {}
    for factor, summand in summands:
        for atom, each in summand:
            total[atom] = total.get(atom, Fraction(0)) + factor * each
    return tuple(sorted((atom, factor) for atom, factor in total.items() if factor))


def without_grad(sum_: Poly) -> Poly:
    """The same number without a gradient."""
    return added(*((factor, ((atom._replace(has_grad=False), Fraction(1)),)) for atom, factor in sum_))


def value(sum_: Poly) -> dict[str, Fraction]:
    """The factor of each atom, whether or not it has a gradient."""
    total: dict[str, Fraction] = {}
    for atom, factor in sum_:
        total[atom.name] = total.get(atom.name, Fraction(0)) + factor
    return {name: factor for name, factor in total.items() if factor}


def atoms(sum_: Poly) -> set[str]:
    """The names of its atoms, also of one that cancels but for its gradient."""
    return {atom.name for atom, _ in sum_}


def has_grad(sum_: Poly) -> bool:
    """Whether any part of it has a gradient."""
    return any(atom.has_grad for atom, _ in sum_)


def with_u_as(name: str, sum_: Poly) -> Poly:
    """With a number of each row in place of u."""
    return added((1, tuple((atom._replace(name=name) if atom.name == "u" else atom, each) for atom, each in sum_)))


def _is(known: Poly, sum_: Poly) -> bool:
    """Whether a sum is a known one, with all of its gradient or without any."""
    return sum_ in (known, without_grad(known))


ONE: Poly = ((Atom("1", has_grad=False), Fraction(1)),)
LOG_PROBABILITY = poly(u=1, L=-1)
"""A log_softmax"""


@dataclass(frozen=True)
class Term:
    """A linear without its bias, times a factor: factor * input @ weight.T."""

    input: Tensor
    """(..., H), or with H elsewhere"""
    weight: Tensor
    """(V, H) or (H, V); with further dimensions of one, such as a kernel's"""
    hidden_dim: int
    """Where H is in the input's shape"""
    weight_dims: tuple[int, int]
    """Where V and H are in the weight's shape"""
    dtype: torch.dtype
    """What the input is cast to, where it has another one"""
    factor: Fraction = Fraction(1)
    has_grad: bool = True
    """Whether gradients flow to the operands: not where the linear was detached, or computed without gradients."""
    changes: int = 0
    """How many changes in place the operands, and a bias, may have had before"""
    outputs: tuple[Tensor, ...] = field(default=(), compare=False)
    """What the linear returns; what several return, where each had some of the input's rows"""

    @property
    def columns(self) -> Any:
        """The number of classes, V."""
        return self.weight.shape[self.weight_dims[0]]

    @property
    def features(self) -> Any:
        """The hidden size, H."""
        return self.weight.shape[self.weight_dims[1]]

    @property
    def rows_shape(self) -> tuple[Any, ...]:
        """The input's shape without H."""
        shape, dim = self.input.shape, self.hidden_dim
        return (*shape[:dim], *shape[dim + 1 :])


@dataclass(frozen=True)
class RowStep:
    """An operation on the rows of logits, by what it does to the shape without the classes."""

    kind: str
    """"reshape", "permute", "index", "take" for rows that tensors pick, "mul" and "div" for a factor of each row, or
    "cat" for several results of such operations"""
    argument: tuple[Any, ...]
    """The new shape, the order of the dimensions, an index (a number or a slice) for each of them, what is the same for
    equal tensors, or the dimension of "cat" and the operations that give each of its operands"""
    shape: tuple[Any, ...] = field(default=(), compare=False)
    """The shape after it"""
    given: tuple[Any, ...] = field(default=(), compare=False)
    """The index with its tensors; or one factor for each row, or for all"""
    factor_shape: tuple[Any, ...] = field(default=(), compare=False)
    """With which it is broadcast to the rows of an input, with a dimension of one in place of H"""
    read_at: int = field(default=0, compare=False)
    """The position of the operation that reads it"""


@dataclass(frozen=True)
class Logits:
    """Some rows of softcap * tanh(scale * z + shift), or of scale * z without a softcap; z is a sum of linears.

    Factors are fractions, so that z / 49 * 49 is z.
    """

    terms: tuple[Term, ...]
    """More than one where linears are added, as a low-rank adapter does it; the one with the largest H is the first."""
    bias: Tensor | None = None
    bias_has_grad: bool = True
    """Whether gradients flow to the bias, which may be added after the terms were detached"""
    scale: Fraction = Fraction(1)
    softcap: Fraction | None = None
    shift: Fraction = Fraction(0)
    vocab_size: int | None = None
    """The number of columns, where only the first columns of the vocabulary are kept"""
    rows: tuple[RowStep, ...] = ()
    """Replayed on the rows of the inputs, they give these rows in their order."""
    group: Any = None
    """The ranks among which the rows of the weights and of the bias are divided; the logits have the columns of all"""

    @property
    def rows_shape(self) -> tuple[Any, ...]:
        """What `rows` leave of the inputs' shape, without H."""
        return self.rows[-1].shape if self.rows else self.terms[0].rows_shape

    @property
    def operands(self) -> list[Tensor]:
        """The inputs, weights and bias of the linears."""
        tensors = [tensor for term in self.terms for tensor in (term.input, term.weight)]
        return tensors if self.bias is None else [*tensors, self.bias]

    @property
    def given(self) -> dict[Tensor, int]:
        """The factors of rows, and what picks them, each with the position of what reads it."""
        return _given(self.rows)

    @property
    def linears(self) -> set[Tensor]:
        """What the linears return."""
        return {out for term in self.terms for out in term.outputs}

    @property
    def has_grad(self) -> bool:
        """Whether gradients flow to any operand."""
        return any(term.has_grad for term in self.terms) or (self.bias is not None and self.bias_has_grad)

    @property
    def in_order(self) -> "Logits":
        """What two have in common whose largest is in one place: any increasing function of logits keeps it."""
        terms = tuple(replace(term, has_grad=False) for term in self.terms)
        sign = Fraction(1 if self.scale > 0 else -1)
        return replace(self, terms=terms, bias_has_grad=False, scale=sign, softcap=None, shift=Fraction(0))

    @property
    def is_similarity(self) -> bool:
        """Whether it is of all pairs of a batch, of which a contrastive loss is made: the classes are no vocabulary."""
        head = self.terms[0]
        is_square = len(head.rows_shape) == 1 and same(head.columns, head.rows_shape[0])
        return is_square and stored(head.weight).op is not None

    @property
    def is_head(self) -> bool:
        """Whether it may be of a language model's head, and not of a gate: more columns than the input has features.

        And a parameter's, not activations times activations.
        """
        head = self.terms[0]
        weight = stored(head.weight)
        return hint(head.columns) > hint(head.features) and weight.op is None and weight is not head.input

    @property
    def is_linear(self) -> bool:
        """Whether these are all of the linears' columns, times a factor at most."""
        return self.softcap is None and self.vocab_size is None

    @property
    def has_float_factors(self) -> bool:
        """Whether scale, softcap and the factors of the terms, which may be products, and what is added are finite."""
        softcap = Fraction(1) if self.softcap is None else self.softcap
        factors = (softcap, self.scale * softcap, *(term.factor for term in self.terms))
        are_floats = all(float_info.min <= abs(factor) <= float_info.max for factor in factors)
        return are_floats and abs(self.shift / self.scale) <= torch.finfo(self.dtype).max

    @property
    def dtype(self) -> torch.dtype:
        """That of the head's operands."""
        return self.terms[0].dtype


def _given(steps: Sequence[RowStep]) -> dict[Tensor, int]:
    found: dict[Tensor, int] = {}
    for step in steps:
        found |= dict.fromkeys(tensors_in(step.given), step.read_at)
        for part in step.argument[1:] if step.kind == "cat" else ():
            found |= _given(part)
    return found


@dataclass(frozen=True)
class Class:
    """A number of each class."""

    logits: Logits
    dim: int
    """Where the classes are in the shape"""
    shape: tuple[Any, ...]
    sum: Poly
    """a u + r, each atom either with its gradient or without"""
    form: str = ""
    """"", "exp" for factor * exp(sum), "p" for softmax(u) * sum"""
    factor: Fraction = Fraction(1)
    p_has_grad: bool = True
    """Of the form "p": whether the probability has its gradient"""
    labels: "Labels | None" = None
    """Where all other classes are 0, and only a sum over the classes follows"""

    def __post_init__(self) -> None:
        if len(atoms(self.sum)) < len(self.sum):
            raise Unknown("with a part that has no gradient")

    @property
    def columns(self) -> Any:
        """How many classes there are."""
        return self.shape[self.dim]

    @property
    def rows_shape(self) -> tuple[Any, ...]:
        """The shape without the classes."""
        return (*self.shape[: self.dim], *self.shape[self.dim + 1 :])

    @property
    def kept_shape(self) -> tuple[Any, ...]:
        """The shape of what is one number of each row, with a dimension of one in place of the classes."""
        return (*self.shape[: self.dim], 1, *self.shape[self.dim + 1 :])

    @property
    def factor_of_u(self) -> Fraction:
        """The factor a."""
        return value(self.sum).get("u", Fraction(0))

    @property
    def u(self) -> Poly:
        """The summand a u."""
        return tuple((atom, factor) for atom, factor in self.sum if atom.name == "u")

    @property
    def rest(self) -> Poly:
        """The summand r."""
        return tuple((atom, factor) for atom, factor in self.sum if atom.name != "u")

    @property
    def is_logits(self) -> bool:
        """Whether it is u itself."""
        # Other logits that are made of these would lose a factor of the gradient.
        return self.form == "" and _is(poly(u=1), self.sum)

    @property
    def is_shifted_logits(self) -> bool:
        """Whether it is u plus something of each row."""
        return self.form == "" and self.factor_of_u == 1

    @property
    def is_probability(self) -> bool:
        """Whether it is softmax(u)."""
        return self.form == "exp" and self.factor == 1 and _is(LOG_PROBABILITY, self.sum)

    def row(self, name: str, shape: tuple[Any, ...], labels: "Labels | None" = None) -> "Row":
        """A number of each row, which has one of the row's, such as u_y, in place of u."""
        return Row(self.logits, shape, with_u_as(name, self.sum), self.form, self.factor, labels)

    def detached(self) -> "Class":
        """Without a gradient."""
        return replace(self, sum=without_grad(self.sum), p_has_grad=False)


@dataclass(frozen=True)
class Labels:
    """The labels of rows, compared by their values."""

    tensors: tuple[Tensor, ...] = field(compare=False)
    """Several where parts of the rows were joined, in `shapes` along `dim`"""
    numbers: tuple[tuple[int, int], ...]
    """`Program.number_at` of each"""
    read_at: int = field(compare=False)
    """The position of the operation that read them first"""
    wraps: bool = False
    """Whether labels from -V to -1 count from the end"""
    ignore_index: int | None = None
    """Of a cross-entropy: it is 0 in rows of this label"""
    fills: tuple[tuple[int, int], int | None] | None = field(default=None, compare=False)
    """Where they are other labels with 0 in place of one label, or of all that are negative (None): the number of these
    and that label"""
    shapes: tuple[tuple[Any, ...], ...] = field(default=(), compare=False)
    dim: int = 0

    def are_filled(self, others: "Labels | None") -> bool:
        """Whether they are others with 0 in place of their ignore_index."""
        index = None if others is None else others.ignore_index
        if self.fills is None or others is None or index is None or index >= 0:
            return False
        return (self.fills[0],) == others.numbers and self.fills[1] in (None, index)


@dataclass(frozen=True)
class Row:
    """A number of each row."""

    logits: Logits
    shape: tuple[Any, ...]
    sum: Poly
    form: str = ""
    """"exp" for factor * exp(sum) in place of the sum"""
    factor: Fraction = Fraction(1)
    labels: Labels | None = None
    class_weight: Tensor | None = None
    """(V,): of a cross-entropy, the weights of what each class adds, where it has any"""
    reduction: str = "none"
    """"sum" or "mean" where it is a number of all rows together, but those whose label is ignored"""

    def detached(self) -> "Row":
        """Without a gradient."""
        return replace(self, sum=without_grad(self.sum))

    @property
    def ignore_index(self) -> int | None:
        """The label of the rows in which it is 0, if there may be such."""
        return None if self.labels is None else self.labels.ignore_index

    @property
    def as_loss(self) -> tuple[Fraction, Fraction] | None:
        """Its factor c and label smoothing s where it is c times a cross-entropy, L - (1 - s) u_y - s U."""
        factors = value(self.sum)
        factor, of_label, of_mean = (factors.pop(name, Fraction(0)) for name in ("L", "y", "U"))
        smoothing = -of_mean / factor if factor else Fraction(-1)
        is_loss = factor + of_label + of_mean == 0 and 0 <= smoothing <= 1
        has_one_grad = len({atom.has_grad for atom, _ in self.sum}) == 1
        if not is_loss or not has_one_grad or factors or self.form or self.labels is None:
            return None
        return factor, smoothing

    @property
    def variables(self) -> dict[str, tuple[Fraction, Fraction]]:
        """The sum by what a region returns, `pointwise.VARIABLES`: the factors with and without a gradient.

        u_y = log_prob + L and E = L - entropy.
        """
        found: dict[str, list[Fraction]] = {}
        for atom, factor in self.sum:
            for name, sign in _PARTS.get(atom.name, {}).items():
                found.setdefault(name, [Fraction(0), Fraction(0)])[not atom.has_grad] += sign * factor
        return {name: (a, b) for name, (a, b) in found.items() if a or b}

    @property
    def constant(self) -> float:
        """Its value where it has no `variables`."""
        constant = float(value(self.sum).get("1", 0))
        return float(self.factor) * math.exp(constant) if self.form else constant

    def made_of(self, known: Mapping[str, Any], call: Callable[..., Any]) -> Any:
        """Its value from those of the `variables`, which there are, by functions that `call` calls."""
        total = None
        for name, (factor, cut) in self.variables.items():
            for each, is_cut in ((factor, False), (cut, True)):
                if each:
                    part = scaled(call(torch.detach, known[name]) if is_cut else known[name], each, call)
                    total = part if total is None else call(torch.add, total, part)
        if constant := value(self.sum).get("1"):
            total = call(torch.add, total, float(constant))
        return scaled(call(torch.exp, total), self.factor, call) if self.form else total

    @property
    def kind(self) -> str:
        """What a user would call it."""
        if self.ignore_index is not None:
            return "cross-entropy"
        names = self.variables
        return next((words for name, words in _KINDS.items() if name in names), "log-sum-exp")

    @property
    def is_whole(self) -> bool:
        """Whether a region can return it: it does not hang on the maximum."""
        return atoms(self.sum).isdisjoint(("M", "u"))


def scaled(number: Any, factor: Fraction | float, call: Callable[..., Any]) -> Any:
    """A number of each row times a factor, by functions of PyTorch's that `call` calls."""
    if factor == 1:
        return number
    return call(torch.neg, number) if factor == -1 else call(torch.mul, number, float(factor))


_PARTS = {
    "y": {"log_prob": 1, "log_sum_exp": 1},
    "E": {"entropy": -1, "log_sum_exp": 1},
    "L": {"log_sum_exp": 1},
    "U": {"mean_logit": 1},
}
_KINDS = {
    "log_prob": "log-probability",
    "entropy": "entropy",
    "mean_logit": "sum over the classes",
    "log_sum_exp": "log-sum-exp",
}


@dataclass(frozen=True)
class Argmax:
    """The column of the largest logit of each row."""

    logits: Logits
    """`Logits.in_order`"""
    shape: tuple[Any, ...]

    def detached(self) -> "Argmax":
        """It has no gradient."""
        return self


Value = Class | Row | Argmax
