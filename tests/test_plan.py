"""Plans are integers: strategies, chunks and accumulators for the shapes that matter."""

import dataclasses

import pytest
import torch

from thunder_flce import Options
from thunder_flce.execution.row_selection import RowPolicy, RowSelection
from thunder_flce.planning.plan import EXACT_CHUNKS, DeviceMemory, Problem, VocabLayout, make_plan, temporary_bytes

S1 = Problem(
    tokens=8192,
    hidden=4096,
    vocab=128256,
    dtype=torch.bfloat16,
    device_type="cuda",
    row_gradients=False,
    input_grad=True,
    weight_grad=True,
    bias_grad=False,
)


def _problem(**changes):
    return dataclasses.replace(S1, **changes)


def test_scalar_reductions_compute_their_gradients_in_the_forward():
    assert make_plan(_problem(), Options()).strategy == "gradients_in_forward"


def test_a_vector_gradient_has_to_wait_for_the_backward():
    assert make_plan(_problem(row_gradients=True), Options()).strategy == "recompute_logits"
    with pytest.raises(ValueError, match='strategy "gradients_in_forward" needs reduction "mean" or "sum"'):
        make_plan(_problem(row_gradients=True), Options(strategy="gradients_in_forward"))


def test_float16_has_to_wait_for_the_loss_scale():
    assert make_plan(_problem(dtype=torch.float16), Options()).strategy == "recompute_logits"


def test_as_many_logits_are_saved_as_the_budget_allows():
    problem = _problem(row_gradients=True)
    whole = problem.logits_bytes(problem.tokens)

    def saved(budget):
        plan = make_plan(problem, Options(memory_budget=budget))
        assert (plan.strategy == "save_logits") == (plan.saved_rows > 0)
        assert (plan.slab_columns > 0) == (plan.saved_rows < problem.tokens)
        assert problem.logits_bytes(plan.saved_rows + (plan.chunk_rows if plan.slab_columns else 0)) <= budget
        return plan.saved_rows

    assert saved(whole) == 8192
    assert 4096 < saved(whole - 1) < 8192
    assert 2048 < saved(whole // 2) < 4096
    assert saved(whole // 8) == 0


def test_without_a_budget_the_device_decides_how_many_logits_are_saved():
    problem = _problem(row_gradients=True)
    gigabyte = 10**9
    assert make_plan(problem, Options()).strategy == "recompute_logits"
    for total, free, rows in ((140, 100, 8192), (24, 20, 8192), (16, 14, 5500), (140, 3, 4000), (140, 0.2, 0)):
        memory = DeviceMemory(total * gigabyte, int(free * gigabyte))
        assert make_plan(problem, Options(), memory=memory).saved_rows == pytest.approx(rows, rel=0.12)


def test_a_chunk_beside_a_float32_accumulator_takes_the_memory_of_dw():
    problem = _problem(tokens=16384)
    plan = make_plan(problem, Options())
    assert plan.float32_accumulator and plan.chunk_rows == 4096
    assert temporary_bytes(problem, plan) == temporary_bytes(problem, dataclasses.replace(plan, chunk_rows=512))


def test_one_chunk_where_it_takes_no_more_than_the_gradients():
    """S4 of the benchmarks, whose logits are 1.1 times as large as its gradients; U2's are 4 times as large."""
    assert make_plan(_problem(tokens=4096, vocab=152064, hidden=3584), Options()).chunk_rows == 4096
    assert make_plan(_problem(vocab=50257, hidden=1600), Options()).chunk_rows == 2816
    assert make_plan(S1, Options()).chunk_rows == 2048


def test_budget_as_a_fraction_of_the_device():
    by_fraction = make_plan(S1, Options(memory_budget=0.01), memory=DeviceMemory(140 * 10**9, 10**9))
    assert by_fraction == make_plan(S1, Options(memory_budget=1_400_000_000))
    with pytest.raises(ValueError, match="memory_budget is a fraction"):
        make_plan(S1, Options(memory_budget=0.01))


@pytest.mark.parametrize("megabytes", [140, 280, 530, 1100, 2200])
def test_a_chunk_stays_within_the_budget(megabytes):
    plan = make_plan(S1, Options(memory_budget=megabytes * 10**6, accumulate="parameter"))
    assert S1.logits_bytes(plan.chunk_rows) <= megabytes * 10**6
    assert S1.logits_bytes(plan.chunk_rows) > megabytes * 10**6 // 2


def test_rows_skipped_on_the_device_are_packed_in_any_case():
    """Where dX is made a chunk at a time, its memory takes them."""
    on_device, row = Options(ignored_rows="skip_on_device"), S1.hidden * 2
    assert make_plan(S1, on_device).describe().endswith("ignored rows skipped on the device")
    assert make_plan(S1, Options(ignored_rows="compute", tune_products=False)).describe().endswith("rows computed")

    def more_bytes(options, **changes):
        problem = _problem(**changes)
        plan = make_plan(problem, options)
        skipping = dataclasses.replace(plan, ignored_rows="skip_on_device")
        return temporary_bytes(problem, skipping) - temporary_bytes(problem, plan)

    assert more_bytes(Options()) == 0
    assert more_bytes(Options(), input_grad=False) == 2048 * row
    assert more_bytes(Options(strategy="recompute_logits", chunk_rows=1024)) == 8192 * row
    assert more_bytes(Options(), input_grad=False, weight_grad=False) == 2048 * row


def test_no_gradient_no_plan_for_one():
    problem = _problem(input_grad=False, weight_grad=False)
    assert make_plan(problem, Options()).strategy == "loss_only"
    assert make_plan(problem, Options(strategy="save_logits")).strategy == "loss_only"


def test_accumulator():
    """float32 wherever 16 bits would add more than a quarter to the error of dW."""
    assert not make_plan(S1, Options()).float32_accumulator
    assert -(-S1.tokens // make_plan(S1, Options()).chunk_rows) <= EXACT_CHUNKS
    assert not make_plan(S1, Options(chunk_rows=512)).float32_accumulator
    assert make_plan(S1, Options(chunk_rows=256)).float32_accumulator
    assert make_plan(_problem(tokens=32768, hidden=768), Options()).float32_accumulator
    assert make_plan(_problem(vocab=32000), Options(chunk_rows=2048)).float32_accumulator
    # Here all tokens in one chunk take less memory than the accumulator.
    assert make_plan(_problem(vocab=32000), Options()).chunk_rows == 8192
    assert not make_plan(_problem(vocab=32000, tokens=1024), Options()).float32_accumulator
    assert not make_plan(S1, Options(chunk_rows=512, accumulate="parameter")).float32_accumulator
    assert make_plan(S1, Options(accumulate="float32")).float32_accumulator
    assert not make_plan(_problem(dtype=torch.float32), Options(accumulate="float32")).float32_accumulator
    assert not make_plan(_problem(weight_grad=False), Options(chunk_rows=256)).float32_accumulator
    assert make_plan(S1, Options()).float32_rows and not make_plan(S1, Options(chunk_rows=8192)).float32_rows


def test_rows_summed_in_float32_take_three_mebibytes_at_most():
    for hidden, rows in ((64, 256), (2048, 256), (4096, 192), (8192, 96)):
        plan = make_plan(_problem(hidden=hidden), Options(chunk_rows=2048))
        assert plan.float32_rows == rows and 4 * rows * hidden <= 3 * 2**20


@pytest.mark.parametrize("vocab", [1, 7, 8, 1009, 32000, 50257, 128256, 128257, 152064, 256000, 299993])
def test_layout_of_a_row(vocab):
    layout = VocabLayout.aligned(vocab)
    assert layout.vocab == vocab and layout.row_stride % 8 == 0
    assert 0 <= layout.padding < 64
    assert layout.padding == 0 or vocab % 8


@pytest.mark.parametrize(("count", "largest"), [(0, 5), (1, 5), (5, 5), (6, 5), (4100, 2048), (4096, 2048)])
def test_chunks_cover_all_rows_and_are_about_equal(count, largest):
    rows = RowSelection(torch.zeros(count, dtype=torch.long), 3, -100, RowPolicy()).rows()
    chunks = list(rows.chunks(largest, largest))
    assert [i for chunk in chunks for i in range(chunk.start, chunk.stop)] == list(range(count))
    sizes = [chunk.stop - chunk.start for chunk in chunks]
    assert all(size <= largest for size in sizes)
    if len(sizes) > 1:
        assert max(sizes[1:]) - min(sizes[1:]) <= 128 * len(sizes)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("memory_budget", 0),
        ("memory_budget", -1),
        ("memory_budget", 1.5),
        ("memory_budget", "1GB"),
        ("memory_budget", True),
        ("strategy", "fast"),
        ("chunk_rows", 0),
        ("chunk_rows", 1.0),
        ("accumulate", "float64"),
        ("ignored_rows", "drop"),
    ],
)
def test_options_name_the_field_that_is_wrong(field, value):
    with pytest.raises(ValueError, match=f"^{field} must be"):
        Options(**{field: value})
