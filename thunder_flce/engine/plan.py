"""The plan by which a region runs: plain values that a trace carries and prints. Legend: T tokens, C in a chunk."""

from dataclasses import dataclass
from functools import cached_property

import torch

from thunder_flce.engine.kernels.interface import row_stride
from thunder_flce.operation.call import Call, Spec, gradient_name
from thunder_flce.operation.loss import OUTPUTS
from thunder_flce.options import GRADIENTS_IN_FORWARD, RECOMPUTE_LOGITS, SAVE_LOGITS, PlainValues

LOSS_ONLY = "loss_only"
"""The strategy if no gradient is needed."""

# A further linear whose hidden size is at most 1 / SMALL_LINEAR of the head's, such as a low-rank adapter, always sums
# its dW in float32, which takes little memory. In 16 bits, the error of its dW is 2.1 times that of a single matmul
# (rank 16, 8192 × 128256, four chunks).
SMALL_LINEAR = 8


def is_small(call: Call, hidden: int) -> bool:
    """Whether a linear of this hidden size is so small beside the head that its dW is summed in float32."""
    return hidden * SMALL_LINEAR <= call.tensors["input"].shape[-1]


def balanced(rows: int, largest: int, *, tile: int = 1) -> int:
    """Returns the size of chunks of some rows that are about equal, in whole tiles, and none above `largest`.

    A small last chunk would read all of W and dW for a few rows. Without rows, the size is one tile.
    """
    chunks = -(-rows // (largest // tile * tile)) or 1
    return (-(-rows // (chunks * tile)) or 1) * tile


@dataclass(frozen=True, kw_only=True)
class Plan(PlainValues):
    """How a region runs: every strategy is the same loop over chunks of tokens."""

    strategy: str
    chunk_rows: int = 0
    """C, the largest number of tokens in a chunk."""
    saved_rows: int | None = None
    """With "save_logits", the number of rows, from the first computed one on, whose logits are saved; None for all."""
    float32_accumulator: bool = False
    """Whether dW is summed over chunks in float32 and rounded once, at the end."""
    float32_rows: int = 0
    """Number of rows of each dW, those with the largest updates, that are summed in float32 beside a dW in 16 bits."""
    float32_logits: bool = False
    """Whether the logits of 16-bit operands stay in float32."""
    ignored_rows: str = "skip"
    """"skip": ignored rows are not computed. The host waits for the number of valid rows, while the device computes the
    first logits. "compute": ignored rows are computed, with a gradient of 0."""
    row_kernels: str = "auto"
    """Which softmax kernels run: see `Options.row_kernels`."""
    tune_products: bool = False
    """Whether matmuls of logits and dW that may gain by it run cuBLAS's fastest algorithm, measured at first use."""
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
        """Whether the backward reads the row statistics that the forward saved."""
        return self.strategy in (SAVE_LOGITS, RECOMPUTE_LOGITS) and call.loss.divergence is None

    def sum_dtype(self, call: Call, hidden: int, *, rows: int) -> torch.dtype:
        """The dtype in which dW of a linear of this hidden size is summed over the chunks of `rows` rows."""
        is_sum = call.dtype.itemsize == 2 and self.first_rows(rows) < rows
        return torch.float32 if is_sum and (self.float32_accumulator or is_small(call, hidden)) else call.dtype

    def logits_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype to which logits are rounded, for operands of `dtype`."""
        return torch.promote_types(dtype, torch.float32) if self.float32_logits else dtype

    def rows_saved(self, rows: int) -> int:
        """S, the number of rows whose logits are saved, out of `rows`."""
        if self.strategy != SAVE_LOGITS:
            return 0
        return rows if self.saved_rows is None else min(self.saved_rows, rows)

    def first_rows(self, rows: int) -> int:
        """The most rows, out of `rows`, that the first chunk can have; all of them if there is a single chunk."""
        return min(self.rows_saved(rows) or self.chunk_rows, rows)

    def saved_logits_shape(self, call: Call) -> tuple[int, int]:
        """The number of rows of saved logits, and their stride."""
        dtype = self.logits_dtype(call.dtype)
        return self.rows_saved(call.tokens), row_stride(call.vocab, dtype=dtype, device_type=call.device.type)

    def result_names(self, call: Call) -> tuple[str, ...]:
        """Returns the names of the forward's results, in order: the loss, its outputs, what the backward reads."""
        names = ["loss", *call.loss.outputs]
        if self.strategy == LOSS_ONLY:
            return tuple(names)
        if self.reads_statistics(call):
            names += ["row_max", "row_log_sum"]
        names.append("valid_count")
        if self.finishes_in_forward:
            return (*names, *map(gradient_name, call.needs_grad))
        names.append("computed_rows")
        return (*names, "logits") if self.strategy == SAVE_LOGITS else tuple(names)

    def result_specs(self, call: Call) -> dict[str, Spec]:
        """Returns the specs of the results in `result_names`; the call may be of tensors, fake tensors or specs."""
        rows, of_rows, count = call.row_dtype, (call.tokens,), ((), torch.int64)
        specs: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "loss": (call.shape if call.loss.reduction == "none" else (), rows),
            "row_max": (of_rows, rows), "row_log_sum": (of_rows, rows), "valid_count": count, "computed_rows": count,
        }  # fmt: skip
        if self.strategy == SAVE_LOGITS:
            specs["logits"] = self.saved_logits_shape(call), self.logits_dtype(call.dtype)
        for name in call.loss.outputs:
            output = OUTPUTS[name]
            per_target = () if call.targets_per_token is None or not output.is_per_target else (call.targets_per_token,)
            shape = () if output.is_mean else (*call.shape, *per_target)
            specs[name] = shape, torch.int64 if output.is_index else rows
        for name in call.needs_grad:
            operand = call.tensors[name]
            # dX for upstream gradients of 1 is rounded only after the backward has multiplied its rows.
            specs[gradient_name(name)] = tuple(operand.shape), rows if call.loss.has_row_gradients else operand.dtype
        return {name: Spec(*specs[name], call.device) for name in self.result_names(call)}

    def describe(self) -> str:
        """The plan in words."""
        words = {
            GRADIENTS_IN_FORWARD: "gradients in forward",
            SAVE_LOGITS: "save logits" if self.saved_rows is None else f"save logits of {self.saved_rows} tokens",
            RECOMPUTE_LOGITS: "recompute logits",
            LOSS_ONLY: "loss only",
        }
        has_chunks = self.strategy != SAVE_LOGITS or self.saved_rows is not None
        details = {
            f"chunks of {self.chunk_rows} tokens": has_chunks,
            "dW summed in float32": self.float32_accumulator,
            f"{self.float32_rows} rows of dW summed in float32": self.float32_rows,
            "float32 logits": self.float32_logits,
            "ignored rows computed": self.ignored_rows != "skip",
            f"row kernels by {self.row_kernels}": self.row_kernels != "auto",
            "products tuned": self.tune_products,
            "batch invariant": self.batch_invariant,
        }
        return ", ".join([words[self.strategy], *(text for text, holds in details.items() if holds)])
