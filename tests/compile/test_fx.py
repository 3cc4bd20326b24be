"""`thunderfx`, beside `thunder.jit`, whose own tests are in test_thunder: caching, modes and graph breaks."""

import operator
from functools import partial

import pytest
import thunder
import torch
import torch.nn.functional as F
from thunder.recipes import BaseRecipe
from torch import nn
from torch.fx._lazy_graph_module import _get_graph_module_cls
from torch.utils.checkpoint import checkpoint

import thunder_flce
from front_ends import FRONT_ENDS, assert_agrees, decisions
from test_patterns import _arguments, _run
from thunder_flce import FuseLinearCrossEntropy
from thunder_flce.matching.decisions import Reason

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


def assert_fused(compiled, times=None):
    found = decisions(compiled)
    assert found and all(decision.fused for decision in found), [str(decision) for decision in found]
    assert times is None or len(found) == times


both_front_ends = pytest.mark.parametrize("front_end", FRONT_ENDS.values(), ids=FRONT_ENDS)

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


def torch_compile_notices_eval() -> bool:
    """Not on Python 3.13.0 with torch 2.11, where it runs the graph of training again."""
    dropout, x = torch.nn.Dropout(), torch.ones(100, requires_grad=True)
    compiled = torch.compile(dropout, backend="eager")
    compiled(x)
    dropout.eval()
    with torch.no_grad():
        compiled(x)
    return torch.equal(compiled(x), x)


def test_no_grad_and_eval():
    model = Model(dropout=0.5)
    arguments = batch()
    compiled = thunder_flce.thunderfx(model)
    compiled(*arguments).backward()
    model.eval()
    compiled.eval() if hasattr(compiled, "eval") else None
    with torch.no_grad():
        loss = compiled(*arguments)
    torch.testing.assert_close(loss, model(*arguments).detach())
    assert not loss.requires_grad
    assert decisions(compiled)[-1].plan.strategy == "loss_only"
    assert_fused(compiled)
    if hasattr(compiled, "_backend") and not torch_compile_notices_eval():
        pytest.skip("torch.compile itself does not notice eval() here")
    assert_agrees(model, lambda: model(*arguments), lambda: compiled(*arguments), **CLOSE)
    assert_fused(compiled)


@both_front_ends
def test_autocast_inside(front_end):
    model = Model()
    arguments = batch()

    def step(tokens, labels):
        with torch.autocast("cpu", torch.bfloat16):
            logits = model.logits(tokens)
        return F.cross_entropy(logits.float().view(-1, V), labels.view(-1))

    compiled = front_end(step)
    assert_agrees(model, lambda: step(*arguments), lambda: compiled(*arguments), rtol=2e-2, atol=2e-2)
    assert_fused(compiled, times=1)


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


def spelled_out(hidden, weight, labels):
    return F.cross_entropy(F.linear(hidden, weight).view(-1, V), labels.view(-1))


@both_front_ends
@pytest.mark.parametrize("of_hidden", [spelled_out, thunder_flce.linear_cross_entropy])
def test_checkpointed_loss(front_end, of_hidden):
    model = Model()
    arguments = batch()

    def step(tokens, labels):
        hidden = torch.tanh(model.hidden(model.embedding(tokens)))

        def loss(hidden, labels):
            return of_hidden(hidden, model.lm_head.weight, labels)

        return checkpoint(loss, hidden, labels, use_reentrant=False)

    compiled = front_end(step)
    assert_agrees(model, lambda: step(*arguments), lambda: compiled(*arguments), **CLOSE)
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


class UnsupportedBeforeHead(Model):
    """An operation that thunder leaves to Inductor: its graph is cut in three, without a graph break."""

    def before_head(self, hidden):
        return torch.sinc(hidden)


@pytest.mark.parametrize("model", [PrintsBeforeHead, UnsupportedBeforeHead], ids=lambda m: m.__name__)
def test_graph_breaks_away_from_the_logits(model):
    model = model()
    compiled = thunder_flce.thunderfx(model)
    for shape in SHAPES[:2]:
        arguments = batch(*shape)
        assert_agrees(model, lambda a=arguments: model(*a), lambda a=arguments: compiled(*a), **CLOSE)
    assert_fused(compiled, times=2)


class BreaksAfterHead(Model):
    def forward(self, tokens, labels):
        logits = self.logits(tokens)
        torch._dynamo.graph_break()
        return F.cross_entropy(logits.view(-1, V), labels.view(-1))


class UnsupportedAfterHead(Model):
    def after_head(self, logits):
        return torch.sinc(logits)


OUTSIDE = {
    BreaksBeforeHead: Reason.ARGUMENT, BreaksAfterHead: Reason.ARGUMENT, UnsupportedAfterHead: Reason.TRANSFORMED_LOGITS
}  # fmt: skip


@pytest.mark.parametrize(
    ("model", "reason"), OUTSIDE.items(), ids=lambda each: getattr(each, "__name__", None) or each.name
)
def test_graph_breaks_between_linear_and_loss(model, reason):
    """The loss gets its logits from outside its graph. Dynamo puts a break in a callee around the whole callee."""
    model = model()
    arguments = batch()
    compiled = thunder_flce.thunderfx(model)
    assert_agrees(model, lambda: model(*arguments), lambda: compiled(*arguments), **CLOSE)
    (decision,) = decisions(compiled)
    assert decision.reason is reason


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


@pytest.mark.parametrize("thunderfx", [thunder.dynamo.thunderfx, thunder_flce.thunderfx])
def test_graphs_have_their_code(thunderfx, monkeypatch):
    """Otherwise thunder's interpreter has to run what PyTorch writes it with, and cannot from torch 2.13 on."""
    classes = []
    monkeypatch.setattr(thunder.dynamo.compiler, "recompile_graph", lambda _: classes.append(_get_graph_module_cls()))
    thunderfx(Model())(*batch())
    assert classes == [torch.fx.GraphModule]


def method_mm(hidden, weight, bias, labels):
    return F.cross_entropy(hidden.flatten(0, 1).mm(weight.t()), labels.flatten()) + 0 * bias.sum()


def method_addmm(hidden, weight, bias, labels):
    return F.cross_entropy(bias.addmm(hidden.flatten(0, 1), weight.t().contiguous()), labels.flatten())


def one_bias_for_all_columns(hidden, weight, bias, labels):
    return F.cross_entropy(torch.addmm(bias[:1], hidden.flatten(0, 1), weight.t()), labels.flatten())


def half_a_bias(hidden, weight, bias, labels):
    return F.cross_entropy(torch.addmm(bias, hidden.flatten(0, 1), weight.t(), beta=0.5), labels.flatten())


@pytest.mark.parametrize(
    ("program", "is_fused"),
    [(method_mm, True), (method_addmm, True), (one_bias_for_all_columns, False), (half_a_bias, False)],
)
def test_products_of_matrices(program, is_fused):
    tensors = _arguments(program)
    compiled = thunder_flce.thunderfx(program)
    torch.testing.assert_close(_run(compiled, tensors), _run(program, tensors), **CLOSE)
    assert [decision.fused for decision in decisions(compiled)] == [is_fused]


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


def test_transforms_of_the_user_come_after_ours():
    class Recorder(thunder.Transform):
        def transform_traces_pre_prologue(self, prologue, computation, epilogue, **kwargs):
            seen.append([bsym.sym.name for bsym in computation.bound_symbols])
            return prologue, computation, epilogue

    for front_end in FRONT_ENDS.values():
        seen, transforms = [], [Recorder()]
        front_end(Model(), transforms=transforms)(*batch())
        assert len(transforms) == 1
        assert "linear_cross_entropy" in seen[0] and "cross_entropy" not in seen[0]


def test_options_reach_the_plan():
    model = Model()
    arguments = batch()
    for front_end in FRONT_ENDS.values():
        compiled = front_end(model, options=thunder_flce.Options(chunk_rows=8))
        compiled(*arguments)
        assert decisions(compiled)[0].plan.chunk_rows == 8


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("compile", [partial(torch.compile, backend="aot_eager"), thunder_flce.thunderfx])
def test_functional_form_behind_dynamo(compile, reduction):
    """In one graph: an operator for torch.compile, a region for thunder."""
    hidden, weight = torch.randn(2, 7, 8, requires_grad=True), torch.randn(20, 8, requires_grad=True)
    labels = torch.randint(20, (2, 7))
    labels[0, :3] = -100

    def program(hidden, weight, labels):
        return (thunder_flce.linear_cross_entropy(hidden * 2, weight, labels, reduction=reduction) * 3).mean()

    compiled = compile(program, fullgraph=True)
    loss, expected = compiled(hidden, weight, labels), program(hidden, weight, labels)
    torch.testing.assert_close(loss, expected)
    gradients = [torch.autograd.grad(value, (hidden, weight)) for value in (loss, expected)]
    torch.testing.assert_close(*gradients)
    if compile is thunder_flce.thunderfx:
        (graph,) = compiled._backend.subgraph_infos
        (fused,) = graph.thunder_compiled_fns
        symbols = [bsym.sym.name for bsym in thunder.last_traces(fused)[-1].bound_symbols]
        assert "flce_linear_cross_entropy_fwd" in symbols
