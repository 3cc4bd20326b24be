"""The vocabulary divided among processes, with gloo and, where there are GPUs, with NCCL: results, and how they fail.

What is computed, `test_vocab_parallel` shows on threads; here are the communication itself and its failures.
"""

import inspect
import os
import re
import signal
import time
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard
from torch.utils._pytree import tree_map

from divided import joined, mesh_rank_result, part_of, parts, rank_result
from ranks import GPUS, as_processes
from reference import Case, Result, assert_close_to_truth, captured, composed, make_case
from thunder_flce import Options, linear_cross_entropy
from thunder_flce.agreement import CHECK_EVERY_CALL
from thunder_flce.options import STRATEGIES

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu(count=2))]
RANKS = {"cpu": 2, "cuda": GPUS}
# Rows of the vocabulary of each rank, and tokens of their own.
UNEVEN = {2: (200, 131), 3: (200, 100, 31), 4: (200, 100, 0, 31)}
OWN_TOKENS = {2: (20, 76), 3: (20, 40, 36), 4: (20, 40, 0, 36)}
SETTINGS = [
    *({"options": Options(strategy=strategy, chunk_rows=20)} for strategy in STRATEGIES),
    {"outputs": ("argmax", "valid_argmax", "accuracy"), "label_smoothing": 0.1, "z_loss": 1e-3},
    {"reduction": "none", "outputs": ("entropy", "log_prob"), "softcap": 5.0},
]


def _case(device: str, dtype: torch.dtype = torch.float32) -> Case:
    torch.manual_seed(5)
    case = make_case(tokens=96, vocab=331, hidden=32, bias=True, class_weight=True, device=device, dtype=dtype)
    case.target = case.target.short()  # Neither gloo nor NCCL knows int16.
    return case


def _divisions(ranks: int) -> list[dict]:
    """Of the vocabulary, and of the tokens: equal parts, or other numbers for gradients that are averaged."""
    chunks = {"options": Options(chunk_rows=16)}
    return [
        *({"sizes": sizes, "dtype": dtype, **settings}
          for dtype in (torch.float32, torch.bfloat16)
          for sizes in ([331 // ranks + (rank < 331 % ranks) for rank in range(ranks)], (331, *[0] * (ranks - 1)))
          for settings in SETTINGS),
        {"sizes": UNEVEN[ranks], **chunks, "counts": [96 // ranks] * ranks, "how": {"sequence_parallel": True}},
        {"sizes": UNEVEN[ranks], **chunks, "counts": OWN_TOKENS[ranks], "how": {"data_parallel": True}},
        {"placements": ((ranks,), (Shard(0),), (Shard(0),)), **chunks},
    ]  # fmt: skip


def _results(rank: int, device: str) -> list[Result]:
    """This rank's results, on the CPU."""
    results = []
    for settings in _divisions(dist.get_world_size()):
        run = mesh_rank_result if "placements" in settings else rank_result
        result = run(rank, _case(device, settings.pop("dtype", torch.float32)), **settings)
        results.append(Result(**tree_map(torch.Tensor.cpu, vars(result))))
    return results


@pytest.mark.parametrize("device", DEVICES)
def test_results(device):
    ranks = RANKS[device]
    results = as_processes(ranks, partial(_results, device=device), device=device)
    assert all(isinstance(rank_results, list) for rank_results in results), results
    for settings, *rank_results in zip(_divisions(ranks), *results, strict=True):
        case = _case(device, settings.pop("dtype", torch.float32))
        case = Case(*(tensor.detach().cpu().requires_grad_() for tensor in case.operands()),
                    case.target.cpu(), case.class_weight.cpu())  # fmt: skip
        is_whole, counts = "placements" in settings, settings.get("counts")
        settings = {name: settings[name] for name in {*settings} & {*inspect.signature(composed).parameters}}
        for result in rank_results if is_whole else [joined(case, rank_results, counts)]:
            assert_close_to_truth(result, case, tiny=True, **settings)


def _captured(rank: int) -> list[bool]:
    """Of the loss, dX and dW, whether a replayed graph of other hidden states gives the bits of an eager call."""
    case = _case("cuda", torch.bfloat16)
    part = part_of(case, parts(UNEVEN[dist.get_world_size()])[rank])

    def step():
        options = Options(chunk_rows=32, ignored_rows="compute")
        loss = linear_cross_entropy(part.x, part.weight, part.target, vocab_parallel=dist.group.WORLD, options=options)
        return loss, *torch.autograd.grad(loss, (part.x, part.weight))

    graph, results = captured(step)
    with torch.no_grad():
        part.x.mul_(-2)
    graph.replay()
    return [torch.equal(*pair) for pair in zip(results, step(), strict=True)]


@pytest.mark.parametrize("device", DEVICES[1:])
def test_cuda_graphs(device):
    assert as_processes(GPUS, _captured, device=device) == [[True] * 3] * GPUS


# How it fails: with words, and within the group's timeout.


def outcome(run, *, within_s: float) -> str:
    """Returns a call's result or exception as text; asserts that no collective waited for the group's timeout."""
    started = time.monotonic()
    try:
        text = str(run())
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    assert time.monotonic() - started < within_s, "the timeout of the group"
    return text


def _wrong_target(rank: int) -> str:
    """Where nobody waits for the device; afterwards this process has lost it."""
    case = _case("cuda")
    case.target[5] = 331
    part = part_of(case, parts(UNEVEN[dist.get_world_size()])[rank])
    options = Options(ignored_rows="compute")
    try:
        linear_cross_entropy(part.x, part.weight, part.target, vocab_parallel=dist.group.WORLD, options=options)
    finally:
        # A library that meets the error first has words of its own for it.
        torch.cuda.synchronize()
    return "no error"


@pytest.mark.parametrize("device", DEVICES[1:])
def test_a_wrong_target_asserts_on_all_devices(device, capfd):
    texts = as_processes(GPUS, _wrong_target, device=device)
    printed = capfd.readouterr().err
    # NCCL's watchdog may notice it first, and then ends the process with these words.
    assert all("device-side assert" in (printed if text is None else text) for text in texts), (texts, printed)


def _captured_anew(rank: int) -> list[str]:
    """A call that was never made without a graph; then two heads of which the first rank has as many rows."""
    torch.manual_seed(0)
    case, outcomes = make_case(tokens=64, vocab=331, hidden=64, device="cuda"), []
    options = Options(ignored_rows="compute")

    def step(rows):
        part = part_of(case, rows)
        target = case.target.clamp(max=99)
        return linear_cross_entropy(part.x, part.weight, target, vocab_parallel=dist.group.WORLD, options=options)

    def captured(rows):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            step(rows)

    heads = [slice(0, 100) if rank == 0 else slice(100, stop) for stop in (150, 200)]
    outcomes.append(outcome(lambda: captured(heads[0]), within_s=55))
    for head in heads:
        step(head)
    outcomes.append(outcome(lambda: captured(heads[0]), within_s=55))
    return outcomes


@pytest.mark.gpu(count=2)
def test_calls_that_a_graph_cannot_capture():
    results = as_processes(2, _captured_anew, device="cuda")
    for first, _ in results:
        assert "cannot agree on a new call with vocab_parallel while a CUDA graph is captured" in first, results
    assert "cannot agree" in results[0][1] and "cannot agree" not in results[1][1], results


def _call(rank: int, group, **settings) -> str:
    """What becomes of a call, in words."""
    case = _case("cpu")
    part, settings = part_of(case, parts((200, 131))[rank]), {"vocab_parallel": group, **settings}
    return outcome(lambda: linear_cross_entropy(part.x, part.weight, case.target, **settings).item(), within_s=100)


def _failures(rank: int) -> list[str]:
    groups = [dist.new_group(timeout=timedelta(seconds=3)) for _ in range(2)]
    outcomes = [_call(rank, groups[0])]
    os.environ[CHECK_EVERY_CALL] = "1"
    outcomes.append(_call(rank, groups[0], num_items=float(rank)))
    del os.environ[CHECK_EVERY_CALL]
    # A rank raises something of its own, and does not come.
    outcomes.append(_call(rank, groups[0]) if rank == 0 else "raises")
    if rank == 1:
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    return [*outcomes, _call(rank, groups[1])]


def test_failures():
    outcomes, killed = as_processes(2, _failures)
    assert killed is None
    loss, different, alone, left = outcomes
    assert re.fullmatch(r"\d\.\d+", loss)
    assert re.match(r"ValueError: all ranks .* the value of num_items is 0.0 on rank 0 and 1.0 on rank 1", different)
    for message in (alone, left):
        assert re.match(r"(RuntimeError|DistBackendError|DistNetworkError): .*(imed out|onnection)", message, re.DOTALL)
