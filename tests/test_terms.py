"""Logits that are a sum of linears, such as a low-rank adapter beside the head, against eager PyTorch in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

import thunder_flce
from reference import (
    Case,
    assert_as_exact_as_eager,
    eager,
    error,
    make_case,
    ours,
    run_by,
    run_inside,
    truth,
)
from thunder_flce import Options, linear_cross_entropy
from thunder_flce.engine.plan import Plan
from thunder_flce.options import STRATEGIES

ON_EVERY_BACKEND = True
IGNORED_ROWS = ("skip", "compute")
PLANS = {
    "one chunk": Plan(strategy="gradients_in_forward", chunk_rows=64),
    "chunks": Plan(strategy="gradients_in_forward", chunk_rows=10),
    "float32 accumulator": Plan(strategy="gradients_in_forward", chunk_rows=10, float32_accumulator=True),
    "frequent rows": Plan(strategy="gradients_in_forward", chunk_rows=10, float32_rows=256),
    "save logits": Plan(strategy="save_logits"),
    "save some logits": Plan(strategy="save_logits", saved_rows=14, chunk_rows=10, float32_accumulator=True),
    "recompute logits": Plan(strategy="recompute_logits", chunk_rows=10, float32_accumulator=True),
}


@pytest.fixture(params=PLANS)
def plan(request, monkeypatch):
    """Each plan, for all calls of `linear_cross_entropy`."""
    run_by(monkeypatch, PLANS[request.param])
    return PLANS[request.param]


def test_second_backward(plan, device):
    """Two upstream gradients through one retained graph, and nothing that anybody holds is changed."""
    case = make_case(device=device, bias=True, ranks=(4, 30))
    before = [tensor.detach().clone() for tensor in case.operands()]
    loss = linear_cross_entropy(case.x, case.weight, case.target, linear_bias=case.bias, terms=case.terms)
    results = []
    for value, retain in ((0.7, True), (3.0, True), (1.0, False)):
        grad = torch.tensor(value, device=device)
        gradients = torch.autograd.grad(loss, case.operands(), grad, retain_graph=retain)
        results.append((gradients, [gradient.clone() for gradient in gradients]))
        for got, right in zip(gradients, truth(case, grad).gradients, strict=True):
            torch.testing.assert_close(got.double(), right, rtol=1e-4, atol=1e-6)
    assert all(map(torch.equal, before, case.operands()))
    for gradients, copies in results:
        assert all(map(torch.equal, gradients, copies))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_input_and_one_weight_in_several_terms(strategy, device):
    """x Wᵀ + x Bᵀ + y Wᵀ: what stands in two terms gets the sum of its gradients."""
    case = make_case(device=device, ranks=(24,))
    ((y, other),) = case.terms
    shared = Case(case.x, case.weight, None, case.target, terms=((case.x, other), (y, case.weight)))
    leaves = (case.x, case.weight, y, other)

    def gradients(loss):
        return torch.autograd.grad(loss, leaves)

    options = Options(strategy=strategy, chunk_rows=None if strategy == "save_logits" else 10)
    got = linear_cross_entropy(case.x, case.weight, case.target, terms=shared.terms, options=options)
    logits = F.linear(case.x + y, case.weight) + F.linear(case.x, other)
    for mine, right in zip(gradients(got), gradients(F.cross_entropy(logits, case.target)), strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("chunks", "frozen"), [(4, False), (16, False), (16, True)], ids=str)
def test_error_does_not_grow_with_the_number_of_chunks(chunks, frozen, device):
    """Zipf-distributed targets: some rows of the adapter's dW get most updates, as those of the head's do."""
    case = make_case(tokens=512, vocab=8192, dtype=torch.bfloat16, device=device, ignored=0.0, ranks=(8, 64))
    frequency = 1 / torch.arange(1, 8193, dtype=torch.float64)
    case.target = torch.multinomial(frequency, 512, replacement=True).to(device)
    case.weight.requires_grad_(not frozen)
    assert_as_exact_as_eager(case, options=Options(chunk_rows=512 // chunks), factor=1.35)


def test_a_low_rank_weight_gradient_is_summed_in_float32(device):
    """Over 16 chunks, too, its error is that of a single matmul; summed in bfloat16 it is 1.6 times that."""
    case = make_case(tokens=512, hidden=256, vocab=16384, dtype=torch.bfloat16, device=device, ignored=0.0, ranks=(16,))
    case.weight.requires_grad_(False)
    assert_as_exact_as_eager(case, options=Options(chunk_rows=32), factor=1.1)


class _Allocations(TorchDispatchMode):
    """Records the sizes of what is made, views aside."""

    def __init__(self):
        super().__init__()
        self.elements = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = run_inside(self, func, args, kwargs)
        known = {tensor.untyped_storage().data_ptr() for tensor in args if isinstance(tensor, torch.Tensor)}
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if not isinstance(tensor, torch.Tensor) or tensor.is_meta:
                continue
            if tensor.untyped_storage().data_ptr() not in known:
                self.elements.append(tensor.numel())
        return result


def assert_nothing_of_the_size_of_the_head(run, weight: torch.Tensor) -> None:
    """Neither allocated nor saved, but for the weight itself."""
    saved = []

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() != weight.untyped_storage().data_ptr():
            saved.append(tensor.numel())
        return tensor

    with _Allocations() as made, saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    assert saved and made.elements
    assert max(saved) < weight.numel() and max(made.elements) < weight.numel()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("rows", IGNORED_ROWS)
def test_a_frozen_head_takes_no_memory(rows, strategy, device):
    """Fewer tokens than the hidden size, so that not even the logits are as large as W."""
    case = make_case(tokens=16, hidden=64, vocab=300, device=device, bias=True, ranks=(4,))
    case.weight.requires_grad_(False)
    options = Options(strategy=strategy, ignored_rows=rows)
    assert_nothing_of_the_size_of_the_head(lambda: ours(case, options=options), case.weight)
    assert_as_exact_as_eager(case, options=options)


class LoRA(nn.Module):
    """A head with a low-rank adapter, as libraries for fine-tuning have it: W is frozen, A and B are trained."""

    def __init__(self, hidden: int, vocab: int, rank: int, *, bias: bool, dtype: torch.dtype, device: str):
        super().__init__()
        of = {"dtype": dtype, "device": device}
        self.head = nn.Linear(hidden, vocab, bias=bias, **of).requires_grad_(False)
        self.down = nn.Linear(hidden, rank, bias=False, **of)
        self.up = nn.Linear(rank, vocab, bias=False, **of)

    def forward(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The mean loss."""
        logits = (self.head(hidden) + self.up(self.down(hidden))).float()
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))


@pytest.mark.parametrize(
    ("dtype", "bias", "strategy"),
    [
        (torch.bfloat16, True, None),
        (torch.float32, False, "recompute_logits"),
    ],
    ids=str,
)
def test_module_with_an_adapter(dtype, bias, strategy, device):
    model = LoRA(24, 101, 4, bias=bias, dtype=dtype, device=device)
    compiled = thunder_flce.jit(model, options=Options(strategy=strategy), strict=True)
    hidden = torch.randn(2, 20, 24, device=device).to(dtype).requires_grad_()
    labels = torch.randint(0, 101, (2, 20), device=device)
    labels[:, ::3] = -100
    leaves = [hidden, model.down.weight, model.up.weight]
    exact = LoRA(24, 101, 4, bias=bias, dtype=torch.float64, device=device)
    exact.load_state_dict(model.state_dict())
    exact_hidden = hidden.detach().double().requires_grad_()
    # The logits in float64, which `forward` would round.
    logits = exact.head(exact_hidden) + exact.up(exact.down(exact_hidden))
    truths = _results(
        F.cross_entropy(logits.flatten(0, 1), labels.flatten()), [exact_hidden, exact.down.weight, exact.up.weight]
    )
    eager_results, got = (_results(run(hidden, labels), leaves) for run in (model, compiled))
    # The loss is one number, whose error may be small by luck: that of rounding logits of this size is 2e-4.
    for mine, theirs, right, slack in zip(got, eager_results, truths, (2e-4, 1e-6, 1e-6, 1e-6), strict=True):
        assert error(mine, right) <= 1.25 * error(theirs, right) + slack
    assert [p.grad for p in model.head.parameters()] == [None] * (1 + bias)
    (decision,) = thunder_flce.explain(compiled)[0].decisions
    assert decision.fused
    assert_nothing_of_the_size_of_the_head(
        lambda: compiled(hidden[:1, :5], labels[:1, :5]).backward(), model.head.weight
    )


def test_errors_are_no_larger_than_those_of_pytorch(device):
    """Over many problems, so that luck plays no part."""
    found = []
    for _ in range(40):
        case = make_case(dtype=torch.bfloat16, device=device, bias=True, ranks=(4, 30))
        results, exact = (ours(case), eager(case)), truth(case)
        found.append([[error(r.loss, exact.loss), *map(error, r.gradients, exact.gradients)] for r in results])
    mine, theirs = torch.tensor(found).square().mean(0).sqrt()
    assert (mine <= 1.1 * theirs).all(), mine / theirs


def _results(loss: torch.Tensor, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]
