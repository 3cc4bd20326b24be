"""Losses as libraries for fine-tuning and reinforcement learning write them, by torch.compile at lengths that change.

`h` (B, T, H) and `w` (V, H) are trained, `y` (B, T) are labels, `a` (B, T) advantages or old log-probabilities, `m`
(B, T) a mask.
"""

import pytest
import torch
import torch.nn.functional as F

import thunder_flce
from thunder_flce import NotFusedError
from thunder_flce.backend import compile_graph
from thunder_flce.matching.decisions import Reason

V = 53


def log_probs(h, w, y):
    return F.log_softmax(F.linear(h, w), -1).gather(-1, y.unsqueeze(-1)).squeeze(-1)


def clipped(x, a):
    ratio = (x - a).exp()
    return ratio, torch.max(-ratio * a, -ratio.clamp(0.8, 1.2) * a)


def sum_of_log_probabilities(h, w, y, a, m):
    return -log_probs(h, w, y).sum()


def mean_of_log_probabilities(h, w, y, a, m):
    return -log_probs(h, w, y).mean()


def losses_of_chunks(h, w, y, a, m):
    logits, labels = F.linear(h, w).flatten(0, 1), y.flatten()
    pairs = zip(logits.split(8), labels.split(8), strict=True)
    return torch.cat([F.cross_entropy(x, of_x, reduction="none") for x, of_x in pairs]).sum() / labels.numel()


def head_of_chunks(h, w, y, a, m):
    pairs = zip(h.flatten(0, 1).chunk(4), y.flatten().chunk(4), strict=True)
    return sum(F.cross_entropy(F.linear(x, w).float(), of_x, reduction="sum") for x, of_x in pairs) / y.numel()


def chunks_along_the_sequence(h, w, y, a, m):
    pairs = zip(F.linear(h, w).chunk(2, 1), y.chunk(2, 1), strict=True)
    return sum(F.cross_entropy(x.reshape(-1, V), of_x.reshape(-1), reduction="sum") for x, of_x in pairs) / y.numel()


def ppo(h, w, y, a, m):
    return (clipped(log_probs(h, w, y), a)[1] * m).sum() / m.sum()


def dual_clip(h, w, y, a, m):
    losses = clipped(log_probs(h, w, y), a)[1]
    return (torch.where(a < 0, torch.min(-3 * a, losses), losses) * m).sum() / m.sum()


def cispo(h, w, y, a, m):
    x = log_probs(h, w, y)
    return -((x - a).exp().clamp(max=1.2).detach() * a * x * m).sum() / m.sum()


def sums_by_axis(h, w, y, a, m):
    return (((log_probs(h, w, y) - a).exp() * m).sum(axis=-1) / m.sum(axis=-1)).mean()


def scaled_in_place(h, w, y, a, m):
    logits = F.linear(h, w)
    logits.div_(0.7)
    return -(F.log_softmax(logits, -1).gather(-1, y[..., None]).squeeze(-1) * m).sum()


def stacked_estimators(h, w, y, a, m):
    d = log_probs(h, w, y) - a
    estimators = torch.stack([d, d.square() / 2, torch.expm1(-d) + d, d.abs()])
    return (estimators[2] * m).sum() / m.sum()


def smooth_l1(h, w, y, a, m):
    return (F.smooth_l1_loss(log_probs(h, w, y), a, reduction="none") * m).sum()


def added_in_place(h, w, y, a, m):
    total = torch.zeros((), device=h.device)
    for x, of_x, of_m in zip(h.chunk(2), y.chunk(2), m.chunk(2), strict=True):
        total += (log_probs(x, w, of_x) * of_m).sum()
    return total / m.sum()


def by_einsum(h, w, y, a, m):
    return -torch.einsum("bt,bt->", log_probs(h, w, y), m)


def means_of_sequences(h, w, y, a, m):
    count = m.sum(1)
    return -((log_probs(h, w, y) * m).sum(1) / count.clamp(min=1)).where(count > 0, torch.zeros(())).mean()


def later_tokens(h, w, y, a, m):
    first = F.cross_entropy(F.linear(h, w).flatten(0, 1), y.flatten())
    return first + 0.3 * F.cross_entropy(F.linear(h.tanh(), w).flatten(0, 1), y.flatten())


def preferences(h, w, y, a, m):
    chosen, rejected = (log_probs(h, w, y) * m).sum(-1).chunk(2)
    return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


def smoothing_by_hand(h, w, y, a, m):
    losses = -F.log_softmax(F.linear(h, w), -1)
    return 0.9 * losses.gather(-1, y[..., None]).mean() + 0.1 * losses.sum(-1).mean() / V


def smoothing_in_place(h, w, y, a, m):
    """As transformers' LabelSmoother."""
    losses = -F.log_softmax(F.linear(h, w), -1)
    of_labels, of_all = losses.gather(-1, y[..., None]), losses.sum(-1, keepdim=True, dtype=torch.float32)
    ignored = (m == 0)[..., None]
    of_labels.masked_fill_(ignored, 0.0)
    of_all.masked_fill_(ignored, 0.0)
    return 0.9 * of_labels.sum() / m.sum() + 0.1 * of_all.sum() / (m.sum() * losses.shape[-1])


def weighted_smoothing(h, w, y, a, m):
    """With the mean of the logits in place of that of their log-probabilities."""
    logits = F.linear(h, w) / 0.7
    log_sum_exp = logits.logsumexp(-1)
    of_labels, of_all = (each - log_sum_exp for each in (logits.gather(-1, y[..., None]).squeeze(-1), logits.mean(-1)))
    return -(a * (0.9 * of_labels + 0.1 * of_all) * m).sum() / m.sum()


def smoothing_of_a_ratio(h, w, y, a, m):
    """Not linear in the mean, of which a part has no gradient."""
    log_probs = F.log_softmax(F.linear(h, w).float(), -1)
    of_all = log_probs.mean(-1)
    of_labels = log_probs.gather(-1, y[..., None]).squeeze(-1)
    return (clipped(of_labels, a)[1] * m).sum() + ((of_all - of_all.detach() - 1).exp() * of_all * m).mean()


def centered(h, w, y, a, m):
    """Less their mean, logits have the same loss."""
    logits = F.linear(h, w)
    return F.cross_entropy((logits - logits.mean(-1, keepdim=True)).flatten(0, 1), y.flatten())


def beside_a_median(h, w, y, a, m):
    losses = -F.log_softmax(F.linear(h, w), -1)
    return 0.9 * losses.gather(-1, y[..., None]).mean() + 0.1 * losses.median(-1)[0].mean()


def after_a_graph_break(h, w, y, a, m):
    logits = F.linear(h, w)
    torch._dynamo.graph_break()
    return -F.log_softmax(logits, -1).gather(-1, y[..., None]).mean()


IN_FORWARD = (
    sum_of_log_probabilities, mean_of_log_probabilities, losses_of_chunks, head_of_chunks, chunks_along_the_sequence,
    ppo, dual_clip, cispo, sums_by_axis, scaled_in_place, stacked_estimators, smooth_l1, added_in_place, by_einsum,
    means_of_sequences, later_tokens, smoothing_by_hand, weighted_smoothing, smoothing_of_a_ratio, centered,
)  # fmt: skip


def check(program, strict=True):
    """Compares with eager PyTorch over several lengths; returns what was decided."""
    torch._dynamo.reset()
    compiled = torch.compile(program, backend=compile_graph, options={"strict": strict})
    w = (torch.randn(V, 16) / 4).requires_grad_()
    for tokens in (12, 10, 14, 11):
        h, y = torch.randn(4, tokens, 16, requires_grad=True), torch.randint(V, (4, tokens))
        a, m = torch.randn(4, tokens), (torch.rand(4, tokens) > 0.3).float()
        found = []
        for function in (compiled, program):
            loss = function(h, w, y, a, m)
            found.append((loss.detach(), *torch.autograd.grad(loss, (h, w))))
        torch.testing.assert_close(*found, rtol=2e-4, atol=2e-5)
    return thunder_flce.explain(compiled).decisions


@pytest.mark.parametrize("program", IN_FORWARD, ids=lambda program: program.__name__)
def test_gradients_in_the_forward_at_every_length(program):
    decisions = check(program)
    # One region, at the first length and, compiled once more, at all others.
    assert [each.plan.strategy for each in decisions] == ["gradients_in_forward"] * len(decisions)
    assert len(decisions) <= (4 if program in (losses_of_chunks, added_in_place) else 2)


def test_no_sum_over_tokens_waits():
    decisions = check(preferences)
    assert all("log_sigmoid in line" in each.note and "of a sum over tokens" in each.note for each in decisions)


def test_label_smoother_of_transformers():
    """And one like it, at several lengths: what is changed in place is read afterwards by its first name."""
    smoother = pytest.importorskip("transformers.trainer_pt_utils").LabelSmoother(epsilon=0.2)

    def label_smoother(h, w, y, a, m):
        return smoother({"logits": F.linear(h, w)}, y.masked_fill(m == 0, -100), shift_labels=True)

    for program in (label_smoother, smoothing_in_place):
        for decision in check(program):
            assert decision.plan.strategy == "gradients_in_forward", decision.note


@pytest.mark.filterwarnings("ignore::thunder_flce.NotFusedWarning")
@pytest.mark.parametrize(
    ("program", "reason"),
    [(beside_a_median, Reason.LOGITS_USED), (after_a_graph_break, Reason.ARGUMENT)],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_never_silent(program, reason):
    assert {each.reason for each in check(program, strict=False)} == {reason}
    with pytest.raises(NotFusedError):
        check(program)
