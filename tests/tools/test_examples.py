"""The examples run to their end, with smaller sizes; that results with and without fusion agree, they check."""

import contextlib
import importlib.util
import io
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from ranks import as_processes

FOLDER = Path(__file__).parents[2] / "examples"
NEEDS = {
    "llama": ["transformers"],
    "train_gpt": ["litgpt", "rich", "tokenizers", "tqdm"],
    "trainer": ["accelerate", "tokenizers", "transformers"],
}


@pytest.fixture
def load(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))

    def load(name):
        for package in NEEDS.get(name, ()):
            pytest.importorskip(package, reason="needs the extra 'examples'")
        spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        return module

    return load


def test_an_example_of_notebook_cells(load):
    load("thunder_jit")


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("name", "sizes", "words"), [
    ("functional", {"VOCAB": 4096}, ["plain PyTorch, in thunder_flce.jit"]),
    ("grpo", {"VOCAB": 1024}, ["gradients in forward"]),
    ("dpo", {"VOCAB": 1024}, ["its gradients wait for the backward", "frozen head", "gradients in forward"]),
    ("torch_compile", {"VOCAB": 512}, ["peak MiB"]),
    ("llama", {}, ["fused, gradients in forward"]),
    ("trainer", {"VOCAB": 512, "TEXT_BYTES": 2**15}, ["gradients in forward", "evaluation"]),
])  # fmt: skip
def test_an_example(name, sizes, words, load, capsys, monkeypatch):
    example = load(name)
    for constant, size in sizes.items():
        monkeypatch.setattr(example, constant, size)
    assert not example.main()
    printed = capsys.readouterr().out
    assert re.search(".*".join(words), printed, re.DOTALL)
    assert name != "llama" or float(printed.split()[-1].removesuffix("x")) < 0.5


RANKS = pytest.mark.parametrize("name", ["tensor_parallel", "fsdp2"])


def check_losses(printed):
    """Asserts that eight steps were printed, and that they reduce the loss."""
    losses = re.findall(r"loss (\d+\.\d+), with the .* (\d+\.\d+)", printed)
    assert "MiB a step" in printed
    assert len(losses) == 8 and float(losses[-1][0]) < float(losses[0][0]) - 1


def _printed(rank, name):
    sys.path.insert(0, str(FOLDER))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        importlib.import_module(name).run_rank("cpu")
    return printed.getvalue()


@RANKS
def test_two_ranks(name):
    first, second = as_processes(2, partial(_printed, name=name))
    assert second == ""
    check_losses(first)


@pytest.mark.slow
@RANKS
def test_two_ranks_without_torchrun(name):
    command = [sys.executable, str(FOLDER / f"{name}.py")]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    # At its very end, after all comparisons, gloo may abort a process whose threads still run.
    is_aborted = "terminate called without an active exception" in run.stderr and "AssertionError" not in run.stderr
    assert run.returncode == 0 or is_aborted, run.stderr
    check_losses(run.stdout)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_demo(load, tmp_path, monkeypatch, capsys):
    demo = load("train_gpt")
    monkeypatch.setitem(demo.SETUPS, "cpu", replace(demo.SETUPS["cpu"], vocab=512, batch=2, length=64, layers=0))
    text = tmp_path / "text.txt"
    text.write_text("\n".join(path.read_text(encoding="utf-8") for path in FOLDER.glob("*.py")), encoding="utf-8")
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", "--device", "cpu", "--steps", "3", "--text", str(text)])
    assert demo.main() == 0
    printed = capsys.readouterr().out
    assert "peak memory of head and loss" in printed and "flce_scale_gradients" in printed
