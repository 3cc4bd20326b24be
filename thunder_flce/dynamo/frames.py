"""Gives large compiled programs room on Python's stack for the functions that they call.

Python keeps frames in chunks of 16 KB. CPython from 3.11 to 3.13.12 and 3.14.3 returns a chunk to the system as soon
as the call that needed it returns (python/cpython#142183). Inductor compiles a program to one function, whose frame may
be nearly as large as a chunk. If the frame ends near the end of a chunk, each launch maps and unmaps memory, which
takes 9 µs: the backward of 24 layers of Qwen 2.5 0.5B took the host 19.9 ms rather than 11.8. A frame that does not fit
into a chunk gets a larger chunk of its own, with room for a thousand further objects.
"""

from collections.abc import Callable
from functools import wraps
from types import FunctionType
from typing import Any

_CHUNK_SLOTS = 2**11
"""Number of objects for which a chunk has room"""
_LARGE = 2**10
"""Number of objects of a frame from which it may leave too little room; smaller frames seldom do."""


def with_room(compile: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function that compiles programs, or loads them from disk: large programs get frames beyond a chunk."""
    from torch._inductor.codecache import PyCodeCache

    @wraps(compile)
    def compiled(*args: Any, **kwargs: Any) -> Any:
        count = len(PyCodeCache.modules)
        result = compile(*args, **kwargs)
        for module in PyCodeCache.modules[count:]:
            program = getattr(module, "call", None)
            program = getattr(program, "__func__", program)
            if isinstance(program, FunctionType):
                code = program.__code__
                if _LARGE <= code.co_nlocals + code.co_stacksize <= _CHUNK_SLOTS:
                    program.__code__ = code.replace(co_stacksize=_CHUNK_SLOTS)
        return result

    return compiled
