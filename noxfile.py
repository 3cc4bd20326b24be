"""`make matrix`: a short suite on all versions that docs/support.md names, each in its own environment.

    nox --list                                      lists the sessions
    nox -s "matrix(python 3.11, torch 2.8)"         runs one session
    nox -k transformers -- --numprocesses 0         runs some sessions, with other arguments for pytest

A session takes two or three minutes on two cores, and 7 GB, most of them for PyTorch, which uv keeps in its cache. If
its tests pass, its environment is deleted. A session whose Python is not installed is skipped, with a warning.
"""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import nox

PYTHONS = ("3.10", "3.11", "3.12", "3.13")
OLDEST_TORCH, *BETWEEN, NEWEST_TORCH = ("2.8", "2.9", "2.10", "2.11", "2.12", "2.13", "2.14", "2.15")
NEWEST_TORCH_OF = {"3.10": "2.14"}
"""Newest torch of Pythons for which it is an older one"""
NVFUSER_PYTHONS, NVFUSER_TORCH = ("3.10", "3.12"), "2.10"
"""Versions for which the extra `nvfuser` has wheels"""
THUNDER, NIGHTLY = "0.2.6", "0.2.7.dev20260201"

# A sample: all entry points, the numbers of every strategy, real models, and Inductor.
SHORT_SUITE = [
    "tests/tools/test_imports.py",
    "tests/api/test_numerics.py::test_every_strategy",
    "tests/api/test_upstream.py",
    "tests/api/test_arguments.py::test_after_a_good_call",
    "tests/api/test_operator.py::test_results_may_change_in_place",
    "tests/api/test_operator.py::test_backward_overwrites_what_only_it_reads",
    "tests/compile/test_thunder.py::test_the_executor_alone",
    "tests/compile/test_thunder.py::test_new_shapes",
    "tests/api/test_modules.py::test_from_linear",
    "tests/compile/test_token_loss.py::test_compiled_programs",
    "tests/compile/test_random_programs.py",
    "tests/compile/test_backend.py::test_any_number_of_tokens",
    "tests/compile/test_disk_cache.py",
    "tests/tools/test_explain.py::test_all_decisions_of_the_process",
    "tests/compile/test_model_zoo.py::test_backend",
    "tests/kernels/test_nvfuser.py",
]


@dataclass(frozen=True, kw_only=True)
class Versions:
    """Versions that a session installs."""

    torch: str
    thunder: str = THUNDER
    nvfuser: bool = False
    transformers: str | None = None
    """None for the version that `thunder.jit` traces, which is installed with litgpt (see pyproject.toml)"""

    def __str__(self) -> str:
        others = {
            f"thunder {self.thunder}": self.thunder != THUNDER,
            "nvFuser": self.nvfuser,
            f"transformers {self.transformers}": self.transformers,
        }
        return ", ".join([f"torch {self.torch}", *(name for name, is_named in others.items() if is_named)])


def _parameters(*sessions: tuple[str, Versions]) -> list[object]:
    return [nox.param(*session, id=f"python {session[0]}, {session[1]}") for session in sessions]


MATRIX = _parameters(
    *((python, Versions(torch=OLDEST_TORCH)) for python in PYTHONS),
    *((python, Versions(torch=NEWEST_TORCH_OF.get(python, NEWEST_TORCH))) for python in PYTHONS),
    *(("3.11", Versions(torch=torch)) for torch in BETWEEN),
    *((python, Versions(torch=NVFUSER_TORCH, nvfuser=True)) for python in NVFUSER_PYTHONS),
    *(("3.12", Versions(torch=torch, thunder=NIGHTLY)) for torch in (NVFUSER_TORCH, NEWEST_TORCH)),
)
MODELS = _parameters(
    *(
        ("3.12", Versions(torch=torch, thunder=thunder, transformers=transformers))
        for torch, thunder, transformers in (
            ("2.10", THUNDER, None),
            ("2.10", THUNDER, "4.57.6"),
            ("2.11", THUNDER, "5.9.0"),
            (NEWEST_TORCH, THUNDER, "5.24.0"),
            ("2.10", NIGHTLY, "4.57.6"),
            (NEWEST_TORCH, NIGHTLY, "5.24.0"),
        )
    )
)

NEWEST_TRAINERS = ("transformers==5.24.0", "trl==1.16.0", "accelerate==1.15.0", "peft==0.21.2")
TORCHTITAN = ("torchtitan==0.3.0", "spmd_types==0.2.3", "tyro", "docstring_parser")
"""torchtitan and the packages that its loss imports; its full requirements cannot be installed beside TRL"""

nox.options.error_on_missing_interpreters = False
nox.options.default_venv_backend = "uv"
nox.needs_version = ">=2025.2.9"

# pyenv's shims on PATH run only versions that a file selects, so its interpreters come first on PATH.
for folder in Path.home().glob(".pyenv/versions/3.*/bin"):
    os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"


@nox.session
@nox.parametrize("python, versions", MATRIX)
def matrix(session: nox.Session, versions: Versions) -> None:
    """Runs the short suite, with models that `thunder.jit` traces."""
    _install(session, versions, extras=["examples"])
    _test(session, *SHORT_SUITE)


@nox.session
@nox.parametrize("python, versions", MODELS)
def models(session: nox.Session, versions: Versions) -> None:
    """Runs the model zoo and trainers, also with newer versions of transformers, which exclude litgpt.

    With transformers 4.57.6, `thunderfx` needs thunder's nightly.
    """
    _install(session, versions, extras=[] if versions.transformers else ["examples"])
    if versions.transformers:
        session.install(f"transformers=={versions.transformers}", "accelerate", "tqdm")
    _test(
        session, "tests/compile/test_model_zoo.py", "tests/tools/test_examples.py", "tests/compile/test_integrations.py"
    )


@nox.session(python="3.12")
def trainers(session: nox.Session) -> None:
    """Runs trainers with the newest transformers, TRL and peft, and torchtitan's loss; `models` has litgpt's."""
    _install(session, Versions(torch="2.10"), extras=["test"])
    session.install(*NEWEST_TRAINERS, "tqdm")
    session.install("--no-deps", *TORCHTITAN)
    _test(session, "tests/compile/test_integrations.py")


@nox.session(python="3.14")
def without_thunder(session: nox.Session) -> None:
    """Runs the README's first program on a Python that thunder does not support."""
    session.install(f"torch=={NEWEST_TORCH}.*", ".")
    program = Path("README.md").read_text().partition("```python\n")[2].partition("```")[0]
    session.run("python", "-c", program)
    shutil.rmtree(session.virtualenv.location, ignore_errors=True)


def _install(session: nox.Session, versions: Versions, *, extras: list[str]) -> None:
    extras = [*extras, "nvfuser"] if versions.nvfuser else extras
    package = f".[{','.join(extras)}]"
    session.install(f"torch=={versions.torch}.*", f"lightning-thunder=={versions.thunder}", package, "--group", "test")
    session.run("python", "-c", "import torch, thunder_flce; print(torch.__version__, thunder_flce.__file__)")


def _test(session: nox.Session, *selected: str) -> None:
    """Runs tests; deletes the environment if they pass."""
    # `python -m pytest` would import the checkout instead of the installed package.
    arguments = session.posargs or ["--numprocesses", "auto", "--maxprocesses", "8", "--dist", "worksteal"]
    session.run("pytest", *selected, "-q", *arguments, env={"GOMP_SPINCOUNT": "10000"})
    shutil.rmtree(session.virtualenv.location, ignore_errors=True)
