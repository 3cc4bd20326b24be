"""Tensor parallel training of a head with a large vocabulary: each rank has some rows of its weight.

    python examples/tensor_parallel.py                              # two CPU processes, without torchrun
    torchrun --nproc-per-node 2 examples/tensor_parallel.py         # or GPUs, one per rank

All ranks see the same batch and train the same trunk. The head's weight, its gradient and its optimizer state are
divided among the ranks. The losses equal those of training with the whole weight on one rank, up to rounding.
"""

import os
import tempfile

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import thunder_flce
from gain import measure

# Of 10007 rows, the first of two ranks has 5004 and the second 5003.
TOKENS, HIDDEN, VOCAB, STEPS = 256, 128, 10007, 8


class Model(nn.Module):
    """An embedding and a layer, equal on all ranks, and this rank's `rows` of the head."""

    def __init__(self, rows: slice):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.layer = nn.Linear(HIDDEN, HIDDEN)
        head = torch.randn(VOCAB, HIDDEN) / HIDDEN**0.5
        self.head = nn.Parameter(head[rows].clone())

    def forward(self, tokens: Tensor, labels: Tensor, group=None) -> Tensor:
        hidden = torch.tanh(self.layer(self.embedding(tokens)))
        return thunder_flce.linear_cross_entropy(hidden, self.head, labels, vocab_parallel=group)


def train(rows: slice, device: str, group=None) -> tuple[list[float], float, float]:
    """Returns the loss of each step, and the milliseconds and peak MiB of a step."""
    torch.manual_seed(1)
    model = Model(rows).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    tokens = torch.randint(VOCAB, (TOKENS,)).to(device)
    labels = thunder_flce.shift_labels(tokens)

    def step() -> float:
        # All ranks get the whole gradient of the hidden states, so the trunk's gradients are the same on all ranks.
        loss = model(tokens, labels, group)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return [step() for _ in range(STEPS)], *measure(step, device)


def run_rank(device: str) -> None:
    """Trains on one rank of the default process group, and compares with the whole weight."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device, (ranks,), mesh_dim_names=("tp",))
    size = -(-VOCAB // ranks)
    losses, *gain = train(slice(rank * size, (rank + 1) * size), device, mesh["tp"])
    whole, *gain_of_whole = train(slice(None), device)
    if rank == 0:
        print(f"{ranks} ranks on {device}:")
        for step, (divided, alone) in enumerate(zip(losses, whole, strict=True)):
            print(f"step {step}: loss {divided:.5f}, with the whole weight {alone:.5f}")
        text = "{:.1f} ms and {:.1f} MiB a step, with the whole weight {:.1f} ms and {:.1f} MiB"
        print(text.format(*gain, *gain_of_whole))
    torch.testing.assert_close(losses, whole, rtol=1e-4, atol=1e-5)


def _spawned(rank: int, ranks: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    run_rank("cpu")
    dist.destroy_process_group()


def main() -> None:
    """Joins the ranks that torchrun has started, or starts two processes."""
    if "RANK" not in os.environ:
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(_spawned, (2, f"{folder}/store"), nprocs=2)
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    run_rank(device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
