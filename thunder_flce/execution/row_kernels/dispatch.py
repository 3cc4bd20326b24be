"""Which backend runs which row work: one table, and what follows from it.

Triton comes with PyTorch on Linux, nvFuser is an extra; PyTorch's operations run everywhere. What asks which library
runs, or how many bytes it moves, asks `library` and `bytes_moved` here, as the dispatch itself does.
"""

import importlib.util
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import torch

from thunder_flce.execution.row_kernels.interface import LogitMap, RowKernels, RowWork

METHODS = ("statistics", "moments", "gradient", "target_gradient", "statistics_and_gradient")
FASTEST = dict.fromkeys(METHODS, ("triton", "nvfuser", "torch"))
"""Who is fastest at a method, first: "auto" takes the first that is there (`python -m thunder_flce bench kernels`)."""


class Backend(NamedTuple):
    """How a backend is found."""

    library: str
    """As it is printed"""
    kernels: str
    """Its `RowKernels`, as `module:class`"""
    package: str
    """What must be installed"""
    install: str = ""
    """The command that installs it"""


BACKENDS = {
    "triton": Backend("Triton", f"{__package__}.triton_rows:TritonRowKernels", "triton", "pip install triton"),
    "nvfuser": Backend(
        "nvFuser",
        f"{__package__}.nvfuser_rows:NvFuserRowKernels",
        "nvfuser_direct",
        'pip install "thunder-flce[nvfuser]"',
    ),
    "torch": Backend("PyTorch", f"{__package__}.torch_rows:TorchRowKernels", "torch"),
}
CHOICES = ("auto", *BACKENDS)


class FastestRowKernels:
    """Takes each method from the backend that runs it; see `RowKernels`."""

    def __init__(self, logit_map: LogitMap, backends: dict[str, RowKernels]):
        self.logit_map = logit_map
        self.statistics = backends["statistics"].statistics
        self.moments = backends["moments"].moments
        self.gradient = backends["gradient"].gradient
        self.target_gradient = backends["target_gradient"].target_gradient
        self.statistics_and_gradient = backends["statistics_and_gradient"].statistics_and_gradient


def kernels_for(choice: str = "auto", *, dtype: torch.dtype, device_type: str, logit_map: LogitMap) -> RowKernels:
    """The row kernels of one backend or, for "auto", of whichever is the fastest at each method.

    Args:
        choice: one of `CHOICES`.
        dtype: of the logits.
        device_type: where they are, such as "cuda".
        logit_map: what they are mapped by.

    Raises:
        ValueError: as `check_available`.
    """
    check_available(choice, dtype=dtype, device_type=device_type)
    backends = {method: _backend(choice, method, dtype, device_type) for method in FASTEST}
    return FastestRowKernels(logit_map, {method: _kernels(name, logit_map) for method, name in backends.items()})


def check_available(choice: str, *, dtype: torch.dtype, device_type: str) -> None:
    """Whether a backend can run where it was asked for; arguments as of `kernels_for`.

    Raises:
        ValueError: where it cannot; the text says what to do.
    """
    if choice not in CHOICES:
        raise ValueError(f"row_kernels must be one of {', '.join(map(repr, CHOICES))}, but is {choice!r}")
    if choice == "auto":
        return
    asked = f'row_kernels="{choice}"'
    if not _runs_on(choice, dtype, device_type):
        where = f"the logits are {str(dtype).removeprefix('torch.')} on {device_type!r}"
        runs = "runs on CUDA, in float32, bfloat16 and float16"
        raise ValueError(f'{asked} {runs}, but {where}: choose row_kernels="auto" or "torch"')
    if not is_installed(choice):
        backend = BACKENDS[choice]
        needs = f"needs the package {backend.package}, which is not installed"
        raise ValueError(f'{asked} {needs}: {backend.install}, or choose row_kernels="auto"')


@cache
def is_installed(name: str) -> bool:
    """Whether the package of a backend is installed."""
    return importlib.util.find_spec(BACKENDS[name].package) is not None


def missing(*, dtype: torch.dtype, device_type: str) -> tuple[str, ...]:
    """The backends that "auto" would use for these logits if they were installed, in the order of `BACKENDS`."""
    wanted = {order[0] for order in FASTEST.values()}
    return tuple(n for n in BACKENDS if n in wanted and _runs_on(n, dtype, device_type) and not is_installed(n))


def without_nvfuser(*, dtype: torch.dtype, device_type: str) -> str:
    """What "auto" amounts to where nvFuser is not to be used."""
    if "nvfuser" not in [_backend("auto", method, dtype, device_type) for method in FASTEST]:
        return "auto"
    return "triton" if _runs_on("triton", dtype, device_type) and is_installed("triton") else "torch"


def library(choice: str, work: RowWork, device_type: str) -> str:
    """The library that runs such work: "Triton", "nvFuser" or "PyTorch"."""
    return BACKENDS[_backend(choice, work.method, work.dtype, device_type)].library


# Operations on a block of rows in PyTorch: how often each reads or writes float32 (float64) values, beside what reads
# z and writes the gradient. Statistics: convert, amax, sub, exp, sum.
_EAGER_PASSES = {"statistics": 7, "moments": 8, "gradient": 10, "statistics_and_gradient": 10, "target_gradient": 0}


def bytes_moved(work: RowWork, rows: int, library: str) -> int:
    """Bytes of logits that such work on `rows` rows reads and writes on a GPU if `library` runs it, for a cost model.

    Row vectors are not counted.
    """
    elements = rows * sum(layout.row_stride for layout in work.layouts)
    read = work.dtype.itemsize
    written = 0 if work.out_dtype is None else work.out_dtype.itemsize
    if library == "PyTorch":
        passes = _EAGER_PASSES[work.method] + 3 * len(work.moments) + work.column_sums
        passes += 7 * work.entropy + (4 if work.has_class_weight else 2) * work.uniform
        return elements * (read + written + (8 if work.dtype is torch.float64 else 4) * passes)
    reads = 1.0
    if work.method == "statistics_and_gradient":
        # Triton reads a row again while the cache holds most of it: its kernel takes 1.14 to 1.2 times as long as the
        # gradient alone, a read and a write (traces/h200/kernels.jsonl). nvFuser's are two passes.
        reads = 4 / 3 if library == "Triton" else 2.0
    return int(elements * (reads * read + written))


def definitions(work: RowWork, logit_map: LogitMap) -> dict[str, Any]:
    """nvFuser's definitions of the fusions that such work takes, by name; each prints itself. nvFuser must be there."""
    from thunder_flce.execution.row_kernels import nvfuser_rows

    return nvfuser_rows.definitions(work, logit_map)


def _backend(choice: str, method: str, dtype: torch.dtype, device_type: str) -> str:
    """The backend, one of `BACKENDS`, that runs a method."""
    if choice != "auto":
        return choice
    return next(n for n in FASTEST[method] if _runs_on(n, dtype, device_type) and is_installed(n))


def _runs_on(name: str, dtype: torch.dtype, device_type: str) -> bool:
    return name == "torch" or (device_type == "cuda" and dtype in (torch.float32, torch.bfloat16, torch.float16))


@cache
def _kernels(name: str, logit_map: LogitMap) -> RowKernels:
    module, _, kernels = BACKENDS[name].kernels.partition(":")
    return getattr(import_module(module), kernels)(logit_map)
