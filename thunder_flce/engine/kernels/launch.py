"""Launching Triton kernels, in as little of the host's time as Triton allows."""

from typing import Any

import torch

# A block has 1024 threads at most.
_MOST_WARPS = 32 if torch.version.hip is None else 16

# Kernels that are compiled, by what they were compiled for: with their constants, and with their settings, so that the
# address of these is not used again. Triton finds out the former anew at each launch, which takes as long as all else.
_compiled: dict[Any, tuple[Any, list[Any], dict[str, Any]]] = {}
_MOST_COMPILED = 1024


def options(warps: int, registers: int | None = None) -> dict[str, int]:
    """What the compiler is told: warps, and registers of a thread at most, which AMD's compiler does not take."""
    of_registers = {} if registers is None or torch.version.hip is not None else {"maxnreg": registers}
    return {"num_warps": min(warps, _MOST_WARPS), **of_registers}


def launch(kernel: Any, programs: int, arguments: list[Any], settings: dict[str, Any]) -> None:
    """Runs a kernel on so many programs, on the device of its first argument.

    Args:
        kernel: a function of Triton's, whose constants come after its other parameters.
        programs: how many.
        arguments: what is no constant, in the order of the parameters: tensors, None, and ints that are among the
            kernel's `do_not_specialize`.
        settings: constants and options by name. The same object each time for the same settings.
    """
    device = arguments[0].device
    # To ask takes the host less time than to set it.
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        _launch(kernel, programs, arguments, settings)
        return
    with torch.cuda.device(device):
        _launch(kernel, programs, arguments, settings)


def _launch(kernel: Any, programs: int, arguments: list[Any], settings: dict[str, Any]) -> None:
    # Addresses in place of tensors, of which Triton would ask the driver whether their memory is the device's.
    given = [each if each is None or type(each) is int else each.data_ptr() for each in arguments]
    # What Triton compiles anew for: dtypes, pointers to multiples of 16 bytes and, since no int is specialised on, the
    # width of ints.
    kinds = [
        None if address is None else -(2**31) <= each < 2**31 if type(each) is int else (each.dtype, address % 16 == 0)
        for each, address in zip(arguments, given, strict=True)
    ]
    key = (id(kernel), id(settings), arguments[0].get_device(), *kinds)
    known = _compiled.get(key)
    if known is not None:
        compiled, constants, _ = known
        compiled[(programs, 1, 1)](*given, *constants)
        return
    compiled = kernel[(programs,)](*arguments, **settings)
    if hasattr(compiled, "packed_metadata"):  # Not so in the interpreter.
        constants = [settings[name] for name in kernel.arg_names[len(arguments) :]]
        if len(_compiled) >= _MOST_COMPILED:
            _compiled.clear()
        _compiled[key] = compiled, constants, settings
