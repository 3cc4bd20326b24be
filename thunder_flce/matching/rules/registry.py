"""The rules, by the names of operations."""

from collections.abc import Callable
from typing import Any

RULES: dict[str, Callable[..., Any]] = {}


def rule(*names: str) -> Callable[[Callable], Callable]:
    """Registers a rule for the operations of these names."""

    def registered(function: Callable) -> Callable:
        RULES.update(dict.fromkeys(names, function))
        return function

    return registered
