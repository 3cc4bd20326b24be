"""A case whose vocabulary is divided among ranks, and its tokens too where they are: results of the whole."""

import itertools

import torch
import torch.distributed as dist

from ranks import as_threads
from reference import DIFFERENTIABLE, OF_TOKENS, Case, Result, incoming_gradients, ours
from thunder_flce import VocabParallel, linear_cross_entropy


def part_of(case: Case, rows: slice) -> Case:
    """What one rank has of a case: leaves of its own, whose rows of the vocabulary are `rows`."""

    def leaf(tensor, rows=slice(None)):
        return None if tensor is None else tensor.detach()[rows].clone().requires_grad_(tensor.requires_grad)

    terms = tuple((leaf(x), leaf(weight, rows)) for x, weight in case.terms)
    return Case(
        leaf(case.x), leaf(case.weight, rows), leaf(case.bias, rows), case.target.clone(), case.class_weight, terms
    )


def parts(sizes) -> list[slice]:
    """The rows of the vocabulary that each rank has."""
    return [slice(stop - size, stop) for size, stop in zip(sizes, itertools.accumulate(sizes), strict=True)]


def has_same_bits(one, other) -> bool:
    """NaN included."""
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(7), other.nan_to_num(7))


def joined(case: Case, results: list[Result]) -> Result:
    """The result of the whole vocabulary, once it is clear that all ranks have the same loss, outputs and dX."""
    whole = []
    for operand, *gradients in zip(case.needing_grad(), *(result.gradients for result in results), strict=True):
        if operand.shape[0] == case.weight.shape[0]:
            whole.append(torch.cat(gradients))
        else:
            assert all(has_same_bits(gradient, gradients[0]) for gradient in gradients), "dX differs between ranks"
            whole.append(gradients[0])
    first = results[0]
    for result in results:
        for one, other in zip((result.loss, *result.outputs), (first.loss, *first.outputs), strict=True):
            assert one.dtype == other.dtype and has_same_bits(one, other)
    return Result(first.loss, tuple(whole), first.outputs)


def divided(case: Case, sizes, grad=None, *, parallel=None, **settings) -> Result:
    """The loss and gradients of a case whose vocabulary is divided among ranks, in parts of such sizes."""

    def run(rank):
        vocab_parallel = dist.group.WORLD if parallel is None else parallel(rank)
        return ours(part_of(case, parts(sizes)[rank]), grad, vocab_parallel=vocab_parallel, **settings)

    return joined(case, as_threads(len(sizes), run))


def divided_tokens(case: Case, sizes, grad=None, *, counts=None, **settings) -> Result:
    """The same where each rank has an equal part of the tokens; its loss, if there is one a token, is of these.

    With counts, ranks have so many tokens each, and what comes before averages the gradients of `x` over them: those of
    the result are so much smaller. Upstream gradients of single tokens are so much larger.
    """
    ranks = len(sizes)
    factor = 1 if counts is None else ranks
    of_ranks = parts(counts or [case.target.shape[0] // ranks] * ranks)

    def run(rank):
        mine = of_ranks[rank]
        part = part_of(case, parts(sizes)[rank])
        part.x = case.x.detach()[mine].clone().requires_grad_(case.x.requires_grad)
        part.terms = tuple(
            (x.detach()[mine].clone().requires_grad_(x.requires_grad), weight) for x, weight in part.terms
        )
        part.target = case.target[mine].clone()
        how = {"data_parallel" if counts else "sequence_parallel": True}
        parallel = VocabParallel(group=dist.group.WORLD, **how)
        of_tokens = grad[mine] if grad is not None and grad.ndim else grad
        names, given = settings.get("outputs", ()), dict(settings)
        for name in OF_TOKENS:
            if name in given:
                of_all = given[name]
                given[name] = tuple(each[mine] for each in of_all) if isinstance(of_all, tuple) else of_all[mine]
        results = linear_cross_entropy(
            part.x, part.weight, part.target, linear_bias=part.bias, weight=part.class_weight, terms=part.terms,
            vocab_parallel=parallel, **given,
        )  # fmt: skip
        loss, *outputs = results if names else (results,)
        upstream = [torch.ones_like(loss) if of_tokens is None else of_tokens]
        upstream += [each[mine] for each in incoming_gradients(case, names, loss.dtype)]
        upstream = [each * factor if each.ndim else each for each in upstream]
        wanted = [loss, *(o for name, o in zip(names, outputs, strict=True) if name in DIFFERENTIABLE)]
        # Not so what is detached.
        kept = [pair for pair in zip(wanted, upstream, strict=True) if pair[0].requires_grad]
        wanted, upstream = zip(*kept, strict=True)
        gradients = torch.autograd.grad(wanted, part.needing_grad(), upstream)
        inputs = [part.x, *(x for x, _ in part.terms)]
        gradients = [
            gradient / factor if any(operand is x for x in inputs) else gradient
            for operand, gradient in zip(part.needing_grad(), gradients, strict=True)
        ]
        return Result(loss.detach(), tuple(gradients), tuple(outputs))

    results = as_threads(ranks, run)
    gradients = [torch.cat(each) for each in zip(*(result.gradients for result in results), strict=True)]

    def whole(each):
        if each[0].ndim:
            return torch.cat(each)
        assert all(has_same_bits(one, each[0]) for one in each)
        return each[0]

    outputs = tuple(whole(each).detach() for each in zip(*(result.outputs for result in results), strict=True))
    return Result(whole([result.loss for result in results]), tuple(gradients), outputs)
