"""Launches Triton kernels with little host time: repeated launches bypass Triton's own lookup."""

import inspect
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from thunder_flce.device import Device

# Compiled kernels, by everything for which Triton compiles anew: the launcher's arguments, the constants, and the
# settings, whose id is in the key and must not be reused. Triton itself determines all of that at each launch.
_compiled: dict[Any, tuple[Any, Any, Any, list[Any], dict[str, Any]]] = {}
_MOST_COMPILED = 1024


def kernel(aligned: int, *integers: str) -> Callable[..., Any]:
    """Returns a decorator like `triton.jit`, for functions of tensors, these `integers` and constants, in this order.

    Only the first `aligned` tensors, at most three, are specialised on whether their address is a multiple of 16 bytes.
    The other tensors are vectors, which may be slices of longer ones.
    """

    def decorate(function: Callable[..., None]) -> Any:
        parameters = inspect.signature(function).parameters.items()
        tensors = [name for name, param in parameters if param.annotation is not tl.constexpr and name not in integers]
        return triton.jit(function, do_not_specialize=integers, do_not_specialize_on_alignment=tensors[aligned:])

    return decorate


@lru_cache(maxsize=1024)
def settings_of(**settings: Any) -> dict[str, Any]:
    """Returns the settings of a launch, as the same dict for equal settings."""
    return settings


def for_compiler(device: Device, *, threads: int, registers: int | None = None, **constants: Any) -> dict[str, Any]:
    """Returns Triton's options to compile a kernel with these settings; AMD's compiler takes no limit of registers."""
    register_limit = {} if registers is None or device.is_hip else {"maxnreg": registers}
    # Fuses multiplications with additions, which newer versions of Triton do only on request.
    return {**constants, "num_warps": threads // device.warp_size, "enable_fp_fusion": True, **register_limit}


def contiguous(*vectors: Tensor | None) -> list[Tensor | None]:
    """Returns the vectors made contiguous: a kernel takes no strides of vectors."""
    return [None if vector is None else vector.contiguous() for vector in vectors]


def launch(jitted: Any, programs: int, tensors: Sequence[Any], settings: dict[str, Any], *integers: int) -> None:
    """Launches a kernel on the device of its first tensor.

    Args:
        jitted: a function decorated by `kernel`.
        programs: the number of programs in the grid.
        tensors: in the order of the parameters; None for an absent one, other than the first.
        settings: constants by name, `threads` of a program and, if they are limited, `registers` of a thread. The same
            dict object for the same settings.
        integers: of 64 bits.
    """
    device = tensors[0].get_device()
    # Reading the current device takes the host less time than setting it.
    if device >= 0 and device != torch._C._cuda_getDevice():
        with torch.cuda.device(device):
            launch(jitted, programs, tensors, settings, *integers)
        return
    # Addresses instead of tensors: Triton would ask the driver whether a tensor's memory belongs to the device.
    addresses: list[int | None] = []
    # Triton compiles anew for dtypes, for addresses at multiples of 16 bytes, and for integers beyond 32 bits.
    key_parts: list[Any] = [id(jitted), id(settings), device]
    for tensor in tensors:
        addresses.append(None if tensor is None else tensor.data_ptr())
        key_parts.append(None if tensor is None else tensor.dtype)
    for address in addresses[:3]:
        key_parts.append(address is None or address % 16 == 0)
    for integer in integers:
        key_parts.append(-(2**31) <= integer < 2**31)
    if torch.version.hip is not None:
        # For AMD's GPUs, also for memory within 2 GiB, which vectors never exceed.
        key_parts += [tensor is None or tensor.untyped_storage().nbytes() < 2**31 for tensor in tensors[:3]]
    cached = _compiled.get(key := tuple(key_parts))
    if cached is not None:
        run, function, metadata, constants, _ = cached
        stream = torch._C._cuda_getCurrentRawStream(device)
        # No launch metadata and hooks: Triton has hooks only while one of its own profilers runs.
        run(programs, 1, 1, stream, function, metadata, None, None, None, *addresses, *integers, *constants)
        return
    compiled = jitted[(programs,)](*tensors, *integers, **for_compiler(Device.of(tensors[0].device), **settings))
    if hasattr(compiled, "packed_metadata"):  # Triton's interpreter returns no compiled kernel.
        constants = [settings[name] for name in jitted.arg_names[len(tensors) + len(integers) :]]
        if len(_compiled) >= _MOST_COMPILED:
            _compiled.clear()
        _compiled[key] = compiled.run, compiled.function, compiled.packed_metadata, constants, settings
