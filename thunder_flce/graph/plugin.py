"""The user's doors to thunder: `jit` and the plugin "flce"."""

from collections.abc import Callable, Sequence
from typing import Any

import thunder
from thunder.core.transform_common import Transform
from thunder.extend import Executor
from thunder.plugins import register_plugin

from thunder_flce.graph.rules import executor
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
        executors: as in `thunder.jit`; `thunder_flce.executor` goes before them.
        transforms: as in `thunder.jit`; the fusion goes before them, since it needs to see the program as written.
        **thunder_options: passed on to `thunder.jit`.
    """
    fusion = FuseLinearCrossEntropy(options, strict=strict)
    return thunder.jit(fn, **with_fusion(fusion, executors, transforms), **thunder_options)


def with_fusion(
    fusion: FuseLinearCrossEntropy,
    executors: Sequence[Executor | str] | None,
    transforms: Sequence[Transform] | None,
) -> dict[str, Any]:
    """The executors and transforms to give to thunder, by argument; None stands for its defaults."""
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
        """The executor, which has to come before thunder's own."""
        return [executor]

    def setup_transforms(self) -> list[Transform]:
        """The fusion."""
        return [FuseLinearCrossEntropy(self.options, strict=self.strict)]


register_plugin("flce", FlcePlugin)
