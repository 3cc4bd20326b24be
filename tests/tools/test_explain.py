"""`explain`: fused, declined and mixed graphs, through thunder.jit, thunderfx and torch.compile."""

import copy
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import thunder
import torch
import torch.nn.functional as F
from thunder.dynamo import thunderfx
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import thunder_flce
from front_ends import Model, batch
from thunder_flce import FuseLinearCrossEntropy, Options
from thunder_flce.backend import compile_graph
from thunder_flce.engine import printing
from thunder_flce.engine.kernels import dispatch, scaling
from thunder_flce.engine.matmul import algorithms
from thunder_flce.engine.matmul.algorithms import Tuning
from thunder_flce.inspection import programs
from thunder_flce.inspection.trace_text import compile_only
from thunder_flce.matching import decisions

SIZES = programs.Sizes(batch=2, sequence=24, hidden=16, vocab=100)
T, H, V = SIZES.tokens, SIZES.hidden, SIZES.vocab

pytestmark = pytest.mark.filterwarnings("ignore::thunder_flce.NotFusedWarning")


def mixed(hidden, weight, labels):
    fused = F.cross_entropy(F.linear(hidden, weight).view(-1, V), labels.view(-1))
    declined = F.cross_entropy(F.linear(hidden, weight).relu().view(-1, V), labels.view(-1))
    return fused + declined


def _explained(program, *, compiler=thunder_flce.jit, **settings):
    compiled = compiler(program, **settings)
    compiled(*programs.arguments(program, SIZES, device="cpu", dtype=torch.float32))
    return thunder_flce.explain(compiled)


def test_fused():
    report = _explained(programs.litgpt, options=Options(chunk_rows=10))
    (compilation,) = report
    (decision,) = report.decisions
    assert decision.fused and decision is compilation.decisions[0]
    text = str(report)
    assert "1 of 1 cross-entropies fused" in text
    assert f"{decision.source}: fused, gradients in forward, chunks of 10 tokens" in text
    assert "return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))" in text
    assert "for each chunk of C tokens (4 × 10, 1 × 8):" in text
    assert f"logits f32[C, {V}] = x @ W.t()" in text and "dW *= grad" in text.split("  backward:\n")[1]
    # The chosen plan comes first.
    plans = compilation.plans(decision)
    assert [plan.chosen for plan in plans] == [True] + [False] * (len(plans) - 1)
    assert plans[0].plan == decision.plan
    assert plans[0].temporary_bytes == 10 * V * 4
    assert {plan.plan.strategy for plan in plans} == {"gradients_in_forward", "save_logits", "recompute_logits"}
    assert next(p.temporary_bytes for p in plans if p.plan.strategy == "save_logits") == T * V * 4
    saved = {tensor.role: tensor for tensor in compilation.saved if not tensor.is_argument}
    sizes = {role: tensor.bytes for role, tensor in saved.items()}
    assert sizes == {"dX": T * H * 4, "dW": V * H * 4, "valid_count": 8}
    assert saved["dW"].type == f"f32[{V}, {H}]"


def test_to_dict_is_plain_values():
    report = _explained(mixed)
    (compilation,) = json.loads(json.dumps(report.to_dict()))["compilations"]
    fused = next(entry for entry in compilation["decisions"] if entry["fused"])
    declined = next(entry for entry in compilation["decisions"] if not entry["fused"])
    assert compilation["compiled_by"] == "thunder" and fused["kind"] == declined["kind"] == "cross-entropy"
    assert fused["plan"]["strategy"] == "gradients_in_forward" and fused["plans"][0]["chosen"]
    assert any(line.startswith("logits f32[48, 100] = ") for line in fused["runs"]["forward"])
    assert declined["plan"] is None and declined["plans"] == [] and declined["reason"] == "TRANSFORMED_LOGITS"
    assert {"name", "type", "bytes", "is_argument", "role"} == set(compilation["saved_for_backward"][0])


def test_a_plan_for_any_number_of_tokens():
    """The plan is for the tokens that were compiled for; if their number depends on values, for 2048."""

    def labelled_rows_loss(x, w, y):
        (rows,) = (y > 20).nonzero(as_tuple=True)
        return F.cross_entropy(x[rows] @ w.t(), y[rows])

    x, w, y = torch.randn(8, H), torch.randn(V, H, requires_grad=True), torch.arange(8) * 5
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(labelled_rows_loss, backend=compile_graph)
        compiled(x, w, y).backward()
    (decision,) = thunder_flce.explain(compiled).decisions
    assert ", chunks of 2048 tokens (for 2048 tokens; other numbers of tokens have plans of their own)" in str(decision)

    compiled = torch.compile(lambda x, w, y: F.cross_entropy(x @ w.t(), y), backend=compile_graph)
    for tokens in (8, 6):
        compiled(x[:tokens], w, y[:tokens]).backward()
    first, second = thunder_flce.explain(compiled).decisions
    assert str(first).endswith(", chunks of 8 tokens")
    assert str(second).endswith(", chunks of 6 tokens (for 6 tokens; other numbers of tokens have plans of their own)")


def test_the_probability_of_a_class_is_not_fused():
    """Such as the probability of "yes", which a reranker takes."""
    compiled = torch.compile(lambda x, w: F.linear(x, w).softmax(-1)[:, 3].sum(), backend=compile_graph)
    message = "the probability at .*: not fused, because the logits are changed"
    with pytest.warns(thunder_flce.NotFusedWarning, match=message):
        compiled(torch.randn(8, H), torch.randn(V, H, requires_grad=True))


def test_programs_of_other_compilers_are_an_error():
    """Also an object that an attribute of its attribute refers to, as a child refers to its parent."""
    cyclic = SimpleNamespace()
    cyclic.module = SimpleNamespace(module=cyclic)
    eager = torch.compile(programs.litgpt, backend="eager")
    for compiled, kind in ((programs.litgpt, "function"), (eager, "function"), (cyclic, "SimpleNamespace")):
        with pytest.raises(TypeError, match=f"compiled must be what .*, or a trainer with .*, but got {kind}"):
            thunder_flce.explain(compiled)


@pytest.mark.parametrize(("compiler", "name"), [(thunder.jit, "thunder"), (thunderfx, "thunderfx")])
def test_thunders_own_front_ends(compiler, name):
    """Without a fusion, that is an error; the executor adds one if there is a loss."""
    executors = [thunder_flce.executor, *thunder.get_default_executors()]
    with pytest.raises(ValueError, match="compiled has no fusion; compile the program with thunder_flce"):
        thunder_flce.explain(compiler(Model()))
    for transforms in ([FuseLinearCrossEntropy()], []):
        compiled = compiler(Model(), executors=executors, transforms=transforms)
        assert "no decision yet" in str(thunder_flce.explain(compiled))
        compiled(*batch()).backward()
        report = thunder_flce.explain(compiled)
        assert report[0].compiled_by == name and [decision.fused for decision in report.decisions] == [True]
    no_loss = compiler(nn.Linear(2, 2), executors=["flce"])
    no_loss(torch.ones(2, 2))
    assert thunder_flce.explain(no_loss).decisions == []


class Forwarding:
    """An object that is no module, with a `__getattr__` like that of Fabric's modules."""

    def __init__(self, forward_module):
        self._forward_module = forward_module

    def __getattr__(self, name):
        return getattr(self.__dict__["_forward_module"], name)


WRAPPERS = {
    # Fabric and accelerate have the module as a submodule.
    "submodules": lambda module: nn.ModuleDict({"_forward_module": nn.ModuleDict({"module": module})}),
    "an attribute": lambda module: SimpleNamespace(module=module),
    "an object that forwards": Forwarding,
    "a forward": lambda module: SimpleNamespace(module=nn.Identity(), forward=module),
    "a copy": copy.deepcopy,
    "a trainer": lambda module: SimpleNamespace(model=nn.Identity(), compiled_loss=module),
}


def test_a_wrapped_module():
    compiled = torch.compile(Model(), backend=compile_graph)
    compiled(*batch()).backward()
    (decision,) = thunder_flce.explain(compiled).decisions
    assert decision.fused
    for name, wrap in WRAPPERS.items():
        (compilation,) = thunder_flce.explain(wrap(compiled))
        assert compilation.compiled_by == "torch.compile" and compilation.decisions == [decision], name
        assert compilation.to_dict()["saved_for_backward"] is None


def test_all_decisions_of_the_process():
    """The latest decisions of all compilers, for programs that only a trainer has."""
    decisions.LOG.clear()
    report = thunder_flce.explain()
    assert len(report) == 0 and "no decision yet" in str(report)
    _explained(programs.litgpt)
    _explained(programs.logits_returned, compiler=thunder_flce.thunderfx)
    _explained(mixed, compiler=lambda program: torch.compile(program, backend=compile_graph))
    (compilation,) = report = thunder_flce.explain()
    assert compilation.compiled_by == "this process" and compilation.saved is None
    assert [decision.fused for decision in report.decisions] == [True, False, True, False]
    assert "2 of 4 cross-entropies fused" in str(report) and "saved for backward" not in str(report)
    assert decisions.LOG.maxlen == 1024


@pytest.mark.parametrize(("value", "is_printed"), [("1", True), ("0", False), ("", False), (None, False)])
def test_each_decision_is_printed_if_the_environment_says_so(value, is_printed, monkeypatch, capsys):
    monkeypatch.delenv("THUNDER_FLCE_EXPLAIN", raising=False)
    if value is not None:
        monkeypatch.setenv("THUNDER_FLCE_EXPLAIN", value)
    report = _explained(mixed)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("thunder_flce: ")]
    assert lines == [f"thunder_flce: the cross-entropy at {decision}" for decision in report.decisions * is_printed]


def test_tuned_products(monkeypatch):
    """The report has the measured matmuls, and how long measuring took."""
    report = _explained(programs.litgpt)
    assert report.to_dict()["tuned_products"] == []
    assert "products tuned in" not in str(report)
    tuning = Tuning(sizes=(2048, 128256, 768), algorithm=None, gain=1.0789, milliseconds=2.5, seconds=0.25)
    monkeypatch.setattr(algorithms, "_tunings", {"one": {"": tuning}, "other": {"": replace(tuning, gain=1.0)}})
    rows = [" ".join(row.split()) for row in str(report).splitlines()[-2:]]
    assert rows == [f"2048 × 128256 × 768 2.500 ms {gain} 0.25 s" for gain in ("1.079", "1.000")]
    assert [entry["gain"] for entry in report.to_dict()["tuned_products"]] == [1.0789, 1.0]


def test_missing_row_kernels(monkeypatch, request):
    """The report names the row kernels that "auto" would choose, unless others were asked for."""
    monkeypatch.setattr(dispatch, "is_installed", lambda name: name == "torch")
    for cached in (printing.program, scaling.library):
        cached.cache_clear()
        request.addfinalizer(cached.cache_clear)
    for row_kernels in ("auto", "torch"):
        jitted = thunder_flce.jit(programs.litgpt, options=Options(row_kernels=row_kernels))
        with FakeTensorMode():
            arguments = programs.arguments(programs.litgpt, programs.Sizes(), device="cuda", dtype=torch.bfloat16)
            compile_only(jitted, arguments)
        lines = [line for line in str(thunder_flce.explain(jitted)).splitlines() if "does not run here" in line]
        missing = "Triton (pip install triton) does not run here; PyTorch runs instead"
        assert [missing in line for line in lines] == [True] * (row_kernels == "auto")
