"""Registers this package with thunder, whichever of the two is imported first, without importing thunder.

The plugin "flce", the executor `flce` and the symbol for `linear_cross_entropy` in traced programs are registered.
thunder does not look for such packages, so this has to happen before it compiles anything.

The import of lightning-thunder 0.2.6 and 0.2.7.dev20260201 looks up names that torch 2.13 to 2.15 no longer have, and
registers what it finds. Nothing that it traces later reads these names from PyTorch. So they exist only while thunder
is imported: afterwards, other libraries may check which names PyTorch has.
"""

import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from torch.autograd import Function

from thunder_flce.importing import when_imported

THUNDER_VERSIONS = ">=0.2.6,<0.3"


def register_with_thunder() -> None:
    """Registers everything: now if thunder is imported already, otherwise right after its import."""
    when_imported("thunder", _register, within=_importable)


def _register() -> None:
    try:
        import thunder_flce.graph.plugin  # noqa: F401
    except Exception as error:
        # This must fail neither the import of thunder, which is intact, nor that of this package.
        version = getattr(sys.modules["thunder"], "__version__", "this one")
        problem = f"{version} fails with {type(error).__name__}: {error}"
        message = f"thunder_flce works with lightning-thunder {THUNDER_VERSIONS}; {problem}"
        warnings.warn(message, stacklevel=2)


# torch 2.13 has no named tensors; thunder lists their methods among the operations that it passes on to PyTorch.
_REMOVED_METHODS = ("align_as", "align_to", "has_names", "refine_names", "rename")


@contextmanager
def _importable() -> Iterator[None]:
    """Gives PyTorch the names that the import of thunder looks up, for the duration of the context."""
    if "thunder.core" in sys.modules:
        # The registrations of the failed import remain, so a second import would fail for a misleading reason.
        raise ImportError(
            "an earlier import of thunder has failed in this process. If its error names an attribute that "
            f"torch {torch.__version__} lacks, import thunder_flce before thunder"
        )
    with ExitStack() as names:
        for name in _REMOVED_METHODS:
            if not hasattr(torch.Tensor, name):
                # A separate object for each name, since thunder identifies operations by their functions.
                method = mock.Mock(__name__=name)
                names.enter_context(mock.patch.object(torch.Tensor, name, method, create=True))
        # Since torch 2.14, `Function.apply` is a builtin; thunder registers a rule for the function behind the method.
        if not hasattr(Function.apply, "__func__"):
            builtin = vars(Function)["apply"]
            apply = classmethod(lambda cls, *args, **kwargs: builtin.__get__(None, cls)(*args, **kwargs))
            names.enter_context(mock.patch.object(Function, "apply", apply))
        yield
