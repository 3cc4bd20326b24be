"""What the package knows about devices and about what is installed for them."""

import importlib.util
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch

# What TMA, through which fast kernels read and write, asks of addresses and strides, in bytes. It writes as many at
# once, past the end of a row if it must.
ALIGNED_BYTES = 16
# The same in elements of 16 bits: cuBLAS takes its fast path, and row kernels load 16 bytes at a time, only where the
# stride of rows is a multiple of that. Where rows have to be padded, they start on 128-byte lines.
ROW_MULTIPLE = 8
PADDED_ROW_MULTIPLE = 64
# Rows of a tile of the large matmuls.
TILE_ROWS = 128

# The compute capability, its first number, that the choice of cuBLAS's algorithms and the Triton matmul were tried on.
HOPPER = 9


@cache
def triton_available() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def is_hopper(device: torch.device | None) -> bool:
    """Whether a device is a Hopper GPU; for None, the current GPU.

    While a plan is made no GPU need be there. One that is not there counts as Hopper.
    """
    if device is None:
        if not torch.cuda.is_available():
            return True
        device = torch.device("cuda")
    if device.type != "cuda":
        return False
    return _capability(torch.cuda.current_device() if device.index is None else device.index) == HOPPER


@cache
def _capability(index: int) -> int:
    return torch.cuda.get_device_capability(index)[0]


@cache
def multiprocessors(device: torch.device) -> int:
    """How many a CUDA device has."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Makes a CUDA device the current one, where it is not: to ask takes the host less time than to set it."""
    is_current = device.type != "cuda" or device.index == torch.cuda.current_device()
    return nullcontext() if is_current else torch.cuda.device(device)


class DeviceMemory(NamedTuple):
    """A device's memory in bytes, when a plan is made."""

    total: int
    free: int
    """What this process could still allocate"""

    @classmethod
    def of(cls, device: torch.device) -> "DeviceMemory | None":
        """The memory of a CUDA device; None for any other device, and without a GPU."""
        if device.type != "cuda" or not torch.cuda.is_available():
            return None
        free, total = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return cls(total, free + cached)
