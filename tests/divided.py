"""Runs a case divided among ranks, by vocabulary and tokens or as DTensors, and joins the ranks' results."""

import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._pytree import tree_map, tree_map_only

from ranks import as_threads
from reference import OF_TOKENS, Case, Result, differentiate, incoming_gradients, ours, results_of
from thunder_flce import VocabParallel

ALL = ...
R = Replicate()
# Mesh shape, placements of inputs, placements of weights: tokens and vocabulary along one mesh dimension each.
BOTH = ((2, 2), (Shard(0), Shard(1)), (R, Shard(0)))


def part_of(case: Case, rows: slice, tokens=ALL) -> Case:
    """Returns a rank's part of a case, as new leaves: some rows of the vocabulary and some tokens."""

    def leaf(tensor, index):
        return tensor.detach()[index].clone().requires_grad_(tensor.requires_grad)

    part = case.mapped(partial(leaf, index=tokens), partial(leaf, index=rows))
    return replace(part, target=case.target[tokens].clone())


def parts(sizes) -> list[slice]:
    """Returns consecutive slices of these sizes."""
    return [slice(stop - size, stop) for size, stop in zip(sizes, itertools.accumulate(sizes), strict=True)]


def rank_result(rank: int, case: Case, sizes, grad=None, *, counts=None, how=None, **settings) -> Result:
    """Returns one rank's result; a loss per token is that of the rank's tokens.

    Each rank has `sizes` rows of the vocabulary and `counts` tokens, or all tokens. `how` has fields of
    `VocabParallel`. With "data_parallel", the layers before average the gradients of `x` over ranks: the result's
    gradients of `x` are divided by the number of ranks, upstream gradients of tokens multiplied.
    """
    tokens, names = ALL if counts is None else parts(counts)[rank], settings.get("outputs", ())
    factor = len(sizes) if (how or {}).get("data_parallel") else 1
    part = part_of(case, parts(sizes)[rank], tokens)
    dtype = torch.float64 if case.x.dtype is torch.float64 else torch.float32
    part.incoming[names, dtype] = [output[tokens] * factor for output in incoming_gradients(case, names, dtype)]
    for name in {*OF_TOKENS} & {*settings}:
        settings[name] = tree_map(lambda tensor: tensor[tokens], settings[name])
    grad = grad[tokens] * factor if grad is not None and grad.ndim else grad
    group = VocabParallel(group=dist.group.WORLD, **how) if how else dist.group.WORLD
    result = ours(part, grad, vocab_parallel=group, **settings)
    inputs = {id(x) for x in (part.x, *(x for x, _ in part.terms))}
    pairs = zip(part.needing_grad(), result.gradients, strict=True)
    gradients = (gradient / factor if id(operand) in inputs else gradient for operand, gradient in pairs)
    return Result(result.loss.detach(), tuple(gradients), tuple(output.detach() for output in result.outputs))


def assert_refused(function, arguments, *changes) -> None:
    """Asserts that a function raises an error for its arguments after each change; a change comes with its message."""
    for change, message in changes:
        with pytest.raises((TypeError, ValueError), match=message):
            function(**arguments | change)


def has_same_bits(one, other) -> bool:
    """Whether two tensors are equal, with NaN equal to NaN."""
    return one.dtype == other.dtype and torch.equal(one.nan_to_num(7), other.nan_to_num(7))


def joined(case: Case, results: list[Result], counts=None) -> Result:
    """Joins the ranks' results to that of the whole case; asserts that replicated results are equal on all ranks."""

    def whole(tensors, *, is_divided):
        if is_divided:
            return torch.cat(tensors)
        assert all(has_same_bits(tensor, tensors[0]) for tensor in tensors), "differs between ranks"
        return tensors[0]

    vocab, divides_tokens = case.weight.shape[0], counts is not None
    gradients = (
        whole(tensors, is_divided=divides_tokens or operand.shape[0] == vocab)
        for operand, *tensors in zip(case.needing_grad(), *(result.gradients for result in results), strict=True)
    )
    loss, *outputs = (
        whole(tensors, is_divided=divides_tokens and tensors[0].ndim > 0)
        for tensors in zip(*((result.loss, *result.outputs) for result in results), strict=True)
    )
    return Result(loss, tuple(gradients), tuple(outputs))


def divided(case: Case, sizes, grad=None, *, counts=None, **settings) -> Result:
    """Returns the loss and gradients of a case that is divided among threads; see `rank_result`."""
    run = partial(rank_result, case=case, sizes=sizes, grad=grad, counts=counts, **settings)
    return joined(case, as_threads(len(sizes), run), counts)


def placed_case(case: Case, mesh, x_placements, weight_placements) -> Case:
    """Returns the case with operands as DTensors on a mesh; targets stay whole."""

    def placed(tensor, placements):
        # A broadcast overwrites its argument, and threads share the case: clone.
        return distribute_tensor(tensor.detach().clone(), mesh, placements).requires_grad_(tensor.requires_grad)

    return case.mapped(partial(placed, placements=x_placements), partial(placed, placements=weight_placements))


def mesh_rank_result(rank: int, case: Case, placements, grad=None, **settings) -> Result:
    """Returns the gathered results on one rank; `placements` are the mesh's shape, and those of `placed_case`."""
    shape, *operand_placements = placements
    placed = placed_case(case, init_device_mesh(case.x.device.type, shape), *operand_placements)
    placed.incoming = case.incoming
    results = results_of(placed, **settings)
    token_placements = tuple(p if isinstance(p, Shard) else R for p in placed.x.placements)
    for result in results if isinstance(results, tuple) else (results,):
        assert isinstance(result, DTensor) == (result.ndim > 0 and any(p != R for p in token_placements))
        if isinstance(result, DTensor):
            assert result.placements == token_placements and result.shape in (case.x.shape[:-1], case.target.shape)
    results = tree_map_only(DTensor, DTensor.full_tensor, results)
    result = differentiate(results, placed, grad, settings.get("outputs", ()))
    for operand, gradient in zip(placed.needing_grad(), result.gradients, strict=True):
        assert gradient.placements == operand.placements and gradient.shape == operand.shape
    gradients = tuple(gradient.full_tensor() for gradient in result.gradients)
    return Result(result.loss.detach(), gradients, tuple(output.detach() for output in result.outputs))


def mesh_result(case: Case, placements, grad=None, **settings) -> Result:
    """Returns the result of a case on a mesh of threads, the same on all ranks; see `mesh_rank_result`."""
    run = partial(mesh_rank_result, case=case, placements=placements, grad=grad, **settings)
    first, *others = as_threads(torch.Size(placements[0]).numel(), run)
    for other in others:
        assert all(map(has_same_bits, (first.loss, *first.gradients), (other.loss, *other.gradients)))
    return first
