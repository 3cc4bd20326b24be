"""`explain`: what was decided about each loss, its memory, what runs, and what is saved for the backward."""

import linecache
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, NamedTuple

from thunder_flce.backend import compiled_graphs
from thunder_flce.device import Device
from thunder_flce.engine.choose import alternatives, temporary_bytes
from thunder_flce.engine.kernels import dispatch
from thunder_flce.engine.kernels.layout import row_stride
from thunder_flce.engine.matmul.algorithms import tunings
from thunder_flce.engine.plan import Plan
from thunder_flce.engine.printing import program
from thunder_flce.inspection.formatting import Block, format_bytes, heading, print_text, table
from thunder_flce.matching.decisions import LOG, PLURALS, Decision, PlannedRegion
from thunder_flce.operation.loss import RowCoefficients
from thunder_flce.operation.pointwise import VARIABLES, uses


@dataclass(frozen=True, kw_only=True)
class SavedTensor:
    """A tensor that the forward keeps alive for the backward."""

    name: str
    """In the trace"""

    type: str
    """dtype and shape, such as "bf16[8192, 4096]" """

    bytes: int

    is_argument: bool
    """Whether it is an argument of the program, or a view of one: alive anyway"""

    role: str = ""
    """What it is to a loss: "row_max", "dW", …; "" where it has nothing to do with one of ours"""


class PredictedPlan(NamedTuple):
    """A way to run a fused loss, and what it is predicted to take."""

    plan: Plan
    chosen: bool
    temporary_bytes: int
    """Peak memory above the loss's inputs and gradients"""


@dataclass(frozen=True, kw_only=True)
class Compilation:
    """What can be said about one compiled program: thunder has one for each set of shapes, Dynamo for each graph."""

    decisions: list[Decision]
    """One for each cross-entropy, log-probability or entropy, fused or not"""

    compiled_by: str
    """"thunder", "thunderfx", "torch.compile" or "this process": whoever it was"""

    saved: list[SavedTensor] | None = field(default=None, repr=False)
    """What the forward saves for the backward; nothing where there is none, None where nobody knows"""

    traces: list[Any] = field(default_factory=list, repr=False)
    """thunder's traces of the forward, in the order of its passes; print one to read it"""

    @staticmethod
    def plans(decision: Decision) -> list[PredictedPlan]:
        """The plan of a fused loss, and its alternatives; nothing where it was not fused."""
        if decision.region is None:
            return []
        call, chosen = decision.region
        plans = (chosen, *alternatives(call, chosen, Device.of(call.device)))
        return [PredictedPlan(plan, plan is chosen, temporary_bytes(call, plan)) for plan in plans]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for `json.dump`; sizes in bytes."""
        return {
            "compiled_by": self.compiled_by,
            "decisions": list(map(_decision_dict, self.decisions)),
            "saved_for_backward": None if self.saved is None else list(map(asdict, self.saved)),
        }

    def blocks(self) -> Iterator[Block]:
        """The report as blocks of text."""
        for decision in self.decisions:
            yield from _decision_blocks(decision)
        if self.saved:
            yield from _saved_blocks(self.saved)
        elif self.saved is not None:
            yield Block("nothing is saved: there is no backward")


@dataclass(frozen=True, repr=False)
class Report(Sequence):
    """What `explain` returns: a sequence of compilations, and text for people.

    `str(report)` is plain text; `report.print()` and `rich.print(report)` use rich's colours on a terminal.
    """

    compilations: list[Compilation]

    @property
    def decisions(self) -> list[Decision]:
        """The decisions of all compilations."""
        return [decision for compilation in self.compilations for decision in compilation.decisions]

    def __len__(self) -> int:
        return len(self.compilations)

    def __getitem__(self, index):
        return self.compilations[index]

    def nvfuser_definitions(self) -> dict[str, str]:
        """The fusions of every plan, as nvFuser prints them, by direction and name, such as "backward: gradient".

        Where two of one name differ, the names are numbered.
        """
        texts: dict[str, dict[str, None]] = {}
        for region in (decision.region for decision in self.decisions if decision.region):
            for direction, fusions in _fusions(region):
                for name, fusion in fusions.items():
                    texts.setdefault(f"{direction}: {name}", {})[str(fusion).strip()] = None
        return {
            f"{name} {number}" if number > 1 else name: text
            for name, of_name in texts.items()
            for number, text in enumerate(of_name, 1)
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for `json.dump`; sizes in bytes, times in seconds."""
        return {
            "compilations": [compilation.to_dict() for compilation in self.compilations],
            "tuned_products": [tuning.to_dict() for tuning in tunings()],
        }

    def print(self) -> None:
        """Prints the report: with rich on a terminal, if it is installed, and as plain text otherwise."""
        print_text(str(self), self.__rich__)

    def blocks(self) -> Iterator[Block]:
        """The report as blocks of text."""
        if not self.compilations:
            yield heading("nothing is compiled yet: call it first")
            return
        yield heading(f"thunder_flce: {self._fused()}")
        for number, compilation in enumerate(self.compilations):
            if len(self.compilations) > 1:
                yield heading(f"compilation {number}, by {compilation.compiled_by}")
            yield from compilation.blocks()
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


def explain(compiled: Callable | None = None) -> Report:
    """What was decided about each loss of a compiled function or module; without one, of all in this process.

    Args:
        compiled: what `thunder_flce.jit`, `thunder_flce.thunderfx`, `thunder.jit` with our executor or transform,
            `thunder.compile` with our plugin, or `torch.compile` with the backend "thunder_flce" returned; also as
            Fabric and accelerate wrap it. None: the latest 1024 decisions of this process, as where a trainer compiles.

    Returns:
        A `Report`: print it, call its `to_dict()`, or read `report[0].decisions[0]`.

    Raises:
        TypeError: where it was compiled by neither.
        ValueError: where thunder compiled it without our fusion.
    """
    if compiled is None:
        return Report([Compilation(decisions=list(LOG), compiled_by="this process")] if LOG else [])
    for each in _unwrapped(compiled):
        if (graphs := compiled_graphs(each)) is not None:
            return Report([Compilation(decisions=graph, compiled_by="torch.compile") for graph in graphs])
        if "thunder" in sys.modules:
            from thunder_flce.inspection.thunder_report import compilations

            if (found := compilations(each)) is not None:
                return Report(found)
    raise TypeError(
        'compiled must be of thunder, or of torch.compile with the backend "thunder_flce", but got '
        f"{type(compiled).__name__}"
    )


_WRAPPED = ("_forward_module", "module", "_original_module", "_orig_mod", "__wrapped__")


def _unwrapped(compiled: Any) -> Iterator[Any]:
    """A compiled function or module, and what it wraps, as Fabric and accelerate do."""
    seen: list[Any] = []
    while compiled is not None and not any(compiled is each for each in seen):
        yield compiled
        seen.append(compiled)
        known = vars(compiled) if hasattr(compiled, "__dict__") else {}
        # The submodules of a module are no attributes of its own.
        known = {**known, **(known.get("_modules") or {})}
        compiled = next((known[name] for name in _WRAPPED if known.get(name) is not None), None)


def source_line(decision: Decision) -> str:
    """The line of code that a decision is about; "" where it is unknown."""
    file, line = decision.line
    return linecache.getline(file, line).strip() if file and line else ""


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
        "plans": [{**found._asdict(), "plan": asdict(found.plan)} for found in Compilation.plans(decision)],
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
        for found in Compilation.plans(decision)
    ]
    yield table(("", "plan", "memory, predicted"), rows, right=(2,))


def _runs(region: PlannedRegion) -> dict[str, list[str]]:
    """What runs in each direction, as lines of text."""
    found = program(*region)
    return {name: list(lines) for name, lines in (("forward", found.forward), ("backward", found.backward)) if lines}


def _fusions(region: PlannedRegion) -> Iterator[tuple[str, dict[str, Any]]]:
    """What nvFuser runs of a region: directions and fusions; none where others run the row work."""
    call, plan = region
    loss, dtype, device_type = call.loss, plan.logits_dtype(call.dtype), call.device.type
    if dispatch.library(plan.row_kernels, dtype=dtype, device_type=device_type) != "nvFuser":
        return
    from thunder_flce.engine.kernels import nvfuser_rows

    stride, primitives = row_stride(call.vocab, dtype=dtype, device_type=device_type), program(call, plan).primitives
    kind: dict[str, Any] = {"dtype": dtype, "stride": stride, "vocab": call.vocab}
    made_by = partial(nvfuser_rows.definitions, loss.logit_map, **kind)
    has_class_weight = "weight" in call.tensors and bool(loss.label_smoothing)
    if "both_" in primitives:
        yield "forward", made_by(method="both_")
    if "results" in primitives:
        yield "forward", made_by(method="statistics")
        if loss.moments:
            yield "forward", made_by(method="moments", names=loss.moments, has_class_weight=has_class_weight)
    if "gradient_" in primitives:
        derivatives = {*loss.differentiable_outputs, *(name for name in VARIABLES if uses(loss.token_loss, name))}
        has_uniform = loss.label_smoothing or "mean_logit" in derivatives
        coefficients = RowCoefficients(1, 1, 1 if has_uniform else None, 1 if "entropy" in derivatives else None)
        settings = {"out_dtype": call.dtype, "in_place": dtype == call.dtype and not plan.keeps_logits}
        of_call = partial(made_by, **settings, column_sums=call.bias_grad, has_class_weight=has_class_weight)
        direction = "backward" if plan.reads_statistics(call) else "forward"
        yield direction, of_call(method="gradient_", coefficients=coefficients)


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
    return f"row kernels: not installed: {what}; {instead} runs their share, and the loss {_SLOWER[instead]}"


# A large model saves hundreds of tensors; text shows the largest, and `to_dict` has all.
_LONGEST_TABLE = 12


def _saved_blocks(tensors: list[SavedTensor]) -> Iterator[Block]:
    arguments = sum(tensor.bytes for tensor in tensors if tensor.is_argument)
    own = [tensor for tensor in tensors if not tensor.is_argument]
    total = sum(tensor.bytes for tensor in own)
    sizes = f"{format_bytes(total)} ({total:,} bytes), and {format_bytes(arguments)} of arguments"
    yield Block(f"saved for backward: {sizes}", "bold")
    own.sort(key=lambda tensor: (not tensor.role, -tensor.bytes))
    rows = [(tensor.name, tensor.role, tensor.type, f"{tensor.bytes:,}") for tensor in own[:_LONGEST_TABLE]]
    if rest := own[_LONGEST_TABLE:]:
        rows.append((f"{len(rest)} more", "", "", f"{sum(tensor.bytes for tensor in rest):,}"))
    if rows:
        yield table(("tensor", "of a loss", "type", "bytes"), rows, right=(3,))
