"""Finding linear + cross-entropy in a trace. Nothing is changed here; `transform` does that.

A loss is followed upwards from its logits to the linear that made them (`logits_path`). What is found has a description
of the way, or a reason why there is none, which is kept for the user to read.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import thunder.torch as ltorch
from thunder.core import dtypes, prims
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol

from thunder_flce.graph import symbols
from thunder_flce.graph.matching.logits_path import COPIES, RESHAPES, LogitsPath, paths_to, step
from thunder_flce.graph.matching.reasons import NotFusable, Reason
from thunder_flce.graph.matching.trace_index import Program, tensors_written
from thunder_flce.graph.rules import is_static
from thunder_flce.graph.trace_arguments import cross_entropy_arguments


@dataclass(frozen=True, eq=False)
class Argmax:
    """The position of each row's largest logit, as accuracy needs it."""

    bsym: BoundSymbol
    indices: TensorProxy
    """What it returns, without the vocabulary or with one element in its place."""
    path: LogitsPath
    """From the linear to what it is the argmax of."""


@dataclass(frozen=True, eq=False)
class Match:
    """A linear + cross-entropy that can become one region."""

    cross_entropy: BoundSymbol
    """Also the nll_loss of a log_softmax."""
    path: LogitsPath
    """From the linear to the loss."""
    arguments: dict[str, Any]
    """Of the cross-entropy, by name: target, ignore_index, reduction and so on."""
    argmaxes: tuple[Argmax, ...] = ()
    """What the region computes beside the loss."""
    argmax_output: str = "argmax"
    """Which of the region's outputs they are: see `functional.linear_cross_entropy`."""
    late: tuple[BoundSymbol, ...] = ()
    """Operations before the loss that need an argmax, so that they have to come after it."""
    shares_logits_with: tuple[BoundSymbol, ...] = ()
    """Other losses on the same logits: this one can be fused only if they are."""


@dataclass(frozen=True)
class Declined:
    """A cross-entropy that stays as it is."""

    cross_entropy: BoundSymbol
    reason: Reason
    detail: str = ""
    """Which operation or value stood in the way."""


def find_cross_entropies(program: Program) -> list[Match | Declined]:
    """Each cross-entropy of the program, in order, and whether it can be fused with its linear."""
    found: dict[int, Match | Declined] = {}
    for bsym in program.bsyms:
        if bsym.sym.id in _ARGUMENTS:
            try:
                found[id(bsym)] = _match(bsym, program)
            except NotFusable as error:
                found[id(bsym)] = Declined(bsym, error.reason, error.detail)
    # The logits have to be there for all losses on them, or for none.
    while broken := [
        match
        for match in found.values()
        if isinstance(match, Match)
        and any(isinstance(found[id(other)], Declined) for other in match.shares_logits_with)
    ]:
        for match in broken:
            detail = "by another loss that is not fused"
            found[id(match.cross_entropy)] = Declined(match.cross_entropy, Reason.LOGITS_USED, detail)
    return list(found.values())


def _match(loss: BoundSymbol, program: Program) -> Match:
    arguments = loss_arguments(loss)
    logits, target = arguments.pop("logits"), arguments["target"]
    if not is_static(logits, *arguments.values()):
        raise NotFusable(Reason.DYNAMIC)
    paths = paths_to(logits, program)
    path = paths[-1]

    if arguments.pop("size_average") is not None or arguments.pop("reduce") is not None:
        raise NotFusable(Reason.DEPRECATED_ARGUMENT)
    if logits.shape == target.shape:
        raise NotFusable(Reason.CLASS_PROBABILITIES)
    if path.class_dimension != min(1, logits.ndim - 1):
        raise NotFusable(Reason.CLASS_DIMENSION, f"logits of shape {tuple(logits.shape)}")
    if loss.sym.id == ltorch.nll_loss.id and not path.is_log_softmax:
        raise NotFusable(Reason.NOT_LOG_PROBABILITIES)
    if not path.has_float_factors:
        raise NotFusable(Reason.TRANSFORMED_LOGITS, "by factors whose product is no float")
    _check_operands(path, target)
    _check_class_weights(path, arguments["weight"], program)
    # From here on the pattern fits; what is left is whether somebody else needs what it would no longer compute.
    users = _other_users(paths, loss, program)
    if users.losses and users.argmaxes:
        raise NotFusable(Reason.LOGITS_USED, "by other losses and an argmax")
    for argmax in users.argmaxes:
        _check_argmax(argmax, path)
    is_accuracy = all(_is_for_accuracy(argmax, path, arguments, program) for argmax in users.argmaxes)
    if writer := _writer_between(path, loss, program):
        raise NotFusable(Reason.OPERAND_MODIFIED, f"by {writer.sym.name}")
    return Match(
        loss,
        path,
        arguments,
        argmaxes=tuple(users.argmaxes),
        argmax_output="valid_argmax" if is_accuracy else "argmax",
        late=tuple(_dependants(users.argmaxes, loss, program)),
        shares_logits_with=tuple(users.losses),
    )


def _check_operands(path: LogitsPath, target: TensorProxy) -> None:
    tensors = [tensor for product in path.products for tensor in (product.input, product.weight)]
    if path.bias is not None:
        tensors.append(path.bias)
    if any(type(tensor) is not TensorProxy for tensor in (*tensors, target)):
        raise NotFusable(Reason.DISTRIBUTED)
    if not is_static(*tensors):
        raise NotFusable(Reason.DYNAMIC)
    tensor_dtypes = {dtypes.to_strong_dtype(tensor.dtype) for tensor in tensors}
    if len(tensor_dtypes) > 1 or not all(dtypes.is_float_dtype(dtype) for dtype in tensor_dtypes):
        raise NotFusable(Reason.DTYPE, ", ".join(sorted(dtype.shortname() for dtype in tensor_dtypes)))


def _check_class_weights(path: LogitsPath, weight: TensorProxy | None, program: Program) -> None:
    if weight is None:
        return
    if weight.name in program.need_grad:
        raise NotFusable(Reason.CLASS_WEIGHTS, "they require a gradient")
    if path.vocab_size is not None:
        raise NotFusable(Reason.CLASS_WEIGHTS, "for a part of the linear's vocabulary")
    input_dtype, dtype = (dtypes.to_strong_dtype(tensor.dtype) for tensor in (path.products[0].input, weight))
    if dtype != input_dtype and (dtype is not dtypes.float32 or input_dtype is dtypes.float64):
        raise NotFusable(Reason.CLASS_WEIGHTS, dtype.shortname())


@dataclass(frozen=True, eq=False)
class _Users:
    """Who uses what stands between a linear and a loss, beside the loss, and can do without it."""

    losses: list[BoundSymbol] = field(default_factory=list)
    argmaxes: list[Argmax] = field(default_factory=list)

    def add(self, path: LogitsPath, user: BoundSymbol, program: Program) -> None:
        """Follows a user of logits down to losses and argmaxes; raises `NotFusable` where it leads to anything else."""
        if user.sym.id == prims.PrimIDs.RETURN:
            raise NotFusable(Reason.LOGITS_RETURNED)
        if is_loss(user) and user.args[0].name == path.tensor.name:
            self.losses.append(user)
        elif (indices := _indices_of_maximum(path, user, program)) is not None:
            self.argmaxes.append(Argmax(user, indices, path))
        else:
            try:
                branch = step(path, user, program)
            except NotFusable:
                raise NotFusable(Reason.LOGITS_USED, f"{path.tensor.name} is used by {user.sym.name}") from None
            for next_user in program.users(branch.tensor):
                self.add(branch, next_user, program)


def _indices_of_maximum(path: LogitsPath, user: BoundSymbol, program: Program) -> TensorProxy | None:
    """What `argmax`, or `max` without use of its values, returns for each row; None where `user` is neither."""
    if user.sym.id not in (ltorch.argmax.id, ltorch.torch_max.id) or len(user.args) < 2:
        return None
    indices = user.output
    if user.sym.id == ltorch.torch_max.id:
        if not isinstance(user.output, tuple) or program.users(user.output[0]):
            return None
        indices = user.output[1]
    dimension = user.args[1]
    is_over_vocab = isinstance(dimension, int) and dimension % path.tensor.ndim == path.class_dimension
    return indices if is_over_vocab else None


def _other_users(paths: Sequence[LogitsPath], loss: BoundSymbol, program: Program) -> _Users:
    on_the_way = {id(bsym) for bsym in (*paths[-1].bsyms, loss)}
    users = _Users()
    for path in paths:
        for user in program.users(path.tensor):
            if id(user) not in on_the_way:
                users.add(path, user, program)
    return users


def _check_argmax(argmax: Argmax, path: LogitsPath) -> None:
    """That it is the argmax of the logits that the loss sees, of the same rows."""
    at = argmax.path
    # Any increasing function of the logits has the same maximum.
    same_maximum = (
        len(at.products) == len(path.products)
        and at.bias is path.bias
        and at.vocab_size == path.vocab_size
        and (at.scale > 0) == (path.scale > 0)
    )
    if at.selection != path.selection or not same_maximum:
        raise NotFusable(Reason.LOGITS_USED, f"{at.tensor.name} is used by {argmax.bsym.sym.name}")


def _is_for_accuracy(argmax: Argmax, path: LogitsPath, arguments: dict[str, Any], program: Program) -> bool:
    """Whether an argmax is only compared with the labels: then it may be -1 in ignored rows, which is no label."""
    if -1 <= arguments["ignore_index"] < path.vocab:
        return False
    waiting = [argmax.indices]
    while waiting:
        indices = waiting.pop()
        for user in program.users(indices):
            if user.sym.id in RESHAPES:
                waiting.append(user.output)
                continue
            others = [arg for arg in user.args if isinstance(arg, TensorProxy) and arg.name != indices.name]
            is_comparison = user.sym.id in (ltorch.eq.id, ltorch.ne.id) and len(others) == 1
            if not is_comparison or not _are_labels(others[0], indices, arguments["target"], program):
                return False
    return True


def _are_labels(tensor: TensorProxy, indices: TensorProxy, target: TensorProxy, program: Program) -> bool:
    """Whether a tensor has the loss's labels, in the same rows."""

    def flat(tensor: TensorProxy) -> TensorProxy:
        while (producer := program.producers.get(tensor.name)) is not None:
            # A narrower integer might be another label.
            if producer.sym.id not in RESHAPES | COPIES or tensor.dtype not in (producer.args[0].dtype, dtypes.int64):
                break
            tensor = producer.args[0]
        return tensor

    return tensor.shape == indices.shape and program.same_values(flat(tensor), flat(target))


def _dependants(argmaxes: Sequence[Argmax], loss: BoundSymbol, program: Program) -> list[BoundSymbol]:
    """What stands before the loss but needs an argmax, which will come with the loss.

    Raises:
        NotFusable: where the loss needs it, or the program changes a tensor in place, so that order matters.
    """
    if not argmaxes:
        return []
    between = program.between([argmax.bsym for argmax in argmaxes], loss)
    late = {argmax.indices.name for argmax in argmaxes}
    found = []
    for bsym in (*between, loss):
        if any(arg.name in late for arg in bsym.flat_proxy_args):
            late |= {out.name for out in bsym.flat_proxy_outs}
            found.append(bsym)
    if loss in found:
        raise NotFusable(Reason.LOGITS_USED, "the loss depends on their argmax")
    if writer := next((bsym for bsym in program.bsyms if tensors_written(bsym)), None):
        raise NotFusable(Reason.OPERAND_MODIFIED, f"by {writer.sym.name}")
    return found


def _writer_between(path: LogitsPath, loss: BoundSymbol, program: Program) -> BoundSymbol | None:
    """Who changes a floating-point tensor in place between the linear and the loss, where the region will stand.

    It may be an operand of the linear, or share its memory. Labels are integers and may be changed.
    """
    for bsym in program.between(path.bsyms, loss):
        if any(dtypes.is_float_dtype(tensor.dtype) for tensor in tensors_written(bsym)):
            return bsym
    return None


def _nll_loss_arguments(
    logits: TensorProxy,
    target: TensorProxy,
    weight: TensorProxy | None = None,
    ignore_index: int | None = None,
    reduction: str = "mean",
) -> dict[str, Any]:
    # Where it is left out, thunder keeps None, and takes that for another value than torch.
    ignore_index = -100 if ignore_index is None else ignore_index
    return cross_entropy_arguments(logits, target, weight, ignore_index=ignore_index, reduction=reduction)


_ARGUMENTS = {ltorch.cross_entropy.id: cross_entropy_arguments, ltorch.nll_loss.id: _nll_loss_arguments}


def loss_arguments(loss: BoundSymbol) -> dict[str, Any]:
    """The arguments of a cross-entropy or nll_loss, by their names in `torch.nn.functional.cross_entropy`."""
    return _ARGUMENTS[loss.sym.id](*loss.args, **loss.kwargs)


def is_loss(bsym: BoundSymbol) -> bool:
    """Whether a bound symbol is a cross-entropy or an nll_loss."""
    return bsym.sym.id in _ARGUMENTS


def is_region(bsym: BoundSymbol) -> bool:
    """Whether a bound symbol is a `linear_cross_entropy`, called by the user or put there by the transform."""
    return bsym.sym.id == symbols.linear_cross_entropy.id
