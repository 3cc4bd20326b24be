"""The tests of Triton's kernels without a GPU: in its interpreter, which is chosen when kernels are imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from interpreted import needs_triton

FILES = {
    "engine": ["test_engine_interpreted.py"],
    "kernels": ["test_row_kernels.py", "test_triton_rows.py"],
}


@needs_triton
@pytest.mark.parametrize("files", FILES.values(), ids=FILES)
def test_in_the_interpreter(files):
    """In a process of its own; each file has tests that run there."""
    command = [sys.executable, "-m", "pytest", *files, "-x", "-q", "-rA", "-p", "no:cacheprovider"]
    environment, folder = {**os.environ, "TRITON_INTERPRET": "1"}, Path(__file__).parent
    run = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-4000:]
    assert all(f"PASSED {file}::" in run.stdout for file in files)
