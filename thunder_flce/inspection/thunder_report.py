"""Reports on programs that thunder compiled: their decisions, and the tensors that a forward saves for its backward."""

from collections.abc import Iterator
from typing import Any

import thunder
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx
from thunder.dynamo.compiler import ThunderFXCompiledObject

from thunder_flce.graph import symbols
from thunder_flce.graph.reading import is_static
from thunder_flce.graph.trace_arguments import settings_of
from thunder_flce.graph.trace_printer import type_of
from thunder_flce.graph.transform import FuseLinearCrossEntropy
from thunder_flce.graph.unfused_cross_entropy import symbols as unfused_symbols
from thunder_flce.inspection.report import Compilation, SavedTensor

_VIEWS = ("view", "reshape", "torch_prims_reshape_impl")


def compilations(compiled: Any) -> list[Compilation] | None:
    """Returns a `Compilation` for each compiled trace; None if thunder has not compiled `compiled`.

    Raises:
        ValueError: if it was compiled without `FuseLinearCrossEntropy`.
    """
    if isinstance(compiled, ThunderFXCompiledObject):
        backend = compiled._backend
        # Our backend decides on Dynamo's graphs. thunder adds decisions about regions that the user wrote, whose
        # source is a line of Dynamo's code.
        decisions, options = getattr(backend, "decisions", None), backend.thunder_options
        if decisions is None and not _has_fusion(options.get("executors", ()), options.get("transforms", [])):
            raise ValueError("compiled has no fusion; compile the program with thunder_flce.thunderfx")
        functions = [function for info in backend.subgraph_infos for function in info.thunder_compiled_fns or ()]
        thunder_decisions = [report.decisions for function in functions for report in compilations(function) or ()]
        graphs = (*(decisions or ()), *filter(None, thunder_decisions))
        return [Compilation(decisions=graph, compiled_by="thunderfx") for graph in graphs]
    data = thunder.compile_data(compiled)
    if data is None:
        return None
    if not _has_fusion(data.executors_list, data.transforms):
        raise ValueError("compiled has no fusion; compile the program with thunder_flce.jit")
    # One transform may serve many functions, and the executor adds a transform to each program that has a loss.
    fusions = [transform for transform in data.transforms if isinstance(transform, FuseLinearCrossEntropy)]
    decided = {id(report.trace): report.decisions for fusion in fusions for report in fusion.compilations}
    reports: list[Compilation] = []
    for forward, backward in _forward_and_backward_traces(compiled):
        trace_decisions = next((decided[id(trace)] for trace in forward if id(trace) in decided), [])
        saved = (saved_tensors(forward[-1]) if is_static(*forward[-1].args) else None) if backward else []
        reports.append(Compilation(decisions=trace_decisions, compiled_by="thunder", saved=saved))
    return reports


def _has_fusion(executors: Any, transforms: Any) -> bool:
    """Whether a program has a fusion, or our executor and a list of transforms, to which the executor adds a fusion."""
    has_executor = any(each in (symbols.executor, "flce") for each in executors) and isinstance(transforms, list)
    return has_executor or any(isinstance(transform, FuseLinearCrossEntropy) for transform in transforms)


def _forward_and_backward_traces(jitted: Any) -> list[tuple[list[TraceCtx], list[TraceCtx]]]:
    """Returns, for each compilation, the traces of the forward and those of the backward."""
    stats = thunder.compile_stats(jitted)
    # Without thunder's cache, only the last compilation is known.
    last = [] if stats.last_traces is None else [(stats.last_traces, stats.last_backward_traces)]
    return [(entry.computation_traces, entry.backward_traces) for entry in stats.interpreter_cache] or last


def saved_tensors(forward: TraceCtx) -> list[SavedTensor]:
    """Returns the tensors that a forward's final trace saves for its backward, with their sizes and roles."""
    _, (saved, _) = forward.output
    roles = dict(_roles(forward.bound_symbols))
    producers = {out.name: bsym for bsym in forward.bound_symbols for out in bsym.flat_proxy_outs}
    arguments = {argument.name for argument in forward.args}

    def base_of(name: str) -> str:
        is_view = name not in arguments and producers[name].sym.name in _VIEWS
        return base_of(producers[name].flat_proxy_args[0].name) if is_view else name

    return [
        SavedTensor(
            name=tensor.name,
            type=type_of(tensor),
            bytes=tensor.numel * tensor.dtype.bytes,
            is_argument=base_of(tensor.name) in arguments,
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
