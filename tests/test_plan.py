"""Plans are plain values: strategies, chunks and accumulators for the shapes that matter."""

import itertools
import warnings
from dataclasses import replace

import pytest
import torch

from thunder_flce import Options
from thunder_flce.device import DeviceMemory
from thunder_flce.execution.layout import VocabLayout, layout_for
from thunder_flce.execution.plan import (
    PLANS,
    GradientsInForward,
    LossOnly,
    Plan,
    RecomputeLogits,
    SaveLogits,
    SaveSomeLogits,
)
from thunder_flce.operation.loss import Loss
from thunder_flce.operation.problem import Problem, TermShape
from thunder_flce.options import IGNORED_ROWS
from thunder_flce.planning import choose
from thunder_flce.planning.choose import (
    CUDA_SMALLEST_BLOCK,
    EXACT_CHUNKS,
    alternatives,
    logits_bytes,
    make_plan,
    temporary_bytes,
)
from thunder_flce.planning.cost import predicted_seconds
from thunder_flce.planning.program import program

EACH_ROW = Loss(reduction="none")


def problem(*, hidden: int = 4096, input_grad: bool = True, weight_grad: bool = True, **changes) -> Problem:
    """S1 of the benchmarks, with changes."""
    defaults = {"tokens": 8192, "vocab": 128256, "dtype": torch.bfloat16, "device_type": "cuda", "loss": Loss()}
    terms = (TermShape(hidden=hidden, input_grad=input_grad, weight_grad=weight_grad),)
    return Problem(**{**defaults, "terms": terms, **changes})


S1 = problem()
S4 = {"tokens": 4096, "vocab": 152064, "hidden": 3584}
U2 = {"vocab": 50257, "hidden": 1600}


# Strategies.


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_scalar_reductions_compute_their_gradients_in_the_forward(reduction):
    assert isinstance(make_plan(problem(loss=Loss(reduction=reduction)), Options()), GradientsInForward)


@pytest.mark.parametrize("loss", [EACH_ROW, Loss(outputs=("log_prob",)), Loss(outputs=("entropy", "argmax"))], ids=str)
def test_gradients_of_rows_have_to_wait_for_the_backward(loss):
    assert isinstance(make_plan(problem(loss=loss), Options()), RecomputeLogits)
    with pytest.raises(ValueError, match='strategy "gradients_in_forward" needs reduction "mean" or "sum"'):
        make_plan(problem(loss=loss), Options(strategy="gradients_in_forward"))


def test_outputs_without_gradients_change_nothing():
    loss = Loss(outputs=("argmax", "accuracy", "mean_logit", "log_sum_sq_probs"))
    assert make_plan(problem(loss=loss), Options()) == make_plan(S1, Options())


def test_float16_has_to_wait_for_the_loss_scale():
    assert isinstance(make_plan(problem(dtype=torch.float16), Options()), RecomputeLogits)
    in_forward = make_plan(problem(dtype=torch.float16), Options(strategy="gradients_in_forward"))
    assert isinstance(in_forward, GradientsInForward)


def test_no_gradient_no_plan_for_one():
    frozen = problem(input_grad=False, weight_grad=False)
    assert type(make_plan(frozen, Options())) is LossOnly
    assert type(make_plan(frozen, Options(strategy="save_logits"))) is LossOnly
    assert type(make_plan(replace(frozen, has_bias=True, bias_grad=True), Options())) is GradientsInForward


@pytest.mark.parametrize("kind", [GradientsInForward, SaveLogits, RecomputeLogits])
def test_a_strategy_can_be_asked_for(kind):
    assert type(make_plan(S1, Options(strategy=kind.strategy))) is kind


def _saved_rows(plan: Plan, tokens: int) -> int:
    return tokens if isinstance(plan, SaveLogits) else getattr(plan, "saved_rows", 0)


def test_as_many_logits_are_saved_as_the_budget_allows():
    each_row = problem(loss=EACH_ROW)
    whole = logits_bytes(each_row, each_row.tokens)

    def saved(budget: int) -> int:
        plan = make_plan(each_row, Options(memory_budget=budget))
        rows = _saved_rows(plan, each_row.tokens)
        assert (plan.strategy == "save_logits") == (rows > 0)
        assert temporary_bytes(each_row, plan) <= budget
        return rows

    assert saved(whole) == 8192
    assert 4096 < saved(whole - 1) < 8192
    assert 1024 < saved(whole // 2) < 4096
    assert saved(whole // 8) == 0


def test_without_a_budget_the_device_decides_how_many_logits_are_saved():
    each_row = problem(loss=EACH_ROW)
    gigabyte = 10**9
    assert type(make_plan(each_row, Options())) is RecomputeLogits
    for total, free, rows in ((140, 100, 8192), (24, 20, 8192), (16, 14, 5500), (140, 3, 4000), (140, 0.2, 0)):
        plan = make_plan(each_row, Options(), memory=DeviceMemory(total * gigabyte, int(free * gigabyte)))
        assert _saved_rows(plan, 8192) == pytest.approx(rows, rel=0.12)


def test_logits_are_never_saved_by_themselves_on_a_cpu():
    on_cpu = problem(loss=EACH_ROW, tokens=64, vocab=1000, device_type="cpu", dtype=torch.float32)
    assert type(make_plan(on_cpu, Options())) is RecomputeLogits


# Chunks.


def test_one_chunk_where_it_takes_no_more_than_the_gradients():
    """S4 of the benchmarks, whose logits are 1.1 times as large as its gradients; U2's are 4 times as large."""
    assert make_plan(problem(**S4), Options()).chunk_rows == 4096
    assert make_plan(problem(**U2), Options()).chunk_rows == 2816
    assert make_plan(S1, Options()).chunk_rows == 2048


def test_budget_as_a_fraction_of_the_device():
    by_fraction = make_plan(S1, Options(memory_budget=0.01), memory=DeviceMemory(140 * 10**9, 10**9))
    assert by_fraction == make_plan(S1, Options(memory_budget=1_400_000_000))
    with pytest.raises(ValueError, match="memory_budget is a fraction"):
        make_plan(S1, Options(memory_budget=0.01))


@pytest.mark.parametrize("megabytes", [140, 280, 530, 1100, 2200])
def test_a_chunk_stays_within_the_budget(megabytes):
    plan = make_plan(S1, Options(memory_budget=megabytes * 10**6, accumulate="parameter"))
    assert megabytes * 10**6 // 2 < logits_bytes(S1, plan.chunk_rows) <= megabytes * 10**6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("loss", [Loss(), EACH_ROW], ids=["mean", "none"])
@pytest.mark.parametrize("shape", [{}, S4, U2, {"vocab": 256000, "hidden": 2304}, {"tokens": 65536}], ids=str)
def test_more_than_the_budget_is_never_taken_silently(shape, loss, dtype):
    for megabytes in (150, 400, 600, 1600):
        region = problem(loss=loss, dtype=dtype, **shape)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            plan = make_plan(region, Options(memory_budget=megabytes * 10**6))
        needed = temporary_bytes(region, plan)
        told = [f"memory_budget is {megabytes} MB, but {region.tokens} tokens take {needed / 1e6:.0f} MB"] * (
            needed > 1.01 * megabytes * 10**6
        )
        assert [str(warning.message).partition(": ")[0] for warning in caught] == told


def test_a_budget_is_kept_where_more_than_a_chunk_grows_with_it():
    """On a CPU, 16 bits are computed in float32."""
    on_cpu = problem(tokens=4096, hidden=64, vocab=32000, device_type="cpu")
    for megabytes in (259, 200, 150, 100):
        plan = make_plan(on_cpu, Options(memory_budget=megabytes * 10**6))
        assert temporary_bytes(on_cpu, plan) <= megabytes * 10**6


def test_a_budget_that_is_missed_names_the_cure():
    with pytest.warns(UserWarning, match='accumulate="parameter" takes less'):
        make_plan(problem(tokens=65536), Options(memory_budget=600 * 10**6))
    options = Options(memory_budget=600 * 10**6, accumulate="parameter")
    assert temporary_bytes(problem(tokens=65536), make_plan(problem(tokens=65536), options)) <= 600 * 10**6


@pytest.mark.parametrize("loss", [Loss(reduction="none"), Loss(reduction="none", outputs=("entropy",))], ids=str)
@pytest.mark.parametrize("megabytes", [150, 200, 230, 270, 300, 590])
def test_logits_that_are_computed_again_fill_the_budget(megabytes, loss):
    """The forward's chunk, and the backward's blocks beside dX in float32; Liger's function takes 0.26 GB."""
    again, options = replace(S1, loss=loss), Options(memory_budget=megabytes * 10**6, strategy="recompute_logits")
    plan = make_plan(again, options)
    assert 0.8 * megabytes * 10**6 < temporary_bytes(again, plan) <= megabytes * 10**6
    if megabytes >= 230:
        assert predicted_seconds(again, plan, "NVIDIA H200") < 1.02 * predicted_seconds(
            again, make_plan(again, Options(strategy="recompute_logits")), "NVIDIA H200"
        )


@pytest.mark.parametrize(
    ("dtype", "tokens", "hidden", "vocab", "megabytes", "columns"),
    [
        (torch.bfloat16, 8192, 4096, 128256, 270, 16384),
        (torch.bfloat16, 1024, 2048, 151936, 105, 50688),
        (torch.float32, 2048, 2048, 128256, 262, 25664),
    ],
)
def test_blocks_fill_the_budget(dtype, tokens, hidden, vocab, megabytes, columns):
    """They hold the sum of dX where only that fits, and are wider where there is room, or no such sum."""
    terms = (TermShape(hidden=hidden, input_grad=True, weight_grad=True),)
    small = replace(S1, tokens=tokens, terms=terms, vocab=vocab, weight_rows=vocab, dtype=dtype)
    options = Options(memory_budget=megabytes * 10**6, strategy="recompute_logits")
    assert make_plan(small, options).block_columns == columns


@pytest.mark.parametrize("device_type", ["cuda", "cpu"])
@pytest.mark.parametrize("strategy", [None, "save_logits", "recompute_logits"])
def test_no_tokens(strategy, device_type):
    """What runs moves nothing, and takes the memory of the gradients."""
    nothing = problem(tokens=0, device_type=device_type)
    found = program(nothing, make_plan(nothing, Options(strategy=strategy)))
    assert found.steps and all(step.operations == 0 for step in found.steps)
    assert all(step.bytes >= 0 for step in found.steps)


# The sum of dW.


def test_accumulator():
    """float32 wherever 16 bits would add more than a quarter to the error of dW."""
    assert not make_plan(S1, Options()).float32_accumulator
    assert -(-S1.tokens // make_plan(S1, Options()).chunk_rows) <= EXACT_CHUNKS
    assert not make_plan(S1, Options(chunk_rows=512)).float32_accumulator
    assert make_plan(S1, Options(chunk_rows=256)).float32_accumulator
    assert make_plan(problem(tokens=32768, hidden=768), Options()).float32_accumulator
    assert make_plan(problem(vocab=32000), Options(chunk_rows=2048)).float32_accumulator
    # Here all tokens in one chunk take less memory than the accumulator.
    assert make_plan(problem(vocab=32000), Options()).chunk_rows == 8192
    assert not make_plan(problem(vocab=32000, tokens=1024), Options()).float32_accumulator
    assert not make_plan(S1, Options(chunk_rows=512, accumulate="parameter")).float32_accumulator
    assert make_plan(S1, Options(accumulate="float32")).float32_accumulator
    assert not make_plan(problem(dtype=torch.float32), Options(accumulate="float32")).float32_accumulator
    assert not make_plan(problem(weight_grad=False), Options(chunk_rows=256)).float32_accumulator
    assert make_plan(S1, Options()).float32_rows and not make_plan(S1, Options(chunk_rows=8192)).float32_rows


def test_rows_summed_in_float32_take_three_mebibytes_at_most():
    """Those of all terms together; a frozen head has none."""
    for hidden, rows in ((64, 256), (2048, 256), (4096, 192), (8192, 96)):
        plan = make_plan(problem(hidden=hidden), Options(chunk_rows=2048))
        assert plan.float32_rows == rows and 4 * rows * hidden <= 3 * 2**20
    adapter = TermShape(hidden=512, input_grad=True, weight_grad=True)
    for frozen, rows in ((False, 170), (True, 256)):
        head = TermShape(hidden=4096, input_grad=True, weight_grad=not frozen)
        assert make_plan(problem(terms=(head, adapter)), Options(chunk_rows=2048)).float32_rows == rows
    # With several targets a token, four times as many: 12 MiB.
    assert make_plan(replace(S1, targets_per_token=64), Options()).float32_rows == 768
    assert make_plan(replace(problem(hidden=64), targets_per_token=1), Options(chunk_rows=2048)).float32_rows == 1024


def test_a_chunk_beside_a_float32_accumulator_takes_the_memory_of_dw():
    larger = problem(tokens=16384)
    plan = make_plan(larger, Options())
    assert plan.float32_accumulator and plan.chunk_rows == 4096
    assert temporary_bytes(larger, plan) == temporary_bytes(larger, replace(plan, chunk_rows=512))


def test_a_single_chunk_has_nothing_to_sum():
    plan = make_plan(problem(tokens=2048), Options(chunk_rows=512, accumulate="float32"))
    assert plan.staged == (2048, 5)
    assert plan.chunk_rows == 2048 and not plan.float32_rows and not plan.float32_accumulator


# Memory.


def test_what_each_strategy_takes_beside_the_gradients():
    """At S1, 8192 × 128256 × 4096 in 16 bits, where no rows are copied."""
    tokens, vocab, hidden = S1.tokens, S1.vocab, S1.hidden

    def logits(rows: int) -> int:
        return 2 * rows * vocab

    def taken(plan: type[Plan], **fields) -> int:
        return temporary_bytes(S1, plan(ignored_rows="compute", **fields))

    of_chunks = GradientsInForward
    assert taken(of_chunks, chunk_rows=2048) == logits(2048)
    assert taken(of_chunks, chunk_rows=2048, float32_rows=192) == logits(2048) + 4 * 192 * hidden
    # The accumulator and the rounded dW are there at once, but no logits.
    assert taken(of_chunks, chunk_rows=2048, float32_accumulator=True) == 4 * vocab * hidden
    assert taken(of_chunks, chunk_rows=6144, float32_accumulator=True) == logits(6144) + 2 * vocab * hidden
    # As much as any other chunk: the first blocks of 4096 tokens are where dW will be.
    assert taken(of_chunks, chunk_rows=512, staged=(4096, 8)) == logits(512)
    assert taken(SaveLogits) == logits(tokens)
    # A block of all rows; dX is summed where dW of the first block will be, or, without room, in memory of its own,
    # before there is a dX in 16 bits.
    block = 2 * tokens * 16384
    sum_bytes = (4 - 2) * tokens * hidden
    assert taken(RecomputeLogits, chunk_rows=1024, block_columns=16384) == block
    assert taken(RecomputeLogits, chunk_rows=1024, block_columns=16320) == 2 * tokens * 16320 + sum_bytes
    # dW of a block is a sum of two, in float32.
    saved, half = logits(4096), tokens // 2
    some = taken(SaveSomeLogits, saved_rows=half, chunk_rows=2048, block_columns=16384)
    assert some == saved + block // 2 + 4 * 16384 * hidden
    some = taken(SaveSomeLogits, saved_rows=half, chunk_rows=2048, block_columns=8128)
    assert some == saved + 2 * half * 8128 + 4 * half * hidden + 4 * 8128 * hidden
    # In a forward, chunks that are not saved share memory: without dW, that is the peak.
    without_dw = problem(weight_grad=False)
    plan = SaveSomeLogits(saved_rows=4096, chunk_rows=1024, block_columns=1024, ignored_rows="compute")
    assert program(without_dw, plan).peak_bytes == saved + logits(1024)


@pytest.mark.parametrize(
    ("hidden", "rows"), [(2048, 2048), (2304, 2048), (3584, 1024), (4096, 1024), (5120, 2048), (8192, 1024)]
)
def test_chunks_of_a_frozen_head(hidden, rows):
    """Half as many rows where dX fills the device; not without gradients."""
    terms = (TermShape(hidden=hidden, input_grad=True, weight_grad=False),)
    frozen = replace(S1, terms=terms)
    assert make_plan(frozen, Options()).chunk_rows == rows
    assert make_plan(replace(frozen, loss=Loss(reduction="none")), Options()).chunk_rows == rows
    adapted = replace(frozen, terms=(*terms, TermShape(hidden=hidden // 16, input_grad=True, weight_grad=True)))
    assert make_plan(adapted, Options()).chunk_rows == rows
    large = replace(adapted.terms[1], hidden=hidden // 8)
    assert make_plan(replace(frozen, terms=(*terms, large)), Options()).chunk_rows >= 2048
    without = replace(frozen, terms=(replace(terms[0], input_grad=False),))
    assert make_plan(without, Options()).chunk_rows >= 2048
    later = replace(frozen, loss=Loss(reduction="none", outputs=("entropy",)))
    assert make_plan(later, Options()).strategy == "recompute_logits" and make_plan(later, Options()).chunk_rows >= 2048


@pytest.mark.parametrize(("tokens", "vocab", "rows"), [(4096, 32000, 1024), (1100, 128256, 1100), (2048, 128256, 1024)])
def test_smaller_chunks_of_a_frozen_head_fill_the_device_themselves(tokens, vocab, rows):
    frozen = problem(tokens=tokens, vocab=vocab, weight_grad=False)
    assert make_plan(frozen, Options()).chunk_rows == rows


def test_a_frozen_head_takes_nothing_of_its_size():
    """Neither memory nor a gradient: what is left are a chunk's logits, and dB of the adapter, summed in float32."""
    head = TermShape(hidden=4096, input_grad=True, weight_grad=False)
    adapter = TermShape(hidden=16, input_grad=True, weight_grad=True)
    region = problem(terms=(head, adapter))
    found = program(region, GradientsInForward(chunk_rows=2048, ignored_rows="compute"))
    gradients = 2 * 8192 * (4096 + 16) + 4 * 128256 * 16
    assert found.peak_bytes == gradients + 2 * 2048 * 128256
    assert not any("dW " in str(step) or "dW[" in str(step) for stage in found.stages for step in stage.steps)


# Logits staged in the memory of dW.


@pytest.mark.parametrize(
    ("changes", "options", "staged"),
    [
        # Chunks that are large enough need nothing of that.
        ({}, Options(), None),
        ({}, Options(chunk_rows=1024), None),
        ({}, Options(chunk_rows=512), (4096, 8)),
        ({"vocab": 128257}, Options(chunk_rows=512), (4096, 9)),
        ({"hidden": 8192}, Options(chunk_rows=512), (4096, 8)),
        (S4, Options(chunk_rows=512), (3584, 9)),
        (S4, Options(memory_budget=2**28), (3328, 5)),
        # All tokens.
        ({"tokens": 4096, "vocab": 129280, "hidden": 7168}, Options(chunk_rows=512), (4096, 15)),
        ({"tokens": 4096, "vocab": 129280, "hidden": 7168}, Options(chunk_rows=512, ignored_rows="compute"), (4096, 8)),
        ({"tokens": 2048}, Options(chunk_rows=512), (2048, 5)),
        # Not where nobody asked for little memory.
        (S4, Options(), None),
        ({"hidden": 8192}, Options(), None),
        (S4, Options(chunk_rows=2048), None),
        (S4, Options(memory_budget=2**31), None),
        # With dX, its sum needs room, too.
        ({"hidden": 8192}, Options(chunk_rows=960, ignored_rows="compute"), (7296, 8)),
        ({"hidden": 8192, "input_grad": False}, Options(chunk_rows=960, ignored_rows="compute"), (8192, 9)),
        # But then a copy of the first rows of x needs memory of its own.
        ({"tokens": 4096, "vocab": 32000, "input_grad": False}, Options(chunk_rows=512), (1536, 5)),
        ({"tokens": 4096, "vocab": 32000}, Options(chunk_rows=512), (2048, 4)),
        # Summed in float32, dW has room for twice as many.
        ({"tokens": 16384}, Options(chunk_rows=512), (7168, 15)),
        # Not the most tokens that there is room for, which would be 2560, in 15 blocks.
        ({"vocab": 64001, "hidden": 2048, "tokens": 4096}, Options(chunk_rows=700), (2048, 3)),
        # Where there is no dW, or no memory for it yet, or another kernel makes the gradient.
        ({"tokens": 4096, "weight_grad": False}, Options(chunk_rows=512), None),
        ({"tokens": 4096, "has_bias": True, "bias_grad": True}, Options(chunk_rows=512), None),
        ({"tokens": 4096, "loss": Loss(z_loss=0.1)}, Options(chunk_rows=512), None),
        ({"tokens": 4096, "float32_logits": True}, Options(chunk_rows=512, logits_dtype="float32"), None),
        ({"tokens": 4096, "device_type": "cpu"}, Options(chunk_rows=512), None),
        ({"tokens": 4096, "hidden": 4100}, Options(chunk_rows=512), None),
    ],
    ids=str,
)
def test_where_the_first_tokens_are_staged(changes, options, staged):
    assert make_plan(problem(**changes), options).staged == staged


@pytest.mark.parametrize("options", [Options(chunk_rows=rows) for rows in (256, 512, 1000)], ids=str)
@pytest.mark.parametrize("ignored_rows", IGNORED_ROWS)
def test_staged_logits_take_no_more_memory_than_chunks(options, ignored_rows, monkeypatch):
    options = replace(options, ignored_rows=ignored_rows)
    sizes = itertools.product((2048, 8191), (32000, 128257), (512, 4096, 8192))
    problems = [problem(tokens=tokens, vocab=vocab, hidden=hidden) for tokens, vocab, hidden in sizes]
    plans = [make_plan(region, options) for region in problems]
    monkeypatch.setattr(choose, "_with_staged_logits", lambda problem, plan: plan)
    count = 0
    for region, plan in zip(problems, plans, strict=True):
        without = make_plan(region, options)
        if plan.staged is None:
            assert plan == without
            continue
        count += 1
        first, _ = plan.staged
        assert temporary_bytes(region, plan) <= temporary_bytes(region, without)
        blocks = plan.staged_logits(hidden=region.hidden, vocab=region.vocab, itemsize=2)
        assert blocks.width >= CUDA_SMALLEST_BLOCK and blocks.borrowed
        # dX, in float32, before the first of them.
        assert 4 * blocks.rows * region.hidden <= 2 * blocks.free_elements
        assert first == region.tokens or first > plan.chunk_rows
    assert count > 1


# Matmuls.


@pytest.mark.parametrize(
    ("changes", "options", "tuned"),
    [
        ({}, Options(), True),
        ({}, Options(tune_products=False), False),
        ({"dtype": torch.float32}, Options(), False),
        ({"device_type": "cpu"}, Options(), False),
        # 8000 columns at a time are not worth measuring, though all columns at once are.
        ({"tokens": 1024, "vocab": 32000}, Options(chunk_rows=400), False),
        ({"tokens": 2048, "vocab": 32000}, Options(chunk_rows=2048), True),
    ],
    ids=str,
)
def test_large_matmuls_are_tuned(changes, options, tuned):
    assert make_plan(problem(**changes), options).tune_products == tuned


# Row kernels.


@pytest.mark.parametrize("row_kernels", ["triton", "nvfuser"])
@pytest.mark.parametrize("changes", [{"device_type": "cpu"}, {"dtype": torch.float64}], ids=str)
def test_row_kernels_that_cannot_run_are_an_error(changes, row_kernels):
    with pytest.raises(ValueError, match=f'row_kernels="{row_kernels}"'):
        make_plan(problem(**changes), Options(row_kernels=row_kernels))


def test_row_kernels_are_part_of_the_plan():
    assert make_plan(S1, Options(row_kernels="torch")).row_kernels == "torch"
    assert make_plan(S1, Options()).row_kernels == "auto"


# Other plans, for `explain`.


def test_alternatives_are_other_plans_that_can_run():
    plan = make_plan(S1, Options())
    others = alternatives(S1, plan)
    assert plan not in others and len(set(others)) == len(others)
    assert {other.strategy for other in others} == {"gradients_in_forward", "save_logits", "recompute_logits"}
    in_forward = {other.chunk_rows for other in others if isinstance(other, GradientsInForward)}
    assert in_forward == {plan.chunk_rows // 2, plan.chunk_rows * 2}


def test_one_loss_a_token_has_no_gradients_in_forward():
    each_row = problem(loss=EACH_ROW)
    others = alternatives(each_row, make_plan(each_row, Options()))
    assert {other.strategy for other in others} == {"save_logits", "recompute_logits"}


@pytest.mark.parametrize("loss", [Loss(), EACH_ROW, Loss(reduction="none", label_smoothing=0.1)])
def test_without_gradients_only_the_chunk_can_differ(loss):
    frozen = problem(input_grad=False, weight_grad=False, loss=loss)
    others = alternatives(frozen, make_plan(frozen, Options(ignored_rows="compute")))
    assert {other.strategy for other in others} == {"loss_only"}
    assert {other.ignored_rows for other in others} == {"compute"}


# Plans as values.


EVERY_PLAN = [
    *(kind(**fields) for kind in (GradientsInForward, LossOnly) for fields in ({"chunk_rows": 7},)),
    GradientsInForward(chunk_rows=7, float32_accumulator=True, staged=(8, 2), ignored_rows="compute"),
    GradientsInForward(chunk_rows=7, float32_rows=3, float32_logits=True, row_kernels="torch", tune_products=True),
    SaveLogits(),
    SaveLogits(ignored_rows="compute"),
    RecomputeLogits(chunk_rows=7, block_columns=8),
    SaveSomeLogits(saved_rows=5, chunk_rows=7, block_columns=8),
]


@pytest.mark.parametrize("plan", EVERY_PLAN, ids=lambda plan: plan.describe())
def test_a_plan_is_what_a_trace_carries_of_it(plan):
    """Beside the fields of a loss, and with whatever belongs to no plan."""
    carried = plan.non_defaults()
    assert Plan.of(carried) == plan and type(Plan.of(carried)) is type(plan)
    assert Plan.of({**Loss(z_loss=0.1).non_defaults(), "needs_grad": ("input",), **carried}) == plan
    assert carried["strategy"] == plan.strategy
    assert all(value != getattr(Plan, name, None) for name, value in carried.items())


def test_every_kind_of_plan_is_tried():
    assert {type(plan) for plan in EVERY_PLAN} == set(PLANS)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (GradientsInForward(chunk_rows=8), "gradients in forward, chunks of 8 tokens"),
        (
            GradientsInForward(chunk_rows=8, float32_accumulator=True),
            "gradients in forward, chunks of 8 tokens, dW summed in float32",
        ),
        (
            GradientsInForward(chunk_rows=8, float32_logits=True, ignored_rows="compute", row_kernels="torch"),
            "gradients in forward, chunks of 8 tokens, float32 logits, ignored rows computed, row kernels by torch",
        ),
        (SaveLogits(tune_products=True), "save logits, products tuned"),
        (
            RecomputeLogits(chunk_rows=8, block_columns=16),
            "recompute logits, chunks of 8 tokens, blocks of 16 columns of the vocabulary",
        ),
        (
            SaveSomeLogits(saved_rows=4, chunk_rows=8, block_columns=16),
            "save logits of 4 tokens, chunks of 8 tokens, blocks of 16 columns of the vocabulary",
        ),
        (LossOnly(chunk_rows=8), "loss only, chunks of 8 tokens"),
        (
            make_plan(problem(tokens=2048), Options(chunk_rows=512)),
            "gradients in forward, one chunk of 2048 tokens staged in dW's memory in 5 blocks, products tuned",
        ),
        (
            make_plan(S1, Options(chunk_rows=512, tune_products=False)),
            "gradients in forward, first 4096 tokens staged in dW's memory in 8 blocks, chunks of 512 tokens, "
            "192 rows of dW summed in float32",
        ),
    ],
    ids=lambda value: "" if isinstance(value, str) else type(value).__name__,
)
def test_a_plan_in_words(plan, words):
    assert plan.describe() == words


# Layouts and options.


@pytest.mark.parametrize("vocab", [1, 7, 8, 1009, 32000, 50257, 128256, 128257, 152064, 256000, 299993])
def test_layout_of_a_row(vocab):
    layout = VocabLayout.aligned(vocab)
    assert layout.vocab == vocab and layout.row_stride % 8 == 0
    assert 0 <= layout.padding < 64
    assert layout.padding == 0 or vocab % 8
    assert layout_for(vocab, dtype=torch.bfloat16, device_type="cuda") == layout
    assert layout_for(vocab, dtype=torch.bfloat16, device_type="cpu").padding == 0
    assert layout_for(vocab, dtype=torch.float64, device_type="cuda").padding == 0


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
        ("logits_dtype", "float64"),
        ("row_kernels", "cuda"),
        ("tune_products", 1),
        ("expected_gradient", 10**30),
        ("expected_gradient", 10**400),
    ],
)
def test_options_name_the_field_that_is_wrong(field, value):
    with pytest.raises(ValueError, match=f"^{field} must be"):
        Options(**{field: value})
