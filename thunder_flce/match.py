"""Finding linear + cross-entropy in a trace. Nothing is changed here; `transform` does that.

A loss is followed upwards from its logits to the linear that made them (`logits_path`). What is found has a description
of the way, or a reason why there is none, which is kept for the user to read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import thunder.torch as ltorch
from thunder.core import dtypes, prims
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from thunder_flce import symbols
from thunder_flce.executor import is_static
from thunder_flce.logits_path import LogitsPath, Program, carries_grad
from thunder_flce.reason import NotFusable, Reason


@dataclass(frozen=True, eq=False)
class Match:
    """A linear + cross-entropy that can become one region."""

    cross_entropy: BoundSymbol
    """Also the nll_loss of a log_softmax."""
    path: LogitsPath
    """From the linear to the loss."""
    arguments: dict[str, Any]
    """Of the cross-entropy, by name: target, ignore_index, reduction and so on."""
    shares_logits_with: tuple[BoundSymbol, ...] = ()
    """Other losses on the same logits: this one can be fused only if they are."""


@dataclass(frozen=True)
class Declined:
    """A cross-entropy that stays as it is."""

    cross_entropy: BoundSymbol
    reason: Reason
    detail: str = ""
    """Which operation or value stood in the way."""


def find_cross_entropies(trace: TraceCtx) -> list[Match | Declined]:
    """Each cross-entropy of the trace, in order, and whether it can be fused with its linear."""
    program = Program(trace)
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
    arguments = _ARGUMENTS[loss.sym.id](*loss.args, **loss.kwargs)
    logits, target = arguments.pop("logits"), arguments["target"]
    if not is_static(logits, *arguments.values()):
        raise NotFusable(Reason.DYNAMIC)
    paths = program.paths_to(logits)
    path = paths[-1]

    if arguments.pop("size_average") is not None or arguments.pop("reduce") is not None:
        raise NotFusable(Reason.DEPRECATED_ARGUMENT)
    if logits.shape == target.shape:
        raise NotFusable(Reason.CLASS_PROBABILITIES)
    if arguments.pop("weight") is not None:
        raise NotFusable(Reason.CLASS_WEIGHTS)
    if arguments.pop("label_smoothing") != 0.0:
        raise NotFusable(Reason.LABEL_SMOOTHING)
    if path.class_dimension != min(1, logits.ndim - 1):
        raise NotFusable(Reason.CLASS_DIMENSION, f"logits of shape {tuple(logits.shape)}")
    if loss.sym.id == ltorch.nll_loss.id and not path.is_log_softmax:
        raise NotFusable(Reason.NOT_LOG_PROBABILITIES)
    if path.scale != 1 or path.softcap is not None:
        raise NotFusable(Reason.TRANSFORMED_LOGITS, "by a factor or a softcap")
    if path.vocab_size is not None:
        raise NotFusable(Reason.TRANSFORMED_LOGITS, "by getitem along the vocabulary")

    _check_operands(path, target)
    # From here on the pattern fits; what is left is whether somebody else needs what it would no longer compute.
    shares_logits_with = _other_users(paths, loss, program)
    if writer := _writer_between(path, loss, program):
        raise NotFusable(Reason.OPERAND_MODIFIED, f"by {writer.sym.name}")
    return Match(loss, path, arguments, tuple(shares_logits_with))


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


def _other_users(paths: Sequence[LogitsPath], loss: BoundSymbol, program: Program) -> list[BoundSymbol]:
    """Who else uses what stands between the linear and the loss: other losses, or else the logits have to stay."""
    on_the_way = {id(bsym) for bsym in (*paths[-1].bsyms, loss)}
    others: list[BoundSymbol] = []
    for path in paths:
        for user in program.consumers[path.tensor.name]:
            if id(user) not in on_the_way:
                others += _losses_below(path, user, program)
    return others


def _losses_below(path: LogitsPath, user: BoundSymbol, program: Program) -> list[BoundSymbol]:
    """The losses that a user of logits leads to; raises `NotFusable` where it leads to anything else."""
    if user.sym.id == prims.PrimIDs.RETURN:
        raise NotFusable(Reason.LOGITS_RETURNED)
    if user.sym.id in _ARGUMENTS and user.args[0] is path.tensor:
        return [user]
    try:
        branch = program.step(path, user)
    except NotFusable:
        raise NotFusable(Reason.LOGITS_USED, f"{path.tensor.name} is used by {user.sym.name}") from None
    return [
        loss for next in program.consumers.get(branch.tensor.name, ()) for loss in _losses_below(branch, next, program)
    ]


def _writer_between(path: LogitsPath, loss: BoundSymbol, program: Program) -> BoundSymbol | None:
    """Who changes a floating-point tensor in place between the linear and the loss, where the region will stand.

    It may be an operand of the linear, or share its memory. Labels are integers and may be changed.
    """
    first = min(program.positions[id(bsym)] for bsym in path.bsyms)
    between = program.bsyms[first : program.positions[id(loss)]]
    return next((bsym for bsym in between if any(map(_is_float, _written(bsym)))), None)


def _written(bsym: BoundSymbol) -> list[TensorProxy]:
    """The tensors that an operation, or one that it consists of, changes in place."""
    written = [tensor for inner in bsym.subsymbols for tensor in _written(inner)]
    if bsym.sym.id == prims.PrimIDs.COPY_:
        written.append(bsym.args[1])
    elif bsym.sym.name.endswith("_") or "setitem" in bsym.sym.name:
        written.append(bsym.args[0])
    return [tensor for tensor in written if isinstance(tensor, TensorProxy)]


def _is_float(tensor: TensorProxy) -> bool:
    return dtypes.is_float_dtype(tensor.dtype)


def _cross_entropy_arguments(
    logits: TensorProxy,
    target: TensorProxy,
    weight: TensorProxy | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> dict[str, Any]:
    return dict(locals())


def _nll_loss_arguments(
    logits: TensorProxy,
    target: TensorProxy,
    weight: TensorProxy | None = None,
    ignore_index: int | None = None,
    reduction: str = "mean",
) -> dict[str, Any]:
    # Where it is left out, thunder keeps None, and takes that for another value than torch.
    ignore_index = -100 if ignore_index is None else ignore_index
    return _cross_entropy_arguments(logits, target, weight, ignore_index=ignore_index, reduction=reduction)


_ARGUMENTS = {ltorch.cross_entropy.id: _cross_entropy_arguments, ltorch.nll_loss.id: _nll_loss_arguments}


def is_loss(bsym: BoundSymbol) -> bool:
    """Whether a bound symbol is a cross-entropy or an nll_loss."""
    return bsym.sym.id in _ARGUMENTS


def tensors_that_need_grad(trace: TraceCtx) -> set[str]:
    """The names of all tensors of a trace through which a gradient flows; thunder marks only its inputs.

    A superset at worst: an operation whose derivative is zero still passes it on.
    """
    needed = {arg.name for arg in _tensors(trace.args) if arg.requires_grad}
    for bsym in trace.bound_symbols:
        if bsym.sym.name in ("detach", "stop_gradient"):
            continue
        if any(arg.name in needed for arg in bsym.flat_proxy_args):
            needed |= {out.name for out in _tensors(bsym.flat_proxy_outs) if carries_grad(out)}
    return needed


def _tensors(proxies: Sequence[Any]) -> list[TensorProxy]:
    return [proxy for proxy in proxies if isinstance(proxy, TensorProxy)]


def is_region(bsym: BoundSymbol) -> bool:
    """Whether a bound symbol is a `linear_cross_entropy`, called by the user or put there by the transform."""
    return bsym.sym.id == symbols.linear_cross_entropy.id
