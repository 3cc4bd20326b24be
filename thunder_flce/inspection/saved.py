"""What a compiled forward saves for its backward, tensor by tensor."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import thunder
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from thunder_flce.engine.plan import Plan
from thunder_flce.graph import symbols
from thunder_flce.graph.thunder_private import build_cache_entry
from thunder_flce.graph.trace_arguments import call_of
from thunder_flce.graph.trace_printer import STATISTICS, type_of
from thunder_flce.graph.unfused_cross_entropy import symbols as unfused_symbols
from thunder_flce.operation.call import result_names

_VIEWS = ("view", "reshape", "torch_prims_reshape_impl")


@dataclass(frozen=True, kw_only=True)
class SavedTensor:
    """A tensor that the forward keeps alive for the backward."""

    name: str
    """In the trace."""

    type: str
    """dtype and shape, such as "bf16[8192, 4096]"."""

    bytes: int

    is_argument: bool
    """Whether it is an argument of the program, or a view of one: alive anyway."""

    role: str = ""
    """What it is to a loss: "row_max", "dW", …; "" where it has nothing to do with one of ours."""


def saved_for_backward(forward: TraceCtx) -> list[TensorProxy]:
    """The tensor proxies that a final forward trace, one with a backward, saves for it."""
    _, (tensors, _) = forward.output
    return list(tensors)


def saved_tensors(forward: TraceCtx) -> list[SavedTensor]:
    """The tensors that a final forward trace saves for the backward, with their sizes and roles."""
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
        for tensor in saved_for_backward(forward)
    ]


def saved_by_plain_thunder(jitted: Any, traces: Sequence[TraceCtx]) -> list[SavedTensor]:
    """What the same program saves without our executor and without any transform; nothing without a backward.

    Nothing runs and nothing is traced anew: thunder compiles the trace that it took of the user's program, from which
    its own compilation began. That takes as long as the rest of the first compilation did.

    Args:
        jitted: what `thunder.jit` returned.
        traces: the prologue, computation and epilogue traces with which one of its compilations began.
    """
    compiled = thunder.compile_data(jitted)
    executors = [executor for executor in compiled.executors_list if executor is not symbols.executor]
    # thunder wants a function, but is only asked for what compiles its trace.
    plain = thunder.jit(lambda: None, executors=executors, **compiled.compile_options)
    entry = build_cache_entry(thunder.compile_data(plain), thunder.compile_stats(plain), traces)
    return saved_tensors(entry.computation_traces[-1]) if entry.backward_traces else []


def _roles(bsyms: list[BoundSymbol]) -> Iterator[tuple[str, str]]:
    for bsym in bsyms:
        if bsym.sym.id == symbols.linear_cross_entropy_fwd.id:
            names = list(result_names(call_of(bsym.kwargs), Plan.of(bsym.kwargs)))
        elif bsym.sym.id == unfused_symbols.cross_entropy_fwd.id:
            names = ["loss", *STATISTICS]
        else:
            yield from _roles(bsym.subsymbols)
            continue
        yield from zip((out.name for out in bsym.output), names, strict=True)
