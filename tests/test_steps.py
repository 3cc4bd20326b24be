"""Steps say who runs them, and a trace prints them beneath the region's line."""

import itertools
import re
from dataclasses import replace
from types import MappingProxyType

import pytest
import thunder
import torch
import torch.nn.functional as F

import thunder_flce
from program_interpreter import evaluate
from test_plan import S1, problem
from thunder_flce import Options
from thunder_flce.device import triton_available
from thunder_flce.execution import row_loss
from thunder_flce.execution.plan import GradientsInForward, RecomputeLogits, SaveLogits, SaveSomeLogits
from thunder_flce.execution.record import Stage, Step, Tape, Value
from thunder_flce.execution.row_kernels.dispatch import BACKENDS
from thunder_flce.graph.trace_printer import stage_lines
from thunder_flce.operation import loss as loss_module
from thunder_flce.operation.loss import OUTPUTS, Loss, Output
from thunder_flce.operation.moments import MOMENTS, Moment
from thunder_flce.operation.problem import Problem, TermShape
from thunder_flce.options import STRATEGIES
from thunder_flce.planning.choose import make_plan
from thunder_flce.planning.program import program

T, H, V = 40, 8, 50
needs_triton = pytest.mark.skipif(not triton_available(), reason="needs Triton")


def test_where_dynamo_has_switched_subclasses_off():
    """As torch 2.15 does while a graph runs that was traced through the stand-ins of a token loss."""

    def step(hidden, weight, labels):
        return F.cross_entropy(F.linear(hidden, weight), labels)

    tensors = torch.randn(7, H, requires_grad=True), torch.randn(V, H, requires_grad=True), torch.arange(7)
    with torch._C.DisableTorchFunctionSubclass():
        for strategy in STRATEGIES:
            jitted = thunder_flce.jit(step, options=Options(strategy=strategy, chunk_rows=5))
            jitted(*tensors).backward()
            symbol = "scale_gradients" if strategy == "gradients_in_forward" else "linear_cross_entropy_bwd"
            assert symbol in str(thunder.last_backward_traces(jitted)[-1])
        program.cache_clear()
        assert steps_of(S1, Options()) and steps_of(S1, Options(strategy="recompute_logits"))


def steps_of(problem: Problem, options: Options) -> list[Step]:
    """All steps of both directions, as they are shown."""
    return [step for stage in program(problem, make_plan(problem, options)).stages for step in stage.steps]


def printed(problem: Problem, options: Options) -> str:
    """The forward and the backward."""
    return "\n".join(stage_lines(program(problem, make_plan(problem, options)).stages))


# Who runs a step.


@needs_triton
def test_matmuls_are_cublas_and_one_pass_is_triton():
    (chunks,) = (stage for stage in program(S1, make_plan(S1, Options())).forward if stage.over)
    assert chunks.title == "for each chunk of 2048 tokens, 4 in all"
    assert [(step.result, step.runs_in) for step in chunks.steps] == [
        ("logits", "cuBLAS"),
        ("row_max, row_log_sum, logits_y", "Triton"),
        ("dlogits", "Triton"),
        ("dW", "cuBLAS"),
        ("dW_frequent", "cuBLAS"),
        ("dX[chunk]", "cuBLAS"),
    ]
    assert str(chunks.steps[0]) == "logits bf16[2048, 128256] = x[chunk] @ W.t()"


@pytest.mark.parametrize("row_kernels", ["triton", "nvfuser", "torch"])
@pytest.mark.parametrize("loss", [Loss(), Loss(z_loss=0.1, label_smoothing=0.1), Loss(reduction="none")], ids=str)
def test_row_work_runs_in_the_library_asked_for(loss, row_kernels):
    region = problem(loss=loss)
    plan = replace(make_plan(region, Options()), row_kernels=row_kernels)
    work = [step for stage in program(region, plan).stages for step in stage.steps if step.is_row_work]
    assert work and {step.runs_in for step in work} == {BACKENDS[row_kernels].library}
    assert all(bool(step.fusions) == (row_kernels == "nvfuser") for step in work)
    if loss == Loss():
        gradient = next(step for step in program(region, plan).forward[1].steps if step.result == "dlogits")
        # Triton's kernel makes statistics and gradient together; elsewhere one call is several kernels.
        assert gradient.note == ("in place, same kernel" if row_kernels == "triton" else "in place")
    lines = stage_lines(program(region, plan).stages)
    assert any(re.search("  nvFuser: statistics", line) for line in lines) == (row_kernels == "nvfuser")


@pytest.mark.parametrize("changes", [{"device_type": "cpu"}, {"dtype": torch.float64}], ids=str)
def test_elsewhere_row_work_is_pytorch(changes):
    for loss in (Loss(), Loss(z_loss=0.1)):
        work = [step for step in steps_of(problem(**changes, loss=loss), Options()) if step.is_row_work]
        assert work and {step.runs_in for step in work} == {"PyTorch"} and not any(step.fusions for step in work)


@needs_triton
def test_a_bias_or_more_than_statistics_takes_two_passes():
    one_pass = {"row_max, row_log_sum, logits_y"}
    for changes in ({"has_bias": True, "bias_grad": True}, {"loss": Loss(z_loss=0.1)}, {"float32_logits": True}):
        options = Options(logits_dtype="float32" if "float32_logits" in changes else "input")
        work = {step.result for step in steps_of(problem(**changes), options) if step.is_row_work}
        assert work == {"row_max, row_log_sum", "dlogits"}, changes
    assert {step.result for step in steps_of(S1, Options()) if step.is_row_work} == one_pass


@pytest.mark.parametrize(("loss", "function"), [(Loss(), "argmax_v"), (Loss(logit_scale=-2.0), "argmin_v")], ids=str)
def test_argmax_is_a_pass_of_its_own(loss, function):
    (step,) = (
        step for step in steps_of(problem(loss=replace(loss, outputs=("argmax",))), Options()) if "arg" in step.result
    )
    assert step.runs_in == "PyTorch" and step.expression.startswith(f"{function}(")
    assert step.bytes == 2048 * 128256 * 2


# How they are written.


def test_an_odd_vocabulary_is_a_matmul_of_its_own():
    assert "logits bf16[2048, 128257] = x[chunk] @ W.t()  (the last 1 columns apart)" in printed(
        problem(vocab=128257), Options()
    )


def test_numbers_are_printed_exactly():
    """0.1 / V has no short form, and 0.002 = 2 · 0.001 has one."""
    loss = Loss(label_smoothing=0.1, z_loss=0.001, softcap=30.0, vocab_size=128000)
    text = printed(problem(loss=loss, vocab=128000, weight_rows=128256), Options())
    assert f"C f32[8192] = s * {0.1 / 128000!r}" in text
    assert "s_z f32[8192] = 0.002 * 1 / valid_count" in text
    assert f"u f32[2048, 128000] = tanh(z * {1 / 30!r}) * 30  (wherever they are read)" in text
    assert "@ W[:128000].t()" in text and "dW[128000:] bf16[256, 4096] = 0" in text


def test_float32_logits_take_memory_of_their_own():
    text = printed(problem(float32_logits=True), Options(logits_dtype="float32"))
    assert "logits f32[2048, 128256]" in text and "dlogits bf16[2048, 128256] = " in text and "(in new memory)" in text


def test_a_bias_gradient_is_a_sum_over_chunks():
    text = printed(problem(has_bias=True, bias_grad=True), Options())
    assert "logits bf16[2048, 128256] = x[chunk] @ W.t() + b" in text
    assert "db f32[128256] += sum_t(dlogits)" in text and "(in place, with its sums over the rows)" in text


def test_the_host_waits_in_the_forward_only():
    """Nothing is computed while the backward would wait, and the host has known the number since the forward."""
    found = program(S1, RecomputeLogits(chunk_rows=2048, block_columns=16384))
    notes = [stages[0].steps[1].note for stages in (found.forward, found.backward)]
    assert notes == ["the host waits for their number while the first logits are computed", ""]


@pytest.mark.parametrize(
    ("stage", "title"),
    [
        (Stage(steps=()), ""),
        (Stage(steps=(), over="chunk", sizes=(7,)), "for the only chunk, of 7 tokens"),
        (Stage(steps=(), over="chunk", sizes=(7,), is_whole_loop=False), "for the first chunk, of 7 tokens"),
        (Stage(steps=(), over="chunk", sizes=(7, 7)), "for each chunk of 7 tokens, 2 in all"),
        (Stage(steps=(), over="chunk", sizes=(7, 3)), "for each chunk of 7 and 3 tokens"),
        (
            Stage(steps=(), over="block", sizes=(7, 3, 3, 7)),
            "for each block of 7, 3 (2 times) and 7 columns of the vocabulary",
        ),
        (
            Stage(steps=(), over="block", sizes=(7, 7), start=9, is_whole_loop=False),
            "for each block of 7 columns of the vocabulary, 2 in all, from column 9 on",
        ),
        (Stage(steps=(), over="chunk", sizes=(7,), start=9), "for a chunk of 7 tokens, from token 9 on"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_titles(stage, title):
    assert stage.title == title


def test_a_slice_is_named_by_its_loop_not_by_its_numbers():
    """Here a chunk has as many tokens as there are columns."""
    plan = GradientsInForward(chunk_rows=20)
    region = problem(tokens=50, vocab=20, weight_rows=24, hidden=8, loss=Loss(vocab_size=20))
    lines = stage_lines(program(region, plan).forward)
    assert [line.split(" ")[2] for line in lines if " += " in line] == ["dW[:20]"]
    # In a loop, a part that is neither the chunk nor the block is written out.
    tape = Tape(torch.device("cpu"))
    matrix = Value(tape, "m", shape=(4, 4))
    for chunk in tape.loop([slice(0, 2), slice(2, 4)], "chunk"):
        assert str(matrix[chunk]) == "m[chunk]" and str(matrix[:, chunk]) == "m[:, chunk]"
        same_numbers = slice(chunk.start, chunk.stop)
        assert str(matrix[same_numbers]) == ("m[2:]" if chunk.start else "m[:2]")
        assert str(matrix[slice(0, 4)]) == "m"


def test_values_write_only_the_brackets_that_are_needed():
    tape = Tape(torch.device("cpu"))
    a, b, c = (Value(tape, name, shape=(2,)) for name in "abc")
    expressions = {
        "a + b * c": a + b * c,
        "(a + b) * c": (a + b) * c,
        "a - (b - c)": a - (b - c),
        "a - b - c": a - b - c,
        "a / (b / c)": a / (b / c),
        "a / (b * c)": a / (b * c),
        "(a - b) ** 2": (a - b).square(),
        "1 - (a / 3) ** 2": 1 - (a / 3.0) ** 2,
        "exp(a - b)[c]": torch.exp(a - b)[c],
        "(a + b)[c]": (a + b)[c],
        "0.1 * a": 0.1 * a,
        "a": 1 * a,
        "a == b": a == b,
        "sum(a) / b": a.sum() / b,
        "minimum(a - b, 0)": (a - b).clamp(max=0),
        "where(a == 0, inf, a)": torch.where(a == 0, float("inf"), a),
    }
    assert {str(value): str(value) for value in expressions.values()} == {words: words for words in expressions}
    # What is written means the same.
    numbers = {"a": torch.tensor([2.0, 5.0]), "b": torch.tensor([3.0, 7.0]), "c": torch.tensor([4.0, 0.5])}
    for make in (
        lambda a, b, c: a - (b - c) * (a + b) / (c * a),
        lambda a, b, c: (a / b / (c / a)) ** 2 - (a - b) * -1.5,
        lambda a, b, c: 1 - (a + (b - (c - a))) / (a - (1 - b)),
    ):
        torch.testing.assert_close(eval(str(make(a, b, c)), numbers), make(*(numbers[name] for name in "abc")))


# Outputs.


def test_outputs_are_described_by_their_formulas():
    names = ("mean_logit", "log_sum_sq_probs", "valid_argmax", "accuracy")
    text = printed(problem(loss=Loss(outputs=names)), Options())
    p = "exp(logits - row_max - row_log_sum)"
    assert f"shifted_sum, sum_sq f32[2048] = sum_v(logits - row_max), sum_v({p} * {p})" in text
    assert "mean_logit f32[8192] = scatter(row_max + shifted_sum / 128256)" in text
    assert "log_sum_sq_probs f32[8192] = scatter(log(sum_sq))" in text
    assert "valid_argmax i64[8192] = scatter(argmax, -1)" in text
    assert "accuracy f32[] = sum(argmax == y) / valid_count" in text


def test_an_added_output_is_described_without_further_code(monkeypatch):
    """A line in OUTPUTS and one in MOMENTS: then it is printed, and its words are its value."""

    def sum_of_cubes(shifted, probability, weight):
        return probability * probability * probability

    added = Output(lambda row, columns, log: log(row.moments["sum_cubed"]) / 2, moments=("sum_cubed",))
    outputs = MappingProxyType({**OUTPUTS, "renyi_entropy": added})
    monkeypatch.setattr(loss_module, "OUTPUTS", outputs)
    monkeypatch.setattr(row_loss, "OUTPUTS", outputs)
    monkeypatch.setitem(MOMENTS, "sum_cubed", Moment(sum_of_cubes))

    region = Problem(
        tokens=T, terms=(TermShape(hidden=H, input_grad=True, weight_grad=True),), vocab=V, dtype=torch.bfloat16,
        device_type="cuda", loss=Loss(outputs=("renyi_entropy",)),
    )  # fmt: skip
    lines = stage_lines(program(region, GradientsInForward(chunk_rows=15)).forward)
    assert any(line.startswith("renyi_entropy f32[40] = scatter(log(sum_cubed) / 2)") for line in lines)
    names = {
        "x": torch.randn(T, H, dtype=torch.float64),
        "W": torch.randn(V, H, dtype=torch.float64),
        "y": torch.randint(0, V, (T, 1)),
    }
    probabilities = F.linear(names["x"], names["W"]).softmax(1)
    evaluate(lines, names, V)
    torch.testing.assert_close(names["renyi_entropy"][:, 0], probabilities.pow(3).sum(1).log() / 2)


# In traces.


def _loss(hidden, weight, labels):
    return F.cross_entropy(F.linear(hidden, weight), labels)


def _capped_loss(hidden, weight, labels):
    return F.cross_entropy(5 * torch.tanh(F.linear(hidden, weight) / 5), labels)


def _comments(trace: str, symbol: str) -> list[str]:
    """The comments beneath a region's line, without their mark."""
    lines = trace.splitlines()
    at = next(i for i, line in enumerate(lines) if f"{symbol}(" in line)
    comments = itertools.takewhile(lambda line: line.lstrip().startswith("#"), lines[at + 1 :])
    return [line.lstrip().removeprefix("# ") for line in comments]


def _given(comment: str) -> list[str]:
    """The names in "x = hidden, W = weight" or in "loss = t2: f32[], row_max = t3: f32[40]"."""
    return [part.split(" = ")[0] for part in re.split(r", (?=\w+ = )", comment)]


@pytest.mark.parametrize("loss", [_loss, _capped_loss], ids=["", "softcap"])
@pytest.mark.parametrize(
    "options",
    [Options(chunk_rows=15), Options(strategy="recompute_logits", chunk_rows=15), Options(strategy="save_logits")],
    ids=lambda options: options.strategy or "default",
)
def test_traces_print_all_there_is_to_know(options, loss):
    """The text beneath a region gives the loss and, from what it says it takes, the gradients."""
    jitted = thunder_flce.jit(loss, options=options)
    x, weight = torch.randn(T, H, requires_grad=True), torch.randn(V, H, requires_grad=True)
    target = torch.randint(0, V, (T,))
    target[::5] = -100
    jitted(x, weight, target)
    right = loss(*(tensor.detach().double().requires_grad_() for tensor in (x, weight)), target)
    operands = {"x": x.detach().double(), "W": weight.detach().double(), "y": target[:, None]}

    takes, gives, *lines = _comments(thunder.last_traces(jitted)[-1].python(), "linear_cross_entropy_fwd")
    assert takes == "x = hidden, W = weight, y = labels"
    saved = {None: ["dX", "dW"], "save_logits": ["logits" if loss is _loss else "z"], "recompute_logits": []}
    assert _given(gives) == ["loss", "row_max", "row_log_sum", "valid_count", *saved[options.strategy]]
    assert "  for each chunk" not in lines and lines[2:] and all("nvFuser" not in line for line in lines)
    names = dict(operands)
    evaluate(lines, names, V)
    torch.testing.assert_close(names["loss"], right)
    if options.strategy is None:
        return
    kept = {name: names[name] for name in _given(gives)}
    takes, gives, *lines = _comments(thunder.last_backward_traces(jitted)[-1].python(), "linear_cross_entropy_bwd")
    assert _given(gives) == ["dX", "dW"]
    known = {**kept, **operands, "grad": torch.tensor(1.0)}
    names = {name: known[name] for name in _given(takes)}
    evaluate(lines, names, V)
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, weight)]
    for name, gradient in zip(("dX", "dW"), torch.autograd.grad(loss(*exact, target), exact), strict=True):
        torch.testing.assert_close(names[name], gradient)


def test_what_only_the_backward_computes_again_is_for_some_tokens():
    """The first of them have their logits saved."""
    plan = SaveSomeLogits(saved_rows=15, chunk_rows=15, block_columns=16)
    region = problem(tokens=T, vocab=48, hidden=H)
    backward = stage_lines(program(region, plan).backward)
    assert any("for each block of 16" in line for line in backward)
    assert any(f"logits bf16[{T - 15}, 16] = x[15:] @ W[block].t()" in line for line in backward)
    assert any("dW[block] bf16[16, 8] += saved_dlogits[:, block].t() @ x[:15]" in line for line in backward)
    assert not any("saved_dlogits" in line for line in stage_lines(program(region, SaveLogits()).backward))
