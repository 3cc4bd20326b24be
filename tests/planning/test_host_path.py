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


@pytest.mark.parametrize(("strategy", "most"), [(None, 295), ("save_logits", 411), ("recompute_logits", 418)])
def test_calls_of_an_eager_step(strategy, most):
    x, weight = torch.randn(64, 32).requires_grad_(), torch.randn(100, 32).requires_grad_()
    target, options = torch.randint(100, (64,)), Options(strategy=strategy)

    def step():
        linear_cross_entropy(x, weight, target, options=options).backward()

    for _ in range(3):
        step()
    # Where Dynamo has been imported, it is kept from looking into what runs.
    found = calls(step) - (25 if "torch._dynamo" in sys.modules else 0)
    assert found <= most, found


@pytest.mark.parametrize(
    ("options", "reduction"),
    [
        (Options(), "mean"),
        (Options(), "none"),
        (Options(memory_budget=2**18), "mean"),
        (Options(chunk_rows=256), "mean"),
    ],
    ids=str,
)
def test_a_new_number_of_tokens_in_a_known_tile(options, reduction):
    """Above 512 tokens, plans are for whole tiles: a new number costs nothing more."""
    weight = torch.randn(100, 32).requires_grad_()

    def step(tokens):
        x = torch.randn(tokens, 32).requires_grad_()
        target = torch.randint(100, (tokens,))
        linear_cross_entropy(x, weight, target, reduction=reduction, options=options).sum().backward()

    for tokens in (1000, 999, 998):
        step(tokens)
    assert calls(lambda: step(997)) <= calls(lambda: step(998))


def test_a_number_of_items_of_any_dtype():
    """As trainers count them, in int64: it is converted, and nothing else is done for it."""
    x, weight = torch.randn(64, 32).requires_grad_(), torch.randn(100, 32).requires_grad_()
    target = torch.randint(100, (64,))

    def found(num_items):
        def step():
            linear_cross_entropy(x, weight, target, num_items=num_items).backward()

        for _ in range(3):
            step()
        return calls(step)

    assert found(torch.tensor(50)) <= found(torch.tensor(50.0)) + 5
