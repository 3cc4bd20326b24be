"""Triton's kernels against float64, on a GPU and, in a process of its own, in Triton's interpreter."""

import math
import re
from types import SimpleNamespace

import pytest
import torch

from interpreted import DEVICE, INTERPRETED, needs_compiler, on_device, run_in_the_interpreter, take_loop_ends
from reference import error
from thunder_flce.execution import gradient_scaling
from thunder_flce.execution.row_kernels.interface import (
    LogitMap,
    LogitsBuffer,
    RowCoefficients,
    RowStatistics,
    SlabbedLogits,
)
from thunder_flce.execution.row_kernels.torch_rows import TorchRowKernels
from thunder_flce.execution.slabs import LogitsInSlabs
from thunder_flce.planning.plan import VocabLayout

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
MAPS = [LogitMap(), LogitMap(scale=0.5), LogitMap(scale=-2.0, softcap=5.0), LogitMap(softcap=30.0)]


@pytest.fixture(autouse=INTERPRETED)
def interpreter(monkeypatch):
    """It has no device library, from where float32 takes its exponential and hyperbolic tangent, runs one program after
    another, so that none may wait for the next, and takes no tensor of NumPy's for the end of a loop.
    """
    import triton.language as tl

    from thunder_flce.execution.row_kernels import triton_rows

    stand_in = SimpleNamespace(exp=lambda x: tl.exp(x), tanh=lambda x: 1 - 2 / (tl.exp(2 * x) + 1))
    monkeypatch.setattr(triton_rows, "libdevice", stand_in)
    monkeypatch.setattr(triton_rows, "_LARGEST_ROW_BYTES", 2**30)
    take_loop_ends(monkeypatch)


def _buffer(rows, vocab, dtype, fill=None):
    """Random products between padding that must not matter."""
    layout = VocabLayout.aligned(vocab)
    padded = torch.full((rows, layout.row_stride), float("nan"), dtype=dtype, device=DEVICE)
    padded[:, :vocab] = torch.randn(rows, vocab, device=DEVICE).mul_(4) if fill is None else fill
    return LogitsBuffer(padded, layout)


def _double(buffer):
    return LogitsBuffer(buffer.logits.double(), VocabLayout.contiguous(buffer.layout.vocab))


def _coefficients(rows, vocab):
    """Of a size that makes gradients about 1."""
    return RowCoefficients(vocab * torch.randn(rows, device=DEVICE), torch.randn(rows, device=DEVICE))


# Every choice of a block, with and without a rest.
SIZES = [
    *((vocab, logit_map) for vocab in (1, 5, 1000, 1024, 4099) for logit_map in MAPS),
    *((vocab, MAPS[0]) for vocab in (8, 2047, 2048, 16384, 57343, 57344)),
    *((vocab, MAPS[2]) for vocab in (17001, 70001)),
    # On a GPU, rows are divided from 160 KiB on.
    *((vocab, MAPS[0]) for vocab in ((81_921,) if INTERPRETED else (81_920, 81_921, 300_007))),
]


@on_device
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("vocab", "logit_map"), SIZES, ids=str)
def test_statistics_and_gradient(vocab, logit_map, dtype):
    _check_statistics_and_gradient(_buffer(3, vocab, dtype), logit_map)


def _check_statistics_and_gradient(buffer, logit_map, slabs=None):
    """slabs: `SlabbedLogits` that get the same logits and are computed on; None for the buffer itself."""
    from thunder_flce.execution.row_kernels import triton_rows

    (rows, vocab), dtype = buffer.logits.shape, buffer.logits.dtype
    coefficients = _coefficients(rows, vocab)
    exact = _double(buffer)
    products = exact.logits.clone()
    target = torch.randint(vocab, (rows,), device=DEVICE)
    kernels = TorchRowKernels(logit_map)
    as_double = RowCoefficients(*(None if c is None else c.double() for c in coefficients))
    reference, target_product = kernels.statistics_and_gradient(exact, target, as_double)
    eager = LogitsBuffer(buffer.logits.clone(), VocabLayout.contiguous(vocab))
    kernels.statistics_and_gradient(eager, target, coefficients)

    alone = triton_rows.statistics(buffer, logit_map)
    at_target = buffer.logits.gather(1, target[:, None]).squeeze(1)
    if slabs is None:
        together, product = triton_rows.statistics_and_gradient(buffer, target, coefficients, logit_map)
    else:
        for columns, of_slab in zip(slabs.columns, slabs.buffers, strict=True):
            of_slab.logits.copy_(buffer.logits[:, columns])
        together, product = triton_rows.statistics_and_gradient(slabs, target, coefficients, logit_map)
        buffer.logits.copy_(torch.cat([of_slab.logits for of_slab in slabs.buffers], 1))
    for statistics in (alone, together):
        for computed, expected in zip(statistics, reference, strict=True):
            torch.testing.assert_close(computed.double(), expected, rtol=2e-6, atol=5e-6 if INTERPRETED else 2e-6)
    assert torch.equal(product, at_target) and torch.equal(product.double(), target_product)
    # The interpreter truncates to bfloat16, and its exp and tanh err by more. An error of the norm alone would not show
    # a single wrong entry.
    eps = max(torch.finfo(dtype).eps, 4e-6 if INTERPRETED else 1e-6)
    own_error = error(eager.logits, exact.logits)
    # On a few numbers, PyTorch's own error may be small by chance.
    floor = eps if INTERPRETED else eps / (2 if dtype is torch.float32 else 4)
    assert error(buffer.logits, exact.logits) < max(1.5 * own_error, floor)
    # The slope of a softcap is a small difference of two large numbers.
    before_slope = 1 + (logit_map(products).softmax(1) * as_double.probability[:, None]).abs()
    assert bool(((buffer.logits - exact.logits).abs() < 4 * eps * exact.logits.abs() + 1e-6 * before_slope).all())


@on_device
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("logit_map", [MAPS[0], MAPS[2]], ids=str)
@pytest.mark.parametrize("vocab", [1280, 1281, 1999, 2048])
def test_rows_divided_among_programs(vocab, logit_map, dtype, monkeypatch):
    """Into three parts, of full blocks and of others. What each program leaves for the others is right, too.

    In one row all logits are below those of absent parts, which are 0, and in one all of a part are -inf.
    """
    from thunder_flce.execution.row_kernels import triton_rows

    buffer = _buffer(5, vocab, dtype)
    buffer.logits[0] -= 60
    buffer.logits[1, :1000] = float("-inf")
    monkeypatch.setattr(triton_rows, "_LARGEST_ROW_BYTES", 0)
    monkeypatch.setattr(triton_rows, "_LARGEST_PART_BYTES", vocab * dtype.itemsize // 2)
    monkeypatch.setattr(triton_rows, "_PART_BLOCK", triton_rows._Block(math.inf, 256, 2, registers=40))
    exchange = _Exchange(lambda parts: logit_map(buffer.logits.float()).split(parts.columns, 1), parts=3, slots=4)
    monkeypatch.setattr(triton_rows, "_exchange", exchange)
    _check_statistics_and_gradient(buffer, logit_map)
    exchange.check()


class _Exchange:
    """Stands in for `triton_rows._exchange`. In the interpreter, what programs leave for each other is there before."""

    def __init__(self, logits_of, *, parts, slots):
        self._logits_of, self._parts, self._slots = logits_of, parts, slots

    def __call__(self, rows, parts, device):
        assert (parts.count, parts.slots) == (self._parts, self._slots)
        self._right = torch.zeros(rows, parts.slots, 2, dtype=torch.float32, device=device)
        for number, part in enumerate(self._logits_of(parts)):
            self._right[:, number, 1] = part.amax(1)
            self._right[:, number, 0] = (part - part.amax(1, keepdim=True)).exp().sum(1).nan_to_num(0)
        self._memory = torch.zeros(1 + rows * parts.slots, dtype=torch.int64, device=device)
        if INTERPRETED:
            self._memory[1:] = self._right.view(torch.int64).flatten()
        return self._memory

    def check(self):
        """What they have left for each other is right."""
        assert self._memory[0] == self._parts * self._right.shape[0]
        left = self._memory[1:].view(torch.float32).view_as(self._right)
        torch.testing.assert_close(left, self._right, rtol=1e-5, atol=1e-5)


@on_device
@pytest.mark.parametrize(("dtype", "logit_map"), [(torch.bfloat16, MAPS[0]), (torch.float32, MAPS[2])], ids=str)
@pytest.mark.parametrize("vocab", [1280, 1283])
@pytest.mark.parametrize(("count", "room", "borrowed"), [(3, 8, 2), (4, 4, 2), (2, 8, 1)])
@pytest.mark.parametrize("parts_of_slab", [1, 2])
def test_rows_in_slabs(parts_of_slab, count, room, borrowed, vocab, logit_map, dtype, monkeypatch):
    """In memory that holds other things, too, of which nothing changes; fewer rows than there is room for."""
    from thunder_flce.execution.row_kernels import triton_rows

    layout = LogitsInSlabs(rows=6, vocab=vocab, count=count, row_room=room)
    assert layout.borrowed == borrowed
    last = VocabLayout.aligned(vocab - layout.columns[-1].start)
    largest = last.row_stride * dtype.itemsize
    monkeypatch.setattr(triton_rows, "_LARGEST_PART_BYTES", -(-largest // parts_of_slab))
    monkeypatch.setattr(triton_rows, "_PART_BLOCK", triton_rows._Block(math.inf, 256, 2, registers=40))
    memory = [
        torch.full((size,), 7, dtype=dtype, device=DEVICE)
        for size in (vocab * room, layout.own_elements(last.row_stride))
    ]
    slabs = SlabbedLogits.lay_out(layout, *memory, last).rows(slice(0, 5))
    buffer = _buffer(5, vocab, dtype)
    buffer.logits[0] -= 60
    buffer.logits[1, :1000] = float("-inf")

    def logits_of(parts):
        logits = logit_map(buffer.logits.float())
        return [part for columns in slabs.columns for part in logits[:, columns].split(parts.columns, 1)]

    parts = count * parts_of_slab
    exchange = _Exchange(logits_of, parts=parts, slots=2 ** (parts - 1).bit_length())
    monkeypatch.setattr(triton_rows, "_exchange", exchange)
    _check_statistics_and_gradient(buffer, logit_map, slabs)
    exchange.check()
    for of_slab in slabs.buffers:
        of_slab.padded[:] = 7
    assert all(bool((numbers == 7).all()) for numbers in memory)


@on_device
@pytest.mark.parametrize("vocab", [40, 5000, 90_000])
def test_rows_that_are_not_finite(vocab):
    """As torch.log_softmax: NaN for a row of -inf, with +inf, or with NaN; -inf alone is a logit like another."""
    from thunder_flce.execution.row_kernels import triton_rows

    logits = torch.randn(5, vocab, device=DEVICE)
    logits[0] = float("-inf")
    logits[1, 3] = float("inf")
    logits[2, 7] = float("nan")
    logits[3, :35] = float("-inf")
    logits[3, 8 : vocab - 5] = float("-inf")
    buffer = _buffer(5, vocab, torch.bfloat16, fill=logits)
    expected = buffer.logits.double().log_softmax(1)
    target = torch.full((5,), vocab - 1, device=DEVICE)
    ones = torch.ones(5, device=DEVICE)
    statistics, product = triton_rows.statistics_and_gradient(buffer, target, RowCoefficients(ones, ones), LogitMap())
    log_prob = product - statistics.row_max - statistics.row_log_sum
    torch.testing.assert_close(log_prob.double(), expected[:, -1], equal_nan=True, rtol=1e-5, atol=1e-5)
    gradient = expected.exp()
    gradient[:, -1] -= 1
    torch.testing.assert_close(buffer.logits.double(), gradient, equal_nan=True, rtol=1e-2, atol=1e-6)


@on_device
def test_large_offsets_keep_their_digits():
    from thunder_flce.execution.row_kernels import triton_rows

    logits = torch.randn(2, 3000, device=DEVICE).bfloat16().float()
    shifted = _buffer(2, 3000, torch.bfloat16, fill=logits + 8192)
    exact = _double(shifted)
    statistics = triton_rows.statistics(shifted, LogitMap())
    row_max, row_log_sum = TorchRowKernels().statistics(exact)
    assert torch.equal(statistics.row_max.double(), row_max)
    torch.testing.assert_close(statistics.row_log_sum.double(), row_log_sum, rtol=1e-6, atol=1e-6)


@on_device
@pytest.mark.parametrize("vocab", [1500, 9000, 20001, 70001, 100_003])
def test_targets_everywhere(vocab):
    """In many rows at a time, the target's entry is the one that is written last."""
    from thunder_flce.execution.row_kernels import triton_rows

    rows = 4 if INTERPRETED else 2000
    buffer, coefficients = _buffer(rows, vocab, torch.bfloat16), _coefficients(rows, vocab)
    target = torch.arange(rows, device=DEVICE) * (vocab - 1) // (rows - 1)
    exact = _double(buffer)
    as_double = RowCoefficients(*(None if c is None else c.double() for c in coefficients))
    TorchRowKernels().statistics_and_gradient(exact, target, as_double)
    triton_rows.statistics_and_gradient(buffer, target, coefficients, LogitMap())
    at_target = buffer.logits.gather(1, target[:, None]).double()
    torch.testing.assert_close(at_target, exact.logits.gather(1, target[:, None]), rtol=2**-7, atol=1e-5)


@on_device
@pytest.mark.parametrize(
    ("dtype", "logit_map"), [(torch.bfloat16, MAPS[0]), (torch.float16, MAPS[2]), (torch.float32, MAPS[3])], ids=str
)
@pytest.mark.parametrize("vocab", [500, 1000, 1024, 2001, 4096])
def test_gradient_of_short_rows(vocab, logit_map, dtype):
    from thunder_flce.execution.row_kernels import triton_rows
    from thunder_flce.execution.row_kernels.interface import SHORT_ROWS

    buffer = _buffer(5, vocab, dtype)
    assert buffer.layout.row_stride in SHORT_ROWS
    statistics = triton_rows.statistics(buffer, logit_map)
    probability = vocab * torch.randn(5, device=DEVICE)
    kernels, none = TorchRowKernels(logit_map), torch.zeros(5, device=DEVICE)
    exact, eager = _double(buffer), LogitsBuffer(buffer.logits.clone(), VocabLayout.contiguous(vocab))
    as_double = RowStatistics(*(vector.double() for vector in statistics))
    kernels.gradient(exact, as_double, RowCoefficients(probability.double(), none.double()), None, dtype=torch.float64)
    kernels.gradient(eager, statistics, RowCoefficients(probability, none), None, dtype=dtype)
    triton_rows.gradient(buffer, statistics, probability, logit_map)
    eps = max(torch.finfo(dtype).eps, 4e-6 if INTERPRETED else 1e-6)
    assert error(buffer.logits, exact.logits) < max(1.5 * error(eager.logits, exact.logits), eps)


@on_device
@pytest.mark.parametrize(
    ("dtype", "logit_map"), [(torch.bfloat16, MAPS[0]), (torch.float16, MAPS[1]), (torch.float32, MAPS[2])], ids=str
)
@pytest.mark.parametrize(
    ("rows", "vocab", "programs"), [(1, 5, 1), (7, 1000, 1), (130, 1030, 8), (64, 2500, 1), (200, 40, 10_000)]
)
def test_gradient_with_column_sums(rows, vocab, programs, logit_map, dtype, monkeypatch):
    """Whatever divides rows and columns among programs; what lies behind the last row is left alone."""
    from thunder_flce.execution.row_kernels import triton_rows

    monkeypatch.setattr(triton_rows, "_SUMS_PROGRAMS", programs)
    memory, probability = _buffer(rows + 3, vocab, dtype), vocab * torch.randn(rows, device=DEVICE)
    buffer = memory.rows(slice(0, rows))
    behind = memory.logits[rows:].clone()
    exact, kernels = _double(buffer), TorchRowKernels(logit_map)
    statistics = triton_rows.statistics(buffer, logit_map)
    coefficients = RowCoefficients(probability, torch.zeros_like(probability))
    as_double = RowCoefficients(*(None if c is None else c.double() for c in coefficients))
    of_double = kernels.statistics(exact)
    expected, sums = kernels.gradient(exact, of_double, as_double, None, dtype=torch.float64, column_sums=True)
    eager = LogitsBuffer(buffer.logits.clone(), VocabLayout.contiguous(vocab))
    _, eager_sums = kernels.gradient(eager, statistics, coefficients, None, dtype=dtype, column_sums=True)
    computed = triton_rows.gradient_with_column_sums(buffer, statistics, probability, logit_map)
    assert computed.shape == (vocab,) and computed.dtype == torch.float32
    eps = max(torch.finfo(dtype).eps, 4e-6 if INTERPRETED else 1e-6)
    assert error(buffer.logits, expected.logits) < max(1.5 * error(eager.logits, expected.logits), eps)
    # They are sums of what has not been rounded.
    assert error(computed, sums) < 1.5 * error(eager_sums, sums) + 4e-6
    assert torch.equal(memory.logits[rows:], behind)


@on_device
def test_no_rows():
    from thunder_flce.execution.row_kernels import triton_rows

    buffer, none = _buffer(0, 40, torch.bfloat16), torch.zeros(0, device=DEVICE)
    sums = triton_rows.gradient_with_column_sums(buffer, RowStatistics(none, none), none, LogitMap())
    assert torch.equal(sums, torch.zeros(40, device=DEVICE))
    statistics = triton_rows.statistics(buffer, LogitMap())
    again, product = triton_rows.statistics_and_gradient(buffer, none.long(), RowCoefficients(none, none), LogitMap())
    assert [vector.shape for vector in (*statistics, *again, product)] == [(0,)] * 5


@on_device
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("factor", [1.0, -0.75])
@pytest.mark.parametrize("size", [1, 64, 300])
def test_finished_gradients_are_multiplied(size, factor, dtype):
    """By two programs, 64 elements at a time; what lies behind them is left alone."""
    memory = torch.randn(size + 100, device=DEVICE).to(dtype)
    before = memory.clone()
    kernel = gradient_scaling._kernel()
    kernel[(2,)](memory, torch.tensor(factor, device=DEVICE), size, BLOCK=64, num_warps=1)
    expected = torch.cat([before[:size].double() * factor, before[size:].double()])
    torch.testing.assert_close(memory.double(), expected, rtol=torch.finfo(dtype).eps, atol=0)
    assert torch.equal(memory[size:], before[size:])


@on_device
def test_rows_that_are_not_aligned_are_refused():
    from thunder_flce.execution.row_kernels import triton_rows

    buffer = LogitsBuffer(torch.zeros(2, 33, device=DEVICE), VocabLayout.contiguous(33))
    with pytest.raises(ValueError, match="row_stride must be a multiple of 8, but is 33"):
        triton_rows.statistics(buffer, LogitMap())


@needs_compiler
@pytest.mark.parametrize("logit_map", [MAPS[0], MAPS[2]], ids=str)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_kernels_compile_for_a_gpu_that_is_not_there(dtype, logit_map):
    """The interpreter takes more than the compiler does."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from thunder_flce.execution.row_kernels import triton_rows

    both = triton_rows._statistics_and_gradient_kernel
    kernels = [
        *((triton_rows._statistics_kernel, block, 1) for block in triton_rows._STATISTICS_BLOCKS),
        *((both, block, 1) for block in triton_rows._GRADIENT_BLOCKS),
        *((both, triton_rows._PART_BLOCK, parts) for parts in (3, 15)),
        (both, triton_rows._PART_BLOCK, 6, 3),
        *((triton_rows._gradient_kernel, block, 1) for block in triton_rows._SHORT_BLOCKS),
        (triton_rows._gradient_with_column_sums_kernel, triton_rows._SUMS_BLOCK, 1),
    ]
    types = {
        "products": f"*{dtype}",
        "target_product": f"*{dtype}",
        "target": "*i64",
        "rows": "i32",
        "rows_each": "i32",
        "own_products": f"*{dtype}",
        "slab_elements": "i32",
        "exchange": "*i64",
    }
    for kernel, block, parts, *slabs in kernels:
        part = 2 * block.elements + 64
        vocab = block.elements - 63 if kernel is triton_rows._gradient_kernel else parts * part - 63
        constants = {"STRIDE": vocab + 63, "VOCAB": vocab, "SCALE": logit_map.scale, "SOFTCAP": logit_map.softcap}
        constants["BLOCK"] = block.elements
        if kernel is triton_rows._gradient_with_column_sums_kernel:
            constants["ROWS"] = triton_rows._SUMS_ROWS
        if kernel is both:
            (count,) = slabs or (1,)
            width = (parts // count) * part
            constants |= {"SLABS": count, "BORROWED": count - 1, "WIDTH": width, "PARTS": parts, "PART": part}
            constants |= {"STRIDE": vocab + 63 - (count - 1) * width, "SLOTS": triton.next_power_of_2(parts)}
        arguments = {name: types.get(name, "*fp32") for name in kernel.arg_names if name not in constants}
        signature = {**arguments, **dict.fromkeys(constants, "constexpr")}
        aligned = {(at,): [["tt.divisibility", 16]] for at, type in enumerate(arguments.values()) if type[0] == "*"}
        source = ASTSource(kernel, signature, constants, aligned)
        compiled = triton.compile(
            source, target=GPUTarget("cuda", 90, 32), options={"num_warps": block.warps, "maxnreg": block.registers}
        )
        ptx = compiled.asm["ptx"]
        if kernel is triton_rows._gradient_with_column_sums_kernel:
            # 16 bytes at a time, and nothing to exchange between threads.
            assert len(re.findall(r"ld\.global\S*\.v4\.b32", ptx)) >= triton_rows._SUMS_ROWS
            assert "shfl" not in ptx
            continue
        if kernel is triton_rows._gradient_kernel:
            assert re.search(r"ld\.global\S*\.v4\.b32", ptx) and "bar.sync" not in ptx
            continue
        # Rows are loaded 16 bytes at a time, the first time to stay in the cache; so they are stored.
        assert re.search(r"ld\.global\S*evict_last\S*\.v4\.b32", ptx)
        assert kernel is not both or re.search(r"st\.global\S*evict_first\S*\.v4\.b32", ptx)
        if kernel is both:
            # Who waits for other programs reads what they have written, not what it has read before.
            reads = [match.start() for match in re.finditer(r"ld\.volatile\.global", ptx)]
            assert len(reads) == (2 if parts > 1 else 0)
            if parts > 1:
                # It has left its own statistics before, and its warps need not wait for each other meanwhile. Which
                # part it is follows from when it started.
                assert ptx.index("exch.b64") < reads[0] and "bar.sync" not in ptx[reads[0] : reads[1]]
                assert "add.u64" in re.search(r"atom\S+", ptx)[0] and "%ctaid" not in ptx
            assert re.search(r"ld\.global\S*evict_first\S*\.v4\.b32", ptx)
            # The target's entry is written when all threads have written theirs.
            stores = [match.start() for match in re.finditer(r"st\.global", ptx)]
            assert stores[-2] < ptx.rindex("bar.sync") < stores[-1]


@needs_compiler
def test_in_the_interpreter():
    """The tests above without a GPU."""
    run_in_the_interpreter(__file__)
