"""Products that end after the valid rows, against float64: on a GPU and, in a process of its own, interpreted."""

import pytest
import torch

from interpreted import DEVICE, INTERPRETED, needs_compiler, on_device, run_in_the_interpreter, take_loop_ends
from reference import error


@pytest.fixture(autouse=INTERPRETED)
def interpreter(monkeypatch):
    """Programs there are three of, and tiles are small."""
    from thunder_flce.execution.matmul import triton_matmul

    monkeypatch.setattr(triton_matmul, "_programs", lambda device: 3)
    monkeypatch.setattr(triton_matmul, "_TILE", (16, 32, 16))
    monkeypatch.setattr(triton_matmul, "_GROUP", 2)
    take_loop_ends(monkeypatch)


def _matrix(rows, columns, dtype, *, transposed=False):
    """Random numbers, in the middle of a larger matrix of others."""
    if transposed:
        return _matrix(columns, rows, dtype).t()
    around = torch.full((rows, columns + 32 - columns % 16), float("nan"), dtype=dtype, device=DEVICE)
    around[:, 8 : 8 + columns] = torch.randn(rows, columns, device=DEVICE)
    return around[:, 8 : 8 + columns]


def _run(*arguments, valid, **settings):
    from thunder_flce.execution.matmul import triton_matmul

    return triton_matmul.run(*arguments, valid_rows=torch.tensor(valid, dtype=torch.int32, device=DEVICE), **settings)


# Of the largest size, the GPU's programs have several tiles each.
ROWS = 71 if INTERPRETED else 900
COLUMNS = [104] if INTERPRETED else [8, 304, 20000]
# The interpreter multiplies bfloat16 as if it were whole numbers.
DTYPE = torch.float16 if INTERPRETED else torch.bfloat16
DTYPES = [(DTYPE, torch.float32), *((dtype, dtype) for dtype in dict.fromkeys((DTYPE, torch.float16)))]
VALID = [0, 1, ROWS // 2, ROWS] if INTERPRETED else [0, 1, ROWS // 2, ROWS - 1, ROWS]


def _tolerance(dtype):
    # The interpreter truncates where it should round.
    return {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-20}[dtype] * (2 if INTERPRETED else 1)


@on_device
@pytest.mark.parametrize(("accumulate", "has_bias"), [(False, False), (False, True), (True, False)])
@pytest.mark.parametrize("b_is_transposed", [False, True], ids=["dX", "logits"])
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("valid", VALID)
def test_rows_of_the_result(valid, columns, dtypes, b_is_transposed, has_bias, accumulate):
    """Those behind the valid ones are zeros or the bias, or what was there; what is beside the result stays."""
    dtype, out_dtype = dtypes
    a, b = _matrix(ROWS, 40, dtype), _matrix(40, columns, dtype, transposed=b_is_transposed)
    a[valid:] = 0
    bias = torch.randn(columns, device=DEVICE).to(out_dtype) if has_bias else None
    out = _matrix(ROWS, columns, out_dtype)
    if not accumulate:
        out.fill_(float("nan"))
    exact = a.double() @ b.double()
    before = out.clone() if accumulate else 0
    exact = exact + before + (0 if bias is None else bias.double())
    assert _run(out, a, b, bias, valid=valid, sums_rows=False, accumulate=accumulate)
    assert error(out[:valid], exact[:valid]) <= _tolerance(out_dtype)
    behind = out[valid:]
    if not accumulate:
        is_bias = (behind == (0 if bias is None else bias)).all(1)
        assert ((behind == 0).all(1) | is_bias).all()
    else:
        assert torch.equal(behind, before[valid:])
    assert out._base[:, :8].isnan().all() and out._base[:, 8 + columns :].isnan().all()


@on_device
@pytest.mark.parametrize("accumulate", [False, True], ids=["", "adds"])
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("valid", VALID)
def test_rows_that_are_summed(valid, columns, dtypes, accumulate):
    """Of dW, some of whose rows are not a whole tile."""
    dtype, out_dtype = dtypes
    dlogits, x = _matrix(ROWS, columns, dtype), _matrix(ROWS, 40, dtype)
    dlogits[valid:] = x[valid:] = 0
    out = _matrix(columns, 40, out_dtype)
    exact = dlogits.double().t() @ x.double() + (out.double() if accumulate else 0)
    if not accumulate:
        out.fill_(float("nan"))
    assert _run(out, dlogits.t(), x, valid=valid, sums_rows=True, accumulate=accumulate)
    assert error(out, exact) <= _tolerance(out_dtype)
    assert out._base[:, :8].isnan().all() and out._base[:, 48:].isnan().all()


@on_device
@pytest.mark.parametrize("sums_rows", [False, True])
def test_rows_behind_the_valid_ones_are_not_read(sums_rows):
    """Whole tiles of them, that is: or nothing would have ended early."""
    from thunder_flce.execution.matmul import triton_matmul

    a = _matrix(304 if sums_rows else ROWS, ROWS if sums_rows else 48, DTYPE, transposed=sums_rows)
    b = _matrix(a.shape[1], 48, DTYPE)
    out = a.new_empty(a.shape[0], 48)
    rows = a.t() if sums_rows else a
    valid = ROWS // 2
    rows[valid:] = 0
    assert _run(out, a, b, valid=valid, sums_rows=sums_rows)
    tile = triton_matmul._TILE[2 if sums_rows else 0]
    behind = -(-valid // tile) * tile
    expected = out.clone()
    rows[behind:] = float("nan")
    if sums_rows:
        b[behind:] = float("nan")
    assert _run(out, a, b, valid=valid, sums_rows=sums_rows)
    assert torch.equal(out, expected)


@on_device
def test_what_tma_cannot_read_is_refused():
    a, b = _matrix(64, 40, DTYPE), _matrix(40, 64, DTYPE)
    out = a.new_empty(64, 64)
    refused = [
        (out, a.float(), b.float()),
        (out, a, b.double()),
        (out, torch.randn(64, 41, device=DEVICE).to(DTYPE)[:, 1:], b),
        (out, a, torch.randn(40, 65, device=DEVICE).to(DTYPE)[:, :64]),
        (out, torch.randn(64, 80, device=DEVICE).to(DTYPE)[:, ::2], b),
        (a.new_empty(64, 64).t(), a, b),
        (a.new_empty(64, 66)[:, :64], a, b),
        (a.new_empty(0, 64), a[:0], b),
        (out[:, :63], a, b[:, :63]),
        (out, a[:, :39], b[:39]),
    ]
    for arguments in refused:
        assert not _run(*arguments, valid=64, sums_rows=False)
    assert _run(out, a, b, valid=64, sums_rows=False)


@needs_compiler
@pytest.mark.parametrize("out_dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(
    ("transposed", "sums_rows", "accumulate", "has_bias"),
    [((False, True), False, False, True), ((False, False), False, True, False), ((True, False), True, True, False)],
    ids=["logits", "dX", "dW"],
)
def test_compiles_for_a_gpu_that_is_not_there(transposed, sums_rows, accumulate, has_bias, out_dtype):
    """By the tensor cores, fed by TMA, out of registers that suffice and shared memory that is there."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from thunder_flce.execution.matmul import triton_matmul

    tile_m, tile_n, tile_k = triton_matmul._TILE
    tiles = [(tile_m, tile_k), (tile_k, tile_n), (tile_m, tile_n // 2)]
    tiles = [tile[::-1] if turned else tile for tile, turned in zip(tiles, (*transposed, False), strict=True)]
    descriptors = [f"tensordesc<{d}[{r}, {c}]>" for d, (r, c) in zip(("bf16", "bf16", out_dtype), tiles, strict=True)]
    constants = {
        "A_IS_TRANSPOSED": transposed[0],
        "B_IS_TRANSPOSED": transposed[1],
        "SUMS_ROWS": sums_rows,
        "ACCUMULATE": accumulate,
        "TILE_M": tile_m,
        "TILE_N": tile_n,
        "TILE_K": tile_k,
        "GROUP": triton_matmul._GROUP,
        **({} if has_bias else {"bias": None}),
    }
    bias = {"bias": f"*{out_dtype}"} if has_bias else {}
    signature = dict(zip("a b out".split(), descriptors, strict=True)) | bias | {"valid_rows": "*i32"}
    signature |= dict.fromkeys("MNK", "i32")
    source = ASTSource(triton_matmul._product_kernel, {**signature, **dict.fromkeys(constants, "constexpr")}, constants)
    options = {"num_warps": triton_matmul._WARPS, "num_stages": triton_matmul._STAGES}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert "wgmma.mma_async" in compiled.asm["ptx"] and "cp.async.bulk.tensor" in compiled.asm["ptx"]
    assert compiled.metadata.shared <= 227 * 1024


@needs_compiler
def test_in_the_interpreter():
    """The tests above without a GPU."""
    run_in_the_interpreter(__file__)
