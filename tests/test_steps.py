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


@pytest.mark.skipif(not find_spec("nvfuser_direct"), reason="needs nvFuser's Python package")
@pytest.mark.parametrize("bias_grad", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("vocab", [1000, 128256, 50257])
def test_fusions_are_those_that_the_kernels_execute(vocab, bias_grad, monkeypatch):
    from thunder_flce.row_kernels import LogitsBuffer, nvfuser

    executed = []

    def execute(fusion, inputs, fast_math=False):
        executed.append(fusion)
        vectors = {"part_statistics": 2, "merge_parts": 3, "target_gradient": 1}.get(fusion, 0)
        rows = inputs[0].shape[0]
        return [torch.zeros(rows) for _ in range(vectors)] or [torch.zeros(inputs[0].shape[1])]

    for name in ("part_statistics", "merge_parts", "target_gradient"):
        monkeypatch.setattr(nvfuser, f"_{name}", lambda *sizes, name=name: name)
    with_sums = {True: "gradient_with_column_sums", False: "gradient"}
    monkeypatch.setattr(nvfuser, "_gradient", lambda *sizes, column_sums: with_sums[column_sums])
    monkeypatch.setattr(nvfuser, "_execute", execute)

    problem = _problem(tokens=4, vocab=vocab, bias_grad=bias_grad)
    buffer = LogitsBuffer.allocate(4, problem.layout, dtype=torch.bfloat16, device=torch.device("cpu"))
    row = torch.zeros(4)
    statistics, _ = nvfuser.KERNELS.statistics(buffer, row)
    nvfuser.KERNELS.gradient_(buffer, statistics, row, column_sums=bias_grad)
    nvfuser.KERNELS.target_gradient(row, statistics, row, row)
    stages = forward_stages(problem, make_plan(problem, Options()))
    assert executed == [name for stage in stages for step in stage.steps if step.call for name in step.fusions]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_tokens(strategy):
    problem = _problem(tokens=0)
    plan = make_plan(problem, Options(strategy=strategy))
    steps = [s for stage in (*forward_stages(problem, plan), *backward_stages(problem, plan)) for s in stage.steps]
    assert steps and all(step.bytes >= 0 and step.operations == 0 for step in steps)


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
