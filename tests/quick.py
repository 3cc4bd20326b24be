"""Speeds up compilation by thunder and Dynamo several times, by skipping side work; imported by all tests."""

import dis
import functools
import inspect
import sys
from types import SimpleNamespace

import torch
from thunder.core import interpreter, symbol
from torch._dynamo import guards


def _callers():
    """Returns the caller's frame and the two below it, like `inspect.stack`; thunder reads the third entry only."""
    frame, frames = sys._getframe(1), []
    for _ in range(3):
        code = frame.f_code
        frames.append(inspect.FrameInfo(frame, code.co_filename, frame.f_lineno, code.co_name, None, None))
        frame = frame.f_back
    return frames


# For each program that it compiles, thunder reads the whole stack, with the source of every frame. At each exception in
# a program, it busily waits for another thread. In pytest, both together take half of a small program's time.
interpreter.inspect = SimpleNamespace(**{**vars(inspect), "stack": _callers})
sys.setswitchinterval(1e-4)


def _global(module, name):
    if isinstance(module, WrappedValue) and type(module.value) is dict:
        if name.value in module.value:
            return dict_item(module, name)
        builtins = dict_item(module, interpreter.wrap_const("__builtins__"))
        if type(builtins.value) is dict and name.value in builtins.value:
            return dict_item(builtins, name)
    return globals_lookup(module, name)


def _arguments(arguments):
    if isinstance(arguments, WrappedValue) and type(arguments.value) in (list, tuple):
        return [sequence_item(arguments, interpreter.wrap_const(at)) for at in range(len(arguments.value))]
    return wrap_args_from_list(arguments)


# thunder interprets d[k] for each name and argument that a function of a program reads: again half of the time.
WrappedValue, globals_lookup = interpreter.WrappedValue, interpreter.globals_lookup
wrap_args_from_list = interpreter.wrap_args_from_list
dict_item = interpreter.MutMappingWrapperMethods.__getitem__
sequence_item = interpreter.SequenceWrapperMethods.__getitem__
interpreter.globals_lookup, interpreter.wrap_args_from_list = _global, _arguments
# thunder disassembles each function at every call.
instructions = functools.lru_cache(4096)(lambda code: tuple(dis.get_instructions(code)))
interpreter.dis = SimpleNamespace(**{**vars(dis), "get_instructions": instructions})
# thunder inspects the signature of a meta function for each operation of a trace.
symbol.inspect = SimpleNamespace(**{**vars(inspect), "signature": functools.lru_cache(1024)(inspect.signature)})

# For each program that it compiles, Dynamo times its guards, with the CPU's caches emptied first, and collects garbage:
# a fifth of a small program's time.
guards.profile_guard_manager = lambda *_: 0.0
torch._dynamo.config.run_gc_after_compile = False
