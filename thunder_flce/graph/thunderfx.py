"""`thunderfx`, which is thunder behind `torch.compile`, and what Dynamo's graphs need before thunder reads them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from thunder.core.transform_common import Transform
from thunder.extend import Executor

from thunder_flce.graph.plugin import with_fusion
from thunder_flce.graph.thunder_private import ThunderCompiler, ThunderFXCompiledObject, get_torch_compile_kwargs
from thunder_flce.graph.transform import FuseLinearCrossEntropy
from thunder_flce.options import Options


def thunderfx(
    fn: Callable,
    /,
    *,
    options: Options | None = None,
    strict: bool = False,
    executors: Sequence[Executor | str] | None = None,
    transforms: Sequence[Transform] | None = None,
    **compile_options: Any,
) -> ThunderFXCompiledObject:
    """`thunder.dynamo.thunderfx`, thunder behind `torch.compile`, with linear + cross-entropy fused.

    The linear and the loss have to be in one graph: a graph break before the linear does no harm, one between the two
    prevents fusion. A function that calls the model and uses only its loss is fused even where the model also returns
    its logits, since Dynamo removes unused outputs.

    Args:
        fn: the function or module to compile.
        options: choices about the time and memory of the fused regions; not the `options` of `torch.compile`, which
            are for other backends.
        strict: raise a `NotFusedError`, with the reason, where a cross-entropy is not fused with its linear.
        executors: as in `thunder.jit`; `thunder_flce.executor` is put before them.
        transforms: as in `thunder.jit`; the fusion runs before them, on the program as the user wrote it.
        **compile_options: passed on to `torch.compile` or `thunder.jit`, whichever has them.
    """
    torch_options = get_torch_compile_kwargs(**compile_options)
    thunder_options = {name: value for name, value in compile_options.items() if name not in torch_options}
    fusion = FuseLinearCrossEntropy(options, strict=strict)
    backend = _Compiler(**with_fusion(fusion, executors, transforms), **thunder_options)
    return ThunderFXCompiledObject(backend, torch.compile(fn, backend=backend, **torch_options))


class _Compiler(ThunderCompiler):
    """thunder's backend, with graphs rewritten so that thunder compiles all of them."""

    def __init__(self, *, transforms: list[Transform], **thunder_options: Any):
        super().__init__(transforms=transforms, **thunder_options)
        self._transforms = tuple(transforms)

    def __call__(self, gm: torch.fx.GraphModule, sample_args: list[Any]) -> torch.fx.GraphModule:
        # thunder appends a transform of its own for each graph, and the list would grow.
        self.thunder_options["transforms"] = list(self._transforms)
        _spell_out_autocast(gm)
        _spell_out_ignore_index(gm)
        return super().__call__(gm, sample_args)


def _spell_out_autocast(gm: torch.fx.GraphModule) -> None:
    """Puts the casts of autocast into a graph, where a linear has operands of two floating-point dtypes.

    Only autocast allows that. Without the casts, thunder finds that it can't run such a linear by itself, and leaves
    each of them, the head included, to Inductor.
    """
    for node in gm.graph.find_nodes(op="call_function", target=F.linear):
        operands = [arg for arg in (*node.args, *node.kwargs.values()) if isinstance(arg, torch.fx.Node)]
        dtype = node.meta["example_value"].dtype
        if len({operand.meta["example_value"].dtype for operand in operands}) == 1:
            continue
        with gm.graph.inserting_before(node):
            for operand in operands:
                value = operand.meta["example_value"]
                if value.dtype != dtype:
                    cast = gm.graph.call_method("to", (operand, dtype))
                    cast.meta["example_value"] = value.to(dtype)
                    node.replace_input_with(operand, cast)


def _spell_out_ignore_index(gm: torch.fx.GraphModule) -> None:
    """Gives each nll_loss its default ignore_index, without which thunder can't differentiate it by itself."""
    for node in gm.graph.find_nodes(op="call_function", target=F.nll_loss):
        if len(node.args) <= 3 and "ignore_index" not in node.kwargs:
            node.update_kwarg("ignore_index", -100)
