"""`explain`: what was decided about each cross-entropy, what it costs, what is saved, and how long compiling took."""

import linecache
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import thunder
from thunder.core.trace import TraceCtx

from thunder_flce.execution.compile_times import compile_seconds
from thunder_flce.execution.matmul.tuning import tunings
from thunder_flce.execution.plan import Plan
from thunder_flce.execution.row_kernels import dispatch
from thunder_flce.graph.rules import PlannedRegion
from thunder_flce.graph.trace_printer import stage_rows
from thunder_flce.graph.transform import Compilation, Decision, FuseLinearCrossEntropy
from thunder_flce.inspection import formatting
from thunder_flce.inspection.fusions import fusion_definitions
from thunder_flce.inspection.saved import SavedTensor, plain_thunder_traces, saved_tensors
from thunder_flce.inspection.subgraphs import parts
from thunder_flce.planning import cost
from thunder_flce.planning.choose import alternatives, temporary_bytes
from thunder_flce.planning.program import program


@dataclass(frozen=True, kw_only=True)
class PredictedPlan:
    """A way to run a region, and what it is predicted to take."""

    plan: Plan
    chosen: bool
    temporary_bytes: int
    """Peak memory above the region's inputs and gradients."""

    seconds: float | None
    """Forward and backward; None where the device's rates are unknown, see `cost`."""


class _Passes(NamedTuple):
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
        """The plan of a cross-entropy, and its alternatives; nothing where it was not fused."""
        if decision.region is None:
            return []
        problem, chosen = decision.region
        name = cost.device_name(problem.device_type)
        return [
            PredictedPlan(
                plan=plan,
                chosen=plan is chosen,
                temporary_bytes=temporary_bytes(problem, plan),
                seconds=cost.predicted_seconds(problem, plan, name),
            )
            for plan in (chosen, *alternatives(problem, chosen))
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
        forward, backward = plain_thunder_traces(self._jitted, self._passes[:3])
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
        directions = program(*decision.region).directions if decision.region else {}
        return {
            **_decision_dict(decision),
            "plans": [{**asdict(plan), "plan": _plan_dict(plan.plan)} for plan in self.plans(decision)],
            "runs": {name: [stage.to_dict() for stage in stages] for name, stages in directions.items()},
        }

    def blocks(self) -> Iterator[formatting.Block]:
        """The report as headings, text and tables."""
        for decision in self.decisions:
            yield from _decision_blocks(decision)
            if decision.region:
                if missing := _missing_row_kernels(decision.region):
                    yield formatting.Text(missing, style="yellow")
                for direction, stages in program(*decision.region).directions.items():
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
            "cross_entropies_not_compiled_by_thunder": list(map(_decision_dict, self.others)),
        }

    def blocks(self) -> Iterator[formatting.Block]:
        """The report as headings, text and tables."""
        if self.name:
            yield formatting.Heading(f"{self.name}, compiled by {self.compiled_by}")
        for decision in self.others:
            yield from _decision_blocks(decision)
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
        """The fusions of every plan, as nvFuser prints their definitions: see `fusions.fusion_definitions`."""
        return fusion_definitions(decision.region for decision in self.decisions if decision.region)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for `json.dump`; sizes in bytes, times in seconds."""
        return {
            "graphs": [graph.to_dict() for graph in self.graphs],
            "tuned_products": [tuning.to_dict() for tuning in tunings()],
        }

    def blocks(self) -> Iterator[formatting.Block]:
        """The report as headings, text and tables."""
        decisions = self.decisions
        if not self.compilations and not decisions:
            yield formatting.Heading("nothing is compiled yet: call it first")
            return
        yield formatting.Heading(f"thunder_flce: {self._fused()} cross-entropies fused")
        reasons = dict.fromkeys(reason for graph in self.graphs for reason in graph.split_reasons)
        if reasons:
            yield formatting.Text("thunder cut a graph because of:\n" + "\n".join(f"- {reason}" for reason in reasons))
        for graph in self.graphs:
            yield from graph.blocks()
        if tuned := [tuning.to_dict() for tuning in tunings()]:
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

    def _fused(self) -> str:
        return f"{sum(decision.fused for decision in self.decisions)} of {len(self.decisions)}"

    def __str__(self) -> str:
        return formatting.plain(self.blocks())

    def __repr__(self) -> str:
        return f"<Report: {len(self)} compilations, {self._fused()} cross-entropies fused>"

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
    backend: Any = getattr(jitted, "_backend", jitted)
    if not hasattr(backend, "subgraph_infos"):
        data = thunder.compile_data(jitted)
        if data is None:
            raise TypeError(f"jitted must have been compiled by thunder, but got {type(jitted).__name__}")
        compilations = _compilations(jitted, _transform(data.transforms), against_plain_thunder)
        return Report([GraphReport("", "thunder", compilations)])
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
            decisions = list(map(translate, compilation.decisions))
            reports.append(CompilationReport(decisions, compilation, own, jitted, against_plain_thunder))
    return reports


def _plan_dict(plan: Plan) -> dict[str, Any]:
    return {"strategy": plan.strategy, **asdict(plan)}


def _decision_dict(decision: Decision) -> dict[str, Any]:
    return {
        "source": decision.source,
        "line": _source_line(decision),
        "fused": decision.fused,
        "plan": None if decision.plan is None else _plan_dict(decision.plan),
        "missing_row_kernels": _missing_row_kernels(decision.region) if decision.region else None,
        "reason": None if decision.reason is None else decision.reason.name,
        "sentence": str(decision).removeprefix(f"{decision.source}: "),
    }


def _decision_blocks(decision: Decision) -> Iterator[formatting.Block]:
    """Where, what and why, and the line of the user's source."""
    yield formatting.Text(str(decision), style="green" if decision.fused else "yellow")
    if line := _source_line(decision):
        yield formatting.Text(line, indent=1, style="dim")


def _source_line(decision: Decision) -> str:
    file, _, line = decision.source.rpartition(":")
    return linecache.getline(file, int(line)).strip() if line.isdigit() else ""


# Of the default plan on an H200: with PyTorch's operations 39% (S1) to 96% (U2) longer than with Triton's kernels, with
# nvFuser's fusions 1.6% (S4) to 7.5% (S2), see traces/h200/backends.jsonl.
_SLOWER = {"nvFuser": "takes 2 to 8% longer", "PyTorch": "takes about 1.4 to 2 times as long"}


def _missing_row_kernels(region: PlannedRegion) -> str | None:
    """What "auto" would use if it were installed, and what that costs; None where nothing is missing."""
    problem, plan = region
    missing = dispatch.missing(dtype=problem.logits_dtype, device_type=problem.device_type)
    if plan.row_kernels != "auto" or missing is None:
        return None
    instead = "nvFuser" if any(step.runs_in == "nvFuser" for step in program(problem, plan).steps) else "PyTorch"
    what = f"{missing.library} ({missing.install})"
    return f"row kernels: not installed: {what}; {instead} runs their share, and the region {_SLOWER[instead]}"


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
