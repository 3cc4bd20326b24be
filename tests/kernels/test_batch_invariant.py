"""`Options(batch_invariant=True)`: a token's log-probability has the same bits, whatever is computed beside it."""

from dataclasses import replace

import pytest
import torch

from reference import error
from test_matmul import StandIn, take_for_cublaslt
from test_plan import H200
from test_plan import call as a_call
from thunder_flce import Options, linear_cross_entropy, linear_kl_divergence
from thunder_flce.device import Device
from thunder_flce.engine.choose import choose
from thunder_flce.engine.matmul import algorithms, cublaslt
from thunder_flce.engine.matmul.cublaslt import Matmul
from thunder_flce.operation.call import Spec
from thunder_flce.operation.divergence import KINDS
from thunder_flce.options import STRATEGIES

INVARIANT = Options(batch_invariant=True)
CUDA = torch.device("cuda")
OUTPUTS = ("log_prob", "entropy", "mean_logit", "log_sum_sq_probs")
"""The last of them has no gradient"""
SIZES = {"cpu": [(77, 33), (1003, 72), (33000, 24)], "cuda": [(1003, 72), (32000, 1024), (128257, 4096)]}


class Batch:
    """Tokens, of which every third is ignored, with a head and a bias."""

    def __init__(self, device, dtype, size, tokens):
        vocab, hidden = size
        self.x = torch.randn(tokens, hidden, dtype=dtype, device=device)
        self.weight = torch.randn(vocab, hidden, dtype=dtype, device=device).mul_(4 / hidden**0.5)
        self.bias = torch.randn(vocab, dtype=dtype, device=device)
        self.target = torch.randint(vocab, (tokens,), device=device)
        self.target[1::3] = -100

    def log_probs(self, rows=slice(None), *, options=INVARIANT, needs_grad=False, bias=False, **settings):
        """Those of some rows, and other sums: beside a loss whose gradients may be computed in the forward, if needed.

        A token loss and label smoothing have theirs of them.
        """
        x, weight = (each.detach().clone().requires_grad_(needs_grad) for each in (self.x[rows], self.weight))
        detached, reduction = (OUTPUTS[:3], "mean") if needs_grad else ((), "none")
        loss, *found = linear_cross_entropy(
            x, weight, self.target[rows], linear_bias=self.bias if bias else None, reduction=reduction,
            outputs=OUTPUTS, detached=detached, options=options, **settings,
        )  # fmt: skip
        if reduction == "none":
            assert torch.equal(loss, -found[0])
        return torch.stack(found, 1).detach()


@pytest.fixture(params=range(3))
def batch(request, device):
    dtypes = [torch.float64, torch.float32, torch.bfloat16] if device == "cpu" else [torch.bfloat16] * 3
    on_cuda = device != "cpu"
    if on_cuda:
        torch.mm(*torch.zeros(2, 8, 8, dtype=torch.bfloat16, device=device))  # PyTorch loads cuBLASLt.
        if cublaslt.loaded() is None:
            pytest.skip("needs cuBLASLt of CUDA 12 or later")
    size = SIZES["cuda" if on_cuda else "cpu"][request.param]
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield Batch(device, dtypes[request.param], size, tokens=4096 if on_cuda else 210)
    torch.set_num_threads(threads)


@pytest.mark.parametrize("settings", [{}, {"bias": True}, {"softcap": 5.0, "logit_scale": -1.5}], ids=str)
def test_any_batch(batch, settings):
    """Fewer tokens, at other places, in memory that is laid out in another way, in chunks, and with gradients."""
    expected, tokens = batch.log_probs(**settings), len(batch.x)
    alone = [slice(row, row + 1) for row in (*range(0, 60, 3), tokens - 1)]
    for rows in (*alone, slice(5, 12), slice(37, 137), slice(1, None, 2)):
        assert torch.equal(batch.log_probs(rows, **settings), expected[rows])
    assert torch.equal(batch.log_probs(options=replace(INVARIANT, chunk_rows=59), **settings), expected)
    assert torch.equal(batch.log_probs(options=replace(INVARIANT, ignored_rows="compute"), **settings), expected)
    for strategy in STRATEGIES:
        options = replace(INVARIANT, strategy=strategy)
        assert torch.equal(batch.log_probs(options=options, needs_grad=True, **settings), expected)
        assert torch.equal(batch.log_probs(slice(5, 12), options=options, needs_grad=True, **settings), expected[5:12])


def test_layout_of_the_input(batch):
    """In memory column by column, and where no row starts at a multiple of 16 bytes."""
    expected = batch.log_probs()
    wide = torch.empty(len(batch.x), batch.x.shape[1] + 1, dtype=batch.x.dtype, device=batch.x.device)
    wide[:, 1:] = batch.x
    for x in (batch.x.t().contiguous().t(), wide[:, 1:]):
        found = linear_cross_entropy(x, batch.weight, batch.target, outputs=("log_prob",), options=INVARIANT)[1]
        assert torch.equal(found, expected[:, 0])


def test_a_sum_of_linears(batch):
    """An adapter beside the head."""
    x, weight = batch.x[:, :8].contiguous(), batch.weight[:, :8].contiguous()
    expected = batch.log_probs(terms=[(x, weight)])
    logits = batch.x.double() @ batch.weight.double().t() + x.double() @ weight.double().t()
    exact = logits.log_softmax(1).gather(1, batch.target.clamp(min=0)[:, None])[:, 0]
    exact[batch.target < 0] = 0
    assert error(expected[:, 0], exact) < 4 * torch.finfo(batch.x.dtype).eps
    assert torch.equal(batch.log_probs(slice(5, 12), terms=[(x[5:12], weight)]), expected[5:12])


@pytest.mark.parametrize(
    ("changes", "options", "reason"),
    [
        ({"dtype": torch.float32}, {}, "on CUDA it needs bfloat16 or float16, but input is torch.float32"),
        ({"rank": 20}, {}, r"of 8, but the hidden sizes of input are \[4096, 20\]"),
        ({"teacher": 64, "teacher_input": Spec((8192, 64), torch.float32, CUDA)}, {}, "teacher_input is torch.float32"),
        ({"teacher": 20}, {}, r"sizes of teacher_input are \[20\]"),
        ({}, {"row_kernels": "torch"}, "on CUDA it needs Triton"),
        ({"device": "xpu"}, {}, "runs on CUDA and on a CPU, but the input is on 'xpu'"),
    ],
    ids=str,
)
def test_what_cannot_be(changes, options, reason):
    with pytest.raises(ValueError, match=f"batch_invariant=True: .*{reason}"):
        choose(a_call(**changes), replace(INVARIANT, **options), replace(H200, kind=changes.get("device", "cuda")))


@pytest.mark.parametrize(
    ("version", "has_it"), [("12.8", True), ("13.2", True), ("11.8", False), ("14.0", False), (None, False)], ids=str
)
def test_without_a_known_cublaslt_the_plan_refuses(version, has_it, monkeypatch):
    """As torch for CUDA 11 or ROCm; for a device that is not there, plans are made all the same."""
    monkeypatch.setattr(torch.version, "cuda", version)
    assert choose(a_call(), INVARIANT, H200).batch_invariant
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(Device, "of", lambda device: H200)
    if has_it:
        assert choose(a_call(), INVARIANT, H200).batch_invariant
    else:
        with pytest.raises(ValueError, match="batch_invariant=True: .* needs NVIDIA's cuBLASLt of CUDA 12 or 13"):
            choose(a_call(), INVARIANT, H200)


@pytest.mark.parametrize(("batch", "kind"), list(enumerate(KINDS)), indirect=["batch"])
def test_divergences(batch, kind):
    """Of a token and its teacher: alone, in a part, in chunks, beside ignored rows, and where gradients are made."""
    # On a CPU, matmuls in bfloat16 take long.
    dtype, tokens = (batch.x.dtype, 4096) if batch.x.is_cuda else (torch.float32, 34)
    x, weight = (tensor.to(dtype, copy=True).requires_grad_() for tensor in (batch.x[:tokens], batch.weight))
    teacher_x, teacher_weight = (tensor.detach().flip(0) for tensor in (x, weight))

    def found(rows, *, reduction="none", **options):
        of = x[rows], weight, teacher_x[rows], teacher_weight, batch.target[:tokens][rows]
        chosen = replace(INVARIANT, **options)
        return linear_kl_divergence(*of, divergence=kind, temperature=1.3, reduction=reduction, options=chosen)

    expected = found(slice(None)).detach()
    assert expected[0] > 0 and expected[1] == 0
    assert torch.equal(found(slice(1, None, 2)), expected[1::2])
    assert torch.equal(found(slice(None), chunk_rows=13), expected)
    assert torch.equal(found(slice(None), ignored_rows="compute"), expected)
    for row, reduction in zip((0, *range(0, 34, 3)), ("sum", *["none"] * 12), strict=True):
        assert torch.equal(found(slice(row, row + 1), reduction=reduction).sum(), expected[row])
    with_gradients = torch.autograd.grad(found(slice(0, 1), reduction="sum"), (x, weight))
    right = torch.autograd.grad(found(slice(0, 1), reduction="sum", batch_invariant=False), (x, weight))
    torch.testing.assert_close(with_gradients, right)


# The comparison at the first use on a device, of a library that is not there.


class OtherBits(StandIn):
    """In place of cuBLASLt: an algorithm that adds in another order for some numbers of rows."""

    candidates = ("algorithm",)
    others: tuple[int, ...] = ()

    def run(self, matmul, algorithm, *, alpha=1.0):
        super().run(matmul, algorithm, alpha=alpha)
        if matmul.out.shape[0] in self.others:
            matmul.out.mul_(1 + 2**-6)
        return True


@pytest.fixture
def stand_in(monkeypatch):
    take_for_cublaslt(OtherBits, monkeypatch)
    for module, name, value in (
        (algorithms, "_are_invariant", {}), (cublaslt, "loaded", lambda: True),
        (torch.cuda, "get_device_name", lambda device: "a GPU"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)
    return OtherBits


def _logits(tokens, hidden=16, columns=24, dtype=torch.bfloat16):
    x, weight = torch.randn(tokens, hidden, dtype=dtype), torch.randn(columns, hidden, dtype=dtype)
    algorithms._run_chosen_for_any_rows(Matmul("logits", torch.empty(tokens, columns, dtype=dtype), x, weight.t()))


@pytest.mark.parametrize("others", [(1,), (2048,)])
def test_other_bits_are_an_error(stand_in, others, monkeypatch):
    """Each time; while a graph is captured, nothing can be compared."""
    monkeypatch.setattr(stand_in, "others", others)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        _logits(3)
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match="on a GPU, cuBLASLt .* 24 logits, hidden size 16, other bits among 2048"
        ):
            _logits(3)
