"""Divergences in Triton; see `operation.divergence`.

Each program computes one row. It reads the student's and the teacher's logits for their maxima and sums, and a second
time for the divergence, where it also writes the gradient of the forward divergence or of the cross-entropy from the
teacher. For the gradients of the other divergences, it reads both a third time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from thunder_flce.engine.kernels.interface import LabelTerm
from thunder_flce.engine.kernels.launch import contiguous, kernel, launch, settings_of
from thunder_flce.engine.kernels.triton_rows import (
    _STATISTICS_BLOCKS,
    _block_for,
    _exp,
    _gradient,
    _logits,
    _row_statistics,
)
from thunder_flce.operation.divergence import Divergence


@triton.jit
def _load(row, columns, VOCAB: tl.constexpr):
    """Loads logits of a row, -inf beyond its end."""
    return tl.load(row + columns, mask=columns < VOCAB, other=float("-inf"))


@triton.jit
def _log_probabilities(z, largest, log_sum, SCALE: tl.constexpr, IS_EXACT: tl.constexpr):
    return _logits(z, SCALE, None, IS_EXACT) - largest - log_sum


@triton.jit
def _log_mixture(
    log_p, log_q, LOG_STUDENT: tl.constexpr, LOG_TEACHER: tl.constexpr, IS_EXACT: tl.constexpr
):  # fmt: skip
    first, second = log_p + LOG_STUDENT, log_q + LOG_TEACHER
    # A NaN is in the difference, but not in the maximum.
    return tl.maximum(first, second) + tl.log(1.0 + _exp(-tl.abs(first - second), IS_EXACT))


@triton.jit
def _weighted(probability, log, log_other):
    """Returns p (log - log_other), and 0 where p is 0."""
    return tl.where(probability == 0.0, 0.0, probability * (log - log_other))


@triton.jit
def _label_gradient(z, is_label, at_label, largest, log_sum, factor, IS_EXACT: tl.constexpr):
    """Returns the gradient of the cross-entropy times a factor; `at_label` is its entry at the label."""
    return tl.where(is_label, at_label, _gradient(z, largest, log_sum, factor, 1.0, None, IS_EXACT))


@kernel(3)
def _divergence_kernel(
    student, teacher, out, factors, target, row_max, row_log_sum, label_factors, divergence,
    STUDENT_STRIDE: tl.constexpr, TEACHER_STRIDE: tl.constexpr, OUT_STRIDE: tl.constexpr, VOCAB: tl.constexpr,
    SCALE: tl.constexpr, STUDENT_WEIGHT: tl.constexpr, TEACHER_WEIGHT: tl.constexpr,
    LOG_STUDENT: tl.constexpr, LOG_TEACHER: tl.constexpr, HAS_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    EXACT_STUDENT: tl.constexpr = student.dtype.element_ty == tl.float32
    EXACT_TEACHER: tl.constexpr = teacher.dtype.element_ty == tl.float32
    IS_EXACT: tl.constexpr = EXACT_STUDENT or EXACT_TEACHER
    index = tl.program_id(0)
    student += index.to(tl.int64) * STUDENT_STRIDE
    teacher += index.to(tl.int64) * TEACHER_STRIDE
    p_max, p_log_sum = _row_statistics(student, VOCAB, STUDENT_STRIDE, SCALE, None, BLOCK)
    q_max, q_log_sum = _row_statistics(teacher, VOCAB, TEACHER_STRIDE, SCALE, None, BLOCK)
    factor = 0.0
    if factors is not None:
        factor = tl.load(factors + index) * SCALE
        out += index.to(tl.int64) * OUT_STRIDE
    label, at_label, s_max, s_log_sum, label_factor = 0, 0.0, 0.0, 0.0, 0.0
    if target is not None:
        label, label_factor = tl.load(target + index), tl.load(label_factors + index)
        s_max, s_log_sum = tl.load(row_max + index), tl.load(row_log_sum + index)
        z_y = tl.load(student + label)
        at_label = _gradient(z_y, s_max, s_log_sum, label_factor, 1.0, None, IS_EXACT, label_factor)

    student_terms, teacher_terms = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, VOCAB, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        z = _load(student, columns, VOCAB)
        log_p = _log_probabilities(z, p_max, p_log_sum, SCALE, IS_EXACT)
        log_q = _log_probabilities(_load(teacher, columns, VOCAB), q_max, q_log_sum, SCALE, IS_EXACT)
        p, q = _exp(log_p, IS_EXACT), _exp(log_q, IS_EXACT)
        if STUDENT_WEIGHT == 0:
            teacher_terms += _weighted(q, log_q if HAS_ENTROPY else 0.0, log_p)
            if factors is not None:
                gradient = (p - q) * factor
                if target is not None:
                    gradient += _label_gradient(z, columns == label, at_label, s_max, s_log_sum, label_factor, IS_EXACT)
                tl.store(out + columns, gradient.to(out.dtype.element_ty), mask=columns < VOCAB)
        elif TEACHER_WEIGHT == 0:
            student_terms += _weighted(p, log_p, log_q)
        else:
            log_m = _log_mixture(log_p, log_q, LOG_STUDENT, LOG_TEACHER, IS_EXACT)
            student_terms += _weighted(p, log_p, log_m)
            teacher_terms += _weighted(q, log_q, log_m)
    mean = tl.sum(student_terms, 0)
    tl.store(divergence + index, STUDENT_WEIGHT * mean + TEACHER_WEIGHT * tl.sum(teacher_terms, 0))

    if factors is not None and STUDENT_WEIGHT != 0:
        factor *= STUDENT_WEIGHT
        for start in range(0, VOCAB, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            z = _load(student, columns, VOCAB)
            log_p = _log_probabilities(z, p_max, p_log_sum, SCALE, IS_EXACT)
            log_other = _log_probabilities(_load(teacher, columns, VOCAB), q_max, q_log_sum, SCALE, IS_EXACT)
            if TEACHER_WEIGHT != 0:
                log_other = _log_mixture(log_p, log_other, LOG_STUDENT, LOG_TEACHER, IS_EXACT)
            p = _exp(log_p, IS_EXACT)
            gradient = (_weighted(p, log_p, log_other) - p * mean) * factor
            if target is not None:
                gradient += _label_gradient(z, columns == label, at_label, s_max, s_log_sum, label_factor, IS_EXACT)
            tl.store(out + columns, gradient.to(out.dtype.element_ty), mask=columns < VOCAB)


def divergence_(
    student: Tensor, teacher: Tensor, divergence: Divergence, *, factors: Tensor | None, out: Tensor,
    labels: LabelTerm | None = None,
) -> Tensor:  # fmt: skip
    """Returns each row's divergence, (C,) float32: see `dispatch.divergence_for`."""
    rows, vocab = student.shape
    result = torch.empty(rows, dtype=torch.float32, device=student.device)
    log_student, log_teacher = divergence.log_shares or (0.0, 0.0)
    settings = settings_of(
        STUDENT_STRIDE=student.stride(0), TEACHER_STRIDE=teacher.stride(0), OUT_STRIDE=out.stride(0), VOCAB=vocab,
        SCALE=1 / divergence.temperature, STUDENT_WEIGHT=divergence.student_factor,
        TEACHER_WEIGHT=divergence.teacher_factor, LOG_STUDENT=log_student, LOG_TEACHER=log_teacher,
        HAS_ENTROPY=divergence.has_teachers_entropy, **_block_for(vocab, _STATISTICS_BLOCKS).settings,
    )  # fmt: skip
    label_vectors = (None,) * 4 if labels is None else (labels.target, *labels.statistics, labels.factors)
    launch(_divergence_kernel, rows, [student, teacher, out, *contiguous(factors, *label_vectors), result], settings)
    return result
