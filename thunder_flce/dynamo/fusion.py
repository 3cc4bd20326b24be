"""Fuses linear + cross-entropy in a graph of Dynamo's, before AOTAutograd and Inductor see it."""

import math
from bisect import bisect
from functools import cache
from operator import attrgetter
from typing import Any

import torch
from torch._higher_order_ops import wrap
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from thunder_flce.device import TILE_ROWS, Device
from thunder_flce.dynamo.reading import body_of, is_checkpoint, read
from thunder_flce.dynamo.writing import write_regions
from thunder_flce.engine.choose import matmul_seconds
from thunder_flce.matching.decisions import Decision, Reason, in_order, report
from thunder_flce.matching.interpreter import Interpreter
from thunder_flce.matching.program import Op, depends_on_values, hint
from thunder_flce.matching.regions import Region, match
from thunder_flce.operation.call import Call, Spec
from thunder_flce.operation.loss import Loss
from thunder_flce.operators import plan_for
from thunder_flce.options import Options

# Of matmuls, up to which a step waits for the host. With 2048 tokens and four layers, on an H100: those of the head of
# pythia-160m take 0.6 ms, and a step took 10.2 ms with ours where it took 9.1 with Inductor's; those of Qwen 2.5 0.5B
# take 2.1, and a step 8.1 ms where it took 8.5.
_SMALL_SECONDS = 1.5e-3


def fuse(gm: GraphModule, options: Options, *, strict: bool, leaves_small: bool = False) -> list[Decision]:
    """Puts the operator `linear_cross_entropy` into a graph, and into those within it, for each loss that it can be.

    Args:
        gm: the graph, which is changed.
        options: choices about time and memory.
        strict: raise where a loss, or what one may be made of, is not fused with its linear.
        leaves_small: leave those as they are that would gain nothing.

    Returns:
        What was decided about each loss, log-probability and entropy.

    Raises:
        NotFusedError: where `strict`, with the source and the reason of each one that is not fused.
    """
    decisions: list[Decision] = []
    bodies = {id(body_of(each, node)) for each in _graphs(gm) for node in each.graph.nodes if is_checkpoint(node)}
    for module in _graphs(gm):
        if id(module) not in bodies:
            decisions += _fuse(module, options, leaves_small=leaves_small)
    report(decisions, strict=strict)
    return decisions


def _graphs(gm: GraphModule) -> list[GraphModule]:
    return [module for module in gm.modules() if isinstance(module, GraphModule)]


def _fuse(gm: GraphModule, options: Options, *, leaves_small: bool) -> list[Decision]:
    known, regions, refused = _matched(gm, options)
    if leaves_small and options == Options() and regions and all(map(_is_small, regions)):
        left = [(part.first.source, part.kind) for region in regions for part in region.parts]
        decisions = [Decision(line, reason=Reason.LEFT_TO_INDUCTOR, kind=kind) for line, kind in left]
        return in_order([*decisions, *refused])
    checkpoints = {op.inside for region in regions for op in _ops_of(region, known) if op.inside is not None}
    if checkpoints:
        for checkpoint in checkpoints:
            _open(gm, checkpoint)
        known, regions, refused = _matched(gm, options)
    if not regions:
        return in_order(refused)
    decisions = write_regions(gm, regions, known, options)
    gm.recompile()
    return in_order([*decisions, *refused])


def _matched(gm: GraphModule, options: Options) -> tuple[Interpreter, list[Region], list[Decision]]:
    known = Interpreter(read(gm))
    return known, *match(known, options)


def _is_small(region: Region) -> bool:
    """Whether, on a GPU, neither time nor memory could be gained: the host's time counts, and all logits are one chunk.

    By what a mean of the same sizes would take. Where the number of tokens is a symbol, a guard makes sure of it.
    """
    term, *others = region.parts[0].logits.terms
    # The hidden size is one of the weight's, even if Dynamo has a symbol for it.
    rows, hidden, device = term.input.shape[:-1], hint(term.input.shape[-1]), term.input.device
    is_known = all(isinstance(size, int) for size in term.weight.shape) and not any(map(depends_on_values, rows))
    if others or len(region.parts) > 1 or device.type != "cuda" or not is_known:
        return False
    tokens = math.prod(rows)
    most = _most_small_tokens(math.prod(term.weight.shape) // max(hidden, 1), hidden, term.input.dtype, device)
    if isinstance(tokens, torch.SymInt) and hint(tokens) <= most:
        environment, expression = tokens.node.shape_env, tokens.node.expr
        if any(environment.var_to_range[symbol].upper.is_Integer for symbol in expression.free_symbols):
            # The caller has said which lengths there are, and may not be given a guard that excludes some.
            return bool(environment.bound_sympy(expression).upper <= most)
        return bool(tokens <= most)
    return hint(tokens) <= most


@cache
def _most_small_tokens(vocab: int, hidden: int, dtype: torch.dtype, device: torch.device) -> int:
    """The largest number of tokens with which a loss is small."""

    def mean(tokens: int) -> Call:
        shapes = {"input": (tokens, hidden), "linear_weight": (vocab, hidden)}
        tensors = {name: Spec(shape, dtype, device) for name, shape in shapes.items()}
        tensors["target"] = Spec((tokens,), torch.int64, device)
        return Call(tensors=tensors, loss=Loss(), needs_grad=tuple(shapes))

    def is_cut(tokens: int) -> bool:
        return plan_for(mean(tokens), Options()).chunk_rows < tokens

    a_token = matmul_seconds(mean(TILE_ROWS), Device.of(device)) / TILE_ROWS
    return bisect(range(1, int(_SMALL_SECONDS / a_token) + 1), False, key=is_cut) if a_token else 0


def _ops_of(region: Region, known: Interpreter) -> list[Op]:
    """From the results of a region up to its linears."""
    found: dict[Op, None] = {}
    linears = {tensor for part in region.parts for tensor in part.linears}
    waiting = [*region.gives, *(result.tensor for part in region.parts for result in part.results)]
    while waiting:
        tensor = waiting.pop()
        if tensor.op is not None and tensor.op not in found:
            found[tensor.op] = None
            # What a sum multiplies its tokens with is read by the region, too.
            is_read = [each for each in tensor.op.operands if region.total is not None or each in known.values]
            waiting += [] if tensor in linears else is_read
    return list(found)


def _open(gm: GraphModule, checkpoint: Any) -> None:
    """Puts the operations of a checkpointed function in its place, tagged as what the backward computes again.

    PyTorch tags them just so, when AOTAutograd traces the function. Not with a policy of its own (`context_fn`), for
    which PyTorch has to run it.
    """
    body, (_, *operands) = body_of(gm, checkpoint), checkpoint.args
    graph_id = next(wrap.uid)
    for node in body.graph.nodes:
        if node.op.startswith("call_"):
            node.meta |= {"ac_graph_id": graph_id, "recompute": CheckpointPolicy.PREFER_RECOMPUTE}
    inner: dict[Node, Any] = dict(zip(body.graph.find_nodes(op="placeholder"), operands, strict=True))
    for node in body.graph.find_nodes(op="get_attr"):
        # In the body's own names, these would be those of the outer graph.
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
