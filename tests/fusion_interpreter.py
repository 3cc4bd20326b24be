"""Runs nvFuser definitions with PyTorch's operations, so that they can be tested without a GPU.

A stand-in for `nvfuser_direct.FusionDefinition`, with the operations that our definitions use. It checks what nvFuser
assumes: that inputs match their definitions. It does not model how nvFuser schedules a definition.
"""

import operator
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from nvfuser_direct import DataType
from torch import Tensor
from torch.fx import Graph, Interpreter, Node

_TORCH_DTYPES = {
    DataType.Float: torch.float32,
    DataType.Half: torch.float16,
    DataType.BFloat16: torch.bfloat16,
    DataType.Int: torch.int64,
}


def _of_equal_dtypes(compute: Callable[[Tensor, Tensor], Tensor], left: Tensor, right: Tensor) -> Tensor:
    # nvFuser would promote dtypes; our definitions cast explicitly.
    assert left.dtype == right.dtype and left.dtype not in (torch.float16, torch.bfloat16)
    return compute(left, right)


def _broadcast(tensor: Tensor, is_new: list[bool]) -> Tensor:
    assert len(is_new) - sum(is_new) == tensor.ndim
    for dim, new in enumerate(is_new):
        tensor = tensor.unsqueeze(dim) if new else tensor
    return tensor


def _broadcast_in_dim(tensor: Tensor, *, shape: list[int], broadcast_dims: list[int]) -> Tensor:
    sizes = [1] * len(shape)
    for dim, size in zip(broadcast_dims, tensor.shape, strict=True):
        sizes[dim] = size
    return tensor.reshape(sizes).expand(shape)


_BINARY = {name: getattr(operator, name) for name in ("add", "sub", "mul", "eq", "ne", "lt", "gt", "ge")}
_BINARY |= {"div": operator.truediv, "logical_and": operator.and_, "logical_or": operator.or_}
OPERATIONS: dict[str, Callable[..., Tensor]] = {
    **{name: partial(_of_equal_dtypes, compute) for name, compute in _BINARY.items()},
    **{name: getattr(torch, name) for name in ("exp", "expm1", "log", "log1p", "tanh", "reciprocal", "logical_not")},
    "cast": lambda tensor, dtype: tensor.to(_TORCH_DTYPES[dtype]),
    "where": torch.where,
    "sum": torch.sum,
    "max": torch.amax,
    "broadcast": _broadcast,
    "broadcast_in_dim": _broadcast_in_dim,
    "reshape": lambda tensor, new_shape: tensor.reshape(new_shape),
    "take_along_axis": lambda tensor, index, dim: tensor.gather(dim, index),
    "iota": lambda count, first, by, *, dtype: first + by * torch.arange(count.item(), dtype=_TORCH_DTYPES[dtype]),
}
"""The used operations of `nvfuser_direct.FusionDefinition.ops`, by name"""


class FusionDefinition:
    """Stand-in for `nvfuser_direct.FusionDefinition`: a graph of these operations."""

    def __init__(self) -> None:
        self._graph = Graph()
        self.ops = SimpleNamespace(**{name: partial(self._add, name) for name in OPERATIONS})
        self._inputs: list[tuple[list[int], list[bool | None], torch.dtype]] = []
        self._outputs: list[tuple[Node, Node | None]] = []

    def __enter__(self) -> "FusionDefinition":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def _add(self, name: str, *arguments: Any, **settings: Any) -> Node:
        return self._graph.call_function(_run, (name, *arguments), settings)

    def define_tensor(self, *, shape: list[int], contiguity: list[bool | None], dtype: DataType) -> Node:
        """Adds an input; -1 in `shape` stands for any size except 1, and a dimension of size 1 has no contiguity."""
        assert [size == 1 for size in shape] == [flag is None for flag in contiguity]
        self._inputs.append((shape, contiguity, _TORCH_DTYPES[dtype]))
        return self._graph.placeholder(f"input_{len(self._inputs)}")

    def define_scalar(self, value: float, dtype: DataType) -> Node:
        """Adds a constant."""
        return self._graph.call_function(torch.tensor, (value,), {"dtype": _TORCH_DTYPES[dtype]})

    def add_output(self, value: Node, alias_input: Node | None = None) -> None:
        """Makes `execute` return `value`, or write it into an input."""
        self._outputs.append((value, alias_input))

    def execute(self, inputs: Sequence[Tensor], **options: Any) -> list[Tensor]:
        """Runs the definition; returns the outputs that are not written into inputs."""
        for tensor, (shape, contiguity, dtype) in zip(inputs, self._inputs, strict=True):
            assert tensor.dtype == dtype
            sizes = zip(shape, tensor.shape, strict=True)
            assert all(defined == size or (defined == -1 and size != 1) for defined, size in sizes)
            assert tensor.is_contiguous() or not all(contiguity)
        interpreter = Interpreter(torch.nn.Module(), garbage_collect_values=False, graph=self._graph)
        interpreter.run(*inputs)
        values = [(interpreter.env[value], alias) for value, alias in self._outputs]
        for value, alias in values:
            if alias is not None:
                interpreter.env[alias].copy_(value)
        return [value for value, alias in values if alias is None]


def _run(name: str, *arguments: Any, **settings: Any) -> Tensor:
    return OPERATIONS[name](*arguments, **settings)
