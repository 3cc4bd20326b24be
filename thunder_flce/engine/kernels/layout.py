"""How logits lie in memory.

Logits z (C, V) are a view of rows that are `z.stride(0)` elements apart, the last dimension contiguous. What lies
between V and the stride, the padding, belongs to the same memory: kernels may write there.
"""

import torch
from torch import Tensor

from thunder_flce.device import PADDED_ROW_MULTIPLE, ROW_MULTIPLE


def row_stride(vocab: int, *, dtype: torch.dtype, device_type: str) -> int:
    """Elements from one row of logits to the next, as the kernels for this dtype and device read them fastest.

    There is padding only where V leaves no choice.
    """
    is_aligned = vocab % ROW_MULTIPLE == 0 or device_type != "cuda" or dtype is torch.float64
    return vocab if is_aligned else -(-vocab // PADDED_ROW_MULTIPLE) * PADDED_ROW_MULTIPLE


def empty_logits(
    rows: int, vocab: int, *, dtype: torch.dtype, device: torch.device | str, device_type: str | None = None
) -> Tensor:
    """(rows, V), uninitialised; `device_type` is whose layout they get, where `device` is another, as "meta" is."""
    stride = row_stride(vocab, dtype=dtype, device_type=device_type or torch.device(device).type)
    memory = torch.empty(rows, stride, dtype=dtype, device=device)
    return memory if stride == vocab else memory[:, :vocab]


def whole_rows(z: Tensor) -> Tensor:
    """(C, stride), contiguous: logits with their padding."""
    stride = z.stride(0)
    return z if stride == z.shape[1] else z.as_strided((z.shape[0], stride), (stride, 1))
