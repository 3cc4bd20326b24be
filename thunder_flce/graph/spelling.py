"""What a graph of Dynamo's leaves to PyTorch, spelled out for thunder: indices that are ranges, casts of autocast."""

import operator

import torch
from torch.fx import Graph, Node

from thunder_flce.loss_nodes import value_of


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


def _arange(graph: Graph, part: object, indexed: torch.Tensor) -> object:
    if not isinstance(part, range):
        return part
    node = graph.call_function(torch.arange, (part.start, part.stop, part.step), {"device": indexed.device})
    node.meta["example_value"] = indexed.new_empty(len(part), dtype=torch.int64)
    return node
