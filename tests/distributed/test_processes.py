"""The vocabulary divided among processes, with gloo and, where there are GPUs, with NCCL: results, and how they fail.

What is computed, `test_vocab_parallel` shows on threads; here are the communication itself and its failures.
"""

import os
import re
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from divided import joined, part_of, parts
from ranks import GPUS, as_processes
from reference import Case, assert_close_to_truth, error, make_case, ours, truth
from thunder_flce import Options, VocabParallel, linear_cross_entropy
from thunder_flce.options import STRATEGIES
from thunder_flce.vocab_parallel import CHECK_EVERY_CALL

on_gpus = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")]
DEVICES = ["cpu", pytest.param("cuda", marks=on_gpus)]
RANKS = {"cpu": 2, "cuda": GPUS}
# Rows of the vocabulary of each rank, and tokens of their own.
UNEVEN = {2: (200, 131), 3: (200, 100, 31), 4: (200, 100, 0, 31)}
OWN_TOKENS = {2: (20, 76), 3: (20, 40, 36), 4: (20, 40, 0, 36)}
SETTINGS = [
    *({"options": Options(strategy=strategy, chunk_rows=20)} for strategy in STRATEGIES),
    {"outputs": ("argmax", "valid_argmax", "accuracy"), "label_smoothing": 0.1, "z_loss": 1e-3},
    {"reduction": "none", "outputs": ("entropy", "log_prob"), "softcap": 5.0},
]


def _case(device: str, dtype: torch.dtype) -> Case:
    torch.manual_seed(5)
    return make_case(tokens=96, vocab=331, hidden=32, bias=True, class_weight=True, device=device, dtype=dtype)


def _results(rank: int) -> list:
    """For both divisions and all settings, this rank's results, on the CPU."""
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    found, ranks = [], dist.get_world_size()
    equal = [331 // ranks + (each < 331 % ranks) for each in range(ranks)]
    for dtype in (torch.float32, torch.bfloat16):
        case = _case(device, dtype)
        for sizes in (equal, (331, *[0] * (ranks - 1))):
            for settings in SETTINGS:
                part = part_of(case, parts(sizes)[rank])
                result = ours(part, vocab_parallel=dist.group.WORLD, **settings)
                for name in ("loss", "gradients", "outputs"):
                    value = getattr(result, name)
                    moved = value.cpu() if torch.is_tensor(value) else tuple(each.detach().cpu() for each in value)
                    setattr(result, name, moved)
                found.append(result)
    return found


def _divided_tokens(rank: int) -> list[tuple]:
    """Of equal parts of the tokens, and of other numbers for gradients that are averaged."""
    device, ranks = "cuda" if dist.get_backend() == "nccl" else "cpu", dist.get_world_size()
    case, found = _case(device, torch.float32), []
    case.target[:32:3] = -100
    part = part_of(case, parts(UNEVEN[ranks])[rank])
    for how, tokens in (("sequence_parallel", [96 // ranks] * ranks), ("data_parallel", OWN_TOKENS[ranks])):
        mine, parallel = parts(tokens)[rank], VocabParallel(group=dist.group.WORLD, **{how: True})
        x, options = case.x.detach()[mine].clone().requires_grad_(), Options(chunk_rows=16)
        loss = linear_cross_entropy(x, part.weight, case.target[mine], vocab_parallel=parallel, options=options)
        dx, dw = torch.autograd.grad(loss, (x, part.weight))
        dx = dx / ranks if how == "data_parallel" else dx
        found.append(tuple(each.detach().cpu() for each in (loss, dx, dw)))
    return found


def _dtensors(rank: int) -> tuple:
    """The same by placements; each gradient of the whole."""
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    case, mesh = _case(device, torch.float32), init_device_mesh(device, (dist.get_world_size(),))
    case.target[:32:3] = -100
    x, weight = (distribute_tensor(each.detach(), mesh, [Shard(0)]).requires_grad_() for each in (case.x, case.weight))
    loss = linear_cross_entropy(x, weight, case.target, options=Options(chunk_rows=16))
    loss.backward()
    return tuple(each.detach().cpu() for each in (loss, x.grad.full_tensor(), weight.grad.full_tensor()))


def _everything(rank: int) -> tuple:
    return _results(rank), *_divided_tokens(rank), _dtensors(rank)


@pytest.mark.parametrize("device", DEVICES)
def test_results(device):
    found = as_processes(RANKS[device], _everything, device=device)
    assert all(isinstance(each, tuple) for each in found), found
    of_settings, *of_divided_tokens, of_dtensors = zip(*found, strict=True)
    results = iter(zip(*of_settings, strict=True))
    for dtype in (torch.float32, torch.bfloat16):
        case = _case(device, dtype)
        case = Case(*(each.detach().cpu().requires_grad_() for each in (case.x, case.weight, case.bias)),
                    case.target.cpu(), case.class_weight.cpu())  # fmt: skip
        for _ in range(2):
            for settings in SETTINGS:
                settings = {name: value for name, value in settings.items() if name != "options"}
                assert_close_to_truth(joined(case, next(results)), case, tiny=True, **settings)
    case = _case(device, torch.float32)
    case.target[:32:3] = -100
    exact = truth(Case(case.x, case.weight, None, case.target))
    for results in of_divided_tokens:
        losses, inputs, weights = zip(*results, strict=True)
        assert all(torch.equal(loss, losses[0]) for loss in losses) and error(losses[0], exact.loss.cpu()) < 1e-6
        assert error(torch.cat(inputs), exact.gradients[0].cpu()) < 1e-5
        assert error(torch.cat(weights), exact.gradients[1].cpu()) < 1e-5
    for loss, *gradients in of_dtensors:
        assert error(loss, exact.loss.cpu()) < 1e-6
        for gradient, right in zip(gradients, exact.gradients, strict=True):
            assert error(gradient, right.cpu()) < 1e-5


def _captured(rank: int) -> list[bool]:
    """Of the loss, dX and dW, whether a replayed graph of other hidden states gives the bits of an eager call."""
    case = _case("cuda", torch.bfloat16)
    part = part_of(case, parts(UNEVEN[dist.get_world_size()])[rank])

    def step():
        options = Options(chunk_rows=32, ignored_rows="compute")
        loss = linear_cross_entropy(part.x, part.weight, part.target, vocab_parallel=dist.group.WORLD, options=options)
        return loss, *torch.autograd.grad(loss, (part.x, part.weight))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        part.x.mul_(-2)
    graph.replay()
    return [torch.equal(*pair) for pair in zip(captured, step(), strict=True)]


@pytest.mark.parametrize("device", DEVICES[1:])
def test_cuda_graphs(device):
    assert as_processes(GPUS, _captured, device=device) == [[True] * 3] * GPUS


# How it fails: with words, and within the group's timeout.


def _wrong_target(rank: int) -> str:
    """Where nobody waits for the device; afterwards this process has lost it."""
    case = _case("cuda", torch.float32)
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
    found = as_processes(GPUS, _wrong_target, device=device)
    said = capfd.readouterr().err
    # NCCL's watchdog may notice it first, and then ends the process with these words.
    assert all("device-side assert" in (said if each is None else each) for each in found), (found, said)


def _call(rank: int, group, **settings) -> str:
    """What becomes of a call, in words."""
    case = _case("cpu", torch.float32)
    part = part_of(case, parts((200, 131))[rank])
    started = time.monotonic()
    try:
        loss = linear_cross_entropy(part.x, part.weight, case.target, vocab_parallel=group, **settings)
    except Exception as failure:
        assert time.monotonic() - started < 100, "the timeout of the default group"
        return f"{type(failure).__name__}: {failure}"
    return f"{loss:.4f}"


def _failures(rank: int) -> list[str]:
    groups = [dist.new_group(timeout=timedelta(seconds=3)) for _ in range(2)]
    found = [_call(rank, groups[0]), _call(rank, groups[0], options=Options(chunk_rows=7 + rank))]
    # Each kind of call is known to both, but now they differ in which one they make.
    for options in (Options(chunk_rows=16), Options(chunk_rows=64)):
        _call(rank, groups[0], options=options)
    os.environ[CHECK_EVERY_CALL] = "1"
    found.append(_call(rank, groups[0], options=Options(chunk_rows=(16, 64)[rank])))
    found.append(_call(rank, groups[0], num_items=float(rank)))
    del os.environ[CHECK_EVERY_CALL]
    # A rank raises something of its own, and does not come.
    found.append(_call(rank, groups[0]) if rank == 0 else "raises")
    if rank == 1:
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    return [*found, _call(rank, groups[1])]


def test_failures():
    (found, killed) = as_processes(2, _failures)
    assert killed is None
    right, differs, checked, values, alone, left = found
    assert re.fullmatch(r"\d\.\d{4}", right)
    assert re.match(r"ValueError: all ranks .* options is Options.*chunk_rows=7.* on rank 0 and Options", differs)
    assert re.match(r"ValueError: all ranks .*chunk_rows=16.* on rank 0 and .*chunk_rows=64.* on rank 1", checked)
    assert re.match(r"ValueError: all ranks .* the value of num_items is 0.0 on rank 0 and 1.0 on rank 1", values)
    for message in (alone, left):
        assert re.match(r"(RuntimeError|DistBackendError|DistNetworkError): .*(imed out|onnection)", message, re.DOTALL)
