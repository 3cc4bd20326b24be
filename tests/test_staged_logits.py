"""Logits staged in dW's memory: nothing is overwritten before it is used up, and the result is as exact as ever."""

import itertools
from collections.abc import Callable

import pytest
import torch

from reference import assert_as_exact_as_eager, make_case, plain_region
from thunder_flce import Options, functional
from thunder_flce.execution.layout import VocabLayout
from thunder_flce.execution.matmul import matmul
from thunder_flce.execution.plan import GradientsInForward, Plan, RecomputeLogits, SaveLogits, SaveSomeLogits
from thunder_flce.execution.row_kernels.interface import LogitsInBlocks
from thunder_flce.execution.row_kernels.torch_rows import TorchRowKernels
from thunder_flce.execution.row_selection import RowSelection
from thunder_flce.execution.staged_logits import MOST_BLOCKS, BlockLayout
from thunder_flce.options import IGNORED_ROWS

ROOM = 40
LAYOUTS = [
    BlockLayout(rows=rows, vocab=vocab, count=count, row_room=ROOM)
    for rows, vocab, count in itertools.product(
        (1, 20, 39, 40, 41, 50, 79, 200), (240, 241, 999), range(2, MOST_BLOCKS + 1)
    )
]


def _overwrites(layout: BlockLayout, borrowed: int) -> bool:
    """Whether a block is overwritten before it is used up if so many lie in dW's memory, its end included."""
    size = layout.vocab * ROOM
    starts = [size - (borrowed - number) * layout.block_elements for number in range(borrowed)]
    for number, columns in enumerate(layout.columns):
        # The block itself is read while its rows of dW are written.
        if any(start < columns.stop * ROOM for start in starts[number:]):
            return True
    return any(start < 0 for start in starts)


def test_nothing_is_overwritten_before_it_is_used_up():
    """And as many blocks as can be lie in dW's memory."""
    for layout in LAYOUTS:
        assert layout.borrowed < layout.count
        assert not _overwrites(layout, layout.borrowed)
        assert layout.borrowed == layout.count - 1 or _overwrites(layout, layout.borrowed + 1), layout
    assert {layout.borrowed for layout in LAYOUTS} == set(range(MOST_BLOCKS))


def test_blocks_lie_beside_each_other():
    """All columns are there once, and what the blocks do not need is left free at the front of dW's memory."""
    for layout in LAYOUTS:
        assert [c.start for c in layout.columns] == [0, *(c.stop for c in layout.columns[:-1])]
        assert layout.columns[-1].stop == layout.vocab
        assert all(c.stop - c.start == layout.width for c in layout.columns[:-1])
        last = VocabLayout.aligned(layout.vocab - layout.columns[-1].start)
        memory = [torch.zeros(layout.vocab * ROOM), torch.zeros(layout.own_elements(last.row_stride))]
        staged = LogitsInBlocks.lay_out(layout, *memory, last)
        for buffer in staged.buffers:
            buffer.padded.add_(1)
        assert all(bool((numbers <= 1).all()) for numbers in memory)
        assert memory[0][layout.free_elements :].eq(1).all() and not memory[0][: layout.free_elements].any()
        assert memory[1].eq(1).all()


@pytest.fixture
def with_plan(monkeypatch) -> Callable[[Plan], None]:
    """Lets all regions run with a plan."""
    return lambda plan: monkeypatch.setattr(functional, "plan_for", lambda operands, options, memory: plan)


@pytest.mark.parametrize("rows", IGNORED_ROWS)
@pytest.mark.parametrize("ignored", [0.0, 0.4, 0.9])
@pytest.mark.parametrize(
    ("staged", "accumulator"),
    # Only in float32 has dW's memory room for more tokens than the hidden size has dimensions.
    [((96, 3), False), ((64, 5), False), ((96, 3), True), ((64, 5), True), ((200, 4), True)],
)
def test_error(staged, accumulator, ignored, rows, with_plan, device):
    """As large as PyTorch's; with many rows ignored, fewer are left than there is room for."""
    case = make_case(tokens=200, vocab=4003, hidden=112, dtype=torch.bfloat16, device=device, ignored=ignored)
    float32 = {"float32_accumulator": accumulator, "float32_rows": 0 if accumulator else 256}
    with_plan(GradientsInForward(chunk_rows=32, staged=staged, ignored_rows=rows, **float32))
    assert_as_exact_as_eager(case, torch.tensor(0.5, device=device))


@pytest.mark.parametrize("first", [64, 256])
def test_error_with_targets_as_frequent_as_words(first, with_plan, device):
    """The most frequent ones' rows of dW go on, in float32, from what the first tokens have given."""
    case = make_case(tokens=512, vocab=8192, hidden=256, dtype=torch.bfloat16, device=device, ignored=0.0)
    frequency = 1 / torch.arange(1, 8193, dtype=torch.float64)
    case.target = torch.multinomial(frequency, 512, replacement=True).to(device)
    with_plan(GradientsInForward(chunk_rows=64, staged=(first, 4), float32_rows=256))
    assert_as_exact_as_eager(case)


@pytest.fixture
def started_early(monkeypatch) -> list[tuple[int, list[bool]]]:
    """Lets the first 40 valid rows start before the number of rows is known, as it is on CUDA, where possible.

    Returns:
        What was asked for: the most rows, and which inputs have memory for theirs.
    """
    asked = []

    def first_rows(self, largest, outs):
        asked.append((largest, [out is not None for out in outs]))
        order = torch.argsort(self._valid, descending=True, stable=True)[: min(largest, 40)]
        return [
            torch.index_select(term.x, 0, order, out=None if out is None else out[: len(order)])
            for term, out in zip(self._region.terms, outs, strict=True)
        ]

    monkeypatch.setattr(RowSelection, "first_rows", first_rows)
    return asked


@pytest.fixture
def rows_of_logits(monkeypatch) -> list[int]:
    """Of how many rows each matmul computes logits."""
    seen, logits_ = [], matmul.logits_

    def spy(out, x, *arguments, **settings):
        seen.append(x.shape[0])
        logits_(out, x, *arguments, **settings)

    monkeypatch.setattr(matmul, "logits_", spy)
    return seen


@pytest.mark.parametrize("ignored", [0.0, 0.4, 0.9])
@pytest.mark.parametrize("first", [96, 160])
@pytest.mark.parametrize("input_grad", [True, False])
def test_the_first_blocks_start_before_the_rows_are_known(
    input_grad, first, ignored, with_plan, started_early, rows_of_logits, device
):
    """Their rows of x are packed where dX will be, if it will; all other rows follow."""
    case = make_case(tokens=200, vocab=4003, hidden=160, dtype=torch.bfloat16, device=device, ignored=ignored)
    case.x.requires_grad_(input_grad)
    with_plan(GradientsInForward(chunk_rows=64, staged=(first, 3), float32_rows=256))
    assert_as_exact_as_eager(case, torch.tensor(0.5, device=device))
    # Elsewhere they take memory: a chunk's and no more.
    assert started_early == [(first if input_grad else 64, [input_grad])]
    valid = min(int((case.target != -100).sum()), first)
    assert rows_of_logits[:6] == [40] * 3 + [valid - 40] * 3 if valid > 40 else rows_of_logits == [40] * 3


@pytest.mark.parametrize("ignored", [0.0, 0.4, 0.9])
@pytest.mark.parametrize(
    ("plan", "largest"),
    [
        (GradientsInForward(chunk_rows=64, float32_rows=16), 64),
        (GradientsInForward(chunk_rows=24), 24),
        (SaveLogits(), 200),
        (SaveSomeLogits(saved_rows=100, chunk_rows=64, block_columns=256), 64),
        (RecomputeLogits(chunk_rows=64, block_columns=256), 64),
    ],
    ids=lambda value: value.describe() if isinstance(value, Plan) else "",
)
def test_the_first_logits_start_before_the_rows_are_known(
    plan, largest, ignored, with_plan, started_early, rows_of_logits, device
):
    """Those of all terms."""
    case = make_case(tokens=200, vocab=1003, hidden=64, bias=True, device=device, ignored=ignored, ranks=(4,))
    with_plan(plan)
    assert_as_exact_as_eager(case, torch.tensor(0.5, device=device))
    ((asked, _),) = started_early
    assert asked == largest
    assert rows_of_logits[:2] == [min(largest, 40)] * 2


def test_row_kernels_see_whole_rows(with_plan, monkeypatch, device):
    """The first chunk's statistics and gradient come from one call, over all blocks."""
    seen = []
    for kernels in _row_kernels(device):
        original = kernels.statistics_and_gradient

        def recorded(self, logits, *arguments, original=original):
            seen.append((len(logits.buffers), logits.buffers[0].padded.shape[0]))
            return original(self, logits, *arguments)

        monkeypatch.setattr(kernels, "statistics_and_gradient", recorded)
    case = make_case(tokens=90, vocab=1003, hidden=64, device=device, ignored=0.0)
    with_plan(GradientsInForward(chunk_rows=30, staged=(50, 4)))
    assert_as_exact_as_eager(case)
    assert seen == [(4, 50), (1, 20), (1, 20)]


def _row_kernels(device: str) -> list[type]:
    if device == "cpu":
        return [TorchRowKernels]
    triton_rows = pytest.importorskip("thunder_flce.execution.row_kernels.triton_rows")
    return [triton_rows.TritonRowKernels]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("rows", IGNORED_ROWS)
@pytest.mark.parametrize("vocab", [32000, 32003])
def test_plans_of_its_own(vocab, rows):
    """As the plan chooses them, with tuned matmuls where these are large enough."""
    case = make_case(tokens=2048, vocab=vocab, hidden=1536, dtype=torch.bfloat16, device="cuda", ignored=0.3)
    options = Options(chunk_rows=600, ignored_rows=rows)
    first, blocks = functional.plan_for(plain_region(case), options).staged
    assert blocks > 1 and first < 2048
    assert_as_exact_as_eager(case, torch.tensor(0.5, device="cuda"), options=options)
