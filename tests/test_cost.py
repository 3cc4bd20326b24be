"""The cost model against what was measured on the device that its constants are from."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from thunder_flce import Options
from thunder_flce.bench.predictions import WAYS
from thunder_flce.bench.shapes import SHAPES, Shape
from thunder_flce.execution.plan import GradientsInForward, LossOnly, Plan, RecomputeLogits, SaveLogits
from thunder_flce.operation.loss import Loss
from thunder_flce.operation.problem import Problem, TermShape
from thunder_flce.planning import choose, cost
from thunder_flce.planning.choose import make_plan
from thunder_flce.planning.cost import DeviceRates, predicted_seconds, seconds
from thunder_flce.planning.program import program

H200_FOLDER = Path(__file__).parent.parent / "traces" / "h200"
H200 = "NVIDIA H200"
OPTIONS = {
    "flce": Options(),
    "flce, 512 rows": Options(chunk_rows=512),
    "flce, 4096 rows": Options(chunk_rows=4096),
    "flce, save_logits": Options(strategy="save_logits"),
    "flce, recompute_logits": Options(strategy="recompute_logits"),
}


def problem_of(shape: Shape, **changes) -> Problem:
    """The region of a measured shape."""
    head = TermShape(hidden=shape.hidden, input_grad=True, weight_grad=not shape.frozen)
    adapter = TermShape(hidden=shape.rank, input_grad=True, weight_grad=True)
    fields = {
        "tokens": shape.tokens,
        "terms": (head, adapter) if shape.rank else (head,),
        "vocab": shape.vocab,
        "dtype": shape.dtype,
        "device_type": "cuda",
        "loss": Loss(),
        "has_bias": shape.bias,
        "bias_grad": shape.bias,
    }
    return Problem(**{**fields, **changes})


S1 = problem_of(SHAPES["S1"])


def _measurements() -> Iterator:
    records = map(json.loads, (H200_FOLDER / "regions.jsonl").read_text(encoding="utf-8").splitlines())
    for record in records:
        shape = SHAPES[record["shape"].split()[0]]
        # How many rows are ignored is not known when a plan is made.
        if record["method"] in OPTIONS and not shape.ignored:
            yield pytest.param(shape, record, id=f"{shape.name} {record['method']}")


@pytest.mark.parametrize(("shape", "record"), list(_measurements()))
def test_predictions_are_near_the_measurements(shape, record):
    problem = problem_of(shape)
    plan = make_plan(problem, OPTIONS[record["method"]])
    predicted_ms = predicted_seconds(problem, plan, H200) * 1e3
    # Matmuls of a tenth of a millisecond, one after the other, leave the device waiting for the host.
    waits_for_host = (shape.name, record["method"]) == ("U2", "flce, 512 rows")
    assert predicted_ms == pytest.approx(record["time_ms"], rel=0.08 if waits_for_host else 0.04)


def _predicted() -> Iterator:
    for record in map(json.loads, (H200_FOLDER / "predictions.jsonl").read_text(encoding="utf-8").splitlines()):
        yield pytest.param(record, id=f"{record['name']} {record['method']}")


@pytest.mark.parametrize("record", list(_predicted()))
def test_every_strategy_is_predicted(record):
    """Its memory and its time; but for the time of 245 small kernels, for which the device waits."""
    shape, way = SHAPES[record["name"]], WAYS[record["method"]]
    problem = problem_of(shape, loss=Loss(reduction=way.reduction))
    if not way.needs_grad:
        frozen = tuple(replace(term, input_grad=False, weight_grad=False) for term in problem.terms)
        problem = replace(problem, terms=frozen, bias_grad=False)
    plan = make_plan(problem, way.options_for(shape))
    assert program(problem, plan).peak_bytes / 1e9 == pytest.approx(record["memory_gb"], rel=0.01)
    waits_for_host = (shape.name, record["method"]) == ("U2", "save_logits, some rows")
    predicted_ms = predicted_seconds(problem, plan, H200) * 1e3
    assert predicted_ms == pytest.approx(record["time_ms"], rel=0.2 if waits_for_host else 0.08)


@pytest.mark.parametrize(
    ("changes", "device_name"),
    [({}, None), ({}, "another device"), ({"device_type": "cpu"}, H200), ({"dtype": torch.float32}, H200)],
    ids=str,
)
def test_unknown_devices_have_no_prediction(changes, device_name):
    problem = replace(S1, **changes)
    assert predicted_seconds(problem, make_plan(problem, Options()), device_name) is None


def test_what_was_never_measured_has_no_prediction():
    assert predicted_seconds(S1, make_plan(S1, Options(row_kernels="torch")), H200) is None


RATES = DeviceRates(matmul_rate=1e12, bandwidth=1e10, part_seconds=0.0)


def _seconds(plan: Plan, problem: Problem = S1, **rates: float) -> float:
    return seconds(program(problem, plan), replace(RATES, **rates))


def test_matmuls_are_counted_once_for_each_time_they_run():
    """The logits twice where they are computed again; without gradients, nothing else."""
    infinitely_fast = {"bandwidth": float("inf")}
    once = 2 * S1.tokens * S1.hidden * S1.vocab / 1e12
    frozen = replace(S1, terms=(TermShape(hidden=S1.hidden, input_grad=False, weight_grad=False),))
    for plan, problem, times in (
        (GradientsInForward(chunk_rows=2048), S1, 3),
        (GradientsInForward(chunk_rows=512, staged=(4096, 8)), S1, 3),
        (SaveLogits(), S1, 3),
        (RecomputeLogits(chunk_rows=2048, block_columns=16384), S1, 4),
        (LossOnly(chunk_rows=2048), frozen, 1),
    ):
        assert _seconds(plan, problem, **infinitely_fast) == pytest.approx(times * once)


def test_each_chunk_costs_something():
    """Those of a loop that goes on and on over the same blocks, once."""
    free = {"matmul_rate": float("inf"), "bandwidth": float("inf"), "part_seconds": 1.0}
    assert _seconds(GradientsInForward(chunk_rows=2048), **free) == 4
    assert _seconds(GradientsInForward(chunk_rows=512, staged=(4096, 8)), **free) == 8 + 8
    assert _seconds(RecomputeLogits(chunk_rows=4096, block_columns=65536), **free) == 2 + 2


def test_a_sum_of_dw_is_read_and_written_once_more_by_each_later_chunk():
    free = {"matmul_rate": float("inf")}
    chunks = [_seconds(GradientsInForward(chunk_rows=rows), **free) for rows in (8192, 4096, 2048)]
    sum_seconds = 2 * S1.vocab * S1.hidden * 2 / 1e10
    assert chunks[1] - chunks[0] == pytest.approx(sum_seconds)
    assert chunks[2] - chunks[0] == pytest.approx(3 * sum_seconds)


@pytest.fixture
def at_rates(monkeypatch):
    """Lets the planner compare candidates at other rates."""

    def use(**rates: float) -> None:
        of_device = replace(cost.DEVICE_RATES[H200], **rates)
        monkeypatch.setattr(choose, "seconds", lambda found: seconds(found, of_device))

    return use


def test_the_planner_takes_what_is_predicted_to_be_fastest(at_rates):
    """Staged blocks spare chunks, each of which reads and writes dW; but blocks cost something, too: here one more."""
    u1, options = problem_of(SHAPES["U1"]), Options(chunk_rows=512)
    assert make_plan(u1, options).staged == (4096, 9)
    at_rates(part_seconds=1e-3, bandwidth=1e15)
    assert make_plan(u1, options).staged is None


def test_one_chunk_or_more_by_the_prediction(at_rates):
    """S4 of the benchmarks: one chunk spares the sum over chunks. If that were free, more take less memory."""
    s4 = problem_of(SHAPES["S4"])
    assert make_plan(s4, Options()).chunk_rows == s4.tokens
    at_rates(bandwidth=1e18, part_seconds=-1e-3)
    assert make_plan(s4, Options()).chunk_rows < s4.tokens
