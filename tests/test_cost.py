"""The cost model against what was measured on the device that its constants are from."""

import json
from pathlib import Path

import pytest
import torch

from thunder_flce import Options
from thunder_flce.bench.shapes import SHAPES
from thunder_flce.operation.loss import Loss
from thunder_flce.planning import cost
from thunder_flce.planning.plan import Problem, make_plan
from thunder_flce.planning.steps import PlannedRegion

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


def _region(shape, options=None, *, loss=None, **changes):
    fields = {
        "tokens": shape.tokens,
        "hidden": shape.hidden,
        "vocab": shape.vocab,
        "dtype": shape.dtype,
        "device_type": "cuda",
        "row_gradients": (loss or Loss()).has_row_gradients,
        "input_grad": True,
        "weight_grad": True,
        "bias_grad": shape.bias,
        "is_plain_loss": (loss or Loss()).is_plain,
    }
    problem = Problem(**{**fields, **changes})
    plan = make_plan(problem, options or Options())
    return PlannedRegion(problem=problem, plan=plan, loss=loss or Loss(), has_bias=shape.bias)


def _measurements():
    records = map(json.loads, MEASURED.read_text(encoding="utf-8").splitlines())
    for record in records:
        shape = SHAPES[record["shape"].split()[0]]
        # How many rows are ignored is not known when a plan is made.
        if record["method"] in OPTIONS and not shape.ignored:
            yield pytest.param(shape, record, id=f"{shape.name} {record['method']}")


@pytest.mark.parametrize(("shape", "record"), _measurements())
def test_predictions_are_near_the_measurements(shape, record):
    predicted_ms = cost.predicted_seconds(_region(shape, OPTIONS[record["method"]]), H200) * 1e3
    # Products of a tenth of a millisecond, one after the other, leave the device waiting for the host.
    waits_for_host = (shape.name, record["method"]) == ("U2", "flce, 512 rows")
    assert predicted_ms == pytest.approx(record["time_ms"], rel=0.08 if waits_for_host else 0.04)


@pytest.mark.parametrize(
    ("changes", "device"),
    [({}, None), ({}, "another device"), ({"device_type": "cpu"}, H200), ({"dtype": torch.float32}, H200)],
    ids=str,
)
def test_unknown_devices_have_no_prediction(changes, device):
    assert cost.predicted_seconds(_region(SHAPES["S1"], **changes), device) is None


def test_products_that_end_early_have_no_prediction():
    """How long they take depends on how many rows are ignored, and their rates are others."""
    assert cost.predicted_seconds(_region(SHAPES["S1"], Options(ignored_rows="skip_on_device")), H200) is None


def test_alternatives_are_other_plans_that_can_run():
    region = _region(SHAPES["S1"])
    plan, others = region.plan, [other.plan for other in cost.alternatives(region)]
    assert plan not in others and len(set(others)) == len(others)
    assert {other.strategy for other in others} == {"gradients_in_forward", "save_logits", "recompute_logits"}
    in_forward = {other.chunk_rows for other in others if other.strategy == "gradients_in_forward"}
    assert in_forward == {plan.chunk_rows // 2, plan.chunk_rows * 2}


def test_one_loss_a_token_has_no_gradients_in_forward():
    others = cost.alternatives(_region(SHAPES["S1"], loss=Loss(reduction="none")))
    assert {other.plan.strategy for other in others} == {"save_logits", "recompute_logits"}


def test_without_gradients_only_the_chunk_can_differ():
    region = _region(SHAPES["S1"], Options(ignored_rows="compute"), input_grad=False, weight_grad=False)
    others = [other.plan for other in cost.alternatives(region)]
    assert {other.strategy for other in others} == {"loss_only"}
    assert {other.ignored_rows for other in others} == {"compute"}
