"""The region's matmuls: how exact they are, who runs them, and what memory they take."""

import weakref
from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from reference import error
from thunder_flce import device
from thunder_flce.device import HOPPER, is_hopper
from thunder_flce.execution.layout import layout_for
from thunder_flce.execution.matmul import matmul, tuning
from thunder_flce.execution.matmul.matmul import MatmulWork

C, H, V = 60, 48, 40

# dtypes of the operands and of the result
DTYPES = [
    (torch.float64, torch.float64),
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.float32),
]


@pytest.fixture
def tails(monkeypatch):
    """Divides an odd V as on CUDA, and converts the weight of float32 logits in several parts."""
    monkeypatch.setattr(MatmulWork, "tail", property(lambda work: work.columns % 8 if work.columns > 8 else 0))
    monkeypatch.setattr(matmul, "_FLOAT32_COLUMNS", 16)


def _assert_as_exact(out, exact, eager):
    """As what eager PyTorch computes in out's dtype; in 32 bits and more, the order of a sum shows, too."""
    factor = 1.1 if out.dtype.itemsize == 2 else 1.3
    assert error(out, exact) <= factor * error(eager, exact) + 1e-15


def _randn(*shape, dtype, device):
    return torch.randn(shape, dtype=torch.float64).to(dtype).to(device)


def _logits_memory(rows, vocab, *, dtype, device):
    """As the engine has it: NaN, in rows that may be padded."""
    padded = layout_for(vocab, dtype=dtype, device_type="cuda").row_stride
    return torch.full((rows, padded), float("nan"), dtype=dtype, device=device)[:, :vocab]


@pytest.mark.usefixtures("tails")
@pytest.mark.parametrize("first", ["large", "small"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("rank", [4, 16])
@pytest.mark.parametrize("vocab", [V, V + 3, 5])
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_logits_of_two_terms(dtypes, vocab, rank, bias, first, device):
    """Whichever is written first, no more wrong than a model that adds the two; nothing else is written."""
    dtype, out_dtype = dtypes
    of = {"dtype": dtype, "device": device}
    terms = [(_randn(C, size, **of), _randn(vocab, size, **of)) for size in (H, rank)]
    b = 8 * _randn(vocab, **of) if bias else None
    out = _logits_memory(C, vocab, dtype=out_dtype, device=device)
    (x, weight), (y, adapter) = terms if first == "large" else terms[::-1]
    matmul.logits_(out, x, weight, bias=b)
    matmul.logits_(out, y, adapter, accumulate=True)
    exact = sum(x.double() @ w.double().t() for x, w in terms) + (0 if b is None else b.double())
    (x, weight), (y, adapter) = terms
    eager = torch.nn.functional.linear(x, weight, b) + y @ adapter.t()
    if out_dtype == dtype:
        _assert_as_exact(out, exact, eager)
    else:
        assert error(out, exact) < 1e-6
    assert out._base[:, vocab:].isnan().all()


def test_a_bias_goes_with_the_first_term():
    with pytest.raises(ValueError, match="a bias is added with the linear term that is written first"):
        matmul.logits_(torch.zeros(2, 3), torch.ones(2, 4), torch.ones(3, 4), bias=torch.ones(3), accumulate=True)


@pytest.mark.usefixtures("tails")
@pytest.mark.parametrize("accumulate", [False, True], ids=["", "accumulate"])
@pytest.mark.parametrize("hidden", [4, H])
@pytest.mark.parametrize("vocab", [V, V + 3])
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_gradients(dtypes, vocab, hidden, accumulate, device):
    """As exact as one matmul of PyTorch, tail or not."""
    dtype, out_dtype = dtypes
    of = {"dtype": dtype, "device": device}
    x, weight, dlogits = _randn(C, hidden, **of), _randn(vocab, hidden, **of), _randn(C, vocab, **of)
    for compute, a, b in (
        (lambda out: matmul.input_gradient_(out, dlogits, weight, accumulate=accumulate), dlogits, weight),
        (lambda out: matmul.weight_gradient_(out, dlogits, x, accumulate=accumulate), dlogits.t(), x),
    ):
        before = _randn(a.shape[0], b.shape[1], dtype=out_dtype, device=device)
        exact = a.double() @ b.double() + (before.double() if accumulate else 0)
        out = before.clone() if accumulate else torch.full_like(before, float("nan"))
        compute(out)
        if out_dtype == dtype:
            eager = before + a @ b if accumulate else a @ b
            _assert_as_exact(out, exact, eager)
        else:
            assert error(out, exact) < 1e-6


def test_which_columns_are_the_tail():
    assert [_work("dX", columns=v).tail for v in (5, 8, 9, 128256, 128257)] == [0, 0, 1, 0, 1]
    assert _work("dX", columns=15, dtype=torch.float32).tail == 0
    assert _work("dX", columns=15, device_type="cpu").tail == 0


def _work(kind, **changes):
    dtype = changes.get("dtype", torch.bfloat16)
    settings = {"dtype": dtype, "out_dtype": dtype, "device_type": "cuda"}
    return MatmulWork(kind, **{**settings, "rows": C, "hidden": 4096, "columns": 128257, **changes})


def test_other_gpus_are_left_to_cublas(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(device, "_capability", lambda index: HOPPER + 1)
    assert not is_hopper(None) and not is_hopper(torch.device("cuda")) and not is_hopper(torch.device("cpu"))
    of = {"dtype": torch.bfloat16, "device_type": "cuda"}
    assert not tuning.can_tune(tuning.TUNED_OPERATIONS, **of)
    monkeypatch.setattr(device, "_capability", lambda index: HOPPER)
    assert tuning.can_tune(tuning.TUNED_OPERATIONS, **of)


class _LiveBytes(TorchDispatchMode):
    """Adds up what operations allocate on a CPU, and what is freed of it."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        known = {t.untyped_storage().data_ptr() for t in [*args, *(kwargs or {}).values()] if torch.is_tensor(t)}
        result = function(*args, **(kwargs or {}))
        if torch.is_tensor(result) and result.untyped_storage().data_ptr() not in known:
            size = result.untyped_storage().nbytes()
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(result, self._free, size)
        return result

    def _free(self, size):
        self.now -= size


@contextmanager
def _allocated(device):
    """Gives a list, to which the peak of what is allocated meanwhile is added."""
    peak = []
    if device == "cpu":
        with _LiveBytes() as live:
            yield peak
        peak.append(live.peak)
        return
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    yield peak
    peak.append(torch.cuda.memory_stats()["requested_bytes.all.peak"] - before)


# dtype of the result, further settings of `MatmulWork`
CASES = [
    ("logits", torch.bfloat16, {}),
    ("logits", torch.bfloat16, {"pads_biased_rows": True}),
    ("logits", torch.float32, {}),
    ("logits", torch.float32, {"pads_biased_rows": True}),
    ("dX", torch.bfloat16, {}),
    ("dX", torch.float32, {}),
    ("dW", torch.bfloat16, {}),
    ("dW", torch.float32, {}),
    ("dW", torch.bfloat16, {"parts": 2}),
]


@pytest.mark.parametrize(("kind", "out_dtype", "settings"), CASES, ids=str)
@pytest.mark.parametrize("vocab", [20000, 20003])
def test_scratch_is_what_is_allocated(vocab, kind, out_dtype, settings, device):
    of = {"dtype": torch.bfloat16, "device": device}
    x, weight, dlogits = _randn(C, H, **of), _randn(vocab, H, **of), _randn(C, vocab, **of)
    bias = _randn(vocab, **of) if settings.get("pads_biased_rows") else None
    logits = _logits_memory(C, vocab, dtype=out_dtype, device=device)
    out = {"logits": logits, "dX": torch.zeros(C, H, device=device), "dW": torch.zeros(vocab, H, device=device)}[kind]
    out = out.to(out_dtype)

    def compute():
        if kind == "logits":
            matmul.logits_(logits, x, weight, bias=bias)
        elif kind == "dX":
            matmul.input_gradient_(out, dlogits, weight)
        else:
            parts = settings.get("parts", 1)
            matmul.weight_gradient_of_parts_(out, [(dlogits, x)] * parts)

    # The first one allocates cuBLAS's workspace, which stays.
    compute()
    with _allocated(device) as peak:
        compute()
    if logits.is_contiguous():
        settings = {**settings, "pads_biased_rows": False}
    work = _work(kind, hidden=H, columns=vocab, out_dtype=out_dtype, device_type=device, **settings)
    assert peak == [work.scratch_bytes]


def test_scratch_of_logits_with_a_bias(monkeypatch):
    """On CUDA, only where PyTorch cannot add it before rounding, nor cuBLASLt is asked to."""

    def scratch(columns, **changes):
        settings = {"pads_biased_rows": columns % 8 > 0, **changes}
        return _work("logits", rows=100, hidden=512, columns=columns, **settings).scratch_bytes

    assert scratch(20000) == scratch(20003, pads_biased_rows=False) == scratch(20003, out_dtype=torch.float32) == 0
    assert scratch(20003) == scratch(20003, tune=True) == 100 * 8192 * 4
    assert scratch(1003) == 100 * 1000 * 4
    monkeypatch.setattr(tuning, "TUNED_OPERATIONS", 1e6)
    assert scratch(20003, tune=True) == 100 * 3 * 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("rank", [8, 16, 64])
@pytest.mark.parametrize("kind", ["logits", "dX", "dW"])
@pytest.mark.parametrize("vocab", [128256, 128257])
def test_narrow_terms_take_little_more_than_reading_the_logits(vocab, kind, rank):
    """So that an adapter costs what it must: its logits are read and written, its gradients read dlogits.

    Not at a rank of 4, whose rows are no 16 bytes: there cuBLAS takes 0.57 ms in place of 0.25 (one H200).
    """
    of = {"dtype": torch.bfloat16, "device": "cuda"}
    x, adapter = _randn(2048, rank, **of), _randn(vocab, rank, **of)
    logits = _logits_memory(2048, vocab, dtype=torch.bfloat16, device="cuda").fill_(0)
    dx, dw = torch.zeros_like(x), torch.zeros_like(adapter)
    run = {
        "logits": lambda: matmul.logits_(logits, x, adapter, accumulate=True, tune=True),
        "dX": lambda: matmul.input_gradient_(dx, logits, adapter, tune=True),
        "dW": lambda: matmul.weight_gradient_(dw, logits, x, accumulate=True, tune=True),
    }[kind]

    def read():
        logits.add_(1)

    run()
    read()
    # In turns, and the fastest of many: other processes may use the device, too.
    times = [(tuning._seconds(run, 2), tuning._seconds(read, 2)) for _ in range(30)]
    taken, to_read = map(min, zip(*times, strict=True))
    assert taken <= 3 * to_read + 3e-5
