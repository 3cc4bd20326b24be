"""Training steps of whole models, with and without this project: forward, backward and optimizer.

All methods share one model. The optimizer runs in full, but with a learning rate of 0, so that parameters do not
change: all methods compute the same loss, and their order does not matter.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache

import thunder_flce
from thunder_flce.backend import compile_graph
from thunder_flce.bench.measure import Mark, Run, no_mark, peak_bytes, release, synchronize
from thunder_flce.bench.shapes import given_fields
from thunder_flce.operation.checks import dtype_name

LENGTHS = 8
"""Number of lengths in a run of changing lengths: evenly spaced from three to five quarters of the model's length"""


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model and its batches: at least four sequences, of at most 2048 tokens."""

    make: Callable[[int, int], tuple[nn.Module, int]]  # (layers, length) to (module that returns the loss, vocabulary)
    name: str = ""
    layers: int
    tokens: int = 8192  # in a batch
    lengths: str = "one"  # or "changing": steps take the lengths in turn, like padded batches of texts
    dtype: torch.dtype = torch.bfloat16

    @property
    def length(self) -> int:
        """Length of the sequences; about the mean, if lengths change."""
        return max(min(2048, self.tokens // 4), 1)

    def __str__(self) -> str:
        batch = f"{self.tokens // self.length} × {self.length} tokens"
        layers = "1 layer" if self.layers == 1 else f"{self.layers} layers"
        return f"{self.name}, {layers}, {batch}{', changing lengths' if self.lengths == 'changing' else ''}"


class _WithLoss(nn.Module):
    """A model with its loss; returns only the loss."""

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module, Tensor, Tensor], Tensor]):
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.model, tokens, labels)


def _litgpt(layers: int, length: int, **settings: Any) -> tuple[nn.Module, int]:
    litgpt = import_module("litgpt")
    make = litgpt.Config.from_name if "name" in settings else litgpt.Config
    config = make(**settings, n_layer=layers, block_size=length)

    def loss(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
        """The loss of litgpt's training loop."""
        return F.cross_entropy(model(tokens).flatten(0, -2), labels.flatten())

    return _WithLoss(litgpt.GPT(config), loss), config.padded_vocab_size


def _llama(layers: int, length: int, **settings: Any) -> tuple[nn.Module, int]:
    transformers = import_module("transformers")
    sizes = {"num_hidden_layers": layers, "max_position_embeddings": length}
    config = transformers.LlamaConfig(**settings, **sizes, attn_implementation="sdpa")
    model = transformers.LlamaForCausalLM(config)
    return _WithLoss(model, lambda model, x, y: model(input_ids=x, labels=y, use_cache=False).loss), config.vocab_size


_LLAMA_1B: dict[str, Any] = {
    "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32,
    "num_key_value_heads": 8, "tie_word_embeddings": True, "rope_theta": 500000.0,
}  # fmt: skip
_TINY_LLAMA: dict[str, Any] = {"vocab_size": 1000, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
_TINY_LITGPT: dict[str, Any] = {"padded_vocab_size": 1000, "n_embd": 64, "n_head": 4}
# Without its sliding window of 4096 tokens, which is longer than the sequences: litgpt writes the window's mask row by
# row, so that torch.compile's graph has 2048 operations for each such layer, and AOTAutograd runs for many minutes.
_GEMMA_2B: dict[str, Any] = {"name": "Gemma-2-2b", "sliding_window_size": None, "sliding_window_indices": None}

MODELS = {
    "litgpt-llama-3.2-1b": Model(make=partial(_litgpt, name="Llama-3.2-1B"), layers=16),
    "litgpt-llama-3.2-3b": Model(make=partial(_litgpt, name="Llama-3.2-3B"), layers=28),
    "litgpt-qwen2.5-0.5b": Model(make=partial(_litgpt, name="Qwen2.5-0.5B"), layers=24, tokens=16384),
    "litgpt-qwen3-4b": Model(make=partial(_litgpt, name="Qwen3-4B"), layers=36, tokens=4096),
    "litgpt-gemma-2-2b": Model(make=partial(_litgpt, **_GEMMA_2B), layers=26, tokens=4096),
    "litgpt-pythia-160m": Model(make=partial(_litgpt, name="pythia-160m"), layers=12, tokens=2048),
    "litgpt-smollm2-135m": Model(make=partial(_litgpt, name="SmolLM2-135M"), layers=30),
    "transformers-llama-3.2-1b": Model(make=partial(_llama, **_LLAMA_1B), layers=16),
    "litgpt-tiny": Model(make=partial(_litgpt, **_TINY_LITGPT), layers=1, tokens=64, dtype=torch.float32),
    "transformers-tiny": Model(make=partial(_llama, **_TINY_LLAMA), layers=1, tokens=64, dtype=torch.float32),
}

METHODS: dict[str, Callable[[nn.Module], Callable[..., Tensor]]] = {
    "eager": lambda module: module,
    "torch.compile": torch.compile,
    "flce backend": partial(torch.compile, backend=compile_graph),
    "torch.compile, reduce-overhead": partial(torch.compile, mode="reduce-overhead"),
    "flce backend, reduce-overhead": partial(torch.compile, mode="reduce-overhead", backend=compile_graph),
    "thunder": lambda module: import_module("thunder").jit(module),
    "flce": lambda module: thunder_flce.jit(module),
    "thunderfx": lambda module: thunder_flce.thunderfx(module),
}

DEFAULT = ["torch.compile", "flce backend", "torch.compile, reduce-overhead", "flce backend, reduce-overhead"]
"""Methods that users would choose from"""


def parse_model(text: str) -> Model:
    """Reads one of `MODELS`, perhaps with changed fields, as in "litgpt-tiny,layers=2,tokens=128,lengths=changing".

    Raises:
        ValueError: if there is no such model, or a field or its value is not allowed.
    """
    name, *changes = text.split(",")
    lengths = {"one": "one", "changing": "changing"}.__getitem__
    try:
        fields = given_fields(changes, {"layers": int, "tokens": int, "lengths": lengths})
        model = replace(MODELS[name], name=name, **fields)
        if min(model.layers, model.tokens) < 1:
            raise ValueError
        return model
    except (KeyError, ValueError):
        raise ValueError(
            f"a model must be one of {', '.join(MODELS)}, perhaps with layers=…, tokens=… and lengths=one or changing, "
            f"as in litgpt-tiny,tokens=64, but got {text!r}"
        ) from None


def measure(model: Model, methods: list[str], run: Run) -> None:
    """Measures methods, by names of `METHODS`, on one model."""
    torch.compiler.reset()
    release(run.device)
    batch = {"batch": model.tokens // model.length, "length": model.length, "lengths": model.lengths}
    run.fields |= {"model": model.name, "layers": model.layers, **batch, "dtype": dtype_name(model.dtype)}
    if model.lengths == "changing":
        # Each turn has each length once.
        run.calls, run.turn_ms = LENGTHS, 1e9
    make = cache(partial(_Training, model, run.device))
    for method in methods:
        with run.attempt(method):
            training = make()
            run.fields |= {"vocab": training.vocab, "parameters": training.parameters}
            # Dynamo remembers which sizes changed: a second method would compile its first length with symbolic sizes.
            torch._dynamo.pgo.reset_code_state()
            program = METHODS[method](training.module)
            # Without a fresh cache, a method would find code on disk that an earlier one has compiled.
            with fresh_cache():
                numbers = training.first_steps(program)
            if method.startswith("flce") or method == "thunderfx":
                decisions = [decision for graph in thunder_flce.explain(program) for decision in graph.decisions]
                numbers["fused"] = bool(decisions) and all(decision.fused for decision in decisions)
            run.added[method] = partial(training.step, program, itertools.cycle(training.batches)), numbers
    run.report()


class _Training:
    """A model with its optimizer, and one batch of each length."""

    def __init__(self, model: Model, device: str):
        lengths = [model.length]
        if model.lengths == "changing":
            lengths = torch.linspace(0.75 * model.length, 1.25 * model.length, LENGTHS).int().tolist()
        # Start Inductor now, so that no method's time includes it.
        torch.compile(lambda x: x.exp().sum())(torch.ones(64, device=device, requires_grad=True)).backward()
        torch.manual_seed(0)
        before = torch.get_default_dtype()
        torch.set_default_dtype(model.dtype)
        try:
            with torch.device(device):
                self.module, self.vocab = model.make(model.layers, max(lengths))
        finally:
            torch.set_default_dtype(before)
        self.parameters = sum(parameter.numel() for parameter in self.module.parameters())
        self._device = device
        self._optimizer = torch.optim.AdamW(self.module.parameters(), lr=0.0, fused=True)
        sequences = model.tokens // model.length
        self.batches = [torch.randint(self.vocab, (2, sequences, length), device=device) for length in lengths]
        # Create the optimizer's state now, so that no method's time includes it.
        for parameter in self.module.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self._optimizer.step()
        self._optimizer.zero_grad()
        with torch.no_grad():
            self._eager_loss = self.module(*self.batches[0]).item()

    def first_steps(self, program: Callable[..., Tensor]) -> dict[str, Any]:
        """Runs a step of each length, which compiles for it, and two more of the longest length for their peak memory.

        The first of these two records the CUDA graph, if there is one; later steps do not count the graph's own memory.
        """
        seconds, losses = [], []
        for batch in self.batches:
            start = time.perf_counter()
            losses.append(self.step(program, iter([batch]), no_mark).item())
            synchronize(self._device)
            seconds.append(time.perf_counter() - start)
        longest = partial(self.step, program, itertools.repeat(self.batches[-1]), no_mark)
        return {
            "first_call_s": seconds[0],
            "second_length_s": seconds[1] if len(seconds) > 1 else None,
            "new_length_ms": 1e3 * statistics.median(seconds[2:]) if len(seconds) > 2 else None,
            "memory_gb": max(peak_bytes(longest, self._device) for _ in range(2)) / 1e9,
            "loss": losses[0],
            "loss_error": abs(losses[0] - self._eager_loss) / self._eager_loss,
        }

    def step(self, program: Callable[..., Tensor], batches: Iterator[Tensor], mark: Mark) -> Tensor:
        """Runs a step; returns the loss, which the next step may overwrite: a CUDA graph reuses its memory."""
        try:
            loss = program(*next(batches))
            mark("forward")
            loss.backward()
            mark("backward")
            self._optimizer.step()
            self._optimizer.zero_grad()
            mark("optimizer")
        finally:
            self._optimizer.zero_grad()
        return loss.detach()
