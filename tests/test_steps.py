"""The steps of a plan are what the engine runs, call by call; and traces print them beneath the region's line."""

import itertools
from dataclasses import replace
from importlib.util import find_spec

import pytest
import thunder
import torch
import torch.nn.functional as F

import thunder_flce
from thunder_flce import Options
from thunder_flce.execution import engine
from thunder_flce.execution.engine import Operands
from thunder_flce.execution.matmul import matmul
from thunder_flce.execution.row_kernels.interface import LogitsBuffer, RowCoefficients, RowStatistics
from thunder_flce.execution.row_kernels.torch_rows import TorchRowKernels
from thunder_flce.functional import plan_for
from thunder_flce.operation.loss import IncomingGradients, Loss
from thunder_flce.options import STRATEGIES
from thunder_flce.planning.plan import Problem, layout_for, make_plan
from thunder_flce.planning.steps import PlannedRegion, backward_stages, forward_stages

T, H, V = 40, 8, 50
CALLS = {
    matmul: ("logits_", "input_gradient_", "weight_gradient_"),
    TorchRowKernels: ("statistics", "moments", "gradient", "statistics_and_gradient", "target_gradient"),
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
        prefix = "products" if owner is matmul else "kernels"
        for name in names:
            monkeypatch.setattr(owner, name, recorded(f"{prefix}.{name}", getattr(owner, name)))
    return seen


def _expected(stages):
    return [step.call for stage in stages for _ in range(stage.repeats) for step in stage.steps if step.call]


GRADS = [grads for grads in itertools.product([False, True], repeat=3) if any(grads)]
CASES = [
    *((Loss(), Options(), grads) for grads in GRADS),
    (Loss(label_smoothing=0.1, softcap=5.0, logit_scale=0.5, z_loss=1e-3), Options(), (True, True, True)),
    (Loss(reduction="sum", vocab_size=V - 8, outputs=("argmax", "accuracy")), Options(), (True, True, True)),
    (Loss(outputs=("entropy", "log_prob")), Options(), (True, True, False)),
    (Loss(), Options(logits_dtype="float32"), (True, True, True)),
]


@pytest.mark.parametrize(("loss", "options", "grads"), CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("strategy", [*STRATEGIES, "save_some_logits", "first_tokens_in_slabs"])
def test_steps_are_the_calls_of_the_engine(strategy, dtype, loss, options, grads, calls):
    in_forward = strategy in ("gradients_in_forward", "first_tokens_in_slabs")
    if loss.has_row_gradients and in_forward:
        pytest.skip("no such strategy")
    needed = dict(zip(("input_grad", "weight_grad", "bias_grad"), grads, strict=True))
    operands = Operands(
        x=torch.randn(T, H, dtype=dtype),
        weight=torch.randn(V, H, dtype=dtype),
        bias=torch.randn(V, dtype=dtype),
        target=torch.randint(0, V - 8, (T,)),
        loss=loss,
        **needed,
    )
    named = {"save_some_logits": "save_logits", "first_tokens_in_slabs": "gradients_in_forward"}.get(strategy, strategy)
    plan = plan_for(operands, replace(options, strategy=named, chunk_rows=10, accumulate="parameter"))
    if plan.slab_columns:
        plan = replace(plan, slab_columns=20)
    if strategy == "save_some_logits":
        plan = replace(plan, saved_rows=15, chunk_rows=10, slab_columns=20)
    if strategy == "first_tokens_in_slabs":
        if not (needed["weight_grad"] and plan.takes_one_pass(is_plain_loss=loss.is_plain, bias_grad=grads[2])):
            pytest.skip("no such plan")
        plan = replace(plan, first_rows=8, first_slabs=2)
    region = PlannedRegion(
        problem=_problem(tokens=T, hidden=H, vocab=operands.vocab, dtype=dtype, device_type="cpu", **needed),
        plan=plan,
        loss=loss,
        has_bias=True,
    )

    result = engine.forward(operands, plan)
    assert calls == _expected(forward_stages(region))
    calls.clear()
    if not in_forward:
        engine.backward(operands, plan, result.statistics, result.logits, IncomingGradients(torch.ones(())))
    assert calls == _expected(backward_stages(region))


def _problem(**changes):
    defaults = {"tokens": 8192, "hidden": 4096, "vocab": 128256, "dtype": torch.bfloat16, "device_type": "cuda"}
    grads = {"input_grad": True, "weight_grad": True, "bias_grad": False}
    return Problem(**{**defaults, **grads, **changes})


def _region(*, loss=None, options=None, has_class_weight=False, **changes):
    loss, options = loss or Loss(), options or Options()
    about_loss = {"row_gradients": loss.has_row_gradients, "every_row": loss.needs_every_row}
    problem = _problem(**about_loss, is_plain_loss=loss.is_plain, **changes)
    problem = replace(problem, float32_logits=options.has_float32_logits(problem.dtype))
    plan = make_plan(problem, options)
    return PlannedRegion(problem=problem, plan=plan, loss=loss, has_class_weight=has_class_weight)


def _text(stages):
    return [str(step) for stage in stages for step in stage.steps]


@pytest.mark.skipif(not find_spec("nvfuser_direct"), reason="needs nvFuser's Python package")
def test_products_are_cublas_and_one_pass_is_triton():
    stages = forward_stages(_region())
    (chunks,) = (stage for stage in stages if stage.repeats > 1)
    assert chunks.title == "for each chunk of 2048 tokens, 4 in all"
    runners = {step.call: step.runner for step in chunks.steps if step.call}
    assert runners == {
        "products.logits_": "cuBLAS",
        "kernels.statistics_and_gradient": "Triton",
        "products.weight_gradient_": "cuBLAS",
        "products.input_gradient_": "cuBLAS",
    }
    assert str(chunks.steps[0]) == "logits bf16[2048, 128256] = x @ W.t()"


@pytest.mark.skipif(not find_spec("triton"), reason="needs Triton")
@pytest.mark.parametrize(
    ("changes", "runner"),
    [
        ({}, "Triton"),
        ({"vocab": 128257, "dtype": torch.float16}, "Triton"),
        ({"dtype": torch.float32}, "cuBLAS"),
        ({"hidden": 4100}, "cuBLAS"),
        ({"loss": Loss(outputs=("argmax",))}, "cuBLAS"),
        ({"device_type": "cpu"}, "PyTorch"),
    ],
    ids=str,
)
def test_products_that_end_on_the_device(changes, runner):
    """All three, by Triton where that can be; not where every row is needed."""
    stages = forward_stages(_region(options=Options(ignored_rows="skip_on_device"), **changes))
    steps = [step for stage in stages for step in stage.steps]
    runners = {step.runs_in for step in steps if step.call.startswith("products.") and "hot" not in step.result}
    assert runners == {runner}
    assert ("x, y = the rows whose target is not ignore_index, then zeros" in _text(stages)) == ("loss" not in changes)


@pytest.mark.skipif(not find_spec("nvfuser_direct"), reason="needs nvFuser's Python package")
@pytest.mark.parametrize(
    ("changes", "gradient"),
    [
        ({"bias_grad": True}, "Triton"),
        ({"bias_grad": True, "loss": Loss(z_loss=0.1)}, "Triton"),
        ({"bias_grad": True, "options": Options(logits_dtype="float32")}, "nvFuser"),
        ({"loss": Loss(z_loss=0.1)}, "nvFuser"),
        ({"loss": Loss(z_loss=0.1), "vocab": 1000}, "Triton"),
        ({"loss": Loss(z_loss=0.1, label_smoothing=0.1), "vocab": 1000}, "nvFuser"),
        ({"options": Options(logits_dtype="float32")}, "nvFuser"),
    ],
    ids=str,
)
def test_two_passes_where_one_is_not_enough(changes, gradient):
    stages = forward_stages(_region(**changes))
    runners = {step.call: step.runs_in for stage in stages for step in stage.steps if "kernels." in step.call}
    runners.pop("kernels.moments", None)
    assert runners == {
        "kernels.statistics": "Triton",
        "kernels.gradient": gradient,
        "kernels.target_gradient": "nvFuser",
    }


@pytest.mark.skipif(not find_spec("nvfuser_direct"), reason="needs nvFuser's Python package")
@pytest.mark.parametrize(
    ("tokens", "vocab", "runner"),
    [
        (65536, 128256, "nvFuser and Triton: gradient"),  # slabs of 1024, the last of 256
        (65536, 152064, "nvFuser and Triton: gradient"),  # of 4800, the last of 3264
        (32768, 65536, "Triton"),  # of 4096
        (8192, 128256, "nvFuser: gradient"),
    ],
)
def test_the_last_slab_may_be_narrower(tokens, vocab, runner):
    options = Options(strategy="recompute_logits", chunk_rows=512)
    region = _region(tokens=tokens, vocab=vocab, loss=Loss(reduction="none"), options=options)
    steps = [step for stage in backward_stages(region) for step in stage.steps]
    width = region.plan.slab_columns
    assert [step.runner for step in steps if step.call == "kernels.gradient"] == [runner], (width, vocab % width)


@pytest.mark.skipif(not find_spec("nvfuser_direct"), reason="needs nvFuser's Python package")
@pytest.mark.parametrize("bias_grad", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("vocab", [1000, 128256, 50257])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_fusions_are_those_that_the_kernels_execute(smoothing, vocab, bias_grad, monkeypatch):
    from thunder_flce.execution.row_kernels import nvfuser_rows as nvfuser
    from thunder_flce.execution.row_kernels import triton_rows

    executed = []

    def execute(fusion, inputs, fast_math=False):
        executed.append(fusion)
        return [torch.zeros(len(inputs[0]) if fusion in ("moments", "target_gradient") else inputs[0].shape[1])]

    for name in ("moments", "target_gradient"):
        monkeypatch.setattr(nvfuser, f"_{name}", lambda *sizes, name=name, **settings: name)
    with_sums = {True: "gradient_with_column_sums", False: "gradient"}
    monkeypatch.setattr(nvfuser, "_gradient", lambda *sizes, column_sums: with_sums[column_sums])
    monkeypatch.setattr(nvfuser, "_execute", execute)
    monkeypatch.setattr(triton_rows, "_launch", lambda *arguments, **constants: None)

    # A z-loss takes two passes.
    region = _region(tokens=4, vocab=vocab, bias_grad=bias_grad, loss=Loss(label_smoothing=smoothing, z_loss=0.1))
    layout = layout_for(vocab, dtype=torch.bfloat16, device_type="cuda")
    buffer = LogitsBuffer.allocate(4, layout, dtype=torch.bfloat16, device=torch.device("cpu"))
    row, kernels = torch.zeros(4), nvfuser.NvFuserRowKernels()
    coefficients = RowCoefficients(row, row, row if smoothing else None)
    statistics = RowStatistics(row, row)
    if smoothing:
        kernels.moments(buffer, statistics, None, expected=False, weighted_sum=True)
    kernels.gradient(buffer, statistics, coefficients, None, dtype=torch.bfloat16, column_sums=bias_grad)
    kernels.target_gradient(row, statistics, coefficients, None, dtype=torch.bfloat16)
    stages = forward_stages(region)
    assert executed == [name for stage in stages for step in stage.steps if step.call for name in step.fusions]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_tokens(strategy):
    region = _region(tokens=0, options=Options(strategy=strategy))
    steps = [step for stage in (*forward_stages(region), *backward_stages(region)) for step in stage.steps]
    assert steps and all(step.bytes >= 0 and step.operations == 0 for step in steps)


@pytest.mark.parametrize("changes", [{"device_type": "cpu"}, {"dtype": torch.float64}], ids=str)
def test_without_nvfuser_row_passes_are_pytorch(changes):
    stages = forward_stages(_region(**changes))
    assert not any(step.fusions or step.runs_in == "nvFuser" for stage in stages for step in stage.steps)


def test_an_odd_vocabulary_is_a_product_of_its_own():
    assert "logits bf16[2048, 128257] = x @ W.t(), the last 1 columns apart" in _text(
        forward_stages(_region(vocab=128257))
    )


def test_a_loss_with_everything_shows_its_terms():
    loss = Loss(label_smoothing=0.1, softcap=30.0, logit_scale=0.5, z_loss=0.001, vocab_size=128000)
    text = "\n".join(_text(forward_stages(_region(loss=loss, vocab=128000, has_class_weight=True))))
    assert "W = W[:128000]" in text
    assert "max(u), log(sum(exp(u - row_max))), u = 30 * tanh(0.5 * z / 30)" in text
    assert "weighted_sum f32[2048] = sum(w * (u - row_max))" in text
    assert "(exp(u - row_max - row_log_sum) * A - C * w) * 0.5 * (1 - (u / 30)**2), in place" in text
    assert "- C * w[y] - B) * 0.5 * (1 - (u[y] / 30)**2)" in text
    assert "cross_entropy f32[8192] = 0.9 * w[y] * (row_log_sum - (u[y] - row_max)) + " in text
    assert "loss = sum(cross_entropy) / sum(w[y]) + sum(z_term) / valid_count" in text


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("has_class_weight", [False, True])
def test_the_printed_loss_is_the_loss(has_class_weight, smoothing):
    """Evaluated, the steps give what torch.nn.functional.cross_entropy gives."""
    z, y, w = torch.randn(7, V, dtype=torch.float64), torch.randint(0, V, (7,)), torch.rand(V, dtype=torch.float64)
    if not has_class_weight:
        w = torch.ones_like(w)
    expected = F.cross_entropy(z, y, w, label_smoothing=smoothing)
    region = _region(loss=Loss(label_smoothing=smoothing), vocab=V, has_class_weight=has_class_weight)
    steps = {step.result.split(" ")[0]: step for stage in forward_stages(region) for step in stage.steps}
    row_max = z.amax(1)
    row_log_sum = (z - row_max[:, None]).exp().sum(1).log()
    names = {
        "sum": torch.sum,
        "row_max": row_max,
        "row_log_sum": row_log_sum,
        "target_logit": z[torch.arange(7), y],
        "weighted_sum": (w * (z - row_max[:, None])).sum(1),
        "w": w,
        "y": y,
        "valid_count": 7,
    }
    names["cross_entropy"] = eval(steps["cross_entropy"].expression.replace("logits[y]", "target_logit"), names)
    torch.testing.assert_close(eval(steps["loss"].expression, names), expected)


def test_further_outputs_are_steps():
    loss = Loss(outputs=("entropy", "log_prob", "argmax", "accuracy"))
    region = _region(loss=loss)
    text = "\n".join(_text(forward_stages(region)))
    assert all(f"\n{name} = " in text for name in loss.outputs)
    assert "(A - g_e * (logits - row_max))" in "\n".join(_text(backward_stages(region)))


def test_float32_logits_take_memory_of_their_own():
    text = "\n".join(_text(forward_stages(_region(options=Options(logits_dtype="float32")))))
    assert "logits f32[2048, 128256]" in text and "dlogits bf16[2048, 128256] = " in text and "in new memory" in text


def test_the_names_of_an_expression_give_the_gradient_of_the_engine():
    """What is printed as the gradient is the gradient: evaluated, it is what autograd computes."""
    options = Options(strategy="save_logits")
    z, y = torch.randn(7, V, dtype=torch.float64, requires_grad=True), torch.randint(0, V, (7,))
    F.cross_entropy(z, y).backward()
    stages = (*forward_stages(_region()), *backward_stages(_region(options=options)))
    steps = {step.call: step for stage in stages for step in stage.steps if step.call}
    (one_pass,) = (step for stage in stages for step in stage.steps if "[v == y]" in step.expression)
    logits, s, rows = z.detach(), 1 / 7, torch.arange(7)
    row_max = logits.amax(1, keepdim=True)
    row_log_sum = (logits - row_max).exp().sum(1, keepdim=True).log()
    names = {"exp": torch.exp, "s": s, "logits": logits, "row_max": row_max, "row_log_sum": row_log_sum}
    gradient = eval(steps["kernels.gradient"].expression.partition(", in place")[0], names)
    at_target = steps["kernels.target_gradient"].expression.replace("logits[y]", "target_logit")
    vectors = {"row_max": row_max[:, 0], "row_log_sum": row_log_sum[:, 0], "target_logit": logits[rows, y]}
    gradient[rows, y] = eval(at_target, {**names, **vectors})
    torch.testing.assert_close(gradient, z.grad)
    expression = one_pass.expression.partition(", in place")[0].replace("[v == y]", "is_target")
    torch.testing.assert_close(eval(expression, {**names, "is_target": F.one_hot(y, V)}), z.grad)


def loss(hidden, weight, labels):
    return F.cross_entropy(F.linear(hidden, weight), labels)


def test_a_trace_prints_one_chunk_beneath_the_region():
    jitted = thunder_flce.jit(loss, options=Options(chunk_rows=10))
    jitted(torch.randn(T, H, requires_grad=True), torch.randn(V, H, requires_grad=True), torch.randint(0, V, (T,)))
    lines = thunder.last_traces(jitted)[-1].python().splitlines()
    at = next(i for i, line in enumerate(lines) if "linear_cross_entropy_fwd(" in line)
    comments = list(itertools.takewhile(lambda line: line.startswith("    #"), lines[at + 1 :]))
    assert comments[0] == "    # x = hidden, W = weight, y = labels"
    for name in ("loss = ", "row_max = ", "row_log_sum = ", "valid_count = ", "dX = ", "dW = "):
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
