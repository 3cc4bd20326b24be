"""Real models, tiny and random: loss and all parameter gradients as eager PyTorch has them, and fused."""

import warnings

import pytest
import thunder
import torch
import torch.nn.functional as F
from torch import nn

import thunder_flce
from thunder_flce.graph import plugin

litgpt = pytest.importorskip("litgpt", reason="needs the extra 'examples'")
transformers = pytest.importorskip("transformers", reason="needs the extra 'examples'")


# One layer at most: what is in front of the head takes most of thunder's time, and is none of ours.
class LitGPTLoss(nn.Module):
    """litgpt's model with the loss of its training loop."""

    def __init__(self, **config):
        super().__init__()
        sizes = {"block_size": 32, "n_layer": 0, "n_embd": 32, "n_head": 4}
        vocabulary = {"vocab_size": 101, "padded_vocab_size": 101}
        self.gpt = litgpt.GPT(litgpt.Config(**{**sizes, **vocabulary, **config}))

    def forward(self, tokens, labels):
        logits = self.gpt(tokens)
        return F.cross_entropy(logits.reshape(-1, logits.size(-1)), labels.reshape(-1))


def llama_loss(**config):
    """transformers' Llama; its own loss, from its own `labels=` path."""
    defaults = {
        "vocab_size": 101,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 0,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "attn_implementation": "sdpa",
        "use_cache": False,
    }
    return thunder_flce.loss_only(transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**defaults, **config})))


MODELS = {
    "litgpt, padded vocabulary": lambda: LitGPTLoss(padded_vocab_size=128),
    "transformers Llama, tied": lambda: llama_loss(tie_word_embeddings=True),
}


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_equal_eager(name, device):
    model = MODELS[name]().to(device)
    tokens = torch.randint(0, 101, (2, 24), device=device)
    labels = tokens.clone()
    labels[0, :5] = -100
    expected = model(tokens, labels=labels)
    expected.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()

    jitted = thunder_flce.jit(model)
    loss = jitted(tokens, labels=labels)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-4)
    for parameter_name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[parameter_name], rtol=1e-4, atol=1e-4)

    (decision,) = thunder_flce.explain(jitted)[0].decisions
    assert decision.fused and (name.startswith("litgpt") or "/loss_utils.py:" in decision.source)
    names = [bsym.sym.name for bsym in thunder.last_traces(jitted)[-1].bound_symbols]
    assert names.count("flce_linear_cross_entropy_fwd") == 1


def test_a_few_steps_of_training_agree(device):
    losses = []
    for compile_model in (lambda model: model, thunder_flce.jit):
        torch.manual_seed(0)
        model = LitGPTLoss().to(device)
        step = compile_model(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(5):
            tokens = torch.randint(0, 101, (4, 16), device=device)
            loss = step(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize("installed", ["4.52.4", "4.57.6"])
def test_a_transformers_that_thunder_does_not_trace(installed, monkeypatch):
    """The warning names what does; a model without transformers gets none."""
    monkeypatch.setattr(plugin, "version", lambda name: installed)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        thunder_flce.jit(llama_loss())
        thunder_flce.jit(LitGPTLoss())
    found = [str(warning.message) for warning in caught if "thunder.jit traces" in str(warning.message)]
    assert len(found) == (installed != "4.52.4")
    assert all(f"this is {installed}: use torch.compile" in message for message in found)
