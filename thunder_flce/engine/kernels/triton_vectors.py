"""Triton kernels on vectors of one number a token: one launch prepares rows, another computes the loss.

One program computes a sum, in the same order in each run. `scale_` multiplies finished gradients. Legend: T tokens, N
rows computed.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from thunder_flce.device import Device
from thunder_flce.engine.kernels.interface import RowStatistics, TokenVectors
from thunder_flce.engine.kernels.launch import contiguous, kernel, launch, settings_of
from thunder_flce.operation.call import Call
from thunder_flce.operation.loss import Loss


@triton.jit
def _read_targets(target, token_weight, start, tokens, ignore_index, IGNORES: tl.constexpr, BLOCK: tl.constexpr):
    """Returns, for a block of tokens: numbers, which exist, labels, which are not ignored, factors, which are valid."""
    number = start + tl.arange(0, BLOCK)
    is_token = number < tokens
    label = tl.load(target + number, mask=is_token, other=0).to(tl.int64)
    is_label = (is_token & (label != ignore_index)) if IGNORES else is_token
    row_factor, valid = tl.full([BLOCK], 1.0, tl.float32), is_label
    if token_weight is not None:
        row_factor = tl.load(token_weight + number, mask=is_token, other=0.0).to(tl.float32)
        valid = is_label & (row_factor != 0.0)
    return number, is_token, label, is_label, tl.where(valid, row_factor, 0.0), valid


@kernel(3, "tokens", "vocab", "ignore_index")
def _prepare_kernel(
    target, token_weight, class_weight, num_items, upstream, integers, floats, tokens, vocab, ignore_index,
    IGNORES: tl.constexpr, IS_MEAN: tl.constexpr, UPSTREAMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Runs as one program. UPSTREAMS: whether each token has its own upstream gradient.

    integers: counts, is_right and columns. floats: divisors, row_factors, s and class weights.
    """
    is_right, column = integers + 2, integers + 3
    row_factors = floats + 2
    s = row_factors + tokens
    at_target = s + tokens
    total, total_z = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    wrong, valid_count = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    for start in range(0, tokens, BLOCK):
        number, is_token, label, is_label, row_factor, valid = _read_targets(
            target, token_weight, start, tokens, ignore_index, IGNORES, BLOCK
        )
        is_wrong = is_label & ((label < 0) | (label >= vocab))
        label = tl.where(is_label & (is_wrong == 0), label, 0)
        tl.store(column + number, label, mask=is_token)
        tl.store(row_factors + number, row_factor, mask=is_token)
        product = row_factor
        if class_weight is not None:
            label_weight = tl.load(class_weight + label, mask=is_token, other=0.0).to(tl.float32)
            tl.store(at_target + number, label_weight, mask=is_token)
            product = tl.where(valid, row_factor * label_weight, 0.0)
        total += product
        total_z += row_factor
        wrong += is_wrong.to(tl.int32)
        valid_count += valid.to(tl.int32)

    count, wrong_count = tl.sum(valid_count, 0), tl.sum(wrong, 0)
    tl.store(integers, count.to(tl.int64))
    tl.store(integers + 1, wrong_count.to(tl.int64))
    tl.store(is_right, (wrong_count == 0).to(tl.int64))
    divisor, divisor_z = 1.0, 1.0
    if IS_MEAN:
        if num_items is not None:
            divisor = tl.load(num_items).to(tl.float32)
            divisor = tl.where(divisor == 0.0, float("inf"), divisor)
            divisor_z = divisor
        else:
            divisor, divisor_z = tl.sum(total, 0), tl.sum(total_z, 0)
    tl.store(floats, divisor)
    tl.store(floats + 1, divisor_z)

    factor = 1.0
    if upstream is not None and not UPSTREAMS:
        factor = tl.load(upstream).to(tl.float32)
    for start in range(0, tokens, BLOCK):
        number, is_token, _, _, row_factor, valid = _read_targets(
            target, token_weight, start, tokens, ignore_index, IGNORES, BLOCK
        )
        row_s = factor * row_factor
        if UPSTREAMS:
            row_s = tl.load(upstream + number, mask=is_token, other=0.0).to(tl.float32) * row_factor
        if IS_MEAN:
            row_s = tl.div_rn(row_s, tl.zeros_like(row_s) + divisor)
        tl.store(s + number, tl.where(valid, row_s, 0.0), mask=is_token)


_BLOCK, _THREADS = 2048, 256


def token_vectors(call: Call, *, upstream: Tensor | None) -> TokenVectors:
    """`engine.rows.token_vectors` for one target a token and float32 rows."""
    loss, target, get = call.loss, call.tensors["target"], call.tensors.get
    class_weight, tokens, device = get("weight"), target.shape[0], target.device
    has_upstreams = upstream is not None and upstream.ndim > 0
    settings = settings_of(
        IGNORES=loss.ignores_rows, IS_MEAN=loss.reduction == "mean", UPSTREAMS=has_upstreams, BLOCK=_BLOCK,
        threads=_THREADS,
    )  # fmt: skip
    # Two allocations and two splits take the host a third of the time of one allocation for each vector.
    sizes_of_floats = [2, tokens, tokens] if class_weight is None else [2, tokens, tokens, tokens]
    integers = torch.empty(3 + tokens, dtype=torch.int64, device=device)
    floats = torch.empty(sum(sizes_of_floats), dtype=torch.float32, device=device)
    inputs = contiguous(target, get("token_weights"), class_weight, get("num_items"), upstream)
    launch(_prepare_kernel, 1, [*inputs, integers, floats], settings, tokens, call.whole_vocab, loss.ignore_index)
    counts, is_right, column = integers.split_with_sizes([2, 1, tokens])
    divisors, row_factor, s, *at_target = floats.split_with_sizes(sizes_of_floats)
    return TokenVectors(column, row_factor, s, at_target[0] if at_target else None, None, divisors, counts, is_right)


@kernel(0, "rows")
def _finish_kernel(
    row_max, row_log_sum, z_y, row_factor, at_target, row_losses, divisors, result, log_prob, log_sum_exp, rows,
    Z_LOSS: tl.constexpr, REDUCES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes each row's weighted cross-entropy and z term; with REDUCES, one program adds them up."""
    first = 0 if REDUCES else tl.program_id(0) * BLOCK
    total, total_z = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, rows if REDUCES else 1, BLOCK):
        number = first + start + tl.arange(0, BLOCK)
        is_row = number < rows
        factor = tl.load(row_factor + number, mask=is_row, other=0.0)
        largest = tl.load(row_max + number, mask=is_row, other=0.0)
        log_sum = tl.load(row_log_sum + number, mask=is_row, other=0.0)
        shifted = tl.load(z_y + number, mask=is_row, other=0.0).to(tl.float32) - largest
        # Clamps at 0, so that the loss is not negative; NaN stays NaN.
        loss = log_sum - tl.where(shifted > 0.0, 0.0, shifted)
        if row_losses is not None:
            loss = tl.load(row_losses + number, mask=is_row, other=0.0)
        if at_target is not None:
            loss = tl.load(at_target + number, mask=is_row, other=0.0) * loss
        loss = tl.where(factor != 0.0, factor * loss, 0.0)
        lse = largest + log_sum
        z_term = tl.where(factor != 0.0, factor * (Z_LOSS * (lse * lse)), 0.0)
        if log_prob is not None:
            tl.store(log_prob + number, tl.where(factor != 0.0, shifted - log_sum, 0.0), mask=is_row)
        if log_sum_exp is not None:
            tl.store(log_sum_exp + number, tl.where(factor != 0.0, lse, 0.0), mask=is_row)
        total += loss
        total_z += z_term
        if not REDUCES:
            tl.store(result + number, total + total_z if Z_LOSS != 0 else total, mask=is_row)
    if REDUCES:
        value = tl.div_rn(tl.sum(total, 0), tl.load(divisors))
        if Z_LOSS != 0:
            value += tl.div_rn(tl.sum(total_z, 0), tl.load(divisors + 1))
        tl.store(result, value)


def finish(
    loss: Loss, statistics: RowStatistics, z_y: Tensor, *, row_factor: Tensor, at_target: Tensor | None, divisors: Any,
    row_losses: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """Computes the loss of `operation.loss` without smoothing in one launch: float32, () or (N,) for "none".

    Also returns the outputs "log_prob" and "log_sum_exp", (N,) each, if the loss has them. `z_y` is (N,), the logit of
    each row's target, in 16 or 32 bits. `row_losses` are (N,), each row's loss in place of its cross-entropy.
    """
    rows, reduces = z_y.shape[0], loss.reduction != "none"
    settings = settings_of(Z_LOSS=loss.z_loss, REDUCES=reduces, BLOCK=_BLOCK, threads=_THREADS)
    result = torch.empty(() if reduces else rows, dtype=torch.float32, device=z_y.device)
    extra = {name: torch.empty_like(statistics.row_max) for name in loss.outputs if name in ("log_prob", "log_sum_exp")}
    tensors = [*contiguous(*statistics, z_y, row_factor, at_target, row_losses), divisors, result]
    tensors += [extra.get("log_prob"), extra.get("log_sum_exp")]
    if programs := 1 if reduces else -(-rows // _BLOCK):
        launch(_finish_kernel, programs, tensors, settings, rows)
    return result, extra


@kernel(1, "size")
def _scale_kernel(gradient, grad, valid_count, expected, size, BLOCK: tl.constexpr):
    factor = tl.load(grad).to(tl.float32)
    if expected is not None:
        divisor = tl.load(expected).to(tl.float32)
        is_usable = (divisor != 0.0) & (tl.abs(divisor) < float("inf"))
        factor = tl.div_rn(factor, tl.where(is_usable, divisor, 1.0))
    if valid_count is not None:
        factor = tl.where(tl.load(valid_count) == 0, 0.0, factor)
    if factor != 1.0:
        start, step = tl.program_id(0).to(tl.int64) * BLOCK, tl.num_programs(0).to(tl.int64) * BLOCK
        for block in range(start, size, step):
            offsets = block + tl.arange(0, BLOCK)
            old = tl.load(gradient + offsets, mask=offsets < size)
            tl.store(gradient + offsets, (old.to(tl.float32) * factor).to(old.dtype), mask=offsets < size)


# A few thousand programs saturate the memory of any device, and cost 3 µs if the factor is 1 and all of them return.
_PROGRAMS_PER_MULTIPROCESSOR = 8
_SCALE_BLOCK = 4096


def scale_(
    gradients: Sequence[Tensor], grad: Tensor, valid_count: Tensor | None = None, expected: Tensor | None = None
) -> None:
    """`scaling.scaled_gradients` in place, for contiguous gradients in float32 or 16 bits.

    `valid_count` may have more elements, of which the first is read.
    """
    settings = settings_of(BLOCK=_SCALE_BLOCK, threads=_THREADS)
    for gradient in gradients:
        most = Device.of(gradient.device).multiprocessors * _PROGRAMS_PER_MULTIPROCESSOR
        if programs := min(-(-gradient.numel() // _SCALE_BLOCK), most):
            launch(_scale_kernel, programs, [gradient, grad, valid_count, expected], settings, gradient.numel())
