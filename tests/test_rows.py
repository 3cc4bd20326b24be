"""Which rows are computed, and how what was computed of them finds its tokens."""

from types import SimpleNamespace

import pytest
import torch

from reference import assert_as_exact_as_eager, error, make_case, truth
from thunder_flce import Options, linear_cross_entropy, operators
from thunder_flce.execution import row_selection
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
