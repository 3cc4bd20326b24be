"""A case whose operands are DTensors: results of the whole."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ranks import as_threads
from reference import DIFFERENTIABLE, Case, Result, incoming_gradients
from thunder_flce import linear_cross_entropy

R = Replicate()
# Tokens and the vocabulary, each along one dimension of a mesh.
BOTH = ((2, 2), (Shard(0), Shard(1)), (R, Shard(0)))


def on_mesh(case: Case, mesh, of_x, of_weight, of_target=None) -> Case:
    """The case on a mesh; the targets as they are where `of_target` is None."""

    def placed(tensor, placements):
        # A broadcast writes to what it is given, and threads share the case.
        return distribute_tensor(tensor.detach().clone(), mesh, placements).requires_grad_(tensor.requires_grad)

    return Case(
        placed(case.x, of_x),
        placed(case.weight, of_weight),
        None if case.bias is None else placed(case.bias, of_weight),
        case.target if of_target is None else distribute_tensor(case.target, mesh, of_target),
        case.class_weight,
        tuple((placed(x, of_x), placed(weight, of_weight)) for x, weight in case.terms),
    )


def loss_of(case: Case, **settings):
    return linear_cross_entropy(
        case.x, case.weight, case.target, linear_bias=case.bias, weight=case.class_weight, terms=case.terms, **settings
    )


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def divided(case: Case, shape, of_x, of_weight, of_target=None, grad=None, **settings) -> Result:
    """What all ranks of a mesh of that shape have together."""

    def run(rank):
        mesh = init_device_mesh("cpu", shape)
        placed = on_mesh(case, mesh, of_x, of_weight, of_target)
        results = loss_of(placed, **settings)
        loss, *outputs = results if isinstance(results, tuple) else (results,)
        tokens = tuple(p if isinstance(p, Shard) else R for p in placed.x.placements)
        for each in (loss, *outputs):
            assert isinstance(each, DTensor) == (each.ndim > 0 and any(p != R for p in tokens))
            assert not isinstance(each, DTensor) or (each.placements == tokens and each.shape == case.x.shape[:-1])
        names = settings.get("outputs", ())
        wanted = whole(loss) if grad is None else (whole(loss) * grad).sum()
        differentiable = [whole(each) for name, each in zip(names, outputs, strict=True) if name in DIFFERENTIABLE]
        upstream = incoming_gradients(case, names, loss.dtype)
        for each, of_each in zip(differentiable, upstream, strict=True):
            wanted = wanted + (each * of_each).sum() if each.requires_grad else wanted
        gradients = torch.autograd.grad(wanted, placed.needing_grad()) if placed.needing_grad() else ()
        for operand, gradient in zip(placed.needing_grad(), gradients, strict=True):
            assert gradient.placements == operand.placements and gradient.shape == operand.shape
        gathered = tuple(gradient.full_tensor() for gradient in gradients)
        return Result(whole(loss).detach(), gathered, tuple(whole(each).detach() for each in outputs))

    first, *others = as_threads(torch.Size(shape).numel(), run)
    for other in others:
        assert torch.equal(first.loss, other.loss)
        assert all(map(torch.equal, first.gradients, other.gradients))
    return first
