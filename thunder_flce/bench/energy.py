"""The power that a GPU takes, by NVML's counter of energy."""

import threading
import time
from importlib.util import find_spec

import torch

INTERVAL_S = 0.01


class PowerMeter:
    """Mean power of the current GPU while the body of a `with` statement runs.

    The counter moves every 20 to 100 ms only, so what it says at the beginning and the end of the body is old. A thread
    reads it every `INTERVAL_S` instead, and what counts is the time between its first and its last move.

    Attributes:
        watts: mean power; None on a CPU, without nvidia-ml-py, where the driver has no such counter, and where it did
            not move twice.
    """

    def __init__(self, device: str):
        self.watts: float | None = None
        self._device = device
        self._moves: list[tuple[float, int]] = []

    def __enter__(self) -> "PowerMeter":
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        if self._device == "cuda" and find_spec("pynvml") is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join()
        if len(self._moves) >= 2:
            (start, first), (end, last) = self._moves[0], self._moves[-1]
            self.watts = (last - first) / 1e3 / (end - start)

    def _watch(self) -> None:
        import pynvml

        try:
            pynvml.nvmlInit()
            # NVML counts the GPUs of the machine, and CUDA those that it may see: a UUID is the same for both.
            uuid = torch.cuda.get_device_properties().uuid
            handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            last = pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
            while not self._stopped.wait(INTERVAL_S):
                millijoules = pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
                if millijoules != last:
                    self._moves.append((time.perf_counter(), millijoules))
                    last = millijoules
        except pynvml.NVMLError:
            self._moves.clear()
