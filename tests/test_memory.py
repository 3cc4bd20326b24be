"""The memory that a plan is said to take beside gradients is what the tensors of a call take."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from reference import run_inside
from thunder_flce import Options, functional, linear_cross_entropy
from thunder_flce.execution.row_kernels.torch_rows import TorchRowKernels
from thunder_flce.operators import problem_of
from thunder_flce.options import IGNORED_ROWS, STRATEGIES
from thunder_flce.planning.choose import temporary_bytes

ROW_METHODS = ("statistics", "moments", "gradient", "statistics_and_gradient", "target_gradient")


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
TOKENS, HIDDEN, VOCAB = 512, 64, 8192
NEEDS = {"all": "xWb", "input": "x", "weight": "W", "bias": "b"}
CASES = [(None, ""), *((strategy, needs) for strategy in STRATEGIES for needs in NEEDS.values())]


@pytest.mark.parametrize("ignored_rows", IGNORED_ROWS)
@pytest.mark.parametrize(("strategy", "needs"), CASES)
def test_predicted_memory_is_what_tensors_take(strategy, needs, ignored_rows, monkeypatch):
    operands = {"x": torch.randn(TOKENS, HIDDEN), "W": torch.randn(VOCAB, HIDDEN), "b": torch.randn(VOCAB)}
    for name, tensor in operands.items():
        tensor.requires_grad_(name in needs)
    x, weight, bias = operands.values()
    seen = []
    plan_for = functional.plan_for

    def spy(operands, options, memory):
        plan = plan_for(operands, options, memory)
        seen.append((problem_of(operands, options), plan))
        return plan

    monkeypatch.setattr(functional, "plan_for", spy)
    live = LiveBytes()
    # Row work in PyTorch takes memory for some rows at a time, which other row kernels do not.
    for method in ROW_METHODS:
        monkeypatch.setattr(TorchRowKernels, method, _called_within(live.paused, getattr(TorchRowKernels, method)))
    options = Options(strategy=strategy, chunk_rows=128, ignored_rows=ignored_rows)
    with live:
        loss = linear_cross_entropy(x, weight, torch.randint(VOCAB, (TOKENS,)), linear_bias=bias, options=options)
        if loss.requires_grad:
            loss.backward()
    ((problem, plan),) = seen
    assert live.peak - problem.gradient_bytes == pytest.approx(temporary_bytes(problem, plan), rel=0.05)
