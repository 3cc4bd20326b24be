"""The upstream gradient that a loss will have, as far as a trace says it: the factors that follow the loss."""

from typing import Any

import thunder.torch as ltorch
from thunder.core import prims
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol

from thunder_flce.graph.matching.logits_path import COPIES, RESHAPES
from thunder_flce.graph.matching.trace_index import TraceIndex, carries_grad

_DIVISIONS = {ltorch.true_divide.id, ltorch.div.id}
# What passes an upstream gradient on as it is.
_UNCHANGED = {ltorch.add.id, ltorch.sub.id, "Tensor.double", *COPIES, *RESHAPES}


def factors_after(loss: BoundSymbol, index: TraceIndex) -> list[tuple[TensorProxy | float, bool]]:
    """What a scalar loss is multiplied with, as in `loss * 0.5 / steps + other_loss`, up to where its way divides.

    Returns:
        Numbers, and tensors of one element that exist before the loss; and whether the loss is divided by them.
    """
    factors: list[tuple[TensorProxy | float, bool]] = []
    tensor = loss.flat_proxy_outs[0]
    while len(users := [user for user in index.users(tensor) if _passes_gradient_on(user)]) == 1:
        (user,) = users
        if user.kwargs.get("alpha", 1) != 1 or user.kwargs.get("rounding_mode") is not None:
            break
        others = [arg for arg in user.args if not (isinstance(arg, Proxy) and arg.name == tensor.name)]
        is_second = others and others[0] is user.args[0]
        is_divided = user.sym.id in _DIVISIONS and not is_second
        if user.sym.id == ltorch.mul.id or is_divided:
            if len(others) != 1 or not _is_known_before(others[0], loss, index):
                break
            factors.append((others[0], is_divided))
        elif user.sym.id == ltorch.neg.id or (user.sym.id == ltorch.sub.id and is_second):
            factors.append((-1.0, False))
        elif user.sym.id not in _UNCHANGED:
            break
        tensor = user.output
    return factors


def _passes_gradient_on(user: BoundSymbol) -> bool:
    """Not what is returned, as to be logged, and what is detached."""
    is_end = user.sym.id == prims.PrimIDs.RETURN or user.sym.name in ("detach", "stop_gradient")
    return not is_end and any(isinstance(out, TensorProxy) and carries_grad(out) for out in user.flat_proxy_outs)


def _is_known_before(factor: Any, loss: BoundSymbol, index: TraceIndex) -> bool:
    """Whether it is a number, or a tensor of one element, that the region can take."""
    if isinstance(factor, TensorProxy):
        return factor.numel == 1 and index.exists_before(factor, loss)
    return isinstance(factor, int | float) and not isinstance(factor, Proxy) and factor != 0
