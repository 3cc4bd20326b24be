"""The loss region of a graph of Dynamo's as a trace of thunder's.

The region is all nodes from the linears to the losses, log-probabilities and entropies, what the targets are computed
from, and all that uses the logits or the losses. thunder traces what it knows of these. Any other operation stands in
the trace under its name, with its operands and results, as does one outside the region that changes a tensor in place:
so the matcher sees all users of the logits.
"""

import inspect
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from thunder.core import devices, dtypes, prims
from thunder.core.codeutils import SigInfo
from thunder.core.langctxs import Languages, langctx
from thunder.core.proxies import ProxyTag, TensorProxy
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import TraceCtx, tracectx
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_flatten, tree_map

from thunder_flce.graph.dynamo.sizes import Sizes
from thunder_flce.graph.matching import losses as losses_in_trace
from thunder_flce.graph.spelling import (
    guard_equal_sizes,
    put_out_of_place,
    spell_out_casts,
    spell_out_mean,
    spell_out_ranges,
)
from thunder_flce.graph.thunder_private import disable_autocast, torch_to_thunder_functions, with_defaults
from thunder_flce.loss_nodes import (
    GATHERS,
    LINEARS,
    above_ends,
    is_call,
    is_linear,
    is_loss,
    name_of,
    reached,
    value_of,
)

# A property is one of aten's operators from torch 2.15 on, and a getattr before.
_PERMUTATIONS = ("t", "transpose", "permute", "movedim", "swapaxes", "swapdims", "getattr", "mT")
# Operations that may take a symbolic size. The shape of the result says all that the size does.
_SIZED = ("view", "reshape", "arange")
# Operations that count with a symbolic size, for which a large prime stands in the trace: thunder would split into so
# many parts, and the transform would divide the weights of a mean by it.
_COUNTING = ("split", "chunk", "tensor_split", "unbind", "mean")
_OF_NUMPY = {"axis": "dim", "keepdims": "keepdim"}
_CAST_BY_AUTOCAST = (*LINEARS, "cross_entropy", "nll_loss", "log_softmax", "softmax", "logsumexp")


class WrappedTensorProxy(TensorProxy):
    """A DTensor, or another tensor that is not a plain one: the matcher declines it."""


@dataclass(frozen=True)
class Position:
    """Where a bound symbol comes from, in place of the positions in a line that thunder keeps."""

    lineno: int | None
    node: Node


@dataclass
class RegionTrace:
    """The trace of a graph's region, with the proxies and bound symbols of each node."""

    graph: Graph
    sizes: Sizes
    trace: TraceCtx = field(default_factory=TraceCtx)
    values: dict[Node, Any] = field(default_factory=dict)
    """The proxy of each node that has one, or a tuple of them."""
    bsyms: dict[Node, list[BoundSymbol]] = field(default_factory=dict)
    """The bound symbols of each node of the region."""
    out_of_place: dict[Node, tuple[Any, ...]] = field(default_factory=dict)
    """Nodes that changed the logits in place, with what they were."""

    def proxies(self) -> Iterator[tuple[Node, TensorProxy]]:
        """Each node that is one tensor, with its proxy."""
        return ((node, value) for node, value in self.values.items() if isinstance(value, TensorProxy))

    def losses_not_traced(self) -> list[Node]:
        """The losses that thunder has not traced, since an argument is symbolic, such as a label smoothing."""
        losses = [node for node in self.graph.nodes if is_loss(node)]
        return [node for node in losses if not any(map(losses_in_trace.is_loss, self.bsyms.get(node, ())))]

    def add(self, node: Node, *, is_wanted: bool) -> None:
        """Adds the next operation of the graph, unless it has nothing to do with the region."""
        written = [operand for operand in _written_by(node) if _is_known(value_of(operand))]
        uses_region = any(operand in self.bsyms for operand in node.all_input_nodes)
        if not (is_wanted or uses_region or written):
            return
        value = value_of(node)
        if not any(map(_is_known, tree_flatten(value)[0])) and not written:
            # A size, or a switch such as that of autocast: no tensor depends on it but those that Dynamo knows of.
            return
        file, _, line = (source_of(node) or "").rpartition(":")
        self.trace.set_current_source_location(file or None, Position(int(line) if line else None, node))
        scope: list[BoundSymbol] = []
        depth = len(self.trace.scopes)
        self.trace.push_scope(scope)
        try:
            result = self._traced(node) if is_wanted and not written else None
        except Exception:
            # Whatever thunder cannot do is an operation like one that it does not know.
            result = None
        finally:
            del self.trace.scopes[depth:]
        if result is None:
            scope = self._unknown(node, written)
        else:
            self.values[node] = result
        self.trace.peek_scope().extend(scope)
        self.bsyms[node] = scope
        self._mark_detached(node)

    def finish(self) -> None:
        """Adds the results of the graph that are of the region, and the trace's arguments."""
        results: list[Any] = []
        for node in self.graph.find_nodes(op="output"):
            results = [self.values[each] for each in node.all_input_nodes if each in self.bsyms]
        prims.python_return(tuple(tree_flatten(results)[0]))
        inputs = [proxy for node, proxy in self.proxies() if node not in self.bsyms]
        self.trace.args = tuple(inputs)
        signature = SigInfo("region")
        signature.args = [(proxy.name, None) for proxy in inputs]
        self.trace._siginfo = signature

    def _traced(self, node: Node) -> Any:
        """What thunder makes of a node; None where that may differ from what PyTorch does."""
        operands = [value_of(operand) for operand in node.all_input_nodes]
        if any(map(_is_symbolic, operands)) and name_of(node) not in _SIZED:
            return None
        if name_of(node) in _COUNTING and any(map(_is_symbolic, operands[0].shape)):
            return None
        args, kwargs = map_arg((node.args, dict(node.kwargs)), self._operand)
        # PyTorch's functions take NumPy's names, too.
        kwargs = {_OF_NUMPY.get(name, name): value for name, value in kwargs.items()}
        if node.op == "call_method":
            function: Callable = partial(_call_method, str(node.target))
        elif node.target in torch_to_thunder_functions:
            function = torch_to_thunder_functions[node.target]
        elif node.target is torch.ops.aten.mT:
            function = operator.attrgetter("mT")
        elif getattr(node.target, "__module__", "") in ("_operator", "builtins"):
            function = node.target  # type: ignore[assignment]
        else:
            return None
        result = function(*args, **kwargs)
        results, expected = tree_flatten(result)[0], tree_flatten(value_of(node))[0]
        is_same = len(results) == len(expected) and all(map(self._is_same, results, expected))
        return result if is_same else None

    def _operand(self, node: Node) -> Any:
        value = value_of(node)
        if isinstance(value, torch.SymInt):
            return self.sizes.number(value)
        if node not in self.values:
            self.values[node] = tree_map(partial(self._proxy, is_input=True, name=node.name), value)
        return self.values[node]

    def _is_same(self, proxy: Any, value: Any) -> bool:
        if not isinstance(proxy, TensorProxy) or not isinstance(value, Tensor):
            return False
        shape = tuple(map(self.sizes.number, value.shape))
        dtype, device = dtypes.to_torch_dtype(proxy.dtype), str(devices.to_device(value.device))
        return tuple(proxy.shape) == shape and dtype == value.dtype and str(proxy.device) == device

    def _proxy(self, value: Any, *, is_input: bool = False, name: str | None = None) -> Any:
        if not _is_known(value):
            return value
        make = WrappedTensorProxy if is_traceable_wrapper_subclass(value) else TensorProxy
        return make(
            None if name is None or self.trace.has_name(name) else name,
            shape=tuple(map(self.sizes.number, value.shape)),
            device=devices.to_device(value.device),
            dtype=dtypes.to_dtype(value.dtype),
            requires_grad=is_input and value.requires_grad,
        )

    def _unknown(self, node: Node, written: list[Node]) -> list[BoundSymbol]:
        """An operation as its name, its operands and its results; for each tensor that it writes to, one more."""
        value, name = value_of(node), name_of(node)
        # An operation that returns the tensor that it has written to gets a new proxy for it.
        result = tree_map(self._proxy, value)
        self.values[node] = result
        operands = [self._operand(each) for each in node.all_input_nodes]
        proxies = [each for each in tree_flatten(operands)[0] if isinstance(each, TensorProxy)]
        if not written:
            return [self._bound(name, proxies, result)]
        # The matcher takes the first operand of an operation with such a name for what it writes to.
        name = f"{name.rstrip('_')}_"
        first, *others = (self._operand(each) for each in written)
        proxies = [first, *(proxy for proxy in proxies if proxy is not first)]
        return [*(self._bound(name, [other], None) for other in others), self._bound(name, proxies, result)]

    def _bound(self, name: str, operands: list[TensorProxy], result: Any) -> BoundSymbol:
        tags = (prims.OpTags.DONT_DCE,) if name.endswith("_") else ()
        # With a call context, thunder prints the name without a module.
        return Symbol(name, is_prim=True, tags=tags).bind(*operands, output=result, _call_ctx={})

    def _mark_detached(self, node: Node) -> None:
        """Tags the results that require no gradient, which Dynamo has found out."""
        results, values = tree_flatten(self.values[node])[0], tree_flatten(value_of(node))[0]
        for proxy, value in zip(results, values, strict=True):
            if isinstance(proxy, TensorProxy) and not value.requires_grad:
                proxy.tags.add(ProxyTag.DETACHED_AUTOGRAD_GRAPH)


def trace_region(graph: Graph) -> RegionTrace:
    """Traces the region of the graph's losses, log-probabilities and entropies, of which there has to be one.

    Spells out in the graph what thunder does not know, and has Dynamo guard sizes: see `graph.spelling`.
    """
    _spell_out_autocast(graph)
    spell_out_ranges(graph)
    region = RegionTrace(graph, Sizes(graph))
    wanted = _region_of(graph)
    region.out_of_place = put_out_of_place(graph, [node for node in graph.nodes if node in wanted])
    for node in filter(is_call, wanted):
        if name_of(node) in GATHERS:
            guard_equal_sizes(node)
        elif name_of(node) == "mean":
            spell_out_mean(node)
    wanted = _region_of(graph)
    for node in _below([node for node in graph.nodes if node in wanted and is_linear(node)]):
        # Sizes of labels that are the same by a guard take the numbers of the logits', not the other way round.
        if isinstance(value_of(node), Tensor):
            for size in value_of(node).shape:
                region.sizes.number(size)
    with tracectx(region.trace), langctx(Languages.TORCH), disable_autocast(), with_defaults():
        for node in graph.nodes:
            if node.op in ("call_function", "call_method", "call_module"):
                region.add(node, is_wanted=node in wanted)
        region.finish()
    return region


def source_of(node: Node) -> str | None:
    """The user's line that a node comes from, as "file:line"."""
    frames = re.findall(r'File "(.+)", line (\d+)', node.meta.get("stack_trace") or "")
    return ":".join(frames[-1]) if frames else None


def _spell_out_autocast(graph: Graph) -> None:
    """Puts casts before what autocast casts the operands of: nothing else has results of another dtype than these."""
    for node in list(graph.nodes):
        if is_call(node) and name_of(node) in _CAST_BY_AUTOCAST and isinstance(value_of(node), Tensor):
            spell_out_casts(node)


def _region_of(graph: Graph) -> dict[Node, None]:
    """From each end up to the linears, with the permutations of their operands, and from the linears down."""
    region = above_ends(graph)
    linears = list(filter(is_linear, region))
    operands = (operand for linear in linears for operand in linear.all_input_nodes)
    region |= dict.fromkeys(operand for operand in operands if name_of(operand) in _PERMUTATIONS)
    region |= _below(linears)

    def may_be_labels(node: Node) -> bool:
        value = value_of(node)
        return isinstance(value, Tensor) and not value.is_floating_point() and not is_linear(node)

    # Whatever labels are compared with, too: it may be the labels, computed once more.
    return reached(region, lambda node: filter(may_be_labels, node.all_input_nodes))


def _below(linears: list[Node]) -> dict[Node, None]:
    """The linears and all that uses their results, the nearest first."""
    return reached(linears, lambda node: node.users)


def _call_method(name: str, self: Any, *args: Any, **kwargs: Any) -> Any:
    return getattr(self, name)(*args, **kwargs)


def _is_symbolic(value: Any) -> bool:
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)


def _is_known(value: Any) -> bool:
    """Whether a value is a tensor of a dtype and layout that thunder has."""
    return isinstance(value, Tensor) and value.dtype in _DTYPES and value.layout is torch.strided


_DTYPES = {dtypes.to_torch_dtype(dtype) for dtype in dtypes.strong_dtypes}


# Such as operator.iadd, whose name without the i is that of an operator, too.
_WRITING_OPERATORS = {operator.setitem} | {
    each for name, each in vars(operator).items() if name[0] == "i" and f"__{name[1:]}__" in vars(operator)
}


def _written_by(node: Node) -> list[Node]:
    """The tensors that an operation changes in place."""
    target, out = node.target, node.kwargs.get("out")
    found = [each for each in tree_flatten(out)[0] if isinstance(each, Node)]
    if isinstance(target, torch._ops.OpOverload):
        arguments = _arguments(node, [argument.name for argument in target._schema.arguments])
        is_written = {a.name: a.alias_info is not None and a.alias_info.is_write for a in target._schema.arguments}
        values = [value for name, value in arguments.items() if is_written.get(name)]
        found += [each for each in tree_flatten(values)[0] if isinstance(each, Node)]
    elif node.args and isinstance(node.args[0], Node):
        name = name_of(node)
        # Python's operators with such a name, such as and_, only avoid a keyword.
        is_by_name = name.endswith("_") and not name.endswith("__") and target not in vars(operator).values()
        if is_by_name or target in _WRITING_OPERATORS or name == "__setitem__" or _is_inplace(node):
            found.append(node.args[0])
    return found


def _arguments(node: Node, names: list[str]) -> Mapping[str, Any]:
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def _is_inplace(node: Node) -> bool:
    """Whether a function of torch.nn.functional has inplace=True."""
    if getattr(node.target, "__module__", "") != F.__name__:
        return False
    return bool(_arguments(node, list(inspect.signature(node.target).parameters)).get("inplace"))  # type: ignore[arg-type]
