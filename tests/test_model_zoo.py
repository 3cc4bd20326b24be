"""Every row of the zoo: loss and all gradients as eager PyTorch has them, and what the table says about fusion."""

import pytest
import thunder
import torch

pytest.importorskip("litgpt", reason="needs the extra 'examples'")
pytest.importorskip("transformers", reason="needs the extra 'examples'")

import zoo  # noqa: E402
from front_ends import FRONT_ENDS, assert_agrees, decisions  # noqa: E402

IDS = [f"{entry.model}, {entry.head}" if entry.head else entry.model for entry in zoo.ENTRIES]


@pytest.fixture(autouse=True)
def without_inductor(monkeypatch):
    """What thunder leaves to Inductor runs as it is: to compile it takes long, and is not what is tested here."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch._inductor, "compile", lambda graph, inputs: graph)


def _loss(result):
    return result if isinstance(result, torch.Tensor) else result.loss


def _regions(compiled, front_end) -> list[thunder.core.symbol.BoundSymbol]:
    traces = [thunder.last_traces(compiled)[-1]] if front_end == "thunder.jit" else compiled.last_traces
    return [b for trace in traces for b in trace.bound_symbols if b.sym.name == "linear_cross_entropy_fwd"]


def _settings(region) -> dict:
    """What the head of a model may set."""
    *_, bias = region.args[:4]
    found = {name: region.kwargs.get(name) for name in ("softcap", "logit_scale")}
    found = {name: value for name, value in found.items() if value not in (None, 1.0)}
    return found | ({"linear_bias": True} if bias is not None else {})


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize("entry", zoo.ENTRIES, ids=IDS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_model(entry, front_end):
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
    assert_agrees(model, lambda: _loss(model(*arguments)), lambda: _loss(compiled(*arguments)), rtol=1e-4, atol=1e-5)
    found = decisions(compiled)
    regions = _regions(compiled, front_end)
    if expected == zoo.FUSED:
        assert found and all(decision.fused for decision in found), [str(decision) for decision in found]
        assert len(regions) == entry.regions
        for region in regions:
            assert _settings(region) == entry.region
    else:
        assert {decision.reason for decision in found} == {expected}, [str(decision) for decision in found]
        assert not regions


@pytest.mark.parametrize("entry", zoo.ENTRIES, ids=IDS)
def test_tied(entry):
    """That the table says which heads are the embedding."""
    model = entry.build().model
    if hasattr(model, "get_input_embeddings"):
        is_tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    else:
        is_tied = model.lm_head.weight is model.transformer.wte.weight
    assert is_tied == ("tied" in entry.head)


def test_page_has_the_table():
    text = zoo.PAGE.read_text(encoding="utf-8")
    assert f"{zoo.BEGIN}\n{zoo.table()}\n{zoo.END}" in text, "run: python tests/zoo.py --write"
