"""Several weighted targets a token: soft targets, such as a teacher's largest probabilities."""

from dataclasses import replace

import pytest
import thunder
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import thunder_flce
from ranks import as_threads
from reference import composed_of_several, error
from thunder_flce import LinearCrossEntropyLoss, Options, VocabParallel, linear_cross_entropy
from thunder_flce.operation.loss import Loss
from thunder_flce.options import STRATEGIES

B, T, H, V, K = 3, 11, 16, 101, 5
S = Shard(0)
ALL = Options(strategy="recompute_logits", chunk_rows=7)
ON_EVERY_BACKEND = True


def operands(dtype=torch.float64, device="cpu", vocab=V, targets=K):
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(B, T, H, generator=generator)
    weight = torch.randn(vocab, H, generator=generator).mul(0.5)
    bias = torch.randn(vocab, generator=generator)
    target = torch.randint(vocab - 3, (B, T, targets), generator=generator)
    # Columns that come twice and three times, and one that others, in another vocabulary block, are put next to.
    target[..., 1] = target[..., 0]
    target[0, :, -1], target[1, :, -1] = target[0, :, 0], 0
    target[torch.rand(target.shape, generator=generator) < 0.3] = -100
    target[1, 5:] = -100
    # With some, more than 1 in all.
    target_weights = torch.rand(target.shape, generator=generator) * torch.linspace(0, 1, T)[None, :, None]
    # What ignored targets weigh does not matter.
    target_weights = target_weights.masked_fill(target == -100, float("nan"))
    floating = [tensor.to(device, dtype).requires_grad_() for tensor in (hidden, weight, bias)]
    return (*floating, target.to(device), target_weights.to(device, dtype))


def ours(hidden, weight, bias, target, target_weights, **settings):
    return linear_cross_entropy(hidden, weight, target, linear_bias=bias, target_weights=target_weights, **settings)


def exact(hidden, weight, bias, target, target_weights, *, token_weights=None, num_items=None, **settings):
    loss = Loss(**settings)
    if num_items is not None:
        loss = Loss(**{**settings, "reduction": "sum"})
    found = composed_of_several(F.linear(hidden, weight, bias), target, target_weights, loss, token_weights)
    return found if num_items is None else found / num_items


TOKEN_WEIGHTS = torch.rand(B, T, generator=torch.Generator().manual_seed(0)) + 0.1
TOKEN_WEIGHTS[0, :4] = 0
CASES = {
    "mean": {},
    "sum": {"reduction": "sum", "softcap": 2.0, "logit_scale": -0.5},
    "none": {"reduction": "none", "z_loss": 0.01},
    "token weights": {"vocab_size": V - 3, "token_weights": TOKEN_WEIGHTS},
    "num_items": {"num_items": 7.0, "z_loss": 0.01, "softcap": 3.0},
    "rest": {"target_rest": True, "softcap": 3.0, "z_loss": 0.01, "token_weights": TOKEN_WEIGHTS},
    "rest, sum": {"target_rest": True, "reduction": "sum", "logit_scale": -0.5},
}
WAYS = {
    "eager": lambda function: function,
    "computed": lambda function: lambda *a: function(*a, options=Options(ignored_rows="compute", chunk_rows=7)),
    "recomputed": lambda function: lambda *a: function(*a, options=Options(strategy="recompute_logits", chunk_rows=7)),
    "saved": lambda function: lambda *a: function(*a, options=Options(strategy="save_logits")),
    "ours": thunder_flce.jit,
    "thunder": thunder.jit,
    "torch.compile": lambda function: torch.compile(function, backend="aot_eager", fullgraph=True),
}


def of_strategies(names, others):
    """Every case in every way, but for losses whose gradients can only be computed in the forward."""
    return [(name, case) for name in names for case in CASES if name not in others or "rest" not in case]


@pytest.mark.parametrize(("way", "case"), of_strategies(WAYS, ("recomputed", "saved")))
def test_function(way, case):
    bias = case != "sum"
    settings, (hidden, weight, of_bias, *targets) = CASES[case], operands()
    tensors = [hidden, weight, of_bias if bias else None]
    loss = WAYS[way](lambda *a, **given: ours(*a, **settings, **given))(*tensors, *targets)
    right = exact(*tensors, *targets, **settings)
    torch.testing.assert_close(loss, right)
    upstream = torch.randn(right.shape, dtype=right.dtype)
    got, right = (torch.autograd.grad(result, tensors[: 2 + bias], upstream) for result in (loss, right))
    torch.testing.assert_close(got, right)


@pytest.mark.parametrize("way", ["eager", "thunder", "torch.compile"])
@pytest.mark.parametrize("outputs", [(), ("entropy", "argmax")])
def test_frozen_head(way, outputs):
    """Each row's gradient for 1 is there from the forward on, with the target weights in it."""
    hidden, weight, _, *targets = operands()
    tensors = (hidden, weight.detach(), None)
    results = WAYS[way](lambda *a: ours(*a, reduction="none", outputs=outputs))(*tensors, *targets)
    loss, *others = results if outputs else (results,)
    right = exact(*tensors, *targets, reduction="none")
    torch.testing.assert_close(loss, right)
    assert all(other.shape == loss.shape for other in others)
    upstream = torch.randn_like(right)
    got, right = (torch.autograd.grad(result, hidden, upstream) for result in (loss, right))
    torch.testing.assert_close(got, right)


SIZES = (40, 0, V - 40)


@pytest.mark.parametrize("how", ["", "sequence_parallel", "data_parallel"])
@pytest.mark.parametrize(("strategy", "case"), of_strategies((None, "save_logits", "recompute_logits"), STRATEGIES))
def test_divided_vocabulary(case, how, strategy):
    """Among three ranks, each of which has one of the sequences where tokens are divided, too."""
    settings, (hidden, weight, bias, *targets) = CASES[case], operands()
    right = exact(hidden, weight, bias, *targets, **settings)
    upstream = torch.randn(right.shape, dtype=right.dtype)
    of_right = torch.autograd.grad(right, (hidden, weight, bias), upstream)
    # What data parallel training takes the mean of.
    factor = 3 if how == "data_parallel" and settings.get("reduction") in ("sum", "none") else 1

    def run(rank):
        rows = slice(sum(SIZES[:rank]), sum(SIZES[: rank + 1]))
        mine = slice(rank, rank + 1) if how else slice(None)
        x, W, b = (
            tensor.detach()[part].clone().requires_grad_()
            for tensor, part in ((hidden, mine), (weight, rows), (bias, rows))
        )
        given = {name: value[mine] if name == "token_weights" else value for name, value in settings.items()}
        if how == "data_parallel" and "num_items" in given:
            given["num_items"] /= 3
        parallel = VocabParallel(group=torch.distributed.group.WORLD, **({how: True} if how else {}))
        options = Options(strategy=strategy, chunk_rows=7)
        loss = ours(x, W, b, *(each[mine] for each in targets), vocab_parallel=parallel, options=options, **given)
        g = upstream[mine] if upstream.ndim else upstream
        return loss.detach(), *torch.autograd.grad(loss, (x, W, b), g)

    losses, xs, weights, biases = zip(*as_threads(3, run), strict=True)
    if right.ndim:
        torch.testing.assert_close(torch.cat(losses) if how else losses[0], right)
    else:
        assert torch.equal(*losses[:2]) and torch.equal(*losses[1:])
        torch.testing.assert_close(losses[0] * factor, right)
    ranks = 3 if how == "data_parallel" else 1
    torch.testing.assert_close(torch.cat(xs) if how else xs[0], of_right[0] * ranks / factor)
    torch.testing.assert_close(factor * torch.cat(weights), of_right[1])
    torch.testing.assert_close(factor * torch.cat(biases), of_right[2])


@pytest.mark.parametrize("of_input, of_weight", [(S, Replicate()), (S, S), (Replicate(), S)], ids=str)
def test_dtensors(of_input, of_weight):
    hidden, weight, _, *targets = operands()
    settings = {"reduction": "sum", "z_loss": 0.01}
    right = exact(hidden, weight, None, *targets, **settings)
    of_right = torch.autograd.grad(right, (hidden, weight))

    def run(rank):
        mesh = init_device_mesh("cpu", (3,))
        x, W, *q = (
            distribute_tensor(tensor.detach().clone(), mesh, [placement])
            for tensor, placement in ((hidden, of_input), (weight, of_weight), (targets[1], S))
        )
        of_tokens = (targets[0], *q)  # One of all tokens, on all ranks; one divided.
        loss = ours(x.requires_grad_(), W.requires_grad_(), None, *of_tokens, **settings)
        torch.testing.assert_close(loss, right)
        for found, expected in zip(torch.autograd.grad(loss, (x, W)), of_right, strict=True):
            torch.testing.assert_close(found.full_tensor(), expected)

    as_threads(3, run)


def test_without_a_target_left():
    hidden, weight, _, target, target_weights = operands()
    loss = ours(hidden, weight, None, torch.full_like(target, -100), target_weights)
    gradients = torch.autograd.grad(loss, (hidden, weight))
    assert loss.isnan() and not any(gradient.any() for gradient in gradients)
    assert ours(hidden[:0], weight, None, target[:0], target_weights[:0], reduction="none").shape == (0, T)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("options", "target_rest"),
    [(None, False), (Options(chunk_rows=8), False), (ALL, False), (Options(chunk_rows=8), True)],
    ids=["", "chunks", "blocks", "rest"],
)
def test_error_beside_pytorchs(options, target_rest, dtype, device):
    """With targets that are the teacher's probabilities, next to the student's: p - q has to keep its digits."""
    if target_rest and dtype == torch.float16:
        options = replace(options, expected_gradient=1.0)
    hidden, weight, bias, target, _ = operands(dtype, device, vocab=1009, targets=64)
    target = target.clamp(min=0)
    with torch.no_grad():
        probabilities = (F.linear(hidden, weight, bias).float() * 1.01).softmax(-1)
        target = probabilities.topk(64).indices
        target_weights = probabilities.gather(-1, target).to(dtype)
    tensors, loss = (hidden, weight, bias), Loss(target_rest=target_rest)
    doubled = [tensor.detach().double().requires_grad_() for tensor in tensors]
    results = {}
    for name, value, of in (
        ("ours", ours(*tensors, target, target_weights, options=options, target_rest=target_rest), tensors),
        ("eager", composed_of_several(F.linear(*tensors).float(), target, target_weights, loss), tensors),
        ("exact", exact(*doubled, target, target_weights.double(), target_rest=target_rest), doubled),
    ):
        results[name] = (value, *torch.autograd.grad(value, of))
    for got, eager, right in zip(*results.values(), strict=True):
        assert error(got, right) <= 1.25 * error(eager, right) + 1e-6


def test_a_rest_that_is_nothing():
    """All of the mass is in the targets, of teacher or student: no infinity, and no gradient of NaN."""
    hidden, weight, bias, *_ = operands()
    target = torch.arange(V).expand(B, T, V)
    target_weights = torch.full(target.shape, 0.5 / V, dtype=torch.float64)
    loss = ours(hidden, weight, bias, target, target_weights, target_rest=True)
    assert all(each.isfinite().all() for each in (loss, *torch.autograd.grad(loss, (hidden, weight, bias))))
    whole = ours(hidden, weight, bias, target, 2 * target_weights, target_rest=True)
    torch.testing.assert_close(whole, ours(hidden, weight, bias, target, 2 * target_weights))
    with pytest.raises(ValueError, match="target_rest is the rest of target_weights"):
        linear_cross_entropy(hidden, weight, target[..., 0], target_rest=True)


def test_module():
    hidden, weight, bias, *targets = operands(torch.float32)
    module = LinearCrossEntropyLoss(H, V)
    module.linear.weight, module.linear.bias = torch.nn.Parameter(weight.detach()), torch.nn.Parameter(bias.detach())
    loss = module(hidden, targets[0], target_weights=targets[1])
    torch.testing.assert_close(loss, exact(hidden, weight, bias, *targets))
    module.target_rest = True
    loss = module(hidden, targets[0], target_weights=targets[1])
    torch.testing.assert_close(loss, exact(hidden, weight, bias, *targets, target_rest=True))


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({"target_weights": torch.rand(B, T)}, ValueError, r"target_weights must have target's shape, \(3, 11, 5\)"),
        ({"target_weights": torch.rand(B, T, K) > 0}, TypeError, r"but got bool; pass mask.to\(input.dtype\)"),
        ({"target_weights": torch.rand(B, T, K).requires_grad_()}, ValueError, "target_weights must not require"),
        ({"target": torch.zeros(B, T, dtype=torch.long)}, ValueError, r"target must be \(..., K\)"),
        ({"target": torch.zeros(B, T, 0, dtype=torch.long)}, ValueError, "and K ≥ 1"),
        ({"target": torch.full((B, T, K), V)}, IndexError, r"target has 33 of 33 rows with values that are neither"),
        ({"weight": torch.rand(V)}, ValueError, "weight has no meaning with target_weights"),
        ({"label_smoothing": 0.1}, ValueError, "label_smoothing must be 0 with target_weights"),
        ({"outputs": ("accuracy",)}, ValueError, "outputs must not have 'accuracy' with target_weights"),
        ({"target_rest": 1}, TypeError, "target_rest must be a bool, but got int"),
        ({"target_rest": True, "reduction": "none"}, ValueError, 'target_rest needs reduction "mean" or "sum"'),
        ({"target_rest": True, "options": ALL}, ValueError, "target_rest needs its gradients computed in the forward"),
        ({"target_weights": None}, ValueError, "target must have input's shape without its last dimension"),
    ],
)
def test_bad_input(given, kind, message):
    hidden, weight, _, target, target_weights = operands(torch.float32)
    given = {"target": target, "target_weights": target_weights, **given}
    with pytest.raises(kind, match=message):
        linear_cross_entropy(hidden, weight, **given)
