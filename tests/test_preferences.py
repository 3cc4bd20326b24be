"""Losses of pairs of sequences, as TRL has them, fused against eager PyTorch in float64."""

import pytest
import torch
import torch.nn.functional as F

import thunder_flce
from front_ends import decisions

PAIRS, T, H, V = 2, 9, 8, 41


def log_probabilities(hidden, weight, tokens, mask, *, mean=False):
    """Of the completion of each sequence, a sum or a mean over its tokens."""
    logits, labels = F.linear(hidden, weight)[:, :-1], tokens[:, 1:]
    mask = mask[:, 1:]
    per_token = torch.gather(logits.log_softmax(-1), 2, labels.unsqueeze(2)).squeeze(2)
    total = (per_token * mask).sum(-1)
    return total / mask.sum(-1) if mean else total


def dpo(*sequences, reference, beta=0.3, label_smoothing=0.1):
    """Arguments of all losses: hidden, weight, tokens and mask, the chosen sequences first."""
    chosen, rejected = log_probabilities(*sequences).chunk(2)
    of_chosen, of_rejected = reference.chunk(2)
    margin = (chosen - rejected) - (of_chosen - of_rejected)
    right, wrong = F.logsigmoid(beta * margin), F.logsigmoid(-beta * margin)
    return (-right * (1 - label_smoothing) - wrong * label_smoothing).mean()


def ipo(*sequences, reference, beta=0.3):
    chosen, rejected = (log_probabilities(*sequences, mean=True) - reference).chunk(2)
    return ((chosen - rejected - 1 / (2 * beta)) ** 2).mean()


def simpo(*sequences, reference, beta=2.0, margin=1.0):
    chosen, rejected = log_probabilities(*sequences, mean=True).chunk(2)
    return -F.logsigmoid(beta * (chosen - rejected) - margin).mean()


def orpo(*sequences, reference, beta=0.1):
    chosen, rejected = log_probabilities(*sequences, mean=True).chunk(2)
    odds = (chosen - rejected) - (torch.log1p(-torch.exp(chosen)) - torch.log1p(-torch.exp(rejected)))
    return -beta * F.logsigmoid(odds).mean() - chosen.mean()


def kto(*sequences, reference, beta=0.1):
    chosen, rejected = (log_probabilities(*sequences) - reference).chunk(2)
    divergence = chosen.mean().clamp(min=0).detach()
    desirable, undesirable = beta * (chosen - divergence), beta * (divergence - rejected)
    return torch.cat([1 - torch.sigmoid(desirable), 1 - torch.sigmoid(undesirable)]).mean()


def with_a_reference_model(*sequences, reference):
    """Whose log-probabilities are computed in the program, from its own head."""
    hidden, weight, *others = sequences
    with torch.no_grad():
        reference = log_probabilities(hidden * 0.9, weight * 1.1, *others)
    return dpo(*sequences, reference=reference)


@pytest.mark.parametrize("loss", [dpo, ipo, simpo, orpo, kto, with_a_reference_model])
def test_loss(loss):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in ((2 * PAIRS, T, H), (V, H))
    )
    tokens = torch.randint(V, (2 * PAIRS, T), generator=generator)
    # Prompts and paddings of different lengths take no part.
    positions, prompts = torch.arange(T), torch.tensor([[2], [3], [2], [3]])
    mask = ((positions >= prompts) & (positions < torch.tensor([[9], [6], [7], [9]]))).double()
    reference = -10 * torch.rand(2 * PAIRS, generator=generator, dtype=torch.float64)

    def program(hidden, weight, tokens, mask, reference):
        return loss(hidden, weight, tokens, mask, reference=reference)

    compiled, found = thunder_flce.jit(program, strict=True), []
    for run in (compiled, program):
        value = run(hidden, weight, tokens, mask, reference)
        found.append((value.detach(), *torch.autograd.grad(value, (hidden, weight))))
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)
    assert all(decision.fused for decision in decisions(compiled))
    assert len(decisions(compiled)) == (2 if loss is with_a_reference_model else 1)
