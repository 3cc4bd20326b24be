"""Chooses the backend of the row kernels, for the engine and for the printed program.

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
    """Where a backend's code is, and which package it needs."""

    library: str
    """The printed name of its library"""
    kernels: str
    """The name of its class of `RowKernels`, in the module named after the backend"""
    package: str
    """The package that must be installed"""
    install: str = ""
    """The command that installs it"""


_TRITON = "triton-windows" if sys.platform == "win32" else "triton"
BACKENDS = {
    "triton": Backend("Triton", "TritonRowKernels", "triton", f"pip install {_TRITON}"),
    "nvfuser": Backend("nvFuser", "NvFuserRowKernels", "nvfuser_direct", 'pip install "thunder-flce[nvfuser]"'),
    "torch": Backend("PyTorch", "TorchRowKernels", "torch"),
}
FASTEST = tuple(BACKENDS)
"""The backends, fastest first; "auto" takes the first that runs. (For moments, nvFuser would gain 0.6% of a step.)"""
# The oldest Triton that is known to compile the kernels for AMD's GPUs (tests/kernels), and the lowest compute
# capability of NVIDIA's GPUs for which Triton compiles them; Inductor uses Triton from the same capability on.
OLDEST_ON_HIP = (3, 5)
OLDEST_CAPABILITY = (7, 0)


def backend(choice: str, *, dtype: torch.dtype, device_type: str) -> str:
    """Returns the name in `BACKENDS` of the backend for a choice (`Options.row_kernels`) that can run."""
    return choice if choice != "auto" else next(name for name in FASTEST if runs(name, dtype, device_type))


@cache
def kernels_of(name: str, logit_map: LogitMap) -> RowKernels:
    """Returns the row kernels of a backend."""
    return getattr(import_module(f"{__package__}.{name}_rows"), BACKENDS[name].kernels)(logit_map)


def check_available(choice: str, *, dtype: torch.dtype, device_type: str) -> None:
    """Checks that the chosen backend can run on logits of this dtype on this type of device.

    Raises:
        ValueError: if it cannot; the text says what to do.
    """
    if choice == "auto":
        return
    option = f'row_kernels="{choice}"'
    if not _supports(choice, dtype, device_type):
        logits_text = f"the logits are {str(dtype).removeprefix('torch.')} on {device_type!r}"
        support = "runs on CUDA, in float32, bfloat16 and float16"
        raise ValueError(f'{option} {support}, but {logits_text}: choose row_kernels="auto" or "torch"')
    if (requirement := _missing_requirement(choice)) is not None:
        problem = "does not run on this GPU"
        if requirement == BACKENDS[choice].install:
            problem = f"needs the package {BACKENDS[choice].package}, which is not installed"
        raise ValueError(f'{option} {problem}: {requirement}, or choose row_kernels="auto"')


@cache
def is_installed(name: str) -> bool:
    """Whether the package of a backend is installed."""
    return importlib.util.find_spec(BACKENDS[name].package) is not None


def _missing_requirement(name: str) -> str | None:
    """Returns what a backend lacks on the current GPU, such as the command that installs it; None if it runs."""
    if name == "torch":
        return None
    if torch.version.hip is not None:
        if name != "triton":
            return "it needs a GPU by NVIDIA"
        if is_installed(name) and tuple(map(int, import_module(name).__version__.split(".")[:2])) >= OLDEST_ON_HIP:
            return None
        return f"it needs Triton {'.'.join(map(str, OLDEST_ON_HIP))} or newer, with PyTorch 2.9 or newer for ROCm"
    device = Device.of(torch.device("cuda"))
    if device.is_nvidia and device.capability < OLDEST_CAPABILITY:
        return f"it needs a GPU of compute capability {'.'.join(map(str, OLDEST_CAPABILITY))} or newer"
    return None if is_installed(name) else BACKENDS[name].install


def missing(*, dtype: torch.dtype, device_type: str) -> str | None:
    """Returns the library that "auto" would use for such logits if it ran, and what it lacks; None if nothing."""
    name = FASTEST[0]
    requirement = _missing_requirement(name) if _supports(name, dtype, device_type) else None
    return None if requirement is None else f"{BACKENDS[name].library} ({requirement})"


def divergence_for(choice: str = "auto", *, dtypes: Sequence[torch.dtype], device_type: str) -> Callable[..., Tensor]:
    """Returns the function that computes a student's divergences from a teacher, for logits of these dtypes.

    It takes logits (C, V) of the student and of the teacher, a `Divergence`, and by name `factors`, (C,), and `out`. It
    returns the divergence of each row, (C,). With factors, it writes the gradient of the student's logits, times each
    row's factor, to `out` (C, V), which may be the student's logits. With `labels`, a `LabelTerm`, the gradient of the
    cross-entropy, times its factors, is added.

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


def runs(name: str, dtype: torch.dtype, device_type: str) -> bool:
    """Whether a backend runs on logits of this dtype on this type of device."""
    return _supports(name, dtype, device_type) and _missing_requirement(name) is None


def _supports(name: str, dtype: torch.dtype, device_type: str) -> bool:
    return name == "torch" or (device_type == "cuda" and dtype in (torch.float32, torch.bfloat16, torch.float16))
