"""Data parallel training with FSDP2, with the head's vocabulary permanently divided among the ranks.

    python examples/fsdp2.py                              # two CPU processes, without torchrun
    torchrun --nproc-per-node 2 examples/fsdp2.py         # or GPUs, one per rank

FSDP2 shards the trunk: it gathers the weight of each layer and averages the gradients. The head is excluded from FSDP2:
each rank keeps its rows of the vocabulary, and receives the hidden states of all ranks. The losses equal those of FSDP2
with the head as one of its units, up to rounding.
"""

import os
import tempfile

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import thunder_flce
from gain import measure
from thunder_flce import LinearCrossEntropyLoss, VocabParallel, count_items

TOKENS, HIDDEN, VOCAB, STEPS = 256, 128, 10007, 8


class Model(nn.Module):
    """An embedding, a layer, and a head with its loss."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.layer = nn.Linear(HIDDEN, HIDDEN)
        self.head = LinearCrossEntropyLoss(HIDDEN, VOCAB)

    def forward(self, tokens: Tensor, labels: Tensor, num_items: Tensor) -> Tensor:
        hidden = torch.tanh(self.layer(self.embedding(tokens)))
        return self.head(hidden, labels, num_items=num_items)


def sharded(mesh: DeviceMesh, *, divides_vocab: bool) -> Model:
    """Returns the model, with parameters sharded among the ranks of the mesh."""
    torch.manual_seed(1)
    model = Model().to(mesh.device_type)
    head = model.head
    if divides_vocab:
        head.vocab_parallel = VocabParallel(group=mesh, data_parallel=True)
        head.linear.weight = nn.Parameter(distribute_tensor(head.linear.weight.detach(), mesh, [Shard(0)]))
        fully_shard(model, mesh=mesh, ignored_params=set(head.parameters()))
    else:
        fully_shard(head, mesh=mesh)
        # The forward has computed the gradients already, so the backward needs no weight.
        head.set_unshard_in_backward(False)
        fully_shard(model, mesh=mesh)
    return model


def train(mesh: DeviceMesh, *, divides_vocab: bool) -> tuple[list[float], float, float]:
    """Returns the loss of each step (the mean over all ranks' tokens), and the milliseconds and peak MiB of a step."""
    model = sharded(mesh, divides_vocab=divides_vocab)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    # Each rank has different tokens, and rank 0 has fewer valid ones. Ranks may have different lengths, too.
    torch.manual_seed(dist.get_rank())
    tokens = torch.randint(VOCAB, (TOKENS,), device=mesh.device_type)
    labels = thunder_flce.shift_labels(tokens)
    if dist.get_rank() == 0:
        labels[: TOKENS // 2] = -100

    def step() -> float:
        loss = model(tokens, labels, count_items(labels, group=mesh))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return mean_over_ranks(loss.detach())

    return [step() for _ in range(STEPS)], *measure(step, mesh.device_type)


def mean_over_ranks(loss: Tensor) -> float:
    """Returns the mean over the ranks; with a divided vocabulary, all ranks have that mean already."""
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def run_rank(device: str) -> None:
    """Trains in both ways on one rank of the default process group."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device, (ranks,), mesh_dim_names=("dp",))
    (gathered, *gain_of_gathered), (divided, *gain) = (train(mesh, divides_vocab=divides) for divides in (False, True))
    if rank == 0:
        print(f"{ranks} ranks on {device}:")
        for step, losses in enumerate(zip(gathered, divided, strict=True)):
            print("step {}: loss {:.5f}, with the vocabulary divided {:.5f}".format(step, *losses))
        text = "{:.1f} ms and {:.1f} MiB a step, with the vocabulary divided {:.1f} ms and {:.1f} MiB"
        print(text.format(*gain_of_gathered, *gain))
    torch.testing.assert_close(divided, gathered, rtol=1e-4, atol=1e-5)


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
