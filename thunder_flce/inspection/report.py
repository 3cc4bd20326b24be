"""`explain`: what was decided about each loss, its memory, what is saved, and how long compiling took."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import thunder
from thunder.core.proxies import DistParallelType
from thunder.core.trace import TraceCtx

from thunder_flce.backend import CompiledGraph, compiled_graphs
from thunder_flce.device import Device
from thunder_flce.engine.choose import alternatives, temporary_bytes
from thunder_flce.engine.kernels import dispatch
from thunder_flce.engine.matmul.algorithms import tunings
from thunder_flce.engine.plan import Plan
from thunder_flce.engine.printing import program
from thunder_flce.graph.decisions import PLURALS, Decision
from thunder_flce.graph.rules import PlannedRegion
from thunder_flce.graph.transform import Compilation, FuseLinearCrossEntropy
from thunder_flce.inspection.formatting import Block, format_bytes, heading, print_text, table
from thunder_flce.inspection.fusions import definitions
from thunder_flce.inspection.saved import SavedTensor, saved_by_plain_thunder, saved_tensors
from thunder_flce.inspection.subgraphs import Part, parts, source_line


@dataclass(frozen=True, kw_only=True)
class PredictedPlan:
    """A way to run a region, and what it is predicted to take."""

    plan: Plan
    chosen: bool
    temporary_bytes: int
    """Peak memory above the region's inputs and gradients."""


class _Passes(NamedTuple):
    """The traces of one compilation, each list in the order of thunder's passes."""

    prologue: list[TraceCtx]
    computation: list[TraceCtx]
    epilogue: list[TraceCtx]
    backward: list[TraceCtx]


@dataclass(frozen=True, kw_only=True)
class CompilationReport:
    """What can be said about one compiled trace."""

    decisions: list[Decision]
    """One for each cross-entropy, log-probability or entropy, fused or not."""

    traces: list[TraceCtx] = field(repr=False)
    """The traces of the forward, in the order of thunder's passes; print one to read it. Of what Inductor compiled, the
    loss region before and after the transform, where a prime from 2¹⁹ on stands for a symbolic size."""

    compile_seconds: dict[str, float] = field(repr=False)
    """By step: ours, and what thunder recorded of its own, to the millisecond. "tracing" is the interpreter's time,
    which thunder keeps for the last compilation only; "region" the time to trace a region of Inductor's graph and to
    write it back."""

    saved: list[SavedTensor] = field(default_factory=list, repr=False)
    """What the forward saves for the backward, as far as that is known; nothing where there is no backward."""

    _has_backward: bool | None = field(default=None, repr=False)
    """None where nobody knows."""
    _plain: Callable[[], list[SavedTensor] | None] = field(default=lambda: None, repr=False)
    """Compiles the same program without this package, for `saved_by_plain_thunder`."""

    @staticmethod
    def plans(decision: Decision) -> list[PredictedPlan]:
        """The plan of a region, and its alternatives; nothing where it was not fused."""
        if decision.region is None:
            return []
        call, chosen = decision.region
        return [
            PredictedPlan(plan=plan, chosen=plan is chosen, temporary_bytes=temporary_bytes(call, plan))
            for plan in (chosen, *alternatives(call, chosen, Device.of(call.device)))
        ]

    @cached_property
    def saved_by_plain_thunder(self) -> list[SavedTensor] | None:
        """What the forward would save without this package; see `saved.saved_by_plain_thunder`.

        None if not asked for, for what Inductor compiled, and where parameters are divided among ranks: the trace that
        thunder began with has them whole, but takes their parts. Raises what thunder raises for a program that it
        cannot compile by itself.
        """
        return self._plain()

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for `json.dump`; sizes in bytes, times in seconds."""
        plain = self.saved_by_plain_thunder
        return {
            "cross_entropies": list(map(_decision_dict, self.decisions)),
            "saved_for_backward": [asdict(tensor) for tensor in self.saved],
            "saved_by_plain_thunder": None if plain is None else [asdict(tensor) for tensor in plain],
            "compile_seconds": self.compile_seconds,
        }

    def blocks(self) -> Iterator[Block]:
        """The report as blocks of text."""
        for decision in self.decisions:
            yield from _decision_blocks(decision)
        if self._has_backward:
            yield from _saved_blocks("saved for backward", self.saved)
            try:
                plain = self.saved_by_plain_thunder
            except Exception as error:
                yield Block(f"plain thunder does not compile this program: {type(error).__name__}: {error}")
            else:
                yield from [] if plain is None else _saved_blocks("saved by plain thunder", plain)
        elif self._has_backward is not None:
            yield Block("nothing is saved: there is no backward")
        times = sorted(self.compile_seconds.items(), key=lambda item: -item[1])
        yield Block("compile times: " + ", ".join(f"{name} {seconds:.3f} s" for name, seconds in times))


@dataclass(frozen=True)
class GraphReport:
    """What a jitted function was compiled to or, for thunderfx, one part of a graph."""

    name: str
    """"" for a jitted function, else which graph and part."""

    compiled_by: str
    """"thunder", "Inductor" or "eager PyTorch"."""

    compilations: list[CompilationReport]
    """One for each set of shapes that it was called with."""

    others: list[Decision]
    """The cross-entropies of a part that thunder does not compile."""

    split_reasons: Sequence[str]
    """Why its graph was cut into parts, as thunder put it."""

    @property
    def is_compiled(self) -> bool:
        """Whether anything was; thunder may not have been called yet."""
        return self.compiled_by != "thunder" or bool(self.compilations)

    @property
    def decisions(self) -> list[Decision]:
        """One for each cross-entropy, log-probability or entropy of each compilation."""
        return [*(d for compilation in self.compilations for d in compilation.decisions), *self.others]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for `json.dump`."""
        return {
            "name": self.name,
            "compiled_by": self.compiled_by,
            "split_reasons": list(self.split_reasons),
            "compilations": [compilation.to_dict() for compilation in self.compilations],
            "cross_entropies_not_compiled_by_thunder": list(map(_decision_dict, self.others)),
        }

    def blocks(self) -> Iterator[Block]:
        """The report as blocks of text."""
        if self.name:
            yield heading(f"{self.name}, compiled by {self.compiled_by}")
        for decision in self.others:
            yield from _decision_blocks(decision)
        for number, compilation in enumerate(self.compilations):
            if len(self.compilations) > 1:
                yield heading(f"compilation {number}")
            yield from compilation.blocks()


@dataclass(frozen=True, repr=False)
class Report(Sequence):
    """What `explain` returns: a sequence of compilations, and text for people.

    `str(report)` is plain text; `report.print()` and `rich.print(report)` use rich's colours on a terminal.
    """

    graphs: list[GraphReport]

    @property
    def compilations(self) -> list[CompilationReport]:
        """The compilations of all graphs; indexing and iterating the report is a shorthand for this."""
        return [compilation for graph in self.graphs for compilation in graph.compilations]

    @property
    def decisions(self) -> list[Decision]:
        """The decisions of all graphs, the parts that thunder does not compile included."""
        return [decision for graph in self.graphs for decision in graph.decisions]

    def __len__(self) -> int:
        return len(self.compilations)

    def __getitem__(self, index):
        return self.compilations[index]

    def nvfuser_definitions(self) -> dict[str, str]:
        """The fusions of every plan, as nvFuser prints them, by direction and name, such as "backward: gradient".

        Where two of one name differ, the names are numbered.
        """
        return definitions(decision.region for decision in self.decisions if decision.region)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for `json.dump`; sizes in bytes, times in seconds."""
        return {
            "graphs": [graph.to_dict() for graph in self.graphs],
            "tuned_products": [tuning.to_dict() for tuning in tunings()],
        }

    def print(self) -> None:
        """Prints the report: with rich on a terminal, if it is installed, and as plain text otherwise."""
        print_text(str(self), self.__rich__)

    def blocks(self) -> Iterator[Block]:
        """The report as blocks of text."""
        if not any(graph.is_compiled for graph in self.graphs):
            yield heading("nothing is compiled yet: call it first")
            return
        yield heading(f"thunder_flce: {self._fused()}")
        reasons = dict.fromkeys(reason for graph in self.graphs for reason in graph.split_reasons)
        if reasons:
            yield Block("thunder cut a graph because of:\n" + "\n".join(f"- {reason}" for reason in reasons))
        for graph in self.graphs:
            yield from graph.blocks()
        if tuned := tunings():
            yield Block("products tuned in this process:")
            columns = ("product", "M × N × K", "time", "times as fast as cuBLAS's first choice", "measured in")
            sizes = [" × ".join(map(str, found.sizes)) for found in tuned]
            rows = [
                (found.product, size, f"{found.milliseconds:.3f} ms", f"{found.gain:.3f}", f"{found.seconds:.2f} s")
                for found, size in zip(tuned, sizes, strict=True)
            ]
            yield table(columns, rows, right=(1, 2, 3, 4))

    def _fused(self) -> str:
        """How many of each kind, such as "1 of 1 cross-entropies fused"."""
        counts = []
        for kind, plural in PLURALS.items():
            fused = [decision.fused for decision in self.decisions if decision.kind == kind]
            counts += [f"{sum(fused)} of {len(fused)} {plural}"] if fused else []
        return f"{', '.join(counts)} fused" if counts else f"no {', '.join(PLURALS)}"

    def __str__(self) -> str:
        return "\n".join(block.text for block in self.blocks())

    def __repr__(self) -> str:
        return f"<Report: {len(self)} compilations, {self._fused()}>"

    def __rich__(self):
        from rich.console import Group
        from rich.text import Text

        return Group(*(Text(block.text, style=block.style) for block in self.blocks()))


def explain(jitted: Callable, *, against_plain_thunder: bool = True) -> Report:
    """What was decided about each loss, for each trace that a jitted function or module has compiled.

    Args:
        jitted: what `thunder_flce.jit`, `thunder.jit` with our transform, `thunder.compile` with our plugin or
            `thunderfx` with our transform returned; or `torch.compile` with the backend "thunder_flce".
        against_plain_thunder: whether the report compares what is saved for backward with what thunder would save
            without us. For that, thunder compiles the same trace again when the report is printed or turned into a
            dict: nothing runs, and no arguments are needed, but a large model takes some seconds.

    Returns:
        A `Report`: print it, call its `to_dict()`, or read `report[0].decisions[0]`.

    Raises:
        TypeError: where jitted was not compiled by thunder.
        ValueError: where it was not compiled with `FuseLinearCrossEntropy`.
    """
    if (graphs := compiled_graphs(jitted)) is not None:
        return Report([_inductor_report(number, graph) for number, graph in enumerate(graphs)])
    backend: Any = getattr(jitted, "_backend", jitted)
    if hasattr(backend, "subgraph_infos"):
        transforms, found = backend.thunder_options.get("transforms", ()), parts(backend)
    elif (data := thunder.compile_data(jitted)) is not None:
        transforms, found = data.transforms, iter([Part("", "thunder", jitted)])
    else:
        raise TypeError(
            'jitted must have been compiled by thunder, or by torch.compile with the backend "thunder_flce", but got '
            f"{type(jitted).__name__}"
        )
    transform = next((transform for transform in transforms if isinstance(transform, FuseLinearCrossEntropy)), None)
    if transform is None:
        raise ValueError("jitted has no FuseLinearCrossEntropy transform; compile it with thunder_flce.jit")
    return Report([_graph_report(part, transform, against_plain_thunder) for part in found])


def _inductor_report(number: int, graph: CompiledGraph) -> GraphReport:
    compilations = [
        CompilationReport(
            decisions=fusion.compilation.decisions,
            traces=[fusion.compilation.trace, fusion.after],
            compile_seconds={
                "region": fusion.tracing_seconds,
                "thunder_flce": fusion.compilation.seconds,
                "Inductor": graph.seconds,
            },
        )
        for fusion in graph.fusions
    ]
    return GraphReport(f"graph {number}", "Inductor", compilations, [], ())


def _graph_report(part: Part, transform: FuseLinearCrossEntropy, against_plain_thunder: bool) -> GraphReport:
    if part.compiled_by != "thunder":
        return GraphReport(part.name, part.compiled_by, [], part.cross_entropies(), part.split_reasons)
    compilations = []
    passes = _compilation_passes(part.compiled)
    # The same transform may serve many functions.
    for compilation in transform.compilations:
        own = next((p for p in passes if any(trace is compilation.trace for trace in p.computation)), None)
        if own is not None:
            compilations.append(_thunder_report(part, compilation, own, against_plain_thunder=against_plain_thunder))
    return GraphReport(part.name, part.compiled_by, compilations, [], part.split_reasons)


def _thunder_report(
    part: Part, compilation: Compilation, passes: _Passes, *, against_plain_thunder: bool
) -> CompilationReport:
    kinds = {getattr(arg, "distparallel_type", DistParallelType.NONE) for arg in compilation.trace.args}
    is_divided = bool(kinds - {DistParallelType.NONE, DistParallelType.REPLICATED})

    def plain() -> list[SavedTensor] | None:
        if not against_plain_thunder or is_divided:
            return None
        return saved_by_plain_thunder(part.compiled, [passes.prologue[0], passes.computation[0], passes.epilogue[0]])

    stats = thunder.compile_stats(part.compiled)
    seconds = {}
    if stats.last_traces is passes.computation and stats.last_trace_tracing_stop > 0:
        seconds["tracing"] = (stats.last_trace_tracing_stop - stats.last_trace_tracing_start) / 1e9
    seconds["thunder_flce"] = compilation.seconds
    for trace in (*passes.computation, *passes.backward):
        provenance = str(trace.get_provenance() or "")
        if found := re.search(r"Constructed by (.*) \(took (\d+) milliseconds\)", provenance):
            seconds[found[1]] = seconds.get(found[1], 0.0) + int(found[2]) / 1e3
    return CompilationReport(
        decisions=list(map(part.with_user_source, compilation.decisions)),
        traces=passes.computation,
        saved=saved_tensors(passes.computation[-1]) if passes.backward else [],
        _has_backward=bool(passes.backward),
        _plain=plain,
        compile_seconds=seconds,
    )


def _compilation_passes(jitted: Callable) -> list[_Passes]:
    stats = thunder.compile_stats(jitted)
    passes = [
        _Passes(entry.prologue_traces, entry.computation_traces, entry.epilogue_traces, entry.backward_traces)
        for entry in stats.interpreter_cache
    ]
    # Without thunder's cache, the last compilation is all there is.
    if stats.last_traces is not None:
        last = (stats.last_prologue_traces, stats.last_traces, stats.last_epilogue_traces, stats.last_backward_traces)
        passes.append(_Passes(*last))
    return passes


def _decision_dict(decision: Decision) -> dict[str, Any]:
    region = decision.region
    return {
        "kind": decision.kind,
        "source": decision.source,
        "line": source_line(decision),
        "fused": decision.fused,
        "plan": None if region is None else asdict(region.plan),
        "missing_row_kernels": _missing_row_kernels(region) if region else None,
        "reason": None if decision.reason is None else decision.reason.name,
        "sentence": str(decision).removeprefix(f"{decision.source}: "),
        "plans": list(map(asdict, CompilationReport.plans(decision))),
        "runs": _runs(region) if region else {},
    }


def _decision_blocks(decision: Decision) -> Iterator[Block]:
    """Where, what and why, the line of the user's source and, where it was fused, what runs and what else could."""
    yield Block(str(decision), "green" if decision.fused else "yellow")
    if line := source_line(decision):
        yield Block(f"  {line}", "dim")
    if decision.region is None:
        return
    if missing := _missing_row_kernels(decision.region):
        yield Block(missing, "yellow")
    for direction, lines in _runs(decision.region).items():
        yield Block("\n".join([f"  {direction}:", *(f"    {line}" for line in lines)]))
    rows = [
        ("▸" if found.chosen else "", found.plan.describe(), format_bytes(found.temporary_bytes))
        for found in CompilationReport.plans(decision)
    ]
    yield table(("", "plan", "memory, predicted"), rows, right=(2,))


def _runs(region: PlannedRegion) -> dict[str, list[str]]:
    """What runs in each direction, as lines of text."""
    found = program(*region)
    return {name: list(lines) for name, lines in (("forward", found.forward), ("backward", found.backward)) if lines}


# Of the default plan on an H200: with PyTorch's operations 39% (S1) to 96% (U2) longer than with Triton's kernels, with
# nvFuser's fusions 2% (S1, S4, U1) to 10% (S2), see traces/h200/backends.jsonl.
_SLOWER = {"nvFuser": "takes 2 to 10% longer", "PyTorch": "takes about 1.4 to 2 times as long"}


def _missing_row_kernels(region: PlannedRegion) -> str | None:
    """What "auto" would use if it were installed, and what that costs; None where nothing is missing."""
    call, plan = region
    logits: dict[str, Any] = {"dtype": plan.logits_dtype(call.dtype), "device_type": call.device.type}
    missing = dispatch.missing(**logits)
    if plan.row_kernels != "auto" or missing is None:
        return None
    instead = dispatch.library(plan.row_kernels, **logits)
    what = f"{missing.library} ({missing.install})"
    return f"row kernels: not installed: {what}; {instead} runs their share, and the region {_SLOWER[instead]}"


# A large model saves hundreds of tensors; text shows the largest, and `to_dict` has all.
_LONGEST_TABLE = 12


def _saved_blocks(title: str, tensors: list[SavedTensor]) -> Iterator[Block]:
    arguments = sum(tensor.bytes for tensor in tensors if tensor.is_argument)
    own = [tensor for tensor in tensors if not tensor.is_argument]
    total = sum(tensor.bytes for tensor in own)
    sizes = f"{format_bytes(total)} ({total:,} bytes), and {format_bytes(arguments)} of arguments"
    yield Block(f"{title}: {sizes}", "bold")
    own.sort(key=lambda tensor: (not tensor.role, -tensor.bytes))
    rows = [(tensor.name, tensor.role, tensor.type, f"{tensor.bytes:,}") for tensor in own[:_LONGEST_TABLE]]
    if rest := own[_LONGEST_TABLE:]:
        rows.append((f"{len(rest)} more", "", "", f"{sum(tensor.bytes for tensor in rest):,}"))
    if rows:
        yield table(("tensor", "of a loss", "type", "bytes"), rows, right=(3,))
