"""Descriptions of tensors that are computed from the logits of a linear layer.

For a row of logits u with label y, let M = max u, L = log Σ exp u and p = exp(u - L). A tensor is described as

    a number of each class    a u + r  or  c exp(a u + r)            `Class`
    a number of each row      r  or  c exp(r)                        `Row`

where r is a linear combination of u_y, L, M, E = Σ p u, the mean U of u, and 1. So log_softmax(u) is u - L, its entry
at the label is u_y - L, its mean U - L, and an entropy L - E. A cross-entropy is L - u_y, or 0 in rows whose label is
ignored. A rule says what an operation makes of such sums, so the matcher need not know each way to write a loss.

The probabilities q of a teacher, another head without a gradient, may stand for a label. Then u_y is Σ q u, and there
are log q, also with the mixture m = β q + (1 - β) p. A product with p or q is described by its sum over the classes, r,
which may have Σ q log q, Σ p log q and the like: the divergence KL(q‖p) is L - u_y + Σ q log q.

Each atom of a sum has a gradient or not: it has none after `detach`, and if computed under `torch.no_grad`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from sys import float_info
from typing import Any, NamedTuple

import torch

from thunder_flce.matching.program import Source, Tensor, hint, same, stored, tensors_in
from thunder_flce.operation.loss import NOTHING_IGNORED


class Unknown(Exception):
    """Raised if an operation's result cannot be described; the message says why, if the operation's name does not."""


def require(condition: Any, detail: str = "") -> None:
    """Raises `Unknown` unless a condition holds, without which an operation's result cannot be described."""
    if not condition:
        raise Unknown(detail)


class Atom(NamedTuple):
    """A variable of a sum, with or without its gradient."""

    name: str
    """In a `Class`, one of "u", "log q" and "log m". In both, "y", "L", "M", "E", "U" or "1" and, of a teacher, one of
    "q log q", "p log q", "q log m" and "p log m"."""
    has_grad: bool = True


Poly = tuple[tuple[Atom, Fraction], ...]
"""A linear combination: pairs of an atom and its factor, which is not 0."""


def poly(**factors: Any) -> Poly:
    """Returns a sum of atoms with gradients, from the factors by the atoms' names."""
    return tuple(sorted((Atom(name), Fraction(factor)) for name, factor in factors.items()))


def added(*summands: tuple[Any, Poly]) -> Poly:
    """Returns the linear combination of sums, each given with its factor."""
    total: dict[Atom, Fraction] = {}
    for factor, summand in summands:
        for atom, coefficient in summand:
            total[atom] = total.get(atom, Fraction(0)) + factor * coefficient
    return tuple(sorted((atom, factor) for atom, factor in total.items() if factor))


def without_grad(sum_: Poly) -> Poly:
    """Returns the same sum without gradients."""
    return added(*((factor, ((atom._replace(has_grad=False), Fraction(1)),)) for atom, factor in sum_))


def value(sum_: Poly) -> dict[str, Fraction]:
    """Returns the factor of each atom by its name: the factors with and without a gradient, added up."""
    total: dict[str, Fraction] = {}
    for atom, factor in sum_:
        total[atom.name] = total.get(atom.name, Fraction(0)) + factor
    return {name: factor for name, factor in total.items() if factor}


def atoms(sum_: Poly) -> set[str]:
    """Returns the names of a sum's atoms, also of an atom whose value cancels and whose gradient does not."""
    return {atom.name for atom, _ in sum_}


def has_grad(sum_: Poly) -> bool:
    """Whether any atom of a sum has a gradient."""
    return any(atom.has_grad for atom, _ in sum_)


def renamed(sum_: Poly, names: Mapping[str, str]) -> Poly:
    """Returns the sum with other atoms in place of some, by their names."""
    return added((1, tuple((atom._replace(name=names.get(atom.name, atom.name)), factor) for atom, factor in sum_)))


def with_u_as(name: str, sum_: Poly) -> Poly:
    """Returns the sum with the atom `name`, a number of each row, in place of u."""
    return renamed(sum_, {"u": name})


def _equals(expected: Poly, sum_: Poly) -> bool:
    """Whether a sum equals a known one, with all of its gradient or without any."""
    return sum_ in (expected, without_grad(expected))


ONE: Poly = ((Atom("1", has_grad=False), Fraction(1)),)
LOG_PROBABILITY = poly(u=1, L=-1)
"""The sum that `log_softmax` returns"""
_TIMES_P = {"u": "E", "log q": "p log q", "log m": "p log m"}
_TIMES_Q = {"u": "y", "log q": "q log q", "log m": "q log m"}
"""What the sum over the classes of the product with p, or with q, has in place of a number of each class"""


@dataclass(frozen=True)
class Term:
    """A linear without its bias, times a factor: factor * input @ weight.T."""

    input: Tensor
    """(..., H), or with H as another dimension"""
    weight: Tensor
    """(V, H) or (H, V); may have further dimensions of size 1, such as that of a convolution's kernel"""
    hidden_dim: int
    """The dimension of the input that is H"""
    weight_dims: tuple[int, int]
    """The dimensions of the weight that are V and H"""
    dtype: torch.dtype
    """The dtype to which the input is cast, if it has another one"""
    factor: Fraction = Fraction(1)
    has_grad: bool = True
    """Whether gradients flow to the operands: not if the linear was detached, or computed under `torch.no_grad`"""
    changes: int = 0
    """Number of in-place changes that the operands, and a bias, may have had before the linear"""
    outputs: tuple[Tensor, ...] = field(default=(), compare=False)
    """The linear's output; several outputs if several linears each read some of the input's rows"""

    @property
    def columns(self) -> Any:
        """Number of classes, V."""
        return self.weight.shape[self.weight_dims[0]]

    @property
    def features(self) -> Any:
        """Hidden size, H."""
        return self.weight.shape[self.weight_dims[1]]

    @property
    def rows_shape(self) -> tuple[Any, ...]:
        """The input's shape without H."""
        shape, dim = self.input.shape, self.hidden_dim
        return (*shape[:dim], *shape[dim + 1 :])


@dataclass(frozen=True)
class RowStep:
    """An operation that selects, reorders or scales rows of logits, in terms of the shape without the classes."""

    kind: str
    """"reshape", "permute", "index" (by numbers and slices), "take" (by tensors), "mul" and "div" (by a factor for each
    row, or for all), or "cat" (of the results of several sequences of steps)"""
    argument: tuple[Any, ...]
    """The new shape; the order of the dimensions; a number or slice for each dimension; for "take", "mul" and "div", a
    key that is equal for equal tensors; or, for "cat", its dimension and the steps that give each of its operands"""
    shape: tuple[Any, ...] = field(default=(), compare=False)
    """Shape of the rows after this step"""
    operands: tuple[Any, ...] = field(default=(), compare=False)
    """For "take", the index with its tensors; for "mul" and "div", the factor"""
    factor_shape: tuple[Any, ...] = field(default=(), compare=False)
    """Shape in which the factor is broadcast to the rows of an input, with a dimension of size 1 in place of H"""
    read_at: int = field(default=0, compare=False)
    """Position of the operation that reads `operands`"""


@dataclass(frozen=True)
class Logits:
    """Rows of softcap * tanh(scale * z + shift), or of scale * z if there is no softcap, where z is a sum of linears.

    Factors are fractions, so that z / 49 * 49 is z.
    """

    terms: tuple[Term, ...]
    """Several if linears are added, as by a low-rank adapter; the term with the largest H is the first"""
    bias: Tensor | None = None
    bias_has_grad: bool = True
    """Whether gradients flow to the bias, which may be added after the terms were detached"""
    bias_read_at: int = field(default=0, compare=False)
    """Position of the operation that adds the bias"""
    scale: Fraction = Fraction(1)
    softcap: Fraction | None = None
    shift: Fraction = Fraction(0)
    vocab_size: int | None = None
    """Number of columns, if the program keeps only the first columns of the vocabulary"""
    rows: tuple[RowStep, ...] = ()
    """The steps that lead from the rows of the inputs to these rows, in their order"""
    group: Any = None
    """Process group that shards the rows of the weights and the bias; the logits have the columns of all ranks"""

    @property
    def rows_shape(self) -> tuple[Any, ...]:
        """Shape of these rows, without the classes."""
        return self.rows[-1].shape if self.rows else self.terms[0].rows_shape

    @property
    def linears(self) -> set[Tensor]:
        """Outputs of the linears."""
        return {out for term in self.terms for out in term.outputs}

    @property
    def has_grad(self) -> bool:
        """Whether gradients flow to any operand."""
        return any(term.has_grad for term in self.terms) or (self.bias is not None and self.bias_has_grad)

    @property
    def argmax_key(self) -> "Logits":
        """Key that is equal for logits with the same argmax: an increasing function of logits does not change it."""
        terms = tuple(replace(term, has_grad=False) for term in self.terms)
        sign = Fraction(1 if self.scale > 0 else -1)
        return replace(self, terms=terms, bias_has_grad=False, scale=sign, softcap=None, shift=Fraction(0))

    @property
    def selection(self) -> tuple[RowStep, ...]:
        """The steps on the rows up to the last that is no reshape or permutation."""
        numbers = (at for at, step in enumerate(self.rows, 1) if step.kind not in ("reshape", "permute"))
        return self.rows[: max(numbers, default=0)]

    @property
    def is_similarity(self) -> bool:
        """Whether these are similarities of all pairs in a batch, as in a contrastive loss, and no vocabulary."""
        head = self.terms[0]
        is_square = len(head.rows_shape) == 1 and same(head.columns, head.rows_shape[0])
        return is_square and stored(head.weight).op is not None

    @property
    def is_head(self) -> bool:
        """Whether the linear may be a language model's head, and not a gate or a product of activations.

        A head has more columns than the input has features, and its weight is a parameter.
        """
        head = self.terms[0]
        weight = stored(head.weight)
        return hint(head.columns) > hint(head.features) and weight.op is None and weight is not head.input

    @property
    def is_linear(self) -> bool:
        """Whether these are all columns of the linears, without a softcap; they may have a factor."""
        return self.softcap is None and self.vocab_size is None

    @property
    def has_float_factors(self) -> bool:
        """Whether scale, softcap, shift and the terms' factors, which may be products, fit into floats."""
        softcap = Fraction(1) if self.softcap is None else self.softcap
        factors = (softcap, self.scale * softcap, *(term.factor for term in self.terms))
        are_floats = all(float_info.min <= abs(factor) <= float_info.max for factor in factors)
        return are_floats and abs(self.shift / self.scale) <= torch.finfo(self.dtype).max

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the first term's operands."""
        return self.terms[0].dtype


def row_operands(steps: Sequence[RowStep]) -> dict[Tensor, int]:
    """Returns the tensors that scale or select rows, each with the position of the operation that reads it."""
    positions: dict[Tensor, int] = {}
    for step in steps:
        positions |= dict.fromkeys(tensors_in(step.operands), step.read_at)
        for part in step.argument[1:] if step.kind == "cat" else ():
            positions |= row_operands(part)
    return positions


@dataclass(frozen=True)
class Labels:
    """Labels of rows, which are equal if their tensors are known to have equal values."""

    tensors: tuple[Tensor, ...] = field(compare=False)
    """Several if rows were joined: each in its shape of `shapes`, concatenated along `dim`"""
    numbers: tuple[tuple[int, int], ...]
    """`Program.number_at` of each tensor"""
    read_at: int = field(compare=False)
    """Position of the operation that reads them first"""
    line: Source = field(compare=False)
    """Line of the user's code that takes the classes at the labels"""
    wraps: str = ""
    """"end" if labels from -V to -1 count from the end, "modulo" if all are taken modulo V"""
    per_row: Any = field(default=1, compare=False)
    """Number of labels of each row. If there are several, tensors of labels, and of numbers at these, end with them"""
    ignore_index: int = NOTHING_IGNORED
    """The label of the rows in which a cross-entropy is 0"""
    fills: tuple[tuple[int, int], int | None] | None = field(default=None, compare=False)
    """If these are other labels with 0 in place of one label, or of all negative ones: the other labels' `number_at`,
    and the replaced label (None for all negative ones)"""
    shapes: tuple[tuple[Any, ...], ...] = field(default=(), compare=False)
    dim: int = 0
    teacher: Logits | None = None
    """If given, there are no tensors: the logits, without a gradient, of a distribution q that stands for the labels"""
    share: float = 0.0
    """The share β of q in a mixture m = β q + (1 - β) p; 0 if there is none"""

    @property
    def are_given(self) -> bool:
        """Whether there are labels, or a teacher."""
        return bool(self.tensors) or self.teacher is not None

    @property
    def has_ignored(self) -> bool:
        """Whether rows may be left out: those of one label."""
        return self.ignore_index != NOTHING_IGNORED

    def are_filled(self, others: "Labels") -> bool:
        """Whether these are the other labels with 0 in place of their ignore_index."""
        if self.fills is None or others.ignore_index >= 0 or not others.has_ignored:
            return False
        return (self.fills[0],) == others.numbers and self.fills[1] in (None, others.ignore_index)


NO_LABELS = Labels((), (), 0, Source())
"""The labels of numbers that belong to no class, such as an entropy"""


@dataclass(frozen=True)
class Class:
    """A tensor that has a number for each class of each row."""

    logits: Logits
    dim: int
    """The dimension of the classes"""
    shape: tuple[Any, ...]
    sum: Poly
    """a u + r; no atom occurs both with its gradient and without"""
    form: str = ""
    """"" for the sum itself, "exp" for factor * exp(sum), "product" for a product with p or q of which the sum is that
    over the classes, "isinf" for a mask of infinite u"""
    factor: Fraction = Fraction(1)
    labels: Labels = NO_LABELS
    """Those that the sum has; if they are tensors, all classes but each row's label are 0"""

    def __post_init__(self) -> None:
        if len(atoms(self.sum)) < len(self.sum) and self.form != "product":
            raise Unknown("with a part that has no gradient")

    @property
    def columns(self) -> Any:
        """Number of classes."""
        return self.shape[self.dim]

    @property
    def rows_shape(self) -> tuple[Any, ...]:
        """Shape without the classes."""
        return (*self.shape[: self.dim], *self.shape[self.dim + 1 :])

    @property
    def kept_shape(self) -> tuple[Any, ...]:
        """Shape of a number of each row with `keepdim`: a dimension of size 1 in place of the classes."""
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
        # Not by its value alone: logits that are made from these would lose a factor that only the gradient has.
        return self.is_shifted_logits and _equals(poly(u=1), self.sum)

    @property
    def is_shifted_logits(self) -> bool:
        """Whether it is u plus a number of each row."""
        return self.form == "" and self.factor_of_u == 1 and not self.labels.are_given

    @property
    def is_probability(self) -> bool:
        """Whether it is softmax(u)."""
        return self.form == "exp" and self.factor == 1 and replace(self, form="").are_log_probabilities

    @property
    def are_log_probabilities(self) -> bool:
        """Whether it is log_softmax(u)."""
        return self.is_shifted_logits and _equals(LOG_PROBABILITY, self.sum)

    def row(self, name: str, shape: tuple[Any, ...], labels: Labels = NO_LABELS) -> "Row":
        """Returns the number of each row with the atom `name`, such as "y" for u_y, in place of u."""
        require(self.form in ("", "exp") and self.labels in (NO_LABELS, labels))
        return Row(self.logits, shape, with_u_as(name, self.sum), self.form, self.factor, labels)

    @property
    def known_columns(self) -> int:
        """Number of classes; raises if it is a symbol: it would be a number, and each compiled by itself."""
        require(type(self.columns) is int, "over a number of classes that is not known when the program is compiled")
        return int(self.columns)

    def summed(self, shape: tuple[Any, ...]) -> "Row":
        """Returns the sum over the classes: of a product, of exp(u + r), of a u + r, or the label's summand alone."""
        if self.form == "product":
            return Row(self.logits, shape, self.sum, labels=self.labels)
        if self.labels.tensors:
            return self.row("y", shape, self.labels)
        if not self.form:
            mean = self.row("U", shape)
            return replace(mean, sum=added((self.known_columns, mean.sum)))
        require(self.form == "exp" and self.factor_of_u == 1)
        return self.row("L", shape)

    def times_p(self, *, p_has_grad: bool) -> "Class":
        """Returns the product with softmax(u), with its gradient or without."""
        summands: list[tuple[Fraction, Poly]] = []
        for atom, factor in self.sum:
            name, has_grad = atom
            if name not in _TIMES_P:
                summands.append((factor, ((atom, Fraction(1)),)))  # Σ p = 1
                continue
            require(name != "log m" or has_grad == p_has_grad, "with a part that has no gradient")
            summands.append((factor, ((Atom(_TIMES_P[name], p_has_grad), Fraction(1)),)))
            if name == "u":
                # Without p's gradient, the gradient of Σ p u is p, as that of L is; without u's, it is the rest of E's.
                excess, log_sum = factor * (has_grad - p_has_grad), poly(L=1)
                summands += [(excess, log_sum), (-excess, without_grad(log_sum))]
        return replace(self, sum=added(*summands), form="product")

    def times_q(self, labels: Labels) -> "Class":
        """Returns the product with the probabilities of a teacher, whose labels are given."""
        return replace(self, sum=renamed(self.sum, _TIMES_Q), form="product", labels=labels)

    def detached(self) -> "Class":
        """Returns the description without gradients."""
        return replace(self, sum=without_grad(self.sum))


@dataclass(frozen=True)
class Row:
    """A tensor that has a number for each row, or one for all rows after a reduction."""

    logits: Logits
    shape: tuple[Any, ...]
    sum: Poly
    form: str = ""
    """"" for the sum itself, "exp" for factor * exp(sum)"""
    factor: Fraction = Fraction(1)
    labels: Labels = NO_LABELS
    class_weight: Tensor | None = None
    """(V,): the class weights of a cross-entropy, if it has any"""
    reduction: str = "none"
    """"sum" or "mean" if the rows are reduced to one number; rows whose label is ignored do not count"""
    is_summed_later: bool = False
    """Whether it stands for a tensor of classes, of which the program needs only the sum, as of (divergences *
    mask[..., None]).sum(); then its shape has 1 in place of the classes"""

    def detached(self) -> "Row":
        """Returns the description without gradients."""
        return replace(self, sum=without_grad(self.sum))

    @property
    def as_loss(self) -> tuple[Fraction, Fraction] | None:
        """Factor c and label smoothing s if it is c times a cross-entropy, L - (1 - s) u_y - s U; else None.

        A divergence from a teacher has no label smoothing.
        """
        if self.labels.teacher is not None:
            return None if self.divergence is None else (self.divergence[0], Fraction(0))
        factors = value(self.sum)
        factor, label_factor, mean_factor = (factors.pop(name, Fraction(0)) for name in "LyU")
        smoothing = -mean_factor / factor if factor else Fraction(-1)
        is_loss = factor + label_factor + mean_factor == 0 and 0 <= smoothing <= 1
        has_one_grad = len({atom.has_grad for atom, _ in self.sum}) == 1
        if not is_loss or not has_one_grad or factors or self.form or not self.labels.are_given:
            return None
        return factor, smoothing

    @property
    def divergence(self) -> tuple[Fraction, str] | None:
        """Factor and kind if it is a divergence from a teacher, of `operation.divergence.KINDS`; else None."""
        factors, share = value(self.sum), self.labels.share
        has_one_grad = len({atom.has_grad for atom, _ in self.sum if atom.name != "q log q"}) == 1
        if self.labels.teacher is None or self.form or not has_one_grad:
            return None
        student, teacher = factors.get("E", Fraction(0)), factors.get("q log q", Fraction(0))
        for kind, factor, others in (
            ("forward", teacher, {"L": 1, "y": -1, "q log q": 1}),
            ("reverse", student, {"E": 1, "L": -1, "p log q": -1}),
            ("cross_entropy", factors.get("L"), {"L": 1, "y": -1}),
        ):
            if factor and factors == {name: factor * each for name, each in others.items()}:
                return factor, kind
        factor = student + teacher
        expected = {"E": student, "L": -student, "p log m": -student, "q log q": teacher, "q log m": -teacher}
        # The program may have the share as a tensor in float32.
        is_known = factor and share and math.isclose(teacher / factor, share, abs_tol=1e-6)
        return (factor, "jensen_shannon") if is_known and factors == expected else None

    @property
    def is_term(self) -> bool:
        """Whether it may be a term of a divergence from a teacher, but is none alone."""
        return self.labels.teacher is not None and self.divergence is None

    @property
    def variables(self) -> dict[str, tuple[Fraction, Fraction]]:
        """The sum in terms of a region's outputs: factors with and without a gradient.

        u_y = log_prob + L and E = L - entropy; a divergence stands for - log_prob.
        """
        if self.divergence is not None:
            factor, has_grad = self.divergence[0], any(atom.has_grad for atom, _ in self.sum)
            return {"log_prob": (-factor, Fraction(0)) if has_grad else (Fraction(0), -factor)}
        factors: dict[str, list[Fraction]] = {}
        for atom, factor in self.sum:
            for name, sign in _VARIABLES.get(atom.name, {}).items():
                factors.setdefault(name, [Fraction(0), Fraction(0)])[not atom.has_grad] += sign * factor
        return {name: (a, b) for name, (a, b) in factors.items() if a or b}

    @property
    def constant(self) -> float:
        """Its value, if it has no `variables`."""
        constant = float(value(self.sum).get("1", 0))
        return float(self.factor) * math.exp(constant) if self.form else constant

    def evaluate(self, values: Mapping[str, Any], call: Callable[..., Any]) -> Any:
        """Returns its value, computed through `call` from the values of its `variables`; there must be some."""
        total = None
        for name, (factor, detached_factor) in self.variables.items():
            for coefficient, is_detached in ((factor, False), (detached_factor, True)):
                if coefficient:
                    part = scaled(call(torch.detach, values[name]) if is_detached else values[name], coefficient, call)
                    total = part if total is None else call(torch.add, total, part)
        if constant := value(self.sum).get("1"):
            total = call(torch.add, total, float(constant))
        return scaled(call(torch.exp, total), self.factor, call) if self.form else total

    @property
    def kind(self) -> str:
        """What messages call it: one of `decisions.PLURALS`."""
        if self.labels.has_ignored:
            return "cross-entropy"
        if self.labels.teacher is not None:
            return "divergence"
        names = self.variables
        return next((words for name, words in _KINDS.items() if name in names), "log-sum-exp")

    @property
    def is_whole(self) -> bool:
        """Whether a region can return it: one that depends on the maximum M has no gradient."""
        return "u" not in atoms(self.sum) and not (self.has_maximum and has_grad(self.sum))

    @property
    def has_maximum(self) -> bool:
        """Whether it depends on the maximum M, of which no token loss can be made."""
        return "M" in atoms(self.sum)


def scaled(number: Any, factor: Fraction | float, call: Callable[..., Any]) -> Any:
    """Returns a number of each row times a factor, computed by PyTorch's functions through `call`."""
    if factor == 1:
        return number
    return call(torch.neg, number) if factor == -1 else call(torch.mul, number, float(factor))


_VARIABLES = {
    "y": {"log_prob": 1, "log_sum_exp": 1},
    "E": {"entropy": -1, "log_sum_exp": 1},
    "L": {"log_sum_exp": 1},
    "U": {"mean_logit": 1},
    "M": {"max_logit": 1},
}
_KINDS = {
    "log_prob": "log-probability",
    "entropy": "entropy",
    "mean_logit": "sum over the classes",
}


@dataclass(frozen=True)
class Argmax:
    """The column of the largest logit of each row."""

    logits: Logits
    """`Logits.argmax_key`"""
    shape: tuple[Any, ...]


Value = Class | Row | Argmax


def linears_of(logits: Logits, labels: Labels) -> set[Tensor]:
    """Returns the outputs of the linears that something is computed from, also of a teacher's."""
    return logits.linears | (set() if labels.teacher is None else labels.teacher.linears)
