"""Writes a transformed trace back into the graph that it was traced from.

Only what the transform has changed is written: each region as a call of the operator, with the operations that it has
put around it, before what it replaces. All other nodes stay as they are, so nothing but the region depends on
how thunder sees the program.
"""

import operator
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import thunder.torch as ltorch
import torch
from thunder.core import devices, dtypes, prims
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx
from torch.fx import Node
from torch.utils._pytree import tree_flatten, tree_map

from thunder_flce.calls import unplanned
from thunder_flce.graph import symbols
from thunder_flce.graph.dynamo.tracing import RegionTrace
from thunder_flce.graph.trace_arguments import call_of, region_arguments, specs
from thunder_flce.loss_nodes import value_of
from thunder_flce.operation.call import Call, Spec, argument
from thunder_flce.options import Options

# What the transform puts around a region.
_NAMES = (
    "abs add detach exp full ge le logical_and logical_or lt mul ne neg permute reshape sum transpose true_divide "
    "where zeros"
)
_OPERATIONS: dict[Any, Callable[..., Any]] = {
    **{getattr(ltorch, name).id: getattr(torch, name) for name in _NAMES.split()},
    ltorch.expand.id: torch.Tensor.expand,
    ltorch.getitem.id: operator.getitem,
    ltorch.to.id: torch.Tensor.to,
}
_TAKES_SIZES = (ltorch.expand.id, ltorch.full.id, ltorch.reshape.id)


def not_writable(region: RegionTrace, trace: TraceCtx) -> str:
    """The name of an operation in the transformed trace that cannot be written back; "" where all can be."""
    before = {out.name for bsym in region.trace.bound_symbols for out in _outs(bsym)}
    added = [bsym for bsym in trace.bound_symbols if any(out.name not in before for out in _outs(bsym))]
    names = (str(bsym.sym.id) for bsym in added if not symbols.is_region(bsym) and bsym.sym.id not in _OPERATIONS)
    return next(names, "")


def write_back(region: RegionTrace, trace: TraceCtx, options: Options) -> None:
    """Changes the region's graph to what the transformed trace says.

    Args:
        region: of the graph, which is changed.
        trace: what the transform made of the region's trace.
        options: of the operator.
    """
    _Writer(region, options).write(trace)


class _Writer:
    def __init__(self, region: RegionTrace, options: Options):
        self._region, self._graph, self._options = region, region.graph, options
        self._nodes: dict[str, Node] = {}
        for node, proxy in region.proxies():
            self._nodes.setdefault(proxy.name, node)
        self._before = {out.name: bsym for of_node in region.bsyms.values() for bsym in of_node for out in _outs(bsym)}
        self._owners = {
            out.name: node for node, of_node in region.bsyms.items() for bsym in of_node for out in _outs(bsym)
        }
        self._positions = {node: position for position, node in enumerate(self._graph.nodes)}
        self._has_grad = list(accumulate(self._graph.nodes, _grad_mode_after, initial=True))[1:]
        self._last = list(self._graph.nodes)
        """The last node at each position: nodes that are added have the position of the one that they come after."""

    def write(self, trace: TraceCtx) -> None:
        kept: set[Node] = set()
        replaced: dict[str, str] = {}
        for bsym in trace.bound_symbols:
            own = [out.name for out in _outs(bsym)]
            is_return = bsym.sym.id == prims.PrimIDs.RETURN
            if own and (own[0] not in self._before or bsym.sym.id != self._before[own[0]].sym.id):
                self._add(bsym)
                # A loss that is spelled out keeps its name.
                replaced |= {name: name for name in own if name in self._before}
                continue
            kept |= {self._owners[name] for name in own}
            before = self._region.trace.bound_symbols[-1] if is_return else self._before[own[0]] if own else bsym
            for old, new in zip(before.flat_proxy_args, bsym.flat_proxy_args, strict=True):
                if old.name != new.name:
                    replaced[old.name] = new.name
            if own:
                self._move_after_operands(self._owners[own[0]], bsym)
        for node, proxy in list(self._region.proxies()):
            if proxy.name in replaced:
                node.replace_all_uses_with(self._nodes[replaced[proxy.name]])
        self._erase(kept)
        self._graph.lint()

    def _add(self, bsym: BoundSymbol) -> None:
        """Adds an operation of the transform after the latest of its operands, but not before the loss."""
        loss = bsym.source_positions.node
        operands = [self._nodes[proxy.name] for proxy in bsym.flat_proxy_args]
        position = max(self._positions[node] for node in (loss, *operands))
        last = self._last[position]
        end = last.next
        with self._graph.inserting_before(end):
            # A trace has no places without gradients: what is not to have one is detached.
            is_off = not self._has_grad[position]
            if is_off:
                self._graph.call_function(torch._C._set_grad_enabled, (True,))
            results = self._region_call(bsym) if symbols.is_region(bsym) else [self._operation(bsym)]
            if is_off:
                self._graph.call_function(torch._C._set_grad_enabled, (False,))
        while last.next is not end:
            last = last.next
            self._positions[last] = position
            last.meta.update({name: value for name, value in loss.meta.items() if name in _SOURCE_META})
        self._last[position] = last
        self._nodes |= {out.name: node for out, node in zip(_outs(bsym), results, strict=True)}

    def _move_after_operands(self, node: Node, bsym: BoundSymbol) -> None:
        """Moves what uses an argmax: the region computes that with the loss, which may come later."""
        position = max((self._positions[self._nodes[proxy.name]] for proxy in bsym.flat_proxy_args), default=0)
        if position > self._positions[node]:
            self._last[position].append(node)
            self._last[position], self._positions[node] = node, position

    def _operation(self, bsym: BoundSymbol) -> Node:
        is_size = bsym.sym.id in _TAKES_SIZES
        # A sum of the transform's is over all elements, which thunder says by defaults that PyTorch does not take.
        given = bsym.args[:1] if bsym.sym.id == ltorch.sum.id else bsym.args
        args = tuple(self._argument(arg, is_size=is_size) for arg in given if arg is not None)
        kwargs = {name: self._argument(value) for name, value in bsym.kwargs.items() if value is not None}
        return self._graph.call_function(_OPERATIONS[bsym.sym.id], args, kwargs)

    def _argument(self, argument: Any, *, is_size: bool = False) -> Any:
        def written(part: Any) -> Any:
            if isinstance(part, TensorProxy):
                return self._nodes[part.name]
            if isinstance(part, dtypes.dtype):
                return dtypes.to_torch_dtype(part)
            if isinstance(part, devices.Device):
                return devices.to_torch_device(part)
            return self._region.sizes.node(part) if is_size and type(part) is int else part

        return tree_map(written, argument)

    def _region_call(self, bsym: BoundSymbol) -> list[Node]:
        """The operator, and its results."""
        region, graph = region_arguments(*bsym.args, **bsym.kwargs), self._graph
        call = call_of(region)
        known = specs(call)
        settings = unplanned(known, self._options)
        tensors = [self._tensor(name, call, known.tensors[name]) for name in settings.names]
        operator_call = graph.call_function(
            torch.ops.thunder_flce.linear_cross_entropy.default, (tensors, str(settings))
        )
        results = [graph.call_function(operator.getitem, (operator_call, at)) for at in range(len(_outs(bsym)))]
        if region.get("dtype") is not None:
            dtype = dtypes.to_torch_dtype(region["dtype"])
            results[0] = graph.call_function(torch.Tensor.to, (results[0], dtype))
        return results

    def _tensor(self, name: str, call: Call, spec: Spec) -> Node:
        """A tensor or a number of a call as the operator takes it."""
        given = call.tensors[name]
        if not isinstance(given, TensorProxy):
            return self._graph.call_function(torch.full, ((), given), {"dtype": spec.dtype, "device": spec.device})
        node = self._nodes[given.name]
        if argument(name).differentiable and name not in call.needs_grad:
            # The operator raises where an operand requires a gradient that needs_grad does not name.
            return self._graph.call_function(torch.detach, (node,))
        return node

    def _erase(self, kept: set[Node]) -> None:
        """Erases the nodes of the region that are not in its trace any more; nodes that read their sizes go along.

        A node without a result, such as one that writes into a tensor, was there for its effect, and stays.
        """
        with_results = set(self._owners.values())
        for node in reversed(self._region.bsyms):
            if node in kept or node not in with_results:
                continue
            for user in list(node.users):
                if isinstance(value_of(user), torch.SymInt) and not user.users:
                    self._graph.erase_node(user)
            if not node.users:
                self._graph.erase_node(node)


_SOURCE_META = ("stack_trace", "nn_module_stack", "source_fn_stack")


def _outs(bsym: BoundSymbol) -> list[TensorProxy]:
    return [out for out in tree_flatten(bsym.output)[0] if isinstance(out, TensorProxy)]


def _grad_mode_after(is_on: bool, node: Node) -> bool:
    """Whether gradients are on after a node, where the graph begins with them on."""
    return bool(node.args[0]) if node.target is torch._C._set_grad_enabled else is_on
