"""Ranks that torchrun has started, each of which runs the same command."""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def ranks() -> int | None:
    """How many torchrun has started; None where this process is not one of them."""
    return int(os.environ["WORLD_SIZE"]) if {"RANK", "WORLD_SIZE"} <= os.environ.keys() else None


def join(device: str, timeout: timedelta) -> None:
    """Makes the default process group, with a GPU for each rank or on the CPU, and takes the variables away.

    nvFuser, which is imported with thunder, would build a communicator of its own from them.
    """
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", os.environ["RANK"])))
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=timeout)
    for name in _VARIABLES:
        os.environ.pop(name, None)


def has_joined() -> bool:
    """Whether this process is a rank of a group that `join` has made."""
    return dist.is_available() and dist.is_initialized()


def end() -> None:
    """Ends the process without what it does at its end.

    On a busy CPU, a rank was now and then aborted there, for a thread that was still running ("terminate called without
    an active exception").
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
