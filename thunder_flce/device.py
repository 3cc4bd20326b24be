"""What the package knows about devices and about what is installed for them."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

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

# The compute capability, its first number, of the GPUs on which the choice among cuBLAS's algorithms was measured.
HOPPER = 9
# That of the first GPUs with instructions for bfloat16.
BFLOAT16_CAPABILITY = (8, 0)


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Makes a CUDA device the current one, where it is not: to ask takes the host less time than to set it."""
    is_current = device.type != "cuda" or device.index == torch.cuda.current_device()
    return nullcontext() if is_current else torch.cuda.device(device)


# What devices reach for long, in operations a second, in 16 bits, and in bytes a second, read and written, by words of
# the name that the driver reports. Only the first two are measured, the H200's by the time of the three matmuls, the
# H100's by `bench --rates`, which found what the clocks give, to 1%: 6·T·H·V operations over the time of the matmuls,
# and what an in-place pass over logits reaches. The others are estimates, for where PyTorch does not tell the clocks.
KNOWN_RATES = {
    "H200": (680e12, 4.1e12),
    "H100 80GB HBM3": (680e12, 3.02e12),
    "H100": (600e12, 2.9e12),
    "A100": (250e12, 1.4e12),
    "L40S": (300e12, 0.8e12),
    "B200": (1500e12, 7e12),
    "RTX 5090": (200e12, 1.6e12),
    "RTX 4090": (150e12, 0.9e12),
    "RTX 3090": (65e12, 0.85e12),
    "GB10": (90e12, 0.24e12),
    "MI300X": (600e12, 4e12),
}
_MEASURED = ("H200", "H100 80GB HBM3")
_H200_MULTIPROCESSORS = 132
# Operations in 16 bits that a multiprocessor reaches for long in a cycle of the highest clock, by compute capability:
# 0.65 to 0.8 of the data sheets'. GeForce cards have half as many units where they sum in float32, which reach more.
_OPERATIONS_A_CYCLE = {
    (8, 0): 1640, (8, 6): 820, (8, 9): 820, (9, 0): 2600, (10, 0): 5300, (10, 3): 5300, (12, 0): 820, (12, 1): 820,
}  # fmt: skip
_GEFORCE_PART = 0.6
# A thread of a CPU, likewise an estimate.
_THREAD_RATES = 50e9, 5e9


@dataclass(frozen=True)
class Device:
    """What plans and kernels ask of a device: a plain value, so that both can be made for one that is not there."""

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
    warp_size: int = 32
    """Threads that run in step"""
    resident_threads: int = 2048
    """That a multiprocessor has at a time, at most"""

    @property
    def is_nvidia(self) -> bool:
        """Whether NVIDIA's libraries are there."""
        return self.kind == "cuda" and not self.is_hip

    @property
    def is_hopper(self) -> bool:
        """Whether this is a Hopper GPU; AMD's MI300 has the capability 9.4."""
        return self.is_nvidia and self.capability is not None and self.capability[0] == HOPPER

    def multiplies_into_float32(self, dtype: torch.dtype) -> bool:
        """Whether PyTorch multiplies operands of a dtype of 16 bits into float32.

        Not on a CPU, nor in all versions for ROCm, nor in bfloat16 on GPUs that have no instructions for it.
        """
        is_new = dtype is not torch.bfloat16 or (self.capability or BFLOAT16_CAPABILITY) >= BFLOAT16_CAPABILITY
        return self.is_nvidia and is_new

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
        matmul, bandwidth = _THREAD_RATES
        return Device(kind, threads, threads * matmul, threads * bandwidth)
    return Device(kind, 1, *KNOWN_RATES["RTX 3090"])


@cache
def _cuda(index: int) -> Device:
    return described(torch.cuda.get_device_properties(index)) if torch.cuda.is_available() else ABSENT_DEVICE


def described(properties: Any) -> Device:
    """The device that `torch.cuda.get_device_properties` describes."""
    return Device(
        "cuda", properties.multi_processor_count, *_rates(properties), capability=(properties.major, properties.minor),
        is_hip=bool(torch.version.hip), memory=properties.total_memory, warp_size=properties.warp_size,
        resident_threads=properties.max_threads_per_multi_processor,
    )  # fmt: skip


def _rates(properties: Any) -> tuple[float, float]:
    """Those measured, or else by the clocks, the name, or the number of multiprocessors in the ratios of an H200."""
    known = next((name for name in KNOWN_RATES if name in properties.name), "")
    by_name, of_h200, count = KNOWN_RATES.get(known), KNOWN_RATES["H200"], properties.multi_processor_count
    if by_name is not None and known in _MEASURED:
        return by_name
    # In kHz and bits. Twice a clock, and nine tenths of that are reached; AMD's memory is faster than its clock says.
    names = "clock_rate", "memory_clock_rate", "memory_bus_width"
    clock, memory_clock, width = (getattr(properties, name, 0) for name in names)
    a_cycle: float = _OPERATIONS_A_CYCLE.get((properties.major, properties.minor), 0)
    a_cycle *= _GEFORCE_PART if "GeForce" in properties.name else 1.0
    rates = count * clock * 1e3 * a_cycle, 0.9 * 2 * memory_clock * 1e3 * width / 8
    if all(rates) and not torch.version.hip:
        return rates
    part = count / _H200_MULTIPROCESSORS
    return by_name or (part * of_h200[0], part * of_h200[1])
