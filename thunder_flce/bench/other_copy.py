"""This package a second time in the same process, as another checkout has it.

Two versions compare only where they take turns on one warm chip, so both have to be there at once. The other one is
copied under another name, which also takes its place in strings, and with an empty `__init__.py`: nothing of it is
registered with thunder, and only what works without thunder is of use.
"""

import itertools
import re
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import Tensor

PACKAGE = "thunder_flce"

_numbers = itertools.count()


@cache
def load(folder: Path) -> tuple[Callable[..., Tensor], Callable[..., Any]]:
    """Imports the package of a checkout beside the one that is running.

    Args:
        folder: the folder that holds the folder `thunder_flce`, of any commit that has `functional` and `options`.

    Returns:
        Its `linear_cross_entropy` and its `Options`.

    Raises:
        FileNotFoundError: where the folder has no such package.
    """
    package = folder / PACKAGE
    if not (package / "functional.py").is_file():
        raise FileNotFoundError(f"there is no {package / 'functional.py'}")
    # A copy loaded before keeps its name: nothing that it imports later may come from this one.
    name = f"{PACKAGE}_other{next(_numbers)}"
    copied = Path(_holder().name)
    for source in package.rglob("*.py"):
        target = copied / name / source.relative_to(package)
        target.parent.mkdir(parents=True, exist_ok=True)
        is_root = source == package / "__init__.py"
        text = "" if is_root else re.sub(rf"\b{PACKAGE}\b", name, source.read_text(encoding="utf-8"))
        target.write_text(text, encoding="utf-8")
    if str(copied) not in sys.path:
        sys.path.append(str(copied))
    functional, options = (import_module(f"{name}.{module}") for module in ("functional", "options"))
    return functional.linear_cross_entropy, options.Options


@cache
def _holder() -> tempfile.TemporaryDirectory:
    """The folder of all copies, there until the process ends: Triton reads the source of its kernels again."""
    return tempfile.TemporaryDirectory(prefix=f"{PACKAGE}-copies-")
