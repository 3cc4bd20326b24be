"""The transform: makes linear + cross-entropy one region, and gives every region its plan."""

import inspect
import time
import warnings
from dataclasses import dataclass, field
from typing import Any

import thunder.torch as ltorch
from thunder.core import dtypes
from thunder.core.proxies import ProxyTag, TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, TraceProvenance
from thunder.core.trace_interpreter import TraceSubstitutionProcessor
from thunder.core.transform_common import Transform, dce

from thunder_flce import symbols
from thunder_flce.executor import is_static, plan_region
from thunder_flce.match import (
    Declined,
    Match,
    Reason,
    carries_grad,
    find_cross_entropies,
    is_region,
    tensors_that_need_grad,
)
from thunder_flce.options import Options
from thunder_flce.plan import Plan
from thunder_flce.proxies import planned_region
from thunder_flce.steps import PlannedRegion


class NotFusedWarning(UserWarning):
    """A cross-entropy whose logits come from a linear was not fused with it."""


@dataclass(frozen=True)
class Decision:
    """What was decided about one cross-entropy of a trace."""

    source: str
    """"file:line" of the user's call, as far as it is known."""
    plan: Plan | None
    """None where it was not fused."""
    reason: Reason | None = None
    """None where it was fused."""
    detail: str = ""
    region: PlannedRegion | None = field(default=None, repr=False)
    """What the plan was made for; None where it was not fused."""

    @property
    def fused(self) -> bool:
        """Whether the linear and the loss are one region."""
        return self.plan is not None

    def __str__(self) -> str:
        if self.fused:
            return f"{self.source}: fused, {self.plan.describe()}"
        return f"{self.source}: not fused, because {self.reason.value}" + (f" ({self.detail})" if self.detail else "")


@dataclass
class Compilation:
    """The decisions about one trace: a jitted function has one for each set of shapes that it was called with."""

    trace: TraceCtx = field(repr=False)
    """The trace that was transformed, as it was before."""

    decisions: list[Decision] = field(default_factory=list)

    seconds: float = 0.0
    """Time that the transform took."""


class FuseLinearCrossEntropy(Transform):
    """Replaces linear → … → cross_entropy by `linear_cross_entropy`, before autograd.

    The region takes the place of the loss, because the labels may be computed between the two:

        # before                                              # after
        logits = ltorch.linear(h, w, None)                    labels = ltorch.pad(y, (0, 1), 'constant', -100)
        labels = ltorch.pad(y, (0, 1), 'constant', -100)      …
        rows = ltorch.view(logits, -1, 32000)                 loss = linear_cross_entropy(h, w, labels, …, plan={…})
        loss = ltorch.cross_entropy(rows, labels, …)

    What can't be fused stays as it is; `decisions` has the reason, and a `NotFusedWarning` says it once where the
    logits do come from a linear.

    Args:
        options: choices about time and memory.
    """

    def __init__(self, options: Options | None = None):
        self.options = options or Options()
        self.compilations: list[Compilation] = []

    def transform_traces_pre_prologue(
        self, prologue_trace: TraceCtx, computation_trace: TraceCtx, epilogue_trace: TraceCtx | None, **kwargs: Any
    ) -> tuple[TraceCtx, TraceCtx, TraceCtx | None]:
        """Called by thunder once per compiled trace."""
        start = time.perf_counter()
        compilation = Compilation(computation_trace)
        self.compilations.append(compilation)
        _keep_forwards_out_of_backward(computation_trace)
        # Reading logits.shape leaves a symbol that uses the logits, though nothing uses what it returned.
        live_trace = dce(computation_trace)
        found = find_cross_entropies(live_trace)
        for match in found:
            if isinstance(match, Declined):
                compilation.decisions.append(_declined(match))
        has_regions = any(is_region(bsym) for bsym in live_trace.bound_symbols)
        if has_regions or any(isinstance(match, Match) for match in found):
            matches = {id(match.cross_entropy): match for match in found if isinstance(match, Match)}
            rewrite = _Rewrite(live_trace, matches, self.options, compilation)
            computation_trace, _ = rewrite()
            computation_trace = dce(computation_trace)
            computation_trace.set_provenance(TraceProvenance("Fuse linear and cross-entropy"))
        compilation.seconds = time.perf_counter() - start
        return prologue_trace, computation_trace, epilogue_trace


class _Rewrite(TraceSubstitutionProcessor):
    def __init__(self, trace: TraceCtx, matches: dict[int, Match], options: Options, compilation: Compilation):
        super().__init__(trace)
        self._matches = matches
        self._options = options
        self._compilation = compilation
        self._needed = tensors_that_need_grad(trace)

    def process_bsym(self, bsym: BoundSymbol) -> None:
        if id(bsym) in self._matches:
            match = self._matches[id(bsym)]
            self.add_bsyms_from_function(self._fused, match, tags=bsym.tags)
        elif is_region(bsym) and is_static(*bsym.flat_args):
            self.add_bsyms_from_function(self._planned, bsym, tags=bsym.tags)
        else:
            self.add_processed_bsyms([bsym.from_bsym()])
            self.set_result(bsym.output)

    def _fused(self, match: Match) -> TensorProxy:
        logits, target = match.arguments["logits"], match.arguments["target"]
        input, weight, bias = match.operands
        # Whatever stands between linear and loss keeps the rows in order: the labels can take the hidden states' shape.
        rows = input.shape[:-1]
        arguments = {
            "input": input,
            "linear_weight": weight,
            "target": target if target.shape == rows else ltorch.reshape(target, rows),
            "linear_bias": bias,
            "reduction": match.arguments["reduction"],
            "ignore_index": match.arguments["ignore_index"],
        }
        if logits.dtype != symbols.loss_dtype(input):
            arguments["dtype"] = dtypes.to_strong_dtype(logits.dtype)
        loss = self._region(arguments, match.cross_entropy, carries_grad=match.carries_grad)
        if loss.ndim > 0 and loss.shape != target.shape:
            loss = ltorch.reshape(loss, target.shape)
        return loss

    def _planned(self, bsym: BoundSymbol) -> TensorProxy:
        bound = inspect.signature(symbols.linear_cross_entropy.meta).bind(*bsym.args, **bsym.kwargs)
        return self._region(dict(bound.arguments), bsym, carries_grad=carries_grad(bsym.output))

    def _region(self, arguments: dict[str, Any], source: BoundSymbol, *, carries_grad: bool) -> TensorProxy:
        needs_grad = ()
        if carries_grad:
            needs_grad = tuple(
                name
                for name in ("input", "linear_weight", "linear_bias")
                if arguments.get(name) is not None and arguments[name].name in self._needed
            )
        plan = plan_region(arguments, needs_grad, self._options)
        region = planned_region(arguments, needs_grad, plan)
        self._compilation.decisions.append(Decision(_source(source), plan, region=region))
        tensors = (arguments.pop("input"), arguments.pop("linear_weight"), arguments.pop("target"))
        arguments.update(needs_grad=needs_grad, plan=plan.chosen())
        return symbols.linear_cross_entropy(*tensors, **arguments)


def _keep_forwards_out_of_backward(trace: TraceCtx) -> None:
    """Exempts losses from activation checkpointing: thunder would run a checkpointed forward twice, tags or no tags.

    Nothing is gained by running a loss again: its saved tensors are small, or finished gradients.
    """
    for bsym in trace.bound_symbols:
        if is_region(bsym) or bsym.sym.id == ltorch.cross_entropy.id:
            for out in bsym.flat_proxy_outs:
                out.tags.discard(ProxyTag.RECOMPUTE_IN_BACKWARD)


def _declined(declined: Declined) -> Decision:
    decision = Decision(_source(declined.cross_entropy), None, declined.reason, declined.detail)
    if declined.reason is not Reason.NO_LINEAR:
        warnings.warn(f"thunder_flce: the cross-entropy at {decision}", NotFusedWarning, stacklevel=2)
    return decision


def _source(bsym: BoundSymbol) -> str:
    if bsym.source_filename is None:
        return "unknown source"
    line = getattr(bsym.source_positions, "lineno", None)
    return f"{bsym.source_filename}:{line}" if line else bsym.source_filename
