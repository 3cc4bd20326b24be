"""`make matrix`: a short suite on the versions that README.md names, each in an environment of its own.

    nox --list                                      the sessions
    nox -s "matrix(python 3.11, torch 2.8)"         one of them
    nox -k nvFuser -- --numprocesses 0              some of them, with other arguments for pytest

A session takes 5 minutes or so and 7 GB, most of them for PyTorch. Where its tests pass, its environment is deleted.
A session whose Python is not installed is skipped, with a warning.
"""

import os
import shutil
from pathlib import Path

import nox

PYTHONS = ("3.10", "3.11", "3.12", "3.13")
OLDEST_TORCH, *BETWEEN, NEWEST_TORCH = ("2.8", "2.9", "2.10", "2.11")
NVFUSER_PYTHONS, NVFUSER_TORCH = ("3.10", "3.12"), "2.10"
"""What the extra `nvfuser` has wheels for."""

# Whole files: imports, the numbers, thunder.jit, thunderfx, the operators, real models, the plan, and the kernels
# in Triton's interpreter.
SHORT_SUITE = [
    f"tests/test_{name}.py"
    for name in (
        *("imports", "numerics", "thunder", "fx", "operator", "upstream", "models", "modules", "plan", "explain"),
        *("nvfuser", "triton_rows", "examples"),
    )
]

VERSIONS = [
    *((python, torch, False) for python in PYTHONS for torch in (OLDEST_TORCH, NEWEST_TORCH)),
    *(("3.12", torch, False) for torch in BETWEEN),
    *((python, NVFUSER_TORCH, True) for python in NVFUSER_PYTHONS),
]
SESSIONS = [
    nox.param(*versions, id=f"python {versions[0]}, torch {versions[1]}{', nvFuser' if versions[2] else ''}")
    for versions in VERSIONS
]

nox.options.error_on_missing_interpreters = False
nox.needs_version = ">=2025.2.9"

# pyenv's shims are on PATH, but run the versions only that are chosen in some file; so its interpreters go before them.
for folder in Path.home().glob(".pyenv/versions/3.*/bin"):
    os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"


@nox.session
@nox.parametrize("python, torch, nvfuser", SESSIONS)
def matrix(session: nox.Session, torch: str, nvfuser: bool) -> None:
    """Installs the package and runs the short suite."""
    session.install(f"torch=={torch}.*", ".[test,nvfuser]" if nvfuser else ".[test]")
    session.run("python", "-c", "import torch, thunder_flce; print(torch.__version__, thunder_flce.__file__)")
    # The command, not `python -m pytest`: that would put the checkout before the package that is installed.
    arguments = session.posargs or ["--numprocesses", "auto", "--maxprocesses", "8"]
    session.run("pytest", *SHORT_SUITE, "-q", *arguments, env={"GOMP_SPINCOUNT": "10000"})
    shutil.rmtree(session.virtualenv.location, ignore_errors=True)
