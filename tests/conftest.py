"""What every test gets: a seed, devices, poisoned memory and an unchanged registry."""

import os

if "PYTEST_XDIST_WORKER" in os.environ:
    # Before torch reads it: tests run beside each other on small matrices, where a second thread only waits.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # And where a test has two, they do not keep the others from the cores while they wait.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

# First, as users with torch 2.13 or newer have to: without it, they cannot import thunder.
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

# Whatever entry point is installed.
registry._BACKENDS["thunder_flce"] = registry._COMPILER_FNS["thunder_flce"] = compile_graph

# In each process, Inductor compiles a program for each set of vector instructions that the processor has, to see
# whether the compiler knows it, and starts another that loads it: twenty seconds. For some, it does not ask the first.
torch._inductor.config.cpp.vec_isa_ok = True
cpu_vec_isa.VecISA.check_build = lambda *_: False


def pytest_configure(config):
    """Spares what torch logs of each program the formatting: pytest's handlers take all levels. No test reads it."""
    config.pluginmanager.set_blocked("logging-plugin")


# They take minutes together, or a minute alone: they come first, so that no process has one left when others are done.
FIRST = ("test_two_ranks.py", "test_interpreted.py", "test_properties.py")


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.name not in FIRST)
    for item in items:
        for mark in item.iter_markers("gpu"):
            if torch.cuda.device_count() < (count := mark.kwargs.get("count", 1)):
                item.add_marker(pytest.mark.skip(reason=f"CUDA devices needed: {count}"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Files stay together, with what is made once for all of a file's tests; who is done takes tests of the other."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


def pytest_collection_finish():
    """Spares collections of garbage the search through modules: a fifth of the time to compile a model."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(200_000, 20, 100)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(1234)


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# Behind "cuda", the backend of the row kernels that counts as the fastest.
INSTALLED = filter(dispatch.is_installed, dispatch.BACKENDS)
BACKENDS = [pytest.param(f"cuda {name}", marks=pytest.mark.gpu) for name in INSTALLED]


def pytest_generate_tests(metafunc):
    """Each device that a test runs on; where a module is about the engine, each backend that is there, too."""
    given = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    is_given = any("device" in ([names] if isinstance(names, str) else names) for names in given)
    if "device" in metafunc.fixturenames and not is_given:
        is_engine = getattr(metafunc.module, "ON_EVERY_BACKEND", False) and torch.cuda.is_available()
        metafunc.parametrize("device", [*DEVICES, *(BACKENDS if is_engine else ())], indirect=True)


@pytest.fixture
def device(request, monkeypatch):
    """The device that a test runs on."""
    device, _, backend = request.param.partition(" ")
    if backend:
        others = [name for name in dispatch.BACKENDS if name != backend]
        monkeypatch.setattr(dispatch, "FASTEST", (backend, *others))
    return device


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """See `poison_memory`."""
    # Dynamo looks up all of PyTorch's functions once, and again after `init_process_group`: not those of earlier tests.
    known = trace_rules.get_torch_obj_rule_map
    if known.cache_info().currsize and torch.empty not in known():
        known.cache_clear()
        known()
    poison_memory(monkeypatch.setattr)


@pytest.fixture(autouse=True)
def unchanged_registry():
    """Fails where a test leaves an executor behind in thunder's list of defaults."""
    before = thunder.get_default_executors()
    yield
    assert thunder.get_default_executors() == before


@pytest.fixture(autouse=True)
def without_inductor(request, monkeypatch):
    """What Dynamo gives to Inductor, which needs seconds for each graph, runs as it is, but in tests marked `inductor`.

    And Dynamo forgets the programs of other tests: after a few with one code, it would run more of them uncompiled.
    """
    torch._dynamo.reset()
    compiles = request.node.get_closest_marker("inductor") is not None
    if not compiles:
        monkeypatch.setattr(torch._inductor, "compile", lambda graph, inputs, **_: graph)
        for wrapper in (torch._TorchCompileInductorWrapper, backend.Inductor):
            monkeypatch.setattr(wrapper, "__call__", lambda self, graph, inputs: graph)
    # Of most operations of a program, fake tensors keep what none that follows asks for: a tenth of the time.
    with torch._dynamo.config.patch(fake_tensor_cache_enabled=compiles):
        yield
