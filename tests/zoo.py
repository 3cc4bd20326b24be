"""Real models, tiny and with random parameters, and their outcomes: under `thunder.jit`, and in Dynamo's graph.

    python tests/zoo.py    writes the table of docs/models.md

`test_model_zoo.py` asserts every row.
"""

import argparse
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tiny
from thunder_flce.matching.decisions import Reason

HAS_LITGPT = importlib.util.find_spec("litgpt") is not None
"""False in environments with the newest transformers, which litgpt excludes"""

if HAS_LITGPT:
    import litgpt
    from litgpt.utils import chunked_cross_entropy

VOCAB = 199
PAGE = Path(__file__).parent.parent / "docs" / "models.md"
BEGIN, END = "<!-- models: python tests/zoo.py -->", "<!-- end of models -->"

FUSED = "fused"
Outcome = str | Reason | type[Exception]
"""Fused, the reason if not, or the exception of thunder if it cannot trace the model, even without this project"""


@dataclass(frozen=True)
class Entry:
    """A row of the table."""

    model: str
    build: Callable[[], nn.Module]  # Makes a module of (tokens, labels) that returns the loss, or outputs with `loss`
    head: str = ""  # Operations between linear and loss, or another peculiarity, as text
    region: Mapping[str, Any] = field(default_factory=dict)  # Expected arguments of the fused region
    jit: Outcome = FUSED
    dynamo: Outcome = FUSED  # For thunderfx and the backend of torch.compile, which get the same graph


class Transformers(nn.Module):
    """A model of transformers that returns the loss, or all outputs."""

    def __init__(self, model: nn.Module, *, all_outputs: bool = False, **arguments: Any):
        super().__init__()
        self.model, self.all_outputs, self.arguments = model, all_outputs, arguments

    def forward(self, tokens, labels):
        outputs = self.model(input_ids=tokens, labels=labels, use_cache=False, **self.arguments)
        return outputs if self.all_outputs else outputs.loss


class Litgpt(nn.Module):
    """A model of litgpt with the loss of its training loops."""

    def __init__(self, model: nn.Module, chunk_size: int = 0, lm_head_chunk_size: int = 0):
        super().__init__()
        self.model, self.chunk_size, self.lm_head_chunk_size = model, chunk_size, lm_head_chunk_size

    def forward(self, tokens, labels):
        logits = self.model(tokens, lm_head_chunk_size=self.lm_head_chunk_size)
        return chunked_cross_entropy(logits, labels, chunk_size=self.chunk_size, ignore_index=-100)


# At most one layer: layers before the head take most of thunder's time, and do not matter here.


def _transformers(name: str, *, call: Mapping[str, Any] | None = None, loss_type: str | None = None, **config: Any):
    """Returns a builder for a model of transformers by its classes' prefix; `call` has further arguments of its call.

    The class's name tells transformers the type of its loss, except for GPT-2, which has the `loss_type`.
    """

    def build():
        settings = {"vocab_size": VOCAB, "num_hidden_layers": 0, "attn_implementation": "sdpa", **config}
        model = tiny.model(name, **settings)
        if loss_type:
            model.loss_type = loss_type
        return Transformers(model, **(call or {}))

    return build


def _litgpt(name: str, n_layer: int = 0, **call: Any):
    """Returns a builder for a small model of litgpt, by the name of its configuration."""

    def build():
        full = litgpt.Config.from_name(name)
        sizes = {"block_size": 32, "n_embd": 32, "n_head": 4, "head_size": 8, "intermediate_size": 48}
        sizes["n_layer"] = n_layer
        sizes["n_query_groups"] = {full.n_head: 4, 1: 1}.get(full.n_query_groups, 2)
        if full.n_expert:
            sizes |= {"n_expert": 4, "n_expert_per_token": 2}
        if full.sliding_window_size:
            sizes |= {"sliding_window_size": 8, "sliding_window_indices": full.sliding_window_indices[:1]}
        config = litgpt.Config.from_name(name, vocab_size=VOCAB, padded_vocab_size=VOCAB, **sizes)
        return Litgpt(litgpt.GPT(config), **call)

    return build


ITEMS = "num_items_in_batch"
ENTRIES = [
    Entry("transformers Llama", _transformers("Llama")),
    Entry("transformers Qwen2", _transformers("Qwen2")),
    Entry("transformers Qwen3", _transformers("Qwen3", head_dim=8)),
    Entry("transformers Gemma", _transformers("Gemma", head_dim=8), "tied to the embedding"),
    Entry(
        "transformers Gemma 2",
        _transformers("Gemma2", head_dim=8, sliding_window=8, attn_implementation="eager", num_hidden_layers=1),
        "tied; softcap", {"softcap": 30.0},
    ),
    Entry("transformers Phi3", _transformers("Phi3")),
    Entry("transformers Mistral", _transformers("Mistral")),
    Entry(
        "transformers Granite", _transformers("Granite", logits_scaling=8.0),
        "logits divided by `logits_scaling`", {"logit_scale": 0.125},
    ),
    Entry(
        "transformers Cohere", _transformers("Cohere", logit_scale=0.0625),
        "tied; logits times `logit_scale`", {"logit_scale": 0.0625},
    ),
    Entry("transformers OLMo 2", _transformers("Olmo2")),
    Entry(
        "transformers GPT-2", _transformers("GPT2", embd_pdrop=0.0, loss_type="ForCausalLM"),
        'tied; `model.loss_type = "ForCausalLM"`',
    ),
    Entry(
        "transformers GPT-2", _transformers("GPT2", embd_pdrop=0.0),
        "tied; without the type that `loss_only` gives it, transformers logs a warning, where Dynamo breaks the graph",
        dynamo=Reason.ARGUMENT,
    ),
    Entry("transformers Llama", _transformers("Llama", call={ITEMS: 37}), f"`{ITEMS}`, a number"),
    Entry("transformers Llama", _transformers("Llama", call={ITEMS: torch.tensor(37)}), f"`{ITEMS}`, a tensor"),
    Entry(
        "transformers Llama", _transformers("Llama", call={"all_outputs": True}), "all outputs returned",
        jit=Reason.LOGITS_RETURNED, dynamo=Reason.LOGITS_RETURNED,
    ),
    Entry("litgpt Pythia", _litgpt("pythia-14m")),
    Entry("litgpt Llama 2", _litgpt("Llama-2-7b-hf")),
    Entry("litgpt Llama 3", _litgpt("Llama-3.2-1B", n_layer=1)),
    Entry("litgpt Llama 3", _litgpt("Llama-3.2-1B", chunk_size=8), "`chunk_size=8`, 3 chunks that become one op"),
    Entry(
        "litgpt Llama 3", _litgpt("Llama-3.2-1B", chunk_size=8, lm_head_chunk_size=6), "`lm_head_chunk_size`, 2 chunks",
    ),
    Entry("litgpt Gemma", _litgpt("Gemma-2b")),
    Entry("litgpt Gemma 2", _litgpt("Gemma-2-2b"), "softcap", {"softcap": 30.0}),
    Entry("litgpt Gemma 3", _litgpt("Gemma-3-1b-it")),
    Entry("litgpt Phi 2", _litgpt("phi-2"), "bias", {"linear_bias": True}),
    Entry("litgpt Falcon", _litgpt("falcon-7b")),
    Entry("litgpt Qwen2.5", _litgpt("Qwen2.5-0.5B")),
    Entry("litgpt Qwen3", _litgpt("Qwen3-0.6B")),
    Entry("litgpt OLMo", _litgpt("OLMo-1B-hf")),
    Entry(
        "litgpt Mixtral", _litgpt("Mixtral-8x7B-v0.1", n_layer=1),
        "experts chosen by the data, where Dynamo breaks the graph",
        jit=NotImplementedError, dynamo=Reason.ARGUMENT,
    ),
]  # fmt: skip


def _cell(outcome: Outcome) -> str:
    if isinstance(outcome, Reason):
        return f"not fused: {outcome.value}"
    return outcome if outcome == FUSED else f"thunder raises `{outcome.__name__}`"


def table() -> str:
    """Returns the table as Markdown."""
    rows = [("model", "head and loss", "`thunder.jit`", "`thunderfx`, the backend"), ("---",) * 4]
    rows += [(entry.model, entry.head, _cell(entry.jit), _cell(entry.dynamo)) for entry in ENTRIES]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def write_page() -> None:
    """Replaces the table in docs/models.md."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    write_page()
