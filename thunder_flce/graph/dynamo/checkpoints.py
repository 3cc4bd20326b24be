"""Opens the checkpointed functions that a loss region reaches into."""

from operator import attrgetter
from typing import Any

from torch._higher_order_ops import wrap
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from thunder_flce.loss_nodes import above_ends, region_ends


def open_checkpoints(gm: GraphModule) -> None:
    """Puts the operations of a checkpointed function in its place, tagged as what the backward computes again.

    Only where it has a loss, or the logits of one. PyTorch tags them just so, when AOTAutograd traces the function. Not
    with a policy of its own (`context_fn`), for which PyTorch has to run it.
    """
    while (checkpoint := _checkpoint_of_a_region(gm)) is not None:
        _open(gm, checkpoint)


def _checkpoint_of_a_region(gm: GraphModule) -> Node | None:
    checkpoints = {
        node: _body(gm, node)
        for node in gm.graph.find_nodes(op="call_function", target=wrap.tag_activation_checkpoint)
        if "_checkpoint_context_fn" not in _body(gm, node).meta
    }
    above = above_ends(gm.graph) if checkpoints else ()
    return next((node for node, body in checkpoints.items() if node in above or region_ends(body.graph)), None)


def _body(gm: GraphModule, checkpoint: Any) -> GraphModule:
    return attrgetter(checkpoint.args[0].target)(gm)


def _open(gm: GraphModule, checkpoint: Any) -> None:
    body, (_, *operands) = _body(gm, checkpoint), checkpoint.args
    graph_id = next(wrap.uid)
    for node in body.graph.nodes:
        if node.op.startswith("call_"):
            node.meta |= {"ac_graph_id": graph_id, "recompute": CheckpointPolicy.PREFER_RECOMPUTE}
    inner = dict(zip(body.graph.find_nodes(op="placeholder"), operands, strict=True))
    for node in body.graph.find_nodes(op="get_attr"):
        # In the body's own names, these would be those of the outer graph.
        name = f"{checkpoint.name}_{node.name}"
        setattr(gm, name, attrgetter(node.target)(body))
        node.target = name
    with gm.graph.inserting_before(checkpoint):
        results: Any = gm.graph.graph_copy(body.graph, inner)
    for user in list(checkpoint.users):
        user.replace_all_uses_with(results[user.args[1]])
        gm.graph.erase_node(user)
    gm.graph.erase_node(checkpoint)
    gm.graph.eliminate_dead_code(lambda node: node.op != "get_attr")
    gm.delete_all_unused_submodules()
