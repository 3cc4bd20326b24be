"""Every row of the zoo: loss and all gradients as eager PyTorch has them, and what the table says about fusion.

Of the three front ends, each runs what README.md says that it does with the version of transformers that is there.
"""

import warnings
from importlib.metadata import version

import pytest
import thunder
import torch
from packaging.version import Version

import thunder_flce

transformers = pytest.importorskip("transformers", reason="needs the extra 'examples'")

import zoo  # noqa: E402
from front_ends import FRONT_ENDS, assert_agrees, decisions  # noqa: E402
from thunder_flce import operators  # noqa: E402
from thunder_flce.backend import compile_graph, compiled_graphs  # noqa: E402
from thunder_flce.graph import plugin  # noqa: E402

TRANSFORMERS, THUNDER = Version(transformers.__version__), Version(version("lightning-thunder"))

IDS = [f"{entry.model}, {entry.head}" if entry.head else entry.model for entry in zoo.ENTRIES]


@pytest.fixture
def graphs(monkeypatch):
    """What Inductor would compile."""
    graphs = []
    compile = lambda self, graph, inputs: graphs.append(graph) or graph  # noqa: E731
    monkeypatch.setattr(torch._TorchCompileInductorWrapper, "__call__", compile)
    return graphs


def _skip_what_does_not_run(entry, front_end):
    """What README.md says of versions."""
    if entry.model.startswith("litgpt"):
        if not zoo.HAS_LITGPT:
            pytest.skip("needs litgpt")
    elif front_end == "thunder.jit" and TRANSFORMERS > Version("4.52.4"):
        pytest.skip("thunder.jit does not trace this transformers")
    elif front_end == "thunderfx" and Version("4.52.4") < TRANSFORMERS < Version("5") and THUNDER <= Version("0.2.6"):
        pytest.skip("thunder 0.2.6 does not split the graphs of transformers between 4.52.4 and 5")


def _loss(result):
    return result if isinstance(result, torch.Tensor) else result.loss


def _regions(compiled, front_end) -> list[thunder.core.symbol.BoundSymbol]:
    traces = [thunder.last_traces(compiled)[-1]] if front_end == "thunder.jit" else compiled.last_traces
    return [b for trace in traces for b in trace.bound_symbols if b.sym.name == "flce_linear_cross_entropy_fwd"]


def _settings(node) -> dict:
    """What the head of a model may set, of a call of the operator."""
    settings = operators.Settings.parse(node.args[1])
    found = {name: getattr(settings.loss, name) for name in ("softcap", "logit_scale")}
    found = {name: value for name, value in found.items() if value not in (None, 1.0)}
    return found | ({"linear_bias": True} if "linear_bias" in settings.names else {})


def _is_slow(entry, front_end):
    """thunder takes seconds for a model; Dynamo gives thunderfx what it gives the backend."""
    of_library = [each for each in zoo.ENTRIES if each.model.split()[0] == entry.model.split()[0]]
    is_quick = entry is of_library[0] or "chunk" in entry.head
    return front_end == "thunderfx" or not is_quick


@pytest.mark.parametrize(
    ("entry", "front_end"),
    [
        pytest.param(entry, name, id=f"{id}-{name}", marks=[pytest.mark.slow] if _is_slow(entry, name) else [])
        for entry, id in zip(zoo.ENTRIES, IDS, strict=True)
        for name in FRONT_ENDS
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_model(entry, front_end):
    _skip_what_does_not_run(entry, front_end)
    model = entry.build()
    compiled = FRONT_ENDS[front_end](model)
    arguments = zoo.batch()
    expected = entry.jit if front_end == "thunder.jit" else entry.thunderfx
    if isinstance(expected, zoo.Raises):
        with pytest.raises(expected.error):
            compiled(*arguments)
        with pytest.raises(expected.error):
            thunder.jit(model)(*arguments)
        return
    _assert_agrees(model, compiled)
    regions = _regions(compiled, front_end)
    _assert_outcome(expected, decisions(compiled), len(regions))


@pytest.mark.parametrize("entry", zoo.ENTRIES, ids=IDS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_backend(entry, graphs):
    _skip_what_does_not_run(entry, "torch.compile")
    model = entry.build()
    compiled = torch.compile(model, backend=compile_graph)
    _assert_agrees(model, compiled)
    found = [decision for graph in compiled_graphs(compiled) for decision in graph]
    operator = torch.ops.thunder_flce.linear_cross_entropy.default
    calls = [node for graph in graphs for node in graph.graph.nodes if node.target is operator]
    _assert_outcome(entry.backend, found, len(calls))
    for call in calls:
        assert _settings(call) == entry.region


def _assert_agrees(model, compiled):
    arguments = zoo.batch()
    assert_agrees(model, lambda: _loss(model(*arguments)), lambda: _loss(compiled(*arguments)), rtol=1e-4, atol=1e-5)


def _assert_outcome(expected, decisions, regions):
    if expected == zoo.FUSED:
        assert decisions and all(decision.fused for decision in decisions), [str(decision) for decision in decisions]
        assert regions == 1
    else:
        assert {decision.reason for decision in decisions} == {expected}, [str(decision) for decision in decisions]
        assert regions == 0


@pytest.mark.parametrize("entry", zoo.ENTRIES, ids=IDS)
def test_tied(entry):
    """That the table says which heads are the embedding."""
    if entry.model.startswith("litgpt") and not zoo.HAS_LITGPT:
        pytest.skip("needs litgpt")
    model = entry.build().model
    if hasattr(model, "get_input_embeddings"):
        is_tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    else:
        is_tied = model.lm_head.weight is model.transformer.wte.weight
    assert is_tied == ("tied" in entry.head)


def test_page_has_the_table():
    text = zoo.PAGE.read_text(encoding="utf-8")
    assert f"{zoo.BEGIN}\n{zoo.table()}\n{zoo.END}" in text, "run: python tests/zoo.py --write"


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
    assert all(f"this is {installed}: use torch.compile" in message for message in found)
