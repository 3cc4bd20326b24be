"""Which backend runs the row work, asked by the engine and by what prints it.

Triton comes with PyTorch on Linux, nvFuser is an extra; PyTorch's operations run everywhere.
"""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import NamedTuple

import torch
from torch import Tensor

from thunder_flce.device import Device
from thunder_flce.engine.kernels.interface import RowKernels
from thunder_flce.operation.loss import LogitMap


class Backend(NamedTuple):
    """How a backend is found."""

    library: str
    """As it is printed"""
    kernels: str
    """Its `RowKernels`, a class in the module of its name"""
    package: str
    """What must be installed"""
    install: str = ""
    """The command that installs it"""


_TRITON = "triton-windows" if sys.platform == "win32" else "triton"
BACKENDS = {
    "triton": Backend("Triton", "TritonRowKernels", "triton", f"pip install {_TRITON}"),
    "nvfuser": Backend("nvFuser", "NvFuserRowKernels", "nvfuser_direct", 'pip install "thunder-flce[nvfuser]"'),
    "torch": Backend("PyTorch", "TorchRowKernels", "torch"),
}
FASTEST = tuple(BACKENDS)
"""Fastest first, but for moments, where nvFuser would gain 0.6% of a step: "auto" takes the first that is there."""
# The oldest Triton that is known to compile the kernels for AMD's GPUs (tests/kernels), and the first compute
# capability of NVIDIA's that it compiles them for, which is also the first for which Inductor asks it to.
OLDEST_TRITON_ON_HIP = (3, 5)
OLDEST_CAPABILITY = (7, 0)


def kernels_for(choice: str = "auto", *, dtype: torch.dtype, device_type: str, logit_map: LogitMap) -> RowKernels:
    """The row kernels that `Options.row_kernels` names, for logits of such a dtype on such a device.

    Raises:
        ValueError: as `check_available`.
    """
    check_available(choice, dtype=dtype, device_type=device_type)
    return _kernels(_backend(choice, dtype, device_type), logit_map)


def check_available(choice: str, *, dtype: torch.dtype, device_type: str) -> None:
    """Whether a backend can run on such logits.

    Raises:
        ValueError: where it cannot; the text says what to do.
    """
    if choice == "auto":
        return
    asked = f'row_kernels="{choice}"'
    if not _takes(choice, dtype, device_type):
        where = f"the logits are {str(dtype).removeprefix('torch.')} on {device_type!r}"
        takes = "runs on CUDA, in float32, bfloat16 and float16"
        raise ValueError(f'{asked} {takes}, but {where}: choose row_kernels="auto" or "torch"')
    if not runs(choice, dtype, device_type):
        backend = _described(choice)
        needs = f"needs the package {backend.package}, which is not installed"
        if is_installed(choice):
            needs = "does not run on this GPU as it is installed"
        raise ValueError(f'{asked} {needs}: {backend.install}, or choose row_kernels="auto"')


@cache
def is_installed(name: str) -> bool:
    """Whether the package of a backend is installed."""
    return importlib.util.find_spec(BACKENDS[name].package) is not None


@cache
def _compiles_for_hip(name: str) -> bool:
    """Whether a backend that is installed is known to run on AMD's GPUs."""
    return name == "triton" and tuple(map(int, import_module(name).__version__.split(".")[:2])) >= OLDEST_TRITON_ON_HIP


@cache
def _is_too_old() -> bool:
    """Whether the GPU, the first that is current, is one of NVIDIA's that nothing is compiled for."""
    device = Device.of(torch.device("cuda"))
    return device.is_nvidia and (device.capability or OLDEST_CAPABILITY) < OLDEST_CAPABILITY


def missing(*, dtype: torch.dtype, device_type: str) -> Backend | None:
    """The fastest backend, where "auto" would use it for these logits if it, or another version, were installed."""
    name = FASTEST[0]
    is_missing = _takes(name, dtype, device_type) and not runs(name, dtype, device_type)
    return _described(name) if is_missing else None


def _described(name: str) -> Backend:
    """A backend, with what installs it for the GPU."""
    install, oldest = BACKENDS[name].install, ".".join(map(str, OLDEST_TRITON_ON_HIP))
    if torch.version.hip is not None:
        cures = {"triton": f"Triton {oldest} or newer, with PyTorch 2.9 or newer for ROCm"}
        install = cures.get(name, "there is none for AMD's GPUs")
    elif _is_too_old():
        install = "there is none for GPUs before compute capability " + ".".join(map(str, OLDEST_CAPABILITY))
    return BACKENDS[name]._replace(install=install)


def divergence_for(choice: str = "auto", *, dtypes: Sequence[torch.dtype], device_type: str) -> Callable[..., Tensor]:
    """What computes a student's divergences from a teacher, for logits of such dtypes.

    It takes logits (C, V) of the student and of the teacher, a `Divergence`, and by name `factors`, (C,), and `out`. It
    returns the divergence of each row, (C,). With factors it writes the gradient of the student's logits, times these,
    to `out` (C, V), which may be the student's logits.

    Raises:
        ValueError: as `check_available`, and for "nvfuser".
    """
    for dtype in dtypes:
        check_available(choice, dtype=dtype, device_type=device_type)
    if choice == "nvfuser":
        raise ValueError('row_kernels="nvfuser" has no divergences: choose row_kernels="auto", "triton" or "torch"')
    has_triton = all(runs("triton", dtype, device_type) for dtype in dtypes)
    name = "torch" if choice == "torch" or not has_triton else "triton"
    return import_module(f"{__package__}.{name}_divergence").divergence_


def library(choice: str, *, dtype: torch.dtype, device_type: str) -> str:
    """The library that runs the row work: "Triton", "nvFuser" or "PyTorch"."""
    return BACKENDS[_backend(choice, dtype, device_type)].library


def _backend(choice: str, dtype: torch.dtype, device_type: str) -> str:
    if choice != "auto":
        return choice
    return next(name for name in FASTEST if runs(name, dtype, device_type))


def runs(name: str, dtype: torch.dtype, device_type: str) -> bool:
    """Whether a backend is there for such logits."""
    if name == "torch":
        return True
    is_there = _takes(name, dtype, device_type) and is_installed(name)
    return is_there and (not _is_too_old() if torch.version.hip is None else _compiles_for_hip(name))


def _takes(name: str, dtype: torch.dtype, device_type: str) -> bool:
    return name == "torch" or (device_type == "cuda" and dtype in (torch.float32, torch.bfloat16, torch.float16))


@cache
def _kernels(name: str, logit_map: LogitMap) -> RowKernels:
    return getattr(import_module(f"{__package__}.{name}_rows"), BACKENDS[name].kernels)(logit_map)
