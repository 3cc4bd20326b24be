"""Runs nvFuser definitions with PyTorch's operations, so that they can be tested without a GPU.

A stand-in for `nvfuser_direct.FusionDefinition`, with those operations that our definitions use. It checks what nvFuser
takes for granted: that inputs are as they were defined. It knows nothing of how nvFuser schedules a definition.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from nvfuser_direct import DataType
from torch import Tensor

_TORCH_DTYPES = {
    DataType.Float: torch.float32,
    DataType.Half: torch.float16,
    DataType.BFloat16: torch.bfloat16,
    DataType.Int: torch.int64,
}


class Value:
    """Something that has a value as soon as the definition has inputs."""

    def __init__(self, compute: Callable[..., Any], *arguments: Any):
        self._compute = compute
        self._arguments = arguments

    def get(self, known: dict["Value", Any]) -> Any:
        """The value, given what is known already; adds to that."""
        if self not in known:
            arguments = (a.get(known) if isinstance(a, Value) else a for a in self._arguments)
            known[self] = self._compute(*arguments)
        return known[self]


class FusionDefinition:
    """See `nvfuser_direct.FusionDefinition`."""

    def __init__(self) -> None:
        self.ops = Operations()
        self._inputs: list[tuple[Value, list[int], list[bool | None], torch.dtype]] = []
        self._outputs: list[tuple[Value, Value | None]] = []

    def __enter__(self) -> "FusionDefinition":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def define_tensor(self, *, shape: list[int], contiguity: list[bool | None], dtype: DataType) -> Value:
        """An input; -1 in `shape` stands for any size but 1, and a size of 1 has no contiguity."""
        assert [size == 1 for size in shape] == [flag is None for flag in contiguity]
        value = Value(lambda: None)
        self._inputs.append((value, shape, contiguity, _TORCH_DTYPES[dtype]))
        return value

    def define_scalar(self, value: float, dtype: DataType) -> Value:
        """A constant."""
        return Value(lambda: torch.tensor(value, dtype=_TORCH_DTYPES[dtype]))

    def add_output(self, value: Value, alias_input: Value | None = None) -> None:
        """Returns `value` from `execute`, or writes it into an input."""
        self._outputs.append((value, alias_input))

    def execute(self, inputs: Sequence[Tensor], **options: Any) -> list[Tensor]:
        """The outputs that are not written into inputs."""
        known: dict[Value, Any] = {}
        for tensor, (value, shape, contiguity, dtype) in zip(inputs, self._inputs, strict=True):
            assert tensor.dtype == dtype
            sizes = zip(shape, tensor.shape, strict=True)
            assert all(defined == size or (defined == -1 and size != 1) for defined, size in sizes)
            assert tensor.is_contiguous() or not all(contiguity)
            known[value] = tensor
        values = [(value.get(known), alias) for value, alias in self._outputs]
        for value, alias in values:
            if alias is not None:
                known[alias].copy_(value)
        return [value for value, alias in values if alias is None]


def _dtypes_agree(*operands: Tensor) -> bool:
    return len({operand.dtype for operand in operands}) == 1


class Operations:
    """Each operation of `nvfuser_direct.FusionDefinition.ops` that is used, by its name."""

    _BINARY = {
        "add": operator.add,
        "sub": operator.sub,
        "mul": operator.mul,
        "div": operator.truediv,
        "eq": operator.eq,
        "ne": operator.ne,
        "lt": operator.lt,
        "gt": operator.gt,
        "ge": operator.ge,
        "logical_and": operator.and_,
        "logical_or": operator.or_,
    }
    _UNARY = {
        "exp": torch.exp,
        "expm1": torch.expm1,
        "log": torch.log,
        "log1p": torch.log1p,
        "tanh": torch.tanh,
        "reciprocal": torch.reciprocal,
        "logical_not": torch.logical_not,
    }

    def __getattr__(self, name: str) -> Callable[..., Value]:
        if name in self._UNARY:
            return lambda operand: Value(self._UNARY[name], operand)
        if name not in self._BINARY:
            raise AttributeError(name)

        def compute(left: Tensor, right: Tensor) -> Tensor:
            # nvFuser promotes; our definitions cast.
            assert _dtypes_agree(left, right) and left.dtype not in (torch.float16, torch.bfloat16)
            return self._BINARY[name](left, right)

        return lambda left, right: Value(compute, left, right)

    def cast(self, operand: Value, dtype: DataType) -> Value:
        """To another dtype."""
        return Value(lambda tensor: tensor.to(_TORCH_DTYPES[dtype]), operand)

    def where(self, condition: Value, chosen: Value, other: Value) -> Value:
        """One or the other."""
        return Value(torch.where, condition, chosen, other)

    def sum(self, operand: Value, dims: list[int]) -> Value:
        """Over `dims`, which are gone then."""
        return Value(lambda tensor: tensor.sum(dims), operand)

    def max(self, operand: Value, dims: list[int]) -> Value:
        """Over `dims`, which are gone then."""
        return Value(lambda tensor: tensor.amax(dims), operand)

    def broadcast(self, operand: Value, is_new: list[bool]) -> Value:
        """With new dimensions of size 1 where `is_new`."""

        def compute(tensor: Tensor) -> Tensor:
            assert len(is_new) - sum(is_new) == tensor.ndim
            for dim, new in enumerate(is_new):
                tensor = tensor.unsqueeze(dim) if new else tensor
            return tensor

        return Value(compute, operand)

    def broadcast_in_dim(self, operand: Value, *, shape: list[int], broadcast_dims: list[int]) -> Value:
        """Of `shape`, the operand's dimensions being `broadcast_dims` of it."""

        def compute(tensor: Tensor) -> Tensor:
            sizes = [1] * len(shape)
            for dim, size in zip(broadcast_dims, tensor.shape, strict=True):
                sizes[dim] = size
            return tensor.reshape(sizes).expand(shape)

        return Value(compute, operand)

    def reshape(self, operand: Value, *, new_shape: list[int]) -> Value:
        """Of another shape."""
        return Value(lambda tensor: tensor.reshape(new_shape), operand)

    def take_along_axis(self, operand: Value, index: Value, *, dim: int) -> Value:
        """The elements at `index` of `dim`."""
        return Value(lambda tensor, at: tensor.gather(dim, at), operand, index)

    def iota(self, length: Value, start: Value, step: Value, *, dtype: DataType) -> Value:
        """start, start + step, …: (length,)."""
        return Value(
            lambda count, first, by: first + by * torch.arange(count.item(), dtype=_TORCH_DTYPES[dtype]),
            length,
            start,
            step,
        )
