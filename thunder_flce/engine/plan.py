"""How a region runs, as plain values that a trace carries and prints. Legend: T tokens, C tokens in a chunk."""

from dataclasses import dataclass
from functools import cached_property

import torch

from thunder_flce.engine.kernels.interface import row_stride
from thunder_flce.operation.call import Call
from thunder_flce.options import PlainValues

GRADIENTS_IN_FORWARD = "gradients_in_forward"
"""The forward turns the logits of each chunk into gradients for the expected upstream gradient.

Where each row has an upstream gradient of its own and the head is frozen, these are dX for an upstream gradient of 1 at
each row, and the backward multiplies each row by its factor."""
SAVE_LOGITS = "save_logits"
"""The forward keeps logits, and the backward turns them into gradients, in place."""
RECOMPUTE_LOGITS = "recompute_logits"
"""The forward keeps the rows' statistics only, and the backward computes the logits again."""
LOSS_ONLY = "loss_only"
"""No gradient is needed."""


# A further linear of at most this part of the head's hidden size, a low-rank adapter, is summed in float32 anyway: that
# takes little memory. In 16 bits its error is 2.1 times that of a single matmul (rank 16, 8192 × 128256, four chunks).
SMALL_LINEAR = 8


def is_small(call: Call, hidden: int) -> bool:
    """Whether a linear of a call, of this hidden size, is small beside the head."""
    return hidden * SMALL_LINEAR <= call.tensors["input"].shape[-1]


@dataclass(frozen=True, kw_only=True)
class Plan(PlainValues):
    """How a fused loss runs: the same loop over chunks of tokens for every strategy."""

    strategy: str
    chunk_rows: int = 0
    """C, the most tokens in a chunk."""
    saved_rows: int | None = None
    """With "save_logits", of how many rows, the first that are computed, logits are kept; None for all."""
    float32_accumulator: bool = False
    """Whether dW is summed over chunks in float32 and rounded once, at the end."""
    float32_rows: int = 0
    """Rows of each dW, those that most is added to, that are summed in float32 although the others are not."""
    float32_logits: bool = False
    """Whether the logits of 16-bit operands stay in float32."""
    ignored_rows: str = "skip"
    """"skip": ignored rows are left out, for which the host waits for their number, while the device computes the first
    logits. "compute": they are computed, with a gradient of 0."""
    row_kernels: str = "auto"
    """Which softmax kernels run: see `Options.row_kernels`."""
    tune_products: bool = False
    """Whether logits and sums of dW that may gain by it run by the fastest of cuBLAS's algorithms, measured when the
    first of them runs."""
    batch_invariant: bool = False
    """Whether a row's log-probability has the same bits in any batch: see `Options.batch_invariant`."""

    @cached_property
    def finishes_in_forward(self) -> bool:
        """Whether gradients are computed in the forward."""
        return self.strategy == GRADIENTS_IN_FORWARD

    def saves_unit_gradients(self, call: Call) -> bool:
        """Whether the forward computes dX for an upstream gradient of 1 at each row."""
        return self.finishes_in_forward and call.loss.has_row_gradients

    def reads_statistics(self, call: Call) -> bool:
        """Whether the backward reads the statistics of rows that the forward has computed."""
        return self.strategy in (SAVE_LOGITS, RECOMPUTE_LOGITS) and call.loss.divergence is None

    def sum_dtype(self, call: Call, hidden: int, *, rows: int) -> torch.dtype:
        """What dW of a linear of this hidden size is summed in over chunks of so many rows."""
        is_sum = call.dtype.itemsize == 2 and self.chunk_rows < rows
        return torch.float32 if is_sum and (self.float32_accumulator or is_small(call, hidden)) else call.dtype

    def logits_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """What the logits of operands of a dtype are rounded to."""
        return torch.promote_types(dtype, torch.float32) if self.float32_logits else dtype

    def rows_saved(self, rows: int) -> int:
        """S, of how many of so many rows logits are kept."""
        if self.strategy != SAVE_LOGITS:
            return 0
        return rows if self.saved_rows is None else min(self.saved_rows, rows)

    def saved_logits_shape(self, call: Call) -> tuple[int, int]:
        """The rows of logits that are kept, and their stride."""
        dtype = self.logits_dtype(call.dtype)
        return self.rows_saved(call.tokens), row_stride(call.vocab, dtype=dtype, device_type=call.device.type)

    def describe(self) -> str:
        """The plan in words."""
        words = {
            GRADIENTS_IN_FORWARD: "gradients in forward",
            SAVE_LOGITS: "save logits" if self.saved_rows is None else f"save logits of {self.saved_rows} tokens",
            RECOMPUTE_LOGITS: "recompute logits",
            LOSS_ONLY: "loss only",
        }
        has_chunks = self.strategy != SAVE_LOGITS or self.saved_rows is not None
        others = {
            f"chunks of {self.chunk_rows} tokens": has_chunks,
            "dW summed in float32": self.float32_accumulator,
            f"{self.float32_rows} rows of dW summed in float32": self.float32_rows,
            "float32 logits": self.float32_logits,
            "ignored rows computed": self.ignored_rows != "skip",
            f"row kernels by {self.row_kernels}": self.row_kernels != "auto",
            "products tuned": self.tune_products,
            "batch invariant": self.batch_invariant,
        }
        return ", ".join([words[self.strategy], *(text for text, holds in others.items() if holds)])
