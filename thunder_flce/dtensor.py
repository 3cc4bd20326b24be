"""DTensors as arguments of `linear_cross_entropy`: the local parts of this rank, and the placements of the results.

Along each dimension of the mesh, two placements decide what is computed:

    linear_weight    input
    Shard(0)         Replicate        the vocabulary is divided: `vocab_parallel`
    Shard(0)         Shard, tokens    the tokens are, too: `sequence_parallel`
    Replicate        Shard, tokens    data parallel: losses and gradients of the weight are summed
    Replicate        Replicate        every rank does the same

A gradient has the placements of its tensor. A result is a plain tensor if it is the same on all ranks, and a DTensor if
each rank has the part of its tokens. This module is imported only if there is a DTensor: PyTorch may be built without.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DeviceMesh
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from thunder_flce.agreement import agreement_on
from thunder_flce.operation.call import CLASS, COLUMN, HIDDEN, TOKEN, Call, RankPart
from thunder_flce.operation.loss import OUTPUTS, Loss
from thunder_flce.options import Options
from thunder_flce.vocab_parallel import VocabParallel

Placements = tuple[Placement, ...]

_IN_FSDP = (
    "for a weight sharded by fully_shard, call the loss in the forward of the module that fully_shard wraps; if data "
    "parallel ranks keep the weight divided during the call, pass vocab_parallel=VocabParallel(group=mesh, "
    "data_parallel=True)"
)


def with_local_weights(call: Call, parallel: VocabParallel) -> Call:
    """Returns a call with `vocab_parallel` in which DTensor weights are this rank's rows; class weights stay DTensors.

    Raises:
        ValueError: if a DTensor is not a weight, or its rows are not divided among these ranks.
    """
    ranks = dist.get_process_group_ranks(parallel.process_group)

    def local(name: str, value: Any) -> Any:
        role = call.roles[name]
        if not isinstance(value, DTensor) or role == CLASS:
            return value
        if role != COLUMN:
            raise ValueError(
                f"{name} must be a plain tensor with vocab_parallel, but got a DTensor; leave vocab_parallel out, and "
                "the placements of the DTensors say which rank has which part"
            )
        mesh = value.device_mesh
        if value.placements != (Shard(0),) or dist.get_process_group_ranks(mesh.get_group()) != ranks:
            raise ValueError(
                f"{name} must be Shard(0) over the ranks of vocab_parallel and no others, but is {value.placements} on "
                f"{mesh}"
            )
        return _waited(value.to_local())

    return call.map(local)


def on_mesh(call: Call, options: Options) -> Callable[[], RankPart]:
    """Does what `ranks.on_ranks` does for calls in which some tensors are DTensors.

    Raises:
        TypeError: if a tensor is plain that must be a DTensor; the message names it and the cure.
        ValueError: for unsupported placements, likewise; and as `agreement.agreement_on`.
    """
    tensors, loss = call.tensors, call.loss
    operands = (name for name, role in call.roles.items() if role in (HIDDEN, COLUMN))
    for name in ("input", "linear_weight", *operands):
        _check_operand(name, tensors)
    input, weight = tensors["input"], tensors["linear_weight"]
    mesh, placements, weight_placements = input.device_mesh, input.placements, weight.placements
    divides_tokens = _divides("input", input, range(input.ndim - 1), expected="a Shard of a dimension of tokens")
    divides_columns = _divides(
        "linear_weight", weight, range(1), expected="Shard(0), as ColwiseParallel has it", cure=f"; {_IN_FSDP}"
    )
    if sum(divides_columns) > 1:
        raise ValueError(
            f"linear_weight must be Shard(0) along one dimension of the mesh at most, but is {weight_placements}; "
            f"{_IN_FSDP}"
        )
    # Dimensions of the mesh whose ranks have different tokens and the whole weight: sums are reduced over them.
    summed = [at for at in range(mesh.ndim) if divides_tokens[at] and not divides_columns[at] and mesh.size(at) > 1]
    _check_sums(input, summed, tensors, loss)
    agree = None
    if any(divides_columns):
        at = divides_columns.index(True)
        _check_even(input, at)
        parallel = VocabParallel(group=mesh.get_group(at), sequence_parallel=divides_tokens[at])
        agree = agreement_on(parallel, call, options)
    weight_grads = tuple(Partial() if at in summed else placement for at, placement in enumerate(weight_placements))
    sum_placements = tuple(Partial() if at in summed else Replicate() for at in range(mesh.ndim))
    shape = input.shape[:-1]

    def local_part(name: str, value: Any, local_input: Tensor) -> Any:
        role = call.roles[name]
        if role == HIDDEN:
            return local_input if name == "input" else _local(value, placements, placements)
        if role == COLUMN:
            return _local(value, weight_placements, weight_grads)
        if role != TOKEN or not isinstance(value, Tensor):
            return value.full_tensor() if isinstance(value, DTensor) else value
        has_several = "target_weights" in tensors and name in ("target", "target_weights")
        return _tokens_part(name, value, input, local_input.shape[:-1], value.shape[-1:] if has_several else ())

    def global_result(result: Tensor) -> Tensor:
        """Turns this rank's result into that of all ranks: a DTensor for numbers per token, the sum for a scalar."""
        if result.ndim and any(divides_tokens):
            # The backward may read the result, and autograd does not notice in-place changes of a DTensor's local part.
            whole = torch.Size((*shape, *result.shape[len(shape) :]))
            strides = tuple(math.prod(whole[at + 1 :]) for at in range(len(whole)))
            return DTensor.from_local(result.clone(), mesh, placements, run_check=False, shape=whole, stride=strides)
        return DTensor.from_local(result, mesh, sum_placements, run_check=False).full_tensor() if summed else result

    def agreed_part() -> RankPart:
        # Agree first: redistributing runs collectives.
        shard = None if agree is None else agree()
        local_input = _local(input, placements, placements)
        part = replace(call.map(lambda name, value: local_part(name, value, local_input)), shard=shard)
        return part, lambda results: tuple(map(global_result, results))

    return agreed_part


def _tokens_part(name: str, tensor: Tensor, input: DTensor, tokens: torch.Size, last: torch.Size | tuple[()]) -> Tensor:
    """Returns this rank's tokens of a DTensor, or of a plain tensor that has all tokens, or has only those of the rank.

    `tokens` is the shape of this rank's tokens, and `last` that of a token's values.
    """
    whole, part = input.shape[:-1] + last, tokens + last
    if not isinstance(tensor, DTensor) and tensor.shape == part:
        return tensor
    if tensor.shape != whole:
        alternative = "" if part == whole else f", or a plain tensor of this rank's tokens, {tuple(part)}"
        raise ValueError(
            f"{name} must have input's shape without its last dimension, {tuple(whole)}{alternative}, but got "
            f"{tuple(tensor.shape)}"
        )
    mesh = input.device_mesh
    if not isinstance(tensor, DTensor):
        tensor = DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
    elif tensor.device_mesh != mesh:
        raise ValueError(f"{name} must be on input's mesh, {mesh}, but is on {tensor.device_mesh}")
    return _local(tensor, input.placements)


class _Wait(torch.autograd.Function):
    """Waits for the result of an asynchronous collective."""

    @staticmethod
    def forward(ctx: Any, tensor: AsyncCollectiveTensor) -> Tensor:
        return tensor.wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _check_operand(name: str, tensors: Mapping[str, Any]) -> None:
    """Raises an error if an operand of a linear is not a DTensor on input's mesh."""
    tensor = tensors.get(name)
    if not isinstance(tensor, DTensor):
        dtensors = {other.partition("[")[0] for other, value in tensors.items() if isinstance(value, DTensor)}
        raise TypeError(
            f"{name} must be a DTensor because others are ({', '.join(sorted(dtensors))}), but got "
            f"{type(tensor).__name__}; pass DTensor.from_local({name}, mesh, placements), which says what the other "
            f"ranks have; {_IN_FSDP}"
        )
    input = tensors["input"]
    if tensor.device_mesh != input.device_mesh:
        cure = "" if name.endswith("input") else f"; {_IN_FSDP}"
        raise ValueError(f"{name} must be on input's mesh, {input.device_mesh}, but is on {tensor.device_mesh}{cure}")


def _divides(name: str, tensor: DTensor, dimensions: range, *, expected: str, cure: str = "") -> list[bool]:
    """For each dimension of the mesh, whether it divides one of `dimensions` of a tensor. It may divide no others."""
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


def _check_sums(input: DTensor, summed_over: Sequence[int], tensors: Mapping[str, Any], loss: Loss) -> None:
    """Raises an error for means over tokens if each rank would take the mean over its own tokens."""
    if not summed_over:
        return
    where = f"input is {input.placements[summed_over[0]]!r} along {_dimension(input.device_mesh, summed_over[0])}"
    if loss.reduction == "mean" and "num_items" not in tensors:
        raise ValueError(
            f'reduction "mean" needs num_items, the number of valid targets on all ranks, because {where}: each rank '
            "would divide by the number of its own targets"
        )
    means = [name for name in loss.outputs if name in OUTPUTS and OUTPUTS[name].is_mean]
    if means:
        raise ValueError(f"outputs must not have {means[0]!r}, a mean over tokens, because {where}")


def _check_even(input: DTensor, at: int) -> None:
    placement = input.placements[at]
    # Earlier dimensions of the mesh may divide the same dimension of input.
    ranks = math.prod(input.device_mesh.size(k) for k in range(at + 1) if input.placements[k] == placement)
    if isinstance(placement, Shard) and input.shape[placement.dim] % ranks:
        raise ValueError(
            f"input's dimension {placement.dim} of {input.shape[placement.dim]} tokens must be a multiple of the "
            f"{ranks} ranks that have a part of it, because it is {placement!r} along "
            f"{_dimension(input.device_mesh, at)}, which also divides the vocabulary; pad input, or redistribute it to "
            "Replicate()"
        )


def _local(tensor: DTensor, placements: Placements, grads: Placements | None = None) -> Tensor:
    """Returns this rank's part of a tensor in `placements`; `grads` are the placements of the part's gradient."""
    return _waited(tensor.redistribute(placements=placements).to_local(grad_placements=grads))


def _waited(tensor: Tensor) -> Tensor:
    """Returns a plain tensor; waits for an asynchronous collective."""
    return _Wait.apply(tensor) if isinstance(tensor, AsyncCollectiveTensor) else tensor
