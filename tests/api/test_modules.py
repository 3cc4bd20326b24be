"""The modules: the head and its loss in one, and a model that returns nothing but its loss."""

import copy
import functools
import io
import pickle
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import thunder_flce
from front_ends import COMPILERS, FRONT_ENDS, assert_agrees, decisions
from reference import assert_close_to_truth, differentiate, make_case
from thunder_flce import LinearCrossEntropyLoss, Options, loss_only

H, V = 24, 101


def _case(loss, **settings):
    """Random inputs of the module's, whose parameters are the weight and the bias."""
    case = make_case(hidden=loss.in_features, vocab=loss.num_classes, dtype=loss.linear.weight.dtype, **settings)
    return replace(case, weight=loss.linear.weight, bias=loss.linear.bias, class_weight=loss.weight)


@pytest.mark.parametrize("way", COMPILERS)
def test_compiled(way):
    loss = LinearCrossEntropyLoss(H, V, bias=True, softcap=5.0, weight=torch.rand(V))
    case = _case(loss)
    result = differentiate(COMPILERS[way](loss)(case.x, case.target), case, None)
    assert_close_to_truth(result, case, softcap=5.0)


def test_state_dict():
    """The names are those of `torch.nn.LinearCrossEntropyLoss`, and those of a linear are taken, too."""
    class_weights = torch.rand(V)
    loss = LinearCrossEntropyLoss(H, V, bias=True, weight=torch.ones(V))
    assert list(loss.state_dict()) == ["weight", "linear.weight", "linear.bias"]
    assert list(LinearCrossEntropyLoss(H, V).state_dict()) == ["linear.weight"]
    linear = nn.Linear(H, V)
    of_torch = {f"linear.{name}": tensor for name, tensor in linear.state_dict().items()}
    for state in (of_torch, linear.state_dict()):
        loss = LinearCrossEntropyLoss(H, V, bias=True)
        loss.load_state_dict(state)
        assert torch.equal(loss.linear.weight, linear.weight) and torch.equal(loss.linear.bias, linear.bias)
    loss = LinearCrossEntropyLoss(H, V, bias=True, weight=torch.ones(V))
    loss.load_state_dict({"weight": class_weights, **of_torch})
    assert torch.equal(loss.weight, class_weights)
    assert loss.load_state_dict({"weight": linear.weight, "x": linear.weight}, strict=False) == (["linear.bias"], ["x"])
    assert torch.equal(loss.linear.weight, linear.weight) and torch.equal(loss.weight, class_weights)
    model = nn.ModuleDict({"embedding": nn.Embedding(V, H), "lm_head": LinearCrossEntropyLoss(H, V)})
    model.lm_head.linear.weight = model.embedding.weight
    tied = torch.randn(V, H)
    model.load_state_dict({"embedding.weight": tied, "lm_head.weight": tied})
    assert torch.equal(model.lm_head.linear.weight, tied) and model.lm_head.linear.weight is model.embedding.weight


@pytest.mark.parametrize("bias", [False, True])
def test_from_linear_shares_the_parameters(bias):
    linear = nn.Linear(H, V, bias=bias).bfloat16()
    linear.weight.requires_grad_(False)
    loss = LinearCrossEntropyLoss.from_linear(linear, softcap=5.0, weight=torch.rand(V))
    assert loss.linear is linear and not loss.weight.is_meta
    case = _case(loss)
    assert_close_to_truth(differentiate(loss(case.x, case.target), case, None), case, softcap=5.0)


def test_copies_and_conversions():
    loss = LinearCrossEntropyLoss(H, V, bias=True, weight=torch.rand(V), reduction="sum", options=Options(chunk_rows=8))
    file = io.BytesIO()
    torch.save(loss, file)
    file.seek(0)
    case = _case(loss)
    expected = loss(case.x, case.target)
    for other in (copy.deepcopy(loss), torch.load(file, weights_only=False)):
        assert torch.equal(other(case.x, case.target), expected) and other.linear.weight is not loss.linear.weight
    half = copy.deepcopy(loss).to(torch.bfloat16)
    assert half.linear.weight.dtype == half.linear.bias.dtype == half.weight.dtype == torch.bfloat16
    assert half(case.x.bfloat16(), case.target).dtype == torch.float32


class Twice(nn.Module):
    def forward(self, parameter):
        """Twice the parameter, and counts the calls."""
        self.calls = getattr(self, "calls", 0) + 1
        return 2 * parameter


def test_what_parameters_are_computed_by_is_called_once():
    """It may draw random numbers, or change what it keeps, as spectral_norm does."""
    loss, ways = LinearCrossEntropyLoss(H, V, bias=True), {"weight": Twice(), "bias": Twice()}
    for name, way in ways.items():
        nn.utils.parametrize.register_parametrization(loss.linear, name, way)
        way.calls = 0
    loss(torch.randn(3, H), torch.tensor([0, 1, 2]))
    assert [way.calls for way in ways.values()] == [1, 1]


@dataclass
class Output:
    loss: torch.Tensor | None
    logits: torch.Tensor


class Model(nn.Module):
    """A model like those of transformers, with one of their ways to return a loss."""

    def __init__(self, returns=Output):
        super().__init__()
        self.embedding = nn.Embedding(V, H)
        self.lm_head = nn.Linear(H, V)
        self.returns = returns

    def forward(self, tokens, labels=None):
        """The loss and the logits."""
        logits = self.lm_head(self.embedding(tokens))
        loss = None if labels is None else nn.functional.cross_entropy(logits.view(-1, V), labels.view(-1))
        return self.returns(loss, logits)


TOKENS = torch.arange(6).view(2, 3)


class NanoGPT(Model):
    """Takes and returns what Karpathy's nanoGPT does."""

    def forward(self, idx, targets=None):
        """The logits and the loss."""
        output = super().forward(idx, targets)
        return output.logits, output.loss


def _wrapped(model):
    """Sets a forward on the model, as accelerate's mixed precision and TRL's trainers do."""
    forward = model.forward
    model.forward = functools.wraps(forward)(lambda *args, **kwargs: forward(*args, **kwargs))
    return model


RETURNS = {
    "attribute": (Model, {}),
    "attribute, of a forward that was set": (lambda: _wrapped(Model()), {}),
    "attribute, of a forward that is set afterwards": (Model, {}),
    "dict": (partial(Model, lambda loss, logits: {"logits": logits, **({} if loss is None else {"loss": loss})}), {}),
    "tuple": (partial(Model, lambda loss, logits: (logits,) if loss is None else (loss, logits)), {}),
    "other names": (NanoGPT, {"labels": "targets", "loss": 1}),
}


@pytest.mark.parametrize("returns", RETURNS)
def test_loss_only(returns):
    make, names = RETURNS[returns]
    model, labels = make(), names.get("labels", "labels")
    only = loss_only(model, **names)
    if "afterwards" in returns:
        _wrapped(model)
    expected = nn.functional.cross_entropy(model.lm_head(model.embedding(TOKENS)).view(-1, V), TOKENS.view(-1))
    assert torch.equal(only(TOKENS, TOKENS), expected) and torch.equal(only(TOKENS, **{labels: TOKENS}), expected)
    kind = r"Model returned no loss; call it with labels=….* this is a (Output|dict|tuple)"
    with pytest.raises(TypeError, match="NanoGPT returned no loss; call it with targets=…" if names else kind):
        only(TOKENS)
    for front_end in FRONT_ENDS.values():
        jitted = front_end(only)
        assert_agrees(model, lambda: only(TOKENS, TOKENS), lambda: jitted(TOKENS, **{labels: TOKENS}))  # noqa: B023
        assert [decision.fused for decision in decisions(jitted)] == [True]
        if returns == "attribute":
            # Dynamo must not give up the frame, which it shares with the other cases.
            with pytest.raises(TypeError, match="Model returned no loss; call it with labels"):
                jitted(TOKENS)


def test_loss_only_is_the_same_model():
    model = Model()
    only = loss_only(model)
    assert list(only.state_dict()) == list(model.state_dict())
    for (name, parameter), (of_model, right) in zip(only.named_parameters(), model.named_parameters(), strict=True):
        assert name == of_model and parameter is right
    only.eval()
    assert not model.training and not model.lm_head.training
    model.train()
    assert only.training
    only.lm_head.weight = only.embedding.weight
    assert model.lm_head.weight is model.embedding.weight
    only.to(torch.bfloat16)
    assert model.lm_head.bias.dtype == torch.bfloat16
    assert isinstance(only, Model) and type(only).__name__ == "Model" and repr(only) == repr(model)
    assert loss_only(only) is only
    assert isinstance(model(TOKENS, TOKENS), Output)


def test_loss_only_of_two_models():
    """The second is not a recompilation of the first."""
    with torch._dynamo.config.patch(recompile_limit=1):
        for make, names in (RETURNS["attribute"], RETURNS["other names"]):
            torch.compile(loss_only(make(), **names), backend="eager", fullgraph=True)(TOKENS, TOKENS)


class Caching(Model):
    """As a model of transformers."""

    def __init__(self, shared_layers=0):
        super().__init__()
        self.config = SimpleNamespace(text_config=SimpleNamespace(num_kv_shared_layers=shared_layers))

    def forward(self, tokens, labels=None, use_cache=None):
        """Notes what it is told."""
        self.use_cache = use_cache
        return super().forward(tokens, labels)


class OfPeft(nn.Module):
    """Whose signature does not say what the model takes."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def get_base_model(self):
        """The model inside."""
        return self.model

    def forward(self, tokens, labels=None, **kwargs):
        """The model's."""
        return self.model(tokens, labels=labels, **kwargs)


@pytest.mark.parametrize(("shared_layers", "is_of_peft"), [(0, False), (0, True), (1, True)])
def test_loss_only_leaves_the_cache_out(shared_layers, is_of_peft):
    """But where the call asks for it, or where layers share what is in it."""
    model = Caching(shared_layers)
    only = loss_only(OfPeft(model) if is_of_peft else model)
    for asked, told in (({}, None if shared_layers else False), ({"use_cache": True}, True)):
        only(TOKENS, labels=TOKENS, **asked)
        assert model.use_cache is told
    loss_only(model)(TOKENS, TOKENS, True)
    assert model.use_cache is True


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda of: pickle.loads(pickle.dumps(of))], ids=["copy", "pickle"])
def test_copies_of_loss_only(copied):
    for only in (loss_only(Model()), loss_only(NanoGPT(), labels="targets", loss=1)):
        other = copied(only)
        assert torch.equal(other(TOKENS, TOKENS), only(TOKENS, TOKENS))
        assert other.lm_head.weight is not only.lm_head.weight


def _changed(module, change):
    change(module)
    return module


of, from_linear = partial(LinearCrossEntropyLoss, 4, 9), LinearCrossEntropyLoss.from_linear
INPUTS = torch.randn(3, 4), torch.tensor([0, 1, 2])
WRONG_TYPES = {
    "options must be thunder_flce.Options or None, but got str": lambda: of(options="auto"),
    "weight must be a tensor, but got list": lambda: of(weight=[1.0] * 9),
    # What is more than a linear.
    "linear must have no hooks":
        lambda: from_linear(_changed(nn.Linear(4, 9), lambda linear: linear.register_forward_hook(print))),
    "linear must have no hooks: it is never":
        lambda: _changed(of(), lambda loss: loss.linear.register_full_backward_hook(print))(*INPUTS),
    "linear must be a torch.nn.Linear with the forward of that class":
        lambda: from_linear(_changed(nn.Linear(4, 9), lambda linear: setattr(linear, "forward", print))),
    "linear.weight must be a parameter": lambda: from_linear(nn.utils.parametrizations.weight_norm(nn.Linear(4, 9))),
    "linear must be a torch.nn.Linear .* but is Sequential":
        lambda: _changed(of(), lambda loss: setattr(loss, "linear", nn.Sequential()))(*INPUTS),
    # What has no loss.
    "model must be a torch.nn.Module, but got method": lambda: loss_only(Model().forward),
    "the forward of Linear takes no labels, so it computes no loss; pass": lambda: loss_only(nn.Linear(H, V)),
    "the forward of NanoGPT takes no labels.*as labels=…": lambda: loss_only(NanoGPT()),
    "ThunderModule takes no labels.*before it is compiled": lambda: loss_only(thunder_flce.jit(Model())),
    "OptimizedModule takes no labels.*before it is compiled": lambda: loss_only(torch.compile(Model())),
    "this Model was compiled; call loss_only before":
        lambda: loss_only(_changed(Model(), lambda model: model.compile(backend="eager"))),
    "Model returned no loss.* a Output, and loss='nll'": lambda: loss_only(Model(), loss="nll")(TOKENS, TOKENS),
    "NanoGPT returned no loss.* a tuple, and loss=0":
        lambda: loss_only(NanoGPT(), labels="targets", loss=0)(TOKENS, TOKENS),
}  # fmt: skip
WRONG_VALUES = {
    "in_features must be a positive int, but got 0": lambda: LinearCrossEntropyLoss(0, 9),
    "num_classes must be a positive int, but got 9.0": lambda: LinearCrossEntropyLoss(4, 9.0),
    r"weight must be \(V,\) = \(9,\), class weights, but got \(9, 4\); to": lambda: of(weight=torch.ones(9, 4)),
    r"out_features must be \(\), but got \(3,\); give input as": lambda: of(out_features=(3,)),
    "reduction must be one of": lambda: of(reduction="avg"),
    r"linear.weight must be .* = \(9, 4\), but got \(10, 4\)":
        lambda: _changed(of(), lambda loss: setattr(loss.linear, "weight", nn.Embedding(10, 4).weight))(*INPUTS),
    "model is a loss_only model already, with labels='labels', loss='loss'":
        lambda: loss_only(loss_only(Model()), loss=1),
}  # fmt: skip


@pytest.mark.parametrize("message", [*WRONG_TYPES, *WRONG_VALUES])
def test_what_is_refused(message):
    with pytest.raises(TypeError if message in WRONG_TYPES else ValueError, match=message):
        (WRONG_TYPES | WRONG_VALUES)[message]()
