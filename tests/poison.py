"""Uninitialised memory that shows where it is read."""

from collections.abc import Callable
from typing import Any

import torch


def poison_memory(replace: Callable[[Any, str, Any], None] = setattr) -> None:
    """Fills uninitialised floating-point memory with NaN, so that what is never written shows in the result."""

    def poisoned(allocate):
        def wrapper(*args, **kwargs):
            tensor = allocate(*args, **kwargs)
            if tensor.is_floating_point() and not tensor.is_meta:
                with torch.no_grad():
                    tensor.fill_(float("nan"))
            return tensor

        return wrapper

    for name in ("empty", "empty_like"):
        replace(torch, name, poisoned(getattr(torch, name)))
