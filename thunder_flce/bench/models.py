"""Training steps of whole models, with and without this project: forward, backward and optimizer.

All methods share one model, whose parameters stay as they are: the optimizer does all its work at a learning rate of 0.
So each computes the same loss, and their order does not matter.
"""

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import thunder_flce
from thunder_flce.backend import compile_graph
from thunder_flce.bench.measuring import (
    ERROR,
    GB,
    TIME,
    TOTAL,
    Mark,
    PhasedRow,
    Session,
    Step,
    Unavailable,
    column,
    peak_bytes,
    release,
    synchronize,
)
from thunder_flce.bench.methods import peer
from thunder_flce.bench.shapes import dtype_name
from thunder_flce.functional import linear_cross_entropy


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model, by the library that has it, and the batch that it is trained on."""

    library: str
    """"litgpt" or "transformers"."""

    config: dict[str, Any]
    """Arguments of litgpt's Config, or of its `from_name` where they have a name; of transformers' LlamaConfig."""

    layers: int
    batch: int
    length: int
    """Tokens in a sequence."""
    dtype: torch.dtype = torch.bfloat16


_LLAMA_1B = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
    "rope_theta": 500000.0,
}
# Without its window of 4096 tokens, which is longer than the sequences: litgpt writes its mask row by row, so that a
# graph of torch.compile has 2048 operations for each of these layers, and AOTAutograd does not end within minutes.
_GEMMA_2B = {"name": "Gemma-2-2b", "sliding_window_size": None, "sliding_window_indices": None}
_TINY_LITGPT = {"padded_vocab_size": 1000, "n_embd": 64, "n_head": 4}
_TINY_LLAMA = {"vocab_size": 1000, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}

MODELS = {
    "litgpt-llama-3.2-1b": Model(library="litgpt", config={"name": "Llama-3.2-1B"}, layers=16, batch=4, length=2048),
    "litgpt-qwen2.5-0.5b": Model(library="litgpt", config={"name": "Qwen2.5-0.5B"}, layers=24, batch=8, length=2048),
    "litgpt-gemma-2-2b": Model(library="litgpt", config=_GEMMA_2B, layers=26, batch=2, length=2048),
    "transformers-llama-3.2-1b": Model(library="transformers", config=_LLAMA_1B, layers=16, batch=4, length=2048),
    "litgpt-tiny": Model(library="litgpt", config=_TINY_LITGPT, layers=1, batch=2, length=32, dtype=torch.float32),
    "transformers-tiny": Model(
        library="transformers", config=_TINY_LLAMA, layers=1, batch=2, length=32, dtype=torch.float32
    ),
}

METHODS: dict[str, Callable[[nn.Module], Callable[..., Tensor]]] = {
    "eager": lambda module: module,
    "torch.compile": partial(torch.compile, dynamic=False),
    "flce backend": partial(torch.compile, dynamic=False, backend=compile_graph),
    "function": lambda module: torch.compile(_CallsFunction(module), dynamic=False),
    "thunder": lambda module: import_module("thunder").jit(module),
    "flce": lambda module: thunder_flce.jit(module),
    "thunderfx": lambda module: thunder_flce.thunderfx(module),
}


@dataclass(frozen=True, kw_only=True)
class Row(PhasedRow):
    """What was measured of one method on one model."""

    model: str
    layers: int
    batch: int
    length: int
    dtype: str
    vocab: int = 0
    parameters: int = 0
    time_ms: float | None = column("step, ms", TIME)
    optimizer_ms: float | None = column("optimizer", TIME)
    """The third phase of a training step."""
    optimizer_ms_p20: float | None = None
    optimizer_ms_p80: float | None = None
    memory_gb: float | None = column("peak, GB", GB)
    """Peak above the parameters and the optimizer's state, in 10⁹ bytes."""
    first_call_s: float | None = column("first step, s", "{:.1f}")
    """The first step, with all that is compiled for it."""
    loss: float | None = None
    loss_error: float | None = column("loss error", ERROR)
    """|loss − loss of eager| / loss of eager."""
    fused: bool | None = None
    """Whether this project fused the loss; "flce", "thunderfx" and "flce backend" only."""


def measure(name: str, methods: list[str], session: Session, *, layers: int | None) -> None:
    """Measures methods on one model.

    Args:
        name: one of `MODELS`.
        methods: names from `METHODS`.
        session: where, for how long, and who is told.
        layers: instead of the model's own number.
    """
    torch.compiler.reset()
    release(session.device)
    model = MODELS[name]
    layers = layers or model.layers
    row = partial(Row, model=name, layers=layers, batch=model.batch, length=model.length, dtype=dtype_name(model.dtype))
    session = replace(session, row=row)
    session.progress("model")
    with session.attempt(*methods) as tried:
        training = _Training(model, layers, session.device)
    if tried.failed:
        return
    session = session.with_fields(vocab=training.vocab, parameters=training.parameters)
    steps: dict[str, Step] = {}
    numbers: dict[str, dict[str, Any]] = {}
    for method in methods:
        session.progress(f"{method}: first step")
        with session.attempt(method):
            program = METHODS[method](training.module)
            numbers[method] = training.first_steps(program)
            if method in ("flce", "thunderfx", "flce backend"):
                numbers[method]["fused"] = _is_fused(program)
            steps[method] = partial(training.step, program)
    for method, outcome in session.take_turns(steps).items():
        session.report(method=method, **outcome.spread("forward", "backward", "optimizer"), **numbers[method])


def _is_fused(program: Callable[..., Tensor]) -> bool:
    compilations = thunder_flce.explain(program)
    return all(decision.fused for compilation in compilations for decision in compilation.decisions)


class _Training:
    """A model with its optimizer and one batch."""

    def __init__(self, model: Model, layers: int, device: str):
        torch.manual_seed(0)
        before = torch.get_default_dtype()
        torch.set_default_dtype(model.dtype)
        try:
            with torch.device(device):
                self.module, self.vocab = _LIBRARIES[model.library](model, layers)
        finally:
            torch.set_default_dtype(before)
        self.parameters = sum(parameter.numel() for parameter in self.module.parameters())
        self._device = device
        self._optimizer = torch.optim.AdamW(self.module.parameters(), lr=0.0, fused=True)
        self._tokens, self._labels = torch.randint(self.vocab, (2, model.batch, model.length), device=device)
        # So that no method pays for making the optimizer's state.
        for parameter in self.module.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self._update()
        with torch.no_grad():
            self._eager_loss = self.module(self._tokens, self._labels).item()

    def first_steps(self, program: Callable[..., Tensor]) -> dict[str, Any]:
        start = time.perf_counter()
        loss = self.step(program, lambda phase: None)
        synchronize(self._device)
        first_call_s = time.perf_counter() - start
        peaks = peak_bytes(partial(self.step, program), self._device)
        return {
            "first_call_s": first_call_s,
            "memory_gb": peaks[TOTAL] / 1e9,
            "loss": loss.item(),
            "loss_error": abs(loss.item() - self._eager_loss) / self._eager_loss,
        }

    def step(self, program: Callable[..., Tensor], mark: Mark) -> Tensor:
        try:
            loss = program(self._tokens, self._labels)
            mark("forward")
            loss.backward()
            mark("backward")
            self._update()
            mark("optimizer")
        finally:
            self._optimizer.zero_grad()
        return loss.detach()

    def _update(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()


class _CallsFunction(nn.Module):
    """litgpt's model, with the same parameters, that calls `linear_cross_entropy` itself."""

    def __init__(self, module: nn.Module):
        super().__init__()
        if not isinstance(module, _LitGPT):
            raise Unavailable("written for litgpt's models only")
        model: Any = module.model
        self.head, self.softcap = model.lm_head, model.config.final_logit_softcapping
        self.body: Any = copy.copy(model)
        self.body._modules = {**model._modules, "lm_head": nn.Identity()}
        self.body.config = replace(model.config, final_logit_softcapping=None)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        hidden = self.body(tokens)
        bias = self.head.bias
        return linear_cross_entropy(hidden, self.head.weight, labels, linear_bias=bias, softcap=self.softcap)


class _LitGPT(nn.Module):
    """litgpt's model with the loss of its training loop."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        logits = self.model(tokens)
        return F.cross_entropy(logits.reshape(-1, logits.size(-1)), labels.reshape(-1))


class _Transformers(nn.Module):
    """transformers' model with its own loss, and nothing else returned."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return self.model(input_ids=tokens, labels=labels, use_cache=False).loss


def _litgpt(model: Model, layers: int) -> tuple[nn.Module, int]:
    litgpt = peer("litgpt", extra="examples")
    make = litgpt.Config.from_name if "name" in model.config else litgpt.Config
    config = make(**model.config, n_layer=layers, block_size=model.length)
    return _LitGPT(litgpt.GPT(config)), config.padded_vocab_size


def _llama(model: Model, layers: int) -> tuple[nn.Module, int]:
    transformers = peer("transformers", extra="examples")
    config = transformers.LlamaConfig(
        **model.config, num_hidden_layers=layers, max_position_embeddings=model.length, attn_implementation="sdpa"
    )
    return _Transformers(transformers.LlamaForCausalLM(config)), config.vocab_size


_LIBRARIES = {"litgpt": _litgpt, "transformers": _llama}
