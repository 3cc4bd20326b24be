"""`thunderfx`, beside `thunder.jit`, whose own tests are in test_thunder: caching, modes and graph breaks."""

import operator

import pytest
import thunder
import torch
import torch.nn.functional as F
from thunder.recipes import BaseRecipe
from torch import nn

import thunder_flce
from front_ends import assert_agrees, assert_fused, decisions
from test_patterns import _run
from thunder_flce import FuseLinearCrossEntropy

V, H = 97, 16
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


class Model(nn.Module):
    """An embedding, a hidden layer, dropout and a head with its loss; the points where a subclass may put something."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.embedding = nn.Embedding(V, H)
        self.hidden = nn.Linear(H, H)
        self.dropout = nn.Dropout(dropout)
        self.lm_head = nn.Linear(H, V, bias=False)

    def before_head(self, hidden):
        return hidden

    def after_head(self, logits):
        return logits

    def logits(self, tokens):
        hidden = self.dropout(torch.tanh(self.hidden(self.embedding(tokens))))
        return self.after_head(self.lm_head(self.before_head(hidden)))

    def forward(self, tokens, labels):
        return F.cross_entropy(self.logits(tokens).float().view(-1, V), labels.view(-1))


def batch(rows=3, tokens=8):
    labels = torch.randint(0, V, (rows, tokens))
    labels[0, :2] = -100
    return torch.randint(0, V, (rows, tokens)), labels


SHAPES = [(3, 8), (2, 9), (4, 5), (3, 8)]


def test_new_shapes():
    """Dynamo makes the first dimension that changes a dynamic one; thunder still gets a trace for each of its sizes."""
    model = Model()
    compiled = thunder_flce.thunderfx(model)
    for shape in SHAPES:
        arguments = batch(*shape)
        assert_agrees(model, lambda a=arguments: model(*a), lambda a=arguments: compiled(*a), **CLOSE)
    assert_fused(compiled)
    compiled_so_far = len(decisions(compiled))
    assert compiled_so_far in (2, 3, 4)
    compiled(*arguments)
    assert len(decisions(compiled)) == compiled_so_far


@pytest.mark.parametrize("product", [torch.mm, operator.matmul, lambda x, matrix: torch.addmm(matrix[0], x, matrix)])
def test_autocast_of_products(product):
    """Of hidden states in bfloat16 with a weight in float32."""

    def program(hidden, weight, labels):
        return F.cross_entropy(product(hidden, weight.t()).float(), labels)

    hidden, weight = torch.randn(24, H, dtype=torch.bfloat16), torch.randn(V, H, requires_grad=True)
    compiled, found = thunder_flce.thunderfx(program, strict=True), []
    for run in (compiled, program):
        with torch.autocast("cpu", torch.bfloat16):
            loss = run(hidden, weight, torch.arange(24))
        found.append((loss.detach(), *torch.autograd.grad(loss, weight)))
    torch.testing.assert_close(*found, rtol=2e-2, atol=2e-2)
    assert_fused(compiled, times=1)


class BreaksBeforeHead(Model):
    def before_head(self, hidden):
        torch._dynamo.graph_break()
        return hidden


class PrintsBeforeHead(Model):
    def forward(self, tokens, labels):
        hidden = self.embedding(tokens)
        print("")
        hidden = torch.tanh(self.hidden(hidden))
        return F.cross_entropy(self.lm_head(hidden).view(-1, V), labels.view(-1))


class BreaksAfterHead(Model):
    def forward(self, tokens, labels):
        logits = self.logits(tokens)
        torch._dynamo.graph_break()
        return F.cross_entropy(logits.view(-1, V), labels.view(-1))


@pytest.mark.parametrize("interpreter", ["thunder.jit", "thunder.fx"])
def test_recipe_with_plugin(interpreter):
    # thunder's default recipe insists on nvFuser, which needs a GPU.
    fuser = "nvfuser" if torch.cuda.is_available() else "torch.compile"
    recipe = BaseRecipe(fuser=fuser, interpreter=interpreter)
    model = Model()
    arguments = batch()
    compiled = thunder.compile(model, recipe=recipe, plugins="flce")
    assert_agrees(model, lambda: model(*arguments), lambda: compiled(*arguments), **CLOSE)
    (fusion,) = [t for t in recipe.transforms if isinstance(t, FuseLinearCrossEntropy)]
    assert [d.fused for c in fusion.compilations for d in c.decisions] == [True]


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: torch.narrow(input=x, dim=0, start=1, length=1),
        lambda x: torch.special.entr(input=x.abs()),
        lambda x: torch.nansum(input=x, dim=-1),
        lambda x: torch.xlogy(x.abs(), other=x.abs()),
        lambda x: F.kl_div(input=x, target=x.detach().softmax(-1), reduction="sum"),
    ],
    ids=["narrow", "entr", "nansum", "xlogy", "kl_div"],
)
def test_tensors_by_keyword(operation):
    """thunder cannot differentiate them."""
    x = torch.randn(3, 5, requires_grad=True)
    compiled, program = thunder_flce.thunderfx(lambda x: operation(x).sum()), lambda x: operation(x).sum()
    torch.testing.assert_close(_run(compiled, [x]), _run(program, [x]), **CLOSE)
