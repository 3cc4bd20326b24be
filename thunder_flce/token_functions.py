"""From a Python function of one token's numbers to the plain values that the engine runs: `operation.token_loss`."""

import inspect
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node, Proxy, Tracer

from thunder_flce.operation.token_loss import VARIABLES, NotOfTokens, TokenLoss, TokenLossWriter, input_name

ONLY_WRITTEN_OUT = (
    "token_loss is for eager calls; where a program is compiled, write it out over log-probabilities, as with "
    'log_softmax and gather: thunder_flce.jit and torch.compile(backend="thunder_flce") fuse that'
)
_CASTS = {"float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16}


class _Tracer(Tracer):
    """Traces what a function does with its arguments, and where gradients are off."""

    def __init__(self) -> None:
        super().__init__()
        self.graph, self.root, self.tensor_attrs = Graph(tracer_cls=_Tracer), torch.nn.Module(), {}

    def create_node(self, *args: Any, **kwargs: Any) -> Node:
        node = super().create_node(*args, **kwargs)
        node.meta["is_detached"] = not torch.is_grad_enabled()
        return node

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, Tensor):
            if a.numel() == 1 and not a.requires_grad:
                return a.item()
            raise NotOfTokens("a tensor that is not among its arguments; give it to token_inputs")
        if isinstance(a, Real) and not isinstance(a, bool | int):
            return float(a)  # NumPy's
        return super().create_arg(a)


def traced_token_loss(function: Callable[..., Any], inputs: Sequence[Any]) -> TokenLoss:
    """The loss that a function computes of (log_prob, entropy, *inputs).

    It is called once, with stand-ins for its arguments.

    Raises:
        TypeError: where it takes other arguments, or does what is no operation on single tokens.
    """
    if not isinstance(inputs, Sequence):
        raise TypeError(f"token_inputs must be a sequence of tensors, but got {type(inputs).__name__}")
    names = [*VARIABLES, *map(input_name, range(len(inputs)))]
    try:
        inspect.signature(function).bind(*names)
    except TypeError as error:
        raise TypeError(
            f"token_loss is called with log_prob, entropy and the {len(inputs)} of token_inputs: {error}"
        ) from None
    tracer = _Tracer()
    try:
        with torch.enable_grad():
            result = function(*(tracer.create_proxy("placeholder", name, (), {}) for name in names))
        return _written(tracer.graph, result, [getattr(input, "dtype", None) is torch.bool for input in inputs])
    except (torch.fx.proxy.TraceError, NotOfTokens, NotImplementedError) as problem:
        raise TypeError(
            "token_loss must be made of PyTorch's operations on single tokens, since a chunk of tokens at a time is "
            f"computed, but it has: {problem}"
        ) from problem


def _written(graph: Graph, result: Any, is_logical: Sequence[bool]) -> TokenLoss:
    if not isinstance(result, Proxy):
        raise NotOfTokens(f"{type(result).__name__} as its result")
    writer = TokenLossWriter(is_logical)
    names: dict[Node, str] = {}
    for node in graph.nodes:
        names[node] = node.target if node.op == "placeholder" else _write(writer, node, names)
        if node.meta["is_detached"]:
            names[node] = writer.detached(names[node])
    return writer.finish(names[result.node])


def _write(writer: TokenLossWriter, node: Node, names: dict[Node, str]) -> str:
    called = str(getattr(node.target, "__name__", node.target))
    args: list[Any] = [names[arg] if isinstance(arg, Node) else arg for arg in node.args]
    kwargs = {name: names[arg] if isinstance(arg, Node) else arg for name, arg in node.kwargs.items()}
    if called == "where" and node.op == "call_method":
        args[:2] = reversed(args[:2])
    if called == "type_as":
        return writer.as_float(args[0])
    if called in ("to", "bool", *_CASTS):
        dtype = _CASTS.get(called, torch.bool) if called != "to" else [*args[1:], *kwargs.values()][0]
        if dtype is torch.bool:
            return writer.as_logical(args[0])
        if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
            return writer.as_float(args[0])
    return writer.write("logsigmoid" if called == "log_sigmoid" else called, args, kwargs)
