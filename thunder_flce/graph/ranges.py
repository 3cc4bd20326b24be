"""Indices of a graph of Dynamo's that are Python ranges, as in `log_probs[range(n), labels]`."""

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


def _arange(graph: Graph, part: object, indexed: torch.Tensor) -> object:
    if not isinstance(part, range):
        return part
    node = graph.call_function(torch.arange, (part.start, part.stop, part.step), {"device": indexed.device})
    node.meta["example_value"] = indexed.new_empty(len(part), dtype=torch.int64)
    return node
