"""Which rows are computed, and how what was computed of them finds its tokens."""

from types import SimpleNamespace

import pytest
import torch

from reference import PLANS, assert_as_exact_as_eager, error, make_case, ours, run_by, truth
from thunder_flce import Options, linear_cross_entropy
from thunder_flce.engine import engine
from thunder_flce.engine.primitives import Primitives, Region

SAVING_PLANS = {name: plan for name, plan in PLANS.items() if plan.strategy != "gradients_in_forward"}


def start_early(monkeypatch):
    """As on a GPU, logits are computed before the number of rows is known."""
    asked = Region.starts_early.func

    def on_gpu(region):
        return asked(SimpleNamespace(**{name: getattr(region, name) for name in OF_EARLY}, device_type="cuda"))

    monkeypatch.setattr(Region, "starts_early", property(on_gpu))


OF_EARLY = ("may_skip", "are_parts", "plan")


@pytest.mark.parametrize("strategy", ["gradients_in_forward", "save_logits", "recompute_logits"])
def test_first_logits_of_confident_rows(strategy, monkeypatch):
    """A backward has the bits of the forward: of a probability near 1, 1 - p has no digit left otherwise."""
    start_early(monkeypatch)
    weight, target = torch.randn(128, 512), torch.randint(128, (4,))
    x = (weight[target] * (30 / 512) + torch.randn(4, 512) * 0.01).requires_grad_()
    loss = linear_cross_entropy(x, weight, target, reduction="sum", options=Options(strategy=strategy))
    (grad,) = torch.autograd.grad(loss, x)
    expected = (x.detach().double() @ weight.double().t()).softmax(1)
    expected[torch.arange(4), target] -= 1
    expected = expected @ weight.double()
    torch.testing.assert_close(grad.double(), expected, rtol=0, atol=1e-3 * expected.abs().max().item())


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
    start_early(monkeypatch)
    run_by(monkeypatch, plan)
    case = make_case(tokens=41, bias=not frozen, ranks=() if frozen else (3,), ignored=ignored)
    case.weight.requires_grad_(not frozen)
    grad = torch.randn(41 if reduction == "none" else ())
    assert_as_exact_as_eager(case, grad, tiny=True, reduction=reduction)
    is_early = plan.strategy != "recompute_logits"
    assert started == [min(11, plan.rows_saved(41) or plan.chunk_rows)] * is_early


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
    grad = torch.randn(40 if reduction == "none" else ())
    results = (run(case, grad, reduction=reduction).gradients for run in (ours, truth))
    assert all(error(got, right) < 1e-6 for got, right in zip(*results, strict=True))
    assert counts[0] == counts[1] == (int((case.target != -100).sum()) if captured == "backward" else 40)
