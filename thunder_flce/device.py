"""Properties of devices that plans and kernels depend on, and the throughput of known GPUs."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

# Alignment of addresses and strides in bytes that TMA requires, through which fast kernels read and write. TMA writes
# this many bytes at once, past the end of a row if need be.
ALIGNED_BYTES = 16
# The same in 16-bit elements: only if the row stride is a multiple of this does cuBLAS take its fast path and do row
# kernels load 16 bytes at a time. Rows that have to be padded start on 128-byte lines.
ROW_MULTIPLE = 8
PADDED_ROW_MULTIPLE = 64
# Rows per tile of the large matmuls.
TILE_ROWS = 128

# Major compute capability of the GPUs on which the choice among cuBLAS's algorithms was measured.
HOPPER = 9
# Compute capability of the first GPUs with instructions for bfloat16.
BFLOAT16_CAPABILITY = (8, 0)


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Makes a CUDA device the current one, unless it is: checking takes the host less time than setting it."""
    is_current = device.type != "cuda" or device.index == torch.cuda.current_device()
    return nullcontext() if is_current else torch.cuda.device(device)


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured on a device, so that the host must not wait for it."""
    if device.type != "cuda":
        return False
    # PyTorch asks the current device's stream.
    with on_device(device):
        return torch.cuda.is_current_stream_capturing()


# Sustained rates of devices, by a part of the name that the driver reports: 16-bit operations per second, and bytes
# read and written per second. Only the first two are measured: 6·T·H·V operations over the time of the three matmuls,
# and the bandwidth of an in-place pass over logits. The H100's are from `bench --rates`, and those that its clocks give
# agree to 1%. The others are estimates, used if PyTorch does not report the clocks.
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
# Sustained 16-bit operations per multiprocessor and cycle of the highest clock, by compute capability: 0.65 to 0.8 of
# the data sheets' peak. GeForce cards have half as many units for sums in float32, but sustain more of their peak.
_OPERATIONS_A_CYCLE = {
    (8, 0): 1640, (8, 6): 820, (8, 9): 820, (9, 0): 2600, (10, 0): 5300, (10, 3): 5300, (12, 0): 820, (12, 1): 820,
}  # fmt: skip
_GEFORCE_PART = 0.6
# Estimated rates of one CPU thread: operations and bytes per second.
_THREAD_RATES = 50e9, 5e9


@dataclass(frozen=True)
class Device:
    """Properties of a device that plans and kernels depend on: a plain value, so the device itself need not exist."""

    kind: str
    """`torch.device.type`: "cuda", also for AMD GPUs, "cpu" and so on"""
    multiprocessors: int
    """Number of multiprocessors; for a CPU, of threads that PyTorch uses"""
    matmul_rate: float
    """16-bit operations per second"""
    bandwidth: float
    """Bytes per second"""
    capability: tuple[int, int] = (0, 0)
    """Compute capability of a GPU"""
    is_hip: bool = False
    memory: int | None = None
    """Total bytes; None if unknown, or shared with other programs, as on a CPU"""
    warp_size: int = 32
    """Threads that run in lockstep"""
    resident_threads: int = 2048
    """Maximum number of threads that are resident on a multiprocessor"""

    @property
    def is_nvidia(self) -> bool:
        """Whether this is an NVIDIA GPU, so that NVIDIA's libraries are available."""
        return self.kind == "cuda" and not self.is_hip

    @property
    def is_hopper(self) -> bool:
        """Whether this is a Hopper GPU. The capability alone does not tell: AMD's MI300 has 9.4."""
        return self.is_nvidia and self.capability[0] == HOPPER

    def multiplies_into_float32(self, dtype: torch.dtype) -> bool:
        """Whether PyTorch's matmul of operands of a 16-bit dtype can return float32.

        It cannot on a CPU, in some versions for ROCm, and for bfloat16 on GPUs without instructions for that dtype.
        """
        is_new = dtype is not torch.bfloat16 or self.capability >= BFLOAT16_CAPABILITY
        return self.is_nvidia and is_new

    @classmethod
    def of(cls, device: torch.device) -> "Device":
        """Returns the properties of a device. A CUDA device that is not there counts as an H200 of unknown memory."""
        if device.type != "cuda":
            return _other_device(device.type, torch.get_num_threads())
        if device.index is not None:
            return _cuda_device(device.index)
        return _cuda_device(torch.cuda.current_device()) if torch.cuda.is_available() else ABSENT_DEVICE


ABSENT_DEVICE = Device("cuda", _H200_MULTIPROCESSORS, *KNOWN_RATES["H200"], capability=(HOPPER, 0))


@cache
def _other_device(kind: str, threads: int) -> Device:
    if kind == "cpu":
        matmul, bandwidth = _THREAD_RATES
        return Device(kind, threads, threads * matmul, threads * bandwidth)
    return Device(kind, 1, *KNOWN_RATES["RTX 3090"])


@cache
def _cuda_device(index: int) -> Device:
    return from_properties(torch.cuda.get_device_properties(index)) if torch.cuda.is_available() else ABSENT_DEVICE


def from_properties(properties: Any) -> Device:
    """Returns the device that `torch.cuda.get_device_properties` describes."""
    return Device(
        "cuda", properties.multi_processor_count, *_rates(properties), capability=(properties.major, properties.minor),
        is_hip=bool(torch.version.hip), memory=properties.total_memory, warp_size=properties.warp_size,
        resident_threads=properties.max_threads_per_multi_processor,
    )  # fmt: skip


def _rates(properties: Any) -> tuple[float, float]:
    """Returns the measured rates, or else those by clocks, by name, or by multiprocessors relative to an H200."""
    model = next((name for name in KNOWN_RATES if name in properties.name), "")
    known_rates, h200_rates, count = KNOWN_RATES.get(model), KNOWN_RATES["H200"], properties.multi_processor_count
    if known_rates is not None and model in _MEASURED:
        return known_rates
    # In kHz and bits. Memory transfers twice per clock and sustains 0.9 of that; AMD's transfers more often.
    names = "clock_rate", "memory_clock_rate", "memory_bus_width"
    clock, memory_clock, width = (getattr(properties, name, 0) for name in names)
    operations_a_cycle: float = _OPERATIONS_A_CYCLE.get((properties.major, properties.minor), 0)
    operations_a_cycle *= _GEFORCE_PART if "GeForce" in properties.name else 1.0
    rates = count * clock * 1e3 * operations_a_cycle, 0.9 * 2 * memory_clock * 1e3 * width / 8
    if all(rates) and not torch.version.hip:
        return rates
    share = count / _H200_MULTIPROCESSORS
    return known_rates or (share * h200_rates[0], share * h200_rates[1])
