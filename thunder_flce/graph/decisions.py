"""What was decided about each cross-entropy, log-probability and entropy of a trace."""

from dataclasses import dataclass

from thunder.core.symbol import BoundSymbol

from thunder_flce.engine.plan import Plan
from thunder_flce.graph.matching.reasons import Reason
from thunder_flce.graph.rules import PlannedRegion

PLURALS = {"cross-entropy": "cross-entropies", "log-probability": "log-probabilities", "entropy": "entropies"}
"""What the matcher looks for."""


@dataclass(frozen=True)
class Decision:
    """What was decided about one cross-entropy, log-probability or entropy of a trace."""

    source: str
    """"file:line" of the user's call, as far as it is known."""
    region: PlannedRegion | None = None
    """None where it was not fused."""
    reason: Reason | None = None
    """None where it was fused."""
    detail: str = ""
    """The operation or value that prevents fusion."""
    kind: str = "cross-entropy"
    """One of `PLURALS`. A region takes the place of one, and may give further results."""
    note: str = ""
    """What else there is to say of a region, such as why its gradients wait for the backward."""

    @property
    def fused(self) -> bool:
        """Whether the linear and the loss are one region."""
        return self.region is not None

    @property
    def plan(self) -> Plan | None:
        """How the region runs; None where it was not fused."""
        return None if self.region is None else self.region.plan

    def __str__(self) -> str:
        if self.region is not None:
            note = f"; {self.note}" if self.note else ""
            ranks = f"the vocabulary over {shard.ranks} ranks, " if (shard := self.region.call.shard) else ""
            return f"{self.source}: fused, {ranks}{self.region.plan.describe()}{note}"
        detail = f" ({self.detail})" if self.detail else ""
        return f"{self.source}: not fused, because {self.reason.value if self.reason else ''}{detail}"


def source_of(bsym: BoundSymbol) -> str:
    """Where the user called it: "file:line", as far as that is known."""
    if bsym.source_filename is None:
        return "unknown source"
    line = getattr(bsym.source_positions, "lineno", None)
    return f"{bsym.source_filename}:{line}" if line else bsym.source_filename
