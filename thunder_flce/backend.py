"""The backend "thunder_flce" of torch.compile: its options, and the graphs that it has compiled.

torch.compile finds `compile_graph` by its entry point. Nothing here imports thunder.
"""

import difflib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.fx import GraphModule

from thunder_flce.matching.decisions import Decision, NotFusedError
from thunder_flce.options import OPTIONS, Options


def compile_graph(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Inductor, with each linear + cross-entropy of the graph fused into one operator before.

    The same for log-probabilities and entropies that are spelled out. Where nothing could be gained, as the sizes are
    small, the loss is left to Inductor, unless options of ours or CUDA graphs are asked for; with lengths that change,
    PyTorch compiles the program once more for those with which it is not small. Where gradients wait for the backward,
    logits are saved while they fit, and again longer batches are compiled once more. A `linear_cross_entropy` that the
    model calls itself stays as it is, with the options of that call. Called by torch.compile, once for each graph.

    Args:
        gm: the graph.
        example_inputs: its arguments, as Inductor takes them.
        mode: Inductor's.
        options: `strict` (raise a `NotFusedError`, with the reason, where a cross-entropy, a log-probability or an
            entropy is not fused with its linear), the fields of `thunder_flce.Options`, and those of Inductor.

    Raises:
        TypeError, ValueError: for an option of ours with a value that it cannot have.
        RuntimeError: for an option that neither we nor Inductor have.
    """
    flce_options, strict, inductor_options = _split(options or {})
    inductor = Inductor(mode, inductor_options, None)
    from torch._inductor import config

    from thunder_flce.dynamo.fusion import fuse

    try:
        # A graph that is replayed takes the host no time.
        is_replayed = inductor.config.get("triton.cudagraphs", config.triton.cudagraphs)
        decisions = fuse(gm, flce_options, strict=strict, leaves_small=not is_replayed)
    except NotFusedError as error:
        return raising(error)
    compiled = inductor(gm, example_inputs)
    # Dynamo may have to trace the program again, and then drops this graph: only now is it known that it stays.
    _graphs_of(_caller()).append(decisions)
    return compiled


class Inductor(torch._TorchCompileInductorWrapper):
    """What torch.compile calls by default, but for the frames of its programs."""

    def __call__(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compiles a graph."""
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner

        from thunder_flce.dynamo.frames import with_room

        # A backward may be compiled at its first call.
        inner = with_room(compile_fx_inner)
        return with_room(compile_fx)(gm, example_inputs, inner_compile=inner, config_patches=self.config)


def raising(error: Exception) -> Callable[..., Any]:
    """A compiled graph that raises: Dynamo would hide what its backend raises in an error of its own."""

    def call(*args: Any) -> Any:
        raise error

    return call


def _split(options: Mapping[str, Any]) -> tuple[Options, bool, dict[str, Any]]:
    """Our options, `strict`, and Inductor's options."""
    if not isinstance(options, Mapping):
        raise TypeError(f'options must be a dict, such as {{"chunk_rows": 512}}, but got {type(options).__name__}')
    if wrong := [name for name in options if not isinstance(name, str)]:
        raise TypeError(f"the names of options must be strings, but got {wrong[0]!r}")
    ours = {name: value for name, value in options.items() if name in OPTIONS}
    strict = options.get("strict", False)
    if not isinstance(strict, bool):
        raise TypeError(f"the option strict must be True or False, but got {strict!r}")
    others = {name: value for name, value in options.items() if name not in {*OPTIONS, "strict"}}
    from torch._inductor import config

    known = [*sorted(OPTIONS), "strict", *config.get_config_copy()]
    for name in others:
        if name.replace("-", "_") not in known:
            similar = difflib.get_close_matches(name, known, n=1)
            meant = f"; did you mean {similar[0]!r}?" if similar else "."
            raise RuntimeError(
                f"the backend thunder_flce has no option {name!r}{meant} Its own are "
                f"{', '.join(sorted({*OPTIONS, 'strict'}))}; all others are Inductor's, which "
                "torch._inductor.list_options() lists"
            )
    return Options(**ours), strict, others


# torch.compile makes one of these for each of its calls, and calls the backend through it.
_callers: "WeakValueDictionary[int, Any]" = WeakValueDictionary()


def _caller() -> Any:
    """The torch.compile that `compile_graph` was called for: it is told to a backend by nothing else."""
    return sys._getframe(2).f_locals.get("self")


def _graphs_of(caller: Any) -> list[list[Decision]]:
    if not isinstance(caller, torch._TorchCompileWrapper):
        return []
    _callers[id(caller)] = caller
    return vars(caller).setdefault("_thunder_flce_graphs", [])


def compiled_graphs(compiled: Any) -> list[list[Decision]] | None:
    """The decisions about each graph of what torch.compile returned, or of a module after `module.compile()`.

    None for another backend.

    torch.compile shares code between calls with the same options, such as for two instances of a class. Where nothing
    was compiled for this one, these are the graphs of all calls that it may share code with.
    """
    compiled = getattr(compiled, "_compiled_call_impl", None) or compiled
    cells = getattr(getattr(compiled, "get_compiler_config", None), "__closure__", None) or ()
    caller = next((cell.cell_contents.callback for cell in cells if hasattr(cell.cell_contents, "callback")), None)
    for name in ("_torchdynamo_orig_backend", "_torchdynamo_orig_callable"):  # the second in torch 2.8
        while hasattr(caller, name):
            caller = getattr(caller, name)
    if getattr(caller, "compiler_fn", None) is not compile_graph:
        return None
    others = (graph for other in _callers.values() if other == caller for graph in _graphs_of(other))
    return _graphs_of(caller) or list(others)


def _reset() -> None:
    """Called by torch.compiler.reset()."""
    from torch._inductor.cudagraph_trees import reset_cudagraph_trees

    reset_cudagraph_trees()


compile_graph.reset = _reset  # type: ignore[attr-defined]
