"""Every row of the zoo: loss and all gradients as eager PyTorch has them, and what the table says about fusion.

Each route runs what docs/models.md says that it does with the version of transformers that is there.
"""

import warnings
from functools import partial
from importlib.metadata import version

import pytest
import thunder
import torch
from packaging.version import Version

import thunder_flce

transformers = pytest.importorskip("transformers", reason="needs the extra 'examples'")

import zoo  # noqa: E402
from front_ends import FRONT_ENDS, assert_agrees, decisions  # noqa: E402
from thunder_flce.backend import compile_graph  # noqa: E402
from thunder_flce.graph import plugin  # noqa: E402

TRANSFORMERS, THUNDER = Version(transformers.__version__), Version(version("lightning-thunder"))

COMPILERS = {**FRONT_ENDS, "backend": partial(torch.compile, backend=compile_graph)}
IDS = [f"{entry.model}, {entry.head}" if entry.head else entry.model for entry in zoo.ENTRIES]
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def _check(entry, compiler):
    # What docs/models.md says of versions.
    if entry.model.startswith("litgpt"):
        if not zoo.HAS_LITGPT:
            pytest.skip("needs litgpt")
    elif compiler == "thunder.jit" and TRANSFORMERS > Version("4.52.4"):
        pytest.skip("thunder.jit does not trace this transformers")
    elif compiler == "thunderfx" and Version("4.52.4") < TRANSFORMERS < Version("5") and THUNDER <= Version("0.2.6"):
        pytest.skip("thunder 0.2.6 does not split the graphs of transformers between 4.52.4 and 5")
    model, arguments = entry.build(), zoo.batch()
    compiled = COMPILERS[compiler](model)
    expected = entry.jit if compiler == "thunder.jit" else entry.dynamo
    if isinstance(expected, type):
        for jitted in (compiled, thunder.jit(model)):
            with pytest.raises(expected):
                jitted(*arguments)
        return
    steps = (lambda each=each: getattr(found := each(*arguments), "loss", found) for each in (model, compiled))
    assert_agrees(model, *steps, rtol=1e-4, atol=1e-5)
    (decision,) = decisions(compiled)
    assert (zoo.FUSED if decision.fused else decision.reason) == expected, str(decision)
    if decision.fused:
        call = decision.region.call
        found = {"softcap": call.loss.softcap, "logit_scale": call.loss.logit_scale}
        found["linear_bias"] = "linear_bias" in call.tensors
        assert found == {"softcap": None, "logit_scale": 1.0, "linear_bias": False} | entry.region
    of_classes = sum(len(parameter) == zoo.VOCAB for parameter in model.parameters() if parameter.ndim == 2)
    assert (of_classes == 1) == ("tied" in entry.head)


def _is_slow(entry, front_end):
    """thunder takes seconds for a model; Dynamo gives thunderfx what it gives the backend."""
    of_library = [each for each in zoo.ENTRIES if each.model.split()[0] == entry.model.split()[0]]
    is_quick = entry is of_library[0] or "chunk" in entry.head
    return front_end == "thunderfx" or not is_quick


@pytest.mark.parametrize(("entry", "front_end"), [
    pytest.param(entry, name, id=f"{id}-{name}", marks=[pytest.mark.slow] if _is_slow(entry, name) else [])
    for entry, id in zip(zoo.ENTRIES, IDS, strict=True)
    for name in FRONT_ENDS
])  # fmt: skip
def test_model(entry, front_end):
    _check(entry, front_end)


@pytest.mark.parametrize("entry", zoo.ENTRIES, ids=IDS)
def test_backend(entry):
    _check(entry, "backend")


def test_page_has_the_table():
    text = zoo.PAGE.read_text(encoding="utf-8")
    assert f"{zoo.BEGIN}\n{zoo.table()}\n{zoo.END}" in text, "run: python tests/zoo.py"


@pytest.mark.parametrize("installed", ["4.52.4", "4.57.6"])
def test_a_transformers_that_thunder_does_not_trace(installed, monkeypatch):
    """The warning names what does; a model without transformers gets none."""
    monkeypatch.setattr(plugin, "version", lambda name: installed)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for model in (zoo.ENTRIES[0].build(), torch.nn.Linear(2, 2)):
            thunder_flce.jit(model)
    found = [str(warning.message) for warning in caught if "thunder.jit traces" in str(warning.message)]
    assert len(found) == (installed != "4.52.4")
    assert all(f"not of {installed}: use torch.compile" in message for message in found)
