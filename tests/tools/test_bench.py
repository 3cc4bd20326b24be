"""The benchmark command end to end, every subset on sizes that a CPU runs in a second."""

import json
import re
import subprocess
import sys
import time
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from thunder_flce.__main__ import main
from thunder_flce.bench import cli, distributed, losses, measuring, methods, rates, reference, regions, small
from thunder_flce.bench.measuring import TOTAL, Outcome, Schedule, Session, TimedRow, Unavailable
from thunder_flce.bench.methods import METHODS, build
from thunder_flce.bench.reference import make_reference, matmuls, relative_error, row_slices
from thunder_flce.bench.shapes import Inputs, Shape, parse_shape
from thunder_flce.device import ABSENT_DEVICE
from thunder_flce.engine.choose import choose
from thunder_flce.options import Options

image = pytest.importorskip("matplotlib.image", reason="needs matplotlib")

SHAPE = "tokens=40,vocab=70,hidden=16,bias=1,ignored=0.5,dtype=float32"


def session_of(schedule=None, rows=None):
    """A session on a CPU that collects its rows."""
    write = (rows if rows is not None else []).append
    return Session(device="cpu", schedule=schedule or Schedule(), progress=lambda words: None, write=write)


def bench(path, subset, *options, turns=("--rounds", "1", "--calls", "2")):
    """Runs the command on a CPU, for as short as can be, and returns the records it wrote."""
    assert main(["bench", subset, "--device", "cpu", *turns, "--json", str(path), *options]) == 0
    return records(path)


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_distributed(tmp_path):
    shape = "tokens=40,vocab=71,hidden=16,dtype=float32"
    # torch.compile takes half a minute for each of these.
    names = [name for name in distributed.METHODS if not name.endswith("torch.compile")]
    arguments = ("distributed", "--shapes", shape, "--methods", *names)
    rows = {row["method"]: row for row in bench(tmp_path / "rows", *arguments)}
    assert list(rows) == names
    for name in ("vocab_parallel", "sequence_parallel", "loss_parallel", "loss_parallel, 8 chunks"):
        assert rows[name]["ranks"] == 2 and rows[name]["dx_error"] < 1e-5 and rows[name]["dw_error"] < 1e-5
    assert rows["vocab_parallel"]["same_bits"] and "same_bits" not in rows["sequence_parallel"]
    assert rows["liger"]["failed"] == "equal parts of the vocabulary only"
    assert rows["three products"]["ratio"] == 1
    for name in ("fully_shard", "data_parallel"):
        assert rows[name]["dx_error"] < 1e-5 and rows[name]["dw_error"] < 1e-5


def test_losses(tmp_path):
    names = [name for name in losses.METHODS if not name.endswith(("liger", *losses.PER_TOKEN))]
    rows = {row["method"]: row for row in bench(tmp_path / "rows", "losses", "--methods", *names)}
    floors = ["one matmul", "two matmuls", "three matmuls", "four matmuls"]
    assert list(rows) == [*floors, *names]
    for name in names:
        row, loss = rows[name], losses.LOSSES[losses.METHODS[name][0]]
        assert {error for error in ("dx", "dw") if f"{error}_error" in row} == set(loss.gradients)
        assert max(row[f"{result}_error"] for result in ("loss", *loss.gradients)) < 1e-5
        floor = floors[loss.matmuls - 1]
        assert row["ratio"] == pytest.approx(row["time_ms"] / rows[floor]["time_ms"])
    # Eager PyTorch has logits (64, 500) in float32 and as much again; a frozen head leaves no room for either.
    memory = {name: rows[f"DPO, frozen head, {name}"]["above_outputs_gb"] for name in ("eager", "jit")}
    assert memory["eager"] >= 2 * 64 * 500 * 4 / 1e9 and memory["jit"] < memory["eager"] / 2


@pytest.mark.parametrize("name", losses.LOSSES)
def test_references_of_losses(name, monkeypatch):
    """Some rows at a time, against all of them by autograd."""
    for module in (losses, reference):
        monkeypatch.setattr(module, "row_slices", lambda x, rows=None: row_slices(x, 7))
    loss, inputs = losses.LOSSES[name], Inputs.random(parse_shape("tokens=16,vocab=70,hidden=8,dtype=float32"), "cpu")
    given = loss.given(inputs)
    found = loss.reference(inputs, given)
    value = loss.written()(inputs.x, inputs.weight, inputs.target, given)
    assert relative_error(value.detach(), found.loss) < 1e-5
    for gradient, operand in (("dx", inputs.x), ("dw", inputs.weight)):
        if gradient in loss.gradients:
            (expected,) = torch.autograd.grad(value, operand, retain_graph=True)
            assert relative_error(expected, found.gradients[gradient]) < 1e-5


class PerToken(torch.autograd.Function):
    """What is computed of each token, with dW only where that is asked for."""

    @staticmethod
    def forward(ctx, x, weight, target):
        ctx.save_for_backward(x, weight, target)
        return -F.cross_entropy(x @ weight.t(), target, reduction="none")

    @staticmethod
    def backward(ctx, grad):
        x, weight, target = ctx.saved_tensors
        dlogits = (F.one_hot(target, len(weight)) - (x @ weight.t()).softmax(-1)) * grad[:, None]
        return dlogits @ weight, dlogits.t() @ x if ctx.needs_input_grad[1] else None, None


class StandIns:
    """With the arguments of TRL 1.16, Liger 0.8.5 and cut-cross-entropy 25.1."""

    class ChunkedLogProbFunction:
        @staticmethod
        def apply(x, weight, bias, targets, temperature, chunk_size, softcap=None, scale=1.0, outputs=("entropy",)):
            assert (bias, temperature, softcap, scale, outputs) == (None, 1.0, None, 1.0, ())
            return PerToken.apply(x, weight, targets), None, None, None, None

    class LigerFusedLinearScaledCrossEntropyFunction:
        @staticmethod
        def apply(x, weight, target, temperature=1.0, ignore_index=-100, m_tiles=1, return_entropy=False):
            assert (temperature, ignore_index, return_entropy) == (1.0, -100, False)
            return -PerToken.apply(x, weight, target)

    class LigerFusedLinearDPOLoss:
        def __init__(self, *, beta, use_ref_model):
            assert beta == 0.1 and not use_ref_model

        def __call__(self, weight, x, target):
            """From (B, T, H) and (B, T)."""
            of_tokens = PerToken.apply(x.flatten(0, 1), weight, target.flatten())
            chosen, rejected = of_tokens.view_as(target).sum(-1).chunk(2)
            return -F.logsigmoid(0.1 * (chosen - rejected)).mean(), ()

    @staticmethod
    def linear_cross_entropy(e, c, targets, *, reduction="mean", filter_eps="auto"):
        assert reduction == "none" and filter_eps is None
        return -PerToken.apply(e, c, targets)


def test_losses_of_peers(tmp_path, monkeypatch):
    """Every loss under the log-probabilities of each, for which others stand in here; absent ones say so."""
    peers = [name for name in losses.METHODS if name.endswith(losses.PER_TOKEN)]
    assert len(peers) == 3 * 5 + 2
    peers += ["DPO, liger", "DPO, frozen head, liger"]
    for module in ("trl.kernels", "liger_kernel.ops", "liger_kernel.chunked_loss", "cut_cross_entropy"):
        monkeypatch.setitem(sys.modules, module, StandIns)
    options = ["--shapes", "tokens=16,vocab=21,hidden=8,dtype=float32", "--methods"]
    rows = {row["method"]: row for row in bench(tmp_path / "rows", "losses", *options, *peers)}
    for name in peers:
        row, loss = rows[name], losses.LOSSES[losses.METHODS[name][0]]
        assert {error for error in ("dx", "dw") if f"{error}_error" in row} == set(loss.gradients)
        assert max(row[f"{result}_error"] for result in ("loss", *loss.gradients)) < 1e-5

    for module in ("trl.kernels", "liger_kernel.ops", "cut_cross_entropy"):
        monkeypatch.setitem(sys.modules, module, None)
    absent = [f"mean, {way}" for way in losses.PER_TOKEN]
    rows = {row["method"]: row for row in bench(tmp_path / "absent", "losses", *options, *absent)}
    assert all(re.search("trl|liger_kernel|cut_cross_entropy", rows[name]["failed"]) for name in absent)


@pytest.mark.parametrize("shape", ["tokens=9,vocab=20,hidden=8", "tiny,bias=1", "tiny,frozen=1"])
def test_shapes_that_losses_do_not_take(shape, capsys):
    with pytest.raises(SystemExit):
        main(["bench", "losses", "--device", "cpu", "--shapes", shape])
    assert "but got" in capsys.readouterr().err


@pytest.fixture
def broken_methods(monkeypatch):
    def unavailable():
        raise Unavailable("not here")

    def failing():
        raise RuntimeError("broken\nand more")

    def out_of_memory():
        def method(inputs):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate …")

        return method

    def without_gradient():
        return lambda inputs: F.cross_entropy(F.linear(inputs.x, inputs.weight.detach(), inputs.bias), inputs.target)

    broken = {
        "unavailable": unavailable,
        "failing": failing,
        "out of memory": out_of_memory,
        "without gradient": without_gradient,
    }
    for name, make in broken.items():
        monkeypatch.setitem(METHODS, name, make)
    return list(broken)


def test_regions(tmp_path, capsys, broken_methods):
    good = ["eager", "flce", "function, strategy=recompute_logits"]
    options = ["--shapes", SHAPE, "--pictures", str(tmp_path / "pictures"), "--methods", *broken_methods, *good]
    rows = {row["method"]: row for row in bench(tmp_path / "results.jsonl", "regions", *options)}
    assert set(rows) == {"three matmuls", *good, *broken_methods}
    for name in good:
        row = rows[name]
        assert row["subset"] == "regions" and (row["tokens"], row["vocab"], row["hidden"]) == (40, 70, 16)
        assert (row["bias"], row["ignored"], row["dtype"]) == (True, 0.5, "float32")
        for phase in ("time_ms", "forward_ms", "backward_ms"):
            assert 0 < row[f"{phase}_p20"] <= row[phase] <= row[f"{phase}_p80"]
        assert row["time_ms"] > max(row["forward_ms"], row["backward_ms"])
        assert row["ratio"] == pytest.approx(row["time_ms"] / rows["three matmuls"]["time_ms"])
        assert row["tflops"] == pytest.approx(6 * 20 * 70 * 16 / row["time_ms"] / 1e9)
        assert max(row[f"{name}_error"] for name in ("loss", "dx", "dw", "dbias")) < 1e-5
        assert row["memory_gb"] == max(row["forward_memory_gb"], row["backward_memory_gb"])
        assert row["memory_gb"] - row["above_outputs_gb"] == pytest.approx(4 * (40 * 16 + 70 * 16 + 70) / 1e9)
        assert row["above_outputs_gb"] >= 0
    assert [rows[name]["failed"] for name in broken_methods] == [
        "not here",
        "RuntimeError: broken",
        "out of memory",
        "RuntimeError: no dw came of the backward",
    ]
    command = rows["eager"]["command"]
    assert all(row["torch"] == torch.__version__.partition("+")[0] and row["date"] for row in rows.values())
    assert command.startswith("python -m thunder_flce bench regions") and rows["flce"]["command"] == command
    printed = capsys.readouterr().out
    assert command in printed and f"torch {rows['eager']['torch']}" in printed
    table = [[cell.strip() for cell in line.split("|")] for line in printed.splitlines() if line.startswith("|")]
    assert {len(line) for line in table} == {len(table[0])} and table[0][1:3] == ["method", "both, ms"]
    assert [line[1] for line in table[2:]] == ["three matmuls", *good]
    half = (rows["eager"]["time_ms_p80"] - rows["eager"]["time_ms_p20"]) / 2
    assert table[3][2] == f"{rows['eager']['time_ms']:.3f} ±{half:.2g}"
    assert "- out of memory: out of memory" in printed
    (picture,) = (tmp_path / "pictures").iterdir()
    assert str(picture) in printed
    pixels = image.imread(picture)
    assert min(pixels.shape[:2]) > 100 and pixels.std() > 0.01


def test_a_low_rank_adapter_beside_a_frozen_head(tmp_path, monkeypatch):
    """Those that take one linear only say so; this project gets the adapter as a term of its own."""
    monkeypatch.setitem(sys.modules, "cut_cross_entropy", StandIns)
    names = ["eager", "thunder", "flce", "cut-cross-entropy"]
    rows = {
        row["method"]: row
        for row in bench(tmp_path / "results.jsonl", "regions", "--shapes", "tiny-a", "--methods", *names)
    }
    for name in ("eager", "thunder", "flce"):
        row = rows[name]
        assert (row["shape"], row["frozen"], row["rank"]) == (
            "tiny-a 64 × 500 × 32, frozen head, rank 4, float32",
            True,
            4,
        )
        assert "dw_error" not in row
        assert max(row[f"{gradient}_error"] for gradient in ("loss", "dx", "dy", "db")) < 1e-5
        assert row["ratio"] == pytest.approx(row["time_ms"] / rows["three matmuls"]["time_ms"])
    assert rows["cut-cross-entropy"]["failed"] == "takes one linear, and no adapter beside it"


def test_models(tmp_path):
    pytest.importorskip("litgpt", reason="needs the extra 'examples'")
    options = ["--models", "litgpt-tiny", "--layers", "1", "--methods", "eager", "flce"]
    eager, flce = bench(tmp_path / "results.jsonl", "models", *options)
    for row in (eager, flce):
        parts = [row[f"{phase}_ms"] for phase in ("forward", "backward", "optimizer")]
        assert min(parts) > 0 and row["time_ms"] > max(parts)
        assert row["loss_error"] < 1e-5 and row["memory_gb"] > 0 and row["parameters"] > 128_000
    assert "fused" not in eager and flce["fused"] is True
    assert flce["first_call_s"] > eager["first_call_s"]


def test_small_regions(tmp_path):
    # torch.compile's takes seconds for a CPU.
    names = [name for name in small.METHODS if name != "torch.compile"]
    rows = {row["method"]: row for row in bench(tmp_path / "rows", "small", "--methods", *names)}
    assert list(rows) == names
    for name, row in rows.items():
        assert row["subset"] == "small" and 0 < row["host_ms"] <= row["time_ms"] and "operations" not in row
        assert row["calls"] > rows["flce, no_grad"]["calls"] > 10 or name in ("eager", "flce, no_grad")
    for name in ("eager", "flce", "flce, compute"):
        assert rows[name]["dx_error"] < 1e-5 and rows[name]["dw_error"] < 1e-5


def test_rates(tmp_path, capsys, monkeypatch):
    """Plain text, and the same as JSON; without the packages that other subsets show their results with."""
    monkeypatch.setattr(cli, "find_spec", lambda name: None)
    monkeypatch.setattr(rates, "SCHEDULE", replace(Schedule(), rounds=1, calls=2, turn_ms=1, settle_ms=0))
    monkeypatch.setattr(rates, "MEASURED_ON_CPU", (64, 256, 32))
    assert main(["bench", "--rates", "--device", "cpu", "--json", str(tmp_path / "rates.jsonl")]) == 0
    (record,) = records(tmp_path / "rates.jsonl")
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1] == json.dumps(record) and record["subset"] == "rates"
    first_words = {line.split()[0] for line in printed[:-1] if not line.startswith(" ")}
    assert first_words == {"device", "versions", "rates", "plans", "times", "bits", "better"}
    assert 1e8 < record["matmul_rate"] < 1e14 and 1e8 < record["bandwidth"] < 1e13
    assert [way["name"] for way in record["ways"]] == ["default", "chunk_rows=32"]
    assert all(way["time_ms"] > 0 and way["failed"] is None for way in record["ways"])
    assert record["batch_invariant"].startswith("yes")


def test_which_options_are_tried():
    """Half and twice the chunk, what the measured rates ask for, the other choice of matmuls, other row kernels."""
    call = rates.a_call((8192, 128256, 4096), "cuda")
    h100, amd, l40s = ABSENT_DEVICE, replace(ABSENT_DEVICE, is_hip=True), replace(ABSENT_DEVICE, bandwidth=2e12)
    chosen, by_rates = (choose(call, Options(), device) for device in (h100, l40s))
    assert (chosen.chunk_rows, by_rates.chunk_rows) == (2048, 4096)
    found = rates.ways(chosen, by_rates, tokens=8192, device=h100)
    of_kernels = ["row_kernels=nvfuser", "row_kernels=torch"]
    assert list(found) == ["default", "chunk_rows=1024", "chunk_rows=4096", "tune_products=False", *of_kernels]
    assert found["chunk_rows=1024"] == {"chunk_rows": 1024} and found["default"] == {}
    found = rates.ways(replace(chosen, tune_products=False), chosen, tokens=2048, device=amd)
    assert list(found) == ["default", "chunk_rows=1024", *of_kernels]
    found = rates.ways(replace(chosen, tune_products=False), chosen, tokens=8192, device=h100)
    assert found["tune_products=True"] == {"tune_products": True}


def test_options_that_are_better():
    def way(time_ms, gb=None):
        return regions.Row(method="", shape=parse_shape("tiny"), time_ms=time_ms, above_outputs_gb=gb)

    default = way(10.0, 1.0)
    of = {(9.7, 3.0): True, (10.1, 0.9): True, (9.9, 1.0): False, (10.2, 0.5): False, (10.0, 1.0): False}
    assert {numbers: rates.is_better(way(*numbers), default) for numbers in of} == of
    assert not rates.is_better(way(None), default) and rates.is_better(default, way(None))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reference_is_that_of_autograd(dtype):
    shape = Shape(name="", tokens=50, vocab=33, hidden=8, bias=True, ignored=0.3, dtype=dtype, rank=3)
    inputs = Inputs.random(shape, "cpu")
    operands = {name: tensor.detach().double().requires_grad_() for name, tensor in inputs.named_operands().items()}
    logits = F.linear(operands["dx"], operands["dw"], operands["dbias"]) + F.linear(operands["dy"], operands["db"])
    loss = F.cross_entropy(logits, inputs.target)
    loss.backward()
    reference = make_reference(inputs, rows=7)
    assert reference.gradients.keys() == operands.keys()
    pairs = [(reference.loss, loss.detach())]
    pairs += [(reference.gradients[name], operand.grad) for name, operand in operands.items()]
    for got, expected in pairs:
        assert got.dtype is (torch.float64 if dtype is torch.float32 else torch.float32)
        assert relative_error(got, expected) < (1e-14 if dtype is torch.float32 else 1e-6)


def test_peers_that_are_not_installed_say_so(monkeypatch):
    for module in ("liger_kernel", "cut_cross_entropy", "quack", "trl"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delattr(torch.nn, "LinearCrossEntropyOptions", raising=False)
    monkeypatch.setattr(methods, "find_spec", lambda name: None)
    peers = [name for name in METHODS if name.startswith(("liger", "trl", "cut", "quack", "torch linear", "auto"))]
    assert len(peers) == 11
    for name in peers:
        with pytest.raises(Unavailable, match=r"liger_kernel|trl|cut_cross_entropy|quack|torch .* has no"):
            build(name)


def test_turns_leave_out_what_fails():
    calls = []

    def good(mark):
        calls.append("good")
        time.sleep(1e-3)
        mark("first")
        mark("second")

    def bad(mark):
        calls.append("bad")
        if calls.count("bad") > 8:
            raise MemoryError
        mark("first")

    schedule = Schedule(rounds=3, calls=3, settle_ms=0)
    rows = []
    outcomes = session_of(schedule, rows).take_turns({"good": good, "bad": bad})
    assert list(outcomes) == ["good"] and rows == [TimedRow(method="bad", failed="MemoryError: ")]
    laps = outcomes["good"].laps_ms
    # One call to settle, one that is not timed and three that are, in each of three rounds.
    assert len(laps) == 9 and calls.count("good") == 15 and calls[:10] == ["good"] * 5 + ["bad"] * 5
    assert all(lap[TOTAL] >= lap["first"] >= 1 for lap in laps)
    spread = Outcome([{TOTAL: 7.0, "a": float(value)} for value in (5, 1, 2, 3, 4, 6)]).spread("a")
    whole = {"time_ms": 7.0, "time_ms_p20": 7.0, "time_ms_p80": 7.0}
    assert spread == {**whole, "a_ms": 3.5, "a_ms_p20": 2.0, "a_ms_p80": 5.0}


def test_what_failed_has_let_go_of_its_memory_when_it_is_released(monkeypatch):
    held = []

    def inner():
        tensor = torch.ones(10)
        held.append(weakref.ref(tensor))
        raise torch.OutOfMemoryError

    def method():
        try:
            inner()
        except torch.OutOfMemoryError:
            raise RuntimeError("in the end") from None

    released, rows = [], []
    monkeypatch.setattr(measuring, "release", lambda device: released.append([ref() for ref in held]))
    with session_of(rows=rows).attempt("method") as tried:
        method()
    assert tried.failed and rows == [TimedRow(method="method", failed="RuntimeError: in the end")]
    assert released == [[None]]


@pytest.mark.parametrize(
    "text",
    [
        "S9",
        "none.json,tokens=3",
        "tokens=3",
        "tokens=3,vocab=x,hidden=4",
        "tokens=1,vocab=1,hidden=1,odd=1",
    ],
)
def test_shapes_that_make_no_sense(text):
    with pytest.raises(ValueError, match="a shape must be one of S1|no shape can be read from 'none.json'"):
        parse_shape(text)
    with pytest.raises(SystemExit):
        main(["bench", "--shapes", text])


def test_the_shape_of_a_model(tmp_path):
    config = tmp_path / "some-model" / "config.json"
    config.parent.mkdir()
    config.write_text(json.dumps({"text_config": {"vocab_size": 70, "hidden_size": 16}}))
    assert parse_shape(f"{config},tokens=40,bias=1") == Shape(
        name="some-model", tokens=40, vocab=70, hidden=16, bias=True
    )
    with pytest.raises(ValueError, match="config.json,tokens=…, with positive"):
        parse_shape(str(config))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "none"], "a method must be one of"),
        (["--methods", "eager, chunk_rows=3"], "a method must be one of"),
        (["--methods", "flce, rows=3"], "'flce, rows=3': .* unexpected keyword argument 'rows'"),
        (["--methods", "flce, chunk_rows=-3"], "chunk_rows must be None or a positive int, but got -3"),
        (["--rounds", "0"], "must be a positive integer"),
        (["--json", "nowhere/results.jsonl"], "--json: nowhere/results.jsonl is no file"),
        (["models", "--models", "none"], "there is no 'none', but litgpt-llama"),
        (["small", "--methods", "none"], "there is no 'none', but eager"),
    ],
)
def test_arguments_that_make_no_sense(arguments, message, capsys):
    with pytest.raises(SystemExit):
        main(["bench", *arguments])
    assert re.search(message, capsys.readouterr().err)


def test_pictures_need_matplotlib(monkeypatch, capsys):
    monkeypatch.setattr(cli, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        main(["bench", "--pictures", "folder"])
    assert "--pictures needs matplotlib" in capsys.readouterr().err


def test_the_laboratory_can_be_imported():
    root = Path(__file__).parents[2]
    listed = subprocess.run([sys.executable, "-m", "lab", "--help"], cwd=root, capture_output=True, text=True)
    assert listed.returncode == 0, listed.stderr
    own_commands = {"pages", "trainers"}
    assert {path.stem for path in (root / "lab").glob("[a-z]*.py")} - own_commands <= set(listed.stdout.split())


def test_the_matmuls_that_times_are_compared_with_have_the_dlogits_of_the_loss(monkeypatch):
    shape = parse_shape("tokens=40,vocab=70,hidden=16,bias=1,ignored=0.5,dtype=float32")
    inputs = Inputs.random(shape, "cpu")
    results = {}
    mm = torch.mm

    def recording(one, other, out=None):
        results[len(results)] = mm(one, other, out=out)
        return results[len(results) - 1]

    monkeypatch.setattr(torch, "mm", recording)
    step = matmuls(inputs, 3, rows=7)
    with torch.no_grad():
        step(lambda phase: None)
    logits = F.linear(inputs.x, inputs.weight, inputs.bias).detach().requires_grad_()
    F.cross_entropy(logits, inputs.target).backward()
    dlogits = logits.grad[:, :64]
    torch.testing.assert_close(results[1], dlogits @ inputs.weight.detach()[:64])
    torch.testing.assert_close(results[2], dlogits.t() @ inputs.x.detach())
