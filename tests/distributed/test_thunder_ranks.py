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
from divided import part_of, parts
from ranks import as_threads
from reference import Case, error, make_case, truth
from thunder_flce import NotFusedWarning, Options, VocabParallel, linear_cross_entropy

H, VOCAB = 8, 102


class Losses(nn.Module):
    """A layer, a head, and two losses on the same logits."""

    def __init__(self, *, columns: int | None = None, bias_after: bool = False):
        super().__init__()
        self.hidden = nn.Linear(H, H, dtype=torch.float64)
        self.lm_head = nn.Linear(H, VOCAB, bias=not bias_after, dtype=torch.float64)
        self.bias = nn.Parameter(torch.randn(VOCAB, dtype=torch.float64)) if bias_after else None
        self.columns = columns

    def forward(self, x, labels, class_weights, advantages):
        logits = self.lm_head(torch.tanh(self.hidden(x)))
        if self.bias is not None:
            logits = logits + self.bias
        logits = 3 * torch.tanh(logits[:, :-1, : self.columns].flatten(0, 1))
        labels = labels[:, 1:].flatten()
        log_probs = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[:, None]).squeeze(-1)
        class_weights = class_weights if self.columns is None else None
        mean = F.cross_entropy(logits, labels, weight=class_weights, label_smoothing=0.1)
        return mean, (torch.exp(log_probs) * advantages).sum(), F.cross_entropy(logits, labels, reduction="none")


class Step:
    """A model, its arguments, upstream gradients, and what float64 makes of them. Threads share the random numbers."""

    def __init__(self, **settings):
        self.model = Losses(**settings)
        self.x = torch.randn(2, 6, H, dtype=torch.float64).requires_grad_()
        labels = torch.randint(40, (2, 6))
        labels[0, 2:4] = -100
        self.others = labels, torch.rand(VOCAB, dtype=torch.float64), torch.randn(10, dtype=torch.float64)
        self.upstream = [torch.randn(shape, dtype=torch.float64) for shape in ((), (), (10,))]
        self.losses = self.model(self.x, *self.others)
        torch.autograd.backward(self.losses, self.upstream)

    def check(self, rank: int, ranks: int, **settings):
        """Asserts that losses are exact, and so are x's gradient and this rank's part of the parameters'."""
        step, device = thunder_flce.jit(deepcopy(self.model), **settings), torch.device("cpu", rank)
        step = thunder.distributed.column_parallel(step, ["lm_head"], device=device)
        x = self.x.detach().requires_grad_()
        losses = step(x, *self.others)
        torch.autograd.backward(losses, self.upstream)
        assert all(error(*pair) < 1e-12 for pair in zip(losses, self.losses, strict=True))
        assert error(x.grad, self.x.grad) < 1e-12
        for name, parameter in self.model.named_parameters():
            gradient = parameter.grad.chunk(ranks)[rank] if name.startswith("lm_head") else parameter.grad
            assert error(step.get_parameter(name).grad, gradient) < 1e-12, name
        return step


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    """thunder's tensor parallelism is for CUDA only."""
    set_device = lambda self: setattr(self, "device", torch.device("cpu", self.rank))  # noqa: E731
    monkeypatch.setattr(TransformForTensorParallel, "__post_init__", set_device)


@pytest.mark.parametrize(
    "ranks, columns, options",
    [(2, None, Options()), (3, VOCAB - 3, Options(strategy="recompute_logits", chunk_rows=4))],
)
def test_column_parallel(ranks, columns, options):
    case = Step(columns=columns)

    def run(rank):
        step = case.check(rank, ranks, options=options, strict=True)
        traces = thunder.last_traces(step)[-1], thunder.last_backward_traces(step)[-1]
        return thunder_flce.explain(step), "\n".join(map(str, traces))

    for report, text in as_threads(ranks, run):
        decisions = [decision for part in report for decision in part.decisions]
        assert all(decision.fused and "test_thunder_ranks.py:" in decision.source for decision in decisions)
        assert f"fused, the vocabulary over {ranks} ranks" in str(report)
        # No logits of other ranks, and the gradient of the hidden states is summed in the region only.
        assert "all_gather" not in text and "all_reduce" not in text
        assert "combined over the ranks" in text and "summed over the ranks" in text and f"'ranks': {ranks}" in text


def test_a_bias_that_is_not_divided():
    case = Step(bias_after=True)
    with pytest.warns(NotFusedWarning, match="by add with a bias that is not divided among ranks"):
        as_threads(2, lambda rank: case.check(rank, 2))


class Head(nn.Module):
    """A call whose ranks are an attribute."""

    vocab_parallel = None

    def forward(self, x, weight, target):
        return linear_cross_entropy(x, weight, target, vocab_parallel=self.vocab_parallel)


def test_other_ranks():
    """thunder compiles anew where a program that it has compiled gets another group, or other settings."""
    whole = make_case(tokens=36, dtype=torch.float64)
    case, right = Case(whole.x.detach(), whole.weight.detach(), None, whole.target), truth(whole)
    exact = right.loss

    def run(rank):
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("both", "alone"))
        operands = {"both": part_of(case, parts((60, 41))[rank]), "alone": case}
        head = Head()
        of_argument = lambda x, w, y, group: linear_cross_entropy(x, w, y, vocab_parallel=group)  # noqa: E731
        steps = [thunder.jit(of_argument), *(thunder_flce.jit(program) for program in (head, of_argument))]
        for name in ("both", "alone", "both"):
            head.vocab_parallel = mesh[name]
            part = operands[name]
            for step in steps:
                arguments = () if step is steps[1] else (mesh[name],)
                assert error(step(part.x, part.weight, case.target, *arguments), exact) < 1e-12
        assert all(thunder.cache_misses(step) == 2 and thunder.cache_hits(step) == 1 for step in steps)
        steps[-1](part.x, part.weight, case.target, VocabParallel(group=mesh["both"], input_grad="partial"))
        assert thunder.cache_misses(steps[-1]) == 3

        # Each with a part of the tokens.
        tokens = slice(18 * rank, 18 * rank + 18)
        x, parallel = part.x[tokens].requires_grad_(), VocabParallel(group=mesh["both"], sequence_parallel=True)
        loss = steps[-1](x, part.weight, case.target[tokens], parallel)
        assert error(loss, exact) < 1e-12
        assert error(torch.autograd.grad(loss, x)[0], right.gradients[0][tokens]) < 1e-12

        # Without ranks, and with them again: the newest program is the first that thunder tries.
        part, target = operands["both"], torch.zeros_like(case.target)
        of_all = truth(Case(case.x, case.weight, None, target)).loss
        steps[-1](part.x, part.weight, target, None)
        assert error(steps[-1](part.x, part.weight, target, mesh["both"]), of_all) < 1e-12
        group = mesh["both"]
        for program in (
            lambda *tensors: linear_cross_entropy(*tensors, vocab_parallel=mesh.get_group("both")),
            lambda *tensors: linear_cross_entropy(*tensors, vocab_parallel=VocabParallel(group=group)),
        ):
            with pytest.raises(NotImplementedError, match="does not notice when vocab_parallel .* make it outside"):
                thunder_flce.jit(program)(part.x, part.weight, case.target)

    as_threads(2, run)
