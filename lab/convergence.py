"""Training runs: loss curves of one model whose loss is computed by each method, from several seeds.

The text is the Python sources of the standard library and of PyTorch, which every machine has that runs this. litgpt's
model without its head is the same for all methods: on a GPU compiled by torch.compile, in autocast to bfloat16 with
float32 parameters. The head's operands are cast to bfloat16, and the method computes the loss from them.
"""

import math
import random
import sysconfig
import time
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from thunder_flce.bench.cli import Subset, one_of, positive
from thunder_flce.bench.measure import Run, progress, release, synchronize
from thunder_flce.bench.methods import Method, maker
from thunder_flce.bench.output import TIME
from thunder_flce.bench.shapes import Inputs

AVERAGED = 10
"""Steps whose mean loss is one point of a curve."""

FINAL = 100
"""Steps at the end whose mean is the final loss."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What is trained, and how."""

    config: dict[str, Any]
    """The arguments of litgpt's Config."""
    vocab: int
    """Entries of the byte-pair vocabulary; the head has as many columns, padded to a multiple of 128."""
    batch: int
    length: int
    """Tokens in a sequence."""
    characters: int
    """Of the text, which the vocabulary is made of and which is trained on; the last 5% are held out."""
    learning_rate: float
    """Its maximum: it rises for 5% of the steps, then falls to a tenth by a cosine."""


_LLAMA = {
    "norm_class_name": "RMSNorm",
    "mlp_class_name": "LLaMAMLP",
    "bias": False,
    "parallel_residual": False,
    "rotary_percentage": 1.0,
}
SETUPS = {
    "llama-100m": Setup(
        config={**_LLAMA, "n_layer": 10, "n_embd": 640, "n_head": 10, "intermediate_size": 1728},
        vocab=50257,
        batch=4,
        length=1024,
        characters=48_000_000,
        learning_rate=6e-4,
    ),
    "tiny": Setup(
        config={**_LLAMA, "n_layer": 1, "n_embd": 32, "n_head": 2, "intermediate_size": 64},
        vocab=500,
        batch=4,
        length=32,
        characters=200_000,
        learning_rate=1e-2,
    ),
}


COLUMNS = {
    "seed": ("seed", "{}"),  # of the parameters and of the order of the batches
    "time_ms": ("step, ms", TIME),  # the mean after the first ten, with the optimizer
    "final_loss": ("final loss", "{:.4f}"),  # mean over the last `FINAL` steps
    "held_out_loss": ("held out", "{:.4f}"),  # after the last step, on other text, by eager PyTorch
}
"""Rows also have the "losses" of the run, means over `AVERAGED` steps each."""


def measure(name: str, methods: list[str], run: Run, *, seeds: list[int], steps: int) -> None:
    """Trains one model by each method from each seed.

    Args:
        name: one of `SETUPS`.
        methods: names that `methods.maker` knows.
        run: where.
        seeds: of the runs; those of one seed begin with the same parameters and see the same batches.
        steps: of each run.
    """
    torch.compiler.reset()
    progress("text and model")
    run.fields |= {"model": name, "steps": steps}
    training = None
    with run.attempt(name):
        training = _Training(SETUPS[name], run.device)
    if training is None:
        return
    run.fields |= training.sizes
    for seed in seeds:
        run.fields["seed"] = seed
        for method in methods:
            progress(f"seed {seed}: {method}")
            with run.attempt(method):
                run.row(method, **training.run(maker(method)(), seed, steps))


class _Training:
    """A compiled model, and the text."""

    def __init__(self, setup: Setup, device: str):
        self._setup = setup
        self._device = device
        tokens = _tokens(setup).to(device)
        held_out = len(tokens) // 20
        self._text, self._held_out = tokens[:-held_out], tokens[-held_out:]
        litgpt = import_module("litgpt")
        self._make = lambda: litgpt.GPT(
            litgpt.Config(**setup.config, block_size=setup.length, vocab_size=setup.vocab, padding_multiple=128)
        )
        self._model = self._make().to(device)
        self._head = self._model.lm_head
        self._model.lm_head = nn.Identity()
        self._body = torch.compile(self._model, dynamic=False) if device == "cuda" else self._model
        self._parameters = [*self._model.parameters(), self._head.weight]
        self.sizes = {
            "tokens": setup.batch * setup.length,
            "vocab": self._head.weight.shape[0],
            "parameters": sum(parameter.numel() for parameter in self._parameters),
            "text_tokens": len(self._text),
        }

    def run(self, method: Method, seed: int, steps: int) -> dict[str, Any]:
        """Trains from the beginning; returns the numbers of a row."""
        release(self._device)
        self._restart(seed)
        setup = self._setup
        optimizer = torch.optim.AdamW(self._parameters, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(len(self._text) - setup.length, (steps, setup.batch), generator=generator)
        starts = starts.to(self._device)
        losses = torch.zeros(steps, device=self._device)
        warm = min(10, steps - 1)
        for step in range(steps):
            if step == warm:
                synchronize(self._device)
                begin = time.perf_counter()
            for group in optimizer.param_groups:
                group["lr"] = setup.learning_rate * _schedule(step, steps)
            loss = self._loss(method, self._text, starts[step])
            loss.backward()
            nn.utils.clip_grad_norm_(self._parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses[step] = loss.detach()
        synchronize(self._device)
        time_ms = (time.perf_counter() - begin) / (steps - warm) * 1e3
        points = losses[: steps - steps % AVERAGED].view(-1, AVERAGED).mean(1)
        return {
            "time_ms": time_ms,
            "losses": [round(point, 5) for point in points.tolist()],
            "final_loss": losses[-FINAL:].mean().item(),
            "held_out_loss": self._held_out_loss(),
        }

    def _restart(self, seed: int) -> None:
        torch.manual_seed(seed)
        fresh = self._make()
        fresh.apply(fresh._init_weights)
        self._head.load_state_dict(fresh.lm_head.state_dict())
        fresh.lm_head = nn.Identity()
        self._model.load_state_dict(fresh.state_dict())

    def _loss(self, method: Method, text: Tensor, starts: Tensor) -> Tensor:
        places = starts[:, None] + torch.arange(self._setup.length + 1, device=self._device)
        sequences = text[places]
        with torch.autocast(self._device, dtype=torch.bfloat16):
            hidden = self._body(sequences[:, :-1].contiguous())
        x, weight = hidden.flatten(0, 1).to(torch.bfloat16), self._head.weight.to(torch.bfloat16)
        return method(Inputs(x=x, weight=weight, bias=None, target=sequences[:, 1:].flatten()))

    @torch.no_grad()
    def _held_out_loss(self) -> float:
        length = self._setup.length
        starts = torch.arange(0, len(self._held_out) - length, length, device=self._device)
        batches = starts[: len(starts) // self._setup.batch * self._setup.batch].view(-1, self._setup.batch)[:50]
        eager = maker("eager")()
        return torch.stack([self._loss(eager, self._held_out, batch) for batch in batches]).mean().item()


def _schedule(step: int, steps: int) -> float:
    """The share of the maximal learning rate."""
    warm_up = max(steps // 20, 1)
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.55 + 0.45 * math.cos(math.pi * (step - warm_up) / (steps - warm_up))


def _tokens(setup: Setup) -> Tensor:
    """The text as numbers (n,) int64, by a byte-level byte-pair vocabulary that is made of it."""
    tokenizers = import_module("tokenizers")
    documents = _documents(setup.characters)
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(documents, vocab_size=setup.vocab, show_progress=False)
    return torch.tensor([token for encoded in tokenizer.encode_batch(documents) for token in encoded.ids])


def _documents(characters: int) -> list[str]:
    """Files of Python, in an order that looks random and is always the same, up to so many characters."""
    library, torch_folder = Path(sysconfig.get_paths()["stdlib"]), Path(torch.__file__).parent
    paths = [path for path in sorted(library.rglob("*.py")) if "site-packages" not in path.parts]
    paths += sorted(torch_folder.rglob("*.py"))
    random.Random(0).shuffle(paths)
    documents = []
    for path in paths:
        documents.append(path.read_text(encoding="utf-8", errors="replace")[:characters])
        characters -= len(documents[-1])
        if characters <= 0:
            break
    return documents


SUBSET = Subset(
    help="loss curves of training runs from several seeds",
    measure=measure,
    columns=COLUMNS,
    methods=["eager", "function", "liger"],
    check_method=maker,
    case="model",
    parse=one_of(SETUPS),
    cases={"cuda": ["llama-100m"], "cpu": ["tiny"]},
    turns=None,
    options={
        "seeds": {"nargs": "+", "type": int, "default": [0, 1, 2], "metavar": "SEED"},
        "steps": {"type": positive, "default": 2000, "help": "of each run (default: %(default)s)"},
    },
)
