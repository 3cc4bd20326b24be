"""Prints traces of `thunder_flce.inspection.programs`, and the table of patterns, into this folder.

    python traces/regenerate.py                   all of it
    python traces/regenerate.py --device cpu      cpu/ and distributed/ (float32), fusions/ and patterns.md
    python traces/regenerate.py --device cuda     cuda/ (bfloat16)

thunder compiles the programs, but nothing runs, since it is given fake tensors, which have a shape and a device but no
memory. So traces for CUDA are printed without a GPU.

What changes from one run to the next is left out or renumbered: timings, file names, and the numbers in names.
"""

import argparse
import inspect
import os
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

# thunder is imported where it is used, because `_offer_nvfuser` has to come first.

FOLDER = Path(__file__).parent
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
VARIANTS = {"plain": "thunder.jit with its default executors", "flce": "thunder_flce.jit"}
PROGRAMS = {
    "cpu": [(name, "flce") for name in ("litgpt", "reduction_none", "functional", "logits_returned")],
    "cuda": [(name, "flce") for name in ("litgpt", "reduction_none", "functional", "logits_returned")]
    + [("litgpt", "plain")],
}
"""What is printed for each device, with which of `VARIANTS`."""


def versions() -> str:
    """What the printed traces depend on."""
    return f"thunder {version('lightning-thunder')}, torch {'.'.join(torch.__version__.split('.')[:2])}"


def nvfuser_versions() -> str:
    """What the printed fusion definitions depend on."""
    import nvfuser_direct

    return f"nvFuser {nvfuser_direct.version().split('+')[0]}"


def build(device: str = "cpu") -> dict[str, str]:
    """The text of each file made on a device ("cpu" or "cuda"), by its path relative to this folder.

    The nvFuser definitions come with "cpu", where nvFuser is installed.
    """
    files = build_traces(device)
    if device == "cpu":
        files |= {"patterns.md": build_patterns()} | build_distributed()
    if device == "cpu" and find_spec("nvfuser_direct"):
        files |= build_fusions()
    return files


def build_traces(device: str) -> dict[str, str]:
    """The printed traces of `PROGRAMS`."""
    from thunder_flce.inspection import programs

    return {
        f"{device}/{name}_{variant}.py": _print_program(getattr(programs, name), variant, device)
        for name, variant in PROGRAMS[device]
    }


def build_patterns() -> str:
    """The table of the ways to write a loss: fused with which plan, or not and why."""
    import patterns

    import thunder_flce

    rows = []
    for program in (*patterns.FUSED, *patterns.NOT_FUSED):
        jitted = thunder_flce.jit(program)
        _compile(jitted, program, patterns.SIZES, device="cpu")
        rows += patterns.table_rows(program, thunder_flce.explain(jitted)[-1].decisions)
    return "\n".join([*patterns.table_header(versions()), *rows, ""])


def build_distributed() -> dict[str, str]:
    """The printed traces of the first of two ranks, which do not exist: a fake process group answers for the other."""
    import torch.distributed as dist
    from distributed_programs import PROGRAMS
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        return {f"distributed/{program.__name__}_flce.py": _print_distributed(program) for program in PROGRAMS}
    finally:
        dist.destroy_process_group()


def _print_distributed(program: Callable) -> str:
    from unittest.mock import patch

    from distributed_programs import CPU, Model, source
    from thunder.distributed.tensor_parallel.common import TransformForTensorParallel

    import thunder_flce
    from thunder_flce.inspection.programs import Sizes
    from thunder_flce.inspection.trace_text import compile_only

    sizes = Sizes()
    # thunder's tensor parallelism is for CUDA only.
    on_cpu = patch.object(TransformForTensorParallel, "__post_init__", lambda self: setattr(self, "device", CPU))
    with FakeTensorMode(), on_cpu:
        step = program(thunder_flce.jit(Model(sizes.hidden, sizes.vocab)))
        hidden = torch.randn(sizes.batch, sizes.sequence, sizes.hidden)
        compile_only(step, [hidden, torch.randint(sizes.vocab, (sizes.batch, sizes.sequence))])
    return _printed(step, "flce", "cpu", where="Compiled for cpu, for the first of two ranks", source=source(program))


def _print_program(program: Callable, variant: str, device: str) -> str:
    import thunder

    import thunder_flce
    from thunder_flce.inspection.programs import Sizes

    jitted = {"plain": thunder.jit, "flce": thunder_flce.jit}[variant](program)
    _compile(jitted, program, Sizes(), device=device)
    return _printed(jitted, variant, device, where=f"Compiled for {device}", source=inspect.getsource(program))


def _compile(jitted: Callable, program: Callable, sizes: Any, *, device: str) -> None:
    import thunder_flce
    from thunder_flce.inspection.programs import arguments
    from thunder_flce.inspection.trace_text import compile_only

    with FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("ignore", thunder_flce.NotFusedWarning)
        compile_only(jitted, arguments(program, sizes, device=device, dtype=DTYPES[device]))


def _printed(jitted: Callable, variant: str, device: str, *, where: str, source: str) -> str:
    import thunder

    import thunder_flce
    from thunder_flce.inspection.thunder_report import saved_tensors
    from thunder_flce.inspection.trace_text import commented, readable, renumbered

    forward = thunder.last_traces(jitted)[-1]
    backward = thunder.last_backward_traces(jitted)[-1:]  # None for a program without gradients.

    header = [
        f"Printed by: {_command(device)}",
        f"{VARIANTS[variant]}, {versions()}. {where}, {str(DTYPES[device]).removeprefix('torch.')}.",
        "",
        textwrap.indent(source, "    "),
    ]
    if variant == "flce":
        for decision in thunder_flce.explain(jitted)[-1].decisions:
            header.append(str(decision).removeprefix(f"{decision.source}: "))
    header.append("Saved for backward, beside the arguments and views of them:")
    header += [
        f"    {saved.name}: {saved.type}, {saved.bytes:,} bytes"
        for saved in (saved_tensors(forward) if backward else ())
        if not saved.is_argument
    ] or ["    nothing"]
    body = "\n\n\n".join(map(readable, (forward, *backward)))
    return renumbered(commented("\n".join(header)), body)


def _command(device: str) -> str:
    return f"python traces/regenerate.py --device {device}"


def build_fusions() -> dict[str, str]:
    """The printed nvFuser definitions for bfloat16 logits over a vocabulary of 128256."""
    from nvfuser_direct import DataType, FusionDefinition

    from thunder_flce.engine.kernels.interface import RowStatistics, row_stride
    from thunder_flce.engine.kernels.nvfuser_rows import Fusion, NvFuserRowKernels, _fuse
    from thunder_flce.graph.unfused_cross_entropy import nvfuser_impl
    from thunder_flce.inspection.programs import Sizes
    from thunder_flce.inspection.trace_text import commented
    from thunder_flce.operation.loss import LogitMap, RowCoefficients
    from thunder_flce.operation.moments import MOMENTS

    rows, vocab = Sizes().tokens, Sizes().vocab
    settings = {"rows": rows, "vocab": vocab, "dtype": DataType.BFloat16, "reduction": "mean", "ignore_index": -100}

    def standalone(translation: Callable, *tensors: tuple[tuple[int, ...], DataType]) -> FusionDefinition:
        with FusionDefinition() as fd:
            inputs = [
                fd.define_tensor(shape=list(shape), contiguity=[True] * len(shape), dtype=dtype)
                for shape, dtype in tensors
            ]
            outputs = translation(fd, *inputs, **settings)
            for output in outputs if isinstance(outputs, tuple) else (outputs,):
                fd.add_output(output)
        return fd

    logits, target = ((rows, vocab), DataType.BFloat16), ((rows,), DataType.Int)
    row_vector, count = ((rows,), DataType.Float), ((), DataType.Int)
    grad = ((), DataType.BFloat16)

    stride = row_stride(vocab, dtype=torch.bfloat16, device_type="cuda")
    found: dict[str, FusionDefinition] = {}
    vector, weight = torch.empty(rows, dtype=torch.bfloat16, device="meta"), torch.empty(vocab, device="meta")

    class Printed(NvFuserRowKernels):
        """Notes down what it would execute."""

        def _run(self, fusion: Fusion, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
            name = fusion.define.__name__.removeprefix("_") + "_with_column_sums" * fusion.column_sums
            found[name] = _fuse(fusion, self.logit_map)
            return [vector] * (len(fusion.moments) or {"part_statistics": 3}.get(name, 2))

    z, of_rows = torch.empty(rows, stride, dtype=torch.bfloat16, device="meta"), Printed(LogitMap())
    statistics, plain = RowStatistics(vector, vector), RowCoefficients(vector, vector)
    Printed(LogitMap(scale=0.5, softcap=30.0)).gradient_(
        z, statistics, RowCoefficients(*[vector] * 4), class_weight=weight, out=z, column_sums=True
    )
    of_everything = found.pop("gradient_with_column_sums")
    # Statistics and gradient are all that a Llama-like region takes of nvFuser.
    of_rows.one_pass_(z, torch.empty(rows, dtype=torch.int64, device="meta"), plain)
    of_rows.moments(z, statistics, weight, tuple(MOMENTS))
    of_rows.gradient_(z, statistics, plain, out=z, column_sums=True)
    fusions = {
        **found,
        "gradient_of_everything": of_everything,
        "cross_entropy_fwd": standalone(nvfuser_impl.forward_fusion, logits, target),
        "cross_entropy_bwd": standalone(
            nvfuser_impl.backward_fusion, grad, logits, target, row_vector, row_vector, count
        ),
    }
    header = commented(f"Printed by: {_command('cpu')}\n{nvfuser_versions()}, bfloat16 logits, vocabulary {vocab}.")
    return {f"fusions/{name}.py": f"{header}\n\n{str(fusion).strip()}\n" for name, fusion in fusions.items()}


def _offer_nvfuser() -> None:
    """Makes thunder offer its nvFuser executor without a GPU: it compiles there, which is all that is asked of it."""
    is_available = torch.cuda.is_available
    torch.cuda.is_available = lambda: True
    try:
        import thunder  # noqa: F401

        import thunder_flce  # noqa: F401
    finally:
        torch.cuda.is_available = is_available


def write(files: dict[str, str], folder: Path) -> None:
    """Writes the files, and removes what else lies in the folders that they belong to."""
    for name in {Path(path).parent for path in files} - {Path(".")}:
        (folder / name).mkdir(parents=True, exist_ok=True)
        for old in (folder / name).glob("*.py"):
            old.unlink()
    for path, text in files.items():
        (folder / path).write_text(text, encoding="utf-8")
    print(f"wrote {len(files)} files to {folder}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=list(DTYPES), help="all of them by default")
    parser.add_argument("--output", type=Path, default=FOLDER, help="where the folders go; traces/ by default")
    settings = parser.parse_args()
    if settings.device is None:
        # A process each, since thunder decides when it is imported which executors it has.
        for device in DTYPES:
            subprocess.run([sys.executable, __file__, "--device", device, "--output", settings.output], check=True)
        sys.exit()
    # Where there is a GPU, thunder's default executors are others, also for tensors on the CPU.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if settings.device == "cuda":
        if not find_spec("nvfuser_direct"):
            sys.exit("the traces for CUDA need nvFuser's Python package: pip install thunder-flce[nvfuser]")
        _offer_nvfuser()
    write(build(settings.device), settings.output)
