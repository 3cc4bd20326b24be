"""Losses in several steps that are one: a cross-entropy of each piece of the logits, and the sum of a loss per token.

The losses put in their place say what is computed, not how: they have no decomposition, so they have to be fused.
"""

from collections.abc import Sequence
from typing import Any

import thunder.torch as ltorch
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, from_trace
from thunder.core.transform_common import dce

from thunder_flce.graph.matching.match import is_loss, loss_arguments
from thunder_flce.graph.matching.trace_index import Program


def join_pieces(trace: TraceCtx) -> tuple[TraceCtx, list[TensorProxy]]:
    """The trace with its losses in one piece, and the losses that this makes.

    Such as in the `chunked_cross_entropy` of litgpt:

    # before                                              # after
    [x0, x1] = ltorch.split(logits, 128)                  loss = ltorch.cross_entropy(logits, labels, 'sum')
    [y0, y1] = ltorch.split(labels, 128)
    loss0 = ltorch.cross_entropy(x0, y0, 'none')
    loss1 = ltorch.cross_entropy(x1, y1, 'none')
    losses = ltorch.cat([loss0, loss1])
    loss = ltorch.sum(losses)
    """
    losses: list[TensorProxy] = []
    for sym_id, join in ((ltorch.cat.id, _join_losses), (ltorch.sum.id, _sum_loss)):
        program = Program(trace)
        joined = {
            id(bsym): loss
            for bsym in program.bsyms
            if bsym.sym.id == sym_id and (loss := join(bsym, program)) is not None
        }
        if joined:
            losses += [loss.output for loss in joined.values()]
            changed = from_trace(trace)
            changed.bound_symbols = [joined.get(id(bsym), bsym) for bsym in program.bsyms]
            trace = dce(changed)
    made = {out.name for bsym in trace.bound_symbols if is_loss(bsym) for out in bsym.flat_proxy_outs}
    return trace, [loss for loss in losses if loss.name in made]


def _join_losses(cat: BoundSymbol, program: Program) -> BoundSymbol | None:
    """One loss for each token of the whole, in place of the concatenation of those of its pieces."""
    pieces = [program.producers.get(tensor.name) for tensor in cat.args[0]]
    if cat.output.ndim != 1 or not all(piece is not None and is_loss(piece) for piece in pieces):
        return None
    if any(program.users(piece.output) != [cat] for piece in pieces):
        return None
    arguments = [loss_arguments(piece) for piece in pieces]
    logits, target = (_whole([found.pop(name) for found in arguments], program) for name in ("logits", "target"))
    first = arguments[0]
    alike = all(piece.sym.id == pieces[0].sym.id for piece in pieces) and all(
        program.same_values(list(found.values()), list(first.values())) for found in arguments
    )
    if logits is None or target is None or not alike or first["reduction"] != "none":
        return None
    return _loss_like(pieces[0], logits, target, output=cat.output)


def _whole(pieces: Sequence[TensorProxy], program: Program) -> TensorProxy | None:
    """What was split along its first dimension into just these pieces, in this order; None if there is none."""
    split = program.producers.get(pieces[0].name)
    if split is None or split.sym.id not in _SPLITS:
        return None
    whole, _, dimension = [*split.args, *split.kwargs.values(), 0][:3]
    names = [piece.name for piece in pieces]
    return whole if dimension == 0 and names == [out.name for out in split.output] else None


_SPLITS = {ltorch.split.id, ltorch.chunk.id, ltorch.tensor_split.id}


def _sum_loss(total: BoundSymbol, program: Program) -> BoundSymbol | None:
    """A loss of reduction "sum" in place of the sum of losses of single tokens."""
    losses = total.flat_proxy_args[0]
    loss = program.producers.get(losses.name)
    if loss is None or not is_loss(loss) or program.users(losses) != [total]:
        return None
    arguments = loss_arguments(loss)
    if arguments["reduction"] != "none" or total.output.ndim > 0 or total.output.dtype != losses.dtype:
        return None
    return _loss_like(loss, arguments["logits"], arguments["target"], output=total.output, reduction="sum")


def _loss_like(loss: BoundSymbol, logits: TensorProxy, target: TensorProxy, **changes: Any) -> BoundSymbol:
    """The same loss of other tensors, with another output and, maybe, reduction."""
    output = changes.pop("output")
    arguments = {**loss_arguments(loss), **changes}
    del arguments["logits"], arguments["target"]
    if loss.sym.id == ltorch.nll_loss.id:
        arguments = {name: arguments[name] for name in ("weight", "ignore_index", "reduction")}
    return loss.from_bsym(args=(logits, target), kwargs=arguments, output=output, subsymbols=[])
