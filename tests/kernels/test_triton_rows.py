"""What only Triton's kernels have: blocks of many sizes, rows divided among programs, divergences, and others.

On a GPU and, in a process of its own, in Triton's interpreter. The rows' results in general: test_row_kernels.
"""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="needs Triton")

from interpreted import DEVICE, INTERPRETED, prepare_row_kernels
from reference import error
from test_pointwise import FUNCTIONS
from test_row_kernels import BF16, FP16, FP32, Backend, Exact, Rows, check_gradient, check_one_pass, logits
from thunder_flce.device import Device
from thunder_flce.engine import row_loss
from thunder_flce.engine.kernels import torch_divergence, triton_rows
from thunder_flce.engine.kernels.interface import LabelTerm, RowStatistics
from thunder_flce.engine.kernels.torch_rows import TorchRowKernels
from thunder_flce.engine.kernels.triton_divergence import divergence_
from thunder_flce.engine.kernels.triton_logits import logits_
from thunder_flce.engine.kernels.triton_tokens import kernel_for
from thunder_flce.engine.row_loss import RowResults
from thunder_flce.operation.divergence import KINDS, Divergence
from thunder_flce.operation.loss import LogitMap, Loss
from thunder_flce.token_losses import token_loss_of

pytestmark = [] if INTERPRETED else pytest.mark.gpu
MAPS = [LogitMap(), LogitMap(scale=0.5), LogitMap(scale=-2.0, softcap=5.0)]


@pytest.fixture(autouse=INTERPRETED)
def interpreter(monkeypatch):
    prepare_row_kernels(monkeypatch)


TRITON = Backend("triton", DEVICE)
# Every choice of a block, with and without a rest; smaller sizes are in test_row_kernels.
SIZES = [(2048, MAPS[2], FP32), (4099, MAPS[2], FP16), (16384, MAPS[0], FP32), (17001, MAPS[2], BF16)]
SIZES += [(57344, MAPS[1], FP16), (81921, MAPS[0], BF16)]
# On a GPU, rows are divided from 160 KiB on.
SIZES += [] if INTERPRETED else [(v, MAPS[0], BF16) for v in (81_920, 300_007)]


@pytest.mark.parametrize(("vocab", "logit_map", "dtype"), SIZES, ids=str)
def test_one_pass(vocab, logit_map, dtype):
    check_one_pass(TRITON, Rows(TRITON, 3, vocab, dtype, logit_map, masked=False, terms=()))


@pytest.mark.parametrize(
    ("vocab", "logit_map", "dtype"), [(1280, MAPS[2], BF16), (1281, MAPS[0], FP16), (1999, MAPS[2], FP32)], ids=str
)
def test_rows_divided_among_programs(vocab, logit_map, dtype, monkeypatch):
    """Into three parts, of full blocks and of others. What each program leaves for the others is right, too.

    In one row all logits are below those of absent parts, which are 0, in one all of a part are -inf, and in one
    a part's maximum and the sum of its others are both 0.
    """
    case = Rows(TRITON, 5, vocab, dtype, logit_map, masked=False, terms=())
    z = case.z
    z[0] -= 60
    z[1, :1000] = -math.inf
    z[2, 1:1000] = -1000 / logit_map.scale
    z[2, 0] = 0
    case.exact = Exact(z.double(), logit_map)
    monkeypatch.setattr(triton_rows, "_LARGEST_ROW_BYTES", 0)
    monkeypatch.setattr(triton_rows, "_LARGEST_PART_BYTES", vocab * dtype.itemsize // 2)
    monkeypatch.setattr(triton_rows, "_PART_BLOCK", triton_rows._Block(math.inf, 256, 64, programs=24))
    parts = triton_rows._parts(z.stride(0), dtype.itemsize, Device.of(z.device))
    assert (parts["PARTS"], parts["SLOTS"]) == (3, 4)
    exchange = _Exchange(logit_map(z.float()).split(parts["PART"], 1))
    monkeypatch.setattr(triton_rows, "_exchange", exchange)
    check_one_pass(TRITON, case)
    exchange.check()


class _Exchange:
    """Stands in for `triton_rows._exchange`. In the interpreter, what programs leave for each other is there before."""

    def __init__(self, parts):
        self._parts = parts

    def __call__(self, rows, slots, device):
        self._expected = torch.zeros(rows, slots, 2, dtype=torch.float32, device=device)
        for number, part in enumerate(self._parts):
            self._expected[:, number, 1] = part.amax(1)
            others = (part - part.amax(1, keepdim=True)).double().exp().sum(1).sub(1).nan_to_num(0)
            self._expected[:, number, 0] = -others
        self._memory = torch.zeros(1 + rows * slots, dtype=torch.int64, device=device)
        if INTERPRETED:
            self._memory[1:] = self._expected.view(torch.int64).flatten()
        return self._memory

    def check(self):
        """What they have left for each other is right."""
        rows, count = len(self._expected), len(self._parts)
        assert self._memory[0] == count * rows
        assert bool((self._memory[1:].view(rows, -1)[:, :count] != 0).all())
        statistics = self._memory[1:].view(torch.float32).view_as(self._expected)
        torch.testing.assert_close(statistics, self._expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("rows", "vocab", "strides", "programs", "dtype", "logit_map"), [
    (7, 1000, (1000,), 1, BF16, MAPS[0]),
    (66, 1030, (1088,), 2, FP16, MAPS[1]),
    (24, 2500, (2560,), 1, FP32, MAPS[2]),
    (130, 40, (40,), 10_000, BF16, MAPS[2]),
    # Not in place, in rows that are longer or shorter.
    (5, 41, (64, 1088), 1, FP32, MAPS[0]),
    (5, 41, (1088, 64), 1, FP32, MAPS[0]),
], ids=str)  # fmt: skip
def test_gradient(rows, vocab, strides, programs, logit_map, dtype, monkeypatch):
    """Whatever divides rows and columns among programs; what lies behind the last row is left alone."""
    monkeypatch.setattr(triton_rows, "_SUMS_PROGRAMS", programs)
    case = Rows(TRITON, rows, vocab, dtype, logit_map)
    z, target = case.z, case.target.clone()
    target[::3] = -1
    for column_sums in (True,) if len(strides) == 1 else (False, True):
        memory = [torch.full((rows + 3, stride), 7.0, dtype=dtype, device=DEVICE) for stride in strides]
        case.z, out = memory[0][:rows, :vocab], memory[-1][:rows, :vocab]
        case.z[:] = z
        written = case.z if len(strides) == 1 else out
        check_gradient(TRITON, case, written, target, column_sums=column_sums, tolerance=1e-6)
        assert (memory[-1][rows:] == 7).all()


def test_rows_that_are_not_aligned_are_refused():
    z = torch.zeros(2, 33, device=DEVICE)
    with pytest.raises(ValueError, match="the stride of rows must be a multiple of 8, but is 33"):
        TRITON.kernels(LogitMap()).statistics(z)


@pytest.mark.parametrize("with_labels", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("vocab", "dtypes", "in_place"),
    [(33, (FP32, BF16), False), (2048, (BF16, BF16), True), (16385, (FP16, FP32), True)],
    ids=str,
)
def test_divergences(kind, vocab, dtypes, in_place, with_labels):
    """With and without gradients; one of the student's logits is -inf, and one of the teacher's where it may be.

    With labels, one label's probability is 1 but for the last digits of a float32.
    """
    student, teacher = (Rows(TRITON, 3, vocab, dtype, LogitMap(), masked=False).z for dtype in dtypes)
    divergence = Divergence(kind=kind, beta=0.3, temperature=1.7)
    if kind not in ("forward", "cross_entropy"):
        student[1, 2] = -math.inf
    if kind != "reverse":
        teacher[1, 3] = -math.inf
    factors = torch.tensor([1.0, -0.3, 0.0], device=DEVICE) * vocab
    exact, exact_teacher = student.double(), teacher.double()
    labels = exact_labels = None
    if with_labels:
        target, label_factors = torch.tensor([vocab - 1, 5, 0], device=DEVICE), factors.flip(0) + 0.5
        labels = LabelTerm(target, TRITON.kernels(LogitMap()).statistics(student)[0], label_factors)
        exact_statistics = TorchRowKernels().statistics(exact)[0]
        exact_labels = LabelTerm(target, exact_statistics, label_factors.double())
    expected = torch_divergence.divergence_(
        exact, exact_teacher, divergence, factors=factors.double(), out=exact, labels=exact_labels
    )
    loss_only = divergence_(student, teacher, divergence, factors=None, out=student)
    out = student if in_place else logits(3, vocab, BF16, DEVICE)
    with_gradient = divergence_(student, teacher, divergence, factors=factors, out=out, labels=labels)
    assert error(with_gradient, expected) < 1e-5 and error(loss_only, expected) < 1e-5
    assert error(out, exact) < max(torch.finfo(out.dtype).eps, 1e-5)


@pytest.mark.parametrize("out_dtype", [None, FP32], ids=str)
@pytest.mark.parametrize("dtype", (FP16,) if INTERPRETED else (FP16, BF16), ids=str)
@pytest.mark.parametrize(("vocab", "hidden"), [(256, 64), (300, 33)])
def test_logits_of_rows_alone_and_among_others(vocab, hidden, dtype, out_dtype):
    """With a bias, and added to what is there; also of a weight and a bias that lie in memory in another way."""
    rows = 140
    shapes = (rows, hidden), (vocab, hidden), (vocab,)
    x, weight, bias = (torch.randn(*shape, device=DEVICE).to(dtype) for shape in shapes)
    transposed_weight, strided_bias = weight.t().contiguous().t(), torch.stack([bias, -bias], 1)[:, 0]

    def two_logits(x, weight=weight, bias=bias):
        out = logits(len(x), vocab, out_dtype or dtype, DEVICE)
        logits_(out, x, weight, bias=bias)
        first = out.clone()
        logits_(out, x, weight, accumulate=True)
        return torch.stack([first, out])

    expected, product = two_logits(x), x.double() @ weight.double().t()
    for computed, exact in zip(expected, (product + bias.double(), 2 * product + bias.double()), strict=True):
        assert error(computed, exact) < 1.5 * torch.finfo(computed.dtype).eps + 1e-6
    # The interpreter multiplies by NumPy, whose sums are in an order of their own.
    most = 2 * torch.finfo(expected.dtype).eps if INTERPRETED else 0
    assert error(two_logits(x, transposed_weight, strided_bias), expected) <= most
    for some in (slice(7, 8), slice(rows - 1, rows), slice(3, 100), slice(1, None, 2)):
        assert error(two_logits(x[some]), expected[:, some]) <= most


# Token losses, against PyTorch's operations, by which every device can compute them.

ROWS, V = 700, 50
LEFT_TO_PYTORCH = (
    "softplus", "nan_to_num", "pow", "where", "masks", "rare", "lerp", "activations", "integers", "logic", "casts",
    "numbers", "sums of masks", "dtypes",
)  # fmt: skip
"""Sums of masks are masks again; of other dtypes, and of powers such as x⁰, the kernels know nothing."""
IN_KERNELS = {
    "sigmoids": lambda p, e, a, *_: F.logsigmoid(p - a) * torch.sigmoid(e) + F.relu(p + 2) + torch.square(e),
    "fractions": lambda p, e, a, *_: 1 / p + a / (e + 1) - p.reciprocal() * torch.rsqrt(e + 2),
    "choices": lambda p, e, a, b, *_: torch.where((p < a) & ~(e >= b) | (p != p), p * e, e).masked_fill(p > -1, 0.5),
    "floats": lambda p, e, a, *_: (p > a).float() * p + (e.to(torch.float64) > 3).double() * e * torch.sign(a),
    "inputs": lambda p, e, a, o, m, k: torch.where(m, p * a, e) * k + p * m + torch.max(a, 2 - p) * o + e / k * (k > 2),
    "methods": lambda p, e, a, *_: p.where(p < a, e * 2) + (p > a).type_as(p) * e,
}


def kernel_of(function, inputs):
    """The kernel of a token loss; None if it is left to PyTorch."""
    return kernel_for(token_loss_of(function, inputs), tuple(tensor.dtype for tensor in inputs), LogitMap())


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_integers_are_compared_as_they_are(dtype):
    """float32 has no odd numbers from 2²⁴ on."""
    odd = 2**24 + 1
    inputs = [torch.tensor(numbers, device=DEVICE, dtype=dtype) for numbers in ([odd - 1, odd, -odd], [odd] * 3)]
    ones = torch.ones(3, device=DEVICE)
    for function in (lambda p, e, i, j: p * (i == j), lambda p, e, i, j: torch.where(i != odd, 0 * p, p)):
        value, _ = kernel_of(function, inputs)(RowStatistics(ones, ones), 0 * ones, {}, ones, inputs, columns=V)
        assert value.tolist() == [0, -2, 0]


def test_what_pytorch_makes_of_integers_and_masks_is_left_to_it():
    """Integers of a dtype remain that; a mask stays one, whatever fills it; and 300 is 44 beside numbers of 8 bits."""
    integers = [torch.tensor([44, -3], device=DEVICE)] * 2
    narrow = [torch.tensor([True, False], device=DEVICE), torch.tensor([44, -3], device=DEVICE, dtype=torch.int8)]
    for function in (
        lambda p, e, i, j: p * (i - j), lambda p, e, i, j: p * (i * 2), lambda p, e, i, j: p * i.clamp(max=5),
        lambda p, e, i, j: p * torch.where(e > 0, i, j), lambda p, e, i, j: p * i.masked_fill(e > 0, 0),
        lambda p, e, i, j: p * -i, lambda p, e, i, j: p * (i + True), lambda p, e, i, j: p * (i - (1 + (j > 0))),
    ):  # fmt: skip
        assert kernel_of(function, integers) is None
    for function in (
        lambda p, e, m, k: p * m.masked_fill(e > 0, 128), lambda p, e, m, k: p * (torch.where(m, m, p > 0) + m),
        lambda p, e, m, k: p * (m + True), lambda p, e, m, k: p * (1 + m).masked_fill(e > 0, 0.5),
        lambda p, e, m, k: p * (k == 300),
    ):  # fmt: skip
        assert kernel_of(function, narrow) is None
    for function in (
        lambda p, e, m, k: p * (1 + m) * (2 * m), lambda p, e, m, k: p * (k == -128) + torch.where(m, p, 1),
    ):  # fmt: skip
        assert kernel_of(function, narrow) is not None


def test_numbers_that_change_at_each_step_are_left_to_pytorch():
    """Each would be compiled; a loss with another operation is."""
    kernels = [kernel_of(lambda p, e, i, n=n: p * i - 10.0**n * e, [torch.ones(3)]) for n in range(1, 21)]
    assert [kernel is None for kernel in kernels] == [False] * 16 + [True] * 4
    assert kernel_of(lambda p, e, i: p * i + 0.1 * e, [torch.ones(3)]) is not None


@pytest.mark.parametrize("name", [*FUNCTIONS, *IN_KERNELS])
def test_functions(name):
    generator = torch.Generator().manual_seed(3)
    # Two numbers of each token, a mask and a positive integer.
    first, second, third = (torch.randn(ROWS, generator=generator) - 1 for _ in range(3))
    inputs = [tensor.to(DEVICE) for tensor in (first, second, third > -1, 1 + torch.arange(ROWS) % 5)]
    function = (FUNCTIONS | IN_KERNELS)[name]
    kernel = kernel_of(function, inputs)
    assert (kernel is None) == (name in LEFT_TO_PYTORCH)
    if kernel is None:
        return
    row_max, log_sum, entropy, upstream = torch.rand(4, ROWS, generator=generator).mul(3).to(DEVICE)
    upstream[::5] = 0
    z_y = row_max - 4 * torch.rand(ROWS, generator=generator).to(DEVICE)
    loss = Loss(token_loss=token_loss_of(function, inputs))
    call = SimpleNamespace(loss=loss, whole_vocab=V, row_dtype=torch.float32)
    sums = {"expected": -entropy, "shifted_sum": V * (-entropy - 1)}
    rows = RowResults(RowStatistics(row_max, log_sum), z_y, {name: sums[name] for name in loss.moments})
    expected, expected_coefficients = row_loss.token_loss(call, rows, inputs, upstream)
    value, coefficients = kernel(rows.statistics, z_y, rows.moments, upstream, inputs, columns=V)
    torch.testing.assert_close(value, expected, rtol=2e-5, atol=2e-5)
    for computed, right in zip(coefficients, expected_coefficients, strict=True):
        assert (computed is None) == (right is None)
        if right is not None:
            torch.testing.assert_close(computed, right, rtol=1e-4, atol=2e-5)
    assert not coefficients.one_hot[::5].any()
