"""Which rows are computed, and the digits of rows that one column dominates."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from ranks import as_threads
from reference import PLANS, assert_as_exact_as_eager, make_case, run_by
from thunder_flce import Options, linear_cross_entropy
from thunder_flce.engine import engine, rows
from thunder_flce.engine.primitives import Region
from thunder_flce.options import STRATEGIES


@pytest.mark.parametrize("ignored", [0.4, 0.8, 1.0])
@pytest.mark.parametrize(("reduction", "frozen"), [("mean", False), ("none", False), ("none", True)])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_the_first_logits_while_the_host_waits(plan, reduction, frozen, ignored, monkeypatch):
    """As on a GPU: those of a quarter of the tokens, or of a chunk, whether that many are valid or not."""
    if plan.strategy == "gradients_in_forward" and reduction == "none" and not frozen:
        pytest.skip("has no such plan")
    started, start, starts_early = [], engine._Logits.start, Region.starts_early.func

    def on_gpu(region):
        properties = {name: getattr(region, name) for name in ("may_skip", "divides_tokens", "plan")}
        return starts_early(SimpleNamespace(**properties, device_type="cuda"))

    monkeypatch.setattr(Region, "starts_early", property(on_gpu))
    monkeypatch.setattr(engine._Logits, "start", lambda self, order: (started.append(len(order)), start(self, order)))
    run_by(monkeypatch, plan)
    case = make_case(tokens=41, bias=not frozen, ranks=() if frozen else (3,), ignored=ignored)
    case.weight.requires_grad_(not frozen)
    grad = torch.randn(41 if reduction == "none" else ())
    assert_as_exact_as_eager(case, grad, tiny=True, reduction=reduction)
    is_early = plan.strategy != "recompute_logits"
    assert started == [min(11, plan.rows_saved(41) or plan.chunk_rows)] * is_early


def test_remembered_counts_of_threads():
    """Counts that the host remembers, while it forgets others."""

    def run(_):
        for number in range(3000):
            count = torch.tensor(number)
            rows.remember(count, number)
            assert rows.recalled(count) == number

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(run, range(6)))


# Rows that one column dominates: -log p and p - 1 keep their digits, where 1 + x and 1 - x would lose those of x.

VOCAB = 100
MARGINS = (20.0, 30.0, 60.0, -20.0, 3.0, -30.0, 5.0)


def confident_rows(device, dtype):
    """Logits (T, V) and targets: the target's logit is so much above the others, or another's is."""
    logits = torch.randn(len(MARGINS), VOCAB, device=device).mul_(0.1)
    target = torch.randint(1, VOCAB, (len(MARGINS),), device=device)
    for row, margin in enumerate(MARGINS):
        logits[row, target[row] if margin > 0 else 0] = abs(margin)
    return logits.to(dtype), target


def exact_log_probs(logits):
    """In float64, with a sum that leaves out the maximum's own 1."""
    shifted = logits.double() - logits.double().amax(1, keepdim=True)
    others = shifted.exp().scatter(1, shifted.argmax(1, keepdim=True), 0)
    return shifted - others.sum(1, keepdim=True).log1p()


def check(logits, target, strategy, columns=slice(None), **settings):
    """With the identity for a head, dX is the gradient of the logits; a rank has some of the head's columns."""
    dtype, device = logits.dtype, logits.device
    x = logits.clone().requires_grad_()
    head = torch.eye(VOCAB, dtype=dtype, device=device)[columns]
    grad = torch.linspace(0.5, 1.5, len(target), device=device)
    names = ("log_prob", "entropy")
    options = Options(strategy=strategy, chunk_rows=None if strategy == "save_logits" else 3)
    settings |= {"outputs": names, "detached": names, "options": options}
    loss, log_prob, entropy = linear_cross_entropy(x, head, target, reduction="none", **settings)
    loss.backward(grad)

    exact = exact_log_probs(logits)
    at_target = exact.gather(1, target.view(-1, 1))[:, 0]
    tolerance = {"rtol": 1e-5, "atol": 0}
    torch.testing.assert_close(loss.double(), -at_target, **tolerance)
    torch.testing.assert_close(log_prob.view(-1).double(), at_target, **tolerance)
    torch.testing.assert_close(entropy.double(), -(exact.exp() * exact).sum(1), **tolerance)
    gradient = x.grad.gather(1, target.view(-1, 1))[:, 0].double()
    torch.testing.assert_close(gradient, at_target.expm1() * grad, rtol=max(1e-5, torch.finfo(dtype).eps), atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_confident_rows(strategy, dtype, device):
    check(*confident_rows(device, dtype), strategy)


@pytest.mark.parametrize("strategy", ["save_logits", "recompute_logits"])
def test_confident_rows_of_a_divided_vocabulary(strategy):
    logits, target = confident_rows("cpu", torch.float32)
    parts = [slice(0, 40), slice(40, 40), slice(40, VOCAB)]
    as_threads(3, lambda rank: check(logits, target, strategy, parts[rank], vocab_parallel=dist.group.WORLD))
