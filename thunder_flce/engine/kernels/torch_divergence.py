"""Divergences in PyTorch's operations; see `operation.divergence`."""

import torch
from torch import Tensor

from thunder_flce.engine.kernels.interface import LabelTerm
from thunder_flce.engine.kernels.torch_rows import row_blocks, sums_of_rows
from thunder_flce.operation.divergence import Divergence


def divergence_(
    student: Tensor, teacher: Tensor, divergence: Divergence, *, factors: Tensor | None, out: Tensor,
    labels: LabelTerm | None = None,
) -> Tensor:  # fmt: skip
    """Returns each row's divergence, (C,), in the wider row dtype of the two logits: see `dispatch.divergence_for`."""
    dtype = torch.promote_types(torch.promote_types(student.dtype, teacher.dtype), torch.float32)
    result = torch.empty(student.shape[0], dtype=dtype, device=student.device)
    # About eight temporaries of the size of a block of logits are alive at a time.
    for rows in row_blocks(student, 8):
        log_p, log_q = ((z[rows].to(dtype) / divergence.temperature).log_softmax(1) for z in (student, teacher))
        log_m = None
        if (shares := divergence.log_shares) is not None:
            # Not logaddexp: on a CPU, its last digit depends on where an element is in the block.
            ours, theirs = log_p + shares[0], log_q + shares[1]
            log_m = (ours - theirs).abs_().neg_().exp_().log1p_().add_(torch.maximum(ours, theirs))
        p, q = log_p.exp(), log_q.exp()
        value, student_ratio = result[rows].zero_(), None
        if divergence.teacher_factor:
            teacher_ratio = _ratio(
                log_q if divergence.has_teachers_entropy else 0.0, log_p if log_m is None else log_m, q
            )
            value += divergence.teacher_factor * sums_of_rows(teacher_ratio.mul_(q))
        if divergence.student_factor:
            student_ratio = _ratio(log_p, log_q if log_m is None else log_m, p)
            mean = sums_of_rows(p * student_ratio)
            value += divergence.student_factor * mean
            student_ratio.sub_(mean[:, None])
        if factors is not None:
            gradient = p.sub_(q) if student_ratio is None else p.mul_(student_ratio).mul_(divergence.student_factor)
            gradient.mul_(factors[rows, None] / divergence.temperature)
            if labels is not None:
                gradient.add_(_label_gradient(student[rows].to(dtype), labels, rows))
            out[rows] = gradient.to(out.dtype)
    return result


def _label_gradient(z: Tensor, labels: LabelTerm, rows: slice) -> Tensor:
    """Returns the gradient of the cross-entropy of some rows, times their factors, from their logits (C, V)."""
    target, factors = labels.target[rows, None], labels.factors[rows, None]
    log_s = z.sub_(labels.statistics.row_max[rows, None]).sub_(labels.statistics.row_log_sum[rows, None])
    at_target = log_s.gather(1, target).expm1_()
    return log_s.exp_().scatter_(1, target, at_target).mul_(factors)


def _ratio(log: Tensor | float, log_other: Tensor, probability: Tensor) -> Tensor:
    """Returns the logarithm of a quotient of probabilities, and 0 where `probability`, its later factor, is 0."""
    return (log - log_other).masked_fill_(probability == 0, 0)
