"""The report of `explain`: each loss's decision, memory and program, and the tensors saved for the backward."""

import linecache
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from thunder_flce.device import Device
from thunder_flce.engine.choose import alternatives, temporary_bytes
from thunder_flce.engine.kernels import dispatch
from thunder_flce.engine.matmul.algorithms import tunings
from thunder_flce.engine.plan import Plan
from thunder_flce.engine.printing import program
from thunder_flce.matching.decisions import PLURALS, Decision, PlannedRegion


@dataclass(frozen=True, kw_only=True)
class SavedTensor:
    """A tensor that the forward keeps alive for the backward."""

    name: str
    """Its name in the trace"""

    type: str
    """dtype and shape, such as "bf16[8192, 4096]" """

    bytes: int

    is_argument: bool
    """Whether it is an argument of the program or a view of one, which stays alive anyway"""

    role: str = ""
    """Its meaning in one of our losses, such as "row_max" or "dW"; "" for a tensor of another operation"""


class PredictedPlan(NamedTuple):
    """A plan for a fused loss, and the memory that it is predicted to need."""

    plan: Plan
    chosen: bool
    temporary_bytes: int
    """Predicted peak memory above the loss's inputs and gradients"""


@dataclass(frozen=True, kw_only=True)
class Compilation:
    """Report on one compiled program: thunder compiles one for each set of shapes, Dynamo one for each graph."""

    decisions: list[Decision]
    """One decision for each cross-entropy, log-probability or entropy, fused or not"""

    compiled_by: str
    """"thunder", "thunderfx" or "torch.compile"; "this process" for decisions of any compiler"""

    saved: list[SavedTensor] | None = field(default=None, repr=False)
    """Tensors that the forward saves for the backward: [] if there is no backward, None if unknown"""

    @staticmethod
    def plans(decision: Decision) -> list[PredictedPlan]:
        """Returns the plan of a fused loss, then its alternatives; [] for a loss that was not fused."""
        if decision.region is None:
            return []
        call, chosen = decision.region
        plans = (chosen, *alternatives(call, chosen, Device.of(call.device)))
        return [PredictedPlan(plan, plan is chosen, temporary_bytes(call, plan)) for plan in plans]

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, for `json.dump`; sizes in bytes."""
        return {
            "compiled_by": self.compiled_by,
            "decisions": list(map(_decision_dict, self.decisions)),
            "saved_for_backward": None if self.saved is None else list(map(asdict, self.saved)),
        }


class Report(list[Compilation]):
    """The result of `explain`: a list of compilations; `str(report)` is the report as text."""

    @property
    def decisions(self) -> list[Decision]:
        """Decisions of all compilations."""
        return [decision for compilation in self for decision in compilation.decisions]

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, for `json.dump`; sizes in bytes, times in seconds."""
        return {
            "compilations": [compilation.to_dict() for compilation in self],
            "tuned_products": [tuning.to_dict() for tuning in tunings()],
        }

    def lines(self) -> Iterator[str]:
        """Yields the report line by line."""
        if not self:
            yield _heading("no decision yet: call the compiled function; linear_cross_entropy itself needs no decision")
            return
        yield _heading(f"thunder_flce: {self._fused_counts()}")
        for number, compilation in enumerate(self):
            if len(self) > 1:
                yield _heading(f"compilation {number}, by {compilation.compiled_by}")
            for decision in compilation.decisions:
                yield from _decision_lines(decision)
            if compilation.saved:
                yield from _saved_lines(compilation.saved)
            elif compilation.saved is not None:
                yield "nothing is saved: there is no backward"
        if tuned := tunings():
            yield "products tuned in this process:"
            columns = ("M × N × K", "time", "times as fast as cuBLAS's first choice", "measured in")
            sizes = [" × ".join(map(str, tuning.sizes)) for tuning in tuned]
            rows = [
                (size, f"{tuning.milliseconds:.3f} ms", f"{tuning.gain:.3f}", f"{tuning.seconds:.2f} s")
                for tuning, size in zip(tuned, sizes, strict=True)
            ]
            yield _table(columns, rows, right=(1, 2, 3))

    def _fused_counts(self) -> str:
        """Returns how many losses of each kind are fused, such as "1 of 1 cross-entropies fused"."""
        counts = []
        for kind, plural in PLURALS.items():
            fused = [decision.fused for decision in self.decisions if decision.kind == kind]
            counts += [f"{sum(fused)} of {len(fused)} {plural}"] if fused else []
        nothing = "no loss to fuse; a call of linear_cross_entropy is fused as it is"
        return f"{', '.join(counts)} fused" if counts else nothing

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def __repr__(self) -> str:
        return f"<Report: {len(self)} compilations, {self._fused_counts()}>"


def _decision_dict(decision: Decision) -> dict[str, Any]:
    region, (file, line) = decision.region, decision.line
    runs = vars(program(*region)) if region else {}
    return {
        "kind": decision.kind,
        "source": decision.source,
        "line": linecache.getline(file, line).strip() if file and line else "",
        "fused": decision.fused,
        "plan": asdict(region.plan) if region else None,
        "missing_row_kernels": _missing_row_kernels(region) if region else None,
        "reason": None if decision.reason is None else decision.reason.name,
        "sentence": str(decision).removeprefix(f"{decision.source}: "),
        "plans": [{**predicted._asdict(), "plan": asdict(predicted.plan)} for predicted in Compilation.plans(decision)],
        "runs": {direction: list(lines) for direction, lines in runs.items() if lines},
    }


def _decision_lines(decision: Decision) -> Iterator[str]:
    """Yields a decision with its place and reason, the user's line and, for a fused loss, its program and all plans."""
    values = _decision_dict(decision)
    yield str(decision)
    if line := values["line"]:
        yield f"  {line}"
    if missing := values["missing_row_kernels"]:
        yield missing
    for direction, lines in values["runs"].items():
        yield "\n".join([f"  {direction}:", *(f"    {line}" for line in lines)])
    rows = [
        ("▸" if predicted.chosen else "", predicted.plan.describe(), format_bytes(predicted.temporary_bytes))
        for predicted in Compilation.plans(decision)
    ]
    if rows:
        yield _table(("", "plan", "memory, predicted"), rows, right=(2,))


# Measured for the default plan on an H200, with hidden sizes of 768 to 4096: the loss takes 2% to 10% longer with
# nvFuser's fusions than with Triton's kernels, and 39% to 96% longer with PyTorch's operations.
_SLOWER = {"nvFuser": "takes 2 to 10% longer", "PyTorch": "takes about 1.4 to 2 times as long"}


def _missing_row_kernels(region: PlannedRegion) -> str | None:
    """Returns a line that names the fastest library if it does not run, and the time this costs; None if it runs."""
    call, plan = region
    logits: dict[str, Any] = {"dtype": plan.logits_dtype(call.dtype), "device_type": call.device.type}
    missing = dispatch.missing(**logits)
    if plan.row_kernels != "auto" or missing is None:
        return None
    instead = dispatch.BACKENDS[dispatch.backend(plan.row_kernels, **logits)].library
    return f"row kernels: {missing} does not run here; {instead} runs instead, and the loss {_SLOWER[instead]}"


# A large model saves hundreds of tensors: the text shows the largest, `to_dict` has all.
_LONGEST_TABLE = 12


def _saved_lines(tensors: list[SavedTensor]) -> Iterator[str]:
    arguments = sum(tensor.bytes for tensor in tensors if tensor.is_argument)
    intermediates = [tensor for tensor in tensors if not tensor.is_argument]
    total = sum(tensor.bytes for tensor in intermediates)
    sizes = f"{format_bytes(total)} ({total:,} bytes), and {format_bytes(arguments)} of arguments"
    yield f"saved for backward: {sizes}"
    intermediates.sort(key=lambda tensor: (not tensor.role, -tensor.bytes))
    rows = [(tensor.name, tensor.role, tensor.type, f"{tensor.bytes:,}") for tensor in intermediates[:_LONGEST_TABLE]]
    if rest := intermediates[_LONGEST_TABLE:]:
        rows.append((f"{len(rest)} more", "", "", f"{sum(tensor.bytes for tensor in rest):,}"))
    if rows:
        yield _table(("tensor", "role in the loss", "type", "bytes"), rows, right=(3,))


def _heading(text: str) -> str:
    """Returns an underlined heading."""
    return f"\n{text}\n{'─' * len(text)}"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[int] = ()) -> str:
    """Returns a table as text; `right` has the positions of right-aligned columns."""
    lines = [columns, *rows]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    # Format specifications, such as ">8".
    specs = [f"{'>' if column in right else '<'}{width}" for column, width in enumerate(widths)]
    padded = (map(format, cells, specs) for cells in lines)
    return "\n".join(f"  {'  '.join(cells)}".rstrip() for cells in padded)


def format_bytes(size: float) -> str:
    """Returns a size as text, such as "1.5 KiB" for 1536."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"
