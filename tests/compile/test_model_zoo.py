"""Every row of the zoo: loss and all gradients as eager PyTorch has them, and what the table says about fusion.

Each compiler runs what docs/models.md says that it does with the version of transformers that is there.
"""

from functools import partial
from importlib.metadata import version

import pytest
import thunder
import torch
from packaging.version import Version

import thunder_flce

transformers = pytest.importorskip("transformers", reason="needs the extra 'examples'")

import zoo  # noqa: E402
from front_ends import FRONT_ENDS, assert_agrees, batch, decisions  # noqa: E402
from thunder_flce.backend import compile_graph  # noqa: E402
from thunder_flce.graph import plugin  # noqa: E402

TRANSFORMERS, THUNDER = Version(transformers.__version__), Version(version("lightning-thunder"))

COMPILERS = {**FRONT_ENDS, "backend": partial(torch.compile, backend=compile_graph)}
IDS = [f"{entry.model}, {entry.head}" if entry.head else entry.model for entry in zoo.ENTRIES]
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def _check(entry, compiler):
    if entry.model.startswith("litgpt"):
        if not zoo.HAS_LITGPT:
            pytest.skip("needs litgpt")
    elif compiler == "thunder.jit" and TRANSFORMERS > Version("4.52.4"):
        pytest.skip("thunder.jit does not trace this transformers")
    elif compiler == "thunderfx" and Version("4.52.4") < TRANSFORMERS < Version("5") and THUNDER <= Version("0.2.6"):
        pytest.skip("thunder 0.2.6 does not split the graphs of transformers between 4.52.4 and 5")
    model, arguments = entry.build(), batch(2, 12)
    compiled = COMPILERS[compiler](model)
    expected = entry.jit if compiler == "thunder.jit" else entry.dynamo
    if isinstance(expected, type):
        for jitted in (compiled, thunder.jit(model)):
            with pytest.raises(expected):
                jitted(*arguments)
        return

    def loss(module):
        outputs = module(*arguments)
        return getattr(outputs, "loss", outputs)

    assert_agrees(model, partial(loss, model), partial(loss, compiled), rtol=1e-4, atol=1e-5)
    (decision,) = decisions(compiled)
    assert (zoo.FUSED if decision.fused else decision.reason) == expected, str(decision)
    if decision.fused:
        call = decision.region.call
        region = {"softcap": call.loss.softcap, "logit_scale": call.loss.logit_scale}
        region["linear_bias"] = "linear_bias" in call.tensors
        assert region == {"softcap": None, "logit_scale": 1.0, "linear_bias": False} | entry.region
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    assert (sum(len(matrix) == zoo.VOCAB for matrix in matrices) == 1) == ("tied" in entry.head)


def _is_slow(entry, front_end):
    """thunder takes seconds for a model; Dynamo gives thunderfx what it gives the backend."""
    same_library = [other for other in zoo.ENTRIES if other.model.split()[0] == entry.model.split()[0]]
    is_quick = entry is same_library[0] or "chunk" in entry.head
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
def test_a_transformers_that_thunder_does_not_trace(installed, monkeypatch, recwarn):
    """The warning names what does; a model without transformers gets none."""
    monkeypatch.setattr(plugin, "version", lambda name: installed)
    for model in (zoo.ENTRIES[0].build(), torch.nn.Linear(2, 2)):
        thunder_flce.jit(model)
    messages = [str(warning.message) for warning in recwarn if "thunder.jit traces" in str(warning.message)]
    assert len(messages) == (installed != "4.52.4")
    assert all(f"not of {installed}: use torch.compile" in message for message in messages)
