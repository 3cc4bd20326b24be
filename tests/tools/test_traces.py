"""The printed traces are current, and thunder recomputes no loss in the backward."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import thunder
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import thunder_flce
from front_ends import symbols
from thunder_flce.inspection import programs

TESTS = Path(__file__).parents[1]
TRACES = TESTS.parent / "traces"
sys.path.insert(0, str(TRACES))

import regenerate  # noqa: E402

SIZES = programs.Sizes(batch=2, sequence=24, hidden=16, vocab=100)
HAS_NVFUSER = find_spec("nvfuser_direct") is not None
needs_nvfuser = pytest.mark.skipif(not HAS_NVFUSER, reason="needs nvFuser's Python package")
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, thunder has other executors")


def _read(folder: Path, pattern: str) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8") for path in folder.glob(pattern)}


def _assert_current(files: dict[str, str], versions: str) -> None:
    """Asserts that traces/ has these files in their folders; skips if those were printed with other versions."""
    folders = {Path(path).parent for path in files}
    committed = {name: text for folder in folders for name, text in _read(TRACES, f"{folder}/*.py").items()}
    others = sorted(path for path, text in committed.items() if versions not in text)
    if others:
        pytest.skip(f"traces/{others[0]} was printed with other versions than {versions}")
    changed = sorted(path for path in files | committed if files.get(path) != committed.get(path))
    assert not changed, f"not current: {', '.join(changed)}; run `python traces/regenerate.py` and read the diff"


@on_cpu
def test_cpu_traces_are_current():
    _assert_current(regenerate.build_traces("cpu"), regenerate.versions())


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """The folder of traces for other devices, printed in a fresh process.

    The numbers of process groups count on in a process, and thunder looks for nvFuser when it is imported.
    """
    offer, cuda = ("r._offer_nvfuser()", " | r.build_traces('cuda')") if HAS_NVFUSER else ("", "")
    files = f"r.build_distributed(){cuda}"
    program = f"import sys, regenerate as r\n{offer}\nimport quick\nr.write({files}, r.Path(sys.argv[1]))"
    search_path = os.pathsep.join([*map(str, (TRACES.parent, TRACES, TESTS)), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": search_path}
    folder = tmp_path_factory.mktemp("printed")
    subprocess.run([sys.executable, "-c", program, str(folder)], check=True, env=environment)
    return folder


@pytest.mark.parametrize("folder", ["distributed", pytest.param("cuda", marks=needs_nvfuser)])
def test_traces_of_other_devices_are_current(folder, printed):
    _assert_current(_read(printed, f"{folder}/*.py"), regenerate.versions())


@needs_nvfuser
def test_nvfuser_definitions_are_current():
    _assert_current(regenerate.build_fusions(), regenerate.nvfuser_versions())


def _checkpointed(hidden, weight, labels):
    """An unfused loss in a checkpoint, whose linear is recomputed for the logits."""
    return checkpoint(_not_fused, hidden, weight, labels, use_reentrant=False)


def _not_fused(hidden, weight, labels):
    # checkpoint marks tensors that are not returned; the product makes the loss such a tensor.
    return 2 * F.cross_entropy(F.linear(hidden, weight).relu().flatten(0, 1), labels.flatten())


@pytest.mark.filterwarnings("ignore::thunder_flce.NotFusedWarning")
@pytest.mark.parametrize("program", [programs.litgpt, programs.reduction_none, programs.logits_returned, _checkpointed])
def test_the_backward_recomputes_no_loss(program):
    """thunder recomputes there what it can or has to."""
    jitted = thunder_flce.jit(program, auto_recompute_intermediates=program is not _checkpointed)
    jitted(*programs.arguments(program, SIZES, device="cpu", dtype=torch.float32))
    forward, backward = (
        [bsym.sym.name for bsym in symbols(traces[-1])]
        for traces in (thunder.last_traces(jitted), thunder.last_backward_traces(jitted))
    )
    assert sum(name.endswith("cross_entropy_fwd") for name in forward) == 1
    assert {"flce_linear_cross_entropy_bwd", "flce_cross_entropy_bwd", "flce_scale_gradients"} & {*backward}
    assert not any(re.search("cross_entropy_fwd$|^cross_entropy$|softmax|logsumexp|nll", name) for name in backward)
