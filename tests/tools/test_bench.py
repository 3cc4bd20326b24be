"""The benchmark command end to end, every subset on sizes that a CPU runs in a second."""

import itertools
import json
import re
import subprocess
import sys
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import ranks  # noqa: F401
from thunder_flce.__main__ import main
from thunder_flce.bench import cli, distributed, losses, measure, output, rates
from thunder_flce.bench.measure import Run, Unavailable
from thunder_flce.bench.methods import LOG_PROBS, METHODS, maker
from thunder_flce.bench.models import parse_model
from thunder_flce.bench.regions import row_slices
from thunder_flce.bench.shapes import Shape, parse_shape
from thunder_flce.device import ABSENT_DEVICE
from thunder_flce.engine.matmul import algorithms
from thunder_flce.engine.plan import Plan

image = pytest.importorskip("matplotlib.image", reason="needs matplotlib")

SHAPE = "tokens=40,vocab=70,hidden=16,bias=1,ignored=0.5,dtype=float32"
FLOORS = list(measure.MATMULS.values())


def bench(path, *arguments):
    """Runs the command on a CPU, for as short as can be, and returns the rows it wrote, by method."""
    assert main(["bench", *arguments, "--device", "cpu", "--rounds", "1", "--calls", "2", "--json", str(path)]) == 0
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {row["method"]: row for row in rows}


@pytest.fixture(autouse=True)
def few_rows(monkeypatch):
    """References are computed so few rows at a time that these inputs have several chunks."""
    for module in ("regions", "losses"):
        monkeypatch.setattr(f"thunder_flce.bench.{module}.row_slices", lambda x: row_slices(x, 7))


def raising(error, *, after=0):
    """A method that does, once it has been called so often."""
    calls, eager = itertools.count(), METHODS["eager"]()

    def method(inputs):
        if next(calls) >= after:
            raise error
        return eager(inputs)

    return method


BROKEN = {
    "no module": lambda: raising(ModuleNotFoundError("no module"))(None),
    "MemoryError: later": lambda: raising(MemoryError("later"), after=3),  # In its turns, after what is measured first
    "not here": lambda: raising(Unavailable("not here")),
    "RuntimeError: broken": lambda: raising(RuntimeError("broken\nand more"))(None),
    "out of memory": lambda: raising(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate …")),
    "RuntimeError: the backward computed no dw": lambda: (
        lambda inputs: F.cross_entropy(F.linear(inputs.x, inputs.weight.detach(), inputs.bias), inputs.target)
    ),
}
"""Makes methods, by what a row says of them."""


def test_regions(tmp_path, capsys, monkeypatch):
    for name, make in BROKEN.items():
        monkeypatch.setitem(METHODS, name, make)
    good = ["eager", "flce", "function, strategy=recompute_logits"]
    options = ["--shapes", SHAPE, "--pictures", str(tmp_path / "pictures"), "--methods", *BROKEN, *good]
    rows = bench(tmp_path / "results.jsonl", *options)
    assert set(rows) == {"three matmuls", *good, *BROKEN}
    of_shape = {"tokens": 40, "vocab": 70, "hidden": 16, "bias": True, "ignored": 0.5, "dtype": "float32"}
    for name in good:
        row = rows[name]
        assert row.items() >= {"subset": "regions", **of_shape}.items()
        for phase in ("time_ms", "forward_ms", "backward_ms"):
            assert 0 < row[f"{phase}_p20"] <= row[phase] <= row[f"{phase}_p80"]
        assert row["time_ms"] > max(row["forward_ms"], row["backward_ms"])
        assert row["ratio"] == pytest.approx(row["time_ms"] / rows["three matmuls"]["time_ms"])
        assert largest_error(row, "loss", "dx", "dw", "dbias") < 1e-5
        assert row["memory_gb"] - row["above_outputs_gb"] == pytest.approx(4 * (40 * 16 + 70 * 16 + 70) / 1e9)
        assert row["above_outputs_gb"] >= 0
    # All logits in float32 and as much again; chunks of 8 rows need less.
    assert rows["eager"]["above_outputs_gb"] >= 2 * 40 * 70 * 4 / 1e9
    assert all(rows[name]["failed"] == name for name in BROKEN)
    command = rows["eager"]["command"]
    assert all(row["torch"] == torch.__version__.partition("+")[0] and row["date"] for row in rows.values())
    assert command.startswith("python -m thunder_flce bench --shapes") and rows["flce"]["command"] == command
    printed = capsys.readouterr().out
    assert command in printed and f"torch {rows['eager']['torch']}" in printed
    table = [[cell.strip() for cell in line.split("|")] for line in printed.splitlines() if line.startswith("|")]
    assert {len(line) for line in table} == {len(table[0])} and table[0][1:3] == ["method", "time, ms"]
    assert [line[1] for line in table[2:]] == ["three matmuls", *good]
    half = (rows["eager"]["time_ms_p80"] - rows["eager"]["time_ms_p20"]) / 2
    assert table[3][2] == f"{rows['eager']['time_ms']:.3f} ±{half:.2g}"
    assert "\n- out of memory: out of memory\n" in printed
    (picture,) = (tmp_path / "pictures").iterdir()
    assert str(picture) in printed
    pixels = image.imread(picture)
    assert min(pixels.shape[:2]) > 100 and pixels.std() > 0.01


def test_a_frozen_head_needs_two_matmuls(tmp_path):
    rows = bench(tmp_path / "rows", "--shapes", "tiny,frozen=1", "--methods", "eager", "flce")
    floor = rows.pop("two matmuls")
    for row in rows.values():
        assert row["shape"] == "tiny 64 × 500 × 32, frozen head, float32" and "dw_error" not in row
        assert row["ratio"] == pytest.approx(row["time_ms"] / floor["time_ms"]) and row["dx_error"] < 1e-5
    names = [f"{loss}, {way}" for loss in ("DPO", "log-probabilities alone") for way in ("eager", "torch.compile")]
    rows = bench(tmp_path / "losses", "losses", "--shapes", "tiny,frozen=1", "--methods", *names, "DPO, flce")
    check_losses(rows, [*names, "DPO, flce"])
    # Eager PyTorch has logits (64, 500) in float32 and as much again; a frozen head leaves no room for either.
    memory = {way: rows[f"DPO, {way}"]["above_outputs_gb"] for way in ("eager", "flce")}
    assert memory["eager"] >= 2 * 64 * 500 * 4 / 1e9 and memory["flce"] < memory["eager"] / 2


def test_distributed(tmp_path, monkeypatch):
    started = partial(torch.multiprocessing.start_processes, start_method="forkserver")
    monkeypatch.setattr(torch.multiprocessing, "spawn", started)  # Which would import PyTorch in each.
    # torch.compile takes half a minute for each of its ways.
    names = [name for name in distributed.METHODS if not name.endswith("torch.compile")]
    options = ["--shapes", "tokens=40,vocab=71,hidden=16,dtype=float32", "--methods", *names]
    rows = bench(tmp_path / "rows", "distributed", *options)
    assert set(rows) == {"three matmuls", *names}
    for name in set(names) - {"liger"}:
        row = rows[name]
        assert row["ranks"] == 2 and largest_error(row, "dx", "dw") < 1e-5
        assert row["ratio"] == pytest.approx(row["time_ms"] / rows["three matmuls"]["time_ms"])
    assert rows["liger"]["failed"] == "equal parts of the vocabulary only"
    names = ["vocab_parallel", "sequence_parallel"]
    rows = bench(tmp_path / "odd", "distributed", "--shapes", "tiny,tokens=9", "--methods", *names)
    assert rows["sequence_parallel"]["failed"] == "9 tokens cannot be divided among 2 ranks"
    assert rows["vocab_parallel"]["dx_error"] < 1e-5


def test_distributed_needs_a_gpu_for_each_rank(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(SystemExit, match="--ranks 2 needs as many GPUs, but PyTorch finds 1"):
        distributed.measure(parse_shape("tiny"), ["vocab_parallel"], Run(device="cuda"), ranks=2)


def test_losses(tmp_path):
    names = [name for name in losses.METHODS if not name.endswith(("liger", *LOG_PROBS))]
    rows = bench(tmp_path / "rows", "losses", "--shapes", "tiny", "--methods", *names)
    assert list(rows) == [*FLOORS, *names]
    check_losses(rows, names)
    rows = bench(tmp_path / "odd", "losses", "--shapes", "tiny,tokens=7", "--methods", "DPO, eager", "GRPO, eager")
    assert rows["DPO"]["failed"] == "7 tokens cannot be divided into 8 sequences of one length"
    check_losses(rows, ["GRPO, eager"])


def largest_error(row, *results):
    return max(row[f"{result}_error"] for result in results)


def check_losses(rows, names):
    for name in names:
        row = rows[name]
        matmuls = 1 if name.startswith("log-prob") else 3 + ("KL" in name) - row["frozen"]
        gradients = ["dx", "dw"][: 0 if matmuls == 1 else 2 - row["frozen"]]
        assert [error for error in ("dx", "dw") if f"{error}_error" in row] == gradients
        assert largest_error(row, "loss", *gradients) < 1e-5
        assert row["ratio"] == pytest.approx(row["time_ms"] / rows[FLOORS[matmuls - 1]]["time_ms"])


def per_token(x, weight, target):
    return -F.cross_entropy(x @ weight.t(), target, reduction="none")


class StandIns:
    """With the arguments of TRL 1.16, Liger 0.8.5 and cut-cross-entropy 25.1, which have these values here."""

    class ChunkedLogProbFunction:
        @staticmethod
        def apply(x, weight, bias, targets, temperature, chunk_size, softcap=None, scale=1.0, outputs=("entropy",)):
            assert (bias, temperature, softcap, scale, outputs) == (None, 1.0, None, 1.0, ())
            return per_token(x, weight, targets), None, None, None, None

    class LigerFusedLinearScaledCrossEntropyFunction:
        @staticmethod
        def apply(x, weight, target, temperature=1.0, ignore_index=-100, m_tiles=1, return_entropy=False):
            assert (temperature, ignore_index, return_entropy) == (1.0, -100, False)
            return -per_token(x, weight, target)

    @staticmethod
    def LigerFusedLinearDPOLoss(*, beta, use_ref_model):
        """Takes (B, T, H) and (B, T)."""
        assert beta == 0.1 and not use_ref_model

        def loss(weight, x, target):
            of_tokens = per_token(x.flatten(0, 1), weight, target.flatten())
            chosen, rejected = of_tokens.view_as(target).sum(-1).chunk(2)
            return -F.logsigmoid(0.1 * (chosen - rejected)).mean(), ()

        return loss

    @staticmethod
    def liger_fused_linear_jsd(x, weight, teacher_input, teacher_weight, *, jsd_beta):
        assert jsd_beta == 0.0
        logits, of_teacher = (F.linear(*of).log_softmax(-1) for of in ((x, weight), (teacher_input, teacher_weight)))
        return F.kl_div(logits, of_teacher, reduction="batchmean", log_target=True)

    @staticmethod
    def liger_fused_linear_cross_entropy(input, weight, target, bias=None, chunk_mem_const=1):
        return F.cross_entropy(F.linear(input, weight, bias), target)

    @staticmethod
    def linear_cross_entropy(e, c, targets, *, reduction="mean", filter_eps="auto"):
        losses = -per_token(e, c, targets)
        assert reduction == "mean" or (reduction == "none" and filter_eps is None)
        return losses.mean() if reduction == "mean" else losses


def test_peers(tmp_path, monkeypatch):
    """Every loss under the log-probabilities of each, and the mean, for which others stand in here."""
    for module in ("trl.kernels", "liger_kernel.ops", "liger_kernel.chunked_loss", "cut_cross_entropy"):
        monkeypatch.setitem(sys.modules, module, StandIns)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.functional", StandIns)
    peers = [name for name in losses.METHODS if name.endswith(tuple(LOG_PROBS))]
    assert len(peers) == 3 * 5
    peers += ["DPO, liger", "KL from a teacher, liger"]
    shape = ["--shapes", "tokens=16,vocab=21,hidden=8,dtype=float32", "--methods"]
    check_losses(bench(tmp_path / "losses", "losses", *shape, *peers), peers)
    names = ["liger", "liger, chunk 8", "trl", "cut-cross-entropy", "cut-cross-entropy, exact"]
    rows = bench(tmp_path / "rows", *shape, *names)
    assert all(largest_error(rows[name], "loss", "dx", "dw") < 1e-5 for name in names)
    rows = bench(tmp_path / "bias", "--shapes", "tiny,bias=1", "--methods", "liger", "cut-cross-entropy")
    assert rows["liger"]["dbias_error"] < 1e-5 and "argument 'bias'" in rows["cut-cross-entropy"]["failed"]


def test_peers_that_are_not_installed_say_so(monkeypatch):
    for module in ("liger_kernel", "cut_cross_entropy", "quack", "trl"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delattr(torch.nn, "LinearCrossEntropyOptions", raising=False)
    peers = [name for name in METHODS if name.startswith(("liger", "trl", "cut", "quack", "torch linear"))]
    assert len(peers) == 10
    for make in [*map(maker, peers), *LOG_PROBS.values()]:
        with pytest.raises((ImportError, AttributeError), match="liger_kernel|trl|cut_cross|quack|LinearCrossEntropy"):
            make()


def test_models(tmp_path):
    pytest.importorskip("litgpt", reason="needs the extra 'examples'")
    rows = bench(tmp_path / "one", "models", "--models", "litgpt-tiny,tokens=32", "--methods", "eager", "flce")
    for row in rows.values():
        parts = [row[f"{phase}_ms"] for phase in ("forward", "backward", "optimizer")]
        assert min(parts) > 0 and row["time_ms"] > max(parts)
        assert (row["layers"], row["batch"], row["length"], row["lengths"]) == (1, 4, 8, "one")
        assert row["loss_error"] < 1e-5 and row["memory_gb"] > 0 and row["parameters"] > 128_000
    assert "fused" not in rows["eager"] and rows["flce"]["fused"] is True
    assert rows["flce"]["first_call_s"] > rows["eager"]["first_call_s"]
    rows = bench(tmp_path / "more", "models", "--models", "transformers-tiny,lengths=changing", "--methods", "eager")
    assert rows["eager"]["second_length_s"] > 0 and rows["eager"]["new_length_ms"] > 0


def test_rates(tmp_path, capsys, monkeypatch):
    measured = {"algorithm": None, "gain": 1.25, "milliseconds": 1.0, "seconds": 0.1}
    tuning = algorithms.Tuning(sizes=(256, 32, 64), **measured)
    monkeypatch.setattr(algorithms, "tunings", lambda: [tuning])
    rows = bench(tmp_path / "rows", "--rates", "--shapes", "tokens=64,vocab=256,hidden=32,dtype=float32")
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
    of = {(9.7, 3.0): True, (10.1, 0.9): True, (9.9, 1.0): False, (10.2, 0.5): False, (10.0, 1.0): False}
    for (time_ms, gb), is_better in of.items():
        assert better(default, time_ms=time_ms, above_outputs_gb=gb) == "Options(chunk_rows=8)" * is_better
    assert better(failed, **default) and not better(default, **failed) and not better(failed, **failed)


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

    released, run = [], Run(device="cpu")
    monkeypatch.setattr(measure, "release", lambda device: released.append([ref() for ref in held]))
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
    *((["--shapes", text], "a shape must be one of") for text in ("S1", "tokens=3", "cpu,vocab=x", "cpu,odd=1")),
    (["--shapes", "none.json,tokens=3"], "no shape can be read from 'none.json'"),
    (["losses", "--shapes", "tiny,ignored=0.5"], "without bias, ignored, but got tiny"),
    (["distributed", "--shapes", "tiny,frozen=1"], "without bias, frozen, but got tiny"),
    (["models", "--models", "none"], "a model must be one of litgpt-llama.*, but got 'none'"),
    (["models", "--models", "litgpt-tiny,layers=0"], "but got 'litgpt-tiny,layers=0'"),
    (["--methods", "none"], "a method must be one of"),
    (["--methods", "eager, chunk_rows=3"], "a method must be one of"),
    (["rates", "--methods", "eager"], "a method must be one of flce; flce backend; function; and"),
    (["--methods", "flce, rows=3"], "'flce, rows=3': .* unexpected keyword argument 'rows'"),
    (["--methods", "flce, chunk_rows=-3"], "chunk_rows must be None or a positive int, but got -3"),
    (["losses", "--methods", "none"], "must be one of mean"),
    (["--rounds", "0"], "must be a positive integer"),
    (["--json", "nowhere/results.jsonl"], "--json: .*No such file or directory: 'nowhere/results.jsonl'"),
    (["--json", "."], "--json: .*Is a directory: '.'"),
    (["--pictures", __file__], "--pictures: .*File exists"),
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
