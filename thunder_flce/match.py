"""Finding linear + cross-entropy in a trace. Nothing is changed here; `transform` does that.

A cross-entropy is followed upwards from its logits, through operations that keep rows and vocabulary as they are, to
the linear that made them. Every step either goes on or ends in a reason, which is kept for the user to read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import thunder.torch as ltorch
from thunder.core import dtypes, prims
from thunder.core.proxies import Proxy, ProxyTag, TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from thunder_flce import symbols
from thunder_flce.executor import is_static


class Reason(Enum):
    """Why a cross-entropy was not fused with its linear."""

    NO_LINEAR = "its logits do not come from a linear layer"
    LOGITS_USED = "the logits, or something between them and the loss, are also used elsewhere"
    LOGITS_RETURNED = "the program returns its logits; return the loss only to have them fused"
    TRANSFORMED_LOGITS = "the logits are changed between the linear and the loss"
    CLASS_DIMENSION = "the vocabulary is not the last dimension of the logits"
    CLASS_PROBABILITIES = "the targets are class probabilities"
    CLASS_WEIGHTS = "it has class weights"
    LABEL_SMOOTHING = "it has label smoothing"
    DTYPE = "the linear's operands have different dtypes, or one that is not supported"
    DISTRIBUTED = "an operand is a distributed tensor"
    OPERAND_MODIFIED = "a floating-point tensor is changed in place between the linear and the loss"
    DYNAMIC = "a shape or a setting is not known when the trace is compiled"
    DEPRECATED_ARGUMENT = "it has the deprecated argument size_average or reduce"
    NOT_THUNDER = "thunder does not compile its part of the graph"


@dataclass(frozen=True)
class Match:
    """A linear + cross-entropy that can become one region."""

    cross_entropy: BoundSymbol
    linear: BoundSymbol
    arguments: dict[str, Any]
    """Of the cross-entropy, by name: logits, target, ignore_index, reduction."""
    operands: tuple[TensorProxy, TensorProxy, TensorProxy | None]
    """Of the linear: input, weight, bias."""
    carries_grad: bool
    """Whether gradients flow from the loss to the linear: not through anything computed under `torch.no_grad`."""


@dataclass(frozen=True)
class Declined:
    """A cross-entropy that stays as it is."""

    cross_entropy: BoundSymbol
    reason: Reason
    detail: str = ""
    """Which operation or value stood in the way."""


def find_cross_entropies(trace: TraceCtx) -> list[Match | Declined]:
    """Each cross-entropy of the trace, in order, and whether it can be fused with its linear."""
    producers = {out.name: bsym for bsym in trace.bound_symbols for out in bsym.flat_proxy_outs}
    consumers: dict[str, list[BoundSymbol]] = {}
    for bsym in trace.bound_symbols:
        for name in {arg.name for arg in bsym.flat_proxy_args}:
            consumers.setdefault(name, []).append(bsym)
    found = []
    for bsym in trace.bound_symbols:
        if bsym.sym.id == ltorch.cross_entropy.id:
            match = _match(bsym, producers, consumers)
            if isinstance(match, Match) and (writer := _writer_between(match, trace)):
                match = Declined(bsym, Reason.OPERAND_MODIFIED, f"by {writer.sym.name}")
            found.append(match)
    return found


def _match(
    cross_entropy: BoundSymbol, producers: dict[str, BoundSymbol], consumers: dict[str, list[BoundSymbol]]
) -> Match | Declined:
    arguments = _cross_entropy_arguments(*cross_entropy.args, **cross_entropy.kwargs)
    logits: TensorProxy = arguments["logits"]

    def declined(reason: Reason, detail: str = "") -> Declined:
        return Declined(cross_entropy, reason, detail)

    if not is_static(*arguments.values()):
        return declined(Reason.DYNAMIC)
    linear = _find_linear(logits, producers)
    if isinstance(linear, tuple):
        return declined(*linear)

    if arguments["size_average"] is not None or arguments["reduce"] is not None:
        return declined(Reason.DEPRECATED_ARGUMENT)
    if logits.shape == arguments["target"].shape:
        return declined(Reason.CLASS_PROBABILITIES)
    if arguments["weight"] is not None:
        return declined(Reason.CLASS_WEIGHTS)
    if arguments["label_smoothing"] != 0.0:
        return declined(Reason.LABEL_SMOOTHING)
    if logits.ndim > 2:
        return declined(Reason.CLASS_DIMENSION, f"logits of shape {tuple(logits.shape)}")

    input, weight, bias = _linear_arguments(*linear.args, **linear.kwargs)
    tensors = [tensor for tensor in (input, weight, bias) if tensor is not None]
    if any(type(tensor) is not TensorProxy for tensor in (*tensors, arguments["target"])):
        return declined(Reason.DISTRIBUTED)
    if not is_static(*tensors):
        return declined(Reason.DYNAMIC)
    tensor_dtypes = {dtypes.to_strong_dtype(tensor.dtype) for tensor in tensors}
    if len(tensor_dtypes) > 1 or not all(dtypes.is_float_dtype(dtype) for dtype in tensor_dtypes):
        return declined(Reason.DTYPE, ", ".join(sorted(dtype.shortname() for dtype in tensor_dtypes)))

    # From here on the pattern fits; what is left is whether somebody else needs what it would no longer compute.
    name = logits.name
    flows = carries_grad(cross_entropy.output)
    while True:
        flows = flows and carries_grad(producers[name].output)
        users = consumers[name]
        if any(user.sym.id == prims.PrimIDs.RETURN for user in users):
            return declined(Reason.LOGITS_RETURNED)
        if len(users) > 1:
            others = [user.sym.name for user in users if user is not cross_entropy and user.output is not logits]
            return declined(Reason.LOGITS_USED, f"{name} is used by {', '.join(sorted(set(others)))}")
        producer = producers[name]
        if producer is linear:
            break
        name = producer.flat_proxy_args[0].name
    return Match(cross_entropy, linear, arguments, (input, weight, bias), flows)


def _writer_between(match: Match, trace: TraceCtx) -> BoundSymbol | None:
    """Who changes a floating-point tensor in place between the linear and the loss, where the region will stand.

    It may be an operand of the linear, or share its memory. Labels are integers and may be changed.
    """
    bsyms = trace.bound_symbols
    first = next(i for i, bsym in enumerate(bsyms) if bsym is match.linear)
    last = next(i for i, bsym in enumerate(bsyms) if bsym is match.cross_entropy)
    return next((bsym for bsym in bsyms[first:last] if any(map(_is_float, _written(bsym)))), None)


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


def _find_linear(logits: TensorProxy, producers: dict[str, BoundSymbol]) -> BoundSymbol | tuple[Reason, str]:
    """The linear that made the logits, or why they can't be followed to one."""
    changed: tuple[Reason, str] | None = None
    current: Proxy = logits
    while (producer := producers.get(current.name)) is not None:
        if producer.sym.id in LINEAR_IDS:
            return changed or producer
        inputs = [arg for arg in producer.flat_proxy_args if isinstance(arg, TensorProxy)]
        if not inputs:
            break
        # A tensor that has been changed is the first argument of what changed it, or has at least its size.
        size = current.numel
        current = next((arg for arg in inputs if arg.numel == size), inputs[0])
        if len(inputs) > 1 or not _keeps_logits(current, producer):
            # Still follow it: a loss whose logits come from no linear at all is no missed fusion.
            changed = changed or (Reason.TRANSFORMED_LOGITS, f"by {producer.sym.name}")
    return Reason.NO_LINEAR, ""


# Symbols that only reshape, or only cast: for them, shapes and dtypes say all there is to know.
_SHAPE_SYMBOLS = {"view", "reshape", "flatten", "unflatten", "contiguous", "squeeze", "unsqueeze"}
_CAST_SYMBOLS = {"to", "float", "type", "convert_element_type", "shallow_copy"}
# Under autocast, thunder puts the primitive in place of torch's linear.
LINEAR_IDS = (ltorch.linear.id, prims.PrimIDs.LINEAR)


def _keeps_logits(before: TensorProxy, bsym: BoundSymbol) -> bool:
    """Whether an operation keeps every row of logits, their order and the vocabulary as the last dimension.

    In row-major order that holds wherever a reshape keeps the last dimension. A cast may only widen 16 bits to float32:
    to narrow would round the logits once more, and float64 is more than the loss of float32 operands is computed in.
    """
    after = bsym.output
    if not isinstance(after, TensorProxy) or after.numel != before.numel or after.device != before.device:
        return False
    if bsym.sym.name in _CAST_SYMBOLS:
        return after.shape == before.shape and _widens(before.dtype, after.dtype)
    return (
        bsym.sym.name in _SHAPE_SYMBOLS
        and after.dtype == before.dtype
        and before.ndim > 0
        and after.ndim > 0
        and after.shape[-1] == before.shape[-1]
    )


def _widens(before: dtypes.dtype, after: dtypes.dtype) -> bool:
    before, after = dtypes.to_strong_dtype(before), dtypes.to_strong_dtype(after)
    return before == after or (before.bytes < 4 and after is dtypes.float32)


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


def _linear_arguments(
    input: TensorProxy, weight: TensorProxy, bias: TensorProxy | None = None
) -> tuple[TensorProxy, TensorProxy, TensorProxy | None]:
    return input, weight, bias


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


def carries_grad(tensor: TensorProxy) -> bool:
    """Whether a gradient can flow through a tensor: not if it was computed under `torch.no_grad`."""
    return dtypes.is_inexact_dtype(tensor.dtype) and ProxyTag.DETACHED_AUTOGRAD_GRAPH not in tensor.tags


def is_region(bsym: BoundSymbol) -> bool:
    """Whether a bound symbol is a `linear_cross_entropy`, called by the user or put there by the transform."""
    return bsym.sym.id == symbols.linear_cross_entropy.id
