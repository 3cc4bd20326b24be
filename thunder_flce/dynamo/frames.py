"""Room on Python's stack for what a program of Inductor's calls.

Python keeps frames in chunks of 16 KB. CPython from 3.11 to 3.13.12 and 3.14.3 gives a chunk back to the system as soon
as the call that needed it returns (python/cpython#142183). A compiled program is one function, whose frame may be
nearly as large. Where that ends near the end of a chunk, each launch maps memory and unmaps it, which takes 9 µs: the
backward of 24 layers of Qwen 2.5 0.5B asked the host for 19.9 ms in place of 11.8. A frame for which a chunk is too
small gets a larger one of its own, with room for a thousand further objects.
"""

from collections.abc import Callable
from functools import wraps
from types import FunctionType
from typing import Any

_CHUNK_SLOTS = 2**11
"""Objects for which a chunk has room"""
_LARGE = 2**10
"""Objects of a frame that may leave too little room: smaller ones seldom do."""


def with_room(compile: Callable[..., Any]) -> Callable[..., Any]:
    """What compiles programs, or finds them on the disk, of which large ones get such frames."""
    from torch._inductor.codecache import PyCodeCache

    @wraps(compile)
    def compiled(*args: Any, **kwargs: Any) -> Any:
        known = len(PyCodeCache.modules)
        result = compile(*args, **kwargs)
        for module in PyCodeCache.modules[known:]:
            program = getattr(module, "call", None)
            program = getattr(program, "__func__", program)
            if isinstance(program, FunctionType):
                code = program.__code__
                if _LARGE <= code.co_nlocals + code.co_stacksize <= _CHUNK_SLOTS:
                    program.__code__ = code.replace(co_stacksize=_CHUNK_SLOTS)
        return result

    return compiled
