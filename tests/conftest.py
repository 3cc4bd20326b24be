"""Fixtures of all tests: a seed, devices, poisoned memory, and compilation without Inductor."""

import os

if "PYTEST_XDIST_WORKER" in os.environ:
    # Set before torch reads it: tests run in parallel on small matrices, where a second thread only waits.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # The threads of tests that have two soon stop spinning while they wait, and leave the cores to other tests.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

# First, as for users with torch 2.13 or newer, where thunder can be imported only after thunder_flce.
import thunder_flce  # noqa: F401 # isort: skip

import gc

import pytest
import thunder
import torch
from torch._dynamo import trace_rules
from torch._dynamo.backends import registry
from torch._inductor import cpu_vec_isa

import quick  # noqa: F401
from reference import poison_memory
from thunder_flce import backend
from thunder_flce.backend import compile_graph
from thunder_flce.engine.kernels import dispatch

# The backend of this checkout, whichever version's entry point is installed.
registry._BACKENDS["thunder_flce"] = registry._COMPILER_FNS["thunder_flce"] = compile_graph

# For each set of vector instructions of the processor, Inductor compiles a test program in each process, and starts
# another process that loads it: twenty seconds. The first setting does not cover all sets.
torch._inductor.config.cpp.vec_isa_ok = True
cpu_vec_isa.VecISA.check_build = lambda *_: False


def pytest_configure(config):
    """Turns off pytest's log capture, which formats torch's messages of all levels; no test reads them."""
    config.pluginmanager.set_blocked("logging-plugin")


# These files take minutes together, or a minute alone. They run first, so that no process ends much later than others.
FIRST = ("test_two_ranks.py", "test_interpreted.py", "test_properties.py")


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.name not in FIRST)
    for item in items:
        for mark in item.iter_markers("gpu"):
            if torch.cuda.device_count() < (count := mark.kwargs.get("count", 1)):
                item.add_marker(pytest.mark.skip(reason=f"CUDA devices needed: {count}"))


def pytest_collection_finish():
    """Exempts all modules from garbage collection, which takes a fifth of the time to compile a model."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(200_000, 20, 100)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(1234)


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# "cuda", followed by the backend of the row kernels that "auto" shall choose
INSTALLED = filter(dispatch.is_installed, dispatch.BACKENDS)
BACKENDS = [pytest.param(f"cuda {name}", marks=pytest.mark.gpu) for name in INSTALLED]


def pytest_generate_tests(metafunc):
    """Runs a test on each device; with `ON_EVERY_BACKEND` in its module, also on each installed backend."""
    parameters = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    has_devices = any("device" in ([names] if isinstance(names, str) else names) for names in parameters)
    if "device" in metafunc.fixturenames and not has_devices:
        on_backends = getattr(metafunc.module, "ON_EVERY_BACKEND", False) and torch.cuda.is_available()
        metafunc.parametrize("device", [*DEVICES, *(BACKENDS if on_backends else ())], indirect=True)


@pytest.fixture
def device(request, monkeypatch):
    device, _, backend = request.param.partition(" ")
    if backend:
        others = [name for name in dispatch.BACKENDS if name != backend]
        monkeypatch.setattr(dispatch, "FASTEST", (backend, *others))
    return device


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """See `poison_memory`."""
    # Dynamo looks up PyTorch's functions once, and again after `init_process_group`: drop those that tests replaced.
    rules = trace_rules.get_torch_obj_rule_map
    if rules.cache_info().currsize and torch.empty not in rules():
        rules.cache_clear()
        rules()
    poison_memory(monkeypatch.setattr)


@pytest.fixture
def without_poison(monkeypatch, poisoned_memory):
    """For tests in which the memory or the calls that it takes would count."""
    monkeypatch.undo()


@pytest.fixture(autouse=True)
def unchanged_registry():
    """Fails if a test leaves an executor behind in thunder's list of defaults."""
    before = thunder.get_default_executors()
    yield
    assert thunder.get_default_executors() == before


@pytest.fixture(autouse=True)
def without_inductor(request, monkeypatch):
    """Runs Dynamo's graphs without Inductor, which needs seconds for each, except in tests marked `inductor`.

    Also resets Dynamo: after a few programs with the same code, it would run further ones uncompiled.
    """
    torch._dynamo.reset()
    compiles = request.node.get_closest_marker("inductor") is not None
    if not compiles:
        monkeypatch.setattr(torch._inductor, "compile", lambda graph, inputs, **_: graph)
        for wrapper in (torch._TorchCompileInductorWrapper, backend.Inductor):
            monkeypatch.setattr(wrapper, "__call__", lambda self, graph, inputs: graph)
    # Most entries of the fake tensors' cache are never looked up in a test; keeping them takes a tenth of the time.
    with torch._dynamo.config.patch(fake_tensor_cache_enabled=compiles):
        yield
