"""Three ways to use the fusion with thunder: `jit`, the plugin "flce", and the executor alone.

Importing this module registers all rules.
"""

import difflib
import warnings
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

import thunder
import torch
import torch.nn.functional as F
from looseversion import LooseVersion
from thunder.core.compile_data import get_compile_data
from thunder.core.jit_ext import register_general_jit_lookaside
from thunder.core.transform_common import Transform
from thunder.extend import Executor
from thunder.plugins import register_plugin

import thunder_flce.graph.rules
import thunder_flce.graph.unfused_cross_entropy.rules  # noqa: F401
from thunder_flce.graph import thunder_fixes
from thunder_flce.graph.symbols import executor
from thunder_flce.graph.transform import FuseLinearCrossEntropy
from thunder_flce.matching.decisions import NotFusedWarning
from thunder_flce.options import OPTIONS, Options

# thunder's interpreter cannot trace the decorators of newer versions of transformers.
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
        options: as in `FuseLinearCrossEntropy`.
        strict: as in `FuseLinearCrossEntropy`.
        executors: as in `thunder.jit`; `thunder_flce.executor` is put before them.
        transforms: as in `thunder.jit`. The fusion runs before them, on the program as the user wrote it, but after
            thunder's transforms that put adapters, quantized weights or sharded weights into linears.
        **thunder_options: passed on to `thunder.jit`.

    Raises:
        TypeError: if `thunder_options` has a field of `Options` or a misspelt argument of `jit`; thunder would ignore
            both.
    """
    _warn_of_transformers(fn)
    fusion = FuseLinearCrossEntropy(options, strict=strict)
    return thunder.jit(fn, **with_fusion(fusion, executors, transforms, **thunder_options))


def _warn_of_transformers(fn: Callable) -> None:
    """Warns if thunder cannot trace the installed version of transformers; thunder's own error does not say so."""
    modules = fn.modules() if isinstance(fn, torch.nn.Module) else ()
    if not any(type(module).__module__.startswith("transformers.") for module in modules):
        return
    installed = version("transformers")
    if LooseVersion(installed) > LooseVersion(_TRACED_TRANSFORMERS):
        warnings.warn(
            f"thunder.jit traces models of transformers up to {_TRACED_TRANSFORMERS}, not of {installed}: use "
            'torch.compile(thunder_flce.loss_only(model), backend="thunder_flce") or thunder_flce.thunderfx',
            stacklevel=3,
        )


def with_fusion(
    fusion: FuseLinearCrossEntropy,
    executors: Sequence[Executor | str] | None,
    transforms: Sequence[Transform] | None,
    **thunder_options: Any,
) -> dict[str, Any]:
    """Returns arguments for thunder, with our executor and the fusion added, and checks the names of all others.

    None as `executors` means thunder's defaults. thunder accepts any name, and silently ignores those that it does not
    know, such as fields of our `Options`.
    """
    if ours := [name for name in thunder_options if name in OPTIONS]:
        raise TypeError(f"{ours[0]} is no argument but a field of Options: options=thunder_flce.Options({ours[0]}=…)")
    argument_names = ("options", "strict", "executors", "transforms", *OPTIONS)
    for name in thunder_options:
        if matches := difflib.get_close_matches(name, argument_names, n=1, cutoff=0.8):
            raise TypeError(f"{name} is no argument; did you mean {matches[0]}?")
    executors = thunder.get_default_executors() if executors is None else executors
    return {"executors": [executor, *executors], "transforms": [fusion, *(transforms or ())], **thunder_options}


class FlcePlugin(thunder.Plugin):
    """Makes `thunder.compile(model, plugins="flce")` work; takes the arguments of `FuseLinearCrossEntropy`.

    With arguments, pass the plugin itself: `plugins=[thunder_flce.FlcePlugin(options)]`. thunder's default recipe needs
    nvFuser; without it, pass `recipe=thunder.recipes.BaseRecipe(fuser="torch.compile")`.
    """

    def __init__(self, options: Options | None = None, *, strict: bool = False):
        self.options = options
        self.strict = strict

    def setup_executors(self) -> list[Executor]:
        """Our executor; thunder puts it before its own executors."""
        return [executor]

    def setup_transforms(self) -> list[Transform]:
        """The fusion."""
        return [FuseLinearCrossEntropy(self.options, strict=self.strict)]


register_plugin("flce", FlcePlugin)


# The executor alone: `thunder.jit(model, executors=[thunder_flce.executor, …])`. thunder looks up in a table (of
# "lookasides") how to trace a function. Our entries for linears and losses first add a fusion to the program's list of
# transforms, which thunder reads after tracing.


def add_fusion() -> None:
    """Inserts a fusion as the first transform of the program being traced, if that has our executor but no fusion."""
    data = get_compile_data()
    if executor not in getattr(data, "executors_list", ()):
        return
    transforms = getattr(data, "transforms", ())
    # `jit`, `thunderfx` and the plugin have added one already.
    if any(isinstance(transform, FuseLinearCrossEntropy) for transform in transforms):
        return
    if isinstance(transforms, list):
        transforms.insert(0, FuseLinearCrossEntropy())
    else:
        warnings.warn(
            "thunder_flce: give thunder.jit its transforms as a list, or FuseLinearCrossEntropy() among them: the "
            f"executor cannot add the fusion to a {type(transforms).__name__}, so nothing is fused",
            NotFusedWarning,
            stacklevel=2,
        )


def _with_fusion(function: Callable) -> Callable:
    def lookaside(*args: Any, **kwargs: Any) -> Any:
        add_fusion()
        return thunder_fixes.traced_by[function](*args, **kwargs)

    return lookaside


# Every language model calls one of these functions. thunder looks up methods, such as `logits.log_softmax(-1)`,
# elsewhere.
for _function in (
    F.linear, F.embedding, torch.matmul, torch.mm, torch.einsum, F.cross_entropy, F.nll_loss, F.log_softmax,
    torch.log_softmax, F.softmax, torch.softmax, torch.logsumexp,
):  # fmt: skip
    register_general_jit_lookaside(_function)(_with_fusion(_function))
