"""The executor brings the fusion along: `thunder.jit(model, executors=[thunder_flce.executor, …])` is enough.

thunder asks a table how to trace a function. What stands there for a linear and for a loss first sees to it that the
program's list of transforms, which thunder reads once the program is traced, has a fusion.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from thunder_flce.graph.executor import executor
from thunder_flce.graph.thunder_private import general_jit_lookasides, get_compile_data, register_general_jit_lookaside
from thunder_flce.graph.transform import FuseLinearCrossEntropy
from thunder_flce.matching.decisions import NotFusedWarning

# One of them is in every language model: methods such as `logits.log_softmax(-1)` thunder looks up elsewhere.
_FUNCTIONS = (F.linear, F.embedding, torch.matmul, F.cross_entropy, F.nll_loss, F.log_softmax, torch.logsumexp)


def add_fusion() -> None:
    """Puts a fusion before the other transforms of the program that is traced, if it has none."""
    data = get_compile_data()
    if executor not in getattr(data, "executors_list", ()):
        return
    transforms = getattr(data, "transforms", ())
    # `thunderfx` and the plugin have one; so has a program whose fusion waits until thunder has distributed it.
    if any(isinstance(each, FuseLinearCrossEntropy) or hasattr(each, "fusion") for each in transforms):
        return
    if isinstance(transforms, list):
        transforms.insert(0, FuseLinearCrossEntropy())
    else:
        warnings.warn(
            "thunder_flce: give thunder.jit its transforms as a list, or FuseLinearCrossEntropy() among them; of a "
            f"{type(transforms).__name__}, the executor cannot fuse linear + cross-entropy",
            NotFusedWarning,
            stacklevel=2,
        )


def _with_fusion(trace: Callable) -> Callable:
    def lookaside(*args: Any, **kwargs: Any) -> Any:
        add_fusion()
        return trace(*args, **kwargs)

    return lookaside


def bring_fusion_along() -> None:
    """Registers this with thunder."""
    for function in _FUNCTIONS:
        register_general_jit_lookaside(function)(_with_fusion(general_jit_lookasides[function]))
