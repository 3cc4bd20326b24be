"""The row kernels alone: bytes a second, against a device copy of as many bytes.

"statistics" reads the logits of a chunk once; "dlogits" reads and writes them, and "statistics and dlogits" do both as
one kernel, which is held to the bytes that it has to move, one read and one write. A copy reads half of its bytes and
writes the other half, so the copy that statistics are compared with is of half the logits.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from thunder_flce.bench.measuring import DeviceLost, Mark, Progress, Schedule, Step, attempt, release, take_turns
from thunder_flce.bench.shapes import dtype_name
from thunder_flce.execution.row_kernels.interface import (
    LogitMap,
    LogitsBuffer,
    RowCoefficients,
    RowKernels,
    kernels_for,
)
from thunder_flce.planning.plan import layout_for

VOCABS = {
    "cuda": [1000, 4099, 16384, 32000, 50257, 65537, 100352, 128256, 128257, 151936, 200064, 256000, 300007],
    "cpu": [1000, 4099, 32000],
}
LOGITS_BYTES = {"cuda": 512 * 2**20, "cpu": 8 * 2**20}
"""Bytes of the logits of a chunk: ten times what a GPU's cache holds."""

KERNELS = ["statistics", "statistics and dlogits", "dlogits", "dlogits, column sums"]
_COPIES = {name: "copy of half" if name == "statistics" else "copy" for name in KERNELS}
_PHASE = "kernel"


@dataclass(frozen=True, kw_only=True)
class Row:
    """What was measured of one kernel at one vocabulary."""

    vocab: int
    rows: int
    row_stride: int
    """Elements from one row to the next, the padding included."""
    dtype: str
    lowering: str
    """The module that the kernels come from: "nvfuser" or "torch_rows"."""
    method: str
    time_ms: float | None = None
    time_ms_p20: float | None = None
    time_ms_p80: float | None = None
    gb_per_s: float | None = None
    """10⁹ bytes of logits a second, padding not counted."""
    copy_gb_per_s: float | None = None
    """The same of a copy that moves as many bytes."""
    ratio: float | None = None
    """The first over the second."""
    failed: str | None = None


def measure(
    vocab: int,
    methods: list[str],
    *,
    dtype: torch.dtype,
    device: str,
    schedule: Schedule,
    progress: Progress,
    logits_bytes: int | None = None,
) -> Iterator[Row]:
    """Measures kernels at one vocabulary.

    Args:
        vocab: V, at least 2.
        methods: names from `KERNELS`.
        dtype: of the logits.
        device: "cuda" or "cpu".
        schedule: how long.
        progress: called before each step.
        logits_bytes: how large the logits are; by default as in `LOGITS_BYTES`.

    Raises:
        DeviceLost: where a kernel, whose row has come, makes further measurements in this process impossible.
    """
    release(device)
    layout = layout_for(vocab, dtype=dtype, device_type=device)
    rows = max((logits_bytes or LOGITS_BYTES[device]) // (layout.row_stride * dtype.itemsize), 2)
    kernels = kernels_for(dtype=dtype, device_type=device, logit_map=LogitMap())
    row = partial(
        Row,
        vocab=vocab,
        rows=rows,
        row_stride=layout.row_stride,
        dtype=dtype_name(dtype),
        lowering=type(kernels).__module__.rpartition(".")[2],
    )
    steps: dict[str, Step] = {}
    try:
        with attempt("logits", device) as tried:
            buffer = LogitsBuffer.allocate(rows, layout, dtype=dtype, device=torch.device(device))
            buffer.padded.normal_()
            available = _kernel_steps(kernels, buffer)
            copies = {"copy": _copy_step(buffer, 1), "copy of half": _copy_step(buffer, 2)}
        if tried.failed is not None:
            yield row(method="logits", failed=tried.failed)
            return
        for name in methods:
            progress(f"{name}: first call")
            with attempt(name, device) as tried:
                available[name](lambda phase: None)
                steps[name] = available[name]
            if tried.failed is not None:
                yield row(method=name, failed=tried.failed)
        outcomes = take_turns({**copies, **steps}, schedule, device=device, progress=progress)
    except DeviceLost as lost:
        yield row(method=lost.method, failed=lost.reason)
        raise
    for name in steps:
        outcome, copied = outcomes[name], outcomes[_COPIES[name]]
        if outcome.failed is not None:
            yield row(method=name, failed=outcome.failed)
            continue
        moved = rows * vocab * dtype.itemsize * (1 if name == "statistics" else 2)
        bandwidth = moved / outcome.median(_PHASE) / 1e6
        copy_bandwidth = copied.median(_PHASE) and moved / copied.median(_PHASE) / 1e6
        yield row(
            method=name,
            **outcome.spread(_PHASE, "time_ms"),
            gb_per_s=bandwidth,
            copy_gb_per_s=copy_bandwidth,
            ratio=copy_bandwidth and bandwidth / copy_bandwidth,
        )


def _kernel_steps(kernels: RowKernels, buffer: LogitsBuffer) -> dict[str, Step]:
    statistics = kernels.statistics(buffer)
    share = torch.full_like(statistics.row_max, 1 / statistics.row_max.shape[0])
    coefficients = RowCoefficients(share, share)

    def gradient(column_sums: bool) -> None:
        dtype = buffer.padded.dtype
        kernels.gradient(buffer, statistics, coefficients, None, dtype=dtype, column_sums=column_sums)

    target = torch.zeros_like(share, dtype=torch.long)
    return {
        "statistics": _timed(lambda: kernels.statistics(buffer)),
        "statistics and dlogits": _timed(lambda: kernels.statistics_and_gradient(buffer, target, coefficients)),
        "dlogits": _timed(lambda: gradient(False)),
        "dlogits, column sums": _timed(lambda: gradient(True)),
    }


def _copy_step(buffer: LogitsBuffer, share: int) -> Step:
    source, destination = (buffer.padded.new_zeros(buffer.logits.numel() // share) for _ in range(2))
    return _timed(lambda: destination.copy_(source))


def _timed(call: Callable[[], object]) -> Step:
    def step(mark: Mark) -> None:
        call()
        mark(_PHASE)

    return step
