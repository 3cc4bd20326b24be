"""A trace as the matcher needs it: the producer and the users of each tensor, and through which gradients flow."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from thunder.core import dtypes, prims
from thunder.core.proxies import NumberProxy, Proxy, ProxyTag, TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from thunder_flce.loss_nodes import reached


class TraceIndex:
    """The bound symbols of a trace, in order, with the producer and the users of each tensor."""

    def __init__(self, trace: TraceCtx):
        self.trace = trace
        self.bsyms = list(trace.bound_symbols)
        self.producers: dict[str, BoundSymbol] = {}
        self.consumers: dict[str, list[BoundSymbol]] = {}
        self.need_grad = tensors_that_need_grad(trace)
        self._positions = {id(bsym): position for position, bsym in enumerate(self.bsyms)}
        for bsym in self.bsyms:
            arguments = {arg.name for arg in bsym.flat_proxy_args}
            outputs = {out.name for out in bsym.flat_proxy_outs}
            if outputs and outputs <= arguments:
                continue  # Returns its argument, such as a reshape to the same shape.
            for name in outputs:
                self.producers.setdefault(name, bsym)
            for name in arguments:
                self.consumers.setdefault(name, []).append(bsym)

    def users(self, tensor: TensorProxy) -> list[BoundSymbol]:
        """The bound symbols that use a tensor, the return included."""
        return self.consumers.get(tensor.name, [])

    def position(self, bsym: BoundSymbol) -> int:
        """Where a bound symbol is in the trace."""
        return self._positions[id(bsym)]

    def exists_before(self, tensor: TensorProxy, bsym: BoundSymbol) -> bool:
        """Whether a tensor is an argument of the trace, or computed before a bound symbol."""
        producer = self.producers.get(tensor.name)
        return producer is None or self.position(producer) < self.position(bsym)

    def derives_from(self, tensor: TensorProxy, source: TensorProxy) -> bool:
        """Whether a tensor is another one, or computed from it."""
        return source.name in self.computed_from([tensor.name])

    def may_share_memory(self, a: TensorProxy, b: TensorProxy) -> bool:
        """Whether one tensor may be a view of the other, or both of a third: views have the same dtype."""

        def viewed(name: str) -> list[str]:
            return [operand.name for operand in _tensors(self._operands(name)) if operand.dtype == a.dtype]

        return a.dtype == b.dtype and not reached([a.name], viewed).keys().isdisjoint(reached([b.name], viewed))

    def computed_from(
        self, names: Iterable[str], *, without: Collection[str] = (), up_to: Collection[str] = ()
    ) -> dict[str, None]:
        """The names of some tensors and of all that they are computed from.

        Args:
            names: of the tensors.
            without: names that are left out, with what only they are computed from.
            up_to: names beyond which nothing is of interest.
        """

        def above(name: str) -> list[str]:
            operands = () if name in up_to else self._operands(name)
            return [operand.name for operand in operands if operand.name not in without]

        return reached((name for name in names if name not in without), above)

    def _operands(self, name: str) -> Sequence[Proxy]:
        return self.producers[name].flat_proxy_args if name in self.producers else ()

    def writers_between(self, first: Sequence[BoundSymbol], last: BoundSymbol) -> list[BoundSymbol]:
        """Of the bound symbols from the earliest of `first` up to `last`, those that change a tensor in place."""
        between = self.bsyms[min(map(self.position, first)) : self.position(last)]
        return [bsym for bsym in between if tensors_written(bsym)]

    def same_values(self, a: Any, b: Any) -> bool:
        """Whether two arguments are the same, or computed by the same operations; ignores changes in place."""
        if not isinstance(a, TensorProxy) or not isinstance(b, TensorProxy):
            if isinstance(a, list | tuple) and isinstance(b, list | tuple):
                return len(a) == len(b) and all(map(self.same_values, a, b))
            return type(a) is type(b) and a == b
        if a.name == b.name:
            return True
        first, second = self.producers.get(a.name), self.producers.get(b.name)
        return (
            first is not None
            and second is not None
            and not _is_random(first)
            and first.sym.id == second.sym.id
            and a.shape == b.shape
            and len(first.flat_proxy_outs) == len(second.flat_proxy_outs) == 1
            and self.same_values(first.args, second.args)
            and first.kwargs.keys() == second.kwargs.keys()
            and all(self.same_values(value, second.kwargs[name]) for name, value in first.kwargs.items())
        )


def tensors_that_need_grad(trace: TraceCtx) -> set[str]:
    """The names of all tensors of a trace through which a gradient flows; thunder marks only its inputs.

    There may be too many, since an operation whose derivative is zero counts as passing the gradient on.
    """
    needed = {arg.name for arg in _tensors(trace.args) if arg.requires_grad}
    for bsym in trace.bound_symbols:
        if not stops_gradients(bsym) and any(arg.name in needed for arg in bsym.flat_proxy_args):
            needed |= {out.name for out in _tensors(bsym.flat_proxy_outs) if carries_grad(out)}
    return needed


def _tensors(proxies: Sequence[Any]) -> list[TensorProxy]:
    return [proxy for proxy in proxies if isinstance(proxy, TensorProxy)]


def carries_grad(tensor: TensorProxy) -> bool:
    """Whether a gradient can flow through a tensor: not if it was computed under `torch.no_grad`."""
    return dtypes.is_inexact_dtype(tensor.dtype) and ProxyTag.DETACHED_AUTOGRAD_GRAPH not in tensor.tags


def loss_dtype(tensor: TensorProxy) -> dtypes.dtype:
    """float32, or float64 for float64: the dtype of the loss and of everything that is one number a row."""
    return dtypes.float64 if dtypes.to_strong_dtype(tensor.dtype) is dtypes.float64 else dtypes.float32


def stops_gradients(bsym: BoundSymbol) -> bool:
    """Whether an operation passes no gradient on to its operand."""
    return bsym.sym.name in ("detach", "stop_gradient")


def argument(bsym: BoundSymbol, name: str, *, at: int, default: Any = None) -> Any:
    """An argument of an operation, whether the program gave it by position, as number `at`, or by name."""
    return bsym.args[at] if at < len(bsym.args) else bsym.kwargs.get(name, default)


def is_static(*values: Any) -> bool:
    """Whether all shapes and numbers are known when a trace is compiled; not so with thunder's symbolic values."""
    # To read `shape` would add a symbol to the trace.
    sizes = [size for value in values if isinstance(value, TensorProxy) for size in value._shape]
    return not any(isinstance(value, NumberProxy) for value in (*values, *sizes))


def _is_random(bsym: BoundSymbol) -> bool:
    return prims.OpTags.RANDOM_OP in (bsym.sym.tags or ()) or any(map(_is_random, bsym.subsymbols))


def tensors_written(bsym: BoundSymbol) -> list[TensorProxy]:
    """The tensors that an operation, or one that it consists of, changes in place."""
    written = [tensor for inner in bsym.subsymbols for tensor in tensors_written(inner)]
    if bsym.sym.id == prims.PrimIDs.COPY_:
        written.append(bsym.args[1])
    elif bsym.sym.name.endswith("_") or "setitem" in bsym.sym.name:
        written.append(bsym.args[0])
    return _tensors(written)
