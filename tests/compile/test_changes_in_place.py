"""Changes in place, and operations that look linear and are not: the numbers are PyTorch's, whatever is fused.

`h` (B, T, H) and `w` (V, H) are trained, `y` (B, T) are labels, `m` (B, T) is a mask.
"""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import thunder_flce


def log_probs(h, w, y):
    return F.linear(h, w).log_softmax(-1).gather(-1, y[..., None]).squeeze(-1)


def losses(h, w, y):
    return F.cross_entropy(F.linear(h, w).flatten(0, 1), y.flatten(), reduction="none").view(y.shape)


def padded(h, w, y, m):
    return F.pad(losses(h, w, y), (0, 2), value=5.0).sum()


def padded_with_the_last(h, w, y, m):
    return F.pad(losses(h, w, y)[None], (0, 2), mode="replicate").sum()


def difference_with_more(h, w, y, m):
    return losses(h, w, y).diff(prepend=m[:, :1]).sum()


def added_by_keyword(h, w, y, m):
    return torch.add(losses(h, w, y), other=m).sum()


def divided_by_keyword(h, w, y, m):
    return torch.div(losses(h, w, y).sum(), other=3.0)


def zeros_that_are_not(h, w, y, m):
    z = torch.zeros_like(m)
    z[0] = 1.0
    return (losses(h, w, y) + z).sum()


def zeros_changed_through_a_view(h, w, y, m):
    z = h.new_zeros(4)
    z.view(2, 2).fill_(3.0)
    return (z + losses(h, w, y).sum(1)).sum()


def changed_before_it_is_read(h, w, y, m):
    logits = F.linear(h, w)
    g = logits.gather(-1, y[..., None]).squeeze(-1)
    g.mul_(2.0)
    return ((g - logits.logsumexp(-1)) * m).sum()


def changed_under_a_view(h, w, y, m):
    s = log_probs(h, w, y)
    a = s.view(-1)
    s *= m
    return a.sum()


def changed_under_a_detached_view(h, w, y, m):
    s = log_probs(h, w, y)
    d = s.detach()
    d *= m
    return (s * m).sum()


def masked_through_a_view(h, w, y, m):
    s = log_probs(h, w, y)
    v = s[None]
    v[m[None] == 0] = 0.0
    return s.sum()


def logits_changed_under_a_detached_view(h, w, y, m):
    logits = F.linear(h, w)
    logits.detach().mul_(2.0)
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def sums_changed_through_a_view(h, w, y, m):
    s = losses(h, w, y).sum(1)
    u = s.view(2, 2).mul_(2.0)
    return s.sum() + u.sum()


def checkpointed_and_masked(h, w, y, m):
    return (checkpoint(losses, h, w, y, use_reentrant=False) * m).sum()


def changed_twice(h, w, y, m):
    s = log_probs(h, w, y)
    t = s.mul_(m)
    u = t.add_(1.0)
    return (s * m).sum() + u.sum() + t.mean()


def changed_and_returned(h, w, y, m):
    """By another name, which has no gradient."""
    s = losses(h, w, y)
    detached = s.detach()
    s.mul_(m)
    return s.sum(), detached


def changed_without_gradients(h, w, y, m):
    s = losses(h, w, y) * 1.0
    with torch.no_grad():
        s.mul_(m)
    return s.sum()


def transposed_in_place(h, w, y, m):
    s = losses(h, w, y)
    s.t_()
    return (s * m.t()).sum()


PROGRAMS = [
    padded, padded_with_the_last, difference_with_more, added_by_keyword, divided_by_keyword, zeros_that_are_not,
    zeros_changed_through_a_view, changed_before_it_is_read, changed_under_a_view, changed_under_a_detached_view,
    masked_through_a_view, logits_changed_under_a_detached_view, sums_changed_through_a_view, checkpointed_and_masked,
    changed_twice, changed_and_returned, changed_without_gradients, transposed_in_place,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_numbers_are_those_of_pytorch(program):
    generator = torch.Generator().manual_seed(0)
    h, w = (torch.randn(*shape, generator=generator) for shape in ((4, 6, 8), (29, 8)))
    y = torch.randint(29, (4, 6), generator=generator)
    m = (torch.rand(4, 6, generator=generator) > 0.3).float()

    def run(call, dtype):
        given = [each.to(dtype, copy=True).requires_grad_() for each in (h, w)]
        results = call(*given, y, m.to(dtype))
        loss, *others = results if isinstance(results, tuple) else (results,)
        return [loss.detach(), *others, *torch.autograd.grad(1.5 * loss, given)]

    for ours, exact in zip(
        run(torch.compile(program, backend="thunder_flce"), torch.float32), run(program, torch.float64), strict=True
    ):
        assert (ours - exact).abs().max() <= 1e-5 * max(1, exact.abs().max())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("compiled", [thunder_flce.jit, lambda f: torch.compile(f, backend="thunder_flce")])
def test_a_mean_of_ignored_labels_beside_another_term(compiled):
    """The loss is NaN, and the gradients are those of the other term."""

    def program(h, w, y):
        logits = F.linear(h, w)
        return F.cross_entropy(logits, y) + logits.logsumexp(-1).square().mean()

    generator = torch.Generator().manual_seed(0)
    h, w = (torch.randn(*shape, generator=generator) for shape in ((6, 8), (29, 8)))
    call = compiled(program)
    for y in (torch.full((6,), -100), torch.tensor([3, -100, 28, 0, -100, 7])):
        found = []
        for each in (call, program):
            given = [x.clone().requires_grad_() for x in (h, w)]
            loss = each(*given, y)
            found.append([loss.detach(), *torch.autograd.grad(loss, given)])
        assert found[0][0].isnan() == (y.max() < 0)
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs, equal_nan=True)


@pytest.mark.filterwarnings("ignore")
def test_float16_waits_where_the_upstream_gradient_is_not_known():
    def program(h, w, y):
        loss = F.cross_entropy(F.linear(h, w), y, reduction="none")
        return ((1 - torch.exp(-loss)) ** 2 * loss).mean() * 1e-4

    compiled = torch.compile(program, backend="thunder_flce")
    h, w = (torch.randn(*shape, dtype=torch.float16, requires_grad=True) for shape in ((6, 8), (29, 8)))
    compiled(h, w, torch.randint(29, (6,))).backward()
    (decision,) = thunder_flce.explain(compiled).decisions
    assert decision.fused and "float16" in decision.note


@pytest.mark.filterwarnings("ignore")
def test_products_by_other_names_in_thunder():
    """thunder has the gradient of `torch.dot` from PyTorch, which reads the rows."""
    generator = torch.Generator().manual_seed(0)
    h, w = (torch.randn(*shape, generator=generator) for shape in ((4, 6, 8), (29, 8)))
    y, m = torch.randint(29, (4, 6), generator=generator), torch.rand(4, 6, generator=generator)

    def program(h, w, y, m):
        return torch.dot(losses(h, w, y)[0], m[0])

    found = []
    for call in (thunder_flce.jit(program), program):
        given = [each.clone().requires_grad_() for each in (h, w)]
        found.append(torch.autograd.grad(call(*given, y, m), given))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)
