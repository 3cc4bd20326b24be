"""Fuses linear + cross-entropy in Dynamo's graph, before AOTAutograd and Inductor see it."""

from operator import attrgetter
from typing import Any

from torch._dynamo.utils import _disable_saved_tensors_hooks_during_tracing
from torch._higher_order_ops import wrap
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from thunder_flce.dynamo.lengths import are_small
from thunder_flce.dynamo.reading import body_of, is_checkpoint, read
from thunder_flce.dynamo.writing import write_regions
from thunder_flce.matching.decisions import Decision, Reason, in_order, report
from thunder_flce.matching.interpreter import Interpreter
from thunder_flce.matching.match import match
from thunder_flce.matching.order import ordered
from thunder_flce.matching.regions import Region
from thunder_flce.options import Options


@_disable_saved_tensors_hooks_during_tracing()  # A checkpoint around the program would count our fake tensors.
def fuse(gm: GraphModule, options: Options, *, strict: bool, leaves_small: bool = False) -> list[Decision]:
    """Replaces each loss that can be fused by the operator `linear_cross_entropy`, in a graph and in those within it.

    Args:
        gm: the graph, which is changed.
        options: choices about time and memory.
        strict: raise if a loss, or a result that it may be computed from, is not fused with its linear.
        leaves_small: leave losses as they are if fusion would gain nothing.

    Returns:
        The decision about each loss, log-probability and entropy.

    Raises:
        NotFusedError: if `strict`, with the source and the reason of each result that is not fused.
    """
    decisions: list[Decision] = []
    graphs = [module for module in gm.modules() if isinstance(module, GraphModule)]
    bodies = {body_of(each, node) for each in graphs for node in each.graph.nodes if is_checkpoint(node)}
    for each in graphs:
        if each not in bodies:
            decisions += _fuse(each, options, leaves_small=leaves_small)
    report(decisions, strict=strict)
    return decisions


def _fuse(gm: GraphModule, options: Options, *, leaves_small: bool) -> list[Decision]:
    interpreter, regions, refused = match(read(gm), options)
    if leaves_small and options == Options() and regions and are_small(regions):
        small_parts = [(part.line, part.kind) for region in regions for part in region.parts]
        decisions = [Decision(line, reason=Reason.LEFT_TO_INDUCTOR, kind=kind) for line, kind in small_parts]
        return in_order([*decisions, *refused])
    while checkpoints := _checkpoints_of(regions, interpreter, gm):
        for checkpoint in checkpoints:
            _open(gm, checkpoint)
        interpreter, regions, refused = match(read(gm), options)
    if not regions:
        return in_order(refused)
    decisions = write_regions(gm, regions, interpreter, options)
    gm.recompile()
    return in_order([*decisions, *refused])


def _checkpoints_of(regions: list[Region], interpreter: Interpreter, gm: GraphModule) -> list[Any]:
    """Returns the checkpoints with operations that regions replace or differentiate, or with tensors that they read.

    They are in the graph's order: the names of the nodes that are opened depend on it, and are in the key of PyTorch's
    disk cache.
    """
    order = ordered(regions, interpreter)
    read_tensors = {tensor for region in regions for tensor in region.read_at}
    inside = {tensor.op for tensor in read_tensors if tensor.op is not None and tensor.handle.graph is not gm.graph}
    linear = {op for region in regions if region.total is not None for op in region.total.ops}
    return sorted({op.inside for op in {*interpreter.program.ops}.difference(order) | inside | linear} - {None})


def _open(gm: GraphModule, checkpoint: Any) -> None:
    """Inlines the operations of a checkpointed function, tagged as recomputed in the backward.

    AOTAutograd tags them in the same way when it traces the function. A function with a policy of its own
    (`context_fn`) is not inlined, since PyTorch has to run the policy.
    """
    body, (_, *operands) = body_of(gm, checkpoint), checkpoint.args
    graph_id = next(wrap.uid)
    for node in body.graph.nodes:
        if node.op.startswith("call_"):
            node.meta |= {"ac_graph_id": graph_id, "recompute": CheckpointPolicy.PREFER_RECOMPUTE}
            # PyTorch's disk cache has the code of a graph in its key, with names, but not these tags.
            node._rename(f"recomputed_{node.name}")
    inner: dict[Node, Any] = dict(zip(body.graph.find_nodes(op="placeholder"), operands, strict=True))
    for node in body.graph.find_nodes(op="get_attr"):
        # Under the body's names, the outer graph may have other attributes.
        name = f"{checkpoint.name}_{node.name}"
        setattr(gm, name, attrgetter(str(node.target))(body))
        node.target = name
    with gm.graph.inserting_before(checkpoint):
        results: Any = gm.graph.graph_copy(body.graph, inner)
    for user in list(checkpoint.users):
        user.replace_all_uses_with(results[user.args[1]])
        gm.graph.erase_node(user)
    gm.graph.erase_node(checkpoint)
    gm.graph.eliminate_dead_code(lambda node: node.op != "get_attr")
    gm.delete_all_unused_submodules()
