"""Fused linear + cross-entropy for PyTorch and lightning-thunder; ARCHITECTURE.md describes the code."""

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

from thunder_flce.engine.plan import Plan
from thunder_flce.functional import linear_cross_entropy
from thunder_flce.inspection.explain import explain
from thunder_flce.inspection.report import Report
from thunder_flce.integrations.transformers import LossTrainerMixin
from thunder_flce.integrations.trl import replace_trl_head
from thunder_flce.kl_divergence import linear_kl_divergence
from thunder_flce.labels import count_items, shift_labels
from thunder_flce.matching.decisions import NotFusedError, NotFusedWarning
from thunder_flce.modules import LinearCrossEntropyLoss, loss_only
from thunder_flce.options import Options
from thunder_flce.registration import THUNDER_VERSIONS, register_with_thunder
from thunder_flce.vocab_parallel import VocabParallel

__version__ = "0.2.0"

__all__ = [
    "FlcePlugin",
    "FuseLinearCrossEntropy",
    "LinearCrossEntropyLoss",
    "LossTrainerMixin",
    "NotFusedError",
    "NotFusedWarning",
    "Options",
    "Plan",
    "Report",
    "VocabParallel",
    "count_items",
    "executor",
    "explain",
    "jit",
    "linear_cross_entropy",
    "linear_kl_divergence",
    "loss_only",
    "replace_trl_head",
    "shift_labels",
    "thunderfx",
]

if TYPE_CHECKING:
    from thunder_flce.graph.plugin import FlcePlugin, jit
    from thunder_flce.graph.symbols import executor
    from thunder_flce.graph.thunderfx import thunderfx
    from thunder_flce.graph.transform import FuseLinearCrossEntropy
else:
    # Importing thunder takes seconds, and fails with some versions of PyTorch. Only these names need it, so they are
    # imported when they are first used (PEP 562).
    _NEED_THUNDER = {
        "FlcePlugin": "graph.plugin",
        "FuseLinearCrossEntropy": "graph.transform",
        "executor": "graph.symbols",
        "jit": "graph.plugin",
        "thunderfx": "graph.thunderfx",
    }

    def __getattr__(name: str) -> Any:
        if name not in _NEED_THUNDER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            with warnings.catch_warnings():
                # thunder warns about a missing executor, which this package does not use.
                warnings.filterwarnings("ignore", message="transformer_engine module not found")
                value = getattr(import_module(f"{__name__}.{_NEED_THUNDER[name]}"), name)
        except Exception as error:
            without = [other for other in __all__ if other not in _NEED_THUNDER]
            raise ImportError(
                f"{__name__}.{name} needs lightning-thunder {THUNDER_VERSIONS}, whose import failed with "
                f"{type(error).__name__}: {error}. These names work without it: {', '.join(without)}"
            ) from error
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


register_with_thunder()
