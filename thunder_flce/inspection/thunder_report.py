"""What is known of a program that thunder compiled: the decisions, and what the forward saves for its backward."""

from collections.abc import Iterator
from typing import Any

import thunder
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from thunder_flce.graph import symbols
from thunder_flce.graph.reading import is_static
from thunder_flce.graph.thunder_private import ThunderFXCompiledObject
from thunder_flce.graph.trace_arguments import settings_of
from thunder_flce.graph.trace_printer import type_of
from thunder_flce.graph.transform import FuseLinearCrossEntropy
from thunder_flce.graph.unfused_cross_entropy import symbols as unfused_symbols
from thunder_flce.inspection.report import Compilation, SavedTensor

_VIEWS = ("view", "reshape", "torch_prims_reshape_impl")


def compilations(compiled: Any) -> list[Compilation] | None:
    """One for each trace that was compiled; None for what thunder has not compiled.

    Raises:
        ValueError: where it was compiled without `FuseLinearCrossEntropy`.
    """
    if isinstance(compiled, ThunderFXCompiledObject):
        # Ours has decided before thunder saw a graph, but for the regions that the user wrote, in lines of Dynamo's.
        decisions = getattr(compiled._backend, "decisions", None)
        fusions = _fusions(compiled._backend.thunder_options.get("transforms", ()))
        if decisions is None and not fusions:
            raise ValueError("it has no fusion; compile it with thunder_flce.thunderfx")
        of_thunder = (compilation.decisions for fusion in fusions for compilation in fusion.compilations)
        graphs = (*(decisions or ()), *filter(None, of_thunder))
        return [Compilation(decisions=each, compiled_by="thunderfx") for each in graphs]
    data = thunder.compile_data(compiled)
    if data is None:
        return None
    fusions = _fusions(data.transforms)
    if not fusions:
        raise ValueError("it has no FuseLinearCrossEntropy transform; compile it with thunder_flce.jit")
    passes = list(_passes(compiled))
    reports: list[Compilation] = []
    # The same transform may serve many functions.
    for compilation in fusions[0].compilations:
        traces = next((own for own in passes if any(trace is compilation.trace for trace in own[0])), None)
        if traces is not None:
            forward, backward = traces
            saved = (saved_tensors(forward[-1]) if is_static(*forward[-1].args) else None) if backward else []
            reports.append(
                Compilation(decisions=compilation.decisions, compiled_by="thunder", saved=saved, traces=forward)
            )
    return reports


def _fusions(transforms: Any) -> list[FuseLinearCrossEntropy]:
    return [transform for transform in transforms if isinstance(transform, FuseLinearCrossEntropy)]


def _passes(jitted: Any) -> Iterator[tuple[list[TraceCtx], list[TraceCtx]]]:
    """The traces of the forward and of the backward, of each compilation."""
    stats = thunder.compile_stats(jitted)
    for entry in stats.interpreter_cache:
        yield entry.computation_traces, entry.backward_traces
    # Without thunder's cache, the last compilation is all there is.
    if stats.last_traces is not None:
        yield stats.last_traces, stats.last_backward_traces


def saved_tensors(forward: TraceCtx) -> list[SavedTensor]:
    """The tensors that a final forward trace, one with a backward, saves for it, with their sizes and roles."""
    _, (saved, _) = forward.output
    roles = dict(_roles(forward.bound_symbols))
    producers = {out.name: bsym for bsym in forward.bound_symbols for out in bsym.flat_proxy_outs}
    arguments = {argument.name for argument in forward.args}

    def viewed(name: str) -> str:
        is_view = name not in arguments and producers[name].sym.name in _VIEWS
        return viewed(producers[name].flat_proxy_args[0].name) if is_view else name

    return [
        SavedTensor(
            name=tensor.name,
            type=type_of(tensor),
            bytes=tensor.numel * tensor.dtype.bytes,
            is_argument=viewed(tensor.name) in arguments,
            role=roles.get(tensor.name, ""),
        )
        for tensor in saved
    ]


def _roles(bsyms: list[BoundSymbol]) -> Iterator[tuple[str, str]]:
    for bsym in bsyms:
        if bsym.sym.id == symbols.linear_cross_entropy_fwd.id:
            names = list(settings_of(bsym.kwargs).result_names)
        elif bsym.sym.id == unfused_symbols.cross_entropy_fwd.id:
            names = ["loss", "row_max", "row_log_sum", "valid_count"]
        else:
            yield from _roles(bsym.subsymbols)
            continue
        yield from zip((out.name for out in bsym.output), names, strict=True)
