"""A student's divergence from a teacher, both as hidden states and a head: the logits of a chunk of tokens at a time.

The student's part is a region of `engine` in all but its row work: the rows that are computed, the matmuls and the sums
of dX and dW are the same. The teacher adds a second buffer of logits, and gets no gradient.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from thunder_flce.execution import steps
from thunder_flce.execution.gradient_accumulation import GradientSums
from thunder_flce.execution.layout import layout_for
from thunder_flce.execution.matmul import matmul
from thunder_flce.execution.operands import Gradients, Operands, UpstreamGradients
from thunder_flce.execution.plan import GradientsInForward, LossOnly
from thunder_flce.execution.region import Region
from thunder_flce.execution.row_kernels.dispatch import divergence_for
from thunder_flce.execution.row_kernels.interface import LogitsBuffer
from thunder_flce.execution.row_loss import RowGradients, RowScales
from thunder_flce.execution.row_selection import select_rows
from thunder_flce.operation.divergence import Divergence


class Teacher(NamedTuple):
    """Where the teacher's logits come from: x Wᵀ."""

    x: Tensor
    """(T, H′)"""
    weight: Tensor
    """(V, H′), x's dtype, which may be another than the student's"""


class DivergenceResult(NamedTuple):
    """What a run gives."""

    loss: Tensor
    """() or, for reduction "none", (T,)"""
    valid_count: Tensor
    """() int64"""
    gradients: Gradients | None
    """For the upstream gradient, where there is one"""


def run(
    operands: Operands,
    teacher: Teacher,
    divergence: Divergence,
    *,
    plan: GradientsInForward | LossOnly,
    upstream: Tensor | None = None,
) -> DivergenceResult:
    """The loss and, for an upstream gradient, the student's gradients.

    Args:
        operands: the student's; its targets only say which rows are ignored, and its loss how rows are reduced.
        teacher: over the same tokens and columns.
        divergence: of the rows.
        plan: the chunks, and how dW is summed.
        upstream: () or, for reduction "none", (T,) the gradient of the loss; None where no gradient is needed.

    Raises:
        IndexError: as `engine.forward`.
        ValueError: as `dispatch.divergence_for`.
    """
    region = Region(operands, plan)
    teacher_dtype = torch.promote_types(teacher.x.dtype, torch.float32) if plan.float32_logits else teacher.x.dtype
    dtypes = (region.logits_dtype, teacher_dtype)
    compute = divergence_for(plan.row_kernels, dtypes=dtypes, device_type=region.device_type)
    rows = select_rows(region).rows()
    scales = RowScales.of(region, rows)
    sums = factors = None
    if upstream is not None:
        assert isinstance(plan, GradientsInForward)
        sums = GradientSums(region, plan, rows)
        factors = RowGradients(region, scales, UpstreamGradients(upstream)).factors
    chunks = list(rows.chunks(plan.chunk_rows))
    largest = max((chunk.stop - chunk.start for chunk in chunks), default=0)
    buffer = steps.logits_buffer(region, largest)
    layout = layout_for(operands.vocab, dtype=teacher_dtype, device_type=region.device_type)
    memory = torch.empty(largest, layout.row_stride, dtype=teacher_dtype, device=operands.device)
    teacher_buffer = LogitsBuffer(memory, layout)
    values = []
    for chunk in chunks:
        taken = slice(0, chunk.stop - chunk.start)
        student_logits, teacher_logits = buffer.rows(taken), teacher_buffer.rows(taken)
        x = rows.gather_chunk(teacher.x, chunk)
        matmul.logits_(
            teacher_logits.logits, x, teacher.weight, tune=plan.tune_products, batch_invariant=plan.batch_invariant
        )
        xs = [rows.gather_chunk(region.terms[0].x, chunk)] if sums is None else sums.gather(chunk)
        steps.logits_(region, student_logits, xs)
        dlogits = student_logits if sums is None else student_logits.in_dtype(operands.dtype)
        of_chunk = None if factors is None else factors[chunk]
        compared = student_logits, teacher_logits, divergence
        values.append(compute(*compared, factors=None if plan.batch_invariant else of_chunk, out=dlogits))
        if plan.batch_invariant and of_chunk is not None:
            # A kernel that makes values and gradients may add in another order. Each adds a row up by itself: PyTorch
            # would divide a sum of more than 2¹⁵ numbers among threads only if it is alone, but `torch_divergence`
            # takes such rows one at a time anyway.
            compute(*compared, factors=of_chunk, out=dlogits)
        if sums is not None:
            sums.add(dlogits, xs, chunk, None)
        del x, xs, dlogits
    del buffer, teacher_buffer, memory
    of_rows = torch.cat([torch.empty(0, dtype=operands.row_dtype, device=operands.device), *values])
    value = operands.loss.reduce([(rows.mask_ignored(of_rows.to(operands.row_dtype)), scales.divisor)])
    value = rows.returned(value) if operands.loss.reduction == "none" else value
    return DivergenceResult(value, rows.valid_count, None if sums is None else sums.finish())
