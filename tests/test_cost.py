"""The cost model against what was measured on the device that its constants are from."""

import json
from pathlib import Path

import pytest
import torch

from thunder_flce import Options, cost
from thunder_flce.bench.shapes import SHAPES
from thunder_flce.plan import Problem, make_plan

pytest.importorskip("nvfuser_direct", reason="the model is of nvFuser's kernels")

MEASURED = Path(__file__).parent.parent / "traces" / "h200" / "regions.jsonl"
H200 = "NVIDIA H200"
OPTIONS = {
    "flce": Options(),
    "flce, 512 rows": Options(chunk_rows=512),
    "flce, 4096 rows": Options(chunk_rows=4096),
    "flce, save_logits": Options(strategy="save_logits"),
    "flce, recompute_logits": Options(strategy="recompute_logits"),
}


def _problem(shape, **changes):
    fields = {
        "tokens": shape.tokens,
        "hidden": shape.hidden,
        "vocab": shape.vocab,
        "dtype": shape.dtype,
        "device_type": "cuda",
        "reduction": "mean",
        "has_bias": shape.bias,
        "input_grad": True,
        "weight_grad": True,
        "bias_grad": shape.bias,
    }
    return Problem(**{**fields, **changes})


def _measurements():
    records = map(json.loads, MEASURED.read_text(encoding="utf-8").splitlines())
    for record in records:
        shape = SHAPES[record["shape"].split()[0]]
        # How many rows are ignored is not known when a plan is made.
        if record["method"] in OPTIONS and not shape.ignored:
            yield pytest.param(shape, record, id=f"{shape.name} {record['method']}")


@pytest.mark.parametrize(("shape", "record"), _measurements())
def test_predictions_are_near_the_measurements(shape, record):
    problem = _problem(shape)
    plan = make_plan(problem, OPTIONS[record["method"]])
    predicted_ms = cost.predicted_seconds(problem, plan, H200) * 1e3
    assert predicted_ms == pytest.approx(record["time_ms"], rel=0.08)


@pytest.mark.parametrize(
    ("changes", "device"),
    [({}, None), ({}, "another device"), ({"device_type": "cpu"}, H200), ({"dtype": torch.float32}, H200)],
    ids=str,
)
def test_unknown_devices_have_no_prediction(changes, device):
    problem = _problem(SHAPES["S1"], **changes)
    assert cost.predicted_seconds(problem, make_plan(problem, Options()), device) is None


def test_alternatives_are_other_plans_that_can_run():
    problem = _problem(SHAPES["S1"])
    plan = make_plan(problem, Options())
    others = cost.alternatives(problem, plan)
    assert plan not in others and len(set(others)) == len(others)
    assert {other.strategy for other in others} == {"gradients_in_forward", "save_logits", "recompute_logits"}
    in_forward = {other.chunk_rows for other in others if other.strategy == "gradients_in_forward"}
    assert in_forward == {plan.chunk_rows // 2, plan.chunk_rows * 2}


def test_one_loss_a_token_has_no_gradients_in_forward():
    problem = _problem(SHAPES["S1"], reduction="none")
    others = cost.alternatives(problem, make_plan(problem, Options()))
    assert {other.strategy for other in others} == {"save_logits", "recompute_logits"}


def test_without_gradients_only_the_chunk_can_differ():
    problem = _problem(SHAPES["S1"], input_grad=False, weight_grad=False)
    plan = make_plan(problem, Options(ignored_rows="compute"))
    others = cost.alternatives(problem, plan)
    assert {other.strategy for other in others} == {"loss_only"}
    assert not any(other.skip_ignored_rows for other in others)
