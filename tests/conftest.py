"""What every test gets: a seed, devices, poisoned memory and an unchanged registry."""

# First, as users with torch 2.13 or newer have to: without it, they cannot import thunder.
import thunder_flce  # noqa: F401 # isort: skip

import pytest
import thunder
import torch
from hypothesis import Phase, settings

from thunder_flce.execution.row_kernels import dispatch

# For `mutations`, which only asks whether there is a failure.
settings.register_profile("mutations", phases=[Phase.explicit, Phase.generate])


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(1234)


on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=on_gpu)]
# Behind "cuda", the backend of the row kernels that counts as the fastest.
BACKENDS = [pytest.param(f"cuda {name}", marks=on_gpu) for name in dispatch.BACKENDS if dispatch.is_installed(name)]


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
    """Fills uninitialised floating-point memory with NaN, so that what is never written shows in the result."""

    def poisoned(allocate):
        def wrapper(*args, **kwargs):
            tensor = allocate(*args, **kwargs)
            if tensor.is_floating_point() and not tensor.is_meta:
                with torch.no_grad():
                    tensor.fill_(float("nan"))
            return tensor

        return wrapper

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))


@pytest.fixture(autouse=True)
def unchanged_registry():
    """Fails where a test leaves an executor behind in thunder's list of defaults."""
    before = thunder.get_default_executors()
    yield
    assert thunder.get_default_executors() == before
