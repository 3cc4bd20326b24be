"""What `thunderfx` made of a model: graphs, cut into parts that thunder compiles and parts that it does not.

Between the user's program and thunder stands Dynamo, whose graphs are programs of their own. The lines of the user's
source come from what Dynamo noted at each of their nodes.
"""

import linecache
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch.nn.functional as F
from torch.fx import GraphModule, Node

from thunder_flce.graph.matching.reasons import Reason
from thunder_flce.graph.thunder_private import CompilerType
from thunder_flce.graph.transform import Decision


@dataclass(frozen=True)
class Part:
    """A part of a graph and what compiles it."""

    name: str
    compiled_by: str
    """"thunder", "Inductor" or "eager PyTorch"."""

    compiled: Callable
    module: GraphModule

    def cross_entropies(self, why: str) -> list[Decision]:
        """A decision for each cross-entropy of a part that is not thunder's; `why` is why thunder cut the graph."""
        # What is checkpointed is a graph within the graph.
        graphs = [module.graph for module in self.module.modules() if isinstance(module, GraphModule)]
        nodes = [node for graph in graphs for node in graph.nodes if node.target is F.cross_entropy]
        detail = f"{self.compiled_by} does" + (f"; {why}" if why else "")
        return [Decision(_source_of(node) or self.name, reason=Reason.NOT_THUNDER, detail=detail) for node in nodes]

    def with_user_source(self, decision: Decision) -> Decision:
        """The same decision, but the line of the user's source instead of that of the graph's own code."""
        file, _, line = decision.source.rpartition(":")
        if not line.isdigit():
            return decision
        name = linecache.getline(file, int(line)).partition(" = ")[0].strip()
        node = next((node for node in self.module.graph.nodes if node.name == name), None)
        source = None if node is None else _source_of(node)
        return decision if source is None else replace(decision, source=source)


def parts(backend: Any) -> Iterator[tuple[Part, list[str]]]:
    """Each part of each graph that a `ThunderCompiler` has seen, and why its graph was cut."""
    for graph, info in enumerate(backend.subgraph_infos):
        reasons = [(r.info or r.exception or "").strip().partition("\n")[0] for r in info.split_reasons or []]
        for part, (module, compiled) in enumerate(info.submodule_to_compiled_functions.items()):
            compiled_by = "thunder"
            if compiled.compiler is not CompilerType.THUNDER:
                # Where Inductor declines, thunder puts the graph itself in place of a compiled one.
                compiled_by = "eager PyTorch" if isinstance(compiled.compiled_fn, GraphModule) else "Inductor"
            yield Part(f"graph {graph}, part {part}", compiled_by, compiled.compiled_fn, module), reasons


def _source_of(node: Node) -> str | None:
    frames = re.findall(r'File "(.+)", line (\d+)', node.meta.get("stack_trace") or "")
    return ":".join(frames[-1]) if frames else None
