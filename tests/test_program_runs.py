"""What is written down of a region is what runs: the same calls, in the same order, of the same sizes and memory."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from program_interpreter import loop_sizes
from reference import run_inside
from test_program import CASES, PLANS, Case, T, can_run, problem_of
from thunder_flce import functional, linear_cross_entropy, operators
from thunder_flce.execution import engine
from thunder_flce.execution.layout import VocabLayout
from thunder_flce.execution.matmul import matmul
from thunder_flce.execution.operands import Operands, Term, UpstreamGradients
from thunder_flce.execution.plan import (
    GradientsInForward,
    LossOnly,
    Plan,
    RecomputeLogits,
    SaveLogits,
    SaveSomeLogits,
)
from thunder_flce.execution.record import Step
from thunder_flce.execution.row_kernels.interface import RowWork
from thunder_flce.execution.row_kernels.torch_rows import TorchRowKernels
from thunder_flce.graph.trace_printer import stage_lines
from thunder_flce.operation.problem import Problem, TermShape
from thunder_flce.options import IGNORED_ROWS
from thunder_flce.planning.program import program

ROW_METHODS = ("statistics", "moments", "gradient", "statistics_and_gradient", "target_gradient")

Call = tuple[str, tuple[int, ...]]
"""What was called, and the size of its result; of row kernels, how many rows"""


@contextmanager
def spied_calls() -> Iterator[list[Call]]:
    """The matmuls and the row work of the engine, in order."""
    calls: list[Call] = []

    def spy(owner, name: str, read):
        function = getattr(owner, name)

        def wrapper(*arguments, **settings):
            calls.append(read(*arguments))
            return function(*arguments, **settings)

        return mock.patch.object(owner, name, wrapper)

    def of_matmul(kind: str):
        return lambda out, *others, **settings: (kind, tuple(out.shape))

    def of_rows(method: str):
        def read(kernels, first, *others):
            rows = first if isinstance(first, torch.Tensor) else first.buffers[0].padded
            return method, (rows.shape[0],)

        return read

    names = {"logits_": "logits", "input_gradient_": "dX", "weight_gradient_": "dW"}
    spies = [spy(matmul, name, of_matmul(kind)) for name, kind in names.items()]
    spies += [spy(TorchRowKernels, method, of_rows(method)) for method in ROW_METHODS]
    spies += [spy(torch, name, lambda z, dim: ("argmax", (z.shape[0],))) for name in ("argmax", "argmin")]
    for each in spies:
        each.start()
    try:
        yield calls
    finally:
        for each in spies:
            each.stop()


def written_calls(steps: Iterator[Step]) -> Iterator[Call]:
    """The same from steps."""
    for step in steps:
        name = step.result.split("[")[0]
        if " @ " in step.expression:
            kind = "logits" if name in ("logits", "z") else name[:2]
            yield kind, step.shape
        elif step.is_row_work:
            if name in ("dlogits", "saved_dlogits"):
                # The target's entry is written last: one step, two calls.
                yield from ((method, step.shape[:1]) for method in ("gradient", "target_gradient"))
            else:
                results = step.result.split(", ")
                is_statistics = results[0] == "row_max"
                method = "statistics" if is_statistics else "moments"
                yield method + ("_and_gradient" if is_statistics and len(results) == 3 else ""), step.shape
        elif name == "argmax":
            yield "argmax", step.shape


def random_operands(problem: Problem) -> Operands:
    """Tensors for a problem on a CPU, no target ignored."""
    rows, tokens, dtype = problem.weight_rows or problem.vocab, problem.tokens, problem.dtype
    several = () if problem.targets_per_token is None else (problem.targets_per_token,)
    return Operands(
        terms=tuple(
            Term(
                x=torch.randn(tokens, term.hidden, dtype=dtype),
                weight=torch.randn(rows, term.hidden, dtype=dtype),
                input_grad=term.input_grad,
                weight_grad=term.weight_grad,
            )
            for term in problem.terms
        ),
        bias=torch.randn(rows, dtype=dtype) if problem.has_bias else None,
        target=(problem.loss.ignore_index + torch.randint(1, problem.vocab, (tokens, *several))).remainder(
            problem.vocab
        ),
        loss=problem.loss,
        target_weights=torch.rand(tokens, *several) if several else None,
        class_weight=torch.rand(rows) if problem.has_class_weight else None,
        token_inputs=tuple(torch.rand(tokens) for _ in range(problem.token_inputs)),
        num_items=torch.tensor(7.0) if problem.has_num_items else None,
        expected_gradient=torch.tensor(0.3) if problem.has_expected_gradient else None,
        bias_grad=problem.bias_grad,
    )


def _dtype_for(plan: Plan) -> torch.dtype:
    """16 bits, but where dW's memory holds the logits of all tokens: there is no room for dX's float32 sum."""
    return torch.float32 if getattr(plan, "staged", None) == (T, 2) else torch.bfloat16


def executed_calls(problem: Problem, plan: Plan) -> list[list[Call]]:
    """What the engine calls on a CPU, in forward and backward."""
    operands, loss, calls = random_operands(problem), problem.loss, []
    with spied_calls() as forward:
        result = engine.forward(operands, plan)
    calls.append(forward)
    if result.gradients is None and not isinstance(plan, LossOnly):
        of_rows = torch.ones(problem.tokens)
        upstream = UpstreamGradients(
            of_rows if loss.reduction == "none" else torch.ones(()),
            log_prob=of_rows if "log_prob" in loss.outputs else None,
            entropy=of_rows if "entropy" in loss.outputs else None,
        )
        with spied_calls() as backward:
            engine.backward(operands, plan, result.statistics, result.kept, upstream)
        calls.append(backward)
    return calls


@pytest.mark.parametrize(
    ("plan", "case"),
    [
        (plan, case)
        for plan in PLANS
        for case in CASES
        # Steps do not say how often they go over the columns of several targets; the row work, below, does.
        if can_run(PLANS[plan], CASES[case]) and CASES[case].targets is None
    ],
)
def test_written_steps_are_the_calls_of_the_engine(plan, case):
    """For each way to treat ignored rows, where there are none."""
    plan, case = PLANS[plan], CASES[case]
    for ignored_rows in IGNORED_ROWS:
        plan = replace(plan, ignored_rows=ignored_rows)
        problem = replace(problem_of(case, plan, dtype=_dtype_for(plan)), device_type="cpu")
        found = program(problem, plan)
        written = [
            list(written_calls(step for stage in stages for step in stage.every_step()))
            for stages in (found.forward, found.backward)
        ]
        assert [calls for calls in written if calls] == executed_calls(problem, plan)


def _row_work(method: str, arguments: dict[str, Any]) -> RowWork:
    """What a call of a row kernel asks for."""
    (_, logits), *others = arguments.items()
    settings = {name: value for name, value in others if name not in ("statistics", "target")}
    coefficients = settings.pop("coefficients", None)
    if method == "statistics_and_gradient":
        settings["dtype"] = logits.buffers[0].padded.dtype
    return RowWork.of(method, logits, coefficients, **settings)


@pytest.mark.parametrize(
    ("plan", "case"), [(plan, case) for plan in PLANS for case in CASES if can_run(PLANS[plan], CASES[case])]
)
def test_written_row_work_is_what_is_asked_of_the_kernels(plan, case, monkeypatch):
    """From it follow the fusions that are printed, and how many bytes are moved."""
    plan, case = PLANS[plan], CASES[case]
    problem = problem_of(case, plan, dtype=_dtype_for(plan))
    found = program(problem, replace(plan, row_kernels="nvfuser"))
    steps = [step for stage in found.stages for step in stage.every_step()]
    # Rows are padded on CUDA only.
    written = [
        replace(work, layouts=tuple(VocabLayout.contiguous(layout.vocab) for layout in work.layouts))
        for step in steps
        for work in step.fusions
    ]
    seen: list[RowWork] = []
    for method in ROW_METHODS:
        function = getattr(TorchRowKernels, method)

        def spy(kernels, *arguments, method=method, function=function, **settings):
            bound = inspect.signature(function).bind(kernels, *arguments, **settings)
            bound.apply_defaults()
            seen.append(_row_work(method, dict(list(bound.arguments.items())[1:])))
            return function(kernels, *arguments, **settings)

        monkeypatch.setattr(TorchRowKernels, method, spy)
    executed_calls(replace(problem, device_type="cpu"), plan)
    assert written == seen


def _printed_sizes(problem: Problem, plan: Plan) -> list[tuple[str, list[int]]]:
    found = program(problem, plan)
    sizes = [loop_sizes(line) for line in (*stage_lines(found.forward), *stage_lines(found.backward))]
    return [loop for loop in sizes if loop is not None]


def _sizes_of(calls: list[list[Call]], dimension: int) -> list[int]:
    return [shape[dimension] for of_direction in calls for kind, shape in of_direction if kind == "logits"]


def _small(tokens: int, vocab: int, plan: Plan) -> Problem:
    head = TermShape(hidden=2, input_grad=True, weight_grad=True)
    problem = problem_of(Case(terms=(head,)), plan, tokens=tokens, vocab=vocab, dtype=torch.float32)
    return replace(problem, device_type="cpu")


def test_printed_chunks_of_2500_tokens_are_those_that_run():
    """In chunks of 1000: about equal ones after the first, so that none is small."""
    plan = GradientsInForward(chunk_rows=1000)
    problem = _small(2500, 3, plan)
    assert _printed_sizes(problem, plan) == [("chunk", [1000, 750, 750])]
    assert _sizes_of(executed_calls(problem, plan), 0) == [1000, 750, 750]


# Whole tiles of 128 rows, too, in which chunks are rounded up.
CHUNK_ROWS = st.one_of(st.integers(1, 400), st.sampled_from((128, 256, 384)))


@settings(max_examples=60, deadline=None)
@given(tokens=st.integers(1, 1000), rows=CHUNK_ROWS, plan=st.sampled_from((GradientsInForward, LossOnly)))
def test_printed_chunks_are_those_that_run(tokens, rows, plan):
    plan = plan(chunk_rows=rows)
    problem = _small(tokens, 3, plan)
    assert _printed_sizes(problem, plan) == [("chunk", _sizes_of(executed_calls(problem, plan), 0))]


@settings(max_examples=40, deadline=None)
@given(tokens=st.integers(2, 300), vocab=st.integers(17, 90), rows=CHUNK_ROWS, blocks=st.integers(2, 5))
def test_printed_staged_blocks_are_those_that_run(tokens, vocab, rows, blocks):
    """The first tokens' logits in blocks, over which dX and dW go again, then chunks of the others."""
    blocks = min(blocks, vocab // 8)
    plan = GradientsInForward(chunk_rows=min(rows, tokens), staged=(max(tokens // 2, 1), blocks))
    problem = _small(tokens, vocab, plan)
    (forward,) = executed_calls(problem, plan)
    in_blocks = [shape[1] for kind, shape in forward if kind == "logits"][:blocks]
    later = [shape[0] for kind, shape in forward if kind == "logits"][blocks:]
    printed = _printed_sizes(problem, plan)
    assert printed == [("block", in_blocks)] * 3 + ([("chunk", later)] if later else [])


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(2, 400),
    vocab=st.integers(2, 300),
    rows=CHUNK_ROWS,
    columns=st.integers(1, 200),
    saved=st.one_of(st.none(), st.integers(1, 300)),
)
def test_printed_vocabulary_blocks_are_those_that_run(tokens, vocab, rows, columns, saved):
    """Where logits are computed again, for those tokens whose logits were not saved."""
    plan = RecomputeLogits(chunk_rows=rows, block_columns=columns)
    if saved is not None:
        saved = min(saved, tokens - 1)
        plan = SaveSomeLogits(chunk_rows=rows, block_columns=columns, saved_rows=saved)
    problem = _small(tokens, vocab, plan)
    forward, backward = executed_calls(problem, plan)
    assert _printed_sizes(problem, plan) == [
        ("chunk", _sizes_of([forward], 0)),
        ("block", _sizes_of([backward], 1)),
    ]
    assert {shape[0] for kind, shape in backward if kind == "logits"} == {tokens - (saved or 0)}


class LiveBytes(TorchDispatchMode):
    """The most bytes that tensors made meanwhile hold at a time."""

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0
        self._is_paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is made inside does not count."""
        self._is_paused = True
        yield
        self._is_paused = False

    def __torch_dispatch__(self, function, types, arguments=(), settings=None):
        known = {tensor.untyped_storage()._cdata for tensor in tree_leaves((arguments, settings)) if _is_tensor(tensor)}
        result = run_inside(self, function, arguments, settings)
        if self._is_paused:
            return result
        for tensor in filter(_is_tensor, tree_leaves(result)):
            storage = tensor.untyped_storage()
            if storage._cdata not in known:
                self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._live = {key: live for key, live in self._live.items() if not live[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._live.values()))
        return result


def _is_tensor(value) -> bool:
    return isinstance(value, torch.Tensor)


def _called_within(context, function):
    def wrapper(*arguments, **settings):
        with context():
            return function(*arguments, **settings)

    return wrapper


# T, H and V, so that the logits of a row outweigh what is one number a row, and gradients do not outweigh the logits.
MEMORY_PLANS = {
    "gradients in forward": GradientsInForward(chunk_rows=128),
    "gradients in forward, first tokens staged": GradientsInForward(chunk_rows=64, staged=(256, 5)),
    "gradients in forward, all tokens staged": GradientsInForward(chunk_rows=512, staged=(512, 10)),
    "save logits": SaveLogits(),
    "save some logits": SaveSomeLogits(saved_rows=200, chunk_rows=128, block_columns=1024),
    "recompute logits": RecomputeLogits(chunk_rows=128, block_columns=2048),
    "loss only": LossOnly(chunk_rows=128),
}


NEEDS = ("all", "input", "weight", "bias")


def _needs_of(plan: Plan) -> tuple[str, ...]:
    """The operands that may need a gradient, of which at least one does."""
    if isinstance(plan, LossOnly):
        return ("nothing",)
    is_staged = isinstance(plan, GradientsInForward) and plan.staged is not None
    return ("input and weight", "weight") if is_staged else NEEDS


@pytest.mark.parametrize("ignored_rows", IGNORED_ROWS)
@pytest.mark.parametrize(
    ("plan", "needs"), [(name, needs) for name, plan in MEMORY_PLANS.items() for needs in _needs_of(plan)]
)
def test_predicted_memory_is_what_tensors_take(plan, needs, ignored_rows, monkeypatch):
    plan = replace(MEMORY_PLANS[plan], ignored_rows=ignored_rows)
    tokens, vocab, hidden = 512, 8192, 64
    operands = {
        "input": torch.randn(tokens, hidden),
        "weight": torch.randn(vocab, hidden),
        "bias": torch.randn(vocab),
    }
    for name, tensor in operands.items():
        tensor.requires_grad_(needs == "all" or name in needs)
    x, weight, bias = operands.values()
    target = torch.randint(0, vocab, (tokens,))
    seen: list[Problem] = []

    def plan_for(operands, options, memory):
        seen.append(operators.problem_of(operands, options))
        return plan

    monkeypatch.setattr(functional, "plan_for", plan_for)
    live = LiveBytes()
    # Row work in PyTorch takes memory for some rows at a time, which other row kernels do not.
    for method in ROW_METHODS:
        monkeypatch.setattr(TorchRowKernels, method, _called_within(live.paused, getattr(TorchRowKernels, method)))
    with live:
        loss = linear_cross_entropy(x, weight, target, linear_bias=bias)
        if loss.requires_grad:
            loss.backward()
    (problem,) = seen
    assert live.peak - problem.gradient_bytes == pytest.approx(program(problem, plan).temporary_bytes, rel=0.05)
