"""Random calls over every argument of `linear_cross_entropy`, against eager PyTorch in float64: see `random_calls`."""

import re
from dataclasses import replace

import pytest

import random_calls
from reference import run_by
from thunder_flce import Options
from thunder_flce.engine.plan import Plan

ON_EVERY_BACKEND = True
CALLS = {"cpu": 1000, "cuda": 180}
SAVED_EXAMPLES = {"cpu": 100, "cuda": 20}
COUNTS = {"module": 60, "torch.compile": 20, "thunder.jit": 15, "with our executor": 10, "with our transform": 10}


@pytest.fixture(autouse=True)
def few_rows_at_a_time(monkeypatch):
    random_calls.few_rows_at_a_time(monkeypatch.setattr)


def test_every_plan(device):
    for number in range(CALLS[device]):
        random_calls.numbered(number, device).run(device)


def test_some_logits_saved(device, monkeypatch):
    """Of fewer tokens, of more than are computed, and the others in chunks."""
    for number in range(SAVED_EXAMPLES[device]):
        one_of = random_calls.chooser(number)
        call = random_calls.plain_call(one_of, device)
        is_16_bit, options = call.dtype.itemsize == 2, call.options
        plan = Plan(
            strategy="save_logits" if call.any_grad else "loss_only", saved_rows=one_of(3, 1, 10, 100),
            chunk_rows=one_of(2, 1, 5, 100), float32_accumulator=is_16_bit,
            float32_logits=options.has_float32_logits(call.dtype),
            ignored_rows="compute" if options.ignored_rows == "compute" else "skip", row_kernels=options.row_kernels,
        )  # fmt: skip
        run_by(monkeypatch, plan)
        replace(call, options=Options()).run(device)


@pytest.mark.parametrize("way", COUNTS)
def test_ways(way, device):
    for number in range(COUNTS[way]):
        random_calls.numbered(number, device, way=way).run(device, way)


@pytest.mark.parametrize("way", random_calls.RANKS)
def test_on_ranks(way):
    """The vocabulary in parts of all sizes, and the tokens too: the results of the whole, with the same bits on all."""
    for number in range(50 if way == "DTensors" else 100):
        random_calls.numbered(number, "cpu", way=way).run("cpu", way)


def test_failures_are_found(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["random_calls.py", "--count", "30"])
    monkeypatch.setattr("thunder_flce.operation.loss.Loss.z_term", lambda self, row: None)
    with pytest.raises(SystemExit) as ended:
        random_calls.main()
    assert ended.value.code and re.search(r"30 calls on cpu: \d+ failed \[\d", capsys.readouterr().out)
