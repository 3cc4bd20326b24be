"""Packing rows in Triton, against PyTorch's operations: on a GPU and, in a process of its own, interpreted."""

import pytest
import torch

from interpreted import DEVICE, INTERPRETED, needs_compiler, on_device, run_in_the_interpreter, take_loop_ends
from thunder_flce import rows

VOCAB = 7


@pytest.fixture(autouse=INTERPRETED)
def interpreter(monkeypatch):
    """A program goes over its row, or over the targets, in several blocks."""
    from thunder_flce import triton_packing

    monkeypatch.setattr(triton_packing, "_TARGETS", 16)
    monkeypatch.setattr(triton_packing, "_COLUMNS", 32)
    take_loop_ends(monkeypatch)


def _targets(tokens, ignored, ignore_index):
    target = torch.randint(0, VOCAB, (tokens,))
    target[torch.rand(tokens) < ignored] = ignore_index
    return target.to(DEVICE)


@on_device
@pytest.mark.parametrize("tokens", [0, 1, 16, 100] if INTERPRETED else [0, 1, 4096, 8191, 70000])
@pytest.mark.parametrize("ignored", [0, 0.6, 1])
@pytest.mark.parametrize("ignore_index", [-100, 3])
@pytest.mark.parametrize("stride", [1, 2])
def test_valid_tokens_come_first(tokens, ignored, ignore_index, stride):
    from thunder_flce import triton_packing

    target = _targets(tokens * stride, ignored, ignore_index)[::stride]
    # On a CPU, it is not Triton that counts.
    counts, packed = (
        result.to(DEVICE) for result in rows._count_and_pack(target.cpu(), VOCAB, ignore_index, pack=True)
    )
    computed = triton_packing.count_and_pack(target, VOCAB, ignore_index, pack=True)
    assert torch.equal(computed[0], counts) and counts[1] == 0
    assert torch.equal(computed[1], packed)


@on_device
@pytest.mark.parametrize("ignore_index", [-100, 3])
@pytest.mark.parametrize("pack", [False, True])
def test_targets_out_of_range_are_counted(ignore_index, pack):
    """Some do not fit in 32 bits, but would be in the range without the others."""
    from thunder_flce import triton_packing

    target = _targets(100, 0.3, ignore_index)
    target[[0, 17, 99]] = torch.tensor([-1, VOCAB, 2**32 + 1], device=DEVICE)
    counts, packed = triton_packing.count_and_pack(target, VOCAB, ignore_index, pack=pack)
    assert counts.tolist() == [int((target != ignore_index).sum()), 3]
    assert (packed is not None) == pack


@on_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("columns", [0, 1, 24, 100] if INTERPRETED else [0, 1, 1000, 4096, 5003])
@pytest.mark.parametrize("layout", ["contiguous", "columns of a wider matrix", "transposed"])
def test_rows_at(layout, columns, dtype):
    """Zeros for negative indices, whatever lies in front of the matrix; what is around the result stays."""
    from thunder_flce import triton_packing

    tokens, index = 9, torch.tensor([8, -1, 0, 0, 3, -1, 7])
    around = torch.full((tokens + 1, columns + 3), float("nan"), dtype=dtype, device=DEVICE)
    tensor = around[1:, 2 : 2 + columns]
    if layout == "contiguous":
        tensor = torch.empty(tokens, columns, dtype=dtype, device=DEVICE)
    if layout == "transposed":
        tensor = torch.empty(columns, tokens, dtype=dtype, device=DEVICE).t()
    tensor.copy_(torch.randn(tokens, columns))
    expected = torch.where(index[:, None] < 0, 0, tensor.cpu()[index])
    assert torch.equal(triton_packing.rows_at(tensor, index.to(DEVICE)).cpu(), expected)
    memory = torch.ones(len(index) + 2, columns, dtype=dtype, device=DEVICE)
    out = memory[1:-1]
    assert triton_packing.rows_at(tensor, index.to(DEVICE), out) is out
    assert torch.equal(out.cpu(), expected) and memory[0].eq(1).all() and memory[-1].eq(1).all()


@on_device
def test_no_rows():
    from thunder_flce import triton_packing

    none = torch.zeros(0, dtype=torch.long, device=DEVICE)
    assert triton_packing.rows_at(torch.ones(3, 8, device=DEVICE), none).shape == (0, 8)


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs a CUDA device")
def test_offsets_above_31_bits():
    from thunder_flce import triton_packing

    tensor = torch.zeros(2**16 + 8, 2**16, dtype=torch.uint8, device=DEVICE)
    tensor[-1] = 3
    index = torch.full((2**16 + 8,), 2**16 + 7, device=DEVICE)
    assert triton_packing.rows_at(tensor, index)[-1].eq(3).all()


@needs_compiler
def test_rows_are_moved_16_bytes_at_a_time():
    import re

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from thunder_flce import triton_packing

    kernel = triton_packing._rows_kernel
    pointers = {"tensor": "*bf16", "index": "*i64", "out": "*bf16"}
    sizes = dict.fromkeys(("columns", "row_stride", "out_stride"), "i32")
    constants = {"column_stride": 1, "BLOCK": triton_packing._COLUMNS}
    signature = {name: {**pointers, **sizes}.get(name, "constexpr") for name in kernel.arg_names}
    attributes = {(at,): [["tt.divisibility", 16]] for at, name in enumerate(signature) if name not in constants}
    source = ASTSource(kernel, signature, constants, attributes)
    target, options = GPUTarget("cuda", 90, 32), {"num_warps": triton_packing._WARPS}
    ptx = triton.compile(source, target=target, options=options).asm["ptx"]
    assert re.search(r"ld\.global\S*\.v4\.b32", ptx) and re.search(r"st\.global\S*\.v4\.b32", ptx)


@needs_compiler
def test_in_the_interpreter():
    """The tests above without a GPU."""
    run_in_the_interpreter(__file__)
