"""The two front ends of thunder that tests go through, and what they have in common."""

import torch

import thunder_flce

FRONT_ENDS = {"thunder.jit": thunder_flce.jit, "thunderfx": thunder_flce.thunderfx}


def decisions(compiled) -> list[thunder_flce.matching.decisions.Decision]:
    """What was decided about each cross-entropy, in the order in which it was compiled."""
    return thunder_flce.explain(compiled).decisions


def assert_fused(compiled, times: int | None = None) -> None:
    """Asserts that all was fused that was decided about, as often as that where it is said."""
    found = decisions(compiled)
    assert found and all(decision.fused for decision in found), [str(decision) for decision in found]
    assert times is None or len(found) == times


def gradients(model) -> dict[str, torch.Tensor | None]:
    """A copy of each parameter's gradient, by name."""
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def assert_agrees(model, expected, got, **tolerances) -> None:
    """Compares the scalar losses, and the gradients of all parameters, of two calls that compute the same.

    Args:
        model: whose parameters both of them read.
        expected: calls eager PyTorch and returns the loss.
        got: calls the compiled program and returns the loss.
        **tolerances: of `torch.testing.assert_close`.
    """
    results = []
    for call in (expected, got):
        model.zero_grad()
        loss = call()
        loss.backward()
        results.append((loss.detach(), gradients(model)))
    model.zero_grad()
    (expected_loss, expected_gradients), (loss, found) = results
    torch.testing.assert_close(loss, expected_loss, **tolerances)
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(found[name], gradient, **tolerances, msg=lambda m, n=name: f"{n}: {m}")
