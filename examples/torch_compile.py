"""A plain training loop under torch.compile, with Inductor alone and with the backend "thunder_flce".

Model and loop stay as they are; only the backend's name changes. The exit code is 1 if the losses differ.
"""

import statistics
import sys
import time

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

VOCAB, HIDDEN, TOKENS, STEPS = 16384, 128, 2048, 8


def train(backend: str, device: str) -> tuple[list[float], float]:
    """Losses, and the median seconds of a step."""
    torch.manual_seed(1)
    layers = [nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, VOCAB, bias=False)]
    model = nn.Sequential(*layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    @torch.compile(backend=backend)
    def loss_of(tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens), targets)

    losses, seconds = [], []
    for _ in range(STEPS):
        tokens = torch.randint(VOCAB, (TOKENS,), device=device)
        start = time.perf_counter()
        loss = loss_of(tokens, (7 * tokens + 1) % VOCAB)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)
    return losses, statistics.median(seconds)


def main() -> int:
    """Trains with both backends and prints losses and times side by side."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    table = Table("backend", "first loss", "last loss", "time of a step", title=f"{STEPS} steps on {device}")
    results = {backend: train(backend, device) for backend in ("inductor", "thunder_flce")}
    for backend, (losses, seconds) in results.items():
        table.add_row(backend, f"{losses[0]:.4f}", f"{losses[-1]:.4f}", f"{seconds * 1e3:.1f} ms")
    Console().print(table)
    (expected, _), (got, _) = results.values()
    error = max(abs(a - b) for a, b in zip(expected, got, strict=True))
    print(f"The losses differ by {error:.1e} at most. Expect less than 1e-3.")
    return int(error >= 1e-3)


if __name__ == "__main__":
    sys.exit(main())
