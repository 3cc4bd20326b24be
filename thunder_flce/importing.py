"""What is to happen when another package is imported, without importing it: thunder and Dynamo take seconds."""

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch


def when_imported(
    name: str, then: Callable[[], Any], *, within: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> None:
    """Calls `then` now, where a module is imported already, or else right after its import, which runs `within`."""
    if name in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _Finder(name, then, within))


def without_dynamo(function: Callable[..., Any], reason: str | None = None) -> Callable[..., Any]:
    """A function into which Dynamo does not look: `torch.compiler.disable`, which would import Dynamo, once it is."""
    called = function

    def disable() -> None:
        nonlocal called
        called = torch.compiler.disable(function, reason=reason)

    when_imported("torch._dynamo", disable)
    return lambda *args, **kwargs: called(*args, **kwargs)


class _Finder(MetaPathFinder):
    """Finds a module where the other finders do, calls a function once it has been executed, and goes."""

    def __init__(self, name: str, then: Callable[[], Any], within: Callable[[], AbstractContextManager[Any]]):
        self._name, self._then, self._within = name, then, within

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The other finders' spec of the module; None for anything else."""
        if fullname != self._name:
            return None
        # Those before this one have not found it, and may be others of this class.
        place = sys.meta_path.index(self) if self in sys.meta_path else -1
        specs = (finder.find_spec(fullname, path, target) for finder in sys.meta_path[place + 1 :])
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            loader = spec.loader
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                vars(loader).pop("exec_module", None)
                with self._within():
                    execute(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                self._then()

            # On the loader, which stays the one that the module's resources and sources are found with.
            vars(loader)["exec_module"] = exec_module
        return spec
