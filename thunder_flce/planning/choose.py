"""Choosing a plan: candidates by rules of thumb, and between them by their predicted time and memory.

Legend: T tokens, H hidden size, V vocabulary, C tokens in a chunk. The matmuls of a region cost 6·T·H·V operations
whatever the plan; plans differ in which of them run twice, in how often dW is read and written, and in what is alive at
the peak. Time and memory of a candidate are those of its `program`.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from thunder_flce.device import PADDED_ROW_MULTIPLE, ROW_MULTIPLE, TILE_ROWS, DeviceMemory
from thunder_flce.execution.layout import layout_for
from thunder_flce.execution.matmul.tuning import can_tune
from thunder_flce.execution.plan import (
    GradientsInForward,
    LossOnly,
    Plan,
    RecomputeLogits,
    SaveLogits,
    SaveSomeLogits,
)
from thunder_flce.execution.row_kernels.dispatch import check_available
from thunder_flce.execution.staged_logits import MOST_BLOCKS, BlockLayout
from thunder_flce.operation.problem import Problem
from thunder_flce.options import Options
from thunder_flce.planning.cost import seconds
from thunder_flce.planning.program import program

# A running sum of dW in 16 bits is rounded twice a chunk. Its error stays within 1.25 × that of a single matmul while
# hardly any column is the target of more than one token; the few that are, in any real text, get their rows of dW
# summed in float32: FREQUENT_ROWS of them, or as many as FREQUENT_BYTES hold. Error over that of a single matmul for 4
# and 16 chunks of 8192 × 128256 × 4096: 1.15 and 1.18 with uniform targets (but 1.30 for 4 chunks at a vocabulary of
# 98304), 1.09 and 1.10 with Zipf-distributed ones and 192 such rows, which the bytes hold; with 128, 1.12 and 1.14.
EXACT_CHUNKS = 16
EXACT_TOKENS_PER_COLUMN = 1 / 15
FREQUENT_ROWS = 256
FREQUENT_BYTES = 3 * 2**20

# On CUDA, chunks of fewer rows leave the matmuls memory-bound: each reads all of W, and reads and writes all of dW.
# Larger chunks gain nothing where H is large; where it is small, what a chunk costs beside its matmuls (about 0.1 ms)
# asks for more rows: enough for this many operations, as long as the logits stay within a gigabyte.
CUDA_CHUNK_ROWS = 2048
CUDA_CHUNK_OPERATIONS = 2.5e12
CUDA_CHUNK_BYTES = 2**30
CUDA_SMALLEST_CHUNK = 512
# A single chunk spares the sum over chunks: 5% at 4096 × 152064 × 3584. It is considered where its logits need no more
# memory than this factor times the gradients, which are there anyway. Two chunks would spare little of either.
CUDA_ONE_CHUNK = 1.2
CUDA_FEWEST_CHUNKS = 3
# Chunks of fewer rows than this may be spared by a first one whose logits are staged in dW's memory. Blocks of fewer
# columns than CUDA_SMALLEST_BLOCK were not tried.
CUDA_SMALL_CHUNK = 1024
CUDA_SMALLEST_BLOCK = 4096
STAGED_CANDIDATES = 4
# On a CPU, larger chunks only take more memory.
CPU_CHUNK_BYTES = 32 * 2**20
CPU_SMALLEST_CHUNK = 64

# Unless the user gives a budget, logits are saved for upstream gradients of one number a row while they take no more
# than this, an eighth of the device's memory and half of what is free.
SAVED_LOGITS_BYTES = 4 * 2**30
# To save the logits of fewer than an eighth of the tokens spares less than 3% of the matmuls.
SMALLEST_SAVED_PART = 1 / 8


@lru_cache(maxsize=1024)
def cached_plan(problem: Problem, options: Options, device: torch.device) -> Plan:
    """`make_plan` with the memory that the device has when a problem is first met: afterwards its plan stays."""
    return make_plan(problem, options, memory=DeviceMemory.of(device))


def make_plan(problem: Problem, options: Options, *, memory: DeviceMemory | None = None) -> Plan:
    """The plan for `problem`: the fastest one that fits the memory budget.

    Args:
        problem: shapes, dtypes, the loss and which gradients are needed.
        options: the user's choices; each of them overrides what the plan would choose.
        memory: the device's; None where it is unknown. Needed where the budget is a fraction of it.

    Raises:
        ValueError: where a chosen strategy cannot give the gradients asked for, or chosen row kernels cannot run.
    """
    check_available(options.row_kernels, dtype=problem.logits_dtype, device_type=problem.device_type)
    plan = _strategy_plan(problem, options, _Budget.of(options, memory))
    if isinstance(plan, GradientsInForward):
        plan = _with_staged_logits(problem, plan)
    return replace(plan, tune_products=options.tune_products and _has_large_matmuls(problem, plan))


def lasting_strategy(problem: Problem, options: Options) -> str:
    """A strategy for any number of tokens, and whatever memory is free: logits are saved only where that was asked for.

    Raises:
        ValueError: as `make_plan`.
    """
    check_available(options.row_kernels, dtype=problem.logits_dtype, device_type=problem.device_type)
    if not problem.needs_grad:
        return LossOnly.strategy
    strategy, _ = _choose_strategy(problem, options, _Budget(None, None))
    return strategy


def temporary_bytes(problem: Problem, plan: Plan) -> int:
    """See `Program.temporary_bytes`."""
    return program(problem, plan).temporary_bytes


def alternatives(problem: Problem, plan: Plan) -> list[Plan]:
    """Other ways to run a region: half and twice the chunk, and the other strategies, each with its own chunks.

    They keep what the plan does with ignored rows and who runs its row work, and heed no memory budget.
    """
    kept = Options(ignored_rows=plan.ignored_rows, row_kernels=plan.row_kernels)
    others = [replace(kept, strategy=strategy) for strategy in _strategies(problem)]
    if isinstance(plan, GradientsInForward | RecomputeLogits | LossOnly) and not isinstance(plan, SaveSomeLogits):
        same = kept if isinstance(plan, LossOnly) else replace(kept, strategy=plan.strategy)
        sizes = {plan.chunk_rows // 2, min(plan.chunk_rows * 2, problem.tokens)}
        others = [replace(same, chunk_rows=rows) for rows in sorted(sizes) if rows] + others
    plans = [make_plan(problem, options) for options in others]
    return [other for at, other in enumerate(plans) if other not in (plan, *plans[:at])]


def _strategies(problem: Problem) -> list[str]:
    """The strategies that can give the gradients that are needed."""
    if not problem.needs_grad:
        return []
    in_forward = ["gradients_in_forward"] if not problem.loss.has_row_gradients else []
    return [*in_forward, "save_logits", "recompute_logits"]


def logits_bytes(problem: Problem, rows: int) -> int:
    """Bytes of the logits of `rows` tokens, and of their gradients where they do not share memory."""
    layout = layout_for(problem.vocab, dtype=problem.logits_dtype, device_type=problem.device_type)
    itemsize = problem.dtype.itemsize
    if problem.float32_logits:
        itemsize = 4 + itemsize * problem.needs_grad
    return rows * layout.row_stride * itemsize


def _common(problem: Problem, options: Options) -> dict[str, Any]:
    """The fields that all plans have, as far as they are chosen before the others."""
    return {
        "ignored_rows": options.ignored_rows,
        "float32_logits": problem.float32_logits,
        "row_kernels": options.row_kernels,
    }


class _Budget(NamedTuple):
    """Bytes that the user or the device's memory allow; None for no limit but the defaults."""

    chunk: int | None
    """For a chunk of logits and what is summed beside it"""
    saved: int | None
    """For logits that are kept for the backward; None: none are kept"""

    @classmethod
    def of(cls, options: Options, memory: DeviceMemory | None) -> "_Budget":
        budget = options.memory_budget
        if isinstance(budget, float):
            if memory is None:
                raise ValueError("memory_budget is a fraction of the device's memory, but that is not known here")
            budget = int(budget * memory.total)
        if budget is not None:
            return cls(budget, budget)
        if memory is None:
            return cls(None, None)
        return cls(None, min(SAVED_LOGITS_BYTES, memory.total // 8, memory.free // 2))


def _strategy_plan(problem: Problem, options: Options, budget: _Budget) -> Plan:
    """The strategy and its sizes."""
    common = _common(problem, options)
    if not problem.needs_grad:
        return LossOnly(chunk_rows=options.chunk_rows or _recomputed_chunk(problem, budget), **common)
    strategy, saved_rows = _choose_strategy(problem, options, budget)
    if strategy == "gradients_in_forward":
        return _accumulating_plan(problem, options, budget.chunk)
    if strategy == "save_logits" and saved_rows == problem.tokens:
        return SaveLogits(**common)
    rows = options.chunk_rows or _recomputed_chunk(problem, budget)
    columns = _block_columns(problem, logits_bytes(problem, rows))
    if saved_rows:
        return SaveSomeLogits(saved_rows=saved_rows, chunk_rows=rows, block_columns=columns, **common)
    return RecomputeLogits(chunk_rows=rows, block_columns=columns, **common)


def _choose_strategy(problem: Problem, options: Options, budget: _Budget) -> tuple[str, int]:
    """The strategy, and of how many tokens the logits are saved."""
    whole = {"save_logits": problem.tokens}
    if options.strategy == "gradients_in_forward" and problem.loss.has_row_gradients:
        raise ValueError(
            'strategy "gradients_in_forward" needs reduction "mean" or "sum" and no differentiable outputs: '
            "otherwise the upstream gradient is a vector that has to be applied before anything is summed over tokens"
        )
    if options.strategy is not None:
        return options.strategy, whole.get(options.strategy, 0)
    # float16 gradients need the upstream gradient (the loss scale) before they are rounded, or they underflow.
    if not problem.loss.has_row_gradients and problem.dtype is not torch.float16:
        return "gradients_in_forward", 0
    if budget.saved is None:
        return "recompute_logits", 0
    if logits_bytes(problem, problem.tokens) <= budget.saved:
        return "save_logits", problem.tokens
    others = logits_bytes(problem, options.chunk_rows or _recomputed_chunk(problem, budget))
    rows = (budget.saved - others) // logits_bytes(problem, 1)
    rows -= rows % TILE_ROWS
    return ("save_logits", rows) if rows >= SMALLEST_SAVED_PART * problem.tokens else ("recompute_logits", 0)


# Chunks.


def _recomputed_chunk(problem: Problem, budget: _Budget) -> int:
    """Rows of a chunk whose logits are not kept; of a budget for saved logits, no more than a quarter."""
    largest = _largest_chunk(problem, budget.chunk)
    if budget.saved is not None:
        largest = min(largest, max(budget.saved // (4 * logits_bytes(problem, 1)), _smallest_chunk(problem)))
    return _balanced(problem, largest)


def _smallest_chunk(problem: Problem) -> int:
    return CPU_SMALLEST_CHUNK if problem.device_type == "cpu" else CUDA_SMALLEST_CHUNK


def _largest_chunk(problem: Problem, budget: int | None, fixed_bytes: int = 0) -> int:
    """Rows of the largest chunk that fits the budget, never under the smallest that is worth running."""
    row_bytes = logits_bytes(problem, 1)
    smallest = _smallest_chunk(problem)
    if budget is not None:
        return max((budget - fixed_bytes) // row_bytes, smallest)
    if problem.device_type == "cpu":
        return max(CPU_CHUNK_BYTES // row_bytes, smallest)
    enough = int(CUDA_CHUNK_OPERATIONS / (6 * max(problem.hidden, 1) * problem.vocab))
    third = -(-problem.tokens // (CUDA_FEWEST_CHUNKS * TILE_ROWS)) * TILE_ROWS
    return max(CUDA_CHUNK_ROWS, min(enough, CUDA_CHUNK_BYTES // row_bytes, third))


def _balanced(problem: Problem, largest: int) -> int:
    """Rows of a chunk so that all chunks are about equal, in whole tiles of the matmul, and none is larger."""
    if problem.tokens <= largest:
        return max(problem.tokens, 1)
    tile = TILE_ROWS if problem.device_type == "cuda" else 1
    chunks = -(-problem.tokens // largest)
    rows = -(-problem.tokens // (chunks * tile)) * tile
    return min(rows, largest)


# The sum of dW over chunks.


def _accumulating_plan(problem: Problem, options: Options, budget: int | None) -> GradientsInForward:
    """Rows of a chunk, and where dW is summed: the candidate that takes the least time or, if it must be exact, memory.

    A sum in 16 bits is exact enough with few chunks. Otherwise either chunks are larger, and few enough, or they stand
    beside a float32 accumulator.
    """
    common = _common(problem, options)
    sums_16_bits = problem.dtype.itemsize < 4 and problem.weight_grad_columns > 0

    def in_float32(rows: int) -> GradientsInForward:
        return GradientsInForward(chunk_rows=rows, float32_accumulator=True, **common)

    def in_16_bits(rows: int) -> GradientsInForward:
        """With the rows of the most frequent targets in float32 where there are chunks."""
        has_sums = sums_16_bits and rows < problem.tokens
        frequent = min(FREQUENT_ROWS, FREQUENT_BYTES // (4 * max(problem.weight_grad_columns, 1)))
        return GradientsInForward(chunk_rows=rows, float32_rows=frequent if has_sums else 0, **common)

    beside_accumulator = options.chunk_rows or _balanced(problem, _largest_beside_accumulator(problem, budget))
    if options.accumulate == "float32" and sums_16_bits:
        return in_float32(beside_accumulator)
    plan = in_16_bits(options.chunk_rows or _balanced(problem, _largest_chunk(problem, budget)))
    if options.chunk_rows is None and budget is None and _fits_in_one_chunk(problem):
        one = in_16_bits(max(problem.tokens, 1))
        plan = min(plan, one, key=lambda candidate: seconds(program(problem, candidate)))
    few_targets = problem.tokens <= problem.vocab * EXACT_TOKENS_PER_COLUMN
    is_exact = plan.chunk_rows >= problem.tokens or (few_targets and plan.chunk_rows * EXACT_CHUNKS >= problem.tokens)
    if options.accumulate == "parameter" or not sums_16_bits or is_exact:
        return plan
    if options.chunk_rows:
        return in_float32(options.chunk_rows)
    larger = in_16_bits(_balanced(problem, -(-problem.tokens // (EXACT_CHUNKS if few_targets else 1))))
    return min(larger, in_float32(beside_accumulator), key=lambda candidate: temporary_bytes(problem, candidate))


def _fits_in_one_chunk(problem: Problem) -> bool:
    """Whether the logits of all tokens take little memory beside the gradients."""
    whole = logits_bytes(problem, problem.tokens)
    return problem.device_type == "cuda" and whole <= CUDA_ONE_CHUNK * problem.gradient_bytes


def _largest_beside_accumulator(problem: Problem, budget: int | None) -> int:
    """Rows of the largest chunk where dW has a float32 accumulator, which each chunk reads and writes.

    Without a budget, a chunk may be as large as the rounded dW, which takes its memory afterwards: at 16384 × 128256 ×
    4096 that halves what the accumulator costs, 10% of the time, and takes no more memory.
    """
    weight_elements = problem.vocab * problem.weight_grad_columns
    largest = _largest_chunk(problem, budget, (4 - problem.dtype.itemsize) * weight_elements)
    if budget is not None or problem.device_type == "cpu":
        return largest
    if _fits_in_one_chunk(problem):
        return max(problem.tokens, 1)
    return max(largest, weight_elements * problem.dtype.itemsize // logits_bytes(problem, 1))


# Logits staged in the memory of dW.


def _with_staged_logits(problem: Problem, plan: GradientsInForward) -> GradientsInForward:
    """The plan, or one like it whose first chunk is staged in the memory of dW, where that spares small chunks.

    It takes the memory of one of these, and has all tokens, or as many as spare the most chunks.
    """
    tokens, rows = problem.tokens, plan.chunk_rows
    is_one_linear = len(problem.terms) == 1 and problem.terms[0].weight_grad and not problem.bias_grad
    can_stage = problem.device_type == "cuda" and is_one_linear and problem.hidden % ROW_MULTIPLE == 0
    in_place = problem.logits_dtype == problem.dtype
    if not (can_stage and in_place and problem.loss.is_plain and rows < min(tokens, CUDA_SMALL_CHUNK)):
        return plan
    candidates = [plan, *_staged_candidates(problem, plan)]
    return min(candidates, key=lambda candidate: seconds(program(problem, candidate)))


def _staged_candidates(problem: Problem, plan: GradientsInForward) -> Iterator[GradientsInForward]:
    """All tokens in one chunk, and as many in the first as leave a whole number of small chunks, the largest first."""
    tokens, rows = problem.tokens, plan.chunk_rows
    whole = replace(plan, chunk_rows=tokens, float32_accumulator=False, float32_rows=0)
    found = 0
    for later in range(-(-tokens // rows)):
        first = tokens - later * rows
        if later:
            first = -(-first // TILE_ROWS) * TILE_ROWS
        if first <= rows or found == STAGED_CANDIDATES:
            return
        like = plan if later else whole
        divided = (replace(like, staged=(first, count)) for count in range(2, MOST_BLOCKS + 1))
        fitting = next((candidate for candidate in divided if _has_room(problem, candidate, rows)), None)
        if fitting is not None:
            found += 1
            yield fitting


def _has_room(problem: Problem, plan: GradientsInForward, limit: int) -> bool:
    """Whether staging takes no more than `limit` rows of logits beside dW, where also dX's float32 sum has room."""
    blocks, itemsize = _blocks_of(problem, plan), problem.dtype.itemsize
    if blocks.width < CUDA_SMALLEST_BLOCK or not blocks.borrowed:
        return False
    has_dx = problem.input_grad_columns > 0
    sum_bytes = 4 * blocks.rows * problem.hidden if has_dx and itemsize < 4 else 0
    last = blocks.columns[-1]
    layout = layout_for(last.stop - last.start, dtype=problem.logits_dtype, device_type=problem.device_type)
    own_bytes = blocks.own_elements(layout.row_stride) * itemsize
    # Where rows are ignored, a copy of the first rows of x is made. dX of these rows comes first, so that it needs
    # other memory of dX, or its own.
    is_copied = plan.ignored_rows != "compute" and not (has_dx and 2 * blocks.rows <= problem.tokens)
    own_bytes += is_copied * blocks.rows * problem.hidden * itemsize
    return sum_bytes <= blocks.free_elements * itemsize and own_bytes <= logits_bytes(problem, limit)


def _blocks_of(problem: Problem, plan: GradientsInForward) -> BlockLayout:
    blocks = plan.staged_logits(hidden=problem.hidden, vocab=problem.vocab, itemsize=problem.dtype.itemsize)
    assert blocks is not None
    return blocks


# Vocabulary blocks, and matmuls.


def _block_columns(problem: Problem, block_bytes: int) -> int:
    """Columns of a vocabulary block whose logits, for all tokens, take about `block_bytes`."""
    itemsize = logits_bytes(problem, 1) // max(
        layout_for(problem.vocab, dtype=problem.logits_dtype, device_type=problem.device_type).row_stride, 1
    )
    columns = max(block_bytes // (max(problem.tokens, 1) * itemsize), 1024)
    blocks = -(-problem.vocab // columns)
    return min(-(-problem.vocab // (blocks * PADDED_ROW_MULTIPLE)) * PADDED_ROW_MULTIPLE, problem.vocab)


def _has_large_matmuls(problem: Problem, plan: Plan) -> bool:
    """Whether cuBLAS's algorithms are worth measuring, for the largest matmuls at least; see `matmul.tuning`."""
    steps = [step for stage in program(problem, plan).stages for step in stage.every_step()]
    largest = max((step.operations for step in steps if step.runs_in == "cuBLAS"), default=0)
    return can_tune(largest, dtype=problem.dtype, device_type=problem.device_type)
