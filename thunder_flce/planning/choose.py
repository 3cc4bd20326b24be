"""Choosing a plan: candidates by rules of thumb, and between them by the predicted time and memory of their `program`.

Plans differ in which matmuls run twice, in how often dW is read and written, and in what is alive at the peak.
"""

import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple

import torch

from thunder_flce.device import PADDED_ROW_MULTIPLE, ROW_MULTIPLE, TILE_ROWS, DeviceMemory
from thunder_flce.execution.gradient_accumulation import columns_that_hold_input_sum
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
from thunder_flce.execution.row_kernels.dispatch import RowWork, check_available, library
from thunder_flce.execution.staged_logits import MOST_BLOCKS
from thunder_flce.operation.problem import Problem
from thunder_flce.options import STRATEGIES, Options
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
# With K targets a token, most columns are the target of several tokens of a text: as many times more rows. What is left
# is the error of columns that are about equally frequent (docs/performance.md, "Losses over log-probabilities").
FREQUENT_OF_SEVERAL = 4

# On CUDA, chunks of fewer rows leave the matmuls memory-bound: each reads all of W, and reads and writes all of dW.
# Larger chunks gain nothing where H is large; where it is small, what a chunk costs beside its matmuls (about 0.1 ms)
# asks for more rows: enough for this many operations, as long as the logits stay within a gigabyte.
CUDA_CHUNK_ROWS = 2048
# Where the weight is frozen, there is no dW to read and write. Half as many rows are enough if dX of these, in tiles of
# 128 × 256, keeps the last wave of an H200's multiprocessors busy: 0% to 1.5% more time at hidden sizes of 3584, 4096
# and 8192, in 0.56 of the memory, but 3% to 6% at 2048, 2304 and 5120. Low-rank adapters, whose dW is no larger than
# this part of the head's, change nothing in that.
ADAPTER_PART = 1 / 16
CUDA_TILE = (128, 256)
CUDA_MULTIPROCESSORS = 132
CUDA_FULL_WAVE = 0.8
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


@lru_cache(maxsize=1024)
def agreed_plan(problem: Problem, options: Options, memory: DeviceMemory | None) -> Plan:
    """`make_plan` for a part of a vocabulary, from what all ranks have agreed on, so that all get the same plan."""
    assert problem.shard is not None
    if options.chunk_rows is not None:
        # At least one row of each part of the tokens.
        options = replace(options, chunk_rows=max(options.chunk_rows, problem.shard.token_parts))
    return make_plan(problem, options, memory=memory)


def make_plan(problem: Problem, options: Options, *, memory: DeviceMemory | None = None) -> Plan:
    """The plan for `problem`: the fastest one that fits the memory budget.

    Each of the options overrides what would be chosen. `memory` is the device's, None where it is unknown.

    Raises:
        ValueError: where a chosen strategy cannot give the gradients asked for, chosen row kernels cannot run, the
            budget is a fraction of an unknown memory, or `batch_invariant` cannot be had.
    """
    check_available(options.row_kernels, dtype=problem.logits_dtype, device_type=problem.device_type)
    if options.batch_invariant:
        _check_batch_invariant(problem, options)
    plan = _plan_within(problem, options, _Budget.of(options, memory))
    return replace(plan, tune_products=options.tune_products and _has_large_matmuls(problem, plan))


def _plan_within(problem: Problem, options: Options, budget: "_Budget") -> Plan:
    """The plan for a budget, with a warning where the smallest one takes more."""

    def plan_for(chunk: int | None) -> Plan:
        plan = _strategy_plan(problem, options, budget._replace(chunk=chunk))
        if isinstance(plan, GradientsInForward) and not plan.batch_invariant:
            return _with_staged_logits(problem, plan)
        return plan

    plan, limit = plan_for(budget.chunk), budget.chunk
    if limit is None or temporary_bytes(problem, plan) <= limit:
        return plan
    # What stands beside a chunk is known when there is a plan.
    beside, candidates = temporary_bytes(problem, plan) - limit, [plan]
    for chunk in (limit - beside, limit // 2, limit // 4, 0):
        candidates.append(plan_for(chunk))
        if temporary_bytes(problem, candidates[-1]) <= limit:
            return candidates[-1]
    plan = min(candidates, key=lambda candidate: temporary_bytes(problem, candidate))
    needed = temporary_bytes(problem, plan)
    if needed > 1.01 * limit:
        sums_float32 = getattr(plan, "float32_accumulator", False) and options.accumulate == "auto"
        cure = '; accumulate="parameter" takes less, with a larger error of dW' if sums_float32 else ""
        warnings.warn(
            f"memory_budget is {limit / 1e6:.0f} MB, but {problem.tokens} tokens take {needed / 1e6:.0f} MB: "
            f"{plan.describe()}{cure}",
            stacklevel=2,
        )
    return plan


def lasting_strategy(problem: Problem, options: Options) -> str:
    """A strategy for any number of tokens, and whatever memory is free: logits are saved only where that was asked for.

    Raises:
        ValueError: as `make_plan`.
    """
    check_available(options.row_kernels, dtype=problem.logits_dtype, device_type=problem.device_type)
    # No size matters, and all of them may be a compiler's symbols.
    terms = tuple(replace(term, hidden=1) for term in problem.terms)
    smallest = replace(problem, tokens=1, terms=terms, vocab=1, weight_rows=1)
    return _strategy_plan(smallest, replace(options, memory_budget=None, chunk_rows=1), _Budget(None, None)).strategy


def temporary_bytes(problem: Problem, plan: Plan) -> int:
    """See `Program.temporary_bytes`."""
    return program(problem, plan).temporary_bytes


def alternatives(problem: Problem, plan: Plan) -> list[Plan]:
    """Other ways to run a region: half and twice the chunk, and the other strategies, each with its own chunks.

    They keep what the plan does with ignored rows and who runs its row work, and heed no memory budget.
    """
    kept = Options(ignored_rows=plan.ignored_rows, row_kernels=plan.row_kernels, batch_invariant=plan.batch_invariant)
    # Without gradients there is one strategy, and so there is with a token loss.
    strategies = STRATEGIES if problem.needs_grad and not problem.loss.needs_gradients_in_forward else ()
    impossible = "gradients_in_forward" if _needs_later_sums(problem) else None
    others = [replace(kept, strategy=strategy) for strategy in strategies if strategy != impossible]
    if isinstance(plan, GradientsInForward | RecomputeLogits | LossOnly) and not isinstance(plan, SaveSomeLogits):
        same = kept if isinstance(plan, LossOnly) else replace(kept, strategy=plan.strategy)
        sizes = {plan.chunk_rows // 2, min(plan.chunk_rows * 2, problem.tokens)}
        others = [replace(same, chunk_rows=rows) for rows in sorted(sizes) if rows] + others
    plans = [make_plan(problem, options) for options in others]
    return [other for at, other in enumerate(plans) if other not in (plan, *plans[:at])]


def logits_bytes(problem: Problem, rows: int) -> int:
    """Bytes of the logits of `rows` tokens, of a teacher's, and of their gradients where they do not share memory."""
    itemsize = problem.dtype.itemsize
    if problem.float32_logits:
        itemsize = 4 + itemsize * problem.needs_grad
    if problem.teacher_dtype is not None:
        itemsize += max(problem.teacher_dtype.itemsize, 4 * problem.float32_logits)
    return rows * _row_stride(problem, problem.vocab) * itemsize


def _row_stride(problem: Problem, columns: int) -> int:
    """Elements from one row of logits to the next."""
    return layout_for(columns, dtype=problem.logits_dtype, device_type=problem.device_type).row_stride


def _common(problem: Problem, options: Options) -> dict[str, Any]:
    """The fields that all plans have, as far as they are chosen before the others."""
    return {
        "ignored_rows": options.ignored_rows,
        "float32_logits": problem.float32_logits,
        "row_kernels": options.row_kernels,
        "batch_invariant": options.batch_invariant,
    }


def _check_batch_invariant(problem: Problem, options: Options) -> None:
    """Whether rows can have the same bits in any batch.

    Raises:
        ValueError: where they cannot; the text says why.
    """
    reason = ""
    work = RowWork(method="statistics", dtype=problem.logits_dtype)
    if problem.device_type == "cuda":
        linears = [("input", problem.dtype, [term.hidden for term in problem.terms])]
        if problem.teacher_dtype is not None:
            linears.append(("teacher_input", problem.teacher_dtype, [problem.teacher_hidden]))
        if library(options.row_kernels, work, "cuda") != "Triton":
            reason = 'on CUDA it needs Triton and row_kernels="auto" or "triton"'
        for name, dtype, sizes in linears:
            if dtype.itemsize != 2:
                reason = f"on CUDA it needs bfloat16 or float16, but {name} is {dtype}"
            elif any(size % ROW_MULTIPLE for size in sizes):
                reason = f"on CUDA it needs multiples of {ROW_MULTIPLE}, but the hidden sizes of {name} are {sizes}"
    elif problem.device_type != "cpu":
        reason = f"it runs on CUDA and on a CPU, but the input is on {problem.device_type!r}"
    if reason:
        raise ValueError(f"batch_invariant=True: {reason}")


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
    common, strategy = _common(problem, options), options.strategy
    rows = options.chunk_rows or _recomputed_chunk(problem, budget)
    if not problem.needs_grad:
        return LossOnly(chunk_rows=rows, **common)
    if strategy == "gradients_in_forward" and _needs_later_sums(problem):
        raise ValueError(
            'strategy "gradients_in_forward" needs reduction "mean" or "sum" and no differentiable outputs: otherwise '
            "the upstream gradient is a vector that has to be applied before anything is summed over tokens. Or it "
            "needs a frozen weight and bias, no further terms, no label smoothing, no z_loss and no gradient of "
            '"entropy" or "log_sum_exp"'
        )
    # float16 gradients need the upstream gradient (the loss scale) before they are rounded, or they underflow.
    has_loss_scale = problem.dtype is not torch.float16 or problem.has_expected_gradient
    only_in_forward = problem.loss.needs_gradients_in_forward
    if only_in_forward and (strategy not in (None, "gradients_in_forward") or not has_loss_scale):
        raise ValueError(
            f"{only_in_forward} needs its gradients computed in the forward: no other strategy and, for float16, "
            "expected_gradient, such as a GradScaler's scale"
        )
    waits = _needs_later_sums(problem) or not (has_loss_scale or problem.loss.has_row_gradients)
    if strategy == "gradients_in_forward" or (strategy is None and not waits):
        return _accumulating_plan(problem, options, budget.chunk)
    saved_rows = _saved_rows(problem, rows, budget.saved) if strategy is None else 0
    if strategy == "save_logits" or (strategy is None and saved_rows == problem.tokens):
        return SaveLogits(**common)
    columns = _block_columns(problem, rows * logits_bytes(problem, 1))
    some = SaveSomeLogits(saved_rows=saved_rows, chunk_rows=rows, block_columns=columns, **common)
    return _within(problem, some, budget.chunk) or _recomputing_plan(problem, options, budget.chunk)


def _needs_later_sums(problem: Problem) -> bool:
    """Whether upstream gradients, one number a row, have to be known before anything is summed."""
    return problem.loss.has_row_gradients and not problem.has_unit_gradients


def _saved_rows(problem: Problem, chunk_rows: int, budget: int | None) -> int:
    """How many tokens' logits are saved, beside a chunk of the others."""
    fitting = 0 if budget is None else budget // logits_bytes(problem, 1)
    if fitting >= problem.tokens:
        return problem.tokens
    if problem.shard is not None and problem.shard.sequence_parallel:
        return 0
    return (fitting - chunk_rows) // TILE_ROWS * TILE_ROWS


def _within(problem: Problem, plan: SaveSomeLogits, budget: int | None) -> SaveSomeLogits | None:
    """The plan, with fewer saved logits where the backward takes more beside them; None where too few are left."""
    while plan.saved_rows >= max(SMALLEST_SAVED_PART * problem.tokens, 1):
        excess = 0 if budget is None else temporary_bytes(problem, plan) - budget
        if excess <= 0:
            return plan
        fewer = plan.saved_rows - -(-excess // logits_bytes(problem, 1))
        plan = replace(plan, saved_rows=fewer // TILE_ROWS * TILE_ROWS)
    return None


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
    """Rows of the largest chunk that fits the budget beside other bytes, never under the smallest worth running."""
    row_bytes = logits_bytes(problem, 1)
    smallest = _smallest_chunk(problem)
    if budget is not None:
        return max((budget - fixed_bytes) // row_bytes, smallest)
    if problem.device_type == "cpu":
        return max(CPU_CHUNK_BYTES // row_bytes, smallest)
    enough = int(CUDA_CHUNK_OPERATIONS / (6 * max(problem.hidden, 1) * problem.vocab))
    third = -(-problem.tokens // (CUDA_FEWEST_CHUNKS * TILE_ROWS)) * TILE_ROWS
    return max(_cuda_chunk_rows(problem), min(enough, CUDA_CHUNK_BYTES // row_bytes, third))


def _cuda_chunk_rows(problem: Problem) -> int:
    # A rank's logits are narrower by the number of ranks, so that its chunks may have as many more rows.
    return CUDA_CHUNK_ROWS * (1 if problem.shard is None else problem.shard.ranks)


def _largest_with_gradients(problem: Problem, budget: int | None) -> int:
    """Rows of the largest chunk whose gradients are computed with its logits: fewer for dX of a frozen head."""
    head, largest, rows = problem.terms[0], _largest_chunk(problem, budget), _cuda_chunk_rows(problem)
    is_chosen = budget is None and problem.device_type == "cuda" and largest == rows
    if is_chosen and head.input_grad and problem.weight_grad_columns <= ADAPTER_PART * head.hidden:
        return rows // 2 if _fills_waves(_balanced(problem, rows // 2), head.hidden) else rows
    return largest


def _fills_waves(rows: int, columns: int) -> bool:
    """Whether a matmul of so many rows and columns keeps the multiprocessors busy to its end."""
    tiles = -(-rows // CUDA_TILE[0]) * -(-columns // CUDA_TILE[1])
    waves = -(-tiles // CUDA_MULTIPROCESSORS)
    return tiles >= CUDA_FULL_WAVE * waves * CUDA_MULTIPROCESSORS


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

    def in_16_bits(rows: int) -> GradientsInForward:
        """With the rows of the most frequent targets in float32 where there are chunks."""
        has_sums = sums_16_bits and rows < problem.tokens
        frequent = min(FREQUENT_ROWS, FREQUENT_BYTES // (4 * max(problem.weight_grad_columns, 1)))
        frequent *= FREQUENT_OF_SEVERAL if problem.targets_per_token else 1
        return GradientsInForward(chunk_rows=rows, float32_rows=frequent if has_sums else 0, **common)

    beside_accumulator = options.chunk_rows or _balanced(problem, _largest_beside_accumulator(problem, budget))
    in_float32 = GradientsInForward(chunk_rows=beside_accumulator, float32_accumulator=True, **common)
    if options.accumulate == "float32" and sums_16_bits:
        return in_float32
    plan = in_16_bits(options.chunk_rows or _balanced(problem, _largest_with_gradients(problem, budget)))
    if options.chunk_rows is None and budget is None and _fits_in_one_chunk(problem):
        one = in_16_bits(max(problem.tokens, 1))
        plan = min(plan, one, key=lambda candidate: seconds(program(problem, candidate)))
    # The K targets of `target_weights` count as one, though each adds to a row of dW: a sum in float32, or compensated,
    # would take once more the memory of dW, fewer chunks that of logits.
    few_targets = problem.tokens <= problem.whole_vocab * EXACT_TOKENS_PER_COLUMN
    is_exact = plan.chunk_rows >= problem.tokens or (few_targets and plan.chunk_rows * EXACT_CHUNKS >= problem.tokens)
    if options.accumulate == "parameter" or not sums_16_bits or is_exact:
        return plan
    if options.chunk_rows:
        return in_float32
    larger = in_16_bits(_balanced(problem, -(-problem.tokens // (EXACT_CHUNKS if few_targets else 1))))
    return min(larger, in_float32, key=lambda candidate: temporary_bytes(problem, candidate))


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
    """The plan, or one like it whose first chunk is staged in the memory of dW, where that spares small chunks."""
    is_small = plan.chunk_rows < min(problem.tokens, CUDA_SMALL_CHUNK)
    is_one_linear = len(problem.terms) == 1 and problem.terms[0].weight_grad and not problem.bias_grad
    is_one_linear = is_one_linear and problem.shard is None
    is_aligned = problem.device_type == "cuda" and problem.hidden % ROW_MULTIPLE == 0
    in_place = problem.logits_dtype == problem.dtype and problem.loss.is_plain
    if not (is_small and is_one_linear and is_aligned and in_place):
        return plan
    candidates = [plan, *islice(_staged_candidates(problem, plan), STAGED_CANDIDATES)]
    return min(candidates, key=lambda candidate: seconds(program(problem, candidate)))


def _staged_candidates(problem: Problem, plan: GradientsInForward) -> Iterator[GradientsInForward]:
    """All tokens in one chunk, and as many in the first as leave a whole number of small chunks, the largest first."""
    tokens, rows = problem.tokens, plan.chunk_rows
    whole = replace(plan, chunk_rows=tokens, float32_accumulator=False, float32_rows=0)
    for left in range(tokens, 0, -rows):
        like, first = (whole, tokens) if left == tokens else (plan, -(-left // TILE_ROWS) * TILE_ROWS)
        if first <= rows:
            return
        divided = (replace(like, staged=(first, count)) for count in range(2, MOST_BLOCKS + 1))
        yield from islice((candidate for candidate in divided if _has_room(problem, candidate, rows)), 1)


def _has_room(problem: Problem, plan: GradientsInForward, limit: int) -> bool:
    """Whether staging takes no more than `limit` rows of logits beside dW, where also dX's float32 sum has room."""
    itemsize = problem.dtype.itemsize
    blocks = plan.staged_logits(hidden=problem.hidden, vocab=problem.vocab, itemsize=itemsize)
    assert blocks is not None
    if blocks.width < CUDA_SMALLEST_BLOCK or not blocks.borrowed:
        return False
    has_dx = problem.input_grad_columns > 0
    sum_bytes = 4 * blocks.rows * problem.hidden if has_dx and itemsize < 4 else 0
    last = blocks.columns[-1]
    own_bytes = blocks.own_elements(_row_stride(problem, last.stop - last.start)) * itemsize
    # Where rows are ignored, a copy of the first rows of x is made. dX of these rows comes first, so that it needs
    # other memory of dX, or its own.
    is_copied = plan.ignored_rows != "compute" and not (has_dx and 2 * blocks.rows <= problem.tokens)
    own_bytes += is_copied * blocks.rows * problem.hidden * itemsize
    return sum_bytes <= blocks.free_elements * itemsize and own_bytes <= logits_bytes(problem, limit)


# Vocabulary blocks, and matmuls.


def _recomputing_plan(problem: Problem, options: Options, budget: int | None) -> RecomputeLogits:
    """No logits are kept: the forward's chunk and the backward's blocks may each fill the budget.

    Beside a block there is the sum of dX in float32, which the record knows, unless the block is wide enough for its dW
    to hold that; then a wider block may take less.
    """
    rows = options.chunk_rows or _balanced(problem, min(_largest_chunk(problem, budget), _largest_chunk(problem, None)))
    nbytes = rows * logits_bytes(problem, 1)
    plan = RecomputeLogits(chunk_rows=rows, block_columns=_block_columns(problem, nbytes), **_common(problem, options))
    if budget is None or temporary_bytes(problem, plan) <= budget:
        return plan
    column_bytes = logits_bytes(problem, problem.tokens) // _row_stride(problem, problem.vocab)
    beside = temporary_bytes(problem, plan) - column_bytes * plan.block_columns
    rounded_up = column_bytes * PADDED_ROW_MULTIPLE
    narrow = replace(plan, block_columns=_block_columns(problem, budget - beside - rounded_up))
    wide = replace(plan, block_columns=min(_holding_input_sum(problem), problem.vocab))
    is_better = wide.block_columns > narrow.block_columns and temporary_bytes(problem, wide) <= budget
    return wide if is_better else narrow


def _holding_input_sum(problem: Problem) -> int:
    """Columns of a block whose dW holds the sum of dX."""
    columns = columns_that_hold_input_sum(problem.tokens, problem.dtype)
    return -(-columns // PADDED_ROW_MULTIPLE) * PADDED_ROW_MULTIPLE


def _block_columns(problem: Problem, nbytes: int) -> int:
    """Columns of a vocabulary block whose logits, for all tokens, take about so many bytes."""
    whole = max(logits_bytes(problem, problem.tokens), 1)
    columns = max(nbytes * _row_stride(problem, problem.vocab) // whole, 1024)
    blocks = -(-problem.vocab // columns)
    return min(-(-problem.vocab // (blocks * PADDED_ROW_MULTIPLE)) * PADDED_ROW_MULTIPLE, problem.vocab)


def _has_large_matmuls(problem: Problem, plan: Plan) -> bool:
    """Whether cuBLAS's algorithms are worth measuring, for the largest matmuls at least; see `matmul.tuning`."""
    largest = max((step.operations for step in program(problem, plan).steps if step.runs_in == "cuBLAS"), default=0)
    return can_tune(largest, dtype=problem.dtype, device_type=problem.device_type)
