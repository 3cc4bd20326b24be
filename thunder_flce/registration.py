"""Has thunder know of this package whichever of the two is imported first, without importing thunder.

What thunder must know is the plugin "flce", the executor `flce`, and what a `linear_cross_entropy` in a traced program
is. thunder asks nobody for these, so they have to be registered before it compiles anything.
"""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from thunder_flce.compatibility import names_for_thunder
from thunder_flce.importing import when_imported


def register_with_thunder() -> None:
    """Registers everything now, where thunder is imported already, or else right after its import."""
    when_imported("thunder", _register, within=_importable)


@contextmanager
def _importable() -> Iterator[None]:
    if "thunder.core" in sys.modules:
        # What it registered is still there, so that it would fail for another reason now.
        raise ImportError(
            "an earlier import of thunder has failed in this process. If its error names an attribute that "
            f"torch {torch.__version__} lacks, import thunder_flce before thunder"
        )
    with names_for_thunder():
        yield


def _register() -> None:
    try:
        import thunder_flce.graph.plugin  # noqa: F401
    except Exception as error:
        # thunder itself is fine, so its import, or ours, must not fail.
        message = f"thunder_flce does not work with this lightning-thunder: {type(error).__name__}: {error}"
        warnings.warn(message, stacklevel=2)
