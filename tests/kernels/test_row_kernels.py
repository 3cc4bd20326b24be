"""Every backend of the row kernels against float64, through the same tests; and which backend is chosen.

PyTorch's operations run here; nvFuser's definitions are run by `fusion_interpreter`, and Triton's kernels by Triton's
interpreter, in a process of its own. On a GPU, all three run themselves.
"""

import itertools
import math
import runpy
import sys
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from interpreted import INTERPRETED, needs_triton, prepare_row_kernels
from reference import error
from thunder_flce.device import ABSENT_DEVICE
from thunder_flce.engine.kernels import dispatch, interface, torch_rows
from thunder_flce.engine.kernels.interface import RowStatistics
from thunder_flce.operation.loss import LogitMap, RowCoefficients

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
MAPS = [LogitMap(), LogitMap(scale=-0.5), LogitMap(scale=2.0, softcap=5.0)]
# Each dtype and each map, and both ways to compute a softcap.
SETTINGS = [(BF16, MAPS[0]), (FP16, MAPS[1]), (BF16, MAPS[2]), (FP32, MAPS[2])]
TERMS = ("uniform", "entropy", "class_weight")
# The interpreter truncates to bfloat16, and its exp and tanh err by more.
SLACK = 4e-6 if INTERPRETED else 1e-6

NEEDS_NVFUSER = pytest.mark.skipif(not find_spec("nvfuser_direct"), reason="needs nvFuser's Python package")


class Backend(NamedTuple):
    """A backend of the row kernels; on a CPU, nvFuser and Triton are interpreted."""

    name: str
    device: str

    def kernels(self, logit_map):
        # New ones, which have no fusions yet.
        return dispatch.kernels_of.__wrapped__(self.name, logit_map)

    @property
    def tolerance(self):
        return 2e-6 if self == ("triton", "cuda") else 5e-6


GPU = pytest.mark.gpu
MARKS = {
    "triton-cpu": needs_triton, "torch-cpu": (), "nvfuser-cpu": NEEDS_NVFUSER,
    "torch-cuda": GPU, "triton-cuda": (GPU, needs_triton), "nvfuser-cuda": (GPU, NEEDS_NVFUSER),
}  # fmt: skip
PARAMETERS = {name: pytest.param(Backend(*name.split("-")), id=name, marks=marks) for name, marks in MARKS.items()}
TRITON_INTERPRETED = PARAMETERS.pop("triton-cpu")


@pytest.fixture(params=[TRITON_INTERPRETED] if INTERPRETED else PARAMETERS.values())
def backend(request, monkeypatch):
    if request.param == ("triton", "cpu"):
        prepare_row_kernels(monkeypatch)
    if request.param == ("nvfuser", "cpu"):
        import fusion_interpreter
        from thunder_flce.engine.kernels import nvfuser_rows

        monkeypatch.setattr(nvfuser_rows, "FusionDefinition", fusion_interpreter.FusionDefinition)
    return request.param


def logits(rows, vocab, dtype, device):
    """Uninitialised logits as a GPU's row kernels read them, with NaN between the rows."""
    z = interface.empty_logits(rows, vocab, dtype=dtype, device=device, device_type="cuda")
    interface.whole_rows(z).fill_(math.nan)
    return z


class Rows:
    """Products with NaN in the padding, and all that a gradient may take; the right results in float64.

    Column 1 is masked, if that is asked for: its probability is 0, and 0 · -inf must not show. Of long rows, more than
    half is: a part of a row that has only -inf.
    """

    def __init__(self, backend, rows, vocab, dtype, logit_map, *, masked=True, terms=TERMS):
        device, self.logit_map = backend.device, logit_map
        self.z = logits(rows, vocab, dtype, device)
        self.z[:] = 3 * torch.randn(rows, vocab, device=device)
        if masked and vocab > 2:
            columns = slice(1, 2) if vocab < 16384 else slice(0, 9000)
            self.z[:, columns] = -math.inf if logit_map.scale > 0 else math.inf
        self.target = torch.randint(min(2, vocab - 1), vocab, (rows,), device=device)
        # Of a size that makes gradients about 1.
        probability = vocab * torch.randn(rows, device=device)
        one_hot, uniform, entropy = torch.randn(3, rows, device=device)
        optional = uniform if "uniform" in terms else None, entropy if "entropy" in terms else None
        self.coefficients = RowCoefficients(probability, one_hot, *optional)
        self.class_weight = torch.rand(vocab, device=device) if "class_weight" in terms else None
        self.exact = Exact(self.z.double(), logit_map)

    @property
    def z_y(self):
        return self.z.gather(1, self.target[:, None])[:, 0]

    @property
    def statistics(self):
        return RowStatistics(self.exact.row_max.float(), self.exact.row_log_sum.float())

    def gradient(self, target=None):
        """In float64, with the one_hot term in the rows whose target is not -1."""
        vectors = (None if vector is None else vector.double()[:, None] for vector in self.coefficients)
        probability, one_hot, uniform, entropy = vectors
        exact = self.exact
        gradient = exact.p * probability
        if entropy is not None:
            gradient = gradient - torch.where(exact.p == 0, 0, exact.p * exact.shifted) * entropy
        if uniform is not None:
            gradient = gradient - uniform * (1 if self.class_weight is None else self.class_weight.double())
        if target is not None:
            column = target[:, None]
            gradient = gradient.scatter_add(1, column.clamp(min=0), torch.where(column < 0, 0, -one_hot))
        softcap = self.logit_map.softcap
        return gradient if softcap is None else gradient * (1 - (exact.u / softcap) ** 2)


class Exact:
    """The rows in float64, with a sum that leaves out the maximum's own 1."""

    def __init__(self, products, logit_map):
        scaled = logit_map.scale * products
        softcap = logit_map.softcap
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
@pytest.mark.parametrize(("rows", "vocab"), [*SIZES[2:], (2, 2100)])
def test_moments(backend, rows, vocab, dtype, logit_map):
    """One, and several in one call; with class weights where there is a scale of 2 or none."""
    terms = TERMS[: 2 if logit_map is MAPS[1] else 3]
    for names in [("expected",), ("weighted_sum",), ("weighted_sum", "expected")]:
        # A sum over masked columns is -inf.
        case = Rows(backend, rows, vocab, dtype, logit_map, masked="weighted_sum" not in names, terms=terms)
        p, shifted, weight = case.exact.p, case.exact.shifted, 1 if case.class_weight is None else case.class_weight
        expected = {"expected": torch.where(p == 0, 0, p * shifted).sum(1), "weighted_sum": (shifted * weight).sum(1)}
        moments = backend.kernels(logit_map).moments(case.z, case.statistics, case.class_weight, names)
        assert list(moments) == list(names)
        for name, moment in moments.items():
            assert moment.shape == (rows,) and moment.dtype == FP32
            # tanh of 16-bit logits errs by 1e-7, of which a single row of five columns averages nothing out.
            close(moment, expected[name], 1e-5)


def check_gradient(backend, case, out, target=None, *, column_sums, tolerance=4e-6):
    """Written to `out`, which may be the case's z."""
    before = case.z.clone()
    settings = {"class_weight": case.class_weight, "out": out, "column_sums": column_sums, "target": target}
    sums = backend.kernels(case.logit_map).gradient_(case.z, case.statistics, case.coefficients, **settings)
    expected = case.gradient(target)
    close(out, expected, max(torch.finfo(out.dtype).eps, tolerance))
    assert out is case.z or torch.equal(case.z, before)
    assert (sums is not None) == column_sums
    if sums is not None:
        # They are sums of what has not been rounded.
        assert sums.shape == expected.shape[1:] and sums.dtype == FP32 and error(sums, expected.sum(0)) < 5 * tolerance


DTYPES = [(BF16, BF16), (FP32, BF16), (FP16, FP16), (FP32, FP32)]
CHOICES = [terms for count in range(3) for terms in itertools.combinations(TERMS, count)] + [TERMS] * 5
GRADIENTS = [(terms, (n + n // 4) % 2 == 1, *DTYPES[n % 4], MAPS[n % 3]) for n, terms in enumerate(CHOICES)]


@pytest.mark.parametrize(("terms", "column_sums", "dtype", "out_dtype", "logit_map"), GRADIENTS, ids=str)
def test_gradient(backend, terms, column_sums, dtype, out_dtype, logit_map):
    """With and without the targets' entries, which some rows have elsewhere; in place and not."""
    sizes = [(5, 409, False), (3, 2, True), (1, 1000, True), (2, 4099, True)]
    for (rows, vocab, has_targets), in_place in itertools.product(sizes, {dtype == out_dtype, False}):
        case = Rows(backend, rows, vocab, dtype, logit_map, terms=terms)
        weight = None if case.class_weight is None else case.class_weight[case.target]
        entry = interface.gradient(case.z_y.float(), logit_map, case.statistics, case.coefficients, class_weight=weight)
        at_target = case.gradient(case.target).gather(1, case.target[:, None])[:, 0]
        # A difference of terms of about 1.
        torch.testing.assert_close(entry, at_target.float(), rtol=2e-5, atol=2e-5)
        out = case.z if in_place else logits(rows, vocab + 64, out_dtype, backend.device)[:, :vocab]
        target = case.target.clone() if has_targets else None
        if has_targets:
            target[1::2] = -1
        check_gradient(backend, case, out, target, column_sums=column_sums)


def check_one_pass(backend, case):
    """Statistics and gradient from one kernel, and the statistics alone."""
    kernels, z_y, eager = backend.kernels(case.logit_map), case.z_y, case.z.clone()
    alone, alone_z_y = kernels.statistics(case.z, case.target)
    together, together_z_y = kernels.one_pass_(case.z, case.target, case.coefficients)
    for row_max, row_log_sum in (alone, together):
        torch.testing.assert_close(row_max.double(), case.exact.row_max, rtol=2e-6, atol=1e-6)
        torch.testing.assert_close(row_log_sum.double(), case.exact.row_log_sum, rtol=0, atol=backend.tolerance)
    assert torch.equal(together_z_y.double(), z_y.double()) and torch.equal(alone_z_y, z_y)
    expected = case.gradient(case.target)
    slack, is_approximate = 5e-6 if backend.name == "nvfuser" else 1e-6, INTERPRETED or backend.name == "nvfuser"
    eps = max(torch.finfo(case.z.dtype).eps, slack, SLACK)
    torch_rows.TorchRowKernels(case.logit_map).one_pass_(eager, case.target, case.coefficients)
    # On a few numbers, PyTorch's own error may be small by chance.
    floor = eps if is_approximate else eps / (2 if case.z.dtype is FP32 else 4)
    assert error(case.z, expected) < max(1.5 * error(eager, expected), floor)
    # An error of the norm would not show a single wrong entry. The slope of a softcap is a small difference of two
    # large numbers.
    before_slope = 1 + (case.exact.p * case.coefficients.probability.double()[:, None]).abs()
    assert bool(((case.z - expected).abs() < 4 * eps * expected.abs() + slack * before_slope).all())


@pytest.mark.parametrize(("dtype", "logit_map"), SETTINGS, ids=str)
@pytest.mark.parametrize(("rows", "vocab"), [*SIZES, (2, 16447)])
def test_one_pass(backend, rows, vocab, dtype, logit_map):
    check_one_pass(backend, Rows(backend, rows, vocab, dtype, logit_map, terms=()))


@pytest.mark.parametrize("vocab", [40, 5000] if INTERPRETED else [40, 5000, 90_000])
def test_rows_that_are_not_finite(backend, vocab):
    """As torch.log_softmax: NaN for a row of -inf, with +inf, or with NaN; -inf alone is a logit like another."""
    z, ones = torch.randn(5, vocab, device=backend.device), torch.ones(5, device=backend.device)
    z[0], z[1, 3], z[2, 7], z[3, : vocab - 5] = -math.inf, math.inf, math.nan, -math.inf
    z, coefficients, kernels = z.bfloat16(), RowCoefficients(ones, ones), backend.kernels(LogitMap())
    at_once, exact = z.clone(), z.double().log_softmax(1)
    z_y, expected = z[:, -1].clone(), exact.exp()
    alone, _ = kernels.statistics(z)
    kernels.gradient_(z, alone, coefficients, out=z)
    torch.testing.assert_close(z.double(), expected, equal_nan=True, rtol=1e-2, atol=1e-6)
    target = torch.full_like(ones, vocab - 1, dtype=torch.int64)
    together, together_z_y = kernels.one_pass_(at_once, target, coefficients)
    expected[:, -1] -= 1
    torch.testing.assert_close(at_once.double(), expected, equal_nan=True, rtol=1e-2, atol=1e-6)
    for (row_max, row_log_sum), at_target in ((alone, z_y), (together, together_z_y)):
        log_prob = at_target - row_max - row_log_sum
        torch.testing.assert_close(log_prob.double(), exact[:, -1], equal_nan=True, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("dtype", "logit_map"), [SETTINGS[0], SETTINGS[1], (FP32, MAPS[0])], ids=str)
@pytest.mark.parametrize("vocab", [2, 100, 9001])
def test_a_column_that_dominates_its_row(backend, vocab, dtype, logit_map):
    """1 + x and 1 - x lose the digits of a small x; neither is in a loss or in a target's gradient."""
    device = backend.device
    margins = torch.tensor([3.0, 20.0, 30.0, 60.0, 20.0, 20.0], device=device)
    case = Rows(backend, 6, vocab, dtype, logit_map, masked=False, terms=())
    case.z.mul_(0.1)
    columns = torch.tensor([vocab - 1, 0, vocab // 2, vocab - 1, 1, 0], device=device)
    case.z.scatter_(1, columns[:, None], (margins / logit_map.scale).to(dtype)[:, None])
    # The last two rows' targets are others.
    case.target = torch.where(torch.arange(6, device=device) < 4, columns, 1 - columns)
    exact, kernels = Exact(case.z.double(), logit_map), backend.kernels(logit_map)
    one_hot = torch.rand(6, device=device) + 0.5
    coefficients = RowCoefficients(one_hot, one_hot)
    tolerance = {"rtol": 2e-5 if dtype != FP32 else 5e-6, "atol": 0}
    alone, z_y = kernels.statistics(case.z, case.target)
    entry = interface.gradient(z_y.float(), logit_map, alone, coefficients)
    together, _ = kernels.one_pass_(case.z, case.target, coefficients)
    expected = exact.log_p.gather(1, case.target[:, None])[:, 0]
    for row_max, row_log_sum in (alone, together):
        log_prob = logit_map(z_y.float()) - row_max - row_log_sum
        torch.testing.assert_close(row_log_sum.double(), exact.row_log_sum, **tolerance)
        torch.testing.assert_close(log_prob.double(), expected, **tolerance)
    gradient = expected.expm1() * one_hot.double()
    torch.testing.assert_close(entry.double(), gradient, **tolerance)
    smallest = torch.finfo(dtype).smallest_normal
    torch.testing.assert_close(case.z_y.double(), gradient, rtol=max(torch.finfo(dtype).eps, 5e-6), atol=smallest)


@pytest.mark.skipif(INTERPRETED, reason="about PyTorch's operations")
def test_no_operation_copies_all_logits(monkeypatch):
    """On a CPU, some of PyTorch's convert 16-bit tensors to float32 and back as a whole."""
    monkeypatch.setattr(torch_rows, "THREAD_BYTES", 2**17)
    z, vector = torch.randn(64, 9001, dtype=BF16), torch.rand(64)
    with torch.autograd.profiler.profile(profile_memory=True) as profiler:
        torch_rows.TorchRowKernels().one_pass_(z, torch.arange(64), RowCoefficients(vector, vector))
    allocations = [event.nbytes() for event in profiler.kineto_results.events() if event.name() == "[memory]"]
    assert 0 < max(allocations) < z.nbytes / 2


@NEEDS_NVFUSER
def test_parts_of_a_row():
    """As few as fit in registers, each of a multiple of 16 bytes; the whole row where there are no such ones."""
    from thunder_flce.engine.kernels.nvfuser_rows import parts_of

    expected = {64: 1, 16384: 1, 32000: 2, 50304: 4, 128256: 8, 151936: 16, 256000: 16, 300032: 32, 128264: 1}
    assert {stride: parts_of(stride) for stride in expected} == expected


# What follows is about the dispatch.

CUDA = {"dtype": BF16, "device_type": "cuda"}
KERNELS = ("triton", "nvfuser")


@pytest.mark.parametrize(("changes", "logits"), [
    ({"device_type": "cpu"}, "bfloat16 on 'cpu'"), ({"dtype": torch.float64}, "float64 on 'cuda'"),
], ids=str)  # fmt: skip
def test_on_a_cpu_and_in_float64_there_is_only_pytorch(changes, logits, monkeypatch):
    monkeypatch.setattr(dispatch, "is_installed", lambda name: True)
    kind = {**CUDA, **changes}
    assert dispatch.backend("auto", **kind) == "torch" and dispatch.missing(**kind) is None
    for name in KERNELS:
        message = rf'row_kernels="{name}" runs on CUDA.*the logits are {logits}.*"auto" or "torch"'
        with pytest.raises(ValueError, match=message):
            dispatch.check_available(name, **kind)


def _needs(name, package):
    return {name: rf'row_kernels="{name}" needs the package {package}.*pip install.*, or choose row_kernels="auto"'}


NO_TRITON, NO_NVFUSER = _needs("triton", "triton"), _needs("nvfuser", "nvfuser_direct")
OLD_TRITON = {"triton": "does not run on this GPU: it needs Triton 3.5 or newer"}
OLD_GPU = dict.fromkeys(KERNELS, 'does not run on this GPU: .* 7.0 or newer, or choose row_kernels="auto"')
ON_AMD = {"nvfuser": "it needs a GPU by NVIDIA"}


@pytest.mark.parametrize(("installed", "hip_triton", "capability", "library", "refused"), [
    (KERNELS, None, (9, 0), "Triton", {}),
    (("triton",), None, (9, 0), "Triton", NO_NVFUSER),
    (("nvfuser",), None, (9, 0), "nvFuser", NO_TRITON),
    ((), None, (9, 0), "PyTorch", NO_TRITON | NO_NVFUSER),
    (KERNELS, None, (7, 0), "Triton", {}),
    (KERNELS, None, (6, 1), "PyTorch", OLD_GPU),
    # AMD's GPUs from a version of Triton on.
    (KERNELS, "3.4.0+git1", (9, 4), "PyTorch", OLD_TRITON | ON_AMD),
    (KERNELS, "3.5.1", (9, 4), "Triton", ON_AMD),
    (KERNELS, "4.0", (9, 4), "Triton", ON_AMD),
])  # fmt: skip
def test_the_fastest_that_runs(installed, hip_triton, capability, library, refused, monkeypatch):
    monkeypatch.setattr(dispatch, "is_installed", lambda name: name in (*installed, "torch"))
    monkeypatch.setattr(torch.version, "hip", hip_triton and "6.4")
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__=hip_triton))
    device = replace(ABSENT_DEVICE, capability=capability, is_hip=hip_triton is not None)
    monkeypatch.setattr(dispatch, "Device", SimpleNamespace(of=lambda _: device))
    assert dispatch.BACKENDS[dispatch.backend("auto", **CUDA)].library == library
    assert (dispatch.missing(**CUDA) is None) == (library == "Triton")
    for choice in {"auto", *dispatch.BACKENDS} - {*refused}:
        assert choice in ("auto", dispatch.backend(choice, **CUDA))
    for name, message in refused.items():
        with pytest.raises(ValueError, match=message):
            dispatch.check_available(name, **CUDA)
    if library != "Triton":
        assert dispatch.divergence_for(dtypes=[BF16], device_type="cuda").__module__.endswith("torch_divergence")


def test_on_windows(monkeypatch):
    """PyTorch brings no Triton there; what installs it has another name."""
    monkeypatch.setattr(sys, "platform", "win32")
    assert runpy.run_path(dispatch.__file__)["BACKENDS"]["triton"].install == "pip install triton-windows"
