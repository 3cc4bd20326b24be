"""What the package knows about devices and about what is installed for them."""

import importlib.util
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
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
    # AMD's MI300 has the capability 9.4.
    if torch.version.hip:
        return False
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


class Rates(NamedTuple):
    """What a device reaches for long."""

    matmul: float
    """Operations a second, in 16 bits"""
    bandwidth: float
    """Bytes a second, read and written"""


# By a word of the name that the driver reports. Only the first was measured: matmul is 6·T·H·V over the time of "three
# matmuls" in traces/h200/regions.jsonl, bandwidth what an in-place pass over logits reaches. The others are estimates.
KNOWN_RATES = {
    "H200": Rates(680e12, 4.1e12),
    "H100": Rates(600e12, 2.9e12),
    "A100": Rates(250e12, 1.4e12),
    "L40S": Rates(300e12, 0.8e12),
    "B200": Rates(1500e12, 7e12),
    "RTX 5090": Rates(200e12, 1.6e12),
    "RTX 4090": Rates(150e12, 0.9e12),
    "RTX 3090": Rates(65e12, 0.85e12),
    "GB10": Rates(90e12, 0.24e12),
    "MI300X": Rates(600e12, 4e12),
}
_H200_MULTIPROCESSORS = 132
# A thread of a CPU, likewise an estimate.
_THREAD_RATES = Rates(50e9, 5e9)


@dataclass(frozen=True)
class Device:
    """What a plan asks of a device; a plain value, so that plans can be made for devices that are not there."""

    kind: str
    """As `torch.device.type`: "cuda", also for AMD's, "cpu" and so on"""
    multiprocessors: int
    """Of a CPU, the threads that PyTorch uses"""
    matmul_rate: float
    """Operations a second, in 16 bits"""
    bandwidth: float
    """Bytes a second"""
    capability: tuple[int, int] | None = None
    is_hip: bool = False
    memory: int | None = None
    """Bytes in total; None where that is unknown, or belongs to everybody, as on a CPU"""

    @property
    def is_hopper(self) -> bool:
        """Whether this is a Hopper GPU; AMD's MI300 has the capability 9.4."""
        return self.capability is not None and self.capability[0] == HOPPER and not self.is_hip

    @classmethod
    def of(cls, device: torch.device) -> "Device":
        """What is known of a device. A "cuda" that is not there counts as an H200 of unknown memory."""
        if device.type != "cuda":
            return _other(device.type, torch.get_num_threads())
        if device.index is not None:
            return _cuda(device.index)
        return _cuda(torch.cuda.current_device()) if torch.cuda.is_available() else ABSENT_DEVICE


ABSENT_DEVICE = Device("cuda", _H200_MULTIPROCESSORS, *KNOWN_RATES["H200"], capability=(HOPPER, 0))


@cache
def _other(kind: str, threads: int) -> Device:
    if kind == "cpu":
        return Device(kind, threads, threads * _THREAD_RATES.matmul, threads * _THREAD_RATES.bandwidth)
    return Device(kind, 1, *KNOWN_RATES["RTX 3090"])


@cache
def _cuda(index: int) -> Device:
    if not torch.cuda.is_available():
        return ABSENT_DEVICE
    properties = torch.cuda.get_device_properties(index)
    rates = next((rates for name, rates in KNOWN_RATES.items() if name in properties.name), None)
    return Device(
        "cuda", properties.multi_processor_count, *(rates or _estimated_rates(properties)),
        capability=(properties.major, properties.minor), is_hip=bool(torch.version.hip), memory=properties.total_memory,
    )  # fmt: skip


def _estimated_rates(properties: Any) -> Rates:
    """From the clock, in kHz, and the width, in bits, of its memory, or else by its size, in the ratios of an H200."""
    of_h200 = KNOWN_RATES["H200"]
    clock, width = (getattr(properties, name, 0) for name in ("memory_clock_rate", "memory_bus_width"))
    # Twice a clock, and nine tenths of that are reached.
    bandwidth = 0.9 * 2 * clock * 1e3 * width / 8
    bandwidth = bandwidth or of_h200.bandwidth * properties.multi_processor_count / _H200_MULTIPROCESSORS
    return Rates(bandwidth * of_h200.matmul / of_h200.bandwidth, bandwidth)


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
