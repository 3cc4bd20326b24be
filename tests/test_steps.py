"""The steps of a plan are what the engine runs, call by call; and traces print them beneath the region's line."""

import itertools
from importlib.util import find_spec

import pytest
import thunder
import torch
import torch.nn.functional as F

import thunder_flce
from thunder_flce import Options, engine, products
from thunder_flce.engine import Operands
from thunder_flce.functional import plan_for
from thunder_flce.options import STRATEGIES
from thunder_flce.plan import Plan, Problem, make_plan
from thunder_flce.row_kernels.torch_ops import TorchRowKernels
from thunder_flce.steps import backward_stages, forward_stages

T, H, V = 40, 8, 50
CALLS = {
    products: ("logits_", "input_gradient_", "weight_gradient_"),
    TorchRowKernels: ("statistics", "gradient_", "target_gradient"),
}


@pytest.fixture
def calls(monkeypatch):
    """The names of the products and row kernels that the engine calls, in order."""
    seen = []

    def recorded(name, function):
        def wrapper(*args, **kwargs):
            seen.append(name)
            return function(*args, **kwargs)

        return wrapper

    for owner, names in CALLS.items():
        prefix = "products" if owner is products else "kernels"
        for name in names:
            monkeypatch.setattr(owner, name, recorded(f"{prefix}.{name}", getattr(owner, name)))
    return seen


def _expected(stages):
    return [step.call for stage in stages for _ in range(stage.repeats) for step in stage.steps if step.call]


GRADS = [grads for grads in itertools.product([False, True], repeat=3) if any(grads)]


@pytest.mark.parametrize("grads", GRADS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_steps_are_the_calls_of_the_engine(strategy, dtype, grads, calls):
    input_grad, weight_grad, bias_grad = grads
    operands = Operands(
        torch.randn(T, H, dtype=dtype),
        torch.randn(V, H, dtype=dtype),
        torch.randn(V, dtype=dtype),
        torch.randint(0, V, (T,)),
        ignore_index=-100,
        reduction="mean",
        input_grad=input_grad,
        weight_grad=weight_grad,
        bias_grad=bias_grad,
    )
    problem = Problem(
        tokens=T,
        hidden=H,
        vocab=V,
        dtype=dtype,
        device_type="cpu",
        reduction="mean",
        has_bias=True,
        input_grad=input_grad,
        weight_grad=weight_grad,
        bias_grad=bias_grad,
    )
    plan = plan_for(operands, Options(strategy=strategy, chunk_rows=10, accumulate="parameter"))
    if plan.slab_columns:
        plan = Plan(strategy=strategy, chunk_rows=10, slab_columns=20)

    result = engine.forward(operands, plan)
    assert calls == _expected(forward_stages(problem, plan))
    calls.clear()
    if strategy != "gradients_in_forward":
        engine.backward(operands, plan, result.statistics, result.logits, torch.ones(()))
    assert calls == _expected(backward_stages(problem, plan))


def _problem(**changes):
    defaults = {"tokens": 8192, "hidden": 4096, "vocab": 128256, "dtype": torch.bfloat16, "device_type": "cuda"}
    grads = {"reduction": "mean", "input_grad": True, "weight_grad": True, "bias_grad": False}
    return Problem(**{**defaults, **grads, **changes})


@pytest.mark.skipif(not find_spec("nvfuser_direct"), reason="needs nvFuser's Python package")
def test_products_are_cublas_and_row_passes_are_nvfuser():
    problem = _problem()
    stages = forward_stages(problem, make_plan(problem, Options()))
    (chunks,) = (stage for stage in stages if stage.repeats > 1)
    assert chunks.title == "for each chunk of 2048 tokens, 4 in all"
    runners = {step.call: step.runner for step in chunks.steps if step.call}
    assert runners == {
        "products.logits_": "cuBLAS",
        "kernels.statistics": "nvFuser: part_statistics, merge_parts",
        "kernels.gradient_": "nvFuser: gradient",
        "kernels.target_gradient": "nvFuser: target_gradient",
        "products.weight_gradient_": "cuBLAS",
        "products.input_gradient_": "cuBLAS",
    }
    assert str(chunks.steps[0]) == "logits bf16[2048, 128256] = x @ W.t()"


@pytest.mark.parametrize("changes", [{"device_type": "cpu"}, {"dtype": torch.float64}], ids=str)
def test_without_nvfuser_row_passes_are_pytorch(changes):
    problem = _problem(**changes)
    stages = forward_stages(problem, make_plan(problem, Options()))
    assert not any(step.fusions or step.runs_in == "nvFuser" for stage in stages for step in stage.steps)


def test_an_odd_vocabulary_is_a_product_of_its_own():
    problem = _problem(vocab=128257)
    steps = [step for stage in forward_stages(problem, make_plan(problem, Options())) for step in stage.steps]
    assert "the last 1 columns apart" in next(str(step) for step in steps if step.call == "products.logits_")


def loss(hidden, weight, labels):
    return F.cross_entropy(F.linear(hidden, weight), labels)


def test_a_trace_prints_one_chunk_beneath_the_region():
    jitted = thunder_flce.jit(loss, options=Options(chunk_rows=10))
    jitted(torch.randn(T, H, requires_grad=True), torch.randn(V, H, requires_grad=True), torch.randint(0, V, (T,)))
    lines = thunder.last_traces(jitted)[-1].python().splitlines()
    at = next(i for i, line in enumerate(lines) if "linear_cross_entropy_fwd(" in line)
    comments = list(itertools.takewhile(lambda line: line.startswith("    #"), lines[at + 1 :]))
    assert comments[0] == "    # x = hidden, W = weight, y = labels"
    for name in ("loss = ", "row_max = ", "row_logsumexp = ", "valid_count = ", "dX = ", "dW = "):
        assert name in comments[1]
    text = "\n".join(comments)
    assert "for each chunk of 10 tokens, 4 in all:" in text
    assert "logits f32[10, 50] = x @ W.t()" in text
    assert f"dW f32[{V}, {H}] += dlogits.t() @ x" in text and "nvFuser" not in text


def test_a_backward_trace_prints_its_slabs():
    jitted = thunder_flce.jit(loss, options=Options(strategy="recompute_logits"))
    jitted(torch.randn(T, H, requires_grad=True), torch.randn(V, H, requires_grad=True), torch.randint(0, V, (T,)))
    text = thunder.last_backward_traces(jitted)[-1].python()
    title = f"    # for the only slab, of {V} columns of the vocabulary:\n"
    assert f"{title}    #   logits f32[{T}, {V}] = x @ W[slab].t()" in text
