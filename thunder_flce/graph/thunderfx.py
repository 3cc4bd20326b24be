"""The door to thunder behind `torch.compile`: `thunderfx`, and what its graphs need before thunder reads them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from thunder.core.transform_common import Transform
from thunder.dynamo.compiler import ThunderCompiler, ThunderFXCompiledObject
from thunder.dynamo.utils import get_torch_compile_kwargs
from thunder.extend import Executor

from thunder_flce.graph.plugin import with_fusion
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
    keeps them apart. A function that calls the model and uses its loss only is fused even where the model returns its
    logits, too, since Dynamo leaves out what nobody uses.

    Args:
        fn: the function or module to compile.
        options: choices about the time and memory of the fused regions; not the `options` of `torch.compile`, which
            are for other backends.
        strict: raise a `NotFusedError`, with the reason, where a cross-entropy is not fused with its linear.
        executors: as in `thunder.jit`; `thunder_flce.executor` goes before them.
        transforms: as in `thunder.jit`; the fusion goes before them, since it needs to see the program as written.
        **compile_options: passed on to `torch.compile` or `thunder.jit`, whichever knows them.
    """
    torch_options = get_torch_compile_kwargs(**compile_options)
    thunder_options = {name: value for name, value in compile_options.items() if name not in torch_options}
    fusion = FuseLinearCrossEntropy(options, strict=strict)
    backend = _Compiler(**with_fusion(fusion, executors, transforms), **thunder_options)
    return ThunderFXCompiledObject(backend, torch.compile(fn, backend=backend, **torch_options))


class _Compiler(ThunderCompiler):
    """thunder's backend, with what its graphs need to reach thunder whole."""

    def __init__(self, *, transforms: list[Transform], **thunder_options: Any):
        super().__init__(transforms=transforms, **thunder_options)
        self._transforms = tuple(transforms)

    def __call__(self, gm: torch.fx.GraphModule, sample_args: list[Any]) -> torch.fx.GraphModule:
        # thunder appends one of its own for each graph, and would go on to do so.
        self.thunder_options["transforms"] = list(self._transforms)
        _spell_out_autocast(gm)
        _spell_out_ignore_index(gm)
        return super().__call__(gm, sample_args)


def _spell_out_autocast(gm: torch.fx.GraphModule) -> None:
    """Puts the casts of autocast into a graph, where a linear has operands of two floating-point dtypes.

    Only autocast allows that. Without the casts, thunder's test of whether it can run a node on its own would fail, and
    every such linear, the head among them, would go to Inductor.
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
    """Gives each nll_loss its default ignore_index, without which thunder can't differentiate it on its own."""
    for node in gm.graph.find_nodes(op="call_function", target=F.nll_loss):
        if len(node.args) <= 3 and "ignore_index" not in node.kwargs:
            node.update_kwarg("ignore_index", -100)
