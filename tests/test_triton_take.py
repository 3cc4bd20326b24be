"""Rows taken by Triton, against PyTorch's operations: on a GPU and, in a process of its own, interpreted."""

from collections import defaultdict

import pytest
import torch

from interpreted import DEVICE, INTERPRETED, needs_compiler, on_device, run_in_the_interpreter, take_loop_ends
from thunder_flce.execution import compile_times


@pytest.fixture(autouse=INTERPRETED)
def interpreter(monkeypatch):
    """A program goes over its row in several blocks."""
    from thunder_flce.execution import triton_take

    monkeypatch.setattr(triton_take, "_COLUMNS", 32)
    take_loop_ends(monkeypatch)


@on_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("columns", [0, 1, 24, 100] if INTERPRETED else [0, 1, 1000, 4096, 5003])
@pytest.mark.parametrize("layout", ["contiguous", "columns of a wider matrix", "transposed"])
def test_taken_rows(layout, columns, dtype):
    """Zeros for negative indices, whatever lies in front of the matrix; what is around the result stays."""
    from thunder_flce.execution import triton_take

    tokens, index = 9, torch.tensor([8, -1, 0, 0, 3, -1, 7])
    around = torch.full((tokens + 1, columns + 3), float("nan"), dtype=dtype, device=DEVICE)
    tensor = around[1:, 2 : 2 + columns]
    if layout == "contiguous":
        tensor = torch.empty(tokens, columns, dtype=dtype, device=DEVICE)
    if layout == "transposed":
        tensor = torch.empty(columns, tokens, dtype=dtype, device=DEVICE).t()
    tensor.copy_(torch.randn(tokens, columns))
    expected = torch.where(index[:, None] < 0, 0, tensor.cpu()[index])
    assert torch.equal(triton_take.take_rows(tensor, index.to(DEVICE)).cpu(), expected)
    memory = torch.ones(len(index) + 2, columns, dtype=dtype, device=DEVICE)
    out = memory[1:-1]
    assert triton_take.take_rows(tensor, index.to(DEVICE), out) is out
    assert torch.equal(out.cpu(), expected) and memory[0].eq(1).all() and memory[-1].eq(1).all()


@on_device
def test_the_first_run_is_timed(monkeypatch):
    """It compiles the kernel; the second one does not."""
    from thunder_flce.execution import triton_take

    monkeypatch.setattr(compile_times, "_first_runs", defaultdict(dict))
    tensor, index = torch.ones(3, 8, device=DEVICE), torch.zeros(2, dtype=torch.long, device=DEVICE)
    triton_take.take_rows(tensor, index)
    seconds = compile_times.compile_seconds()
    assert list(seconds) == ["Triton rows taken"] and seconds["Triton rows taken"] > 0
    triton_take.take_rows(tensor, index)
    assert compile_times.compile_seconds() == seconds


@on_device
def test_no_rows():
    from thunder_flce.execution import triton_take

    none = torch.zeros(0, dtype=torch.long, device=DEVICE)
    assert triton_take.take_rows(torch.ones(3, 8, device=DEVICE), none).shape == (0, 8)


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs a CUDA device")
def test_offsets_above_31_bits():
    from thunder_flce.execution import triton_take

    tensor = torch.zeros(2**16 + 8, 2**16, dtype=torch.uint8, device=DEVICE)
    tensor[-1] = 3
    index = torch.full((2**16 + 8,), 2**16 + 7, device=DEVICE)
    assert triton_take.take_rows(tensor, index)[-1].eq(3).all()


@needs_compiler
def test_rows_are_moved_16_bytes_at_a_time():
    import re

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from thunder_flce.execution import triton_take

    kernel = triton_take._take_rows_kernel
    pointers = {"tensor": "*bf16", "index": "*i64", "out": "*bf16"}
    sizes = dict.fromkeys(("columns", "row_stride"), "i32")
    constants = {"column_stride": 1, "BLOCK": triton_take._COLUMNS}
    signature = {name: {**pointers, **sizes}.get(name, "constexpr") for name in kernel.arg_names}
    attributes = {(at,): [["tt.divisibility", 16]] for at, name in enumerate(signature) if name not in constants}
    source = ASTSource(kernel, signature, constants, attributes)
    target, options = GPUTarget("cuda", 90, 32), {"num_warps": triton_take._WARPS}
    ptx = triton.compile(source, target=target, options=options).asm["ptx"]
    assert re.search(r"ld\.global\S*\.v4\.b32", ptx) and re.search(r"st\.global\S*\.v4\.b32", ptx)


@needs_compiler
def test_in_the_interpreter():
    """The tests above without a GPU."""
    run_in_the_interpreter(__file__)
