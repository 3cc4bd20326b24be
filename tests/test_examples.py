"""The examples run to their end; the demo, which takes minutes, runs for a few steps.

What examples/llama.py runs is in test_models.py; here, it is only loaded.
"""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "examples"
NEEDS = ("litgpt", "transformers", "rich", "tokenizers", "tqdm")

needs_extra = pytest.mark.skipif(not all(map(importlib.util.find_spec, NEEDS)), reason="needs the extra 'examples'")


@needs_extra
@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        (["functional.py"], "plain PyTorch, in thunder_flce.jit"),
        (["train_gpt.py", "--steps", "2", "--device", "cpu"], "thunder with flce"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_example(arguments, printed, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("\n".join(path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.py"))) * 4)
    text_option = ["--text", str(text)] if arguments[0] == "train_gpt.py" else []
    command = [sys.executable, "-W", "ignore", str(FOLDER / arguments[0]), *arguments[1:], *text_option]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, (run.stdout + run.stderr)[-3000:]
    assert printed in run.stdout


@needs_extra
@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.name)
def test_example_loads(path, monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    assert module.__doc__
