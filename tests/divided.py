"""Runs a case divided among ranks, by vocabulary and tokens or as DTensors, and joins the ranks' results."""

import itertools
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._pytree import tree_map

from ranks import as_threads
from reference import OF_TOKENS, Case, Result, differentiate, incoming_gradients, ours, results_of
from thunder_flce import VocabParallel

ALL = ...
R = Replicate()
# Mesh shape, placements of inputs, placements of weights: tokens and vocabulary along one mesh dimension each.
BOTH = ((2, 2), (Shard(0), Shard(1)), (R, Shard(0)))


def part_of(case: Case, rows: slice, tokens=ALL) -> Case:
    """Returns a rank's part of a case, as new leaves: some rows of the vocabulary and some tokens."""

    def leaf(of):
        return lambda tensor: tensor.detach()[of].clone().requires_grad_(tensor.requires_grad)

    return replace(case.mapped(leaf(tokens), leaf(rows)), target=case.target[tokens].clone())


def parts(sizes) -> list[slice]:
    """Returns consecutive slices of these sizes."""
    return [slice(stop - size, stop) for size, stop in zip(sizes, itertools.accumulate(sizes), strict=True)]


def of_rank(rank: int, case: Case, sizes, grad=None, *, counts=None, how=None, **settings) -> Result:
    """Returns one rank's result; a loss per token is that of the rank's tokens.

    Args:
        rank: the rank.
        case: the whole case.
        sizes: number of vocabulary rows of each rank.
        grad: upstream gradient of the whole loss.
        counts: number of tokens of each rank; None if all ranks have all tokens.
        how: fields of `VocabParallel`. With "data_parallel", the layers before average the gradients of `x` over ranks:
            the result's gradients of `x` are divided by the number of ranks, upstream gradients of tokens multiplied.
        **settings: arguments of `linear_cross_entropy`.
    """
    tokens, names = ALL if counts is None else parts(counts)[rank], settings.get("outputs", ())
    factor = len(sizes) if (how or {}).get("data_parallel") else 1
    part = part_of(case, parts(sizes)[rank], tokens)
    dtype = torch.float64 if case.x.dtype is torch.float64 else torch.float32
    part.incoming[names, dtype] = [each[tokens] * factor for each in incoming_gradients(case, names, dtype)]
    for name in {*OF_TOKENS} & {*settings}:
        of_all = settings[name]
        settings[name] = tuple(each[tokens] for each in of_all) if isinstance(of_all, tuple) else of_all[tokens]
    grad = grad[tokens] * factor if grad is not None and grad.ndim else grad
    group = VocabParallel(group=dist.group.WORLD, **how) if how else dist.group.WORLD
    if factor > 1 and grad is None and settings.get("reduction") == "none":
        grad = torch.full(part.x.shape[:-1], float(factor), device=part.x.device)
    result = ours(part, grad, vocab_parallel=group, **settings)
    inputs = {id(x) for x in (part.x, *(x for x, _ in part.terms))}
    pairs = zip(part.needing_grad(), result.gradients, strict=True)
    gradients = (gradient / factor if id(operand) in inputs else gradient for operand, gradient in pairs)
    return Result(result.loss.detach(), tuple(gradients), tuple(each.detach() for each in result.outputs))


def has_same_bits(one, other) -> bool:
    """Whether two tensors are equal, with NaN equal to NaN."""
    return one.dtype == other.dtype and torch.equal(one.nan_to_num(7), other.nan_to_num(7))


def joined(case: Case, results: list[Result], counts=None) -> Result:
    """Joins the ranks' results to that of the whole case; asserts that replicated results are equal on all ranks."""

    def whole(each, *, is_divided):
        if is_divided:
            return torch.cat(each)
        assert all(has_same_bits(one, each[0]) for one in each), "differs between ranks"
        return each[0]

    vocab, of_tokens = case.weight.shape[0], counts is not None
    gradients = (
        whole(each, is_divided=of_tokens or operand.shape[0] == vocab)
        for operand, *each in zip(case.needing_grad(), *(result.gradients for result in results), strict=True)
    )
    loss, *outputs = (
        whole(each, is_divided=of_tokens and each[0].ndim > 0)
        for each in zip(*((result.loss, *result.outputs) for result in results), strict=True)
    )
    return Result(loss, tuple(gradients), tuple(outputs))


def divided(case: Case, sizes, grad=None, *, counts=None, **settings) -> Result:
    """Returns the loss and gradients of a case that is divided among threads; see `of_rank`."""
    run = partial(of_rank, case=case, sizes=sizes, grad=grad, counts=counts, **settings)
    return joined(case, as_threads(len(sizes), run), counts)


def on_mesh(case: Case, mesh, of_x, of_weight) -> Case:
    """Returns the case with operands as DTensors on a mesh; targets stay whole."""

    def placed(tensor, placements):
        # A broadcast overwrites its argument, and threads share the case: clone.
        return distribute_tensor(tensor.detach().clone(), mesh, placements).requires_grad_(tensor.requires_grad)

    return case.mapped(partial(placed, placements=of_x), partial(placed, placements=of_weight))


def of_mesh(rank: int, case: Case, placements, grad=None, **settings) -> Result:
    """Returns the gathered results on one rank; `placements` are those of `on_mesh`, after the mesh's shape."""
    shape, *of_operands = placements
    placed = on_mesh(case, init_device_mesh(case.x.device.type, shape), *of_operands)
    results = results_of(placed, **settings)
    of_tokens = tuple(p if isinstance(p, Shard) else R for p in placed.x.placements)
    for each in results if isinstance(results, tuple) else (results,):
        assert isinstance(each, DTensor) == (each.ndim > 0 and any(p != R for p in of_tokens))
        assert not isinstance(each, DTensor) or (each.placements == of_tokens and each.shape == case.x.shape[:-1])
    placed.incoming = case.incoming
    results = tree_map(lambda each: each.full_tensor() if isinstance(each, DTensor) else each, results)
    found = differentiate(results, placed, grad, settings.get("outputs", ()))
    for operand, gradient in zip(placed.needing_grad(), found.gradients, strict=True):
        assert gradient.placements == operand.placements and gradient.shape == operand.shape
    gathered = tuple(gradient.full_tensor() for gradient in found.gradients)
    return Result(found.loss.detach(), gathered, tuple(each.detach() for each in found.outputs))


def on_a_mesh(case: Case, placements, grad=None, **settings) -> Result:
    """Returns the result of a case on a mesh of threads, the same on all ranks."""
    run = partial(of_mesh, case=case, placements=placements, grad=grad, **settings)
    first, *others = as_threads(torch.Size(placements[0]).numel(), run)
    for other in others:
        assert all(map(has_same_bits, (first.loss, *first.gradients), (other.loss, *other.gradients)))
    return first
