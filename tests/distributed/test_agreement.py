"""What ranks agree on: plans, heads of which one has as many rows as before, and nothing new in a CUDA graph."""

import threading
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from divided import part_of
from ranks import as_processes, as_threads, errors_of, outcome
from reference import make_case
from test_plan import DEVICES, call, shard_of
from thunder_flce import Options, VocabParallel, linear_cross_entropy
from thunder_flce.device import Device
from thunder_flce.engine.choose import choose
from thunder_flce.operation.call import named_tensors
from thunder_flce.operation.loss import Loss
from thunder_flce.vocab_parallel import agreement_on


def _two_heads(rank: int) -> list[torch.Tensor]:
    """Of one column and of two: the first rank has one of each."""
    x, target = torch.ones(6, 4), torch.zeros(6, dtype=torch.long)
    one, two = torch.ones(1 - rank, 4, requires_grad=True), torch.ones(1, 4, requires_grad=True)
    losses = [linear_cross_entropy(x, each, target, vocab_parallel=dist.group.WORLD) for each in (one, two, one, two)]
    sum(losses).backward()
    return [loss.detach() for loss in losses]


@pytest.mark.parametrize("run", [as_threads, as_processes], ids=["threads", "processes"])
def test_heads_of_which_a_rank_has_as_many_rows(run):
    for losses in run(2, _two_heads):
        torch.testing.assert_close(torch.stack(losses).exp(), torch.tensor([1.0, 2.0, 1.0, 2.0]))


def test_a_default_device():
    """What ranks tell each other is not made there: not of pinned memory on a GPU, which there is not."""

    def run(rank):
        x, weight, target = torch.ones(6, 4), torch.ones(1, 4), torch.zeros(6, dtype=torch.long)
        with torch.device("meta"):
            return linear_cross_entropy(x, weight, target, vocab_parallel=dist.group.WORLD)

    for loss in as_threads(2, run):
        torch.testing.assert_close(loss.exp(), torch.tensor(2.0))


def test_a_program_on_one_rank_alone_is_an_error_where_its_backward_would_wait():
    def run(rank):
        x, weight = (torch.zeros(each, 8, requires_grad=True) for each in (3, 5))
        tensors = {"input": x, "linear_weight": weight, "target": torch.zeros(3).long()}
        how = {"loss": Loss(), "options": Options(), "needs_grad": ("input", "linear_weight") if rank else None}
        return agreement_on(VocabParallel(group=dist.group.WORLD), tensors, **how)()

    for found in errors_of(2, run):
        assert "whether a program computes gradients is False on rank 0 and True on rank 1" in str(found)


@pytest.mark.parametrize("others", [("H100", "L40S"), ("H200", "A100"), ("A100", "3090"), ("H200", "H200")], ids=str)
def test_ranks_with_different_gpus_make_one_plan(others, monkeypatch):
    """Or they would run another number of chunks, and wait for each other. Products are tuned if all are Hopper's."""
    devices, rank_of = [DEVICES[name] for name in others], threading.local()
    monkeypatch.setattr(Device, "of", lambda device: devices[rank_of.rank])

    def run(rank):
        rank_of.rank = rank
        arguments = {"input": torch.zeros(3, 8), "linear_weight": torch.zeros(5, 8), "target": torch.zeros(3).long()}
        parallel = VocabParallel(group=dist.group.WORLD)
        tensors, others = named_tensors(arguments), {"loss": Loss(), "options": Options()}
        found, again = (agreement_on(parallel, tensors, **others)() for _ in range(2))
        assert found == again
        region = call(shard=replace(shard_of(2), rank=rank))
        return found.device, [choose(region, Options(tune_products=tune), found.device) for tune in (None, True)]

    (first, plans), (second, others_plans) = as_threads(2, run)
    assert plans == others_plans and first.memory == min(device.memory for device in devices)
    assert first.is_hopper == second.is_hopper == all(device.is_hopper for device in devices)
    # What each would plan on its own.
    alone = {choose(call(shard=shard_of(2)), Options(), device) for device in devices}
    assert (len(alone) > 1) == (others != ("H200", "H200"))


def _captured_anew(rank: int) -> list[str]:
    """A call that was never made without a graph; then two heads of which the first rank has as many rows."""
    torch.manual_seed(0)
    case, found = make_case(tokens=64, vocab=331, hidden=64, device="cuda"), []
    options = Options(ignored_rows="compute")

    def step(rows):
        part = part_of(case, rows)
        target = case.target.clamp(max=99)
        return linear_cross_entropy(part.x, part.weight, target, vocab_parallel=dist.group.WORLD, options=options)

    def captured(rows):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            step(rows)

    heads = [slice(0, 100) if rank == 0 else slice(100, stop) for stop in (150, 200)]
    found.append(outcome(lambda: captured(heads[0]), within_s=55))
    for head in heads:
        step(head)
    found.append(outcome(lambda: captured(heads[0]), within_s=55))
    return found


@pytest.mark.gpu(count=2)
def test_calls_that_a_graph_cannot_capture():
    results = as_processes(2, _captured_anew, device="cuda")
    for found in results:
        assert "cannot agree on a new call of vocab_parallel while a CUDA graph is captured" in found[0], found
    assert "cannot agree" in results[0][1] and "cannot agree" not in results[1][1], results
