"""`jit` and the plugin "flce": two ways to use the fusion with thunder. To import this module registers all rules."""

from collections.abc import Callable, Sequence
from typing import Any

import thunder
from thunder.core.transform_common import Transform
from thunder.extend import Executor
from thunder.plugins import register_plugin

import thunder_flce.graph.rules
import thunder_flce.graph.unfused_cross_entropy.rules  # noqa: F401
from thunder_flce.graph.executor import executor
from thunder_flce.graph.transform import FuseLinearCrossEntropy
from thunder_flce.options import Options


def jit(
    fn: Callable,
    /,
    *,
    options: Options | None = None,
    strict: bool = False,
    executors: Sequence[Executor | str] | None = None,
    transforms: Sequence[Transform] | None = None,
    **thunder_options: Any,
) -> Callable:
    """`thunder.jit` with linear + cross-entropy fused.

    Args:
        fn: the function or module to compile.
        options: choices about the time and memory of the fused regions.
        strict: raise a `NotFusedError`, with the reason, where a cross-entropy is not fused with its linear.
        executors: as in `thunder.jit`; `thunder_flce.executor` is put before them.
        transforms: as in `thunder.jit`; the fusion runs before them, on the program as the user wrote it.
        **thunder_options: passed on to `thunder.jit`.
    """
    fusion = FuseLinearCrossEntropy(options, strict=strict)
    return thunder.jit(fn, **with_fusion(fusion, executors, transforms), **thunder_options)


def with_fusion(
    fusion: FuseLinearCrossEntropy,
    executors: Sequence[Executor | str] | None,
    transforms: Sequence[Transform] | None,
) -> dict[str, Any]:
    """thunder's arguments `executors` and `transforms`; None means thunder's defaults."""
    executors = thunder.get_default_executors() if executors is None else executors
    return {"executors": [executor, *executors], "transforms": [fusion, *(transforms or ())]}


class FlcePlugin(thunder.Plugin):
    """Makes `thunder.compile(model, plugins="flce")` work.

    Args:
        options: choices about the time and memory of the fused regions.
        strict: raise a `NotFusedError`, with the reason, where a cross-entropy is not fused with its linear.
    """

    def __init__(self, options: Options | None = None, *, strict: bool = False):
        self.options = options
        self.strict = strict

    def setup_executors(self) -> list[Executor]:
        """The executor; thunder puts it before its own."""
        return [executor]

    def setup_transforms(self) -> list[Transform]:
        """The fusion."""
        return [FuseLinearCrossEntropy(self.options, strict=self.strict)]


register_plugin("flce", FlcePlugin)
