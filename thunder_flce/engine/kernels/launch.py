"""Launching Triton kernels, in as little of the host's time as Triton allows."""

import inspect
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from thunder_flce.device import Device

# Kernels that are compiled, by what they were compiled for: what runs them, their constants, and their settings, so
# that the address of these is not used again. Triton finds out all of that anew at each launch.
_compiled: dict[Any, tuple[Any, Any, Any, list[Any], dict[str, Any]]] = {}
_MOST_COMPILED = 1024


def kernel(aligned: int, *integers: str) -> Callable[..., Any]:
    """`triton.jit` of what `launch` runs: parameters are tensors, these integers and constants, in this order.

    It is compiled anew where the memory of one of the first `aligned` tensors, three at most, starts elsewhere than on
    a multiple of 16 bytes, or no longer does. The others are vectors, and slices of longer ones.
    """

    def compiled(function: Callable[..., None]) -> Any:
        parameters = inspect.signature(function).parameters.items()
        tensors = [name for name, each in parameters if each.annotation is not tl.constexpr and name not in integers]
        return triton.jit(function, do_not_specialize=integers, do_not_specialize_on_alignment=tensors[aligned:])

    return compiled


@lru_cache(maxsize=1024)
def settings_of(**settings: Any) -> dict[str, Any]:
    """These settings of a launch, as the same object each time."""
    return settings


def for_compiler(device: Device, *, threads: int, registers: int | None = None, **constants: Any) -> dict[str, Any]:
    """What Triton is told to compile a kernel of these settings for a device. AMD's compiler takes no registers."""
    of_registers = {} if registers is None or device.is_hip else {"maxnreg": registers}
    # Multiplications and additions become one operation; newer versions of Triton do so only where they are told.
    return {**constants, "num_warps": threads // device.warp_size, "enable_fp_fusion": True, **of_registers}


def contiguous(*vectors: Tensor | None) -> list[Tensor | None]:
    """The vectors as a kernel takes them, which could not tell that one is not contiguous."""
    return [None if vector is None else vector.contiguous() for vector in vectors]


def launch(jitted: Any, programs: int, tensors: Sequence[Any], settings: dict[str, Any], *integers: int) -> None:
    """Runs a kernel on so many programs, on the device of its first tensor.

    Args:
        jitted: what `kernel` made.
        programs: how many.
        tensors: in the order of the parameters; None for those but the first that are not there.
        settings: constants by name, `threads` of a program and, if there is a limit, `registers` of each. The same
            object each time for the same settings.
        integers: of 64 bits.
    """
    device = tensors[0].get_device()
    # To ask takes the host less time than to set it.
    if device >= 0 and device != torch._C._cuda_getDevice():
        with torch.cuda.device(device):
            launch(jitted, programs, tensors, settings, *integers)
        return
    # Addresses in place of tensors, of which Triton would ask the driver whether their memory is the device's.
    addresses: list[int | None] = []
    # What Triton compiles anew for: dtypes, pointers to multiples of 16 bytes and integers of more than 32 bits.
    kinds: list[Any] = [id(jitted), id(settings), device]
    for each in tensors:
        addresses.append(None if each is None else each.data_ptr())
        kinds.append(None if each is None else each.dtype)
    for address in addresses[:3]:
        kinds.append(address is None or address % 16 == 0)
    for integer in integers:
        kinds.append(-(2**31) <= integer < 2**31)
    if torch.version.hip is not None:
        # And for AMD's GPUs memory that 32 bits reach, which vectors never exceed.
        kinds += [each is None or each.untyped_storage().nbytes() < 2**31 for each in tensors[:3]]
    known = _compiled.get(key := tuple(kinds))
    if known is not None:
        run, function, metadata, constants, _ = known
        stream = torch._C._cuda_getCurrentRawStream(device)
        # Nothing for Triton's hooks, of which there are none but while one of its own profilers runs.
        run(programs, 1, 1, stream, function, metadata, None, None, None, *addresses, *integers, *constants)
        return
    compiled = jitted[(programs,)](*tensors, *integers, **for_compiler(Device.of(tensors[0].device), **settings))
    if hasattr(compiled, "packed_metadata"):  # Not so in the interpreter.
        constants = [settings[name] for name in jitted.arg_names[len(tensors) + len(integers) :]]
        if len(_compiled) >= _MOST_COMPILED:
            _compiled.clear()
        _compiled[key] = compiled.run, compiled.function, compiled.packed_metadata, constants, settings
