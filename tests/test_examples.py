"""The examples run to their end, the demo with a smaller model; what examples/llama.py runs is in test_models.py."""

import importlib.util
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "examples"
NEEDS = ("litgpt", "transformers", "rich", "tokenizers", "tqdm")

pytestmark = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, NEEDS)), reason="needs the extra 'examples', and rich"
)


@pytest.fixture
def load(monkeypatch):
    """Gives an example's module by its name."""
    monkeypatch.syspath_prepend(str(FOLDER))

    def load(name):
        spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.py")))
def test_loads(name, load):
    assert load(name).__doc__


def test_functional(load, capsys):
    load("functional").main()
    assert "plain PyTorch, in thunder_flce.jit" in capsys.readouterr().out


def test_tensor_parallel():
    command = [sys.executable, str(FOLDER / "tensor_parallel.py")]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert run.returncode == 0, run.stderr
    losses = re.findall(r"loss (\d+\.\d+), with the whole weight (\d+\.\d+)", run.stdout)
    # That they are equal, the example checks for itself.
    assert len(losses) == 8 and float(losses[-1][0]) < float(losses[0][0]) - 1


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_demo(load, tmp_path, monkeypatch, capsys):
    demo = load("train_gpt")
    monkeypatch.setitem(demo.SETUPS, "cpu", replace(demo.SETUPS["cpu"], vocab=512, batch=2, length=64, layers=1))
    text = tmp_path / "text.txt"
    text.write_text("\n".join(path.read_text(encoding="utf-8") for path in FOLDER.glob("*.py")), encoding="utf-8")
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", "--device", "cpu", "--steps", "3", "--text", str(text)])
    assert demo.main() == 0
    printed = capsys.readouterr().out
    assert "peak memory of the loss region" in printed and "scale_gradients" in printed
