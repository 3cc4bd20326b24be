"""Logits whose rows have the same bits in any batch, in Triton.

Libraries choose the order of a sum, and whether thread blocks share it, by the number of rows. Here each program
computes one tile of the logits, and sums over H from the first element to the last for any number of rows.
"""

import triton
import triton.language as tl
from torch import Tensor

from thunder_flce.device import Device
from thunder_flce.engine.kernels.launch import contiguous, kernel, launch, settings_of

# Rows and columns of a tile, elements of H at a time, number of pipeline stages, and threads. The large tile is the
# fastest of those tried on an H100: 652 TFLOPS at 2048 × 128256 × 4096, against 747 by cuBLAS.
_TILE = {"ROWS": 64, "COLUMNS": 128, "FEATURES": 32, "num_stages": 4, "threads": 128}
_HOPPER_TILE = {"ROWS": 128, "COLUMNS": 256, "FEATURES": 64, "num_stages": 4, "threads": 256}


@kernel(3, "rows")
def _logits_kernel(
    x, weight, out, bias, rows,
    X_STRIDE: tl.constexpr, OUT_STRIDE: tl.constexpr, COLUMN_STRIDE: tl.constexpr, FEATURE_STRIDE: tl.constexpr,
    VOCAB: tl.constexpr, HIDDEN: tl.constexpr, ACCUMULATE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    FEATURES: tl.constexpr,
):  # fmt: skip
    # Programs of the same columns follow each other, so that each part of the weight is read once.
    tiles = tl.cdiv(rows, ROWS)
    row = (tl.program_id(0) % tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(0) // tiles).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    feature = tl.arange(0, FEATURES)
    # Indices beyond the last row or column read another one (modulo), and their results are not written.
    x_ptrs = x + (row % rows)[:, None] * X_STRIDE + feature[None, :]
    weight_ptrs = weight + (column % VOCAB)[None, :] * COLUMN_STRIDE + feature[:, None].to(tl.int64) * FEATURE_STRIDE
    out_ptrs = out + row[:, None] * OUT_STRIDE + column[None, :]
    is_in = (row < rows)[:, None] & (column < VOCAB)[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    if ACCUMULATE:
        total = tl.load(out_ptrs, mask=is_in, other=0.0).to(tl.float32)
    if bias is not None:
        total += tl.load(bias + column % VOCAB).to(tl.float32)[None, :]
    for start in range(0, HIDDEN, FEATURES):
        if HIDDEN % FEATURES == 0:
            a, b = tl.load(x_ptrs), tl.load(weight_ptrs)
        else:
            a = tl.load(x_ptrs, mask=start + feature[None, :] < HIDDEN, other=0.0)
            b = tl.load(weight_ptrs, mask=start + feature[:, None] < HIDDEN, other=0.0)
        total = tl.dot(a, b, total)
        x_ptrs += FEATURES
        weight_ptrs += FEATURES * FEATURE_STRIDE
    tl.store(out_ptrs, total.to(out.dtype.element_ty), mask=is_in)


def logits_(out: Tensor, x: Tensor, weight: Tensor, *, bias: Tensor | None = None, accumulate: bool = False) -> None:
    """out (C, V) = x (C, H) @ weight (V, H)ᵀ + bias (V,), rounded once; added to `out` if `accumulate`.

    Rows of `out` are contiguous; x and the weight may have any strides.
    """
    (rows, hidden), vocab = x.shape, weight.shape[0]
    if not rows:
        return
    x = x if x.stride(1) == 1 else x.contiguous()
    # To accumulate, a tile of `out` is read, too, and a large one does not fit into registers.
    tile = _HOPPER_TILE if Device.of(x.device).is_hopper and not accumulate else _TILE
    settings = settings_of(
        X_STRIDE=x.stride(0), OUT_STRIDE=out.stride(0), COLUMN_STRIDE=weight.stride(0), FEATURE_STRIDE=weight.stride(1),
        VOCAB=vocab, HIDDEN=hidden, ACCUMULATE=accumulate, **tile,
    )  # fmt: skip
    programs = triton.cdiv(rows, settings["ROWS"]) * triton.cdiv(vocab, settings["COLUMNS"])
    launch(_logits_kernel, programs, [x, weight, out, *contiguous(bias)], settings, rows)
