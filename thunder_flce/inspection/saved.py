"""What a compiled forward saves for its backward, tensor by tensor."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import thunder
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from thunder_flce.graph import symbols
from thunder_flce.graph.trace_printer import STATISTICS, output_names, type_of

# Everything else that thunder asks of a compilation is read from the traces themselves.
_CACHE_INFO = {"no_grad_sync": False, "alias_tensor_indices": ""}
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
    """The same with sizes, and what they are."""
    roles = dict(_roles(forward.bound_symbols))
    return [
        SavedTensor(
            name=tensor.name,
            type=type_of(tensor),
            bytes=tensor.numel * tensor.dtype.bytes,
            is_argument=is_argument_or_view(tensor, forward),
            role=roles.get(tensor.name, ""),
        )
        for tensor in saved_for_backward(forward)
    ]


def is_argument_or_view(tensor: TensorProxy, trace: TraceCtx) -> bool:
    """Whether a tensor of a trace is one of its arguments, or shares the memory of one."""
    producers = {out.name: bsym for bsym in trace.bound_symbols for out in bsym.flat_proxy_outs}
    arguments = {argument.name for argument in trace.args}
    name = tensor.name
    while name not in arguments:
        producer = producers[name]
        if producer.sym.name not in _VIEWS:
            return False
        name = producer.flat_proxy_args[0].name
    return True


def plain_thunder_traces(jitted: Any, traces: list[list[TraceCtx]]) -> tuple[list[TraceCtx], list[TraceCtx]]:
    """Forward and backward traces of the same program without our executor and without any transform.

    Nothing runs and nothing is traced anew: thunder compiles the trace that it took of the user's program, from which
    its own compilation began. That takes as long as the rest of the first compilation did.

    Args:
        jitted: what `thunder.jit` returned.
        traces: the prologue, computation and epilogue traces of one compilation, each in the order of its passes.
    """
    compiled = thunder.compile_data(jitted)
    executors = [executor for executor in compiled.executors_list if executor is not symbols.executor]
    plain = thunder.jit(_nothing, executors=executors, **compiled.compile_options)
    data, stats = thunder.compile_data(plain), thunder.compile_stats(plain)
    first = (passes[0] for passes in traces)
    entry = data.apply_transforms_and_build_cache_entry(data, stats, dict(_CACHE_INFO), *first)
    return entry.computation_traces, entry.backward_traces


def _nothing() -> None:
    """thunder wants a function, but is only asked for what compiles its trace."""


def _roles(bsyms: list[BoundSymbol]) -> Iterator[tuple[str, str]]:
    for bsym in bsyms:
        if bsym.sym.id == symbols.linear_cross_entropy_fwd.id:
            names = output_names(bsym.kwargs)
        elif bsym.sym.id == symbols.cross_entropy_fwd.id:
            names = ["loss", *STATISTICS]
        elif bsym.sym.id == symbols.cross_entropy_probabilities_fwd.id:
            names = ["loss", *STATISTICS[:2]]
        else:
            yield from _roles(bsym.subsymbols)
            continue
        yield from zip((out.name for out in bsym.output), names, strict=True)
