"""Dynamo's symbolic sizes as numbers, which thunder's shapes have to be.

Each symbol stands as a large prime, so that two sizes are the same number only if they are the same for every number of
tokens: B·T and T·B are, B·T and T are not, though B may be 1 in the call that is compiled. So what is found in a trace
holds for every call. Sizes that are the same by a guard of the graph have one number, too: cross_entropy makes sure
that there are as many labels as rows of logits, though both may have symbols of their own.
"""

from itertools import count
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node, Proxy
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

# Primes from here on: hardly a size that a program has as a constant, and three of them still make a size of 64 bits.
_FIRST = 2**19


class Sizes:
    """The numbers of the symbolic sizes of one graph, and what they stand for."""

    def __init__(self, graph: Graph):
        self._graph = graph
        self._inputs: dict[sympy.Expr, Node] = {}
        for node in graph.find_nodes(op="placeholder"):
            value = node.meta.get("example_value")
            if isinstance(value, torch.SymInt):
                self._inputs.setdefault(value.node.expr, node)
        self._primes = (sympy.nextprime(_FIRST + 10_000 * step) for step in count())
        self._numbers: dict[sympy.Expr, int] = {}
        self._sizes: dict[int, torch.SymInt] = {}

    def number(self, size: int | torch.SymInt) -> int:
        """The number of a size: itself, where it is known."""
        if not isinstance(size, torch.SymInt):
            return size
        expression = size.node.expr
        if expression.is_Integer:
            return int(expression)
        if expression not in self._numbers:
            # Asked for what is known already, the comparison adds no guard.
            same = (number for number, other in self._sizes.items() if statically_known_true(size == other))
            self._numbers[expression] = next(same, None) or self._number_of(expression)
        number = self._numbers[expression]
        self._sizes.setdefault(number, size)
        return number

    def _number_of(self, expression: sympy.Expr) -> int:
        if expression not in self._numbers:
            # Anything but a polynomial, such as min(s, 128), is like a symbol of its own.
            if expression.is_polynomial() and not expression.is_Symbol:
                symbols = {symbol: self._number_of(symbol) for symbol in expression.free_symbols}
                self._numbers[expression] = int(expression.subs(symbols))
            else:
                self._numbers[expression] = next(self._primes)
        return self._numbers[expression]

    def hint(self, number: int) -> int:
        """The size in the call that is compiled; 1 where that is not known, as it depends on a tensor's values."""
        size = self._sizes.get(number)
        if size is None:
            return number
        return size.node.hint if size.node.has_hint() else 1

    def node(self, number: int) -> Node | int:
        """The size for a graph: a number that is known, or a node, which is added where the graph's cursor is."""
        size = self._sizes.get(number)
        if size is None:
            return number
        inputs = {expression: Proxy(node) for expression, node in self._inputs.items()}
        for symbol in size.node.expr.free_symbols - set(inputs):
            inputs[symbol] = Proxy(self._node_of(symbol))
        value: Any = sympy_interp(PythonReferenceAnalysis, inputs, size.node.expr)
        return value.node

    def _node_of(self, symbol: sympy.Expr) -> Node:
        """A node, added where the graph's cursor is, for a size that no input has, such as that of `hidden[mask]`."""
        for node in self._graph.nodes:
            value = node.meta.get("example_value")
            for at, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
                if isinstance(size, torch.SymInt) and size.node.expr == symbol:
                    found = self._graph.call_method("size", (node, at))
                    found.meta["example_value"] = size
                    return found
        raise KeyError(symbol)
