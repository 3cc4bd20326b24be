"""Room on Python's stack for what a program of Inductor's calls.

Python keeps frames in chunks of 16 KB. CPython up to 3.13.12 and 3.14.3 gives a chunk back to the system as soon as the
call that needed it returns (python/cpython#142183). A compiled program is one function whose frame may be nearly as
large. Where it ends near the end of a chunk, each launch maps memory and unmaps it: 9 µs a call, which is 15% to 40% of
the host's time for a model of 24 layers. A frame for which a chunk is too small gets one of its own, in which there is
room for a thousand further objects.
"""

import sys
from collections.abc import Callable
from functools import wraps
from types import FunctionType
from typing import Any

_CHUNK_SLOTS = 2**11
"""Objects that a chunk can hold"""


def with_room(compile: Callable[..., Any]) -> Callable[..., Any]:
    """What compiles, or loads from the disk, programs that get such frames."""
    from torch._inductor.codecache import PyCodeCache

    @wraps(compile)
    def compiled(*args: Any, **kwargs: Any) -> Any:
        known = len(PyCodeCache.modules)
        result = compile(*args, **kwargs)
        for module in PyCodeCache.modules[known:]:
            program = getattr(module, "call", None)
            program = getattr(program, "__func__", program)
            if isinstance(program, FunctionType) and sys.version_info >= (3, 11):
                program.__code__ = program.__code__.replace(co_stacksize=_CHUNK_SLOTS)
        return result

    return compiled
