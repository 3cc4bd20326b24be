"""Losses computed in several steps: which become one region, which do not, and that results agree with eager."""

from functools import partial

import pytest
import thunder
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import thunder_flce
from front_ends import decisions
from thunder_flce.backend import compile_graph

V, H, N = 33, 16, 20


def _chunk_losses(logits, labels, size=6, **settings):
    pairs = zip(logits.split(size), labels.split(size), strict=True)
    return [F.cross_entropy(x, y, reduction="none", **settings) for x, y in pairs]


def sum_of_chunks(logits, labels):
    """As litgpt's chunked_cross_entropy."""
    count = (labels != 3).sum()
    return torch.cat(_chunk_losses(logits, labels, ignore_index=3)).sum() / count.maximum(torch.ones_like(count))


def torch_chunk(logits, labels):
    pairs = zip(logits.chunk(3), labels.chunk(3), strict=True)
    return torch.cat([F.cross_entropy(x, y, reduction="none", label_smoothing=0.1) for x, y in pairs]).sum()


def reversed_chunks(logits, labels):
    losses = _chunk_losses(logits, labels)
    return (torch.cat(losses[::-1]) * torch.arange(N)).sum()


def a_loss_for_each_chunk(logits, labels):
    """As torchtune has it."""
    pairs = zip(logits.chunk(4), labels.chunk(4), strict=True)
    return sum(F.cross_entropy(x.float(), y, reduction="sum", ignore_index=3) for x, y in pairs) / (labels != 3).sum()


def losses_used_elsewhere(logits, labels):
    losses = _chunk_losses(logits, labels)
    return torch.cat(losses).sum() + losses[0].max()


ONE_REGION = {
    reversed_chunks: "sum",
    a_loss_for_each_chunk: "sum",
    losses_used_elsewhere: "none",
    sum_of_chunks: "sum",
    torch_chunk: "sum",
}


def chunks_that_differ(logits, labels):
    first, *rest = zip(logits.split(10), labels.split(10), strict=True)
    losses = [F.cross_entropy(*first, reduction="none")]
    losses += [F.cross_entropy(x, y, reduction="none", ignore_index=3) for x, y in rest]
    return torch.cat(losses).sum()


def logits_used_elsewhere(logits, labels):
    return torch.cat(_chunk_losses(logits, labels)).sum() + logits.square().sum()


def _results(call, hidden, weight, labels):
    loss = call(hidden, weight, labels)
    return loss, *torch.autograd.grad(loss, (hidden, weight))


def _arguments():
    hidden, weight = torch.randn(N, H, requires_grad=True), torch.randn(V, H, requires_grad=True)
    labels = torch.randint(0, V, (N,))
    labels[:4] = 3
    return hidden, weight, labels


def _program(loss):
    return lambda hidden, weight, labels: loss(F.linear(hidden, weight), labels)


IN_THUNDER = (sum_of_chunks, a_loss_for_each_chunk)


@pytest.mark.parametrize(
    ("loss", "compile"),
    [
        *((loss, partial(torch.compile, backend=compile_graph)) for loss in ONE_REGION),
        *((loss, thunder_flce.jit) for loss in IN_THUNDER),
    ],
    ids=lambda each: getattr(each, "__name__", "torch.compile"),
)
def test_one_region(loss, compile):
    compiled = compile(_program(loss))
    arguments = _arguments()
    torch.testing.assert_close(_results(compiled, *arguments), _results(_program(loss), *arguments))
    (decision,) = decisions(compiled)
    assert decision.fused
    assert (decision.plan.strategy == "gradients_in_forward") == (ONE_REGION[loss] == "sum")


@pytest.mark.parametrize(
    "loss",
    [chunks_that_differ, logits_used_elsewhere],
    ids=lambda loss: loss.__name__,
)
@pytest.mark.filterwarnings("ignore::thunder_flce.NotFusedWarning")
def test_no_one_sum(loss):
    """Labels that are ignored in one part alone; logits that all have to be there."""
    compiled = thunder_flce.jit(_program(loss))
    arguments = _arguments()
    torch.testing.assert_close(_results(compiled, *arguments), _results(_program(loss), *arguments))
    found = decisions(compiled)
    is_fused = loss is chunks_that_differ
    assert found and all(each.fused == is_fused for each in found)
    assert not is_fused or {each.plan.strategy for each in found} == {"recompute_logits"}


def test_checkpointed_chunks_are_computed_once():
    def program(hidden, weight, labels):
        def loss(hidden, weight, labels):
            return sum_of_chunks(F.linear(hidden, weight), labels) * 2

        return checkpoint(loss, hidden, weight, labels, use_reentrant=False)

    compiled = thunder_flce.jit(program)
    arguments = _arguments()
    torch.testing.assert_close(_results(compiled, *arguments), _results(program, *arguments))
    (decision,) = decisions(compiled)
    assert decision.fused
    backward = thunder.last_backward_traces(compiled)[-1]
    assert "flce_linear_cross_entropy_fwd" not in [bsym.sym.name for bsym in backward.bound_symbols]
