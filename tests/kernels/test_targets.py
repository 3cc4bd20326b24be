"""Every Triton kernel, as its launchers ask for it, compiled for GPUs that are not there.

It fails for what does not compile, reads rows in small pieces, needs more shared memory, threads or registers than the
chip has, spills, or waits in a loop that reads nothing. `make targets` (ALL_TARGETS=1) compiles for all of them, in
every dtype; `make test` for two, in bfloat16. Launchers are called with tensors on a CPU, in place of which a device is
described.
"""

import itertools
import os
import re
import subprocess
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import KernelInterface

from thunder_flce.device import ABSENT_DEVICE, Device
from thunder_flce.engine.kernels import interface, triton_vectors
from thunder_flce.engine.kernels.interface import LabelTerm, RowStatistics
from thunder_flce.engine.kernels.triton_divergence import divergence_
from thunder_flce.engine.kernels.triton_logits import logits_
from thunder_flce.engine.kernels.triton_rows import TritonRowKernels
from thunder_flce.engine.kernels.triton_tokens import kernel_for
from thunder_flce.operation.call import Call
from thunder_flce.operation.divergence import Divergence
from thunder_flce.operation.loss import LogitMap, Loss, RowCoefficients
from thunder_flce.operation.moments import MOMENTS
from thunder_flce.token_losses import token_loss_of

KIB = 2**10
MOST_THREADS = 1024
SPILLED_BYTES = 16
"""That a thread may spill: less than a hundredth of what it reads and writes"""


@dataclass(frozen=True)
class Chip:
    """What a compiler is asked for, and what a program may use."""

    target: tuple
    device: Device
    shared: int
    registers: int = 65536
    """Of all threads of a program, 4 bytes each"""


def _nvidia(capability: tuple[int, int], processors: int, shared: int, threads: int = 2048) -> Chip:
    device = replace(ABSENT_DEVICE, capability=capability, multiprocessors=processors, resident_threads=threads)
    return Chip(("cuda", 10 * capability[0] + capability[1], 32), device, shared)


def _amd(architecture: str, capability: tuple[int, int], shared: int) -> Chip:
    warp_size = 64 if architecture.startswith("gfx9") else 32
    device = replace(ABSENT_DEVICE, capability=capability, is_hip=True, warp_size=warp_size, multiprocessors=256)
    return Chip(("hip", architecture, warp_size), device, shared, 131072)


CHIPS = {
    "sm75": _nvidia((7, 5), 40, 64 * KIB, 1024),
    "sm80": _nvidia((8, 0), 108, 163 * KIB),
    "sm86": _nvidia((8, 6), 82, 99 * KIB, 1536),
    "sm89": _nvidia((8, 9), 128, 99 * KIB, 1536),
    "sm90": _nvidia((9, 0), 132, 227 * KIB),
    "sm100": _nvidia((10, 0), 148, 227 * KIB),
    "sm120": _nvidia((12, 0), 170, 99 * KIB, 1536),
    "sm121": _nvidia((12, 1), 48, 99 * KIB, 1536),
    "gfx942": _amd("gfx942", (9, 4), 64 * KIB),
    "gfx950": _amd("gfx950", (9, 5), 160 * KIB),
    "gfx1100": _amd("gfx1100", (11, 0), 64 * KIB),
    "gfx1201": _amd("gfx1201", (12, 0), 64 * KIB),
}
WIDE = {f"_{name}_kernel" for name in ("statistics", "both", "moments", "gradient", "divergence")}
WIDE_LOAD = r"ld\.global\S*\.v4\.b32|(global|buffer)_load_(b128|dwordx4)"
SHORT = ("sm80", "gfx942")
IS_SHORT = not os.environ.get("ALL_TARGETS")
ROWS = 64


@dataclass
class Launch:
    """A compiled kernel."""

    kernel: str
    chip: Chip
    compiled: object

    @property
    def text(self) -> str:
        return self.compiled.asm["amdgcn" if self.chip.device.is_hip else "ptx"]

    @property
    def threads(self) -> int:
        return self.compiled.metadata.num_warps * self.chip.device.warp_size

    def registers_and_spills(self) -> tuple[int, int]:
        """Of a thread, the latter in bytes."""
        if self.chip.device.is_hip:
            keys = ("vgpr_count", "vgpr_spill_count", "private_segment_fixed_size")
            vgprs, spilled, private = (int(re.search(rf"\.{key}:\s+(\d+)", self.text)[1]) for key in keys)
            return vgprs, 4 * spilled + private
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.compiled.asm["cubin"])
            file.flush()
            tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
            usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
        registers, stack, local = (int(re.search(rf"{key}:(\d+)", usage)[1]) for key in ("REG", "STACK", "LOCAL"))
        return registers, stack + local

    def waits_blindly(self) -> bool:
        """Whether a loop waits for other programs without reading what they write.

        Who waits has left its own part before, by an exchange. The loops are those that hold nothing else: behind it,
        up to the first branch back.
        """
        is_hip = self.chip.device.is_hip
        _, exchanged, rest = self.text.partition("atomic_swap" if is_hip else ".exch.")
        if not exchanged:
            return False
        label, branch = (r"^\.LBB\d+_\d+:", "s_cbranch") if is_hip else (r"^\$L\w+:", "bra")
        for start in re.finditer(label, rest, re.M):
            name = start[0][:-1]
            back = re.search(rf"{branch}\S*\s+{re.escape(name)}\b", rest[start.end() :])
            if back is not None:
                loop = rest[start.end() : start.end() + back.start()]
                return not re.search("load|atomic" if is_hip else r"ld\.volatile|ld\.acquire|atom\.", loop)
        raise AssertionError(f"{self.kernel} exchanges something, but waits nowhere")

    def faults(self) -> list[str]:
        (registers, spilled), shared = self.registers_and_spills(), self.compiled.metadata.shared
        faults = {
            f"{shared} bytes of shared memory": shared > self.chip.shared,
            f"{self.threads} threads": self.threads > MOST_THREADS,
            f"{registers} registers of {self.threads} threads": registers * self.threads > self.chip.registers,
            f"{spilled} bytes spilled": spilled > SPILLED_BYTES,
            "waits in a loop that reads nothing": self.waits_blindly(),
            "reads less than 16 bytes at a time": self.kernel in WIDE and not re.search(WIDE_LOAD, self.text),
        }
        return [text for text, is_fault in faults.items() if is_fault]


@pytest.fixture
def launches(name, monkeypatch):
    """What launchers have compiled for the chip of that name."""
    launches, chip = [], CHIPS[name]
    driver = SimpleNamespace(
        # A device for each chip, or Triton would take what it has compiled for another.
        get_current_device=lambda: [*CHIPS].index(name),
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget(*chip.target),
    )

    def compile_only(kernel, grid):
        def launch(*arguments, **settings):
            compiled = kernel.run(*arguments, grid=grid, warmup=True, **settings)
            launches.append(Launch(kernel.fn.__name__, chip, compiled))

        return launch

    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    monkeypatch.setattr(KernelInterface, "__getitem__", compile_only)
    monkeypatch.setattr(Device, "of", lambda device: chip.device)
    return launches


def logits(vocab: int, dtype: torch.dtype) -> torch.Tensor:
    return interface.empty_logits(ROWS, vocab, dtype=dtype, device="cpu", device_type="cuda")


def vector(dtype=torch.float32) -> torch.Tensor:
    return torch.zeros(ROWS, dtype=dtype)


def row_statistics() -> RowStatistics:
    return RowStatistics(vector(), vector())


# What is launched, kernel by kernel: all of it, or what `make test` does.


def statistics(dtype):
    for vocab in (8192, 128257):
        TritonRowKernels().statistics(logits(vocab, dtype))
    TritonRowKernels(LogitMap(softcap=30.0)).statistics(logits(128256, dtype))


def one_pass(dtype):
    """A small row, two medium ones, a large one that a program has to itself, and some that are divided."""
    vocabs = (8192, 32000, 65536, 128257) if IS_SHORT else (8192, 32000, 65536, 81920, 128256, 151936, 262144)
    plain, target = RowCoefficients(vector(), vector()), vector(torch.int64)
    for vocab in vocabs:
        TritonRowKernels().one_pass_(logits(vocab, dtype), target, plain)
    TritonRowKernels(LogitMap(softcap=30.0)).one_pass_(logits(128256, dtype), target, plain)


def moments(dtype):
    for names in (tuple(MOMENTS),) if IS_SHORT else (tuple(MOMENTS), *((name,) for name in MOMENTS)):
        TritonRowKernels().moments(logits(128257, dtype), row_statistics(), torch.ones(128257), names)


def gradient(dtype):
    settings = {"class_weight": torch.ones(128257), "target": vector(torch.int64)}
    for out, terms, sums in itertools.product({dtype, torch.bfloat16}, (4,) if IS_SHORT else (4, 2), (False, True)):
        coefficients = RowCoefficients(*(vector() for _ in range(terms)))
        settings |= {"out": logits(128257, out), "column_sums": sums}
        TritonRowKernels().gradient_(logits(128257, dtype), row_statistics(), coefficients, **settings)


def divergences(dtype):
    for kind in ("forward", "reverse", "jensen_shannon"):
        for vocab in (128256,) if IS_SHORT else (8192, 128256):
            z, teacher = logits(vocab, dtype), logits(vocab, torch.bfloat16)
            for labels in (None, LabelTerm(vector(torch.int64), row_statistics(), vector())):
                divergence_(z, teacher, Divergence(kind=kind), factors=vector(), out=z, labels=labels)


def vectors(dtype):
    """What comes before the rows' work, after it, and last of all."""
    tensors = {"linear_weight": torch.empty(128256, 0), "target": vector(torch.int64)}
    tensors |= {"token_weights": vector(), "weight": torch.ones(99)}
    for reduction, num_items in (("mean", {}), ("sum", {"num_items": torch.ones(())})):
        loss = Loss(reduction=reduction, z_loss=1e-4, outputs=("log_prob", "log_sum_exp"))
        call = Call(tensors=tensors | num_items, loss=loss)
        found = triton_vectors.token_vectors(call, upstream=torch.ones(()))
        vectors = {name: getattr(found, name) for name in ("row_factor", "at_target", "divisors")}
        triton_vectors.finish(loss, row_statistics(), vector(dtype), **vectors)
    gradients = [torch.empty(2**16, dtype=dtype) for _ in range(3)]
    triton_vectors.scale_(gradients, torch.ones(()), torch.ones(2, dtype=torch.int64), torch.ones(()))


def tokens(dtype):
    """A token loss of everything that a kernel knows of a row."""

    def ratio(log_prob, entropy, old, advantage, *, log_sum_exp, mean_logit):
        ratio = torch.exp(log_prob - old)
        clipped = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        return 1e-4 * log_sum_exp.square() - clipped - 0.1 * entropy * torch.sigmoid(advantage) + mean_logit * old

    inputs, moments = [vector(), vector()], {"expected": vector(), "shifted_sum": vector()}
    token_loss = token_loss_of(ratio, inputs)
    for logit_map in (LogitMap(), LogitMap(softcap=30.0)):
        run = kernel_for(token_loss, (torch.float32, torch.float32), logit_map)
        run(row_statistics(), vector(dtype), moments, vector(), inputs, columns=2**17)


def invariant_logits(dtype):
    """Of operands in 16 bits."""
    for hidden in () if dtype.itemsize > 2 else (1000,) if IS_SHORT else (4096, 1000):
        x, weight = torch.zeros(ROWS, hidden, dtype=dtype), torch.zeros(128257, hidden, dtype=dtype)
        logits_(logits(128257, dtype), x, weight, bias=torch.zeros(128257, dtype=dtype))
        logits_(logits(128257, torch.float32), x, weight, accumulate=True)


KERNELS = {
    statistics: {"_statistics_kernel"},
    one_pass: {"_one_pass_kernel"},
    moments: {"_moments_kernel"},
    gradient: {"_gradient_kernel"},
    divergences: {"_divergence_kernel"},
    vectors: {"_prepare_kernel", "_finish_kernel", "_scale_kernel"},
    tokens: {"token_kernel"},
    invariant_logits: {"_logits_kernel"},
}
DTYPES = (torch.bfloat16,) if IS_SHORT else (torch.bfloat16, torch.float16, torch.float32)


@pytest.mark.parametrize("launched", KERNELS, ids=lambda launched: launched.__name__)
@pytest.mark.parametrize("name", SHORT if IS_SHORT else CHIPS)
def test_kernels_fit_their_target(name, launched, launches):
    if (name, launched) == ("sm75", invariant_logits):
        pytest.skip("refused before compute capability 8.0")
    for dtype in DTYPES:
        launched(dtype)
    assert not {f"{at}, {launch.kernel}": faults for at, launch in enumerate(launches) if (faults := launch.faults())}
    assert {launch.kernel for launch in launches} == KERNELS[launched]
    if launched is one_pass and not CHIPS[name].device.is_hip:
        assert any(".exch." in launch.text for launch in launches)


@pytest.mark.parametrize(("vocab", "dtype", "softcap"), [
    (8193, torch.bfloat16, None), (17001, torch.float32, 5.0), (40960, torch.float32, 5.0),
    (65536, torch.bfloat16, None), (128257, torch.bfloat16, None), (300032, torch.float32, 5.0),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("name", ["sm90"])
def test_order_of_what_one_pass_reads_and_writes(vocab, dtype, softcap, launches):
    """Of rows that a program has to itself, and that are divided."""
    coefficients, logit_map = RowCoefficients(vector(), vector()), LogitMap(scale=2.0, softcap=softcap)
    TritonRowKernels(logit_map).one_pass_(logits(vocab, dtype), vector(torch.int64), coefficients)
    (launch,) = launches
    ptx, is_divided = launch.text, vocab * dtype.itemsize > 160 * KIB
    # Rows are loaded 16 bytes at a time, the first time to stay in the cache; so they are stored.
    assert re.search(r"ld\.global\S*evict_last\S*\.v4\.b32", ptx)
    assert re.search(r"ld\.global\S*evict_first\S*\.v4\.b32", ptx)
    assert re.search(r"st\.global\S*evict_first\S*\.v4\.b32", ptx)
    # Who waits for other programs reads what they have written, not what it has read before.
    reads = [match.start() for match in re.finditer(r"ld\.volatile\.global", ptx)]
    assert len(reads) == (2 if is_divided else 0)
    if is_divided:
        # It has left its own statistics before, and its warps need not wait for each other meanwhile. Which part it is
        # follows from when it started.
        assert ptx.index("exch.b64") < reads[0] and "bar.sync" not in ptx[reads[0] : reads[1]]
        assert "add.u64" in re.search(r"atom\S+", ptx)[0] and "%ctaid" not in ptx
    # The target's entry is written when all threads have written theirs.
    stores = [match.start() for match in re.finditer(r"st\.global", ptx)]
    assert stores[-2] < ptx.rindex("bar.sync") < stores[-1]


def test_no_kernel_is_left_out():
    """Every kernel of the package is among those that are compiled here."""
    text = "".join(file.read_text() for file in Path(interface.__file__).parent.glob("triton_*.py"))
    assert set(re.findall(r"^def (\w*_kernel)\(", text, re.M)) == set().union(*KERNELS.values())
