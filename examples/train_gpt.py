"""Trains a small GPT twice, with thunder alone and with thunder_flce, and shows what the executor changes.

The model is litgpt's, unchanged; the text is the source of Python's standard library, or any file (`--text`). Both runs
start from the same parameters and see the same batches, in turn, so that they are timed under the same conditions. The
exit code is 1 if their losses differ.
"""

import argparse
import os
import shutil
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # The profiler warns of missing GPUs.
warnings.filterwarnings("ignore", message="transformer_engine module not found")

import thunder_flce  # isort: skip  # With torch 2.13 or newer, import it before thunder.
import thunder
import torch
import torch.nn.functional as F
from litgpt.config import Config
from litgpt.model import GPT
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from tqdm import tqdm

from local_text import standard_library, tokenize
from show_traces import loss_region, print_side_by_side
from thunder_flce.bench.measure import peak_bytes
from thunder_flce.engine.kernels.dispatch import is_installed
from thunder_flce.inspection.report import format_bytes

SEED = 1
WIDTH = 120
TEST_BATCHES = 8
SOURCE = "Python's standard library"
GRADIENTS_IN_FORWARD = """\
With flce, the forward computes the logits of one chunk of tokens at a time and turns them into gradients at once. It
saves the gradients of the hidden states and of the head; the backward multiplies them by the upstream gradient."""
RUNS = {"thunder": thunder.jit, "thunder with flce": thunder_flce.jit}


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Sizes and settings that suit a device."""

    text_bytes: int
    vocab: int
    """Maximum vocabulary of the tokenizer"""
    batch: int
    """Sequences in a batch"""
    length: int
    """Tokens in a sequence"""
    layers: int
    width: int
    dtype: torch.dtype
    learning_rate: float
    tolerance: float
    """Largest accepted difference of the losses after training; rounding alone makes two runs diverge slowly"""


SETUPS = {
    "cpu": Setup(
        text_bytes=4 * 2**20,
        vocab=8192,
        batch=12,
        length=128,
        layers=3,
        width=128,
        dtype=torch.float32,
        learning_rate=1e-3,
        tolerance=0.001,
    ),
    "cuda": Setup(
        text_bytes=16 * 2**20,
        vocab=32768,
        batch=16,
        length=1024,
        layers=4,
        width=1024,
        dtype=torch.bfloat16,
        learning_rate=1e-3,
        tolerance=0.02,
    ),
}


class NextToken(nn.Module):
    """A language model with its loss. It returns only the loss, so the logits have no other user."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, input: Tensor, targets: Tensor) -> Tensor:
        logits = self.model(input)
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


@dataclass(kw_only=True)
class Run:
    """One training run."""

    module: NextToken
    jit: Callable[[nn.Module], Callable[..., Tensor]]
    learning_rate: float
    losses: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)

    def __post_init__(self):
        self.jitted = self.jit(self.module)
        # With AdamW's default eps, gradients that are pure rounding errors would cause full steps.
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=self.learning_rate, eps=1e-6)

    def compile(self, input: Tensor, targets: Tensor) -> None:
        """Compiles forward and backward by running them once; discards the gradients."""
        self.jitted(input, targets).backward()
        self.optimizer.zero_grad()

    def step(self, input: Tensor, targets: Tensor) -> None:
        """Trains on one batch; records the loss and the time."""
        start = time.perf_counter()
        loss = self.jitted(input, targets)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if input.is_cuda:
            torch.cuda.synchronize()
        self.step_seconds.append(time.perf_counter() - start)
        self.losses.append(loss.item())


def draw_batches(tokens: Tensor, setup: Setup, count: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Returns batches of random sequences of the text, each with its next tokens; the same at each call."""
    generator = torch.Generator().manual_seed(SEED)
    starts = torch.randint(len(tokens) - setup.length, (count, setup.batch, 1), generator=generator)
    windows = tokens[starts + torch.arange(setup.length + 1)].to(device)
    return [(window[:, :-1].contiguous(), window[:, 1:].contiguous()) for window in windows]


def make_model(setup: Setup, vocab: int) -> NextToken:
    """Makes a model, with the same parameters at each call."""
    torch.manual_seed(SEED)
    config = Config(
        block_size=setup.length,
        padded_vocab_size=vocab,
        n_layer=setup.layers,
        n_head=setup.width // 64,
        n_embd=setup.width,
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP",
        intermediate_size=setup.width * 3,
    )
    model = GPT(config)
    model.apply(model._init_weights)
    return NextToken(model)


def train(runs: dict[str, Run], batches: list[tuple[Tensor, Tensor]], *, columns: int) -> None:
    """Trains all runs on each batch, in turn."""
    # A terminal shows a moving bar; a log file gets few copies of it.
    refresh_seconds = 0.1 if sys.stderr.isatty() else 10
    progress = tqdm(batches, desc="training", unit="step", mininterval=refresh_seconds, ncols=columns)
    for input, targets in progress:
        for run in runs.values():
            run.step(input, targets)
        losses = " and ".join(f"{run.losses[-1]:.4f}" for run in runs.values())
        progress.set_postfix_str(f"losses {losses}", refresh=False)


@torch.no_grad()
def evaluate(module: NextToken, batches: list[tuple[Tensor, Tensor]]) -> float:
    """Returns the mean loss, in eager PyTorch and in float32."""
    return statistics.fmean(
        F.cross_entropy(module.model(input).flatten(0, 1).float(), targets.flatten()).item()
        for input, targets in batches
    )


def loss_peak_bytes(run: Run, setup: Setup, targets: Tensor) -> int:
    """Returns the peak memory of forward and backward of head and loss alone, gradients included."""
    region = run.jit(NextToken(run.module.model.lm_head))
    hidden = torch.randn(*targets.shape, setup.width, device=targets.device, dtype=setup.dtype, requires_grad=True)

    def forward_and_backward() -> None:
        region(hidden, targets).backward()

    forward_and_backward()  # Compiles.
    hidden.grad = run.module.model.lm_head.weight.grad = None
    return peak_bytes(forward_and_backward, targets.device.type)


def report_traces(console: Console, runs: dict[str, Run], logits_numel: int) -> None:
    """Prints the operations of the loss in the last backward trace of each run."""
    regions = {
        name: loss_region(
            thunder.last_backward_traces(run.jitted)[-1],
            logits_numel=logits_numel,
            parameters=(parameter for parameter, _ in run.module.named_parameters()),
        )
        for name, run in runs.items()
    }
    print_side_by_side(console, regions, logits_numel=logits_numel)


def report_numbers(console: Console, seconds: list[float], peaks: list[int], losses: list[float]) -> None:
    """Prints a table of time, memory and loss, each given for every run in order."""
    table = Table(box=box.SIMPLE_HEAD)
    for title in ("", *RUNS, ""):
        table.add_column(title, justify="right" if title else "left")
    speed, memory = seconds[0] / seconds[1], peaks[1] / peaks[0]
    table.add_row("time per step, median", *(f"{s * 1e3:.1f} ms" for s in seconds), f"{speed:.2f} × as fast")
    table.add_row("peak memory of head and loss", *map(format_bytes, peaks), f"{memory:.2f} × the memory")
    table.add_row(
        "loss after training",
        *(f"{loss:.5f}" for loss in losses),
        f"differ by {abs(losses[1] - losses[0]):.1e}",
    )
    console.print(table)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200, help="training steps (default: %(default)s)")
    parser.add_argument("--text", type=Path, help=f"a text file to train on (default: {SOURCE})")
    parser.add_argument("--device", choices=SETUPS, default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error("--steps must be at least 1")
    if arguments.text and not arguments.text.is_file():
        parser.error(f"there is no file {arguments.text}")
    return arguments


def main() -> int:
    arguments = parse_arguments()
    setup, device = SETUPS[arguments.device], torch.device(arguments.device)
    console = Console(highlight=False, width=min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns))

    if arguments.text:
        documents = [arguments.text.read_text("utf-8", errors="replace")[: setup.text_bytes]]
    else:
        documents = standard_library(setup.text_bytes)
    tokens, vocab = tokenize(documents, setup.vocab)
    if len(tokens) <= setup.length:
        console.print(f"The text has {len(tokens)} tokens, but at least {setup.length + 1} are needed.")
        return 2
    batches = draw_batches(tokens, setup, arguments.steps + TEST_BATCHES, device)
    train_batches, test_batches = batches[:-TEST_BATCHES], batches[-TEST_BATCHES:]
    runs = {
        name: Run(module=make_model(setup, vocab).to(device, setup.dtype), jit=jit, learning_rate=setup.learning_rate)
        for name, jit in RUNS.items()
    }
    plain, fused = runs.values()

    rows = setup.batch * setup.length
    parameters = sum(parameter.numel() for parameter in plain.module.parameters())
    on_cuda = device.type == "cuda"
    processor = torch.cuda.get_device_name(device) if on_cuda else "CPU"
    lowering = "Triton" if on_cuda and is_installed("triton") else "PyTorch operations"
    console.print(f"text       {arguments.text or SOURCE}: {len(tokens):,} tokens, {vocab:,} different ones")
    console.print(f"model      litgpt GPT, {setup.layers} layers of width {setup.width}, {parameters:,} parameters")
    console.print(f"batch      {setup.batch} × {setup.length} tokens: the logits are T × V = {rows:,} × {vocab:,}")
    console.print(f"device     {processor}, {str(setup.dtype).removeprefix('torch.')}; flce uses {lowering}")
    for name, run in runs.items():
        start = time.perf_counter()
        run.compile(*train_batches[0])
        console.print(f"compiled   in {time.perf_counter() - start:.0f} s by {name}")
    decisions = [decision for compilation in thunder_flce.explain(fused.jitted) for decision in compilation.decisions]
    for decision in decisions:
        console.print(f"decided    {decision}", soft_wrap=True)

    train(runs, train_batches, columns=console.width)
    console.print()
    report_traces(console, runs, logits_numel=rows * vocab)
    if any(decision.fused and decision.plan.strategy == "gradients_in_forward" for decision in decisions):
        console.print(GRADIENTS_IN_FORWARD)
    losses = [evaluate(run.module, test_batches) for run in runs.values()]
    report_numbers(
        console,
        seconds=[statistics.median(run.step_seconds) for run in runs.values()],
        peaks=[loss_peak_bytes(run, setup, train_batches[0][1]) for run in runs.values()],
        losses=losses,
    )
    if not abs(losses[1] - losses[0]) <= setup.tolerance:
        console.print(f"The losses differ by more than {setup.tolerance}: they do not agree.", style="bold red")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
