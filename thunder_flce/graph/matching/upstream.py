"""The upstream gradient that a loss will have, as far as a trace says it: the factors that follow the loss."""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import thunder.torch as ltorch
from thunder.core import prims
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol

from thunder_flce.graph.matching.logits_path import COPIES, RESHAPES
from thunder_flce.graph.matching.trace_index import TraceIndex, argument, carries_grad, loss_dtype, stops_gradients

_DIVISIONS = {ltorch.true_divide.id, ltorch.div.id}
# Operations that pass an upstream gradient on as it is.
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
        others = _others(user, tensor)
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


@dataclass(frozen=True, eq=False)
class WeightedSum:
    """A sum of the losses of all rows, each times a factor that is known before: a number, or one that exists."""

    place: BoundSymbol
    """What computes the sum."""
    replaced: tuple[BoundSymbol, ...]
    """What is not needed any more: the operations from the losses up to `place`."""
    steps: "tuple[Step, ...]"
    factor: int = 1
    """-1 for a sum of log-probabilities, which are the negative of the losses."""

    def weights(self) -> TensorProxy | float:
        """What multiplies each row's loss: its gradient, from that of the sum. Adds operations to the trace."""
        grad: TensorProxy | float = 1.0
        for step in reversed(self.steps):
            grad = step.pull_back(grad)
        return grad if self.factor == 1 else -grad


@dataclass(frozen=True, eq=False)
class Step:
    """One linear operation."""

    shape: tuple[int, ...]
    """The shape of the operand."""
    derivative: Callable[[TensorProxy | float], TensorProxy | float]
    """From the gradient of the result to that of the operand, which may still have to be broadcast to `shape`."""

    def pull_back(self, grad: TensorProxy | float) -> TensorProxy | float:
        """The gradient of the operand: a number where all elements have the same. Adds operations to the trace."""
        grad = self.derivative(grad)
        if isinstance(grad, TensorProxy) and tuple(grad.shape) != self.shape:
            grad = ltorch.expand(grad, self.shape)
        return grad


def weighted_sum(losses: BoundSymbol, index: TraceIndex) -> WeightedSum | None:
    """What becomes of the losses of rows, or of log-probabilities, in programs such as `(losses * w).sum() / w.sum()`.

    Args:
        losses: what computes them.
        index: of the trace.

    Returns:
        None where that is not a sum, or where a factor needs a gradient. A factor may depend on the logits; whether it
        depends on what the region itself gives, `match` finds out.
    """
    bsyms, steps, tensor = [losses], [], losses.output
    while tensor.ndim > 0:
        users = index.users(tensor)
        step = linear_step(users[0], tensor, index) if len(users) == 1 else None
        if step is None:
            return None
        bsyms.append(users[0])
        steps.append(step)
        tensor = users[0].output
    return WeightedSum(bsyms[-1], tuple(bsyms[:-1]), tuple(steps)) if steps else None


def linear_step(
    user: BoundSymbol, tensor: TensorProxy, index: TraceIndex, addends: Collection[str] = ()
) -> Step | None:
    """What an operation is to one of its operands; None where it is not linear in that.

    Args:
        user: the operation.
        tensor: the operand.
        index: of the trace.
        addends: the names of what may be added to the operand.
    """
    shape, kind = tuple(tensor.shape), user.sym.id
    if not isinstance(user.output, TensorProxy) or not carries_grad(user.output):
        return None
    if kind == ltorch.neg.id:
        return Step(shape, lambda grad: -grad)
    if kind in COPIES | RESHAPES and user.output.numel == tensor.numel:
        return Step(shape, lambda grad: ltorch.reshape(grad, shape) if isinstance(grad, TensorProxy) else grad)
    if kind == ltorch.mean.id and not tensor.numel:
        return None
    if kind in (ltorch.sum.id, ltorch.mean.id):
        divisor = math.prod(shape) // user.output.numel if kind == ltorch.mean.id else 1
        dimensions = _reduced(user, tensor)
        kept = tuple(1 if at in dimensions else size for at, size in enumerate(shape))

        def spread(grad: TensorProxy | float) -> TensorProxy | float:
            grad = grad / divisor if divisor != 1 else grad
            return ltorch.reshape(grad, kept) if isinstance(grad, TensorProxy) else grad

        return Step(shape, spread)
    others = _others(user, tensor)
    if kind in (ltorch.add.id, ltorch.sub.id) and len(others) == 1 and isinstance(others[0], TensorProxy):
        is_subtracted = kind == ltorch.sub.id and user.args[0] is others[0]
        is_like = tuple(others[0].shape) == shape and user.kwargs.get("alpha", 1) == 1
        if others[0].name not in addends or not is_like:
            return None
        return Step(shape, lambda grad: -grad if is_subtracted else grad)
    is_divided = kind in _DIVISIONS and isinstance(user.args[0], Proxy) and user.args[0].name == tensor.name
    is_product = (kind == ltorch.mul.id or is_divided) and user.kwargs.get("rounding_mode") is None
    if not is_product or len(others) != 1 or tuple(user.output.shape) != shape:
        return None
    factor = others[0]
    if isinstance(factor, TensorProxy):
        if factor.name in index.need_grad:
            return None
    elif not isinstance(factor, int | float) or isinstance(factor, Proxy) or (is_divided and factor == 0):
        return None

    def multiplied(grad: TensorProxy | float) -> TensorProxy | float:
        given = ltorch.to(ltorch.detach(factor), loss_dtype(tensor)) if isinstance(factor, TensorProxy) else factor
        if is_divided:
            return ltorch.true_divide(grad, given) if isinstance(given, TensorProxy) else grad / given
        return given if isinstance(grad, float) and grad == 1 else grad * given

    return Step(shape, multiplied)


def _others(bsym: BoundSymbol, tensor: TensorProxy) -> list[Any]:
    """The arguments of an operation but for one tensor."""
    return [arg for arg in bsym.args if not (isinstance(arg, Proxy) and arg.name == tensor.name)]


def _reduced(reduction: BoundSymbol, tensor: TensorProxy) -> set[int]:
    """The dimensions that a sum or a mean is over."""
    given = argument(reduction, "dim", at=1)
    if given is None or given == ():
        return set(range(tensor.ndim))
    return {dimension % tensor.ndim for dimension in (given if isinstance(given, list | tuple) else (given,))}


def _passes_gradient_on(user: BoundSymbol) -> bool:
    """Whether a gradient comes back through an operation. Not through the return, as of a loss that is logged."""
    is_end = user.sym.id == prims.PrimIDs.RETURN or stops_gradients(user)
    return not is_end and any(isinstance(out, TensorProxy) and carries_grad(out) for out in user.flat_proxy_outs)


def _is_known_before(factor: Any, loss: BoundSymbol, index: TraceIndex) -> bool:
    """Whether a factor is a number other than 0, or a tensor of one element that is there before the loss."""
    if isinstance(factor, TensorProxy):
        return factor.numel == 1 and index.exists_before(factor, loss)
    return isinstance(factor, int | float) and not isinstance(factor, Proxy) and factor != 0
