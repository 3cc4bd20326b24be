"""The benchmark command end to end, every subset on sizes that a CPU runs in a second."""

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import thunder
import torch
import torch.nn.functional as F

import thunder_flce
from thunder_flce.__main__ import main
from thunder_flce.bench import (
    chunked_loop,
    cli,
    convergence,
    distributed,
    energy,
    kernels,
    lengths,
    losses,
    measuring,
    methods,
    predictions,
    profiling,
    rates,
    records,
    small,
    soak,
)
from thunder_flce.bench.measuring import (
    TOTAL,
    Outcome,
    Schedule,
    Session,
    TimedRow,
    Unavailable,
    paired_spread,
    peak_bytes,
)
from thunder_flce.bench.methods import METHODS, build
from thunder_flce.bench.profiling import exposed, exposed_collectives_ms
from thunder_flce.bench.reference import make_reference, matmuls, relative_error
from thunder_flce.bench.shapes import SHAPES, Inputs, Shape, parse_shape
from thunder_flce.device import ABSENT_DEVICE
from thunder_flce.engine.choose import choose
from thunder_flce.engine.matmul.algorithms import Tuning
from thunder_flce.functional import linear_cross_entropy
from thunder_flce.options import Options

pytest.importorskip("rich", reason="needs the extra 'bench'")
image = pytest.importorskip("matplotlib.image", reason="needs the extra 'bench'")

SHAPE = "tokens=40,vocab=70,hidden=16,bias=1,ignored=0.5,dtype=float32"
ROOT = Path(__file__).parents[1]
H200 = ROOT / "traces" / "h200" / "regions.jsonl"


def session_of(schedule=None, rows=None):
    """A session on a CPU that collects its rows."""
    write = (rows if rows is not None else []).append
    return Session(device="cpu", schedule=schedule or Schedule(), progress=lambda words: None, write=write)


def bench(path, subset, *options, turns=("--rounds", "1", "--calls", "2")):
    """Runs the command on a CPU, for as short as can be, and returns the records it wrote."""
    assert main(["bench", subset, "--device", "cpu", *turns, "--json", str(path), *options]) == 0
    return records.read([path])


def test_distributed(tmp_path):
    shape = "tokens=40,vocab=71,hidden=16,dtype=float32"
    # torch.compile takes half a minute for each of these; `test_two_ranks` has those of thunder.
    names = [name for name in distributed.METHODS if not name.endswith("torch.compile")]
    names = [name for name in names if not name.startswith("thunder")]
    arguments = ("distributed", "--shapes", shape, "--methods", *names)
    rows = {row["method"]: row for row in bench(tmp_path / "rows", *arguments)}
    assert list(rows) == names
    for name in ("vocab_parallel", "sequence_parallel", "loss_parallel", "loss_parallel, 8 chunks"):
        assert rows[name]["ranks"] == 2 and rows[name]["dx_error"] < 1e-5 and rows[name]["dw_error"] < 1e-5
    assert rows["vocab_parallel"]["same_bits"] and "same_bits" not in rows["sequence_parallel"]
    for name in ("liger", "liger, of logits"):
        assert rows[name]["failed"] == "equal parts of the vocabulary only"
    assert rows["three products"]["ratio"] == 1 and "exposed_ms" not in rows["vocab_parallel"]
    for name in ("fully_shard", "data_parallel"):
        assert rows[name]["dx_error"] < 1e-5 and rows[name]["dw_error"] < 1e-5


def test_distributed_under_torchrun(tmp_path):
    """The two processes that it has started are the ranks, and the first of them prints and writes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "thunder_flce", "bench", "distributed", "--device", "cpu", "--rounds", "1"]
    command += ["--json", str(tmp_path / "rows"), "--shapes", "tokens=8,vocab=7,hidden=4,dtype=float32"]
    names = ["three products", "data_parallel"]
    ranks = []
    for rank in "01":
        given = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        environment = {**os.environ, **given, "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": str(port)}
        started = [*command, "--methods", *names]
        ranks.append(subprocess.Popen(started, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True))
    first, second = (rank.communicate(timeout=100)[0] for rank in ranks)
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert "data_parallel" in first and "over 2 ranks" in first and "data_parallel" not in second
    rows = records.read([tmp_path / "rows"])
    assert [row["method"] for row in rows] == names and rows[1]["ranks"] == 2 and rows[1]["dw_error"] < 1e-5


def test_ranks_are_those_of_torchrun(monkeypatch, capsys):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        main(["bench", "distributed", "--device", "cpu", "--ranks", "3"])
    assert "--ranks must be those that torchrun has started, 2, or left out, but got 3" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("collectives", "others", "length"),
    [
        ([], [(0, 5)], 0),
        ([(1, 4)], [], 3),
        ([(1, 4)], [(0, 9)], 0),
        ([(1, 4), (3, 6)], [], 5),
        ([(5, 12), (0, 10), (2, 3)], [], 12),
        ([(1, 6)], [(5, 9), (0, 2)], 3),
        ([(0, 10)], [(4, 5), (2, 8), (3, 4)], 4),
        ([(0, 1), (20, 22), (5, 9)], [(21, 30), (6, 7), (1, 5)], 5),
    ],
)
def test_collectives_that_no_other_kernel_hides(collectives, others, length):
    assert exposed(collectives, others) == length


def test_exposed_collectives_of_a_step(monkeypatch):
    """Of kernels in microseconds, over two calls; on a CPU there are none."""

    def event(name, start, end, **settings):
        # As of the profiler: equal to DeviceType.CUDA, but another object.
        settings = {
            "device_type": torch.autograd.DeviceType(int(torch.autograd.DeviceType.CUDA)),
            "is_user_annotation": False,
            **settings,
        }
        return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start, end=end), **settings)

    events = [
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 1000, 5000),
        event("gemm", 2000, 3000),
        event("nccl:all_reduce", 0, 9000, is_user_annotation=True),
        event("FSDP::all_gather", 0, 9000, is_user_annotation=True),
        event("aten::mm", 0, 9000, device_type=torch.autograd.DeviceType.CPU),
    ]
    profiler = contextlib.nullcontext(SimpleNamespace(events=lambda: events))
    monkeypatch.setattr(profiling, "profile", lambda **settings: profiler)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    calls = []
    assert exposed_collectives_ms(calls.append, device="cuda", calls=2) == 1.5 and len(calls) == 2
    assert exposed_collectives_ms(calls.append, device="cpu") is None and len(calls) == 2


def test_losses(tmp_path):
    # torch.compile's take seconds each for a CPU.
    peers = ("torch.compile", "liger", *losses.PER_TOKEN)
    names = [name for name in losses.METHODS if not name.endswith(peers)]
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
    assert rows["DPO, frozen head, eager"]["memory_gb"] >= 2 * 64 * 500 * 4 / 1e9
    assert rows["DPO, frozen head, jit"]["memory_gb"] < rows["DPO, frozen head, eager"]["memory_gb"] / 2


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
    assert len(peers) == 3 * 6 + 2 * 2
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


def test_what_the_losses_are():
    log_probs, weights = -torch.rand(losses.SEQUENCES * 3, dtype=torch.float64), torch.rand(losses.SEQUENCES * 3)
    half, loss = log_probs.numel() // 2, losses.LOSSES["DPO"].reduce(log_probs, weights)
    margins = [log_probs[start : start + 3].sum() - log_probs[half:][start : start + 3].sum() for start in (0, 3, 6, 9)]
    torch.testing.assert_close(loss, torch.stack([F.softplus(-0.1 * margin) for margin in margins]).mean())
    loss = losses.LOSSES["weighted tokens"].reduce(log_probs, weights)
    torch.testing.assert_close(loss, -sum(log_probs * weights) / sum(weights))


def test_a_loss_that_is_not_fused_fails(tmp_path, monkeypatch):
    def with_penalty(reduce, parts):
        def program(x, weight, target, weights):
            logits = F.linear(x, weight)
            return F.cross_entropy(logits, target) + logits.square().mean()

        return program

    monkeypatch.setattr(losses, "_written", with_penalty)
    options = ["--shapes", "tokens=8,vocab=20,hidden=8", "--methods", "DPO, jit"]
    rows = {row["method"]: row for row in bench(tmp_path / "rows", "losses", *options)}
    assert rows["DPO, jit"]["failed"].startswith("NotFusedError") and "time_ms" not in rows["DPO, jit"]


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
    good = ["eager", "flce", "flce, recompute_logits", "grad_and_value loop"]
    options = ["--shapes", SHAPE, "--memory-budgets", "1e6", "--methods", *broken_methods, *good]
    rows = {row["method"]: row for row in bench(tmp_path / "results.jsonl", "regions", *options)}
    assert set(rows) == {"three matmuls", "flce, budget 1000000", *good, *broken_methods}
    for name in (*good, "flce, budget 1000000"):
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
    assert all(row["torch"] == torch.__version__.partition("+")[0] and row["date"] for row in rows.values())
    assert all(row["command"].startswith("python -m thunder_flce bench regions") for row in rows.values())
    printed = capsys.readouterr().out
    assert "three matmuls" in printed and "out of memory: out of memory" in printed


def test_without_a_subset_it_measures_regions_and_profiles(tmp_path):
    path, folder = tmp_path / "results.jsonl", tmp_path / "profiles"
    options = ["--device", "cpu", "--rounds", "1", "--json", str(path), "--commit", "abc", "--profile", str(folder)]
    assert main(["bench", *options, "--shapes", "tiny", "--dtype", "bfloat16", "--bias", "--methods", "eager"]) == 0
    eager = records.read([path])[-1]
    assert (eager["method"], eager["dtype"], eager["bias"], eager["commit"]) == ("eager", "bfloat16", True, "abc")
    assert 1e-4 < eager["dw_error"] < 1e-2
    events = json.loads((folder / "tiny-64-500-32-bias-eager.trace.json").read_text())["traceEvents"]
    names = {event.get("name") for event in events}
    assert {"end of forward", "end of backward", "aten::addmm"} <= names


@pytest.fixture
def lost_device(monkeypatch):
    """A method "breaking" that leaves a device behind which does not answer; a new process is an exception."""

    def breaking():
        raise RuntimeError("illegal memory access")

    def no_answer(device):
        raise RuntimeError("unspecified launch failure")

    def execv(program, arguments):
        raise SystemExit(arguments)

    monkeypatch.setitem(METHODS, "breaking", breaking)
    monkeypatch.setattr(measuring, "release", no_answer)
    monkeypatch.setattr(cli.os, "execv", execv)


@pytest.mark.parametrize(
    ("subset", "options", "expected"),
    [
        ("soak", ["--shapes", "tiny"], {"tokens": 64}),
        ("convergence", ["--models", "tiny", "--seeds", "7"], {"model": "tiny", "seed": 7}),
    ],
)
def test_a_method_that_lost_the_device_has_a_row(subset, options, expected, tmp_path, lost_device):
    path = tmp_path / "results.jsonl"
    arguments = ["--device", "cpu", "--steps", "4", "--json", str(path), *options, "--methods", "breaking", "eager"]
    with pytest.raises(SystemExit) as started:
        main(["bench", subset, *arguments])
    assert started.value.code[-2:] == ["--methods", "eager"]
    (row,) = records.read([path])
    assert row.items() >= {"method": "breaking", "failed": "RuntimeError: illegal memory access", **expected}.items()


def test_a_lost_device_costs_only_the_method_that_lost_it(tmp_path, lost_device, capfd):
    path = tmp_path / "results.jsonl"
    options = ["--shapes", "tiny", SHAPE, "--methods", "eager", "breaking", "flce", "--memory-budgets", "1e6"]
    with pytest.raises(SystemExit) as started:
        bench(path, "regions", *options)
    rows = records.read([path])
    assert [(row["method"], row["failed"]) for row in rows] == [("breaking", "RuntimeError: illegal memory access")]
    assert started.value.code[:4] == [sys.executable, "-m", "thunder_flce", "bench"]
    parsed = cli._parser().parse_args(started.value.code[4:])
    assert parsed.shapes == ["tiny", SHAPE] and parsed.json == path
    assert cli._regions(parsed).methods == ["eager", "flce", "flce, budget 1000000"]
    assert "going on without it" in capfd.readouterr().err


def test_sweep_and_its_figures(tmp_path):
    path, folder = tmp_path / "results.jsonl", tmp_path / "figures"
    points = ["context=64", "context=128", "vocabulary=300", "vocabulary=601"]
    rows = bench(path, "sweep", "--base", "tiny", "--points", *points, "--methods", "eager", "flce", "liger")
    assert {(row["axis"], row["tokens"], row["vocab"]) for row in rows} == {
        ("context", 64, 500),
        ("context", 128, 500),
        ("vocabulary", 64, 300),
        ("vocabulary", 64, 601),
    }
    assert all("dx_error" not in row for row in rows)
    peaks = {row["tokens"]: row["memory_gb"] for row in rows if row["axis"] == "context" and row["method"] == "eager"}
    assert peaks[128] > peaks[64]
    assert main(["bench", "figures", str(path), "--output", str(folder)]) == 0
    assert_figures(folder, ["sweep-context", "sweep-vocabulary"])


def test_a_low_rank_adapter_beside_a_frozen_head(tmp_path):
    """Those that take one linear only say so; this project gets the adapter as a term of its own."""
    names = ["eager", "thunder", "flce", "grad_and_value loop"]
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
    assert rows["grad_and_value loop"]["failed"] == "takes one linear, and no adapter beside it"


@pytest.fixture
def checkout(tmp_path):
    """A copy of the package that waits for 100 ms in each forward, and holds a million bytes more."""
    folder = tmp_path / "checkout"
    shutil.copytree(ROOT / "thunder_flce", folder / "thunder_flce", ignore=shutil.ignore_patterns("__pycache__"))
    functional = folder / "thunder_flce" / "functional.py"
    start = "    options = as_options(options)\n"
    slower = "    import time\n\n    time.sleep(0.1)\n    held = torch.empty(250_000)\n"
    text = functional.read_text(encoding="utf-8")
    assert text.count(start) == 1
    functional.write_text(text.replace(start, slower + start), encoding="utf-8")
    return folder


def test_against_another_checkout(tmp_path, checkout, capsys):
    executors = thunder.get_all_executors()
    options = [str(checkout), "--base-commit", "abc", "--shapes", "tiny", "--methods", "flce", "flce, recompute_logits"]
    rows = bench(tmp_path / "results.jsonl", "against", *options)
    assert [row["method"] for row in rows] == ["flce", "flce, recompute_logits"]
    for row in rows:
        assert (row["subset"], row["base"], row["name"], row["pairs"]) == ("against", "abc", "tiny", 2)
        assert row["base_time_ms"] >= 100
        assert row["ratio_p20"] <= row["ratio"] <= row["ratio_p80"]
        assert row["base_above_outputs_gb"] - row["above_outputs_gb"] > 0.9e-3
        assert row["memory_ratio"] == pytest.approx(row["above_outputs_gb"] / row["base_above_outputs_gb"])
    # The copy took no thunder symbol, nor an executor, in place of this package's.
    assert thunder.get_all_executors() == executors
    assert "tiny 64 × 500 × 32, float32, against abc" in capsys.readouterr().out


def test_against_a_method(tmp_path, broken_methods):
    options = ["flce", "--shapes", "tiny", "--methods", "eager", *broken_methods[:2], "flce"]
    rows = {row["method"]: row for row in bench(tmp_path / "results.jsonl", "against", *options)}
    assert rows["eager"]["base"] == "flce" and rows["eager"]["memory_ratio"] > 1.5
    assert rows["flce"]["memory_ratio"] == 1
    assert [rows[name]["failed"] for name in broken_methods[:2]] == ["not here", "RuntimeError: broken"]


def test_predictions(tmp_path):
    options = ["--shapes", "tokens=1200,vocab=4000,hidden=64,bias=1,dtype=float32"]
    rows = {row["method"]: row for row in bench(tmp_path / "rows", "predictions", *options, turns=())}
    assert set(rows) == set(predictions.WAYS)
    for name, row in rows.items():
        assert row["subset"] == "predictions" and row["plan"].startswith(name.partition(",")[0].replace("_", " "))
        assert row["memory_ratio"] == pytest.approx(row["predicted_gb"] / row["memory_gb"])
        # On a CPU, row kernels take memory of their own.
        assert row["predicted_gb"] < row["memory_gb"] < row["predicted_gb"] + 6e-3
    # Half of what all logits take is the budget: some are saved, and only a few more are there at a time.
    logits_gb = 1200 * 4000 * 4 / 1e9
    assert rows["save_logits"]["predicted_gb"] > logits_gb > rows["save_logits, some rows"]["memory_gb"]


def test_models_and_their_figures(tmp_path):
    pytest.importorskip("litgpt", reason="needs the extra 'examples'")
    path, folder = tmp_path / "results.jsonl", tmp_path / "figures"
    options = ["--models", "litgpt-tiny", "--layers", "1", "--methods", "eager", "flce"]
    eager, flce = bench(path, "models", *options)
    for row in (eager, flce):
        parts = [row[f"{phase}_ms"] for phase in ("forward", "backward", "optimizer")]
        assert min(parts) > 0 and row["time_ms"] > max(parts)
        assert row["loss_error"] < 1e-5 and row["memory_gb"] > 0 and row["parameters"] > 128_000
    assert "fused" not in eager and flce["fused"] is True
    assert flce["first_call_s"] > eager["first_call_s"]
    assert main(["bench", "figures", str(path), "--output", str(folder)]) == 0
    assert_figures(folder, ["models-litgpt-tiny"])


def test_convergence_and_its_figure(tmp_path):
    """Runs of one seed begin alike; the loss falls; on a CPU, all methods round the same dlogits."""
    for package in ("litgpt", "tokenizers"):
        pytest.importorskip(package, reason="needs the extra 'examples'")
    path, folder = tmp_path / "results.jsonl", tmp_path / "figures"
    options = [
        "--device",
        "cpu",
        "--seeds",
        "0",
        "1",
        "--steps",
        "20",
        "--methods",
        "eager",
        "flce",
        "--json",
        str(path),
    ]
    assert main(["bench", "convergence", *options]) == 0
    rows = {(row["method"], row["seed"]): row for row in records.read([path])}
    assert list(rows) == [("eager", 0), ("flce", 0), ("eager", 1), ("flce", 1)]
    for row in rows.values():
        assert (row["model"], row["steps"], row["tokens"], row["vocab"]) == ("tiny", 20, 128, 512)
        assert row["parameters"] == 2 * 512 * 32 + 4 * 32**2 + 3 * 32 * 64 + 3 * 32
        assert 6.3 > row["losses"][0] > row["losses"][1] and len(row["losses"]) == 2
        assert row["final_loss"] == pytest.approx(sum(row["losses"]) / 2, rel=1e-5)
        assert row["time_ms"] > 0 and row["held_out_loss"] < 6.2
    for seed in (0, 1):
        eager, flce = rows["eager", seed], rows["flce", seed]
        assert flce["losses"] == pytest.approx(eager["losses"], abs=0.01)
        assert flce["held_out_loss"] == pytest.approx(eager["held_out_loss"], abs=0.01)
    assert abs(rows["eager", 0]["losses"][0] - rows["eager", 1]["losses"][0]) > 1e-4
    assert main(["bench", "figures", str(path), "--output", str(folder)]) == 0
    assert_figures(folder, ["convergence-tiny"])


def test_what_is_trained_on():
    for package in ("litgpt", "tokenizers"):
        pytest.importorskip(package, reason="needs the extra 'examples'")
    training, seen = convergence._Training(convergence.SETUPS["tiny"], "cpu"), []
    training._loss(lambda inputs: seen.append(inputs) or inputs.x.sum(), torch.arange(200), torch.tensor([3, 50]))
    (inputs,) = seen
    assert inputs.target.tolist() == [*range(4, 36), *range(51, 83)]
    assert (inputs.x.dtype, tuple(inputs.x.shape), inputs.weight.dtype) == (torch.bfloat16, (64, 32), torch.bfloat16)
    rates = [convergence._schedule(step, 100) for step in range(100)]
    assert rates[0] == 0.2 and max(rates) == rates[5] == 1 and 0.1 < rates[-1] < 0.101


def test_a_soak_of_a_method_that_grows(tmp_path, monkeypatch):
    held = []

    def leaking():
        eager = build("eager")

        def method(inputs):
            held.append(None)
            return eager(inputs)

        return method

    # Steps take ever longer: by ten seconds each, whatever else the machine does.
    monkeypatch.setattr(soak, "time", SimpleNamespace(perf_counter=lambda: time.perf_counter() + 5 * len(held) ** 2))
    # The process may have had more memory before, so that its peak would not show what is held.
    usage = SimpleNamespace(
        RUSAGE_SELF=0, getrusage=lambda of: SimpleNamespace(ru_maxrss=len(held) * 32_000_000 // 1024)
    )
    monkeypatch.setattr(soak, "resource", usage)
    monkeypatch.setattr(soak, "COUNTS", 4)
    monkeypatch.setitem(METHODS, "leaking", leaking)
    path = tmp_path / "results.jsonl"
    options = ["--device", "cpu", "--shapes", "tiny", "--steps", "15", "--methods", "flce", "leaking"]
    assert main(["bench", "soak", *options, "--json", str(path)]) == 0
    flce, leaking = records.read([path])
    for row in (flce, leaking):
        assert row["steps"] == 16 and len(row["passes_ms"]) == 4 and row["compilations"] == 0
        assert row["drift"] == pytest.approx(row["passes_ms"][3] / row["passes_ms"][1], rel=1e-2)
    assert flce["host_growth_gb"] < 0.1
    # 32 MB in each of the 8 steps after the second pass.
    assert 0.2 < leaking["host_growth_gb"] < 0.4 and leaking["drift"] == pytest.approx(
        (16**2 - 12**2) / (8**2 - 4**2), 0.1
    )


def test_a_soak_counts_compilations(monkeypatch):
    from triton import knobs

    steps = []

    def method(inputs):
        steps.append((inputs.x.shape[0], (inputs.target == -100).float().mean().item()))
        if len(steps) in (1, 2, 70):
            knobs.runtime.jit_post_compile_hook(repr=f"kernel {len(steps) // 50}")
        return F.cross_entropy(F.linear(inputs.x, inputs.weight), inputs.target)

    monkeypatch.setitem(METHODS, "compiling", lambda: method)
    rows = []
    soak.measure(SHAPES["tiny"], ["compiling"], session_of(rows=rows), steps=1)
    (row,) = rows
    assert (row.steps, row.compilations, row.last_compilation) == (256, 3, 70)
    assert row.compiled == ["1: kernel 0", "2: kernel 0", "70: kernel 1"]
    assert knobs.runtime.jit_post_compile_hook is None
    counts = [tokens for tokens, _ in steps]
    assert sorted(counts[:64]) == sorted(counts[64:128]) and counts[:64] != counts[64:128]
    assert (min(counts), max(counts)) == (4, 64)
    ignored = sorted(fraction for tokens, fraction in steps if tokens > 50)
    assert ignored[0] == 0 and ignored[-1] > 0.75


def test_small_regions(tmp_path):
    # torch.compile's takes seconds for a CPU.
    names = [name for name in small.METHODS if name != "torch.compile"]
    rows = {row["method"]: row for row in bench(tmp_path / "rows", "small", "--methods", *names)}
    assert rows.pop("lean")["failed"] == "runs on GPUs only"
    assert list(rows) == [name for name in names if name != "lean"]
    for name, row in rows.items():
        assert row["subset"] == "small" and 0 < row["host_ms"] <= row["time_ms"] and "operations" not in row
        assert row["calls"] > rows["flce, no_grad"]["calls"] > 10 or name in ("eager", "flce, no_grad")
    for name in ("eager", "flce", "flce, compute"):
        assert rows[name]["dx_error"] < 1e-5 and rows[name]["dw_error"] < 1e-5


def test_lengths_of_batches(tmp_path, monkeypatch):
    seen = []

    def method(inputs):
        seen.append(len(inputs.target))
        time.sleep(0.02 if len(seen) <= 3 else 0)
        return F.cross_entropy(F.linear(inputs.x, inputs.weight), inputs.target)

    tuning = Tuning(product="dX", sizes=(500, 32, 64), algorithm=None, gain=1.25, milliseconds=0.5, seconds=0.01)
    monkeypatch.setattr(lengths, "COUNTS", 3)
    monkeypatch.setattr(lengths, "tunings", lambda: [tuning] * (len(seen) == 3))
    monkeypatch.setitem(lengths.METHODS, "eager", lambda shape: method)
    # torch.compile's takes seconds for a CPU.
    names = [name for name in lengths.METHODS if "compile" not in name]
    rows = bench(tmp_path / "rows", "lengths", "--methods", *names, turns=())
    assert [row["method"] for row in rows] == names and all(row["second_ms"] > 0 for row in rows)
    assert seen == lengths.counts_of(64) * 2 and len(set(seen)) == 3 and 48 <= min(seen) <= max(seen) <= 80
    eager = rows[0]
    assert eager["first_ms"] > 20 and eager["first_s"] > 0.06 and eager["tuning_s"] == 0.01
    assert eager["ratio"] == pytest.approx((eager["first_s"] - 0.01) / eager["second_s"])


def test_rates(tmp_path, capsys, monkeypatch):
    """Plain text, and the same as JSON; without the packages that other subsets show their results with."""
    monkeypatch.setattr(cli, "find_spec", lambda name: None)
    monkeypatch.setattr(rates, "SCHEDULE", replace(Schedule(), rounds=1, calls=2, turn_ms=1, settle_ms=0))
    monkeypatch.setattr(rates, "MEASURED_ON_CPU", (64, 256, 32))
    assert main(["bench", "--rates", "--device", "cpu", "--json", str(tmp_path / "rates.jsonl")]) == 0
    (record,) = records.read([tmp_path / "rates.jsonl"])
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
    def way(time_ms, memory_gb, failed=None):
        return rates.Measured(name="", options={}, time_ms=time_ms, memory_gb=memory_gb, failed=failed)

    default = way(10.0, 1.0)
    better = [(9.7, 3.0), (10.1, 0.9), (5.0, 1.0)]
    assert [rates.is_better(way(*numbers), default) for numbers in better] == [True] * 3
    assert not any(rates.is_better(way(*numbers), default) for numbers in [(9.9, 1.0), (10.2, 0.5), (10.0, 1.0)])
    failed = way(None, None, "out of memory")
    assert not rates.is_better(failed, default) and rates.is_better(default, failed)


def test_rates_that_cannot_be_measured(monkeypatch):
    def fail(*arguments, **settings):
        raise RuntimeError("no matmuls here")

    monkeypatch.setattr(torch, "mm", fail)
    with pytest.raises(RuntimeError, match="matmuls cannot be measured here: .*no matmuls here"):
        rates.measured_rates(session_of(replace(Schedule(), rounds=1, calls=2, turn_ms=1, settle_ms=0)))


def test_kernels_and_their_figures(tmp_path):
    path, folder = tmp_path / "results.jsonl", tmp_path / "figures"
    rows = bench(path, "kernels", "--vocabs", "1000", "4099", "--dtype", "bfloat16")
    assert [(row["vocab"], row["method"]) for row in rows] == [(v, n) for v in (1000, 4099) for n in kernels.KERNELS]
    for row in rows:
        moved = row["rows"] * row["vocab"] * 2 * (1 if row["method"] in ("statistics", "moments") else 2)
        assert row["gb_per_s"] == pytest.approx(moved / row["time_ms"] / 1e6)
        assert row["ratio"] == pytest.approx(row["gb_per_s"] / row["copy_gb_per_s"])
        assert row["backend"] == "torch"
    assert main(["bench", "figures", str(path), "--output", str(folder)]) == 0
    assert_figures(folder, ["kernels-bfloat16-torch"])


def assert_figures(folder, names):
    assert {path.stem for path in folder.iterdir()} == set(names)
    for path in folder.iterdir():
        pixels = image.imread(path)
        assert min(pixels.shape[:2]) > 300 and pixels.std() > 0.01, path


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


@pytest.mark.parametrize("bias", [False, True])
def test_loop_of_chunks_with_any_upstream_gradient(monkeypatch, bias):
    monkeypatch.setattr(chunked_loop, "CHUNK_ROWS", 16)
    shape = Shape(name="", tokens=40, vocab=33, hidden=8, bias=bias, ignored=0.3, dtype=torch.float32)
    inputs = Inputs.random(shape, "cpu")
    loss = build("grad_and_value loop")(inputs)
    (3 * loss).backward()
    expected = F.cross_entropy(F.linear(*(t.detach() for t in inputs.named_operands().values())), inputs.target)
    torch.testing.assert_close(loss.detach(), expected)
    reference = make_reference(inputs)
    for name, operand in inputs.named_operands().items():
        assert relative_error(operand.grad, 3 * reference.gradients[name]) < 1e-6


def test_peers_that_are_not_installed_say_so(monkeypatch):
    for module in ("liger_kernel", "cut_cross_entropy", "quack", "trl"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delattr(torch.nn, "LinearCrossEntropyOptions", raising=False)
    monkeypatch.setattr(methods, "find_spec", lambda name: None)
    peers = [name for name in METHODS if name.startswith(("liger", "trl", "cut", "quack", "torch linear", "auto"))]
    assert len(peers) == 14
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


def test_paired_turns():
    calls = []

    def step(name, seconds):
        def run(mark):
            calls.append(name)
            time.sleep(seconds)
            mark("phase")

        return run

    def bad(mark):
        raise MemoryError

    schedule = Schedule(rounds=2, calls=3, turn_ms=1e4, settle_ms=0)
    pairs = {"one": (step("a", 2e-3), step("b", 5e-2)), "bad": (step("c", 0), bad)}
    rows = []
    outcomes = session_of(schedule, rows).take_paired_turns(pairs)
    assert list(outcomes) == ["one"] and rows == [TimedRow(method="bad", failed="MemoryError: ")]
    # A pair to settle, one that is not timed, and three in alternating order; in each of two rounds.
    assert "".join(name for name in calls if name in "ab") == 2 * ("ab" + "ab" + "abbaab")
    assert all(2 <= first and 50 <= second for first, second in outcomes["one"])
    spread = paired_spread([(1.0, 2.0), (9.0, 3.0), (4.0, 4.0)])
    assert spread == {
        "time_ms": 4.0, "base_time_ms": 3.0, "ratio": 1.0, "ratio_p20": 0.5, "ratio_p80": 3.0, "pairs": 3
    }  # fmt: skip


@pytest.fixture
def nvml(monkeypatch):
    """A counter of a GPU of 700 W that moves every 30 ms, by too much and too little in turn."""
    start = time.perf_counter()

    class NVMLError(Exception):
        pass

    def consumed(handle):
        assert handle == "GPU-1234"
        moves = int((time.perf_counter() - start) / 0.03)
        return moves * 21_000 + moves % 2 * 6_000

    counter = SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetTotalEnergyConsumption=consumed,
    )
    monkeypatch.setitem(sys.modules, "pynvml", counter)
    monkeypatch.setattr(energy, "find_spec", lambda name: counter)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: SimpleNamespace(uuid="1234"))
    return counter


def test_power_between_moves_of_the_counter(nvml):
    with energy.PowerMeter("cuda") as power:
        time.sleep(0.7)
    assert power.watts == pytest.approx(700, rel=0.25)
    with energy.PowerMeter("cuda") as power:
        pass
    assert power.watts is None
    with energy.PowerMeter("cpu") as power:
        time.sleep(0.1)
    assert power.watts is None

    def not_supported(handle):
        raise nvml.NVMLError

    nvml.nvmlDeviceGetTotalEnergyConsumption = not_supported
    with energy.PowerMeter("cuda") as power:
        time.sleep(0.1)
    assert power.watts is None


def test_energy_of_a_call(monkeypatch):
    powers = iter([600.0, None, 800.0])
    monkeypatch.setattr(energy.PowerMeter, "__exit__", lambda self, *_: setattr(self, "watts", next(powers)))
    steps = {"slow": lambda mark: (time.sleep(4e-3), mark("phase"))}
    schedule = Schedule(rounds=3, calls=2, settle_ms=0)
    outcome = session_of(schedule).take_turns(steps)["slow"]
    assert outcome.watts == [600, 800]
    assert outcome.joules() == pytest.approx(0.7 * outcome.median(TOTAL))
    assert Outcome([{TOTAL: 5.0}]).joules() is None


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


def test_peaks_of_phases():
    def step(mark):
        kept = torch.ones(1000)
        mark("one")
        torch.ones(5000)
        mark("two")
        del kept
        torch.ones(100)
        mark("three")

    assert peak_bytes(step, "cpu") == {"one": 4000, "two": 24000, "three": 4000, TOTAL: 24000}


@pytest.mark.parametrize(
    "text", ["S9", "S1,data=flat", "tokens=3", "tokens=3,vocab=x,hidden=4", "tokens=1,vocab=1,hidden=1,odd=1"]
)
def test_shapes_that_make_no_sense(text):
    with pytest.raises(ValueError, match="a shape must be one of S1"):
        parse_shape(text)
    with pytest.raises(SystemExit):
        main(["bench", "--shapes", text])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "none"], "unknown methods"),
        (["--memory-budgets", "-1"], "a memory budget must be a positive number"),
        (["--ignored", "2"], "must be between 0 and 1"),
        (["--rounds", "0"], "must be a positive integer"),
        (["against", "nowhere"], "the base must be a method or a folder with the folder thunder_flce"),
        (["against", "flce", "--methods", "none"], "unknown methods"),
        (["against", str(ROOT), "--methods", "eager"], "only this project's methods are in another checkout"),
        (["kernels", "--json", "nowhere/results.jsonl"], "--json: there is no folder nowhere"),
        (["sweep", "--points", "depth=3"], "a point must be one of context, vocabulary"),
        (["sweep", "--points", "context=x"], "a point must be one of context, vocabulary"),
    ],
)
def test_arguments_that_make_no_sense(arguments, message, capsys):
    with pytest.raises(SystemExit):
        main(["bench", *arguments])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("package", "arguments"),
    [("rich", ["kernels"]), ("matplotlib", ["figures", str(H200)])],
    ids=["rich", "matplotlib"],
)
def test_missing_packages_name_their_extra(package, arguments, monkeypatch, capsys):
    monkeypatch.setattr(cli, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        main(["bench", *arguments])
    assert f"bench needs {package}: pip install 'thunder-flce[bench]'" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["vocab=3000,hidden=768,bias=1,ignored=0.4"])
def test_peaked_data(text):
    """A loss near 2, targets by Zipf's law, and predictions between hopeless and certain."""
    inputs = Inputs.random(parse_shape(f"tokens=4000,{text},dtype=float32,data=peaked"), "cpu")
    assert 1.7 < make_reference(inputs).loss < 2.5
    valid = inputs.target != -100
    assert valid.float().mean() == (0.6 if "ignored" in text else 1)
    vocab = inputs.weight.shape[0]
    harmonic = (1 / torch.arange(1, vocab + 1)).sum()
    counts = torch.bincount(inputs.target[valid], minlength=vocab) / valid.sum()
    torch.testing.assert_close(counts[:5], 1 / torch.arange(1, 6) / harmonic, rtol=0.25, atol=0)
    probabilities = F.linear(inputs.x, inputs.weight, inputs.bias)[valid].softmax(1)
    ratios = probabilities.mean(0)[:5] / counts[:5]
    assert 0.3 < ratios.min() and ratios.max() < 1.5
    of_targets = probabilities.gather(1, inputs.target[valid][:, None])
    assert of_targets.quantile(0.1) < 0.02 and of_targets.quantile(0.9) > 0.8


def test_the_matmuls_that_times_are_compared_with_have_the_dlogits_of_the_loss(monkeypatch):
    shape = parse_shape("tokens=40,vocab=70,hidden=16,bias=1,ignored=0.5,dtype=float32,data=peaked")
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


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_first_matmuls(count, monkeypatch):
    step = matmuls(Inputs.random(parse_shape("tiny"), "cpu"), count)
    calls = []
    monkeypatch.setattr(torch, "mm", lambda *operands, out=None: calls.append(operands))
    step(lambda phase: None)
    assert len(calls) == count


def test_reduction_none_with_entropy(monkeypatch):
    """The entropies' gradient is computed, and adds nothing."""
    inputs = Inputs.random(parse_shape(SHAPE), "cpu")
    upstream = []

    def with_hook(*arguments, **keywords):
        losses, entropies = linear_cross_entropy(*arguments, **keywords)
        entropies.register_hook(upstream.append)
        return losses, entropies

    monkeypatch.setattr(thunder_flce, "linear_cross_entropy", with_hook)
    loss = build("flce, entropy")(inputs)
    loss.backward()
    reference = make_reference(inputs)
    assert relative_error(loss.detach(), reference.loss) < 1e-6
    for name, operand in inputs.named_operands().items():
        assert relative_error(operand.grad, reference.gradients[name]) < 1e-5
    assert len(upstream) == 1 and upstream[0].count_nonzero() == 0


def test_bytes_and_operations_of_a_frozen_head_with_an_adapter():
    shape = Shape(name="", tokens=10, vocab=7, hidden=5, ignored=0.2, frozen=True, rank=2)
    # dx, dy and db, in bfloat16.
    assert shape.output_bytes == 2 * (10 * 5 + 10 * 2 + 7 * 2)
    # Logits and dx of x W, then logits, dy and db of y B.
    assert shape.operations == 2 * 8 * 7 * (5 + 5 + 2 + 2 + 2)
    inputs = Inputs.random(shape, "cpu")
    assert list(inputs.named_operands()) == ["dx", "dy", "db"]
    assert not inputs.without_gradients().named_operands()
