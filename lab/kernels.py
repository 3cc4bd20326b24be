"""The row kernels alone: bytes per second of each backend, against a device copy of as many bytes.

"statistics" and "moments" read the logits of a chunk once; "dlogits" reads and writes them. "statistics and dlogits"
does both, and its rate counts the bytes that it needs to move at least: one read and one write. A copy reads half of
its bytes and writes the other half.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from thunder_flce.bench.cli import Subset
from thunder_flce.bench.measure import TOTAL, Mark, Run, Step, no_mark, progress, release, spread
from thunder_flce.bench.output import TIME
from thunder_flce.bench.shapes import DTYPES
from thunder_flce.engine.kernels.dispatch import BACKENDS, check_available, kernels_of
from thunder_flce.engine.kernels.interface import RowKernels, empty_logits, row_stride, whole_rows
from thunder_flce.operation.checks import dtype_name
from thunder_flce.operation.loss import LogitMap, RowCoefficients
from thunder_flce.operation.moments import MOMENTS

VOCABS = {
    "cuda": [1000, 4099, 16384, 32000, 50257, 65537, 100352, 128256, 128257, 151936, 200064, 256000, 300007],
    "cpu": [1000, 4099, 32000],
}
LOGITS_BYTES = {"cuda": 512 * 2**20, "cpu": 8 * 2**20}
"""Bytes of a chunk's logits: ten times the size of a GPU's cache"""

KERNELS = [
    "statistics",
    "moments",
    "statistics and dlogits",
    "dlogits",
    "dlogits, every term",
    "dlogits, column sums",
]


COLUMNS = {
    "backend": ("backend", "{}"),  # one of `dispatch.BACKENDS`
    "time_ms": ("time, ms", TIME),
    "gb_per_s": ("GB/s", "{:.0f}"),  # 10⁹ bytes per second, of bytes that have to be moved, without padding
    "copy_gb_per_s": ("copy, GB/s", "{:.0f}"),  # of a copy of as many bytes
    "ratio": ("of the copy", "{:.1%}"),  # ratio of these two rates
}


def measure(vocab: int, methods: list[str], run: Run, *, dtype: str | None) -> None:
    """Measures the kernels of each available backend in turns, at one vocabulary.

    Args:
        vocab: V, at least 2.
        methods: names from `KERNELS`.
        run: the device, and how long to measure.
        dtype: dtype of the logits; by default bfloat16, and float32 on a CPU.
    """
    device = run.device
    of_logits = DTYPES[dtype or ("bfloat16" if device == "cuda" else "float32")]
    release(device)
    stride = row_stride(vocab, dtype=of_logits, device_type=device)
    rows = max(LOGITS_BYTES[device] // (stride * of_logits.itemsize), 2)
    # `row_stride` is the distance of rows, padding included.
    run.fields |= {"vocab": vocab, "rows": rows, "row_stride": stride, "dtype": dtype_name(of_logits)}
    steps: dict[str, Step] = {}
    with run.attempt("logits"):
        z = empty_logits(rows, vocab, dtype=of_logits, device=device)
        whole_rows(z).normal_()
        steps = {f"copy: {name}": _copy_step(z, _bytes_moved(name, z)) for name in methods}
    if not steps:
        return
    for backend in _available_backends(of_logits, device):
        run.fields["backend"] = backend
        with run.attempt("statistics"):
            kernels = kernels_of(backend, LogitMap())
            available = _kernel_steps(kernels, z)
            for name in methods:
                progress(f"{backend}, {name}: first call")
                with run.attempt(name):
                    available[name](no_mark)
                    steps[f"{backend}: {name}"] = available[name]
    del run.fields["backend"]
    laps = run.in_turns(steps, run.turn)
    for method, of_method in laps.items():
        kind, _, name = method.partition(": ")
        if kind == "copy":
            continue
        times, moved = spread((lap[TOTAL] for lap in of_method), "time_ms"), _bytes_moved(name, z)
        bandwidth, copied = moved / times["time_ms"] / 1e6, None
        if (copies := laps.get(f"copy: {name}")) is not None:
            copied = moved / spread((lap[TOTAL] for lap in copies), "ms")["ms"] / 1e6
        of_copy = {"copy_gb_per_s": copied, "ratio": copied and bandwidth / copied}
        run.row(name, backend=kind, **times, gb_per_s=bandwidth, **of_copy)


def _available_backends(dtype: torch.dtype, device: str) -> list[str]:
    """Returns those of `dispatch.BACKENDS` that can run on the device."""

    def is_available(name: str) -> bool:
        try:
            check_available(name, dtype=dtype, device_type=device)
        except ValueError:
            return False
        return True

    return [name for name in BACKENDS if is_available(name)]


def _columns(text: str) -> int:
    if not text.isdecimal() or int(text) < 2:
        raise ValueError(f"a vocabulary must be an integer of at least 2, but got {text!r}")
    return int(text)


def _bytes_moved(name: str, z: Tensor) -> int:
    """Number of bytes that a kernel has to read and write at least."""
    return z.numel() * z.element_size() * (1 if name in ("statistics", "moments") else 2)


def _kernel_steps(kernels: RowKernels, z: Tensor) -> dict[str, Step]:
    """Returns a step for each of `KERNELS`."""
    rows, vocab = z.shape
    row = z.new_full((rows,), 1 / rows, dtype=torch.float32)
    statistics, _ = kernels.statistics(z)
    plain, everything = RowCoefficients(row, row), RowCoefficients(row, row, row, row)
    target, class_weight = torch.zeros_like(row, dtype=torch.long), row.new_ones(vocab)

    def gradient(coefficients: RowCoefficients, **settings: Any) -> None:
        kernels.gradient_(z, statistics, coefficients, out=z, target=target, **settings)

    calls: dict[str, Callable[[], object]] = {
        "statistics": lambda: kernels.statistics(z),
        "moments": lambda: kernels.moments(z, statistics, class_weight, tuple(MOMENTS)),
        "statistics and dlogits": lambda: kernels.one_pass_(z, target, plain),
        "dlogits": lambda: gradient(plain),
        "dlogits, every term": lambda: gradient(everything, class_weight=class_weight),
        "dlogits, column sums": lambda: gradient(plain, column_sums=True),
    }
    return {name: _timed(call) for name, call in calls.items()}


def _copy_step(z: Tensor, moved: int) -> Step:
    """Returns a step that copies: reads and writes add up to `moved` bytes."""
    source, destination = (z.new_zeros(moved // 2, dtype=torch.uint8) for _ in range(2))
    return _timed(lambda: destination.copy_(source))


def _timed(call: Callable[[], object]) -> Step:
    def step(mark: Mark) -> None:
        call()
        mark("kernel")

    return step


SUBSET = Subset(
    help="bandwidth of the row kernels, against a device copy",
    measure=measure,
    columns=COLUMNS,
    methods=KERNELS,
    case="vocab",
    parse=_columns,
    cases={device: list(map(str, vocabs)) for device, vocabs in VOCABS.items()},
    options={"dtype": {"choices": DTYPES, "help": "dtype of the logits (default: bfloat16; float32 on a CPU)"}},
)
