"""Every backend of the row kernels against float64, through the same tests.

PyTorch's operations run here; nvFuser's definitions are run by `fusion_interpreter`, and Triton's kernels by Triton's
interpreter, in a process of its own. On a GPU, all three run themselves.
"""

import itertools
from functools import partial
from importlib.util import find_spec

import pytest
import torch

import fusion_interpreter
from interpreted import INTERPRETED, needs_compiler, prepare_row_kernels, run_in_the_interpreter
from reference import error
from thunder_flce.execution.layout import VocabLayout
from thunder_flce.execution.row_kernels import dispatch, interface
from thunder_flce.execution.row_kernels.interface import (
    LogitMap,
    LogitsBuffer,
    LogitsInBlocks,
    RowCoefficients,
    RowStatistics,
    RowWork,
)
from thunder_flce.execution.staged_logits import BlockLayout
from thunder_flce.operation.moments import MOMENTS, Moment

MAPS = [LogitMap(), LogitMap(scale=-0.5), LogitMap(scale=2.0, softcap=5.0)]
# Each dtype and each map, and both ways to compute a softcap.
SETTINGS = [(torch.bfloat16, MAPS[0]), (torch.float16, MAPS[1]), (torch.bfloat16, MAPS[2]), (torch.float32, MAPS[2])]
NEGATIVE_INFINITY = float("-inf")

ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
NEEDS_NVFUSER = pytest.mark.skipif(not find_spec("nvfuser_direct"), reason="needs nvFuser's Python package")
NEEDS_TRITON = pytest.mark.skipif(not find_spec("triton"), reason="needs Triton")
BACKENDS = (
    [pytest.param(("triton", "cpu"), id="triton-interpreted", marks=NEEDS_TRITON)]
    if INTERPRETED
    else [
        pytest.param(("torch", "cpu"), id="torch-cpu"),
        pytest.param(("nvfuser", "cpu"), id="nvfuser-interpreted", marks=NEEDS_NVFUSER),
        pytest.param(("torch", "cuda"), id="torch-cuda", marks=ON_GPU),
        pytest.param(("triton", "cuda"), id="triton-cuda", marks=[*ON_GPU, NEEDS_TRITON]),
        pytest.param(("nvfuser", "cuda"), id="nvfuser-cuda", marks=[*ON_GPU, NEEDS_NVFUSER]),
    ]
)


@pytest.fixture(params=BACKENDS)
def backend(request, monkeypatch):
    """A function from a `LogitMap` to row kernels, and the device that they run on."""
    name, device = request.param
    if name == "triton" and device == "cpu":
        prepare_row_kernels(monkeypatch)
    if name == "nvfuser" and device == "cpu":
        from thunder_flce.execution.row_kernels import nvfuser_rows

        monkeypatch.setattr(nvfuser_rows, "FusionDefinition", fusion_interpreter.FusionDefinition)
    return Backend(name, device)


class Backend:
    def __init__(self, name, device):
        self.name, self.device = name, device

    def kernels(self, logit_map):
        # Not by `kernels_for`, which knows of no interpreters; new ones, which have no fusions yet.
        return dispatch._kernels.__wrapped__(self.name, logit_map)

    def eps(self, dtype):
        """Triton's interpreter truncates to bfloat16, and its functions err by more than a GPU's."""
        return max(torch.finfo(dtype).eps, 5e-6)


class Rows:
    """Products with NaN in the padding, and all that a gradient may take; the right results in float64.

    Column 1 is masked, if that is asked for: its probability is 0, and 0 · -inf must not show. Of long rows, more than
    half is: a part of a row that has only -inf.
    """

    def __init__(self, backend, rows, vocab, dtype, logit_map, *, masked=True, given=(True, True, True)):
        device, self.logit_map = backend.device, logit_map
        layout = VocabLayout.aligned(vocab)
        padded = torch.full((rows, layout.row_stride), float("nan"), dtype=dtype, device=device)
        padded[:, :vocab] = 3 * torch.randn(rows, vocab, device=device)
        if masked and vocab > 2:
            columns = slice(1, 2) if vocab < 16384 else slice(0, 9000)
            padded[:, columns] = NEGATIVE_INFINITY if logit_map.scale > 0 else -NEGATIVE_INFINITY
        self.buffer = LogitsBuffer(padded, layout)
        self.target = torch.randint(min(2, vocab - 1), vocab, (rows,), device=device)
        uniform, entropy, class_weight = given
        # Of a size that makes gradients about 1.
        vectors = [vocab * torch.randn(rows, device=device), *torch.randn(3, rows, device=device)]
        self.coefficients = RowCoefficients(
            *vectors[:2], vectors[2] if uniform else None, vectors[3] if entropy else None
        )
        self.class_weight = torch.rand(vocab, device=device) if class_weight else None
        self.exact = Exact(self.buffer.logits.double(), logit_map)

    @property
    def statistics(self):
        return RowStatistics(self.exact.row_max.float(), self.exact.row_log_sum.float())

    def gradient(self, *, one_hot):
        """In float64, with or without the targets' term."""
        c = RowCoefficients(*(None if v is None else v.double()[:, None] for v in self.coefficients))
        exact = self.exact
        gradient = exact.p * c.probability
        if c.entropy is not None:
            gradient = gradient - torch.where(exact.p == 0, 0, exact.p * exact.shifted) * c.entropy
        if c.uniform is not None:
            gradient = gradient - c.uniform * (1 if self.class_weight is None else self.class_weight.double())
        if one_hot:
            gradient = gradient.scatter_add(1, self.target[:, None], -c.one_hot)
        softcap = self.logit_map.softcap
        return gradient if softcap is None else gradient * (1 - (exact.u / softcap) ** 2)


class Exact:
    """The rows in float64."""

    def __init__(self, products, logit_map):
        scaled = logit_map.scale * products
        softcap = logit_map.softcap
        self.products = products
        self.u = scaled if softcap is None else softcap * torch.tanh(scaled / softcap)
        self.row_max = self.u.amax(1)
        self.shifted = self.u - self.row_max[:, None]
        others = self.shifted.exp().scatter(1, self.u.argmax(1, keepdim=True), 0)
        self.row_log_sum = others.sum(1).log1p()
        self.log_p = self.shifted - self.row_log_sum[:, None]
        self.p = self.log_p.exp()


def close(computed, expected, eps):
    """As a whole and, so that no single wrong entry passes, entry by entry."""
    assert computed.isfinite().all() and error(computed, expected) < eps
    torch.testing.assert_close(computed.double(), expected, rtol=4 * eps, atol=4 * eps)


SIZES = [(3, 1), (1, 5), (6, 40), (5, 409), (1, 1000), (2, 1027)]


@pytest.mark.parametrize(("dtype", "logit_map"), SETTINGS, ids=str)
@pytest.mark.parametrize(("rows", "vocab"), [*SIZES, (2, 16447)])
def test_statistics(backend, rows, vocab, dtype, logit_map):
    case = Rows(backend, rows, vocab, dtype, logit_map)
    before = case.buffer.logits.clone()
    row_max, row_log_sum = backend.kernels(logit_map).statistics(case.buffer)
    assert row_max.dtype == row_log_sum.dtype == torch.float32
    torch.testing.assert_close(row_max.double(), case.exact.row_max, rtol=2e-6, atol=1e-6)
    torch.testing.assert_close(row_log_sum.double(), case.exact.row_log_sum, rtol=5e-6, atol=5e-6)
    assert torch.equal(case.buffer.logits, before)


@pytest.mark.parametrize(
    ("dtype", "logit_map", "class_weight"),
    [(*SETTINGS[0], True), (*SETTINGS[1], False), (*SETTINGS[2], False), (*SETTINGS[3], True)],
    ids=str,
)
@pytest.mark.parametrize(("rows", "vocab"), [*SIZES[2:], (2, 2100)])
def test_moments(backend, rows, vocab, dtype, logit_map, class_weight):
    """One, and all of them in one call."""
    for names in [("expected",), ("weighted_sum",), ("weighted_sum", "expected")]:
        # A sum over masked columns is -inf.
        masked = "weighted_sum" not in names
        case = Rows(backend, rows, vocab, dtype, logit_map, masked=masked, given=(True, True, class_weight))
        exact, kernels = case.exact, backend.kernels(logit_map)
        weight = 1 if case.class_weight is None else case.class_weight.double()
        expected = {
            "expected": torch.where(exact.p == 0, 0, exact.p * exact.shifted).sum(1),
            "weighted_sum": (exact.shifted * weight).sum(1),
        }
        moments = kernels.moments(case.buffer, case.statistics, case.class_weight, names)
        assert list(moments) == list(names)
        for name, moment in moments.items():
            assert moment.shape == (rows,) and moment.dtype == torch.float32
            # tanh of 16-bit logits errs by 1e-7, of which a single row of five columns averages nothing out.
            close(moment, expected[name], 1e-5)


def _total(shifted, probability, weight):
    return (0 - shifted) * -1


def _squares(shifted, probability, weight):
    return 2 * probability * (0.5 * probability) - (1 - 1.0) + 0 * weight


@pytest.mark.parametrize(("dtype", "logit_map"), SETTINGS, ids=str)
def test_a_further_moment_is_a_further_entry(backend, logit_map, dtype, monkeypatch):
    """Σ (u - m) with its infinity, and Σ p² without one."""
    monkeypatch.setitem(MOMENTS, "total", Moment(_total, keeps_infinity=True))
    monkeypatch.setitem(MOMENTS, "squares", Moment(_squares))
    for masked in (False, True):
        case = Rows(backend, 3, 1003, dtype, logit_map, masked=masked)
        names = ("squares", "total", "expected")
        moments = backend.kernels(logit_map).moments(case.buffer, case.statistics, case.class_weight, names)
        close(moments["squares"], (case.exact.p**2).sum(1), 1e-5)
        torch.testing.assert_close(moments["total"].double(), case.exact.shifted.sum(1), rtol=1e-5, atol=1e-5)
        assert bool(moments["total"].isinf().all()) == (masked and logit_map.softcap is None)


GIVEN = list(itertools.product([False, True], repeat=3))


DTYPES = [(torch.bfloat16,) * 2, (torch.float32, torch.bfloat16), (torch.float16,) * 2, (torch.float32,) * 2]
GRADIENTS = [(GIVEN[n % 8], n >= 8, *DTYPES[(n + n // 8) % 4], MAPS[n % 3]) for n in range(16)]
GRADIENTS += [((True, True, True), n % 2 == 1, *DTYPES[n % 4], MAPS[n // 2 % 3]) for n in range(6)]


@pytest.mark.parametrize(("given", "column_sums", "dtype", "out_dtype", "logit_map"), dict.fromkeys(GRADIENTS), ids=str)
def test_gradient(backend, column_sums, dtype, out_dtype, logit_map, given):
    """Of all terms that may be there; in place or in new memory; then the targets' entries."""
    # Of 70 rows, sums over the rows have two parts.
    for rows, vocab in [*(SIZES if all(given) else [(9, 1027)]), *([(70, 41)] if column_sums else [])]:
        case = Rows(backend, rows, vocab, dtype, logit_map, given=given)
        products, kernels = case.buffer.logits.clone(), backend.kernels(logit_map)
        result, sums = kernels.gradient(
            case.buffer,
            case.statistics,
            case.coefficients,
            case.class_weight,
            dtype=out_dtype,
            column_sums=column_sums,
        )
        eps = backend.eps(out_dtype)
        expected = case.gradient(one_hot=False)
        assert result.logits.dtype == out_dtype and result.layout == case.buffer.layout
        close(result.logits, expected, eps)
        if out_dtype == dtype:
            assert result is case.buffer
        else:
            assert torch.equal(case.buffer.logits, products)
        assert (sums is not None) == column_sums
        if sums is not None:
            # They are sums of what has not been rounded.
            assert sums.shape == (vocab,) and error(sums, expected.sum(0)) < 2e-5
        at_target = products.gather(1, case.target[:, None]).squeeze(1)
        weight = None if case.class_weight is None else case.class_weight[case.target]
        entry = kernels.target_gradient(at_target, case.statistics, case.coefficients, weight, dtype=out_dtype)
        assert entry.dtype == out_dtype and entry.shape == (rows,)
        close(entry, case.gradient(one_hot=True).gather(1, case.target[:, None]).squeeze(1), eps)


@pytest.mark.parametrize(("dtype", "logit_map"), SETTINGS, ids=str)
@pytest.mark.parametrize(("rows", "vocab"), SIZES)
def test_statistics_and_gradient(backend, rows, vocab, dtype, logit_map):
    case = Rows(backend, rows, vocab, dtype, logit_map, given=(False, False, False))
    z_target = case.buffer.logits.gather(1, case.target[:, None]).squeeze(1)
    kernels = backend.kernels(logit_map)
    statistics, product = kernels.statistics_and_gradient(case.buffer, case.target, case.coefficients)
    _check_one_pass(case, backend.eps(dtype), case.buffer.logits, statistics, product, z_target)


def _check_one_pass(case, eps, gradient, statistics, product, expected_product):
    torch.testing.assert_close(statistics.row_max.double(), case.exact.row_max, rtol=2e-6, atol=1e-6)
    torch.testing.assert_close(statistics.row_log_sum.double(), case.exact.row_log_sum, rtol=5e-6, atol=5e-6)
    assert torch.equal(product, expected_product)
    expected = case.gradient(one_hot=True)
    close(gradient, expected, eps)
    at = case.target[:, None]
    close(gradient.gather(1, at), expected.gather(1, at), 2 * eps)


@pytest.mark.parametrize(("dtype", "logit_map"), SETTINGS[::3], ids=str)
@pytest.mark.parametrize(("vocab", "count", "room"), [(1280, 3, 8), (1283, 4, 4), (1283, 2, 8)])
def test_vocabulary_blocks(backend, vocab, count, room, logit_map, dtype):
    """Of which each row's target is in one."""
    if backend.name == "triton" and backend.device == "cpu":
        pytest.skip("programs that wait for each other: see test_triton_rows")
    case = Rows(backend, 5, vocab, dtype, logit_map, given=(False, False, False))
    layout = BlockLayout(rows=6, vocab=vocab, count=count, row_room=room)
    last = VocabLayout.aligned(vocab - layout.columns[-1].start)
    sizes = (vocab * room, layout.own_elements(last.row_stride))
    memory = [torch.full((size,), 7, dtype=dtype, device=backend.device) for size in sizes]
    blocks = LogitsInBlocks.lay_out(layout, *memory, last).rows(slice(0, 5))
    for columns, block in zip(blocks.columns, blocks.buffers, strict=True):
        block.logits.copy_(case.buffer.logits[:, columns])
    z_target = case.buffer.logits.gather(1, case.target[:, None]).squeeze(1)
    kernels = backend.kernels(logit_map)
    statistics, product = kernels.statistics_and_gradient(blocks, case.target, case.coefficients)
    gradient = torch.cat([block.logits for block in blocks.buffers], 1)
    _check_one_pass(case, backend.eps(dtype), gradient, statistics, product, z_target)
    for block in blocks.buffers:
        block.padded[:] = 7
    assert all(bool((numbers == 7).all()) for numbers in memory)


def test_rows_that_are_not_finite(backend):
    """As torch.log_softmax: NaN for a row of -inf, with +inf, or with NaN; -inf alone is a logit like another."""
    vocab = 40
    logits = torch.randn(5, vocab, device=backend.device)
    logits[0] = NEGATIVE_INFINITY
    logits[1, 3] = float("inf")
    logits[2, 7] = float("nan")
    logits[3, :35] = NEGATIVE_INFINITY
    for together in (False, True):
        buffer = LogitsBuffer(logits.bfloat16(), VocabLayout.aligned(vocab))
        exact = buffer.logits.double().log_softmax(1)
        target = torch.full((5,), vocab - 1, device=backend.device)
        ones = torch.ones(5, device=backend.device)
        coefficients, kernels = RowCoefficients(ones, ones), backend.kernels(LogitMap())
        product = buffer.logits[:, -1].clone()
        expected = exact.exp()
        if together:
            statistics, product = kernels.statistics_and_gradient(buffer, target, coefficients)
            expected[:, -1] -= 1
        else:
            statistics = kernels.statistics(buffer)
            kernels.gradient(buffer, statistics, coefficients, None, dtype=torch.bfloat16)
        log_prob = product - statistics.row_max - statistics.row_log_sum
        torch.testing.assert_close(log_prob.double(), exact[:, -1], equal_nan=True, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(buffer.logits.double(), expected, equal_nan=True, rtol=1e-2, atol=1e-6)


def test_large_offsets_keep_their_digits(backend):
    logits = torch.randn(2, 3000, device=backend.device).bfloat16().float()
    buffer = LogitsBuffer((logits + 8192).bfloat16(), VocabLayout.aligned(3000))
    exact = Exact(buffer.logits.double(), LogitMap())
    statistics = backend.kernels(LogitMap()).statistics(buffer)
    assert torch.equal(statistics.row_max.double(), exact.row_max)
    torch.testing.assert_close(statistics.row_log_sum.double(), exact.row_log_sum, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("dtype", "logit_map"), [SETTINGS[0], SETTINGS[1], (torch.float32, MAPS[0])], ids=str)
@pytest.mark.parametrize("vocab", [2, 100, 5003])
def test_a_column_that_dominates_its_row(backend, vocab, dtype, logit_map):
    """1 + x and 1 - x lose the digits of a small x; neither is in a loss or in a target's gradient."""
    margins = torch.tensor([3.0, 20.0, 30.0, 60.0, 20.0, 20.0], device=backend.device)
    case = Rows(backend, 6, vocab, dtype, logit_map, masked=False, given=(False, False, False))
    case.buffer.logits.mul_(0.1)
    columns = torch.tensor([vocab - 1, 0, vocab // 2, vocab - 1, 1, 0], device=backend.device)
    case.buffer.logits.scatter_(1, columns[:, None], (margins / logit_map.scale).to(dtype)[:, None])
    # The last two rows' targets are others.
    case.target = torch.where(torch.arange(6, device=backend.device) < 4, columns, 1 - columns)
    exact, at, kernels = Exact(case.buffer.logits.double(), logit_map), case.target[:, None], backend.kernels(logit_map)
    one_hot = torch.rand(6, device=backend.device) + 0.5
    coefficients = RowCoefficients(one_hot, one_hot)
    tolerance = {"rtol": 2e-5 if dtype != torch.float32 else 5e-6, "atol": 0}
    found, z = kernels.statistics(case.buffer), case.buffer.logits.gather(1, at)[:, 0]
    entry = kernels.target_gradient(z, found, coefficients, None, dtype=torch.float32)
    together, _ = kernels.statistics_and_gradient(case.buffer, case.target, coefficients)
    expected = exact.log_p.gather(1, at)[:, 0]
    for row_max, row_log_sum in (found, together):
        log_prob = logit_map(z.float()) - row_max - row_log_sum
        torch.testing.assert_close(row_log_sum.double(), exact.row_log_sum, **tolerance)
        torch.testing.assert_close(log_prob.double(), expected, **tolerance)
    gradient = expected.expm1() * one_hot.double()
    torch.testing.assert_close(entry.double(), gradient, **tolerance)
    written, smallest = case.buffer.logits.gather(1, at)[:, 0].double(), torch.finfo(dtype).smallest_normal
    torch.testing.assert_close(written, gradient, rtol=max(torch.finfo(dtype).eps, 5e-6), atol=smallest)


@needs_compiler
def test_in_the_interpreter():
    """The tests above for Triton, without a GPU."""
    run_in_the_interpreter(__file__)


# What follows is about the dispatch.


def _work(method, **changes):
    layouts = () if method == "target_gradient" else (VocabLayout.aligned(1000),)
    return RowWork(method=method, layouts=layouts, **{"dtype": torch.bfloat16, **changes})


METHODS = [name for name in vars(interface.RowKernels) if not name.startswith("_") and name != "logit_map"]


@pytest.mark.parametrize(("name", "library"), [("triton", "Triton"), ("nvfuser", "nvFuser")])
def test_what_cannot_run_says_what_to_do(name, library, monkeypatch):
    monkeypatch.setattr(dispatch, "is_installed", lambda name: True)
    settings = {"dtype": torch.bfloat16, "device_type": "cuda"}
    dispatch.check_available(name, **settings)
    for changes, text in [
        ({"device_type": "cpu"}, "the logits are bfloat16 on 'cpu'"),
        ({"dtype": torch.float64}, "the logits are float64 on 'cuda'"),
    ]:
        with pytest.raises(ValueError, match=rf'row_kernels="{name}" runs on CUDA.*{text}.*"auto" or "torch"'):
            dispatch.kernels_for(name, **{**settings, **changes}, logit_map=LogitMap())
    monkeypatch.setattr(dispatch, "is_installed", lambda name: False)
    with pytest.raises(ValueError, match=rf'row_kernels="{name}" needs the package.*pip install.*row_kernels="auto"'):
        dispatch.check_available(name, **settings)


def test_choices_are_checked():
    with pytest.raises(ValueError, match="row_kernels must be one of 'auto', 'triton', 'nvfuser', 'torch', but is 'x'"):
        dispatch.check_available("x", dtype=torch.bfloat16, device_type="cuda")


@pytest.mark.parametrize("installed", [(), ("triton",), ("nvfuser",), ("triton", "nvfuser")], ids=str)
def test_auto_takes_the_fastest_that_is_there(installed, monkeypatch):
    """Each method from where `library` says."""
    there = (*installed, "torch")
    monkeypatch.setattr(dispatch, "is_installed", lambda name: name in there)
    monkeypatch.setattr(dispatch, "_kernels", lambda name, logit_map: name)
    assert dispatch.FASTEST == ("triton", "nvfuser", "torch")
    expected = next(name for name in dispatch.FASTEST if name in there)
    settings = {"dtype": torch.bfloat16, "device_type": "cuda"}
    for choice in ("auto", *there):
        name = expected if choice == "auto" else choice
        assert dispatch.kernels_for(choice, **settings, logit_map=LogitMap()) == name
        for method in METHODS:
            assert dispatch.library(choice, _work(method), "cuda") == dispatch.BACKENDS[name].library
    # On a CPU and for float64 there is only PyTorch.
    for method in METHODS:
        assert dispatch.library("auto", _work(method), "cpu") == "PyTorch"
        assert dispatch.library("auto", _work(method, dtype=torch.float64), "cuda") == "PyTorch"
    missing = None if "triton" in installed else dispatch.BACKENDS["triton"]
    assert dispatch.missing(**settings) == missing
    assert dispatch.missing(dtype=torch.bfloat16, device_type="cpu") is None
    assert dispatch.without_nvfuser(**settings) == ("torch" if expected == "nvfuser" else "auto")


def test_other_orders_are_heeded(monkeypatch):
    monkeypatch.setattr(dispatch, "is_installed", lambda name: True)
    for name in dispatch.BACKENDS:
        monkeypatch.setattr(dispatch, "FASTEST", (name, "torch"))
        assert dispatch.library("auto", _work("moments"), "cuda") == dispatch.BACKENDS[name].library


@pytest.mark.parametrize("library", ["Triton", "nvFuser", "PyTorch"])
def test_bytes_moved(library):
    """A read of the logits for what is summed over a row, and a write for each gradient."""
    logits = 3 * VocabLayout.aligned(1000).row_stride * 2
    one_pass = 7 / 3 if library == "Triton" else 3
    least = {
        "statistics": ({}, 1),
        "moments": ({"moments": ("expected",)}, 1),
        "gradient": ({"out_dtype": torch.bfloat16}, 2),
        "statistics_and_gradient": ({"out_dtype": torch.bfloat16}, one_pass),
        "target_gradient": ({"out_dtype": torch.bfloat16}, 0),
    }
    for method, (changes, passes) in least.items():
        moved = dispatch.bytes_moved(_work(method, **changes), 3, library)
        assert moved == pytest.approx(passes * logits, abs=1)


@NEEDS_NVFUSER
@pytest.mark.skipif(INTERPRETED, reason="about nvFuser")
@pytest.mark.parametrize(("vocab", "logit_map"), [(1000, MAPS[0]), (50257, MAPS[0]), (1027, MAPS[2])], ids=str)
def test_definitions_are_those_that_are_executed(vocab, logit_map, monkeypatch):
    """Once each, however often; of vocabulary blocks, those of the first and of the last."""
    from thunder_flce.execution.row_kernels import nvfuser_rows

    executed, define, real = [], nvfuser_rows.fusion, nvfuser_rows.FusionDefinition

    def fusion(*settings):
        executed.append(str(define(*settings)))
        with monkeypatch.context() as patch:
            patch.setattr(nvfuser_rows, "FusionDefinition", fusion_interpreter.FusionDefinition)
            return define(*settings)

    case = Rows(Backend("nvfuser", "cpu"), 2, vocab, torch.bfloat16, logit_map)
    buffer, weight, z = case.buffer, case.class_weight, torch.zeros(2, dtype=torch.bfloat16)
    plain, names = RowCoefficients(*case.coefficients[:2]), ("expected", "weighted_sum")
    settings = {"dtype": torch.float16, "column_sums": True}
    works = {
        "statistics": RowWork.of("statistics", buffer),
        "moments": RowWork.of("moments", buffer, class_weight=weight, names=names),
        "gradient": RowWork.of("gradient", buffer, case.coefficients, class_weight=weight, **settings),
        "target_gradient": RowWork.of("target_gradient", z, plain, dtype=torch.bfloat16),
        "statistics_and_gradient": RowWork.of("statistics_and_gradient", buffer, plain, dtype=torch.bfloat16),
    }
    expected = {name: list(map(str, dispatch.definitions(work, logit_map).values())) for name, work in works.items()}
    monkeypatch.setattr(nvfuser_rows, "fusion", fusion)
    for name, work in works.items():
        kernels = nvfuser_rows.NvFuserRowKernels(logit_map)
        calls = {
            "statistics": partial(kernels.statistics, buffer),
            "moments": partial(kernels.moments, buffer, case.statistics, weight, names),
            "gradient": partial(kernels.gradient, buffer, case.statistics, case.coefficients, weight, **settings),
            "target_gradient": partial(kernels.target_gradient, z, case.statistics, plain, None, dtype=torch.bfloat16),
            "statistics_and_gradient": partial(kernels.statistics_and_gradient, buffer, case.target, plain),
        }
        executed.clear()
        for _ in range(2):
            calls[name]()
        assert executed == expected[name], work
    assert nvfuser_rows.FusionDefinition is real and len(expected["statistics_and_gradient"]) == 3
