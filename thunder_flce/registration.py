"""Has thunder know of this package whichever of the two is imported first, without importing thunder.

What thunder must know is the plugin "flce", the executor `flce`, and what a `linear_cross_entropy` in a traced program
is. thunder asks nobody for these, so they have to be registered before it compiles anything.
"""

import sys
import warnings
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

import torch

from thunder_flce.compatibility import names_for_thunder


def register_with_thunder() -> None:
    """Registers everything now, where thunder is imported already, or else right after its import."""
    if "thunder" in sys.modules:
        _register()
    else:
        sys.meta_path.insert(0, _ThunderFinder())


def _register() -> None:
    try:
        import thunder_flce.graph.plugin  # noqa: F401
    except Exception as error:
        # thunder itself is fine, so its import, or ours, must not fail.
        message = f"thunder_flce does not work with this lightning-thunder: {type(error).__name__}: {error}"
        warnings.warn(message, stacklevel=2)


class _ThunderFinder(MetaPathFinder):
    """Finds thunder where the other finders do, registers everything once it has been executed, and goes."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The other finders' spec of thunder; None for anything else."""
        if fullname != "thunder":
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            loader = spec.loader

            def exec_module(module: ModuleType) -> None:
                del vars(loader)["exec_module"]
                if "thunder.core" in sys.modules:
                    # What it registered is still there, so that it would fail for another reason now.
                    raise ImportError(
                        "an earlier import of thunder has failed in this process. If its error names an attribute that "
                        f"torch {torch.__version__} lacks, import thunder_flce before thunder"
                    )
                with names_for_thunder():
                    loader.exec_module(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                _register()

            # On the loader, which stays the one that thunder's resources and sources are found with.
            vars(loader)["exec_module"] = exec_module
        return spec
