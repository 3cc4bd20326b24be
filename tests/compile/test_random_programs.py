"""Random programs with losses in them, against eager PyTorch: see `random_programs`."""

import pytest

import random_programs
from thunder_flce.matching import algebra


@pytest.mark.parametrize(("compiler", "count"), [("backend", 45), ("thunder.jit", 18)])
def test_results_are_those_of_eager_pytorch(compiler, count):
    made = [random_programs.compare(number, compiler) or () for number in range(count)]
    assert any(decision.fused for decisions in made for decision in decisions)


def test_failures_are_found(monkeypatch):
    monkeypatch.setitem(algebra._VARIABLES, "E", {"entropy": 1, "log_sum_exp": 1})
    with pytest.raises(AssertionError, match="def program"):
        for number in range(40):
            random_programs.compare(number)
