"""Callbacks for the import of other packages, which this does not import itself: thunder and Dynamo take seconds."""

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
    """Calls `then` once a module is imported: now, or right after its import, which runs in the context `within`."""
    if name in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _Finder(name, then, within))


def without_dynamo(function: Callable[..., Any], reason: str | None = None) -> Callable[..., Any]:
    """Applies `torch.compiler.disable` to a function once Dynamo is imported: applied now, it would import Dynamo."""
    wrapped = function

    def disable() -> None:
        nonlocal wrapped
        wrapped = torch.compiler.disable(function, reason=reason)

    when_imported("torch._dynamo", disable)
    return lambda *args, **kwargs: wrapped(*args, **kwargs)


class _Finder(MetaPathFinder):
    """Finder that calls a function once a module has been executed, and then removes itself; other finders find it."""

    def __init__(self, name: str, then: Callable[[], Any], within: Callable[[], AbstractContextManager[Any]]):
        self._name, self._then, self._within = name, then, within

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns the other finders' spec of the module, with a wrapped loader; None for other modules."""
        if fullname != self._name:
            return None
        # Finders before this one have not found it, and may be further instances of this class.
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

            # Set on the loader itself, since the module's resources and sources are found through that object.
            vars(loader)["exec_module"] = exec_module
        return spec
