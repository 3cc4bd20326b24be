"""A loss region's operands and plan, and what follows from them for all of its steps."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from thunder_flce.execution.layout import VocabLayout, layout_for
from thunder_flce.execution.operands import Operands
from thunder_flce.execution.plan import Plan
from thunder_flce.execution.record import Tape, Value
from thunder_flce.execution.row_kernels.dispatch import RowKernels, kernels_for


class Region:
    """Operands and a plan. The operands are tensors, or values of one tape where a run is written down."""

    def __init__(self, operands: Operands, plan: Plan):
        self.operands = operands
        self.plan = plan
        self.loss = operands.loss
        self.logits_dtype = torch.float32 if plan.float32_logits else operands.dtype
        self.device_type = operands.device.type
        self.is_cuda = self.device_type == "cuda"
        self.logit_map = self.loss.logit_map
        target = operands.target
        self.tape: Tape | None = target.tape if isinstance(target, Value) else None
        self.terms, self.bias = operands.terms, operands.bias
        if (vocab := operands.vocab) < operands.weight_rows:
            self.terms = tuple(replace(term, weight=term.weight[:vocab]) for term in self.terms)
            self.bias = None if self.bias is None else self.bias[:vocab]
        self.shard = operands.shard

    @property
    def has_token_parts(self) -> bool:
        """Whether each rank has a part of the tokens, too."""
        return self.shard is not None and self.shard.sequence_parallel

    @property
    def sums_input_grad(self) -> bool:
        """Whether dX is summed over the ranks that divide the vocabulary."""
        return self.shard is not None and self.shard.reduces_input_grad

    @property
    def input_grad_dtype(self) -> torch.dtype:
        """The dtype in which dX is summed over the ranks."""
        is_wide = self.shard is not None and self.shard.float32_input_grad
        return self.operands.row_dtype if is_wide else self.operands.dtype

    @cached_property
    def kernels(self) -> RowKernels:
        """The row kernels of the plan."""
        return kernels_for(
            self.plan.row_kernels, dtype=self.logits_dtype, device_type=self.device_type, logit_map=self.logit_map
        )

    @property
    def written_to(self) -> Tape:
        """The tape, where a run is written down."""
        assert self.tape is not None
        return self.tape

    def layout(self, columns: int) -> VocabLayout:
        """The memory layout of rows of logits that have so many columns."""
        return layout_for(columns, dtype=self.logits_dtype, device_type=self.device_type)

    def loop(self, parts: Iterable[slice], over: str) -> Iterator[slice]:
        """The parts, one after another: "chunk" of tokens, or "block" of columns of the vocabulary."""
        return iter(parts) if self.tape is None else self.tape.loop(parts, over)

    def empty(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Uninitialised memory."""
        if self.tape is None:
            return torch.empty(shape, dtype=dtype, device=self.operands.device)
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        return Value(self.tape, name, shape=shape, dtype=dtype, storage=self.tape.allocate(nbytes))

    def zeros(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory to add to."""
        if self.tape is not None:
            return self.empty(name, shape, dtype)
        return torch.zeros(shape, dtype=dtype, device=self.operands.device)

    def scalar(self, number: float) -> Tensor:
        """A number in the dtype of rows."""
        if self.tape is None:
            return torch.full((), number, dtype=self.operands.row_dtype, device=self.operands.device)
        return Value(self.tape, f"{number:g}", dtype=self.operands.row_dtype)
