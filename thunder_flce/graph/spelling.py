"""What a graph of Dynamo's leaves to PyTorch, spelled out for thunder: ranges, casts of autocast, means, guards.

And changes in place of logits, which are the same out of place where nobody else has seen the logits.
"""

import operator
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import map_arg

from thunder_flce.loss_nodes import is_linear, name_of, value_of


def spell_out_ranges(graph: Graph) -> None:
    """Puts `torch.arange` where a tensor is indexed by a range among tensors: thunder takes no ranges."""
    for node in list(graph.find_nodes(op="call_function", target=operator.getitem)):
        tensor, key = node.args
        if not isinstance(tensor, Node) or not isinstance(value_of(tensor), torch.Tensor) or not isinstance(key, tuple):
            continue
        with graph.inserting_before(node):
            node.args = (tensor, tuple(_arange(graph, part, value_of(tensor)) for part in key))


def spell_out_casts(node: Node) -> None:
    """Casts the floating-point operands of a node to the dtype of its result, as autocast does."""
    dtype = value_of(node).dtype
    with node.graph.inserting_before(node):
        for operand in node.all_input_nodes:
            value = value_of(operand)
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != dtype:
                cast = node.graph.call_method("to", (operand, dtype))
                cast.meta = {**node.meta, "example_value": value.to(dtype)}
                node.replace_input_with(operand, cast)


def spell_out_mean(node: Node) -> None:
    """Puts a sum, divided by its number of elements, where a mean is of all elements and these have a symbolic number.

    thunder would divide by a number that stands for the symbol. In 16 bits a sum would be rounded once more.
    """
    operand = node.all_input_nodes[0]
    value = value_of(operand)
    is_plain = len(node.args) == 1 and not node.kwargs and value.dtype in (torch.float32, torch.float64)
    if not is_plain or isinstance(value.numel(), int):
        return
    graph = node.graph
    with graph.inserting_before(node):
        total, count = graph.call_method("sum", (operand,)), graph.call_method("numel", (operand,))
        total.meta = {**node.meta, "example_value": value.sum()}
        count.meta = {**node.meta, "example_value": value.numel()}
        mean = graph.call_function(operator.truediv, (total, count))
        mean.meta = dict(node.meta)
    node.replace_all_uses_with(mean)
    graph.erase_node(node)


def guard_equal_sizes(gather: Node) -> None:
    """Has Dynamo make sure that a gather's index has the sizes of what it gathers from, where it has in this call.

    PyTorch lets the index be the smaller one. Dynamo has a symbol of its own for each, once lengths have changed.
    """
    values = [value_of(operand) for operand in gather.all_input_nodes]
    if len(values) != 2 or not all(isinstance(value, torch.Tensor) for value in values):
        return
    # The last dimension is that of the columns.
    for size, other in zip(values[0].shape[:-1], values[1].shape[:-1], strict=False):
        if isinstance(size, torch.SymInt) and isinstance(other, torch.SymInt) and _may_be_equal(size, other):
            # To ask adds the guard.
            bool(size == other)


def _may_be_equal(size: torch.SymInt, other: torch.SymInt) -> bool:
    """Whether two sizes are equal in this call, and of the same range, if the user has declared one."""
    if statically_known_true(size == other) or not (size.node.has_hint() and other.node.has_hint()):
        return False
    bounds = [each.node.shape_env.bound_sympy(each.node.expr) for each in (size, other)]
    return size.node.hint == other.node.hint and bounds[0] == bounds[1]


_IN_PLACE: dict[Any, str] = {
    **{f"{name}_": name for name in ("add", "sub", "mul", "div")},
    operator.iadd: "add", operator.isub: "sub", operator.imul: "mul", operator.itruediv: "div",
}  # fmt: skip


def put_out_of_place(graph: Graph, changes: Iterable[Node]) -> dict[Node, tuple[Any, ...]]:
    """Arithmetic in place on the result of a linear that nothing has read before, such as `logits.div_(0.7)`.

    What reads that later reads the new tensor. Nothing else shares its memory, since there was no view of it.

    Args:
        graph: which is changed.
        changes: of the graph's nodes, those that may be such a change.

    Returns:
        For each node that was changed, what `put_back_in_place` needs.
    """
    done: dict[Node, tuple[Any, ...]] = {}
    positions = {node: position for position, node in enumerate(graph.nodes)}
    if any(name_of(node) in ("_set_grad_enabled", "_enter_inference_mode") for node in graph.nodes):
        # In a place without gradients, a change in place leaves the tensor its gradient.
        return done
    for node in changes:
        logits = node.args[0] if node.target in _IN_PLACE and node.args else None
        if not isinstance(logits, Node) or not (is_linear(logits) or logits in done):
            continue
        if any(user is not node and positions[user] < positions[node] for user in logits.users):
            continue
        value, name = value_of(logits), _IN_PLACE[node.target]
        args, kwargs = map_arg((node.args[1:], dict(node.kwargs)), value_of)
        result = getattr(value, name)(*args, **kwargs)
        if result.dtype == value.dtype and result.shape == value.shape:
            done[node] = node.op, node.target, value_of(node)
            node.op, node.target, node.meta["example_value"] = "call_method", name, result
            for user in [user for user in logits.users if user is not node]:
                user.replace_input_with(logits, node)
    return done


def put_back_in_place(changed: Mapping[Node, tuple[Any, ...]], left: Collection[Node]) -> None:
    """Undoes `put_out_of_place` in the nodes that are left, so that a program without a fused region takes no more."""
    for node, before in changed.items():
        if node in left:
            node.op, node.target, node.meta["example_value"] = before


def _arange(graph: Graph, part: object, indexed: torch.Tensor) -> object:
    if not isinstance(part, range):
        return part
    node = graph.call_function(torch.arange, (part.start, part.stop, part.step), {"device": indexed.device})
    node.meta["example_value"] = indexed.new_empty(len(part), dtype=torch.int64)
    return node
