"""Losses computed in several steps: the cross-entropy of each chunk of the logits, and the sum of a loss per token.

Each becomes one loss. The new losses have no decomposition, so they have to be fused. The other way round, a loss whose
logits are asked for more becomes the losses of tokens and their sum.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

import thunder.torch as ltorch
from thunder.core.proxies import TensorProxy, variableify
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, from_trace, tracectx
from thunder.core.transform_common import dce

from thunder_flce.graph.matching.logits_path import SPLITS, split_dimension
from thunder_flce.graph.matching.losses import CrossEntropy, is_loss
from thunder_flce.graph.matching.trace_index import TraceIndex


def merge_chunked_losses(trace: TraceCtx) -> tuple[TraceCtx, list[TensorProxy]]:
    """The trace with one loss in place of several steps, and the losses that are new.

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
    for sym_id, merge in ((ltorch.cat.id, _concatenated_losses), (ltorch.sum.id, _sum_loss)):
        index = TraceIndex(trace)
        merged = {
            id(bsym): loss for bsym in index.bsyms if bsym.sym.id == sym_id and (loss := merge(bsym, index)) is not None
        }
        if merged:
            losses += [loss.output for loss in merged.values()]
            changed = from_trace(trace)
            changed.bound_symbols = [merged.get(id(bsym), bsym) for bsym in index.bsyms]
            trace = dce(changed)
    left = {out.name for bsym in trace.bound_symbols if is_loss(bsym) for out in bsym.flat_proxy_outs}
    return trace, [loss for loss in losses if loss.name in left]


def _concatenated_losses(cat: BoundSymbol, index: TraceIndex) -> BoundSymbol | None:
    """One loss over all tokens, in place of the concatenation of the losses of chunks of them."""
    chunks = [index.producers.get(tensor.name) for tensor in cat.args[0]]
    losses = [chunk for chunk in chunks if chunk is not None and is_loss(chunk)]
    if cat.output.ndim != 1 or len(losses) < len(chunks) or any(index.users(loss.output) != [cat] for loss in losses):
        return None
    calls = [CrossEntropy.of(loss) for loss in losses]
    first = calls[0]
    logits = split_tensor([call.logits for call in calls], index)
    target = split_tensor([call.target for call in calls], index)
    alike = all(loss.sym.id == losses[0].sym.id for loss in losses) and all(
        index.same_values(call.values[2:], first.values[2:]) for call in calls
    )
    if logits is None or target is None or not alike or first.reduction != "none" or first.is_deprecated:
        return None
    if index.writers_between(losses, cat):
        return None
    return replace(first, logits=logits, target=target).in_place_of(losses[0], cat.output)


def split_tensor(chunks: Sequence[TensorProxy], index: TraceIndex) -> TensorProxy | None:
    """The tensor that was split along its first dimension into just these chunks, in this order, or None."""
    split = index.producers.get(chunks[0].name)
    if split is None or split.sym.id not in SPLITS:
        return None
    names = [chunk.name for chunk in chunks]
    return split.args[0] if split_dimension(split) == 0 and names == [out.name for out in split.output] else None


def _sum_loss(total: BoundSymbol, index: TraceIndex) -> BoundSymbol | None:
    """A loss of reduction "sum" in place of the sum of the losses of single tokens."""
    losses = total.flat_proxy_args[0]
    loss = index.producers.get(losses.name)
    if loss is None or not is_loss(loss) or index.users(losses) != [total]:
        return None
    arguments = CrossEntropy.of(loss)
    is_sum_of_all = total.output.ndim == 0 and total.output.dtype == losses.dtype
    if arguments.reduction != "none" or arguments.is_deprecated or not is_sum_of_all:
        return None
    if index.writers_between([loss], total):
        return None
    return replace(arguments, reduction="sum").in_place_of(loss, total.output)


def spell_out_reductions(trace: TraceCtx, losses: Collection[BoundSymbol]) -> TraceCtx:
    """The trace with some of its losses, of reduction "mean" or "sum", as sums of the losses of tokens.

    # before                                              # after
    loss = ltorch.cross_entropy(logits, labels)           losses = ltorch.cross_entropy(logits, labels, 'none')
                                                          valid = ltorch.ne(labels, -100)
                                                          total = ltorch.sum(ltorch.mul(losses, valid))
                                                          loss = ltorch.true_divide(total, ltorch.sum(valid))
    """
    changed, spelled_out = from_trace(trace), {id(loss) for loss in losses}
    for bsym in trace.bound_symbols:
        changed.bound_symbols += _in_steps(bsym, changed) if id(bsym) in spelled_out else [bsym]
    return changed


def _in_steps(loss: BoundSymbol, trace: TraceCtx) -> list[BoundSymbol]:
    call = CrossEntropy.of(loss)
    source = {"source_filename": loss.source_filename, "source_positions": loss.source_positions}
    steps: list[BoundSymbol] = []
    with tracectx(trace):
        trace.push_scope(steps)
        losses = TensorProxy(like=loss.output, shape=tuple(call.target.shape))
        steps.append(replace(call, reduction="none").in_place_of(loss, losses))
        valid = ltorch.ne(call.target, call.ignore_index)
        total = ltorch.sum(ltorch.mul(losses, valid))
        if call.reduction == "mean":
            total = ltorch.true_divide(total, ltorch.sum(valid))
        trace.pop_scope()
    steps[-1] = steps[-1].from_bsym_swap_proxies({variableify(total): loss.output})
    return [step.from_bsym(**source) for step in steps]
