"""The engine's matmuls: how exact they are, and which of cuBLAS's algorithms runs."""

import math
from collections import Counter
from functools import lru_cache

import pytest
import torch
import torch.nn.functional as F

from reference import doubled, error
from thunder_flce.device import Device
from thunder_flce.engine.matmul import algorithms, cublaslt, matmul
from thunder_flce.engine.matmul.cublaslt import Matmul, MatmulDescriptor, Signature, StoredMatrix

C, H, V = 60, 48, 40
CPU = Device.of(torch.device("cpu"))
B16, F32 = torch.bfloat16, torch.float32
# dtypes of the operands and of the result
DTYPES = [(torch.float64, torch.float64), (F32, F32), (B16, B16), (torch.float16, torch.float16), (B16, F32)]


@pytest.fixture
def tails(monkeypatch):
    """Divides an odd V as on CUDA, and converts the weight of float32 logits in several parts."""
    monkeypatch.setattr(matmul, "_main_columns", lambda columns, operand: columns // 8 * 8 or columns)
    monkeypatch.setattr(matmul, "FLOAT32_COLUMNS", 16)


def _randn(*shape, dtype=B16, device="cuda"):
    return torch.randn(shape, dtype=torch.float64).to(dtype).to(device)


def _padded(rows, columns, *, dtype, device):
    """As the engine has logits: NaN, in rows that are padded."""
    stride = -(-(columns + 1) // 64) * 64
    return torch.full((rows, stride), math.nan, dtype=dtype, device=device)[:, :columns]


def _assert_as_exact(out, exact, eager):
    """As what eager PyTorch computes in out's dtype; in 32 bits and more, the order of a sum shows, too."""
    if eager.dtype == out.dtype:
        assert error(out, exact) <= (1.1 if out.dtype.itemsize == 2 else 1.3) * error(eager, exact) + 1e-15
    else:
        assert error(out, exact) < 1e-6


@pytest.mark.usefixtures("tails")
@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("vocab", [V, V + 3, 5])
@pytest.mark.parametrize(("dtype", "out_dtype"), DTYPES, ids=str)
def test_logits_of_two_terms(dtype, out_dtype, vocab, has_bias, device):
    """No more wrong than a model that adds the two; nothing else is written."""
    shapes = (C, H), (vocab, H), (C, 4), (vocab, 4), (vocab,)
    x, weight, y, adapter, bias = (_randn(*shape, dtype=dtype, device=device) for shape in shapes)
    bias = 8 * bias if has_bias else None
    out = _padded(C, vocab, dtype=out_dtype, device=device)
    matmul.logits_(out, x, weight, bias=bias)
    matmul.logits_(out, y, adapter, accumulate=True)
    exact = F.linear(*map(doubled, (x, weight, bias))) + F.linear(y.double(), adapter.double())
    _assert_as_exact(out, exact, F.linear(x, weight, bias) + F.linear(y, adapter))
    assert out._base[:, vocab:].isnan().all()


@pytest.mark.usefixtures("tails")
@pytest.mark.parametrize("vocab", [V, V + 3])
@pytest.mark.parametrize(("dtype", "out_dtype"), DTYPES, ids=str)
def test_gradients(dtype, out_dtype, vocab, device):
    """As exact as one matmul of PyTorch, tail or not."""
    x, weight, dlogits = (_randn(*shape, dtype=dtype, device=device) for shape in ((C, H), (vocab, H), (C, vocab)))
    dx = torch.full((C, H), math.nan, dtype=out_dtype, device=device)
    matmul.input_gradient_(dx, dlogits, weight)
    _assert_as_exact(dx, dlogits.double() @ weight.double(), dlogits @ weight)
    before = _randn(vocab, H, dtype=out_dtype, device=device)
    eager, exact = dlogits.t() @ x, dlogits.double().t() @ x.double()
    for accumulate in (False, True):
        dw = before.clone() if accumulate else torch.full_like(before, math.nan)
        matmul.weight_gradient_(dw, dlogits, x, accumulate=accumulate)
        _assert_as_exact(dw, exact + accumulate * before.double(), eager + before if accumulate else eager)


@pytest.fixture
def fresh(monkeypatch):
    """Nothing measured, and every matmul large enough to be."""
    monkeypatch.setattr(algorithms, "TUNED_OPERATIONS", 0)
    monkeypatch.setattr(algorithms, "_TURNS_SECONDS", 1e-3)
    monkeypatch.setattr(algorithms, "_tunings", {})
    monkeypatch.setattr(algorithms, "_call_counts", Counter())
    algorithms._descriptor.cache_clear()


class StandIn:
    """In place of cuBLASLt: two algorithms, of which the second is the faster one, and one that cannot run."""

    candidates = ("slow", "impossible", "fast")

    def __init__(self, signature):
        self.signature = signature

    def run(self, matmul, algorithm, *, alpha=1.0):
        if algorithm == "impossible" or self.signature.b.row_stride == 72:
            return False
        self.ran.append(algorithm)
        result = alpha * (matmul.a.double() @ matmul.b.double()) + (0 if matmul.bias is None else matmul.bias)
        matmul.out.copy_(result + matmul.out if matmul.accumulate else result)
        return True


@pytest.fixture
def stand_in(fresh, monkeypatch):
    """Tuning on a CPU; gives the list of the algorithms that ran."""

    def signature(call):
        return Signature(0, *map(StoredMatrix.of, (call.out, call.a, call.b)), call.bias is not None)

    def seconds(runs):
        for run in runs:
            run()
        return [1.0 if run.args[1] == "slow" else 0.5 for run in runs]

    monkeypatch.setattr(algorithms, "_seconds", seconds)
    monkeypatch.setattr(algorithms, "_descriptor", lru_cache(StandIn))
    monkeypatch.setattr(Signature, "of", signature)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(StandIn, "ran", [], raising=False)
    return StandIn.ran


def check_logits(x, weight, *, tune=True) -> None:
    """Computes logits, by the stand-in or by PyTorch, which are right."""
    out = torch.zeros(x.shape[0], weight.shape[0])
    matmul.logits_(out, x, weight, tune=tune)
    torch.testing.assert_close(out, x @ weight.t())


def test_the_fastest_runs_from_then_on(stand_in, monkeypatch):
    """For the first two numbers of tokens, as early logits have another; for others when they have come often."""
    monkeypatch.setattr(algorithms, "_OFTEN", 3)
    monkeypatch.setattr(algorithms, "_MOST_TUNINGS", 3)
    weight = torch.randn(32, 64)
    for tokens, tunings, is_tuned in (
        (48, 1, True), (64, 2, True), (48, 2, True), (80, 2, False), (90, 2, False), (80, 2, False), (80, 3, True),
        (90, 3, False), (90, 3, False), (48, 3, True),
    ):  # fmt: skip
        stand_in.clear()
        check_logits(torch.randn(tokens, 64), weight)
        assert len(algorithms.tunings()) == tunings
        assert stand_in[-1:] == ["fast"] * is_tuned
    tuning = algorithms.tunings()[0]
    plain = {"sizes": (48, 32, 64), "gain": 2.0, "milliseconds": 500.0}
    assert {**plain, "seconds": tuning.seconds} == tuning.to_dict() and tuning.algorithm == "fast"


def test_what_may_gain_is_tuned(stand_in, monkeypatch):
    """Logits of small hidden sizes, but not further terms, and sums of dW; and gives what it gives untuned."""
    monkeypatch.setattr(algorithms, "TUNED_DEPTH", 32)

    def results(hidden, tokens, *, tune):
        x, weight, dlogits = torch.ones(tokens, hidden), torch.ones(48, hidden), torch.ones(tokens, 48)
        logits, dw = torch.zeros(tokens, 48), torch.zeros(48, hidden)
        matmul.logits_(logits, x, weight, bias=torch.ones(48), tune=tune)
        matmul.logits_(logits, x, weight, accumulate=True, tune=tune)
        matmul.weight_gradient_(dw, dlogits, x, accumulate=False, tune=tune)
        matmul.weight_gradient_(dw, dlogits, x, accumulate=True, tune=tune)
        return logits, dw

    for hidden, tokens, tunings in ((40, 40, 0), (16, 40, 1), (40, 24, 1), (16, 24, 2)):
        monkeypatch.setattr(algorithms, "_tunings", {})
        untuned = results(hidden, tokens, tune=False)
        assert algorithms.tunings() == []
        torch.testing.assert_close(results(hidden, tokens, tune=True), untuned)
        assert len(algorithms.tunings()) == tunings


def test_algorithms_that_give_other_bits_are_left_out(stand_in, monkeypatch):
    """However fast they are, and in whichever row of the first ones it shows."""
    compared_rows, run = [], StandIn.run

    def another_order(self, matmul, algorithm, *, alpha=1.0):
        has_run = run(self, matmul, algorithm, alpha=alpha)
        if algorithm == "fast":
            matmul.out[-1, -1] = torch.nextafter(matmul.out[-1, -1], torch.tensor(math.inf))
            compared_rows.append(matmul.out.shape[0])
        return has_run

    monkeypatch.setattr(StandIn, "run", another_order)
    x, weight = torch.randn(600, 16), torch.randn(32, 16)
    for _ in range(2):
        check_logits(x, weight)
    (tuning,) = algorithms.tunings()
    assert tuning.algorithm == "slow" and stand_in[-1] == "slow" and compared_rows == [256]


def test_pytorch_keeps_what_is_not_known_to_be_right(stand_in, monkeypatch):
    x = torch.randn(64, 64)

    def is_tuned(x=x, weight=x, tune=True):
        stand_in.clear()
        check_logits(x, weight, tune=tune)
        return bool(stand_in)

    for module, name, value in (
        (torch, "are_deterministic_algorithms_enabled", lambda: True),
        (algorithms, "TUNED_OPERATIONS", 2 * 64**3 + 1),
        (Signature, "of", lambda matmul: None),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, value)
            assert not is_tuned() and algorithms.tunings() == []
    assert is_tuned() and not is_tuned(tune=False)
    assert not is_tuned(weight=torch.randn(64, 72)[:, :64]), "cuBLASLt refuses"
    monkeypatch.setattr(StandIn, "candidates", ())
    assert not is_tuned(weight=torch.randn(8, 64)), "no candidates"

    def fail(self):
        raise RuntimeError("cublasLtMatmulPreferenceCreate returned status 3")

    monkeypatch.setattr(StandIn, "candidates", property(fail))
    small = torch.randn(32, 32)
    with pytest.warns(UserWarning, match="cuBLASLt lists no algorithms: .* returned status 3"):
        assert not is_tuned(small, small)
    assert not is_tuned(small, small), "the library has failed"


def _matrix(rows, columns, dtype=B16, *, stride=None, transposed=False):
    if transposed:
        return _matrix(columns, rows, dtype, stride=stride).t()
    return torch.randn(rows, stride or columns, device="cuda").to(dtype)[:, :columns]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [B16, torch.float16], ids=str)
@pytest.mark.parametrize("is_wide", [False, True], ids=["", "float32"])
@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize(("c", "v", "h", "strides"), [(512, 4096, 256, {}), (300, 4104, 200, {"out": 4160, "x": 264})])
def test_all_algorithms_give_the_same_bits(c, v, h, strides, transposed, is_wide, dtype, fresh):
    x = _matrix(c, h, dtype, stride=strides.get("x"))
    weight = _matrix(v, h, dtype, transposed=transposed)
    out = _matrix(c, v, F32 if is_wide else dtype, stride=strides.get("out"))
    call = Matmul(out, x, weight.t())
    descriptor, results = MatmulDescriptor(Signature.of(call)), []
    for algorithm in descriptor.candidates:
        out.fill_(math.nan)
        assert descriptor.run(call, algorithm)
        results.append(out.clone())
    assert len(results) > 1 and all(torch.equal(result, results[0]) for result in results)
    exact, eager = x.double() @ weight.double().t(), torch.mm(x, weight.t(), out_dtype=out.dtype)
    # In float32 the error is that of a long sum in a tensor core, which PyTorch may split.
    assert error(results[0], exact) <= 1.01 * error(eager, exact) + (1e-5 if is_wide else 0)


@pytest.mark.gpu
@pytest.mark.parametrize("out_dtype", [B16, torch.float16, F32], ids=str)
def test_measuring_does_not_disturb_a_sum(out_dtype, fresh):
    """Whatever it holds: nothing is added but, in float32, to what is next to 0."""
    dtype = B16 if out_dtype is F32 else out_dtype
    a, b = 10 * _matrix(512, 256, dtype, transposed=True), 10 * _matrix(256, 1024, dtype)
    before, smallest = _matrix(512, 1024, out_dtype), torch.finfo(out_dtype).smallest_normal
    for row, number in enumerate((0.0, -0.0, smallest, smallest / 2, 1e4, -1e4, math.inf, math.nan)):
        before[row] = number
    out = before.clone()
    call = Matmul(out, a, b, accumulate=True)
    algorithms._measure(call, Signature.of(call))
    # Not even zeros change, but for their sign.
    torch.testing.assert_close(out, before, rtol=0, atol=1e-37 if out_dtype is F32 else 0, equal_nan=True)
    assert algorithms.run_fastest(call)
    exact = before.double() + a.double() @ b.double()
    assert error(out[8:], exact[8:]) < torch.finfo(dtype).eps


@pytest.mark.gpu
def test_a_bias_is_added_before_rounding(fresh):
    """By cuBLASLt into padded rows; another bias of the same size has another address, which is not kept."""
    x, weight, out = _matrix(512, 256), _matrix(4104, 256), _matrix(512, 4104, stride=4160)
    for bias in (16 * _randn(4104), 16 * _randn(4104)):
        exact = x.double() @ weight.double().t() + bias.double()
        matmul.logits_(out, x, weight, bias=bias, tune=True)
        assert error(out, exact) <= 1.01 * error(torch.addmm(bias, x, weight.t()), exact)
        assert len(algorithms.tunings()) == 1


@pytest.mark.gpu
def test_what_cannot_run_is_left_to_pytorch(fresh):
    x, weight, out = (torch.randn(64, 64, device="cuda").bfloat16() for _ in range(3))
    padded = torch.zeros(64, 66, device="cuda", dtype=B16)
    for why, *tensors in (
        ("address", padded[:, 1:65], x, weight),
        ("stride", padded[:, :64], x, weight),
        ("column-major", out.t(), x, weight),
        ("dtype", out.double(), x.double(), weight.double()),
        ("dtype of the bias", out, x, weight, torch.zeros(64, device="cuda")),
    ):
        assert not algorithms.run_fastest(Matmul(*tensors)), why
    assert algorithms.tunings() == []
    assert algorithms.run_fastest(Matmul(out, x, weight))
    (tuning,) = algorithms.tunings()
    assert tuning.sizes == (64, 64, 64) and tuning.gain >= 1 and tuning.seconds > 0


@pytest.mark.gpu
def test_nothing_is_measured_while_a_graph_is_captured(fresh):
    x, weight = (torch.randn(256, 256, device="cuda").bfloat16() for _ in range(2))
    out = torch.empty_like(x)

    def capture():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            has_run = algorithms.run_fastest(Matmul(out, x, weight))
        return graph, has_run

    assert not capture()[1]
    assert algorithms.run_fastest(Matmul(out, x, weight))
    graph, has_run = capture()
    x.normal_()
    graph.replay()
    torch.testing.assert_close(out, x @ weight)
    assert has_run


@pytest.mark.gpu
def test_matmuls_are_those_of_pytorch(fresh):
    """The bits of PyTorch's own matmul, as long as it does not split the sum either; in its library."""
    x, weight = _matrix(512, 256), _matrix(8192, 256)
    out = x.new_empty(512, 8192)
    matmul.logits_(out, x, weight, tune=True)
    assert len(algorithms.tunings()) == 1 and torch.equal(out, x @ weight.t())
    with open("/proc/self/maps") as maps:
        assert len({line.split()[-1] for line in maps if "libcublasLt.so" in line}) == 1 and cublaslt.loaded()


@pytest.mark.parametrize(("version", "platform_has_it", "name"), [
    ("12.8", True, "libcublasLt.so.12"), ("13.2", True, "libcublasLt.so.13"), ("12.8", False, None),
    ("14.0", True, None), (None, True, None),
], ids=str)  # fmt: skip
def test_only_a_known_cublaslt_is_called(version, platform_has_it, name, monkeypatch):
    """Another one, on Windows or for ROCm, is left to PyTorch; so is one that PyTorch has not loaded."""
    opened = []

    def library(name, mode):
        opened.append(name)
        raise OSError

    monkeypatch.setattr(torch.version, "cuda", version)
    monkeypatch.setattr(cublaslt.ctypes, "CDLL", library)
    if not platform_has_it:
        monkeypatch.delattr(cublaslt.os, "RTLD_NOLOAD")
    assert cublaslt.library_name() == name
    assert cublaslt.loaded.__wrapped__() is None and opened == ([name] if name else [])


@pytest.mark.gpu
def test_one_column_beyond_32_bits():
    """Such as the last one of 128257, in memory of more than 2³¹ elements."""
    rows, stride = 20000, 128320
    x, weight = _randn(rows, 8), _randn(1, 8)
    out = torch.empty(rows, stride, dtype=B16, device="cuda")[:, 128256:128257]
    matmul.logits_(out, x, weight)
    torch.testing.assert_close(out, x @ weight.t())
