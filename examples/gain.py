"""Time and peak memory of a training step, with and without thunder_flce, for the other examples."""

import os
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # The profiler warns of missing GPUs.

import torch

from thunder_flce.bench.measure import peak_bytes


def measure(step: Callable[[], object], device: str) -> tuple[float, float]:
    """Returns the median milliseconds and the peak MiB of a step, which first runs once to compile."""
    step()
    peak = peak_bytes(step, device)
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds) * 1e3, peak / 2**20


def print_gain(title: str, steps: dict[str, Callable[[], object]], device: str) -> None:
    """Prints a line for each step, by its name; memory is compared with that of the first step."""
    print(f"\n{title:44}{'ms':>10}{'peak MiB':>12}{'memory':>10}")
    peaks = []
    for name, step in steps.items():
        milliseconds, peak = measure(step, device)
        peaks.append(peak)
        print(f"{name:44}{milliseconds:10.1f}{peak:12.1f}{peak / peaks[0]:9.2f}x")
