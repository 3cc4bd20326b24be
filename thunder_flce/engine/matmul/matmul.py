"""The three matmuls, each written into a tensor of the caller.

    logits_             logits = x Wᵀ + b, or logits += x Wᵀ for a further linear term
    invariant_logits_   the same on a CPU, each row with the same bits in any batch
    input_gradient_     dX = dlogits W
    weight_gradient_    dW = dlogitsᵀ x

Legend: C tokens in a chunk, H hidden size (for a further term, its rank), V vocabulary.

`out` has the operands' dtype; for 16-bit operands it may also be float32. With `tune`, large matmuls for logits and for
sums of dW run the cuBLASLt algorithm that `algorithms` has measured to be the fastest.
"""

from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from thunder_flce.device import ROW_MULTIPLE, Device
from thunder_flce.engine.matmul import algorithms
from thunder_flce.engine.matmul.cublaslt import Matmul

# Columns at a time that are converted to float32, or computed in a float32 buffer.
FLOAT32_COLUMNS = 8192
# Rows of every matmul of `invariant_logits_`.
_BLOCK_ROWS = 64


def logits_(
    out: Tensor, x: Tensor, weight: Tensor, *, bias: Tensor | None = None, accumulate: bool = False, tune: bool = False
) -> None:  # fmt: skip
    """out (C, V) = x (C, H) @ weight (V, H)ᵀ + bias (V,), rounded once; added to `out` if `accumulate`.

    Rows of out may be padded. If logits are a sum of several linears, the bias is added with the first.

    Raises:
        ValueError: if there are both a bias and `accumulate`.
    """
    if accumulate and bias is not None:
        raise ValueError("bias must be None with accumulate=True: the linear that is written first adds the bias")
    columns, is_wider = weight.shape[0], out.dtype != weight.dtype
    step = columns if columns % ROW_MULTIPLE == 0 else _main_columns(columns, weight)
    if is_wider and not Device.of(x.device).multiplies_into_float32(weight.dtype):
        # The operands must be converted to float32.
        step = FLOAT32_COLUMNS
    if step < columns:
        biases = repeat(None) if bias is None else bias.split(step)
        # Not `strict`: repeat(None) has no end.
        for out_part, weight_part, bias_part in zip(out.split(step, 1), weight.split(step), biases, strict=False):
            logits_(out_part, x, weight_part, bias=bias_part, accumulate=accumulate, tune=tune)
        return
    inner_bias = None if is_wider else bias
    _multiply(out, x, weight.t(), bias=inner_bias, accumulate=accumulate, tune=tune and not accumulate)
    if is_wider and bias is not None:
        out.add_(bias)


def invariant_logits_(
    out: Tensor, x: Tensor, weight: Tensor, *, bias: Tensor | None = None, accumulate: bool = False
) -> None:
    """`logits_` on a CPU, where each row has the same bits in any batch.

    Libraries choose the order of a sum by the number of rows, so all matmuls have `_BLOCK_ROWS` rows, padded with 0.
    """
    # MKL adds in another order if a row does not start at a multiple of 16 bytes. In out's dtype, since a conversion
    # of the block would drop its padding.
    x_block, out_block = (
        out.new_zeros(_BLOCK_ROWS, -(-columns // ROW_MULTIPLE) * ROW_MULTIPLE)[:, :columns]
        for columns in (x.shape[1], out.shape[1])
    )
    for x_rows, out_rows in zip(x.split(_BLOCK_ROWS), out.split(_BLOCK_ROWS), strict=True):
        rows = slice(0, x_rows.shape[0])
        x_block[rows] = x_rows
        if accumulate:
            out_block[rows] = out_rows
        logits_(out_block, x_block, weight, bias=bias, accumulate=accumulate)
        out_rows.copy_(out_block[rows])


def input_gradient_(out: Tensor, dlogits: Tensor, weight: Tensor) -> None:
    """out (C, H) = dlogits (C, V) @ weight (V, H), rounded once."""
    columns = weight.shape[0]
    if not columns:
        out.zero_()
        return
    main = columns if columns % ROW_MULTIPLE == 0 else _main_columns(columns, weight)
    if main == columns:
        _multiply(out, dlogits, weight)
        return
    # dX is a sum over V. In 16 bits, adding the last columns' part to the rounded main part would round twice.
    total = torch.empty_like(out, dtype=torch.float32) if out.dtype.itemsize == 2 else out
    for number, (dlogits_part, weight_part) in enumerate(zip(dlogits.split(main, 1), weight.split(main), strict=True)):
        _multiply(total, dlogits_part, weight_part, accumulate=number > 0)
    if total is not out:
        out.copy_(total)


def weight_gradient_(out: Tensor, dlogits: Tensor, x: Tensor, *, accumulate: bool, tune: bool = False) -> None:
    """out (V, H) = dlogits (C, V)ᵀ @ x (C, H), added to `out` if `accumulate`.

    A sum in 16 bits is rounded twice a chunk: the product is rounded before it is added.
    """
    columns = dlogits.shape[1]
    main = columns if columns % ROW_MULTIPLE == 0 else _main_columns(columns, x)
    if main == columns:
        _multiply(out, dlogits.t(), x, accumulate=accumulate, tune=tune and accumulate)
        return
    for out_part, dlogits_part in zip(out.split(main), dlogits.split(main, 1), strict=True):
        _multiply(out_part, dlogits_part.t(), x, accumulate=accumulate, tune=tune and accumulate)


def library(device_type: str) -> str:
    """Returns the library that runs the matmuls on a type of device."""
    device = Device.of(torch.device(device_type))
    return "PyTorch" if device.kind != "cuda" else "cuBLAS" if device.is_nvidia else "hipBLAS"


def _main_columns(columns: int, operand: Tensor) -> int:
    """Returns the number of first columns of V for one matmul; the others, at most seven, get one of their own.

    In 16 bits, cuBLAS takes five times as long if V is no multiple of 8, as after adding one token to a tokenizer: 202
    ms for the three matmuls of 8192 × 128257 × 4096 instead of 38.5. Both parts are views.
    """
    is_split = operand.is_cuda and operand.dtype.itemsize == 2 and columns > ROW_MULTIPLE
    return columns // ROW_MULTIPLE * ROW_MULTIPLE if is_split else columns


def _multiply(
    out: Tensor, a: Tensor, b: Tensor, *, bias: Tensor | None = None, accumulate: bool = False, tune: bool = False
) -> None:  # fmt: skip
    """out (M, N) = a (M, K) @ b (K, N) + bias (N,), or added to `out`."""
    if tune and algorithms.may_gain(out.shape[0], out.shape[1], a.shape[1]):
        if algorithms.run_fastest(Matmul(out, a, b, bias, accumulate)):
            return
    if not out.is_cuda:
        # On a CPU, PyTorch reads 16-bit matrices of one row or one column as if they were contiguous (torch 2.8, 2.10).
        # A last chunk of a single row, from a transposed input, is not.
        a, b = a.contiguous() if 1 in a.shape else a, b.contiguous() if 1 in b.shape else b
    elif out.shape[1] == 1 and out.shape[0] * out.stride(0) >= 2**31 and not out.is_contiguous():
        # cuBLAS writes to wrong addresses for a strided single column that spans 2³¹ elements or more (CUDA 13.0).
        column = out.contiguous()
        _multiply(column, a, b, bias=bias, accumulate=accumulate)
        out.copy_(column)
        return
    if bias is not None:
        _multiply_with_bias(out, a, b, bias=bias)
        return
    mixed: dict[str, Any] = {}
    if b.dtype != out.dtype:
        if Device.of(out.device).multiplies_into_float32(b.dtype):
            mixed = {"out_dtype": out.dtype}
        else:
            a, b = a.to(out.dtype), b.to(out.dtype)
    if accumulate:
        torch.addmm(out, a, b, out=out, **mixed)
    else:
        torch.mm(a, b, out=out, **mixed)


def _multiply_with_bias(out: Tensor, a: Tensor, b: Tensor, *, bias: Tensor) -> None:
    # PyTorch lets cuBLAS add a bias before rounding only if the output is contiguous. Otherwise it rounds, adds and
    # rounds again, with 1.4 times the error of the logits. So such outputs are computed in float32, block by block.
    if not out.is_cuda or out.dtype.itemsize > 2 or out.is_contiguous():
        torch.addmm(bias, a, b, out=out)
        return
    for start in range(0, out.shape[1], FLOAT32_COLUMNS):
        block = slice(start, start + FLOAT32_COLUMNS)
        out_block = out[:, block]
        product = torch.empty(out_block.shape, dtype=torch.float32, device=out.device)
        _multiply(product, a, b[:, block])
        torch.add(product, bias[block], out=out_block)
        del product  # Or two blocks would be alive at once.
