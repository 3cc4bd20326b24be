"""What a program computes of each row of its logits: the log-probability of a label, the entropy, the log-sum-exp.

For a row of logits u, each is a sum of three numbers: u_y, the logit of the label; L = log Σ exp u; and E = Σ p u.

    log p_y = u_y - L         log_softmax(u).gather(-1, y), or u.gather(-1, y) - logsumexp(u)
    entropy = L - E           -(p * log_softmax(u)).sum(-1), or logsumexp(u) - (p * u).sum(-1)

So an operation on such sums is a rule for their coefficients, and spellings need not be known one by one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, permutations
from typing import Any, NamedTuple

import thunder.torch as ltorch
import torch
from thunder.core import dtypes
from thunder.core.proxies import ProxyTag, TensorProxy
from thunder.core.symbol import BoundSymbol

from thunder_flce.graph.matching.chunked_losses import split_tensor
from thunder_flce.graph.matching.logits_path import (
    BROADCAST,
    COPIES,
    LINEARS,
    RESHAPES,
    LogitsPath,
    RowStep,
    before_broadcast,
    before_log_sum_exp,
    paths_to,
)
from thunder_flce.graph.matching.reasons import NotFused, Reason
from thunder_flce.graph.matching.trace_index import TraceIndex, argument, carries_grad, is_static, tensors_written


@dataclass(frozen=True, eq=False)
class Reading:
    """A tensor of one number for each row of logits: a sum of u_y, L and E, or its exponential."""

    bsym: BoundSymbol
    """What computes it."""
    coefficients: tuple[int, int, int]
    """Of u_y, L and E."""
    paths: tuple[tuple[LogitsPath, ...], ...] = ()
    """For each tensor of logits that is read, the descriptions from the linear to the logits."""
    labels: TensorProxy | None = None
    """y: integers, one a row, in any shape."""
    inner: tuple[BoundSymbol, ...] = ()
    """The operations between the logits and `bsym`."""
    wraps_labels: bool = False
    """Whether labels from -V to -1 count from the end."""
    is_exponential: bool = False
    problem: NotFused | None = None
    """Why the logits are not those of a linear, where they are not; then there is no path."""

    @property
    def tensor(self) -> TensorProxy:
        """The result."""
        return self.bsym.output

    @property
    def path(self) -> LogitsPath:
        """The description of the logits."""
        return self.paths[0][-1]

    @property
    def output(self) -> str:
        """The one of `token_loss.VARIABLES` that the sum is `factor` times; "" for none."""
        of_label, of_log_sum, of_expected = self.coefficients
        if self.paths and self.path.shift and sum(self.coefficients):
            return ""
        if of_label == of_expected == 0:
            return "log_sum_exp" if abs(of_log_sum) == 1 else ""
        if of_expected == 0:
            return "log_prob" if of_label == -of_log_sum != 0 else ""
        return "entropy" if of_label == 0 and of_log_sum == -of_expected else ""

    @property
    def factor(self) -> int:
        """See `output`."""
        return self.coefficients[0] or self.coefficients[1]


def find_readings(index: TraceIndex) -> list[Reading]:
    """The log-probabilities and entropies of a trace, in order, and logits that are gathered for something else."""
    found: dict[str, Reading] = {}
    for bsym in index.bsyms:
        is_new = isinstance(bsym.output, TensorProxy) and index.producers.get(bsym.output.name) is bsym
        rule = _RULES.get(bsym.sym.id) if is_new else None
        if rule is not None and is_static(*bsym.flat_args):
            reading = rule(index, bsym, found)
            if reading is not None:
                found[bsym.output.name] = reading
    finished = [reading for reading in found.values() if reading.output]
    inner = {id(bsym) for reading in finished for bsym in reading.inner}
    passed = inner | {id(reading.bsym) for reading in finished}

    def is_wanted(reading: Reading) -> bool:
        if reading.output == "log_sum_exp":
            return any(
                id(user) not in passed and not _is_log_softmax(user, reading.tensor)
                for user in index.users(reading.tensor)
            )
        is_gathered = reading.labels is not None and reading.problem is None and not reading.inner
        return id(reading.bsym) not in inner and bool(reading.output or is_gathered)

    return [reading for reading in found.values() if is_wanted(reading)]


def _is_log_softmax(user: BoundSymbol, log_sum_exp: TensorProxy) -> bool:
    """Whether a log-sum-exp is only subtracted from its logits: that is a rule of `logits_path`."""
    return user.sym.id == ltorch.sub.id and user.output.numel > log_sum_exp.numel


_Found = dict[str, Reading]


def _gather(index: TraceIndex, bsym: BoundSymbol, found: _Found) -> Reading | None:
    names = ("input", "dim", "index")
    logits, dimension, labels = (argument(bsym, name, at=at) for at, name in enumerate(names))
    return _at_labels(index, bsym, logits, dimension, labels)


def _take_along_dim(index: TraceIndex, bsym: BoundSymbol, found: _Found) -> Reading | None:
    names = ("input", "indices", "dim")
    logits, labels, dimension = (argument(bsym, name, at=at) for at, name in enumerate(names))
    return _at_labels(index, bsym, logits, dimension, labels)


def _index_select(index: TraceIndex, bsym: BoundSymbol, found: _Found) -> Reading | None:
    tensor, dimension, picked = (argument(bsym, name, at=at) for at, name in enumerate(("input", "dim", "index")))
    if tensor.ndim == 1:
        return _picked_apart(index, bsym, tensor, picked, found)
    reading = _at_labels(index, bsym, tensor, dimension, picked)
    # Of logits, some columns may be wanted as they are.
    is_unknown = reading is not None and reading.problem is not None
    return None if is_unknown and not _is_normalised(tensor, dimension, index) else reading


def _take(index: TraceIndex, bsym: BoundSymbol, found: _Found) -> Reading | None:
    tensor, picked = (argument(bsym, name, at=at) for at, name in enumerate(("input", "index")))
    return _picked_apart(index, bsym, tensor, picked, found)


def _picked_apart(
    index: TraceIndex, bsym: BoundSymbol, tensor: TensorProxy, picked: TensorProxy, found: _Found
) -> Reading | None:
    """Log-probabilities that are picked from flattened rows, or from one row at a time, which no region gives."""
    rows = tensor
    while (producer := index.producers.get(rows.name)) is not None and producer.sym.id in RESHAPES | COPIES:
        rows = producer.args[0]
    try:
        paths = paths_to(rows, index)
    except NotFused:
        return None
    path = paths[-1]
    if path.normalised != "log_softmax" or index.derives_from(picked, paths[0].tensor):
        return None
    is_flat = rows.ndim > tensor.ndim or bsym.sym.id == ltorch.take.id
    detail = "picked from flattened rows" if is_flat else "of one row at a time"
    others = (reading for reading in found.values() if reading.problem is not None and reading.problem.detail == detail)
    if any(other.paths and is_same_logits(replace(other.path, rows=path.rows), path) for other in others):
        # The first one of a loop speaks for all.
        return None
    problem = NotFused(Reason.NOT_A_LOG_PROBABILITY, detail)
    return Reading(bsym, (1, -1, 0), paths=(tuple(paths),), problem=problem)


def _at_labels(
    index: TraceIndex, bsym: BoundSymbol, logits: TensorProxy, dimension: int, labels: TensorProxy
) -> Reading | None:
    """The logits, or what log_softmax and softmax make of them, at one column of each row."""
    labels = before_broadcast(labels, index)
    try:
        paths = paths_to(logits, index)
    except NotFused as problem:
        is_normalised = _is_normalised(logits, dimension, index) or _is_difference_to_rows(logits, dimension, index)
        return _unknown(index, bsym, logits, (1, -1 if is_normalised else 0, 0), problem)
    path = paths[-1]
    # Columns that hang on the logits are choices, as of a gate's experts or a sampled token.
    if dimension % logits.ndim != path.class_dimension or index.derives_from(labels, paths[0].tensor):
        return None
    _flows_back(bsym, path.carries_grad)
    reading = Reading(
        bsym,
        (1, -1 if path.normalised else 0, 0),
        paths=(tuple(paths),),
        labels=labels,
        is_exponential=path.normalised == "softmax",
    )
    is_of_rows = labels.ndim < logits.ndim or tuple(labels.shape) == path.kept_shape
    if labels.numel * path.vocab != logits.numel or bsym.output.numel != labels.numel or not is_of_rows:
        detail = f"labels of shape {tuple(labels.shape)} for logits of shape {tuple(logits.shape)}"
        return replace(reading, coefficients=(1, -1, 0), problem=NotFused(Reason.NOT_A_LOG_PROBABILITY, detail))
    return reading


def _unknown(
    index: TraceIndex, bsym: BoundSymbol, logits: TensorProxy, coefficients: tuple[int, int, int], problem: NotFused
) -> Reading | None:
    """A reading of what no rule describes; None where a product of activations, as in attention, made the logits."""
    producer = index.producers.get(logits.name)
    while producer is not None and producer.sym.id not in LINEARS:
        inputs = [arg for arg in producer.flat_proxy_args if isinstance(arg, TensorProxy)]
        larger = [arg for arg in inputs if arg.numel >= bsym.output.numel]
        producer = index.producers.get(larger[0].name) if larger else None
    if producer is not None and any(arg.ndim > 2 for arg in producer.flat_proxy_args[1:2]):
        return None
    return Reading(bsym, coefficients, problem=problem)


def _is_normalised(tensor: TensorProxy, dimension: int, index: TraceIndex) -> bool:
    """Whether a tensor is what log_softmax or softmax returned, as it is."""
    while (producer := index.producers.get(tensor.name)) is not None and producer.sym.id in {*COPIES, BROADCAST}:
        tensor = max(producer.flat_proxy_args, key=lambda arg: arg.numel)
    is_function = producer is not None and producer.sym.id in (ltorch.log_softmax.id, "torch.softmax")
    return is_function and dimension % tensor.ndim == tensor.ndim - 1


def _log_sum_exp(index: TraceIndex, bsym: BoundSymbol, found: _Found) -> Reading | None:
    """log Σ exp u, in one operation or in three."""
    logits, bsyms = before_log_sum_exp(bsym.output, index)
    if not bsyms:
        return None
    *inner, _ = bsyms
    try:
        paths = paths_to(logits, index)
    except NotFused as problem:
        return None if inner else _unknown(index, bsym, logits, (0, 1, 0), problem)
    if paths[-1].normalised or not _reduces_classes(inner[-1] if inner else bsym, paths[-1]):
        return None
    if not _flows_back(bsym, paths[-1].carries_grad, *(carries_grad(each.output) for each in inner)):
        return None
    return Reading(bsym, (0, 1, 0), paths=(tuple(paths),), inner=tuple(inner))


def _is_difference_to_rows(tensor: TensorProxy, dimension: int, index: TraceIndex) -> bool:
    """Whether one number a row was subtracted, as by a log_softmax that is spelled out in another way than we know."""
    producer = index.producers.get(tensor.name)
    if producer is None or producer.sym.id != ltorch.sub.id:
        return False
    subtracted = producer.args[1]
    return isinstance(subtracted, TensorProxy) and subtracted.numel * tensor.shape[dimension] == tensor.numel


def _reduces_classes(bsym: BoundSymbol, path: LogitsPath) -> bool:
    dimension = argument(bsym, "dim", at=1)
    if isinstance(dimension, list | tuple) and len(dimension) == 1:
        (dimension,) = dimension
    if dimension is None:
        return path.tensor.ndim == 1
    return isinstance(dimension, int) and dimension % path.tensor.ndim == path.class_dimension


def _sum(index: TraceIndex, bsym: BoundSymbol, found: _Found) -> Reading | None:
    """Σ p u, or Σ p log p = E - L."""

    def problem(path: LogitsPath) -> NotFused | None:
        if _reduces_classes(bsym, path):
            return None
        return NotFused(Reason.CLASS_DIMENSION, "a sum over other dimensions than the classes")

    product = _product(bsym.args[0], index)
    return _expectation(index, bsym, product, problem) if product.factors else _of_choices(index, bsym)


def _of_choices(index: TraceIndex, bsym: BoundSymbol) -> Reading | None:
    """Σ where(v == y, log p, 0): what a mask over all classes leaves."""
    choice = index.producers.get(bsym.args[0].name)
    if choice is None or choice.sym.id not in (ltorch.where.id, ltorch.masked_fill.id):
        return None
    tensors = [arg for arg in choice.flat_proxy_args if isinstance(arg, TensorProxy)]
    if sorted(dtypes.is_float_dtype(each.dtype) for each in tensors) != [False, True]:
        return None
    mask, log_probs = sorted(tensors, key=lambda each: dtypes.is_float_dtype(each.dtype))
    try:
        paths = paths_to(log_probs, index)
    except NotFused:
        return None
    has_classes = before_broadcast(mask, index).shape[-1:] == log_probs.shape[-1:]
    # A mask that hangs on the logits is a choice.
    if paths[-1].normalised == "log_softmax" and has_classes and not index.derives_from(mask, paths[0].tensor):
        problem = NotFused(Reason.CLASS_PROBABILITIES, f"chosen by {choice.sym.name}")
        return Reading(bsym, (1, -1, 0), problem=problem)
    return None


def _nansum(index: TraceIndex, bsym: BoundSymbol, found: _Found) -> Reading | None:
    problem = NotFused(Reason.TRANSFORMED_LOGITS, "by nansum, which takes NaN for 0")
    return _expectation(index, bsym, _product(argument(bsym, "input", at=0), index), lambda path: problem)


def _einsum(index: TraceIndex, bsym: BoundSymbol, found: _Found) -> Reading | None:
    """Σ p log p as in `einsum("btv,btv->bt", p, log_p)`."""
    equation, operands = bsym.args[0], [arg for arg in bsym.flat_proxy_args if isinstance(arg, TensorProxy)]
    if len(operands) != 2 or not isinstance(equation, str):
        return None

    def problem(path: LogitsPath) -> NotFused | None:
        at = path.class_dimension
        names, _, result = equation.replace(" ", "").partition("->")
        names, _, others = names.partition(",")
        # As "...v,...v->..." or, with a name for each dimension, as "btv,btv->bt".
        is_last = names[:3] == result == "..." and len(names) == 4 and at == path.tensor.ndim - 1
        is_named = names.isalpha() and len(set(names)) == len(names) == path.tensor.ndim
        if names == others and (is_last or (is_named and result == names[:at] + names[at + 1 :])):
            return None
        return NotFused(Reason.CLASS_DIMENSION, f"einsum {equation!r}")

    return _expectation(index, bsym, _Product(1, (), [(operand, False) for operand in operands]), problem)


class _Product(NamedTuple):
    """A tensor as a product of two factors and a sign; no factors where it is none."""

    sign: int
    inner: tuple[BoundSymbol, ...]
    """The operations from the factors to the tensor."""
    factors: list[tuple[TensorProxy, bool]]
    """Each factor is a tensor or, with True, its logarithm, where that times 0 is 0."""


def _expectation(
    index: TraceIndex, bsym: BoundSymbol, product: _Product, problem: Callable[[LogitsPath], NotFused | None]
) -> Reading | None:
    """The sum of a product over the classes; `problem` says why it is not that sum, for logits as described."""
    sign, inner, factors = product
    if len(factors) != 2:
        return None
    try:
        ways = [paths_to(factor, index) for factor, _ in factors]
    except NotFused as reason:
        if all(_is_of_softmax(factor, index) for factor, _ in factors):
            return _unknown(index, bsym, factors[0][0], (0, sign, -sign), reason)
        return _of_all_classes(index, bsym, [factor for factor, _ in factors])
    are_logs = [is_log for _, is_log in factors]
    forms = [way[-1].normalised for way in ways]
    if any(is_log and form != "softmax" for form, is_log in zip(forms, are_logs, strict=True)):
        return None
    others = [form for form, is_log in zip(forms, are_logs, strict=True) if is_log or form != "softmax"]
    if len(others) != 1 or not is_same_logits(ways[0][-1], ways[1][-1]):
        return _of_all_classes(index, bsym, [factor for factor, _ in factors])
    flows = [*(way[-1].carries_grad for way in ways), *(carries_grad(each.output) for each in inner)]
    if not _flows_back(bsym, *flows):
        return None
    # The softmax last: it is the same whatever was subtracted from its logits.
    ways.sort(key=lambda way: way[-1].normalised == "softmax")
    coefficients = (0, -sign if others[0] else 0, sign)
    if (found := problem(ways[0][-1])) is not None:
        return Reading(bsym, coefficients, problem=found)
    return Reading(bsym, coefficients, paths=tuple(map(tuple, ways)), inner=inner)


def _of_all_classes(index: TraceIndex, bsym: BoundSymbol, factors: Sequence[TensorProxy]) -> Reading | None:
    """A cross-entropy or a divergence with probabilities of all classes: one factor is a log_softmax of logits."""
    for log_probs, weights in permutations(factors, 2):
        try:
            paths = paths_to(log_probs, index)
        except NotFused:
            continue
        # Weights that hang on the logits are choices, and activations times activations are no logits of classes.
        term, is_choice = paths[0].terms[0], index.derives_from(weights, paths[0].tensor)
        is_of_classes = weights.shape == log_probs.shape and not index.derives_from(term.weight, term.input)
        if paths[-1].normalised == "log_softmax" and is_of_classes and not is_choice:
            return Reading(bsym, (1, -1, 0), problem=NotFused(Reason.CLASS_PROBABILITIES, f"of {bsym.sym.name}"))
    return None


def _kl_div(index: TraceIndex, bsym: BoundSymbol, found: _Found) -> Reading | None:
    log_probs, probabilities = (argument(bsym, name, at=at) for at, name in enumerate(("input", "target")))
    reading = _of_all_classes(index, bsym, [log_probs, probabilities])
    if reading is None or not _is_of_softmax(log_probs, index):
        return None
    hint = "of kl_div; `linear_kl_divergence` takes a teacher's hidden states and head"
    return replace(reading, problem=NotFused(Reason.CLASS_PROBABILITIES, hint))


def _product(tensor: TensorProxy, index: TraceIndex) -> _Product:
    producer = index.producers.get(tensor.name)
    if producer is None or producer.sym.id not in (ltorch.neg.id, ltorch.mul.id, _ENTR, *_XLOGY):
        return _Product(1, (), [])
    tensors = [arg for arg in producer.args if isinstance(arg, TensorProxy)]
    if producer.sym.id == ltorch.neg.id:
        sign, inner, factors = _product(tensors[0], index)
        return _Product(-sign, (*inner, producer), factors)
    if producer.sym.id == _ENTR and tensors:
        return _Product(-1, (producer,), [(tensors[0], False), (tensors[0], True)])
    if producer.sym.id in _XLOGY:
        return _Product(1, (producer,), [(each, number == 1) for number, each in enumerate(tensors)])
    product = _Product(1, (producer,), [])
    for factor in tensors:
        before = index.producers.get(factor.name)
        while before is not None and (before.sym.id == ltorch.neg.id or _is_finite_clamp(before)):
            sign = -product.sign if before.sym.id == ltorch.neg.id else product.sign
            product, factor = product._replace(sign=sign, inner=(before, *product.inner)), before.args[0]
            before = index.producers.get(factor.name)
        product.factors.append((factor, False))
    return product


# p log p as one operation, which is 0 where p is.
_ENTR, _XLOGY = "torch.special.entr", ("torch.xlogy", "torch.special.xlogy")


def _is_finite_clamp(bsym: BoundSymbol) -> bool:
    """Whether only -inf is changed, as by `Categorical.entropy`, lest its product with a probability of 0 be NaN."""
    if bsym.sym.id != ltorch.clamp.id:
        return False
    smallest, largest = (argument(bsym, name, at=at) for at, name in enumerate(("min", "max"), 1))
    # To compare a proxy would add an operation to the trace.
    if largest is not None or not isinstance(smallest, float) or not dtypes.is_float_dtype(bsym.output.dtype):
        return False
    return smallest == torch.finfo(dtypes.to_torch_dtype(bsym.output.dtype)).min


def _is_of_softmax(tensor: TensorProxy, index: TraceIndex) -> bool:
    """Whether a tensor is a softmax or log_softmax, or made of one as in `log(p + eps)` and `exp(log_p)`."""
    for between in ((ltorch.exp.id, ltorch.log.id), (ltorch.add.id, ltorch.clamp.id)):
        producer = index.producers.get(tensor.name)
        if producer is not None and producer.sym.id in between and isinstance(producer.args[0], TensorProxy):
            tensor = producer.args[0]
    return _is_normalised(tensor, -1, index)


def _flows_back(bsym: BoundSymbol, *flows: bool) -> bool:
    """Whether gradients flow from a result to all operands, for each of which `flows` says so, or to none of them.

    Where they flow to none, the result is marked so, as thunder marks what is computed under `torch.no_grad`.
    """
    if not carries_grad(bsym.output) or not any(flows):
        bsym.output.tags.add(ProxyTag.DETACHED_AUTOGRAD_GRAPH)
        return True
    return all(flows)


def is_same_logits(a: LogitsPath, b: LogitsPath) -> bool:
    """Whether two descriptions are of the same logits, in the same rows and in the same order."""
    return has_same_linears(a, b) and (a.scale, a.softcap) == (b.scale, b.softcap)


def _has_same_numbers(a: LogitsPath, b: LogitsPath) -> bool:
    """Whether the same was subtracted from the same logits, too."""
    return is_same_logits(a, b) and a.shift == b.shift


def has_same_linears(a: LogitsPath, b: LogitsPath) -> bool:
    """Whether two descriptions are of the same rows of the same linears, however these are mapped to logits."""

    def operands(path: LogitsPath) -> list[Any]:
        names = [(term.input.name, term.weight.name, term.transposed, term.factor) for term in path.terms]
        return [*names, None if path.bias is None else path.bias.name, path.vocab_size, path.selection]

    return operands(a) == operands(b)


def before_reshapes(labels: TensorProxy, index: TraceIndex) -> TensorProxy:
    """The labels before they were copied or reshaped, as `labels[..., None]` does it, too."""
    while (producer := index.producers.get(labels.name)) is not None:
        if producer.sym.id not in RESHAPES | COPIES | {ltorch.getitem.id}:
            break
        source = producer.args[0]
        # A narrower integer might be another label.
        if source.numel != labels.numel or labels.dtype not in (source.dtype, dtypes.int64):
            break
        if producer.sym.id == ltorch.getitem.id and not _keeps_order(producer.args[1]):
            break
        labels = source
    return labels


def _combined(index: TraceIndex, bsym: BoundSymbol, found: _Found, *, signs: tuple[int, ...]) -> Reading | None:
    """The sum of the first operands, each a reading with its sign; a cast or a reshape is a sum of one.

    A log-probability and an entropy go on only where nothing else uses them.
    """
    tensors = [arg for arg in bsym.args[: len(signs)] if isinstance(arg, TensorProxy)]
    parts = [found.get(tensor.name) for tensor in tensors]
    readings = [part for part in parts if part is not None and not part.is_exponential]
    if len(readings) < len(signs) or bsym.kwargs.get("alpha", 1) != 1:
        return None
    ends = [reading for reading in readings if reading.output not in ("", "log_sum_exp")]
    if any(index.users(reading.tensor) != [bsym] for reading in ends):
        return None
    first = readings[0]
    shapes = {tuple(reading.tensor.shape) for reading in readings}
    labels = [reading.labels for reading in readings if reading.labels is not None]
    problem = next((reading.problem for reading in readings if reading.problem is not None), None)
    are_alike = problem is not None or all(_has_same_numbers(reading.path, first.path) for reading in readings)
    if len(shapes) > 1 or len(labels) > 1 or not are_alike or not dtypes.is_float_dtype(bsym.output.dtype):
        return None
    if not _flows_back(bsym, *(carries_grad(reading.tensor) for reading in readings)):
        return None
    columns = zip(*(reading.coefficients for reading in readings), strict=True)
    of_label, of_log_sum, of_expected = (
        sum(sign * each for sign, each in zip(signs, column, strict=True)) for column in columns
    )
    return Reading(
        bsym,
        (of_label, of_log_sum, of_expected),
        paths=tuple(path for reading in readings for path in reading.paths),
        labels=labels[0] if labels else None,
        inner=tuple(inner for reading in readings for inner in (*reading.inner, reading.bsym)),
        problem=problem,
    )


def _getitem(index: TraceIndex, bsym: BoundSymbol, found: _Found) -> Reading | None:
    """Logits [arange(N), labels] or [arange(B)[:, None], arange(T), labels], or one number a row in another shape."""
    tensor, key = bsym.args
    if tensor.name in found and bsym.output.numel == tensor.numel and _keeps_order(key):
        return _combined(index, bsym, found, signs=(1,))
    *rows, labels = _plain_key(key) or (None,)
    if len(rows) + 1 != tensor.ndim or not _is_index(labels):
        return None
    if all(type(part) is int for part in rows):
        return _picked_apart(index, bsym, tensor, labels, found)
    if not all(_is_index(part) or _is_list(part) for part in rows):
        return None
    reading = _at_labels(index, bsym, tensor, tensor.ndim - 1, labels)
    if all(_is_every_index(part, dimension, bsym, index) for dimension, part in enumerate(rows)):
        return reading and replace(reading, wraps_labels=True)
    if reading is None or reading.output != "log_prob" or (reading.paths and not reading.path.normalised):
        return None
    return replace(reading, problem=NotFused(Reason.NOT_A_LOG_PROBABILITY, "rows picked by an index"))


def _is_index(part: Any) -> bool:
    return isinstance(part, TensorProxy) and dtypes.is_nonboolean_integer_dtype(part.dtype)


def _is_list(part: Any) -> bool:
    return isinstance(part, list) and all(type(number) is int for number in part)


def _is_every_index(part: TensorProxy | list[int], dimension: int, bsym: BoundSymbol, index: TraceIndex) -> bool:
    """Whether an index is 0, 1, … along its own dimension of the rows of a tensor, and the same along the others."""
    tensor = bsym.args[0]
    rows, count = tensor.ndim - 1, tensor.shape[dimension]
    if isinstance(part, list):
        return rows == 1 and part == list(range(count))
    shape = [1] * (rows - part.ndim) + list(part.shape)
    producer = index.producers.get(before_reshapes(part, index).name)
    if producer is None or producer.sym.id != ltorch.arange.id:
        return False
    written = [tensor for writer in index.writers_between([producer], bsym) for tensor in tensors_written(writer)]
    return (
        producer.args in ((count, None, 1), (0, count, 1))
        and shape == [count if at == dimension else 1 for at in range(rows)]
        and not any(index.may_share_memory(producer.output, each) for each in written)
    )


def _joined(index: TraceIndex, bsym: BoundSymbol, found: _Found) -> Reading | None:
    """Readings of the parts into which rows were split, such as the sequences of a batch, put together again."""
    tensors, dimension = bsym.args[0], argument(bsym, "dim", at=1, default=0)
    parts = [reading for tensor in tensors if (reading := found.get(tensor.name)) is not None]
    if len(parts) < len(tensors) or dimension != 0 or any(part.problem is not None for part in parts):
        return None
    first = parts[0]
    alike = {(part.coefficients, part.is_exponential, part.wraps_labels, len(part.paths)) for part in parts}
    if len(alike) > 1 or any(part.labels is None for part in parts) != (first.labels is None):
        return None
    ways = [_joined_way(parts_of_way) for parts_of_way in zip(*(part.paths for part in parts), strict=True)]
    labels = None
    if first.labels is not None:
        labels = _whole([before_reshapes(part.labels, index) for part in parts if part.labels is not None], index)
    if not all(ways) or (labels is None) != (first.labels is None):
        return None
    if not _flows_back(bsym, *(carries_grad(part.tensor) for part in parts)):
        return None
    inner = tuple(inner for part in parts for inner in (*part.inner, part.bsym))
    return replace(first, bsym=bsym, paths=tuple(ways), labels=labels, inner=inner)


def _joined_way(ways: Sequence[tuple[LogitsPath, ...]]) -> tuple[LogitsPath, ...]:
    """From the linear to all parts, and last the description of the logits as if they were whole; nothing otherwise."""
    lasts = [way[-1] for way in ways]
    before = next((path for path, part in pairwise(ways[0]) if part.rows == lasts[0].rows), None)
    if before is None or not all(_is_part(last, number, len(ways), before) for number, last in enumerate(lasts)):
        return ()
    wholes = [replace(last, rows=last.rows[:-1]) for last in lasts]
    if not all(_has_same_numbers(whole, wholes[0]) and whole.normalised == wholes[0].normalised for whole in wholes):
        return ()
    bsyms = tuple(bsym for last in lasts for bsym in last.bsyms)
    inner = tuple(bsym for last in lasts for bsym in last.inner)
    whole = replace(wholes[0], tensor=before.tensor, class_dimension=before.class_dimension, bsyms=bsyms, inner=inner)
    return (*(path for way in ways for path in way), whole)


def _is_part(path: LogitsPath, number: int, count: int, whole: LogitsPath) -> bool:
    """Whether the last operation on the rows of a path takes part `number` of the first dimension."""
    if not path.rows or path.rows[:-1] != whole.rows:
        return False
    rest = (slice(None),) * (whole.tensor.ndim - 2)
    is_index = count == whole.tensor.shape[0] and path.rows[-1] == RowStep("index", (number, *rest))
    return is_index or path.rows[-1] == RowStep("part", (number, count, 0))


def _whole(parts: Sequence[TensorProxy], index: TraceIndex) -> TensorProxy | None:
    """The tensor whose parts along the first dimension these are, all of them and in order, or None."""
    producer = index.producers.get(parts[0].name)
    if producer is None or producer.sym.id != ltorch.getitem.id:
        return split_tensor(parts, index)
    tensor = producer.args[0]
    expected = [(ltorch.getitem.id, (tensor.name, number)) for number in range(tensor.shape[0])]
    found = [
        (part.sym.id, (part.args[0].name, *_plain_key(part.args[1])))
        for part in (index.producers.get(part.name) for part in parts)
        if part is not None and len(part.args) > 1
    ]
    return tensor if found == expected else None


def _keeps_order(key: Any) -> bool:
    """Whether an index that takes all elements of a tensor has them in their order: without lists and tensors."""
    return all(part is None or part is Ellipsis or isinstance(part, int | slice) for part in _plain_key(key))


def _plain_key(key: Any) -> tuple[Any, ...]:
    return key if isinstance(key, tuple) else (key,)


_RULES: dict[Any, Callable[[TraceIndex, BoundSymbol, _Found], Reading | None]] = {
    ltorch.gather.id: _gather,
    ltorch.take_along_dim.id: _take_along_dim,
    ltorch.getitem.id: _getitem,
    ltorch.index_select.id: _index_select,
    ltorch.take.id: _take,
    **dict.fromkeys((ltorch.logsumexp.id, ltorch.log.id), _log_sum_exp),
    ltorch.sum.id: _sum,
    "torch.nansum": _nansum,
    ltorch.einsum.id: _einsum,
    "torch.nn.functional.kl_div": _kl_div,
    ltorch.neg.id: partial(_combined, signs=(-1,)),
    ltorch.sub.id: partial(_combined, signs=(1, -1)),
    ltorch.add.id: partial(_combined, signs=(1, 1)),
    ltorch.stack.id: _joined,
    ltorch.cat.id: _joined,
    **dict.fromkeys(COPIES | RESHAPES, partial(_combined, signs=(1,))),
}
