"""Decisions about each cross-entropy, log-probability and entropy of a program, and the log of all decisions."""

import os
import warnings
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from thunder_flce.engine.plan import Plan
from thunder_flce.matching.program import Source
from thunder_flce.operation.call import Call

PLURALS = {
    "cross-entropy": "cross-entropies",
    "divergence": "divergences",
    "log-probability": "log-probabilities",
    "entropy": "entropies",
    "sum over the classes": "sums over the classes",
    "log-sum-exp": "log-sum-exps",
    "probability": "probabilities",
}
"""Kinds of results that the matcher looks for, with plurals; a part is named by the first kind that it has."""


class Reason(Enum):
    """Why something that is computed from the logits of a linear was not fused with it."""

    NO_LINEAR = "its logits do not come from a linear layer"
    ANOTHER_PRODUCT = (
        "its logits come from a matmul that is not a linear layer: a linear layer has one matrix for all rows "
        "and one bias per column"
    )
    ARGUMENT = (
        "its logits are an argument of the compiled graph, or come from before a graph break; compile the linear layer "
        "and the loss in one graph"
    )
    LOGITS_USED = "the logits, or a tensor between them and the loss, are also used elsewhere"
    LOGITS_RETURNED = (
        "the program returns its logits, or uses them after a graph break; return only the loss to have it fused"
    )
    TRANSFORMED_LOGITS = "the logits are changed between the linear and the loss in a way that cannot be fused"
    NOT_LOG_PROBABILITIES = "the input of nll_loss is not a log_softmax"
    NOT_A_LOG_PROBABILITY = "its logits are gathered, but not into log-probabilities of each row's labels"
    NOT_FOLLOWED = "the program computes something from its log-probabilities that is not a supported loss"
    CLASS_DIMENSION = "the vocabulary is not the class dimension of the loss"
    CLASS_PROBABILITIES = "the targets are class probabilities, of which only those of a teacher's head can be fused"
    CUSTOM_FUNCTION = (
        "a torch.autograd.Function with a backward of its own computes it; write the loss with PyTorch's operations"
    )
    CLASS_WEIGHTS = "it has class weights that are not supported"
    DTYPE = "the linear's operands have different dtypes, or a dtype that is not supported"
    DISTRIBUTED = "an operand is a distributed tensor, or belongs to a torch.func transform such as grad or vmap"
    TENSOR_PARALLEL = "thunder.distributed shards its linear, but not by column_parallel of that layer alone"
    OPERAND_MODIFIED = "a tensor that the loss, or a prediction beside it, may depend on is changed in place"
    DYNAMIC = (
        'with cache="symbolic values", sizes are not known when the trace is compiled; linear_cross_entropy plans when '
        "it runs"
    )
    NUMBER_READ = (
        "the program reads a number from a tensor, such as by item(), and computes with it; keep it as a tensor"
    )
    LEFT_TO_INDUCTOR = (
        "it is small, and left to Inductor: its matmuls take the device less time than the host, and its logits take "
        "little memory"
    )
    DEPRECATED_ARGUMENT = "it has the deprecated argument size_average or reduce; use reduction"


class NotFused(Exception):
    """Raised while matching, and turned into a decision that the user can read.

    Args:
        reason: what prevents fusion.
        detail: which operation or value it was.
    """

    def __init__(self, reason: Reason, detail: str = ""):
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail

    def at(self, line: Source, kind: str) -> "Decision":
        """Returns the decision about a result of this kind, which the user's line computes."""
        return Decision(line, reason=self.reason, detail=self.detail, kind=kind)


class PlannedRegion(NamedTuple):
    """A region's call, as it is known before it runs, and its plan."""

    call: Call
    """With specs in place of tensors"""
    plan: Plan


@dataclass(frozen=True)
class Decision:
    """The decision about one cross-entropy, log-probability or entropy of a program."""

    line: Source
    """The line of the user's call, if it is known."""
    region: PlannedRegion | None = None
    """None if it was not fused."""
    reason: Reason | None = None
    """None if it was fused."""
    detail: str = ""
    """The operation or value that prevents fusion."""
    kind: str = "cross-entropy"
    """One of `PLURALS`. A region stands for one result, and may return further ones."""
    note: str = ""
    """A remark on a region, such as why its gradients wait for the backward."""
    is_example: bool = False
    """Whether the region takes any number of tokens, so that its plan is an example, for one number."""

    @property
    def source(self) -> str:
        """The user's call as "file:line"."""
        return str(self.line)

    @property
    def fused(self) -> bool:
        """Whether the linear and the loss are one region."""
        return self.region is not None

    @property
    def plan(self) -> Plan | None:
        """How the region runs; None if it was not fused."""
        return None if self.region is None else self.region.plan

    @property
    def is_missed(self) -> bool:
        """Whether a change of the program could let it be fused: then it is a warning, or an error if strict."""
        return self.reason not in (None, Reason.NO_LINEAR, Reason.LEFT_TO_INDUCTOR)

    def __str__(self) -> str:
        if self.region is not None:
            note = f"; {self.note}" if self.note else ""
            ranks = f"the vocabulary over {shard.ranks} ranks, " if (shard := self.region.call.shard) else ""
            plan = self.region.plan.describe()
            if self.is_example:
                plan += f" (for {self.region.call.tokens} tokens; other numbers of tokens have plans of their own)"
            return f"{self.source}: fused, {ranks}{plan}{note}"
        detail = f" ({self.detail})" if self.detail else ""
        return f"{self.source}: not fused, because {self.reason.value if self.reason else ''}{detail}"


class NotFusedWarning(UserWarning):
    """A cross-entropy, log-probability or entropy whose logits come from a linear was not fused with it."""


class NotFusedError(RuntimeError):
    """With `strict=True`, raised in place of a `NotFusedWarning`."""


def in_order(decisions: Iterable[Decision]) -> list[Decision]:
    """Returns decisions in the order of the user's lines."""
    return sorted(decisions, key=lambda decision: (decision.line.file or "", decision.line.line or 0))


LOG: deque[Decision] = deque(maxlen=1024)
"""The decisions of this process, the latest last."""


def report(decisions: Iterable[Decision], *, strict: bool) -> None:
    """Warns of each result that was not fused, at the user's line, and adds all decisions to the log.

    Raises:
        NotFusedError: in place of the warnings, if strict.
    """
    messages: dict[str, Source] = {}
    for decision in decisions:
        LOG.append(decision)
        if os.environ.get("THUNDER_FLCE_EXPLAIN", "0") not in ("", "0"):
            print(f"thunder_flce: the {decision.kind} at {decision}", flush=True)
        if decision.is_missed:
            messages[f"thunder_flce: the {decision.kind} at {decision}"] = decision.line
    if strict and messages:
        raise NotFusedError("\n".join(messages))
    for message, line in messages.items():
        warnings.warn_explicit(message, NotFusedWarning, line.file or "unknown", line.line or 0)
