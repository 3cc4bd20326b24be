"""Finding what can become one region with its linear. Nothing is changed here; `transform` does that.

Cross-entropies, log-probabilities and entropies (`readings`) are followed upwards from their logits to the linear that
made them (`logits_path`). Those that read the same rows for the same labels are one region. The outcome is a `Match`
with a description of the path, or a `NotFused` with a reason for the user to read.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import thunder.torch as ltorch
from thunder.core import dtypes, prims
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol

from thunder_flce.engine.plan import GRADIENTS_IN_FORWARD
from thunder_flce.graph.matching.logits_path import RESHAPES, LogitsPath, paths_to, steps
from thunder_flce.graph.matching.losses import CrossEntropy, is_loss
from thunder_flce.graph.matching.readings import (
    Reading,
    before_reshapes,
    find_readings,
    has_same_linears,
    is_same_logits,
)
from thunder_flce.graph.matching.reasons import NotFused, Reason
from thunder_flce.graph.matching.token_losses import NotASum, Source, TokenSum, find_token_sum
from thunder_flce.graph.matching.trace_index import TraceIndex, carries_grad, is_static, tensors_written
from thunder_flce.graph.matching.upstream import WeightedSum, weighted_sum
from thunder_flce.loss_nodes import reached
from thunder_flce.operation.loss import NOTHING_IGNORED
from thunder_flce.options import Options


class Result(NamedTuple):
    """A tensor of the program that a region gives."""

    bsym: BoundSymbol
    """What computes it in the program."""
    tensor: TensorProxy
    output: str
    """"loss" or one of the region's further outputs: see `functional.linear_cross_entropy`."""
    factor: int = 1
    """What the output has to be multiplied by, 1 or -1."""
    is_exponential: bool = False
    """Whether the tensor is the exponential of that product."""


@dataclass(frozen=True, eq=False)
class Match:
    """What can become one region."""

    kind: str
    """"cross-entropy", "log-probability", "entropy" or, as a part of another one's region, "log-sum-exp"."""
    path: LogitsPath
    """From the linear to the logits."""
    arguments: CrossEntropy
    """The arguments of the region's loss. A log-probability is the negative of a cross-entropy."""
    results: tuple[Result, ...]
    """The region takes the place of the first. The others can be computed with it."""
    wraps_labels: bool = False
    """Whether labels from -V to -1 count from the end."""
    weighted: WeightedSum | None = None
    """What the program makes of the losses of all rows, where the region gives that."""
    token_sum: TokenSum | None = None
    """The sum that the program makes of log-probabilities and entropies, where the region gives that."""
    reduced: CrossEntropy | None = None
    """The cross-entropy that is made of the losses or log-probabilities of all rows, where the region gives these."""
    own: frozenset[str] = frozenset()
    """The names of what the program computes from the linear's output up to the results."""
    note: str = ""
    """Why its gradients wait for the backward, where they do."""

    @property
    def place(self) -> BoundSymbol:
        """Where the region will be."""
        return self.results[0].bsym

    @property
    def read(self) -> list[str]:
        """The names of the tensors that the region, or what it takes the place of, is computed from."""
        tensors = (*self.path.operands, self.arguments.target, self.arguments.weight, *self.place.flat_proxy_args)
        return [tensor.name for tensor in tensors if tensor is not None]

    @property
    def further(self) -> set[str]:
        """The names of the tensors of the program that the region gives beside the first."""
        return {result.tensor.name for result in self.results[1:]}

    @property
    def given(self) -> set[str]:
        """The names of all tensors of the program that the region gives."""
        return {self.place.output.name, *self.further}

    @property
    def replaced(self) -> list[BoundSymbol]:
        """What the program need not compute any more, beside what the region takes the place of."""
        total = self.weighted or self.token_sum
        return [*(total.replaced if total else ()), *(result.bsym for result in self.results[1:])]

    @property
    def waits_for_reduction(self) -> bool:
        """Whether the region gives the losses of all rows, whose gradients wait, for a cross-entropy made of these."""
        return self.reduced is not None and self.token_sum is None and not self.reduced.label_smoothing

    @property
    def label_without_target(self) -> int | None:
        """The label of rows that have no target but are computed, too."""
        if self.reduced is not None:
            return self.reduced.ignore_index
        inputs = () if self.token_sum is None else self.token_sum.inputs
        return next((each.ignore_index for each in inputs if each.ignore_index is not None), None)

    @property
    def outputs(self) -> tuple[str, ...]:
        """The region's outputs beside the loss."""
        return tuple(dict.fromkeys(result.output for result in self.results if result.output != "loss"))


class Found(NamedTuple):
    """A cross-entropy, log-probability or entropy, and what can become of it."""

    bsym: BoundSymbol
    kind: str
    outcome: Match | NotFused


def find_matches(index: TraceIndex, options: Options) -> list[Found]:
    """What a trace computes from logits, in order, and how, or why not, it can be fused with its linear.

    What becomes part of another one's region is left out. The options say whether gradients of sums of token losses may
    be computed in the forward.
    """
    candidates = [_Candidate.of_loss(bsym, index) for bsym in index.bsyms if is_loss(bsym)]
    candidates += [_Candidate.of_reading(reading, index) for reading in find_readings(index)]
    candidates.sort(key=lambda candidate: index.position(candidate.bsym))
    leaders: list[_Candidate] = []
    # An entropy has no labels of its own, so the others come first.
    for candidate in sorted(candidates, key=lambda candidate: _KINDS.index(candidate.kind)):
        leader = next((leader for leader in leaders if leader.takes(candidate)), None)
        if leader is not None:
            leader.members.append(candidate)
        elif candidate.kind != "log-sum-exp":
            leaders.append(candidate)
    owners: dict[int, list[_Candidate]] = {}
    for leader in leaders:
        for bsym in leader.own_bsyms():
            owners.setdefault(id(bsym), []).append(leader)
    for leader in leaders:
        leader.find_users(owners)
    _distribute_argmaxes(leaders)
    for leader in leaders:
        leader.match(options)
    _check_order(leaders)
    # What reads the same logits is fused as a whole, or not at all.
    while broken := [
        leader
        for leader in leaders
        if leader.problem is None and any(other.problem is not None for other in leader.others)
    ]:
        for leader in broken:
            leader.problem = NotFused(Reason.LOGITS_USED, "by something that is not fused itself")
    leaders.sort(key=lambda leader: index.position(leader.bsym))
    return [Found(leader.bsym, leader.kind, leader.outcome) for leader in leaders]


_KINDS = ("cross-entropy", "log-probability", "entropy", "log-sum-exp")


@dataclass(eq=False)
class _Candidate:
    """What may become a region, or a part of another one's."""

    kind: str
    result: Result
    index: TraceIndex
    paths: Sequence[Sequence[LogitsPath]] = ()
    """From the linear to each tensor of logits that is read."""
    arguments: CrossEntropy | None = None
    reading: Reading | None = None
    problem: NotFused | None = None
    """Why it cannot be fused, as far as that is known."""
    members: "list[_Candidate]" = field(default_factory=list)
    """Others that its region computes, too."""
    others: "list[_Candidate]" = field(default_factory=list)
    """Candidates that use the same logits, or tensors computed from them, in regions of their own."""
    argmaxes: "list[tuple[LogitsPath, Result]]" = field(default_factory=list)
    """Each argmax of the logits, or of what is made of them, with the description of its operand."""
    own_argmaxes: list[Result] = field(default_factory=list)
    """The argmaxes that its region computes."""
    found: Match | None = None
    without_sum: Match | None = None
    """Where `found` computes a sum that the program makes of its results: the same without that."""

    @classmethod
    def of_loss(cls, loss: BoundSymbol, index: TraceIndex) -> "_Candidate":
        arguments = CrossEntropy.of(loss)
        candidate = cls("cross-entropy", Result(loss, loss.output, "loss"), index, arguments=arguments)
        try:
            candidate.paths = [_paths_of_loss(loss, arguments, index)]
        except NotFused as problem:
            candidate.problem = problem
        return candidate

    @classmethod
    def of_reading(cls, reading: Reading, index: TraceIndex) -> "_Candidate":
        factor = reading.factor
        # The loss of a token is the negative of its log-probability.
        kind, output, sign = {
            "entropy": ("entropy", "entropy", 1),
            "log_sum_exp": ("log-sum-exp", "log_sum_exp", 1),
        }.get(reading.output, ("log-probability", "loss", -1))
        result = Result(reading.bsym, reading.tensor, output, sign * factor, reading.is_exponential)
        problem = reading.problem
        if problem is None and not reading.output:
            problem = NotFused(Reason.NOT_A_LOG_PROBABILITY, f"by {reading.bsym.sym.name} alone")
        elif problem is None and abs(factor) != 1:
            problem = NotFused(Reason.NOT_A_LOG_PROBABILITY, f"but {factor} times that")
        return cls(kind, result, index, reading.paths, reading=reading, problem=problem)

    @property
    def outcome(self) -> Match | NotFused:
        """What has become of it."""
        outcome = self.problem or self.found
        assert outcome is not None
        return outcome

    @property
    def bsym(self) -> BoundSymbol:
        return self.result.bsym

    @property
    def path(self) -> LogitsPath:
        """The description of the logits that the region will compute: one with gradients, if any has them."""
        paths = [ways[-1] for ways in self.all_paths]
        return next((path for path in paths if path.carries_grad), paths[0])

    @property
    def labels(self) -> TensorProxy | None:
        if self.reading is not None:
            return self.reading.labels
        return None if self.arguments is None else self.arguments.target

    @property
    def parts(self) -> "tuple[_Candidate, ...]":
        """What its region computes, but for argmaxes."""
        return (self, *self.members)

    @property
    def all_paths(self) -> list[Sequence[LogitsPath]]:
        """From the linear to each tensor of logits that the parts read."""
        return [paths for part in self.parts for paths in part.paths]

    def own_bsyms(self) -> Iterator[BoundSymbol]:
        """What computes the results of its parts from the logits."""
        for part in self.parts:
            yield part.bsym
            if part.reading is not None:
                yield from part.reading.inner

    def takes(self, other: "_Candidate") -> bool:
        """Whether its region can compute another candidate's result, too: of all of its rows, with its labels."""
        mine, theirs = self.reading, other.reading
        if self.problem or other.problem or theirs is None:
            return False
        if not is_same_logits(self.path, theirs.path) or not _flow_alike(self.path, theirs.path):
            return False
        if self.arguments is not None:
            # The region then has to give a loss for each row. Without a gradient, to compute the logits once more for
            # the entropy alone takes as long, and less memory.
            is_cheap = theirs.path.carries_grad or theirs.output == "log_sum_exp"
            return theirs.labels is None and is_cheap and self.arguments.weight is None
        if theirs.labels is None:
            return True
        return (
            mine is not None
            and mine.labels is not None
            and mine.wraps_labels == theirs.wraps_labels
            and self.has_same_labels(mine.labels, theirs.labels)
        )

    def has_same_labels(self, a: TensorProxy, b: TensorProxy) -> bool:
        """Whether two tensors have the same labels in the same order, in any shape."""
        return self.index.same_values(before_reshapes(a, self.index), before_reshapes(b, self.index))

    def find_users(self, owners: "dict[int, list[_Candidate]]") -> None:
        """Finds out what else uses the logits, or what is between them and the linear or the results."""
        if self.problem is not None:
            return
        passed = {id(bsym) for bsym in self.own_and_paths()}
        try:
            inner = [bsym for part in self.parts if part.reading for bsym in part.reading.inner]
            # What the logits are reduced by is a part of their path.
            inner += [bsym for paths in self.all_paths for bsym in paths[-1].inner]
            self._check_inner(inner, passed, owners)
            waiting = [
                (path, user) for paths in self.all_paths for path in paths for user in self.index.users(path.tensor)
            ]
            while waiting:
                path, user = waiting.pop(0)
                if id(user) not in passed:
                    passed.add(id(user))
                    waiting += self._follow(path, user, owners)
        except NotFused as problem:
            self.problem = problem

    def _check_inner(self, inner: list[BoundSymbol], passed: set[int], owners: "dict[int, list[_Candidate]]") -> None:
        """Raises `NotFused` where something else uses what is between the logits and a result, such as logsumexp."""
        given = {member.result.tensor.name for member in self.members}
        for tensor in (out for bsym in inner for out in bsym.flat_proxy_outs if out.name not in given):
            for user in self.index.users(tensor):
                if id(user) not in passed and id(user) not in owners:
                    raise _used(tensor, user)
                self.others += [other for other in owners.get(id(user), ()) if other is not self]

    def _follow(
        self, path: LogitsPath, user: BoundSymbol, owners: "dict[int, list[_Candidate]]"
    ) -> list[tuple[LogitsPath, BoundSymbol]]:
        """Notes a user of some logits; returns the users of its result, if that is logits, too."""
        if user.sym.id == prims.PrimIDs.RETURN:
            raise NotFused(Reason.LOGITS_RETURNED)
        if id(user) in owners:
            self.others += owners[id(user)]
            return []
        if (indices := _indices_of_maximum(path, user, self.index)) is not None:
            self.argmaxes.append((path, Result(user, indices, "argmax")))
            return []
        try:
            branches = steps(path, user, self.index)
        except NotFused:
            raise _used(path.tensor, user) from None
        return [(branch, next_user) for branch in branches for next_user in self.index.users(branch.tensor)]

    def match(self, options: Options) -> None:
        """Makes a `Match` of it, or finds out why it cannot be one."""
        if self.problem is not None:
            return
        try:
            self.found = plain = self._checked_match()
            if plain.arguments.reduction == "none" and self.path.carries_grad:
                self.found = self._with_weighted_sum(plain) or self._with_token_sum(plain, options)
            if self.found.weighted is not None or self.found.token_sum is not None:
                note = "its gradients wait for the backward, because its weights depend on what needs its results"
                self.without_sum = replace(plain, note=note)
        except NotFused as problem:
            self.problem = problem

    def _checked_match(self) -> Match:
        index, path, arguments = self.index, self.path, self.arguments
        if self.reading is not None:
            _check_path(path, self.labels)
            # An entropy has no labels.
            arguments = CrossEntropy(path.tensor, self.labels, ignore_index=NOTHING_IGNORED, reduction="none")
        assert arguments is not None
        reduced = self.arguments if self.members else None
        if reduced is not None:
            arguments = replace(arguments, ignore_index=NOTHING_IGNORED, reduction="none")
        # The region takes the result's place. What is written may share memory with an operand of the linear, or with
        # the labels once these are read.
        for writer in index.writers_between(self.path_bsyms(), self.bsym):
            if any(dtypes.is_float_dtype(tensor.dtype) for tensor in tensors_written(writer)):
                raise NotFused(Reason.OPERAND_MODIFIED, f"by {writer.sym.name}")
        labels = self.labels
        for writer in () if labels is None else index.writers_between(self._readers_of_labels(), self.bsym):
            if any(index.may_share_memory(labels, tensor) for tensor in tensors_written(writer)):
                raise NotFused(Reason.OPERAND_MODIFIED, f"by {writer.sym.name}, after the labels were read")
        # In ignored rows, valid_argmax is -1, which no other label may be.
        is_accuracy = not -1 <= arguments.ignore_index < path.vocab and all(
            self._is_compared_with_labels(argmax.tensor) for argmax in self.own_argmaxes
        )
        output = "valid_argmax" if is_accuracy else "argmax"
        argmaxes = [argmax._replace(output=output) for argmax in self.own_argmaxes]
        results = (*(part.result for part in self.parts), *argmaxes)
        if len(results) > 1 and (writer := next((bsym for bsym in index.bsyms if tensors_written(bsym)), None)):
            # Operations that depend on a result after the first move behind the region, past what is written.
            raise NotFused(Reason.OPERAND_MODIFIED, f"by {writer.sym.name}")
        return Match(
            kind=self.kind,
            path=path,
            arguments=arguments,
            results=results,
            wraps_labels=self.reading is not None and self.reading.wraps_labels,
            reduced=reduced,
            own=frozenset(out.name for bsym in self.own_and_paths() for out in bsym.flat_proxy_outs),
        )

    def _readers_of_labels(self) -> list[BoundSymbol]:
        """What computes the result from the labels. Where parts are joined, what takes the labels of parts, too."""
        assert self.labels is not None
        own = {id(bsym) for bsym in self.own_bsyms()}
        readers = self.index.users(self.labels)
        found = [bsym for bsym in readers if id(bsym) in own]
        parts = [bsym for bsym in readers if any(out.dtype == self.labels.dtype for out in bsym.flat_proxy_outs)]
        return [*(found or parts), self.bsym]

    def _is_compared_with_labels(self, indices: TensorProxy) -> bool:
        """Whether an argmax is only compared with the labels of its rows."""
        labels = self.labels
        if labels is None:
            return False

        def compares(user: BoundSymbol) -> bool:
            if user.sym.id in RESHAPES:
                return self._is_compared_with_labels(user.output)
            others = [arg for arg in user.args if isinstance(arg, TensorProxy) and arg.name != indices.name]
            if user.sym.id not in (ltorch.eq.id, ltorch.ne.id) or len(others) != 1:
                return False
            return others[0].shape == indices.shape and self.has_same_labels(others[0], labels)

        return all(map(compares, self.index.users(indices)))

    def _with_weighted_sum(self, match: Match) -> Match | None:
        """The match with the weighted sum that the program makes of the losses alone, if it makes one."""
        result, *others = match.results
        # Rows of weight 0 are not computed, so nothing else can be asked of them.
        is_alone = result.output == "loss" and not result.is_exponential and not others
        weighted = weighted_sum(result.bsym, self.index) if is_alone else None
        if weighted is None or self.index.writers_between([result.bsym], weighted.place):
            return None
        total = Result(weighted.place, weighted.place.output, "loss")
        return replace(match, results=(total,), weighted=replace(weighted, factor=result.factor))

    def _with_token_sum(self, match: Match, options: Options) -> Match:
        """The match with the sum that the program makes of the results, if it makes one and gradients need not wait."""
        results = [part.result for part in self.parts]
        if not any(carries_grad(result.tensor) for result in results):
            return match
        try:
            _check_gradients_in_forward(match, options)
            own, logits = self.own_and_paths(), self.paths[0][0].tensor
            sources, call, reduced = list(map(_source_of, results)), match.arguments, match.reduced
            found = None if reduced is not None else find_token_sum(sources, own, logits, self.index)
            if self.reading is None and (found is None or not found.is_zero_without_loss):
                # In ignored rows the loss is 0, and what the program makes of this 0 counts.
                reduced = reduced or call
                sources[0] = sources[0]._replace(labels=reduced.target, ignore_index=reduced.ignore_index)
                found = find_token_sum(sources, own, logits, self.index)
                call = replace(call, ignore_index=NOTHING_IGNORED)
            assert found is not None
            bsyms = [bsym for paths in self.paths for bsym in paths[-1].bsyms]
            if self.index.writers_between(bsyms, found.place):
                raise NotASum("a tensor is changed in place")
        except NotASum as problem:
            return replace(match, note=f"its gradients wait for the backward, because {problem}")
        outputs = [
            result._replace(output=source.variable, factor=source.factor)
            for result, source in zip(results, sources, strict=True)
            if result.tensor.name in found.kept
        ]
        results = [Result(found.place, found.place.output, "loss"), *outputs, *match.results[len(results) :]]
        return replace(match, arguments=call, results=tuple(results), token_sum=found, reduced=reduced)

    def needed(self, givers: "dict[str, _Candidate]") -> "list[_Candidate]":
        """The candidates whose regions give what its region needs; it may be among them."""
        assert self.found is not None
        names = self.index.computed_from(self.found.read, without=self.found.own, up_to=givers)
        return [givers[name] for name in names if name in givers]

    def path_bsyms(self) -> list[BoundSymbol]:
        """What computes the logits: the linear, and all operations on its output."""
        return [bsym for paths in self.all_paths for bsym in paths[-1].bsyms]

    def own_and_paths(self) -> list[BoundSymbol]:
        """What computes the results from the operands of the linear."""
        return [*self.own_bsyms(), *self.path_bsyms()]


def _source_of(result: Result) -> Source:
    """What a sum of token losses may be made of."""
    variable, factor = ("log_prob", -1) if result.output == "loss" else (result.output, 1)
    return Source(result.tensor, variable, factor * result.factor, result.is_exponential)


def _check_gradients_in_forward(match: Match, options: Options) -> None:
    """Raises `NotASum` where the gradients of a sum of token losses may not be computed in the forward."""
    if match.arguments.weight is not None or match.arguments.label_smoothing:
        raise NotASum("the losses have class weights or label smoothing")
    if options.strategy not in (None, GRADIENTS_IN_FORWARD):
        raise NotASum(f"the options say {options.strategy}")
    dtype = dtypes.to_strong_dtype(match.path.terms[0].input.dtype)
    if dtype is dtypes.float16 and options.expected_gradient is None:
        raise NotASum("in float16 they need Options(expected_gradient=), such as a GradScaler's scale")
    if match.reduced is not None and match.reduced.reduction != "none":
        raise NotASum("an entropy or a log-sum-exp stands beside a cross-entropy that is reduced itself")


def _flow_alike(a: LogitsPath, b: LogitsPath) -> bool:
    """Whether gradients flow to the same operands in both, or to none at all in one of them."""
    flows = [([term.carries_grad for term in path.terms], path.bias_carries_grad) for path in (a, b)]
    return flows[0] == flows[1] or not (a.carries_grad and b.carries_grad)


def _used(tensor: TensorProxy, user: BoundSymbol) -> NotFused:
    return NotFused(Reason.LOGITS_USED, f"{tensor.name} is used by {user.sym.name}")


def _distribute_argmaxes(leaders: Sequence[_Candidate]) -> None:
    """Gives each argmax to a region that computes the same rows; without one, its logits must stay as they are."""
    met: dict[int, list[tuple[_Candidate, LogitsPath, Result]]] = {}
    for leader in leaders:
        for path, argmax in leader.argmaxes:
            met.setdefault(id(argmax.bsym), []).append((leader, path, argmax))
    for of_argmax in met.values():
        fitting = [leader for leader, path, _ in of_argmax if _has_same_maximum(path, leader.path)]
        if fitting:
            fitting[0].own_argmaxes.append(of_argmax[0][2])
            continue
        for leader, path, argmax in of_argmax:
            leader.problem = leader.problem or _used(path.tensor, argmax.bsym)


def _paths_of_loss(loss: BoundSymbol, arguments: CrossEntropy, index: TraceIndex) -> list[LogitsPath]:
    logits = arguments.logits
    if not is_static(*arguments.values):
        raise NotFused(Reason.DYNAMIC)
    paths = paths_to(logits, index)
    path = paths[-1]
    if arguments.is_deprecated:
        raise NotFused(Reason.DEPRECATED_ARGUMENT)
    if arguments.has_probabilities:
        raise NotFused(Reason.CLASS_PROBABILITIES)
    if path.class_dimension != arguments.class_dimension:
        raise NotFused(Reason.CLASS_DIMENSION, f"logits of shape {tuple(logits.shape)}")
    if loss.sym.id == ltorch.nll_loss.id and path.normalised != "log_softmax":
        raise NotFused(Reason.NOT_LOG_PROBABILITIES)
    if path.normalised == "softmax":
        raise NotFused(Reason.TRANSFORMED_LOGITS, "by softmax")
    _check_path(path, arguments.target)
    _check_class_weights(path, arguments.weight, index)
    return paths


def _check_path(path: LogitsPath, labels: TensorProxy | None) -> None:
    if any(step.kind == "part" for step in path.rows):
        raise NotFused(Reason.TRANSFORMED_LOGITS, "by a split whose parts do not come together again")
    if not path.has_float_factors:
        raise NotFused(Reason.TRANSFORMED_LOGITS, "by factors whose product is no float")
    if any(type(tensor) is not TensorProxy for tensor in (*path.operands, *([] if labels is None else [labels]))):
        raise NotFused(Reason.DISTRIBUTED)
    tensor_dtypes = {dtypes.to_strong_dtype(tensor.dtype) for tensor in path.operands}
    if len(tensor_dtypes) > 1 or not all(dtypes.is_float_dtype(dtype) for dtype in tensor_dtypes):
        raise NotFused(Reason.DTYPE, ", ".join(sorted(dtype.shortname() for dtype in tensor_dtypes)))


def _check_class_weights(path: LogitsPath, weight: TensorProxy | None, index: TraceIndex) -> None:
    if weight is None:
        return
    if weight.name in index.need_grad:
        raise NotFused(Reason.CLASS_WEIGHTS, "they require a gradient")
    if path.vocab_size is not None:
        raise NotFused(Reason.CLASS_WEIGHTS, "for a part of the linear's vocabulary")
    input_dtype, dtype = (dtypes.to_strong_dtype(tensor.dtype) for tensor in (path.terms[0].input, weight))
    if dtype != input_dtype and (dtype is not dtypes.float32 or input_dtype is dtypes.float64):
        raise NotFused(Reason.CLASS_WEIGHTS, dtype.shortname())


def _indices_of_maximum(path: LogitsPath, user: BoundSymbol, index: TraceIndex) -> TensorProxy | None:
    """What `argmax`, or `max` without use of its values, returns for each row; None where `user` is neither."""
    if user.sym.id not in (ltorch.argmax.id, ltorch.torch_max.id) or len(user.args) < 2:
        return None
    values, indices = user.output if isinstance(user.output, tuple) else (None, user.output)
    if user.sym.id == ltorch.torch_max.id and (values is None or index.users(values)):
        return None
    dimension = user.args[1]
    is_over_vocab = isinstance(dimension, int) and dimension % path.tensor.ndim == path.class_dimension
    # Several exponentials may be infinite.
    return indices if is_over_vocab and path.normalised != "exp" else None


def _has_same_maximum(path: LogitsPath, other: LogitsPath) -> bool:
    """Whether two tensors have the same rows, and in each of them the largest element in the same column."""
    # Any increasing function of the logits has the same maximum.
    return has_same_linears(path, other) and (path.scale > 0) == (other.scale > 0)


def _check_order(leaders: Sequence[_Candidate]) -> None:
    """Finds out which regions would have to run before themselves.

    A region gives all its results at once. Where it needs one of them, directly or by way of other regions, it cannot
    run: such as where the labels of two losses are each other's predictions. Where only the sum that it computes needs
    it, the program computes that sum.
    """
    while matched := {leader: leader.found for leader in leaders if leader.found and leader.problem is None}:
        givers = {name: leader for leader, found in matched.items() for name in found.given}
        needed = {leader: leader.needed(givers) for leader in matched}
        stuck = [leader for leader in matched if leader in reached(needed[leader], needed.__getitem__)]
        sums = [leader for leader in stuck if leader.without_sum is not None]
        for leader in sums:
            leader.found, leader.without_sum = leader.without_sum, None
        if sums:
            continue
        for leader in stuck:
            leader.problem = NotFused(Reason.LOGITS_USED, "the loss depends on their argmax or entropy")
        return
