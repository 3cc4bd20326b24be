"""What every test gets: a seed, devices, poisoned memory and an unchanged registry."""

import pytest
import thunder
import torch
from hypothesis import Phase, settings

# For `mutations`, which only asks whether there is a failure.
settings.register_profile("mutations", phases=[Phase.explicit, Phase.generate])


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(1234)


@pytest.fixture(
    params=[
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
            ],
        ),
    ]
)
def device(request):
    """Each device that a test runs on."""
    return request.param


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
