"""Plans: the ways to run a region, as plain values that a trace carries and prints.

Legend: T tokens, C tokens in a chunk, V vocabulary. What each one runs is in `engine`, one function a strategy.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from thunder_flce.execution.staged_logits import BlockLayout


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What all ways to run a region have in common."""

    strategy: ClassVar[str]

    float32_logits: bool = False
    """Whether the logits of 16-bit operands stay in float32."""

    ignored_rows: str = "skip"
    """What happens to rows whose target is ignore_index: see `Options.ignored_rows`."""

    row_kernels: str = "auto"
    """Who runs the row work: see `Options.row_kernels`."""

    tune_products: bool = False
    """Whether large matmuls run by the fastest of cuBLAS's algorithms, measured when the first of them runs."""

    batch_invariant: bool = False
    """Whether a row's log-probability has the same bits in any batch: see `Options.batch_invariant`."""

    def non_defaults(self) -> dict[str, Any]:
        """The strategy, and the fields that differ from their defaults: what a trace carries."""
        changed = {f.name: value for f in fields(self) if (value := getattr(self, f.name)) != f.default}
        return {"strategy": self.strategy, **changed}

    @staticmethod
    def of(settings: Mapping[str, Any]) -> "Plan":
        """The plan with these settings; those that belong to no plan are passed over."""
        kinds = [kind for kind in PLANS if kind.strategy == settings["strategy"]]
        kind = next(kind for kind in kinds if {f.name for f in fields(kind)} >= settings.keys() & _OWN_FIELDS)
        return kind(**{f.name: settings[f.name] for f in fields(kind) if f.name in settings})

    def describe(self) -> str:
        """The plan in words."""
        common = {
            "float32 logits": self.float32_logits,
            "ignored rows computed": self.ignored_rows != "skip",
            f"row kernels by {self.row_kernels}": self.row_kernels != "auto",
            "products tuned": self.tune_products,
            "batch invariant": self.batch_invariant,
        }
        return ", ".join([*self._own_words(), *(words for words, holds in common.items() if holds)])

    def _own_words(self) -> list[str]:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class GradientsInForward(Plan):
    """The forward computes the gradients for the expected upstream gradient, a chunk of tokens at a time.

    Where each row has an upstream gradient of its own and the head is frozen, it computes dX for an upstream gradient
    of 1 at each row, and the backward multiplies each row by its factor.
    """

    strategy: ClassVar[str] = "gradients_in_forward"

    chunk_rows: int
    """Tokens in a chunk (C)."""

    float32_accumulator: bool = False
    """Whether dW is summed over chunks in float32 and rounded once, at the end."""

    float32_rows: int = 0
    """Rows of each term's dW, those with the most targets, that are summed in float32 although the others are not."""

    staged: tuple[int, int] | None = None
    """(tokens, vocabulary blocks) of a first chunk whose logits are staged in the memory of dW: `staged_logits`."""

    def staged_logits(self, *, hidden: int, vocab: int, itemsize: int) -> BlockLayout | None:
        """Where the logits of the first chunk are, if they are staged in the memory of dW (V, H)."""
        if self.staged is None:
            return None
        rows, blocks = self.staged
        elements = hidden * 4 // itemsize if self.float32_accumulator else hidden
        return BlockLayout(rows=rows, vocab=vocab, count=blocks, row_room=elements)

    def _own_words(self) -> list[str]:
        words = [f"chunks of {self.chunk_rows} tokens"]
        if self.staged is not None:
            rows, blocks = self.staged
            is_only = rows == self.chunk_rows
            first = f"{'one chunk of' if is_only else 'first'} {rows} tokens staged in dW's memory in {blocks} blocks"
            words = [first] if is_only else [first, *words]
        if self.float32_accumulator:
            words.append("dW summed in float32")
        if self.float32_rows:
            words.append(f"{self.float32_rows} rows of dW summed in float32")
        return ["gradients in forward", *words]


@dataclass(frozen=True, kw_only=True)
class SaveLogits(Plan):
    """The forward keeps the logits, and the backward turns them into gradients in place."""

    strategy: ClassVar[str] = "save_logits"

    def _own_words(self) -> list[str]:
        return ["save logits"]


@dataclass(frozen=True, kw_only=True)
class RecomputeLogits(Plan):
    """The forward keeps statistics only; the backward computes the logits again, a vocabulary block at a time."""

    strategy: ClassVar[str] = "recompute_logits"

    chunk_rows: int
    """Tokens in a chunk of the forward (C)."""

    block_columns: int
    """Columns of the vocabulary in a block of the backward."""

    def _own_words(self) -> list[str]:
        return [
            "recompute logits",
            f"chunks of {self.chunk_rows} tokens",
            f"blocks of {self.block_columns} columns of the vocabulary",
        ]


@dataclass(frozen=True, kw_only=True)
class SaveSomeLogits(RecomputeLogits):
    """The logits of the first tokens are kept, those of the others computed again."""

    strategy: ClassVar[str] = "save_logits"

    saved_rows: int
    """Tokens whose logits are kept for the backward."""

    def _own_words(self) -> list[str]:
        _, chunks, blocks = super()._own_words()
        return [f"save logits of {self.saved_rows} tokens", chunks, blocks]


@dataclass(frozen=True, kw_only=True)
class LossOnly(Plan):
    """No gradient is needed."""

    strategy: ClassVar[str] = "loss_only"

    chunk_rows: int
    """Tokens in a chunk (C)."""

    def _own_words(self) -> list[str]:
        return ["loss only", f"chunks of {self.chunk_rows} tokens"]


PLANS: tuple[type[Plan], ...] = (GradientsInForward, SaveLogits, SaveSomeLogits, RecomputeLogits, LossOnly)
_OWN_FIELDS = {f.name for kind in PLANS for f in fields(kind)} - {f.name for f in fields(Plan)}
