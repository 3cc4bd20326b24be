"""Which rows are computed, and how what was computed of them finds its tokens."""

from dataclasses import replace
from functools import partial

import pytest
import torch

import thunder_flce
from reference import assert_as_exact_as_eager, error, make_case, run_by, truth
from thunder_flce import Options, linear_cross_entropy
from thunder_flce.engine import rows as row_selection
from thunder_flce.engine.matmul import matmul
from thunder_flce.engine.plan import Plan
from thunder_flce.engine.primitives import Primitives
from thunder_flce.engine.rows import Rows
from thunder_flce.operation.call import Call
from thunder_flce.operation.loss import Loss
from thunder_flce.options import STRATEGIES

IGNORED_ROWS = ("skip", "compute")


def selected(target: torch.Tensor, *, vocab: int = 7, ignored_rows: str = "skip") -> Rows:
    """The rows of a region with these targets."""
    tensors = {"input": torch.zeros(target.shape[0], 1), "linear_weight": torch.zeros(vocab, 1), "target": target}
    plan = Plan(strategy="loss_only", chunk_rows=1, ignored_rows=ignored_rows)
    return Primitives(Call(tensors=tensors, loss=Loss()), plan).prepare(None)


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
    assert torch.equal(rows.scatter(rows.masked(rows.gather(values), -7.0), -7.0), expected)


@pytest.mark.parametrize(
    ("tokens", "largest", "first", "sizes"),
    [
        (10, 4, 0, [4, 4, 2]),
        (9, 8, 0, [5, 4]),
        (10, 100, 0, [10]),
        (10, 4, 3, [3, 4, 3]),
        (10, 4, 30, [10]),
        (0, 4, 3, []),
        (3 * 256 + 1, 512, 0, [512, 257]),
        (1100, 512, 0, [384, 384, 332]),
    ],
)
def test_chunks(tokens, largest, first, sizes):
    """About equal ones, of whole tiles where there are many rows; the first may be given."""
    chunks = [*selected(torch.zeros(tokens, dtype=torch.long)).chunks(largest, first)]
    assert [chunk.stop - chunk.start for chunk in chunks] == sizes
    assert [chunk.start for chunk in chunks] == [sum(sizes[:at]) for at in range(len(sizes))]


PLANS = {
    **{strategy: Plan(strategy=strategy, chunk_rows=0 if strategy == "save_logits" else 10) for strategy in STRATEGIES},
    "some logits saved": Plan(strategy="save_logits", saved_rows=14, chunk_rows=26),
}


@pytest.mark.parametrize("ignored_rows", IGNORED_ROWS)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_ignored_rows_with_large_logits(plan, ignored_rows, monkeypatch):
    """Where they are computed, too; the bias is large enough for its exponential to overflow."""
    run_by(monkeypatch, replace(plan, ignored_rows=ignored_rows))
    case = make_case(tokens=40, bias=True, ignored=0.5)
    with torch.no_grad():
        case.bias += 100
    assert_as_exact_as_eager(case)


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


SAVING_PLANS = {name: plan for name, plan in PLANS.items() if plan.strategy != "gradients_in_forward"}


@pytest.mark.parametrize("captured", ["forward", "backward", "both"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("plan", SAVING_PLANS.values(), ids=SAVING_PLANS)
def test_a_step_of_which_a_part_may_not_wait(plan, reduction, captured, monkeypatch):
    """As if it were captured. The backward goes on with the rows that the forward has computed, whichever these are."""
    run_by(monkeypatch, plan)
    case = make_case(tokens=40, bias=True, ignored=0.5)
    with torch.no_grad():
        case.bias += 100
    prepare, prepare_again = Primitives.prepare, Primitives.prepare_again
    is_captured = {"forward": captured != "backward", "backward": captured != "forward"}

    def prepared(ops, upstream):
        # Only on CUDA need a forward not wait for the device.
        ops.region.may_skip = ops.region.may_skip and not is_captured["forward"]
        counts.append((rows := prepare(ops, upstream)).count)
        return rows

    def prepared_again(ops, upstream, count):
        counts.append((rows := prepare_again(ops, upstream, count)).count)
        return rows

    counts = []
    monkeypatch.setattr(Primitives, "prepare", prepared)
    monkeypatch.setattr(Primitives, "prepare_again", prepared_again)
    monkeypatch.setattr(Primitives, "_is_capturing", lambda ops: is_captured["backward"])
    loss = linear_cross_entropy(case.x, case.weight, case.target, linear_bias=case.bias, reduction=reduction)
    grad = torch.randn_like(loss)
    for got, right in zip(
        torch.autograd.grad(loss, case.operands(), grad), truth(case, grad, reduction=reduction).gradients, strict=True
    ):
        assert error(got, right) < 1e-6
    assert counts[0] == counts[1] == (int((case.target != -100).sum()) if captured == "backward" else 40)


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
    """The host has it in its own memory, or knows it by the memory of what an operator has returned."""
    case = make_case(tokens=33, hidden=16, vocab=64, device=device, ignored=ignored)
    losses = DOORS[door](partial(linear_cross_entropy, reduction="none"), Options(strategy=strategy))
    operands, grad = (case.x, case.weight), torch.randn(33, device=device)
    are_known, recalled = [], row_selection.recalled

    def asked(count):
        are_known.append(recalled(count) is not None)
        return recalled(count)

    monkeypatch.setattr(row_selection, "recalled", asked)
    torch.autograd.grad(losses(*operands, case.target), operands, grad)
    found = losses(*operands, case.target)
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        torch.autograd.grad(found, operands, grad)
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    assert are_known == ([True, True] if device == "cuda" and door == "torch.compile" else [])


def test_known_counts():
    """Known while its memory lives, in views and detached tensors, and asked for in a copy."""
    before, count = len(row_selection._known_counts), torch.tensor([7, 0])[0]
    assert row_selection.recalled(count) is None
    row_selection.remember(count, 5)
    assert row_selection.recalled(count) == row_selection.recalled(count.detach()) == 5
    assert row_selection.recalled(count.clone()) is None
    del count
    other = torch.tensor(3)
    row_selection.remember(other, 3)
    assert row_selection.recalled(other) == 3
    assert len(row_selection._known_counts) <= before + 1
