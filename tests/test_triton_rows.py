"""What only Triton's row kernels have: blocks of many sizes, rows divided among programs, and what they compile to.

On a GPU and, in a process of its own, in Triton's interpreter. Their results in general: test_row_kernels.
"""

import math
import re
from types import SimpleNamespace

import pytest
import torch

from interpreted import (
    DEVICE,
    INTERPRETED,
    needs_compiler,
    needs_triton,
    on_device,
    prepare_row_kernels,
    run_in_the_interpreter,
)
from reference import error
from thunder_flce.execution import gradient_scaling
from thunder_flce.execution.layout import VocabLayout
from thunder_flce.execution.row_kernels.interface import (
    LogitMap,
    LogitsBuffer,
    LogitsInBlocks,
    RowCoefficients,
)
from thunder_flce.execution.row_kernels.torch_rows import TorchRowKernels
from thunder_flce.execution.staged_logits import BlockLayout

MAPS = [LogitMap(), LogitMap(scale=0.5), LogitMap(scale=-2.0, softcap=5.0), LogitMap(softcap=30.0)]


@pytest.fixture(autouse=INTERPRETED)
def interpreter(monkeypatch):
    prepare_row_kernels(monkeypatch)


def _buffer(rows, vocab, dtype, fill=None):
    """Random products between padding that must not matter."""
    layout = VocabLayout.aligned(vocab)
    padded = torch.full((rows, layout.row_stride), float("nan"), dtype=dtype, device=DEVICE)
    padded[:, :vocab] = torch.randn(rows, vocab, device=DEVICE).mul_(4) if fill is None else fill
    return LogitsBuffer(padded, layout)


def _triton(logit_map=LogitMap()):  # noqa: B008
    from thunder_flce.execution.row_kernels.triton_rows import TritonRowKernels

    return TritonRowKernels(logit_map)


def _double(buffer):
    return LogitsBuffer(buffer.logits.double(), VocabLayout.contiguous(buffer.layout.vocab))


def _coefficients(rows, vocab):
    """Of a size that makes gradients about 1."""
    return RowCoefficients(vocab * torch.randn(rows, device=DEVICE), torch.randn(rows, device=DEVICE))


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Every choice of a block, with and without a rest; smaller sizes are in test_row_kernels.
SIZES = [(2047, MAPS[0], BF16), (2048, MAPS[2], FP32), (4099, MAPS[2], FP16), (16384, MAPS[0], FP32)]
SIZES += [(17001, MAPS[2], BF16), (57343, MAPS[1], FP16), (57344, MAPS[0], BF16)]
# On a GPU, rows are divided from 160 KiB on.
SIZES += [(v, MAPS[0], BF16) for v in ((81_921,) if INTERPRETED else (81_920, 81_921, 300_007))]


@on_device
@pytest.mark.parametrize(("vocab", "logit_map", "dtype"), SIZES, ids=str)
def test_statistics_and_gradient(vocab, logit_map, dtype):
    _check_statistics_and_gradient(_buffer(3, vocab, dtype), logit_map)


def _check_statistics_and_gradient(buffer, logit_map, blocks=None):
    """blocks: `LogitsInBlocks` that get the same logits and are computed on; None for the buffer itself."""
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

    triton = _triton(logit_map)
    alone = triton.statistics(buffer)
    at_target = buffer.logits.gather(1, target[:, None]).squeeze(1)
    if blocks is None:
        together, product = triton.statistics_and_gradient(buffer, target, coefficients)
    else:
        for columns, of_block in zip(blocks.columns, blocks.buffers, strict=True):
            of_block.logits.copy_(buffer.logits[:, columns])
        together, product = triton.statistics_and_gradient(blocks, target, coefficients)
        buffer.logits.copy_(torch.cat([of_block.logits for of_block in blocks.buffers], 1))
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
@pytest.mark.parametrize(
    ("vocab", "logit_map", "dtype"),
    [(1280, MAPS[2], BF16), (1281, MAPS[0], BF16), (1999, MAPS[2], FP32), (2048, MAPS[0], FP16)],
    ids=str,
)
def test_rows_divided_among_programs(vocab, logit_map, dtype, monkeypatch):
    """Into three parts, of full blocks and of others. What each program leaves for the others is right, too.

    In one row all logits are below those of absent parts, which are 0, in one all of a part are -inf, and in one
    a part's maximum and the sum of its others are both 0.
    """
    from thunder_flce.execution.row_kernels import triton_rows

    buffer = _buffer(5, vocab, dtype)
    buffer.logits[0] -= 60
    buffer.logits[1, :1000] = float("-inf")
    buffer.logits[2, 1:1000] = -1000 / logit_map.scale
    buffer.logits[2, 0] = 0
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
        assert (parts.total, parts.slots) == (self._parts, self._slots)
        self._right = torch.zeros(rows, parts.slots, 2, dtype=torch.float32, device=device)
        for number, part in enumerate(self._logits_of(parts)):
            self._right[:, number, 1] = part.amax(1)
            others = (part - part.amax(1, keepdim=True)).double().exp().sum(1).sub(1).nan_to_num(0)
            self._right[:, number, 0] = -others
        self._memory = torch.zeros(1 + rows * parts.slots, dtype=torch.int64, device=device)
        if INTERPRETED:
            self._memory[1:] = self._right.view(torch.int64).flatten()
        return self._memory

    def check(self):
        """What they have left for each other is right."""
        assert self._memory[0] == self._parts * self._right.shape[0]
        left = self._memory[1:].view(torch.float32).view_as(self._right)
        assert bool((self._memory[1:].view(len(left), -1)[:, : self._parts] != 0).all())
        torch.testing.assert_close(left, self._right, rtol=1e-5, atol=1e-5)


@on_device
@pytest.mark.parametrize(
    ("parts_each", "count", "room", "borrowed", "vocab", "dtype", "logit_map"),
    [
        (1, 3, 8, 2, 1280, BF16, MAPS[0]),
        (1, 4, 4, 2, 1283, FP32, MAPS[2]),
        (2, 2, 8, 1, 1283, BF16, MAPS[0]),
        (2, 4, 4, 2, 1280, FP16, MAPS[2]),
    ],
    ids=str,
)
def test_rows_in_blocks(parts_each, count, room, borrowed, vocab, logit_map, dtype, monkeypatch):
    """In memory that holds other things, too, of which nothing changes; fewer rows than there is room for."""
    from thunder_flce.execution.row_kernels import triton_rows

    layout = BlockLayout(rows=6, vocab=vocab, count=count, row_room=room)
    assert layout.borrowed == borrowed
    last = VocabLayout.aligned(vocab - layout.columns[-1].start)
    largest = last.row_stride * dtype.itemsize
    monkeypatch.setattr(triton_rows, "_LARGEST_PART_BYTES", -(-largest // parts_each))
    monkeypatch.setattr(triton_rows, "_PART_BLOCK", triton_rows._Block(math.inf, 256, 2, registers=40))
    memory = [
        torch.full((size,), 7, dtype=dtype, device=DEVICE)
        for size in (vocab * room, layout.own_elements(last.row_stride))
    ]
    blocks = LogitsInBlocks.lay_out(layout, *memory, last).rows(slice(0, 5))
    buffer = _buffer(5, vocab, dtype)
    buffer.logits[0] -= 60
    buffer.logits[1, :1000] = float("-inf")

    def logits_of(parts):
        logits = logit_map(buffer.logits.float())
        return [part for columns in blocks.columns for part in logits[:, columns].split(parts.columns, 1)]

    parts = count * parts_each
    exchange = _Exchange(logits_of, parts=parts, slots=2 ** (parts - 1).bit_length())
    monkeypatch.setattr(triton_rows, "_exchange", exchange)
    _check_statistics_and_gradient(buffer, logit_map, blocks)
    exchange.check()
    for of_block in blocks.buffers:
        of_block.padded[:] = 7
    assert all(bool((numbers == 7).all()) for numbers in memory)


@on_device
@pytest.mark.parametrize("vocab", [5000, 90_000])
def test_long_rows_that_are_not_finite(vocab):
    """As torch.log_softmax: NaN for a row of -inf, with +inf, or with NaN; -inf alone is a logit like another."""
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
    statistics, product = _triton().statistics_and_gradient(buffer, target, RowCoefficients(ones, ones))
    log_prob = product - statistics.row_max - statistics.row_log_sum
    torch.testing.assert_close(log_prob.double(), expected[:, -1], equal_nan=True, rtol=1e-5, atol=1e-5)
    gradient = expected.exp()
    gradient[:, -1] -= 1
    torch.testing.assert_close(buffer.logits.double(), gradient, equal_nan=True, rtol=1e-2, atol=1e-6)


@on_device
@pytest.mark.parametrize("vocab", [1500, 9000, 20001, 70001, 100_003])
def test_targets_everywhere(vocab):
    """In many rows at a time, the target's entry is the one that is written last."""
    rows = 4 if INTERPRETED else 2000
    buffer, coefficients = _buffer(rows, vocab, torch.bfloat16), _coefficients(rows, vocab)
    target = torch.arange(rows, device=DEVICE) * (vocab - 1) // (rows - 1)
    exact = _double(buffer)
    as_double = RowCoefficients(*(None if c is None else c.double() for c in coefficients))
    TorchRowKernels().statistics_and_gradient(exact, target, as_double)
    _triton().statistics_and_gradient(buffer, target, coefficients)
    at_target = buffer.logits.gather(1, target[:, None]).double()
    torch.testing.assert_close(at_target, exact.logits.gather(1, target[:, None]), rtol=2**-7, atol=1e-5)


@on_device
@pytest.mark.parametrize(
    ("rows", "vocab", "programs", "dtype", "logit_map"),
    [
        (7, 1000, 1, BF16, MAPS[0]),
        (66, 1030, 2, FP16, MAPS[1]),
        (24, 2500, 1, FP32, MAPS[2]),
        (130, 40, 10_000, BF16, MAPS[2]),
    ],
    ids=str,
)
def test_gradient_with_column_sums(rows, vocab, programs, logit_map, dtype, monkeypatch):
    """Whatever divides rows and columns among programs; what lies behind the last row is left alone."""
    from thunder_flce.execution.row_kernels import triton_rows

    monkeypatch.setattr(triton_rows, "_SUMS_PROGRAMS", programs)
    memory, probability = _buffer(rows + 3, vocab, dtype), vocab * torch.randn(rows, device=DEVICE)
    buffer = memory.rows(slice(0, rows))
    behind = memory.logits[rows:].clone()
    exact, kernels = _double(buffer), TorchRowKernels(logit_map)
    statistics = _triton(logit_map).statistics(buffer)
    coefficients = RowCoefficients(probability, torch.zeros_like(probability), probability / vocab)
    as_double = RowCoefficients(*(None if c is None else c.double() for c in coefficients))
    of_double = kernels.statistics(exact)
    expected, sums = kernels.gradient(exact, of_double, as_double, None, dtype=torch.float64, column_sums=True)
    eager = LogitsBuffer(buffer.logits.clone(), VocabLayout.contiguous(vocab))
    _, eager_sums = kernels.gradient(eager, statistics, coefficients, None, dtype=dtype, column_sums=True)
    _, computed = _triton(logit_map).gradient(buffer, statistics, coefficients, None, dtype=dtype, column_sums=True)
    assert computed.shape == (vocab,) and computed.dtype == torch.float32
    eps = max(torch.finfo(dtype).eps, 4e-6 if INTERPRETED else 1e-6)
    assert error(buffer.logits, expected.logits) < max(1.5 * error(eager.logits, expected.logits), eps)
    # They are sums of what has not been rounded.
    assert error(computed, sums) < 1.5 * error(eager_sums, sums) + 4e-6
    assert torch.equal(memory.logits[rows:], behind)


@on_device
@pytest.mark.parametrize("factor", [1.0, -0.75])
@pytest.mark.parametrize(("size", "dtype"), [(1, BF16), (64, FP16), (300, FP32), (300, BF16)], ids=str)
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
    buffer = LogitsBuffer(torch.zeros(2, 33, device=DEVICE), VocabLayout.contiguous(33))
    with pytest.raises(ValueError, match="row_stride must be a multiple of 8, but is 33"):
        _triton().statistics(buffer)


@needs_triton
def test_rows_are_divided_only_where_their_parts_run_at_a_time(monkeypatch):
    """Programs wait for the others of their row."""
    from thunder_flce.execution.row_kernels import triton_rows

    monkeypatch.setattr(triton_rows, "_LARGEST_ROW_BYTES", 2**10)
    monkeypatch.setattr(triton_rows, "_LARGEST_PART_BYTES", 2**10)
    buffer = LogitsBuffer(torch.zeros(2, 2048, dtype=torch.float16), VocabLayout.aligned(2048))
    for most, parts in [(math.inf, 5), (5, 5), (4, 1)]:
        monkeypatch.setattr(triton_rows, "_parts_at_a_time", lambda device, most=most: most)
        assert triton_rows._parts(buffer).total == parts
    with pytest.raises(RuntimeError, match="too small for rows of logits in 3 vocabulary blocks"):
        triton_rows._parts(buffer, 3)


@needs_triton
def test_how_many_programs_run_at_a_time(monkeypatch):
    """By the numbers of an H200: 2048 threads and 65536 registers on each of 132 multiprocessors."""
    from thunder_flce.execution.row_kernels import triton_rows

    h200 = SimpleNamespace(
        multi_processor_count=132, max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: h200)
    count = triton_rows._parts_at_a_time.__wrapped__
    assert count(torch.device("cuda")) == 3 * 132
    monkeypatch.setattr(triton_rows, "_PART_REGISTERS", 32)
    assert count(torch.device("cuda")) == 4 * 132
    assert count(torch.device("cpu")) == math.inf


class Compiler:
    """Compiles kernels for a GPU that is not there; the interpreter takes more than the compiler does."""

    TYPES = {"target": "*i64", "rows": "i32", "rows_each": "i32", "block_elements": "i32", "exchange": "*i64"}

    def __init__(self, dtype, logit_map):
        of_logits = ("z", "own_z", "z_target", "out")
        self._types = {**self.TYPES, **dict.fromkeys(of_logits, f"*{dtype}")}
        self._map = {"SCALE": logit_map.scale, "SOFTCAP": logit_map.softcap}

    def ptx(self, kernel, block, *, absent=(), **constants):
        """Of a kernel without the arguments named in `absent`."""
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        constants = {**self._map, "BLOCK": block.elements, **constants, **dict.fromkeys(absent)}
        constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
        arguments = {name: self._types.get(name, "*fp32") for name in kernel.arg_names}
        signature = {name: "constexpr" if name in constants else type for name, type in arguments.items()}
        aligned = {
            (at,): [["tt.divisibility", 16]] for at, type in enumerate(signature.values()) if type.startswith("*")
        }
        source = ASTSource(kernel, signature, constants, aligned)
        options = {"num_warps": block.warps, "maxnreg": block.registers}
        return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]


@pytest.fixture(params=[("bf16", MAPS[0]), ("fp32", MAPS[2])], ids=str)
def compiler(request):
    return Compiler(*request.param)


LOADS = r"ld\.global\S*\.v4\.b32"


@needs_compiler
def test_compiled_statistics(compiler):
    """Rows are loaded 16 bytes at a time."""
    from thunder_flce.execution.row_kernels import triton_rows

    for block in triton_rows._STATISTICS_BLOCKS:
        vocab = 2 * block.elements + 1
        assert re.search(LOADS, compiler.ptx(triton_rows._statistics_kernel, block, STRIDE=vocab + 63, VOCAB=vocab))


@needs_compiler
@pytest.mark.parametrize("absent", [(), ("class_weight",)], ids=str)
def test_compiled_moments(compiler, absent):
    """16 bytes at a time; what no term reads costs nothing."""
    from thunder_flce.execution.row_kernels import triton_rows

    block = triton_rows._MOMENTS_BLOCK
    vocab, loads = 2 * block.elements + 1, []
    for names in (("expected",), ("weighted_sum",), ("expected", "weighted_sum")):
        constants, kernel = triton_rows._terms(names), triton_rows._moments_kernel
        ptx = compiler.ptx(kernel, block, absent=absent, STRIDE=vocab + 63, VOCAB=vocab, **constants)
        loads.append(len(re.findall(LOADS, ptx)))
        if "expected" not in names and compiler._map["SOFTCAP"] is None:
            assert "ex2" not in ptx
    assert all(loads)


@needs_compiler
@pytest.mark.parametrize("column_sums", [False, True])
@pytest.mark.parametrize("absent", [(), ("uniform", "entropy", "class_weight")], ids=str)
def test_compiled_gradient(compiler, absent, column_sums):
    """16 bytes at a time, and nothing to exchange between threads."""
    from thunder_flce.execution.row_kernels import triton_rows

    block = triton_rows._SUMS_BLOCK if column_sums else triton_rows._GRADIENT_BLOCK
    rows = triton_rows._SUMS_ROWS if column_sums else 1
    absent = ("one_hot", *absent) if column_sums else ("one_hot", *absent, "column_sums")
    vocab = 2 * block.elements + 1
    kernel = triton_rows._gradient_kernel
    ptx = compiler.ptx(kernel, block, absent=absent, STRIDE=vocab + 63, VOCAB=vocab, ROWS=rows)
    assert len(re.findall(LOADS, ptx)) >= rows
    assert len(re.findall(r"st\.global\S*\.v4\.b32", ptx)) >= rows
    assert "shfl" not in ptx and ("bar.sync" not in ptx or column_sums)


@needs_compiler
def test_compiled_target_gradient(compiler):
    """Threads next to each other have targets next to each other."""
    from thunder_flce.execution.row_kernels import triton_rows

    constants = {"STRIDE": 1, "VOCAB": 1, "ROWS": triton_rows._TARGETS_ROWS}
    absent = ("class_weight", "column_sums")
    assert "st.global" in compiler.ptx(
        triton_rows._gradient_kernel, triton_rows._TARGETS_BLOCK, absent=absent, **constants
    )


@needs_compiler
@pytest.mark.parametrize(("parts", "blocks"), [(1, 1), (3, 1), (15, 1), (6, 3)])
def test_compiled_statistics_and_gradient(compiler, parts, blocks):
    """Of rows that a program has to itself, that are divided, and that lie in vocabulary blocks."""
    import triton

    from thunder_flce.execution.row_kernels import triton_rows

    for block in triton_rows._ONE_PASS_BLOCKS if parts == 1 else [triton_rows._PART_BLOCK]:
        part = 2 * block.elements + 64
        width = (parts // blocks) * part
        vocab = parts * part - 63
        ptx = compiler.ptx(
            triton_rows._statistics_and_gradient_kernel,
            block,
            absent=("exchange",) if parts == 1 else (),
            STRIDE=vocab + 63 - (blocks - 1) * width,
            VOCAB=vocab,
            VOCAB_BLOCKS=blocks,
            BORROWED=blocks - 1,
            WIDTH=width,
            PARTS=parts,
            PART=part,
            SLOTS=triton.next_power_of_2(parts),
        )
        # Rows are loaded 16 bytes at a time, the first time to stay in the cache; so they are stored.
        assert re.search(r"ld\.global\S*evict_last\S*\.v4\.b32", ptx)
        assert re.search(r"ld\.global\S*evict_first\S*\.v4\.b32", ptx)
        assert re.search(r"st\.global\S*evict_first\S*\.v4\.b32", ptx)
        # Who waits for other programs reads what they have written, not what it has read before.
        reads = [match.start() for match in re.finditer(r"ld\.volatile\.global", ptx)]
        assert len(reads) == (2 if parts > 1 else 0)
        if parts > 1:
            # It has left its own statistics before, and its warps need not wait for each other meanwhile. Which part
            # it is follows from when it started.
            assert ptx.index("exch.b64") < reads[0] and "bar.sync" not in ptx[reads[0] : reads[1]]
            assert "add.u64" in re.search(r"atom\S+", ptx)[0] and "%ctaid" not in ptx
        # The target's entry is written when all threads have written theirs.
        stores = [match.start() for match in re.finditer(r"st\.global", ptx)]
        assert stores[-2] < ptx.rindex("bar.sync") < stores[-1]


@needs_compiler
def test_in_the_interpreter():
    """The tests above without a GPU."""
    run_in_the_interpreter(__file__)
