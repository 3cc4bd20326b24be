"""`explain`: what was decided about each cross-entropy, what it costs, what is saved, and how long compiling took."""

import linecache
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import thunder
from thunder.core.trace import TraceCtx

from thunder_flce.execution.compile_times import compile_seconds
from thunder_flce.execution.matmul.tuning import tunings
from thunder_flce.graph.trace_printer import stage_rows
from thunder_flce.graph.transform import Compilation, Decision, FuseLinearCrossEntropy
from thunder_flce.inspection import formatting
from thunder_flce.inspection.fusions import fusion_definitions
from thunder_flce.inspection.saved import SavedTensor, plain_thunder_traces, saved_tensors
from thunder_flce.inspection.subgraphs import parts
from thunder_flce.planning import cost
from thunder_flce.planning.plan import Plan, temporary_bytes
from thunder_flce.planning.steps import Stage, backward_stages, forward_stages


@dataclass(frozen=True, kw_only=True)
class PredictedPlan:
    """A way to run a region, and what it is predicted to take."""

    plan: Plan
    chosen: bool
    temporary_bytes: int
    """Peak memory above the region's inputs and gradients."""

    seconds: float | None
    """Forward and backward; None where the device's rates are unknown, see `cost`."""


@dataclass(frozen=True)
class _Passes:
    """The traces of one compilation, each list in the order of thunder's passes."""

    prologue: list[TraceCtx]
    computation: list[TraceCtx]
    epilogue: list[TraceCtx]
    backward: list[TraceCtx]


@dataclass(frozen=True)
class CompilationReport:
    """What can be said about one compiled trace."""

    decisions: list[Decision]
    """One for each cross-entropy, fused or not."""

    _compilation: Compilation = field(repr=False)
    _passes: _Passes = field(repr=False)
    _jitted: Callable = field(repr=False)
    _against_plain_thunder: bool = field(repr=False)

    def plans(self, decision: Decision) -> list[PredictedPlan]:
        """The plan of a fused cross-entropy, and its alternatives."""
        region = decision.region
        name = cost.device_name(region.problem.device_type)
        return [
            PredictedPlan(
                plan=planned.plan,
                chosen=planned is region,
                temporary_bytes=temporary_bytes(planned.problem, planned.plan),
                seconds=cost.predicted_seconds(planned, name),
            )
            for planned in (region, *cost.alternatives(region))
        ]

    @property
    def saved(self) -> list[SavedTensor]:
        """What the forward saves for the backward; nothing where there is no backward."""
        return saved_tensors(self._passes.computation[-1]) if self._passes.backward else []

    @cached_property
    def saved_by_plain_thunder(self) -> list[SavedTensor] | None:
        """What it would save without us; None if not asked for. See `saved.plain_thunder_traces` for what it takes."""
        if not self._against_plain_thunder:
            return None
        passes = [self._passes.prologue, self._passes.computation, self._passes.epilogue]
        forward, backward = plain_thunder_traces(self._jitted, passes)
        return saved_tensors(forward[-1]) if backward else []

    @property
    def compile_seconds(self) -> dict[str, float]:
        """Time by step, in seconds: ours, and what thunder recorded of its own, to the millisecond.

        "tracing" is the interpreter's time; thunder keeps it for the last compilation only. What nvFuser and Triton
        compiled ("nvFuser row kernels", "Triton row kernels", "Triton products" and so on) and "products tuned" are
        what ran for the first time in this process, whichever compilation it belongs to.
        """
        stats = thunder.compile_stats(self._jitted)
        seconds = {}
        if stats.last_traces is self._passes.computation and stats.last_trace_tracing_stop > 0:
            seconds["tracing"] = (stats.last_trace_tracing_stop - stats.last_trace_tracing_start) / 1e9
        seconds["thunder_flce"] = self._compilation.seconds
        for trace in (*self._passes.computation, *self._passes.backward):
            provenance = str(trace.get_provenance() or "")
            if found := re.search(r"Constructed by (.*) \(took (\d+) milliseconds\)", provenance):
                seconds[found[1]] = seconds.get(found[1], 0.0) + int(found[2]) / 1e3
        seconds |= compile_seconds()
        if tuned := tunings():
            seconds["products tuned"] = sum(tuning.seconds for tuning in tuned)
        return seconds

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for `json.dump`; sizes in bytes, times in seconds."""
        plain = self.saved_by_plain_thunder
        return {
            "cross_entropies": [self._decision_dict(decision) for decision in self.decisions],
            "saved_for_backward": [asdict(tensor) for tensor in self.saved],
            "saved_by_plain_thunder": None if plain is None else [asdict(tensor) for tensor in plain],
            "compile_seconds": self.compile_seconds,
        }

    def _decision_dict(self, decision: Decision) -> dict[str, Any]:
        plans = self.plans(decision) if decision.fused else []
        runs = {}
        if decision.fused:
            runs = {name: [asdict(stage) for stage in stages] for name, stages in _stages(decision).items()}
        return {**decision_dict(decision), "plans": [asdict(plan) for plan in plans], "runs": runs}

    def blocks(self) -> Iterator[formatting.Block]:
        """The report as headings, text and tables."""
        for decision in self.decisions:
            yield from decision_blocks(decision)
            if decision.fused:
                for direction, stages in _stages(decision).items():
                    yield formatting.Table(columns=(direction, "runs in"), rows=stage_rows(stages))
                yield _plan_table(self.plans(decision))
        if self._passes.backward:
            yield from _saved_blocks("saved for backward", self.saved)
            if (plain := self.saved_by_plain_thunder) is not None:
                yield from _saved_blocks("saved by plain thunder", plain)
        else:
            yield formatting.Text("nothing is saved: there is no backward")
        times = sorted(self.compile_seconds.items(), key=lambda item: -item[1])
        yield formatting.Text("compile times: " + ", ".join(f"{name} {seconds:.3f} s" for name, seconds in times))


@dataclass(frozen=True)
class GraphReport:
    """What a jitted function was compiled to or, for thunderfx, one part of a graph."""

    name: str
    """"" for a jitted function, else which graph and part."""

    compiled_by: str
    """"thunder", "Inductor" or "eager PyTorch"."""

    compilations: list[CompilationReport] = field(default_factory=list)
    """One for each set of shapes that it was called with."""

    others: list[Decision] = field(default_factory=list)
    """The cross-entropies of a part that thunder does not compile."""

    split_reasons: list[str] = field(default_factory=list)
    """Why its graph was cut into parts, as thunder put it."""

    @property
    def decisions(self) -> list[Decision]:
        """One for each cross-entropy of each compilation."""
        return [*(d for compilation in self.compilations for d in compilation.decisions), *self.others]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for `json.dump`."""
        return {
            "name": self.name,
            "compiled_by": self.compiled_by,
            "split_reasons": self.split_reasons,
            "compilations": [compilation.to_dict() for compilation in self.compilations],
            "cross_entropies_not_compiled_by_thunder": [decision_dict(decision) for decision in self.others],
        }

    def blocks(self) -> Iterator[formatting.Block]:
        """The report as headings, text and tables."""
        if self.name:
            yield formatting.Heading(f"{self.name}, compiled by {self.compiled_by}")
        for decision in self.others:
            yield from decision_blocks(decision)
        for number, compilation in enumerate(self.compilations):
            if len(self.compilations) > 1:
                yield formatting.Heading(f"compilation {number}")
            yield from compilation.blocks()


@dataclass(frozen=True, repr=False)
class Report(Sequence):
    """What `explain` returns: a sequence of compilations, and text for people.

    `str(report)` is plain text; `report.print()` and `rich.print(report)` use rich's colours and tables on a terminal.
    """

    graphs: list[GraphReport]

    @property
    def compilations(self) -> list[CompilationReport]:
        """Those of all graphs; indexing and iterating the report is a shorthand for this."""
        return [compilation for graph in self.graphs for compilation in graph.compilations]

    @property
    def decisions(self) -> list[Decision]:
        """One for each cross-entropy of each compilation, and of the parts that thunder does not compile."""
        return [decision for graph in self.graphs for decision in graph.decisions]

    def __len__(self) -> int:
        return len(self.compilations)

    def __getitem__(self, index):
        return self.compilations[index]

    def nvfuser_definitions(self) -> dict[str, str]:
        """The fusions of every plan, as nvFuser prints their definitions; none on a CPU.

        By name; where two plans have different fusions of one name, the names are numbered.
        """
        found: dict[str, str] = {}
        for decision in self.decisions:
            if not decision.fused:
                continue
            for name, definition in fusion_definitions(decision.region).items():
                if definition not in found.values():
                    number = sum(other.partition(" ")[0] == name for other in found)
                    found[f"{name} {number + 1}" if number else name] = definition
        return found

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for `json.dump`; sizes in bytes, times in seconds."""
        return {"graphs": [graph.to_dict() for graph in self.graphs], "tuned_products": _tuned_products()}

    def blocks(self) -> Iterator[formatting.Block]:
        """The report as headings, text and tables."""
        decisions = self.decisions
        if not self.compilations and not decisions:
            yield formatting.Heading("nothing is compiled yet: call it first")
            return
        fused = sum(decision.fused for decision in decisions)
        yield formatting.Heading(f"thunder_flce: {fused} of {len(decisions)} cross-entropies fused")
        reasons = dict.fromkeys(reason for graph in self.graphs for reason in graph.split_reasons)
        if reasons:
            yield formatting.Text("thunder cut a graph because of:\n" + "\n".join(f"- {reason}" for reason in reasons))
        for graph in self.graphs:
            yield from graph.blocks()
        if tuned := _tuned_products():
            yield formatting.Text("products tuned in this process:")
            rows = [
                (t["product"], " × ".join(map(str, t["sizes"])), f"{t['milliseconds']:.3f} ms", f"{t['gain']:.3f}")
                for t in tuned
            ]
            columns = ("product", "M × N × K", "time", "times as fast as cuBLAS's first choice")
            yield formatting.Table(columns=columns, rows=rows, right=(1, 2, 3))

    def print(self) -> None:
        """Prints the report: with rich on a terminal, if it is installed, and as plain text otherwise."""
        formatting.print_blocks(self.blocks())

    def __str__(self) -> str:
        return formatting.plain(self.blocks())

    def __repr__(self) -> str:
        fused = sum(decision.fused for decision in self.decisions)
        return f"<Report: {len(self)} compilations, {fused} of {len(self.decisions)} cross-entropies fused>"

    def __rich__(self):
        return formatting.rich_group(self.blocks())


def explain(jitted: Callable, *, against_plain_thunder: bool = True) -> Report:
    """What was decided about each cross-entropy, for each trace that a jitted function or module has compiled.

    Args:
        jitted: what `thunder_flce.jit`, `thunder.jit` with our transform, `thunder.compile` with our plugin or
            `thunderfx` with our transform returned.
        against_plain_thunder: whether the report compares what is saved for backward with what thunder would save
            without us. For that, thunder compiles the same trace again when the report is printed or turned into a
            dict: nothing runs, and no arguments are needed, but a large model takes some seconds.

    Returns:
        A `Report`: print it, call its `to_dict()`, or read `report[0].decisions[0]`.

    Raises:
        TypeError: where jitted was not compiled by thunder.
        ValueError: where it was not compiled with `FuseLinearCrossEntropy`.
    """
    backend = getattr(jitted, "_backend", jitted)
    if hasattr(backend, "subgraph_infos"):
        return _explain_subgraphs(backend, against_plain_thunder)
    data = thunder.compile_data(jitted)
    if data is None:
        raise TypeError(f"jitted must have been compiled by thunder, but got {type(jitted).__name__}")
    transform = _transform(data.transforms)
    return Report([GraphReport("", "thunder", _compilations(jitted, transform, against_plain_thunder))])


def _explain_subgraphs(backend: Any, against_plain_thunder: bool) -> Report:
    transform = _transform(backend.thunder_options.get("transforms", ()))
    graphs = []
    for part, reasons in parts(backend):
        compilations, others = [], []
        if part.compiled_by == "thunder":
            compilations = _compilations(part.compiled, transform, against_plain_thunder, part.with_user_source)
        else:
            others = part.cross_entropies("; ".join(reasons))
        graphs.append(GraphReport(part.name, part.compiled_by, compilations, others, reasons))
    return Report(graphs)


def _transform(transforms: Sequence[Any]) -> FuseLinearCrossEntropy:
    for transform in transforms:
        if isinstance(transform, FuseLinearCrossEntropy):
            return transform
    raise ValueError("jitted has no FuseLinearCrossEntropy transform; compile it with thunder_flce.jit")


def _compilations(
    jitted: Callable,
    transform: FuseLinearCrossEntropy,
    against_plain_thunder: bool,
    translate: Callable[[Decision], Decision] = lambda decision: decision,
) -> list[CompilationReport]:
    """Those compilations of the transform that belong to `jitted`: the same transform may serve many functions."""
    stats = thunder.compile_stats(jitted)
    passes = [
        _Passes(entry.prologue_traces, entry.computation_traces, entry.epilogue_traces, entry.backward_traces)
        for entry in stats.interpreter_cache
    ]
    # Without thunder's cache, the last compilation is all there is.
    if stats.last_traces is not None:
        last = (stats.last_prologue_traces, stats.last_traces, stats.last_epilogue_traces, stats.last_backward_traces)
        passes.append(_Passes(*last))
    reports = []
    for compilation in transform.compilations:
        own = next((p for p in passes if any(trace is compilation.trace for trace in p.computation)), None)
        if own is not None:
            decisions = [translate(decision) for decision in compilation.decisions]
            reports.append(CompilationReport(decisions, compilation, own, jitted, against_plain_thunder))
    return reports


def _tuned_products() -> list[dict[str, Any]]:
    """What was measured about products in this process, as plain values: see `product_tuning.Tuning`."""
    return [tuning.to_dict() for tuning in tunings()]


def decision_dict(decision: Decision) -> dict[str, Any]:
    """A decision as plain values."""
    return {
        "source": decision.source,
        "line": _source_line(decision),
        "fused": decision.fused,
        "plan": None if decision.plan is None else asdict(decision.plan),
        "reason": None if decision.reason is None else decision.reason.name,
        "sentence": str(decision).removeprefix(f"{decision.source}: "),
    }


def decision_blocks(decision: Decision) -> Iterator[formatting.Block]:
    """A decision as text: where, what and why, and the line of the user's source."""
    yield formatting.Text(str(decision), style="green" if decision.fused else "yellow")
    if line := _source_line(decision):
        yield formatting.Text(line, indent=1, style="dim")


def _source_line(decision: Decision) -> str:
    file, _, line = decision.source.rpartition(":")
    return linecache.getline(file, int(line)).strip() if line.isdigit() else ""


def _stages(decision: Decision) -> dict[str, tuple[Stage, ...]]:
    """What the plan runs, by direction; no backward where no gradient is needed."""
    directions = {"forward": forward_stages(decision.region), "backward": backward_stages(decision.region)}
    return {name: stages for name, stages in directions.items() if stages}


def _plan_table(plans: list[PredictedPlan]) -> formatting.Table:
    rows = [
        (
            "▸" if plan.chosen else "",
            plan.plan.describe(),
            formatting.format_bytes(plan.temporary_bytes),
            "unknown" if plan.seconds is None else f"{plan.seconds * 1e3:.1f} ms",
        )
        for plan in plans
    ]
    return formatting.Table(columns=("", "plan", "memory, predicted", "time, predicted"), rows=rows, right=(2, 3))


# A large model saves hundreds of tensors; text shows the largest, and `to_dict` has all.
_LONGEST_TABLE = 12


def _saved_blocks(title: str, tensors: list[SavedTensor]) -> Iterator[formatting.Block]:
    own = [tensor for tensor in tensors if not tensor.is_argument]
    arguments = sum(tensor.bytes for tensor in tensors if tensor.is_argument)
    total = sum(tensor.bytes for tensor in own)
    size = formatting.format_bytes
    yield formatting.Text(f"{title}: {size(total)} ({total:,} bytes), and {size(arguments)} of arguments", style="bold")
    own.sort(key=lambda tensor: (not tensor.role, -tensor.bytes))
    rows = [(tensor.name, tensor.role, tensor.type, f"{tensor.bytes:,}") for tensor in own[:_LONGEST_TABLE]]
    if rest := own[_LONGEST_TABLE:]:
        rows.append((f"{len(rest)} more", "", "", f"{sum(tensor.bytes for tensor in rest):,}"))
    if rows:
        yield formatting.Table(columns=("tensor", "of a loss", "type", "bytes"), rows=rows, right=(3,))
