"""Ranks for tests: threads of this process, which is quick, or processes that speak gloo."""

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.multi_threaded_pg import (
    ProcessLocalGroup,
    _install_threaded_pg,
    _uninstall_threaded_pg,
)


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
    isolate = torch._C._distributed_c10d._set_thread_isolation_mode
    results: list[Any] = [None] * count
    errors: dict[int, BaseException] = {}
    _install_threaded_pg()
    isolate(True)
    ProcessLocalGroup.reset()
    store = dist.HashStore()
    barrier = threading.Barrier(count)
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
            barrier.wait(timeout=2 if errors else 60)
        except threading.BrokenBarrierError:
            ProcessLocalGroup.exception_handle(RuntimeError("a rank has failed"))
        dist.destroy_process_group()

    try:
        threads = [threading.Thread(target=rank_thread, args=(rank,), daemon=True) for rank in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
            assert not thread.is_alive(), "a rank hangs"
    finally:
        isolate(False)
        _uninstall_threaded_pg()
    if errors:
        raise RankErrors(errors)
    return results
