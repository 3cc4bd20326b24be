"""The host's cost of a step, before it is on the device: function calls, each a part of a microsecond."""

import cProfile
import pstats

import pytest
import torch

from thunder_flce import Options, linear_cross_entropy, operators
from thunder_flce.engine.primitives import Region

pytestmark = pytest.mark.usefixtures("without_poison")


def count_calls(run) -> int:
    """Returns how many functions of Python and of C are called."""
    profile = cProfile.Profile()
    profile.runcall(run)
    return pstats.Stats(profile).total_calls


def step(tokens=64, *, reduction="mean", options=None):
    """Returns a forward and backward; its operands exist before it is called, so they do not count."""
    x, weight = torch.randn(tokens, 32).requires_grad_(), torch.randn(100, 32).requires_grad_()
    target, settings = torch.randint(100, (tokens,)), {"reduction": reduction, "options": options}
    return lambda: linear_cross_entropy(x, weight, target, **settings).sum().backward()


@pytest.mark.parametrize(("strategy", "most"), [(None, 321), ("save_logits", 427), ("recompute_logits", 435)])
def test_calls_of_an_eager_step(strategy, most):
    """With those that keep Dynamo, which tests import, from tracing the step."""
    run = step(options=Options(strategy=strategy))
    *_, calls = (count_calls(run) for _ in range(4))
    assert calls <= most, calls


@pytest.mark.parametrize(("options", "reduction"), [
    (Options(), "mean"), (Options(), "none"), (Options(memory_budget=2**18), "mean"),
    (Options(chunk_rows=256), "mean"),
], ids=str)  # fmt: skip
def test_a_new_number_of_tokens_in_a_known_tile(options, reduction):
    """Above 512 tokens, plans are for whole tiles: a new number of tokens costs nothing more."""
    for tokens in (1000, 999, 998):
        step(tokens, reduction=reduction, options=options)()
    new, known = (step(tokens, reduction=reduction, options=options) for tokens in (997, 998))
    assert count_calls(new) <= count_calls(known)


def test_tensors_of_any_layout_share_a_region(monkeypatch):
    """In forward and backward."""
    regions = []
    monkeypatch.setattr(operators, "Region", lambda *arguments: regions.append(Region(*arguments)) or regions[-1])
    rows, columns = torch.randn(60, 66), torch.randn(32, 100)
    for x, weight in ((rows[:, :32], columns.t()), (rows[:, :64:2], columns.t().contiguous())):
        target, options = torch.randint(100, (60, 2))[:, 0], Options(strategy="recompute_logits")
        linear_cross_entropy(x.requires_grad_(), weight.requires_grad_(), target, options=options).backward()
    assert len(regions) == 1
