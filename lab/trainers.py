"""Long runs of trainers, with and without this project: losses, memory and compilations.

    python -m lab.trainers trainer --steps 2000 --json FILE             transformers' Trainer with LossTrainerMixin
    python -m lab.trainers trainer --without --seed 1 --json FILE       the same without thunder_flce
    python -m lab.trainers trainer --kill-at 700 --folder RUN           ends itself by SIGKILL after step 700
    python -m lab.trainers trainer --resume --folder RUN --json FILE    continues from the last checkpoint
    python -m lab.trainers grpo --steps 100 --json FILE                 TRL's GRPOTrainer with generation, our head

Each command writes one line of JSON. The training text is Python's standard library. Sequences have 64 to 512 tokens,
so that lengths of batches vary; the first third of a sequence is not a target. The last batch of both data sets has
fewer sequences, and an epoch has fewer than 100 steps, so that everything is compiled after 100 steps.
"""

import argparse
import os
import random
import resource
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

import thunder_flce
from thunder_flce.bench import output

sys.path.append(str(Path(__file__).parents[1] / "examples"))
import local_text  # noqa: E402

TEXT_BYTES = 2**21
SIZES = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4}


class Observer(TrainerCallback):
    """Records memory every `every` steps, and the step of each compilation; can end the process after a step."""

    def __init__(self, every: int, kill_at: int | None = None):
        self.every, self.kill_at = every, kill_at
        self.held: list[dict[str, float]] = []
        self.compiled: dict[int, int] = {}
        self._compilations = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        step, before = state.global_step, self._compilations
        self._compilations = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        if self._compilations > before:
            self.compiled[step] = self._compilations - before
        if step % self.every == 0:
            on_device = (
                {
                    "allocated_gb": torch.cuda.memory_allocated() / 1e9,
                    "peak_gb": torch.cuda.max_memory_allocated() / 1e9,
                    "reserved_gb": torch.cuda.memory_reserved() / 1e9,
                }
                if torch.cuda.is_available()
                else {}
            )
            on_host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
            self.held.append({"step": step, "host_gb": on_host, **on_device})
        if step == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


class FusedTrainer(thunder_flce.LossTrainerMixin, Trainer):
    # Without a memory budget, losses as small as these would be left to Inductor.
    backend_options = {"strict": True, "memory_budget": 2**28}


def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    pad = torch.nn.utils.rnn.pad_sequence
    tokens = [torch.tensor(row["input_ids"]) for row in rows]
    labels = [row.masked_fill(torch.arange(len(row)) < len(row) // 3, -100) for row in tokens]
    ids, mask = pad(tokens, batch_first=True), pad(list(map(torch.ones_like, tokens)), batch_first=True)
    return {"input_ids": ids, "attention_mask": mask, "labels": pad(labels, batch_first=True, padding_value=-100)}


def _common(parsed: argparse.Namespace) -> dict[str, Any]:
    """Arguments that both trainers share."""
    return {
        "max_steps": parsed.steps,
        "seed": parsed.seed,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "bf16": torch.cuda.is_available(),
        "report_to": "none",
        "disable_tqdm": True,
    }


def of_transformers(parsed: argparse.Namespace, folder: str, observer: Observer) -> Trainer:
    tokens, vocab = local_text.tokenize(local_text.standard_library(TEXT_BYTES), 32000)
    drawn, rows, start = random.Random(0), [], 0
    while start < len(tokens) - 512 and len(rows) < 1475:
        rows.append({"input_ids": tokens[start : start + drawn.randint(64, 512)].tolist()})
        start += len(rows[-1]["input_ids"])
    arguments = TrainingArguments(
        folder,
        **_common(parsed),
        per_device_eval_batch_size=8,
        learning_rate=1e-3,
        warmup_steps=50,
        logging_steps=max(parsed.steps // 100, 1),
        eval_strategy="steps",
        eval_steps=max(parsed.steps // 10, 1),
        eval_on_start=True,
        save_strategy="steps" if parsed.folder else "no",
        save_steps=max(parsed.steps // 4, 1),
        prediction_loss_only=True,
    )
    set_seed(parsed.seed)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=vocab, **SIZES))
    evaluated = len(rows) // 40 | 1  # An odd number, so that the last batch is smaller.
    return (Trainer if parsed.without else FusedTrainer)(
        model=model,
        args=arguments,
        data_collator=collate,
        train_dataset=rows[evaluated:],
        eval_dataset=rows[:evaluated],
        callbacks=[observer],
    )


def of_trl(parsed: argparse.Namespace, folder: str, observer: Observer) -> Trainer:
    """Makes a GRPOTrainer. Its reward, a completion's fraction of tokens below 4000, is easy for an untrained model."""
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from trl import GRPOConfig, GRPOTrainer

    if not parsed.without:
        thunder_flce.replace_trl_head()
    documents = local_text.standard_library(TEXT_BYTES)
    bpe = local_text.train_tokenizer(documents, 32000)
    bpe.add_special_tokens(["<pad>", "<eos>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>", eos_token="<eos>")
    set_seed(parsed.seed)
    sizes = {**SIZES, "pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), bos_token_id=None, **sizes))
    drawn = random.Random(0)
    prompts = [document[: drawn.randint(40, 400)] for document in documents if len(document) > 400]
    model.save_pretrained(Path(folder) / "model")
    arguments = GRPOConfig(
        folder,
        **_common(parsed),
        num_generations=4,
        num_iterations=2,
        beta=0.04,
        max_completion_length=48,
        learning_rate=3e-4,
        logging_steps=max(parsed.steps // 50, 1),
        save_strategy="no",
    )
    return GRPOTrainer(
        model=str(Path(folder) / "model"),
        args=arguments,
        reward_funcs=lambda completion_ids, **_: [
            sum(id < 4000 for id in ids) / max(len(ids), 1) for ids in completion_ids
        ],
        train_dataset=Dataset(InMemoryTable.from_pydict({"prompt": prompts}), fingerprint="prompts"),
        processing_class=tokenizer,
        callbacks=[observer],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trainer", choices=["trainer", "grpo"])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--without", action="store_true", help="the trainer without thunder_flce")
    parser.add_argument("--folder", help="folder for checkpoints; without it, none are written")
    parser.add_argument("--kill-at", type=int, help="the step after which the process ends by SIGKILL")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint in the folder")
    parser.add_argument("--json", type=Path, help="append a line to this file")
    parser.add_argument("--commit")
    parsed = parser.parse_args()
    observer = Observer(max(parsed.steps // 10, 1), parsed.kill_at)
    with tempfile.TemporaryDirectory() as temporary:
        build = of_transformers if parsed.trainer == "trainer" else of_trl
        trainer = build(parsed, parsed.folder or temporary, observer)
        start = time.perf_counter()
        trainer.train(resume_from_checkpoint=parsed.resume or None)
    log = trainer.state.log_history
    ours = ("loss", "eval_loss", "grad_norm", "reward", "entropy", "kl", "completions/mean_length")
    entry: dict[str, Any] = {
        "subset": "trainers",
        "trainer": parsed.trainer,
        "method": "without" if parsed.without else "flce",
        "seed": parsed.seed,
        "resumed": parsed.resume,
        "steps": trainer.state.global_step,
        "seconds": round(time.perf_counter() - start, 1),
        "memory": observer.held,
        "compiled": observer.compiled,
        "fused": sum(decision.fused for compiled in thunder_flce.explain() for decision in compiled.decisions),
        "log": [{name: each[name] for name in ("step", *ours) if name in each} for each in log],
    }
    context = output.context(
        " ".join(["python -m lab.trainers", *sys.argv[1:]]),
        device="cuda" if torch.cuda.is_available() else "cpu",
        commit=parsed.commit,
    )
    if parsed.json:
        output.append(parsed.json, {**entry, **context})
    else:
        print({**entry, **context})


if __name__ == "__main__":
    main()
