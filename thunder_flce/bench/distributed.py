"""A loss region whose vocabulary several GPUs divide: time, memory and error of each way, on the slowest rank.

Ways of sequence parallel and data parallel training divide the tokens as well.

Each rank is a process of its own, which this module starts. All ranks run the same calls in the same order, without the
clock having a say, since their collectives have to match.
"""

import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from thunder_flce.bench.measuring import (
    ERROR,
    GB,
    TOTAL,
    Mark,
    Outcome,
    Schedule,
    Session,
    Step,
    TimedRow,
    Unavailable,
    column,
    no_mark,
    peak_bytes,
)  # fmt: skip
from thunder_flce.bench.methods import peer
from thunder_flce.bench.reference import make_reference, matmuls, relative_error
from thunder_flce.bench.shapes import Inputs, Shape, parse_shape
from thunder_flce.functional import linear_cross_entropy
from thunder_flce.modules import LinearCrossEntropyLoss
from thunder_flce.vocab_parallel import VocabParallel

# As torchtitan has it by default.
_CHUNKS = 8

# A rank that fails ends the others after this time.
TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True, kw_only=True)
class Row(TimedRow):
    """What one way takes on the slowest rank; None for what was not measured."""

    shape: Shape
    ranks: int | None = column("ranks")
    ratio: float | None = column("× matmuls", "{:.3f}")
    """To the three matmuls over this rank's rows, all tokens at once, without any collective."""
    memory_gb: float | None = column("peak − gradients, GB", GB)
    """The peak above the inputs and the gradients."""
    dx_error: float | None = column("dX error", ERROR)
    dw_error: float | None = column("dW error", ERROR)
    """Of all ranks' rows together."""
    same_bits: bool | None = column("same bits")
    """Whether all ranks have the same loss and dX; None where they need not."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """What a rank has."""

    inputs: Inputs
    """All tokens, and its rows of the weight"""
    mesh: DeviceMesh
    tokens: slice
    """Its tokens, where these are divided, too"""
    vocab: int
    """Rows of the whole weight"""


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a way computes."""

    loss: Tensor
    dx: Tensor
    """Of all tokens, or of this rank's; times `dx_factor`"""
    dw: Tensor
    """Of this rank's rows"""
    dx_factor: int = 1


def _three_products(part: Part) -> Step:
    # Which column a target is, makes no difference to a product; here it must be one of this rank's.
    rows = part.inputs.weight.shape[0]
    return matmuls(replace(part.inputs, target=part.inputs.target % rows), 3)


def _run(loss: Callable[[Tensor, Tensor], Tensor], part: Part, mark: Mark, *, tokens: slice, dx_factor: int) -> Result:
    x = part.inputs.x.detach()[tokens].requires_grad_()
    value = loss(x, part.inputs.weight)
    mark("forward")
    dx, dw = torch.autograd.grad(value, (x, part.inputs.weight))
    mark("backward")
    return Result(loss=value.detach(), dx=dx, dw=dw, dx_factor=dx_factor)


def _vocab_parallel(part: Part, **settings: Any) -> Step:
    """Ours. No rank ever has the whole weight."""
    parallel = VocabParallel(group=part.mesh, **settings)
    tokens = part.tokens if parallel.divides_tokens else slice(None)
    target = part.inputs.target[tokens]

    def loss(x: Tensor, weight: Tensor) -> Tensor:
        return linear_cross_entropy(x, weight, target, vocab_parallel=parallel)

    return partial(_run, loss, part, tokens=tokens, dx_factor=part.mesh.size() if parallel.data_parallel else 1)


def _whole(part: Part, tensor: Tensor) -> DTensor:
    """What all ranks have."""
    return DTensor.from_local(tensor, part.mesh, [Replicate()], run_check=False)


def _weight(part: Part) -> DTensor:
    """As `ColwiseParallel` has it."""
    shape = torch.Size((part.vocab, part.inputs.x.shape[1]))
    return DTensor.from_local(
        part.inputs.weight, part.mesh, [Shard(0)], run_check=False, shape=shape, stride=(shape[1], 1)
    )


def _value(tensor: Tensor) -> Tensor:
    """What this rank has of it."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _loss_parallel(part: Part, *, is_compiled: bool = False) -> Step:
    """PyTorch's own: logits as a DTensor that is divided by columns, all of them at once."""
    from torch.distributed.tensor.parallel import loss_parallel

    def loss(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, weight).float(), target)

    program = torch.compile(loss, dynamic=False) if is_compiled else loss

    def step(mark: Mark) -> Result:
        x = part.inputs.x.detach().requires_grad_()
        with loss_parallel():
            value = program(_whole(part, x), _weight(part), _whole(part, part.inputs.target))
            mark("forward")
            dx, dw = torch.autograd.grad(value, (x, part.inputs.weight))
        mark("backward")
        return Result(loss=_value(value), dx=dx, dw=dw)

    return step


def _chunked_loss_parallel(part: Part, *, is_compiled: bool = False) -> Step:
    """The same for a part of the tokens at a time, each with a backward of its own, as torchtitan's chunked loss.

    dX is collected in float32, and summed over the ranks once, in its dtype. Compiled is the loss of a part's logits.
    """
    from torch.distributed.tensor.parallel import loss_parallel

    x, weight = part.inputs.x.detach(), part.inputs.weight
    chunks = list(zip(x.chunk(_CHUNKS), part.inputs.target.chunk(_CHUNKS), strict=True))

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits.float(), target, reduction="sum")

    program = torch.compile(loss, dynamic=False) if is_compiled else loss

    def step(mark: Mark) -> Result:
        # In a backward of its own, each part adds to this.
        weight.grad = None
        total = x.new_zeros((), dtype=torch.float32)
        dx = torch.empty_like(x, dtype=torch.float32)
        count = (part.inputs.target != -100).sum()
        with loss_parallel():
            for (x_of_chunk, target), dx_of_chunk in zip(chunks, dx.chunk(_CHUNKS), strict=True):
                leaf = _whole(part, x_of_chunk).requires_grad_()
                value = program(F.linear(leaf, _weight(part)), _whole(part, target)) / count
                value.backward()
                total += _value(value)
                assert isinstance(leaf.grad, DTensor)
                # dX is a sum over ranks, and this is this rank's summand.
                dx_of_chunk.copy_(leaf.grad.to_local())
        mark("forward")
        shares = dx.to(x.dtype)
        dist.all_reduce(shares, group=part.mesh.get_group())
        mark("backward")
        dw, weight.grad = weight.grad, None
        assert dw is not None
        return Result(loss=total, dx=shares, dw=dw)

    return step


def _liger(part: Part) -> Step:
    """Liger's, as a loop in PyTorch: its own kernels for it need NVSHMEM and NVLink's multicast."""
    if part.vocab % part.mesh.size():
        raise Unavailable("equal parts of the vocabulary only")
    if not part.inputs.x.is_cuda:
        raise Unavailable("runs on GPUs only")
    fused = peer("liger_kernel.transformers.functional").liger_fused_linear_scaled_cross_entropy_tp
    target, group = part.inputs.target, part.mesh.get_group()

    def loss(x: Tensor, weight: Tensor) -> Tensor:
        return fused(x, weight, target, tp_group=group).sum() / (target != -100).sum()

    return partial(_run, loss, part, tokens=slice(None), dx_factor=1)


def _fully_shard(part: Part) -> Step:
    """FSDP2, the head as a unit that is gathered once a step, and the loss of each rank's tokens in its forward."""
    x, target = part.inputs.x.detach()[part.tokens].requires_grad_(), part.inputs.target[part.tokens]
    head = LinearCrossEntropyLoss(x.shape[1], part.vocab, device="meta", dtype=x.dtype)
    fully_shard(head, mesh=part.mesh).set_unshard_in_backward(False)
    head.to_empty(device=x.device)
    weight = head.linear.weight
    assert isinstance(weight, DTensor)
    with torch.no_grad():
        weight.to_local().copy_(part.inputs.weight)

    def step(mark: Mark) -> Result:
        loss = head(x, target)
        mark("forward")
        loss.backward()
        mark("backward")
        dx, dw = x.grad, head.linear.weight.grad
        x.grad = None
        head.zero_grad()
        assert dx is not None and isinstance(dw, DTensor)
        return Result(loss=loss.detach(), dx=dx, dw=dw.to_local(), dx_factor=part.mesh.size())

    return step


METHODS: Mapping[str, Callable[[Part], Step]] = {
    "three products": _three_products,
    "vocab_parallel": _vocab_parallel,
    "sequence_parallel": partial(_vocab_parallel, sequence_parallel=True),
    "loss_parallel": _loss_parallel,
    "loss_parallel, torch.compile": partial(_loss_parallel, is_compiled=True),
    "loss_parallel, 8 chunks": _chunked_loss_parallel,
    "loss_parallel, 8 chunks, torch.compile": partial(_chunked_loss_parallel, is_compiled=True),
    "liger": _liger,
    "fully_shard": _fully_shard,
    "data_parallel": partial(_vocab_parallel, data_parallel=True),
}


def parse(text: str) -> Shape:
    """A shape of tokens, vocab, hidden, ignored and dtype alone.

    Raises:
        ValueError: for a shape with more.
    """
    shape = parse_shape(text)
    if shape.bias or shape.frozen or shape.rank:
        raise ValueError(f"distributed takes shapes without bias, frozen and rank, but got {shape}")
    return shape


def measure(shape: Shape, names: list[str], session: Session, *, ranks: int) -> None:
    """Measures some ways on so many ranks, each in a process of its own.

    Args:
        shape: of all ranks together.
        names: from `METHODS`.
        session: where ("cuda": a GPU for each rank), for how long, and who is told.
        ranks: how many.
    """
    if shape.tokens % ranks:
        failed = f"{shape.tokens} tokens cannot be divided among {ranks} ranks"
        for name in names:
            session.write(Row(method=name, shape=shape, ranks=ranks, failed=failed))
        return
    session.progress(f"{ranks} processes")
    with tempfile.TemporaryDirectory() as folder:
        arguments = (ranks, shape, names, session.device, session.schedule, folder)
        torch.multiprocessing.spawn(_run_rank, arguments, nprocs=ranks)
        rows = torch.load(Path(folder, "rows"), weights_only=False)
    for row in rows:
        session.write(row)


def _run_rank(
    rank: int, ranks: int, shape: Shape, names: list[str], device: str, schedule: Schedule, folder: str
) -> None:
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=ranks, timeout=TIMEOUT)
    rows = _rows(shape, names, device, schedule)
    if rank == 0:
        torch.save(rows, Path(folder, "rows"))
    sys.stdout.flush()
    sys.stderr.flush()
    # At its usual end, a rank on a busy CPU was now and then aborted for a thread that was still running ("terminate
    # called without an active exception").
    os._exit(0)


def _rows(shape: Shape, names: list[str], device: str, schedule: Schedule) -> list[Row]:
    """The rows of this rank; those of all ranks are the same."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    whole = Inputs.random(shape, device)
    reference = make_reference(whole)
    size, tokens = -(-shape.vocab // ranks), shape.tokens // ranks
    mine = slice(rank * size, (rank + 1) * size)
    weight = whole.weight.detach()[mine].clone().requires_grad_()
    part = Part(
        inputs=replace(whole, weight=weight),
        mesh=init_device_mesh(device, (ranks,), mesh_dim_names=("tp",)),
        tokens=slice(rank * tokens, (rank + 1) * tokens),
        vocab=shape.vocab,
    )
    of_reference = {"dx": reference.gradients["dx"], "dw": reference.gradients["dw"][mine].clone()}
    del whole, reference
    # The clock must not decide how often a step runs.
    schedule = replace(schedule, settle_ms=0, turn_ms=1e9)
    steps: dict[str, Step] = {}
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        try:
            step = METHODS[name](part)
        except Unavailable as reason:  # On all ranks.
            found[name] = {"failed": str(reason)}
            continue
        for _ in range(2):
            result = step(no_mark)
        if isinstance(result, Result):
            found[name] = _checked(result, of_reference, part)
            gradients = result.dx.nbytes + result.dw.nbytes
            del result
            found[name]["memory_gb"] = _largest((peak_bytes(step, device)[TOTAL] - gradients) / 1e9)
        else:
            found[name] = {}
        steps[name] = step
    failures: list[Any] = []
    outcomes = Session(device=device, schedule=schedule, progress=no_mark, write=failures.append).take_turns(steps)
    assert not failures, failures
    times = {name: _slowest(outcome) for name, outcome in outcomes.items()}
    products = times.get("three products")
    for name, outcome in times.items():
        found[name] |= outcome.spread()
        if products is not None:
            found[name]["ratio"] = found[name]["time_ms"] / products.median(TOTAL)
    return [Row(method=name, ranks=ranks, shape=shape, **numbers) for name, numbers in found.items()]


def _checked(result: Result, reference: dict[str, Tensor], part: Part) -> dict[str, Any]:
    """The errors over all ranks, and whether these have the same bits."""
    of_tokens = reference["dx"]
    has_all_tokens = result.dx.shape == of_tokens.shape
    if not has_all_tokens:
        of_tokens = of_tokens[part.tokens]
    numbers = {
        "dx_error": _largest(relative_error(result.dx / result.dx_factor, of_tokens)),
        "dw_error": _largest(relative_error(result.dw, reference["dw"])),
    }
    if not has_all_tokens:
        return numbers
    first = result.dx.clone()
    dist.broadcast(first, 0)
    losses = [torch.empty_like(result.loss) for _ in range(dist.get_world_size())]
    dist.all_gather(losses, result.loss)
    differs = not torch.equal(first, result.dx) or any(not torch.equal(loss, losses[0]) for loss in losses)
    return {**numbers, "same_bits": not _largest(float(differs))}


def _slowest(outcome: Outcome) -> Outcome:
    """The time of each call on the rank that took longest."""
    laps_ms = _of_all([lap[TOTAL] for lap in outcome.laps_ms])
    return Outcome([{TOTAL: max(laps)} for laps in zip(*laps_ms, strict=True)])


def _largest(number: float) -> float:
    """Over the ranks."""
    return max(_of_all(number))


def _of_all(value: Any) -> list[Any]:
    """What each rank has."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered
