"""Which of cuBLAS's algorithms is taken, and that the choice changes time only."""

import math
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache

import pytest
import torch

from reference import error
from thunder_flce import Options, functional, linear_cross_entropy
from thunder_flce.execution.matmul import cublaslt, matmul, tuning
from thunder_flce.execution.matmul.cublaslt import Product, Signature, StoredMatrix
from thunder_flce.execution.matmul.tuning import fastest
from thunder_flce.planning.plan import Problem, make_plan

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def on_gpu(test):
    for mark in gpu:
        test = mark(test)
    return test


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


def test_the_first_wins_a_draw():
    clock = Clock([2.0, 1.99], [2.0, 2.0])
    assert fastest(clock.runs, clock.seconds) == (0, 1.0, 2e-3)


def test_only_one():
    clock = Clock([2.0], [2.5])
    assert fastest(clock.runs, clock.seconds) == (0, 1.0, 2.5e-3)


def test_how_matrices_lie_in_memory():
    matrix = torch.empty(6, 16, dtype=torch.bfloat16)
    assert StoredMatrix.of_transpose(matrix) == StoredMatrix(16, 6, 16, False)
    assert StoredMatrix.of_transpose(matrix.t()) == StoredMatrix(16, 6, 16, True)
    assert StoredMatrix.of_transpose(matrix[:, :5]) == StoredMatrix(5, 6, 16, False)
    assert StoredMatrix.of_transpose(matrix[:, ::2]) is None
    assert StoredMatrix.of_transpose(matrix.expand(6, 16)[:, :1].expand(6, 16)) is None
    assert StoredMatrix.of_transpose(torch.empty(6, 15, dtype=torch.bfloat16)) is None
    assert StoredMatrix.of_transpose(torch.empty(6, 4)) == StoredMatrix(4, 6, 4, False)


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
        # Those that end on the device are Triton's.
        (8192, torch.bfloat16, "cuda", {"ignored_rows": "skip_on_device"}, False),
        (8192, torch.bfloat16, "cuda", {"strategy": "save_logits"}, True),
        (8192, torch.bfloat16, "cuda", {"strategy": "recompute_logits"}, True),
        # Chunks are small, slabs are not.
        (65536, torch.bfloat16, "cuda", {"strategy": "recompute_logits", "chunk_rows": 512}, True),
    ],
)
def test_which_plans_have_tuned_products(tokens, dtype, device_type, options, tuned):
    problem = Problem(
        tokens=tokens,
        hidden=4096,
        vocab=32000,
        dtype=dtype,
        device_type=device_type,
        input_grad=True,
        weight_grad=True,
        bias_grad=False,
    )
    plan = make_plan(problem, Options(**options))
    assert plan.tune_products == tuned
    assert ("products tuned" in plan.describe()) == tuned


def test_a_cpu_leaves_products_to_pytorch(monkeypatch):
    monkeypatch.setattr(tuning, "TUNED_OPERATIONS", 0)
    out, a, b = (torch.empty(64, 64, dtype=torch.bfloat16) for _ in range(3))
    assert not tuning.run("logits", out, a, b)
    assert tuning.tunings() == []


def test_an_option_must_be_a_bool():
    with pytest.raises(ValueError, match="tune_products must be True or False"):
        Options(tune_products=1)


class StandIn:
    """In place of cuBLASLt: two algorithms, of which the second is the faster one, and one that cannot run."""

    def __init__(self, signature):
        self.signature = signature

    def proposals(self):
        return ["slow", "impossible", "fast"]

    def run(self, algorithm, out, a, b, bias, *, accumulate, alpha=1.0):
        if algorithm == "impossible" or self.signature.b.leading_dimension == 72:
            return False
        self.ran.append((algorithm, accumulate))
        result = alpha * (a.double() @ b.double()) + (0 if bias is None else bias)
        out.copy_(result + out if accumulate else result)
        return True


@pytest.fixture
def stand_in(fresh, monkeypatch):
    """Tuning on a CPU; gives the list of what ran: (algorithm, accumulate)."""

    def signature(out, a, b, bias):
        stored = [StoredMatrix.of_transpose(matrix) for matrix in (a, b, out)]
        return Signature(0, a.dtype, out.dtype, *stored, bias is not None)

    def seconds(run, times):
        run()
        return 1.0 if run.args[0] == "slow" else 0.5

    monkeypatch.setattr(tuning, "_product", lru_cache(StandIn))
    monkeypatch.setattr(tuning, "_seconds", seconds)
    monkeypatch.setattr(Signature, "of", signature)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(StandIn, "ran", [], raising=False)
    return StandIn.ran


def test_the_fastest_runs_from_then_on(stand_in):
    x, weight = torch.randn(40, 64), torch.randn(32, 64)
    out = torch.empty(40, 32)
    assert tuning.run("logits", out, x, weight.t())
    torch.testing.assert_close(out, x @ weight.t())
    (found,) = tuning.tunings()
    assert (found.product, found.sizes, found.algorithm) == ("logits", (40, 32, 64), "fast")
    assert (found.gain, found.milliseconds) == (2.0, 500.0)
    stand_in.clear()
    # Other numbers of tokens, up to the next power of two, are the same kind of product.
    for tokens, kinds in ((64, 1), (33, 1), (32, 2)):
        x = torch.randn(tokens, 64)
        out = torch.empty(tokens, 32)
        assert tuning.run("logits", out, x, weight.t())
        torch.testing.assert_close(out, x @ weight.t())
        assert len(tuning.tunings()) == kinds
    assert stand_in[:2] == [("fast", False)] * 2


def test_sizes_of_dx_are_four_an_octave(stand_in):
    weight, seen = torch.randn(32, 64), []
    for tokens in (64, 57, 56, 49, 48, 40, 33, 32):
        assert tuning.run("dX", torch.empty(tokens, 64), torch.randn(tokens, 32), weight)
        seen.append(len(tuning.tunings()))
    assert seen == [1, 1, 2, 2, 3, 4, 4, 5]


@pytest.mark.parametrize("name", ["dW", "dX"])
def test_a_sum_is_measured_as_a_sum_and_not_disturbed(name, stand_in):
    a, b = torch.randn(32, 64), torch.randn(64, 40)
    out = torch.randn(32, 40)
    before = out.clone()
    assert tuning.run(name, out, a, b, accumulate=True)
    assert {accumulate for _, accumulate in stand_in} == {True} and len(stand_in) > 4
    torch.testing.assert_close(out, before + a @ b)
    stand_in.clear()
    assert tuning.run(name, out, a, b, accumulate=True)
    torch.testing.assert_close(out, before + 2 * a @ b)
    assert stand_in == [("fast", True)]


def test_dw_is_measured_as_a_sum(stand_in):
    """Which it is for most chunks; what lies where the first one's goes is not added to it."""
    a, b, out = torch.randn(32, 64), torch.randn(64, 40), torch.randn(32, 40)
    assert tuning.run("dW", out, a, b)
    assert {accumulate for _, accumulate in stand_in[:-1]} == {True}
    torch.testing.assert_close(out, a @ b)
    # Tokens are what is summed over.
    for tokens in (48, 40):
        assert tuning.run("dW", out, torch.randn(32, tokens), torch.randn(tokens, 40), accumulate=True)
    assert stand_in[-2:] == [("fast", True)] * 2 and len(tuning.tunings()) == 1


def test_nearest_number_of_tokens(stand_in, monkeypatch):
    weight = torch.randn(32, 64)

    def algorithm(tokens):
        stand_in.clear()
        if not tuning.run("dX", torch.zeros(tokens, 64), torch.zeros(tokens, 32), weight):
            return None
        return stand_in[-1][0]

    assert algorithm(64) == "fast"
    monkeypatch.setattr(StandIn, "proposals", lambda self: ["slow"])
    assert algorithm(1024) == "slow"
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert [algorithm(tokens) for tokens in (1, 128, 400, 4096)] == ["fast", "fast", "slow", "slow"]
    assert len(tuning.tunings()) == 2


def test_products_that_differ_are_measured_apart(stand_in):
    """Of the same sizes, but of other dtypes, with a bias, or transposed."""

    def logits(out_dtype=torch.float32, dtype=torch.float32, bias=None, transposed=False):
        x, weight = torch.randn(32, 32, dtype=dtype), torch.randn(32, 32, dtype=dtype)
        assert tuning.run("logits", torch.empty(32, 32, dtype=out_dtype), x, weight.t(), bias)
        return len(tuning.tunings())

    assert logits() == 1
    assert logits(dtype=torch.bfloat16) == 2
    assert logits(dtype=torch.bfloat16, out_dtype=torch.bfloat16) == 3
    assert logits(bias=torch.randn(32)) == 4
    assert tuning.run("logits", torch.empty(32, 32), torch.randn(32, 32), torch.randn(32, 32))
    assert tuning.run("dX", torch.empty(32, 32), torch.randn(32, 32), torch.randn(32, 32))
    assert len(tuning.tunings()) == 6
    assert logits() == 6


def test_pytorch_keeps_what_is_not_known_to_be_right(stand_in, monkeypatch):
    def runs():
        return tuning.run("logits", torch.empty(32, 32), torch.ones(32, 32), torch.ones(32, 32))

    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert not runs()
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert not runs() and stand_in == []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not runs() and stand_in == []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert runs()


def test_a_library_that_fails_is_not_the_end(stand_in, monkeypatch):
    def fail(self):
        raise RuntimeError("cublasLtMatmulPreferenceCreate returned status 3")

    monkeypatch.setattr(StandIn, "proposals", fail)
    arguments = "logits", torch.empty(32, 32), torch.ones(32, 32), torch.ones(32, 32)
    with pytest.warns(UserWarning, match="products are PyTorch's: .* returned status 3"):
        assert not tuning.run(*arguments)
    assert not tuning.run(*arguments)


def test_a_product_that_the_algorithm_cannot_compute_is_left_to_pytorch(stand_in):
    x, weight, out = torch.randn(64, 64), torch.randn(64, 72), torch.empty(64, 64)
    assert tuning.run("dX", out, x, weight[:, :64].contiguous())
    before = out.clone()
    assert not tuning.run("dX", out, x, weight[:, :64])
    assert torch.equal(out, before)


def test_nothing_proposed(stand_in, monkeypatch):
    monkeypatch.setattr(StandIn, "proposals", lambda self: [])
    assert not tuning.run("logits", torch.empty(8, 8), torch.ones(8, 8), torch.ones(8, 8))
    assert stand_in == []


def test_small_products_are_left_to_pytorch(stand_in, monkeypatch):
    monkeypatch.setattr(tuning, "TUNED_OPERATIONS", 2 * 8**3)
    assert not tuning.run("logits", torch.empty(7, 8), torch.ones(7, 8), torch.ones(8, 8))
    assert tuning.run("logits", torch.empty(8, 8), torch.ones(8, 8), torch.ones(8, 8))


@pytest.mark.parametrize("name", ["logits", "dX", "dW"])
def test_each_product_can_be_tuned(name, stand_in):
    """And gives what it gives untuned; with a bias, added before rounding."""
    x, weight, bias = torch.randn(24, 16), torch.randn(32, 16), torch.randn(32)
    dlogits = torch.randn(24, 32)

    def compute(tune):
        out = {"logits": (24, 32), "dX": (24, 16), "dW": (32, 16)}[name]
        out = torch.zeros(out)
        if name == "logits":
            matmul.logits_(out, x, weight, bias, tune=tune)
        elif name == "dX":
            matmul.input_gradient_(out, dlogits, weight, tune=tune)
        else:
            matmul.weight_gradient_(out, dlogits, x, accumulate=False, tune=tune)
            matmul.weight_gradient_(out, dlogits, x, accumulate=True, tune=tune)
        return out

    untuned = compute(tune=False)
    assert stand_in == []
    torch.testing.assert_close(compute(tune=True), untuned)
    assert [tuning.product for tuning in tuning.tunings()] == [name]


@pytest.mark.parametrize("plan", ["gradients_in_forward", "save_logits", "recompute_logits", "some rows saved"])
def test_a_region_tunes_what_its_plan_says(plan, stand_in, monkeypatch):
    """All its products, and nothing where it does not say so."""
    strategy = {"some rows saved": "save_logits"}.get(plan, plan)
    x = torch.randn(50, 16).requires_grad_()
    weight = torch.randn(40, 16).requires_grad_()
    target = torch.randint(0, 40, (50,))

    def plan_of(problem, options, device):
        changes = {"saved_rows": 30, "slab_columns": 20} if plan == "some rows saved" else {}
        return replace(make_plan(problem, options), tune_products=options.tune_products, **changes)

    monkeypatch.setattr(functional, "cached_plan", plan_of)

    def gradients(tune):
        options = Options(strategy=strategy, chunk_rows=20, tune_products=tune)
        loss = linear_cross_entropy(x, weight, target, options=options)
        return torch.autograd.grad(loss, [x, weight])

    def no_product(*arguments, **settings):
        raise AssertionError("PyTorch's product")

    untuned = gradients(tune=False)
    assert stand_in == []
    monkeypatch.setattr(torch, "mm", no_product)
    monkeypatch.setattr(torch, "addmm", no_product)
    torch.testing.assert_close(gradients(tune=True), untuned)
    assert {tuning.product for tuning in tuning.tunings()} == {"logits", "dX", "dW"}


@pytest.fixture
def fresh(monkeypatch):
    """Nothing measured, and every product large enough to be."""
    monkeypatch.setattr(tuning, "TUNED_OPERATIONS", 0)
    monkeypatch.setattr(tuning, "_BURST_SECONDS", 1e-3)
    monkeypatch.setattr(tuning, "_tunings", {})
    tuning._product.cache_clear()
    yield
    tuning._product.cache_clear()


def _matrix(rows, columns, dtype, *, stride=None, transposed=False):
    if transposed:
        return _matrix(columns, rows, dtype, stride=stride).t()
    return torch.randn(rows, stride or columns, device="cuda").to(dtype)[:, :columns]


# name, M, N, K, dtype of out, strides of rows as stored
PRODUCTS = [
    ("logits", 512, 4096, 256, None, {}),
    ("logits", 300, 4104, 200, None, {"out": 4160}),
    ("logits", 300, 4104, 200, torch.float32, {"out": 4160, "a": 264}),
    ("dX", 300, 200, 4104, None, {"a": 4160}),
    ("dX", 300, 200, 4104, torch.float32, {"a": 4160}),
    ("dW", 4104, 200, 300, None, {"a": 4160}),
    ("dW", 4104, 200, 300, torch.float32, {"a": 4160, "b": 208}),
]


@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("name", "m", "n", "k", "out_dtype", "strides"), PRODUCTS)
def test_each_algorithm_gives_the_same_bits(name, m, n, k, out_dtype, strides, dtype, fresh):
    a = _matrix(m, k, dtype, stride=strides.get("a"), transposed=name == "dW")
    b = _matrix(k, n, dtype, stride=strides.get("b"), transposed=name == "logits")
    out = _matrix(m, n, out_dtype or dtype, stride=strides.get("out"))
    before = out.clone()
    product = Product(Signature.of(out, a, b, None))
    algorithms = product.proposals()
    assert len(algorithms) > 1
    results = []
    for algorithm in algorithms:
        out.copy_(before)
        product.run(algorithm, out, a, b, None, accumulate=False)
        results.append(out.clone())
    assert all(torch.equal(result, results[0]) for result in results)
    exact = a.double() @ b.double()
    # In float32 the error is that of a long sum in a tensor core, which PyTorch may split.
    slack = 1e-5 if out_dtype else 0
    of_pytorch = torch.mm(a, b, out_dtype=out.dtype)
    assert error(results[0], exact) <= 1.01 * error(of_pytorch, exact) + slack
    if name == "dW":
        out.copy_(before)
        product.run(algorithms[-1], out, a, b, None, accumulate=True)
        of_pytorch = torch.addmm(before, a, b, out_dtype=out.dtype)
        exact += before.double()
        assert error(out, exact) <= 1.01 * error(of_pytorch, exact) + slack


@on_gpu
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_measuring_does_not_disturb_a_sum(out_dtype, fresh):
    """Whatever it holds: nothing is added but, in float32, to what is next to 0."""
    dtype = torch.bfloat16 if out_dtype is torch.float32 else out_dtype
    a, b = 10 * _matrix(512, 256, dtype, transposed=True), 10 * _matrix(256, 1024, dtype)
    before = _matrix(512, 1024, out_dtype)
    smallest = torch.finfo(out_dtype).smallest_normal
    for row, number in enumerate((0.0, -0.0, smallest, smallest / 2, 1e4, -1e4, math.inf, math.nan)):
        before[row] = number
    out = before.clone()
    tuning._measured("dW", Signature.of(out, a, b, None), out, a, b, None, accumulate=True)
    if out_dtype is torch.float32:
        torch.testing.assert_close(out, before, rtol=0, atol=1e-37, equal_nan=True)
    else:
        # Not even zeros, but for their sign.
        torch.testing.assert_close(out, before, rtol=0, atol=0, equal_nan=True)
    assert tuning.run("dW", out, a, b, accumulate=True)
    exact = before.double() + a.double() @ b.double()
    assert error(out[8:], exact[8:]) < torch.finfo(dtype).eps


@on_gpu
def test_a_bias_is_added_before_rounding(fresh):
    x, weight = _matrix(512, 256, torch.bfloat16), _matrix(4104, 256, torch.bfloat16)
    bias = 16 * torch.randn(4104, device="cuda").bfloat16()
    contiguous = torch.addmm(bias, x, weight.t())
    out = _matrix(512, 4104, torch.bfloat16, stride=4160)
    assert tuning.run("logits", out, x, weight.t(), bias)
    exact = x.double() @ weight.double().t() + bias.double()
    assert error(out, exact) <= 1.01 * error(contiguous, exact)
    result = out.clone()
    product = Product(Signature.of(out, x, weight.t(), bias))
    arguments = (out, x, weight.t(), bias)
    for algorithm in product.proposals():
        if product.run(algorithm, *arguments, accumulate=False):
            assert torch.equal(out, result)
        out.zero_()
    assert tuning.run("logits", *arguments)
    # Another bias of the same size: its address is no part of what is kept.
    other = bias + 1
    assert tuning.run("logits", out, x, weight.t(), other)
    assert error(out, exact + 1) < 3e-3


@on_gpu
def test_what_cannot_run_is_left_to_pytorch(fresh):
    x, weight, out = (torch.randn(64, 64, device="cuda").bfloat16() for _ in range(3))
    padded = torch.zeros(64, 66, device="cuda", dtype=torch.bfloat16)
    assert not tuning.run("dX", padded[:, 1:65], x, weight), "address"
    assert not tuning.run("dX", padded[:, :64], x, weight), "stride"
    assert not tuning.run("dX", out.t(), x, weight), "column-major"
    assert not tuning.run("dX", out.double(), x.double(), weight.double()), "dtype"
    assert not tuning.run("logits", out, x, weight, bias=torch.zeros(64, device="cuda")), "dtype of the bias"
    assert tuning.tunings() == []
    assert tuning.run("dW", out, x, weight)
    assert tuning.run("dW", out, x, weight, accumulate=True)
    (found,) = tuning.tunings()
    assert (found.product, found.sizes) == ("dW", (64, 64, 64))
    assert found.gain >= 1 and found.seconds > 0


@on_gpu
def test_numbers_of_tokens_between_powers_of_two_share_what_was_measured(fresh):
    weight = torch.randn(512, 64, device="cuda").bfloat16()

    def logits(tokens):
        x = torch.randn(tokens, 64, device="cuda").bfloat16()
        out = x.new_empty(tokens, 512)
        assert tuning.run("logits", out, x, weight.t())
        torch.testing.assert_close(out, x @ weight.t())
        return len(tuning.tunings())

    assert [logits(tokens) for tokens in (256, 129, 200, 128, 257, 512)] == [1, 1, 1, 2, 3, 3]


@on_gpu
def test_nothing_is_measured_while_a_graph_is_captured(fresh):
    x, weight = (torch.randn(256, 256, device="cuda").bfloat16() for _ in range(2))
    out = torch.empty_like(x)

    def capture():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            has_run = tuning.run("logits", out, x, weight)
        return graph, has_run

    assert not capture()[1]
    assert tuning.run("logits", out, x, weight)
    graph, has_run = capture()
    assert has_run
    x.normal_()
    graph.replay()
    torch.testing.assert_close(out, x @ weight)


@on_gpu
@pytest.mark.parametrize("strategy", ["gradients_in_forward", "save_logits", "recompute_logits"])
@pytest.mark.parametrize("vocab", [4096, 4099])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_region(strategy, vocab, has_bias, fresh, monkeypatch):
    """Tuned or not: as exact, and in the same memory."""
    monkeypatch.setattr("thunder_flce.planning.plan.TUNED_OPERATIONS", 0)
    functional.cached_plan.cache_clear()
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
    assert {tuning.product for tuning in tuning.tunings()} == {"logits", "dX", "dW"}
    doubles = [tensor.detach().double().requires_grad_() for tensor in inputs]
    logits = torch.nn.functional.linear(*([doubles[0], doubles[1]] + doubles[2:]))
    loss = torch.nn.functional.cross_entropy(logits, target)
    exact = [loss.detach(), *torch.autograd.grad(loss, doubles)]
    for one, other, reference in zip(tuned, plain, exact, strict=True):
        assert error(one, reference) <= 1.05 * error(other, reference) + 1e-6
    with_tuning, without = peak(tune=True), peak(tune=False)
    assert with_tuning <= 1.01 * without + 2**16


@on_gpu
def test_products_are_those_of_pytorch(fresh):
    """The bits of PyTorch's own product, as long as it does not split the sum either."""
    x, weight = _matrix(512, 256, torch.bfloat16), _matrix(8192, 256, torch.bfloat16)
    out = x.new_empty(512, 8192)
    matmul.logits_(out, x, weight, None, tune=True)
    assert len(tuning.tunings()) == 1
    assert torch.equal(out, x @ weight.t())


@on_gpu
def test_the_library_is_the_one_that_pytorch_has_loaded():
    with open("/proc/self/maps") as maps:
        assert len({line.split()[-1] for line in maps if "libcublasLt.so" in line}) == 1
    assert cublaslt.available()
