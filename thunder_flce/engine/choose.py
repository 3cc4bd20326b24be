"""Which plan runs a call: a few candidates by rules of thumb, and between them predicted memory and time.

Both are closed formulas of the sizes, so a plan takes microseconds, and is made anew for each number of tokens. Legend:
T tokens, C tokens in a chunk, S tokens whose logits are saved, H hidden size, V vocabulary.
"""

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import inf, log2
from typing import Any

import torch

from thunder_flce.device import ABSENT_DEVICE, ROW_MULTIPLE, TILE_ROWS, Device
from thunder_flce.engine.kernels.dispatch import check_available, library
from thunder_flce.engine.kernels.layout import row_stride
from thunder_flce.engine.matmul import cublaslt
from thunder_flce.engine.matmul.algorithms import TUNED_OPERATIONS
from thunder_flce.engine.matmul.matmul import scratch_bytes
from thunder_flce.engine.plan import GRADIENTS_IN_FORWARD, LOSS_ONLY, RECOMPUTE_LOGITS, SAVE_LOGITS, Plan, is_small
from thunder_flce.operation.call import COLUMN, Call, argument
from thunder_flce.options import STRATEGIES, Options

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
# is the error of columns that are about equally frequent (lab/performance.md, "Losses over log-probabilities").
FREQUENT_OF_SEVERAL = 4

# Chunks of fewer rows leave the matmuls of an H200 memory-bound: each reads all of W, and reads and writes all of dW.
# On other devices, as many more or fewer, in powers of two, as they compute more or less while they move a byte.
CHUNK_ROWS = 2048
BALANCED_OPERATIONS_PER_BYTE = ABSENT_DEVICE.matmul_rate / ABSENT_DEVICE.bandwidth
# Unless the user gives a budget, chunks are no larger than this part of the device's memory, as far as dW allows.
PART_OF_MEMORY = 1 / 20
# Larger chunks gain nothing where H is large; where it is small, what a chunk costs beside its matmuls (about 0.1 ms)
# asks for more rows: enough for this time, as long as the logits stay within a gigabyte, in at least three chunks.
CHUNK_SECONDS = 2.5e12 / ABSENT_DEVICE.matmul_rate
CHUNK_BYTES = 2**30
FEWEST_CHUNKS = 3
SMALLEST_CHUNK = 512
# Where the weight is frozen, there is no dW to read and write. Half as many rows are enough if dX of these, in tiles of
# 128 × 256, keeps the last wave of the multiprocessors busy: on an H200, 0% to 1.5% more time at hidden sizes of 3584,
# 4096 and 8192, in 0.56 of the memory, but 3% to 6% at 2048, 2304 and 5120. Low-rank adapters, whose dW is no larger
# than this part of the head's, change nothing in that.
ADAPTER_PART = 1 / 16
TILE = (128, 256)
FULL_WAVE = 0.8
# A single chunk spares the sum over chunks. It is considered where its logits need no more memory than this factor
# times the gradients, which are there anyway, and taken where smaller ones are predicted to take this much longer.
ONE_CHUNK = 1.2
WORTH_MEMORY = 1.03
# On a CPU, the logits of a chunk have so many bytes for each thread, and for all of them together. But each chunk reads
# all of W and adds to all of dW: with fewer rows than this part of H, their traffic takes longer than the logits'. On
# two cores, 1024 × 128256 × 2048 in float32 takes 13.4, 11.8, 10.5 and 10.3 s with chunks of 64, 128, 256 and 512, and
# twice as many tokens 24.8, 21.2 and 22.7 s with chunks of 256, 512 and 1024.
CPU_THREAD_BYTES = 16 * 2**20
CPU_CHUNK_BYTES = (2 * CPU_THREAD_BYTES, 32 * CPU_THREAD_BYTES)
CPU_PART_OF_HIDDEN = 1 / 4
CPU_SMALLEST_CHUNK = 64

# Unless the user gives a budget, logits are saved for upstream gradients of one number a row while a call takes no more
# than this, and than `PART_OF_MEMORY`, whatever of it is free: plans must not depend on when they are made. To save the
# logits of fewer than an eighth of the tokens spares less than 3% of the matmuls.
SAVED_LOGITS_BYTES = 4 * 2**30
SMALLEST_SAVED_PART = 1 / 8

# What a chunk costs beside its matmuls and row work, and dividing the tokens at all. The second is fitted to 4096 ×
# 152064 × 3584 in two chunks on an H200, 5% slower than in one; traffic alone would make it 1%.
CHUNK_OVERHEAD_SECONDS = 25e-6
DIVISION_SECONDS = 0.8e-3
# How much of the traffic of a sum over chunks shows where cuBLAS's algorithms are measured.
TUNED_SUM_PART = 1 / 3
# float32 and float64 matmuls take so many times as long as 16-bit ones, roughly.
SLOWER_MATMULS = {4: 8.0, 8: 16.0}
# To leave ignored rows out, the host waits for their number: worth it where the matmuls take this long. The wait takes
# 0.2 to 0.6 ms, but then the host is no longer ahead. In whole steps of small models it may never be again: four layers
# of Qwen 2.5 0.5B with 2048 tokens, 2.1 ms of matmuls, took 11.1 ms with it (H100) where torch.compile took 8.6.
WAIT_SECONDS = 8e-3

_warned: set[tuple[object, ...]] = set()


def choose(call: Call, options: Options, device: Device) -> Plan:
    """The plan for a call of specs: the fastest one within the memory budget, or else the smallest worth its time.

    Ranks that divide the vocabulary get the same plan from the same `device`.

    Raises:
        ValueError: where a chosen strategy cannot give the gradients asked for, chosen row kernels cannot run, the
            budget is a fraction of an unknown memory, or `batch_invariant` cannot be had.
    """
    return _Choice(call.largest_part, options, device).plan()


def strategy_of(call: Call, options: Options) -> str:
    """The strategy for any number of tokens: logits are saved only where that was asked for. No size matters.

    Raises:
        ValueError: as `choose`.
    """
    logits_dtype = torch.float32 if options.has_float32_logits(call.dtype) else call.dtype
    check_available(options.row_kernels, dtype=logits_dtype, device_type=call.device.type)
    if not call.needs_grad:
        return LOSS_ONLY
    strategy, loss = options.strategy, call.loss
    needs_later_sums = _needs_later_sums(call)
    if strategy == GRADIENTS_IN_FORWARD and needs_later_sums:
        raise ValueError(
            'strategy "gradients_in_forward" needs reduction "mean" or "sum" and no differentiable outputs: otherwise '
            "the upstream gradient is a vector that has to be applied before anything is summed over tokens. Or it "
            "needs a frozen weight and bias, no further terms, no label smoothing, no z_loss and no gradient of "
            '"entropy", "log_sum_exp" or "mean_logit"'
        )
    # float16 gradients need the upstream gradient (the loss scale) before they are rounded, or they underflow.
    is_scaled = options.expected_gradient is not None or "expected_gradient" in call.tensors
    has_loss_scale = call.dtype is not torch.float16 or is_scaled
    only_in_forward = loss.needs_gradients_in_forward
    if only_in_forward and (strategy not in (None, GRADIENTS_IN_FORWARD) or not has_loss_scale):
        raise ValueError(
            f"{only_in_forward} needs its gradients computed in the forward: no other strategy and, for float16, "
            "expected_gradient, such as a GradScaler's scale"
        )
    waits = needs_later_sums or not (has_loss_scale or loss.has_row_gradients)
    return strategy or (RECOMPUTE_LOGITS if waits else GRADIENTS_IN_FORWARD)


def saves_all_logits(call: Call, options: Options, device: Device) -> bool:
    """Whether a call of specs, in a program, saves the logits of all rows without being asked for that strategy."""
    choice = _Choice(call.largest_part, options, device)
    saving = choice.saving()
    if saving is None or saving.saved_rows is not None:
        return False
    return choice.sizes.temporary_bytes(in_program(saving)) <= choice.most_saved


def in_program(plan: Plan) -> Plan:
    """The plan in a program that is compiled or exported, which may not change what it has saved."""
    return replace(plan, keeps_logits=True) if plan.strategy == SAVE_LOGITS else plan


def alternatives(call: Call, plan: Plan, device: Device) -> list[Plan]:
    """Other ways to run a call: half and twice the chunk, and the other strategies, each with its own chunks.

    They keep what the plan does with ignored rows and who runs its row work, and heed no memory budget.
    """
    kept = Options(
        ignored_rows=plan.ignored_rows, row_kernels=plan.row_kernels, batch_invariant=plan.batch_invariant,
        logits_dtype="float32" if plan.float32_logits else "input",
    )  # fmt: skip
    others = []
    if plan.strategy != SAVE_LOGITS:
        same = kept if plan.strategy == LOSS_ONLY else replace(kept, strategy=plan.strategy)
        sizes = {plan.chunk_rows // 2, min(2 * plan.chunk_rows, call.tokens)} - {0}
        others = [replace(same, chunk_rows=rows) for rows in sorted(sizes)]
    # Without gradients there is one strategy, and so there is with a token loss.
    if call.needs_grad and not call.loss.needs_gradients_in_forward:
        impossible = {GRADIENTS_IN_FORWARD} if _needs_later_sums(call) else set()
        impossible |= {SAVE_LOGITS} if call.divergence is not None else set()
        others += [replace(kept, strategy=strategy) for strategy in STRATEGIES if strategy not in impossible]
    plans = [choose(call, options, device) for options in others]
    if plan.keeps_logits:
        plans = [*map(in_program, plans)]
    return [other for at, other in enumerate(plans) if other not in (plan, *plans[:at])]


def seconds(call: Call, plan: Plan, device: Device) -> float:
    """The time of forward and backward, only to decide between plans: nothing overlaps, all tokens are computed."""
    return _Sizes(call, device, float32_logits=plan.float32_logits).seconds(plan)


def matmul_seconds(call: Call, device: Device) -> float:
    """The time of the matmuls of a call of specs, logits, dX and dW, as predicted."""
    return _Sizes(call, device, float32_logits=False).matmul_seconds(Plan(strategy=GRADIENTS_IN_FORWARD))


def temporary_bytes(call: Call, plan: Plan, device: Device | None = None) -> int:
    """The most memory that forward and backward of a call of specs take at a time, beside inputs and gradients.

    It leaves out vectors of one number a token. `device` is where it runs, unless that is the call's device.
    """
    device = device or Device.of(call.device)
    return _Sizes(call, device, float32_logits=plan.float32_logits).temporary_bytes(plan)


# Time and memory.


class _Sizes:
    """What time and memory depend on beside the plan, of one call of specs."""

    def __init__(self, call: Call, device: Device, *, float32_logits: bool):
        self.call, self.device, dtype, device_type = call, device, call.dtype, call.device.type
        self.tokens, self.vocab, self.itemsize, self.dtype = call.tokens, call.vocab, dtype.itemsize, dtype
        self.logits_dtype = torch.float32 if float32_logits else dtype
        self.stride = row_stride(self.vocab, dtype=self.logits_dtype, device_type=device_type)
        self.logits_bytes = self.stride * self.logits_dtype.itemsize
        """Of a row of logits, and of a teacher's"""
        self.teacher_hidden = 0
        if (teacher := call.get("teacher_input")) is not None:
            self.teacher_hidden = teacher.shape[-1]
            wide = torch.promote_types(teacher.dtype, torch.float32) if float32_logits else teacher.dtype
            self.logits_bytes += row_stride(self.vocab, dtype=wide, device_type=device_type) * wide.itemsize
        self.dlogits_bytes = self.stride * self.itemsize if float32_logits and call.needs_grad else 0
        """Of a row of dlogits, where they do not take the memory of the logits"""
        self.row_bytes = max(self.logits_bytes + self.dlogits_bytes, 1)
        hidden = {linear: call.tensors[linear.x].shape[-1] for linear in call.linears}
        self.hidden, self.widest = sum(hidden.values()), max(hidden.values())
        self.head = call.tensors["input"].shape[-1]
        self.inputs = [size for linear, size in hidden.items() if linear.x in call.needs_grad]
        self.weights = [size for linear, size in hidden.items() if linear.weight in call.needs_grad]
        """The hidden sizes of each dX and dW"""
        self.frequent_columns = 0
        """Columns of all dW that chunks are summed to in 16 bits, where nothing wider was planned"""
        if self.itemsize == 2:
            self.frequent_columns = sum(size for size in self.weights if not is_small(call, size))
        self.dw_elements = call.weight_rows * sum(self.weights)
        # Where rows are not padded, no matmul that need not convert its operands takes memory of its own.
        self.has_scratch = not device.multiplies_into_float32(dtype) or self.vocab % ROW_MULTIPLE != 0

    def matmul_seconds(self, plan: Plan) -> float:
        """The logits, as often as they are computed, dX and dW."""
        logits, again = self.hidden + self.teacher_hidden, plan.strategy in (SAVE_LOGITS, RECOMPUTE_LOGITS)
        operations = 2.0 * self.vocab * self.tokens * (logits + sum(self.inputs) + sum(self.weights))
        operations += again * 2.0 * self.vocab * (self.tokens - plan.rows_saved(self.tokens)) * logits
        return operations * SLOWER_MATMULS.get(self.itemsize, 1.0) / self.device.matmul_rate

    def seconds(self, plan: Plan) -> float:
        """See the function."""
        saved = plan.rows_saved(self.tokens)
        chunks = (saved > 0) + -(-(self.tokens - saved) // max(plan.chunk_rows, 1))
        moved = self.logits_bytes * self.tokens * (1.0 if plan.strategy == LOSS_ONLY else 3.0)
        overhead = chunks * CHUNK_OVERHEAD_SECONDS
        if chunks > 1 and self.dw_elements:
            sums = 2.0 * (chunks - 1) * (4 if plan.float32_accumulator else self.itemsize)
            sums *= TUNED_SUM_PART if plan.tune_products else 1.0
            moved += self.dw_elements * (sums + plan.float32_accumulator * (4 + self.itemsize))
            overhead += DIVISION_SECONDS
        return self.matmul_seconds(plan) + moved / self.device.bandwidth + overhead

    def temporary_bytes(self, plan: Plan) -> int:
        """See the function. A forward that is not the whole takes less than its backward, which has the gradients."""
        saved = plan.rows_saved(self.tokens)
        rows = min(plan.chunk_rows, self.tokens - saved)
        fixed, per_row, least = self.linear_bytes(plan)
        most = fixed + rows * per_row + self.scratch_bytes(plan, rows)
        if saved:
            of_saved = saved * (per_row - self.logits_bytes) + self.scratch_bytes(plan, saved)
            most = saved * self.logits_bytes + max(most, fixed + of_saved)
            least += saved * self.logits_bytes
        return max(most, least)

    def linear_bytes(self, plan: Plan) -> tuple[int, int, int]:
        """Bytes beside a chunk, of each row of it, and at the end, when there are no chunks any more."""
        call, shard, itemsize = self.call, self.call.shard, self.itemsize
        is_divided = plan.chunk_rows < self.tokens
        sums = least = frequent_columns = 0
        for hidden in reversed(self.weights):
            if plan.sum_dtype(call, hidden, rows=self.tokens) != self.dtype:
                # The float32 sum and the rounded dW, beside the sums that are rounded later.
                elements = call.weight_rows * hidden
                least = max(least, 4 * elements + sums)
                sums += (4 - itemsize) * elements
            else:
                frequent_columns += hidden
        frequent_rows = min(plan.float32_rows, self.vocab) if is_divided and frequent_columns else 0
        fixed = sums + 4 * frequent_rows * frequent_columns + 4 * call.bias_grad * call.weight_rows
        if has_units := plan.saves_unit_gradients(call) and itemsize < 4:
            # dX for units is float32, and the backward multiplies it by the factors of its rows into new memory.
            fixed += (4 - itemsize) * call.own_tokens * self.hidden
            least = max(least, 4 * call.own_tokens * self.hidden)

        per_row = self.row_bytes + frequent_rows * itemsize
        if plan.keeps_logits and not self.dlogits_bytes:
            per_row += self.stride * itemsize
        if shard is not None and shard.reduces_input_grad and self.inputs:
            # What this rank's columns contribute to dX and, where ranks divide the tokens, this rank's rows of the sum.
            part = max(self.inputs) * (call.row_dtype.itemsize if shard.float32_input_grad else itemsize)
            per_row += part + (part // shard.ranks if shard.sequence_parallel else 0)
        if shard is not None and shard.sequence_parallel:
            # x of this chunk, and of the next one while that is gathered.
            per_row += self.hidden * itemsize * (2 if is_divided else 1)
        elif plan.ignored_rows == "skip" and call.ignores_rows:
            # Copies of rows of x, unless they have room where dX will be.
            per_row += itemsize * (self.hidden if has_units else self.hidden - sum(self.inputs))
        return fixed, per_row, least

    def scratch_bytes(self, plan: Plan, rows: int) -> int:
        """The most that a matmul of so many rows allocates."""
        if not self.has_scratch:
            return 0
        call, shard, dtype = self.call, self.call.shard, self.dtype
        of = partial(scratch_bytes, rows=rows, columns=self.vocab, dtype=dtype, device=self.device)
        found = [
            of(
                "logits", hidden=self.widest, out_dtype=self.logits_dtype, has_bias="linear_bias" in call.tensors,
                pads_rows=self.stride != self.vocab, tune=plan.tune_products,
            )
        ]  # fmt: skip
        if self.inputs:
            is_wide = plan.saves_unit_gradients(call)
            if shard is not None and shard.reduces_input_grad:
                is_wide = shard.float32_input_grad
            found.append(of("dX", hidden=max(self.inputs), out_dtype=call.row_dtype if is_wide else dtype))
        for hidden in self.weights:
            found.append(of("dW", hidden=hidden, out_dtype=plan.sum_dtype(call, hidden, rows=self.tokens)))
        return max(found)


# The choice.


class _Choice:
    """One call, what was asked for, and the device: each method decides one thing."""

    def __init__(self, call: Call, options: Options, device: Device):
        self.call, self.options, self.device, self.tokens = call, options, device, call.tokens
        self.strategy = strategy_of(call, options)
        self.sizes = sizes = _Sizes(call, device, float32_logits=options.has_float32_logits(call.dtype))
        self.is_on_cpu = device.kind == "cpu"
        self.smallest = CPU_SMALLEST_CHUNK if self.is_on_cpu else SMALLEST_CHUNK
        self.ranks = 1 if call.shard is None else call.shard.ranks
        # At least one row of each part of the tokens.
        parts = 1 if call.shard is None else call.shard.token_parts
        self.chosen_rows = None if options.chunk_rows is None else max(options.chunk_rows, parts)
        budget = options.memory_budget
        if isinstance(budget, float):
            if device.memory is None:
                raise ValueError("memory_budget is a fraction of the device's memory, but that is not known here")
            budget = int(budget * device.memory)
        self.limit = budget
        # The rows from which the largest matmul is worth measuring.
        is_tuned = device.is_hopper if options.tune_products is None else options.tune_products and device.is_nvidia
        per_row = 2 * (sizes.vocab - sizes.vocab % ROW_MULTIPLE) * sizes.widest
        self.tuned_rows = -(-TUNED_OPERATIONS // per_row) if is_tuned and sizes.itemsize == 2 and per_row else inf
        self.most_by_default = inf if device.memory is None else int(PART_OF_MEMORY * device.memory)
        ignored_rows = options.ignored_rows
        if ignored_rows == "auto":
            # Whether leaving ignored rows out can save more than the wait for their number costs.
            pays = self.is_on_cpu or sizes.matmul_seconds(Plan(strategy=GRADIENTS_IN_FORWARD)) >= WAIT_SECONDS
            ignored_rows = "skip" if pays or not call.ignores_rows else "compute"
        self.common = {
            "strategy": self.strategy, "float32_logits": sizes.logits_dtype is not call.dtype,
            "ignored_rows": ignored_rows, "row_kernels": options.row_kernels,
            "batch_invariant": options.batch_invariant,
            "is_estimated": not (self.is_on_cpu or device.is_measured),
        }  # fmt: skip

    def plan(self) -> Plan:
        """The plan, with a warning where it takes more than the budget."""
        if self.options.batch_invariant:
            _check_batch_invariant(self.call, self.options, self.device)
        if self.strategy == LOSS_ONLY:
            plan = self._of_largest(self._default_rows(), self._in_16_bits)
        elif self.strategy == SAVE_LOGITS:
            plan = self._with(max(self.tokens, 1))
        else:
            plan = self.saving() or self._summed()
        if self.limit is not None and (needed := self.sizes.temporary_bytes(plan)) > 1.01 * self.limit:
            cure = '; accumulate="parameter" takes less, with a larger error of dW' if plan.float32_accumulator else ""
            self._warn(
                f"memory_budget is {self.limit / 1e6:.0f} MB, but {self.tokens} tokens take {needed / 1e6:.0f} MB: "
                f"{plan.describe()}{cure}"
            )
        return plan

    def _with(self, rows: int, **fields: Any) -> Plan:
        """The plan with chunks of so many rows, and other fields."""
        tune = min(rows, self.tokens) >= self.tuned_rows
        return Plan(**{**self.common, "chunk_rows": rows, "tune_products": tune, **fields})

    def _warn(self, text: str) -> None:
        """Warns once a process for each budget, strategy and shapes but for the number of tokens."""
        tensors = self.call.tensors.items()
        shapes = tuple(spec.shape for name, spec in tensors if argument(name).role == COLUMN)
        key = (self.limit, self.strategy, self.call.dtype, shapes, text[:6])
        if key not in _warned:
            _warned.add(key)
            warnings.warn(text, stacklevel=4)

    # Chunks.

    def _default_rows(self) -> int:
        """Rows of the largest chunk that time asks for."""
        device, sizes = self.device, self.sizes
        if self.is_on_cpu:
            least, most = CPU_CHUNK_BYTES
            allowed = min(max(device.multiprocessors * CPU_THREAD_BYTES, least), most)
            return max(allowed // sizes.row_bytes, int(sizes.hidden * CPU_PART_OF_HIDDEN), CPU_SMALLEST_CHUNK)
        # A rank's logits are narrower by the number of ranks, so that its chunks may have as many more rows.
        rows = _compute_bound_rows(device) * self.ranks
        if self.tokens <= max(rows, CHUNK_ROWS):
            rows = max(rows, CHUNK_ROWS)
        else:
            operations = 6 * max(sizes.hidden, 1) * max(sizes.vocab, 1)
            enough = int(CHUNK_SECONDS * device.matmul_rate / operations)
            part = -(-self.tokens // (FEWEST_CHUNKS * TILE_ROWS)) * TILE_ROWS
            rows = max(rows, min(enough, CHUNK_BYTES // sizes.row_bytes, part))
        return rows if self.most_by_default == inf else min(rows, max(self._affordable_rows(), SMALLEST_CHUNK))

    def _affordable_rows(self) -> int:
        """Rows of a chunk that takes no more memory than a call may by default."""
        fixed, per_row, _ = self.sizes.linear_bytes(self._in_16_bits(1))
        return int((self.most_by_default - fixed) // per_row)

    def _default_rows_with_gradients(self) -> int:
        """The same where the forward computes dX: half of it for a frozen head, if that keeps the device busy."""
        largest, sizes = self._default_rows(), self.sizes
        is_frozen = "input" in self.call.needs_grad and sum(sizes.weights) <= ADAPTER_PART * sizes.head
        is_grown = largest > max(_compute_bound_rows(self.device) * self.ranks, CHUNK_ROWS)
        if self.is_on_cpu or self.strategy != GRADIENTS_IN_FORWARD or not is_frozen or is_grown:
            return largest
        tiles = -(-self._balanced(largest // 2) // TILE[0]) * -(-sizes.head // TILE[1])
        in_waves = -(-tiles // self.device.multiprocessors) * self.device.multiprocessors
        return largest // 2 if tiles >= FULL_WAVE * in_waves else largest

    def _balanced(self, largest: int) -> int:
        """Rows of a chunk so that all chunks are about equal, in whole tiles of the matmul, and none is larger."""
        if self.tokens <= largest:
            return max(self.tokens, 1)
        tile = 1 if self.is_on_cpu else min(TILE_ROWS, largest)
        chunks = -(-self.tokens // (largest // tile * tile))
        return -(-self.tokens // (chunks * tile)) * tile

    def _of_largest(self, default: int, of_rows: Callable[[int], Plan]) -> Plan:
        """The plan with the chosen chunk, the largest within the budget or, without one, the default."""
        limit, sizes = self.limit, self.sizes
        if self.chosen_rows is not None:
            return of_rows(self.chosen_rows)
        if limit is None:
            return of_rows(self._balanced(default))
        most = min(limit // sizes.row_bytes, self.tokens)
        if most >= self.tokens and sizes.temporary_bytes(whole := of_rows(max(self.tokens, 1))) <= limit:
            return whole
        most = max(min(most, self.tokens - 1), 1)
        plan = of_rows(most)
        fixed, per_row, _ = sizes.linear_bytes(plan)
        # Scratch grows at most in proportion, and does not shrink to nothing.
        scratch = sizes.scratch_bytes(plan, 0), sizes.scratch_bytes(plan, most)
        rows = int((limit - fixed - scratch[0]) / (per_row + (scratch[1] - scratch[0]) / most))
        return of_rows(self._balanced(max(min(rows, most), self.smallest)))

    # The sum of dW over chunks.

    def _in_16_bits(self, rows: int) -> Plan:
        """With the rows of dW that most is added to in float32, where there are chunks."""
        columns = self.sizes.frequent_columns
        has_targets = self.call.divergence is None or self.call.loss.ignores_rows
        if not columns or rows >= self.tokens or not has_targets:
            return self._with(rows)
        frequent = min(FREQUENT_ROWS, FREQUENT_BYTES // (4 * columns))
        return self._with(rows, float32_rows=frequent * (FREQUENT_OF_SEVERAL if self.call.targets_per_token else 1))

    def _in_float32(self, rows: int) -> Plan:
        return self._with(rows, float32_accumulator=rows < self.tokens)

    def _has_few_targets(self) -> bool:
        # The K targets of `target_weights` count as one, though each adds to a row of dW: a sum in float32, or
        # compensated, would take once more the memory of dW, fewer chunks that of logits.
        return self.tokens <= self.call.whole_vocab * EXACT_TOKENS_PER_COLUMN

    def _is_exact(self, rows: int) -> bool:
        """Whether sums in the parameter's dtype over chunks of so many rows err little enough."""
        if self.options.accumulate == "parameter" or not self.sizes.frequent_columns or rows >= self.tokens:
            return True
        return self._has_few_targets() and rows * EXACT_CHUNKS >= self.tokens

    def _summed(self) -> Plan:
        """Rows of a chunk, and where dW is summed.

        A sum in 16 bits is exact enough with few chunks. Otherwise either chunks are larger, and few enough, or they
        stand beside a float32 accumulator.
        """
        sizes, default = self.sizes, self._default_rows_with_gradients()
        is_free = self.chosen_rows is None and self.limit is None
        # All tokens, where their logits take little memory beside the gradients that the forward computes.
        is_small = sizes.row_bytes * self.tokens <= min(ONE_CHUNK * self.call.gradient_bytes, self.most_by_default)
        considers_one = is_free and is_small and self.strategy == GRADIENTS_IN_FORWARD and not self.is_on_cpu
        # A chunk may be as large as the rounded dW, which takes its memory afterwards: at 16384 × 128256 × 4096 that
        # halves what the accumulator costs, 10% of the time, and takes no more memory.
        rounded = 0 if self.is_on_cpu else sizes.itemsize * sizes.dw_elements // sizes.row_bytes
        in_float32 = partial(self._of_largest, max(default, rounded), self._in_float32)
        if self.options.accumulate == "float32" and sizes.frequent_columns:
            return in_float32()
        plan = self._of_largest(default, self._in_16_bits)
        if considers_one and plan.chunk_rows < self.tokens:
            one = self._in_16_bits(self.tokens)
            is_exact = self._is_exact(plan.chunk_rows)
            if not is_exact or sizes.seconds(plan) > WORTH_MEMORY * sizes.seconds(one):
                return one
        if self._is_exact(plan.chunk_rows):
            return plan
        wide = in_float32()
        if is_free:
            larger = -(-self.tokens // (EXACT_CHUNKS if self._has_few_targets() else 1))
            return min(self._in_16_bits(self._balanced(larger)), wide, key=sizes.temporary_bytes)
        if self.limit is None or sizes.temporary_bytes(wide) <= self.limit:
            return wide
        self._warn(
            f"within a memory_budget of {self.limit / 1e6:.0f} MB, dW is summed over chunks in {self.call.dtype}, with "
            f"more than 1.25 times the error of a single matmul: {sizes.temporary_bytes(wide) / 1e6:.0f} MB have room "
            'for a sum in float32; accumulate="parameter" accepts the error'
        )
        return plan

    # Saved logits.

    @property
    def most_saved(self) -> int:
        """Bytes that a call may take in which logits are saved, unless that is asked for."""
        if self.limit is not None:
            return self.limit
        is_known = self.most_by_default < inf and not self.is_on_cpu
        return min(SAVED_LOGITS_BYTES, int(self.most_by_default)) if is_known else 0

    def saving(self) -> Plan | None:
        """A plan that keeps the logits of all rows, or of some; None where too few fit, or none may be kept."""
        allowed, sizes = self.most_saved, self.sizes
        is_asked_for = self.options.strategy is not None
        if not allowed or self.strategy != RECOMPUTE_LOGITS or is_asked_for or self.call.divergence is not None:
            return None
        whole = replace(self._with(max(self.tokens, 1)), strategy=SAVE_LOGITS)
        if sizes.temporary_bytes(whole) <= allowed:
            return whole
        if self.call.shard is not None and self.call.shard.sequence_parallel:
            return None
        largest = min(self._default_rows(), max(allowed // (4 * sizes.row_bytes), self.smallest))
        rows = self.chosen_rows or self._balanced(largest)
        some = replace((self._in_16_bits if self._is_exact(rows) else self._in_float32)(rows), strategy=SAVE_LOGITS)
        # As many rows as there is room for, but fewer where the backward takes more for them than for a chunk.
        saved = 0
        for is_last in (False, True, True):
            excess = sizes.temporary_bytes(replace(some, saved_rows=saved)) - allowed
            excess = max(excess, 0) if is_last else excess
            saved = min(max(saved - -(-excess // sizes.row_bytes), 0), self.tokens) // TILE_ROWS * TILE_ROWS
        return replace(some, saved_rows=saved) if saved >= max(SMALLEST_SAVED_PART * self.tokens, 1) else None


def _compute_bound_rows(device: Device) -> int:
    balance = device.matmul_rate / device.bandwidth / BALANCED_OPERATIONS_PER_BYTE
    return int(CHUNK_ROWS * 2.0 ** max(min(round(log2(balance)), 1), -1))


def _needs_later_sums(call: Call) -> bool:
    """Whether upstream gradients, one number a row, have to be known before anything is summed."""
    return call.loss.has_row_gradients and (call.divergence is not None or not call.has_unit_gradients)


def _check_batch_invariant(call: Call, options: Options, device: Device) -> None:
    """Whether rows can have the same bits in any batch.

    Raises:
        ValueError: where they cannot; the text says why.
    """
    reason = ""
    if device.kind == "cuda":
        linears = [("input", call.dtype, [call.tensors[linear.x].shape[-1] for linear in call.linears])]
        if (teacher := call.get("teacher_input")) is not None:
            linears.append(("teacher_input", teacher.dtype, [teacher.shape[-1]]))
        dtype = torch.float32 if options.has_float32_logits(call.dtype) else call.dtype
        # What a GPU that is not there would have is not known.
        if device.is_hip or (torch.cuda.is_available() and cublaslt.library_name() is None):
            reason = "on GPUs it needs NVIDIA's cuBLASLt of CUDA 12 or 13, on Linux"
        elif library(options.row_kernels, dtype=dtype, device_type="cuda") != "Triton":
            reason = 'on CUDA it needs Triton and row_kernels="auto" or "triton"'
        for name, dtype, sizes in linears:
            if dtype.itemsize != 2:
                reason = f"on CUDA it needs bfloat16 or float16, but {name} is {dtype}"
            elif any(size % ROW_MULTIPLE for size in sizes):
                reason = f"on CUDA it needs multiples of {ROW_MULTIPLE}, but the hidden sizes of {name} are {sizes}"
    elif device.kind != "cpu":
        reason = f"it runs on CUDA and on a CPU, but the input is on {device.kind!r}"
    if reason:
        raise ValueError(f"batch_invariant=True: {reason}")
