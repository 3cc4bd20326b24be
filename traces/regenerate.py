"""Prints the traces of `thunder_flce.inspection.programs`, with and without the executor, into this folder.

    python traces/regenerate.py                   all of it
    python traces/regenerate.py --device cpu      cpu/, patterns/ and distributed/ (float32), and fusions/
    python traces/regenerate.py --device cuda     cuda/ (bfloat16) or, on a machine with a GPU, a folder of its name

thunder compiles the programs, but nothing runs, since it is given fake tensors, which have a shape and a device but no
memory. So traces for CUDA can be printed without a GPU. Only where there is one, the CUDA programs run as well, forward
and backward.

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
from contextlib import nullcontext
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
        files |= build_patterns() | build_distributed()
    if device == "cpu" and find_spec("nvfuser_direct"):
        files |= build_fusions()
    return files


def build_traces(device: str) -> dict[str, str]:
    """The printed traces of all programs, plain and flce."""
    from thunder_flce.inspection.programs import PROGRAMS

    has_gpu = device == "cuda" and torch.cuda.is_available()
    folder = torch.cuda.get_device_name().removeprefix("NVIDIA ").replace(" ", "-").lower() if has_gpu else device
    return {
        f"{folder}/{program.__name__}_{variant}.py": _print_program(program, variant, device, run=has_gpu)
        for program in PROGRAMS
        for variant in VARIANTS
    }


def build_patterns() -> dict[str, str]:
    """The printed traces of every way to write a loss, fused or not, on a CPU."""
    from patterns import FUSED, NOT_FUSED

    return {
        f"patterns/{program.__name__}.py": _print_program(program, "flce", "cpu", run=False)
        for program in (*FUSED, *NOT_FUSED)
    }


def build_distributed() -> dict[str, str]:
    """The printed traces of the first of two ranks, which do not exist: a fake process group answers for the other."""
    import torch.distributed as dist
    from distributed_programs import PROGRAMS
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        return {
            f"distributed/{program.__name__}_{variant}.py": _print_distributed(program, variant)
            for program in PROGRAMS
            for variant in VARIANTS
        }
    finally:
        dist.destroy_process_group()


def _print_distributed(program: Callable, variant: str) -> str:
    from unittest.mock import patch

    from distributed_programs import CPU, Model, source
    from thunder.distributed.tensor_parallel.common import TransformForTensorParallel

    from thunder_flce.inspection.programs import Sizes
    from thunder_flce.inspection.trace_text import compile_only

    sizes = Sizes()
    # thunder's tensor parallelism is for CUDA only.
    on_cpu = patch.object(TransformForTensorParallel, "__post_init__", lambda self: setattr(self, "device", CPU))
    with FakeTensorMode(), on_cpu:
        step = program(_jit(variant)(Model(sizes.hidden, sizes.vocab)))
        hidden = torch.randn(sizes.batch, sizes.sequence, sizes.hidden)
        compile_only(step, [hidden, torch.randint(sizes.vocab, (sizes.batch, sizes.sequence))])
    return _printed(step, variant, "cpu", where="Compiled for cpu, for the first of two ranks", source=source(program))


def _jit(variant: str) -> Callable:
    import thunder

    import thunder_flce

    return {"plain": thunder.jit, "flce": thunder_flce.jit}[variant]


def _print_program(program: Callable, variant: str, device: str, *, run: bool) -> str:
    import thunder_flce
    from thunder_flce.inspection.programs import Sizes, arguments
    from thunder_flce.inspection.trace_text import compile_only

    jitted = _jit(variant)(program)
    with nullcontext() if run else FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("ignore", thunder_flce.NotFusedWarning)
        tensors = arguments(program, Sizes(), device=device, dtype=DTYPES[device])
        if run:
            outputs = jitted(*tensors)
            loss = outputs[0] if isinstance(outputs, tuple) else outputs
            loss.backward(torch.ones_like(loss))
            where = f"Compiled and run on {torch.cuda.get_device_name()}"
        else:
            compile_only(jitted, tensors)
            where = f"Compiled for {device}"
    return _printed(jitted, variant, device, where=where, source=inspect.getsource(program))


def _printed(jitted: Callable, variant: str, device: str, *, where: str, source: str) -> str:
    import thunder

    import thunder_flce
    from thunder_flce.inspection.saved import saved_tensors
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

    from thunder_flce.execution.layout import VocabLayout
    from thunder_flce.execution.row_kernels import dispatch
    from thunder_flce.execution.row_kernels.interface import LogitMap, RowWork
    from thunder_flce.graph.unfused_cross_entropy import nvfuser_impl
    from thunder_flce.inspection.programs import Sizes
    from thunder_flce.inspection.trace_text import commented
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

    def of_rows(method: str, logit_map: LogitMap, **asked: Any) -> dict[str, FusionDefinition]:
        layouts = () if method == "target_gradient" else (VocabLayout.aligned(vocab),)
        work = RowWork(method=method, layouts=layouts, dtype=torch.bfloat16, out_dtype=torch.bfloat16, **asked)
        return dispatch.definitions(work, logit_map)

    everything = ("uniform", "entropy", "class_weight")
    of_everything = of_rows("gradient", LogitMap(scale=0.5, softcap=30.0), optional=everything, column_sums=True)
    fusions = {
        # Statistics, gradient and the targets' entries are all that a Llama-like region takes.
        **of_rows("statistics_and_gradient", LogitMap()),
        **of_rows("moments", LogitMap(), moments=tuple(MOMENTS), optional=("class_weight",)),
        **of_rows("gradient", LogitMap(), column_sums=True),
        "gradient_of_everything": of_everything["gradient_with_column_sums"],
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
    for name in {Path(path).parent for path in files}:
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
    if settings.device == "cpu":
        # Where there is a GPU, thunder's default executors are others, also for tensors on the CPU.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif not find_spec("nvfuser_direct"):
        sys.exit("the traces for CUDA need nvFuser's Python package: pip install thunder-flce[nvfuser]")
    elif not torch.cuda.is_available():
        _offer_nvfuser()
    write(build(settings.device), settings.output)
