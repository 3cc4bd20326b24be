"""Matmuls whose rows have the same bits, whatever rows there are beside them.

Libraries choose by the number of rows in which order they sum. Here that number has no say: on CUDA cuBLASLt runs, for
any number of rows, the algorithm that it proposes first for 2048 of them; on a CPU all matmuls have 64 rows, some of
which may be zeros.
"""

from collections.abc import Callable
from functools import lru_cache

import torch

from thunder_flce.device import ALIGNED_BYTES, ROW_MULTIPLE, on_device
from thunder_flce.execution.matmul.cublaslt import Algorithm, MatmulDescriptor, Signature
from thunder_flce.execution.matmul.layout import Matmul

_CHOSEN_FOR_ROWS = 2048
_CPU_ROWS = 64


def run(matmul: Matmul, *, in_pytorch: Callable[[Matmul], None]) -> None:
    """Runs a matmul each row of which has the same bits beside any other rows; on a CPU, `in_pytorch` runs it.

    Raises:
        RuntimeError: on CUDA, where cuBLASLt cannot read the operands or has no algorithm for any number of rows.
    """
    if not matmul.out.is_cuda:
        _run_on_cpu(matmul, in_pytorch)
    elif matmul.out.shape[1] % ROW_MULTIPLE:
        _run_in_whole_columns(matmul)
    elif matmul.out.numel():
        _run_in_cublaslt(matmul)


def _run_on_cpu(matmul: Matmul, in_pytorch: Callable[[Matmul], None]) -> None:
    # MKL adds in another order where a row of float64 starts between two multiples of 16 bytes.
    hidden, columns = matmul.a.shape[1], matmul.out.shape[1]
    a = matmul.a.new_zeros(_CPU_ROWS, -(-hidden // ROW_MULTIPLE) * ROW_MULTIPLE)[:, :hidden]
    out = matmul.out.new_zeros(_CPU_ROWS, columns)
    for of_a, of_out in zip(matmul.a.split(_CPU_ROWS), matmul.out.split(_CPU_ROWS), strict=True):
        rows = slice(0, of_a.shape[0])
        a[rows] = of_a
        if matmul.accumulate:
            out[rows] = of_out
        in_pytorch(matmul._replace(a=a, out=out))
        of_out.copy_(out[rows])


def _run_in_whole_columns(matmul: Matmul) -> None:
    """Pads the columns to a multiple of those that cuBLASLt reads at a time."""
    columns = matmul.out.shape[1]
    more = -columns % ROW_MULTIPLE
    pad = torch.nn.functional.pad
    out = pad(matmul.out, (0, more))
    bias = None if matmul.bias is None else pad(matmul.bias, (0, more))
    _run_in_cublaslt(matmul._replace(out=out, b=pad(matmul.b.t(), (0, 0, 0, more)).t(), bias=bias))
    matmul.out.copy_(out[:, :columns])


def _run_in_cublaslt(matmul: Matmul) -> None:
    # The row stride of a matrix of one row may be any number; that of a view of the flat matrix is its width.
    a = matmul.a.flatten().view(matmul.a.shape)
    matmul = matmul._replace(a=a.clone() if a.data_ptr() % ALIGNED_BYTES else a)
    signature = Signature.of(matmul)
    if signature is None:
        raise RuntimeError(
            "batch_invariant=True: cuBLASLt cannot read these operands; input, weight and bias must be contiguous, on "
            "multiples of 16 bytes, and of one dtype in 16 bits"
        )
    with on_device(matmul.out.device):
        algorithm = _algorithm(_for_rows(signature, _CHOSEN_FOR_ROWS))
        if algorithm is None or not _descriptor(signature).run(matmul, algorithm):
            raise RuntimeError(f"batch_invariant=True: cuBLASLt has no algorithm for any number of rows of {signature}")


def _for_rows(signature: Signature, rows: int) -> Signature:
    """The same matmul of so many rows."""
    return signature._replace(a=signature.a._replace(rows=rows), out=signature.out._replace(rows=rows))


_descriptor = lru_cache(maxsize=64)(MatmulDescriptor)


@lru_cache(maxsize=64)
def _algorithm(signature: Signature) -> Algorithm | None:
    return next(iter(MatmulDescriptor(signature).candidates()), None)
