"""Which rows are computed, and how what was computed of them finds its tokens."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import thunder_flce
from reference import assert_as_exact_as_eager, error, make_case, truth
from thunder_flce import Options, linear_cross_entropy, operators
from thunder_flce.execution import host_counts, row_selection
from thunder_flce.execution.matmul import matmul
from thunder_flce.execution.operands import Operands, Term
from thunder_flce.execution.plan import LossOnly, SaveSomeLogits
from thunder_flce.execution.region import Region
from thunder_flce.execution.row_selection import Rows, select_rows
from thunder_flce.operation.loss import Loss
from thunder_flce.options import IGNORED_ROWS, STRATEGIES
from thunder_flce.planning.choose import make_plan


def selected(target: torch.Tensor, *, vocab: int = 7, ignored_rows: str = "skip") -> Rows:
    """The rows of a region with these targets."""
    x, weight = torch.zeros(target.shape[0], 1), torch.zeros(vocab, 1)
    operands = Operands(terms=(Term(x=x, weight=weight),), bias=None, target=target, loss=Loss())
    return select_rows(Region(operands, LossOnly(chunk_rows=1, ignored_rows=ignored_rows))).rows()


@pytest.mark.parametrize("block", [1, 3, 100])
@pytest.mark.parametrize("ignored", [(), (0,), (0, 1, 5, 6, 7, 19), (17, 18, 19), tuple(range(20)), tuple(range(19))])
def test_scatter_in_place(ignored, block, monkeypatch):
    """In place what `scatter` does; what lay in the other rows, were it NaN, is gone."""
    monkeypatch.setattr(row_selection, "_MOVED_ROWS", block)
    target = torch.arange(20) % 7
    target[list(ignored)] = -100
    rows = selected(target)
    packed = torch.randn(rows.count, 3)
    tensor = torch.full((20, 3), float("nan"))
    tensor[: rows.count] = packed
    rows.scatter_(tensor)
    assert torch.equal(tensor, torch.stack([rows.scatter(column) for column in packed.unbind(1)], 1))


def test_gather_and_scatter():
    target = torch.tensor([3, -100, 1, 2, -100])
    rows = selected(target)
    x = torch.randn(5, 2)
    assert torch.equal(rows.gather_chunk(x, slice(1, 3)), x[[2, 3]])
    assert torch.equal(rows.scatter(rows.gather(x[:, 0])), torch.where(target == -100, 0, x[:, 0]))


@pytest.mark.parametrize("policy", IGNORED_ROWS)
def test_scattered_rows_are_filled(policy):
    """What ignored rows hold, were it NaN, does not come through."""
    target = torch.tensor([3, -100, 1, -100])
    rows = selected(target, ignored_rows=policy)
    values = torch.where(target == -100, float("nan"), torch.arange(4.0))
    expected = torch.tensor([0.0, -7.0, 2.0, -7.0])
    assert torch.equal(rows.scatter(rows.mask_ignored(rows.gather(values), -7.0), -7.0), expected)


@pytest.fixture
def planned(monkeypatch, request):
    """The name of a plan, one of which only larger problems get, and options for it."""
    name = request.param

    def plan_of(problem, options, device):
        if name == "some rows saved":
            return SaveSomeLogits(saved_rows=14, chunk_rows=26, block_columns=5, ignored_rows=options.ignored_rows)
        return make_plan(problem, options)

    monkeypatch.setattr(operators, "cached_plan", plan_of)
    strategy = {"some rows saved": "save_logits"}.get(name, name)
    chunk_rows = None if strategy == "save_logits" else 10
    return SimpleNamespace(name=name, options=Options(strategy=strategy, chunk_rows=chunk_rows, ignored_rows="compute"))


PLANS = [*STRATEGIES, "some rows saved"]


@pytest.mark.parametrize("planned", PLANS, indirect=True)
def test_ignored_rows_with_large_logits(planned):
    """Where they are computed, too; the bias is large enough for its exponential to overflow."""
    case = make_case(tokens=40, bias=True, ignored=0.5)
    with torch.no_grad():
        case.bias += 100
    assert_as_exact_as_eager(case, options=planned.options)


@pytest.mark.parametrize("strategy", ["gradients_in_forward", "save_logits"])
def test_rows_of_x_take_no_memory_beside_dx(strategy, monkeypatch):
    """Where rows are skipped, those of a chunk are packed where its dX goes."""
    addresses = []

    def spy(name, read):
        function = getattr(matmul, name)

        def call(*arguments, **settings):
            addresses.append(read(*arguments).data_ptr())
            return function(*arguments, **settings)

        monkeypatch.setattr(matmul, name, call)

    spy("weight_gradient_", lambda out, dlogits, x: x)
    spy("input_gradient_", lambda out, dlogits, weight: out)
    x, weight = torch.randn(40, 8).requires_grad_(), torch.randn(12, 8).requires_grad_()
    target = torch.randint(0, 12, (40,))
    target[::3] = -100
    options = Options(strategy=strategy, chunk_rows=None if strategy == "save_logits" else 10)
    linear_cross_entropy(x, weight, target, options=options).backward()
    assert addresses[::2] == addresses[1::2]
    assert len(set(addresses)) == (1 if strategy == "save_logits" else 3)


def test_a_backward_that_may_not_wait(monkeypatch):
    """Rows that the forward has left out are computed again, where only the backward is captured, and add nothing."""
    case = make_case(tokens=40, bias=True, ignored=0.5)
    with torch.no_grad():
        case.bias += 100
    options = Options(strategy="recompute_logits", chunk_rows=10)
    loss = linear_cross_entropy(case.x, case.weight, case.target, linear_bias=case.bias, options=options)
    monkeypatch.setattr(row_selection, "_host_waits", lambda region: False)
    for got, right in zip(torch.autograd.grad(loss, case.operands()), truth(case).gradients, strict=True):
        assert error(got, right) < 1e-6


def _compiled(program, options):
    return torch.compile(partial(program, options=options), backend="aot_eager", fullgraph=True)


DOORS = {
    "eager": lambda program, options: partial(program, options=options),
    "torch.compile": _compiled,
    "thunder.jit": lambda program, options: thunder_flce.jit(program, options=options),
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("ignored", [0.0, 0.4])
@pytest.mark.parametrize("strategy", ["save_logits", "recompute_logits"])
def test_the_backward_does_not_ask_for_the_number_of_rows(strategy, ignored, door, device, monkeypatch):
    """The host waited for it in the forward, and knows it by the memory of what the forward saved."""
    case = make_case(tokens=33, hidden=16, vocab=64, device=device, ignored=ignored)
    losses = DOORS[door](partial(linear_cross_entropy, reduction="none"), Options(strategy=strategy))
    operands, grad = (case.x, case.weight), torch.randn(33, device=device)
    are_known, value_of = [], host_counts.value_of

    def asked(count):
        are_known.append(StorageWeakRef(count.untyped_storage()) in host_counts._known)
        return value_of(count)

    monkeypatch.setattr(host_counts, "value_of", asked)
    torch.autograd.grad(losses(*operands, case.target), operands, grad)
    found = losses(*operands, case.target)
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        torch.autograd.grad(found, operands, grad)
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    assert are_known == [True, True]


def test_known_counts():
    """Known while its memory lives, in views and detached tensors, and asked for in a copy."""
    before, count = len(host_counts._known), torch.tensor([7, 0])[0]
    assert host_counts.value_of(count) == 7
    host_counts.remember(count, 5)
    assert host_counts.value_of(count) == host_counts.value_of(count.detach()) == 5
    assert host_counts.value_of(count.clone()) == 7
    del count
    other = torch.tensor(3)
    host_counts.remember(other, 3)
    assert host_counts.value_of(other) == 3
    assert len(host_counts._known) <= before + 1
