"""`thunderfx`, thunder behind `torch.compile`: the fusion rewrites Dynamo's graphs before thunder sees them."""

import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from thunder.core.jit_ext import register_general_jit_lookaside
from thunder.core.transform_common import Transform
from thunder.dynamo.compiler import ThunderCompiler, ThunderFXCompiledObject
from thunder.extend import Executor
from thunder.torch import _torch_to_thunder_function_map as torch_to_thunder_functions

from thunder_flce.backend import raising
from thunder_flce.dynamo.fusion import fuse
from thunder_flce.dynamo.reading import value_of
from thunder_flce.graph.plugin import with_fusion
from thunder_flce.graph.thunder_fixes import traced_by
from thunder_flce.graph.transform import FuseLinearCrossEntropy
from thunder_flce.matching.decisions import Decision, NotFusedError
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

    The linear and the loss have to be in one graph: a graph break before the linear does no harm, but a graph break
    between the two prevents fusion. A function that calls the model and uses only its loss is fused even if the model
    also returns its logits, since Dynamo removes unused outputs.

    Args:
        fn: the function or module to compile.
        options: as in `FuseLinearCrossEntropy`; not the `options` of `torch.compile`, which are for other backends.
        strict: as in `FuseLinearCrossEntropy`.
        executors: as in `thunder.jit`; `thunder_flce.executor` is put before them.
        transforms: as in `thunder.jit`; they see the fused losses.
        **compile_options: passed on to `torch.compile` if it has an argument of that name, otherwise to `thunder.jit`.

    Raises:
        TypeError: if `compile_options` has a field of `Options`, which thunder would ignore.
    """
    # thunder's `get_torch_compile_kwargs` would do the same, but removes lightning's wrapper of torch.compile.
    torch_arguments = inspect.signature(torch.compile).parameters
    torch_options = {name: value for name, value in compile_options.items() if name in torch_arguments}
    thunder_options = {name: value for name, value in compile_options.items() if name not in torch_options}
    fusion = FuseLinearCrossEntropy(options, strict=strict)
    # Without known sizes, no region can be planned: the transform says so.
    fusion.fuses = thunder_options.get("cache") == "symbolic values"
    backend = _Compiler(fusion, **with_fusion(fusion, executors, transforms, **thunder_options))
    return ThunderFXCompiledObject(backend, torch.compile(fn, backend=backend, **torch_options))


class _Compiler(ThunderCompiler):
    """thunder's backend; fuses a Dynamo graph before it passes the graph to thunder, unless the transform fuses."""

    def __init__(self, fusion: FuseLinearCrossEntropy, *, transforms: list[Transform], **thunder_options: Any):
        super().__init__(transforms=transforms, **thunder_options)
        self._fusion, self._transforms = fusion, tuple(transforms)
        self.decisions: list[list[Decision]] = []
        """One list for each graph"""

    def __call__(self, gm: torch.fx.GraphModule, sample_args: list[Any]) -> Any:
        # thunder appends its own transform to the list for each graph; a fresh list keeps it from growing.
        self.thunder_options["transforms"] = list(self._transforms)
        try:
            if not self._fusion.fuses:
                self.decisions.append(fuse(gm, self._fusion.options, strict=self._fusion.strict))
                _replace_aten_operations(gm)
        except NotFusedError as error:
            return raising(error)
        compiled = super().__call__(gm, sample_args)

        def call(*args: Any) -> Any:
            # If thunder splits a graph inside a no_grad block, the switch that ends the block may be lost.
            with torch.set_grad_enabled(torch.is_grad_enabled()):
                return compiled(*args)

        return call


def _replace_aten_operations(gm: torch.fx.GraphModule) -> None:
    """Replaces ATen operations, in which the weights of a sum are written, by functions that thunder knows.

    thunder would leave unknown functions to Inductor, which splits the graph. The parts cannot pass sizes that they
    compute to each other. Nor can thunder take two tensors of different sizes that share memory, if one is changed in
    place.
    """
    for node in gm.graph.nodes:
        if node.target is torch.sym_sum:
            node.target = sum
        elif node.target is torch.ops.aten.constant_pad_nd.default:
            node.target, node.args = F.pad, (*node.args[:2], "constant", *node.args[2:])
        elif node.target is torch.ops.aten.slice.Tensor and len(node.args) > 3 and not node.kwargs:
            input, dim, *ends = node.args
            index = [slice(None)] * value_of(input).ndim
            index[dim] = slice(*ends)
            node.target, node.args = operator.getitem, (input, tuple(index))
        elif isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "aten":
            name = _TORCH_NAMES.get(node.target._opname, node.target._opname)
            candidates = [getattr(namespace, name, None) for namespace in (torch, torch.Tensor)]
            if functions := [function for function in candidates if function in torch_to_thunder_functions]:
                node.target = functions[0]
                kwargs = {name: value for name, value in node.kwargs.items() if name not in ("layout", "pin_memory")}
                node.kwargs = {name: value for name, value in kwargs.items() if value is not torch.contiguous_format}
        if node.target is torch.detach:
            node.target = _detach
    gm.recompile()


_TORCH_NAMES = {"_to_copy": "to", "_unsafe_view": "reshape", "mm": "matmul", "mv": "matmul", "dot": "matmul"}


def _detach(input: Any) -> Any:
    """Calls `torch.detach`: thunder can trace that function, but leaves nodes that call it directly to Inductor."""
    return torch.detach(input)


torch_to_thunder_functions[_detach] = torch_to_thunder_functions[torch.detach]
register_general_jit_lookaside(_detach)(traced_by[torch.detach])
