"""The transform: makes a linear and what is computed from its logits one region, and gives every region its plan."""

import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import thunder.torch as ltorch
from thunder.core.proxies import ProxyTag
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, TraceProvenance, from_trace
from thunder.core.transform_common import Transform, dce

from thunder_flce.graph import symbols
from thunder_flce.graph.decisions import Decision, source_of
from thunder_flce.graph.distributed import divided_weights, fuses_later, warn_of_gradients_that_are_not_summed
from thunder_flce.graph.early_reduction import reduce_early
from thunder_flce.graph.matching.chunked_losses import merge_chunked_losses, spell_out_reductions
from thunder_flce.graph.matching.losses import is_loss
from thunder_flce.graph.matching.match import Found, Match, find_matches
from thunder_flce.graph.matching.reasons import NotFused, Reason
from thunder_flce.graph.matching.trace_index import TraceIndex
from thunder_flce.graph.rewrite import Rewrite
from thunder_flce.graph.rules import PlannedRegion, plan_region
from thunder_flce.graph.thunder_private import disable_autocast
from thunder_flce.options import Options, as_options


class NotFusedWarning(UserWarning):
    """A cross-entropy, log-probability or entropy whose logits come from a linear was not fused with it."""


class NotFusedError(RuntimeError):
    """With `strict=True`, raised in place of a `NotFusedWarning`."""


@dataclass
class Compilation:
    """The decisions about one trace: a jitted function has one for each set of shapes that it was called with."""

    trace: TraceCtx = field(repr=False)
    """The trace before the transform."""

    decisions: list[Decision] = field(default_factory=list)

    seconds: float = 0.0
    """Time that the transform took."""


class FuseLinearCrossEntropy(Transform):
    """Replaces linear → … → cross_entropy by `linear_cross_entropy`, before autograd.

    The same for log-probabilities and entropies that are spelled out (`matching.readings`). The region takes the place
    of the loss, because the labels may be computed between the two:

        # before                                              # after
        logits = ltorch.linear(h, w, None)                    labels = ltorch.pad(y, (0, 1), 'constant', -100)
        labels = ltorch.pad(y, (0, 1), 'constant', -100)      …
        rows = ltorch.view(logits, -1, 32000)                 loss = linear_cross_entropy(h, w, labels, …, plan={…})
        loss = ltorch.cross_entropy(rows, labels, …)

    What can't be fused stays as it is. Its decision in `compilations` has the reason; where the logits do come from a
    linear, a `NotFusedWarning` reports it.

    Args:
        options: choices about time and memory.
        strict: raise a `NotFusedError` in place of the warning, in the call that compiles the program.
    """

    def __init__(self, options: Options | None = None, *, strict: bool = False):
        self.options = as_options(options)
        self.strict = strict
        self.compilations: list[Compilation] = []

    def transform_traces_pre_prologue(
        self, prologue_trace: TraceCtx, computation_trace: TraceCtx, epilogue_trace: TraceCtx | None, **kwargs: Any
    ) -> tuple[TraceCtx, TraceCtx, TraceCtx | None]:
        """Called by thunder once per compiled trace.

        Raises:
            NotFusedError: where `strict`, with the source and the reason of everything that is not fused.
        """
        if fuses_later(self, computation_trace):
            self._check_regions(computation_trace)
            return prologue_trace, computation_trace, epilogue_trace
        return prologue_trace, self.fuse(computation_trace), epilogue_trace

    def fuse(self, computation_trace: TraceCtx) -> TraceCtx:
        """Puts regions into a trace, and records what was decided.

        Raises:
            NotFusedError: see `transform_traces_pre_prologue`.
        """
        start = time.perf_counter()
        warn_of_gradients_that_are_not_summed()
        compilation = Compilation(computation_trace)
        self.compilations.append(compilation)
        computation_trace = _open_checkpoints(computation_trace)
        # Reading logits.shape leaves a symbol in the trace that uses the logits, though its result is not used.
        index, found = _search(dce(computation_trace), self.options)
        _keep_forwards_out_of_backward(index.trace)
        compilation.decisions += [
            Decision(source_of(bsym), reason=outcome.reason, detail=outcome.detail, kind=kind)
            for bsym, kind, outcome in found
            if isinstance(outcome, NotFused)
        ]
        self.report(compilation.decisions)
        matches = [outcome for _, _, outcome in found if isinstance(outcome, Match)]
        if matches or any(map(symbols.is_region, index.bsyms)):
            rewrite = Rewrite(index, matches, planner=self.plan, options=self.options, decisions=compilation.decisions)
            # The trace has its casts already; the region's symbol would be cast by them once more.
            with disable_autocast():
                computation_trace, _ = rewrite()
            computation_trace = reduce_early(dce(computation_trace))
            computation_trace.set_provenance(TraceProvenance("Fuse linear and cross-entropy"))
        compilation.seconds = time.perf_counter() - start
        return computation_trace

    def _check_regions(self, trace: TraceCtx) -> None:
        """Raises for regions that the user has written: thunder would gather their losses in place of logits."""
        divided = divided_weights()
        for bsym in filter(symbols.is_region, trace.bound_symbols):
            if any(arg.name in divided for arg in bsym.flat_proxy_args):
                raise NotImplementedError(
                    f"linear_cross_entropy at {source_of(bsym)}: thunder.distributed divides its weight among ranks, "
                    "but knows linears only. Write the linear and the loss, which will be fused; or divide the weight "
                    "yourself, and say so by vocab_parallel"
                )

    def plan(self, region: Mapping[str, Any], needs_grad: tuple[str, ...]) -> PlannedRegion:
        """The plan of a region, from its arguments and the names of the operands that need a gradient."""
        return plan_region(region, needs_grad, self.options)

    def report(self, decisions: list[Decision]) -> None:
        """Warns of what was not fused though its logits come from a linear, or raises if strict."""
        missed = [decision for decision in decisions if decision.reason not in (None, Reason.NO_LINEAR)]
        messages = [f"thunder_flce: the {decision.kind} at {decision}" for decision in missed]
        if self.strict and messages:
            raise NotFusedError("\n".join(messages))
        for message in messages:
            warnings.warn(message, NotFusedWarning, stacklevel=3)


def _search(trace: TraceCtx, options: Options) -> tuple[TraceIndex, list[Found]]:
    """The index of a trace and what the trace computes from logits.

    The index is of a rewritten trace where fusion needs that, such as one with chunked losses merged, if all of these
    can be fused then.
    """

    def searched(trace: TraceCtx) -> tuple[TraceIndex, list[Found]]:
        index = TraceIndex(trace)
        return index, find_matches(index, options)

    merged, new_losses = merge_chunked_losses(trace)
    index, found = searched(merged)
    fused = {bsym.output.name for bsym, _, outcome in found if isinstance(outcome, Match)}
    if not all(loss.name in fused for loss in new_losses):
        index, found = searched(trace)
    if reduced := _waiting_for_reduction(found):
        spelled_out = searched(spell_out_reductions(index.trace, reduced))
        if not _waiting_for_reduction(spelled_out[1]):
            index, found = spelled_out
    delayed = _delay_sums(index, found)
    return (index, found) if delayed is None else searched(delayed)


def _waiting_for_reduction(found: list[Found]) -> list[BoundSymbol]:
    return [bsym for bsym, _, outcome in found if isinstance(outcome, Match) and outcome.waits_for_reduction]


def _delay_sums(index: TraceIndex, found: list[Found]) -> TraceCtx | None:
    """The trace with each weighted sum of losses right before its first use; None where there is no such sum.

    A factor that follows the sum may be computed in between, and then exists before the region.

    # before                                              # after
    total = ltorch.sum(weighted)                          count = ltorch.sum(weights)
    count = ltorch.sum(weights)                           total = ltorch.sum(weighted)
    loss = ltorch.true_divide(total, count)               loss = ltorch.true_divide(total, count)
    """
    matches = [outcome for _, _, outcome in found if isinstance(outcome, Match)]
    places = {id(match.place) for match in matches if match.weighted is not None or match.token_sum is not None}
    if not places:
        return None
    delayed = from_trace(index.trace)
    waiting: dict[str, list[BoundSymbol]] = {}
    for bsym in index.bsyms:
        used = [each for arg in bsym.flat_proxy_args for each in waiting.pop(arg.name, ())]
        # As in -(log_probs * weights).sum() / weights.sum().
        is_negated_sum = used and bsym.sym.id == ltorch.neg.id and len(index.users(bsym.args[0])) == 1
        if id(bsym) in places or is_negated_sum:
            waiting[bsym.output.name] = [*used, bsym]
        else:
            delayed.bound_symbols += [*used, bsym]
    return delayed


def _open_checkpoints(trace: TraceCtx) -> TraceCtx:
    """A checkpointed function as the operations it consists of, each tagged, as `thunder.jit` traces it.

    `thunderfx` traces it as one symbol, which thunder opens in the same way, but only when it differentiates:

        # before                                              # after
        loss = ltorch.checkpoint(_, h, w, labels)             logits = ltorch.linear(h, w, None)
          # logits = ltorch.linear(h, w, None)                loss = ltorch.cross_entropy(logits, labels, …)
          # loss = ltorch.cross_entropy(logits, labels, …)
    """
    if not any(bsym.sym.id == ltorch.checkpoint.id for bsym in trace.bound_symbols):
        return trace
    opened = from_trace(trace)
    for bsym in trace.bound_symbols:
        if bsym.sym.id != ltorch.checkpoint.id:
            opened.bound_symbols.append(bsym)
            continue
        opened.bound_symbols += bsym.subsymbols
        kept = {proxy.name for proxy in (*bsym.flat_proxy_args, *bsym.flat_proxy_outs)}
        for out in (out for inner in bsym.subsymbols for out in inner.flat_proxy_outs if out.name not in kept):
            out.tags.add(ProxyTag.RECOMPUTE_IN_BACKWARD)
    opened.set_provenance(TraceProvenance("Open checkpoints"))
    return opened


def _keep_forwards_out_of_backward(trace: TraceCtx) -> None:
    """Exempts losses from activation checkpointing, in which thunder would run them twice, whatever their tags.

    That would save no memory: what they save is small, or finished gradients.
    """
    for bsym in trace.bound_symbols:
        if symbols.is_region(bsym) or is_loss(bsym):
            for out in bsym.flat_proxy_outs:
                out.tags.discard(ProxyTag.RECOMPUTE_IN_BACKWARD)
