"""A plain training loop under torch.compile, with Inductor alone and with the backend "thunder_flce".

Model and loop stay the same; only the backend's name changes.

    python examples/torch_compile.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gain import print_gain

VOCAB, HIDDEN, STEPS = 16384, 128, 8
TOKENS = {"cpu": 2048, "cuda": 16384}


class Training:
    """A model with its optimizer and batches, the same for each backend."""

    def __init__(self, backend: str, device: str):
        torch.manual_seed(1)
        layers = [nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.GELU()]
        model = nn.Sequential(*layers, nn.Linear(HIDDEN, VOCAB, bias=False)).to(device)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.device = device

        @torch.compile(backend=backend)
        def loss_of(tokens: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(model(tokens), targets)

        self.loss_of = loss_of
        self.losses = [self.step() for _ in range(STEPS)]

    def step(self) -> float:
        """Trains on one batch."""
        tokens = torch.randint(VOCAB, (TOKENS[self.device],), device=self.device)
        loss = self.loss_of(tokens, (7 * tokens + 1) % VOCAB)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    runs = {backend: Training(backend, device) for backend in ("inductor", "thunder_flce")}
    for backend, run in runs.items():
        print(f"{backend:14} loss " + " ".join(f"{loss:.4f}" for loss in run.losses))
    inductor, ours = (torch.tensor(run.losses) for run in runs.values())
    torch.testing.assert_close(ours, inductor, rtol=0, atol=1e-3)
    print_gain(f"a training step on {device}", {backend: run.step for backend, run in runs.items()}, device)


if __name__ == "__main__":
    main()
