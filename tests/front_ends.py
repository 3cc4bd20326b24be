"""The front ends that tests go through, a model, and comparisons of compiled programs."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

import thunder_flce
from thunder_flce.backend import compile_graph
from thunder_flce.dynamo import fusion

FRONT_ENDS = {"thunder.jit": thunder_flce.jit, "thunderfx": thunder_flce.thunderfx}
COMPILERS = {
    **FRONT_ENDS,
    "torch.compile": partial(torch.compile, backend="aot_eager", fullgraph=True),
    "backend": partial(torch.compile, backend=compile_graph, fullgraph=True),
}

V, H = 97, 16
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def flattened_loss(logits, labels):
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


def log_prob(logits, labels):
    """The log-probability of each label."""
    return logits.log_softmax(-1).gather(-1, labels[..., None]).squeeze(-1)


def log_probs(hidden, weight, labels):
    return log_prob(F.linear(hidden, weight), labels)


class Model(nn.Module):
    """An embedding, a hidden layer and a head with its loss."""

    def __init__(self, loss=flattened_loss, *, vocab=V, bias=False):
        super().__init__()
        self.embedding = nn.Embedding(vocab, H)
        self.hidden = nn.Linear(H, H)
        self.lm_head = nn.Linear(H, vocab, bias=bias)
        self.loss = loss

    def last_hidden(self, tokens):
        return torch.tanh(self.hidden(self.embedding(tokens)))

    def logits(self, tokens):
        return self.lm_head(self.last_hidden(tokens))

    def forward(self, tokens, labels):
        return self.loss(self.logits(tokens), labels)


def batch(rows=3, tokens=8, device="cpu"):
    labels = torch.randint(0, V, (rows, tokens), device=device)
    labels[0, :2] = -100
    return torch.randint(0, V, (rows, tokens), device=device), labels


def operands(tokens, dtype=torch.float32):
    """Hidden states, a head and labels."""
    trained = {"dtype": dtype, "requires_grad": True}
    return torch.randn(tokens, H, **trained), torch.randn(V, H, **trained), torch.randint(V, (tokens,))


def run(program, tensors):
    """Returns a program's outputs, and gradients for upstream gradients that differ between elements."""
    outputs = program(*tensors)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    differentiable = [output for output in outputs if output.requires_grad]
    if not differentiable:
        return outputs, ()
    upstream = [torch.linspace(2, -1, output.numel()).view(output.shape).to(output) for output in differentiable]
    trained = [tensor for tensor in tensors if tensor.requires_grad]
    gradients = torch.autograd.grad(differentiable, trained, upstream, allow_unused=True, materialize_grads=True)
    return tuple(output.detach() for output in outputs), gradients


def fused_graph(program, *tensors):
    """Returns Dynamo's graph of a program after fusion, which does not run."""
    graphs = []

    def backend(gm, inputs):
        assert all(decision.fused for decision in fusion.fuse(gm, thunder_flce.Options(), strict=True))
        graphs.append(gm)
        return lambda *_: [None] * 9

    torch.compile(program, backend=backend, fullgraph=True)(*tensors)
    (graph_module,) = graphs
    return graph_module


def decisions(compiled) -> list[thunder_flce.matching.decisions.Decision]:
    """Returns the decisions about all losses, in the order in which they were compiled."""
    return thunder_flce.explain(compiled).decisions


def assert_fused(compiled, times: int | None = None) -> None:
    """Asserts that all losses are fused, and that there are `times` of them."""
    made = decisions(compiled)
    assert made and all(decision.fused for decision in made), [str(decision) for decision in made]
    assert times is None or len(made) == times


def symbols(trace):
    """Yields the bound symbols of a trace, each followed by all its subsymbols."""
    for bsym in getattr(trace, "bound_symbols", None) or trace.subsymbols:
        yield bsym
        yield from symbols(bsym)


def assert_same(compiled, program, tensors, **tolerances) -> None:
    """Asserts that a compiled program has a program's outputs and gradients; see `run`."""
    torch.testing.assert_close(run(compiled, tensors), run(program, tensors), **tolerances)


def assert_agrees(model, expected, got, **tolerances) -> None:
    """Asserts that two calls on a model's parameters have the same results and gradients."""
    assert_same(lambda *_: got(), lambda *_: expected(), [*model.parameters()], **tolerances)
