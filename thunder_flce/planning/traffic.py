"""What the head of a model moves between the ranks of data parallel training, in two ways of dividing its weight."""

from typing import NamedTuple

import torch

from thunder_flce.execution.plan import Plan
from thunder_flce.operation.loss import Loss
from thunder_flce.operation.problem import Problem, TermShape
from thunder_flce.operation.shard import Shard
from thunder_flce.options import Options
from thunder_flce.planning.choose import agreed_plan
from thunder_flce.planning.program import program


class HeadTraffic(NamedTuple):
    """Bytes that a rank gets from the others in a step."""

    fully_shard: float
    """FSDP2, the head as a unit that is gathered once a step: all-gather of the weight, reduce-scatter of its gradient.
    """
    data_parallel: float
    """`VocabParallel(data_parallel=True)`: all-gather of the hidden states and of what is said of each row,
    reduce-scatter of the hidden states' gradient"""


def head_traffic(
    *,
    tokens: int,
    vocab: int,
    hidden: int,
    ranks: int,
    dtype: torch.dtype = torch.bfloat16,
    reduce_dtype: torch.dtype | None = None,
    input_grad_dtype: torch.dtype | None = None,
) -> HeadTraffic:
    """What a head's loss and its gradients move between the ranks that train it on data of their own.

    Args:
        tokens: of each rank.
        vocab: V, rows of the whole weight.
        hidden: H.
        ranks: how many.
        dtype: of the hidden states and the weight.
        reduce_dtype: of FSDP2's sum of the weight's gradient; None for dtype.
        input_grad_dtype: as of `VocabParallel`.
    """
    largest = -(-vocab // ranks)
    shard = Shard(
        group="", ranks=ranks, rank=0, start=0, columns=largest, largest=largest, vocab=vocab,
        float32_input_grad=input_grad_dtype in (None, torch.float32), sequence_parallel=True, input_grad_factor=ranks,
    )  # fmt: skip
    problem = Problem(
        tokens=ranks * tokens, terms=(TermShape(hidden=hidden, input_grad=True, weight_grad=True),), vocab=largest,
        weight_rows=largest, dtype=dtype, device_type="cuda", loss=Loss(), shard=shard,
    )  # fmt: skip
    plan = agreed_plan(problem, Options(row_kernels="torch"), None)
    return region_traffic(problem, plan, reduce_dtype=reduce_dtype)


def region_traffic(problem: Problem, plan: Plan, *, reduce_dtype: torch.dtype | None = None) -> HeadTraffic:
    """The same of a region whose vocabulary is divided, as its plan runs it, and of FSDP2 in its place."""
    shard = problem.shard
    assert shard is not None
    moved = 0
    for step in program(problem, plan).steps:
        if step.runs_in in ("NCCL", "gloo"):
            # All ranks have the whole sum of dX where they have the same tokens: it is reduce-scattered and gathered.
            is_all_reduce = step.result.startswith("dX") and not shard.sequence_parallel
            moved += step.bytes * (2 if is_all_reduce else 1)
    weight_bytes = 0
    for term in problem.terms:
        itemsize = problem.dtype.itemsize + term.weight_grad * (reduce_dtype or problem.dtype).itemsize
        weight_bytes += shard.vocab * term.hidden * itemsize
    of_others = (shard.ranks - 1) / shard.ranks
    return HeadTraffic(fully_shard=weight_bytes * of_others, data_parallel=moved * of_others)
