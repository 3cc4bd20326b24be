"""Finding linear + cross-entropy in a trace. Nothing is changed here; `transform` does that.

A loss is followed upwards from its logits to the linear that made them (`logits_path`). The result is a `Match` with a
description of that path, or a `NotFusedLoss` with a reason for the user to read.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import thunder.torch as ltorch
from thunder.core import dtypes, prims
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol

from thunder_flce.graph.matching.logits_path import COPIES, RESHAPES, LogitsPath, paths_to, step
from thunder_flce.graph.matching.losses import CrossEntropy, is_loss
from thunder_flce.graph.matching.reasons import NotFused, Reason
from thunder_flce.graph.matching.trace_index import TraceIndex, is_static, tensors_written


@dataclass(frozen=True, eq=False)
class Argmax:
    """The column of each row's largest logit, such as a program computes for accuracy."""

    bsym: BoundSymbol
    indices: TensorProxy
    """Its result: the logits' shape without the vocabulary, or with one element in that dimension."""
    path: LogitsPath
    """From the linear to its operand."""


@dataclass(frozen=True, eq=False)
class Match:
    """A linear + cross-entropy that can become one region."""

    cross_entropy: BoundSymbol
    """Also the nll_loss of a log_softmax."""
    path: LogitsPath
    """From the linear to the loss."""
    arguments: CrossEntropy
    argmaxes: tuple[Argmax, ...] = ()
    """What the region computes besides the loss."""
    argmax_output: str = "argmax"
    """Which of the region's outputs they are: see `functional.linear_cross_entropy`."""
    after_loss: tuple[BoundSymbol, ...] = ()
    """Operations before the loss that depend on an argmax, so that they have to move after the loss."""
    shares_logits_with: tuple[BoundSymbol, ...] = ()
    """Other losses on the same logits: this one can be fused only if they are."""


@dataclass(frozen=True)
class NotFusedLoss:
    """A cross-entropy that stays as it is."""

    cross_entropy: BoundSymbol
    reason: Reason
    detail: str = ""
    """The operation or value that prevents fusion."""


def find_cross_entropies(index: TraceIndex) -> list[Match | NotFusedLoss]:
    """Each cross-entropy of the trace, in order, and whether it can be fused with its linear."""
    found: dict[int, Match | NotFusedLoss] = {}
    for bsym in index.bsyms:
        if is_loss(bsym):
            try:
                found[id(bsym)] = _match(bsym, index)
            except NotFused as error:
                found[id(bsym)] = NotFusedLoss(bsym, error.reason, error.detail)
    # Losses on the same logits are all fused, or none of them is.
    while broken := [
        match
        for match in found.values()
        if isinstance(match, Match)
        and any(isinstance(found[id(other)], NotFusedLoss) for other in match.shares_logits_with)
    ]:
        for match in broken:
            detail = "by another loss that is not fused"
            found[id(match.cross_entropy)] = NotFusedLoss(match.cross_entropy, Reason.LOGITS_USED, detail)
    return list(found.values())


def _match(loss: BoundSymbol, index: TraceIndex) -> Match:
    arguments = CrossEntropy.of(loss)
    logits, target = arguments.logits, arguments.target
    if not is_static(*arguments.values):
        raise NotFused(Reason.DYNAMIC)
    paths = paths_to(logits, index)
    path = paths[-1]

    if arguments.is_deprecated:
        raise NotFused(Reason.DEPRECATED_ARGUMENT)
    if arguments.has_probabilities:
        raise NotFused(Reason.CLASS_PROBABILITIES)
    if path.class_dimension != min(1, logits.ndim - 1):
        raise NotFused(Reason.CLASS_DIMENSION, f"logits of shape {tuple(logits.shape)}")
    if loss.sym.id == ltorch.nll_loss.id and not path.is_log_softmax:
        raise NotFused(Reason.NOT_LOG_PROBABILITIES)
    if not path.has_float_factors:
        raise NotFused(Reason.TRANSFORMED_LOGITS, "by factors whose product is no float")
    _check_operands(path, target)
    _check_class_weights(path, arguments.weight, index)
    # The pattern fits. What is left is whether the logits have other users.
    on_path, users = {id(bsym) for bsym in (*path.bsyms, loss)}, _Users()
    for at in paths:
        for user in index.users(at.tensor):
            if id(user) not in on_path:
                users.add(at, user, index)
    if users.losses and users.argmaxes:
        raise NotFused(Reason.LOGITS_USED, "by other losses and an argmax")
    for argmax in users.argmaxes:
        _check_argmax(argmax, path)
    is_accuracy = all(_is_for_accuracy(argmax, path, arguments, index) for argmax in users.argmaxes)
    for writer in index.between(path.bsyms, loss):
        # The region takes the loss's place. What is written may share memory with an operand of the linear. Labels are
        # integers and may be changed.
        if any(dtypes.is_float_dtype(tensor.dtype) for tensor in tensors_written(writer)):
            raise NotFused(Reason.OPERAND_MODIFIED, f"by {writer.sym.name}")
    return Match(
        loss,
        path,
        arguments,
        argmaxes=tuple(users.argmaxes),
        argmax_output="valid_argmax" if is_accuracy else "argmax",
        after_loss=tuple(_dependants(users.argmaxes, loss, index)),
        shares_logits_with=tuple(users.losses),
    )


def _check_operands(path: LogitsPath, target: TensorProxy) -> None:
    tensors = [tensor for term in path.terms for tensor in (term.input, term.weight)]
    if path.bias is not None:
        tensors.append(path.bias)
    if any(type(tensor) is not TensorProxy for tensor in (*tensors, target)):
        raise NotFused(Reason.DISTRIBUTED)
    if not is_static(*tensors):
        raise NotFused(Reason.DYNAMIC)
    tensor_dtypes = {dtypes.to_strong_dtype(tensor.dtype) for tensor in tensors}
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


@dataclass(frozen=True, eq=False)
class _Users:
    """Other users of the logits that fusion allows: further losses, or argmaxes that the region can compute."""

    losses: list[BoundSymbol] = field(default_factory=list)
    argmaxes: list[Argmax] = field(default_factory=list)

    def add(self, path: LogitsPath, user: BoundSymbol, index: TraceIndex) -> None:
        """Follows a user of the logits to losses and argmaxes; raises `NotFused` where it leads to anything else."""
        if user.sym.id == prims.PrimIDs.RETURN:
            raise NotFused(Reason.LOGITS_RETURNED)
        if is_loss(user) and user.args[0].name == path.tensor.name:
            self.losses.append(user)
        elif (indices := _indices_of_maximum(path, user, index)) is not None:
            self.argmaxes.append(Argmax(user, indices, path))
        else:
            try:
                branch = step(path, user, index)
            except NotFused:
                raise NotFused(Reason.LOGITS_USED, f"{path.tensor.name} is used by {user.sym.name}") from None
            for next_user in index.users(branch.tensor):
                self.add(branch, next_user, index)


def _indices_of_maximum(path: LogitsPath, user: BoundSymbol, index: TraceIndex) -> TensorProxy | None:
    """What `argmax`, or `max` without use of its values, returns for each row; None where `user` is neither."""
    if user.sym.id not in (ltorch.argmax.id, ltorch.torch_max.id) or len(user.args) < 2:
        return None
    values, indices = user.output if isinstance(user.output, tuple) else (None, user.output)
    if user.sym.id == ltorch.torch_max.id and (values is None or index.users(values)):
        return None
    dimension = user.args[1]
    is_over_vocab = isinstance(dimension, int) and dimension % path.tensor.ndim == path.class_dimension
    return indices if is_over_vocab else None


def _check_argmax(argmax: Argmax, path: LogitsPath) -> None:
    """Raises `NotFused` unless it is the argmax of the rows of logits that the loss reads."""
    at = argmax.path
    # Any increasing function of the logits has the same maximum.
    same_maximum = (
        len(at.terms) == len(path.terms)
        and at.bias is path.bias
        and at.vocab_size == path.vocab_size
        and (at.scale > 0) == (path.scale > 0)
    )
    if at.selection != path.selection or not same_maximum:
        raise NotFused(Reason.LOGITS_USED, f"{at.tensor.name} is used by {argmax.bsym.sym.name}")


def _is_for_accuracy(argmax: Argmax, path: LogitsPath, arguments: CrossEntropy, index: TraceIndex) -> bool:
    """Whether an argmax is only compared with the labels: then it may be -1 in ignored rows, which is no label."""
    if -1 <= arguments.ignore_index < path.vocab:
        return False
    waiting = [argmax.indices]
    while waiting:
        indices = waiting.pop()
        for user in index.users(indices):
            if user.sym.id in RESHAPES:
                waiting.append(user.output)
                continue
            others = [arg for arg in user.args if isinstance(arg, TensorProxy) and arg.name != indices.name]
            is_comparison = user.sym.id in (ltorch.eq.id, ltorch.ne.id) and len(others) == 1
            if not is_comparison or not _are_labels(others[0], indices, arguments.target, index):
                return False
    return True


def _are_labels(tensor: TensorProxy, indices: TensorProxy, target: TensorProxy, index: TraceIndex) -> bool:
    """Whether a tensor has the loss's labels, in the same rows."""

    def flat(tensor: TensorProxy) -> TensorProxy:
        while (producer := index.producers.get(tensor.name)) is not None:
            # A narrower integer might be another label.
            if producer.sym.id not in RESHAPES | COPIES or tensor.dtype not in (producer.args[0].dtype, dtypes.int64):
                break
            tensor = producer.args[0]
        return tensor

    return tensor.shape == indices.shape and index.same_values(flat(tensor), flat(target))


def _dependants(argmaxes: Sequence[Argmax], loss: BoundSymbol, index: TraceIndex) -> list[BoundSymbol]:
    """The operations before the loss that depend on an argmax, which the region will compute together with the loss."""
    if not argmaxes:
        return []
    between = index.between([argmax.bsym for argmax in argmaxes], loss)
    dependent = {argmax.indices.name for argmax in argmaxes}
    found = []
    for bsym in (*between, loss):
        if any(arg.name in dependent for arg in bsym.flat_proxy_args):
            dependent |= {out.name for out in bsym.flat_proxy_outs}
            found.append(bsym)
    if loss in found:
        raise NotFused(Reason.LOGITS_USED, "the loss depends on their argmax")
    if writer := next((bsym for bsym in index.bsyms if tensors_written(bsym)), None):
        raise NotFused(Reason.OPERAND_MODIFIED, f"by {writer.sym.name}")
    return found
