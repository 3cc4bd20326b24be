"""Plans for models' shapes and a dozen devices, and the memory that they are predicted to take."""

import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from thunder_flce import LinearCrossEntropyLoss, Options, linear_cross_entropy
from thunder_flce.device import ABSENT_DEVICE, Device, from_properties
from thunder_flce.engine import choose as choosing
from thunder_flce.engine.choose import EXACT_CHUNKS, choose, strategy_of, temporary_bytes
from thunder_flce.engine.plan import Plan
from thunder_flce.operation.call import Call, Shard, Spec
from thunder_flce.operation.divergence import Divergence
from thunder_flce.operation.loss import NOTHING_IGNORED, Loss
from thunder_flce.operators import plan_for

GB, MB = 10**9, 10**6
EACH_ROW = Loss(reduction="none")
H200 = replace(ABSENT_DEVICE, memory=141 * GB)
CPU = Device("cpu", 2, 1e11, 1e10)


def gpu(name, multiprocessors, memory, capability, clock=0, memory_clock=0, width=0, threads=2048) -> Device:
    """Returns the device that PyTorch describes by these numbers, in GB, MHz and bits."""
    return from_properties(
        SimpleNamespace(
            name=name, multi_processor_count=multiprocessors, total_memory=memory * GB, major=capability[0],
            minor=capability[1], clock_rate=1000 * clock, memory_clock_rate=1000 * memory_clock, memory_bus_width=width,
            warp_size=32, max_threads_per_multi_processor=threads,
        )
    )  # fmt: skip


DEVICES = {
    "H200": H200,
    "H100": gpu("NVIDIA H100 80GB HBM3", 132, 80, (9, 0), 1980, 2619, 5120),
    "A100": gpu("NVIDIA A100-SXM4-40GB", 108, 40, (8, 0), 1410, 1215, 5120),
    "A100 80GB": gpu("NVIDIA A100-SXM4-80GB", 108, 80, (8, 0), 1410, 1593, 5120),
    "A6000": gpu("NVIDIA RTX A6000", 84, 48, (8, 6), 1800, 8001, 384, 1536),
    "3090": gpu("NVIDIA GeForce RTX 3090", 82, 24, (8, 6), 1695, 9751, 384, 1536),
    "4090": gpu("NVIDIA GeForce RTX 4090", 128, 24, (8, 9), 2520, 10501, 384, 1536),
    "L40S": gpu("NVIDIA L40S", 142, 48, (8, 9), 2520, 9001, 384, 1536),
    "B200": gpu("NVIDIA B200", 148, 192, (10, 0), 1965, 3996, 8192),
    "5090": gpu("NVIDIA GeForce RTX 5090", 170, 32, (12, 0), 2407, 14001, 512, 1536),
    # Its memory is the host's, whose clock is unknown.
    "GB10": gpu("NVIDIA GB10", 48, 128, (12, 1), 2418, threads=1536),
    "MI300X": replace(gpu("AMD Instinct MI300X", 304, 192, (9, 4), 2100, 1300, 8192), is_hip=True, warp_size=64),
}


def call(
    tokens=8192, vocab=128256, hidden=4096, *, dtype=torch.bfloat16, device="cuda", loss=None, bias=False, rank=0,
    needs_grad=("input", "linear_weight"), targets=None, shard=None, teacher=None, **tensors,
) -> Call:  # fmt: skip
    """Returns a call of specs, by default with the head of Llama 3.1 8B."""

    def spec(*shape, dtype=dtype):
        return Spec(shape, dtype, torch.device(device))

    columns, own = vocab if shard is None else shard.columns, tokens
    if shard is not None and shard.sequence_parallel:
        own //= shard.ranks
    specs = {"input": spec(own, hidden), "linear_weight": spec(columns, hidden)}
    specs["target"] = spec(tokens, *([targets] if targets else []), dtype=torch.int64)
    if bias:
        specs["linear_bias"], needs_grad = spec(vocab), (*needs_grad, "linear_bias")
    if targets:
        specs["target_weights"] = spec(tokens, targets, dtype=torch.float32)
    if rank:
        specs |= {"terms[0].input": spec(own, rank), "terms[0].weight": spec(columns, rank)}
        needs_grad = (*needs_grad, "terms[0].input", "terms[0].weight")
    if teacher:
        specs |= {"teacher_input": spec(own, teacher), "teacher_weight": spec(columns, teacher)}
    loss = replace(loss or Loss(), divergence=Divergence() if teacher else None)
    return Call(tensors=specs | tensors, loss=loss, needs_grad=needs_grad, shard=shard)


def plan_of(*sizes, options=None, on=ABSENT_DEVICE, **changes) -> Plan:
    return choose(call(*sizes, **changes), options or Options(), on)


S1, S4, U2 = (8192, 128256, 4096), (4096, 152064, 3584), (8192, 50257, 1600)
FROZEN = {"needs_grad": ("input",)}


@pytest.fixture(autouse=True)
def nothing_warned(monkeypatch):
    monkeypatch.setattr(choosing, "_warned", set())


# Strategies.


@pytest.mark.parametrize(("changes", "options", "strategy"), [
    ({}, Options(), "gradients_in_forward"),
    ({"loss": Loss(reduction="sum", outputs=("argmax", "log_sum_sq_probs"))}, Options(), "gradients_in_forward"),
    ({"loss": EACH_ROW}, Options(), "recompute_logits"),
    ({"loss": Loss(outputs=("mean_logit",))}, Options(), "recompute_logits"),
    ({"loss": EACH_ROW, **FROZEN}, Options(), "gradients_in_forward"),
    ({"loss": EACH_ROW, "rank": 16, **FROZEN}, Options(), "recompute_logits"),
    # The gradients of several targets' log-probabilities are no multiples of one vector.
    ({"loss": Loss(reduction="none", outputs=("log_prob",)), "targets": 3, **FROZEN}, Options(), "recompute_logits"),
    ({"dtype": torch.float16}, Options(), "recompute_logits"),
    ({"dtype": torch.float16}, Options(expected_gradient=1024.0), "gradients_in_forward"),
    ({"dtype": torch.float16}, Options(strategy="gradients_in_forward"), "gradients_in_forward"),
    ({"needs_grad": ()}, Options(strategy="save_logits"), "loss_only"),
    ({"needs_grad": (), "bias": True}, Options(), "gradients_in_forward"),
    ({"teacher": 4096}, Options(), "gradients_in_forward"),
    ({"teacher": 4096, "loss": EACH_ROW}, Options(), "recompute_logits"),
    ({"teacher": 4096, "loss": EACH_ROW, **FROZEN}, Options(), "recompute_logits"),
    *(({}, Options(strategy=name), name) for name in ("save_logits", "recompute_logits")),
], ids=str)  # fmt: skip
def test_strategies(changes, options, strategy):
    assert plan_of(options=options, **changes).strategy == strategy_of(call(**changes), options) == strategy


# Saved logits.


def test_as_many_logits_are_saved_as_the_budget_allows():
    each_row, whole = call(loss=EACH_ROW), 8192 * 128256 * 2
    expected = {whole: (8192, 8192), whole - 1: (4096, 8191), whole // 2: (1024, 4095), whole // 8: (0, 0)}
    for budget, (least, most) in expected.items():
        plan = choose(each_row, Options(memory_budget=budget), ABSENT_DEVICE)
        assert least <= plan.rows_saved(8192) <= most and temporary_bytes(each_row, plan) <= budget


# Chunks.


@pytest.mark.parametrize(("sizes", "changes", "rows"), [
    (S1, {}, 2048),
    (U2, {"options": Options(accumulate="parameter")}, 2816),
    ((32768, 128256, 768), {"bias": True}, 4096),
    # One chunk takes 5% less time than several, but less than 3% on an RTX 4090.
    (S4, {}, 4096),
    ((3000, 128256, 4096), {"on": DEVICES["4090"]}, 1536),
    # Small calls are one chunk: their logits are small beside their gradients, or take little memory.
    ((1000, 32000, 768), {}, 1000),
    ((8192, 32000, 2048), {}, 8192),
    ((8192, 49152, 576), {}, 2816),
    # One chunk, because the error of dW would otherwise be too large.
    ((8192, 32000, 4096), {}, 8192),
    # The size that the options ask for.
    (S1, {"options": Options(chunk_rows=300)}, 300),
    # Half where the head is frozen and dX fills the device, 132 multiprocessors.
    *(((8192, 128256, h), FROZEN, rows) for h, rows in ((2048, 2048), (4096, 1024))),
    ((8192, 128256, 4096), {**FROZEN, "rank": 1024}, 2048),
    # Half with a teacher, whose logits take as much memory, unless there are many tokens or very few.
    *(((tokens, 128256, 4096), {"teacher": 4096}, rows) for tokens, rows in ((1000, 1000), (2048, 1024), (8192, 2048))),
    # Without dW, a single chunk avoids no sum.
    ((8192, 32000, 2048), FROZEN, 2816),
    ((8192, 128256, 4096), {"needs_grad": ()}, 2048),
    ((0, 128256, 4096), {}, 1),
], ids=str)  # fmt: skip
def test_chunks(sizes, changes, rows):
    assert plan_of(*sizes, **changes).chunk_rows == rows


OTHER_SIZES = (
    S4, U2, (16384, 262144, 2560), (4096, 128256, 8192), (8192, 32000, 4096), (512, 32000, 768), (8192, 151936, 1024),
    (2048, 262144, 3840),
)  # fmt: skip


@pytest.mark.parametrize("name", DEVICES)
def test_devices(name):
    """Chunks follow the ratio of a chip's rates, within a twentieth of its memory; only Hopper's matmuls are tuned."""
    device = DEVICES[name]
    assert plan_of(on=device).chunk_rows == {"3090": 1024, "L40S": 4096, "GB10": 4096}.get(name, 2048)
    for sizes in (S1, *OTHER_SIZES):
        for changes in ({}, {"loss": EACH_ROW}, FROZEN, {"needs_grad": ()}, {"bias": True}):
            plan, region = plan_of(*sizes, on=device, **changes), call(*sizes, **changes)
            assert temporary_bytes(region, plan, device) <= 0.05 * device.memory, (sizes, changes, plan.describe())
            assert plan.tune_products == (name in ("H200", "H100"))
    assert plan_of(on=device, options=Options(tune_products=True)).tune_products == (name != "MI300X")
    assert not plan_of(on=device, options=Options(tune_products=False)).tune_products


# The sum of dW.


def test_where_dw_is_summed():
    """In float32 if 16 bits would add more than a quarter to the error of dW."""
    plan = plan_of()
    assert not plan.float32_accumulator and -(-8192 // plan.chunk_rows) <= EXACT_CHUNKS and plan.float32_rows == 192
    in_float32 = Options(accumulate="float32", logits_dtype="float32")
    for sizes, options, changes, is_wide in (
        (S1, Options(chunk_rows=512), {}, False),
        (S1, Options(chunk_rows=256), {}, True),
        (S1, Options(chunk_rows=256, accumulate="parameter"), {}, False),
        (S1, Options(chunk_rows=256), FROZEN, False),
        (S1, Options(chunk_rows=256), {"dtype": torch.float32}, False),
        (S1, Options(chunk_rows=256), {"teacher": 4096}, True),
        ((16384, 128256, 4096), Options(accumulate="float32"), {}, True),
        (S1, Options(accumulate="float32", chunk_rows=8192), {}, False),
        ((8192, 32000, 4096), Options(chunk_rows=2048), {}, True),
        ((8192, 32000, 4096), Options(), {}, False),
        ((32768, 128256, 768), Options(), {}, True),
        # With some logits saved.
        ((12288, 256000, 2304), Options(accumulate="float32"), {"loss": EACH_ROW, "on": H200}, True),
        ((512, 4096, 64), replace(in_float32, memory_budget=11 * MB), {"loss": EACH_ROW}, True),
    ):
        plan = plan_of(*sizes, options=options, **changes)
        assert plan.float32_accumulator == is_wide, (sizes, options, changes)
        assert not (plan.float32_accumulator and plan.float32_rows)
    # Chunks of a float32 sum take twice the memory of the rounded dW, unless chunks are larger already.
    for sizes, rows in (((16384, 128256, 2048), 4096), ((16384, 128256, 4096), 8192), ((32768, 128256, 768), 4096)):
        assert plan_of(*sizes).chunk_rows == rows and plan_of(*sizes).float32_accumulator
    assert not plan_of(options=Options(chunk_rows=8192)).float32_rows
    # Also if the rows after those whose logits are saved are one chunk.
    plan = Plan(strategy="save_logits", saved_rows=1664, chunk_rows=4096, float32_accumulator=True)
    assert [plan.sum_dtype(call(), 4096, rows=rows).itemsize for rows in (1664, 1665, 4096)] == [2, 4, 4]
    # Labels beside a divergence tell the frequent rows, also if none is ignored.
    nothing_ignored, weights = Loss(ignore_index=NOTHING_IGNORED), Spec((8192,), torch.float32, torch.device("cuda"))
    assert plan_of(teacher=4096, loss=nothing_ignored, label_weights=weights).float32_rows == 192
    assert not plan_of(teacher=4096, loss=nothing_ignored).float32_rows
    # All rows of an adapter's dW are summed in float32.
    assert plan_of(rank=512).float32_rows == 192 and not plan_of(rank=512, **FROZEN).float32_rows


# Memory.


def shard_of(ranks: int, vocab: int = 128256, **changes) -> Shard:
    columns = vocab // ranks
    return Shard(group="", ranks=ranks, rank=0, start=0, columns=columns, largest=columns, vocab=vocab, **changes)


def test_ranks_that_divide_the_vocabulary():
    """Their memory includes a chunk's dX in float32 and, if ranks divide the tokens, the gathered x of two chunks."""
    for is_sequence in (False, True):
        region = call(shard=shard_of(4, sequence_parallel=is_sequence))
        plan = choose(region, Options(ignored_rows="compute", chunk_rows=2048), ABSENT_DEVICE)
        parts = 2048 * 4096 * (4 + (1 + 2 * 2 if is_sequence else 0))
        frequent = plan.float32_rows * (4 * 4096 + 2 * 2048)
        assert temporary_bytes(region, plan) == 2 * 2048 * 32064 + frequent + parts
        # A chunk has more rows by the number of ranks, and at least one of each part of the tokens.
        assert choose(region, Options(), ABSENT_DEVICE).chunk_rows == 8192
        assert choose(region, Options(chunk_rows=1), ABSENT_DEVICE).chunk_rows == (4 if is_sequence else 1)
        partly = choose(replace(region, loss=EACH_ROW), Options(memory_budget=400 * MB), ABSENT_DEVICE)
        assert not (is_sequence and partly.saved_rows)


def test_all_ranks_get_one_plan():
    uneven = shard_of(4, 128250)
    for columns in (0, 100, 32062):
        other = replace(uneven, rank=1, start=7, columns=columns)
        assert plan_of(vocab=128250, shard=other) == plan_of(vocab=128250, shard=uneven)


# Budgets.

SHAPES = [S1, S4, U2, (8192, 256000, 2304), (65536, 128256, 4096)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("loss", [Loss(), EACH_ROW], ids=["mean", "none"])
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_more_than_the_budget_is_never_taken_silently(sizes, loss, dtype):
    region = call(*sizes, loss=loss, dtype=dtype)
    for megabytes in (150, 400, 600, 1600):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            plan = choose(region, Options(memory_budget=megabytes * MB), ABSENT_DEVICE)
        needed = temporary_bytes(region, plan)
        is_over = needed > 1.01 * megabytes * MB
        assert is_over == any(f"take {needed / 1e6:.0f} MB" in str(warning.message) for warning in caught)


def test_budget_as_a_fraction_of_the_device():
    by_fraction = plan_of(options=Options(memory_budget=0.01), on=replace(H200, memory=140 * GB))
    assert by_fraction == plan_of(options=Options(memory_budget=1400 * MB))
    with pytest.raises(ValueError, match="memory_budget is a fraction"):
        plan_of(options=Options(memory_budget=0.01))


def test_warnings_name_the_cure_once():
    def warned(*tokens, **options) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for count in tokens:
                plan_of(count, options=Options(**options))
        return [str(warning.message) for warning in caught]

    (text,) = warned(65536, 65537, 70000, 65536, memory_budget=600 * MB)
    assert text.startswith("within a memory_budget of 600 MB") and "2101 MB have room" in text
    assert len(warned(65536, 70000, memory_budget=700 * MB)) == 1
    assert not warned(65536, memory_budget=600 * MB, accumulate="parameter")
    (text,) = warned(65536, 70000, memory_budget=600 * MB, accumulate="float32")
    assert text.startswith("memory_budget is 600 MB, but up to 65536 tokens take 2101 MB")
    assert 'accumulate="parameter" takes less' in text
    assert len(warned(8192, 8000, memory_budget=60 * MB)) == 1


def test_warnings_are_about_the_line_that_calls():
    head = LinearCrossEntropyLoss(8, 600, options=Options(memory_budget=1))
    x, target = torch.zeros(70, 8), torch.zeros(70).long()
    with pytest.warns(UserWarning, match="memory_budget is 0 MB, but up to") as caught:
        linear_cross_entropy(x, head.linear.weight, target, options=head.options)
        head(x, target, token_weights=torch.ones(70))
    assert [warning.filename for warning in caught] == [__file__] * 2


@pytest.mark.parametrize(
    ("sizes", "changes", "waits"),
    [(S1, {}, True), ((4096, 128256, 2048), {}, True), ((2048, 151936, 896), {}, False), ((64, 500, 32), {}, False),
     ((64, 500, 32), {"device": "cpu", "on": CPU}, True), (S1, {"needs_grad": ()}, True)],
)  # fmt: skip
def test_the_host_waits_for_the_number_of_rows_if_that_pays(sizes, changes, waits):
    assert plan_of(*sizes, **changes).ignored_rows == ("skip" if waits else "compute")
    for choice in ("skip", "compute"):
        assert plan_of(*sizes, options=Options(ignored_rows=choice), **changes).ignored_rows == choice
    # No rows are ignored.
    assert plan_of(*sizes, loss=Loss(ignore_index=NOTHING_IGNORED), **changes).ignored_rows == "skip"


def test_plans_are_for_the_device_of_the_operands(monkeypatch):
    """With two different GPUs, plans are neither for the current nor for the first one."""
    devices = {0: DEVICES["H200"], 1: DEVICES["L40S"]}
    monkeypatch.setattr(Device, "of", lambda device: devices[device.index or 0])
    for index, device in devices.items():
        assert plan_for(call(device=f"cuda:{index}"), Options()) == choose(call(), Options(), device)
    assert plan_for(call(device="cuda:0"), Options()) != plan_for(call(device="cuda:1"), Options())
