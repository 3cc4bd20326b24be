"""Random problems over every argument of `linear_cross_entropy`, against eager PyTorch in float64."""

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module

import pytest
import torch
from hypothesis import strategies as st

from problems import SPECIAL, Problem, check, one_pass_problems, problems, run_examples, special_case
from reference import run_by
from thunder_flce import Options
from thunder_flce.engine.kernels import dispatch, torch_rows
from thunder_flce.engine.plan import Plan

ON_EVERY_BACKEND = True
EXAMPLES = {"cpu": 400, "cuda": 40}
SAVED_EXAMPLES = {"cpu": 100, "cuda": 20}
ONE_PASS_EXAMPLES = {"cpu": 150, "cuda": 40}
SPECIAL_EXAMPLES = {"cpu": 20, "cuda": 10}


@pytest.fixture
def few_rows_at_a_time(monkeypatch):
    """Where PyTorch's operations are the row kernels."""
    monkeypatch.setattr(torch_rows, "BLOCK_BYTES", 512)
    monkeypatch.setattr(torch_rows, "THREAD_BYTES", 256)


def test_every_plan(device, few_rows_at_a_time):
    run_examples(lambda problem: check(problem, device), problems(device), EXAMPLES[device])


def test_some_logits_saved(device, few_rows_at_a_time, monkeypatch):
    """Of fewer tokens, of more than are computed, and the others in chunks."""

    def run(example: tuple[Problem, int, int]) -> None:
        problem, saved_rows, chunk_rows = example
        is_16_bit, options = problem.dtype.itemsize == 2, problem.options
        plan = Plan(
            strategy="save_logits" if problem.any_grad else "loss_only", saved_rows=saved_rows, chunk_rows=chunk_rows,
            float32_accumulator=is_16_bit, float32_logits=options.has_float32_logits(problem.dtype),
            ignored_rows="compute" if options.ignored_rows == "compute" else "skip", row_kernels=options.row_kernels,
        )  # fmt: skip
        run_by(monkeypatch, plan)
        check(replace(problem, options=Options()), device)

    examples = st.tuples(problems(device), st.sampled_from((3, 1, 10, 100)), st.sampled_from((2, 1, 5, 100)))
    run_examples(run, examples, SAVED_EXAMPLES[device])


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
    run_examples(lambda problem: check(problem, device), one_pass_problems(device), ONE_PASS_EXAMPLES[device])
    assert kernel_calls["statistics"] == 0
    assert kernel_calls["both_"] > ONE_PASS_EXAMPLES[device] / 2


@pytest.mark.parametrize("drawn_from", [problems, one_pass_problems], ids=["", "one pass"])
@pytest.mark.parametrize("special", SPECIAL)
def test_logits_that_are_not_ordinary(special, drawn_from, device, kernel_calls):
    """As PyTorch has them."""

    def run(problem: Problem) -> None:
        problem, case = special_case(problem, special, device)
        check(problem, device, case)

    run_examples(run, drawn_from(device), SPECIAL_EXAMPLES[device])
    needed = "both_" if drawn_from is one_pass_problems else "statistics"
    assert kernel_calls[needed] > SPECIAL_EXAMPLES[device] / 4
