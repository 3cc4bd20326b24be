"""Formulas of the divergences of a student's distribution from a teacher's, for each row.

For logits z of the student and z′ of the teacher, temperature τ and the rows' distributions

    p = softmax(z / τ),   q = softmax(z′ / τ),   m = β q + (1 − β) p

    "forward"          KL(q‖p) = Σ q log(q / p)                 dz = (p − q) / τ
    "cross_entropy"    - Σ q log p                              dz = (p − q) / τ
    "reverse"          D = KL(p‖q) = Σ p log(p / q)             dz = p (log(p / q) − D) / τ
    "jensen_shannon"   β KL(q‖m) + (1 − β) D, D = KL(p‖m)       dz = (1 − β) p (log(p / m) − D) / τ

The last is the generalized Jensen-Shannon divergence of GKD (arXiv:2306.13649), with β as in TRL's `GKDTrainer` and in
Liger's fused linear JSD: it weighs the teacher. The loss is not multiplied by τ².

With labels, a row's loss is its divergence, times its divergence weight, and - log softmax(z)_y, its cross-entropy at
temperature 1, times its label weight (arXiv:1503.02531).
"""

import math
from dataclasses import dataclass

from thunder_flce.options import PlainValues

KINDS = ("forward", "cross_entropy", "reverse", "jensen_shannon")


@dataclass(frozen=True, kw_only=True)
class Divergence(PlainValues):
    """Choice of a divergence, and its parameters."""

    kind: str = "forward"
    """One of `KINDS`"""
    beta: float = 0.5
    """β, for "jensen_shannon" only"""
    temperature: float = 1.0
    """τ"""

    @property
    def student_factor(self) -> float:
        """Weight of KL(p‖q), or of KL(p‖m), in the divergence."""
        return {"forward": 0.0, "cross_entropy": 0.0, "reverse": 1.0}.get(self.kind, 1 - self.beta)

    @property
    def teacher_factor(self) -> float:
        """Weight of KL(q‖p), of KL(q‖m), or of - Σ q log p, in the divergence."""
        return {"forward": 1.0, "cross_entropy": 1.0, "reverse": 0.0}.get(self.kind, self.beta)

    @property
    def has_teachers_entropy(self) -> bool:
        """Whether the teacher's entropy is subtracted, as in KL(q‖p), which is 0 if the student is the teacher."""
        return self.kind != "cross_entropy"

    @property
    def log_shares(self) -> tuple[float, float] | None:
        """Logarithms of the weights of p and q in the mixture m; None if the divergence has no mixture."""
        return (math.log1p(-self.beta), math.log(self.beta)) if self.kind == "jensen_shannon" else None
