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
from thunder_flce.options import OPTIONS, Options, checked_strict


def compile_graph(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compiles a graph with Inductor, after fusing each linear + cross-entropy in it into one operator.

    Log-probabilities and entropies that the program spells out are fused, too. If the sizes are so small that fusion
    would gain nothing, the loss is left to Inductor, unless options of ours or CUDA graphs are chosen; if lengths
    change, PyTorch compiles the program once more for those that are not small. If gradients wait for the backward,
    logits are saved while they fit, and the program is again compiled once more for longer batches. If the model calls
    `linear_cross_entropy` itself, that call stays as it is, with its options. torch.compile calls this once per graph.

    Args:
        gm: the graph.
        example_inputs: its arguments, as Inductor takes them.
        mode: Inductor's mode.
        options: `strict` (raise a `NotFusedError`, with the reason, if a cross-entropy, a log-probability or an
            entropy is not fused with its linear), the fields of `thunder_flce.Options`, and the options of Inductor.

    Raises:
        TypeError, ValueError: if an option of ours has a value that is not allowed.
        RuntimeError: if an option is neither ours nor Inductor's.
    """
    flce_options, strict, inductor_options = split_options(options or {})
    inductor = Inductor(mode, inductor_options, None)
    from torch._inductor import config

    from thunder_flce.dynamo.fusion import fuse

    try:
        # The replay of a CUDA graph takes the host no time: then small losses are fused, too.
        is_replayed = inductor.config.get("triton.cudagraphs", config.triton.cudagraphs)
        decisions = fuse(gm, flce_options, strict=strict, leaves_small=not is_replayed)
    except NotFusedError as error:
        return raising(error)
    compiled = inductor(gm, example_inputs)
    # Only now: Inductor may have had Dynamo trace the program again, and then this graph is dropped.
    _graphs_of(_caller()).append(decisions)
    return compiled


class Inductor(torch._TorchCompileInductorWrapper):
    """The default backend of torch.compile, with larger frames for its programs."""

    def __call__(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compiles a graph."""
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner

        from thunder_flce.dynamo.frames import with_room

        # A backward may be compiled at its first call.
        inner = with_room(compile_fx_inner)
        return with_room(compile_fx)(gm, example_inputs, inner_compile=inner, config_patches=self.config)


def raising(error: Exception) -> Callable[..., Any]:
    """Returns a compiled graph that raises an error: Dynamo would hide one that its backend raises in its own."""

    def call(*args: Any) -> Any:
        raise error

    return call


def split_options(options: Mapping[str, Any]) -> tuple[Options, bool, dict[str, Any]]:
    """Returns our options, `strict`, and Inductor's options; raises the errors of `compile_graph` about them."""
    if not isinstance(options, Mapping):
        raise TypeError(f'options must be a dict, such as {{"chunk_rows": 512}}, but got {type(options).__name__}')
    if wrong := [name for name in options if not isinstance(name, str)]:
        raise TypeError(f"the names of options must be strings, but got {wrong[0]!r}")
    ours = {name: value for name, value in options.items() if name in OPTIONS}
    strict = checked_strict(options.get("strict", False))
    inductor_options = {name: value for name, value in options.items() if name not in {*OPTIONS, "strict"}}
    from torch._inductor import config

    inductor_names = config.get_config_copy()
    for name in inductor_options:
        if name.replace("-", "_") not in inductor_names:
            similar = difflib.get_close_matches(name, [*sorted(OPTIONS), "strict", *inductor_names], n=1)
            meant = f"; did you mean {similar[0]!r}?" if similar else "."
            raise RuntimeError(
                f"the backend thunder_flce has no option {name!r}{meant} Its own are "
                f"{', '.join(sorted({*OPTIONS, 'strict'}))}; all others are Inductor's, which "
                "torch._inductor.list_options() lists"
            )
    return Options(**ours), strict, inductor_options


# torch.compile makes a wrapper in each of its calls, and calls the backend through it.
_callers: "WeakValueDictionary[int, Any]" = WeakValueDictionary()


def _caller() -> Any:
    """Returns torch.compile's wrapper, from its frame, since a backend is not told it; None if there is none."""
    frame: Any = sys._getframe(2)  # That of `compile_graph`'s caller, which may be a backend around it.
    while frame is not None and not isinstance(frame.f_locals.get("self"), torch._TorchCompileWrapper):
        frame = frame.f_back
    return frame and frame.f_locals["self"]


def _graphs_of(caller: Any) -> list[list[Decision]]:
    if not isinstance(caller, torch._TorchCompileWrapper):
        return []
    _callers[id(caller)] = caller
    return vars(caller).setdefault("_thunder_flce_graphs", [])


def compiled_graphs(compiled: Any) -> list[list[Decision]] | None:
    """Returns the decisions about each graph of a function from torch.compile, or of a module after `module.compile()`.

    Returns None for another backend.

    torch.compile shares code between calls with the same options, such as for two instances of a class. If nothing was
    compiled for this function, the decisions are those of all calls that it may share code with.
    """
    compiled = getattr(compiled, "_compiled_call_impl", None) or compiled
    cells = getattr(getattr(compiled, "get_compiler_config", None), "__closure__", None) or ()
    caller = next((cell.cell_contents.callback for cell in cells if hasattr(cell.cell_contents, "callback")), None)
    for name in ("_torchdynamo_orig_backend", "_torchdynamo_orig_callable"):  # the second in torch 2.8
        while hasattr(caller, name):
            caller = getattr(caller, name)
    if getattr(caller, "compiler_fn", None) is not compile_graph and not hasattr(caller, "_thunder_flce_graphs"):
        return None
    others = (graph for other in _callers.values() if other == caller for graph in _graphs_of(other))
    return _graphs_of(caller) or list(others)


def _reset() -> None:
    """Called by torch.compiler.reset()."""
    from torch._inductor.cudagraph_trees import reset_cudagraph_trees

    reset_cudagraph_trees()


compile_graph.reset = _reset  # type: ignore[attr-defined]
