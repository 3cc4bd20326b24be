"""The modules: the head and its loss in one, and a model that returns nothing but its loss."""

import copy
import pickle
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import front_ends
import thunder_flce
from front_ends import COMPILERS, FRONT_ENDS, H, V, assert_agrees, decisions, flattened_loss
from reference import assert_close_to_truth, differentiate, make_case
from thunder_flce import LinearCrossEntropyLoss, Options, loss_only

INPUTS = torch.randn(3, H), torch.tensor([0, 1, 2])


@pytest.mark.parametrize("compiler", COMPILERS)
def test_from_linear(compiler):
    """The parameters are those of the linear, and the module compiles."""
    linear = nn.Linear(H, V)
    loss = LinearCrossEntropyLoss.from_linear(linear, softcap=5.0, weight=torch.rand(V))
    assert loss.linear is linear and not loss.weight.is_meta
    case = replace(make_case(hidden=H, vocab=V), weight=linear.weight, bias=linear.bias, class_weight=loss.weight)
    result = differentiate(COMPILERS[compiler](loss)(case.x, case.target), case, None)
    assert_close_to_truth(result, case, softcap=5.0)


def test_state_dict():
    """It has the names of `torch.nn.LinearCrossEntropyLoss`; one of a linear is loaded, too."""
    linear, ones, class_weights = nn.Linear(H, V), torch.ones(V), torch.rand(V)
    torch_state = {"weight": class_weights, "linear.weight": linear.weight, "linear.bias": linear.bias}
    for state, expected in ((torch_state, class_weights), (linear.state_dict(), ones)):
        loss = LinearCrossEntropyLoss(H, V, bias=True, weight=torch.ones(V))
        assert list(loss.state_dict()) == list(torch_state)
        loss.load_state_dict(state)
        assert torch.equal(loss.linear.weight, linear.weight) and torch.equal(loss.linear.bias, linear.bias)
        assert torch.equal(loss.weight, expected)
    assert loss.load_state_dict({"weight": linear.weight, "x": ones}, strict=False) == (["linear.bias"], ["x"])

    model = nn.ModuleDict({"embedding": nn.Embedding(V, H), "lm_head": LinearCrossEntropyLoss(H, V)})
    model.lm_head.linear.weight = model.embedding.weight
    assert list(model.lm_head.state_dict()) == ["linear.weight"]
    model.load_state_dict({"embedding.weight": linear.weight, "lm_head.weight": linear.weight})
    assert torch.equal(model.lm_head.linear.weight, linear.weight)
    assert model.lm_head.linear.weight is model.embedding.weight


def test_parametrized_parameters_are_computed_once():
    """A parametrization may draw random numbers, or change its own state, as spectral_norm does."""
    computed = []

    class Twice(nn.Module):
        def forward(self, parameter):
            computed.append(tuple(parameter.shape))
            return 2 * parameter

    loss = LinearCrossEntropyLoss(H, V, bias=True)
    for name in ("weight", "bias"):
        nn.utils.parametrize.register_parametrization(loss.linear, name, Twice())
    computed.clear()
    loss(*INPUTS)
    assert computed == [(V, H), (V,)]


# Models that return only their loss.

TOKENS = torch.arange(6).view(2, 3)


@dataclass
class Output:
    loss: torch.Tensor | None
    logits: torch.Tensor


class Model(front_ends.Model):
    """A model like those of transformers; `output_type` makes its output of the loss and the logits."""

    def __init__(self, output_type=Output):
        super().__init__(bias=True)
        self.output_type = output_type

    def forward(self, tokens, labels=None):
        logits = self.logits(tokens)
        return self.output_type(None if labels is None else flattened_loss(logits, labels), logits)


class NanoGPT(Model):
    """Takes and returns what Karpathy's nanoGPT does."""

    def forward(self, idx, targets=None):
        output = super().forward(idx, targets)
        return output.logits, output.loss


MODELS = {
    "attribute": (Model, {}),
    "dict": (partial(Model, lambda loss, logits: {"logits": logits, **({} if loss is None else {"loss": loss})}), {}),
    "tuple": (partial(Model, lambda loss, logits: (logits,) if loss is None else (loss, logits)), {}),
    "other names": (NanoGPT, {"labels": "targets", "loss": 1}),
}
"""Models by what they return, and the arguments of `loss_only` for them"""


@pytest.mark.parametrize("name", MODELS)
def test_loss_only(name):
    make, settings = MODELS[name]
    model, labels = make(), settings.get("labels", "labels")
    only = loss_only(model, **settings)
    expected = flattened_loss(model.logits(TOKENS), TOKENS)
    assert torch.equal(only(TOKENS, TOKENS), expected) and torch.equal(only(TOKENS, **{labels: TOKENS}), expected)
    with pytest.raises(TypeError, match=rf" returned no loss; call it with {labels}=….* this is a (Output|dict|tuple)"):
        only(TOKENS)
    for front_end in FRONT_ENDS.values():
        jitted = front_end(only)
        assert_agrees(model, lambda: only(TOKENS, TOKENS), lambda: jitted(TOKENS, **{labels: TOKENS}))  # noqa: B023
        assert [decision.fused for decision in decisions(jitted)] == [True]
        if name == "attribute":
            # Dynamo must not give up the frame, which it shares with the other cases.
            with pytest.raises(TypeError, match="Model returned no loss; call it with labels"):
                jitted(TOKENS)


def test_loss_only_shares_the_models_attributes():
    model = Model()
    only = loss_only(model)
    only.eval()
    assert not model.training and not model.lm_head.training
    only.lm_head.weight = only.embedding.weight
    assert model.lm_head.weight is model.embedding.weight
    only.to(torch.bfloat16)
    assert model.lm_head.bias.dtype == torch.bfloat16
    model.train()
    assert only.training and list(only.parameters()) == list(model.parameters())
    assert isinstance(only, Model) and type(only).__name__ == "Model" and repr(only) == repr(model)
    assert loss_only(only) is only
    assert isinstance(model(TOKENS, TOKENS), Output)


def test_two_loss_only_models_are_two_programs():
    """The second is not a recompilation of the first."""
    with torch._dynamo.config.patch(recompile_limit=1):
        for make, settings in (MODELS["attribute"], MODELS["other names"]):
            torch.compile(loss_only(make(), **settings), backend="eager", fullgraph=True)(TOKENS, TOKENS)


class CachingModel(Model):
    """Has a cache, as models of transformers; `shared_layers` of its layers share what is in it."""

    def __init__(self, shared_layers=0):
        super().__init__()
        self.config = SimpleNamespace(text_config=SimpleNamespace(num_kv_shared_layers=shared_layers))

    def forward(self, tokens, labels=None, use_cache=None):
        self.use_cache = use_cache
        return super().forward(tokens, labels)


class PeftModel(nn.Module):
    """Wraps a model as peft does: its signature does not say what the model takes."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def get_base_model(self):
        return self.model

    def forward(self, tokens, labels=None, **kwargs):
        return self.model(tokens, labels=labels, **kwargs)


@pytest.mark.parametrize(("shared_layers", "is_peft"), [(0, False), (0, True), (1, True)])
def test_loss_only_uses_no_cache(shared_layers, is_peft):
    """Unless the call asks for it, or layers share what is in it."""
    model = CachingModel(shared_layers)
    only = loss_only(PeftModel(model) if is_peft else model)
    for arguments, use_cache in (({}, None if shared_layers else False), ({"use_cache": True}, True)):
        only(TOKENS, labels=TOKENS, **arguments)
        assert model.use_cache is use_cache
    loss_only(model)(TOKENS, TOKENS, True)
    assert model.use_cache is True


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies(copied):
    loss = LinearCrossEntropyLoss(H, V, weight=torch.rand(V), reduction="sum", options=Options(chunk_rows=8))
    nanogpt = loss_only(NanoGPT(), labels="targets", loss=1)
    for model, inputs in ((loss, INPUTS), (loss_only(Model()), (TOKENS, TOKENS)), (nanogpt, (TOKENS, TOKENS))):
        other = copied(model)
        assert torch.equal(other(*inputs), model(*inputs))
        assert not {*other.parameters()} & {*model.parameters()}


# What the modules refuse.


def changed(module, change):
    change(module)
    return module


head, from_linear = partial(LinearCrossEntropyLoss, H, V), LinearCrossEntropyLoss.from_linear
WRONG_TYPES = {
    "options must be thunder_flce.Options or None, but got str": lambda: head(options="auto"),
    "weight must be a tensor, but got list": lambda: head(weight=[1.0] * V),
    # More than a linear.
    "linear must have no hooks":
        lambda: from_linear(changed(nn.Linear(H, V), lambda linear: linear.register_forward_hook(print))),
    "linear must have no hooks: it is never":
        lambda: changed(head(), lambda loss: loss.linear.register_full_backward_hook(print))(*INPUTS),
    "linear must be a torch.nn.Linear with the forward of that class":
        lambda: from_linear(changed(nn.Linear(H, V), lambda linear: setattr(linear, "forward", print))),
    "linear.weight must be a parameter": lambda: from_linear(nn.utils.parametrizations.weight_norm(nn.Linear(H, V))),
    "linear must be a torch.nn.Linear .* but is Sequential":
        lambda: changed(head(), lambda loss: setattr(loss, "linear", nn.Sequential()))(*INPUTS),
    # No loss.
    "model must be a torch.nn.Module, but got method": lambda: loss_only(Model().forward),
    "the forward of NanoGPT takes no labels.*as labels=…": lambda: loss_only(NanoGPT()),
    "ThunderModule takes no labels.*before it is compiled": lambda: loss_only(thunder_flce.jit(Model())),
    "OptimizedModule takes no labels.*before it is compiled": lambda: loss_only(torch.compile(Model())),
    "this Model was compiled; call loss_only before":
        lambda: loss_only(changed(Model(), lambda model: model.compile(backend="eager"))),
    "Model returned no loss.* a Output, and loss='nll'": lambda: loss_only(Model(), loss="nll")(TOKENS, TOKENS),
}  # fmt: skip
WRONG_VALUES = {
    "in_features must be a positive int, but got 0": lambda: LinearCrossEntropyLoss(0, V),
    "num_classes must be a positive int, but got 9.0": lambda: LinearCrossEntropyLoss(H, 9.0),
    r"weight must be \(V,\) = \(97,\), class weights, but got \(97, 4\); to": lambda: head(weight=torch.ones(V, 4)),
    r"out_features must be \(\), but got \(3,\); give input as": lambda: head(out_features=(3,)),
    "reduction must be one of": lambda: head(reduction="avg"),
    r"linear.weight must be .* = \(97, 16\), but got \(10, 16\)":
        lambda: changed(head(), lambda loss: setattr(loss.linear, "weight", nn.Embedding(10, H).weight))(*INPUTS),
    "model is a loss_only model already, with labels='labels', loss='loss'":
        lambda: loss_only(loss_only(Model()), loss=1),
}  # fmt: skip


@pytest.mark.parametrize("message", [*WRONG_TYPES, *WRONG_VALUES])
def test_bad_argument(message):
    with pytest.raises(TypeError if message in WRONG_TYPES else ValueError, match=message):
        (WRONG_TYPES | WRONG_VALUES)[message]()
