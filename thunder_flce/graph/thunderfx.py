"""`thunderfx`, which is thunder behind `torch.compile`, and what Dynamo's graphs need before thunder reads them."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from thunder.core.transform_common import Transform
from thunder.extend import Executor

from thunder_flce.graph.plugin import with_fusion
from thunder_flce.graph.spelling import spell_out_casts, spell_out_ranges
from thunder_flce.graph.thunder_private import (
    ThunderCompiler,
    ThunderFXCompiledObject,
    auto_register_ops,
    get_torch_compile_kwargs,
)
from thunder_flce.graph.transform import FuseLinearCrossEntropy
from thunder_flce.loss_nodes import value_of
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


# thunder has these, but by default leaves them to Inductor, with the graph split there.
_KEPT = {
    *(torch.detach, torch.Tensor.detach, torch.narrow, torch.Tensor.narrow, torch.broadcast_tensors),
    *(torch.special.entr, torch.special.xlogy, torch.xlogy, torch.Tensor.xlogy, torch.nansum, torch.Tensor.nansum),
    F.kl_div,
}


class _Compiler(ThunderCompiler):
    """thunder's backend, with graphs rewritten so that thunder compiles all of them."""

    def __init__(self, *, transforms: list[Transform], **thunder_options: Any):
        super().__init__(transforms=transforms, **thunder_options)
        self._transforms = tuple(transforms)

    def __call__(self, gm: torch.fx.GraphModule, sample_args: list[Any]) -> torch.fx.GraphModule:
        # thunder appends a transform of its own for each graph, and the list would grow.
        self.thunder_options["transforms"] = list(self._transforms)
        spell_out_ranges(gm.graph)
        _put_in_position(gm)
        _spell_out_operations(gm)
        _spell_out_autocast(gm)
        _spell_out_ignore_index(gm)
        left_out = auto_register_ops & _KEPT
        auto_register_ops.difference_update(left_out)
        try:
            return super().__call__(gm, sample_args)
        finally:
            auto_register_ops.update(left_out)


def _spell_out_autocast(gm: torch.fx.GraphModule) -> None:
    """Puts the casts of autocast into a graph, where a linear or a matmul has operands of two floating-point dtypes.

    Only autocast allows that. Without the casts, thunder finds that it can't run such a linear by itself, and leaves
    each of them, the head included, to Inductor.
    """
    products = (F.linear, torch.matmul, operator.matmul)
    for node in [node for product in products for node in gm.graph.find_nodes(op="call_function", target=product)]:
        if len({value_of(operand).dtype for operand in node.all_input_nodes}) > 1:
            spell_out_casts(node)


def _spell_out_ignore_index(gm: torch.fx.GraphModule) -> None:
    """Gives each nll_loss its default ignore_index, without which thunder can't differentiate it by itself."""
    for node in gm.graph.find_nodes(op="call_function", target=F.nll_loss):
        if len(node.args) <= 3 and "ignore_index" not in node.kwargs:
            node.update_kwarg("ignore_index", -100)


def _put_in_position(gm: torch.fx.GraphModule) -> None:
    """Gives operations that are kept from Inductor their tensors by position: thunder differentiates no others."""
    for node in [node for node in gm.graph.nodes if node.target in _KEPT]:
        by_name = [name for name in ("input", "other", "target") if name in node.kwargs]
        node.args = (*node.args, *(node.kwargs[name] for name in by_name))
        node.kwargs = {name: value for name, value in node.kwargs.items() if name not in by_name}


def _spell_out_operations(gm: torch.fx.GraphModule) -> None:
    """Writes operations that thunder leaves to Inductor, which splits the graph, by others that mean the same."""
    for node in list(gm.graph.nodes):
        name = getattr(node.target, "__name__", node.target)
        is_method, others = node.op == "call_method", node.args[1:]
        if node.kwargs or not (is_method or node.target in (torch.min, torch.mm, torch.addmm)):
            continue
        if name == "min" and len(others) == 1 and isinstance(others[0], torch.fx.Node):
            node.op, node.target = "call_function", torch.minimum
        elif name == "where" and len(others) == 2:
            node.op, node.target, node.args = "call_function", torch.where, (others[0], node.args[0], others[1])
        elif name == "bool" and not others:
            node.target, node.args = "to", (*node.args, torch.bool)
        elif name == "mm":
            node.op, node.target = "call_function", torch.matmul
        elif name == "addmm" and len(others) == 2:
            _spell_out_addmm(gm.graph, node)


def _spell_out_addmm(graph: torch.fx.Graph, node: Any) -> None:
    bias, x, matrix = node.args
    value = matrix.meta["example_value"]
    # A linear does not broadcast its bias along the columns.
    if bias.meta["example_value"].shape != value.shape[1:]:
        return
    with graph.inserting_before(node):
        weight = graph.call_method("t", (matrix,))
    weight.meta["example_value"] = value.t()
    node.op, node.target, node.args = "call_function", F.linear, (x, weight, bias)
