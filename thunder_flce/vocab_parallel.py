"""`VocabParallel`: which ranks divide the vocabulary, and how. Also its literal in a graph, and tests for DTensors."""

import ast
import operator
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeGuard

import torch
import torch.distributed as dist

from thunder_flce.importing import when_imported
from thunder_flce.operation.checks import dtype_name
from thunder_flce.options import PlainValues

ONLY_EAGER = (
    "DTensors and VocabParallel.data_parallel work in eager calls only: torch.compile breaks the graph there, or fails "
    "with fullgraph=True; torch.export and thunder cannot trace them. Call linear_cross_entropy outside of the traced "
    "program, or pass to_local() of DTensors and a vocab_parallel without data_parallel"
)


@dataclass(frozen=True, kw_only=True)
class VocabParallel(PlainValues):
    """How the ranks of a group divide the vocabulary of `linear_cross_entropy`.

    Raises:
        TypeError, ValueError: if a field has a wrong type or value; the message names it.
    """

    group: "dist.ProcessGroup | dist.DeviceMesh"
    """The ranks: a process group, or a device mesh of one dimension."""

    start: int | None = None
    """Index, in the whole weight, of the first row that this rank has. None, on all ranks: the parts follow each other
    in the order of ranks. Parts may differ in size, and may be empty."""

    sequence_parallel: bool = False
    """Whether input, target, token_weights and token_inputs are this rank's part of the tokens. Parts are in the order
    of ranks and of equal size. The loss is that of all tokens; with reduction "none", the loss and the outputs are
    those of this rank's tokens. The input's gradient is that of this rank's tokens."""

    data_parallel: bool = False
    """Whether each rank has tokens of its own, any number of them, and the gradients of the layers before are averaged
    over the ranks, as by FSDP and DDP. The loss is the mean over ranks of their losses, so that averaged gradients are
    its gradients: input's gradient is that of this rank's loss, and linear_weight's is averaged already. "mean" is the
    mean over the tokens of all ranks; num_items, if given, is the same on all ranks, as `count_items` computes it."""

    input_grad: str = "reduced"
    """"reduced": the gradients of input and of the inputs of terms are summed over the ranks. "partial": each rank gets
    the contribution of its columns, and the caller has to sum them."""

    input_grad_dtype: torch.dtype | None = None
    """Dtype in which the ranks sum the gradient of input: None for float32 (float64 for float64), or input's dtype,
    which moves half as many bytes."""

    def __post_init__(self) -> None:
        group_of("group", self.group)
        if self.start is not None and (isinstance(self.start, bool) or not isinstance(self.start, int)):
            raise TypeError(f"start must be None or an int, but got {type(self.start).__name__}")
        if self.start is not None and not 0 <= self.start < 2**63:
            raise ValueError(f"start must be the index of a row of the whole weight, but got {self.start}")
        flags = ("sequence_parallel", "data_parallel")
        for name, choices in (*((flag, (False, True)) for flag in flags), ("input_grad", ("reduced", "partial"))):
            value = getattr(self, name)
            # 1 is in (False, True).
            if type(value) is not type(choices[0]) or value not in choices:
                raise ValueError(f"{name} must be one of {choices}, but got {value!r}")
        if self.sequence_parallel and self.data_parallel:
            raise ValueError("sequence_parallel must be False with data_parallel: set only one of them")
        if self.divides_tokens and self.input_grad == "partial":
            name = flags[self.data_parallel]
            raise ValueError(f'input_grad must be "reduced" with {name}: each rank has tokens of its own')

    def __deepcopy__(self, memo: dict[int, Any]) -> "VocabParallel":
        # A process group cannot be copied, but a module that has one can be, such as for an average of its weights.
        return self

    @property
    def process_group(self) -> "dist.ProcessGroup":
        """The process group of the ranks."""
        return group_of("group", self.group)

    @property
    def divides_tokens(self) -> bool:
        """Whether a rank has only some of the tokens."""
        return self.sequence_parallel or self.data_parallel

    @classmethod
    def of(cls, vocab_parallel: Any) -> "VocabParallel":
        """Returns the `VocabParallel` of an argument of `linear_cross_entropy`, or of a literal from `as_literal`."""
        if isinstance(vocab_parallel, str) and vocab_parallel.startswith("{"):
            return _from_literal(vocab_parallel)
        if isinstance(vocab_parallel, VocabParallel):
            return vocab_parallel
        group_of("vocab_parallel", vocab_parallel)
        return cls(group=vocab_parallel)


_FIELDS = tuple(field.name for field in fields(VocabParallel))


def is_dtensor(value: Any) -> TypeGuard[Any]:
    """Whether a value is a DTensor. This imports nothing: if there is a DTensor, its module has been imported."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def has_dtensor(values: Sequence[Any]) -> bool:
    """Whether there is a DTensor among some values, or in lists and tuples, such as terms, among them."""
    if sys.modules.get("torch.distributed.tensor") is None:
        return False
    return any([has_dtensor(value) if isinstance(value, (list, tuple)) else is_dtensor(value) for value in values])


# `VocabParallel` as a literal in a graph.


def as_literal(vocab_parallel: Any) -> str:
    """Returns the argument vocab_parallel of `linear_cross_entropy` as a literal for a graph, with the group's name.

    Raises:
        NotImplementedError: with `data_parallel`.
        TypeError, ValueError: see `VocabParallel`.
    """
    if not isinstance(vocab_parallel, VocabParallel):
        return _as_literal(group=vocab_parallel)
    values = {name: getattr(vocab_parallel, name) for name in _FIELDS}
    if values["start"] is not None:
        values["start"] = operator.index(values["start"])  # In Dynamo it may be a symbol.
    return _as_literal(**values)


def _as_literal(**fields: Any) -> str:
    parallel = VocabParallel.of(fields["group"]) if len(fields) == 1 else VocabParallel(**fields)
    if parallel.data_parallel:
        raise NotImplementedError(ONLY_EAGER)
    changed = parallel.non_defaults()
    if parallel.input_grad_dtype is not None:
        changed["input_grad_dtype"] = dtype_name(parallel.input_grad_dtype)
    # The number of ranks is for PyTorch's disk cache: shapes of results follow from it.
    return repr({**changed, "group": parallel.process_group.group_name, "ranks": parallel.process_group.size()})


# Dynamo calls this function with constants instead of tracing it; it does trace the caller.
when_imported("torch._dynamo", lambda: torch.compiler.assume_constant_result(_as_literal))


def _from_literal(literal: str) -> VocabParallel:
    values = ast.literal_eval(literal)
    dtype, _ = values.pop("input_grad_dtype", None), values.pop("ranks", None)
    group = dist.distributed_c10d._resolve_process_group(values.pop("group"))
    return VocabParallel(group=group, input_grad_dtype=None if dtype is None else getattr(torch, dtype), **values)


def group_of(name: str, group: Any) -> "dist.ProcessGroup":
    """Returns the process group of an argument: the argument itself, or the group of a device mesh.

    Raises:
        TypeError, ValueError: if the argument is no group of ranks; the message names it.
    """
    if dist.is_available() and isinstance(group, dist.DeviceMesh) and group.get_coordinate() is not None:
        if group.ndim != 1:
            raise ValueError(
                f"{name} must be a device mesh of one dimension, but has {group.ndim}, {group.mesh_dim_names}: pass "
                'one of them, such as mesh["tp"]'
            )
        group = group.get_group()
    if not dist.is_available() or not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"{name} must be a ProcessGroup or a DeviceMesh that this rank belongs to, but got {type(group).__name__}"
        )
    return group
