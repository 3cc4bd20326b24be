"""Programs that thunder compiles on ranks that divide the vocabulary; ranks are threads here."""

from copy import deepcopy

import pytest
import thunder
import thunder.distributed
import torch
import torch.nn.functional as F
from thunder.distributed.tensor_parallel.common import TransformForTensorParallel
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import thunder_flce
from divided import parts
from ranks import as_threads
from reference import error, make_case, truth
from thunder_flce import NotFusedWarning, Options, VocabParallel, linear_cross_entropy

H, VOCAB = 8, 102


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    """thunder's tensor parallelism is for CUDA only."""
    set_device = lambda self: setattr(self, "device", torch.device("cpu", self.rank))  # noqa: E731
    monkeypatch.setattr(TransformForTensorParallel, "__post_init__", set_device)


class Losses(nn.Module):
    """A layer, a head, and three losses on the same logits, all of them or the first columns."""

    def __init__(self, columns: int | None):
        super().__init__()
        self.columns = columns
        self.hidden = nn.Linear(H, H, dtype=torch.float64)
        self.lm_head = nn.Linear(H, VOCAB, dtype=torch.float64)

    def forward(self, x, labels, class_weights, advantages):
        logits = self.lm_head(torch.tanh(self.hidden(x)))
        logits = 3 * torch.tanh(logits[:, :-1, : self.columns].flatten(0, 1))
        labels = labels[:, 1:].flatten()
        log_probs = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[:, None]).squeeze(-1)
        mean = F.cross_entropy(logits, labels, weight=class_weights, label_smoothing=0.1)
        return mean, (torch.exp(log_probs) * advantages).sum(), F.cross_entropy(logits, labels, reduction="none")


@pytest.mark.parametrize(
    ("ranks", "columns", "options"),
    [(2, None, Options()), (3, VOCAB - 3, Options(strategy="recompute_logits", chunk_rows=4))],
)
def test_column_parallel(ranks, columns, options):
    model, x = Losses(columns), torch.randn(2, 6, H, dtype=torch.float64).requires_grad_()
    labels = torch.randint(40, (2, 6))
    labels[0, 2:4] = -100
    class_weights = torch.rand(VOCAB, dtype=torch.float64) if columns is None else None
    others = labels, class_weights, torch.randn(10, dtype=torch.float64)
    upstream = [torch.randn(shape, dtype=torch.float64) for shape in ((), (), (10,))]
    exact_losses = model(x, *others)
    torch.autograd.backward(exact_losses, upstream)

    def run(rank):
        step = thunder_flce.jit(deepcopy(model), options=options, strict=True)
        step = thunder.distributed.column_parallel(step, ["lm_head"], device=torch.device("cpu", rank))
        hidden = x.detach().requires_grad_()
        losses = step(hidden, *others)
        torch.autograd.backward(losses, upstream)
        assert all(error(*pair) < 1e-12 for pair in zip(losses, exact_losses, strict=True))
        assert error(hidden.grad, x.grad) < 1e-12
        for name, parameter in model.named_parameters():
            gradient = parameter.grad.chunk(ranks)[rank] if name.startswith("lm_head") else parameter.grad
            assert error(step.get_parameter(name).grad, gradient) < 1e-12, name
        traces = thunder.last_traces(step)[-1], thunder.last_backward_traces(step)[-1]
        return thunder_flce.explain(step), "\n".join(map(str, traces))

    for report, text in as_threads(ranks, run):
        decisions = [decision for part in report for decision in part.decisions]
        assert all(decision.fused and "test_thunder_ranks.py:" in decision.source for decision in decisions)
        assert f"fused, the vocabulary over {ranks} ranks" in str(report)
        # No logits of other ranks, and the gradient of the hidden states is summed in the region only.
        assert "all_gather" not in text and "all_reduce" not in text
        assert "combined over the ranks" in text and "summed over the ranks" in text and f"'ranks': {ranks}" in text


class Head(nn.Module):
    """A head with a loss: with a bias that is added outside of the linear, or by `linear_cross_entropy`."""

    def __init__(self, *, is_call: bool = False):
        super().__init__()
        self.lm_head, self.is_call = nn.Linear(H, VOCAB, bias=False, dtype=torch.float64), is_call
        self.bias = nn.Parameter(torch.randn(VOCAB, dtype=torch.float64))

    def forward(self, x, labels):
        if self.is_call:
            return linear_cross_entropy(x, self.lm_head.weight, labels)
        return F.cross_entropy(self.lm_head(x) + self.bias, labels)


def test_what_is_not_fused():
    model, x, labels = Head(), torch.randn(5, H, dtype=torch.float64), torch.randint(VOCAB, (5,))

    def run(rank):
        device = torch.device("cpu", rank)
        for divide in (thunder.distributed.column_parallel, thunder.distributed.row_parallel):
            step = divide(thunder_flce.jit(deepcopy(model)), ["lm_head"], device=device)
            assert error(step(x, labels), model(x, labels)) < 1e-12
        step = thunder.distributed.column_parallel(thunder_flce.jit(Head(is_call=True)), ["lm_head"], device=device)
        with pytest.raises(NotImplementedError, match="thunder.distributed divides its weight among ranks"):
            step(x, labels)

    with pytest.warns(NotFusedWarning) as warned:
        as_threads(2, run)
    messages = "\n".join(str(warning.message) for warning in warned)
    assert "by add with a bias that is not divided among ranks" in messages
    assert "shards its linear, but not by column_parallel of that layer alone" in messages


class Call(nn.Module):
    """A call whose ranks are an attribute."""

    vocab_parallel = None

    def forward(self, x, weight, target):
        return linear_cross_entropy(x, weight, target, vocab_parallel=self.vocab_parallel)


def test_other_ranks():
    """thunder compiles anew where a program that it has compiled gets another group, or other settings."""
    case = make_case(tokens=36, dtype=torch.float64)
    exact, target = truth(case), case.target

    def run(rank):
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("both", "alone"))
        both, alone = mesh["both"], mesh["alone"]
        rows, tokens, x = parts((60, 41))[rank], slice(18 * rank, 18 * rank + 18), case.x.detach()
        weights = {both: case.weight.detach()[rows], alone: case.weight.detach()}
        module, weight = Call(), weights[both]
        module_step = thunder_flce.jit(module)
        step = thunder.jit(lambda x, w, y, group: linear_cross_entropy(x, w, y, vocab_parallel=group))
        for group in (both, alone, both):
            module.vocab_parallel = group
            assert error(module_step(x, weights[group], target), exact.loss) < 1e-12
            assert error(step(x, weights[group], target, group), exact.loss) < 1e-12
        assert thunder.cache_misses(step) == thunder.cache_misses(module_step) == 2
        step(x, weight, target, VocabParallel(group=both, input_grad="partial"))
        assert thunder.cache_misses(step) == 3 and thunder.cache_hits(step) == thunder.cache_hits(module_step) == 1

        # Each with a part of the tokens.
        own = x[tokens].requires_grad_()
        loss = step(own, weight, target[tokens], VocabParallel(group=both, sequence_parallel=True))
        assert error(loss, exact.loss) < 1e-12
        assert error(torch.autograd.grad(loss, own)[0], exact.gradients[0][tokens]) < 1e-12

        # Without ranks, and with them again: the newest program is the first that thunder tries.
        step(x, weight, target.clamp(max=40), None)
        assert error(step(x, weight, target, both), exact.loss) < 1e-12
        for program in (
            lambda *tensors: linear_cross_entropy(*tensors, vocab_parallel=mesh.get_group("both")),
            lambda *tensors: linear_cross_entropy(*tensors, vocab_parallel=VocabParallel(group=both)),
        ):
            with pytest.raises(NotImplementedError, match="does not notice when vocab_parallel .* make it outside"):
                thunder_flce.jit(program)(x, weight, target)

    as_threads(2, run)
