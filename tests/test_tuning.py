"""Which of cuBLAS's algorithms is taken, and that the choice changes time only."""

import math
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache

import pytest
import torch

from reference import error
from thunder_flce import Options, linear_cross_entropy, operators
from thunder_flce.execution.matmul import cublaslt, matmul, tuning
from thunder_flce.execution.matmul.cublaslt import MatmulDescriptor, Signature
from thunder_flce.execution.matmul.layout import Matmul, StoredMatrix
from thunder_flce.execution.matmul.tuning import fastest
from thunder_flce.execution.plan import SaveSomeLogits
from thunder_flce.operation.loss import Loss
from thunder_flce.operation.problem import Problem, TermShape
from thunder_flce.planning.choose import make_plan


def on_gpu(test):
    for mark in (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")):
        test = mark(test)
    return test


def run(kind, out, a, b, bias=None, *, accumulate=False):
    """See `tuning.run`."""
    return tuning.run(Matmul(kind, out, a, b, bias, accumulate))


def measured():
    """What kinds of matmul were measured so far."""
    return [found.product for found in tuning.tunings()]


@pytest.fixture
def fresh(monkeypatch):
    """Nothing measured, and every matmul large enough to be."""
    monkeypatch.setattr(tuning, "TUNED_OPERATIONS", 0)
    monkeypatch.setattr(tuning, "_BURST_SECONDS", 1e-3)
    monkeypatch.setattr(tuning, "_tunings", {})
    monkeypatch.setattr(tuning, "_runs", Counter())
    tuning._descriptor.cache_clear()
    yield
    tuning._descriptor.cache_clear()


class Clock:
    """Runs that take given times, in ms: alone, and in a burst."""

    def __init__(self, once, in_a_burst):
        self.runs = [lambda: None for _ in once]
        self._once = dict(zip(self.runs, once, strict=True))
        self._in_a_burst = dict(zip(self.runs, in_a_burst, strict=True))
        self.bursts = []

    def seconds(self, run, times):
        if times == 1:
            return self._once[run] / 1e3
        self.bursts.append((self.runs.index(run), times))
        return self._in_a_burst[run] / 1e3


def test_bursts_decide_among_those_that_are_close():
    clock = Clock([2.05, 2.0, 2.02, 2.2], [2.5, 2.4, 2.3, 1.0])
    assert fastest(clock.runs, clock.seconds) == (2, pytest.approx(2.5 / 2.3), pytest.approx(2.3e-3))
    assert clock.bursts == [(index, clock.bursts[0][1] if index == 0 else 15) for index in (0, 1, 2, 2, 1, 0)]


def test_no_more_than_four_and_the_first_get_bursts():
    times = [3.0, 2.0, 2.01, 2.02, 2.03, 2.04, 2.05, 2.06]
    clock = Clock(times, times)
    assert fastest(clock.runs, clock.seconds) == (1, pytest.approx(1.5), pytest.approx(2e-3))
    assert {index for index, _ in clock.bursts} == {0, 1, 2, 3, 4}


@pytest.mark.parametrize(
    ("once", "in_a_burst", "seconds"), [([2.0, 1.99], [2.0, 2.0], 2e-3), ([2.0], [2.5], 2.5e-3)], ids=["draw", "alone"]
)
def test_the_first_wins(once, in_a_burst, seconds):
    clock = Clock(once, in_a_burst)
    assert fastest(clock.runs, clock.seconds) == (0, 1.0, seconds)


def test_how_matrices_lie_in_memory():
    matrix = torch.empty(6, 16, dtype=torch.bfloat16)
    assert StoredMatrix.of(matrix) == StoredMatrix(6, 16, 16)
    assert StoredMatrix.of(matrix.t()) == StoredMatrix(6, 16, 16, is_transposed=True)
    assert StoredMatrix.of(matrix[:, :5]) == StoredMatrix(6, 5, 16)
    assert StoredMatrix.of(torch.empty(6, 4)) == StoredMatrix(6, 4, 4)
    others = [matrix[:, ::2], matrix[:, 1:9], matrix[:1].expand(6, 16), torch.empty(6, 15, dtype=torch.bfloat16)]
    assert [StoredMatrix.of(other) for other in others] == [None] * 4


@pytest.mark.parametrize(
    ("tokens", "dtype", "device_type", "options", "tuned"),
    [
        (8192, torch.bfloat16, "cuda", {}, True),
        (8192, torch.float16, "cuda", {}, True),
        (8192, torch.bfloat16, "cuda", {"tune_products": False}, False),
        (8192, torch.float32, "cuda", {}, False),
        (8192, torch.bfloat16, "cpu", {}, False),
        (64, torch.bfloat16, "cuda", {}, False),
        # 2 · 512 · 4096 · 32000 operations are too few.
        (8192, torch.bfloat16, "cuda", {"chunk_rows": 512}, False),
        (8192, torch.bfloat16, "cuda", {"strategy": "save_logits"}, True),
        (8192, torch.bfloat16, "cuda", {"strategy": "recompute_logits"}, True),
        # Chunks are small, slabs are not.
        (65536, torch.bfloat16, "cuda", {"strategy": "recompute_logits", "chunk_rows": 512}, True),
    ],
)
def test_which_plans_tune_their_matmuls(tokens, dtype, device_type, options, tuned):
    head = TermShape(hidden=4096, input_grad=True, weight_grad=True)
    problem = Problem(tokens=tokens, terms=(head,), vocab=32000, dtype=dtype, device_type=device_type, loss=Loss())
    plan = make_plan(problem, Options(**options))
    assert plan.tune_products == tuned
    assert ("products tuned" in plan.describe()) == tuned


def test_a_cpu_leaves_matmuls_to_pytorch(fresh):
    out, a, b = (torch.empty(64, 64, dtype=torch.bfloat16) for _ in range(3))
    assert not run("logits", out, a, b) and tuning.tunings() == []


def test_an_option_must_be_a_bool():
    with pytest.raises(ValueError, match="tune_products must be True or False"):
        Options(tune_products=1)


class StandIn:
    """In place of cuBLASLt: two algorithms, of which the second is the faster one, and one that cannot run."""

    def __init__(self, signature):
        self.signature = signature

    def candidates(self):
        return ["slow", "impossible", "fast"]

    def run(self, matmul, algorithm, *, alpha=1.0):
        if algorithm == "impossible" or self.signature.b.row_stride == 72:
            return False
        self.ran.append((algorithm, matmul.accumulate))
        result = alpha * (matmul.a.double() @ matmul.b.double()) + (0 if matmul.bias is None else matmul.bias)
        matmul.out.copy_(result + matmul.out if matmul.accumulate else result)
        return True


@pytest.fixture
def stand_in(fresh, monkeypatch):
    """Tuning on a CPU; gives the list of what ran: (algorithm, accumulate)."""

    def signature(matmul):
        return Signature(0, matmul.a.dtype, matmul.out.dtype, *matmul.stored, matmul.bias is not None)

    def seconds(run, times):
        run()
        return 1.0 if run.args[1] == "slow" else 0.5

    monkeypatch.setattr(tuning, "_descriptor", lru_cache(StandIn))
    monkeypatch.setattr(tuning, "_seconds", seconds)
    monkeypatch.setattr(tuning, "is_hopper", lambda device: True)
    monkeypatch.setattr(Signature, "of", signature)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(StandIn, "ran", [], raising=False)
    return StandIn.ran


def test_the_fastest_runs_from_then_on(stand_in):
    """For other numbers of tokens, too, up to the next power of two."""
    weight = torch.randn(32, 64)
    for tokens, kinds in ((40, 1), (64, 1), (33, 1), (32, 2)):
        stand_in.clear()
        x, out = torch.randn(tokens, 64), torch.empty(tokens, 32)
        assert run("logits", out, x, weight.t())
        torch.testing.assert_close(out, x @ weight.t())
        assert len(measured()) == kinds
        assert stand_in[-1] == ("fast", False) and (len(stand_in) == 1) == (tokens in (64, 33))
    found = tuning.tunings()[0]
    assert (found.product, found.sizes, found.algorithm) == ("logits", (40, 32, 64), "fast")
    assert (found.gain, found.milliseconds) == (2.0, 500.0)


def test_sizes_of_dx_are_four_per_octave(stand_in):
    weight, seen = torch.randn(32, 64), []
    for tokens in (64, 57, 56, 49, 48, 40, 33, 32):
        assert run("dX", torch.empty(tokens, 64), torch.randn(tokens, 32), weight)
        seen.append(len(measured()))
    assert seen == [1, 1, 2, 2, 3, 4, 4, 5]


@pytest.mark.parametrize("kind", ["logits", "dX", "dW"])
def test_a_sum_is_measured_as_a_sum_and_not_disturbed(kind, stand_in):
    a, b, out = torch.randn(32, 64), torch.randn(64, 40), torch.randn(32, 40)
    exact = out.double()
    for runs in (None, [("fast", True)]):
        stand_in.clear()
        exact += a.double() @ b.double()
        assert run(kind, out, a, b, accumulate=True)
        torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)
        assert stand_in == runs or (runs is None and {adds for _, adds in stand_in} == {True} and len(stand_in) > 4)


def test_dw_is_measured_as_a_sum(stand_in):
    """Which it is for most chunks; what is in the memory of the first one's result is not added to it."""
    a, b, out = torch.randn(32, 64), torch.randn(64, 40), torch.randn(32, 40)
    assert run("dW", out, a, b)
    assert {accumulate for _, accumulate in stand_in[:-1]} == {True}
    torch.testing.assert_close(out, a @ b)
    # Tokens are what is summed over.
    for tokens in (48, 40):
        assert run("dW", out, torch.randn(32, tokens), torch.randn(tokens, 40), accumulate=True)
    assert stand_in[-2:] == [("fast", True)] * 2 and len(measured()) == 1


def test_nearest_number_of_tokens(stand_in, monkeypatch):
    weight = torch.randn(32, 64)

    def algorithm(tokens):
        stand_in.clear()
        return stand_in[-1][0] if run("dX", torch.zeros(tokens, 64), torch.zeros(tokens, 32), weight) else None

    assert algorithm(64) == "fast"
    monkeypatch.setattr(StandIn, "candidates", lambda self: ["slow"])
    assert algorithm(1024) == "slow"
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert [algorithm(tokens) for tokens in (1, 128, 400, 4096)] == ["fast", "fast", "slow", "slow"]
    assert len(measured()) == 2


def test_late_numbers_of_tokens_are_not_measured(stand_in, monkeypatch):
    """Unless they are far from all others, or come often."""
    monkeypatch.setattr(tuning, "_MEASURED_RUNS", 3)
    monkeypatch.setattr(tuning, "_OFTEN", 2)
    counts = []
    for tokens in (64, 40, 40, 90, 32, 200, 90, 50, 89, 90):
        assert run("dX", torch.zeros(tokens, 64), torch.zeros(tokens, 32), torch.randn(32, 64))
        counts.append(len(measured()))
    assert counts == [1, 2, 2, 2, 2, 3, 3, 3, 4, 4]


def test_matmuls_that_differ_are_measured_apart(stand_in):
    """Of the same sizes, but of other dtypes, with a bias, transposed, or logits that are added to others."""

    def kinds(kind="logits", *, dtype=torch.float32, out_dtype=torch.float32, transposed=True, **settings):
        a, b = torch.randn(32, 32, dtype=dtype), torch.randn(32, 32, dtype=dtype)
        assert run(kind, torch.zeros(32, 32, dtype=out_dtype), a, b.t() if transposed else b, **settings)
        return len(measured())

    assert kinds() == 1
    assert kinds(dtype=torch.bfloat16) == 2
    assert kinds(dtype=torch.bfloat16, out_dtype=torch.bfloat16) == 3
    assert kinds(bias=torch.randn(32)) == 4
    assert kinds(transposed=False) == 5
    assert kinds(accumulate=True) == 6
    assert kinds("dX") == kinds("dX", accumulate=True) == 7
    assert kinds() == kinds(accumulate=True) == 7


def test_pytorch_keeps_what_is_not_known_to_be_right(stand_in, monkeypatch):
    def runs():
        return run("logits", torch.empty(32, 32), torch.ones(32, 32), torch.ones(32, 32))

    for module, name, value in (
        (torch, "are_deterministic_algorithms_enabled", lambda: True),
        (tuning, "is_hopper", lambda device: False),
        (torch.cuda, "is_current_stream_capturing", lambda: True),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, value)
            assert not runs() and stand_in == []
    assert runs()


def test_a_library_that_fails_is_not_the_end(stand_in, monkeypatch):
    def fail(self):
        raise RuntimeError("cublasLtMatmulPreferenceCreate returned status 3")

    monkeypatch.setattr(StandIn, "candidates", fail)
    arguments = "logits", torch.empty(32, 32), torch.ones(32, 32), torch.ones(32, 32)
    with pytest.warns(UserWarning, match="PyTorch runs all matmuls: .* returned status 3"):
        assert not run(*arguments)
    assert not run(*arguments)


def test_a_matmul_that_the_algorithm_cannot_compute_is_left_to_pytorch(stand_in):
    x, weight, out = torch.randn(64, 64), torch.randn(64, 72), torch.empty(64, 64)
    assert run("dX", out, x, weight[:, :64].contiguous())
    before = out.clone()
    assert not run("dX", out, x, weight[:, :64])
    assert torch.equal(out, before)


def test_no_candidates(stand_in, monkeypatch):
    monkeypatch.setattr(StandIn, "candidates", lambda self: [])
    assert not run("logits", torch.empty(8, 8), torch.ones(8, 8), torch.ones(8, 8))
    assert stand_in == []


def test_small_matmuls_are_left_to_pytorch(stand_in, monkeypatch):
    monkeypatch.setattr(tuning, "TUNED_OPERATIONS", 2 * 8**3)
    assert not run("logits", torch.empty(7, 8), torch.ones(7, 8), torch.ones(8, 8))
    assert run("logits", torch.empty(8, 8), torch.ones(8, 8), torch.ones(8, 8))


@pytest.mark.parametrize("kind", ["logits", "dX", "dW"])
def test_each_matmul_can_be_tuned(kind, stand_in):
    """And gives what it gives untuned; with a bias, added before rounding, or added to what is there."""
    x, weight, bias, dlogits = torch.randn(24, 16), torch.randn(32, 16), torch.randn(32), torch.randn(24, 32)

    def compute(tune):
        out = torch.zeros({"logits": (24, 32), "dX": (24, 16), "dW": (32, 16)}[kind])
        if kind == "logits":
            matmul.logits_(out, x, weight, bias=bias, tune=tune)
            matmul.logits_(out, x[:, :4].contiguous(), weight[:, :4].contiguous(), accumulate=True, tune=tune)
        elif kind == "dX":
            matmul.input_gradient_(out, dlogits, weight, tune=tune)
        else:
            matmul.weight_gradient_(out, dlogits, x, accumulate=False, tune=tune)
            matmul.weight_gradient_(out, dlogits, x, accumulate=True, tune=tune)
        return out

    untuned = compute(tune=False)
    assert stand_in == []
    torch.testing.assert_close(compute(tune=True), untuned)
    assert set(measured()) == {kind}


@pytest.mark.parametrize("plan", ["gradients_in_forward", "save_logits", "recompute_logits", "some rows saved"])
def test_a_region_tunes_what_its_plan_says(plan, stand_in, monkeypatch):
    """All its products, and nothing where it does not say so."""
    strategy = {"some rows saved": "recompute_logits"}.get(plan, plan)
    x, weight = (torch.randn(rows, 16).requires_grad_() for rows in (50, 40))
    target = torch.randint(0, 40, (50,))

    def plan_of(problem, options, device):
        made = replace(make_plan(problem, options), tune_products=options.tune_products)
        if strategy == "recompute_logits":
            made = replace(made, block_columns=20)
        return SaveSomeLogits(saved_rows=30, **vars(made)) if plan == "some rows saved" else made

    monkeypatch.setattr(operators, "cached_plan", plan_of)

    def gradients(tune):
        options = Options(strategy=strategy, chunk_rows=20, tune_products=tune)
        loss = linear_cross_entropy(x, weight, target, options=options)
        return torch.autograd.grad(loss, [x, weight])

    def no_matmul(*arguments, **settings):
        raise AssertionError("PyTorch's matmul")

    untuned = gradients(tune=False)
    assert stand_in == []
    monkeypatch.setattr(torch, "mm", no_matmul)
    monkeypatch.setattr(torch, "addmm", no_matmul)
    torch.testing.assert_close(gradients(tune=True), untuned)
    assert set(measured()) == {"logits", "dX", "dW"}


def _matrix(rows, columns, dtype, *, stride=None, transposed=False):
    if transposed:
        return _matrix(columns, rows, dtype, stride=stride).t()
    return torch.randn(rows, stride or columns, device="cuda").to(dtype)[:, :columns]


# kind, M, N, K, dtype of out, strides of rows as stored
MATMULS = [
    ("logits", 512, 4096, 256, None, {}),
    ("logits", 300, 4104, 200, None, {"out": 4160}),
    ("logits", 300, 4104, 200, torch.float32, {"out": 4160, "a": 264}),
    ("logits", 300, 4104, 16, None, {}),
    ("dX", 300, 200, 4104, None, {"a": 4160}),
    ("dX", 300, 200, 4104, torch.float32, {"a": 4160}),
    ("dW", 4104, 200, 300, None, {"a": 4160}),
    ("dW", 4104, 200, 300, torch.float32, {"a": 4160, "b": 208}),
]


@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("kind", "m", "n", "k", "out_dtype", "strides"), MATMULS)
def test_each_algorithm_gives_the_same_bits(kind, m, n, k, out_dtype, strides, dtype, fresh):
    a = _matrix(m, k, dtype, stride=strides.get("a"), transposed=kind == "dW")
    b = _matrix(k, n, dtype, stride=strides.get("b"), transposed=kind == "logits")
    out = _matrix(m, n, out_dtype or dtype, stride=strides.get("out"))
    before, exact = out.clone(), a.double() @ b.double()
    # In float32 the error is that of a long sum in a tensor core, which PyTorch may split.
    slack = 1e-5 if out_dtype else 0
    # dX is added to in float32 only.
    for accumulate in (False,) if kind == "dX" and out_dtype is None else (False, True):
        call = Matmul(kind, out, a, b, accumulate=accumulate)
        descriptor = MatmulDescriptor(Signature.of(call))
        algorithms = descriptor.candidates()
        assert len(algorithms) > 1
        results = []
        for algorithm in algorithms:
            out.copy_(before)
            assert descriptor.run(call, algorithm)
            results.append(out.clone())
        assert all(torch.equal(result, results[0]) for result in results)
        if accumulate:
            of_pytorch, right = torch.addmm(before, a, b, out_dtype=out.dtype), exact + before.double()
        else:
            of_pytorch, right = torch.mm(a, b, out_dtype=out.dtype), exact
        assert error(results[0], right) <= 1.01 * error(of_pytorch, right) + slack


@on_gpu
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["logits", "dW"])
def test_measuring_does_not_disturb_a_sum(kind, out_dtype, fresh):
    """Whatever it holds: nothing is added but, in float32, to what is next to 0."""
    dtype = torch.bfloat16 if out_dtype is torch.float32 else out_dtype
    a, b = 10 * _matrix(512, 256, dtype, transposed=True), 10 * _matrix(256, 1024, dtype)
    before = _matrix(512, 1024, out_dtype)
    smallest = torch.finfo(out_dtype).smallest_normal
    for row, number in enumerate((0.0, -0.0, smallest, smallest / 2, 1e4, -1e4, math.inf, math.nan)):
        before[row] = number
    out = before.clone()
    call = Matmul(kind, out, a, b, accumulate=True)
    tuning._measure(call, Signature.of(call))
    # Not even zeros change, but for their sign.
    distance = 1e-37 if out_dtype is torch.float32 else 0
    torch.testing.assert_close(out, before, rtol=0, atol=distance, equal_nan=True)
    assert tuning.run(call)
    exact = before.double() + a.double() @ b.double()
    assert error(out[8:], exact[8:]) < torch.finfo(dtype).eps


@on_gpu
def test_a_bias_is_added_before_rounding(fresh):
    x, weight = _matrix(512, 256, torch.bfloat16), _matrix(4104, 256, torch.bfloat16)
    bias = 16 * torch.randn(4104, device="cuda").bfloat16()
    contiguous = torch.addmm(bias, x, weight.t())
    out = _matrix(512, 4104, torch.bfloat16, stride=4160)
    call = Matmul("logits", out, x, weight.t(), bias)
    assert tuning.run(call)
    exact = x.double() @ weight.double().t() + bias.double()
    assert error(out, exact) <= 1.01 * error(contiguous, exact)
    result = out.clone()
    descriptor = MatmulDescriptor(Signature.of(call))
    for algorithm in descriptor.candidates():
        out.zero_()
        assert not descriptor.run(call, algorithm) or torch.equal(out, result)
    # Another bias of the same size: its address is no part of what is kept.
    assert tuning.run(call._replace(bias=bias + 1)) and len(measured()) == 1
    assert error(out, exact + 1) < 3e-3


@on_gpu
def test_what_cannot_run_is_left_to_pytorch(fresh):
    x, weight, out = (torch.randn(64, 64, device="cuda").bfloat16() for _ in range(3))
    padded = torch.zeros(64, 66, device="cuda", dtype=torch.bfloat16)
    assert not run("dX", padded[:, 1:65], x, weight), "address"
    assert not run("dX", padded[:, :64], x, weight), "stride"
    assert not run("dX", out.t(), x, weight), "column-major"
    assert not run("dX", out.double(), x.double(), weight.double()), "dtype"
    assert not run("logits", out, x, weight, bias=torch.zeros(64, device="cuda")), "dtype of the bias"
    assert tuning.tunings() == []
    assert run("dW", out, x, weight)
    assert run("dW", out, x, weight, accumulate=True)
    (found,) = tuning.tunings()
    assert (found.product, found.sizes) == ("dW", (64, 64, 64))
    assert found.gain >= 1 and found.seconds > 0


@on_gpu
def test_nothing_is_measured_while_a_graph_is_captured(fresh):
    x, weight = (torch.randn(256, 256, device="cuda").bfloat16() for _ in range(2))
    out = torch.empty_like(x)

    def capture():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            has_run = run("logits", out, x, weight)
        return graph, has_run

    assert not capture()[1]
    assert run("logits", out, x, weight)
    graph, has_run = capture()
    assert has_run
    x.normal_()
    graph.replay()
    torch.testing.assert_close(out, x @ weight)


@on_gpu
@pytest.mark.parametrize("strategy", ["gradients_in_forward", "save_logits", "recompute_logits"])
@pytest.mark.parametrize("vocab", [4096, 4099])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_region(strategy, vocab, has_bias, fresh):
    """Tuned or not: as exact, and in the same memory."""
    operators.cached_plan.cache_clear()
    tokens, hidden = 1000, 512
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight = (torch.randn(vocab, hidden, device="cuda") / hidden**0.5).bfloat16().requires_grad_()
    bias = torch.randn(vocab, device="cuda").bfloat16().requires_grad_() if has_bias else None
    target = torch.randint(0, vocab, (tokens,), device="cuda")
    target[::7] = -100
    inputs = [x, weight, *([bias] if has_bias else [])]

    def step(tune):
        options = Options(strategy=strategy, chunk_rows=384, tune_products=tune)
        loss = linear_cross_entropy(x, weight, target, linear_bias=bias, options=options)
        return [loss.detach(), *torch.autograd.grad(loss, inputs)]

    def peak(tune):
        # What was asked for: what was given may be larger by a megabyte, depending on what was free before.
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        # What a step returns stays alive, lest it is freed during the next.
        results.append(step(tune))
        return torch.cuda.memory_stats()["requested_bytes.all.peak"] - before

    results = [step(tune=False), step(tune=True)]
    plain, tuned = results
    assert set(measured()) == {"logits", "dX", "dW"}
    doubles = [tensor.detach().double().requires_grad_() for tensor in inputs]
    logits = torch.nn.functional.linear(*([doubles[0], doubles[1]] + doubles[2:]))
    loss = torch.nn.functional.cross_entropy(logits, target)
    exact = [loss.detach(), *torch.autograd.grad(loss, doubles)]
    for one, other, reference in zip(tuned, plain, exact, strict=True):
        assert error(one, reference) <= 1.05 * error(other, reference) + 1e-6
    with_tuning, without = peak(tune=True), peak(tune=False)
    assert with_tuning <= 1.01 * without + 2**16


@on_gpu
def test_matmuls_are_those_of_pytorch(fresh):
    """The bits of PyTorch's own matmul, as long as it does not split the sum either."""
    x, weight = _matrix(512, 256, torch.bfloat16), _matrix(8192, 256, torch.bfloat16)
    out = x.new_empty(512, 8192)
    matmul.logits_(out, x, weight, tune=True)
    assert len(measured()) == 1
    assert torch.equal(out, x @ weight.t())


@on_gpu
def test_the_library_is_the_one_that_pytorch_has_loaded():
    with open("/proc/self/maps") as maps:
        assert len({line.split()[-1] for line in maps if "libcublasLt.so" in line}) == 1
    assert cublaslt.loaded()
