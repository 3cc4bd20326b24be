"""One matmul: its tensors, and how they lie in memory."""

from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from thunder_flce.device import ALIGNED_BYTES

Kind = Literal["logits", "dX", "dW"]

DTYPES_16_BIT = (torch.float16, torch.bfloat16)


class StoredMatrix(NamedTuple):
    """A matrix, or its transpose, as it lies in memory row by row, each row on a multiple of 16 bytes."""

    rows: int
    columns: int
    row_stride: int
    """Elements from one row to the next"""
    is_transposed: bool = False
    """Whether the matrix as stored is the transpose of the one meant"""

    @classmethod
    def of(cls, matrix: Tensor) -> "StoredMatrix | None":
        """How a matrix lies in memory; None where its rows are not contiguous, or not on multiples of 16 bytes."""
        if matrix.data_ptr() % ALIGNED_BYTES:
            return None
        return _stored(matrix.shape, matrix.stride(), matrix.element_size())


@lru_cache(maxsize=256)
def _stored(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> StoredMatrix | None:
    (rows, columns), (stride, last_stride) = shape, strides
    is_transposed = last_stride != 1
    if is_transposed:
        rows, columns, stride, last_stride = columns, rows, last_stride, stride
    is_readable = last_stride == 1 and stride >= columns and stride * itemsize % ALIGNED_BYTES == 0
    return StoredMatrix(rows, columns, stride, is_transposed) if is_readable else None


class Matmul(NamedTuple):
    """out (M, N) = a (M, K) @ b (K, N) + bias (N,), summed in float32 and rounded to out's dtype.

    Operands have one dtype, out and bias that or float32. Without a bias, it may be added to what out holds.
    """

    kind: Kind
    out: Tensor
    a: Tensor
    b: Tensor
    bias: Tensor | None = None
    accumulate: bool = False

    @property
    def sizes(self) -> tuple[int, int, int]:
        """M, N and K."""
        (m, k), n = self.a.shape, self.b.shape[1]
        return m, n, k

    @property
    def stored(self) -> tuple[StoredMatrix | None, StoredMatrix | None, StoredMatrix | None]:
        """How out, a and b lie in memory."""
        return StoredMatrix.of(self.out), StoredMatrix.of(self.a), StoredMatrix.of(self.b)
