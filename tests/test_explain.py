"""`explain`: fused, declined and mixed graphs, through thunder.jit and thunderfx."""

import io
import json
import subprocess
import sys
from dataclasses import replace

import pytest
import thunder
import torch
import torch.nn.functional as F
from thunder.dynamo import splitter, thunderfx
from thunder.dynamo.utils import SplitReason, SplitReasonType
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import thunder_flce
from thunder_flce import FuseLinearCrossEntropy, Options
from thunder_flce.engine import printing
from thunder_flce.engine.kernels import dispatch
from thunder_flce.engine.matmul import algorithms
from thunder_flce.engine.matmul.algorithms import Tuning
from thunder_flce.graph.matching.reasons import Reason
from thunder_flce.inspection import formatting, programs
from thunder_flce.inspection.trace_text import compile_only

SIZES = programs.Sizes(batch=2, sequence=24, hidden=16, vocab=100)
T, H, V = SIZES.tokens, SIZES.hidden, SIZES.vocab

pytestmark = pytest.mark.filterwarnings("ignore::thunder_flce.NotFusedWarning")


def mixed(hidden, weight, labels):
    fused = F.cross_entropy(F.linear(hidden, weight).view(-1, V), labels.view(-1))
    declined = F.cross_entropy(F.linear(hidden, weight).relu().view(-1, V), labels.view(-1))
    return fused + declined


def _explained(program, *, requires_grad=True, jit=thunder_flce.jit, sizes=SIZES, **settings):
    jitted = jit(program, **settings)
    arguments = programs.arguments(program, sizes, device="cpu", dtype=torch.float32)
    if not requires_grad:
        arguments = [argument.detach() for argument in arguments]
    jitted(*arguments)
    return thunder_flce.explain(jitted)


def _saved_by_autograd(program):
    """Shapes of what an uncompiled program saves, from PyTorch's own hooks."""
    shapes = []

    def pack(tensor):
        shapes.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        program(*programs.arguments(program, SIZES, device="cpu", dtype=torch.float32))
    return shapes


def test_fused():
    report = _explained(programs.litgpt, options=Options(chunk_rows=10))
    (compilation,) = report
    (decision,) = report.decisions
    assert decision.fused and decision is compilation.decisions[0] and report[0] is compilation
    text = str(report)
    assert "1 of 1 cross-entropies fused" in text
    assert f"{decision.source}: fused, gradients in forward, chunks of 10 tokens" in text
    assert "return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))" in text
    assert "for each chunk of 10 tokens, 4 in all:" in text and "for the last chunk of 8 tokens:" in text
    assert f"logits f32[10, {V}] = x @ W.t()" in text and "dW *= grad" in text.split("  backward:\n")[1]


def test_plans_have_the_chosen_one_first():
    report = _explained(programs.litgpt, options=Options(chunk_rows=10))
    plans = report[0].plans(report.decisions[0])
    assert [plan.chosen for plan in plans] == [True] + [False] * (len(plans) - 1)
    assert plans[0].plan == report.decisions[0].plan
    assert plans[0].temporary_bytes == 10 * V * 4
    assert {plan.plan.strategy for plan in plans} == {"gradients_in_forward", "save_logits", "recompute_logits"}
    assert next(p.temporary_bytes for p in plans if p.plan.strategy == "save_logits") == T * V * 4


def test_declined_says_why_and_where():
    report = _explained(programs.logits_returned)
    (decision,) = report.decisions
    assert decision.reason is Reason.LOGITS_RETURNED
    text = str(report)
    assert "0 of 1 cross-entropies fused" in text and "chunk" not in text
    assert f"{decision.source}: not fused, because the program returns its logits; return the loss only" in text
    assert decision.source.startswith(programs.__file__)
    assert "return F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), labels.view(-1)), logits" in text


def test_mixed():
    report = _explained(mixed)
    assert sorted(decision.fused for decision in report.decisions) == [False, True]
    text = str(report)
    assert "1 of 2 cross-entropies fused" in text and "not fused, because the logits are changed" in text
    lines = {str(entry["line"]) for entry in report.to_dict()["graphs"][0]["compilations"][0]["cross_entropies"]}
    assert len(lines) == 2 and all("F.cross_entropy" in line for line in lines)


def test_saved_tensors_are_those_of_the_trace_with_their_sizes():
    (compilation,) = _explained(programs.litgpt)
    saved = {tensor.role: tensor for tensor in compilation.saved if not tensor.is_argument}
    assert {role: tensor.bytes for role, tensor in saved.items()} == {
        "dX": T * H * 4,
        "dW": V * H * 4,
        "valid_count": 8,
    }
    assert saved["dW"].type == f"f32[{V}, {H}]"


@pytest.mark.parametrize("strategy", ["save_logits", "recompute_logits"])
def test_saved_statistics_have_their_names(strategy):
    (compilation,) = _explained(programs.litgpt, options=Options(strategy=strategy))
    roles = {tensor.role for tensor in compilation.saved if not tensor.is_argument}
    logits = {"logits"} if strategy == "save_logits" else set()
    assert roles == {"row_max", "row_log_sum", "valid_count", "computed_rows"} | logits


@pytest.mark.parametrize("program", programs.PROGRAMS, ids=lambda program: program.__name__)
def test_plain_thunder_saves_what_thunder_jit_saves(program):
    (compilation,) = _explained(program)
    plain = thunder.jit(program)
    plain(*programs.arguments(program, SIZES, device="cpu", dtype=torch.float32))
    _, (expected, _) = thunder.last_traces(plain)[-1].output
    saved = compilation.saved_by_plain_thunder
    assert sorted(tensor.bytes for tensor in saved) == sorted(t.numel * t.dtype.bytes for t in expected)
    # Something of the logits' size, as PyTorch's own autograd keeps, and as none of ours but the standalone one does.
    assert max(tensor.bytes for tensor in saved) == T * V * 4
    assert (T, V) in _saved_by_autograd(program) or program is programs.functional


def test_what_plain_thunder_does_not_compile():
    """thunder 0.2.6 has no gradient of an nll_loss with labels that the program makes."""

    def program(hidden, weight):
        return F.nll_loss(F.linear(hidden, weight).softmax(-1).log(), torch.arange(6))

    jitted = thunder_flce.jit(program, strict=True)
    jitted(torch.randn(6, 8, requires_grad=True), torch.randn(29, 8, requires_grad=True))
    assert "plain thunder does not compile this program: ValueError" in str(thunder_flce.explain(jitted))


def test_plain_thunder_can_be_left_out():
    jitted = thunder_flce.jit(programs.litgpt)
    jitted(*programs.arguments(programs.litgpt, SIZES, device="cpu", dtype=torch.float32))
    report = thunder_flce.explain(jitted, against_plain_thunder=False)
    assert report[0].saved_by_plain_thunder is None and "plain thunder" not in str(report)


def test_nothing_is_saved_without_gradients():
    report = _explained(programs.litgpt, requires_grad=False)
    assert report[0].saved == [] and report[0].saved_by_plain_thunder == []
    assert "nothing is saved" in str(report) and report.decisions[0].plan.strategy == "loss_only"


def test_tuned_products(monkeypatch):
    """What was measured about products, and how long that took."""
    report = _explained(programs.litgpt)
    assert report.to_dict()["tuned_products"] == []
    assert "products tuned in" not in str(report)
    found = Tuning(
        product="dW", sizes=(128256, 4096, 2048), algorithm=None, gain=1.0789, milliseconds=2.5, seconds=0.25
    )
    other = replace(found, product="dX", gain=1.0)
    monkeypatch.setattr(algorithms, "_tunings", {("dW", 11): found, ("dX", 11): other})
    assert [row.split() for row in str(report).splitlines()[-2:]] == [
        ["dW", "128256", "×", "4096", "×", "2048", "2.500", "ms", "1.079", "0.25", "s"],
        ["dX", "128256", "×", "4096", "×", "2048", "2.500", "ms", "1.000", "0.25", "s"],
    ]
    assert [entry["gain"] for entry in report.to_dict()["tuned_products"]] == [1.0789, 1.0]


def test_compile_times():
    report = _explained(programs.litgpt)
    (compilation,) = report
    seconds = compilation.compile_seconds
    assert f"tracing {seconds['tracing']:.3f} s" in str(report).split("compile times: ")[1]
    assert 0 < seconds["thunder_flce"] < seconds["tracing"] < 60
    assert "Grad transform pass" in seconds


def test_each_set_of_shapes_is_a_compilation():
    jitted = thunder_flce.jit(programs.litgpt)
    for sequence in (8, 24):
        sizes = programs.Sizes(batch=2, sequence=sequence, hidden=H, vocab=V)
        jitted(*programs.arguments(programs.litgpt, sizes, device="cpu", dtype=torch.float32))
    report = thunder_flce.explain(jitted)
    assert [c.decisions[0].region.call.tokens for c in report] == [16, 48]
    assert [sum(t.bytes for t in c.saved if t.role == "dX") for c in report] == [16 * H * 4, 48 * H * 4]
    assert "tracing" not in report[0].compile_seconds and "tracing" in report[1].compile_seconds


def test_a_transform_of_two_functions_is_not_mixed_up():
    transform = FuseLinearCrossEntropy()
    executors = [thunder_flce.executor, *thunder.get_default_executors()]
    first = _explained(programs.litgpt, jit=thunder.jit, executors=executors, transforms=[transform])
    second = _explained(programs.logits_returned, jit=thunder.jit, executors=executors, transforms=[transform])
    assert [decision.fused for decision in first.decisions] == [True]
    assert [decision.fused for decision in second.decisions] == [False]


def test_the_last_compilation_is_there_without_a_cache():
    report = _explained(programs.litgpt, cache="no caching")
    assert [decision.fused for decision in report.decisions] == [True] and report[0].saved


def test_to_dict_is_plain_values():
    report = _explained(mixed)
    (graph,) = json.loads(json.dumps(report.to_dict()))["graphs"]
    (compilation,) = graph["compilations"]
    fused = next(entry for entry in compilation["cross_entropies"] if entry["fused"])
    declined = next(entry for entry in compilation["cross_entropies"] if not entry["fused"])
    assert fused["plan"]["strategy"] == "gradients_in_forward" and fused["plans"][0]["chosen"]
    assert any(line.startswith("logits f32[48, 100] = ") for line in fused["runs"]["forward"])
    assert declined["plan"] is None and declined["plans"] == [] and declined["reason"] == "TRANSFORMED_LOGITS"
    assert {"name", "type", "bytes", "is_argument", "role"} == set(compilation["saved_for_backward"][0])


def test_before_the_first_call():
    report = thunder_flce.explain(thunder_flce.jit(programs.litgpt))
    assert len(report) == 0 and "nothing is compiled yet" in str(report)


def test_what_thunder_did_not_compile():
    with pytest.raises(
        TypeError, match="jitted must have been compiled by thunder, or by torch.compile .*, but got function"
    ):
        thunder_flce.explain(programs.litgpt)


def test_print_without_a_terminal_is_plain(capsys):
    report = _explained(programs.litgpt)
    report.print()
    printed = capsys.readouterr().out
    assert printed == f"{report}\n" and "\x1b[" not in printed


def test_rich_on_a_terminal(monkeypatch):
    pytest.importorskip("rich")
    report = _explained(programs.litgpt)
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "160")
    report.print()
    assert "\x1b[" in terminal.getvalue() and "gradients in forward" in terminal.getvalue()


def test_rich_is_optional():
    program = f"import sys; sys.modules['rich'] = None; from {formatting.__name__} import print_text\n"
    program += "import importlib.util; sys.stdout.isatty = lambda: True\n"
    program += "importlib.util.find_spec = lambda name: None; print_text('plain', as_rich=None)"
    result = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout == "plain\n"


def test_format_bytes():
    assert [formatting.format_bytes(size) for size in (0, 1536, 3 * 2**20, 2**31)] == [
        "0 B",
        "1.5 KiB",
        "3.0 MiB",
        "2.00 GiB",
    ]


class Model(nn.Module):
    """A head with, on request, operations that thunder leaves to Inductor."""

    def __init__(self, unsupported=""):
        super().__init__()
        self.embedding = nn.Embedding(V, H)
        self.head = nn.Linear(H, V, bias=False)
        self.unsupported = unsupported

    def forward(self, tokens, labels):
        hidden = self.embedding(tokens)
        if self.unsupported == "before":
            hidden = torch.sinc(hidden)
        if self.unsupported == "graph break":
            torch._dynamo.graph_break()
        return F.cross_entropy(self.head(hidden).view(-1, V), labels.view(-1))


def _explained_fx(**settings):
    torch._dynamo.reset()
    compiled = thunderfx(
        Model(**settings),
        executors=[thunder_flce.executor, *thunder.get_default_executors()],
        transforms=[FuseLinearCrossEntropy()],
    )
    tokens = torch.randint(0, V, (2, 24))
    compiled(tokens, tokens).backward()
    return thunder_flce.explain(compiled)


def test_thunderfx_in_one_graph_names_the_users_line():
    report = _explained_fx()
    (graph,) = report.graphs
    (decision,) = report.decisions
    assert graph.compiled_by == "thunder" and decision.fused
    assert decision.source.startswith(__file__)
    assert "F.cross_entropy(self.head(hidden).view(-1, V), labels.view(-1))" in str(report)
    assert {tensor.role for tensor in report[0].saved} >= {"dX", "dW"}
    assert max(tensor.bytes for tensor in report[0].saved_by_plain_thunder) == T * V * 4


def test_thunderfx_in_several_parts(without_inductor):
    report = _explained_fx(unsupported="before")
    assert [graph.compiled_by for graph in report.graphs] == ["thunder", "Inductor", "thunder"]
    assert [decision.fused for decision in report.decisions] == [True]
    text = str(report)
    assert "sinc" in text and "graph 0, part 1, compiled by Inductor" in text


def test_thunderfx_in_several_graphs():
    report = _explained_fx(unsupported="graph break")
    assert [graph.name for graph in report.graphs] == ["graph 0, part 0", "graph 1, part 0"]
    assert [[decision.fused for decision in graph.decisions] for graph in report.graphs] == [[], [True]]


@pytest.mark.parametrize("compiled_by", ["Inductor", "eager PyTorch"])
def test_thunderfx_where_thunder_leaves_the_loss_to_others(compiled_by, monkeypatch, without_inductor):
    is_supported = splitter.is_node_supported_by_thunder

    def all_but_the_loss(node, options):
        if node.target is F.cross_entropy:
            return False, SplitReason(SplitReasonType.MISSING_OP_SUPPORT, info="not today")
        return is_supported(node, options)

    monkeypatch.setattr(splitter, "is_node_supported_by_thunder", all_but_the_loss)
    if compiled_by == "eager PyTorch":
        monkeypatch.setattr(splitter, "make_fake_arguments", lambda graph: None)
    report = _explained_fx()
    assert [graph.compiled_by for graph in report.graphs] == ["thunder", compiled_by]
    (decision,) = report.decisions
    assert decision.reason is Reason.NOT_THUNDER and decision.source.startswith(__file__)
    sentence = f"not fused, because thunder does not compile its part of the graph ({compiled_by} does; not today)"
    assert f"{decision.source}: {sentence}" in str(report)
    (entry,) = report.to_dict()["graphs"][1]["cross_entropies_not_compiled_by_thunder"]
    assert entry["reason"] == "NOT_THUNDER" and "F.cross_entropy" in entry["line"]


def test_thunderfx_without_our_transform():
    with pytest.raises(ValueError, match="no FuseLinearCrossEntropy transform"):
        thunder_flce.explain(thunderfx(Model()))


@pytest.mark.parametrize(
    ("installed", "instead", "slower"),
    [(("torch",), "PyTorch", "1.4 to 2 times as long"), (("nvfuser", "torch"), "nvFuser", "2 to 10% longer")],
)
def test_missing_row_kernels(installed, instead, slower, monkeypatch):
    """What "auto" would run with, were it installed, and what that costs; nothing where it was not asked for."""
    if "nvfuser" in installed:
        pytest.importorskip("nvfuser_direct")
    monkeypatch.setattr(dispatch, "is_installed", lambda name: name in installed)
    printing._program.cache_clear()
    try:
        for row_kernels in ("auto", "torch"):
            report = _compiled_for_cuda(Options(row_kernels=row_kernels))
            (entry,) = report[0].to_dict()["cross_entropies"]
            missing = entry["missing_row_kernels"]
            if row_kernels == "torch":
                assert missing is None and "not installed" not in str(report)
            else:
                assert "Triton (pip install triton)" in missing and missing in str(report)
                assert f"{instead} runs their share" in missing and slower in missing
    finally:
        printing._program.cache_clear()


def test_no_row_kernels_are_missing_on_a_cpu():
    assert _explained(programs.litgpt)[0].to_dict()["cross_entropies"][0]["missing_row_kernels"] is None


def _compiled_for_cuda(options: Options) -> thunder_flce.Report:
    jitted = thunder_flce.jit(programs.litgpt, options=options)
    with FakeTensorMode():
        arguments = programs.arguments(programs.litgpt, programs.Sizes(), device="cuda", dtype=torch.bfloat16)
        compile_only(jitted, arguments)
    return thunder_flce.explain(jitted, against_plain_thunder=False)
