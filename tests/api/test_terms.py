"""Logits that are a sum of linears, such as a low-rank adapter beside the head, against eager PyTorch in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from reference import (
    Case,
    assert_as_exact_as_eager,
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
