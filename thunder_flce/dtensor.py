"""DTensors as arguments of `linear_cross_entropy`: the parts of this rank, and what their results are together.

Along each dimension of the mesh, what is computed follows from two placements:

    linear_weight    input
    Shard(0)         Replicate        the vocabulary is divided: `vocab_parallel`
    Shard(0)         Shard, tokens    the tokens are, too: `sequence_parallel`
    Replicate        Shard, tokens    data parallel: losses and gradients of the weight are summed
    Replicate        Replicate        every rank does the same

A gradient has the placements of what it belongs to. A result is a plain tensor where all ranks have the same, and a
DTensor where each has that of its tokens.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DeviceMesh
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from thunder_flce.operation.arguments import check_pairs, check_token_inputs
from thunder_flce.operation.loss import OUTPUTS, Loss
from thunder_flce.vocab_parallel import VocabParallel

Placements = tuple[Placement, ...]

_IN_FSDP = (
    "of a weight that fully_shard has sharded, call the loss in the forward of the module that it wraps; where the "
    "ranks of data parallel training divide it for good, pass vocab_parallel=VocabParallel(group=mesh, "
    "data_parallel=True)"
)


def has_dtensor(value: Any) -> bool:
    """Whether it is a DTensor, or a list or tuple, such as terms, that has one."""
    if isinstance(value, (list, tuple)):
        return any(map(has_dtensor, value))
    return isinstance(value, DTensor)


def local_weights(arguments: Mapping[str, Any], parallel: VocabParallel) -> dict[str, Any]:
    """The arguments with this rank's rows in place of weights that are DTensors, beside plain hidden states.

    Args:
        arguments: of `linear_cross_entropy`, by name; not checked yet.
        parallel: the ranks that divide the vocabulary.

    The class weights stay a DTensor, which `whole_class_weight` gathers once all ranks have come so far.

    Raises:
        TypeError: for terms or token_inputs that are no sequences.
        ValueError: where a DTensor is none of the weights, or is not divided by its rows over these ranks.
    """
    check_pairs(arguments["terms"])
    check_token_inputs(arguments["token_inputs"])

    def local(name: str, value: Any) -> Any:
        if not isinstance(value, DTensor) or name == "weight":
            return value
        if not name.endswith(("weight", "linear_bias")):
            raise ValueError(
                f"{name} must be a plain tensor with vocab_parallel, but got a DTensor; without vocab_parallel, the "
                "placements of DTensors say who has which part"
            )
        mesh, is_divided = value.device_mesh, value.placements == (Shard(0),)
        ranks = dist.get_process_group_ranks(parallel.process_group)
        if not is_divided or dist.get_process_group_ranks(mesh.get_group()) != ranks:
            raise ValueError(
                f"{name} must be Shard(0) over the ranks of vocab_parallel and no others, but is {value.placements} "
                f"on {mesh}"
            )
        return _arrived(value.to_local())

    changed: dict[str, Any] = {name: local(name, value) for name, value in arguments.items()}
    changed["terms"] = tuple(
        (local(f"terms[{number}].input", x), local(f"terms[{number}].weight", weight))
        for number, (x, weight) in enumerate(arguments["terms"])
    )
    return changed


def whole_class_weight(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with all class weights, where a DTensor has a part of them; waits for the ranks with the others."""
    return {**arguments, "weight": _whole(arguments["weight"])}


@dataclass(frozen=True, kw_only=True)
class DividedCall:
    """A call of `linear_cross_entropy` with DTensors, as the call that this rank makes of its parts."""

    arguments: dict[str, Any]
    """Plain tensors: this rank's parts"""
    vocab_parallel: VocabParallel | None
    mesh: DeviceMesh
    of_tokens: Placements
    """Where tokens are"""
    shape: torch.Size
    """(...) of all tokens"""
    summed_over: tuple[int, ...]
    """The dimensions of the mesh whose ranks have losses of their own"""

    @classmethod
    def of(cls, arguments: Mapping[str, Any], loss: Loss) -> "DividedCall":
        """The parts of this rank.

        Args:
            arguments: of `linear_cross_entropy`, by name; not checked yet.
            loss: the loss.

        Raises:
            TypeError: for a plain tensor where a DTensor is needed; the message names it and the cure.
            ValueError: for placements that have no meaning here, likewise.
        """
        check_pairs(arguments["terms"])
        input, weight = (_checked(name, arguments[name], arguments) for name in ("input", "linear_weight"))
        mesh, of_input, of_weight = input.device_mesh, input.placements, weight.placements
        divides_tokens = _divides("input", input, range(input.ndim - 1), expected="a Shard of a dimension of tokens")
        divides_vocab = _divides(
            "linear_weight", weight, range(1), expected="Shard(0), as ColwiseParallel has it", cure=f"; {_IN_FSDP}"
        )
        if sum(divides_vocab) > 1:
            raise ValueError(
                f"linear_weight must be Shard(0) along one dimension of the mesh at most, but is {of_weight}; "
                f"{_IN_FSDP}"
            )
        summed_over = tuple(
            at for at in range(mesh.ndim) if divides_tokens[at] and not divides_vocab[at] and mesh.size(at) > 1
        )
        _check_sums(input, summed_over, arguments, loss)
        parallel = None
        if any(divides_vocab):
            at = divides_vocab.index(True)
            parallel = VocabParallel(group=mesh.get_group(at), sequence_parallel=divides_tokens[at])
            _check_even(input, at)
        of_tokens = tuple(p if is_part else Replicate() for p, is_part in zip(of_input, divides_tokens, strict=True))
        grads = tuple(Partial() if at in summed_over else p for at, p in enumerate(of_weight))
        tokens = input.shape[:-1]

        def part(name: str, tensor: Any) -> Any:
            """Of an operand of a linear."""
            if name.endswith("input"):
                return _local(_checked(name, tensor, arguments), of_input, of_input)
            return None if tensor is None else _local(_checked(name, tensor, arguments), of_weight, grads)

        # Class weights are gathered once the ranks that divide the vocabulary have agreed.
        local: dict[str, Any] = {
            name: tensor if name == "weight" and parallel else _whole(tensor) for name, tensor in arguments.items()
        }
        for name in ("input", "linear_weight", "linear_bias"):
            local[name] = part(name, arguments[name])
        local["terms"] = tuple(
            (part(f"terms[{number}].input", x), part(f"terms[{number}].weight", w))
            for number, (x, w) in enumerate(arguments["terms"])
        )
        shape, several = local["input"].shape[:-1], arguments["target_weights"] is not None

        def of_each_token(name: str, tensor: Any) -> Any:
            """Of a tensor with a number a token or, with target weights, several."""
            has_several = several and name in ("target", "target_weights") and isinstance(tensor, Tensor)
            last = tensor.shape[-1:] if has_several else ()
            return _local_tokens(name, tensor, (mesh, of_tokens), (tokens + last, shape + last))

        for name in ("target", "token_weights", "target_weights"):
            local[name] = of_each_token(name, arguments[name])
        local["token_inputs"] = tuple(
            of_each_token(f"token_inputs[{number}]", tensor) for number, tensor in enumerate(arguments["token_inputs"])
        )
        return cls(
            arguments=local,
            vocab_parallel=parallel,
            mesh=mesh,
            of_tokens=of_tokens,
            shape=tokens,
            summed_over=summed_over,
        )

    def whole(self, results: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """This rank's results as those of all: sums of numbers, and DTensors where each rank has its own tokens."""
        return tuple(self._of_tokens(result) if result.ndim else self._sum(result) for result in results)

    def _sum(self, result: Tensor) -> Tensor:
        for at in self.summed_over:
            result = _Sum.apply(result, self.mesh.get_group(at))
        return result

    def _of_tokens(self, result: Tensor) -> Tensor:
        if all(isinstance(placement, Replicate) for placement in self.of_tokens):
            return result
        strides = [math.prod(self.shape[at + 1 :]) for at in range(len(self.shape))]
        return DTensor.from_local(
            result, self.mesh, self.of_tokens, run_check=False, shape=self.shape, stride=tuple(strides)
        )


class _Sum(torch.autograd.Function):
    """The sum over ranks of a number, whose upstream gradient all of them have."""

    @staticmethod
    def forward(ctx: Any, number: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = number.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Arrival(torch.autograd.Function):
    """The result of an asynchronous collective, once it has arrived."""

    @staticmethod
    def forward(ctx: Any, tensor: AsyncCollectiveTensor) -> Tensor:
        return tensor.wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _checked(name: str, tensor: Any, arguments: Mapping[str, Any]) -> DTensor:
    """An operand of a linear: a DTensor on the mesh of all."""
    if not isinstance(tensor, DTensor):
        others = ", ".join(other for other, value in arguments.items() if isinstance(value, DTensor))
        raise TypeError(
            f"{name} must be a DTensor where others are ({others or 'terms'}), but got {type(tensor).__name__}; pass "
            f"DTensor.from_local({name}, mesh, placements), which says what the other ranks have; {_IN_FSDP}"
        )
    first = arguments["input"]
    if isinstance(first, DTensor) and tensor.device_mesh != first.device_mesh:
        cure = "" if name.endswith("input") else f"; {_IN_FSDP}"
        raise ValueError(f"{name} must be on input's mesh, {first.device_mesh}, but is on {tensor.device_mesh}{cure}")
    return tensor


def _divides(name: str, tensor: DTensor, dimensions: range, *, expected: str, cure: str = "") -> list[bool]:
    """Whether each dimension of the mesh divides one of these dimensions of a tensor; it may divide no others."""
    divides = [type(placement) is Shard and placement.dim in dimensions for placement in tensor.placements]
    for at, placement in enumerate(tensor.placements):
        if not divides[at] and not isinstance(placement, Replicate):
            raise ValueError(
                f"{name} must be Replicate() or {expected}, along each dimension of the mesh, but is {placement!r} "
                f"along {_dimension(tensor.device_mesh, at)}; redistribute it first{cure}"
            )
    return divides


def _dimension(mesh: DeviceMesh, at: int) -> str:
    return f"dimension {at}" if mesh.mesh_dim_names is None else repr(mesh.mesh_dim_names[at])


def _check_sums(input: DTensor, summed_over: tuple[int, ...], arguments: Mapping[str, Any], loss: Loss) -> None:
    """Raises where the parts of tokens have means of their own."""
    if not summed_over:
        return
    where = f"input is {input.placements[summed_over[0]]!r} along {_dimension(input.device_mesh, summed_over[0])}"
    if loss.reduction == "mean" and arguments["num_items"] is None:
        raise ValueError(
            f'reduction "mean" needs num_items, the number of valid targets on all ranks, because {where}: means of '
            "the ranks' own tokens have no mean in common"
        )
    means = [name for name in loss.outputs if name in OUTPUTS and OUTPUTS[name].is_mean]
    if means:
        raise ValueError(f"outputs must not have {means[0]!r}, a mean over tokens, because {where}")


def _check_even(input: DTensor, at: int) -> None:
    placement = input.placements[at]
    # Earlier dimensions of the mesh may have divided it before.
    ranks = math.prod(input.device_mesh.size(k) for k in range(at + 1) if input.placements[k] == placement)
    if isinstance(placement, Shard) and input.shape[placement.dim] % ranks:
        raise ValueError(
            f"input's dimension {placement.dim} of {input.shape[placement.dim]} tokens must be a multiple of the "
            f"{ranks} ranks that have a part of it, because it is {placement!r} along "
            f"{_dimension(input.device_mesh, at)}, which divides the vocabulary, too; pad it, or redistribute it to "
            "Replicate()"
        )


def _local(tensor: DTensor, placements: Placements, grads: Placements) -> Tensor:
    """This rank's part; its gradient, of placements `grads`, arrives in those of the tensor."""
    return _arrived(tensor.redistribute(placements=placements).to_local(grad_placements=grads))


def _local_tokens(
    name: str, tensor: Any, placed: tuple[DeviceMesh, Placements], shapes: tuple[torch.Size, torch.Size]
) -> Any:
    """This rank's part of a tensor with a number a token, (...), or several, (..., K).

    Args:
        name: of the argument.
        tensor: a DTensor, or a plain tensor of all tokens, the same on all ranks, or of this rank's.
        placed: the mesh, and where tokens are.
        shapes: for all tokens, and for this rank's.
    """
    (mesh, of_tokens), (whole, part) = placed, shapes
    if not isinstance(tensor, Tensor) or (not isinstance(tensor, DTensor) and tensor.shape == part):
        return tensor
    if tensor.shape != whole:
        of_part = "" if part == whole else f", or a plain tensor of this rank's tokens, {tuple(part)}"
        raise ValueError(
            f"{name} must have input's shape without its last dimension, {tuple(whole)}{of_part}, but got "
            f"{tuple(tensor.shape)}"
        )
    if not isinstance(tensor, DTensor):
        tensor = DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
    elif tensor.device_mesh != mesh:
        raise ValueError(f"{name} must be on input's mesh, {mesh}, but is on {tensor.device_mesh}")
    return _arrived(tensor.redistribute(placements=of_tokens).to_local())


def _whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _arrived(tensor: Tensor) -> Tensor:
    """The tensor as a plain one, after waiting for what other ranks have sent."""
    return _Arrival.apply(tensor) if isinstance(tensor, AsyncCollectiveTensor) else tensor
