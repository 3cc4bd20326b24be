"""Choosing a strategy and chunk sizes: integers in, integers out, no tensor touched.

Legend: T tokens, H hidden size, V vocabulary, C tokens in a chunk.

The three products of the region cost 6·T·H·V operations whatever the strategy; what differs is which of them run
twice, how often the weight's gradient is read and written, and what is alive at the peak.

==========================  =====================================  ===========================================
strategy                    forward, per chunk of C tokens         backward
==========================  =====================================  ===========================================
gradients_in_forward        logits, statistics, dlogits in place,  multiplies dX, dW, db by the incoming
                            dX, dW, db accumulated                 gradient (nothing where it is 1)
the same, slabs             the logits of the first tokens lie in  the same
                            dW's memory: see `slabs`
save_logits                 logits (kept: T × V), statistics       dlogits in place of the logits, dX, dW, db
recompute_logits            logits, statistics                     per slab of the vocabulary: logits again,
                                                                   dlogits in place, dX accumulated, dW and db
                                                                   written once
save_logits, some rows      both: logits of `saved_rows` tokens    both: a slab's dW is the sum of two products,
                            are kept, the others are not           rounded once
loss_only                   logits, statistics                     none: no gradient is needed
==========================  =====================================  ===========================================
"""

import importlib.util
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, NamedTuple

import torch

from thunder_flce.execution.slabs import MOST_SLABS, LogitsInSlabs
from thunder_flce.options import Options

# A running sum of dW in 16 bits is rounded twice a chunk. Its error stays within 1.25 × that of a single product while
# hardly any column is the target of more than one token; the few that are, in any real text, get their rows of dW
# summed in float32: HOT_ROWS of them, or as many as HOT_BYTES hold. Error over that of a single product for 4 and 16
# chunks of 8192 × 128256 × 4096: 1.15 and 1.18 with uniform targets (but 1.30 for 4 chunks at a vocabulary of 98304),
# 1.09 and 1.10 with Zipf-distributed ones and 192 such rows, which the bytes hold; with 128 of them 1.12 and 1.14.
EXACT_CHUNKS = 16
EXACT_TOKENS_PER_COLUMN = 1 / 15
HOT_ROWS = 256
HOT_BYTES = 3 * 2**20

# On CUDA, chunks of fewer rows leave the products memory-bound: each reads all of W, and reads and writes all of dW.
# Larger chunks gain nothing where H is large; where it is small, what a chunk costs beside its products (about 0.1 ms)
# asks for more rows: enough for this many operations, as long as the logits stay within a gigabyte.
CUDA_CHUNK_ROWS = 2048
CUDA_CHUNK_OPERATIONS = 2.5e12
CUDA_CHUNK_BYTES = 2**30
CUDA_SMALLEST_CHUNK = 512
# A single chunk spares the sum over chunks: 5% at 4096 × 152064 × 3584. It is taken where its logits need no more
# memory than this factor times the gradients, which are there anyway. Two chunks would spare little of either.
CUDA_ONE_CHUNK = 1.2
CUDA_FEWEST_CHUNKS = 3
# Chunks of fewer rows than CUDA_SMALL_CHUNK are spared by a first one whose logits lie in dW's memory, slab by slab.
# Such a chunk costs about what three slabs do, beside its products, and four slabs cost nothing. At 8192 × 128256 ×
# 4096, the products and row kernels of 512 rows at a time take 1.13 times the three products, and 1.10 after 4096 rows
# in 8 slabs, but 1024 rows take 1.04 either way; those of 4096 × 152064 × 3584 take 1.02 in one piece, and 1.02, 1.01,
# 1.03 and 1.04 in 2, 4, 8 and 14 slabs. Slabs narrower than CUDA_SMALLEST_SLAB columns were not tried.
CUDA_SMALL_CHUNK = 1024
CUDA_SMALL_CHUNK_SLABS = 3
CUDA_FREE_SLABS = 4
CUDA_SMALLEST_SLAB = 4096
# On a CPU, larger chunks only take more memory.
CPU_CHUNK_BYTES = 32 * 2**20
CPU_SMALLEST_CHUNK = 64

# Unless the user gives a budget, logits are saved for incoming gradients of one number a row while they take no more
# than this, an eighth of the device's memory and half of what is free.
SAVED_LOGITS_BYTES = 4 * 2**30
# To save the logits of fewer than an eighth of the tokens spares less than 3% of the products.
SMALLEST_SAVED_PART = 1 / 8

# The compute capability, its first number, that `product_tuning` and `triton_products` were tried on.
HOPPER = 9

# Products of so many operations, a quarter of a millisecond on an H200, are worth measuring cuBLAS's algorithms.
TUNED_OPERATIONS = 2e11

# Chunks are whole tiles of the matrix product.
TILE_ROWS = 128
# cuBLAS takes its fast path, and kernels load 16 bytes at a time, only where the stride of rows is a multiple of that.
# Where rows have to be padded, they start on 128-byte lines.
ROW_MULTIPLE = 8
PADDED_ROW_MULTIPLE = 64


@dataclass(frozen=True, kw_only=True)
class VocabLayout:
    """A row of V logits in memory."""

    vocab: int

    row_stride: int
    """Elements from one row of the logits to the next."""

    @property
    def padding(self) -> int:
        """Elements at the end of each row that belong to no column of the vocabulary."""
        return self.row_stride - self.vocab

    @classmethod
    def contiguous(cls, vocab: int) -> "VocabLayout":
        """V elements, no padding."""
        return cls(vocab=vocab, row_stride=vocab)

    @classmethod
    def aligned(cls, vocab: int) -> "VocabLayout":
        """Without padding wherever V allows it."""
        multiple = 1 if vocab % ROW_MULTIPLE == 0 else PADDED_ROW_MULTIPLE
        return cls(vocab=vocab, row_stride=-(-vocab // multiple) * multiple)


def layout_for(vocab: int, *, dtype: torch.dtype, device_type: str) -> VocabLayout:
    """The layout that the row kernels for this dtype and device read fastest."""
    if device_type == "cuda" and dtype is not torch.float64:
        return VocabLayout.aligned(vocab)
    return VocabLayout.contiguous(vocab)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What the plan is made from; everything is known when a trace is compiled."""

    tokens: int
    hidden: int
    vocab: int
    dtype: torch.dtype
    device_type: str
    row_gradients: bool = False
    """Whether incoming gradients are one number a row: `loss.Loss.has_row_gradients`."""
    input_grad: bool
    weight_grad: bool
    bias_grad: bool
    float32_logits: bool = False
    """Whether logits of 16-bit operands stay in float32."""
    every_row: bool = False
    """Whether the loss needs ignored rows, too: `loss.Loss.needs_every_row`."""
    is_plain_loss: bool = False
    """`loss.Loss.is_plain`."""

    @property
    def needs_grad(self) -> bool:
        """Whether anything requires a gradient."""
        return self.input_grad or self.weight_grad or self.bias_grad

    @property
    def logits_itemsize(self) -> int:
        """Bytes of a logit and, where the two do not share their memory, of its gradient."""
        return 4 + self.dtype.itemsize * self.needs_grad if self.float32_logits else self.dtype.itemsize

    def row_stride(self, columns: int) -> int:
        """Elements from one row of logits to the next, over `columns` columns."""
        dtype = torch.float32 if self.float32_logits else self.dtype
        return layout_for(columns, dtype=dtype, device_type=self.device_type).row_stride

    def logits_bytes(self, rows: int) -> int:
        """Bytes of the logits of `rows` tokens, and of their gradients where they do not share memory."""
        return rows * self.row_stride(self.vocab) * self.logits_itemsize

    @property
    def has_tail(self) -> bool:
        """Whether the products come in two parts, because cuBLAS is slow for this V; see `products`."""
        return self.device_type == "cuda" and self.dtype.itemsize == 2 and self.vocab % 8 != 0

    @property
    def accumulator_bytes(self) -> int:
        """What a float32 accumulator for dW takes more than dW, which is only there once the accumulator is full."""
        return (4 - self.dtype.itemsize) * self.vocab * self.hidden

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients that are needed: what every method has to write."""
        elements = self.input_grad * self.tokens * self.hidden + self.weight_grad * self.vocab * self.hidden
        return (elements + self.bias_grad * self.vocab) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One way to run the region, as printed in the trace. Plain values only: a trace carries them as arguments."""

    strategy: str
    """"gradients_in_forward", "save_logits", "recompute_logits" or "loss_only"."""

    chunk_rows: int
    """Tokens in a chunk (C)."""

    first_rows: int = 0
    """Tokens of the first chunk, where its logits lie in the memory of dW; it is larger than the others, or the only
    one."""

    first_slabs: int = 0
    """In how many slabs of the vocabulary they are divided: see `slabs`."""

    saved_rows: int = 0
    """Tokens whose logits are kept for the backward; only "save_logits" has them. The others' are recomputed."""

    slab_columns: int = 0
    """Columns of the vocabulary in a slab of the backward, where logits are recomputed."""

    float32_accumulator: bool = False
    """Whether dW is summed over chunks in float32 and rounded once, at the end."""

    float32_rows: int = 0
    """Rows of dW, those with the most targets, that are summed in float32 although the others are not."""

    float32_logits: bool = False
    """Whether the logits of 16-bit operands stay in float32."""

    ignored_rows: str = "skip"
    """What happens to rows whose target is ignore_index: see `Options.ignored_rows`."""

    tune_products: bool = False
    """Whether large products run by the fastest of cuBLAS's algorithms, measured when the first of them runs."""

    def chosen(self) -> dict[str, Any]:
        """The fields that differ from their defaults: what a trace carries."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) != f.default}

    def takes_one_pass(self, *, is_plain_loss: bool, bias_grad: bool) -> bool:
        """Whether one kernel makes the statistics of a chunk's rows and, in place of its logits, their gradient.

        Args:
            is_plain_loss: `loss.Loss.is_plain`.
            bias_grad: whether db is needed: a sum over the rows, of which the kernel sees one at a time.
        """
        in_place = not self.float32_logits
        return self.strategy == "gradients_in_forward" and in_place and is_plain_loss and not bias_grad

    def logits_in_slabs(self, *, hidden: int, vocab: int, dtype: torch.dtype) -> LogitsInSlabs | None:
        """Where the logits of the first chunk lie, if that is in the memory of dW (V, H)."""
        if not self.first_slabs:
            return None
        numbers = 4 // dtype.itemsize if self.float32_accumulator else 1
        return LogitsInSlabs(rows=self.first_rows, vocab=vocab, count=self.first_slabs, row_room=hidden * numbers)

    def describe(self) -> str:
        """The plan in words."""
        words = [self.strategy.replace("_", " "), f"chunks of {self.chunk_rows} tokens"]
        if self.first_slabs:
            is_only = self.first_rows == self.chunk_rows
            chunk = f"{'one chunk of' if is_only else 'first'} {self.first_rows} tokens"
            words[1:] = [f"{chunk} in {self.first_slabs} slabs in dW's memory", *([] if is_only else words[1:])]
        if self.saved_rows:
            words = [f"save logits of {self.saved_rows} tokens", *(words[1:] if self.slab_columns else [])]
        if self.slab_columns:
            words.append(f"slabs of {self.slab_columns} columns")
        if self.float32_accumulator:
            words.append("dW summed in float32")
        if self.float32_rows:
            words.append(f"{self.float32_rows} rows of dW summed in float32")
        if self.float32_logits:
            words.append("float32 logits")
        if self.ignored_rows != "skip":
            words.append(f"ignored rows {'computed' if self.ignored_rows == 'compute' else 'skipped on the device'}")
        if self.tune_products:
            words.append("products tuned")
        return ", ".join(words)


class DeviceMemory(NamedTuple):
    """A device's memory in bytes, when the plan is made."""

    total: int
    free: int
    """What this process could still allocate"""


def make_plan(problem: Problem, options: Options, *, memory: DeviceMemory | None = None) -> Plan:
    """The plan for `problem`: the fastest one that fits the memory budget.

    Args:
        problem: shapes, dtypes, what kind of gradient arrives and which are needed.
        options: the user's choices; each of them overrides what the plan would choose.
        memory: the device's; None where it is unknown. Needed where the budget is a fraction of it.

    Raises:
        ValueError: where a chosen strategy cannot give the gradients asked for.
    """
    plan = _untuned_plan(problem, options, memory)
    are_cublas = not products_end_early(problem, plan)
    return replace(plan, tune_products=options.tune_products and are_cublas and _has_large_products(problem, plan))


@cache
def triton_available() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def products_end_early(problem: Problem, plan: Plan) -> bool:
    """Whether the products end after the valid rows, on the device: see `triton_products`.

    A GPU that is not there is taken to be one for which they do.
    """
    is_hopper = not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] == HOPPER
    is_possible = problem.device_type == "cuda" and problem.dtype.itemsize == 2 and problem.hidden % 8 == 0
    return plan.ignored_rows == "skip_on_device" and is_possible and is_hopper and triton_available()


def _untuned_plan(problem: Problem, options: Options, memory: DeviceMemory | None) -> Plan:
    budget = _Budget.of(options, memory)
    strategy, saved_rows = _choose_strategy(problem, options, budget)
    if not problem.needs_grad:
        strategy, saved_rows = "loss_only", 0
    if strategy == "gradients_in_forward" and problem.row_gradients:
        raise ValueError(
            'strategy "gradients_in_forward" needs reduction "mean" or "sum" and no differentiable outputs: otherwise '
            "the incoming gradient is a vector that has to be applied before anything is summed over tokens"
        )
    ignored_rows = options.ignored_rows
    if ignored_rows == "skip_on_device" and problem.every_row:
        ignored_rows = "compute"
    common = {"ignored_rows": ignored_rows, "float32_logits": problem.float32_logits}
    if strategy == "gradients_in_forward":
        rows, float32_accumulator = _accumulation(problem, options, budget.chunk)
        in_16_bits = problem.weight_grad and problem.dtype.itemsize < 4 and not float32_accumulator
        plan = Plan(
            strategy=strategy,
            chunk_rows=rows,
            float32_accumulator=float32_accumulator,
            float32_rows=_hot_rows(problem) if in_16_bits and rows < problem.tokens else 0,
            **common,
        )
        return _with_slabs(problem, plan)
    if strategy == "save_logits" and saved_rows == problem.tokens:
        rows = max(problem.tokens, 1)
        return Plan(strategy=strategy, chunk_rows=rows, saved_rows=rows, **common)
    rows = options.chunk_rows or _recomputed_chunk(problem, budget)
    slab_columns = 0 if strategy == "loss_only" else _slab_columns(problem, problem.logits_bytes(rows))
    return Plan(strategy=strategy, chunk_rows=rows, saved_rows=saved_rows, slab_columns=slab_columns, **common)


def _with_slabs(problem: Problem, plan: Plan) -> Plan:
    """The plan, or one like it whose first chunk is in the memory of dW, where that spares small chunks.

    It takes the memory of one of these, and holds all tokens, or as many as spare the most chunks.
    """
    tokens, rows = problem.tokens, plan.chunk_rows
    can_borrow = problem.device_type == "cuda" and problem.weight_grad and problem.hidden % ROW_MULTIPLE == 0
    one_pass = plan.takes_one_pass(is_plain_loss=problem.is_plain_loss, bias_grad=problem.bias_grad)
    if not (can_borrow and one_pass and rows < min(tokens, CUDA_SMALL_CHUNK)):
        return plan
    whole = replace(plan, chunk_rows=tokens, float32_accumulator=False, float32_rows=0)
    largest = min(tokens - rows, 2 * problem.hidden + rows) // TILE_ROWS * TILE_ROWS
    candidates = [_divided(problem, whole, tokens, rows)]
    candidates += [_divided(problem, plan, first, rows) for first in range(largest, rows, -TILE_ROWS)]

    def cost(candidate: Plan) -> int:
        chunks = -(-(tokens - candidate.first_rows) // candidate.chunk_rows) + (candidate.first_slabs > 0)
        return CUDA_SMALL_CHUNK_SLABS * chunks + max(candidate.first_slabs - CUDA_FREE_SLABS, 0)

    return min([*filter(None, candidates), plan], key=cost)


def _divided(problem: Problem, plan: Plan, first: int, limit: int) -> Plan | None:
    """The plan with `first` tokens in as few slabs as take no more than `limit` rows of logits, if any number does."""
    divided = (replace(plan, first_rows=first, first_slabs=count) for count in range(2, MOST_SLABS + 1))
    return next((candidate for candidate in divided if _has_room(problem, candidate, limit)), None)


def _has_room(problem: Problem, plan: Plan, limit: int) -> bool:
    """Whether the slabs take no more than `limit` rows of logits beside dW, where also dX's float32 sum has room."""
    dtype, hidden = problem.dtype, problem.hidden
    slabs = _slabs_of(problem, plan)
    if slabs.width < CUDA_SMALLEST_SLAB or not slabs.borrowed:
        return False
    sum_bytes = 4 * slabs.rows * hidden if problem.input_grad and dtype.itemsize < 4 else 0
    has_room_for_sum = sum_bytes <= slabs.free_elements * dtype.itemsize
    own_bytes = _own_bytes(problem, slabs) + _copied_bytes(problem, plan)
    return has_room_for_sum and own_bytes <= problem.logits_bytes(limit)


def _copied_bytes(problem: Problem, plan: Plan) -> int:
    """What a copy of the first rows of x takes, which is made where rows are ignored.

    It has to last longer than for a chunk without slabs: dX of these rows comes first, so it needs other memory of dX.
    """
    has_room = problem.input_grad and 2 * plan.first_rows <= problem.tokens
    is_copied = plan.ignored_rows != "compute" and not has_room
    return is_copied * plan.first_rows * problem.hidden * problem.dtype.itemsize


def _slabs_of(problem: Problem, plan: Plan) -> LogitsInSlabs | None:
    return plan.logits_in_slabs(hidden=problem.hidden, vocab=problem.vocab, dtype=problem.dtype)


def _own_bytes(problem: Problem, slabs: LogitsInSlabs) -> int:
    last = slabs.columns[-1]
    return slabs.own_elements(problem.row_stride(last.stop - last.start)) * problem.logits_itemsize


def _has_large_products(problem: Problem, plan: Plan) -> bool:
    """Whether cuBLAS's algorithms are worth measuring, for the largest products at least; see `product_tuning`."""
    logits = max(
        max(min(plan.chunk_rows, problem.tokens - plan.first_rows), plan.saved_rows) * problem.vocab,
        (problem.tokens - plan.saved_rows) * plan.slab_columns,
    )
    if plan.first_slabs:
        slabs = _slabs_of(problem, plan)
        logits = max(logits, slabs.slab_elements)
    is_16_bit = problem.device_type == "cuda" and problem.dtype.itemsize == 2
    return is_16_bit and 2 * logits * problem.hidden >= TUNED_OPERATIONS


def temporary_bytes(problem: Problem, plan: Plan) -> int:
    """The region's predicted peak of memory above its inputs and the gradients that it returns.

    Leaves out vectors of one number a token and, where rows are ignored, copies of rows of x: of a chunk, or of all
    rows in a backward that recomputes logits. (Where dX is made a chunk at a time, its memory takes them, but for more
    than half of the tokens in slabs.) Where rows are skipped on the device, these are always there.
    """
    packed_rows = problem.hidden * problem.dtype.itemsize if plan.ignored_rows == "skip_on_device" else 0
    if plan.slab_columns:
        saved = problem.logits_bytes(plan.saved_rows)
        tokens = problem.tokens - plan.saved_rows
        chunk = problem.logits_bytes(min(plan.chunk_rows, tokens))
        slab = tokens * problem.row_stride(plan.slab_columns) * problem.logits_itemsize
        # dX is summed in float32 and rounded at the end, when the slab is gone; so is dW of a slab from two products.
        is_rounded = problem.input_grad and problem.dtype.itemsize < 4
        input_sum = is_rounded * tokens * problem.hidden * 4
        rounded = is_rounded * problem.tokens * problem.hidden * problem.dtype.itemsize
        if plan.saved_rows:
            slab += 4 * problem.weight_grad * plan.slab_columns * problem.hidden
            rounded = 0
        packed = packed_rows * problem.tokens
        chunk += packed_rows * min(plan.chunk_rows, tokens)
        in_backward = packed + max(saved + slab + input_sum - rounded, input_sum)
        return max(saved + chunk - problem.gradient_bytes, in_backward)
    rows = min(plan.chunk_rows, problem.tokens - plan.first_rows)
    chunk = problem.logits_bytes(rows)
    if not problem.input_grad:
        chunk += packed_rows * rows
    if problem.input_grad and problem.has_tail:
        # dX of a chunk is summed in float32 from the main part and the tail.
        chunk += 4 * rows * problem.hidden
    if plan.first_slabs:
        slabs = _slabs_of(problem, plan)
        is_packed = plan.ignored_rows == "skip_on_device"
        chunk = max(chunk, _own_bytes(problem, slabs) + is_packed * _copied_bytes(problem, plan))
    if plan.float32_accumulator:
        return max(chunk + problem.accumulator_bytes, 4 * problem.vocab * problem.hidden)
    return chunk


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


def _choose_strategy(problem: Problem, options: Options, budget: _Budget) -> tuple[str, int]:
    """The strategy, and of how many tokens the logits are saved."""
    whole = {"save_logits": problem.tokens}
    if options.strategy is not None:
        return options.strategy, whole.get(options.strategy, 0)
    # float16 gradients need the incoming gradient (the loss scale) before they are rounded, or they underflow.
    if not problem.row_gradients and problem.dtype is not torch.float16:
        return "gradients_in_forward", 0
    if budget.saved is None:
        return "recompute_logits", 0
    if problem.logits_bytes(problem.tokens) <= budget.saved:
        return "save_logits", problem.tokens
    others = problem.logits_bytes(options.chunk_rows or _recomputed_chunk(problem, budget))
    rows = (budget.saved - others) // problem.logits_bytes(1)
    rows -= rows % TILE_ROWS
    return ("save_logits", rows) if rows >= SMALLEST_SAVED_PART * problem.tokens else ("recompute_logits", 0)


def _recomputed_chunk(problem: Problem, budget: _Budget) -> int:
    """Rows of a chunk whose logits are not kept; of a budget for saved logits, no more than a quarter."""
    largest = _largest_chunk(problem, budget.chunk)
    if budget.saved is not None:
        largest = min(largest, max(budget.saved // (4 * problem.logits_bytes(1)), _smallest_chunk(problem)))
    return _balanced(problem, largest)


def _smallest_chunk(problem: Problem) -> int:
    return CPU_SMALLEST_CHUNK if problem.device_type == "cpu" else CUDA_SMALLEST_CHUNK


def _largest_chunk(problem: Problem, budget: int | None, fixed_bytes: int = 0) -> int:
    """Rows of the largest chunk that fits the budget, never under the smallest that is worth running."""
    row_bytes = problem.logits_bytes(1)
    smallest = _smallest_chunk(problem)
    if budget is not None:
        return max((budget - fixed_bytes) // row_bytes, smallest)
    if problem.device_type == "cpu":
        return max(CPU_CHUNK_BYTES // row_bytes, smallest)
    whole = problem.logits_bytes(problem.tokens)
    if not problem.row_gradients and whole <= CUDA_ONE_CHUNK * problem.gradient_bytes:
        return max(problem.tokens, 1)
    enough = int(CUDA_CHUNK_OPERATIONS / (6 * max(problem.hidden, 1) * problem.vocab))
    third = -(-problem.tokens // (CUDA_FEWEST_CHUNKS * TILE_ROWS)) * TILE_ROWS
    return max(CUDA_CHUNK_ROWS, min(enough, CUDA_CHUNK_BYTES // row_bytes, third))


def _balanced(problem: Problem, largest: int) -> int:
    """Rows of a chunk so that all chunks are about equal, in whole tiles of the matrix product, and none is larger."""
    if problem.tokens <= largest:
        return max(problem.tokens, 1)
    tile = TILE_ROWS if problem.device_type == "cuda" else 1
    chunks = -(-problem.tokens // largest)
    rows = -(-problem.tokens // (chunks * tile)) * tile
    return min(rows, largest)


def _accumulation(problem: Problem, options: Options, budget: int | None) -> tuple[int, bool]:
    """Rows of a chunk, and whether dW needs a float32 accumulator: the smaller of the two ways to be exact."""
    low_precision = problem.dtype.itemsize < 4 and problem.weight_grad
    if options.accumulate == "float32" and low_precision:
        return options.chunk_rows or _balanced(problem, _largest_beside_accumulator(problem, budget)), True
    rows = options.chunk_rows or _balanced(problem, _largest_chunk(problem, budget))
    if options.accumulate == "parameter" or not low_precision or rows >= problem.tokens:
        return rows, False
    few_targets = problem.tokens <= problem.vocab * EXACT_TOKENS_PER_COLUMN
    if few_targets and rows * EXACT_CHUNKS >= problem.tokens:
        return rows, False
    if options.chunk_rows:
        return rows, True
    # Either larger chunks, few enough, or small ones beside a float32 accumulator: whichever takes less memory.
    larger = _balanced(problem, -(-problem.tokens // (EXACT_CHUNKS if few_targets else 1)))
    smaller = _balanced(problem, _largest_beside_accumulator(problem, budget))

    def plan_bytes(rows: int, float32_accumulator: bool) -> int:
        plan = Plan(strategy="gradients_in_forward", chunk_rows=rows, float32_accumulator=float32_accumulator)
        return temporary_bytes(problem, plan)

    if plan_bytes(larger, False) <= plan_bytes(smaller, True):
        return larger, False
    return smaller, True


def _hot_rows(problem: Problem) -> int:
    return min(HOT_ROWS, HOT_BYTES // (4 * max(problem.hidden, 1)))


def _largest_beside_accumulator(problem: Problem, budget: int | None) -> int:
    """Rows of the largest chunk where dW has a float32 accumulator, which each chunk reads and writes.

    Without a budget, a chunk may be as large as the rounded dW, which takes its memory afterwards: at 16384 × 128256 ×
    4096 that halves what the accumulator costs, 10% of the time, and takes no more memory.
    """
    largest = _largest_chunk(problem, budget, problem.accumulator_bytes)
    if budget is not None or problem.device_type == "cpu":
        return largest
    rounded = problem.vocab * problem.hidden * problem.dtype.itemsize
    return max(largest, rounded // problem.logits_bytes(1))


def _slab_columns(problem: Problem, slab_bytes: int) -> int:
    """Columns of a vocabulary slab whose logits, for all tokens, take about `slab_bytes`."""
    columns = slab_bytes // (max(problem.tokens, 1) * problem.logits_itemsize)
    columns = max(columns, 1024)
    slabs = -(-problem.vocab // columns)
    return min(-(-problem.vocab // (slabs * PADDED_ROW_MULTIPLE)) * PADDED_ROW_MULTIPLE, problem.vocab)
