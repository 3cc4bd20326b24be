"""A matmul over the first rows only, where nobody but the device knows how many; in Triton.

cuBLAS takes the sizes of a matmul from the host. Where valid rows are gathered first without the host learning their
number, as in a CUDA graph, its matmuls would run over the ignored rows, too; one scaled by an alpha of 0 takes as long
as any other. torch._grouped_mm can end early, but neither adds to memory nor writes into the caller's.

A program computes a tile of the result, then the next one that is its own; TMA reads the operands and writes the
result. Over all rows, at 2048 × 128256 × 4096 in bfloat16 on an H200, it takes 3.07 ms for the logits, 2.96 for dX and
3.57 for dW, which is added to, against 3.09, 3.14 and 3.11 of cuBLAS's fastest algorithms.
"""

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from thunder_flce.device import is_hopper, multiprocessors
from thunder_flce.execution.compile_times import first_run_timed
from thunder_flce.execution.matmul.layout import DTYPES_16_BIT, Matmul, StoredMatrix

# Tried at S1, in the steady state: tiles of 256 × 128 take 3.2 to 3.5 ms where these take 3.0, 128 × 128 3.2 to 3.9;
# four stages take as long as three, and a depth of 128 a third longer.
_TILE = (128, 256, 64)
_WARPS, _STAGES = 8, 3

# Tiles of so many rows that run at the same time share what they read of b. For logits and dX these are all rows of a
# chunk or half of them, so that the weight is read once or twice (column by column, logits take 4.6 instead of 3.1 ms).
_GROUP = 16


@triton.jit(do_not_specialize=["M", "N", "K"])
def _matmul_kernel(
    a, b, out, bias, valid_rows, M, N, K,
    A_IS_TRANSPOSED: tl.constexpr, B_IS_TRANSPOSED: tl.constexpr, SUMS_ROWS: tl.constexpr, ACCUMULATE: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """out (M, N) = a (M, K) @ b (K, N), over the first `valid_rows` along K if SUMS_ROWS, along M otherwise."""
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


def supports(stored: tuple[StoredMatrix | None, ...], *, dtype: torch.dtype, device: torch.device | None) -> bool:
    """Whether `run` computes a matmul of 16-bit operands, whose out, a and b lie in memory so, and it is worth it.

    TMA must be able to read a and b and to write out, whose rows must be whole multiples of 16 bytes, 16 bytes apart.
    The device must be a Hopper: before, there is no TMA; afterwards, not every GPU has as much shared memory. None is
    the current GPU, or one that is not there.
    """
    out = stored[0]
    if dtype not in DTYPES_16_BIT or not is_hopper(device) or out is None or out.is_transposed:
        return False
    # Most of a tile would be padding, and dX would have fewer tiles than there are multiprocessors. Where H is that
    # small, a matmul takes as long as reading dlogits, ignored rows or not, and cuBLAS divides that among all.
    is_narrow = 2 * out.columns < _TILE[1]
    return not is_narrow and all(matrix is not None and matrix.has_whole_rows for matrix in stored)


def run(matmul: Matmul, valid_rows: Tensor) -> None:
    """Computes a matmul that `supports` is true for, over the valid rows, () int32 on the device; rounded once.

    Rows from the valid ones on are zeros: of a or, if they are summed over, of both operands. The result's rows after
    the valid ones are zeros or the bias or, if they are added to, what they were.
    """
    out, a, b = matmul.out, matmul.a, matmul.b
    a_is_transposed, b_is_transposed = a.stride(1) != 1, b.stride(1) != 1
    (m, n, k), sums_rows = _TILE, matmul.kind == "dW"
    how = (a_is_transposed, b_is_transposed, matmul.bias is None, sums_rows, matmul.accumulate)
    on_device = torch.cuda.device(a.device) if a.is_cuda else nullcontext()
    with on_device, first_run_timed("Triton products", (a.device, a.dtype, out.dtype, *how)):
        # As many programs as run at the same time.
        _matmul_kernel[(multiprocessors(a.device),)](
            _tiled(a.t(), (k, m)) if a_is_transposed else _tiled(a, (m, k)),
            _tiled(b.t(), (n, k)) if b_is_transposed else _tiled(b, (k, n)),
            _tiled(out, (m, n // 2)), matmul.bias, valid_rows, *matmul.sizes,
            A_IS_TRANSPOSED=a_is_transposed, B_IS_TRANSPOSED=b_is_transposed, SUMS_ROWS=sums_rows,
            ACCUMULATE=matmul.accumulate, TILE_M=m, TILE_N=n, TILE_K=k, GROUP=_GROUP, num_warps=_WARPS,
            num_stages=_STAGES,
        )  # fmt: skip


def _tiled(matrix: Tensor, tile: tuple[int, int]) -> TensorDescriptor:
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), list(tile))
