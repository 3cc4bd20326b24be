"""The examples run to their end, the demo with a smaller model."""

import importlib.util
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from torch._dynamo.backends.registry import _BACKENDS, _COMPILER_FNS

from thunder_flce.backend import compile_graph

FOLDER = Path(__file__).parent.parent / "examples"
NEEDS = {
    "dpo": [],
    "fsdp2": [],
    "functional": [],
    "gain": [],
    "grpo": [],
    "llama": ["transformers"],
    "local_text": ["tokenizers"],
    "show_traces": ["rich"],
    "tensor_parallel": [],
    "thunder_jit": [],
    "torch_compile": [],
    "train_gpt": ["litgpt", "rich", "tokenizers", "tqdm"],
    "trainer": ["accelerate", "tokenizers", "transformers"],
}


@pytest.fixture
def load(monkeypatch):
    """Gives an example's module by its name."""
    monkeypatch.syspath_prepend(str(FOLDER))

    def load(name):
        for package in NEEDS[name]:
            pytest.importorskip(package, reason="needs the extra 'examples'")
        spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.py")))
def test_loads(name, load):
    assert load(name).__doc__


def test_functional(load, capsys, monkeypatch):
    example = load("functional")
    monkeypatch.setattr(example, "VOCAB", 4096)
    example.main()
    assert "plain PyTorch, in thunder_flce.jit" in capsys.readouterr().out


def test_grpo(load, capsys):
    """That losses are the same, the example checks for itself."""
    load("grpo").main()
    assert "gradients in forward" in capsys.readouterr().out


def test_dpo(load, capsys):
    """That losses are the same, the example checks for itself."""
    load("dpo").main()
    of_trained_head, of_frozen_head = capsys.readouterr().out.split("frozen head")
    assert "its gradients wait for the backward" in of_trained_head and "gradients in forward" in of_frozen_head


@pytest.mark.parametrize("name", ["tensor_parallel", "fsdp2"])
def test_two_ranks(name):
    command = [sys.executable, str(FOLDER / f"{name}.py")]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert run.returncode == 0, run.stderr
    losses = re.findall(r"loss (\d+\.\d+), with the .* (\d+\.\d+)", run.stdout)
    # That they are equal, the example checks for itself.
    assert "MiB a step" in run.stdout
    assert len(losses) == 8 and float(losses[-1][0]) < float(losses[0][0]) - 1


@pytest.fixture
def without_inductor(without_inductor, monkeypatch):
    for registry in (_BACKENDS, _COMPILER_FNS):  # Whatever entry point is installed.
        monkeypatch.setitem(registry, "thunder_flce", compile_graph)


def test_torch_compile(load, capsys, monkeypatch, without_inductor):
    example = load("torch_compile")
    monkeypatch.setattr(example, "VOCAB", 512)
    example.main()
    assert "peak MiB" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_llama(load, capsys, without_inductor):
    """That losses and gradients are the same, the example checks for itself."""
    load("llama").main()
    printed = capsys.readouterr().out
    assert "fused, gradients in forward" in printed and float(printed.split()[-1].removesuffix("x")) < 0.5


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_trainer(load, capsys, monkeypatch, without_inductor):
    """That losses are the same, the example checks for itself."""
    example = load("trainer")
    monkeypatch.setattr(example, "VOCAB", 512)
    monkeypatch.setattr(example, "TEXT_BYTES", 2**15)
    assert example.main() == 0
    out = capsys.readouterr().out
    assert "gradients in forward" in out and "evaluation" in out


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
    assert "peak memory of head and loss" in printed and "flce_scale_gradients" in printed
