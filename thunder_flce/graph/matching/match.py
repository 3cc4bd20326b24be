"""Finding linear + cross-entropy in a trace. Nothing is changed here; `transform` does that.

A loss is followed upwards from its logits to the linear that made them (`logits_path`). The result is a `Match` with a
description of that path, or a `NotFused` with a reason for the user to read.
"""

from collections.abc import Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True, eq=False)
class Match:
    """A linear + cross-entropy that can become one region."""

    cross_entropy: BoundSymbol
    """Or the nll_loss of a log_softmax."""
    path: LogitsPath
    """From the linear to the loss."""
    arguments: CrossEntropy
    argmaxes: tuple[Argmax, ...] = ()
    """What the region computes besides the loss."""
    outputs: tuple[str, ...] = ()
    """The region's output that each of them is, if there are any: see `functional.linear_cross_entropy`."""
    other_losses: tuple[BoundSymbol, ...] = ()
    """On the same logits: this one can be fused only if they are."""


def find_cross_entropies(index: TraceIndex) -> list[tuple[BoundSymbol, Match | NotFused]]:
    """Each cross-entropy of the trace, in order, and how, or why not, it can be fused with its linear."""
    losses = [bsym for bsym in index.bsyms if is_loss(bsym)]
    found: dict[int, Match | NotFused] = {}
    for loss in losses:
        try:
            found[id(loss)] = _match(loss, index)
        except NotFused as reason:
            found[id(loss)] = reason
    # Losses on the same logits are all fused, or none of them is.
    while broken := [
        key
        for key, match in found.items()
        if isinstance(match, Match) and any(isinstance(found[id(other)], NotFused) for other in match.other_losses)
    ]:
        found |= dict.fromkeys(broken, NotFused(Reason.LOGITS_USED, "by another loss that is not fused"))
    return [(loss, found[id(loss)]) for loss in losses]


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
    if path.class_dimension != arguments.class_dimension:
        raise NotFused(Reason.CLASS_DIMENSION, f"logits of shape {tuple(logits.shape)}")
    if loss.sym.id == ltorch.nll_loss.id and not path.is_log_softmax:
        raise NotFused(Reason.NOT_LOG_PROBABILITIES)
    if not path.has_float_factors:
        raise NotFused(Reason.TRANSFORMED_LOGITS, "by factors whose product is no float")
    _check_operands(path, target)
    _check_class_weights(path, arguments.weight, index)
    # The pattern fits. What is left is whether the logits have other users.
    losses, argmaxes = _other_users(paths, loss, index)
    if argmaxes:
        if losses:
            raise NotFused(Reason.LOGITS_USED, "by other losses and an argmax")
        _check_order(argmaxes, loss, index)
    for writer in index.between(path.bsyms, loss):
        # The region takes the loss's place. What is written may share memory with an operand of the linear. Labels are
        # integers and may be changed.
        if any(dtypes.is_float_dtype(tensor.dtype) for tensor in tensors_written(writer)):
            raise NotFused(Reason.OPERAND_MODIFIED, f"by {writer.sym.name}")
    # In ignored rows, valid_argmax is -1, which no other label may be.
    is_accuracy = not -1 <= arguments.ignore_index < path.vocab and all(
        _is_compared_with_labels(argmax.indices, target, index) for argmax in argmaxes
    )
    output = "valid_argmax" if is_accuracy else "argmax"
    return Match(loss, path, arguments, tuple(argmaxes), (output,) if argmaxes else (), tuple(losses))


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


def _other_users(
    paths: Sequence[LogitsPath], loss: BoundSymbol, index: TraceIndex
) -> tuple[list[BoundSymbol], list[Argmax]]:
    """What else uses the logits, or what is between them and the linear: other losses, and argmaxes of the same rows.

    Raises:
        NotFused: where anything else uses them.
    """
    losses: list[BoundSymbol] = []
    argmaxes: list[Argmax] = []
    on_path = {id(bsym) for bsym in (*paths[-1].bsyms, loss)}
    waiting = [(path, user) for path in paths for user in index.users(path.tensor) if id(user) not in on_path]
    while waiting:
        path, user = waiting.pop(0)
        if user.sym.id == prims.PrimIDs.RETURN:
            raise NotFused(Reason.LOGITS_RETURNED)
        if is_loss(user) and user.args[0].name == path.tensor.name:
            losses.append(user)
        elif (indices := _indices_of_maximum(path, user, index)) is not None:
            if not _has_same_maximum(path, paths[-1]):
                raise NotFused(Reason.LOGITS_USED, f"{path.tensor.name} is used by {user.sym.name}")
            argmaxes.append(Argmax(user, indices))
        else:
            try:
                branch = step(path, user, index)
            except NotFused:
                raise NotFused(Reason.LOGITS_USED, f"{path.tensor.name} is used by {user.sym.name}") from None
            waiting += [(branch, next_user) for next_user in index.users(branch.tensor)]
    return losses, argmaxes


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


def _has_same_maximum(path: LogitsPath, other: LogitsPath) -> bool:
    """Whether two tensors have the same rows, and in each of them the largest element in the same column."""
    # Any increasing function of the logits has the same maximum.
    return (
        path.selection == other.selection
        and len(path.terms) == len(other.terms)
        and path.bias is other.bias
        and path.vocab_size == other.vocab_size
        and (path.scale > 0) == (other.scale > 0)
    )


def _is_compared_with_labels(indices: TensorProxy, target: TensorProxy, index: TraceIndex) -> bool:
    """Whether an argmax is only compared with the loss's labels."""
    for user in index.users(indices):
        if user.sym.id in RESHAPES:
            if not _is_compared_with_labels(user.output, target, index):
                return False
            continue
        others = [arg for arg in user.args if isinstance(arg, TensorProxy) and arg.name != indices.name]
        is_comparison = user.sym.id in (ltorch.eq.id, ltorch.ne.id) and len(others) == 1
        if not is_comparison or not _are_labels(others[0], indices, target, index):
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


def _check_order(argmaxes: Sequence[Argmax], loss: BoundSymbol, index: TraceIndex) -> None:
    """Raises `NotFused` unless what depends on an argmax can run after the loss, with which it is computed."""
    dependent = {argmax.indices.name for argmax in argmaxes}
    for bsym in index.bsyms:
        if any(arg.name in dependent for arg in bsym.flat_proxy_args):
            dependent |= {out.name for out in bsym.flat_proxy_outs}
    if loss.output.name in dependent:
        raise NotFused(Reason.LOGITS_USED, "the loss depends on their argmax")
    if writer := next((bsym for bsym in index.bsyms if tensors_written(bsym)), None):
        raise NotFused(Reason.OPERAND_MODIFIED, f"by {writer.sym.name}")
