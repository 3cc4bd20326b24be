"""Values and gradients against float64, for every strategy, reduction and kind of input."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from ranks import as_threads
from reference import PLANS, assert_as_exact_as_eager, error, errors, linear, make_case, ours, results_of, run_by, truth
from test_row_kernels import Exact
from thunder_flce import Options, linear_cross_entropy
from thunder_flce.engine import engine, rows
from thunder_flce.engine.kernels.scaling import scaled_gradients
from thunder_flce.engine.primitives import Region
from thunder_flce.operation.loss import LogitMap
from thunder_flce.options import STRATEGIES

ON_EVERY_BACKEND = True
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("reduction", "bias"), [("mean", True), ("sum", False), ("none", True)])
@pytest.mark.parametrize("strategy", [None, *STRATEGIES])
def test_every_strategy(strategy, reduction, bias, dtype, device):
    if strategy == "gradients_in_forward" and (reduction == "none" or dtype == torch.float16):
        pytest.skip("needs one upstream gradient; float16 is for strategies that know the loss scale")
    case = make_case(tokens=150, vocab=1009, hidden=64, dtype=dtype, device=device, bias=bias)
    grad = torch.randn(case.target.shape if reduction == "none" else (), device=device, dtype=torch.float64)
    if strategy in (None, "gradients_in_forward") and reduction != "none":
        # The finished gradients are rounded once more unless the upstream gradient is a power of two.
        grad = torch.full_like(grad, 0.25)
    options = Options(strategy=strategy, chunk_rows=None if strategy == "save_logits" else 40)
    grad = grad if dtype == torch.float64 else grad.float()
    assert_as_exact_as_eager(case, grad, options=options, reduction=reduction)


@pytest.mark.parametrize(("ranks", "frozen"), [((), False), ((8, 64), False), ((8, 64), True)])
def test_error_with_targets_as_frequent_as_words(ranks, frozen, device):
    """Zipf-distributed: some columns are the target of many tokens, and dW is summed in 16 bits, also an adapter's."""
    case = make_case(tokens=512, vocab=8192, hidden=64, dtype=torch.bfloat16, device=device, ignored=0.0, ranks=ranks)
    frequency = 1 / torch.arange(1, 8193, dtype=torch.float64)
    case.target = torch.multinomial(frequency, 512, replacement=True).to(device)
    case.weight.requires_grad_(not frozen)
    assert_as_exact_as_eager(case, options=Options(chunk_rows=32), factor=1.35 if ranks else 1.25)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_second_backward(plan, device, monkeypatch):
    """Upstream gradients one after another through a retained graph: no operand and no earlier gradient changes."""
    run_by(monkeypatch, plan)
    case = make_case(device=device, bias=True, ranks=(4, 30))
    operands = [tensor.detach().clone() for tensor in case.operands()]
    loss, held = results_of(case), []
    for value, retain in ((0.7, True), (3.0, True), (1.0, False)):
        grad = torch.tensor(value, device=device)
        gradients = torch.autograd.grad(loss, case.operands(), grad, retain_graph=retain)
        exact = truth(case, grad).gradients
        torch.testing.assert_close(gradients, exact, rtol=1e-4, atol=1e-6, check_dtype=False)
        held += [(gradient, gradient.clone()) for gradient in gradients]
    assert all(map(torch.equal, operands, case.operands()))
    assert all(torch.equal(gradient, copy) for gradient, copy in held)


@pytest.mark.parametrize("may_overwrite", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("factor", [1.0, 0.0, 0.3, float("nan")])
def test_finished_gradients_are_scaled_with_one_rounding(factor, dtype, may_overwrite, device):
    """0.3 in bfloat16 is off by 0.3%: the factor itself must not be rounded."""
    gradient = torch.randn(103, 77, device=device, dtype=dtype)
    before = gradient.clone()
    factor = torch.tensor(factor, device=device)
    (scaled,) = scaled_gradients([gradient], factor, may_overwrite=may_overwrite)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    torch.testing.assert_close(scaled, (before.to(wide) * factor).to(dtype), rtol=0, atol=0, equal_nan=True)
    assert (scaled.data_ptr() == gradient.data_ptr()) == may_overwrite
    assert may_overwrite or torch.equal(gradient, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", [
    Options(), Options(chunk_rows=8), Options(strategy="recompute_logits", chunk_rows=7),
], ids=["", "chunks", "recomputed"])  # fmt: skip
def test_targets_that_are_a_teachers_probabilities(options, dtype, device):
    """The probabilities are close to the student's, so the difference of the two has to keep its digits."""
    case = make_case(tokens=33, vocab=1009, hidden=16, dtype=dtype, device=device, bias=True, ignored=0.0)
    probabilities = (linear(case).detach().float() * 1.01).softmax(-1)
    weights, case.target = probabilities.topk(64)
    assert_as_exact_as_eager(case, options=options, target_weights=weights.to(dtype))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("vocab", [1009, 20001])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_float32_logits_lose_nothing(bias, vocab, strategy, device):
    """The product of bfloat16 operands, 8192 columns of the vocabulary at a time on a CPU."""
    case = make_case(tokens=13, hidden=16, vocab=vocab, dtype=torch.bfloat16, device=device, bias=bias, scale=4.0)
    options = Options(strategy=strategy, logits_dtype="float32")
    result, exact = ours(case, options=options, reduction="sum"), truth(case, reduction="sum")
    loss_error, *gradient_errors = errors(result, exact)
    assert loss_error < 1e-6 and max(gradient_errors) < 4e-3


def test_a_million_tokens(device):
    """The sum of a million row losses keeps its digits."""
    case = make_case(tokens=2**20, hidden=2, vocab=5, device=device)
    exact = truth(case, reduction="sum").loss
    assert error(ours(case, reduction="sum").loss, exact) < 2e-7


def test_target_out_of_range(device):
    for ignored_rows, wrong in (("skip", -1), ("skip", 2**40), ("compute" if device == "cpu" else "skip", 101)):
        case = make_case(device=device, ignored=0.0)
        case.target[5] = wrong
        with pytest.raises(IndexError, match=rf"target has 1 of 37 values .*\[0, 101\).*first is {wrong}"):
            linear_cross_entropy(case.x, case.weight, case.target, options=Options(ignored_rows=ignored_rows))


@pytest.mark.gpu
def test_target_out_of_range_asserts_on_the_device():
    """In a process of its own: a device-side assertion ends the CUDA context."""
    program = (
        "import torch, thunder_flce as f; x = torch.randn(4, 8, device='cuda'); w = torch.randn(16, 8, device='cuda');"
        "f.linear_cross_entropy(x, w, torch.tensor([1, 2, 16, 3], device='cuda')); torch.cuda.synchronize()"
    )
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert process.returncode != 0 and "target is neither in [0, 16)" in process.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_more_than_two_to_the_31_logits(strategy):
    """Element offsets need 64 bits: 17408 × 128256 logits, all of them in one buffer where they are saved."""
    case = make_case(tokens=17408, hidden=64, vocab=128256, dtype=torch.bfloat16, device="cuda", ignored=0.0)
    assert case.x.shape[0] * case.weight.shape[0] > 2**31
    chunk_rows = 17408 if strategy != "recompute_logits" else None
    result = ours(case, options=Options(strategy=strategy, chunk_rows=chunk_rows))
    small = ours(case, options=Options(strategy="gradients_in_forward", chunk_rows=1024, accumulate="float32"))
    loss_error, *gradient_errors = errors(result, small)
    assert loss_error < 1e-6 and max(gradient_errors) < 4e-3


# Which rows are computed.


@pytest.mark.parametrize("ignored", [0.4, 0.8, 1.0])
@pytest.mark.parametrize(("reduction", "frozen"), [("mean", False), ("none", False), ("none", True)])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_the_first_logits_while_the_host_waits(plan, reduction, frozen, ignored, monkeypatch):
    """As on a GPU: those of a quarter of the tokens, or of a chunk, whether that many are valid or not."""
    if plan.strategy == "gradients_in_forward" and reduction == "none" and not frozen:
        pytest.skip("has no such plan")
    started, start, starts_early = [], engine._Logits.start, Region.starts_early.func

    def on_gpu(region):
        properties = {name: getattr(region, name) for name in ("may_skip", "token_shard", "plan")}
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


def check_confident(logits, target, strategy, columns=slice(None), **settings):
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

    exact = Exact(logits.double(), LogitMap()).log_p
    at_target = exact.gather(1, target.view(-1, 1))[:, 0]
    tolerance = {"rtol": 2e-5, "atol": 0}
    torch.testing.assert_close(loss.double(), -at_target, **tolerance)
    torch.testing.assert_close(log_prob.view(-1).double(), at_target, **tolerance)
    torch.testing.assert_close(entropy.double(), -(exact.exp() * exact).sum(1), **tolerance)
    gradient = x.grad.gather(1, target.view(-1, 1))[:, 0].double()
    torch.testing.assert_close(gradient, at_target.expm1() * grad, rtol=max(2e-5, torch.finfo(dtype).eps), atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_confident_rows(strategy, dtype, device):
    check_confident(*confident_rows(device, dtype), strategy)


@pytest.mark.parametrize("strategy", ["save_logits", "recompute_logits"])
def test_confident_rows_of_a_divided_vocabulary(strategy):
    logits, target = confident_rows("cpu", torch.float32)
    parts = [slice(0, 40), slice(40, 40), slice(40, VOCAB)]
    as_threads(3, lambda rank: check_confident(logits, target, strategy, parts[rank], vocab_parallel=dist.group.WORLD))
