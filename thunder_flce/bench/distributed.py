"""Loss regions on several GPUs that divide the vocabulary: time, memory and error of methods, on the slowest rank.

Methods for sequence parallel and data parallel training divide the tokens, too.

This module starts a process for each rank. All ranks run the same calls in the same order, whatever the clock says,
since their collectives have to match.
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from thunder_flce.bench.measure import TOTAL, Mark, Run, Step, Unavailable
from thunder_flce.bench.methods import ours
from thunder_flce.bench.regions import Results, add, add_matmuls, mean_reference, run_step
from thunder_flce.bench.shapes import Inputs, Shape
from thunder_flce.modules import LinearCrossEntropyLoss
from thunder_flce.vocab_parallel import VocabParallel

TIMEOUT = timedelta(seconds=60)
"""Time after which the other ranks end once a rank has failed."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """The part of a loss that one rank has."""

    inputs: Inputs  # all tokens, and this rank's rows of the weight
    mesh: DeviceMesh
    tokens: slice  # this rank's tokens, for methods that divide them
    vocab: int  # number of rows of the whole weight

    def own_tokens(self) -> Inputs:
        """Returns the rank's own tokens, and its rows of the weight."""
        if len(self.inputs.x) % self.mesh.size():
            raise Unavailable(f"{len(self.inputs.x)} tokens cannot be divided among {self.mesh.size()} ranks")
        x = self.inputs.x.detach()[self.tokens].requires_grad_()
        return self.inputs._replace(x=x, target=self.inputs.target[self.tokens])


def _vocab_parallel(part: Part, **settings: Any) -> Step:
    """Our function. No rank ever has the whole weight."""
    parallel = VocabParallel(group=part.mesh, **settings)
    inputs = part.own_tokens() if parallel.divides_tokens else part.inputs
    return partial(run_step, inputs, ours(vocab_parallel=parallel))


def _loss_parallel(part: Part, *, is_compiled: bool = False) -> Step:
    """PyTorch's `loss_parallel`: all logits at once, as a DTensor sharded by columns."""
    from torch.distributed.tensor.parallel import loss_parallel

    def loss(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, weight).float(), target)

    program = torch.compile(loss, dynamic=False) if is_compiled else loss

    def method(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        # The weight is sharded as by `ColwiseParallel`.
        size, stride = torch.Size((part.vocab, x.shape[1])), (x.shape[1], 1)
        weight = DTensor.from_local(weight, part.mesh, [Shard(0)], shape=size, stride=stride)
        x, target = (DTensor.from_local(tensor, part.mesh, [Replicate()]) for tensor in (x, target))
        return cast(DTensor, program(x, weight, target)).to_local()

    def step(mark: Mark) -> Results:
        with loss_parallel():
            return run_step(part.inputs, method, mark)

    return step


def _liger(part: Part) -> Step:
    """Liger's loop in PyTorch: its kernels for several ranks need NVSHMEM and NVLink's multicast."""
    if part.vocab % part.mesh.size():
        raise Unavailable("equal parts of the vocabulary only")
    if not part.inputs.x.is_cuda:
        raise Unavailable("runs on GPUs only")
    fused = import_module("liger_kernel.transformers.functional").liger_fused_linear_scaled_cross_entropy_tp

    def method(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return fused(x, weight, target, tp_group=part.mesh.get_group()).sum() / (target != -100).sum()

    return partial(run_step, part.inputs, method)


def _fully_shard(part: Part) -> Step:
    """FSDP2 with the head as a unit that is gathered once per step; its forward computes the loss of own tokens."""
    own_inputs = part.own_tokens()
    head = LinearCrossEntropyLoss(own_inputs.x.shape[1], part.vocab, device="meta", dtype=own_inputs.x.dtype)
    fully_shard(head, mesh=part.mesh).set_unshard_in_backward(False)
    head.to_empty(device=own_inputs.x.device)
    weight = cast(DTensor, head.linear.weight)
    weight.to_local().detach().copy_(part.inputs.weight.detach())

    def step(mark: Mark) -> Results:
        results = run_step(own_inputs._replace(weight=weight), lambda x, weight, target: head(x, target), mark)
        return {**results, "dw": cast(DTensor, results["dw"]).to_local()}

    return step


# The steps return the loss, dX of all tokens or of this rank's tokens, and dW of this rank's rows.
METHODS: Mapping[str, Callable[[Part], Step]] = {
    "vocab_parallel": _vocab_parallel,
    "sequence_parallel": partial(_vocab_parallel, sequence_parallel=True),
    "loss_parallel": _loss_parallel,
    "loss_parallel, torch.compile": partial(_loss_parallel, is_compiled=True),
    "liger": _liger,
    "fully_shard": _fully_shard,
    "data_parallel": partial(_vocab_parallel, data_parallel=True),
}
OWN_MEANS = ("fully_shard", "data_parallel")
"""Methods whose loss is the mean over a rank's own tokens; their dX is larger by a factor of the number of ranks."""
OWN_TOKENS = (*OWN_MEANS, "sequence_parallel")
"""Methods that give a rank dX of its own tokens only."""


def measure(shape: Shape, names: list[str], run: Run, *, ranks: int) -> None:
    """Measures methods, by names of `METHODS`, on `ranks` ranks, each in its own process and on its own GPU."""
    if run.device == "cuda" and (count := torch.cuda.device_count()) < ranks:
        raise SystemExit(f"--ranks {ranks} needs as many GPUs, but PyTorch finds {count}")
    run.fields |= {**shape.as_record(), "ranks": ranks}
    with tempfile.TemporaryDirectory() as folder:
        # The clock must not decide how often a step runs, and no rank may continue once another rank has failed.
        rank_run = Run(device=run.device, rounds=run.rounds, calls=run.calls, settle_ms=0, turn_ms=1e9, strict=True)
        torch.multiprocessing.spawn(_run_rank, (ranks, Path(folder), rank_run, shape, names), nprocs=ranks)
        for row in json.loads(Path(folder, "rows").read_text()):
            run.row(**row)


def _run_rank(rank: int, ranks: int, folder: Path, *arguments: Any) -> None:
    """Measures on one rank; rank 0 writes rows of the slowest times and the largest memory and errors."""
    run, shape, names = arguments
    if run.device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if run.device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=ranks, timeout=TIMEOUT)
    whole = Inputs.random(shape, run.device)
    expected = mean_reference(whole)
    size, tokens = -(-shape.vocab // ranks), shape.tokens // ranks
    own_rows = slice(rank * size, (rank + 1) * size)
    part = Part(
        inputs=whole._replace(weight=whole.weight.detach()[own_rows].clone().requires_grad_()),
        mesh=init_device_mesh(run.device, (ranks,), mesh_dim_names=("tp",)),
        tokens=slice(rank * tokens, (rank + 1) * tokens),
        vocab=shape.vocab,
    )
    loss, dx, dw = expected["loss"], expected["dx"], expected["dw"][own_rows].clone()
    del whole, expected
    # The targets do not change the matmuls' time; they must be columns of this rank's weight.
    add_matmuls(run, part.inputs._replace(target=part.inputs.target % len(dw)), 3)

    def largest(numbers: Iterable[float]) -> list[float]:
        """Returns the maximum of each number over the ranks."""
        maxima = torch.tensor([*numbers], dtype=torch.float64, device=run.device)
        dist.all_reduce(maxima, dist.ReduceOp.MAX)
        return maxima.tolist()

    for name in names:
        expected_dx = (dx[part.tokens] if name in OWN_TOKENS else dx) * (ranks if name in OWN_MEANS else 1)
        reference = {"dx": expected_dx, "dw": dw, **({} if name in OWN_MEANS else {"loss": loss})}
        with run.attempt(name):
            numbers = add(run, name, METHODS[name](part), reference=reference, matmuls=3)
            floats = {field: number for field, number in numbers.items() if isinstance(number, float)}
            numbers |= zip(floats, largest(floats.values()), strict=True)

    def slowest(step: Step) -> list[dict[str, float]]:
        return [{TOTAL: ms} for ms in largest(lap[TOTAL] for lap in run.turn(step))]

    run.report(slowest)
    if rank == 0:
        (folder / "rows").write_text(json.dumps(run.rows))
    sys.stdout.flush()
    sys.stderr.flush()
    # Without this, a rank on a busy CPU sometimes aborted at exit, because of a thread that was still running
    # ("terminate called without an active exception").
    os._exit(0)
