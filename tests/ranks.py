"""Ranks for tests: threads of this process, which are fast, or processes that communicate by gloo or NCCL."""

import os
import pickle
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from typing import Any

import pytest
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

# The fork server imports thunder once; each forked process would need seconds for the import.
torch.multiprocessing.set_forkserver_preload(["thunder_flce", "thunder"])
# Number of ranks in tests on GPUs: that of the GPUs, at most 4.
GPUS = min(torch.cuda.device_count(), 4)


class RankErrors(Exception):
    """Exceptions of the ranks that raised one, by rank."""

    def __init__(self, errors: dict[int, BaseException]):
        super().__init__(errors)
        self.errors = errors


def as_threads(count: int, run: Callable[[int], Any]) -> list[Any]:
    """Runs each rank in a thread of one default process group; returns the results of `run`.

    Raises:
        RankErrors: if some ranks raise. The other ranks are ended.
    """
    with FakeTensorMode():
        pass  # If a thread is the first to enter this mode, torch 2.10 crashes in the next thread.
    isolate = torch._C._distributed_c10d._set_thread_isolation_mode
    results: list[Any] = [None] * count
    errors: dict[int, BaseException] = {}
    # Without a GPU, a process's first fake tensor creates this guard, which would end with a rank's thread.
    if hasattr(torch._C, "_ensureCUDADeviceGuardSet"):  # Not in torch 2.8
        torch._C._ensureCUDADeviceGuardSet()
    _install_threaded_pg()
    isolate(True)
    ProcessLocalGroup.reset()
    store = dist.HashStore()
    barrier = threading.Barrier(count)
    # One flag for all threads says whether a dispatch mode, or thunder's autocast, is active. If threads change it in
    # turns, it may stay set: then Dynamo silently compiles nothing any more, and thunder uses the wrong dtype.
    modules = [module for module in (_python_dispatch, sys.modules.get("thunder.transforms.autocast")) if module]
    flags = [{name: flag for name, flag in vars(module).items() if isinstance(flag, bool)} for module in modules]
    # Each thread has its own grad mode and autocast.
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
        # Ranks may raise errors of their own before they are ended.
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
        for module, module_flags in zip(modules, flags, strict=True):
            vars(module).update(module_flags)
    if errors:
        raise RankErrors(errors)
    return results


def errors_of(count: int, run: Callable[[int], Any]) -> list[BaseException]:
    """Returns the exceptions of all ranks; asserts that each rank raised one."""
    with pytest.raises(RankErrors) as raised:
        as_threads(count, run)
    assert len(raised.value.errors) == count, raised.value.errors
    return [raised.value.errors[rank] for rank in range(count)]


def as_processes(count: int, run: Callable[[int], Any], *, device: str = "cpu", timeout_s: int = 300) -> list[Any]:
    """Runs each rank in a process; returns the results of `run`, a module's function.

    The result is a traceback as text where it raised an exception, and None for a process that died. The processes wait
    for the next function, unless one has failed. A function must leave their state unchanged.
    """
    processes, pipes = _started(count, device)
    has_failed, answers, deadline = True, [], time.monotonic() + timeout_s
    try:
        for pipe in pipes:
            pipe.send(run)
        for rank, pipe in enumerate(pipes):
            assert pipe.poll(max(deadline - time.monotonic(), 0)), f"rank {rank} hangs"
            try:
                answers.append(pickle.loads(pipe.recv_bytes()))
            except (EOFError, ConnectionResetError):
                answers.append((None, True))
        results, failures = zip(*answers, strict=True)
        has_failed = any(failures)
        return [*results]
    finally:
        if has_failed or device == "cuda":
            _started.cache_clear()
            for process in processes:
                process.kill()


@cache
def _started(count: int, device: str) -> tuple[list, list]:
    """Starts the processes of one process group; returns them, and pipes to them."""
    # CUDA does not work after a fork.
    context = torch.multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
    store, processes, pipes = f"file://{tempfile.mkdtemp()}/store", [], []
    for rank in range(count):
        pipe, rank_pipe = context.Pipe()
        processes.append(context.Process(target=_process, args=(rank, count, device, store, rank_pipe), daemon=True))
        pipes.append(pipe)
        processes[-1].start()
        rank_pipe.close()  # The pipe then ends with the process.
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
        except Exception:
            result, has_failed = traceback.format_exc(), True
        pipe.send_bytes(pickle.dumps((result, has_failed)))
        if has_failed:
            os._exit(1)  # An orderly end may hang on other ranks or on the device.
