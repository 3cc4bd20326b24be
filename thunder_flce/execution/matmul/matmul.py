"""The region's matmuls, each written into memory that the caller owns.

    logits_             logits = x Wᵀ + b, or logits += x Wᵀ for a further linear term
    input_gradient_     dX = dlogits W
    weight_gradient_    dW = dlogitsᵀ x

Legend: C tokens in a chunk, H hidden size (of a further term, its rank), V vocabulary or the columns of a block of it.

With `tune`, large ones run by the algorithm of cuBLAS that `tuning` measures to be the fastest, and `batch_invariant`
logits as `invariant` says.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from thunder_flce.device import ROW_MULTIPLE
from thunder_flce.execution.matmul import invariant, tuning
from thunder_flce.execution.matmul.layout import Kind, Matmul

# Columns at a time of a matmul that is summed in float32 outside its output.
_FLOAT32_COLUMNS = 8192


class MatmulWork(NamedTuple):
    """What one of the functions below is asked for, without its tensors; these are taken to be contiguous.

    rows, columns and hidden are C (of several parts of dW, the largest), V and H; dtype is that of the operands.
    Without a GPU, a device of the type "cuda" is taken to be a Hopper.
    """

    kind: Kind
    rows: int
    columns: int
    hidden: int
    dtype: torch.dtype
    out_dtype: torch.dtype
    device_type: str
    pads_biased_rows: bool = False
    """Whether a bias is added to logits whose rows are padded"""
    parts: int = 1
    """How many matmuls dW is the sum of"""
    tune: bool = False

    @classmethod
    def of(cls, kind: Kind, out: Tensor, a: Tensor, b: Tensor, **settings: Any) -> "MatmulWork":
        """Of x Wᵀ, dlogits W or dlogitsᵀ x, whose operands are a and b, into `out`; and the further fields."""
        rows, columns = (a.shape[0], b.shape[0]) if kind == "logits" else a.shape
        return cls(kind, rows, columns, b.shape[1], b.dtype, out.dtype, out.device.type, **settings)

    @property
    def tail(self) -> int:
        """How many columns at the end of V, one to seven, are a matmul of their own, where cuBLAS is slow for all of V.

        For 16 bits and a V that is no multiple of 8, as after one token was added to a tokenizer, it takes five times
        as long: 202 ms for the three matmuls of 8192 × 128257 × 4096 instead of 38.5. Both parts are views.
        """
        has_tail = self.device_type == "cuda" and self.dtype.itemsize == 2 and self.columns > ROW_MULTIPLE
        return self.columns % ROW_MULTIPLE if has_tail else 0

    @property
    def blocks(self) -> list[slice]:
        """The columns of each matmul, the tail last; a part of the weight each where operands are converted."""
        main = self.columns - self.tail
        step = _FLOAT32_COLUMNS if self.kind == "logits" and self.converts_operands else main
        blocks = [slice(start, min(start + step, main)) for start in range(0, main, step)]
        return [*blocks, slice(main, self.columns)] if main < self.columns else blocks

    @property
    def sum_dtype(self) -> torch.dtype:
        """The dtype of a sum of several matmuls, which must be rounded once; of only one, the result's."""
        is_sum = self.parts > 1 or (self.kind == "dX" and self.tail > 0)
        return torch.promote_types(self.out_dtype, torch.float32) if is_sum else self.out_dtype

    @property
    def converts_operands(self) -> bool:
        """Whether operands are copied to the result's dtype: torch has no mixed-precision matmul on a CPU."""
        return self.device_type != "cuda" and self.dtype != self.sum_dtype

    @property
    def library(self) -> str:
        """Who runs it: "cuBLAS", and on a CPU "PyTorch"."""
        return "cuBLAS" if self.device_type == "cuda" else "PyTorch"

    @property
    def operations(self) -> int:
        """Floating-point operations."""
        return 2 * self.rows * self.columns * self.hidden

    @property
    def scratch_bytes(self) -> int:
        """The most memory that it allocates, and frees before it returns."""
        rows, columns, hidden = self.rows, self.columns, self.hidden
        sizes = {"logits": (rows, columns, hidden), "dX": (rows, hidden, columns), "dW": (columns, hidden, rows)}
        m, n, k = sizes[self.kind]
        total = m * n * self.sum_dtype.itemsize if self.sum_dtype != self.out_dtype else 0
        if self.converts_operands:
            block = min(n, _FLOAT32_COLUMNS) if self.kind == "logits" else n
            total += (m * k + k * block) * self.sum_dtype.itemsize
        elif self.pads_biased_rows and self.device_type == "cuda" and self.out_dtype.itemsize == 2:
            main = columns - self.tail
            is_tuned = self.tune and tuning.can_tune(2 * rows * main * hidden, dtype=self.dtype, device_type="cuda")
            block = 0 if is_tuned else min(main, _FLOAT32_COLUMNS)
            total += rows * max(block, self.tail) * torch.float32.itemsize
        return total


def logits_(
    out: Tensor, x: Tensor, weight: Tensor, *, bias: Tensor | None = None, accumulate: bool = False, tune: bool = False,
    batch_invariant: bool = False,
) -> None:  # fmt: skip
    """out (C, V) = x (C, H) @ weight (V, H)ᵀ + bias (V,), rounded once; added to what out holds if `accumulate`.

    Out is of the others' dtype or float32. Logits that are a sum of linear terms get their bias with the first one.

    Raises:
        ValueError: for a bias with `accumulate`.
        RuntimeError: with `batch_invariant`, as `invariant.run`.
    """
    if accumulate and bias is not None:
        raise ValueError("a bias is added with the linear term that is written first, not to one that accumulates")
    is_wider = out.dtype != x.dtype
    for block in MatmulWork.of("logits", out, x, weight).blocks:
        of_bias = None if bias is None or is_wider else _rows(bias, block)
        matmul = Matmul("logits", _columns(out, block), x, _rows(weight, block).t(), of_bias, accumulate)
        if batch_invariant:
            invariant.run(matmul, in_pytorch=_run_in_pytorch)
        else:
            _run(matmul, tune=tune)
    if bias is not None and is_wider:
        out.add_(bias)


def input_gradient_(
    out: Tensor, dlogits: Tensor, weight: Tensor, *, accumulate: bool = False, tune: bool = False
) -> None:
    """out (C, H) = dlogits (C, V) @ weight (V, H), rounded once; added to what out holds if `accumulate`."""
    # Adding the tail's share to a sum already rounded would round twice.
    work = MatmulWork.of("dX", out, dlogits, weight)
    dtype = work.sum_dtype
    # Itself, if it has that dtype.
    total = out.to(dtype) if accumulate or dtype == out.dtype else torch.empty_like(out, dtype=dtype)
    for block in work.blocks:
        parts = _columns(dlogits, block), _rows(weight, block)
        matmul = Matmul("dX", total, *parts, accumulate=accumulate or block.start > 0)
        _run(matmul, tune=tune)
    if total is not out:
        out.copy_(total)


def weight_gradient_(out: Tensor, dlogits: Tensor, x: Tensor, *, accumulate: bool, tune: bool = False) -> None:
    """out (V, H) = dlogits (C, V)ᵀ @ x (C, H), added to what out holds if `accumulate`; out may be float32.

    A sum in 16 bits rounds twice a chunk: what is added is rounded before.
    """
    for block in MatmulWork.of("dW", out, dlogits, x).blocks:
        matmul = Matmul("dW", _rows(out, block), _columns(dlogits, block).t(), x, accumulate=accumulate)
        _run(matmul, tune=tune)


def weight_gradient_of_parts_(out: Tensor, parts: list[tuple[Tensor, Tensor]], *, tune: bool = False) -> None:
    """out (V, H) = the sum of dlogits (C, V)ᵀ @ x (C, H) over the parts (dlogits, x), rounded once."""
    dtype = MatmulWork.of("dW", out, *parts[0], parts=len(parts)).sum_dtype
    total = out if dtype == out.dtype else torch.empty_like(out, dtype=dtype)
    for number, (dlogits, x) in enumerate(parts):
        weight_gradient_(total, dlogits, x, accumulate=number > 0, tune=tune)
    if total is not out:
        out.copy_(total)


def _rows(matrix: Tensor, block: slice) -> Tensor:
    """A block of rows; the matrix where that is all of them, since a view takes the host as long as half a launch."""
    return matrix if block == slice(0, matrix.shape[0]) else matrix[block]


def _columns(matrix: Tensor, block: slice) -> Tensor:
    """A block of columns, likewise."""
    return matrix if block == slice(0, matrix.shape[1]) else matrix[:, block]


def _run(matmul: Matmul, *, tune: bool) -> None:
    if not (tune and tuning.run(matmul)):
        _run_in_pytorch(matmul)


def _run_in_pytorch(matmul: Matmul) -> None:
    out, a, b = matmul.out, _readable(matmul.a), _readable(matmul.b)
    if matmul.bias is not None:
        _run_with_bias(out, a, b, bias=matmul.bias)
        return
    mixed: dict[str, Any] = {}
    if a.dtype != out.dtype and out.is_cuda:
        mixed = {"out_dtype": out.dtype}
    elif a.dtype != out.dtype:
        a, b = a.to(out.dtype), b.to(out.dtype)
    if matmul.accumulate:
        torch.addmm(out, a, b, **mixed, out=out)
    else:
        torch.mm(a, b, **mixed, out=out)


def _run_with_bias(out: Tensor, a: Tensor, b: Tensor, *, bias: Tensor) -> None:
    # PyTorch lets cuBLAS add a bias before rounding only into contiguous memory. Elsewhere it rounds, adds and rounds
    # again, which makes the logits' error 1.4 times as large. So those are computed in float32, block by block.
    if not out.is_cuda or out.dtype.itemsize > 2 or out.is_contiguous():
        torch.addmm(bias, a, b, out=out)
        return
    for start in range(0, out.shape[1], _FLOAT32_COLUMNS):
        block = slice(start, start + _FLOAT32_COLUMNS)
        columns = torch.mm(a, b[:, block], out_dtype=torch.float32)
        torch.add(columns, bias[block], out=out[:, block])
        del columns  # Or two blocks would be alive at once.


def _readable(matrix: Tensor) -> Tensor:
    """The matrix, or a copy where PyTorch would read other numbers.

    On a CPU, a matmul of 16-bit operands takes the elements of a matrix of one row, or of one column, as if they lay
    side by side (torch 2.8 and 2.10). So the last chunk's only row of a transposed input would be a wrong one.
    """
    is_strided_vector = not matrix.is_cuda and 1 in matrix.shape and not matrix.is_contiguous()
    return matrix.contiguous() if is_strided_vector else matrix
