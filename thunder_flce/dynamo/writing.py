"""Writes regions into Dynamo's graph, as calls of the operator.

Other nodes stay where they are, unless they use a result of a region that comes later: these move behind the region.
"""

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import MethodDescriptorType
from typing import Any

import sympy
import torch
import torch.nn.functional as F
from torch._decomp import get_decompositions
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import tracing
from torch._subclasses.fake_tensor import FakeTensor
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.fx import Graph, GraphModule, Node, Proxy
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from thunder_flce.dynamo.lengths import may_save_logits
from thunder_flce.dynamo.reading import name_of, tensor_of, value_of
from thunder_flce.matching.decisions import Decision, PlannedRegion
from thunder_flce.matching.interpreter import Interpreter
from thunder_flce.matching.order import ordered
from thunder_flce.matching.program import Op, Tensor, depends_on_values, hint, same_shape
from thunder_flce.matching.regions import Region
from thunder_flce.matching.sums import PRODUCTS
from thunder_flce.matching.writing import write
from thunder_flce.operation.call import Call, Spec
from thunder_flce.operators import Settings, plan_for
from thunder_flce.options import SAVE_LOGITS, Options

_SOURCE_META = ("stack_trace", "nn_module_stack", "source_fn_stack")
_SYMBOLIC = (torch.SymInt, torch.SymFloat)
# Number of tokens for which a plan is reported if the call's own number depends on values.
_EXAMPLE_TOKENS = 2048


def write_regions(
    gm: GraphModule, regions: Sequence[Region], interpreter: Interpreter, options: Options
) -> list[Decision]:
    """Writes regions into a graph; returns the decision about each."""
    order = ordered(regions, interpreter)
    graph, has_grad = _Graph(gm.graph, options), any(region.needs_grad for region in regions)
    decisions = []
    for item in order:
        if isinstance(item, Op):
            graph.keep(item)
        else:
            with graph.behind(item.place, has_grad=has_grad):
                results, decision = write(item, graph, interpreter, options)
            graph.replace(results)
            decisions.append(decision)
    kept = {_node_of(item) for item in order if isinstance(item, Op)}
    graph.erase([node for node in dict.fromkeys(map(_node_of, interpreter.program.all_ops)) if node not in kept])
    gm.graph.lint()
    return decisions


class _Graph:
    """The `Writer` of Dynamo's graph."""

    def __init__(self, graph: Graph, options: Options):
        self._graph, self._options = graph, options
        nodes = list(graph.nodes)
        self._positions = {node: position for position, node in enumerate(nodes)}
        self._modes_after = _modes_after_each(nodes)
        self._last = nodes[0]
        """The last node that is at its final place"""
        self._place = nodes[0]
        """The same or, if that node was added or moved, the node behind which it was put"""
        self._replaced: dict[Tensor, Tensor] = {}
        values = [value_of(node) for node in nodes]
        # The fake mode of the graph's own values: that of the tracing context is another one, for AOTAutograd.
        self._fake_mode = next(value.fake_mode for value in tree_flatten(values)[0] if isinstance(value, FakeTensor))

    # Order.

    def keep(self, op: Op) -> None:
        """Leaves the node of an operation where it is, or moves it behind the nodes that it reads."""
        node = _node_of(op)
        if self._positions[node] < self._positions[self._place]:
            self._read_sizes_elsewhere(node)
            with self._modes(*self._modes_after[node]):
                self._put(node, *_readers_of_parts(node))
        else:
            self._last = self._place = node
            # Nodes that are put behind it may read one of its several results.
            if not isinstance(value_of(node), torch.Tensor):
                self._put(*_readers_of_parts(node))

    @contextmanager
    def behind(self, op: Op, *, has_grad: bool) -> Iterator[None]:
        """Context in which nodes are added behind an operation, and behind all nodes at their final place.

        Gradients are on if any region has them, since regions share nodes; tensors without a gradient are detached.
        """
        if self._positions[op.handle] > self._positions[self._place]:
            self._last = self._place = op.handle
        node = self._last
        is_on, autocast = self._modes_after[self._place]
        # Without autocast: the nodes that are added cast explicitly.
        with self._modes(has_grad or is_on, dict.fromkeys(autocast, _NO_AUTOCAST)):
            self._end = self._last.next
            yield
            self._last = self._end.prev
        while node is not self._last:
            node = node.next
            node.meta.update({name: value for name, value in op.handle.meta.items() if name in _SOURCE_META})

    @contextmanager
    def _modes(self, has_grad: bool, autocast: "_Autocast") -> Iterator[None]:
        """Context in which nodes that are put behind the last one run in these modes."""
        has_grad_here, autocast_here = self._modes_after[self._place]
        add = self._graph.call_function
        if has_grad_here != has_grad:
            self._put(add(torch._C._set_grad_enabled, (has_grad,)))
        changed = [(device, *state) for device, state in autocast.items() if state != autocast_here[device]]
        entered = [add(_enter_autocast, each) for each in changed]
        self._put(*entered)
        yield
        self._put(*(add(_exit_autocast, (node,)) for node in reversed(entered)))
        if has_grad_here != has_grad:
            self._put(add(torch._C._set_grad_enabled, (has_grad_here,)))

    def _put(self, *nodes: Node) -> None:
        for node in nodes:
            self._last.append(node)
            self._last = node

    def replace(self, results: dict[Tensor, Tensor]) -> None:
        """Replaces the program's tensors by new ones in all users, except for sizes, which may be read before."""
        for tensor, new in results.items():
            self._replaced[tensor] = new
            kept = _readers_of_parts(tensor.handle)
            tensor.handle.replace_all_uses_with(self._node(new), lambda user, kept=kept: user not in kept)

    def _read_sizes_elsewhere(self, node: Node) -> None:
        """Replaces sizes that are read from a node by sizes of others, as it is erased or moves behind its readers."""
        others: dict[Node, Any] = {}
        for user in _readers_of_parts(node)[::-1]:
            size: Any = value_of(user)
            with self._graph.inserting_before(user):
                if isinstance(size, tuple):
                    others[user] = tuple(map(self._argument, size))
                elif isinstance(size, torch.SymInt) and user.users:
                    others[user] = self._size(size)  # Not if unused: no other node may have this size.
        for reader in {reader for user in others for reader in user.users}:
            arguments: Any = map_arg((reader.args, reader.kwargs), lambda each: others.get(each, each))
            reader.args, reader.kwargs = arguments

    def erase(self, nodes: Sequence[Node]) -> None:
        """Erases the nodes that have no users left."""
        for node in reversed(nodes):
            self._read_sizes_elsewhere(node)
            for user in _readers_of_parts(node)[::-1]:
                if not user.users:
                    self._graph.erase_node(user)
            if not node.users:
                self._graph.erase_node(node)
            elif _is_read_for_its_length(node):
                # The number of rows that a mask selects is also that of the mask's own elements.
                mask = tree_flatten(node.args[1])[0][0]
                node.args = mask, mask
                node.meta["example_value"] = value_of(node).new_empty(value_of(node).shape[:1], dtype=torch.bool)

    # Nodes.

    def call(self, function: Callable, *args: Any, **kwargs: Any) -> Tensor:
        """See `Writer`."""
        with self._graph.inserting_before(self._end):
            arguments = tree_map(self._argument, (args, kwargs))
            # PyTorch's disk cache takes a method of tensors only if it is called as one.
            is_method = isinstance(function, MethodDescriptorType)
            add: Callable = self._graph.call_method if is_method else self._graph.call_function
            node = add(function.__name__ if is_method else function, *arguments)
        values: Any = map_arg(arguments, _operand_of)
        # Without the Python dispatcher, torch 2.8 cannot view tensors in symbolic sizes.
        shapes = self._fake_mode.shape_env
        with (
            self._fake_mode, enable_python_dispatcher(), torch.enable_grad(), torch.autocast("cpu", enabled=False),
            # A slice of rows that a mask selects has a size of its own in each tracing.
            nullcontext() if shapes is None else shapes.ignore_fresh_unbacked_symbols(),
        ):  # fmt: skip
            value = function(*values[0], **values[1])
        return self._new_tensor(node, value)

    def _new_tensor(self, node: Node, value: torch.Tensor) -> Tensor:
        node.meta["example_value"] = value
        return tensor_of(value, node)

    def _argument(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._node(value)
        if isinstance(value, _SYMBOLIC):
            return self._size(value)
        if isinstance(value, slice):
            return slice(*map(self._argument, (value.start, value.stop, value.step)))
        return value

    def _node(self, tensor: Tensor) -> Node:
        return self._replaced.get(tensor, tensor).handle

    def _size(self, size: torch.SymInt | torch.SymFloat) -> Any:
        """Returns a node for a symbolic number, added at the graph's cursor; a number if the expression is one."""
        expression = size.node.expr
        if expression.is_number:
            return (int if isinstance(size, torch.SymInt) else float)(expression)
        nodes: dict[sympy.Expr, Node] = {}
        for node in self._graph.nodes:
            number, inputs = value_of(node), [*map(value_of, node.all_input_nodes)]
            if isinstance(number, _SYMBOLIC) and inputs and all(isinstance(each, _SYMBOLIC) for each in inputs):
                nodes.setdefault(number.node.expr, node)
        proxies: dict[sympy.Expr, Proxy] = {}
        # Copies the program's nodes: a proxy has no operation that rounds, as in `int(0.5 * length)`.
        for each, node in [*nodes.items()][::-1]:
            if not each.is_Atom and expression.has(each):
                symbol = sympy.Dummy(integer=each.is_integer)
                proxies[symbol] = Proxy(self._graph.node_copy(node, lambda input: self._size(value_of(input))))
                expression = expression.xreplace({each: symbol})
        proxies |= {
            symbol: Proxy(self._node_of_symbol(symbol)) for symbol in expression.free_symbols.difference(proxies)
        }
        if expression in proxies:
            return proxies[expression].node
        value: Any = sympy_interp(PythonReferenceAnalysis, proxies, expression)
        _set_example_value(value.node)
        return value.node

    def _node_of_symbol(self, symbol: sympy.Expr) -> Node:
        """Returns a node for a symbol: that of an argument, or a size of a tensor, such as of `hidden[mask]`."""
        for node in self._graph.nodes:
            value = value_of(node)
            if isinstance(value, _SYMBOLIC) and value.node.expr == symbol:
                # A number that the caller gives is read where the program first uses it, which may be later.
                return self._graph.node_copy(node) if name_of(node) == "item" and value.node.has_hint() else node
            for dim, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
                if isinstance(size, torch.SymInt) and size.node.expr == symbol:
                    size_node = self._graph.call_method("size", (node, dim))
                    size_node.meta["example_value"] = size
                    return size_node
        raise KeyError(symbol)

    def weights(
        self, ops: Sequence[Op], operands: Sequence[Tensor], result: Tensor, *, values: Sequence[Tensor | None] | None
    ) -> list[Tensor]:
        """Adds autograd's derivative of the nodes, as operations of ATen: see `Writer`."""
        starts, nodes = [self._node(operand) for operand in operands], [op.handle for op in ops]
        others = _other_inputs(starts, nodes)
        written = dict.fromkeys(self._node(each) for op in ops for each in op.writes)

        def derivative(rows: list[torch.Tensor], other_values: list[Any]) -> list[torch.Tensor]:
            rows = [each.detach().requires_grad_() for each in rows]
            with torch.enable_grad():
                # Cloned, since a leaf must not be changed in place.
                results: dict[Node, Any] = dict(zip(starts, [each.clone() for each in rows], strict=True))
                results |= zip(others, other_values, strict=True)
                results |= {node: results[node].clone() for node in written if node in results}
                for node in (*starts, *others, *nodes):
                    if not isinstance(value_of(node), _SYMBOLIC):
                        _run_node(node, results)
                total = results[result.handle]
            row_gradients = torch.autograd.grad(total, rows, torch.ones((), dtype=total.dtype, device=total.device))
            return [*row_gradients, *([] if values is None else [total.detach()])]

        rows = [_in_shape(value_of(node).detach(), each.shape) for node, each in zip(starts, operands, strict=True)]
        wide = [each.float() if each.dtype.itemsize < 4 else each for each in rows]
        other_values = [each.detach() if isinstance(each, torch.Tensor) else each for each in map(value_of, others)]
        with tracing(None), self._fake_mode, enable_python_dispatcher(), torch.autocast("cpu", enabled=False):
            # Dynamo cannot print a guard that is added in autograd's thread of a GPU.
            with torch.autograd.set_multithreading_enabled(False):
                traced = make_fx(derivative, decomposition_table=_DECOMPOSITIONS)(wide, other_values)
        return self._inline(traced, others, values or ())

    def _inline(self, traced: GraphModule, others: Sequence[Node], values: Sequence[Tensor | None]) -> list[Tensor]:
        """Adds the graph of a derivative; its arguments are rows, with their values if given, and other nodes."""
        placeholders = traced.graph.find_nodes(op="placeholder")
        inlined: dict[Node, Any] = dict(zip(placeholders[len(placeholders) - len(others) :], others, strict=True))
        (output,) = traced.graph.find_nodes(op="output")
        needed = set(output.args[0])
        for node in reversed(traced.graph.nodes):
            # If a view was changed in place, autograd copies into a part of a gradient, and nothing reads that result.
            if _is_mutable(node) and any(_share_memory(node, each) for each in needed):
                needed.add(node)
            if node in needed and not isinstance(node.meta.get("val"), torch.SymInt):
                needed.update(node.all_input_nodes)
        with self._graph.inserting_before(self._end):
            # thunder differentiates all operations that may need it, and does not know a gradient for each of these.
            self._graph.call_function(torch._C._set_grad_enabled, (False,))
            for node, value in zip(placeholders, values, strict=False):
                if node in needed and value is not None:
                    inlined[node] = self.call(torch.Tensor.to, value, node.meta["val"].dtype).handle
            for node in traced.graph.nodes:
                if node in needed and node not in inlined:
                    inlined[node] = self._inline_node(node, inlined, traced)
            results = [self._new_tensor(inlined[each], each.meta["val"]) for each in output.args[0]]
            self._graph.call_function(torch._C._set_grad_enabled, (True,))
            return results

    def _inline_node(self, node: Node, inlined: dict[Node, Any], traced: GraphModule) -> Any:
        """Returns the node, or the number, for a node of a derivative's graph."""
        value: Any = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            return self._size(value)
        if node.op == "placeholder":
            # Rows: the derivative of a linear function is the same at 0.
            return self.call(torch.zeros, tuple(value.shape), dtype=value.dtype, device=value.device).handle
        if node.op == "get_attr":
            # A constant of the derivative. It is written as a call: PyTorch's disk cache has no attributes in its key.
            constant = getattr(traced, str(node.target))
            return self.call(torch.tensor, constant.tolist(), dtype=constant.dtype, device=constant.device).handle
        copy = self._graph.node_copy(node, inlined.__getitem__)
        copy.meta = {"example_value": value}
        return copy

    def region(self, call: Call, group: Any) -> tuple[list[Tensor], PlannedRegion]:
        """Adds the operator, which makes its plan when it runs: see `Writer`."""
        # With the sizes of this call, for the plan that is reported; the operator's settings depend on no size.
        specs, options = call.map(lambda _, each: self._spec(each, call)), self._options
        if may_save_logits(specs, math.prod(call.tensors["input"].shape[:-1]), options):
            options = replace(options, strategy=SAVE_LOGITS)
        settings = Settings.unplanned(specs, options)
        run_forward = torch.ops.thunder_flce.linear_cross_entropy.default
        tensors = [self._operand(name, call) for name in settings.names]
        with self._graph.inserting_before(self._end):
            node = self._graph.call_function(run_forward, (tensors, str(settings)))
        with self._fake_mode, torch.enable_grad():
            node.meta["example_value"] = tuple(run_forward([*map(_operand_of, tensors)], str(settings)))
        planned = PlannedRegion(specs, plan_for(specs, settings.options or self._options))
        return [self.call(operator.getitem, node, position) for position in range(1 + len(call.loss.outputs))], planned

    def _spec(self, tensor: Any, call: Call) -> Spec:
        if isinstance(tensor, Tensor):
            shape = (_EXAMPLE_TOKENS if depends_on_values(size) else hint(size) for size in tensor.shape)
            return Spec(tuple(shape), tensor.dtype, tensor.device)
        return Spec((), call.row_dtype, call.device)

    def _operand(self, name: str, call: Call) -> Node:
        """Returns a tensor or a number of a call as the operator takes it."""
        operand = call.tensors[name]
        if not isinstance(operand, Tensor):
            return self.call(torch.full, (), operand, dtype=call.row_dtype, device=call.device).handle
        node = self._node(operand)
        if name not in call.needs_grad and value_of(node).requires_grad:
            # The operator raises if a tensor requires a gradient that needs_grad does not name.
            return self.call(torch.detach, operand).handle
        return node


def _node_of(op: Op) -> Node:
    """Returns the node of an operation, or of the checkpointed function that contains it."""
    return op.handle if op.inside is None else op.inside


def _operand_of(node: Node) -> Any:
    """Returns a node's value as an operand: PyTorch refuses some views whose base was changed in place since."""
    value = value_of(node)
    if not isinstance(value, torch.Tensor) or not value._is_view():
        return value
    with torch.no_grad():
        return value.detach().requires_grad_(value.requires_grad)


def _is_mutable(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _share_memory(a: Node, b: Node) -> bool:
    values = [value for value in (a.meta.get("val"), b.meta.get("val")) if isinstance(value, torch.Tensor)]
    return len(values) == 2 and len({StorageWeakRef(value.untyped_storage()) for value in values}) == 1


def _slice_backward(grad: torch.Tensor, sizes: Sequence[Any], dim: int, start: Any, end: Any, step: int) -> Any:
    if step != 1:
        return NotImplemented
    size = sizes[dim]
    before = max(start + size if start < 0 else min(start, size), 0)
    return F.pad(grad, [*(0, 0) * (grad.ndim - dim % grad.ndim - 1), before, size - before - grad.shape[dim]])


def _select_backward(grad: torch.Tensor, sizes: Sequence[Any], dim: int, index: Any) -> Any:
    return _slice_backward(grad.unsqueeze(dim), sizes, dim, index, None, 1)


def _index_put(tensor: torch.Tensor, indices: Sequence[Any], values: torch.Tensor, accumulate: bool = False) -> Any:
    if not accumulate:
        return NotImplemented
    numbers = torch.arange(tensor.numel(), device=tensor.device).view(tensor.shape)
    numbers = numbers[tuple(slice(None) if each is None else each for each in indices)]
    values = values.expand_as(numbers).reshape(-1)
    return tensor.reshape(-1).scatter_add(0, numbers.reshape(-1), values).view(tensor.shape)


def _scalar_tensor(value: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> torch.Tensor:
    return torch.full((), value, dtype=dtype, device=device)


_DECOMPOSITIONS: dict[Any, Callable] = {
    torch.ops.aten.scalar_tensor.default: _scalar_tensor,
    torch.ops.aten.index_put.default: _index_put,
    torch.ops.aten.slice_backward.default: _slice_backward,
    torch.ops.aten.select_backward.default: _select_backward,
    **get_decompositions([torch.ops.aten.split_with_sizes, torch.ops.aten.split, torch.ops.aten.unbind]),
}
"""Decompositions of operations that thunder lacks, or leaves to Inductor, which would split a part without gradients"""


def _set_example_value(node: Node) -> None:
    """Sets the example value of a number's node, and of the nodes that it is computed from, as Dynamo does."""
    for input in node.all_input_nodes:
        if value_of(input) is None:
            _set_example_value(input)
    node.meta["example_value"] = node.target(*map_arg(node.args, value_of))  # type: ignore[operator]


def _run_node(node: Node, values: dict[Node, Any]) -> None:
    """Runs a node on values, unless it has one, with the nodes that take one of its results or read a size."""
    shapes = [each for each in node.all_input_nodes if each.target is torch.Size]
    for current in (*shapes, node, *_readers_of_parts(node)):
        if current in values:
            continue
        args, kwargs = map_arg((current.args, current.kwargs), lambda input: values.get(input, value_of(input)))
        if name_of(current) in PRODUCTS:
            # Operands of a product must have one dtype, and rows may be in a wider one than the program's.
            floats = [value for value in tree_flatten((args, kwargs))[0] if _is_float(value)]
            widest = max((value.dtype for value in floats), key=lambda dtype: dtype.itemsize)
            args, kwargs = tree_map(lambda x, to=widest: x.to(to) if _is_float(x) else x, (args, kwargs))
        if current.op == "call_method":
            values[current] = getattr(args[0], str(current.target))(*args[1:], **kwargs)
        else:
            values[current] = current.target(*args, **kwargs)  # type: ignore[operator]


def _other_inputs(starts: Sequence[Node], nodes: Sequence[Node]) -> list[Node]:
    """Returns the tensors and numbers that nodes read, other than those they start from and each other."""
    own_nodes = {*starts, *nodes, *(each for node in (*starts, *nodes) for each in _readers_of_parts(node))}
    others: dict[Node, None] = {}
    pending = [each for node in nodes[::-1] for each in node.all_input_nodes[::-1]]
    while pending:
        node = pending.pop()
        if isinstance(value_of(node), torch.Tensor | torch.SymInt | torch.SymFloat):
            others |= {} if node in own_nodes else {node: None}
        elif node not in own_nodes:
            pending += node.all_input_nodes  # The whole shape of a tensor, which is traced with the tensor.
    return list(others)


def _in_shape(tensor: torch.Tensor, shape: tuple[Any, ...]) -> torch.Tensor:
    """Returns a tensor, or the first class of one that the program sums over the classes later."""
    return tensor if same_shape(tensor.shape, shape) else tensor.new_empty(shape)


def _is_read_for_its_length(node: Node) -> bool:
    """Whether a node selects rows by a mask alone, and all its users read how many these are."""
    key = tree_flatten(node.args[1])[0] if node.target is operator.getitem else []
    mask = value_of(key[0]) if len(key) == 1 and isinstance(key[0], Node) else None
    is_mask = isinstance(mask, torch.Tensor) and mask.dtype is torch.bool
    return is_mask and all(name_of(user) in _READ_SIZE and user.args[1:] == (0,) for user in node.users)


_READ_SIZE = ("size", "sym_size")


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _readers_of_parts(node: Node) -> list[Node]:
    """Returns the nodes that take one of several results of a node, or read sizes of its result."""
    readers: list[Node] = []
    is_one = isinstance(value_of(node), torch.Tensor)
    # A number that is read of a tensor is an operation of its own, and so is what is computed from it.
    users = [] if isinstance(value_of(node), _SYMBOLIC) else [each for each in node.users if name_of(each) != "item"]
    for user in users:
        value = value_of(user)
        is_size = value is not None and not any(isinstance(each, torch.Tensor) for each in tree_flatten(value)[0])
        if is_size or (not is_one and user.target is operator.getitem):
            readers += [user, *(_readers_of_parts(user) if not isinstance(value, torch.Tensor | torch.SymInt) else [])]
    return readers


_Autocast = dict[str, tuple[torch.dtype | None, bool, bool | None]]
"""For each type of device: autocast's dtype, None if it is off, whether it is on, and whether it caches casts"""
_NO_AUTOCAST = (None, False, None)


def _modes_after_each(nodes: Sequence[Node]) -> dict[Node, tuple[bool, _Autocast]]:
    """Returns whether gradients are on after each node, and autocast for each type of device that may have it."""
    devices = {str(node.args[0]) for node in nodes if node.target is _enter_autocast}
    devices |= {value.device.type for value in map(value_of, nodes) if isinstance(value, torch.Tensor)}
    around = {
        device: (torch.get_autocast_dtype(device), True, None) if torch.is_autocast_enabled(device) else _NO_AUTOCAST
        for device in sorted(devices)
        if torch.amp.is_autocast_available(device)
    }
    entered: list[Node] = []
    modes, has_grad = {}, torch.is_grad_enabled()
    for node in nodes:
        if node.target is torch._C._set_grad_enabled:
            has_grad = bool(node.args[0])
        elif node.target is _enter_autocast:
            entered.append(node)
        elif node.target is _exit_autocast:
            entered.remove(node.args[0])  # type: ignore[arg-type]
        autocast: Any = around.copy()
        for device, dtype, is_on, caches in (each.args for each in entered):
            state = (dtype or torch.get_autocast_dtype(str(device)), True, caches) if is_on else _NO_AUTOCAST
            autocast[device] = state
        modes[node] = has_grad, autocast
    return modes
