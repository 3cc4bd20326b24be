"""What is kept of earlier calls of the same shapes changes nothing that a later one returns or raises."""

from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F

from thunder_flce import linear_cross_entropy
from thunder_flce.engine import rows

V, H = 11, 8


def operands(*shape, dtype=torch.float64):
    torch.manual_seed(0)
    hidden = torch.randn(*shape, H, dtype=dtype, requires_grad=True)
    return hidden, torch.randn(V, H, dtype=dtype, requires_grad=True), torch.randint(0, V, shape)


@pytest.mark.parametrize("shape", [(6,), (2, 3)])
@pytest.mark.parametrize("outputs", [(), ("log_prob",)])
@pytest.mark.parametrize("is_frozen", [False, True])
def test_results_may_change_in_place(shape, outputs, is_frozen):
    hidden, weight, target = operands(*shape)
    weight.requires_grad_(not is_frozen)
    found = []
    for _ in range(2):
        result = linear_cross_entropy(hidden, weight, target, reduction="none", outputs=outputs)
        result = result[1] if outputs else result
        result.mul_(2)
        found.append(torch.autograd.grad(result.sum(), hidden)[0])
    logits = hidden @ weight.T
    right = F.cross_entropy(logits.flatten(0, -2), target.flatten(), reduction="sum")
    (right,) = torch.autograd.grad(right * (-2 if outputs else 2), hidden)
    for gradient in found:
        torch.testing.assert_close(gradient, right)


@pytest.mark.parametrize(("name", "good", "bad"), [
    ("ignore_index", 1, True), ("vocab_size", V, float(V)), ("label_smoothing", 0, False),
    ("num_items", Fraction(3), -1), ("expected_gradient", 3.0, 0.0),
    ("linear_weight", torch.ones(V, H).double(), torch.ones(V, H).double().to_sparse()),
    ("token_weights", torch.ones(6), torch.ones(7)), ("target", torch.ones(6).long(), torch.ones(5).long()),
])  # fmt: skip
def test_what_is_wrong_after_what_is_right(name, good, bad):
    """Also where the two are equal, or differ in the number of tokens alone."""
    hidden, weight, target = operands(6)
    given = {"input": hidden, "linear_weight": weight, "target": target}
    linear_cross_entropy(**given | {name: good})
    with pytest.raises((TypeError, ValueError), match=f"{name} must"):
        linear_cross_entropy(**given | {name: bad})


def test_threads():
    """Counts that the host remembers, while others are forgotten."""

    def run(_):
        for number in range(3000):
            count = torch.tensor(number)
            rows.remember(count, number)
            assert rows.recalled(count) == number

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(run, range(6)))
