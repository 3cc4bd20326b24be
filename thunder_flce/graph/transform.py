"""The transform: replaces each linear and the losses of its logits by a region, and gives every region its plan."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import thunder.torch as ltorch
from thunder.core.compile_data import _compile_data as compile_data_and_stats
from thunder.core.compile_data import get_compile_data, using_symbolic_values
from thunder.core.prims import PrimIDs
from thunder.core.proxies import ProxyTag, TensorProxy, variableify
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, TraceProvenance, from_trace, tracectx
from thunder.core.transform_common import Transform, dce
from thunder.transforms.autocast import disable_autocast

from thunder_flce.graph import symbols, thunder_fixes
from thunder_flce.graph.distributed import defers_fusion, divided_weights, warn_of_unsummed_gradients
from thunder_flce.graph.reading import is_static, read, source_of, tensors_written
from thunder_flce.graph.writing import write_regions
from thunder_flce.matching.decisions import Decision, Reason, in_order, report
from thunder_flce.matching.interpreter import LOSSES, NORMALISERS, Interpreter
from thunder_flce.matching.match import match
from thunder_flce.options import Options, as_options, checked_strict


class Compilation(NamedTuple):
    """Decisions about one trace: a jitted function has one trace for each set of input shapes."""

    trace: TraceCtx
    """Trace before the transform"""

    decisions: list[Decision]


@contextmanager
def _grad_enabled() -> Iterator[None]:
    """Has thunder differentiate what is added to a trace, also where the program has ended without gradients."""
    data = get_compile_data()
    ended_with, data.is_grad_enabled = data.is_grad_enabled, True
    try:
        yield
    finally:
        data.is_grad_enabled = ended_with


class FuseLinearCrossEntropy(Transform):
    """Replaces linear → … → cross_entropy by `linear_cross_entropy`, before autograd.

    Log-probabilities and entropies that are written out are replaced in the same way (`matching.rules`). The fused
    operation stands where the loss was, since labels may be computed between the linear and the loss.
    `python -m thunder_flce trace litgpt` prints a program before and after.

    A loss that cannot be fused stays as it is. Its decision in `compilations` has the reason; if the logits come from a
    linear, a `NotFusedWarning` reports the reason.

    Args:
        options: choices about the time and memory of the fused losses.
        strict: raise a `NotFusedError` in place of the warning, in the call that compiles the program.
    """

    def __init__(self, options: Options | None = None, *, strict: bool = False):
        thunder_fixes.apply()
        self.options = as_options(options)
        self.strict = checked_strict(strict)
        self.compilations: list[Compilation] = []
        self.fuses = True
        """False if the program has been fused before, in Dynamo's graph: then its regions only get plans"""
        self.original: TraceCtx | None = None
        """The program as the user wrote it, if this fusion runs after a transform that rewrites linears"""

    @_grad_enabled()
    def transform_traces_pre_prologue(
        self, prologue_trace: TraceCtx, computation_trace: TraceCtx, epilogue_trace: TraceCtx | None, **kwargs: Any
    ) -> tuple[TraceCtx, TraceCtx, TraceCtx | None]:
        """Called by thunder once per compiled trace.

        Raises:
            NotFusedError: if `strict` is set and a loss is not fused; lists the source and reason of all such losses.
        """
        if defers_fusion(self, computation_trace):
            self._check_regions(computation_trace)
            return prologue_trace, computation_trace, epilogue_trace
        warn_of_unsummed_gradients()
        _warn_of_many_compilations()
        fused, decisions = self._fused(computation_trace)
        self.compilations.append(Compilation(computation_trace, decisions))
        report(decisions, strict=self.strict)
        return prologue_trace, _copy_overwritten_logits(fused), epilogue_trace

    def _fused(self, computation_trace: TraceCtx) -> tuple[TraceCtx, list[Decision]]:
        # `dce` removes the unused symbols that reading logits.shape left in the trace, since they use the logits.
        trace = dce(_inline_checkpoints(computation_trace))
        _keep_forwards_out_of_backward(trace)
        if not _is_static_trace(trace):
            return computation_trace, _unknown_losses(trace) if self.fuses else []
        # The trace has autocast's casts already; without this, autocast would cast the region's arguments once more.
        with disable_autocast():
            program = read(trace)
            interpreter, regions, refused = (
                match(program, self.options) if self.fuses else (Interpreter(program), [], [])
            )
            if not regions and not any(map(symbols.is_region, trace.bound_symbols)):
                return computation_trace, in_order(refused)
            trace, decisions = write_regions(trace, regions, interpreter, options=self.options)
        trace.set_provenance(TraceProvenance("Fuse linear and cross-entropy"))
        return trace, in_order([*decisions, *refused])

    def _check_regions(self, trace: TraceCtx) -> None:
        """Raises if the user wrote a region on a divided weight: thunder would gather losses instead of logits."""
        divided = divided_weights()
        for bsym in filter(symbols.is_region, trace.bound_symbols):
            if any(arg.name in divided for arg in bsym.flat_proxy_args):
                raise NotImplementedError(
                    f"linear_cross_entropy at {source_of(bsym)}: thunder.distributed divides its weight among ranks, "
                    "but supports linears only. Call F.linear and the loss instead, which will be fused; or divide the "
                    "weight yourself and pass vocab_parallel"
                )


MANY = 8
"""Number of compilations of one program that causes a warning; Dynamo's default limit is the same."""


def _warn_of_many_compilations() -> None:
    _, stats = compile_data_and_stats.get()
    if stats is not None and stats.cache_misses == MANY:
        warnings.warn(
            f"thunder_flce: thunder compiles this program for the {MANY}th time, as it does for each new shape of the "
            'inputs. Pad batches to a few lengths, or use torch.compile(model, backend="thunder_flce"), which '
            "compiles a program twice for all lengths",
            stacklevel=2,
        )


def _unknown_losses(trace: TraceCtx) -> list[Decision]:
    """Returns decisions about a program with unknown sizes or numbers, in which nothing is fused."""
    reason = Reason.DYNAMIC if using_symbolic_values() else Reason.NUMBER_READ
    losses = [bsym for bsym in trace.bound_symbols if bsym.sym.name in (*LOSSES, *NORMALISERS)]
    return [Decision(source_of(bsym), reason=reason) for bsym in losses]


def _is_static_trace(trace: TraceCtx) -> bool:
    """Whether all sizes, and all numbers that a trace computes with, are known; it may still return unknown numbers."""
    computing = (bsym for bsym in trace.bound_symbols if bsym.sym.id != PrimIDs.RETURN)
    tensors = ((out for out in bsym.flat_outs if isinstance(out, TensorProxy)) for bsym in trace.bound_symbols)
    return all(is_static(*bsym.flat_args) for bsym in computing) and all(is_static(*outs) for outs in tensors)


def _inline_checkpoints(trace: TraceCtx) -> TraceCtx:
    """Replaces the symbol of each checkpointed function by the function's operations, tagged as `thunder.jit` does.

    `thunderfx` traces a checkpointed function as one symbol, which thunder opens only when it differentiates.
    """
    inlined = from_trace(trace)

    def add(bsym: BoundSymbol) -> None:
        if bsym.sym.id != ltorch.checkpoint.id:
            inlined.bound_symbols.append(bsym)
            return
        kept_names = {proxy.name for proxy in (*bsym.flat_proxy_args, *bsym.flat_proxy_outs)}
        for inner in bsym.subsymbols:
            for out in (out for out in inner.flat_proxy_outs if out.name not in kept_names):
                out.tags.add(ProxyTag.RECOMPUTE_IN_BACKWARD)
            add(inner)

    for bsym in trace.bound_symbols:
        add(bsym)
    return inlined


def _keep_forwards_out_of_backward(trace: TraceCtx) -> None:
    """Exempts losses from activation checkpointing: thunder would compute them twice, whatever the symbols' tags.

    Recomputation would save no memory: the tensors that losses save are small, or finished gradients.
    """
    for bsym in trace.bound_symbols:
        if symbols.is_region(bsym) or bsym.sym.name in LOSSES:
            for out in bsym.flat_proxy_outs:
                out.tags.discard(ProxyTag.RECOMPUTE_IN_BACKWARD)


def _copy_overwritten_logits(trace: TraceCtx) -> TraceCtx:
    """Gives an unfused cross-entropy a copy of its logits if a later operation may change them before its backward."""
    copied = from_trace(trace)
    with tracectx(copied):
        for index, bsym in enumerate(trace.bound_symbols):
            if bsym.sym.id == ltorch.cross_entropy.id:
                written = [tensor.dtype for later in trace.bound_symbols[index:] for tensor in tensors_written(later)]
                # By dtype, which a written view of the logits shares with them.
                if (logits := bsym.flat_proxy_args[0]).dtype in written:
                    bsym = bsym.from_bsym_swap_proxies({variableify(logits): ltorch.clone(logits)})
            copied.bound_symbols.append(bsym)
    copied.set_provenance(TraceProvenance("Copy logits that are changed in place"))
    return copied if len(copied.bound_symbols) > len(trace.bound_symbols) else trace
