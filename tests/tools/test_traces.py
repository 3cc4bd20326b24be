"""Traces: the printed ones are current, and what is saved, computed and fused is what it should be."""

import os
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest
import thunder
import torch
from torch.utils.checkpoint import checkpoint

import thunder_flce
from thunder_flce import Options
from thunder_flce.inspection import programs
from thunder_flce.options import STRATEGIES

TRACES = Path(__file__).parents[2] / "traces"
sys.path.insert(0, str(TRACES))

import regenerate  # noqa: E402

SIZES = programs.Sizes(batch=2, sequence=24, hidden=16, vocab=100)
STANDALONE = programs.logits_returned
FUSED = [program for program in programs.PROGRAMS if program is not STANDALONE]
CASES = [
    (program, strategy)
    for program in FUSED
    for strategy in STRATEGIES
    if not (program is programs.reduction_none and strategy == "gradients_in_forward")
]
each_case = pytest.mark.parametrize(("program", "strategy"), CASES, ids=lambda x: getattr(x, "__name__", x))
needs_nvfuser = pytest.mark.skipif(not find_spec("nvfuser_direct"), reason="needs nvFuser's Python package")

FORWARD = {"flce_linear_cross_entropy_fwd", "flce_cross_entropy_fwd"}
BACKWARD = {"flce_linear_cross_entropy_bwd", "flce_cross_entropy_bwd", "flce_scale_gradients"}
UNFUSED = {"linear", "cross_entropy", "log_softmax", "logsumexp", "nll_loss"}


on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, thunder has other executors")


def _assert_current(files: dict[str, str], versions: str) -> None:
    """That the files of the same folders in traces/ are these, unless they were printed with other versions."""
    folders = {Path(path).parent for path in files}
    committed = {
        path.relative_to(TRACES).as_posix(): path.read_text(encoding="utf-8")
        for folder in folders
        for path in (TRACES / folder).glob("*.py")
    }
    others = sorted(path for path, text in committed.items() if versions not in text)
    if others:
        pytest.skip(f"traces/{others[0]} was printed with other versions than {versions}")
    changed = sorted(path for path in files | committed if files.get(path) != committed.get(path))
    assert not changed, f"not current: {', '.join(changed)}; run `python traces/regenerate.py` and read the diff"


@on_cpu
def test_cpu_traces_are_current():
    _assert_current(regenerate.build_traces("cpu"), regenerate.versions())


def test_distributed_traces_are_current(tmp_path):
    """In a process of its own: the numbers of process groups count on."""
    program = "import regenerate as r; r.write(r.build_distributed(), r.Path(__import__('sys').argv[1]))"
    _run(["-c", program, str(tmp_path)])
    printed = {f"distributed/{path.name}": path.read_text(encoding="utf-8") for path in tmp_path.glob("*/*.py")}
    _assert_current(printed, regenerate.versions())


@needs_nvfuser
def test_nvfuser_definitions_are_current():
    _assert_current(regenerate.build_fusions(), regenerate.nvfuser_versions())


def _run(command: list[str]) -> None:
    search_path = os.pathsep.join([str(TRACES.parent), str(TRACES), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": search_path}
    subprocess.run([sys.executable, *command], check=True, env=environment)


def _compile(program, *, options=None, jit=thunder_flce.jit, **settings):
    """The final forward and backward trace of a program."""
    jitted = jit(program, **settings) if options is None else jit(program, options=options, **settings)
    jitted(*programs.arguments(program, SIZES, device="cpu", dtype=torch.float32))
    return thunder.last_traces(jitted)[-1], thunder.last_backward_traces(jitted)[-1]


def _count(trace) -> Counter:
    """How often each of the symbols of a loss stands in a trace, on its own or inside of others."""
    found = Counter()
    waiting = list(trace.bound_symbols)
    while waiting:
        bsym = waiting.pop()
        if bsym.sym.name in FORWARD | BACKWARD | UNFUSED:
            found[bsym.sym.name] += 1
        else:
            waiting += bsym.subsymbols
    return found


@each_case
def test_recompute_option_brings_no_forward_back(program, strategy):
    forward, backward = _compile(program, options=Options(strategy=strategy), auto_recompute_intermediates=True)
    assert _count(forward) == {"flce_linear_cross_entropy_fwd": 1}
    assert not _count(backward).keys() & (FORWARD | UNFUSED)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_checkpoint_brings_no_forward_back(strategy):
    def loss(hidden, weight, labels):
        # What checkpoint marks is what is not returned; the product makes the loss such a tensor.
        return programs.litgpt(hidden, weight, labels) * 2

    def program(hidden, weight, labels):
        return checkpoint(loss, hidden, weight, labels, use_reentrant=False)

    forward, backward = _compile(program, options=Options(strategy=strategy))
    assert _count(forward) == {"flce_linear_cross_entropy_fwd": 1}
    assert not _count(backward).keys() & (FORWARD | UNFUSED)


@pytest.mark.filterwarnings("ignore::thunder_flce.NotFusedWarning")
def test_standalone_cross_entropy():
    forward, backward = _compile(STANDALONE, auto_recompute_intermediates=True)
    assert _count(forward) == {"linear": 1, "flce_cross_entropy_fwd": 1}
    assert _count(backward) == {"flce_cross_entropy_bwd": 1}


# Traces for CUDA, which need no GPU. They are read as text, because they come from another process.


@pytest.fixture(scope="module")
def cuda_traces(tmp_path_factory) -> dict[str, str]:
    """Compiled in a process of its own: thunder decides when it is imported whether it has nvFuser."""
    folder = tmp_path_factory.mktemp("traces")
    _run([str(TRACES / "regenerate.py"), "--device", "cuda", "--output", str(folder)])
    return {path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8") for path in folder.glob("cuda/*.py")}


@needs_nvfuser
def test_cuda_traces_are_current(cuda_traces):
    _assert_current(cuda_traces, regenerate.versions())
