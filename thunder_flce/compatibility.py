"""What lightning-thunder 0.2.6 and 0.2.7.dev20260201 need to be imported with torch 2.13 to 2.15.

thunder's import looks up names that PyTorch no longer has, and registers what it finds; nothing that it traces later
reads them from PyTorch. So they are there while thunder is imported, and gone afterwards: another library may ask
PyTorch what it has.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.autograd import Function

# torch 2.13 has no named tensors; thunder lists their methods among the operations that it hands on to PyTorch.
REMOVED_METHODS = ("align_as", "align_to", "has_names", "refine_names", "rename")


@contextmanager
def names_for_thunder() -> Iterator[None]:
    """PyTorch has the names that the import of thunder looks up."""
    with ExitStack() as names:
        for name in REMOVED_METHODS:
            if not hasattr(torch.Tensor, name):
                names.enter_context(mock.patch.object(torch.Tensor, name, _removed(name), create=True))
        # Since torch 2.14, `Function.apply` is a builtin; thunder registers a rule for the function behind the method.
        if not hasattr(Function.apply, "__func__"):
            names.enter_context(mock.patch.object(Function, "apply", _apply_of(vars(Function)["apply"])))
        yield


def _removed(name: str) -> Callable:
    """A function for each name, since thunder tells operations apart by their functions."""

    def method(*_: Any, **__: Any) -> None:
        raise NotImplementedError(f"torch {torch.__version__} has no torch.Tensor.{name}")

    method.__name__ = name
    return method


def _apply_of(builtin: Any) -> classmethod:
    def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        return builtin.__get__(None, cls)(*args, **kwargs)

    return classmethod(apply)
