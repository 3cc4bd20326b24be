"""Fused linear + cross-entropy for lightning-thunder.

Reading order: `functional` (the operation), `plan` (how it is run), `engine` (running it), `row_kernels` and `products`
(what it is made of), `steps` and `cost` (what a plan runs, and what that takes); then, for thunder, `symbols`,
`printer`, `program`, `logits_path`, `match`, `pieces`, `transform`, `executor`, `plugin` and `fx`; and `inspection`,
which explains what was compiled.
"""

from thunder_flce.execution.plan import Plan
from thunder_flce.functional import linear_cross_entropy
from thunder_flce.graph.plugin import FlcePlugin, jit
from thunder_flce.graph.rules import executor
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
