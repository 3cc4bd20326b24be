"""Fuses linear + cross-entropy in a graph of Dynamo's, before AOTAutograd and Inductor see it."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from thunder.common import CompileData
from thunder.core.trace import TraceCtx
from torch.fx import Graph, GraphModule, Node

from thunder_flce.calls import unplanned
from thunder_flce.graph.decisions import Decision
from thunder_flce.graph.dynamo.checkpoints import open_checkpoints
from thunder_flce.graph.dynamo.sizes import Sizes
from thunder_flce.graph.dynamo.tracing import source_of, trace_region
from thunder_flce.graph.dynamo.writing import not_writable, write_back
from thunder_flce.graph.matching.reasons import Reason
from thunder_flce.graph.rules import PlannedRegion
from thunder_flce.graph.spelling import put_back_in_place
from thunder_flce.graph.thunder_private import compile_data_and_stats
from thunder_flce.graph.trace_arguments import call_of, specs
from thunder_flce.graph.transform import Compilation, FuseLinearCrossEntropy
from thunder_flce.loss_nodes import is_call, name_of, region_ends, sources_above, value_of
from thunder_flce.operators import plan_for
from thunder_flce.options import Options


@dataclass(frozen=True)
class Fusion:
    """What was done to one graph."""

    compilation: Compilation
    after: TraceCtx
    """The region's trace after the transform."""
    tracing_seconds: float
    """Time to trace the region and to write it back."""


def fuse(gm: GraphModule, options: Options, *, strict: bool) -> list[Fusion]:
    """Puts the operator `linear_cross_entropy` into a graph, and into those within it, for each loss that it can be.

    Args:
        gm: the graph, which is changed.
        options: choices about time and memory.
        strict: raise where a loss, or what one may be made of, is not fused with its linear.

    Returns:
        A fusion for each graph that has a loss, or may have a log-probability or an entropy.

    Raises:
        NotFusedError: where `strict`, with the source and the reason of each one that is not fused.
    """
    open_checkpoints(gm)
    graphs = [module for module in gm.modules() if isinstance(module, GraphModule)]
    found = [_fuse(module, options, strict) for module in graphs if region_ends(module.graph)]
    for module in graphs:
        module.recompile()
    return found


def _fuse(gm: GraphModule, options: Options, strict: bool) -> Fusion:
    start = time.perf_counter()
    # thunder's functions ask it whether gradients are enabled; of each tensor, Dynamo knows that.
    with compile_data_and_stats(CompileData(fn=gm, executors_list=(), disable_preprocessing=True), None):
        region = trace_region(gm.graph)
        transform = _FuseForInductor(region.sizes, options, strict=strict)
        _, trace, _ = transform.transform_traces_pre_prologue(None, region.trace, None)
    (compilation,) = transform.compilations
    # AOTAutograd makes Dynamo start again where a float is symbolic that has to be a number.
    decisions = [
        Decision(source_of(loss) or loss.name, reason=Reason.DYNAMIC if sources_above(loss) else Reason.NO_LINEAR)
        for loss in region.losses_not_traced()
        if not any(isinstance(value_of(operand), torch.SymFloat) for operand in loss.all_input_nodes)
    ]
    if name := not_writable(region, trace):
        fused = [decision for decision in compilation.decisions if decision.fused]
        decisions += [replace(each, region=None, reason=Reason.NOT_WRITTEN, detail=name) for each in fused]
        compilation.decisions = [decision for decision in compilation.decisions if not decision.fused]
        trace = region.trace
    else:
        write_back(region, trace, options)
    put_back_in_place(region.out_of_place, set(gm.graph.nodes))
    if not compilation.decisions and not decisions and (node := _normaliser(gm.graph)) is not None:
        source = source_of(node) or node.name
        decisions.append(Decision(source, reason=Reason.NOT_FOLLOWED, kind="log-probability"))
    compilation.decisions += decisions
    transform.report(decisions)
    return Fusion(compilation, trace, time.perf_counter() - start - compilation.seconds)


def _normaliser(graph: Graph) -> Node | None:
    """What a loss that was not recognised may be made of: a log_softmax of a linear's, that needs a gradient."""
    for node in graph.nodes:
        if is_call(node) and name_of(node) in ("log_softmax", "logsumexp") and sources_above(node):
            value = value_of(node)
            if isinstance(value, torch.Tensor) and value.requires_grad:
                return node
    return None


class _FuseForInductor(FuseLinearCrossEntropy):
    """The transform for regions that become the operator, which makes its plan when it runs."""

    def __init__(self, sizes: Sizes, options: Options, *, strict: bool):
        super().__init__(options, strict=strict)
        self._sizes = sizes

    def plan(self, region: Mapping[str, Any], needs_grad: tuple[str, ...]) -> PlannedRegion:
        """The plan that the operator will make for the sizes of the call that is compiled."""
        call = specs(call_of(region, needs_grad), self._sizes.hint)
        return PlannedRegion(call, plan_for(call, unplanned(call, self.options).options or self.options))
