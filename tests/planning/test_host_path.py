"""What a step costs the host before it is on the device: calls, of which each takes a part of a microsecond."""

import sys

import pytest
import torch

from thunder_flce import Options, linear_cross_entropy


def calls(run) -> int:
    """Of Python's functions and of those in C."""
    count = 0

    def profile(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


@pytest.fixture(autouse=True)
def no_poison(monkeypatch, poisoned_memory):
    """What fills memory with NaN is called, too."""
    monkeypatch.undo()


def step(tokens=64, *, reduction="mean", options=None):
    """A step, which makes its own operands when it is made: what is counted is the call."""
    x, weight = torch.randn(tokens, 32).requires_grad_(), torch.randn(100, 32).requires_grad_()
    target, settings = torch.randint(100, (tokens,)), {"reduction": reduction, "options": options}
    return lambda: linear_cross_entropy(x, weight, target, **settings).sum().backward()


@pytest.mark.parametrize(("strategy", "most"), [(None, 294), ("save_logits", 405), ("recompute_logits", 413)])
def test_calls_of_an_eager_step(strategy, most):
    *_, found = (calls(step) for step in [step(options=Options(strategy=strategy))] * 4)
    # Where Dynamo has been imported, it is kept from looking into what runs.
    found -= 31 if "torch._dynamo" in sys.modules else 0
    assert found <= most, found


@pytest.mark.parametrize(("options", "reduction"), [
    (Options(), "mean"), (Options(), "none"), (Options(memory_budget=2**18), "mean"),
    (Options(chunk_rows=256), "mean"),
], ids=str)  # fmt: skip
def test_a_new_number_of_tokens_in_a_known_tile(options, reduction):
    """Above 512 tokens, plans are for whole tiles: a new number costs nothing more."""
    for tokens in (1000, 999, 998):
        step(tokens, reduction=reduction, options=options)()
    new, known = (step(tokens, reduction=reduction, options=options) for tokens in (997, 998))
    assert calls(new) <= calls(known)
