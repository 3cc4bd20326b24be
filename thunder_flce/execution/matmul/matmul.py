"""The region's three matrix products, each written into memory that the caller owns.

Legend: C tokens in a chunk, H hidden size, V vocabulary.

cuBLAS takes a path five times slower for 16-bit operands whose size along V is not a multiple of 8, for example after
one token was added to a tokenizer (8192 × 128257 × 4096: 202 ms for the three products against 38.5 ms). So on CUDA an
odd V is computed as an aligned main part and a tail of one to seven columns, both views of the weight as it is.

Where `tune` is set, large products run by the algorithm that `product_tuning` measures to be the fastest. With
`valid_rows`, (), the rows of x and dlogits from there on are zeros, so that those of logits (but for a bias) and of dX
are: then products end after the valid rows where they can, on CUDA by `triton_products` (but for a tail).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from thunder_flce.execution.matmul import tuning
from thunder_flce.planning.plan import triton_available

ALIGNMENT = 8

# Columns at a time of a product that is summed in float32 beside its output.
_FLOAT32_COLUMNS = 8192


class Part(NamedTuple):
    """One of the products that dW is the sum of."""

    dlogits: Tensor
    """(C, V)"""
    x: Tensor
    """(C, H)"""
    valid_rows: Tensor | None = None


def _main_columns(tensor: Tensor, vocab: int) -> int:
    """The largest number of columns up to `vocab` that cuBLAS computes at full speed."""
    if tensor.is_cuda and tensor.element_size() == 2:
        return vocab - vocab % ALIGNMENT or vocab
    return vocab


def logits_(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    tune: bool = False,
    valid_rows: Tensor | None = None,
) -> None:
    """out (C, V) = x (C, H) @ weight (V, H)ᵀ + bias (V,), rounded once, to out's dtype; out may be float32."""
    vocab = weight.shape[0]
    main = _main_columns(x, vocab)
    if out.dtype != x.dtype:
        # On a CPU, operands are converted for such a product: a part of the weight at a time.
        step = main if x.is_cuda else _FLOAT32_COLUMNS
        for start, end in _column_blocks(main, vocab, step):
            columns, weight_rows = out[:, start:end], weight[start:end]
            _product_("logits", columns, x, weight_rows.t(), accumulate=False, tune=tune, valid_rows=valid_rows)
        if bias is not None:
            out.add_(bias)
        return
    for start, end in _column_blocks(main, vocab, main):
        columns, weight_rows = out[:, start:end], weight[start:end]
        of_bias = None if bias is None else bias[start:end]
        _product_("logits", columns, x, weight_rows.t(), of_bias, accumulate=False, tune=tune, valid_rows=valid_rows)


def _column_blocks(main: int, vocab: int, step: int):
    """(start, end) of at most `step` columns each: first those up to `main`, then the tail up to `vocab`."""
    yield from ((start, min(start + step, main)) for start in range(0, main, step))
    if main < vocab:
        yield main, vocab


def input_gradient_(
    out: Tensor,
    dlogits: Tensor,
    weight: Tensor,
    *,
    accumulate: bool = False,
    tune: bool = False,
    valid_rows: Tensor | None = None,
) -> None:
    """out (C, H) = dlogits (C, V) @ weight (V, H), added to what out holds if `accumulate`; rounded once."""
    vocab = weight.shape[0]
    main = _main_columns(dlogits, vocab)
    # Adding the tail's share to a product already rounded would round twice.
    total = out if main == vocab or out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
    for number, (start, end) in enumerate(_column_blocks(main, vocab, main)):
        columns, weight_rows = dlogits[:, start:end], weight[start:end]
        adds = accumulate or number > 0
        _product_("dX", total, columns, weight_rows, accumulate=adds, tune=tune, valid_rows=valid_rows)
    if total is not out:
        out.copy_(total)


def weight_gradient_(
    out: Tensor,
    dlogits: Tensor,
    x: Tensor,
    *,
    accumulate: bool,
    tune: bool = False,
    valid_rows: Tensor | None = None,
) -> None:
    """out (V, H) = dlogits (C, V)ᵀ @ x (C, H), added to what out holds if `accumulate`; out may be float32.

    A sum in 16 bits rounds twice a chunk: cuBLAS rounds the product before adding it.
    """
    vocab = out.shape[0]
    main = _main_columns(dlogits, vocab)
    for start, end in _column_blocks(main, vocab, main):
        rows, columns = out[start:end], dlogits[:, start:end]
        _product_("dW", rows, columns.t(), x, accumulate=accumulate, tune=tune, valid_rows=valid_rows)


def weight_gradient_of_parts_(out: Tensor, parts: list[Part], *, tune: bool = False) -> None:
    """out (V, H) = the sum of dlogits (C, V)ᵀ @ x (C, H) over the parts, rounded once."""
    total = out
    if len(parts) > 1:
        total = torch.empty_like(out, dtype=torch.promote_types(out.dtype, torch.float32))
    for number, part in enumerate(parts):
        dlogits, x, valid_rows = part
        weight_gradient_(total, dlogits, x, accumulate=number > 0, tune=tune, valid_rows=valid_rows)
    if total is not out:
        out.copy_(total)


def _product_(
    name: str,
    out: Tensor,
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    *,
    accumulate: bool,
    tune: bool,
    valid_rows: Tensor | None = None,
) -> None:
    """out = a @ b + bias, or out += a @ b: 16-bit products are summed in float32 and rounded to out's dtype."""
    if valid_rows is not None:
        sums_rows = name == "dW"
        if not out.is_cuda:
            out, a, b = _of_valid_rows(out, a, b, int(valid_rows), sums_rows=sums_rows, accumulate=accumulate)
        elif triton_available():
            from thunder_flce.execution.matmul import triton_matmul

            how = {"valid_rows": valid_rows, "sums_rows": sums_rows, "accumulate": accumulate}
            if triton_matmul.run(out, a, b, bias, **how):
                return
    if tune and tuning.run(name, out, a, b, bias, accumulate=accumulate):
        return
    a, b = _readable(a), _readable(b)
    if bias is not None:
        _biased_product_(out, a, b, bias)
    elif out.dtype == a.dtype:
        if accumulate:
            torch.addmm(out, a, b, out=out)
        else:
            torch.mm(a, b, out=out)
    elif a.is_cuda:
        if accumulate:
            torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
        else:
            torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:
        # torch has no mixed-precision product on a CPU.
        a, b = a.to(out.dtype), b.to(out.dtype)
        if accumulate:
            torch.addmm(out, a, b, out=out)
        else:
            torch.mm(a, b, out=out)


def _biased_product_(out: Tensor, a: Tensor, b: Tensor, bias: Tensor) -> None:
    if out.is_contiguous() or not out.is_cuda or out.element_size() != 2:
        torch.addmm(bias, a, b, out=out)
        return
    # PyTorch lets cuBLAS add a bias before rounding only into contiguous memory. Elsewhere it rounds the product, adds
    # and rounds again, which makes the logits' error 1.4 times as large.
    for start in range(0, out.shape[1], _FLOAT32_COLUMNS):
        part = slice(start, start + _FLOAT32_COLUMNS)
        columns = torch.mm(a, b[:, part], out_dtype=torch.float32)
        torch.add(columns, bias[part], out=out[:, part])


def _of_valid_rows(
    out: Tensor, a: Tensor, b: Tensor, count: int, *, sums_rows: bool, accumulate: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The product's result and operands without the rows from `count` on; those of the result are set to zero."""
    if sums_rows:
        return out, a[:, :count], b[:count]
    if not accumulate:
        out[count:] = 0
    return out[:count], a[:count], b


def _readable(matrix: Tensor) -> Tensor:
    """The matrix, or a copy where PyTorch would read other numbers.

    On a CPU, a product of 16-bit operands takes the elements of a matrix of one row, or of one column, as if they lay
    side by side (torch 2.8 and 2.10). So the last chunk's only row of a transposed input would be a wrong one.
    """
    is_strided_vector = 1 in matrix.shape and not matrix.is_contiguous()
    return matrix.contiguous() if is_strided_vector and not matrix.is_cuda else matrix
