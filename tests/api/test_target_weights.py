"""Several weighted targets a token: soft targets, such as a teacher's largest probabilities."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from reference import composed_of_several, error
from thunder_flce import Options, linear_cross_entropy
from thunder_flce.operation.loss import Loss

B, T, H, V, K = 3, 11, 16, 101, 5
ALL = Options(strategy="recompute_logits", chunk_rows=7)
ON_EVERY_BACKEND = True


def operands(dtype=torch.float64, device="cpu", vocab=V, targets=K):
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(B, T, H, generator=generator)
    weight = torch.randn(vocab, H, generator=generator).mul(0.5)
    bias = torch.randn(vocab, generator=generator)
    target = torch.randint(vocab - 3, (B, T, targets), generator=generator)
    # Columns that come twice and three times, and one that others, in another vocabulary block, are put next to.
    target[..., 1] = target[..., 0]
    target[0, :, -1], target[1, :, -1] = target[0, :, 0], 0
    target[torch.rand(target.shape, generator=generator) < 0.3] = -100
    target[1, 5:] = -100
    # With some, more than 1 in all.
    target_weights = torch.rand(target.shape, generator=generator) * torch.linspace(0, 1, T)[None, :, None]
    # What ignored targets weigh does not matter.
    target_weights = target_weights.masked_fill(target == -100, float("nan"))
    floating = [tensor.to(device, dtype).requires_grad_() for tensor in (hidden, weight, bias)]
    return (*floating, target.to(device), target_weights.to(device, dtype))


def ours(hidden, weight, bias, target, target_weights, **settings):
    return linear_cross_entropy(hidden, weight, target, linear_bias=bias, target_weights=target_weights, **settings)


def exact(hidden, weight, bias, target, target_weights, *, token_weights=None, num_items=None, **settings):
    loss = Loss(**settings)
    if num_items is not None:
        loss = Loss(**{**settings, "reduction": "sum"})
    found = composed_of_several(F.linear(hidden, weight, bias), target, target_weights, loss, token_weights)
    return found if num_items is None else found / num_items


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("options", "target_rest"),
    [(None, False), (Options(chunk_rows=8), False), (ALL, False), (Options(chunk_rows=8), True)],
    ids=["", "chunks", "blocks", "rest"],
)
def test_error_beside_pytorchs(options, target_rest, dtype, device):
    """With targets that are the teacher's probabilities, next to the student's: p - q has to keep its digits."""
    if target_rest and dtype == torch.float16:
        options = replace(options, expected_gradient=1.0)
    hidden, weight, bias, target, _ = operands(dtype, device, vocab=1009, targets=64)
    target = target.clamp(min=0)
    with torch.no_grad():
        probabilities = (F.linear(hidden, weight, bias).float() * 1.01).softmax(-1)
        target = probabilities.topk(64).indices
        target_weights = probabilities.gather(-1, target).to(dtype)
    tensors, loss = (hidden, weight, bias), Loss(target_rest=target_rest)
    doubled = [tensor.detach().double().requires_grad_() for tensor in tensors]
    results = {}
    for name, value, of in (
        ("ours", ours(*tensors, target, target_weights, options=options, target_rest=target_rest), tensors),
        ("eager", composed_of_several(F.linear(*tensors).float(), target, target_weights, loss), tensors),
        ("exact", exact(*doubled, target, target_weights.double(), target_rest=target_rest), doubled),
    ):
        results[name] = (value, *torch.autograd.grad(value, of))
    for got, eager, right in zip(*results.values(), strict=True):
        assert error(got, right) <= 1.25 * error(eager, right) + 1e-6


def test_a_rest_that_is_nothing():
    """All of the mass is in the targets, of teacher or student: no infinity, and no gradient of NaN."""
    hidden, weight, bias, *_ = operands()
    target = torch.arange(V).expand(B, T, V)
    target_weights = torch.full(target.shape, 0.5 / V, dtype=torch.float64)
    loss = ours(hidden, weight, bias, target, target_weights, target_rest=True)
    assert all(each.isfinite().all() for each in (loss, *torch.autograd.grad(loss, (hidden, weight, bias))))
    whole = ours(hidden, weight, bias, target, 2 * target_weights, target_rest=True)
    torch.testing.assert_close(whole, ours(hidden, weight, bias, target, 2 * target_weights))
    with pytest.raises(ValueError, match="target_rest is the rest of target_weights"):
        linear_cross_entropy(hidden, weight, target[..., 0], target_rest=True)


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({"target_weights": torch.rand(B, T)}, ValueError, r"target_weights must have target's shape, \(3, 11, 5\)"),
        ({"target_weights": torch.rand(B, T, K) > 0}, TypeError, r"but got bool; pass mask.to\(input.dtype\)"),
        ({"target_weights": torch.rand(B, T, K).requires_grad_()}, ValueError, "target_weights must not require"),
        ({"target": torch.zeros(B, T, dtype=torch.long)}, ValueError, r"target must be \(..., K\)"),
        ({"target": torch.zeros(B, T, 0, dtype=torch.long)}, ValueError, "and K ≥ 1"),
        ({"target": torch.full((B, T, K), V)}, IndexError, r"target has 33 of 33 rows with values that are neither"),
        ({"weight": torch.rand(V)}, ValueError, "weight has no meaning with target_weights"),
        ({"label_smoothing": 0.1}, ValueError, "label_smoothing must be 0 with target_weights"),
        ({"outputs": ("accuracy",)}, ValueError, "outputs must not have 'accuracy' with target_weights"),
        ({"target_rest": 1}, TypeError, "target_rest must be a bool, but got int"),
        ({"target_rest": True, "reduction": "none"}, ValueError, 'target_rest needs reduction "mean" or "sum"'),
        ({"target_rest": True, "options": ALL}, ValueError, "target_rest needs its gradients computed in the forward"),
        ({"target_weights": None}, ValueError, "target must have input's shape without its last dimension"),
    ],
)
def test_bad_input(given, kind, message):
    hidden, weight, _, target, target_weights = operands(torch.float32)
    given = {"target": target, "target_weights": target_weights, **given}
    with pytest.raises(kind, match=message):
        linear_cross_entropy(hidden, weight, **given)
