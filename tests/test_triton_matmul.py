"""Matmuls that end after the valid rows, against float64: on a GPU and, in a process of its own, interpreted."""

from collections import defaultdict

import pytest
import torch

from interpreted import (
    DEVICE,
    INTERPRETED,
    needs_compiler,
    needs_triton,
    on_device,
    run_in_the_interpreter,
    take_loop_ends,
)
from reference import error
from thunder_flce.execution import compile_times
from thunder_flce.execution.matmul.layout import Matmul


@pytest.fixture(autouse=INTERPRETED)
def interpreter(monkeypatch):
    """Three programs, and small tiles."""
    from thunder_flce.execution.matmul import triton_matmul

    monkeypatch.setattr(triton_matmul, "multiprocessors", lambda device: 3)
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


def _supports(matmul):
    from thunder_flce.execution.matmul import triton_matmul

    return triton_matmul.supports(matmul.stored, dtype=matmul.a.dtype, device=None)


def _run(kind, out, a, b, *, valid, **settings):
    from thunder_flce.execution.matmul import triton_matmul

    matmul = Matmul(kind, out, a, b, **settings)
    assert _supports(matmul)
    triton_matmul.run(matmul, torch.tensor(valid, dtype=torch.int32, device=DEVICE))


# Of the largest size, the GPU's programs have several tiles each.
ROWS = 71 if INTERPRETED else 900
COLUMNS = [104] if INTERPRETED else [128, 304, 20000]
# H, of which there may be little but where the result is that wide.
HIDDEN = 40 if INTERPRETED else 136
# The interpreter multiplies bfloat16 as if it were whole numbers.
DTYPE = torch.float16 if INTERPRETED else torch.bfloat16
DTYPES = [(DTYPE, torch.float32), *((dtype, dtype) for dtype in dict.fromkeys((DTYPE, torch.float16)))]
VALID = [0, 1, ROWS // 2, ROWS] if INTERPRETED else [0, 1, ROWS // 2, ROWS - 1, ROWS]


def _tolerance(dtype):
    # The interpreter truncates where it should round.
    return {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-20}[dtype] * (2 if INTERPRETED else 1)


@on_device
@pytest.mark.parametrize(("accumulate", "has_bias"), [(False, False), (False, True), (True, False)])
@pytest.mark.parametrize("kind", ["dX", "logits"])
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("valid", VALID)
def test_rows_of_the_result(valid, columns, dtypes, kind, has_bias, accumulate):
    """Those after the valid ones are zeros or the bias, or what was there; what is around the result stays."""
    dtype, out_dtype = dtypes
    a, b = _matrix(ROWS, 40, dtype), _matrix(40, columns, dtype, transposed=kind == "logits")
    a[valid:] = 0
    bias = torch.randn(columns, device=DEVICE).to(out_dtype) if has_bias else None
    out = _matrix(ROWS, columns, out_dtype)
    if not accumulate:
        out.fill_(float("nan"))
    exact = a.double() @ b.double()
    before = out.clone() if accumulate else 0
    exact = exact + before + (0 if bias is None else bias.double())
    _run(kind, out, a, b, bias=bias, valid=valid, accumulate=accumulate)
    assert error(out[:valid], exact[:valid]) <= _tolerance(out_dtype)
    after = out[valid:]
    if not accumulate:
        is_bias = (after == (0 if bias is None else bias)).all(1)
        assert ((after == 0).all(1) | is_bias).all()
    else:
        assert torch.equal(after, before[valid:])
    assert out._base[:, :8].isnan().all() and out._base[:, 8 + columns :].isnan().all()


@on_device
@pytest.mark.parametrize("accumulate", [False, True], ids=["", "adds"])
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("valid", VALID)
def test_rows_that_are_summed(valid, columns, dtypes, accumulate):
    """Of dW, some of whose rows are not a whole tile."""
    dtype, out_dtype = dtypes
    dlogits, x = _matrix(ROWS, columns, dtype), _matrix(ROWS, HIDDEN, dtype)
    dlogits[valid:] = x[valid:] = 0
    out = _matrix(columns, HIDDEN, out_dtype)
    exact = dlogits.double().t() @ x.double() + (out.double() if accumulate else 0)
    if not accumulate:
        out.fill_(float("nan"))
    _run("dW", out, dlogits.t(), x, valid=valid, accumulate=accumulate)
    assert error(out, exact) <= _tolerance(out_dtype)
    assert out._base[:, :8].isnan().all() and out._base[:, 8 + HIDDEN :].isnan().all()


@on_device
@pytest.mark.parametrize("kind", ["logits", "dW"])
def test_rows_after_the_valid_ones_are_not_read(kind):
    """Whole tiles of them, that is: or nothing would have ended early."""
    from thunder_flce.execution.matmul import triton_matmul

    sums_rows = kind == "dW"
    a = _matrix(304 if sums_rows else ROWS, ROWS if sums_rows else 48, DTYPE, transposed=sums_rows)
    b = _matrix(a.shape[1], HIDDEN, DTYPE)
    out = a.new_empty(a.shape[0], HIDDEN)
    rows = a.t() if sums_rows else a
    valid = ROWS // 2
    rows[valid:] = 0
    _run(kind, out, a, b, valid=valid)
    tile = triton_matmul._TILE[2 if sums_rows else 0]
    after = -(-valid // tile) * tile
    expected = out.clone()
    rows[after:] = float("nan")
    if sums_rows:
        b[after:] = float("nan")
    _run(kind, out, a, b, valid=valid)
    assert torch.equal(out, expected)


@on_device
def test_the_first_run_is_timed(monkeypatch):
    """It compiles the kernel; the second one does not."""
    monkeypatch.setattr(compile_times, "_first_runs", defaultdict(dict))
    a, b, out = (torch.zeros(136, 136, dtype=DTYPE, device=DEVICE) for _ in range(3))
    _run("logits", out, a, b, valid=3)
    seconds = compile_times.compile_seconds()
    assert list(seconds) == ["Triton products"] and seconds["Triton products"] > 0
    _run("logits", out, a, b, valid=3)
    assert compile_times.compile_seconds() == seconds


@needs_triton
def test_what_is_left_to_cublas():
    """What TMA cannot read or write, and results that are too narrow for their tiles."""
    from thunder_flce.execution.matmul import triton_matmul

    def empty(rows, columns, dtype=torch.bfloat16):
        return torch.empty(rows, columns, dtype=dtype)

    narrow = triton_matmul._TILE[1] // 2
    wide = 2 * narrow
    out, a, b = empty(wide, wide), empty(wide, 40), empty(40, wide)
    for other in (
        Matmul("dX", empty(wide, wide, torch.float32), a.float(), b.float()),
        Matmul("dX", out, empty(wide, 41)[:, 1:], b),
        Matmul("dX", out, a, empty(40, wide + 1)[:, :-1]),
        Matmul("dX", empty(wide, 2 * wide)[:, ::2], a, b),
        Matmul("dX", out.t(), a, b),
        Matmul("dX", empty(wide, wide + 2)[:, :-2], a, b),
        Matmul("dX", out[:0], a[:0], b),
        Matmul("dX", out[:, :-1], a, b[:, :-1]),
        Matmul("dX", out, a[:, :39], b[:39]),
        Matmul("dX", out[:, : narrow - 8], a, b[:, : narrow - 8]),
    ):
        assert not _supports(other)
    assert _supports(Matmul("dX", out, a, b)) and _supports(Matmul("dX", out[:, :narrow], a, b[:, :narrow]))
    stored = Matmul("dX", out, a, b).stored
    assert not triton_matmul.supports(stored, dtype=torch.bfloat16, device=torch.device("cpu"))


@needs_compiler
@pytest.mark.parametrize("out_dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(
    ("transposed", "sums_rows", "accumulate", "has_bias"),
    [((False, True), False, False, True), ((False, False), False, True, False), ((True, False), True, True, False)],
    ids=["logits", "dX", "dW"],
)
def test_compiles_for_hopper(transposed, sums_rows, accumulate, has_bias, out_dtype):
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
    source = ASTSource(triton_matmul._matmul_kernel, {**signature, **dict.fromkeys(constants, "constexpr")}, constants)
    options = {"num_warps": triton_matmul._WARPS, "num_stages": triton_matmul._STAGES}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert "wgmma.mma_async" in compiled.asm["ptx"] and "cp.async.bulk.tensor" in compiled.asm["ptx"]
    assert compiled.metadata.shared <= 227 * 1024


@needs_compiler
def test_in_the_interpreter():
    """The tests above without a GPU."""
    run_in_the_interpreter(__file__)
