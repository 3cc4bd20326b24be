"""Fused linear + cross-entropy for lightning-thunder; ARCHITECTURE.md says where to read on."""

from thunder_flce.execution.plan import Plan
from thunder_flce.functional import linear_cross_entropy
from thunder_flce.graph.executor import executor
from thunder_flce.graph.plugin import FlcePlugin, jit
from thunder_flce.graph.thunderfx import thunderfx
from thunder_flce.graph.transform import FuseLinearCrossEntropy, NotFusedError, NotFusedWarning
from thunder_flce.inspection.report import Report, explain
from thunder_flce.options import Options

__all__ = [
    "FlcePlugin",
    "FuseLinearCrossEntropy",
    "NotFusedError",
    "NotFusedWarning",
    "Options",
    "Plan",
    "Report",
    "executor",
    "explain",
    "jit",
    "linear_cross_entropy",
    "thunderfx",
]
