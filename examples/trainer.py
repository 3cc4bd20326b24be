"""Trains a small Llama with transformers' Trainer, compiled by Inductor and by the backend "thunder_flce".

Both runs start from the same parameters and see the same batches; gradients are accumulated over several batches, whose
losses are divided by `num_items_in_batch`. The exit code is 1 if the losses differ. Needs `pip install transformers
accelerate tokenizers rich`: Trainer and model are those of transformers 4.52 or newer, unchanged.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass

os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # The profiler complains of GPUs that are not there.

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from local_text import SEED, standard_library, tokenize
from thunder_flce.bench.measuring import TOTAL, peak_bytes
from thunder_flce.inspection.formatting import format_bytes

# With `strict`, it is an error if the loss is not fused.
BACKENDS = {"inductor": None, "thunder_flce": {"strict": True}}
ACCUMULATED = 2
IGNORED = -100


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What fits a device."""

    text_bytes: int
    vocab: int
    """Rows of the embedding and the head; the tokenizer has no more tokens than the text gives."""
    batch: int
    length: int
    """Tokens in a sequence."""
    layers: int
    width: int
    tolerance: float
    """How far apart the losses may be. Rounding alone drives two runs apart, step by step."""


SETUPS = {
    "cpu": Setup(text_bytes=2**20, vocab=16384, batch=8, length=128, layers=1, width=64, tolerance=1e-3),
    "cuda": Setup(text_bytes=4 * 2**20, vocab=128256, batch=8, length=1024, layers=2, width=2048, tolerance=2e-2),
}


class LossTrainer(Trainer):
    """Compiles the loss of a model, instead of the model, whose output has the logits, too.

    Args:
        backend: of torch.compile.
        **arguments: the Trainer's.
    """

    def __init__(self, *, backend: str, **arguments):
        super().__init__(**arguments)
        self.compiled_loss = torch.compile(_loss, backend=backend, options=BACKENDS[backend])
        self.seconds: list[float] = []

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """As the Trainer's, which knows no outputs but the loss."""
        assert not return_outputs
        return self.compiled_loss(model, inputs, num_items_in_batch)

    def training_step(self, model, inputs, num_items_in_batch=None):
        """The Trainer's forward and backward of one batch, with a stopwatch."""
        start = time.perf_counter()
        loss = super().training_step(model, inputs, num_items_in_batch)
        if loss.is_cuda:
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - start)
        return loss


def _loss(model: nn.Module, inputs: dict[str, Tensor], num_items_in_batch: Tensor | int | None) -> Tensor:
    return model(**inputs, use_cache=False, num_items_in_batch=num_items_in_batch)["loss"]


@dataclass(frozen=True)
class Result:
    """Of a training run."""

    losses: list[float]
    first_seconds: float
    seconds: float
    """The median of a batch's forward and backward, without the compilation."""
    peak_bytes: int
    """The most memory that forward and backward of a batch take above what was there before."""


def train(backend: str, tokens: Tensor, *, setup: Setup, steps: int, device: str) -> Result:
    """Trains with one backend and returns what became of it."""
    set_seed(SEED)
    config = LlamaConfig(
        vocab_size=setup.vocab,
        hidden_size=setup.width,
        intermediate_size=2 * setup.width,
        num_hidden_layers=setup.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        bos_token_id=0,
        eos_token_id=0,
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = LossTrainer(
            backend=backend,
            model=LlamaForCausalLM(config),
            args=TrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=setup.batch,
                gradient_accumulation_steps=ACCUMULATED,
                max_steps=steps,
                learning_rate=1e-3,
                bf16=device == "cuda",
                use_cpu=device == "cpu",
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                seed=SEED,
            ),
            train_dataset=TensorDataset(tokens[: len(tokens) // setup.length * setup.length].view(-1, setup.length)),
            data_collator=_collate,
        )
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    seconds = statistics.median(trainer.seconds[ACCUMULATED:])
    return Result(losses, trainer.seconds[0], seconds, _peak(trainer, device))


def _collate(rows: list[tuple[Tensor]]) -> dict[str, Tensor]:
    """A batch; a quarter of each sequence is not trained on, as a prompt is not."""
    input_ids = torch.stack([tokens for (tokens,) in rows])
    labels = input_ids.clone()
    labels[:, : labels.shape[1] // 4] = IGNORED
    return {"input_ids": input_ids, "labels": labels}


def _peak(trainer: LossTrainer, device: str) -> int:
    """Of one more batch."""
    batch = next(iter(trainer.get_train_dataloader()))
    items = (batch["labels"][:, 1:] != IGNORED).sum() * ACCUMULATED

    def step(mark) -> None:
        trainer.training_step(trainer.model, batch, items)
        mark("forward and backward")

    return peak_bytes(step, device)[TOTAL]


def main() -> int:
    """Trains with both backends and prints what they have in common, and what not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=SETUPS, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=8, metavar="N", help="of the optimizer (default: 8)")
    arguments = parser.parse_args()
    setup = SETUPS[arguments.device]
    tokens, _ = tokenize(standard_library(setup.text_bytes), min(setup.vocab, 16384))
    results = {
        backend: train(backend, tokens, setup=setup, steps=arguments.steps, device=arguments.device)
        for backend in BACKENDS
    }
    expected, got = (torch.tensor(result.losses) for result in results.values())
    table = Table(
        "", *(f'backend="{backend}"' for backend in BACKENDS), title=f"{arguments.steps} steps on {arguments.device}"
    )
    rows = {
        "first loss": lambda result: f"{result.losses[0]:.4f}",
        "last loss": lambda result: f"{result.losses[-1]:.4f}",
        "first batch": lambda result: f"{result.first_seconds:.1f} s",
        "forward and backward of a batch": lambda result: f"{result.seconds * 1e3:.1f} ms",
        "their peak memory": lambda result: format_bytes(result.peak_bytes),
    }
    for name, cell in rows.items():
        table.add_row(name, *map(cell, results.values()))
    console = Console()
    console.print(table)
    error = (got - expected).abs().max().item()
    console.print(f"The losses differ by {error:.1e} at most. Expect less than {setup.tolerance}.")
    return int(error > setup.tolerance)


if __name__ == "__main__":
    sys.exit(main())
