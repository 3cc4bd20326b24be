"""The benchmark command: every subset end to end, on sizes that a CPU runs in a second."""

import itertools
import json
import re
import subprocess
import sys
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import ranks  # noqa: F401
from thunder_flce.__main__ import main
from thunder_flce.bench import cli, distributed, losses, measure, output, rates
from thunder_flce.bench.measure import Run, Unavailable
from thunder_flce.bench.methods import COMPILERS, LOG_PROBS, METHODS
from thunder_flce.bench.models import parse_model
from thunder_flce.bench.regions import row_slices
from thunder_flce.bench.shapes import Inputs, Shape, parse_shape
from thunder_flce.device import ABSENT_DEVICE
from thunder_flce.engine.matmul import algorithms
from thunder_flce.engine.plan import Plan

image = pytest.importorskip("matplotlib.image", reason="needs matplotlib")

FLOORS = list(measure.MATMULS.values())


@pytest.fixture
def bench(tmp_path):
    """Runs the command on a CPU, for as short as can be; returns the rows that it wrote, by method."""

    def run(*arguments):
        path = tmp_path / "rows.jsonl"
        path.unlink(missing_ok=True)
        assert main(["bench", *arguments, "--device", "cpu", "--rounds", "1", "--calls", "2", "--json", str(path)]) == 0
        rows = map(json.loads, path.read_text().splitlines())
        return {row["method"]: row for row in rows}

    return run


@pytest.fixture(autouse=True)
def few_rows(monkeypatch):
    """References are computed so few rows at a time that these inputs have several chunks."""
    for module in ("regions", "losses"):
        monkeypatch.setattr(f"thunder_flce.bench.{module}.row_slices", lambda x: row_slices(x, 7))


def check(row, rows, *results, matmuls=3):
    """Asserts that a row has small errors of these results alone, and its ratio to the time of the matmuls."""
    errors = {name.removesuffix("_error"): row[name] for name in row if name.endswith("_error")}
    assert errors.keys() == {*results} and max(errors.values()) < 1e-5
    assert row["ratio"] == pytest.approx(row["time_ms"] / rows[FLOORS[matmuls - 1]]["time_ms"])


def check_losses(rows, names):
    for name in names:
        is_frozen = rows[name]["frozen"]
        if name.startswith("log-probabilities alone"):
            check(rows[name], rows, "loss", matmuls=1)
        else:
            gradients = ["dx"] if is_frozen else ["dx", "dw"]
            check(rows[name], rows, "loss", *gradients, matmuls=3 + name.startswith("KL") - is_frozen)


def failing(error, *, calls=0):
    """Returns a method that raises an error after some calls."""
    count, eager = itertools.count(), METHODS["eager"]()

    def method(*operands, **bias):
        if next(count) >= calls:
            raise error
        return eager(*operands, **bias)

    return method


BROKEN = {
    "no module": lambda: failing(ModuleNotFoundError("no module"))(None),
    "MemoryError: later": lambda: failing(MemoryError("later"), calls=3),  # In its turns, after what is measured first
    "not here": lambda: failing(Unavailable("not here")),
    "RuntimeError: broken": lambda: failing(RuntimeError("broken\nand more"))(None),
    "out of memory": lambda: failing(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate …")),
    "RuntimeError: the backward computed no dw": lambda: (
        lambda x, weight, target, bias: F.cross_entropy(F.linear(x, weight.detach(), bias), target)
    ),
}
"""Makers of methods that fail, by what a row says of them."""


def test_regions(bench, tmp_path, capsys, monkeypatch):
    for name, make in BROKEN.items():
        monkeypatch.setitem(METHODS, name, make)
    methods = ["eager", "flce", "function, strategy=recompute_logits"]
    shape = "tokens=40,vocab=70,hidden=16,bias=1,ignored=0.5,dtype=float32"
    rows = bench("--shapes", shape, "--pictures", str(tmp_path / "pictures"), "--methods", *BROKEN, *methods)
    assert set(rows) == {"three matmuls", *methods, *BROKEN}
    fields = {"tokens": 40, "vocab": 70, "hidden": 16, "bias": True, "ignored": 0.5, "dtype": "float32"}
    for name in methods:
        row = rows[name]
        assert row.items() >= {"subset": "regions", **fields}.items()
        for phase in ("time_ms", "forward_ms", "backward_ms"):
            assert 0 < row[f"{phase}_p20"] <= row[phase] <= row[f"{phase}_p80"]
        assert row["time_ms"] > max(row["forward_ms"], row["backward_ms"])
        check(row, rows, "loss", "dx", "dw", "dbias")
        assert row["memory_gb"] - row["above_outputs_gb"] == pytest.approx(4 * (40 * 16 + 70 * 16 + 70) / 1e9)
        assert row["above_outputs_gb"] >= 0
    # All logits in float32 and as much again; chunks of 8 rows need less.
    eager = rows["eager"]
    assert eager["above_outputs_gb"] >= 2 * 40 * 70 * 4 / 1e9
    assert all(rows[name]["failed"] == name for name in BROKEN)
    assert all(row["torch"] == torch.__version__.partition("+")[0] and row["date"] for row in rows.values())
    command = eager["command"]
    assert command.startswith("python -m thunder_flce bench --shapes") and rows["flce"]["command"] == command
    printed = capsys.readouterr().out
    assert command in printed and f"torch {eager['torch']}" in printed
    table = [[cell.strip() for cell in line.split("|")] for line in printed.splitlines() if line.startswith("|")]
    assert {len(line) for line in table} == {len(table[0])} and table[0][1:3] == ["method", "time, ms"]
    assert [line[1] for line in table[2:]] == ["three matmuls", *methods]
    assert table[3][2] == f"{eager['time_ms']:.3f} ±{(eager['time_ms_p80'] - eager['time_ms_p20']) / 2:.2g}"
    assert "\n- out of memory: out of memory\n" in printed
    (picture,) = (tmp_path / "pictures").iterdir()
    assert str(picture) in printed
    pixels = image.imread(picture)
    assert min(pixels.shape[:2]) > 100 and pixels.std() > 0.01


def test_a_frozen_head_needs_two_matmuls(bench):
    rows = bench("--shapes", "tiny,frozen=1", "--methods", "eager")
    check(rows["eager"], rows, "loss", "dx", matmuls=2)
    assert rows["eager"]["shape"] == "tiny 64 × 500 × 32, frozen head, float32"
    names = [f"{loss}, {way}" for loss in ("DPO", "log-probabilities alone") for way in ("eager", "torch.compile")]
    rows = bench("losses", "--shapes", "tiny,frozen=1", "--methods", *names, "DPO, flce")
    check_losses(rows, [*names, "DPO, flce"])
    # Eager PyTorch has logits (64, 500) in float32 and as much again; a frozen head leaves no room for either.
    eager, fused = (rows[f"DPO, {way}"]["above_outputs_gb"] for way in ("eager", "flce"))
    assert eager >= 2 * 64 * 500 * 4 / 1e9 and fused < eager / 2


def test_losses(bench):
    names = [name for name in losses.METHODS if not name.endswith(("liger", *LOG_PROBS))]
    rows = bench("losses", "--shapes", "tiny", "--methods", *names)
    assert list(rows) == [*FLOORS, *names]
    check_losses(rows, names)
    rows = bench("losses", "--shapes", "tiny,tokens=7", "--methods", "DPO, eager", "GRPO, eager")
    assert rows["DPO"]["failed"] == "7 tokens cannot be divided into 8 sequences of one length"
    check_losses(rows, ["GRPO, eager"])


def test_distributed(bench, monkeypatch):
    start = partial(torch.multiprocessing.start_processes, start_method="forkserver")
    monkeypatch.setattr(torch.multiprocessing, "spawn", start)  # Which would import PyTorch in each.
    # torch.compile takes half a minute for each of its ways.
    names = [name for name in distributed.METHODS if not name.endswith("torch.compile")]
    rows = bench("distributed", "--shapes", "tokens=40,vocab=71,hidden=16,dtype=float32", "--methods", *names)
    assert set(rows) == {"three matmuls", *names}
    assert rows["liger"]["failed"] == "equal parts of the vocabulary only"
    for name in set(names) - {"liger"}:
        check(rows[name], rows, *(["dx", "dw"] if name in distributed.OWN_MEANS else ["loss", "dx", "dw"]))
        assert rows[name]["ranks"] == 2


def test_distributed_needs_a_gpu_and_as_many_tokens_for_each_rank(monkeypatch):
    inputs = Inputs.random(parse_shape("tiny,tokens=9"), "cpu")
    part = distributed.Part(inputs=inputs, mesh=SimpleNamespace(size=lambda: 2), tokens=slice(4), vocab=500)
    with pytest.raises(Unavailable, match="9 tokens cannot be divided among 2 ranks"):
        part.own_tokens()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(SystemExit, match="--ranks 2 needs as many GPUs, but PyTorch finds 1"):
        distributed.measure(parse_shape("tiny"), ["vocab_parallel"], Run(device="cuda"), ranks=2)


def log_probs(x, weight, target):
    return -F.cross_entropy(x @ weight.t(), target, reduction="none")


class StandIns:
    """Peers with the arguments of TRL 1.16, Liger 0.8.5 and cut-cross-entropy 25.1, and the values they need here."""

    class ChunkedLogProbFunction:
        @staticmethod
        def apply(x, weight, bias, targets, temperature, chunk_size, softcap=None, scale=1.0, outputs=("entropy",)):
            assert (bias, temperature, softcap, scale, outputs) == (None, 1.0, None, 1.0, ())
            return log_probs(x, weight, targets), None, None, None, None

    class LigerFusedLinearScaledCrossEntropyFunction:
        @staticmethod
        def apply(x, weight, target, temperature=1.0, ignore_index=-100, m_tiles=1, return_entropy=False):
            assert (temperature, ignore_index, return_entropy) == (1.0, -100, False)
            return -log_probs(x, weight, target)

    @staticmethod
    def LigerFusedLinearDPOLoss(*, beta, use_ref_model):
        """Returns a function of a weight, x (B, T, H) and targets (B, T)."""
        assert beta == 0.1 and not use_ref_model

        def loss(weight, x, target):
            sequences = log_probs(x.flatten(0, 1), weight, target.flatten()).view_as(target)
            chosen, rejected = sequences.sum(-1).chunk(2)
            return -F.logsigmoid(0.1 * (chosen - rejected)).mean(), ()

        return loss

    @staticmethod
    def liger_fused_linear_jsd(x, weight, teacher_input, teacher_weight, *, jsd_beta):
        assert jsd_beta == 0.0
        student, teacher = F.linear(x, weight).log_softmax(-1), F.linear(teacher_input, teacher_weight).log_softmax(-1)
        return F.kl_div(student, teacher, reduction="batchmean", log_target=True)

    @staticmethod
    def liger_fused_linear_cross_entropy(input, weight, target, bias=None, chunk_mem_const=1):
        return F.cross_entropy(F.linear(input, weight, bias), target)

    @staticmethod
    def linear_cross_entropy(e, c, targets, *, reduction="mean", filter_eps="auto"):
        row_losses = -log_probs(e, c, targets)
        assert reduction == "mean" or (reduction == "none" and filter_eps is None)
        return row_losses.mean() if reduction == "mean" else row_losses


def test_peers(bench, monkeypatch):
    """Every loss by the log-probabilities of each peer, and the mean by each peer."""
    for module in ("trl.kernels", "liger_kernel.ops", "liger_kernel.chunked_loss", "cut_cross_entropy"):
        monkeypatch.setitem(sys.modules, module, StandIns)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.functional", StandIns)
    peers = [name for name in losses.METHODS if name.endswith(tuple(LOG_PROBS))]
    assert len(peers) == 3 * 5
    peers += ["DPO, liger", "KL from a teacher, liger"]
    shape = ["--shapes", "tokens=16,vocab=21,hidden=8,dtype=float32", "--methods"]
    check_losses(bench("losses", *shape, *peers), peers)
    names = ["liger", "liger, chunk 8", "trl", "cut-cross-entropy", "cut-cross-entropy, exact"]
    rows = bench(*shape, *names)
    for name in names:
        check(rows[name], rows, "loss", "dx", "dw")
    rows = bench("--shapes", "tiny,bias=1", "--methods", "liger", "cut-cross-entropy")
    assert rows["liger"]["dbias_error"] < 1e-5 and "argument 'bias'" in rows["cut-cross-entropy"]["failed"]


def test_peers_that_are_not_installed_say_so(monkeypatch):
    for module in ("liger_kernel", "cut_cross_entropy", "quack", "trl"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delattr(torch.nn, "LinearCrossEntropyOptions", raising=False)
    peers = [make for name, make in METHODS.items() if name not in ("function", *COMPILERS)]
    for make in (*peers, *LOG_PROBS.values()):
        with pytest.raises((ImportError, AttributeError), match="liger_kernel|trl|cut_cross|quack|LinearCrossEntropy"):
            make()


def test_models(bench):
    pytest.importorskip("litgpt", reason="needs the extra 'examples'")
    rows = bench("models", "--models", "litgpt-tiny,tokens=32", "--methods", "eager", "flce")
    for row in rows.values():
        parts = [row[f"{phase}_ms"] for phase in ("forward", "backward", "optimizer")]
        assert min(parts) > 0 and row["time_ms"] > max(parts)
        assert (row["layers"], row["batch"], row["length"], row["lengths"]) == (1, 4, 8, "one")
        assert row["loss_error"] < 1e-5 and row["memory_gb"] > 0 and row["parameters"] > 128_000
    assert "fused" not in rows["eager"] and rows["flce"]["fused"] is True
    assert rows["flce"]["first_call_s"] > rows["eager"]["first_call_s"]
    rows = bench("models", "--models", "transformers-tiny,lengths=changing", "--methods", "eager")
    assert rows["eager"]["second_length_s"] > 0 and rows["eager"]["new_length_ms"] > 0


def test_rates(bench, capsys, monkeypatch):
    tuning = algorithms.Tuning(sizes=(256, 32, 64), algorithm=None, gain=1.25, milliseconds=1.0, seconds=0.1)
    monkeypatch.setattr(algorithms, "tunings", lambda: [tuning])
    rows = bench("--rates", "--shapes", "tokens=64,vocab=256,hidden=32,dtype=float32")
    printed = capsys.readouterr().out
    assert all(f"\n- {name}: " in printed for name in ("device", "rates", "plan", "better"))
    assert "\n- 256 × 32 × 64 by another algorithm of cuBLAS: 1.250 times as fast\n" in printed
    assert list(rows) == ["function", "function, chunk_rows=32", "function, batch_invariant=True"]
    for row in rows.values():
        assert row["subset"] == "rates" and row["time_ms"] > 0
        assert 1e8 < row["matmul_rate"] < 1e14 and 1e8 < row["bandwidth"] < 1e13


def test_which_options_are_tried():
    """Half and twice the chunk, what the measured rates ask for, the other choice of matmuls, other row kernels."""
    plan, by_rates = (Plan(strategy="gradients_in_forward", chunk_rows=rows, tune_products=True) for rows in (512, 300))

    def ways(tokens, device):
        return [name.removeprefix("function, ") for name in rates.ways(plan, by_rates, tokens=tokens, device=device)]

    others = ["row_kernels=nvfuser", "row_kernels=torch", "batch_invariant=True"]
    chunks = ["function", "chunk_rows=256", "chunk_rows=300"]
    assert ways(8192, ABSENT_DEVICE) == [*chunks, "chunk_rows=1024", "tune_products=False", *others]
    assert ways(512, replace(ABSENT_DEVICE, is_hip=True)) == [*chunks, *others]


def test_options_that_are_better():
    def better(default, **numbers):
        rows = [{"method": "function", **default}, {"method": "function, chunk_rows=8", **numbers}]
        return rates.better(rows, "function")

    default, failed = {"time_ms": 10.0, "above_outputs_gb": 1.0}, {"failed": "out of memory"}
    cases = ((9.7, 3.0, True), (10.1, 0.9, True), (9.9, 1.0, False), (10.2, 0.5, False))
    for time_ms, gb, is_better in cases:
        assert better(default, time_ms=time_ms, above_outputs_gb=gb) == "Options(chunk_rows=8)" * is_better
    assert better(failed, **default) and not better(default, **failed) and not better(failed, **failed)


def test_a_failed_method_keeps_no_tensor_when_memory_is_released(monkeypatch):
    tensors = []

    def inner():
        tensor = torch.ones(10)
        tensors.append(weakref.ref(tensor))
        raise torch.OutOfMemoryError

    def method():
        try:
            inner()
        except torch.OutOfMemoryError:
            raise RuntimeError("in the end") from None

    released, run = [], Run(device="cpu")
    monkeypatch.setattr(measure, "release", lambda device: released.append([tensor() for tensor in tensors]))
    with run.attempt("method"):
        method()
    assert run.rows == [{"method": "method", "failed": "RuntimeError: in the end"}] and released == [[None]]
    with pytest.raises(RuntimeError), replace(run, strict=True).attempt("method"):
        method()


def test_a_changed_working_tree_is_marked(tmp_path, monkeypatch):
    """As `git describe --dirty` does; what --commit says stands as it is."""
    commit = "git add . && git -c user.name=a -c user.email=a commit -m a"
    shell = partial(subprocess.run, shell=True, cwd=tmp_path, check=True)
    package = tmp_path / "package"
    shell("git init && mkdir package lab && touch package/a.py lab/a.py")
    assert output.commit_of(package) is None
    for changed in ("package/a.py", "lab/a.py", "package/new.py"):
        shell(commit)
        clean = output.commit_of(package)
        assert re.fullmatch("[0-9a-f]{12}", clean)
        (tmp_path / "results.jsonl").write_text(clean)
        assert output.commit_of(package) == clean
        (tmp_path / changed).write_text("2")
        assert output.commit_of(package) == f"{clean}-dirty"
    monkeypatch.setattr(output, "commit_of", lambda package: "abc-dirty")
    assert output.context("", device="cpu")["commit"] == "abc-dirty"
    assert output.context("", device="cpu", commit="abc")["commit"] == "abc"


def test_the_shape_of_a_model(tmp_path):
    config = tmp_path / "some-model" / "config.json"
    config.parent.mkdir()
    config.write_text(json.dumps({"text_config": {"vocab_size": 70, "hidden_size": 16}}))
    expected = Shape(name="some-model", tokens=40, vocab=70, hidden=16, bias=True)
    assert parse_shape(f"{config},tokens=40,bias=1") == expected
    with pytest.raises(ValueError, match="config.json,tokens=…, with positive"):
        parse_shape(str(config))
    assert str(parse_model("litgpt-pythia-160m,layers=4")) == "litgpt-pythia-160m, 4 layers, 4 × 512 tokens"


@pytest.mark.parametrize(("arguments", "message"), [
    *((["--shapes", text], "a shape must be one of") for text in ("S1", "tokens=3", "cpu,odd=1", "cpu,tokens=0")),
    (["--shapes", "none.json,tokens=3"], "no shape can be read from 'none.json'"),
    (["losses", "--shapes", "tiny,ignored=0.5"], "without bias, ignored, but got tiny"),
    (["distributed", "--shapes", "tiny,frozen=1"], "without bias, frozen, but got tiny"),
    (["models", "--models", "none"], "a model must be one of litgpt-llama.*, but got 'none'"),
    (["models", "--models", "litgpt-tiny,layers=0"], "but got 'litgpt-tiny,layers=0'"),
    (["--methods", "eager, chunk_rows=3"], "a method must be one of"),
    (["rates", "--methods", "eager"], "a method must be one of flce; flce backend; function; and"),
    (["--methods", "flce, rows=3"], "'flce, rows=3': .* unexpected keyword argument 'rows'"),
    (["--methods", "flce, chunk_rows=-3"], "chunk_rows must be None or a positive int, but got -3"),
    (["losses", "--methods", "none"], "must be one of mean"),
    (["--rounds", "0"], "must be a positive integer"),
    (["--json", "."], "--json: .*Is a directory: '.'"),
    (["--pictures", f"{__file__}/folder"], "--pictures: .*Not a directory"),
    (["--pictures", "folder"], "--pictures needs matplotlib"),
])  # fmt: skip
def test_arguments_that_make_no_sense(arguments, message, capsys, monkeypatch):
    if "needs" in message:
        monkeypatch.setattr(cli, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        main(["bench", *arguments])
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize(("command", "columns"), [
    (["against", "--base", "eager"], {"base_time_ms", "ratio", "memory_ratio"}),
    (["lean", "--methods", "flce"], {"host_ms", "calls", "dx_error"}),
    (["peaked", "--methods", "function"], {"dw_error", "ratio"}),
    (["lengths", "--methods", "flce"], {"first_s", "passes_ms"}),
])  # fmt: skip
def test_the_laboratory(command, columns, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    from lab.__main__ import SUBSETS

    options = ["--shapes", "tokens=8,vocab=20,hidden=8,dtype=float32", "--device", "cpu", "--json", tmp_path / "rows"]
    assert cli.main([*command, *map(str, options)], SUBSETS, "python -m lab") == 0
    row = json.loads((tmp_path / "rows").read_text().splitlines()[-1])
    assert row["subset"] == command[0] and columns <= row.keys()
