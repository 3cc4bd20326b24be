"""Weights of single tokens, known before the loss: gradients in the forward all the same."""

import re

import pytest
import torch
import torch.nn.functional as F

import test_patterns  # noqa: F401 (finds traces/patterns.py)
import thunder_flce
from front_ends import decisions
from test_backend import compiled_with
from test_readings import regions
from thunder_flce import linear_cross_entropy

B, T, H, V = 3, 10, 16, 50
WEIGHTS = torch.rand(B, T, generator=torch.Generator().manual_seed(0)) + 0.1
WEIGHTS[0, :4] = 0


def operands(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(B, T, H, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(V, H, generator=generator).mul(0.3).to(dtype).requires_grad_()
    labels = torch.randint(V, (B, T), generator=generator)
    labels[1, 5:] = -100
    return hidden, weight, labels


def weighted_mean(hidden, weight, labels, w):
    losses = F.cross_entropy(F.linear(hidden, weight).flatten(0, 1), labels.flatten(), reduction="none")
    return (losses * w.view(-1)).sum() / w.sum()


def masked_log_probs(hidden, weight, labels, w):
    """GRPO's and DAPO's way to average: over each sequence, then over sequences."""
    tokens, mask = labels.clamp(min=0), (w > 0) & (labels != -100)
    log_probs = F.linear(hidden, weight).float().log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)
    return -((log_probs * mask).sum(-1) / mask.sum(-1)).mean()


def weighted_log_probs(hidden, weight, labels, w):
    """The sum of the weights is computed after the sum of what they weigh."""
    tokens, mask = labels.clamp(min=0), w * (labels != -100)
    log_probs = F.linear(hidden, weight).float().log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)
    return -(log_probs * mask).sum() / mask.sum()


def weighted_sequences(hidden, weight, labels, w):
    logits = F.linear(hidden, weight).transpose(1, 2)
    of_sequences = F.cross_entropy(logits, labels, reduction="none").mean(dim=1, keepdim=True)
    return (0.5 * of_sequences * w[:, :1] / 3).sum()


def mean_of_losses(hidden, weight, labels, w):
    return F.cross_entropy(F.linear(hidden, weight).flatten(0, 1), labels.flatten(), reduction="none").mean() * 2


def spread(hidden, weight, labels, w):
    """Each loss counts ten times, each time with another weight."""
    losses = F.cross_entropy(F.linear(hidden, weight)[:, 0], labels[:, 0], reduction="none")
    return (losses * w.t()).sum()


SUMS = (weighted_mean, masked_log_probs, weighted_log_probs, weighted_sequences, mean_of_losses, spread)


@pytest.mark.parametrize("program", SUMS, ids=lambda program: program.__name__)
@pytest.mark.parametrize("compiled", [thunder_flce.jit, compiled_with], ids=["thunder.jit", "backend"])
def test_found_in_a_trace(compiled, program):
    """Any upstream gradient is right, and the program's own factors, which weights have, need no second rounding."""
    tensors = (*operands(), WEIGHTS)
    jitted = compiled(program, **({"strict": True} if compiled is thunder_flce.jit else {"options": {"strict": True}}))
    loss, right = jitted(*tensors), program(*tensors)
    torch.testing.assert_close(loss, right)
    for upstream in (1.0, -0.3):
        grad = torch.tensor(upstream)
        got, expected = (torch.autograd.grad(of, tensors[:2], grad, retain_graph=True) for of in (loss, right))
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)
    if compiled is thunder_flce.jit:
        (region,) = regions(jitted)
        assert (region["strategy"], region["reduction"]) == ("gradients_in_forward", "sum")
        assert "token_weights" in region and "expected_gradient" not in region


def of_the_logits(hidden, weight, labels, w):
    """Such as DFT weights tokens."""
    losses = F.cross_entropy(F.linear(hidden, weight).flatten(0, 1), labels.flatten(), reduction="none")
    return (losses * torch.exp(-losses.detach())).sum()


def trained(hidden, weight, labels, w):
    losses = F.cross_entropy(F.linear(hidden, weight).flatten(0, 1), labels.flatten(), reduction="none")
    return (losses * (hidden.mean(-1).flatten() * w.view(-1))).sum()


def not_linear(hidden, weight, labels, w):
    losses = F.cross_entropy(F.linear(hidden, weight).flatten(0, 1), labels.flatten(), reduction="none")
    return (losses * w.view(-1)).square().sum()


def used_twice(hidden, weight, labels, w):
    losses = F.cross_entropy(F.linear(hidden, weight).flatten(0, 1), labels.flatten(), reduction="none")
    return (losses * w.view(-1)).sum() + losses.square().sum()


def weighted_by_entropies(hidden, weight, labels, w):
    """Entropies without a gradient are a region of their own, which runs before."""
    logits = F.linear(hidden, weight)
    with torch.no_grad():
        log_probs = logits.log_softmax(-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
    return (F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none") * entropy.flatten()).sum()


def weighted_by_other_rows(hidden, weight, labels, w):
    logits, tokens = F.linear(hidden, weight), labels[:, 1:, None].clamp(min=0)
    with torch.no_grad():
        weights = logits[:, 1:].log_softmax(-1).gather(-1, tokens).squeeze(-1)
    return (logits[:, :-1].log_softmax(-1).gather(-1, tokens).squeeze(-1) * weights).sum()


@pytest.mark.parametrize("program", [weighted_by_entropies, weighted_by_other_rows], ids=lambda f: f.__name__)
@pytest.mark.parametrize("compiled", [thunder_flce.jit, compiled_with], ids=["thunder.jit", "backend"])
def test_weights_of_the_same_logits(compiled, program):
    """Another region gives them, so that this one still makes its gradients in the forward."""
    tensors = (*operands(), WEIGHTS)
    jitted = compiled(program)
    got, right = (torch.autograd.grad(f(*tensors), tensors[:2], torch.tensor(-0.3)) for f in (jitted, program))
    torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-6)
    found = thunder_flce.explain(jitted).decisions if compiled is compiled_with else decisions(jitted)
    assert {decision.plan.strategy for decision in found} == {"loss_only", "gradients_in_forward"}


def weighted_by_predictions(hidden, weight, labels, w):
    """Of each sequence; the region that gives them is the one that would need them."""
    logits = F.linear(hidden, weight)
    losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    return (losses.sum(-1) * (logits.argmax(-1) == labels).float().sum(-1)).sum()


def test_weights_of_the_region_itself():
    hidden, weight, labels = operands()
    tensors = (hidden, weight, torch.where(labels < 0, labels, F.linear(hidden, weight).argmax(-1)), WEIGHTS)
    jitted = thunder_flce.jit(weighted_by_predictions, strict=True)
    got, right = (torch.autograd.grad(f(*tensors), tensors[:2]) for f in (jitted, weighted_by_predictions))
    torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-6)
    ((strategy, note),) = [(each.plan.strategy, each.note) for each in decisions(jitted)]
    assert strategy != "gradients_in_forward" and re.search("depends? on", note)


def test_what_is_no_factor():
    tensors = (*operands(), WEIGHTS)
    jitted = thunder_flce.jit(trained)
    got, right = (torch.autograd.grad(f(*tensors), tensors[:2]) for f in (jitted, trained))
    torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-6)
    assert [region["reduction"] for region in regions(jitted)] == ["none"]


@pytest.mark.parametrize("program", [of_the_logits, not_linear, used_twice], ids=lambda program: program.__name__)
def test_what_is_a_loss_of_tokens(program):
    """Of ignored ones, too: what is made of their loss, 0."""
    tensors = (*operands(), WEIGHTS)
    jitted = thunder_flce.jit(program)
    got, right = (torch.autograd.grad(f(*tensors), tensors[:2]) for f in (jitted, program))
    torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-6)
    (region,) = regions(jitted)
    assert region["reduction"] == "sum" and region["token_loss"]


@pytest.mark.parametrize(
    ("weights", "kind", "message"),
    [
        (WEIGHTS[0], ValueError, r"token_weights must have target's shape, \(3, 10\), but got \(10,\)"),
        (WEIGHTS > 0, TypeError, r"but got bool; pass mask.to\(input.dtype\)"),
        (WEIGHTS.clone().requires_grad_(), ValueError, "token_weights must not require a gradient"),
        (1.0, TypeError, "token_weights must be a tensor, but got float"),
    ],
)
def test_bad_input(weights, kind, message):
    hidden, weight, labels = operands()
    with pytest.raises(kind, match=message):
        linear_cross_entropy(hidden, weight, labels, token_weights=weights)
