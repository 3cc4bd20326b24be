"""Logits in the memory of dW: nothing is overwritten before it is used up, and the result is as exact as ever."""

import dataclasses
import itertools

import pytest
import torch

from reference import assert_as_exact_as_eager, make_case, plain_region
from test_plan import S1 as ANY_LOSS
from thunder_flce import Options, Plan, functional
from thunder_flce.execution.matmul import matmul
from thunder_flce.execution.row_kernels.interface import SlabbedLogits
from thunder_flce.execution.row_kernels.torch_rows import TorchRowKernels
from thunder_flce.execution.row_selection import RowSelection
from thunder_flce.execution.slabs import MOST_SLABS, LogitsInSlabs
from thunder_flce.options import IGNORED_ROWS
from thunder_flce.planning import plan as plan_module
from thunder_flce.planning.plan import CUDA_SMALLEST_SLAB, VocabLayout, make_plan, temporary_bytes

S1 = dataclasses.replace(ANY_LOSS, is_plain_loss=True)
S4 = {"tokens": 4096, "vocab": 152064, "hidden": 3584}


def _problem(**changes):
    return dataclasses.replace(S1, **changes)


ROOM = 40
LAYOUTS = [
    LogitsInSlabs(rows=rows, vocab=vocab, count=count, row_room=ROOM)
    for rows, vocab, count in itertools.product(
        (1, 20, 39, 40, 41, 50, 79, 200), (240, 241, 999), range(2, MOST_SLABS + 1)
    )
]


def _overwrites(layout, borrowed):
    """Whether a slab is overwritten before it is used up if so many lie in dW's memory, its end included."""
    size = layout.vocab * ROOM
    starts = [size - (borrowed - number) * layout.slab_elements for number in range(borrowed)]
    for number, columns in enumerate(layout.columns):
        # The slab itself is read while its rows of dW are written.
        if any(start < columns.stop * ROOM for start in starts[number:]):
            return True
    return any(start < 0 for start in starts)


def test_nothing_is_overwritten_before_it_is_used_up():
    """And as many slabs as can be lie in dW's memory."""
    for layout in LAYOUTS:
        assert layout.borrowed < layout.count
        assert not _overwrites(layout, layout.borrowed)
        assert layout.borrowed == layout.count - 1 or _overwrites(layout, layout.borrowed + 1), layout
    assert {layout.borrowed for layout in LAYOUTS} == set(range(MOST_SLABS))


def test_slabs_lie_beside_each_other():
    """All columns are there once, and what the slabs do not need is left free at the front of dW's memory."""
    for layout in LAYOUTS:
        assert [c.start for c in layout.columns] == [0, *(c.stop for c in layout.columns[:-1])]
        assert layout.columns[-1].stop == layout.vocab
        assert all(c.stop - c.start == layout.width for c in layout.columns[:-1])
        last = VocabLayout.aligned(layout.vocab - layout.columns[-1].start)
        memory = [torch.zeros(layout.vocab * ROOM), torch.zeros(layout.own_elements(last.row_stride))]
        slabs = SlabbedLogits.lay_out(layout, *memory, last)
        for buffer in slabs.buffers:
            buffer.padded.add_(1)
        assert all(bool((numbers <= 1).all()) for numbers in memory)
        assert memory[0][layout.free_elements :].eq(1).all() and not memory[0][: layout.free_elements].any()
        assert memory[1].eq(1).all()


@pytest.mark.parametrize(
    ("changes", "options", "first", "slabs"),
    [
        # Chunks that are large enough need nothing of that.
        ({}, Options(), 0, 0),
        ({}, Options(chunk_rows=1024), 0, 0),
        ({}, Options(chunk_rows=512), 4096, 8),
        ({"vocab": 128257}, Options(chunk_rows=512), 4096, 9),
        ({"hidden": 8192}, Options(chunk_rows=512), 4096, 8),
        (S4, Options(chunk_rows=512), 3584, 9),
        (S4, Options(memory_budget=2**28), 3200, 4),
        # All tokens.
        ({"tokens": 4096, "vocab": 129280, "hidden": 7168}, Options(chunk_rows=512), 4096, 15),
        ({"tokens": 4096, "vocab": 129280, "hidden": 7168}, Options(chunk_rows=512, ignored_rows="compute"), 4096, 8),
        ({"tokens": 2048}, Options(chunk_rows=512), 2048, 5),
        # Not where nobody asked for little memory.
        (S4, Options(), 0, 0),
        ({"hidden": 8192}, Options(), 0, 0),
        (S4, Options(chunk_rows=2048), 0, 0),
        (S4, Options(memory_budget=2**31), 0, 0),
        # Here dX would have no room for its sum.
        ({"hidden": 8192}, Options(chunk_rows=960, ignored_rows="compute"), 6656, 7),
        ({"hidden": 8192, "input_grad": False}, Options(chunk_rows=960, ignored_rows="compute"), 8192, 9),
        # Summed in float32, dW has room for twice as many.
        ({"tokens": 16384}, Options(chunk_rows=512), 7552, 15),
        # Not the most tokens that there is room for, which would be 2560, in 15 slabs.
        ({"vocab": 64001, "hidden": 2048, "tokens": 4096}, Options(chunk_rows=700), 2048, 3),
        # Where there is no dW, or no memory for it yet, or another kernel makes the gradient.
        ({"tokens": 4096, "weight_grad": False}, Options(chunk_rows=512), 0, 0),
        ({"tokens": 4096, "bias_grad": True}, Options(chunk_rows=512), 0, 0),
        ({"tokens": 4096, "is_plain_loss": False}, Options(chunk_rows=512), 0, 0),
        ({"tokens": 4096, "float32_logits": True}, Options(chunk_rows=512), 0, 0),
        ({"tokens": 4096}, Options(strategy="recompute_logits", chunk_rows=512), 0, 0),
        ({"tokens": 4096, "device_type": "cpu"}, Options(chunk_rows=512), 0, 0),
        ({"tokens": 4096, "hidden": 4100}, Options(chunk_rows=512), 0, 0),
    ],
    ids=str,
)
def test_where_the_first_tokens_are_in_slabs(changes, options, first, slabs):
    plan = make_plan(_problem(**changes), options)
    assert (plan.first_rows, plan.first_slabs) == (first, slabs)


@pytest.mark.parametrize("options", [Options(chunk_rows=rows) for rows in (256, 512, 768, 1000)], ids=str)
@pytest.mark.parametrize("ignored_rows", IGNORED_ROWS)
def test_slabs_take_no_more_memory_than_chunks(options, ignored_rows, monkeypatch):
    """The copy of the rows of x that are not ignored included, which a chunk's dX has room for."""
    options = dataclasses.replace(options, ignored_rows=ignored_rows)
    sizes = itertools.product((2048, 2100, 4095, 8192), (32000, 128256, 128257), (512, 2048, 4096, 8192))
    problems = [_problem(tokens=tokens, vocab=vocab, hidden=hidden) for tokens, vocab, hidden in sizes]
    plans = [make_plan(problem, options) for problem in problems]
    monkeypatch.setattr(plan_module, "_with_slabs", lambda problem, plan: plan)
    count = 0
    for problem, plan in zip(problems, plans, strict=True):
        without = make_plan(problem, options)
        if not plan.first_slabs:
            assert plan == without
            continue
        count += 1
        # Then the copy is always there, and counted.
        if ignored_rows != "compute":
            plan, without = (dataclasses.replace(p, ignored_rows="skip_on_device") for p in (plan, without))
        assert temporary_bytes(problem, plan) <= temporary_bytes(problem, without)
        slabs = plan.logits_in_slabs(hidden=problem.hidden, vocab=problem.vocab, dtype=problem.dtype)
        assert slabs.width >= CUDA_SMALLEST_SLAB and slabs.borrowed
        # dX, in float32, before the first of them.
        assert 4 * slabs.rows * problem.hidden <= 2 * slabs.free_elements
        # What is left are whole chunks, or nothing.
        assert plan.first_rows == problem.tokens or problem.tokens - plan.first_rows >= plan.chunk_rows
    assert count > 3


@pytest.mark.parametrize(("input_grad", "first", "copies"), [(True, 4096, 0), (True, 4224, 1), (False, 4096, 1)])
def test_the_copy_of_x_needs_memory_unless_dx_has_room_for_it(input_grad, first, copies):
    """Beside dX of the same rows, which comes before the last use of the copy."""
    plan = Plan(strategy="gradients_in_forward", chunk_rows=512, first_rows=first, first_slabs=4)
    problem = _problem(input_grad=input_grad)
    skipping, computing = (dataclasses.replace(plan, ignored_rows=how) for how in ("skip_on_device", "compute"))
    more = temporary_bytes(problem, skipping) - temporary_bytes(problem, computing)
    assert more == copies * first * problem.hidden * 2


def test_a_single_chunk_has_nothing_to_sum():
    plan = make_plan(_problem(tokens=2048), Options(chunk_rows=512, accumulate="float32"))
    assert plan.chunk_rows == 2048 and not plan.float32_rows and not plan.float32_accumulator
    assert plan.describe() == "gradients in forward, one chunk of 2048 tokens in 5 slabs in dW's memory, products tuned"
    plan = make_plan(S1, Options(chunk_rows=512, tune_products=False))
    assert plan.describe() == (
        "gradients in forward, first 4096 tokens in 8 slabs in dW's memory, chunks of 512 tokens, "
        "192 rows of dW summed in float32"
    )


def test_products_are_tuned_where_those_of_slabs_are_large():
    """These of 8000 columns are not, though all columns at once would be."""
    problem = _problem(tokens=1024, vocab=32000)
    plan = make_plan(problem, Options(chunk_rows=400))
    assert plan.first_slabs == 4 and not plan.tune_products
    assert make_plan(problem, Options(chunk_rows=1024)).tune_products


def _with_plan(monkeypatch, **fields):
    plan = Plan(strategy="gradients_in_forward", **fields)
    monkeypatch.setattr(functional, "plan_for", lambda operands, options: plan)


@pytest.mark.parametrize("rows", IGNORED_ROWS)
@pytest.mark.parametrize("ignored", [0.0, 0.4, 0.9])
@pytest.mark.parametrize(
    ("first", "count", "accumulator"),
    # Only in float32 has dW's memory room for more tokens than the hidden size has dimensions.
    [(96, 3, False), (64, 5, False), (96, 3, True), (64, 5, True), (200, 4, True)],
)
def test_error(first, count, accumulator, ignored, rows, monkeypatch, device):
    """As large as PyTorch's; with many rows ignored, fewer are left than there is room for."""
    case = make_case(tokens=200, vocab=4003, hidden=112, dtype=torch.bfloat16, device=device, ignored=ignored)
    fields = {"float32_accumulator": accumulator, "float32_rows": 0 if accumulator else 256, "ignored_rows": rows}
    _with_plan(monkeypatch, chunk_rows=32, first_rows=first, first_slabs=count, **fields)
    assert_as_exact_as_eager(case, torch.tensor(0.5, device=device))


@pytest.mark.parametrize("first", [64, 256])
def test_error_with_targets_as_frequent_as_words(first, monkeypatch, device):
    """The most frequent ones' rows of dW go on, in float32, from what the first tokens have given."""
    case = make_case(tokens=512, vocab=8192, hidden=256, dtype=torch.bfloat16, device=device, ignored=0.0)
    frequency = 1 / torch.arange(1, 8193, dtype=torch.float64)
    case.target = torch.multinomial(frequency, 512, replacement=True).to(device)
    _with_plan(monkeypatch, chunk_rows=64, first_rows=first, first_slabs=4, float32_rows=256)
    assert_as_exact_as_eager(case)


@pytest.mark.parametrize("ignored", [0.0, 0.4, 0.9])
@pytest.mark.parametrize("first", [96, 160])
@pytest.mark.parametrize("input_grad", [True, False])
def test_the_first_products_start_before_the_rows_are_known(input_grad, first, ignored, monkeypatch, device):
    """On CUDA they do by themselves. Their rows of x are packed where dX will be, if it will; all other rows follow."""

    def first_rows(self, x, largest, out=None):
        # Elsewhere they take memory: a chunk's and no more.
        assert largest == (first if input_grad else 64) and (out is not None) == input_grad
        order = torch.argsort(self._valid, descending=True, stable=True)[:40]
        return torch.index_select(x, 0, order, out=out[:40] if input_grad else None)

    def logits_(out, x, *arguments, **settings):
        seen.append(x.shape[0])
        product(out, x, *arguments, **settings)

    seen, product = [], matmul.logits_
    monkeypatch.setattr(matmul, "logits_", logits_)
    monkeypatch.setattr(RowSelection, "first_rows", first_rows)
    case = make_case(tokens=200, vocab=4003, hidden=160, dtype=torch.bfloat16, device=device, ignored=ignored)
    case.x.requires_grad_(input_grad)
    _with_plan(monkeypatch, chunk_rows=64, first_rows=first, first_slabs=3, float32_rows=256)
    assert_as_exact_as_eager(case, torch.tensor(0.5, device=device))
    valid = min(int((case.target != -100).sum()), first)
    assert seen[:6] == [40] * 3 + [valid - 40] * 3 if valid > 40 else seen == [40] * 3


def test_row_kernels_see_whole_rows(monkeypatch, device):
    """The first chunk's statistics and gradient come from one call, over all slabs."""
    seen = []
    for lowering in _lowerings(device):
        original = lowering.statistics_and_gradient

        def recorded(self, logits, *arguments, original=original):
            seen.append((len(logits.buffers), logits.buffers[0].padded.shape[0]))
            return original(self, logits, *arguments)

        monkeypatch.setattr(lowering, "statistics_and_gradient", recorded)
    case = make_case(tokens=90, vocab=1003, hidden=64, device=device, ignored=0.0)
    _with_plan(monkeypatch, chunk_rows=30, first_rows=50, first_slabs=4)
    assert_as_exact_as_eager(case)
    assert seen == [(4, 50), (1, 20), (1, 20)]


def _lowerings(device):
    if device == "cpu":
        return [TorchRowKernels]
    nvfuser = pytest.importorskip("thunder_flce.execution.row_kernels.nvfuser_rows")
    return [nvfuser.NvFuserRowKernels]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("rows", IGNORED_ROWS)
@pytest.mark.parametrize("vocab", [32000, 32003])
def test_plans_of_its_own(vocab, rows):
    """As the plan chooses them, with tuned products where these are large enough."""
    case = make_case(tokens=2048, vocab=vocab, hidden=1536, dtype=torch.bfloat16, device="cuda", ignored=0.3)
    options = Options(chunk_rows=600, ignored_rows=rows)
    plan = functional.plan_for(plain_region(case), options)
    assert plan.first_slabs > 1 and plan.first_rows < 2048
    assert_as_exact_as_eager(case, torch.tensor(0.5, device="cuda"), options=options)
