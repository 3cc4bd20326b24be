"""Gradients that the forward finishes for an expected upstream gradient."""

import re

import pytest
import thunder
import torch
import torch.nn.functional as F

import thunder_flce
from front_ends import run
from reference import Case, eager, error, make_case, truth
from thunder_flce import LinearCrossEntropyLoss, Options, linear_cross_entropy
from thunder_flce.backend import compile_graph

# The last is in the middle of two numbers of bfloat16.
UPSTREAM = [1 / 3, 1000 / 7, 1 + 2**-8]


def flat_case(device: str, dtype: torch.dtype = torch.bfloat16) -> Case:
    """Logits of standard deviation 0.05, whose rounding would hide that of the gradients otherwise."""
    case = make_case(tokens=1024, vocab=300, hidden=64, dtype=dtype, device=device, ignored=0.0)
    with torch.no_grad():
        case.weight.copy_(torch.randn_like(case.weight) * 0.05 / 8)
        case.x.copy_(torch.randn_like(case.x))
    return case


def assert_rounded_once(gradients, case: Case, upstream: float) -> None:
    """Asserts that dX and dW have no larger errors than those of eager PyTorch, which rounds once."""
    grad = torch.tensor(upstream, device=case.x.device)
    for gradient, peer, exact in zip(gradients, eager(case, grad).gradients, truth(case, grad).gradients, strict=True):
        assert error(gradient, exact) < 1.02 * error(peer, exact)


def fused(x, weight, target):
    return F.cross_entropy(F.linear(x, weight).float(), target)


def by_module(x, weight, target, upstream):
    module = LinearCrossEntropyLoss(weight.shape[1], weight.shape[0], device="meta")
    settings = {"expected_gradient": upstream}
    return torch.func.functional_call(module, {"linear.weight": weight}, (x, target), settings) * upstream


# For an upstream gradient g, the program that returns the loss of x, W and y times g.
WAYS = {
    "argument": lambda g: lambda *a: linear_cross_entropy(*a, expected_gradient=g) * g,
    "module": lambda g: lambda *a: by_module(*a, g),
    "option": lambda g: lambda *a: linear_cross_entropy(*a, options=Options(expected_gradient=g)) * g,
    "option of jit": lambda g: lambda *a: thunder_flce.jit(fused, options=Options(expected_gradient=g))(*a) * g,
    "multiplied": lambda g: thunder_flce.jit(lambda *a: fused(*a) * g),
    "16-bit loss": lambda g: thunder_flce.jit(lambda *a: F.cross_entropy(F.linear(*a[:2]), a[2]) * g),
    # Without an option, so small a loss would be left to Inductor on a GPU.
    "divided, backend": lambda g: torch.compile(
        lambda *a: fused(*a) / (1 / g), backend=compile_graph, fullgraph=True, options={"chunk_rows": 1024}
    ),
    "tensor": lambda g: (
        lambda *a: thunder_flce.jit(lambda scale, *a: scale * fused(*a))(torch.tensor(g).to(a[0].device), *a)
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("upstream", UPSTREAM)
def test_gradients_are_rounded_once(upstream, way, device):
    if way == "16-bit loss" and upstream == UPSTREAM[-1] and device == "cuda":
        pytest.skip("nvFuser does not round it")
    case = flat_case(device)
    loss = WAYS[way](upstream)(case.x, case.weight, case.target)
    gradients = torch.autograd.grad(loss, (case.x, case.weight), retain_graph=True)
    # A loss in 16 bits rounds its upstream gradient.
    rounded = torch.tensor(upstream, dtype=torch.bfloat16 if way == "16-bit loss" else torch.float64).item()
    assert_rounded_once(gradients, case, rounded)
    # As exact the second time.
    for again, gradient in zip(torch.autograd.grad(loss, (case.x, case.weight)), gradients, strict=True):
        assert torch.equal(again, gradient)


@pytest.mark.parametrize("factor", [1 / 3, torch.tensor(0.125)], ids=["number", "tensor"])
def test_a_factor_in_the_program_is_no_loss_scale(factor):
    """With float16, gradients wait for the loss scale, which is outside the program."""
    case = flat_case("cpu", torch.float16)
    for options, is_in_forward in ((Options(), False), (Options(expected_gradient=2.0**16), True)):
        jitted = thunder_flce.jit(lambda factor, *a: fused(*a) * factor, options=options)
        loss = jitted(factor, case.x, case.weight, case.target)
        gradients = torch.autograd.grad(loss, (case.x, case.weight), torch.tensor(2.0**16))
        assert_rounded_once(gradients, case, 2.0**16 * float(factor))
        strategy = thunder_flce.explain(jitted)[0].decisions[0].plan.strategy
        assert (strategy == "gradients_in_forward") == is_in_forward


def expected_gradients(program, *factors) -> list[str]:
    """Compares results and gradients with PyTorch's; returns the expected gradients that the printed trace has."""
    case = make_case(dtype=torch.float32, ignored=0.0)
    tensors, jitted = (*factors, case.x, case.weight, case.target), thunder_flce.jit(program)
    result, exact = run(jitted, tensors), run(program, tensors)
    if not exact[0][0].isfinite():
        result, exact = result[0], exact[0]  # Gradients are infinite or NaN, as the operations come.
    torch.testing.assert_close(result, exact, rtol=1e-4, atol=1e-6, equal_nan=True)
    return re.findall(r"# x = [^:]*expected_gradient = ([-\w.]+)", thunder.last_traces(jitted)[-1].python())


def times_accuracy(x, weight, target):
    """The accuracy is computed after the region, where the region computes the argmax."""
    logits = F.linear(x, weight)
    accuracy = (logits.argmax(-1) == target).float().mean() + 0.5
    return F.cross_entropy(logits, target) * accuracy * 2


def two_losses(x, weight, target):
    return 0.75 * fused(x, weight, target) + fused(2 * x, weight, target) / 4


def beside(loss, function):
    return loss, function(loss)


@pytest.mark.parametrize(("program", "expected"), [
    (lambda *a: fused(*a) / 4, ["0.25"]),
    (lambda *a: -fused(*a), ["-1.0"]),
    (lambda *a: fused(*a).double() * 0.5 + 1, ["0.5"]),
    (lambda *a: (fused(*a) * 0.5).reshape(1) * 3, ["1.5"]),
    (lambda *a: beside(fused(*a), lambda loss: loss * 0.5), ["0.5"]),
    # In the weights of the tokens.
    (two_losses, []),
    # Not behind a call.
    (lambda *a: linear_cross_entropy(*a) * 0.5, []),
    (lambda *a: linear_cross_entropy(*a, expected_gradient=3) * 0.5, ["3"]),
    # No factor that is known before the loss.
    (lambda *a: fused(*a) ** 2 * 3, []),
    (lambda *a: beside(fused(*a), lambda loss: loss * 3 + loss)[1], []),
    (lambda *a: beside(fused(*a), lambda loss: loss * (loss.detach() + 1))[1], []),
    (lambda *a: fused(*a) / 0.0, []),
    (times_accuracy, ["2.0"]),
])  # fmt: skip
def test_factors_that_follow_the_loss(program, expected):
    assert expected_gradients(program) == expected


@pytest.mark.parametrize(
    ("factor", "divides"), [(0.0, False), (False, False), (1e-42, False), (-2.0, False), (1e39, True), (-2.0, True)]
)
def test_a_tensor_of_any_value(factor, divides):
    """Also one that is 0 when the program runs; and the loss that is returned beside the product has its gradient."""
    factor = torch.tensor(factor, dtype=torch.bool if factor is False else torch.float64)
    scaled = (lambda loss, factor: loss / (factor * 1.0)) if divides else (lambda loss, factor: loss * factor)
    expected_gradients(lambda factor, *a: beside(fused(*a), lambda loss: scaled(loss, factor)), factor)


def test_a_factor_that_needs_a_gradient():
    (name,) = expected_gradients(lambda factor, *a: fused(*a) / factor, torch.tensor(0.3, requires_grad=True))
    assert name.startswith("t")


@pytest.mark.parametrize("expected", [0, float("inf"), "1", True])
def test_bad_option(expected):
    with pytest.raises(ValueError, match="expected_gradient must be None or a finite number other than 0, but got"):
        Options(expected_gradient=expected)
