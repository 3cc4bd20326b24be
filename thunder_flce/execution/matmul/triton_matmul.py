"""Matrix products of which only the first rows count, how many being known to the device alone; in Triton.

cuBLAS takes the sizes of a product from the host. Where valid rows are packed first without the host learning their
number, as in a CUDA graph, its products would run over the ignored rows, too. These read the number on the device, and
leave out the tiles behind it. (A product scaled by an alpha of 0 in the device's memory takes cuBLAS as long as any
other.) torch._grouped_mm can end early as well, but neither adds to memory nor writes into the caller's.

A program computes a tile of the result, then the next that is its own; operands come and results go through TMA. Over
all rows, at 2048 × 128256 × 4096 in bfloat16 on an H200, a settled product takes 3.07 ms for the logits, 2.96 for dX
and 3.57 for dW, which is added to, against 3.09, 3.14 and 3.11 of the fastest of cuBLAS's algorithms.
"""

from contextlib import nullcontext
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from thunder_flce.execution.compile_times import first_run_timed
from thunder_flce.planning.plan import HOPPER

# What TMA asks of addresses and strides, in bytes. It also writes so many at once, behind the end of a row if it must.
_ALIGNMENT = 16

# Tried at S1, settled: tiles of 256 × 128 take 3.2 to 3.5 ms where these take 3.0, 128 × 128 3.2 to 3.9; four stages
# take as long as three, and a depth of 128 a third longer.
_TILE = (128, 256, 64)
_WARPS = 8
_STAGES = 3

# Tiles of so many rows that run at the same time share what they read of b. For logits and dX these are all rows of a
# chunk or half of them, so that the weight is read once or twice (column by column, logits take 4.6 instead of 3.1 ms).
_GROUP = 16


@triton.jit(do_not_specialize=["M", "N", "K"])
def _product_kernel(
    a,
    b,
    out,
    bias,
    valid_rows,
    M,
    N,
    K,
    A_IS_TRANSPOSED: tl.constexpr,
    B_IS_TRANSPOSED: tl.constexpr,
    SUMS_ROWS: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """out (M, N) = a (M, K) @ b (K, N), of the first `valid_rows` along K if SUMS_ROWS, along M otherwise."""
    valid = tl.load(valid_rows)
    n_tiles = tl.cdiv(N, TILE_N)
    m_tiles = tl.cdiv(M, TILE_M)
    k_tiles = tl.cdiv(K, TILE_K)
    if SUMS_ROWS:
        k_tiles = tl.cdiv(valid, TILE_K)
    else:
        m_tiles = tl.cdiv(valid, TILE_M)
    summed = m_tiles * n_tiles
    if ACCUMULATE:
        # Nothing is added to the other tiles.
        tiles = summed * (k_tiles > 0)
    else:
        tiles = tl.cdiv(M, TILE_M) * n_tiles
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        if tile < summed:
            first = tile // (GROUP * n_tiles) * GROUP
            rows = tl.minimum(m_tiles - first, GROUP)
            m = (first + tile % (GROUP * n_tiles) % rows) * TILE_M
            n = tile % (GROUP * n_tiles) // rows * TILE_N
        else:
            m = tile // n_tiles * TILE_M
            n = tile % n_tiles * TILE_N
        total = tl.zeros((TILE_M, TILE_N), tl.float32)
        for k in range(k_tiles * (tile < summed)):
            if A_IS_TRANSPOSED:
                of_a = a.load([k * TILE_K, m]).T
            else:
                of_a = a.load([m, k * TILE_K])
            if B_IS_TRANSPOSED:
                of_b = b.load([n, k * TILE_K]).T
            else:
                of_b = b.load([k * TILE_K, n])
            total = tl.dot(of_a, of_b, total)
        # In halves, which leaves room for a third stage.
        left, right = tl.split(tl.permute(tl.reshape(total, (TILE_M, 2, TILE_N // 2)), (0, 2, 1)))
        _write(left, out, bias, m, n, N, ACCUMULATE)
        _write(right, out, bias, m, n + TILE_N // 2, N, ACCUMULATE)


@triton.jit
def _write(values, out, bias, m, n, N, ACCUMULATE: tl.constexpr):
    if bias is not None:
        columns = n + tl.arange(0, values.shape[1])
        values += tl.load(bias + columns, mask=columns < N, other=0).to(tl.float32)
    if ACCUMULATE:
        values += out.load([m, n]).to(tl.float32)
    out.store([m, n], values.to(out.dtype))


def run(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    *,
    valid_rows: Tensor,
    sums_rows: bool,
    accumulate: bool = False,
) -> bool:
    """out = a @ b + bias, or out += a @ b, over the valid rows; summed in float32 and rounded once.

    Args:
        out: (M, N), in the operands' dtype or float32.
        a: (M, K), float16 or bfloat16.
        b: (K, N), in a's dtype.
        bias: (N,) or None, as it has to be where the product is added to something.
        valid_rows: () int32 on the device. Rows from there on are zeros: of a or, if they are summed over, of both.
        sums_rows: whether the rows are those along K. Otherwise they are along M, and the result's rows behind the
            valid ones are zeros or the bias or, with `accumulate`, what they were.
        accumulate: whether the product is added to what out holds.

    Returns:
        Whether it does: only on Hopper, and where TMA can read the operands and write the result, whose rows
        must be whole multiples of 16 bytes, 16 bytes apart.
    """
    is_16_bit = a.dtype == b.dtype and a.dtype in (torch.float16, torch.bfloat16)
    programs = _programs(a.device)
    stored = [_row_major(matrix) for matrix in (a, b, out)]
    if not (is_16_bit and programs) or None in stored or stored[2] is not out:
        return False
    (m, k), n = a.shape, b.shape[1]
    tile_m, tile_n, tile_k = _TILE
    stored_a, stored_b, _ = stored
    kind = (a.device, a.dtype, out.dtype, stored_a is a, stored_b is b, bias is None, sums_rows, accumulate)
    on_device = torch.cuda.device(a.device) if a.is_cuda else nullcontext()
    with on_device, first_run_timed("Triton products", kind):
        _product_kernel[(programs,)](
            _tiled(stored_a, (tile_m, tile_k) if stored_a is a else (tile_k, tile_m)),
            _tiled(stored_b, (tile_k, tile_n) if stored_b is b else (tile_n, tile_k)),
            _tiled(out, (tile_m, tile_n // 2)),
            bias,
            valid_rows,
            *(m, n, k),
            A_IS_TRANSPOSED=stored_a is not a,
            B_IS_TRANSPOSED=stored_b is not b,
            SUMS_ROWS=sums_rows,
            ACCUMULATE=accumulate,
            TILE_M=tile_m,
            TILE_N=tile_n,
            TILE_K=tile_k,
            GROUP=_GROUP,
            num_warps=_WARPS,
            num_stages=_STAGES,
        )
    return True


@cache
def _programs(device: torch.device) -> int:
    """How many run at the same time: one a multiprocessor; 0 but on Hopper.

    Before, there is no TMA; afterwards, not every GPU has as much shared memory.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != HOPPER:
        return 0
    return torch.cuda.get_device_properties(device).multi_processor_count


def _row_major(matrix: Tensor) -> Tensor | None:
    """The matrix, or its transpose if that lies in memory row by row; None where TMA can read neither."""
    if matrix.numel() == 0 or matrix.data_ptr() % _ALIGNMENT:
        return None
    for stored in (matrix, matrix.t()):
        bytes_along = [size * stored.element_size() for size in (stored.stride(0), stored.shape[1])]
        if stored.stride(1) == 1 and all(size % _ALIGNMENT == 0 for size in bytes_along):
            return stored
    return None


def _tiled(matrix: Tensor, tile: tuple[int, int]) -> TensorDescriptor:
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), list(tile))
