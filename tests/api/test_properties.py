"""Random problems over every argument of `linear_cross_entropy`, against eager PyTorch in float64."""

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module

import pytest
import torch

import random_calls
from random_calls import SPECIAL, drawn, special_case
from reference import run_by
from thunder_flce import Options
from thunder_flce.engine.kernels import dispatch, torch_rows
from thunder_flce.engine.plan import Plan

ON_EVERY_BACKEND = True
CALLS = {"cpu": 600, "cuda": 100}
FAILED = {"cpu": (1377,), "cuda": ()}
"""1377: a token loss of the log-sum-exp, over one column"""
SAVED_EXAMPLES = {"cpu": 100, "cuda": 20}
ONE_PASS_EXAMPLES = {"cpu": 150, "cuda": 40}
SPECIAL_EXAMPLES = {"cpu": 20, "cuda": 10}


@pytest.fixture
def few_rows_at_a_time(monkeypatch):
    """Where PyTorch's operations are the row kernels."""
    monkeypatch.setattr(torch_rows, "BLOCK_BYTES", 512)
    monkeypatch.setattr(torch_rows, "THREAD_BYTES", 256)


def test_every_plan(device, few_rows_at_a_time):
    """What `random_calls` runs by the thousand, and what has failed of that."""
    for number in (*range(CALLS[device]), *FAILED[device]):
        random_calls.numbered(number, device).run(device)


def test_some_logits_saved(device, few_rows_at_a_time, monkeypatch):
    """Of fewer tokens, of more than are computed, and the others in chunks."""
    for call, one_of in drawn(SAVED_EXAMPLES[device], device):
        is_16_bit, options = call.dtype.itemsize == 2, call.options
        plan = Plan(
            strategy="save_logits" if call.any_grad else "loss_only", saved_rows=one_of(3, 1, 10, 100),
            chunk_rows=one_of(2, 1, 5, 100), float32_accumulator=is_16_bit,
            float32_logits=options.has_float32_logits(call.dtype),
            ignored_rows="compute" if options.ignored_rows == "compute" else "skip", row_kernels=options.row_kernels,
        )  # fmt: skip
        run_by(monkeypatch, plan)
        replace(call, options=Options()).run(device)


@pytest.fixture
def kernel_calls(monkeypatch):
    """How often each of the row kernels that every loss needs one of was called."""
    calls = dict.fromkeys(("statistics", "both_"), 0)
    names = [name for name in dispatch.BACKENDS if name == "torch" or torch.cuda.is_available()]
    kernels = [dispatch.BACKENDS[name].kernels.split(":") for name in names if dispatch.is_installed(name)]
    lowerings = [getattr(import_module(module), name) for module, name in kernels]

    def counted(name: str, kernel: Callable) -> Callable:
        def call(*arguments):
            calls[name] += 1
            return kernel(*arguments)

        return call

    for lowering in lowerings:
        for name in calls:
            monkeypatch.setattr(lowering, name, counted(name, getattr(lowering, name)))
    return calls


def test_one_pass(device, few_rows_at_a_time, kernel_calls):
    for call, _ in drawn(ONE_PASS_EXAMPLES[device], device, in_one_pass=True):
        call.run(device)
    assert kernel_calls["statistics"] == 0
    assert kernel_calls["both_"] > ONE_PASS_EXAMPLES[device] / 2


@pytest.mark.parametrize("in_one_pass", [False, True], ids=["", "one pass"])
@pytest.mark.parametrize("special", SPECIAL)
def test_logits_that_are_not_ordinary(special, in_one_pass, device, kernel_calls):
    """As PyTorch has them."""
    for call, _ in drawn(SPECIAL_EXAMPLES[device], device, in_one_pass=in_one_pass):
        call, case = special_case(call, special, device)
        call.run(device, case=case)
    assert kernel_calls["both_" if in_one_pass else "statistics"] > SPECIAL_EXAMPLES[device] / 4
