"""Time, memory and error of whole loss regions, forward and backward, all methods in one run.

The chip is power-limited, so a method is the faster the cooler its predecessor left the chip. Each is therefore run for
`SETTLE_MS` before it is timed, methods take turns, and only numbers of one run compare.
"""

import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor

from thunder_flce.bench.methods import METHODS, Method, Unavailable, reference_gradients, three_products
from thunder_flce.bench.shapes import Inputs, Shape

SETTLE_MS = {"cuda": 250, "cpu": 0}
CALLS_A_ROUND = 5


@dataclass(frozen=True, kw_only=True)
class Row:
    """What was measured of one method on one shape."""

    shape: str
    method: str
    time_ms: float | None = None
    """Median of forward + backward."""
    time_ms_p20: float | None = None
    time_ms_p80: float | None = None
    ratio: float | None = None
    """Time over that of the three products alone."""
    memory_gb: float | None = None
    """Peak above the inputs, in 10⁹ bytes; CUDA only."""
    above_outputs_gb: float | None = None
    """The same, less the gradients themselves."""
    dx_error: float | None = None
    """‖dX − reference‖ / ‖reference‖, the reference being float32."""
    dw_error: float | None = None
    dbias_error: float | None = None
    first_call_s: float | None = None
    """The first forward + backward, with all that is compiled for it."""
    failed: str | None = None


def versions() -> dict[str, str]:
    """The machine and the versions that a result belongs to."""
    names = ["torch", "lightning-thunder", "triton", "liger-kernel", "cut-cross-entropy"]
    names += ["nvfuser-cu128-torch210", "nvfuser-cu130-torch210"]
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.processor()} (CPU)"
    return {"device": machine, "cuda": torch.version.cuda or "", "python": platform.python_version(), **found}


def measure(
    shape: Shape, methods: list[str], *, device: str, rounds: int, progress: Callable[[str], None]
) -> list[Row]:
    """Measures methods on one shape.

    Args:
        shape: what to measure.
        methods: names from `METHODS`.
        device: "cuda" or "cpu".
        rounds: how often each method has its turn, for `CALLS_A_ROUND` timings.
        progress: called with a word before each step.
    """
    inputs = Inputs.random(shape, device)
    progress("reference")
    reference = reference_gradients(inputs)
    ready: dict[str, Method] = {}
    rows: dict[str, dict] = {name: {} for name in methods}
    for name in methods:
        progress(f"{name}: first call")
        try:
            method = METHODS[name]()
            start = time.perf_counter()
            gradients = _run(method, inputs)
            _synchronize(device)
            rows[name]["first_call_s"] = time.perf_counter() - start
            errors = [_error(got, right) for got, right in zip(gradients, reference, strict=True)]
            rows[name].update(zip(("dx_error", "dw_error", "dbias_error"), errors, strict=False))
            del gradients
            rows[name].update(_memory(method, inputs, shape, device))
            ready[name] = method
        except Unavailable as error:
            rows[name]["failed"] = str(error)
        # A peer may fail in any way; its row says so and the others go on.
        except Exception as error:
            rows[name]["failed"] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    del reference

    floor = three_products(inputs)
    calls: dict[str, Callable[[], object]] = {"three products": floor}
    calls.update({name: (lambda method=method: _run(method, inputs)) for name, method in ready.items()})
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds):
        for name, call in calls.items():
            progress(f"round {turn + 1} of {rounds}: {name}")
            settled = time.perf_counter() + SETTLE_MS[device] / 1e3
            while time.perf_counter() < settled:
                call()
                _synchronize(device)
            call()
            times[name] += _times_ms(call, device)
    floor_ms = statistics.median(times["three products"])
    result = [Row(shape=str(shape), method="three products", **_spread(times["three products"]), ratio=1.0)]
    for name in methods:
        if name in ready:
            rows[name].update(_spread(times[name]))
            rows[name]["ratio"] = rows[name]["time_ms"] / floor_ms
        result.append(Row(shape=str(shape), method=name, **rows[name]))
    return result


def _run(method: Method, inputs: Inputs) -> list[Tensor]:
    loss = method(inputs)
    loss.backward()
    gradients = [tensor.grad for tensor in inputs.operands()]
    for tensor in inputs.operands():
        tensor.grad = None
    return gradients


def _memory(method: Method, inputs: Inputs, shape: Shape, device: str) -> dict[str, float]:
    if device != "cuda":
        return {}
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    _run(method, inputs)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    return {"memory_gb": peak / 1e9, "above_outputs_gb": (peak - shape.output_bytes) / 1e9}


def _times_ms(call: Callable[[], object], device: str) -> list[float]:
    """`CALLS_A_ROUND` timings, one call after the other without waiting in between, as in training."""
    if device != "cuda":
        times = []
        for _ in range(CALLS_A_ROUND):
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e3)
        return times
    events = [torch.cuda.Event(enable_timing=True) for _ in range(CALLS_A_ROUND + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in zip(events, events[1:], strict=False)]


def _spread(times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    last = len(ordered) - 1
    return {
        "time_ms": statistics.median(ordered),
        "time_ms_p20": ordered[round(0.2 * last)],
        "time_ms_p80": ordered[round(0.8 * last)],
    }


def _error(result: Tensor, reference: Tensor) -> float:
    return (torch.linalg.vector_norm(result.float() - reference) / torch.linalg.vector_norm(reference)).item()


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def as_record(row: Row) -> dict:
    """A row for JSON: what was not measured is left out."""
    return {key: value for key, value in asdict(row).items() if value is not None}
