"""Training steps of whole models, with and without this project: forward, backward and optimizer.

All methods share one model, whose parameters stay as they are: the optimizer does all its work at a learning rate of 0.
So each computes the same loss, and their order does not matter.

A batch has at least four sequences, of at most `Model.length` tokens. Where lengths change, each step has another one,
`LENGTHS` of them in turn, as of padded batches of texts.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache

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
    column,
    no_mark,
    peak_bytes,
    release,
    synchronize,
)  # fmt: skip
from thunder_flce.bench.methods import peer
from thunder_flce.bench.shapes import dtype_name


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model, by the library that has it, and the batch that it is trained on."""

    library: str
    """"litgpt" or "transformers"."""

    config: dict[str, Any]
    """Arguments of litgpt's Config, or of its `from_name` where they have a name; of transformers' LlamaConfig."""

    layers: int
    tokens: int = 8192
    """In a batch, where nothing else is asked for."""
    length: int = 2048
    """Tokens in a sequence, at most."""
    dtype: torch.dtype = torch.bfloat16


_LLAMA_1B = {
    "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32,
    "num_key_value_heads": 8, "tie_word_embeddings": True, "rope_theta": 500000.0,
}  # fmt: skip
# Without its window of 4096 tokens, which is longer than the sequences: litgpt writes its mask row by row, so that a
# graph of torch.compile has 2048 operations for each of these layers, and AOTAutograd does not end within minutes.
_GEMMA_2B = {"name": "Gemma-2-2b", "sliding_window_size": None, "sliding_window_indices": None}
_TINY_LITGPT = {"padded_vocab_size": 1000, "n_embd": 64, "n_head": 4}
_TINY_LLAMA = {"vocab_size": 1000, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}

_litgpt_model = partial(Model, library="litgpt")
MODELS = {
    "litgpt-llama-3.2-1b": _litgpt_model(config={"name": "Llama-3.2-1B"}, layers=16),
    "litgpt-llama-3.2-3b": _litgpt_model(config={"name": "Llama-3.2-3B"}, layers=28),
    "litgpt-qwen2.5-0.5b": _litgpt_model(config={"name": "Qwen2.5-0.5B"}, layers=24, tokens=16384),
    "litgpt-qwen3-4b": _litgpt_model(config={"name": "Qwen3-4B"}, layers=36, tokens=4096),
    "litgpt-gemma-2-2b": _litgpt_model(config=_GEMMA_2B, layers=26, tokens=4096),
    "litgpt-pythia-160m": _litgpt_model(config={"name": "pythia-160m"}, layers=12, tokens=2048),
    "litgpt-smollm2-135m": _litgpt_model(config={"name": "SmolLM2-135M"}, layers=30),
    "transformers-llama-3.2-1b": Model(library="transformers", config=_LLAMA_1B, layers=16),
    "litgpt-tiny": _litgpt_model(config=_TINY_LITGPT, layers=1, tokens=64, dtype=torch.float32),
    "transformers-tiny": Model(library="transformers", config=_TINY_LLAMA, layers=1, tokens=64, dtype=torch.float32),
}

LENGTHS = 8
"""How many lengths a run has, where they change: evenly spaced from three to five quarters of the length."""

METHODS: dict[str, Callable[[nn.Module], Callable[..., Tensor]]] = {
    "eager": lambda module: module,
    "torch.compile": torch.compile,
    "flce backend": partial(torch.compile, backend=compile_graph),
    "torch.compile, reduce-overhead": partial(torch.compile, mode="reduce-overhead"),
    "flce backend, reduce-overhead": partial(torch.compile, mode="reduce-overhead", backend=compile_graph),
    "flce backend, ignored_rows=compute": partial(
        torch.compile, backend=compile_graph, options={"ignored_rows": "compute"}
    ),
    "thunder": lambda module: import_module("thunder").jit(module),
    "flce": lambda module: thunder_flce.jit(module),
    "thunderfx": lambda module: thunder_flce.thunderfx(module),
}


DEFAULT = ["torch.compile", "flce backend", "torch.compile, reduce-overhead", "flce backend, reduce-overhead"]
"""The methods that a user would choose from."""


@dataclass(frozen=True, kw_only=True)
class Row(PhasedRow):
    """What was measured of one method on one model."""

    model: str
    layers: int
    batch: int = column("sequences")
    length: int = column("length")
    """Of the sequences; where lengths change, about the mean."""
    lengths: str = column("lengths")
    """"one" or "changing"."""
    dtype: str
    vocab: int = 0
    parameters: int = 0
    time_ms: float | None = column("step, ms", TIME)
    optimizer_ms: float | None = column("optimizer", TIME)
    """The third phase of a training step."""
    optimizer_ms_p20: float | None = None
    optimizer_ms_p80: float | None = None
    memory_gb: float | None = column("peak, GB", GB)
    """Peak above the parameters and the optimizer's state, in 10⁹ bytes; of the longest length. Of two steps, the first
    of which records the CUDA graph, if there is one: what a recorded graph holds is not counted afterwards."""
    first_call_s: float | None = column("first step, s", "{:.1f}")
    """The first step, with all that is compiled for it."""
    second_length_s: float | None = column("second length, s", "{:.1f}")
    """The first step of another length, with all that is compiled for it. Of one length, None, as the next."""
    new_length_ms: float | None = column("new length, ms", TIME)
    """The median step of a length that is new, after the second, until the device has done it."""
    loss: float | None = None
    loss_error: float | None = column("loss error", ERROR)
    """|loss − loss of eager| / loss of eager."""
    fused: bool | None = None
    """Whether this project fused the loss; of ours."""


def measure(
    name: str, methods: list[str], session: Session, *, layers: int | None, tokens: list[int] | None, lengths: list[str]
) -> None:
    """Measures methods, names from `METHODS`, on one of `MODELS`.

    Args:
        name: of the model.
        methods: their names.
        session: where, for how long, and who is told.
        layers: instead of the model's own number.
        tokens: in a batch, instead of the model's own number; each is measured.
        lengths: "one", "changing" or both.
    """
    model = MODELS[name]
    layers = layers or model.layers
    for count, kind in itertools.product(tokens or [model.tokens], lengths):
        length = max(min(model.length, count // 4), 1)
        row = partial(Row, model=name, layers=layers, batch=count // length, length=length, lengths=kind)
        of_batches = replace(session, row=partial(row, dtype=dtype_name(model.dtype)))
        of_steps = [length]
        if kind == "changing":
            of_steps = torch.linspace(0.75 * length, 1.25 * length, LENGTHS).int().tolist()
            # Each turn has each length once.
            schedule = replace(session.schedule, calls=LENGTHS, turn_ms=1e9)
            of_batches = replace(of_batches, schedule=schedule)
        _measure(partial(_Training, model, layers, batch=count // length, lengths=of_steps), methods, of_batches)


def _measure(make: Callable[..., "_Training"], methods: list[str], session: Session) -> None:
    torch.compiler.reset()
    release(session.device)
    session.progress("model")
    with session.attempt(*methods) as tried:
        # So that no method pays for Inductor's own start.
        torch.compile(lambda x: x.exp().sum())(torch.ones(64, device=session.device, requires_grad=True)).backward()
        training = make(device=session.device)
    if tried.failed:
        return
    session = session.with_fields(vocab=training.vocab, parameters=training.parameters)
    steps: dict[str, Step] = {}
    numbers: dict[str, dict[str, Any]] = {}
    for method in methods:
        session.progress(f"{method}: first step")
        # What one method has compiled, the next would find on the disk.
        with session.attempt(method), fresh_cache():
            # Dynamo remembers which sizes have changed, so a second method would not meet its first length alone.
            torch._dynamo.pgo.reset_code_state()
            program = METHODS[method](training.module)
            numbers[method] = training.first_steps(program)
            if method.startswith("flce") or method == "thunderfx":
                numbers[method]["fused"] = _is_fused(program)
            steps[method] = partial(training.step, program, itertools.cycle(training.batches))
    for method, outcome in session.take_turns(steps).items():
        session.report(method=method, **outcome.spread("forward", "backward", "optimizer"), **numbers[method])


def _is_fused(program: Callable[..., Tensor]) -> bool:
    decisions = [each for compilation in thunder_flce.explain(program) for each in compilation.decisions]
    return bool(decisions) and all(decision.fused for decision in decisions)


class _Training:
    """A model with its optimizer, and a batch of each length."""

    def __init__(self, model: Model, layers: int, *, batch: int, lengths: list[int], device: str):
        torch.manual_seed(0)
        before = torch.get_default_dtype()
        torch.set_default_dtype(model.dtype)
        try:
            with torch.device(device):
                self.module, self.vocab = _LIBRARIES[model.library](model, layers, max(lengths))
        finally:
            torch.set_default_dtype(before)
        self.parameters = sum(parameter.numel() for parameter in self.module.parameters())
        self._device = device
        self._optimizer = torch.optim.AdamW(self.module.parameters(), lr=0.0, fused=True)
        self.batches = [torch.randint(self.vocab, (2, batch, length), device=device) for length in lengths]
        # So that no method pays for making the optimizer's state.
        for parameter in self.module.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self._update()
        with torch.no_grad():
            self._eager_loss = self.module(*self.batches[0]).item()

    def first_steps(self, program: Callable[..., Tensor]) -> dict[str, Any]:
        first_calls_s, losses = [], []
        for batch in self.batches:
            start = time.perf_counter()
            losses.append(self.step(program, iter([batch]), no_mark).item())
            synchronize(self._device)
            first_calls_s.append(time.perf_counter() - start)
        longest = partial(self.step, program, itertools.repeat(self.batches[-1]))
        found = {
            "first_call_s": first_calls_s[0],
            "memory_gb": max(peak_bytes(longest, self._device)[TOTAL] for _ in range(2)) / 1e9,
            "loss": losses[0],
            "loss_error": abs(losses[0] - self._eager_loss) / self._eager_loss,
        }
        if len(self.batches) > 1:
            found["second_length_s"] = first_calls_s[1]
            found["new_length_ms"] = 1e3 * statistics.median(first_calls_s[2:])
        return found

    def step(self, program: Callable[..., Tensor], batches: Iterator[Tensor], mark: Mark) -> Tensor:
        """Returns the loss, which the next step may overwrite: a CUDA graph writes it into the same memory."""
        try:
            loss = program(*next(batches))
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


def _litgpt(model: Model, layers: int, length: int) -> tuple[nn.Module, int]:
    litgpt = peer("litgpt", extra="examples")
    make = litgpt.Config.from_name if "name" in model.config else litgpt.Config
    config = make(**model.config, n_layer=layers, block_size=length)
    return _LitGPT(litgpt.GPT(config)), config.padded_vocab_size


def _llama(model: Model, layers: int, length: int) -> tuple[nn.Module, int]:
    transformers = peer("transformers", extra="examples")
    config = transformers.LlamaConfig(
        **model.config, num_hidden_layers=layers, max_position_embeddings=length, attn_implementation="sdpa"
    )
    return _Transformers(transformers.LlamaForCausalLM(config)), config.vocab_size


_LIBRARIES = {"litgpt": _litgpt, "transformers": _llama}
