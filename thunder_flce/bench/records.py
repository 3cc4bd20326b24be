"""Results as JSON lines: what was measured, with the machine, the versions, the commit and the command."""

import datetime
import json
import platform
import subprocess
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

_PACKAGES = (
    "torch", "lightning-thunder", "triton", "litgpt", "transformers", "liger-kernel", "cut-cross-entropy",
    "quack-kernels", "trl", "nvidia-cutlass-dsl", "cuda-tile", "nvfuser-cu128-torch210", "nvfuser-cu130-torch210",
)  # fmt: skip


def context(command: str, *, device: str, commit: str | None = None) -> dict[str, str]:
    """What a result belongs to.

    Args:
        command: how it was asked for.
        device: "cuda" or "cpu".
        commit: what was measured; by default what git says of this file's repository, left out where it says nothing.
    """
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()} (CPU)",
        "cuda": (device == "cuda" and torch.version.cuda) or "",
        "python": platform.python_version(),
        **versions,
        **({"commit": commit} if (commit := commit or commit_of(Path(__file__).parents[1])) else {}),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "command": command,
    }


def as_words(context: dict[str, str]) -> str:
    """The machine, the versions and the commit, for people."""
    first, *others = ((name, value) for name, value in context.items() if value and name != "command")
    return ", ".join([first[1], *(value if name == "date" else f"{name} {value}" for name, value in others)])


def commit_of(package: Path) -> str | None:
    """The commit that a package is checked out at, with "-dirty" where it differs; None where git does not know it.

    Args:
        package: a folder.
    """

    def git(*arguments: str) -> str | None:
        try:
            result = subprocess.run(["git", *arguments], cwd=package, capture_output=True, text=True)
        except FileNotFoundError:
            return None
        return result.stdout.strip() if result.returncode == 0 else None

    # A folder that git ignores is not of the commit that the folder around it is at.
    head = git("rev-parse", "--short=12", "HEAD") if git("ls-files", ".") else None
    return f"{head}-dirty" if head and git("status", "--porcelain", "--", ".") else head


def as_record(subset: str, row: Any) -> dict[str, Any]:
    """A row for JSON: what was not measured is left out, and the fields of a shape stand beside the others."""
    values = {name: value for name, value in vars(row).items() if value is not None}
    shape = values.pop("shape").as_record() if "shape" in values else {}
    return {"subset": subset, **shape, **values}


def append(path: Path, record: dict[str, Any]) -> None:
    """Adds a line, which is on the disk when this returns."""
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def read(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """All records, in the order of the files."""
    return [json.loads(line) for path in paths for line in path.read_text().splitlines() if line.strip()]
