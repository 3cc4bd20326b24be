"""Trains and evaluates a small Llama with transformers' Trainer, without changes and with its loss fused.

Both runs start from the same parameters and see the same batches. The exit code is 1 if their losses differ. Needs `pip
install transformers accelerate tokenizers`, with transformers 4.52 or newer.
"""

import sys
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

import thunder_flce
from local_text import SEED, standard_library, tokenize

VOCAB, LENGTH, TEXT_BYTES = 8192, 128, 2**19


class FusedTrainer(thunder_flce.LossTrainerMixin, Trainer):
    """The Trainer with its loss fused, or an error (`strict`). A GPU fuses so small a loss only with `chunk_rows`."""

    backend_options = {"strict": True, "chunk_rows": 256}


def train(trainer_class: type[Trainer], rows: list[dict], folder: str) -> tuple[Trainer, list[float]]:
    """Returns the trainer, and the losses of its steps and of the evaluation."""
    set_seed(SEED)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
    # Gradients are accumulated over two batches; both losses are divided by the number of labels of the two.
    arguments = TrainingArguments(
        folder, max_steps=8, gradient_accumulation_steps=2, learning_rate=1e-3, logging_steps=1, report_to="none"
    )
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, **sizes))
    trainer = trainer_class(model=model, args=arguments, train_dataset=rows[8:], eval_dataset=rows[:8])
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return trainer, [*losses, trainer.evaluate()["eval_loss"]]


def main() -> int:
    tokens, _ = tokenize(standard_library(TEXT_BYTES), VOCAB)
    rows = [{"input_ids": row, "labels": row} for row in tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)]
    with tempfile.TemporaryDirectory() as folder:
        _, expected = train(Trainer, rows, folder)
        trainer, losses = train(FusedTrainer, rows, folder)
    print(thunder_flce.explain(trainer))
    error = (torch.tensor(losses) - torch.tensor(expected)).abs().max().item()
    print(f"losses from {losses[0]:.4f} to {losses[-2]:.4f}, evaluation {losses[-1]:.4f}; they differ by {error:.1e}")
    return int(error > 1e-3)


if __name__ == "__main__":
    sys.exit(main())
