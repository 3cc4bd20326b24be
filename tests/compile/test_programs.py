"""Programs with a loss in them, compiled: the numbers are eager PyTorch's, and what is fused, and when, is as it says.

Ways to write a language model's loss are in traces/patterns.py, see test_patterns. Here are losses of libraries for
fine-tuning and reinforcement learning, and what only looks like a loss. `h` (B, T, H) and `w` (V, H) are trained, `y`
(B, T) are labels, `a` (B, T) advantages or old log-probabilities, `m` (B, T) a mask; of them, `z` (B, T, V) are logits,
and `x`, `s`, `e` (B, T) log-probabilities of the labels, losses and entropies; `t` are a teacher's logits; `f` and `g`
are log-probabilities of the first and the other sequences, each of a linear of its own. A program takes what it names.
Each goes through the backend of torch.compile, and through thunder where thunder's traces have something in another
way.
"""

import inspect
import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Categorical
from torch.utils.checkpoint import checkpoint

import thunder_flce
from front_ends import decisions, fused_graph, log_prob, log_probs, run
from thunder_flce.backend import compile_graph
from thunder_flce.matching.decisions import Reason
from thunder_flce.matching.program import Tensor
from thunder_flce.operation.loss import NOTHING_IGNORED

B, H, V = 4, 16, 53
IN_FORWARD, FUSED, NONE, ANY = "gradients in the forward", "fused", "nothing to fuse", "whatever is fused"
AT_ONCE, LATER, NO_GRADIENT = "gradients_in_forward", "recompute_logits", "loss_only"
TRANSFORMED, PRODUCT = Reason.TRANSFORMED_LOGITS, Reason.ANOTHER_PRODUCT
LOG_SOFTMAX, ATEN = nn.LogSoftmax(), torch.ops.aten
by_dynamo = partial(torch.compile, backend=compile_graph)
BY_DYNAMO: list[tuple[Callable, Any]] = []
BY_THUNDER: list[tuple[Callable, Any]] = []


def expect(outcome, *, thunder: bool = False, dynamo: bool = True, wrap: Callable = lambda program: program):
    """Enters a program, or those of a dictionary or a class.

    With a `Reason`, it is not fused; with other words, its gradients wait, and a note has them. With a list, its
    regions have these strategies.
    """

    def enter(programs):
        by_name = {programs.__name__: programs} if inspect.isfunction(programs) else programs
        for name, program in (vars(by_name) if inspect.isclass(by_name) else by_name).items():
            if inspect.isfunction(program):
                entered = wrap(with_arguments(program))
                entered.__name__ = name
                BY_DYNAMO.extend([(entered, outcome)] * dynamo)
                BY_THUNDER.extend([(entered, outcome)] * thunder)
        return programs

    return enter


def expect_each(programs: dict, *, thunder: bool = False):
    """Enters programs that each have an outcome of their own."""
    for name, (outcome, program) in programs.items():
        expect(outcome, thunder=thunder)({name: program})


def with_arguments(program: Callable) -> Callable:
    """Calls a program with the tensors that its parameters name."""
    names = [name for name in inspect.signature(program).parameters if name in ARGUMENTS]
    return lambda *tensors: program(*[ARGUMENTS[name](*tensors) for name in names])


def operands(tokens: int):
    """Some labels are what the head predicts."""
    generator = torch.Generator().manual_seed(tokens)

    def randn(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    h, w, a = randn(B, tokens, H), randn(V, H) / 3, randn(B, tokens) / 2
    m = (torch.rand(B, tokens, generator=generator) > 0.3).double()
    m[:, 0] = 1
    y = torch.where(a > 0.3, F.linear(h, w).argmax(-1), torch.randint(V, (B, tokens), generator=generator))
    return h.requires_grad_(), w.requires_grad_(), y, a, m


def check(program: Callable, outcome, compiled: Callable, lengths) -> list:
    """Compares with eager PyTorch over several lengths; returns the decisions."""
    for tokens in lengths:
        # A program may change copies in place; those that need a gradient are no leaves.
        copying, copying_compiled = (
            lambda h, w, y, *others, call=call: call(h * 1, w * 1, y.clone(), *others) for call in (program, compiled)
        )
        tensors = operands(tokens)
        torch.testing.assert_close(run(copying_compiled, tensors), run(copying, tensors), equal_nan=True)
    made = decisions(compiled)
    if outcome == NONE:
        assert not made
    elif isinstance(outcome, Reason):
        assert {decision.reason for decision in made} == {outcome}, made
    elif isinstance(outcome, list):
        assert sorted(decision.plan.strategy for decision in made) == outcome
    elif outcome != ANY:
        assert made and all(decision.fused for decision in made), made
        strategies = {decision.plan.strategy for decision in made}
        if outcome == IN_FORWARD:
            # Regions without gradients may give what others weigh their tokens with.
            assert AT_ONCE in strategies <= {AT_ONCE, NO_GRADIENT}, made
            assert not any(decision.note for decision in made)
        elif outcome != FUSED:
            assert any(outcome in decision.note for decision in made), made
    return made


def ce_loss(z, y, **settings):
    return F.cross_entropy(z.flatten(0, 1), y.flatten(), **settings)


def losses(h, w, y):
    return ce_loss(F.linear(h, w), y, reduction="none").view(len(h), -1)


def several_labels(y):
    return torch.stack([y, (y + 3) % V, y * 5 % V], -1)


def cross_entropy_of(t, a, m):
    """From the distribution of a teacher over several labels, of log-probabilities `t`."""
    return -((torch.stack([a, 2 * a, a - 1], -1).softmax(-1) * t).sum(-1) * m).sum() / m.sum()


def clipped(x, a):
    ratio = (x - a).exp()
    return torch.max(-ratio * a, -ratio.clamp(0.8, 1.2) * a)


def entropies(h, w):
    return entropy(F.linear(h, w))


ARGUMENTS = {
    **{name: lambda *tensors, at=at: tensors[at] for at, name in enumerate("hwyam")},
    "z": lambda h, w, y, a, m: F.linear(h, w),
    "x": lambda h, w, y, a, m: log_probs(h, w, y),
    "s": lambda h, w, y, a, m: losses(h, w, y),
    "e": lambda h, w, y, a, m: entropies(h, w),
    "t": lambda h, w, y, a, m: F.linear(h.detach().cos(), w.detach().sin()),
    "f": lambda h, w, y, a, m: log_probs(h[:2], w, y[:2]),
    "g": lambda h, w, y, a, m: log_probs(h[2:], w, y[2:]),
}


def entropy(z):
    x = z.log_softmax(-1)
    return -(x.exp() * x).sum(-1)


def class_weights(w):
    return w[:, 0].detach().abs() + 0.5


def _less_constant_log_sum_exp(z):
    return z - z.logsumexp(-1, keepdim=True).detach()


def _constant_less_log_sum_exp(z):
    return z.detach() - z.logsumexp(-1, keepdim=True)


def _less_maximum(z):
    return z - z.amax(-1, keepdim=True)


def _without_gradients(function, *tensors):
    with torch.no_grad():
        return function(*tensors)


def _logged(number):
    buffer = number.new_zeros(B)
    with torch.no_grad():
        buffer[1] = number
    return buffer


def _before_and_after(made: Callable) -> Callable:
    """What a program returns of constants, before and after something is changed in place that it reads."""
    both = with_arguments(made)

    def before_and_after(*tensors):
        change, program = both(*tensors)
        return program(), change(), program()

    return lambda h, w, y, a, m: _without_gradients(before_and_after, h, w, y, a, m)[::2]


@torch._dynamo.allow_in_graph
def cross_entropy(z, y):
    """Only called like PyTorch's."""
    return F.cross_entropy(z, y) * 3 + z.logsumexp(-1).mean()


class OwnFunction(torch.autograd.Function):
    """A cross-entropy as Megatron-LM has it; without labels, an activation; of a loss, one with a larger gradient."""

    @staticmethod
    def forward(ctx, z, y=None):
        ctx.save_for_backward(z, y)
        if y is None:
            return z.sigmoid()
        return z.logsumexp(-1) - z.gather(-1, y[..., None])[..., 0] if y.ndim else y.clone()

    @staticmethod
    def backward(ctx, gradient):
        z, y = ctx.saved_tensors
        if y is None:
            return gradient * z.sigmoid() * (1 - z.sigmoid()), None
        return ((z.softmax(-1) - F.one_hot(y, V)) * gradient[..., None], None) if y.ndim else (z / 9, gradient)


torch.library.define("flce_tests::log", "(Tensor x, Tensor(a!) double) -> ()")
torch.library.impl("flce_tests::log", "CompositeExplicitAutograd")(lambda x, double: (double.mul_(2), None)[1])
torch.library.define("flce_tests::halve", "(Tensor(a!) x) -> Tensor")
torch.library.impl("flce_tests::halve", "CompositeExplicitAutograd")(lambda x: x.mul_(0.5).sum())
torch.library.define("flce_tests::draw", "(Tensor x) -> Tensor")
torch.library.impl("flce_tests::draw", "CompositeExplicitAutograd")(lambda x: torch.randint_like(x, V))


# What is made of the numbers of tokens, of their logits and of hidden states, and what becomes of that.

expect(IN_FORWARD)({
    "arguments that are the defaults": lambda h, w, y: F.cross_entropy(
        torch.addmm(w[:, 0], h.flatten(0, 1), w.t(), beta=1, alpha=1).div(2, rounding_mode=None), y.flatten()
    ),
    "half of the rows, from the end":
        lambda z, y: -log_prob(*(x.narrow(1, -(n := z.shape[1] // 2), n) for x in (z, y))).exp().mean(),
    "tokens from the end, and at half the length": lambda x: x.narrow(1, -3, 2).exp().mean()
        + x.narrow(1, -(n := x.shape[1] // 2), n).exp().mean() + x.select(1, n).exp().mean(),
    # What is logged after the loss: no gradient comes back from it.
    "logged and changed": lambda s: (s.mean(), s.sum(1).div_(3).detach()),
    "logged in a buffer": lambda s: (s.mean(), _without_gradients(s.new_zeros(B).lerp_, s.sum(1), 0.1)),
    "logged in a part of a buffer": lambda s: (s.mean(), _logged(s.sum(1)[0])),
    "logged less their mean": lambda x: (t := x.detach() * 2, t.sub_(t.mean()), (-x.mean(), t))[-1],
    # As fairseq and open-instruct have it.
    "changed in place, and logged afterwards":
        lambda s, a, m: (t := s * a, t.mul_(m), ((t * m).sum() / m.sum(), t.detach().mean()))[-1],
    # As DPPO has it.
    "weights that tokens set in place": lambda x, a, m: (
        k := torch.ones_like(m), k.__setitem__((a > 0) & (x.detach() > -3), 0.0), (x.exp() * a * k).sum(),
    )[-1],
    "labels that are changed after their copy is read": lambda h, w, y, m: (
        t := y.clone(), x := losses(h[:, 1:], w, t[:, 1:]), t.zero_(), (x * m[:, 1:]).sum(),
    )[-1],
    "weights that keep their dtype where tokens change them": lambda x, m: (
        k := torch.ones_like(m, dtype=torch.int8), k.add_((x.detach() * 100).long()),
        v := x.detach() * 2, v.gt_(-7), (x * k).sum() * 0.01 + (x * (v + v)).sum(),
    )[-1],
    # Lengths are symbols, and what is made of them is a number.
    "over a root": lambda h, s, m: (s * m).sum() * (1 / h.shape[1]) + s.mean() / h.shape[1] ** 0.5,
    "a sum times itself": lambda s, m: (total := (s * m).sum()) * total,
    "none selected, added to zero": lambda s, m: (
        total := m.new_zeros(()), total.add_(s.masked_fill(m > -1, 0).sum()), total / (m < 0).sum(),
    )[2],
    "read for their sizes":
        lambda x, a, m: (torch.cat([x.new_zeros(len(x), 1), x * a[:, :1].expand_as(x)], 1)[:, 1:].flatten()
        * m.view(-1).view_as(x.flatten()).type_as(x)).sum(),
    # Dynamo writes a shape of products of lengths as torch.Size.
    "packed, in the shape of logits": lambda h, w, y, a: (
        z := F.linear(h.flatten(0, 1), w),
        (F.cross_entropy(z, y.flatten(), reduction="none").view(z.shape[:-1]) * a.flatten()).sum(),
    )[1],
    # Dynamo describes what comes before as it is after the reshape in place.
    "mask reshaped in place": lambda s, m: (
        k := m[..., None] > 0, ones := torch.ones_like(k), k.squeeze_(-1), ((s * k).sum() / k.sum(), ones),
    )[-1],
    "label reshaped in place":
        lambda s, y: (label := y[:1, :1] + 0, row := label.select(0, 0), label.squeeze_(), (s.mean(), row))[-1],
    "rows reshaped in place": lambda s, m: (
        two := m.new_empty(2, 3), row := m[0, :3] * 2, two.__setitem__(slice(0, 1), row),
        two.__setitem__(slice(1, 2), m[1:2, :3]), row.unsqueeze_(0), (s.mean(), two),
    )[-1],
    # What is logged stands behind the region, which reads what has its shape.
    "in the shape of what is logged": lambda x, a, m: (
        (torch.where((ratio := (x - a).exp()) > 0.8, ratio, torch.zeros_like(ratio))
        * torch.ones(ratio.shape, dtype=m.dtype) * m.reshape(ratio.tanh().size())).sum(), (ratio > 1).sum(), x.detach(),
    ),
    # A number that is rounded, such as a part of the length, is no sum of products of lengths.
    "a part of the length":
        lambda z, y, s, a: ce_loss(z[:, : (n := int(0.5 * z.shape[1]))], y[:, :n]) + (s[:, :n] * a[:, :n]).sum(),
    "in other shapes":
        lambda x, a, m: (x * m).mean() + x.flatten()[0] - x[0, -1] * 2 + (x.view(2, -1) * a.view(2, -1)).sum()
        + x[..., None].sum(1).sum(),
    # Each with a factor of its own.
    "labels smoothed to their neighbours": lambda z, y: -(
        0.7 * log_prob(z, y) + log_prob(z, y.roll(1, 1)) / 5 + 0.1 * log_prob(z, y.roll(-1, 1))
    ).mean(),
    # They move behind the region, which gives what they read.
    "logged in place before the sum": lambda y, s, m: (
        logged := torch.zeros(V, dtype=s.dtype), logged.index_add_(0, y.flatten(), s.detach().flatten()),
        logged[0].add_(s.detach().mean()), logged.__setitem__(1, s.detach().sum()),
        logged[2].add_(s.detach()[0, 0]), ((s * m).sum() / m.sum(), logged * 2),
    )[-1],
    # The sums of sequences are computed there once more, and the region weighs its tokens by their derivative.
    "logged in a checkpoint": lambda s, m: (
        sums := checkpoint(lambda s: (s * m).sum(-1), s, use_reentrant=False), (sums.mean(), sums.detach()),
    )[1],
    # It reads what the region gives, which stands where the sum is.
    "checkpoint that nothing needs": lambda s, m: (
        checkpoint(torch.cos, s.tanh(), use_reentrant=False), (s.mean() + (s * m).sum(), s.detach()),
    )[1],
    # The region reads a mask that is made inside, and one that another checkpoint returns beside something else.
    "masked in a checkpoint": lambda h, w, y, m: (
        checkpoint(lambda m: (m.exp(), m.sin()), m, use_reentrant=False)[0]
        * checkpoint(lambda h, w: log_probs(h, w, y) * h.detach().mean(-1), h, w, use_reentrant=False)
    ).sum(),
    # Ignored ones among them.
    "slices of losses": lambda h, w, y, a, m: (
        (s := losses(h, w, y.where(m > 0, -100))[:, 1:]) * torch.exp(-s.detach()) + (s - a[:, 1:]).square()
    ).mean(),
    # The mean is NaN, and their gradients are 0.
    "all ignored": lambda h, w, y, m: (losses(h, w, y.where(m < 0, -100)).exp() * (m < 0)).sum() / (m < 0).sum(),
    "all ignored, divided by their number":
        lambda h, w, y, m: (losses(h, w, y.where(m < 0, -100)) * m).sum() / (m < 0).sum(),
    "squares of ignored losses": lambda h, w, y, m: (losses(h, w, y.where(m < 0, -100)).square() / (m < 0).sum()).sum(),
    # Dynamo has a symbol for the length of each input, and knows more of that which a linear has read.
    "shifted hidden states": lambda h, w, y, m: -(log_probs(h[:, :-1], w, y[:, 1:]) * m[:, 1:]).sum() / m.sum(),
    # A shape is one argument of what follows the losses: that of another tensor, and of what comes before.
    "in the shape of labels": lambda z, y, a: (
        (s := ce_loss(z, y, reduction="none").view(y.shape).flip(0)).flatten().view(s.size()) * a
    ).mean(),
    "rows of equal tensors": lambda h, w, y: -torch.cat(
        [F.linear(h.flatten(0, 1)[at], w) for at in (slice(8), slice(8, None))]
    ).log_softmax(-1).gather(-1, y.flatten()[:, None]).sum(),
    # What looks the same is not: draws, the functions of a branch, floats and their integers, and one tensor's shapes.
    "drawn twice": lambda x, a: ((x * F.gumbel_softmax(a) - x * F.gumbel_softmax(a)).sign().abs() * x).sum(),
    "labels of two branches":
        lambda z, y: ce_loss(z, torch.cond(y.sum() > 0, lambda y: (y + 1) % V, torch.clone, (y,)))
        + ce_loss(z, torch.cond(y.sum() > 0, lambda y: (y + 7) % V, torch.clone, (y,))),
    "weights and their integers": lambda x, a: (x * (b := a * 5) + x.exp() * b.long()).sum(),
    "weights of rows and of columns": lambda x, y: ((u := x[:, :B]) * (v := y[:, 0])[:, None] + u.exp() * v).sum(),
    "labels of rows and of columns": lambda z, y:
        ce_loss(u := z[:, :B], (v := y[:, 0])[None].expand(B, B)) + 2 * ce_loss(u, v[:, None].expand(B, B)),
    "rows picked by rows and by columns":
        lambda z, y: ce_loss(z[(i := y[:, 0] % B)[:, None], i[None]], y[:, :B]) * 2
        + ce_loss(z[i[None], i[:, None]], y[:, :B]),
    "checkpoint in a checkpoint": lambda h, w, y: checkpoint(
        lambda h: checkpoint(lambda h: losses(h.tanh(), w, y).mean(), h, use_reentrant=False),
        h, use_reentrant=False,
    ),
    # As slime has them: a ratio of each token, of all sequences one after another.
    "sequences in one line": lambda z, y, a, m: (
        clipped(torch.cat([*map(log_prob, z, y)]), a.flatten()) * m.flatten()
    ).sum() / m.sum(),
    # Of the same operations, in turn; and sums, each with weights of its own.
    "chunks in other orders": lambda f, g, a, m: (
        first := [(f * a[:2]).exp(), (f * m[:2]).sin()], second := [(g * m[2:]).sin(), (g * a[2:]).exp()],
        sum(terms.sum() for terms in (*first, *second[::-1])),
    )[2],
    "sums of chunks in other orders": lambda f, g, a, m: (f.exp() * a[:2]).sum() + (f.sin() * m[:2]).sum()
        + (g.sin() * m[2:]).sum() + (g.exp() * a[2:]).sum(),
    # As TRL has it: a response's logits are a view of all, which nothing reads afterwards.
    "a response, warmer in place": lambda z, y, a: (
        response := z[:, :-1][:, -5:], response.div_(0.7), clipped(log_prob(response, y[:, -5:]), a[:, -5:]).mean(),
    )[2],
    "tokens left out at random": lambda s: (s * (torch.rand_like(s) < 2)).sum() / 3,
    "responses cut out of packed tokens": lambda z, y, a: (
        u := z.flatten(0, 1), v := y.flatten(), pieces := [(u[i:j], v[i:j]) for i, j in ((2, 5), (7, 9), (9, 19))],
        clipped(torch.cat([log_prob(*piece) for piece in pieces]), a.flatten()[:15]).mean()
        - torch.cat([entropy(logits) for logits, _ in pieces]).mean() / 9,
    )[3],
    "every other sequence, and the last ones":
        lambda z, y, a: clipped(torch.cat([log_prob(z[at], y[at]) for at in (slice(0, 4, 2), slice(2, 4))]), a).mean(),
    "columns of tokens in another shape": lambda z, y, a: (
        u := z[:, :4], x := [log_prob(u[:, at], y[:, at]).view(2, 4) for at in (slice(2), slice(2, 4))],
        clipped(torch.cat(x, dim=1), a[:, :4].reshape(2, 8)).mean(),
    )[2],
    # As Dream has them, a diffusion model: the logits of a token stand at the one before.
    "of the token before": lambda z, y, m: (
        (ce_loss(torch.cat([z[:, :1], z[:, :-1]], dim=1), y, reduction="none") * m.flatten()).sum() / m.sum()
    ),
    "of the token before, warmer": lambda z, y, a, m: (
        u := (z / a.exp()[..., None]).mT, x := torch.cat([u[..., :1], u[..., :-1]], -1).log_softmax(1),
        (clipped(x.gather(1, y[:, None]).squeeze(1), a) * m).mean(),
    )[2],
    # They are others before the cast, which is behind a reshape: of eight bits, also from the end, and rounded.
    "labels that are cast":
        lambda h, w, y, z: F.cross_entropy(z.flatten(0, 1), (y + 512).flatten().to(torch.uint8).long())
        + F.linear(h, w.repeat(4, 1)).flatten(0, 1).log_softmax(-1)[
            torch.arange(y.numel()), (y - V).to(torch.int8).flatten().long()
        ].mean() + ce_loss(F.linear(h, w.repeat(10, 1)), (y * 9 + 3).flatten().bfloat16().long()),
    "means of sequences":
        lambda x, m: -((x * m).sum(axis=1) / m.sum(1).clamp(min=1)).where(m.sum(1) > 0, m.new_zeros(())).mean(),
    # They are no hidden states, of which a matrix makes logits.
    "products": lambda x, a, m: torch.einsum("bt,tk->bk", x, a.t()).sum() + (x @ m.t()).sum(),
    "ratio to itself alone": lambda h, x, a, m: -((x - x.detach()).exp() * a * m).sum() / m.sum() + h.square().mean(),
    "one head after another":
        lambda h, w, y, z, x, m: z.logsumexp(-1).square().mean() - (x * m).sum()
        + losses(h, v := w * -1.5, y).mean() - F.linear(h, v).logsumexp(-1).square().mean() / 3,
    # What reads the shape stands before the region, which gives the losses, too.
    "weights in the shape of losses": lambda z, y, a: (
        s := F.cross_entropy(z.transpose(1, 2), y, reduction="none"),
        ((weighted := s * a[:, :1].expand(s.shape)).sum(), weighted.detach().sum()),
    )[1],
    "a bias that is made after the linear": lambda h, w, y: (
        z := F.linear(h, w), b := z.new_zeros(V), b.__setitem__(3, -1e4), ce_loss(z + b, y.where(y != 3, 4)),
    )[-1],
    # As Medusa and MusicGen have them.
    "heads whose logits are stacked": lambda h, w, y: (
        u := torch.stack([F.linear(h, w), F.linear(h.tanh(), w * -1.5)]),
        v := torch.stack([F.linear(h.sin(), w * 0.5), F.linear(h, w * 0.7)], dim=1),
        ce_loss(u[-1], y) + sum(ce_loss(u[n, :, : -(1 + n)], y[:, 1 + n :]) + ce_loss(v[:, n], y) for n in range(2)),
    )[-1],
    "labels of another head":
        lambda h, w, y, z: ce_loss(z, (u := F.linear(h.tanh(), w)).argmax(-1).flatten()) + ce_loss(u, y),
    # Autograd's derivative of this sum copies into a view.
    "several labels, masked in place through a view": lambda z, y, m: (
        x := z.log_softmax(-1).gather(-1, several_labels(y)).sum(-1), v := x.t(), v.mul_(m.t()), v.sum(),
    )[-1],
    "a part of hidden states that change afterwards": lambda h, w, y: (
        loss := log_prob(h.chunk(2)[0] @ w.detach().t(), y[:2]).exp().mean(), h.mul_(2), loss,
    )[-1],
    "parts of hidden states that change afterwards": lambda h, w, y: (
        loss := sum(ce_loss(x @ w.detach().t(), own) for x, own in zip(h.chunk(2), y.chunk(2), strict=True)),
        h.mul_(2), loss,
    )[-1],
    "largest probabilities that are logged": lambda z, y, a, m: (
        p := z.softmax(-1), clipped(log_prob(z, y), a).mean(), (p.amax(-1) * m).sum().detach(), p.argmax(-1),
    )[1:],
    # Ignored rows are computed for the label 0, whose loss is infinite here.
    "suppressed column, beside what is logged of all rows": lambda h, w, y, m: (
        z := F.linear(h, w, torch.where(torch.arange(V) == 0, -torch.inf, 0.0).double()), k := y.clamp(min=1),
        x := torch.where(m > 0, log_prob(z, k * m.long()), 0.0),
        (x.mean() + ce_loss(z, k.where(m > 0, -100)), z.softmax(-1).amax(-1).detach(), z.logsumexp(-1).detach()),
    )[-1],
    "largest logits that are logged": lambda z, y: (
        ce_loss(z, y.where(y > 9, -100)), (z.detach().max(-1).values - z.logsumexp(-1).detach()).exp().flatten()
    ),
    # Of classes whose probabilities are shifted, beside their loss: e in each row.
    "sum of exp that is a constant":
        lambda z, y: (F.nll_loss((u := z.log_softmax(-1)).flatten(0, 1), y.flatten()), (u + 1).exp().sum(-1).detach()),
})  # fmt: skip
expect(Reason.LOGITS_USED)({
    # No logits are returned.
    "a maximum that is returned": lambda z, y: (ce_loss(z, y), z.amax(-1)),
    # A divergence of two heads without a gradient, either of which may be the teacher.
    "a largest probability with a gradient": lambda z, y: ce_loss(z, y) + z.softmax(-1).amax(-1).mean(),
    "a function that adds to a loss's gradient": lambda z, y: OwnFunction.apply(z, ce_loss(z, y)),
    # A linear reads them, and not what they are made of.
    "mean embedding of what is predicted": lambda z, w, y: ce_loss(z, y) + (z.softmax(-1) @ w).square().mean(),
    "read for their strides": lambda z, y: ce_loss(z, y) + torch.zeros_like(z.transpose(1, 2)).mean(),
})  # fmt: skip
expect(Reason.LOGITS_RETURNED)({
    "log-probabilities of all classes that are returned": lambda z: z.log_softmax(-1),
    "a teacher's logits that are returned, too": lambda z, t: (_kl(z, t, reduction="sum"), t),
    "probabilities that are returned beside a loss": lambda z, y: (p := z.softmax(-1), ce_loss(z, y), p)[1:],
})  # fmt: skip
expect(FUSED)({
    # No gradient comes back from it, and no term of the loss is the chunk's.
    "histogram of a chunk beside a loss": lambda f, g, a: ((f * a[:2]).exp().sum(), torch.histc(g, bins=5)),
    "picked twice": lambda x, a: (x[[0, 0, 1]].exp() * a[:3]).sum(),
    "weights that losses are added to in place":
        lambda s, m: (weights := m * 1, weights.add_(s.detach()), (s * weights).sum() / m.sum())[2],
    # They are other tokens: of one number a token, it would be none.
    "transposed": lambda x, a, m: ((x.t().exp() + clipped(x.t(), a.t())) * m.t()).sum(),
    # It reads what a region gives that stands behind it, where the sum of losses is: it moves there.
    "checkpoint of losses":
        lambda h, w, y, s, a: checkpoint(lambda x: x.detach().sort().values.cos(), s, use_reentrant=False).sum()
        * ce_loss(F.linear(h, w), y.flatten().flip(0)) + (s * a).sum(),
    "a slice beside probabilities": lambda h, w, y, s: s[:, 1:].mean() + losses(h, w, y.flip(1)).neg().exp().mean(),
    # Through a view, which has no gradient then.
    "hidden states written without gradients":
        lambda h, w, y: (_without_gradients(lambda h: h[:, 1:].mul_(2), h), losses(h, w, y).mean())[1],
    # One region gives both, where the first is: there, gradients have to be on for the second. No region gives the sum
    # of what mixes tokens.
    "old log-probabilities":
        lambda h, w, y: (_without_gradients(log_probs, h, w, y) - log_probs(h, w, y)).neg().exp().cumsum(0)
        .square().sum() + h.square().sum(),
    # What is computed without gradients is so where it moves, behind the region that has the entropies.
    "weights before the loss":
        lambda h, w, y, e: (_without_gradients(torch.cumsum, e, -1) * losses(h, w, y)).sum() + e.mean(),
    # A mean by weights, also where another loss and what is logged read the same labels.
    "class weights beside log-probabilities": lambda z, w, y: (
        ce_loss(z, y := y.flatten(), weight=class_weights(w)) + ce_loss(z, y),
        log_prob(z.detach().flatten(0, 1), y),
    ),
    "class weights with this package's mark of losses that ignore nothing":
        lambda z, w, y: ce_loss(z, y, weight=class_weights(w), ignore_index=NOTHING_IGNORED),
    # Only what cancels has a gradient.
    "without their gradient": lambda z, y: ce_loss(u := _constant_less_log_sum_exp(z), y) - log_prob(u, y).sum(),
    "with a part of their gradient":
        lambda z, y: F.nll_loss((u := _less_constant_log_sum_exp(z)).flatten(0, 1), y.flatten())
        * (u.exp().argmax(-1) == y).double().mean(),
    "names of other modules":
        lambda z, y: ce_loss(23 * torch.special.expit(z / 7.5) + 3, y)
        + ATEN.nll_loss(z.flatten(0, 1).log_softmax(-1), y.flatten(), None, 2, 5),
    # As in the graph of a module that was exported: reductions are numbers.
    "names of ATen": lambda h, w, y: ATEN.cross_entropy_loss.default(
        u := ATEN.flatten.using_ints(ATEN.linear.default(h, w), 0, 1), v := ATEN.flatten.using_ints(y), None, 2
    ) + ATEN.nll_loss_nd.default(ATEN.log_softmax.int(u, -1), v),
    "ATen's divergence": lambda z, t: ATEN.kl_div.default(
        ATEN.log_softmax.int(z, -1), ATEN.log_softmax.int(t, -1), 2, log_target=True
    ),
    "ATen's divergence, a mean": lambda z, t: ATEN.kl_div.default(z.log_softmax(-1), t.softmax(-1)),
    "permuted by name":
        lambda z, y: F.cross_entropy(torch.transpose(input=z, dim0=1, dim1=2), y)
        + F.cross_entropy(torch.permute(input=z, dims=(0, 2, 1)), y)
        + F.cross_entropy(torch.movedim(input=z, source=2, destination=1), y),
    # A cross-entropy is where they are read, and its sum may follow.
    "labels changed before the sum":
        lambda z, y: _without_gradients(lambda z: (F.cross_entropy(z[0], y[0], reduction="none"), y.mul_(0))[0], z),
    "labels changed before":
        lambda z, y: _without_gradients(lambda z: (y.masked_fill_(y > 7, 0), log_prob(z, y))[1], z),
    "labels drawn by an operator": lambda z, y: (
        draw := torch.ops.flce_tests.draw, (log_prob(z, draw(y)) != log_prob(z, draw(y))).any(),
    )[1],
    "changed as one of a list": lambda h, w, y, x, a: (
        x := x.detach().clone(), torch._foreach_mul_([x], 2.0), (log_probs(h, w, y) * x * a).sum(),
    )[2],
    "changed by an operator without results": lambda h, w, y, x, a, m: (
        x := (x * m).detach(), torch.ops.flce_tests.log(h, x), (log_probs(h, w, y) * x * a).sum(),
    )[2],
    "changed by an operator with another result": lambda s, m: (
        w := m * 1, total := torch.ops.flce_tests.halve(w), (s * w.mul_(3)).sum() / total,
    )[2],
    # A token loss of one would have no gradient for the other.
    "each head weighs the other": lambda h, w, y, x, m: -(
        torch.where(m > 0, x, (u := log_probs(h.tanh(), w, y)).detach()) + u * x.detach()
    ).mean(),
    "counts doubled under a view":
        lambda z: (counts := z.exp().clone(), v := counts.view(-1, V), counts.mul_(2), v.sum(-1).log().sum())[-1],
    "constants added": lambda z, y: ce_loss(z + 3.0, y) + ((z - 1).logsumexp(-1) - z.logsumexp(-1)).exp().sum(),
})  # fmt: skip
expect(ANY)({
    "logged in place where it is a weight":
        lambda s, m: (w := m * 1, u := s * 2, v := w[1:], v.add_(u.detach()[1:]), (u * w).sum())[4],
    "weights that tokens set under a view": lambda x, a, m: (
        k := torch.ones_like(m), v := k.view(-1), k.__setitem__(x.detach() > -3, 0.0), (x * a * v.view_as(x)).sum(),
    )[-1],
    "weights that tokens set and that are returned":
        lambda x, m: (k := torch.ones_like(m), k.__setitem__(x.detach() > -3, 0.0), (x * k).sum(), k)[2:],
    "logged in place in its own memory":
        lambda s, m: (u := s * 2, v := u.detach(), v.add_(s.detach()), (u * m).sum(), v)[3:],
    "changed after they are stacked": lambda h, w, z, y: (
        v := F.linear(h.tanh(), w), u := torch.stack([z, v]), v.mul_(3), ce_loss(u[0], y) - ce_loss(u[1], y),
    )[-1],
    "changed after a checkpoint has stacked them": lambda h, w, y: (
        u := checkpoint(
            lambda h, w: (v := torch.stack([F.linear(h, w), F.linear(h.tanh(), w)]), v[0], v[1])[1:],
            h, w, use_reentrant=False,
        ), u[0].mul_(2), ce_loss(u[0], y) - ce_loss(u[1], y),
    )[-1],
    "stacked along a dimension that is named first": lambda h, w, z, y: (
        u := torch.stack(dim=1, tensors=[z, F.linear(h.tanh(), w)]), ce_loss(u[:, 0], y) - ce_loss(u[:, 1], y),
    )[-1],
    "changed where they are stacked": lambda h, w, z, y: (
        u := torch.stack([z, F.linear(h.tanh(), w)]), u[0].mul_(2), ce_loss(u[0], y) - ce_loss(u[1], y),
    )[-1],
    "stacked without gradients": lambda h, w, z, y: (
        u := _without_gradients(lambda z: torch.stack([z, F.linear(h.sin(), w)]), z), h.sum() + u[0].square().mean(),
    )[-1],
    # What is added to it afterwards is of the same rows.
    "changed through a view": lambda z, y: (
        x := z.log_softmax(-1).gather(-1, y[..., None]), x[:, :2].zero_(),
        (x + 2 * z.logsumexp(-1, keepdim=True)).sum(),
    )[2],
    "beside the logit of another head": lambda h, w, x, y:
        (x - (F.linear(h.tanh(), w) * 2).gather(-1, y[..., None])[..., 0]).mean(),
    "joined with logits": lambda z, y:
        torch.cat([z[:, :1].log_softmax(-1), z[:, 1:]], 1).gather(-1, y[..., None]).sum(),
    "beside sums over the tokens": lambda z, y: ce_loss(z, y) + z.logsumexp(1).mean(),
    "beside an accuracy of five guesses":
        lambda z, y: ce_loss(z, y) + (z.topk(5, -1).indices == y[..., None]).any(-1).double().mean(),
    "rounded down": lambda z, y: ce_loss(z.div(2, rounding_mode="floor"), y),
    "twice a bias": lambda z, w, y: ce_loss(z.add(w[:, 0], alpha=2), y),
    "at indices of the other dimension": lambda z, y: (
        n := torch.arange(B), z[:, :B].log_softmax(-1)[n, n[:, None], y[:, :B]].sum(),
    )[1],
    "sums beside those without gradients": lambda x: x.sum() + _without_gradients(torch.sum, x),
    "rounded, as a factor": lambda s: (s * s.detach().int()).mean(),
    "zeroed at indices": lambda s, y: (t := s[0] * 1, t.__setitem__(y[0] % len(t), 0.0), t.sum())[2],
    "filled in another order": lambda h, w, y: (
        z := h.new_empty(B, 3, V), [z.__setitem__((slice(None), at), F.linear(h[:, at], w)) for at in (2, 0, 1)],
        log_prob(z, y[:, :3]).sum(),
    )[2],
    "filled with one sequence for all": lambda h, w, y: (
        z := h.new_empty(B, 2, V), [z.__setitem__((slice(None), at), F.linear(h[:1, at], w)) for at in (0, 1)],
        log_prob(z, y[:, :2]).sum(),
    )[2],
    "beside a derivative":
        lambda h, w, y: torch.func.grad(lambda h: losses(h, w, y).mean())(h).sum() + losses(h, w, y).mean(),
})  # fmt: skip
expect(TRANSFORMED)({
    # Of logits.
    "rows that they pick": lambda z, y: F.cross_entropy(z[0][at := z[0].detach().amax(-1).argsort()[:3]], y[0][at]),
    "entropy with a part of its gradient": lambda z: -(_less_constant_log_sum_exp(z).exp() * z.log_softmax(-1)).sum(),
    "beside another head's":
        lambda h, w, y: ce_loss(torch.cat([F.linear(h, w), F.linear(h, w * 2)]), torch.cat([y, y])),
    "split at indices that go back": lambda z, y: sum(
        ce_loss(u, v, reduction="sum")
        for u, v in zip(*(x.tensor_split((4, 2), 1) for x in (z, y)), strict=True)
    ),
    "probabilities of some classes, after a sum over all":
        lambda z, y: -z.cumsum(-1)[..., :40].softmax(-1).gather(-1, y.clamp(max=39)[..., None]).log().sum(),
    "log-probabilities of the last classes":
        lambda z, y: -z.split([40, V - 40], -1)[1].log_softmax(-1).gather(-1, y.clamp(max=12)[..., None]).sum(),
    "log-probabilities of two heads": lambda h, z, w, y:
        -torch.cat([z, F.linear(h, w[:9])], -1).log_softmax(-1).gather(-1, y[..., None]).sum(),
    "log-probabilities with further classes":
        lambda z, y: -F.pad(z, (0, 3)).log_softmax(-1).gather(-1, y[..., None]).sum(),
    "log-probabilities of classes by another numbering": lambda h, z, y: -h.new_zeros(*y.shape, 60).scatter_add(
        -1, torch.arange(V).expand(z.shape), z).log_softmax(-1).gather(-1, y[..., None]).sum(),
    "several vocabularies":
        lambda h, w, y: ce_loss(F.linear(h, w[:52]).unflatten(-1, (4, 13))[..., 0, :], y.clamp(max=12)),
})  # fmt: skip
expect("class weights")({
    "class weights, logged":
        lambda z, w, y: ((s := ce_loss(z, y, weight=class_weights(w), reduction="none")).mean(), s.detach()),
    "class weights beside an accuracy":
        lambda z, w, y: ce_loss(z, y, weight=class_weights(w), reduction="none").mean()
        + (z.argmax(-1) == y).double().mean(),
    # Of logits.
    "class weights beside predictions": lambda z, w, y, m: (
        (ce_loss(z, y, weight=class_weights(w), reduction="none") * m.flatten()).sum(), (z.argmax(-1) == y).sum(),
    ),
})  # fmt: skip
expect(Reason.OPERAND_MODIFIED)({
    # A region takes the place of the last operation, and would read the labels there. Eager has no gradient there.
    "labels changed": lambda z, y: _without_gradients(
        lambda z: (x := z.log_softmax(-1).gather(-1, y[..., None]), y.masked_fill_(y > 7, 0), x[..., 0])[2], z
    ),
    "logits changed as one of a list":
        lambda z, y: (u := z.detach(), torch._foreach_mul_([u], 2.0), log_prob(u, y).sum() + ce_loss(z, y))[2],
    "hidden states detached in place":
        lambda h, w, y: (u := h.tanh(), loss := losses(u, w, y).mean(), u.detach_(), loss)[3],
    "other rows changed in place": lambda z, y: (
        before := z[:, :-1], after := z[:, 1:], before.div_(0.7), log_prob(after, y[:, 1:]).sum(),
    )[3],
    "a loss detached in place": lambda z, y: (s := ce_loss(z, y), loss := s * 2, s.detach_(), loss)[3],
    "hidden states changed by an operator": lambda h, w, y: (
        u := h * 2, z := F.linear(u, w.detach()), torch.ops.flce_tests.log(y, u.detach()), ce_loss(z, y),
    )[3],
    "hidden states reshaped in place":
        lambda h, w, y: (u := h * 2, loss := losses(u, w.detach(), y).mean(), u.unsqueeze_(0), loss)[3],
    "logits reshaped in place": lambda h, w, y: (z := F.linear(h[:1], w), z.squeeze_(0), F.cross_entropy(z, y[0]))[2],
    "log-probabilities reshaped in place": lambda z, y, m: (
        x := z.log_softmax(-1).gather(-1, y[..., None]), x.squeeze_(-1), (x * m).sum(),
    )[2],
    "log-probabilities of rows in a buffer": lambda h, w, y: (
        z := h.new_zeros(B, 3, V + 2),
        [z.__setitem__((slice(None), at, slice(V)), F.linear(h[:, at], w)) for at in (2, 0, 1)],
        log_prob(z, y[:, :3]).sum(),
    )[2],
    "predictions reshaped in place": lambda z, y: (best := z.argmax(-1), best.unsqueeze_(0), ce_loss(z, y), best)[2:],
    "changed under other rows":
        lambda z, y, a: (u := z.transpose(0, 1), z.div_(a.exp()[..., None]), ce_loss(u, y.t()))[2],
})  # fmt: skip
expect_each({
    # Its derivative depends on which are NaN.
    "without NaNs": ("nansum in line", lambda s, m: torch.nansum(s * m)),
    "stacked with zeros in other words": (
        "does not depend on the logits",
        lambda x, m: (torch.stack([torch.zeros_like(x, requires_grad=False), x], -1).sum(-1) * m).mean(),
    ),
    # Of more tokens than sequences: PyTorch's derivative has ones beside the diagonal.
    "trace": ("trace in line", lambda s: s.t().trace()),
    "logged beside its neighbours": (
        "losses of different kinds",
        lambda z, y: (-(x := 0.8 * log_prob(z, y) + log_prob(z, y.roll(1, 1)) / 5).mean(), x.detach()),
    ),
    "a factor that is trained":
        ("needs a gradient, too", lambda h, x, a: (h.mean(-1).sigmoid() * x.exp() + a.sigmoid()).log().mean()),
    "as indices": (
        "index_add in line", lambda x, a: x.sum()
        + torch.zeros_like(a).flatten().index_add(0, (x.detach() < -4).long().flatten(), x.flatten()).square().sum(),
    ),
    "sum plus a factor": (
        "another loss is both added to it and multiplied with it",
        lambda x, e, a, m: ((x * a).sum() + (factor := m.mean())) * factor - e.mean(),
    ),
    "count between terms":
        ("adds another loss before the last term", lambda x, e, a, m: (x * a).sum() + (m > 0).sum() - e.mean()),
    "over the tokens": (Reason.CLASS_DIMENSION, lambda z, y: -z.log_softmax(1).gather(-1, y[..., None]).mean()),
    "a bias in another dtype":
        (Reason.DTYPE, lambda h, w, y: ce_loss(F.linear(h.float(), w.float()) + w[:, 0], y)),
    "class weights of some columns":
        (Reason.CLASS_WEIGHTS, lambda z, w, y: ce_loss(z[..., :50], y.clamp(max=49), weight=class_weights(w)[:50])),
    "single tokens": (IN_FORWARD, lambda z, y: sum(F.cross_entropy(z[at, at], y[at, at]) for at in (0, 1))),
    "logits twice": (TRANSFORMED, lambda z, y: ce_loss(torch.cat([z, z]), torch.cat([y, y.roll(1, 1)]))),
    "class weights without their gradient": (
        Reason.CLASS_WEIGHTS,
        lambda z, w, y: ce_loss(_constant_less_log_sum_exp(z), y, weight=class_weights(w)) + w.sum(),
    ),
    "of another's cross_entropy": (NONE, lambda z, y: cross_entropy(z.flatten(0, 1), y.flatten())),
    "by a function with a backward of its own": (Reason.CUSTOM_FUNCTION, lambda z, y: OwnFunction.apply(z, y).mean()),
    "an activation with a backward of its own":
        ([AT_ONCE], lambda h, w, z, y: ce_loss(F.linear(OwnFunction.apply(z)[..., :H] + h, w), y)),
    "after a graph break": (Reason.ARGUMENT, lambda z, y: (torch._dynamo.graph_break(), -log_prob(z, y).mean())[1]),
    "sequences twice": (
        "is neither linear nor an operation on single tokens", lambda z, y, a: (
            clipped(torch.stack([log_prob(z[at], y[at]) for at in (1, 1)]), a[:2])
        ).sum(),
    ),
    # Nothing reads a log-softmax, but what is subtracted.
    "soft targets after the maximum": (
        Reason.NOT_FOLLOWED, lambda z, w: (
            (u := _less_maximum(z)).exp().sum(-1).log() - (u * w.detach().sum(1).softmax(0)).sum(-1)
        ).mean(),
    ),
    # As a reranker has them: one column for each of a group.
    "scores of candidates":
        (Reason.NO_LINEAR, lambda z, y, h: F.cross_entropy(z[:, -1, 7].view(2, 2), y[:2, 0] % 2) + h.sum()),
    "a temperature that is computed twice": (
        [AT_ONCE], lambda z, y, a: (
            count := torch.zeros((), dtype=a.dtype), first := z / a[:, :1, None].exp().clamp(min=0.1),
            second := z / a[:, :1, None].exp().clamp(min=0.1), count.add_(len(y)),
            (ce_loss(first, y) + second.logsumexp(-1).square().mean(), count),
        )[4],
    ),
    "each sequence beside the entropy of all": (
        [AT_ONCE], lambda z, y, a: (
            x := torch.stack([u.log_softmax(-1).gather(-1, v[:, None]) for u, v in zip(z, y, strict=True)])[..., 0],
            ((x.exp() * a).sum(), entropy(z.detach()).mean()),
        )[1],
    ),
    # Nobody needs its gradient: it is detached last.
    "a metric of other rows":
        ([AT_ONCE, NO_GRADIENT], lambda z, y, e: (ce_loss(z[:, :-1], y[:, 1:]), (e.mean() * 2).detach())),
    "a metric of other rows in a buffer":
        ([AT_ONCE, NO_GRADIENT], lambda z, y, e: (ce_loss(z[:, :-1], y[:, 1:]), _logged(e.mean() * 2))),
    # A head that waits is one region, with all of its chunks, though their sum is left to the program.
    "chunks of two heads in turns": (
        [AT_ONCE, LATER], lambda h, w, y, a: sum(
            (losses(h[part], head, y[part]).exp() * a[part]).sum()
            for part in (slice(0, 2), slice(2, None)) for head in (w, w * -1.5)
        ),
    ),
    # Apart, they would be no loss that anybody knows, and take no rows.
    "rows that are joined, beside another head": (
        [AT_ONCE, AT_ONCE], lambda h, w, y: F.cross_entropy(
            F.linear(rows := h.flatten(0, 1), w.flip(0)), y := y.flatten()
        ) - torch.cat([F.linear(rows[at], w) for at in (slice(8, None), slice(8))]).softmax(-1).gather(
            -1, y.roll(-8)[:, None]
        ).log().sum(),
    ),
    "in vmap":
        (Reason.DISTRIBUTED, lambda h, w, y: torch.vmap(lambda x, y: F.cross_entropy(F.linear(x, w), y))(h, y).sum()),
    "class weights in vmap": (
        Reason.DISTRIBUTED, lambda z, y, w: torch.vmap(lambda weight: F.cross_entropy(
            z.flatten(0, 1), y.flatten(), weight
        ))(w.detach().T.abs()).sum(),
    ),
    "padded": ("after pad in line", lambda x, a: (F.pad(x, (0, 1)) * a[:, :1]).exp().sum()),
    "tokens beside their neighbours":
        ("combines different tokens", lambda x, a: (x.exp() * x.roll(1, 1).exp() * a).sum()),
    "returned": ("and not detached", lambda x, a: (torch.exp(x - a).mean(), x)),
    # Only one of the regions can compute its gradients before the other.
    "heads that weigh each other": (
        "depend on its own results",
        lambda h, w, y, x: (x.exp() * (u := log_probs(h, w * -1.5, y)).detach()).sum() + (u.exp() * x.detach()).sum(),
    ),
    "two heads in turns": (
        "added in turns", lambda h, w, y, z, x, m: losses(h, v := w * -1.5, y).mean() - (x * m).sum()
        + F.linear(h, v).logsumexp(-1).square().mean() - z.logsumexp(-1).square().mean() / 3,
    ),
    "divergence at several labels": (
        IN_FORWARD, lambda z, y, a: F.kl_div(
            x := z.log_softmax(-1).gather(-1, several_labels(y)), q := a[..., None].expand(-1, -1, 3).exp(),
            reduction="batchmean",
        ) + F.kl_div(target=q, input=x, reduction="sum"),
    ),
    # Of so few tokens that a gradient of the head for each loss takes more memory than their logits.
    "several labels, beside a smoothed loss of few tokens": (
        IN_FORWARD, lambda h, w, y: F.cross_entropy(z := F.linear(h[0, :2], w), y[0, :2], label_smoothing=0.1)
        - z.log_softmax(-1).gather(-1, several_labels(y[0, :2])).mean(),
    ),
    "several labels of other rows": ([LATER, LATER], lambda h, w, y: tuple(
        F.linear(rows, w).log_softmax(-1).gather(-1, several_labels(y)).exp().prod(-1).mean() for rows in (h, h * 2)
    )),
    "relative positions":
        (NONE, lambda h, w, y: F.linear(h, w[:9]).gather(-1, several_labels(y) % 9).softmax(-1).square().sum()),
    "trained weights": ("needs a gradient, too", lambda h, x, a: (torch.exp(x - a) * h.mean(-1).exp().square()).sum()),
})  # fmt: skip
expect(IN_FORWARD, thunder=True)({
    "dft": lambda s: (s * torch.exp(-s.detach())).mean(),
    "accuracy by topk": lambda z, y: (
        u := z.flatten(0, 1), right := u.topk(1, -1)[1].t() == y.view(1, -1), (ce_loss(z, y), right.sum()),
    )[-1],
    "by matmul": lambda x, a, m: (torch.stack([x, x * a], -1) @ a[0, :2] * m).sum(),
    "taken": lambda x: x.take(torch.tensor([0, 3, 3])).mean(),
    "compared with numbers that are trained": lambda h, x, a: torch.where(x.exp() > h.mean(-1).tanh(), x * a, a).sum(),
    "bits": lambda x, m: ((x * m).sum(), (x.detach() * 1e-3).view(torch.int64) < 0),
    # thunder's derivative keeps the sum, with a dtype of its own.
    "summed in another dtype": lambda s: (s - s.detach()).sum(dtype=torch.float32).double(),
    # thunder has its gradient from PyTorch, which reads the rows.
    "by dot": lambda s, m: torch.dot(s[0], m[0]),
    # It is NaN, though no token has a weight that is.
    "none selected": lambda s, m: torch.where(m < 0, s, 0.0).sum() / (m < 0).sum(),
    "none of one sequence": lambda h, w, y, m: (
        count := (valid := (m > 0) & (torch.arange(B) > 0)[:, None]).sum(-1),
        torch.where(count > 0, losses(h, w, y.where(valid, -100)).sum(-1) / count, 0.0).mean(),
    )[1],
    # Of some tokens, of whose losses no other sum is made.
    "accuracy of an answer": lambda z, y, m: (
        (log_prob(z, y).exp() * m).sum(), (z[1::2, 2:].flatten(0, 1).argmax(-1) == y[1::2, 2:].flatten()).sum(),
        (z[0].argmax(-1) == y[0]).sum(),
    ),
    "accuracy of tokens in another order": lambda z, y, m: (
        v := y.clamp(max=2).where(m > 0, -100), ce_loss(z[..., :3], v),
        (z[..., :3].transpose(0, 1).argmax(-1) == v.view(-1, B)).sum(),
    )[1:],
    "several labels": lambda z, y, a, m: cross_entropy_of(z.log_softmax(-1).gather(-1, several_labels(y)), a, m),
    "several labels, from logits": lambda z, y, a, m: cross_entropy_of(
        (u := z.flatten(0, 1) / 2).gather(1, several_labels(y).flatten(0, 1)) - u.logsumexp(1, keepdim=True),
        a.flatten(), m.flatten(),
    ),
    "several labels, with metrics": lambda z, y, a, m: (
        t := z.log_softmax(-1).gather(-1, several_labels(y)), cross_entropy_of(t, a, m), t.detach().exp().sum(-1),
        (z.argmax(-1) == y).sum(), entropy(z.detach()).mean(),
    )[1:],
    "several labels, without an impossible one": lambda h, w, y, a, m: cross_entropy_of(
        F.linear(h, w, torch.zeros_like(w[:, 0]).index_fill(0, y[0, :1], -torch.inf)).log_softmax(-1).gather(
            -1, several_labels(y)
        ).masked_fill(several_labels(y) == y[0, 0], 0.0), a, m,
    ),
    "number of each sequence": lambda x, a, m: (((x * m).sum(-1) - a.exp().sum(-1)) * a[:, 0]).mean() + 3 * m.sum(),
    "sum that is logged": lambda x, m: (-0.5 * (loss := (x * m).sum()) / m.sum(), loss.detach()),
    # The mean over tokens and classes at once.
    "of all classes":
        lambda z, y: 0.9 * ce_loss(z, y) - 0.1 * F.log_softmax(z, -1).mean()
        + 1e-3 * (z.softmax(-1) * z.log_softmax(-1)).sum(),
})  # fmt: skip
expect([AT_ONCE], thunder=True)({
    "several labels of chunks, beside their own": lambda h, w, y, a, m: sum(
        cross_entropy_of(z.log_softmax(-1).gather(-1, several_labels(y[at : at + 2])), a[at : at + 2], m[at : at + 2])
        + ce_loss(z, y[at : at + 2].where(m[at : at + 2] > 0, -100), reduction="sum")
        for at in (0, 2) for z in [F.linear(h[at : at + 2], w)]
    ),
    # The other rows have only one.
    "several labels of some rows": lambda h, w, z, y, a, m: cross_entropy_of(
        z.log_softmax(-1).gather(-1, several_labels(y)), a, m
    ) + ce_loss(z, y.where(m > 0, -100)) + ce_loss(F.linear(h * 2, w), y.where(m > 0, -100)),
    "losses of several labels and of one, each logged": lambda h, w, y, a, m: (
        z := F.linear(torch.cat([h, h * 2]), w), t := z[:4].log_softmax(-1).gather(-1, several_labels(y)),
        one := [ce_loss(rows, y.where(m > 0, -100)) for rows in (z[:4], z[4:])], kd := cross_entropy_of(t, a, m),
        kd * 0.3 + one[0] - one[1] * 0.2, kd.detach(), one[1].detach(), one[0].detach(), t.detach().exp().sum(-1),
        (z[:4].argmax(-1) == y).sum(),
    )[4:],
    "several labels of joined chunks": lambda h, w, y, a, m: cross_entropy_of(torch.cat([
        F.linear(h[at : at + 2], w).log_softmax(-1).gather(-1, several_labels(y[at : at + 2])) for at in (0, 2)
    ]), a, m),
    "divergence at several labels, written out": lambda z, y, a: (
        q := torch.stack([a, 2 * a, a - 1], -1).sigmoid(), t := z.log_softmax(-1).gather(-1, several_labels(y)),
        (q * (q.log() - t)).sum(-1).mean(),
    )[-1],
})  # fmt: skip
expect([AT_ONCE, AT_ONCE])({
    "several labels beside a smoothed loss": lambda z, y, a, m: cross_entropy_of(
        z.log_softmax(-1).gather(-1, several_labels(y)), a, m
    ) + ce_loss(z, y, label_smoothing=0.1),
})  # fmt: skip
expect(FUSED, thunder=True)({
    "times ones": lambda s, m: (s @ torch.ones(m.shape[1], 1, dtype=m.dtype)).sum(),
    # thunder lacks the sum of a scalar's gradient, where that is broadcast on a CPU, and a method of tensors.
    "scalar and vector":
        lambda h, w, y: (s := losses(h, w, y % 3)).mean() + s * s.mean() - s.sum() + torch.arange(3).sum(),
    "of a module": lambda z, y: -LOG_SOFTMAX(z[0]).gather(1, y[0][:, None]),
})  # fmt: skip
expect_each(thunder=True, programs={
    "by other tokens": ("mixes tokens, after softmax", lambda x, a: (torch.exp(x - a) * x.detach().softmax(-1)).sum()),
    # thunder has its gradient from PyTorch, which wants one of each part.
    "of a part": ("hsplit in line", lambda x: x.hsplit([2])[0].sum()),
    # The region takes the place of the loss, so it would read them after the change.
    "hidden states changed": (
        Reason.OPERAND_MODIFIED,
        lambda h, w, y: (x := h.tanh() + 1, z := F.linear(x, w.detach()), x.mul_(0.5), ce_loss(z, y) + x.sum())[3],
    ),
    # It is NaN.
    "mean of no tokens": (ANY, lambda h, w, s: s.sum() + F.linear(h[:, :0], w).log_softmax(-1).mean().isnan().double()),
    "greedy choice":
        (Reason.NOT_A_LOG_PROBABILITY, lambda z: (u := z.log_softmax(-1)).gather(-1, u.argmax(-1, keepdim=True)).sum()),
    # A divergence to a teacher; with the student's entropy.
    "exponentials of several labels": ("in line", lambda z, y, a: (
        t := (u := z.log_softmax(-1)).gather(-1, several_labels(y)),
        (t.exp() * (t - a[..., None])).sum(-1).mean() - entropy(u).square().mean() / 9,
    )[1]),
    "several labels, returned": ("and not detached", lambda z, y: z.log_softmax(-1).gather(-1, several_labels(y))),
    "several labels, smoothed": (
        "not one weighted sum", lambda z, y: (
            (x := z.log_softmax(-1)).gather(-1, several_labels(y)) * 0.9 + x.mean(-1, keepdim=True) / 10
        ).mean(),
    ),
    "several labels that cancel": (
        "not one weighted sum",
        lambda z, y: (z.gather(-1, i := several_labels(y)) - z.log_softmax(-1).gather(-1, i)).mean(),
    ),
    "normalised over several labels":
        (Reason.NOT_A_LOG_PROBABILITY, lambda z, y: z.gather(-1, several_labels(y)).log_softmax(-1).sum()),
    # The gradient is 0, and there is one.
    "normalised twice": (Reason.NOT_FOLLOWED, lambda z: z.log_softmax(-1).logsumexp(-1).square().sum()),
    "several codebooks": (
        PRODUCT, lambda h, w, y: log_prob(
            torch.einsum("bth,kvh->bktv", h, torch.stack([w, w.tanh()])), torch.stack([y, y], 1)
        ).mean(),
    ),
})  # fmt: skip

# Distillation from a teacher.


def _kl(z, t, tau=1.0, **settings):
    return F.kl_div((z / tau).log_softmax(-1), (t / tau).softmax(-1), **settings)


def _mixed(z, t, *, share=0.3, weights=None):
    """The Jensen-Shannon divergence of each class, as TRL's `GKDTrainer` has it."""
    p, q, share = z.log_softmax(-1), t.log_softmax(-1), torch.tensor(share, dtype=z.dtype)
    m = torch.logsumexp(torch.stack([p + torch.log1p(-share), q + torch.log(share)]), dim=0)
    of_teacher, of_student = (F.kl_div(m, each, reduction="none", log_target=True) for each in (q, p))
    weights = weights or (share, 1 - share)
    return weights[0] * of_teacher + weights[1] * of_student


def _of_mean(z, t, *, a=0.5, b=0.5):
    """The same, from the mean of the probabilities."""
    p, q = z.softmax(-1), t.softmax(-1)
    m = (a * p + b * q).log()
    return (p * (z.log_softmax(-1) - m)).sum(-1) / 2 + (q * (t.log_softmax(-1) - m)).sum(-1) / 2


LOG_2 = torch.tensor(2.0).log().item()


def _smoothed(z, t):
    x = z.log_softmax(-1)
    return -0.9 * (t.softmax(-1) * x).sum(-1) - 0.1 * x.mean(-1)


def _of_parts(h, w, y, a, m):
    """As torchtune computes it: a call of both heads for each chunk of tokens."""
    total, teacher = 0.0, w.detach().sin()
    for x, labels in zip(h.chunk(2, 1), y.chunk(2, 1), strict=True):
        z, t = F.linear(x, w), F.linear(x.detach().cos(), teacher)
        total = total + _kl(z, t, reduction="sum") + 0.5 * ce_loss(z, labels, reduction="sum")
    return total / y.numel()


expect([AT_ONCE], thunder=True)({
    "divergence of flattened rows": lambda z, t: _kl(z.flatten(0, 1), t.flatten(0, 1), reduction="batchmean"),
    "divergence of sequences, at a temperature": lambda z, t: 4 * _kl(z, t, 2.0, reduction="batchmean"),
    "mean over the classes": lambda z, t: F.kl_div(z.log_softmax(-1), t.log_softmax(-1), log_target=True),
    "divergence and labels": lambda z, t, y: 0.3 * ce_loss(z, y) + 2 * _kl(z, t, 2.0, reduction="sum") / y.numel(),
    "what is logged of both": lambda z, t, y: (
        hard := ce_loss(z, y), soft := _kl(z, t, 2.0, reduction="none").sum(-1),
        (hard + soft.mean(), hard.detach(), soft.detach().max(), (z.argmax(-1) == y).sum(), entropy(z).mean().detach()),
    )[-1],
    "an accuracy without a cross-entropy": lambda z, t, y: (_kl(z, t, 2.0).mul(9), (z.argmax(-1) == y).double().mean()),
    "labels that are only logged": lambda z, t, y: (_kl(z, t, reduction="sum"), ce_loss(z, y).detach()),
    # Each leaves out tokens of its own, and some that the other leaves out, too.
    "other tokens of both": lambda z, t, y, m: (_kl(z, t, reduction="none").sum(-1) * m).sum() / m.sum()
        + ce_loss(z, torch.where((m > 0) & (y < 30), y, -100)),
    "teacher's probabilities as targets": lambda z, t, m: (
        F.cross_entropy(z.flatten(0, 1), t.softmax(-1).flatten(0, 1), reduction="none") * m.flatten()
    ).mean(),
    "cross-entropy written out": lambda z, t, m: -((t.softmax(-1) * z.log_softmax(-1)).sum(-1) * m).sum() / m.sum(),
    "twice the probabilities": lambda z, t: (2 * t.softmax(-1) * z.log_softmax(-1)).sum(),
    "times numbers before the sum":
        lambda z, t: (-((q := t.log_softmax(-1)).exp() * (q - z.log_softmax(-1)) * -2) / 3).sum(),
    "reverse divergence": lambda z, t: F.kl_div(
        (t / 3).log_softmax(-1), (z / 3).log_softmax(-1), reduction="batchmean", log_target=True
    ),
    "reverse divergence written out, and labels": lambda z, t, y, m: ce_loss(z, y) + (
        ((p := (z / 2).log_softmax(-1)).exp() * (p - (t / 2).log_softmax(-1))).sum(-1) * m
    ).sum(),
    "added for each token": lambda z, t, y, m: (
        (F.cross_entropy(z.mT, torch.where(m > 0, y, -100), reduction="none") + _kl(z, t, reduction="none").sum(-1))
        * y.cos()
    ).mean(),
    "labels that are all ignored, and their number": lambda z, t, y: _kl(z, t, reduction="none").sum(-1).sum()
        + ce_loss(z, torch.full_like(y, -100), reduction="none").sum() / (y < 0).sum(),
    "next tokens of both": lambda z, t, y: _kl(z[:, :-1], t[:, :-1], reduction="sum") + ce_loss(z[:, :-1], y[:, 1:]),
    "calls for parts": _of_parts,
    # Labels of some of the divergence's rows.
    "labels of the next tokens": lambda z, t, y: ce_loss(z[:, :-1], y[:, 1:]) + 4 * _kl(z, t, 2.0, reduction="sum"),
    "labels of next tokens, and flat rows": lambda z, t, y: _kl(
        z.flatten(0, 1), t.flatten(0, 1), reduction="batchmean"
    ) + ce_loss(z[1:, :-1].contiguous(), torch.where(y < 9, -100, y)[1:, 1:], reduction="sum") / 7,
    "labels of other rows, each with a weight": lambda z, t, y, a: _kl(z, t).mul(3) - (
        log_prob(z.transpose(0, 1)[2:], y.T[2:]) * a.T[2:]
    ).sum(),
    "labels of a token of each sequence": lambda z, t, y, a: (_kl(z, t, reduction="none") * a[..., None]).sum()
        + F.cross_entropy(z[:, -2], y[:, 0]),
    "what is logged of some rows": lambda z, t, y, m: (
        hard := ce_loss(z[:, :-1], y[:, 1:]), soft := (_kl(z, t, reduction="none").sum(-1) * m).mean(),
        (hard + soft, hard.detach(), soft.detach(), (z[:, :-1].argmax(-1) == y[:, 1:]).double().mean()),
    )[-1],
    "probabilities of one and a difference of the other":
        lambda z, t: ((q := t.log_softmax(-1)).exp() * (z.log_softmax(-1) - q)).sum(),
    "a divergence written out the other way":
        lambda z, t: ((p := z.log_softmax(-1)).exp() * (t.log_softmax(-1) - p)).sum(),
    # Masks of rows, before the sum over the classes.
    "summands times a mask": lambda z, t, m: (_kl(z, t, 2.0, reduction="none") * m.unsqueeze(-1)).sum() / m.sum(),
    "summands that a mask fills": lambda z, t, y, m: ce_loss(z, y) + 2 * _kl(z, t, reduction="none").masked_fill(
        (m == 0).unsqueeze(-1), 0.0
    ).sum() / m.numel(),
    "summands that a mask chooses, of each sequence": lambda z, t, y, m: (
        torch.where(m[..., None] > 0, _kl(z, t, reduction="none"), 0.0).sum((1, 2)) / m.sum(1)
    ).mean(),
    "summands in another order": lambda z, t, m: (_kl(z, t, reduction="none").mT.transpose(0, 2) * m.T[:, None]).sum(),
    "summands of some rows": lambda z, t: _kl(z, t, reduction="none")[:, 1:].flatten(0, 1)[::2].sum(-1).mean(),
    # As DistiLLM and torchtune have them.
    "reverse divergence of two products": lambda z, t, m: (
        p := z.log_softmax(-1), inf := torch.isinf(z) | torch.isinf(t),
        product := (p.exp() * t.log_softmax(-1)).masked_fill(inf, 0) - (p.exp() * p).masked_fill(inf, 0),
        -(product.sum(-1).view(-1) * m.view(-1)).sum() / m.sum(),
    )[-1],
    "less the teacher's entropy": lambda z, t, m: (
        (((q := t.log_softmax(-1)).exp() * q).sum(-1) - (q.exp() * z.log_softmax(-1)).sum(-1)) * m
    ).sum(),
    "less the teacher's entropy, of all classes": lambda z, t, m: (
        ((q := t.log_softmax(-1)).exp() * q - q.exp() * z.log_softmax(-1)) * m[..., None]
    ).sum(),
    "filled where logits are infinite": lambda z, t, y: -(torch.masked_fill(
        t.softmax(-1) * z.log_softmax(-1), torch.isinf(z) | torch.isinf(t), 0
    ).sum(-1).view(-1) * (y.view(-1) > 3)).sum() / (y > 3).sum(),
})  # fmt: skip
expect([AT_ONCE])({
    "summands that are changed in place": lambda z, t, m: (
        p := z.log_softmax(-1), product := (p.exp() * t.log_softmax(-1)) * 2, product.sub_(p.exp() * p * 2),
        product.div_(-2), (product * m[..., None]).sum(),
    )[-1],
    "Jensen-Shannon divergence": lambda z, t, m: (_mixed(z / 2, t / 2) * m[..., None]).sum() / m.sum(),
    "Jensen-Shannon divergence of two means": lambda z, t: (
        m := ((z.softmax(-1) + t.softmax(-1)) / 2).log(),
        0.5 * F.kl_div(m, z.log_softmax(-1), log_target=True) + 0.5 * F.kl_div(m, t.softmax(-1)),
    )[-1],
    "Jensen-Shannon divergence from a mean": lambda z, t, y: _of_mean(z, t).mean() + ce_loss(z, y),
    "times numbers that are tensors": lambda z, t: _kl(z, t, reduction="none").mul(
        torch.add(torch.tensor(0.5), torch.tensor(0.25), alpha=2) + torch.tensor(data=7.0).div(2, rounding_mode="floor")
        + torch.log(input=torch.tensor(3.0)) + torch.tensor(300).to(torch.uint8)
    ).sum(),
    "Jensen-Shannon divergence, log of a sum": lambda z, t: (
        m := torch.logaddexp(z.log_softmax(-1) - LOG_2, t.log_softmax(-1) - LOG_2),
        F.kl_div(m, z.log_softmax(-1), reduction="sum", log_target=True) +
        F.kl_div(m, t.log_softmax(-1), reduction="sum", log_target=True),
    )[-1],
})  # fmt: skip
expect([NO_GRADIENT])({
    "an evaluated Jensen-Shannon divergence": lambda z, t: _without_gradients(
        lambda: _mixed(t, z, share=0.7).sum(-1)
    ),
})  # fmt: skip
expect([AT_ONCE], thunder=True)({
    "log-probabilities of all classes times a mask": lambda z, m: -(z.log_softmax(-1) * m[..., None]).sum(),
    "entropies times a mask": lambda z, m: ((x := z.log_softmax(-1)).exp() * x * m[..., None]).sum() / m.sum(),
    "one-hot labels times a mask":
        lambda z, y, m: (z.log_softmax(-1) * F.one_hot(y, V) * m[..., None]).sum((1, 2))[1:].sum(),
})  # fmt: skip
expect("is neither linear nor an operation on single tokens", thunder=True)({
    "entropies of sequences times a mask": lambda z, m: (
        ((x := z.log_softmax(-1)).exp() * x * m[..., None]).sum((1, 2)) ** 2
    ).mean(),
})  # fmt: skip
expect([NO_GRADIENT], thunder=True)({
    "evaluated, with labels of some rows": lambda z, t, y: _without_gradients(lambda: (
        _kl(z, t, 2.0, reduction="sum"), ce_loss(z[:, :-1], y[:, 1:]), (z[:, :-1].argmax(-1) == y[:, 1:]).sum(),
    )),
    "evaluated summands": lambda z, t, m: _without_gradients(
        lambda: ((_kl(z, t, reduction="none") * m[..., None]).sum((1, 2)),)
    ),
    "a divergence from the trained head": lambda z, t:
        F.kl_div(t.log_softmax(-1), z.log_softmax(-1).detach(), reduction="sum", log_target=True),
    "evaluated": lambda z, t, y: _without_gradients(lambda: (_kl(z, t, 2.0, reduction="sum"), ce_loss(z, y))),
})  # fmt: skip
expect(Reason.CLASS_PROBABILITIES)({
    # These gradients would wait, and nothing saves the logits of both.
    "divergences that are clipped": lambda z, t: _kl(z, t, reduction="none").sum(-1).clamp(max=2).sum(),
    "another temperature": lambda z, t: F.kl_div((z / 2).log_softmax(-1), t.softmax(-1), reduction="sum"),
    "a skewed divergence": lambda z, t: _of_mean(z, t, a=0.1, b=0.9).sum(),
    "one half of a Jensen-Shannon divergence": lambda z, t: F.kl_div(
        ((z.softmax(-1) + t.softmax(-1)) / 2).log(), t.log_softmax(-1), reduction="sum", log_target=True
    ),
    "weights of another mixture": lambda z, t: _mixed(z, t, weights=(0.5, 0.5)).sum(),
    "a mixture that is none": lambda z, t: _of_mean(z, t, a=0.5, b=0.2).sum(),
    "a negative temperature": lambda z, t: _kl(z, t, -2.0, reduction="sum"),
    "a head with a bias": lambda z, t, w: _kl(z + w[:, 0], t, reduction="sum"),
    "some of the classes": lambda z, t: _kl(z[..., :40], t[..., :40], reduction="sum"),
    "a teacher that is trained": lambda h, z, w: -(F.linear(h.cos(), w.sin()).softmax(-1) * z.log_softmax(-1)).sum(),
    "two teachers": lambda z, t: _kl(z, t, reduction="sum") + _kl(z, t * 2, 2.0, reduction="sum"),
    "smoothed targets": lambda z, t: F.cross_entropy(z.mT, t.softmax(-1).mT, label_smoothing=0.1),
    "a smoothed loss that is only logged": lambda z, t: (_kl(z, t, reduction="sum"), _smoothed(z, t).detach()),
    "the teacher's entropy with another factor":
        lambda z, t: (-(t.softmax(-1) * z.log_softmax(-1)).sum(-1) + _kl(z, t, reduction="none").sum(-1)).sum(),
    "a part of the probabilities": lambda z, t: F.kl_div(z.log_softmax(-1), t.softmax(-1) / 2, reduction="sum"),
    "a number for a reduction": lambda z, t: torch.kl_div(z.log_softmax(-1), t.softmax(-1), reduction=2),
    # Such as at a graph break before an index by a mask.
    "a divergence of each class that is clipped": lambda z, t: _kl(z, t, reduction="none").clamp(max=1).sum(),
    "summands times other numbers for each class": lambda z, t: (_kl(z, t, reduction="none") * z[0, 0].detach()).sum(),
    "summands and a constant": lambda z, t, m: (_kl(z, t, reduction="none") * m[..., None] + m[..., None]).sum(),
    "a mean over the classes after a mask": lambda z, t, m: (_kl(z, t, reduction="none") * m[..., None]).mean(),
    # The gradient is another one.
    "a reverse divergence without that of its weights":
        lambda z, t: ((p := z.log_softmax(-1)).exp().detach() * (p - t.log_softmax(-1))).sum(),
})  # fmt: skip
expect(Reason.LOGITS_RETURNED)({
    # Such as at a graph break before an index by a mask.
    "a divergence of each class": lambda z, t: _kl(z, t, reduction="none"),
})  # fmt: skip
expect(ANY)({
    "a mixture with large weights": lambda z, t: F.kl_div(
        torch.logaddexp(z.log_softmax(-1) + 1000, t.log_softmax(-1) - 1), t.softmax(-1), reduction="sum"
    ),
    # In evaluation, too.
    "classes that are divisors": lambda h, z, t, m: (
        h.sum(), *_without_gradients(lambda: (
            (1 / z.softmax(-1)).sum(), (m[..., None] / _kl(z, t, reduction="none")).sum((1, 2))
        ))
    ),
    "rounded summands": lambda z, m:
        torch.div(z.log_softmax(-1) * m[..., None], 3, rounding_mode="floor").sum() + z.log_softmax(-1).sum(),
    "rounded summands, evaluated": lambda h, z, t, m: (h.sum(), _without_gradients(
        lambda: torch.div(_kl(z, t, reduction="none"), m[..., None] + 0.1, rounding_mode="trunc").sum()
    )),
    "filled with other numbers": lambda h, z, t, m: (
        h.sum(), *_without_gradients(lambda: (
            _kl(z, t, reduction="none").masked_fill(m[..., None] == 0, 1.0).sum(),
            torch.where(m[..., None] > 0, _kl(z, t, reduction="none"), 2.0).sum(),
        ))
    ),
    "terms of a divergence in another shape": lambda z, t: (
        m := ((z.softmax(-1) + t.softmax(-1)) / 2).log(),
        (F.kl_div(m, z.log_softmax(-1), log_target=True).view(1) + F.kl_div(m, t.softmax(-1)).view(1)).sum(),
    )[-1],
    "labels of more rows than the divergence has": lambda z, t, y:
        _kl(z[:, :-1], t[:, :-1], reduction="sum") + ce_loss(z, y),
    "changed in place, and compared with another head": lambda z, t, y: (
        z.div_(2), p := z.detach().log_softmax(-1), q := t.log_softmax(-1),
        log_prob(z, y).exp().mean() + (q.exp() * (p - q)).sum(-1).flip(0).sum(),
    )[-1],
    "a reverse divergence less the normalisation, and twice that":
        lambda z, t: ((z.softmax(-1) * (z - t.log_softmax(-1))).sum(-1) + z.logsumexp(-1)).sum(),
    "divergence beside another loss": lambda z, t: _kl(z, t, reduction="sum") + z.logsumexp(-1).square().mean(),
    "divergence beside a smoothed loss":
        lambda z, t, y: _kl(z, t, reduction="sum") + ce_loss(z, y, label_smoothing=0.1),
    "divergence of one number, and of one beside it":
        lambda z, t: (d := _kl(z, t, reduction="none").sum(-1), d.mean() + z.logsumexp(-1).mean())[-1],
    "two teachers, and two calls of the head": lambda h, w, z, t:
        _kl(z, t, reduction="sum") + _kl(F.linear(h, w), t.roll(1, 0), reduction="sum"),
    "labels of two calls of the head": lambda h, w, z, t, y:
        _kl(z, t, reduction="sum") + ce_loss(z, y) + 3 * ce_loss(F.linear(h, w), y.roll(1, 0)),
    "a difference that is summed": lambda z, t: (t.log_softmax(-1) - z.log_softmax(-1)).sum(),
    "a difference from logits": lambda z, t: (t.softmax(-1) * (t - z.log_softmax(-1))).sum(),
    "a difference from probabilities": lambda z, t: ((q := t.softmax(-1)) * (q - z.log_softmax(-1))).sum(),
    "a difference of probabilities": lambda z, t: (t.softmax(-1) * (t.log_softmax(-1) - z.softmax(-1))).sum(),
    "a reverse difference of logits": lambda z, t: (z.softmax(-1) * (z - t.log_softmax(-1))).sum(),
    "a difference of a difference":
        lambda z, t: ((q := t.softmax(-1)) * (t.log_softmax(-1) - q * z.log_softmax(-1))).sum(),
    "a reverse difference times probabilities of another input":
        lambda h, w, z, t: (F.linear(h.cos(), w).softmax(-1) * (z.log_softmax(-1) - t.log_softmax(-1))).sum(),
    "a difference times another teacher's probabilities":
        lambda w, z, t: ((t @ w @ w.T).detach().softmax(-1) * (t.log_softmax(-1) - z.log_softmax(-1))).sum(),
    "a teacher of the first sequence for all": lambda z, t: (t[:1].softmax(-1) * z.log_softmax(-1)).sum(),
    "a product without a normalisation": lambda z, t: (t.exp() * z.log_softmax(-1)).sum(),
    "a product of probabilities": lambda z, t: (t.softmax(-1) * z.softmax(-1)).sum(),
    "a product of three": lambda z, t: (t.softmax(-1) * (z.softmax(-1) * z.log_softmax(-1))).sum(),
    "a product at a label": lambda z, t, y: (t.softmax(-1) * z.log_softmax(-1)).gather(-1, y[..., None]).mean(),
    "a product at one-hot labels":
        lambda z, t, y: (t.softmax(-1) * z.log_softmax(-1) * F.one_hot(y, V)).sum(),
    "a difference at one-hot labels":
        lambda z, t, y: (t.softmax(-1) * ((t.log_softmax(-1) - z.log_softmax(-1)) * F.one_hot(y, V))).sum(),
    "a difference at a label":
        lambda z, t, y: (t.log_softmax(-1) - z.log_softmax(-1)).gather(-1, y[..., None]).mean(),
    "a difference of other rows": lambda z, t:
        (t.softmax(-1)[:, 1:] * (t.log_softmax(-1) - z.log_softmax(-1))[:, :-1]).sum(),
    "a difference in another order": lambda z, t: (
        (q := t.log_softmax(-1)).exp() * (q - z.log_softmax(-1))[torch.tensor([1, 0, 3, 2])]
    ).sum(),
    "a reverse difference in another order": lambda z, t: (
        (p := z.log_softmax(-1)).exp().transpose(0, 1) * (p - t.log_softmax(-1)).transpose(0, 1)
    ).sum(),
    "a reverse difference of some rows": lambda z, t:
        ((p := z.log_softmax(-1)).exp()[:2] * (p - t.log_softmax(-1))[:2]).sum(),
    "divergences that are joined": lambda z, t:
        torch.cat([_kl(z[at], t[at], reduction="none").sum(-1) for at in (slice(2), slice(2, None))]).mean(),
    "rows in another order": lambda z, t: _kl(z.transpose(0, 1), t.transpose(0, 1), reduction="batchmean"),
    "a teacher of other rows": lambda z, t: _kl(z.flatten(0, 1), t.transpose(0, 1).flatten(0, 1), reduction="sum"),
})  # fmt: skip


expect(Reason.LOGITS_USED)(
    {
        "a teacher whose predictions are counted": lambda z, t, y: (
            _kl(z, t, reduction="sum"),
            (t.argmax(-1) == y).sum(),
        ),
    }
)


def test_students_whose_losses_are_added_in_turns():
    """With so few tokens, cross-entropies without a teacher would share a region whose gradients wait."""

    @with_arguments
    def program(h, w, z, t, y):
        other = F.linear(h.cos(), w.sin())
        return _kl(z, t, reduction="sum") + _kl(other, t, reduction="sum") + ce_loss(z, y) + ce_loss(other, y)

    check(program, ANY, by_dynamo(program), (1, 6))


def test_reverse_difference_times_transposed_probabilities():
    """There are as many rows as classes."""

    @with_arguments
    def program(h, w):
        z, t = F.linear(w, w), F.linear(w.detach().cos(), w.detach().sin())
        return ((p := z.log_softmax(-1)).exp().mT * (p - t.log_softmax(-1))).sum() + h.sum()

    check(program, ANY, by_dynamo(program), (6,))


def test_teachers_logits_that_are_changed_in_place_are_not_kept():
    program = with_arguments(lambda z, t: (t.div_(2), _kl(z / 2, t, reduction="sum"))[1])
    check(program, [AT_ONCE], by_dynamo(program), (6,))
    assert not fused_graph(program, *operands(6)).graph.find_nodes(op="call_function", target=F.linear)


# What is changed, and what reads it: the same tensors, or views of the same, are other operands then.
CHANGED = {
    "hidden states": lambda h, w, y: (lambda: h[:, :2].zero_(), lambda: log_probs(h, w, y)),
    "weights": lambda h, w, y: (v := w.t(), lambda: w[:3].zero_(), lambda: log_prob(h @ v, y))[1:],
    "a bias": lambda h, w, y: (
        b := w[:, 0].clone(), v := b[:], lambda: b.exp_(), lambda: log_prob(h @ w.t() + v, y),
    )[2:],
    "temperatures": lambda z, a: (b := a.exp(), v := b[:, :1, None], lambda: b.exp_(), lambda: entropy(z / v))[2:],
    "rows": lambda z: (i := torch.arange(3), v := i[:], lambda: i.add_(1), lambda: entropy(z[v]))[2:],
    "labels": lambda z, y: (lambda: y.view(torch.int32).mul_(0), lambda: ce_loss(z, (y + 1) % V, reduction="none")),
}  # fmt: skip

expect(FUSED)({f"{name} changed between": _before_and_after(made) for name, made in CHANGED.items()})


@expect(FUSED, thunder=True, dynamo=False)
def one_row_at_a_time(h, w, y):
    x = F.linear(h[0], w).log_softmax(-1)
    return -torch.stack([x[at][y[0, at]] + x[at, y[0, at]] for at in range(4)]).mean()


@expect(IN_FORWARD)
class InForward:
    """Programs whose gradients are computed in the forward."""

    def rows_as_many_as_labels(h, w, y, a):
        """Their numbers have the symbol of the labels' length, and may be given by name."""
        x = F.linear(h[0], w).log_softmax(-1)
        rows = torch.arange(y.shape[1]), torch.arange(end=y.shape[1]), torch.arange(start=0, end=y.shape[1], step=1)
        return -sum((x[numbers, y[0]] * a[0]).sum() for numbers in rows)

    def ratio_to_itself(x, a, m):
        """As NeMo RL has it: 1 where it is logged, and a gradient that is cut where the divergence is clamped."""
        ratio, difference = (x - x.detach()).exp(), a - x
        clamped = difference.clamp(-3, 3)
        weight = torch.where(difference == clamped, ratio, ratio.detach())
        divergence = torch.nan_to_num(weight, posinf=0.0) * (clamped.exp() - 1 - clamped)
        return ((divergence - ratio * a) * m).sum(), (ratio.detach() < 0.8).double().mean(), ratio.detach()

    def smoothing_in_place(z, y, m):
        """As transformers' LabelSmoother: what is changed in place is read afterwards by its first name."""
        losses = -z.log_softmax(-1)
        nll, smooth = losses.gather(-1, y[..., None]), losses.sum(-1, keepdim=True, dtype=torch.float64)
        ignored = (m == 0)[..., None]
        nll.masked_fill_(ignored, 0.0)
        smooth.masked_fill_(ignored, 0.0)
        return 0.9 * nll.sum() / m.sum() + 0.1 * smooth.sum() / (m.sum() * losses.shape[-1])

    def slices_of_tokens(x, e, a, m):
        """As those of a response, of which a loss is made: of other tokens, what it reads and weighs is not known."""
        response = x[:, 1:][:, :-1]
        terms = clipped(response, a[:, 1:-1]) / a[:, 2:] * a[:, :1] - e[:, 1:][:, :-1].square()
        terms = torch.where(m[:, 1:-1].bool(), terms, 0.0)
        others = e.flatten()[::2].exp()
        return (terms.sum(-1) / m.sum(-1)).mean() - 0.01 * others.mean(), response.detach().exp().sum()

    def means_of_packed_sequences(s, y, a, m):
        """By sums that are scattered, or cumulated up to their ends."""
        s, sequence = s.flatten(), y.flatten() % 3
        counts = torch.zeros(3, dtype=s.dtype).scatter_add_(0, sequence, m.flatten())
        sums = torch.zeros(3, dtype=s.dtype).scatter_add_(0, sequence, s * m.flatten())
        others = torch.zeros(3, dtype=s.dtype).index_add(0, sequence, s, alpha=2)
        ends = F.pad(s.cumsum(0), (1, 0))
        return (sums / counts.clamp(min=1)).mean() + (others * a[0, :3]).sum() + (ends[3:] - ends[:-3]).mean() / 3

    def masks_in_two_dtypes(x, a, m):
        """A mask as a factor, and as it is."""
        is_valid = m > 0
        kept = torch.where(is_valid, x * is_valid.to(x.dtype) - a, 0.0)
        return (kept.exp() * m).sum() / m.sum()

    def losses_that_a_mask_sets(s, y, a, m):
        s, ratio = s.view_as(y), s.view_as(y) - a
        s[y == -100] = 0.5
        ratio[m == 0] = 0
        return ((s * m).sum() + ratio.exp().sum()) / m.sum()

    def losses_that_a_mask_sets_which_nothing_else_reads(x, m):
        x = 2 * x
        x[m == 0] = 0
        return x.exp().sum()

    def many_sequences(x, a, m):
        """Cut out of packed tokens: one loss of all, where a loss for each would be too many operations."""

        def loss(cut):
            x, a, m = map(cut, packed)
            ratio = (x - a).exp()
            return (torch.max(-ratio * a, -ratio.clamp(0.8, 1.2) * a) * m).sum() / m.sum().clamp(min=1)

        packed = x.flatten(), a.flatten(), m.flatten()
        return sum(loss(lambda z, end=end: z[end - 2 : end]) for end in range(2, 20, 2)) / 9 + loss(lambda z: z[-1:])

    def sequences_that_overlap(x, a, m):
        """Or read tensors that others read beside other ones."""
        overlapping = sum((x[:, at : at + 2] * a[:, at : at + 2]).exp().mean() for at in range(3))
        overlapping = overlapping + sum((x[at : at + 2] * m[at : at + 2]).exp().mean() for at in range(len(x) - 1))
        in_order = sum((x[at] * a[at]).exp().sum() for at in range(len(x)))
        shuffled = sum((x[at] + a[-at]).sigmoid().sum() + (x[at] - a[0]).tanh().sum() for at in range(len(x)))
        return overlapping + in_order + shuffled + sum((x[at] + a[at]).sigmoid().sum() for at in range(len(x))[::-1])

    def slices_without_infinite_tokens(h, w, y, a, m):
        """Some of the first tokens are certain, and 0 is no place where the square root could be asked for."""
        x = log_probs(torch.cat([h[:, :1] * 1e4, h[:, 1:]], 1), w, y)
        answer = x[:, 1:]
        unlikely = (1 - answer.exp()).log() - (answer + (a[:, 1:].abs() + 100)).sqrt()
        return (unlikely * m[:, 1:]).sum() + (x * m).sum(), x.detach()

    def logits_read_for_their_dtype_and_sizes(z, y, m):
        """And a view of them, whose strides nothing has that is made like it."""
        loss, mask = z.new_zeros(()), torch.ones_like(z[..., 0]) * (m > 0).to(z)
        mask[:, 0] = 0.5
        s = ce_loss(z, y, reduction="none")
        return loss + (s * mask.flatten()).sum() / torch.full_like(mask, 3.0).sum(), torch.zeros_like(z[..., :1]).sum()

    def chunks_backwards(z, y, a):
        pairs = zip(z.flatten(0, 1).split(8), y.flatten().split(8), strict=True)
        chunks = [F.cross_entropy(*pair, reduction="none", label_smoothing=0.1) for pair in pairs]
        return (torch.cat(chunks[::-1]) * a.flatten()).sum()

    def temperatures_of_tokens(h, w, y, a, m):
        """As verl has it: in place, under a view, and without a gradient."""
        logits = F.linear(h.view(1, -1, H), w)
        rows = logits.squeeze(0)
        rows.div_(a.detach().exp().flatten().clamp(min=1e-8).unsqueeze(-1))
        x = rows.log_softmax(-1)
        entropy, selected = -(x.exp() * x).sum(-1), x.gather(-1, y.view(-1, 1)).squeeze(-1)
        right = (logits.argmax(-1) == y.view(1, -1)).sum()
        return -(selected * m.flatten()).sum() - 0.01 * entropy.mean(), right

    def factors_of_rows(z, w, y, a):
        """Before a bias, a softcap and a slice; rows that are permuted, and one factor for all."""
        factors = 1 + a.square()
        first = 3 * torch.tanh((z * factors[..., None] + w[:, 0])[:, 1:] / 3)
        second = factors.t()[..., None] * z.transpose(0, 1) / factors.amax()
        return ce_loss(first, y[:, 1:]) + ce_loss(second, y.t())

    def a_checkpoint_under_autocast_before_the_head(h, w, y):
        """What is cast in it stays there."""
        with torch.autocast("cpu", torch.bfloat16):
            x = checkpoint(lambda h: F.linear(h, w[:H].detach().float()), h.detach().float(), use_reentrant=False)
        return ce_loss(F.linear(h + x, w), y)

    def products_under_autocast(h, w, y, m):
        """What is cast is the number of each token, or what was made of it; gradients in 16 bits would not agree."""
        x, mask = log_probs(h.float(), w.float(), y), m.float()
        with torch.autocast("cpu", torch.bfloat16):
            total = torch.einsum("bt,bt->", x, mask) + ((x * mask) @ mask.t()).sum()
        return total * 0.0, total.detach()

    def value_loss_between_terms(h, x, e, a, m):
        policy, value = (clipped(x, a) * m).sum(), (h.mean(-1) - a).square().mean()
        return (policy + 0.1 * value) / 2 - 0.01 * e.mean(), value.detach(), policy.detach()

    def numbers_that_nothing_needs(x, a, m):
        """Dynamo leaves what was computed of log-probabilities in its graph."""
        cumulated = x.cumsum(-1)
        cumulated.sum()
        policy = (x * a).sum()
        (x.exp() * m).view(cumulated.shape)
        return policy - (x.exp() * m).mean(), policy.detach()

    def focal_loss_of_one_hot_targets(z, y, a, m):
        """Beside a cross-entropy of the same labels, as PolyLoss has it, and in other words."""
        one_hot = F.one_hot(y, V)
        p, x = (z.softmax(-1) * one_hot).sum(-1), torch.einsum("btv,btv->bt", one_hot.double(), z.log_softmax(-1))
        losses = F.cross_entropy(z.transpose(1, 2), y, reduction="none")
        return (losses + (1 - p).square() * a - x * m).mean() - (z.log_softmax(-1) * one_hot.to(z)).sum() / m.sum()

    def head_of_an_equation(h, w, y, a):
        """The order of operands and dimensions is free, and so are a transposed weight and dots."""
        first = ce_loss(torch.einsum("vh,bth->tbv", w, h), y.t())
        second = log_prob(torch.einsum("b h t, h v", h.transpose(1, 2).tanh(), w.t()), y)
        return first - (second * a).sum() + F.cross_entropy(torch.einsum("...h,vh->...v", h[0].sin(), w), y[0])

    def heads_of_parts(h, w, y, a):
        """As unsloth has it: a head for each part of the hidden states, whose tokens are read as one."""
        rows, labels = h.flatten(0, 1).chunk(3), y.flatten().chunk(3)
        packed = [log_prob(part @ w.t() / 0.9, own) for part, own in zip(rows, labels, strict=True)]
        sequences = torch.stack([log_prob(F.linear(h.select(0, at), w).tanh() * 3, y[at]) for at in range(B)])
        return clipped(torch.cat(packed), a.flatten()).mean() + clipped(sequences, a).mean()

    def heads_of_copied_parts(h, w, y, a):
        rows = [part.to(h.dtype).clone() for part in h.flatten(0, 1).chunk(3)]
        packed = [log_prob(part @ w.t(), own) for part, own in zip(rows, y.flatten().chunk(3), strict=True)]
        return clipped(torch.cat(packed), a.flatten()).mean()

    def filled_by_chunks(z, y, a):
        """As OpenRLHF has it, in chunks whose last one has fewer tokens."""
        u = z.flatten(0, 1)
        filled = u.new_zeros(len(u))
        for at in range(0, len(u), 7):
            filled[at : at + 7] = u[at : at + 7].logsumexp(-1)
        return (clipped(u.gather(-1, y.flatten()[:, None]).squeeze(-1) - filled, a.flatten())).mean()

    def filled_by_sequences(z, y, m):
        """As torchtune and verl have it; in float32."""
        x, e = torch.zeros(m.shape), torch.zeros_like(m)
        with torch.no_grad():
            m = m / m.mean()
        for at in range(B):
            x[at] = log_prob(z[at], y[at])
            e[at] = entropy(z[at])
        return -(x * m).sum() / m.sum() - e.mul(m).mean() / 9

    def filled_by_chunks_of_tokens(z, y, a):
        """Of all sequences, as SkyRL has it, and one after another."""
        filled, weights = torch.zeros_like(a), a.new_empty(B, 2)
        for at in range(0, z.shape[1], 7):
            filled[:, at : at + 7] = log_prob(z[:, at : at + 7], y[:, at : at + 7])
        for at in range(2):
            weights[:, at] = a[:, at] * 2
        return (clipped(filled, a)).mean() + (filled[:, :2] * weights).sum()

    def filled_in_the_memory_of_others(z, y, m):
        weights = m * 1
        filled = torch.zeros(m.shape, dtype=m.dtype, out=weights)
        for at in range(B):
            filled[at] = y[at] * 2.0
        return (log_prob(z, y) * weights).mean()

    def filled_in_another_memory_format(z, y, m):
        filled = torch.zeros_like(m.t().contiguous().t())
        for at in range(B):
            filled[at] = m[at]
        parts = m.new_ones(B, 2, 2, 2).contiguous(memory_format=torch.channels_last) * m.sum()
        other = m.new_empty(B, 2, 2, 2)
        other[:B] = parts
        return (log_prob(z, y) * filled).sum() * filled.stride(0) + other.view(-1).mean()

    def a_sum_of_no_label_beside_a_metric(z, y):
        """What is logged is of ignored rows, too."""
        y = torch.full_like(y, -100)
        return ce_loss(z, y, reduction="sum") / (y >= 0).sum(), z.detach().logsumexp(-1).mean()


def _in_other_orders(*picks):
    """As Megatron-LM has tokens, or by the lengths of packed sequences; some are masks."""

    def loss(picked, x, a, m):
        ratio = (picked(x) - picked(a)).exp()
        return (torch.where(picked(x > -4), ratio.clamp(max=1.2), 2.0) * picked(m)).sum() / picked(m).sum()

    return lambda x, a, m: sum(loss(picked, x, a, m) for picked in picks)


expect(IN_FORWARD, thunder=True)({"tokens in other orders": _in_other_orders(
    lambda x: x.T, lambda x: x[None].permute(2, 0, 1), lambda x: x.roll(1, -1), lambda x: x.unbind()[2],
    lambda x: x.flatten().split([3, 4, x.numel() - 7])[1], lambda x: torch.chunk(x, 2, dim=-1)[1],
    lambda x: x.tensor_split((1, 2))[1], lambda x: x[:, 1:].split(2)[0].t().roll(1, 0),
)})  # fmt: skip
# thunder has no derivative of these.
expect(IN_FORWARD)({"tokens in more orders": _in_other_orders(
    lambda x: x.mT, lambda x: torch.movedim(x, 0, 1), lambda x: x.flip(0, 1), lambda x: torch.roll(input=x, shifts=1),
)})  # fmt: skip


# Which torch has from 2.13 on.
expect(IN_FORWARD, dynamo=hasattr(F, "linear_cross_entropy"))({"linear and loss as one function":
    lambda h, w, y: F.linear_cross_entropy(h.flatten(0, 1), w, y.flatten(), linear_bias=w[:, 0], label_smoothing=0.1)
})  # fmt: skip


# Newer ones refuse it in eager mode.
@expect(IN_FORWARD, dynamo=torch.__version__ < "2.11")
def numbers_that_a_mask_makes_infinite(x, a, m):
    a = a.half()
    a[m == 0] = 1e9
    return (x - a).exp().sum()


@expect("operations on tokens, more than the limit of 250")
def many_operations(x):
    for _ in range(100):
        x = x.sin()
    return x.sum()


@expect(IN_FORWARD, thunder=True)
class InForwardByBoth:
    def rows_that_tensors_pick(z, y, a, m):
        """Some of them twice, in other shapes, and counted from the end; beside all rows of the same logits."""
        at, last = torch.tensor([3, 0, 3]), m.sum(-1).long() - 1
        x = z.log_softmax(-1)[..., at, :].gather(-1, y[:, at, None]).squeeze(-1)
        others = F.cross_entropy(z[torch.arange(B), last], y[torch.arange(B), last])
        negative = F.cross_entropy(z[0][-at], y[0][-at]) + ce_loss(z.index_select(1, at), y[:, at])
        return (x * a[:, at]).sum() + others + negative + ce_loss(z, y)

    def capped_by_a_sigmoid_by_hand(z, y, m):
        capped = 3 * torch.sigmoid(z)
        shifted = capped - capped.amax(-1, keepdim=True)
        x = shifted - shifted.exp().sum(-1, keepdim=True).log()
        entropy = capped.logsumexp(-1) - (capped.softmax(-1) * capped).sum(-1)
        right = (capped.argmax(-1) == y).sum()
        label_logit, selected = (scores.gather(-1, y[..., None])[..., 0] for scores in (capped, x))
        return -((selected - label_logit.square()) * m).sum() - (0.1 * entropy + 0.01 * capped.mean(-1)).mean(), right

    def shifted_before_a_cap(h, w, y, m):
        """Also with a bias, and of a frozen head."""
        logits, other = F.linear(h, w, w[:, 0]), F.linear(2 * h, w.detach())
        capped = 3 * torch.sigmoid((2 * logits - 1) / 5)
        right = (capped.argmax(-1) == y).sum()
        return ce_loss(capped, y) + (capped.logsumexp(-1) * m).sum() + ce_loss(4 * ((other + 3) / 4).tanh(), y), right

    def products_of_16_bits(h, w, y, m):
        """A derivative in float32, of products with tensors of 16 bits; gradients in 16 bits would not agree."""
        x, mask = log_probs(h.bfloat16(), w.bfloat16(), y), m.bfloat16()
        loss = (x @ mask.t()).sum() + torch.dot(x[0], mask[0]) + torch.mv(x, mask[1]).sum()
        return loss * 0.0, loss.detach()

    def heads_of_parts_of_each_sequence(h, w, y, a):
        """Joined twice, along the tokens; and token by token."""
        x = [log_prob(F.linear(h[:, at], w), y[:, at]) for at in (slice(2), slice(2, 3), slice(3, None))]
        by_token = torch.stack([log_prob(F.linear(h[:, at], w) * 0.5, y[:, at]) for at in (2, 0)], dim=1)
        twice = torch.cat([torch.cat(x[:2], 1), x[2]], dim=-1)
        return clipped(twice, a).mean() + clipped(by_token, a[:, :2]).mean()

    def logits_of_each_sequence(h, w, y, a):
        """Stacked in front, behind the tokens, and behind the classes; joined as they were cut, or in another order."""
        one_by_one = [F.linear(sequence, w) for sequence in h]
        by_token = torch.stack([F.linear(h[:, at], w) * 2 for at in (2, 0)], dim=-2)
        behind = torch.stack([F.linear(sequence, w) for sequence in h.tanh()], dim=-1)
        by_token, behind = log_prob(by_token, y[:, 1:3]), behind.log_softmax(1).gather(1, y.t()[:, None]).squeeze(1)
        joined = ce_loss(torch.stack(one_by_one), y) + ce_loss(torch.cat([u[None] for u in one_by_one[::-1]]), y)
        return joined - clipped(behind.t(), a).mean() + (by_token * a[:, :2]).sum()

    def guarded_means_of_no_label(z, y, m):
        """Beside a term that has tokens."""
        none, some = torch.full_like(y, -100), y.where(m > 0, -100)
        means = [torch.where((labels >= 0).any(), ce_loss(z, labels), 0.0) for labels in (none, some)]
        total = ce_loss(z, none, reduction="sum", label_smoothing=0.1) / (count := (none >= 0).sum())
        return means[0] / 2 + means[1] + z.logsumexp(-1).square().mean() / 9 + torch.where(count > 0, total, 0.0)


@expect(ANY)
class WhateverIsFused:
    def labels_written_between_losses(z, y):
        """By an index; they are those of one tensor, and not the same."""
        z, written = z.transpose(1, 2), y.clone()
        with torch.no_grad():
            before = F.cross_entropy(z, written, reduction="none").mean()
            written[0, 0] = (y[0, 0] + 1) % V
            behind = F.cross_entropy(z, written)
        return F.cross_entropy(z, y), before, behind

    def labels_written_by_numpy_and_by_a_method(z, y):
        """By functions that return nothing, what they write to, or a view, and by one that only reads."""
        written, results = y.clone(), []
        changes = [
            lambda array: array.__setitem__(0, 1), lambda array: array.fill(2), lambda array: np.abs(array),
            lambda array: np.minimum(array, 1, array), lambda array: operator.iadd(array.T[0], 3),
        ]  # fmt: skip
        for change in changes:
            results.append(ce_loss(z.detach(), written))
            change(written.numpy())
        results.append(ce_loss(z.detach(), written))
        written.__imul__(2)
        return (log_prob(z, y), ce_loss(z.detach(), written), *results)

    def temperatures_written_by_functions(h, z, y):
        """Of PyTorch's, whose names do not say so."""
        mean, var = h.new_zeros(H), h.new_ones(H)
        vectors, negative = h.new_full((V, 2), 3), h.new_full((1,), -2)
        changes = [
            lambda: F.batch_norm(h.detach().flatten(0, 1), mean, var, training=True),
            lambda: F.instance_norm(h.detach().mT, mean, var),
            lambda: F.embedding(y, vectors, max_norm=1.0),
            lambda: F.relu(input=negative, inplace=True),
        ]
        results = []
        for change in changes:
            change()
            results.append(ce_loss(z.detach() / (3 + var.mean() + mean[0] + vectors.mean() + negative), y))
        return (ce_loss(z, y), *results)

    @torch.no_grad()
    def labels_that_get_the_memory_of_others(z, y):
        """After they were changed through a view of what they had."""
        labels = y.clone()
        view, before = labels.view(-1), ce_loss(z, labels)
        view.fill_(3)
        behind = ce_loss(z, labels)
        return before, behind, labels.set_(y + 1)

    def one_hot_vectors_that_are_written(z, y):
        one_hot = F.one_hot(y, V).to(z.dtype)
        one_hot[0] = 0.0
        one_hot[:, :, 0].add_(1.0)
        return -(one_hot * z.log_softmax(-1)).sum(-1).mean()

    def heads_of_changed_parts(h, w, y, a):
        first, second = (both := h * 1)[:2], both[2:]
        x = log_prob(F.linear(first, w.detach()), y[:2])
        both.mul_(2)  # Of a frozen head, no gradient needs what it was.
        return clipped(torch.cat([x, log_prob(F.linear(second, w.detach()), y[2:])]), a).mean()

    def heads_of_copied_parts_that_change(h, w, y, a):
        """Beside heads of copies of what changes."""
        x, parts, losses = h * 1, (h[:2].clone(), h[2:].clone()), []
        copies = x[:2].clone(), x[2:].clone()
        x.mul_(2)
        for part in parts:
            part[0].mul_(2)
        for heads in (parts, copies):
            packed = [log_prob(F.linear(part, w), own) for part, own in zip(heads, y.split(2), strict=True)]
            losses.append(clipped(torch.cat(packed), a).mean())
        return sum(losses)

    def heads_of_equal_inputs_with_other_gradients(h, w, y):
        factor = w[0]
        with torch.no_grad():
            frozen = h * 2
        return losses(frozen * factor, w, y).mean() + losses(h * 2 * factor, w, y).mean()

    def heads_of_parts_that_are_rounded(h, w, y, a):
        """Only the last cast is the linear's own."""
        packed = [log_prob(F.linear(h[at].half().to(h.dtype), w), y[at]) for at in range(B)]
        return clipped(torch.stack(packed), a).mean()


@expect("is neither linear nor an operation on single tokens in their order, after sum in line", thunder=True)
def gspo(x, a, m):
    """A ratio of whole sequences; and the gradient of equals, which thunder lacks."""
    log_ratios = (x - a) * m
    ratios = torch.exp(log_ratios.sum(-1) / m.sum(-1))
    gains = torch.min(ratios * a[:, 0], ratios.clamp(0.8, 1.2) * a[:, 0])
    return -gains.mean() + torch.minimum(log_ratios, log_ratios + 0.0).mean()


@expect(NONE, thunder=True)
class NoLosses:
    def attention(h):
        scores = (h @ h.transpose(1, 2)).softmax(-1)
        x = (h @ h.transpose(1, 2)).log_softmax(-1)
        return -(scores * scores.log()).sum() + (scores @ h).sum() - (x.exp() * x).sum(-1).mean()

    def memory_of_keys_and_values(h, w):
        return (F.linear(h, w).softmax(-1) @ w).mean()

    def gate_of_sigmoids(h, w, a):
        scores = torch.sigmoid(F.linear(h, w[:4]))
        weights, experts = scores.topk(2, -1)
        weights = weights / scores.sum(-1, keepdim=True) + scores.gather(-1, experts) * scores.mean(-1, keepdim=True)
        return (weights * a[..., None]).sum() + (h * torch.sigmoid(h @ w[:H])).mean()


@expect(FUSED, thunder=True)
def columns_of_logits_beside_a_loss(h, w, y):
    """The scores of two answers, and rows of a hidden layer that is centred, are not its business."""
    answers = F.linear(h[0, -1:], w).index_select(-1, y.new_tensor([3, 7]))
    z = F.linear(h[0], w, w[:, 0])
    z = (z - z.mean(0, keepdim=True)).index_select(0, y[0, :2] * 0)
    return F.cross_entropy(F.linear(h[0], w), y[0]) + F.softplus(answers).sum() + z.sum()


# Heads: sums of linears, other products, and changes in place.


def _with_loss(logits: Callable) -> Callable:
    return lambda h, w, y, a, m: F.cross_entropy(logits(h, w, y, a, m).reshape(-1, V), y.flatten())


expect(IN_FORWARD, thunder=True, wrap=_with_loss)({
    "adapter of equations":
        lambda h, w: torch.einsum("bth,vh->btv", h, w)
        + 2 * torch.einsum("btr,vr->btv", torch.einsum("bth,rh->btr", h, w[:3]), w[:, :3]),
    "equation with the classes before the tokens": lambda h, w: torch.einsum("bth,vh->bvt", h, w).transpose(1, 2),
    "tensordot": lambda h, w: torch.tensordot(h, w, dims=([-1], [1])),
    "tensordot of a number": lambda h, w: torch.tensordot(h.tanh(), w.t(), 1),
})  # fmt: skip
expect(TRANSFORMED, thunder=True, wrap=_with_loss)({
    "factors that are no float": lambda z: z * 1e-200 * 1e-200,
    # A region would add the constant before it rounds the logits to 16 bits.
    "shifted in float32": lambda h, w: 23 * torch.sigmoid((F.linear(h.bfloat16(), w.bfloat16()).float() + 5) / 7.5),
})  # fmt: skip
expect(PRODUCT, thunder=True, wrap=_with_loss)({
    "one bias for all columns": lambda h, w: torch.addmm(w[:1, 0], h.flatten(0, 1), w.t()),
    "half a bias": lambda h, w: torch.addmm(w[:, 0], h.flatten(0, 1), w.t(), beta=0.5),
})  # fmt: skip
expect(FUSED, thunder=True, wrap=_with_loss)({
    "bias of a frozen head": lambda h, w: F.linear(h, w, w[:, 0]).detach() + F.linear(F.linear(h, w[:3]), w[:, 3:6]),
})  # fmt: skip
expect(PRODUCT, wrap=_with_loss)({
    # Expanded: the weight has as many classes as the logits, and its memory has one.
    "one row for all classes": lambda h, w: F.linear(h, w[:1].expand(V, -1)),
    "one column for all": lambda h, w: h @ w[0].expand(V, H).t(),
    "kernels of one token at every second":
        lambda h, w: F.conv1d(h.repeat(1, 2, 1).transpose(1, 2), w[..., None], stride=2).transpose(1, 2),
    "a head for each sequence": lambda h, w, m: torch.bmm(h, w.t() * m[:, :1, None]),
})  # fmt: skip
expect(TRANSFORMED, wrap=_with_loss)({
    "factors of rows that are learned": lambda h, z: z * h.mean(-1, keepdim=True),
    "a part of their gradient": lambda z: (z + z.detach()) / 2,
    "cumulated, of a frozen head": lambda h, w: F.linear(h, w.detach()).cumsum(-1),
    "factors of rows after a bias": lambda h, w, m: F.linear(h, w, w[:, 0]) * m[..., None],
    # Before their factor, in float16.
    "shifted too far": lambda h, w: 30 * torch.sigmoid(F.linear(h.half(), w.half()) * 2**-17 + 0.75).float(),
})  # fmt: skip
expect(ANY, wrap=_with_loss)({
    "changed under a detached view": lambda z: (z.detach().mul_(2.0), z)[1],
    "exponentials under a view": lambda z: (u := z.flatten(0, 1), z.exp_(), u)[2],
    "a bias added under a part": lambda z, w: (z[:, 1:].add_(w[:, 0]), z)[1],
    "a bias added without gradients": lambda z, w: (_without_gradients(z.add_, w[:, 0]), z)[1],
})  # fmt: skip
expect(FUSED, wrap=_with_loss)({
    "a bias added under a view": lambda z, w: (u := z.transpose(0, 1), z.add_(w[:, 0]), u.transpose(0, 1))[2],
    "scaled under a view": lambda z: (z.div_(0.7), u := z.flatten(0, 1), z.mul_(2).mul_(0.4), u)[3],
    # A bias gets a gradient where it was added after the linear was detached, and none where it was detached with it.
    "bias after a frozen head": lambda h, w: _without_gradients(torch.matmul, h, w.t()) + w[:, 0],
    "adapter beside tied embeddings":
        lambda h, w, y: F.linear(x := torch.tanh(F.embedding(y, w)) + h, w)
        + F.linear(x, w[:3]) @ (w[:, 3:6].t() * 1.0).contiguous(),
})  # fmt: skip
expect(Reason.OPERAND_MODIFIED, wrap=_with_loss)({
    "scaled without gradients": lambda z: (_without_gradients(z.mul_, 2), z)[1],
})  # fmt: skip

# Losses that are changed in place, and operations that look linear and are not.

expect(ANY)({
    "losses padded": lambda s, m: F.pad(s, (0, 2), value=5.0).sum() + F.pad(s[None], (0, 2), mode="replicate").sum(),
    "losses by keyword": lambda s, m: (
        s.diff(prepend=m[:, :1]).sum() + torch.add(s, other=m).sum() + torch.div(s.sum(), other=3.0)
        + s.where(condition=m > 0, other=m).sum() + torch.where(other=m, condition=m > 0, input=s).mean()
    ),
    "losses changed under a view": lambda s, m: (s.view(-1), s.mul_(m))[0].sum(),
    "losses changed under a detached view": lambda s, m: (s.detach().mul_(m), (s * m).sum())[1],
    "sums changed through a view": lambda s, m: (u := s.sum(1), v := u.view(2, 2).mul_(2.0), u.sum() + v.sum())[2],
    "losses changed twice": lambda s, m: (t := s.mul_(m), u := t.add_(1.0), (s * m).sum() + u.sum() + t.mean())[2],
    # By another name, which has no gradient.
    "losses changed and returned": lambda s, m: (t := s.detach(), s.mul_(m), (s.sum(), t))[2],
    "losses changed without gradients": lambda s, m: (t := s * 1.0, _without_gradients(t.mul_, m), t.sum())[2],
    "losses transposed in place": lambda s, m: (s.t_(), (s * m.t()).sum())[1],
    "a product transposed in place": lambda s, m: (t := s * 1.0, t.transpose_(0, 1), (t.exp() * m.t()).sum())[2],
    "zeros that are written": lambda s, m: (u := torch.zeros_like(m), u.view(-1).fill_(3.0), (s + u).sum())[2],
    "losses masked in place": lambda s, m: (s[None].index_put_((m[None] == 0,), s.new_zeros(())), s.sum())[1],
})  # fmt: skip


@expect("its tokens' weights depend on its own results")
def weighted_by_their_confidence(z, y, a):
    return (clipped(log_prob(z, y), a) * z.softmax(-1).amax(-1).detach()).mean()


@expect("its tokens' weights depend on its own results")
def weighted_by_what_reads_its_predictions(h, w, y, z):
    """The first of the two in the circle has no sum that could be left to the program."""
    x, chosen = log_prob(z, y), z.argmax(-1)
    with torch.no_grad():
        reward = log_probs(F.embedding(chosen, w) + h, w.tanh(), y)
    return (x * reward).mean()


@expect("may depend on is changed in place")
def written_rows_that_are_read_before_other_labels(z, y, m):
    """One region would give both of them, where the second has its labels."""
    x = torch.zeros_like(m)
    x[0] = log_prob(z[0], y[0])
    return x.sum(), z.log_softmax(-1).gather(-1, (y * 3 % V)[..., None])


@expect(Reason.OPERAND_MODIFIED)
class WrittenLabels:
    @torch.no_grad()
    def labels_in_one_buffer(z, y):
        buffer, results = torch.empty_like(y), []
        for number in range(B):
            buffer[number] = y[number]
            results.append(log_prob(z[number], buffer[number]))
            buffer[number] = 0
        return torch.stack(results)

    def labels_that_depend_on_normalisers(z, y):
        normalisers = z.logsumexp(-1)
        y[:, 0] = (normalisers[:, 0] > 3).long()
        return log_prob(z, y).sum() + normalisers.sum()


# Gradient modes, and other things that Dynamo has.


@expect(FUSED)
def a_sum_that_ends_under_autocast(h, w, y, a):
    """The derivative of its matmul stands where autocast is on; gradients in float32 would not agree."""
    products = log_probs(h.float(), w.float(), y) @ a.float().t()
    with torch.autocast("cpu", torch.bfloat16):
        total = products.sum() * 2
    return total * 0.0, total.detach()


@expect(Reason.CLASS_PROBABILITIES)
def rows_of_one_hot_targets(h, w, y, z):
    """Other rows than the labels', and the choice of the head itself."""
    own = F.linear(h.tanh(), w)
    own = own.log_softmax(-1) * F.one_hot(own.argmax(-1), V)
    return (z.log_softmax(-1) * F.one_hot(y, V))[:, 1:].sum(-1).mean() + own.sum(-1).mean()


@expect("is neither linear nor an operation on single tokens", thunder=True)
def accuracy_of_each_part(h, w, y, a):
    """A region of all parts has no argmax of one."""
    parts = [F.linear(h[at], w) for at in range(B)]
    x = torch.stack([log_prob(z, y[at]) for at, z in enumerate(parts)])
    return clipped(x, a).mean(), sum((z.argmax(-1) == y[at]).sum() for at, z in enumerate(parts))


@expect(Reason.OPERAND_MODIFIED, thunder=True, dynamo=False)
def losses_that_a_mask_multiplies(s, m):
    """thunder's own operation for that is on a list of tensors."""
    s = s * 2
    s *= m
    return s.sum() / m.sum()


@expect("changes a tensor in place")
class FilledAndChanged:
    def filled_with_what_changes(x, m):
        filled, double = torch.zeros(2 * B, m.shape[1], dtype=x.dtype), x * 2
        filled[:B] = double
        double.mul_(3)
        filled[B:] = double
        return (filled * torch.cat([m, m.exp()])).sum()

    def filled_twice_and_read_meanwhile(z, y, m):
        filled = torch.zeros_like(m)
        filled[: B - 1] = log_prob(z[1:], y[1:])
        first = filled[0].sum()
        filled[1:] = log_prob(z[1:], y[1:])
        return (filled * m).sum() + first

    def filled_and_a_view_of_it_changed(z, y, m):
        filled = torch.zeros_like(m)
        for at in range(B):
            filled[at] = log_prob(z[at], y[at])
        filled[1].mul_(3)
        return (filled * m).sum()

    def sums_in_views(s, m):
        sums = torch.zeros(2, dtype=s.dtype)
        sums.add_(s.sum())
        sums[1].add_((s * m).sum())
        return sums.sum()


@expect("may depend on is changed in place")
def views_that_losses_are_copied_to(z, y, m):
    copied = torch.zeros_like(m)
    for at in range(B):
        copied[at].copy_(log_prob(z[at], y[at]))
    return (copied * m).sum()


@expect("is neither linear nor an operation on single tokens in their order")
def a_head_of_a_part_after_another_of_the_same(h, w):
    """They are one region, right behind the split."""
    first = F.logsigmoid(F.linear(h.tanh(), w).logsumexp(-1).sum(1)).mean()
    _, part = h.split((2, h.shape[1] - 2), 1)
    return first + F.logsigmoid(F.linear(part, w).logsumexp(-1).sum(1)).mean()


def test_attention_is_not_missed():
    """Of as many tokens as a query has columns."""
    query = torch.randn(24, H, dtype=torch.float64, requires_grad=True)

    def program(h, w, y, *_):
        queries = F.linear(h, query).view(B, 24, 2, 12).transpose(1, 2)
        return ce_loss(F.linear((queries @ queries.mT).softmax(-1).sum(1) @ h, w), y)

    check(program, IN_FORWARD, by_dynamo(program), (24,))


def _gathered(h, w, y, *_):
    selected = F.linear(h, w).log_softmax(-1).gather(-1, y[..., None])
    return -(selected - selected.detach()).exp().sum()


def _by_one_hot(h, w, y, *_):
    one_hot = F.one_hot(y, V)
    return -(F.linear(h, w).log_softmax(-1) * one_hot).sum()


@pytest.mark.parametrize(("program", "line"), [(_gathered, 1), (_by_one_hot, 2)])
def test_line_of_log_probabilities(program, line):
    """It is where labels select them, and not where labels are prepared or something is computed from them."""
    (decision,) = check(program, IN_FORWARD, by_dynamo(program), (6,))
    assert decision.line.line == inspect.getsourcelines(program)[1] + line


def test_contrastive_loss_is_not_missed():
    """All pairs of a batch, both ways, beside the loss of a caption."""

    def program(h, w, y, *_):
        image, text, numbers = h.mean(1), (h[:, 0] @ w[:H]).tanh(), torch.arange(B)
        pairs, others = image @ text.t() / 0.07, image @ text.t() * w.sum().exp()
        loss = F.cross_entropy(pairs, numbers) + F.cross_entropy(pairs.t(), numbers) + F.cross_entropy(others, numbers)
        return loss - pairs.log_softmax(0).diagonal().mean() + ce_loss(F.linear(h, w), y)

    made = check(program, ANY, by_dynamo(program, options={"strict": True}), (6,))
    assert {decision.reason for decision in made} == {Reason.NO_LINEAR, None}


# Numbers of a row, of which `z` are the logits, and `y` the labels: rows or labels in another order, and gradients that
# flow to a part of what is computed.


def _of_one_sequence(numbers):
    def program(h, w, y, a, m):
        each = numbers(h[0], w, y[0], a, m)
        return (each * a.flatten()[: each.numel()].view(each.shape)).sum()

    return program


def _by_hand(z, y, in_sum):
    """A log-probability if the function returns the same logits."""
    return z.gather(-1, y[:, None])[:, 0] - in_sum(z).exp().sum(-1).log()


def _by_counts(z, y, total):
    """A log-probability where the total is the sum of each row."""
    counts = z.exp()
    return (counts / total(counts)).gather(-1, y[:, None]).log()


def _row_sums(counts):
    return counts.sum(-1, keepdim=True)


def _over_the_other_half(z, y):
    (first, second), (first_labels, second_labels) = z.exp().chunk(2), y[:, None].chunk(2)
    total = _row_sums(first)
    return torch.cat([(first / total).gather(-1, first_labels), (second / total).gather(-1, second_labels)])


def _at_changed_rows(z, y):
    rows, others, flipped = torch.arange(6), torch.arange(6), torch.arange(2)
    rows[0] = 3
    others.view(-1)[1:].clamp_(max=3)
    flipped.neg_().add_(1)
    cast = torch.arange(6, dtype=torch.int32).long()
    cast[0] = 3
    x = z.log_softmax(-1)
    backwards = z.view(2, 3, -1).log_softmax(-1)[flipped[:, None], torch.arange(3), y.view(2, 3)]
    return x[rows, y] + x[others, y] + x[cast, y] + backwards.view(-1)


def _with_labels_returned(z, y):
    """And broadcast labels that something else reads, as a whole, and by a maximum that is a pair of tensors."""
    labels, x = torch.broadcast_tensors(y[:, None], z.log_softmax(-1))
    return x.gather(-1, labels[..., :1]).squeeze(-1) * labels.max(-1)[0] + labels.sum()


def _clamped(z, y):
    """No logarithm: neither integers nor a clamp at other tensors."""
    counts = (y.clamp(min=0) * y).sum(-1, keepdim=True)
    return log_prob(z, y) * counts + (z.clamp(min=z.detach() - 1) * z.softmax(-1)).sum(-1)


def _straight_through(z, reduce):
    """The logits; their gradients less what comes back through a number of each row."""
    return z - reduce(z, -1, True) + reduce(z.detach(), -1, True)


COLUMNS = torch.arange(V, dtype=torch.float64)
expect(ANY, wrap=_of_one_sequence)({
    "rows in another order": lambda z, y: log_prob(z, y)[[3, 1, 0, 2, 5, 4]],
    "rows picked in another order": lambda z, y: z.log_softmax(-1)[torch.arange(6).flip(0), y],
    "rows listed in another order": lambda z, y: z.log_softmax(-1)[[3, 1, 0, 2, 5, 4], y],
    "rows beside others": lambda z, y: (x := torch.atleast_1d(log_prob(z, y), z[:, 0]))[0] * x[1],
    "rows by name": lambda z, y: z.log_softmax(-1)[torch.arange(start=-6, end=0), y],
    "rows of an index": lambda z, y: log_prob(z, y)[y.argsort()],
    "labels in another order": lambda z, y: F.logsigmoid(log_prob(z, y) - log_prob(z, y[[1, 0, 2, 3, 5, 4]])),
    "two labels of three rows": lambda z, y: z.log_softmax(-1).gather(-1, y.view(3, 2)),
    "constant log-sum-exp": lambda z, y: z.gather(-1, y[:, None])[:, 0] - _without_gradients(torch.logsumexp, z, -1),
    "logits of labels of constants": lambda z, y: z.detach().gather(-1, y[:, None])[:, 0] - z.logsumexp(-1),
    "constant log-sum-exp of all": lambda z, y: (
        z - _without_gradients(lambda u: u.logsumexp(-1, keepdim=True), z)
    ).gather(-1, y[:, None]),
    "constant probabilities": lambda z, y: -(z.softmax(-1).detach() * z.softmax(-1).log()).sum(-1),
    "constant expectation": lambda z, y: z.logsumexp(-1) - _without_gradients(lambda u: (u.softmax(-1) * u).sum(-1), z),
    "ratio to itself": lambda z, y: (log_prob(z, y) - log_prob(z.detach(), y)).exp(),
    "log-probabilities of at least -3": lambda z, y: (z.softmax(-1) * z.log_softmax(-1).clamp(min=-3.0)).sum(-1),
    "logarithm of other probabilities": lambda z, y: torch.xlogy(z.softmax(-1).square(), z.softmax(-1)).sum(-1),
    "products of all rows": lambda z, y: torch.einsum("rv,qv->r", z.softmax(-1), z.log_softmax(-1)),
    "less the maximum in the sum": lambda z, y: _by_hand(z, y, _less_maximum),
    "exponentials of constants": lambda z, y: _by_hand(z, y, torch.detach),
    "maximum that is used": lambda z, y: log_prob(_less_maximum(z), y) * z.amax(-1),
    "constant counts": lambda z, y: (z.exp().detach() / _row_sums(z.exp())).gather(-1, y[:, None]).log(),
    "counts over the sum of others": lambda z, y: _by_counts(z, y, lambda counts: _row_sums((z / 2).exp())),
    "counts over sums without gradients": lambda z, y: _by_counts(z, y, lambda c: _without_gradients(_row_sums, c)),
    "probabilities at another temperature": lambda z, y: ((z / 2).softmax(-1) * z.log_softmax(-1)).sum(-1),
    "counts over the sums of other rows": _over_the_other_half,
    "counts that are used": lambda z, y: _by_counts(z, y, _row_sums)[:, 0] + z.exp().sum(-1),
    "softmax of counts": lambda z, y: log_prob(z.exp(), y),
    "divided after the maximum": lambda z, y: log_prob(_less_maximum(z) / 0.7, y),
    "expectation less the maximum": lambda z, y: z.logsumexp(-1) - (z.softmax(-1) * _less_maximum(z)).sum(-1),
    "row numbers that are changed": _at_changed_rows,
    "labels that are read twice": _with_labels_returned,
    "labels under an empty index": lambda z, y: z.log_softmax(-1).gather(-1, y[:, None][()]),
    "clamps": _clamped,
    "weighted by a constant log-sum-exp": lambda z, y: z.detach().logsumexp(-1) * log_prob(z, y),
    "mean of all classes": lambda z, y: z.log_softmax(-1).mean(-1) * log_prob(z, y),
    "sum of constants": lambda z, y: z.detach().log_softmax(-1).sum(-1, keepdim=True) * log_prob(z, y)[:, None],
    "mean less a constant log-sum-exp": lambda z, y: z.mean(-1) - z.detach().logsumexp(-1),
    "constant mean less the log-sum-exp": lambda z, y: _without_gradients(torch.mean, z, -1) - z.logsumexp(-1),
    "mean of a factor": lambda z, y: (2 * z).mean(-1) - (z / 3).sum(-1) + log_prob(z / 3, y),
    "mean of half of the rows": lambda z, y: z[:3].mean(-1).repeat(2) + log_prob(z, y),
    "less the mean of the row": lambda z, y: log_prob((z - z.mean(-1, keepdim=True)) / 0.7, y),
    "mean of probabilities": lambda z, y: (z.softmax(-1) * z).mean(-1) + z.softmax(-1).mean(-1),
    "exponential of the row's mean": lambda z, y: z.mean(-1).exp() * log_prob(z, y),
    "entropies of all rows in one sum": lambda z, y: -(z.softmax(-1) * z.log_softmax(-1)).sum() + z[:, 0],
    # Of what cancels, or is detached, something is left in the gradient.
    "row sum of centered logits": lambda z, y: log_prob(z, y) * (1 + (z - z.mean(-1, keepdim=True)).sum(-1)),
    "row sum of a softmax": lambda z, y: log_prob(z, y) * z.softmax(-1).sum(-1),
    "log-sum-exp of a log-softmax": lambda z, y: log_prob(z, y) * (1 + z.log_softmax(-1).logsumexp(-1)),
    "row's log-probability less itself": lambda z, y: log_prob(z, y) + (log_prob(z, y) - log_prob(z, y)).exp(),
    "constant probabilities of the row": lambda z, y: (
        -(z.softmax(-1) * z.log_softmax(-1)).sum(-1) + (z.softmax(-1).detach() * z).sum(-1)
    ),
    "row's mean before a bias": lambda z, y: (_straight_through(z, torch.mean) + COLUMNS).logsumexp(-1),
    "row's log-sum-exp before a factor": lambda z, y: (2 * _straight_through(z, torch.logsumexp)).logsumexp(-1),
    "row less itself at another temperature": lambda z, y: (x := log_prob(2 * z, y)) - x.detach() + z.logsumexp(-1),
    # Hidden states (H,), and results without dimensions.
    "entropy of one row": lambda z, y: -(z[0].softmax(-1) * z[0].log_softmax(-1)).sum() - z[1].softmax(-1)[3].log(),
    "entr of one row": lambda z, y: torch.special.entr(z[0].softmax(-1)).sum(-1),
    # Dynamo turns validation off for the whole process.
    "one row of Categorical": lambda z, y: Categorical(logits=z[0], validate_args=False).log_prob(y[0]),
})  # fmt: skip


@pytest.mark.parametrize(("program", "outcome"), BY_DYNAMO, ids=lambda value: getattr(value, "__name__", ""))
@pytest.mark.filterwarnings("ignore")
def test_by_torch_compile(program, outcome):
    compiled = by_dynamo(program)
    check(program, outcome, compiled, (12, 10, 14, 11) if outcome == IN_FORWARD else (6,))
    # At the first length and, once more, at all others; numbers of chunks are others.
    assert len(thunder_flce.explain(compiled)) <= (4 if "chunks" in program.__name__ else 2)


def _transposed_before(h, w, y, a, m):
    """The weight is a view that was made without gradients, and gets none."""
    weight = w.t()
    with torch.enable_grad():
        return F.cross_entropy((h @ weight).flatten(0, 1), y.flatten()) + h.square().mean()


def _evaluated(h, w, y, a, m):
    """What is changed in place has no gradient that it could keep."""
    logits = F.linear(h, w)
    logits /= 0.7
    x = log_probs(h, w, y)
    x.mul_(m)
    return x.sum(), ce_loss(torch.bmm(h, w.expand(B, -1, -1).mT), y), F.cross_entropy(logits.flatten(0, 1), y.flatten())


@pytest.mark.parametrize("program", [
    _transposed_before, lambda *tensors: checkpoint(_transposed_before, *tensors, use_reentrant=False), _evaluated,
])  # fmt: skip
def test_entered_without_gradients(program):
    """Gradients are off before anything in the graph says so."""
    tensors, compiled = operands(6), by_dynamo(program)
    results, expected = (run(torch.no_grad()(call), tensors) for call in (compiled, program))
    torch.testing.assert_close(results, expected)
    made, gradients = decisions(compiled), expected[1]
    assert all(decision.fused for decision in made)
    assert (AT_ONCE in {decision.plan.strategy for decision in made}) == bool(gradients)


DEPENDING_ON_VALUES = {
    # Gradients of losses that are selected wait.
    "losses that a mask selects": (FUSED, lambda s, m: s[m > 0].sum()),
    "their mean": ("the number of tokens in mean in line", lambda s, m: s[m > 0].mean()),
    "parts of masked hidden states": (FUSED, lambda h, w, m: (
        z := torch.cat([F.linear((x := h[m > 0])[:2], w), F.linear(x[2:], w)]), entropy(z).sum().exp()
    )[1]),
    "masked hidden states": (
        FUSED, lambda h, w, y, m: F.cross_entropy(F.linear(h[is_masked := m > 0], w), y[is_masked])
        + log_probs(h[is_masked], w, y[is_masked]).mean(),
    ),
    "by itself": (IN_FORWARD, lambda x, m: (loss := (x.exp() * m).sum()) / loss.item()),
    "a term by another":
        ("reads one of its terms", lambda s, m: (s * m).sum() * (square := s.square().mean()).item() + square),
    "a term by a number of another":
        ("reads one of its terms", lambda s: s.sum() * s.detach().mean().item() + s.square().sum()),
    "another loss by a number of it": (
        IN_FORWARD, lambda h, s, m: (loss := (s * m).sum()) + h.square().sum() * (loss.detach() * 2).item(),
    ),
    "changed in place, by a number": (IN_FORWARD, lambda s, m: (
        t := s * 2, s.sub_(m), number := s.sum().item(), (t.sum() + t.square().sum()) * number)[3],
    ),
    "each term, by a number of all": ("line", lambda s: (s * s.detach().mean().item()).sin().sum()),
    "in a checkpoint": (IN_FORWARD, lambda h, x: (
        number := x.detach().mean().item(), checkpoint(lambda h, n: (h * n).sin(), h, number, use_reentrant=False),
        x.exp().sum(),
    )[1:]),
    "sliced":
        ("depends on the values", lambda x, m: (x[:, : (n := (m[0] > 0).sum().item())].exp() * m[:, :n]).sum()),
    "a list":
        ("depends on the values", lambda x, m: (x[:, : (n := (m > 0).sum(1).tolist()[0])].exp() * m[:, :n]).sum()),
    "sliced logits": (TRANSFORMED, lambda z, y, m: (
        n := (m[0] > 0).sum().item(), log_prob(z[:, :n], y[:, :n]).sum() + log_prob(z[:, n:], y[:, n:]).sum(),
    )[1:]),
    # What reads a size of what a region gives stays where it is.
    "logged before the loss":
        ("whose size depends on the values", lambda x, a, m: (x.detach()[m > 0].mean(), (x * a).sum())),
    "before another loss of the head": (
        "whose size depends on the values", lambda h, w, x, m: x[m > 0].sum()
        + F.logsigmoid(F.linear(h.sin(), w).logsumexp(-1).sum(-1)).sum(),
    ),
    "number of labels": (
        Reason.NOT_A_LOG_PROBABILITY,
        lambda z, y, m: z.log_softmax(-1).gather(-1, several_labels(y)[..., m[0, :3].nonzero().squeeze(-1)]).sum(),
    ),
    # As a loss of diffusion has it: a mean of no other tokens, each with its own weight.
    "masked rows of logits": (
        IN_FORWARD, lambda z, y, a, m: (
            F.cross_entropy(z[is_masked := m > 0], y[is_masked], reduction="none") / a.exp()[is_masked]
        ).sum() / m.numel(),
    ),
    # As TRL's `GKDTrainer` has it.
    "masked summands of a divergence": (IN_FORWARD, lambda z, t, m: _mixed(z, t)[m > 0].sum() / (m > 0).sum()),
    # Each time, PyTorch counts anew how many these are.
    "masked twice": ("the number of tokens in mean", lambda z, m: ((p := z.log_softmax(-1)).exp() * p)[m > 0].sum(
        -1
    ).mean() + (p.exp() * p)[m > 0].sum(-1).mean()),
    "masked rows of summands": (
        IN_FORWARD, lambda z, t, m: _kl(z, t, reduction="none").view(-1, V)[m.flatten() > 0].sum() / m.sum()
    ),
}  # fmt: skip


@torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True)
@pytest.mark.parametrize(("outcome", "program"), DEPENDING_ON_VALUES.values(), ids=DEPENDING_ON_VALUES)
def test_numbers_that_depend_on_values(outcome, program):
    program = with_arguments(program)
    check(program, outcome, by_dynamo(program, fullgraph=True), (6, 4, 9))


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
@pytest.mark.parametrize("program", [
    lambda z, y, m: F.cross_entropy(z[mask := m > 0], y[mask]),
    lambda z, t, m: _kl(z, t, reduction="none")[m > 0].sum(),
])  # fmt: skip
def test_logits_of_which_a_mask_selects_rows_are_not_computed(program):
    """PyTorch reads the number of these rows from the tensor of selected logits."""
    assert not fused_graph(with_arguments(program), *operands(6)).graph.find_nodes(op="call_function", target=F.linear)


def _changed_afterwards(y):
    filled = y.clamp(min=0).clone()
    filled[:, 0] = 5
    return filled


@pytest.mark.parametrize(("regions", "label", "fill"), [
    (1, -100, lambda y: y.clamp(min=0)),
    (1, -100, lambda y: torch.where(y != -100, y, 0)),
    (1, -100, lambda y: torch.where(y == -100, 0, y)),
    (1, -100, lambda y: y.masked_fill(torch.eq(y, other=-100), 0)),
    # The labels are others.
    (2, -100, lambda y: (is_filled := y == -100, is_filled[0].fill_(True), y.masked_fill(is_filled, 0))[-1]),
    (2, -100, lambda y: y.clamp(min=1)),
    (2, -100, lambda y: y.clamp(0, 9)),
    (2, -100, _changed_afterwards),
    # No label is ignored.
    (2, 3, lambda y: y.clamp(max=0)),
    (2, 3, lambda y: torch.where(y != 3, y, 0)),
    (2, 3, lambda y: torch.where(y.masked_fill(y > 20, -100) != -100, y, 0)),
])  # fmt: skip
def test_ignored_labels_that_are_filled(regions, label, fill):
    """One region gives the cross-entropy of labels and log-probabilities at these, with 0 in place of the ignored."""
    for fills_all in (False, True):

        @with_arguments
        def program(h, w, y, m):
            z, y = F.linear(h, w), torch.where(m > 0, y, label)
            filled = fill(y)
            return ce_loss(z, filled if fills_all else y) + log_prob(z, filled).exp().mean()  # noqa: B023

        made = check(program, IN_FORWARD, by_dynamo(program), (6,))
        assert len(made) == (1 if fills_all else regions)


@pytest.mark.skipif(torch.__version__ < "2.10", reason="take_along_dim does not take labels modulo V")
def test_ignored_labels_of_take_along_dim():
    """Its labels are valid, whatever they are, and not those of a gather or a cross-entropy."""

    @with_arguments
    def program(z, y, m):
        y = torch.where(m > 0, y, -100)
        x = torch.take_along_dim(z.log_softmax(-1), y[..., None], -1).squeeze(-1)
        return (x * m).sum() + ce_loss(z, y) + x.exp().mean()

    check(program, IN_FORWARD, by_dynamo(program), (6,))


@pytest.mark.parametrize(("loss", "targets_per_token"), [
    (ce_loss, 2),
    (lambda z, y: -(log_prob(z, y.clamp(min=0)) * (y >= 0)).sum(), 2),
    (lambda z, y: ce_loss(z, y, label_smoothing=0.1), None),
])  # fmt: skip
def test_two_labels_of_each_row(loss, targets_per_token):
    """The head is computed once for both losses, unless they are smoothed, also if their sum is logged."""

    @with_arguments
    def program(h, w, y, m):
        z, y = F.linear(h, w), torch.where(m > 0, y, -100)
        total = loss(z, y) * 0.3 - loss(z, y.roll(1, 1)) * 0.7
        return total / 2, total.detach()

    (decision,) = check(program, IN_FORWARD, by_dynamo(program), (6,))
    assert decision.region.call.targets_per_token == targets_per_token


def test_results_that_share_memory():
    """A caller who changes one of them changes the others, as in eager PyTorch."""
    program = lambda h, w, y: (x := log_probs(h, w, y), (x.detach(), x.view(2, -1)))[1]  # noqa: E731
    x, view = by_dynamo(program, fullgraph=True)(*operands(4)[:3])
    x.zero_()
    assert not view.any()


@pytest.mark.parametrize("compiler", [partial(by_dynamo, fullgraph=True), thunder_flce.jit])
def test_equal_results_share_no_memory(compiler):
    program = lambda h, w: (z := F.linear(h, w), (z.logsumexp(-1), z.logsumexp(-1, keepdim=True)))[1]  # noqa: E731
    one, other = compiler(program)(*operands(4)[:2])
    one.detach().zero_()
    assert other.all()


@pytest.mark.parametrize("returned", [lambda e: e.neg(), lambda e: e, lambda e: e.t()[1:]])
def test_returned_entropies_may_change_in_place(returned):
    """The backward reads those that the operator returned."""
    h, w, *_ = operands(6)

    def gradients(program):
        loss, entropies = program(h, w)
        entropies.detach().mul_(2)
        return torch.autograd.grad(loss + entropies.sum(), (h, w))

    def program(h, w):
        z = F.linear(h, w)
        return z.logsumexp(-1).square().sum(), returned(entropy(z))

    torch.testing.assert_close(gradients(by_dynamo(program)), gradients(program))


def test_argument_that_is_changed_in_place():
    """Gradients flow back from the caller's tensor, too."""

    def program(h, w, y, a):
        x = log_probs(h, w, y)
        a += x
        return x.sum() * 2

    calls = [lambda h, w, y, a, m, call=call: (call(h, w, y, a := m * 1), a) for call in (by_dynamo(program), program)]
    got, expected = (run(call, operands(6)) for call in calls)
    torch.testing.assert_close(got, expected)


@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_number_of_a_loss():
    """It is read of the region's, as what is asserted is, and nothing keeps the logits."""

    @with_arguments
    def program(h, z, y, a, m):
        x, accuracy = log_prob(z, y), (z.argmax(-1) == y).double().mean().item()
        loss = (clipped(x, a) * m).sum()
        torch._assert_async((x < 0).all())
        return loss + h.square().sum() * loss.item(), a * (accuracy + 1) * 2

    check(program, IN_FORWARD, by_dynamo(program, fullgraph=True), (6,))
    assert not fused_graph(program, *operands(6)).graph.find_nodes(op="call_function", target=F.linear)


def test_labels_of_another_head_keep_no_logits():
    program = with_arguments(lambda h, w, y, z: ce_loss(z, y) - log_probs(h.tanh(), w, z.argmax(-1)).mean())
    check(program, IN_FORWARD, by_dynamo(program), (6,))
    assert not fused_graph(program, *operands(6)).graph.find_nodes(op="call_function", target=F.linear)


def _chunks(count, h, w, *others):
    """Yields the logits of each chunk of tokens, with its part of other tensors."""
    logits = [F.linear(rows, w) for rows in h.flatten(0, 1).chunk(count)]
    return zip(logits, *(tensor.flatten().chunk(count) for tensor in others), strict=True)


def _in_chunks(h, w, y, a):
    """As torchtune has it: a loss for each chunk, whose operations count once."""
    total = 0
    for logits, labels, old in _chunks(12, h, w, y, a):
        x = log_prob(logits, labels)
        total = total + (clipped(x, old) + 0.1 * ((old - x).exp() - (old - x) - 1)).sum()
    return total / a.numel()


def _in_chunks_with_metrics(h, w, y, a):
    total, right, clips, uncertain, logged = 0, 0, 0, 0, []
    for logits, labels, old in _chunks(3, h, w, y, a):
        x = log_prob(logits, labels)
        total = total + clipped(x, old).sum()
        right, clips = right + (logits.data.argmax(-1) == labels).sum(), clips + ((x.detach() - old).exp() > 1.2).sum()
        uncertain = uncertain + entropy(logits).detach().sum()
        logged.append(x.detach())
    return total / a.numel(), right, clips, uncertain, torch.cat(logged)


def _in_chunks_with_losses(h, w, y):
    y = y.flatten().where(torch.arange(y.numel()) % 5 > 1, 7)
    sums = [F.cross_entropy(*chunk, ignore_index=7, reduction="sum") for chunk in _chunks(3, h, w, y)]
    return sum(sums) / y.numel(), torch.stack(sums).detach()


def _in_chunks_of_a_weight_made_anew(h, w, y):
    """As by modules whose forward makes it: of unit length, or with a low-rank adapter."""
    total = 0
    for rows, labels in zip(h.flatten(0, 1).chunk(3), y.flatten().chunk(3), strict=True):
        weight = F.normalize(w.detach() + w[:, :2] @ w[:2] / 4, dim=-1)
        logits = F.linear(rows, torch._weight_norm(weight, w[:, :1], 0))
        total = total + F.cross_entropy(logits, labels, reduction="sum")
    return total


@pytest.mark.parametrize(("program", "lengths"), [
    (_in_chunks, (6,)), (_in_chunks_with_metrics, (6, 9)), (_in_chunks_with_losses, (6, 9)),
    (_in_chunks_of_a_weight_made_anew, (6, 9)),
])  # fmt: skip
def test_chunks_of_one_loss_are_one_region(program, lengths):
    program = with_arguments(program)
    assert len(check(program, IN_FORWARD, by_dynamo(program), lengths)) == len(lengths)  # One for each.


def _with_a_penalty(h, w, y, a, m, penalty, clip):
    x = log_probs(h, w, y)[:, 1:]
    ratio = (x - a[:, 1:]).exp()
    policy = torch.min(ratio * a[:, 1:], ratio.clamp(1 - clip, 1 + clip) * a[:, 1:])
    return ((x > -penalty).long() * penalty * x.square() - policy).mul(m[:, 1:]).sum()


def _with_a_factor_behind_another_loss(h, w, y, a, m, factor, power):
    z = F.linear(h, w)
    return z.logsumexp(-1).sum(1).exp(), (z * factor).logsumexp(-1).sum(1).tanh() ** power


@pytest.mark.parametrize(("program", "strategies"), [
    (_with_a_penalty, [AT_ONCE] * 2), (_with_a_factor_behind_another_loss, [LATER] * 3),
])  # fmt: skip
def test_numbers_that_change(program, strategies):
    """Dynamo has a symbol for each of them, from the second call on."""
    compiled, tensors = by_dynamo(program), operands(6)
    for numbers in ((0.1, 0.2), (0.2, 0.3), (0.3, 0.4)):
        results = (run(lambda *tensors, f=f: f(*tensors, *numbers), tensors) for f in (compiled, program))  # noqa: B023
        torch.testing.assert_close(*results)
    assert [decision.plan.strategy for decision in decisions(compiled)] == strategies


def _in_halves(h, w, y, *_):
    half = h.shape[1] // 2
    return sum(
        F.cross_entropy(F.linear(h[:, at], w).reshape(-1, V), y[:, at].reshape(-1), reduction="sum")
        for at in (slice(half), slice(half, None))
    )


@pytest.mark.parametrize(("program", "shapes"), [
    (with_arguments(InForward.filled_by_chunks), [(4, 6), (4, 5), (3, 4)]), (_in_halves, [(4, 6), (4, 5), (4, 2)]),
])  # fmt: skip
def test_sizes_that_pytorch_does_not_simplify(program, shapes):
    """Of batches of other sizes, and of one token, whose logits have a symbolic number of classes."""
    compiled = by_dynamo(program)
    for batch, length in shapes:
        h, w, *others = operands(length)
        tensors = (h[:batch].detach().requires_grad_(), w, *(each[:batch] for each in others))
        torch.testing.assert_close(run(compiled, tensors), run(program, tensors))
    assert {decision.fused and decision.plan.strategy for decision in decisions(compiled)} == {AT_ONCE}


def test_memory_is_compared_once_for_each_loss_that_is_added_in_place(monkeypatch):
    """And not once more for each scalar: 96 chunks took half a minute."""
    shares, compared = Tensor.shares_memory, []
    monkeypatch.setattr(Tensor, "shares_memory", lambda *tensors: (compared.append(tensors), shares(*tensors))[1])

    @with_arguments
    def program(h, w, y):
        total = h.new_zeros(())
        for logits, labels in _chunks(12, h, w, y):
            total += log_prob(logits, labels).exp().sum()
        return total

    assert len(check(program, IN_FORWARD, by_dynamo(program), (6,))) == 1
    assert len(compared) < 12**3


@pytest.mark.parametrize("chunks, options, strategies", [
    (12, {}, ["recompute_logits"]), (2, {}, ["gradients_in_forward"] * 2),
    (12, {"strategy": "gradients_in_forward"}, ["gradients_in_forward"] * 12),
])  # fmt: skip
def test_gradients_of_a_head_for_each_of_many_losses_wait(chunks, options, strategies):
    """More memory than the logits they would take, one beside the other."""

    @with_arguments
    def program(h, w, y):
        pairs = [(F.cross_entropy(z, y), (z.argmax(-1) == y).sum()) for z, y in _chunks(chunks, h, w, y)]
        return sum(loss**2 for loss, _ in pairs), torch.stack([right for _, right in pairs])

    compiled = by_dynamo(program, options={"chunk_rows": 7, **options})
    made = check(program, FUSED, compiled, (6,))
    assert [decision.plan.strategy for decision in made] == strategies


def _heads_of_parts_that_change_since(h, w, y, a):
    x = h * 1
    loss = sum(ce_loss(F.linear(part, w), own) for part, own in zip(x.chunk(2), y.chunk(2), strict=True))
    x.mul_(2)
    return loss


UNDER_AUTOCAST = {
    "parts of tokens": lambda h, w, y, a: clipped(
        torch.stack([log_probs(h[at], w, y[at]) for at in range(B)]), a
    ).mean(),
    "two heads": lambda h, w, y, a: ce_loss(F.linear(h, w), y) + ce_loss(F.linear(h.flip(1), w), y) / 2,
    "twice the same": lambda h, w, y, a: (log_probs(h, w, y) * a).mean() + entropies(h, w).mean(),
    "parts of what changes since": _heads_of_parts_that_change_since,
    # The first of them has no gradient, and the second has one through the cast of the weight.
    "two regions": lambda h, w, y, a: (
        z := F.linear(h, w), logged := _without_gradients(ce_loss, z, y), (ce_loss(z, y.flip(0)), logged)
    )[2],
}  # fmt: skip


@pytest.mark.parametrize("name", UNDER_AUTOCAST)
def test_casts_of_one_parameter_are_one(name):
    """Autocast has one for each linear."""
    program = torch.autocast("cpu", torch.bfloat16)(UNDER_AUTOCAST[name])
    h, w, y, a, _ = operands(6)
    compiled, trained = by_dynamo(program), (tensor.detach().float().requires_grad_() for tensor in (h, w))
    tensors = (*trained, y, a.float())
    torch.testing.assert_close(run(compiled, tensors), run(program, tensors), rtol=0.02, atol=0.002)
    strategies = [NO_GRADIENT] * (name == "two regions") + [AT_ONCE]
    assert [decision.plan.strategy for decision in decisions(compiled)] == strategies


@pytest.mark.parametrize("loss", [
    lambda x, z, y, m: (((1 - torch.exp(-x)) ** 2 * x).mean(),),
    lambda x, z, y, m: ((x * m).sum(), (z.argmax(-1) == y).sum()),
    lambda x, z, y, m: (F.cross_entropy(z.flatten(0, 1), y.flatten()),),
], ids=["token loss", "accuracy", "mean"])  # fmt: skip
def test_float16_waits_for_a_loss_scale(loss):
    """Gradients would be computed in the forward else."""

    def program(h, w, y, m):
        z = F.linear(h, w)
        return loss(F.cross_entropy(z.transpose(1, 2), y, reduction="none"), z, y, m)

    (h, w, y, _, m), compiled = operands(6), by_dynamo(program)
    results = compiled(*(tensor.detach().half().requires_grad_() for tensor in (h, w)), y, m.half())
    for result, expected in zip(results, program(h, w, y, m), strict=True):
        torch.testing.assert_close(result.double(), expected.double(), rtol=1e-2, atol=1e-2)
    (decision,) = decisions(compiled)
    assert decision.fused and "float16" in decision.note


@pytest.mark.parametrize("compiler", [by_dynamo, thunder_flce.jit])
def test_weights_are_wider_than_losses_of_16_bits(compiler):
    """bfloat16 has 1, and not the factor."""

    def program(h, w, y):
        return (F.cross_entropy(F.linear(h, w).transpose(1, 2), y, reduction="none") * (1 + 2**-8)).sum()

    h, w, y, *_ = operands(6)
    rounded = [tensor.detach().bfloat16().requires_grad_() for tensor in (h, w)]
    _, gradients = run(compiler(program), (*rounded, y))
    _, expected = run(program, (*(tensor.detach().double().requires_grad_() for tensor in rounded), y))
    for gradient, exact in zip(gradients, expected, strict=True):
        assert abs((gradient.double() * exact).sum() / exact.square().sum() - 1) < 1e-3


def test_masked_tokens_are_left_out():
    """They are what a weight of 0 says, and a product with the mask comes last."""
    h, w, y, a, m = operands(6)
    step = thunder_flce.jit(lambda h, w, y, a, m: ((log_probs(h, w, y) - a).exp() * m).sum() / m.sum())
    loss = step(h, w, y, a.masked_fill(m == 0, torch.nan), m)
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(loss, (h, w)))


@pytest.mark.parametrize(("program", "outcome"), BY_THUNDER, ids=lambda value: getattr(value, "__name__", ""))
@pytest.mark.filterwarnings("ignore")
def test_by_thunder(program, outcome):
    check(program, outcome, thunder_flce.jit(program), (6,))


PICKED = (1, 2, 1)
BY_THUNDERFX = {
    # Derivatives that thunder lacks: they are the weights of a region's tokens, and thunder asks for their gradient.
    "ends":
        (FUSED, lambda s: (s.flatten().cumsum(0)[at := torch.tensor(PICKED)] / at).sum() + s.flip(1)[0, :2].sum()),
    "picked": (FUSED, lambda s: s[:, torch.tensor(PICKED)].mean()),
    "selected": (FUSED, lambda s: s.index_select(1, torch.tensor(PICKED)).sum()),
    "of pairs": (FUSED, lambda s: (s[at := torch.tensor(PICKED), at] * at).sum()),
    # Tensors by keyword: thunder cannot differentiate these.
    "narrow": (NONE, lambda h: torch.narrow(input=h, dim=0, start=1, length=1).sum()),
    "entr": (NONE, lambda h: torch.special.entr(input=h.abs()).sum()),
    "nansum": (NONE, lambda h: torch.nansum(input=h, dim=-1).sum()),
    "xlogy": (NONE, lambda h: torch.xlogy(h.abs(), other=h.abs()).sum()),
    "kl_div": (NONE, lambda h: F.kl_div(input=h, target=h.detach().softmax(-1), reduction="sum")),
}  # fmt: skip


@pytest.mark.parametrize(("outcome", "program"), BY_THUNDERFX.values(), ids=BY_THUNDERFX)
def test_by_thunderfx(outcome, program):
    program = with_arguments(program)
    check(program, outcome, thunder_flce.thunderfx(program), (6,))


@pytest.mark.parametrize("picked", [
    lambda s: s.split([2, 2])[1], lambda s: s.roll(1, 0),
])  # fmt: skip
def test_thunderfx_keeps_the_grad_mode(picked):
    """What thunder leaves to Inductor may divide the part of a derivative that is computed without gradients."""
    program = with_arguments(lambda h, w, y, m: torch.where(m.sum() > -1, picked(losses(h, w, y)).sum(), 0.0) / m.sum())
    compiled = thunder_flce.thunderfx(program)
    for _ in range(2):
        check(program, IN_FORWARD, compiled, (8,))
        assert torch.is_grad_enabled()


@pytest.mark.parametrize(("detail", "logits"), [
    (" with a tensor that is no bias", lambda h, w: F.linear(h, w) + (w[:, 0] - 1) * F.linear(h, w)),
    (" of two linears that each have a bias", lambda h, w: F.linear(h, w, w[:, 0]) + F.linear(h, w * 2, w[:, 1])),
    (" of a linear whose bias has a factor", lambda h, w: F.linear(h, w) + 4 * F.linear(h, w * 2, w[:, 0])),
    (r"\)", lambda h, w: (F.linear(h, w).t() + w[:, :1]).t()),
])  # fmt: skip
def test_linears_whose_sum_is_none(detail, logits):
    """As of DoRA, of an adapter with a bias, of one whose bias is scaled with it, and with a bias for a transpose."""
    h, w, y = torch.randn(5, H), torch.randn(V, H, requires_grad=True), torch.randint(V, (5,))
    step = torch.compile(lambda h, w, y: F.cross_entropy(logits(h, w), y), backend="thunder_flce")
    with pytest.warns(thunder_flce.NotFusedWarning, match=rf"\(by add{detail}"):
        step(h, w, y)
