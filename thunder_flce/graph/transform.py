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
from thunder.core.trace import TraceCtx, TraceProvenance, from_trace
from thunder.core.trace_interpreter import TraceSubstitutionProcessor
from thunder.core.transform_common import Transform, dce

from thunder_flce.graph import symbols
from thunder_flce.graph.matching.chunked_losses import join_pieces
from thunder_flce.graph.matching.logits_path import LogitsPath
from thunder_flce.graph.matching.match import Declined, Match, find_cross_entropies, is_loss, is_region
from thunder_flce.graph.matching.reasons import Reason
from thunder_flce.graph.matching.trace_index import Program, carries_grad
from thunder_flce.graph.rules import is_static, plan_region
from thunder_flce.graph.trace_arguments import planned_region
from thunder_flce.options import Options, as_options
from thunder_flce.planning.plan import Plan
from thunder_flce.planning.steps import PlannedRegion


class NotFusedWarning(UserWarning):
    """A cross-entropy whose logits come from a linear was not fused with it."""


class NotFusedError(RuntimeError):
    """With `strict=True`: a cross-entropy whose logits come from a linear was not fused with it."""


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
        strict: raise a `NotFusedError` in place of the warning. It comes when the program is compiled, from the call.
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
            NotFusedError: where `strict`, with the source and the reason of each cross-entropy that is not fused.
        """
        start = time.perf_counter()
        compilation = Compilation(computation_trace)
        self.compilations.append(compilation)
        computation_trace = _open_checkpoints(computation_trace)
        # Reading logits.shape leaves a symbol that uses the logits, though nothing uses what it returned.
        live_trace = dce(computation_trace)
        live_trace, program, found = _search(live_trace)
        _keep_forwards_out_of_backward(live_trace)
        declined = [_decision(match) for match in found if isinstance(match, Declined)]
        compilation.decisions.extend(declined)
        self._report([decision for decision in declined if decision.reason is not Reason.NO_LINEAR])
        has_regions = any(is_region(bsym) for bsym in live_trace.bound_symbols)
        if has_regions or any(isinstance(match, Match) for match in found):
            matches = [match for match in found if isinstance(match, Match)]
            rewrite = _Rewrite(live_trace, matches, program.need_grad, self.options, compilation)
            computation_trace, _ = rewrite()
            computation_trace = dce(computation_trace)
            computation_trace.set_provenance(TraceProvenance("Fuse linear and cross-entropy"))
        compilation.seconds = time.perf_counter() - start
        return prologue_trace, computation_trace, epilogue_trace

    def _report(self, missed: list[Decision]) -> None:
        """Says what was not fused though its logits come from a linear."""
        messages = [f"thunder_flce: the cross-entropy at {decision}" for decision in missed]
        if self.strict and messages:
            raise NotFusedError("\n".join(messages))
        for message in messages:
            warnings.warn(message, NotFusedWarning, stacklevel=3)


def _search(trace: TraceCtx) -> tuple[TraceCtx, Program, list[Match | Declined]]:
    """What there is to fuse, and the trace that has it: with its losses in one piece, if these can all be fused."""
    whole, losses = join_pieces(trace)
    if losses:
        program = Program(whole)
        found = find_cross_entropies(program)
        fused = {match.cross_entropy.output.name for match in found if isinstance(match, Match)}
        if all(loss.name in fused for loss in losses):
            return whole, program, found
    program = Program(trace)
    return trace, program, find_cross_entropies(program)


class _Rewrite(TraceSubstitutionProcessor):
    def __init__(
        self,
        trace: TraceCtx,
        matches: list[Match],
        need_grad: set[str],
        options: Options,
        compilation: Compilation,
    ):
        super().__init__(trace)
        self._matches = {id(match.cross_entropy): match for match in matches}
        self._need_grad = need_grad
        self._options = options
        self._compilation = compilation
        self._argmaxes = {id(argmax.bsym) for match in matches for argmax in match.argmaxes}
        self._waits_for: dict[int, set[int]] = {}
        """Of each operation that is late, the losses that have to come before it."""
        for match in matches:
            for bsym in match.late:
                self._waits_for.setdefault(id(bsym), set()).add(id(match.cross_entropy))
        self._waiting: list[BoundSymbol] = []

    def process_bsym(self, bsym: BoundSymbol) -> None:
        if self._waits_for.get(id(bsym)):
            self._waiting.append(bsym)
        elif id(bsym) in self._matches:
            self._fuse(self._matches[id(bsym)])
        elif is_region(bsym) and is_static(*bsym.flat_args):
            self.add_bsyms_from_function(self._planned, bsym, tags=bsym.tags)
        elif id(bsym) not in self._argmaxes:
            self.add_processed_bsyms([bsym.from_bsym()])
            self.set_result(bsym.output)

    def _fuse(self, match: Match) -> None:
        """Puts the region in place of the loss, and what waits for one of its outputs behind it."""
        loss, *indices = self.add_bsyms_from_function(self._fused, match, tags=match.cross_entropy.tags)
        self.set_result(loss)
        for argmax, result in zip(match.argmaxes, indices, strict=True):
            # What the program returns is read before names are swapped.
            self.write(argmax.indices, argmax.indices)
            self.add_to_swap_map(argmax.indices, result)
        for losses in self._waits_for.values():
            losses.discard(id(match.cross_entropy))
        self.add_unprocessed_bsyms([bsym for bsym in self._waiting if not self._waits_for[id(bsym)]])
        self._waiting = [bsym for bsym in self._waiting if self._waits_for[id(bsym)]]

    def _fused(self, match: Match) -> tuple[TensorProxy, ...]:
        """The loss, and what takes the place of each argmax."""
        target = match.arguments["target"]
        input, weight, bias = _operands(match.path)
        # After the rows have been selected, they keep their order: the labels can take the hidden states' shape.
        rows = input.shape[:-1]
        arguments = {
            **match.arguments,
            **match.path.logit_map,
            "input": input,
            "linear_weight": weight,
            "target": target if target.shape == rows else ltorch.reshape(target, rows),
            "linear_bias": bias,
        }
        if match.argmaxes:
            arguments["outputs"] = (match.argmax_output,)
        unfused = match.cross_entropy.output
        if unfused.dtype != symbols.loss_dtype(input):
            arguments["dtype"] = dtypes.to_strong_dtype(unfused.dtype)
        result = self._region(arguments, match.cross_entropy, self._operands_that_need_grad(match.path))
        loss, *argmax = result if match.argmaxes else (result,)
        shapes = [unfused.shape, *(argmax.indices.shape for argmax in match.argmaxes)]
        results = [loss, *(argmax * len(match.argmaxes))]
        return tuple(
            result if result.shape == shape else ltorch.reshape(result, shape)
            for result, shape in zip(results, shapes, strict=True)
        )

    def _operands_that_need_grad(self, path: LogitsPath) -> tuple[str, ...]:
        products = [product for product in path.products if path.carries_grad and product.carries_grad]
        sources = {
            "input": [product.input for product in products],
            "linear_weight": [product.weight for product in products],
            "linear_bias": [path.bias] if path.bias is not None and path.bias_carries_grad else [],
        }
        return tuple(
            name for name, tensors in sources.items() if any(tensor.name in self._need_grad for tensor in tensors)
        )

    def _planned(self, bsym: BoundSymbol) -> TensorProxy:
        arguments = dict(inspect.signature(symbols.linear_cross_entropy.meta).bind(*bsym.args, **bsym.kwargs).arguments)
        needs_grad = ()
        if carries_grad(bsym.flat_proxy_outs[0]):
            needs_grad = tuple(
                name
                for name in ("input", "linear_weight", "linear_bias")
                if arguments.get(name) is not None and arguments[name].name in self._need_grad
            )
        return self._region(arguments, bsym, needs_grad)

    def _region(self, arguments: dict[str, Any], source: BoundSymbol, needs_grad: tuple[str, ...]) -> Any:
        plan = plan_region(arguments, needs_grad, self._options)
        region = planned_region(arguments, needs_grad, plan)
        self._compilation.decisions.append(Decision(_source(source), plan, region=region))
        tensors = (arguments.pop("input"), arguments.pop("linear_weight"), arguments.pop("target"))
        arguments.update(needs_grad=needs_grad, plan=plan.chosen())
        return symbols.linear_cross_entropy(*tensors, **arguments)


def _operands(path: LogitsPath) -> tuple[TensorProxy, TensorProxy, TensorProxy | None]:
    """Input, weight and bias of the one linear that a path amounts to; may add operations to the trace.

    A sum of products is the product of their operands, side by side along the hidden dimension.
    """
    inputs, weights = [], []
    for product in path.products:
        input, weight = product.input, product.weight
        if path.carries_grad and not product.carries_grad:
            input, weight = ltorch.detach(input), ltorch.detach(weight)
        for step in path.selection:
            input = step(input)
        inputs.append(input if product.factor == 1 else ltorch.mul(input, float(product.factor)))
        weights.append(ltorch.transpose(weight, 0, 1) if product.transposed else weight)
    if len(path.products) == 1:
        return inputs[0], weights[0], path.bias
    return ltorch.cat(inputs, -1), ltorch.cat(weights, 1), path.bias


def _open_checkpoints(trace: TraceCtx) -> TraceCtx:
    """A checkpointed function as the operations it consists of, each tagged, as `thunder.jit` has it.

    `thunderfx` hands it over as one symbol, which thunder opens in the same way, but only when it differentiates:

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
        kept = {proxy.name for proxy in (*bsym.flat_proxy_args, *bsym.flat_proxy_outs)}
        for inner in bsym.subsymbols:
            for out in inner.flat_proxy_outs:
                if out.name not in kept:
                    out.tags.add(ProxyTag.RECOMPUTE_IN_BACKWARD)
            opened.bound_symbols.append(inner)
    opened.set_provenance(TraceProvenance("Open checkpoints"))
    return opened


def _keep_forwards_out_of_backward(trace: TraceCtx) -> None:
    """Exempts losses from activation checkpointing: thunder would run a checkpointed forward twice, tags or no tags.

    Nothing is gained by running a loss again: its saved tensors are small, or finished gradients.
    """
    for bsym in trace.bound_symbols:
        if is_region(bsym) or is_loss(bsym):
            for out in bsym.flat_proxy_outs:
                out.tags.discard(ProxyTag.RECOMPUTE_IN_BACKWARD)


def _decision(declined: Declined) -> Decision:
    return Decision(_source(declined.cross_entropy), None, declined.reason, declined.detail)


def _source(bsym: BoundSymbol) -> str:
    if bsym.source_filename is None:
        return "unknown source"
    line = getattr(bsym.source_positions, "lineno", None)
    return f"{bsym.source_filename}:{line}" if line else bsym.source_filename
