"""Which rows are computed, and how what was computed of them finds its tokens."""

from functools import partial

import pytest
import torch

import thunder_flce
from reference import error, make_case, run_by, truth
from thunder_flce import Options, linear_cross_entropy
from thunder_flce.engine import engine
from thunder_flce.engine import rows as row_selection
from thunder_flce.engine.plan import Plan
from thunder_flce.engine.primitives import Primitives, Region
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


SAVING_PLANS = {name: plan for name, plan in PLANS.items() if plan.strategy != "gradients_in_forward"}


@pytest.mark.parametrize("ignored", [0.0, 0.4, 0.8, 1.0])
@pytest.mark.parametrize(("reduction", "frozen"), [("mean", False), ("none", False), ("none", True)])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_the_first_logits_while_the_host_waits(plan, reduction, frozen, ignored, monkeypatch):
    """As on a GPU: of a quarter of the tokens, or of a chunk, whether that many are valid or not."""
    if plan.strategy == "gradients_in_forward" and reduction == "none" and not frozen:
        pytest.skip("has no such plan")
    started, start = [], engine._Logits.start
    monkeypatch.setattr(
        engine._Logits, "start", lambda *arguments: (started.append(len(arguments[1])), start(*arguments))
    )
    monkeypatch.setattr(Region, "starts_early", property(lambda region: region.may_skip))
    run_by(monkeypatch, plan)
    case = make_case(tokens=41, bias=not frozen, ranks=() if frozen else (3,), ignored=ignored)
    case.weight.requires_grad_(not frozen)
    loss = linear_cross_entropy(
        case.x, case.weight, case.target, linear_bias=case.bias, terms=case.terms, reduction=reduction
    )
    grad = torch.randn_like(loss)
    found = torch.autograd.grad(loss, [each for each in case.operands() if each.requires_grad], grad)
    expected = truth(case, grad, reduction=reduction).gradients
    for got, right in zip(found, expected, strict=True):
        torch.testing.assert_close(got.double(), right, rtol=2e-5, atol=1e-6, equal_nan=True)
    assert started == [min(11, plan.rows_saved(41) or plan.chunk_rows)]


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

    def prepared(ops, upstream, meanwhile):
        # Only on CUDA need a forward not wait for the device.
        ops.region.may_skip = ops.region.may_skip and not is_captured["forward"]
        counts.append((rows := prepare(ops, upstream, meanwhile=meanwhile)).count)
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
