"""What `thunderfx` made of a model: graphs, cut into parts that thunder compiles and parts that it does not.

Between the user's program and thunder stands Dynamo, whose graphs are programs of their own. The lines of the user's
source come from what Dynamo noted at each of their nodes.
"""

import linecache
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.nn.functional as F
from torch.fx import GraphModule, Node

from thunder_flce.graph.decisions import Decision
from thunder_flce.graph.dynamo.tracing import source_of
from thunder_flce.graph.matching.reasons import Reason
from thunder_flce.graph.thunder_private import CompilerType


@dataclass(frozen=True)
class Part:
    """A part of a graph, or a jitted function, and what compiles it."""

    name: str
    compiled_by: str
    """"thunder", "Inductor" or "eager PyTorch"."""

    compiled: Callable
    nodes: Sequence[Node] = ()
    """The nodes of its graph, and of graphs within it, such as checkpointed functions; none for a jitted function."""

    split_reasons: Sequence[str] = ()
    """Why thunder cut the graph."""

    def cross_entropies(self) -> list[Decision]:
        """A decision for each cross-entropy, where the part is not thunder's."""
        nodes = [node for node in self.nodes if node.target is F.cross_entropy]
        detail = "; ".join((f"{self.compiled_by} does", *filter(None, self.split_reasons)))
        return [Decision(source_of(node) or self.name, reason=Reason.NOT_THUNDER, detail=detail) for node in nodes]

    def with_user_source(self, decision: Decision) -> Decision:
        """The decision with the line of the user's source in place of the line of the graph's own code."""
        name = source_line(decision).partition(" = ")[0]
        source = next((source_of(node) for node in self.nodes if node.name == name), None)
        return decision if source is None else replace(decision, source=source)


def source_line(decision: Decision) -> str:
    """The line of code that a decision is about; "" where it is unknown."""
    file, _, line = decision.source.rpartition(":")
    return linecache.getline(file, int(line)).strip() if line.isdigit() else ""


def parts(backend: Any) -> Iterator[Part]:
    """Each part of each graph that a `ThunderCompiler` has seen."""
    for number, info in enumerate(backend.subgraph_infos):
        reasons = [(r.info or r.exception or "").strip().partition("\n")[0] for r in info.split_reasons or []]
        for part, (module, compiled) in enumerate(info.submodule_to_compiled_functions.items()):
            compiled_by = "thunder"
            if compiled.compiler is not CompilerType.THUNDER:
                # Where Inductor declines, thunder puts the graph itself in place of a compiled one.
                compiled_by = "eager PyTorch" if isinstance(compiled.compiled_fn, GraphModule) else "Inductor"
            graphs = [inner.graph for inner in module.modules() if isinstance(inner, GraphModule)]
            nodes = [node for graph in graphs for node in graph.nodes]
            yield Part(f"graph {number}, part {part}", compiled_by, compiled.compiled_fn, nodes, reasons)
