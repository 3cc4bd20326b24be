"""`jit` and the plugin "flce": two ways to use the fusion with thunder. To import this module registers all rules."""

import warnings
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

import thunder
import torch
from looseversion import LooseVersion
from thunder.core.transform_common import Transform
from thunder.extend import Executor
from thunder.plugins import register_plugin

import thunder_flce.graph.rules
import thunder_flce.graph.unfused_cross_entropy.rules  # noqa: F401
from thunder_flce.graph.executor import executor
from thunder_flce.graph.executor_alone import bring_fusion_along
from thunder_flce.graph.transform import FuseLinearCrossEntropy
from thunder_flce.options import Options

# thunder's interpreter does not know the decorators of newer versions.
_TRACED_TRANSFORMERS = "4.52.4"


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
        options: choices about the time and memory of the fused losses.
        strict: raise a `NotFusedError`, with the reason, where a cross-entropy is not fused with its linear.
        executors: as in `thunder.jit`; `thunder_flce.executor` is put before them.
        transforms: as in `thunder.jit`; the fusion runs before them, on the program as the user wrote it.
        **thunder_options: passed on to `thunder.jit`.
    """
    _warn_of_transformers(fn)
    fusion = FuseLinearCrossEntropy(options, strict=strict)
    return thunder.jit(fn, **with_fusion(fusion, executors, transforms), **thunder_options)


def _warn_of_transformers(fn: Callable) -> None:
    """Warns of a version of transformers that thunder cannot trace: thunder's own error does not name it."""
    modules = fn.modules() if isinstance(fn, torch.nn.Module) else ()
    if not any(type(module).__module__.startswith("transformers.") for module in modules):
        return
    installed = version("transformers")
    if LooseVersion(installed) > LooseVersion(_TRACED_TRANSFORMERS):
        warnings.warn(
            f"thunder.jit traces models of transformers up to {_TRACED_TRANSFORMERS}, and this is {installed}: use "
            'torch.compile(thunder_flce.loss_only(model), backend="thunder_flce") or thunder_flce.thunderfx',
            stacklevel=3,
        )


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
        options: choices about the time and memory of the fused losses.
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
bring_fusion_along()
