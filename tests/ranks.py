"""Ranks for tests: threads of this process, which is quick, or processes that speak gloo or NCCL."""

import os
import pickle
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.multi_threaded_pg import (
    ProcessLocalGroup,
    _install_threaded_pg,
    _uninstall_threaded_pg,
)
from torch.utils import _python_dispatch

import quick  # noqa: F401

# The process that makes others has imported thunder: each would take seconds for that.
torch.multiprocessing.set_forkserver_preload(["thunder_flce", "thunder"])
# How many ranks tests on GPUs have: as many as there are, from 2 to 4.
GPUS = min(torch.cuda.device_count(), 4)


class RankErrors(Exception):
    """The exceptions of the ranks that raised one, by rank."""

    def __init__(self, errors: dict[int, BaseException]):
        super().__init__(errors)
        self.errors = errors


def as_threads(count: int, run: Callable[[int], Any]) -> list[Any]:
    """What `run` returns for each rank, a thread each; the default process group has all of them.

    Raises:
        RankErrors: where some ranks raise. The others are ended.
    """
    with FakeTensorMode():
        pass  # Where a thread is the first to enter it, torch 2.10 crashes in the next one.
    isolate = torch._C._distributed_c10d._set_thread_isolation_mode
    results: list[Any] = [None] * count
    errors: dict[int, BaseException] = {}
    # Without a GPU, the first fake tensors of a process make this, and it would end with the thread of a rank.
    if hasattr(torch._C, "_ensureCUDADeviceGuardSet"):  # Not in torch 2.8
        torch._C._ensureCUDADeviceGuardSet()
    _install_threaded_pg()
    isolate(True)
    ProcessLocalGroup.reset()
    store = dist.HashStore()
    barrier = threading.Barrier(count)
    # Whether there is a mode, or thunder's autocast, is one flag for all threads, which two that change it in turns
    # leave changed: then Dynamo would compile nothing any more, and thunder in the wrong dtype, in silence.
    autocast = sys.modules.get("thunder.transforms.autocast")
    modules = [each for each in (_python_dispatch, autocast) if each is not None]
    flags = [{name: flag for name, flag in vars(each).items() if isinstance(flag, bool)} for each in modules]
    # Grad mode and autocast are a thread's own.
    is_grad_enabled = torch.is_grad_enabled()

    def rank_thread(rank: int) -> None:
        dist.init_process_group(backend="threaded", rank=rank, world_size=count, store=store)
        try:
            with torch.set_grad_enabled(is_grad_enabled):
                results[rank] = run(rank)
        except SystemExit:
            pass  # Another rank has raised.
        except BaseException as error:
            errors[rank] = error
        # Each rank may raise for itself before the others are ended.
        try:
            barrier.wait(timeout=2 if errors else 600)
        except threading.BrokenBarrierError:
            ProcessLocalGroup.exception_handle(RuntimeError("a rank has failed"))
        dist.destroy_process_group()

    try:
        threads = [threading.Thread(target=rank_thread, args=(rank,), daemon=True) for rank in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=600)
            assert not thread.is_alive(), "a rank hangs"
    finally:
        isolate(False)
        _uninstall_threaded_pg()
        for module, of_module in zip(modules, flags, strict=True):
            vars(module).update(of_module)
    if errors:
        raise RankErrors(errors)
    return results


def errors_of(count: int, run: Callable[[int], Any]) -> list[BaseException]:
    """The exceptions of ranks that all raise one."""
    try:
        found = as_threads(count, run)
    except RankErrors as raised:
        assert len(raised.errors) == count, raised.errors
        return [raised.errors[rank] for rank in range(count)]
    raise AssertionError(f"no rank raised: {found}")


def outcome(run: Callable[[], Any], *, within_s: float) -> str:
    """What becomes of a call, in words, and that it did not take the time of a group that waits."""
    started = time.monotonic()
    try:
        found = str(run())
    except Exception as failure:
        found = f"{type(failure).__name__}: {failure}"
    assert time.monotonic() - started < within_s, "the timeout of the group"
    return found


def as_processes(count: int, run: Callable[[int], Any], *, device: str = "cpu", timeout_s: int = 300) -> list[Any]:
    """What a function of a module returns for each rank, a process each; None for one that has died.

    The processes wait for the next function, unless one has failed. A function leaves them as they were.

    Args:
        count: how many.
        run: takes the rank. Of an exception, the words are its result.
        device: "cpu", or "cuda": a GPU for each rank.
        timeout_s: for all of it.
    """
    processes, pipes = _started(count, device)
    has_failed, found, deadline = True, [], time.monotonic() + timeout_s
    try:
        for pipe in pipes:
            pipe.send(run)
        for rank, pipe in enumerate(pipes):
            assert pipe.poll(max(deadline - time.monotonic(), 0)), f"rank {rank} hangs"
            try:
                found.append(pickle.loads(pipe.recv_bytes()))
            except (EOFError, ConnectionResetError):
                found.append((None, True))
        results, failures = zip(*found, strict=True)
        has_failed = any(failures)
        return [*results]
    finally:
        if has_failed or device == "cuda":
            _started.cache_clear()
            for process in processes:
                process.kill()


@cache
def _started(count: int, device: str) -> tuple[list, list]:
    """Processes of one process group, and pipes to them."""
    # CUDA does not work after a fork.
    context = torch.multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
    store, processes, pipes = f"file://{tempfile.mkdtemp()}/store", [], []
    for rank in range(count):
        pipe, of_rank = context.Pipe()
        processes.append(context.Process(target=_process, args=(rank, count, device, store, of_rank), daemon=True))
        pipes.append(pipe)
        processes[-1].start()
        of_rank.close()  # So that its end is that of the pipe.
    return processes, pipes


def _process(rank, count, device, store, pipe) -> None:
    torch.set_num_threads(1)
    backend = "gloo"
    if device == "cuda":
        torch.cuda.set_device(rank)
        backend = "nccl"
    timeout = timedelta(seconds=900)
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=count, timeout=timeout)
    while True:
        try:
            run = pipe.recv()
        except EOFError:  # The tests have ended.
            os._exit(0)
        torch._dynamo.reset()
        torch.manual_seed(1234)
        try:
            result, has_failed = run(rank), False
        except Exception as error:
            result, has_failed = f"{type(error).__name__}: {error}", True
        pipe.send_bytes(pickle.dumps((result, has_failed)))
        if has_failed:
            os._exit(1)  # The others may not come to an orderly end, nor may the device be there for one.
