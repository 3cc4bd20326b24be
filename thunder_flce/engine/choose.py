"""Chooses the plan for a call: rules of thumb propose a few, and their predicted memory and time decide.

Memory and time are closed formulas of the sizes, so a plan takes microseconds and is made for each number of tokens.
Legend: T tokens, C tokens in a chunk, S tokens whose logits are saved, H hidden size, V vocabulary.
"""

import sys
import warnings
from bisect import bisect
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from math import inf, log2
from typing import Any

import torch

from thunder_flce.device import ABSENT_DEVICE, BFLOAT16_CAPABILITY, ROW_MULTIPLE, TILE_ROWS, Device
from thunder_flce.engine.kernels.dispatch import backend, check_available
from thunder_flce.engine.kernels.interface import row_stride
from thunder_flce.engine.matmul.matmul import FLOAT32_COLUMNS
from thunder_flce.engine.plan import LOSS_ONLY, Plan, balanced, is_small
from thunder_flce.operation.call import COLUMN, HIDDEN, Call, argument
from thunder_flce.options import GRADIENTS_IN_FORWARD, RECOMPUTE_LOGITS, SAVE_LOGITS, STRATEGIES, Options

# A running sum of dW in 16 bits is rounded twice a chunk. Its error stays within 1.25 × that of a single matmul while
# hardly any column is the target of more than one token. In any real text, a few columns are: FREQUENT_ROWS of their
# rows of dW, or as many as fit into FREQUENT_BYTES, are summed in float32. Error relative to a single matmul, for 4 and
# 16 chunks of 8192 × 128256 × 4096: 1.15 and 1.18 with uniform targets (but 1.30 for 4 chunks at a vocabulary of
# 98304); with Zipf-distributed targets 1.09 and 1.10 for 192 such rows, which fit, and 1.12 and 1.14 for 128.
EXACT_CHUNKS = 16
EXACT_TOKENS_PER_COLUMN = 1 / 15
FREQUENT_ROWS = 256
FREQUENT_BYTES = 3 * 2**20
# With K targets a token, most columns are the target of several tokens, so this many times as many rows are summed in
# float32. The remaining error is that of columns that are about equally frequent.
FREQUENT_OF_SEVERAL = 4

# Chunks of fewer rows leave the matmuls of an H200 memory-bound: each reads all of W, and reads and writes all of dW.
# Devices with half or twice the ratio of operations to bytes moved per second take half or twice as many rows.
CHUNK_ROWS = 2048
# Up to a quarter more tokens are one chunk: in two halves, they take 1.14 times as long (2304 × 151936 × 896, H200).
# Half more tokens take 1.00 times as long in two halves.
ONE_CHUNK_ROWS = CHUNK_ROWS * 5 // 4
# Without a memory budget, chunks take no more than this part of the device's memory, as far as the sum of dW allows.
PART_OF_MEMORY = 1 / 20
# If H is large, larger chunks gain nothing. If H is small, a chunk's fixed cost of about 0.1 ms beside its matmuls
# counts: then chunks have enough rows to take CHUNK_SECONDS, up to CHUNK_BYTES of logits, in at least FEWEST_CHUNKS.
CHUNK_SECONDS = 2.5e12 / ABSENT_DEVICE.matmul_rate
CHUNK_BYTES = 2**30
FEWEST_CHUNKS = 3
SMALLEST_CHUNK = 512
# With a frozen weight, there is no dW to read and write. Half as many rows are then enough, if their dX, in tiles of
# 128 × 256, keeps the multiprocessors busy in its last wave. Low-rank adapters do not change that.
TILE = (128, 256)
FULL_WAVE = 0.8
# A single chunk avoids the sum over chunks. It is considered if its logits take no more memory than ONE_CHUNK times the
# gradients, which exist anyway, or than ONE_CHUNK_BYTES, which are little for a GPU (8192 × 32000 × 2048 takes 0.87 of
# the time of three chunks). It is taken if smaller chunks are predicted to take WORTH_MEMORY of its time longer.
ONE_CHUNK, ONE_CHUNK_BYTES = 1.2, 2**29
WORTH_MEMORY = 0.03
# On a CPU, a chunk's logits may take CPU_THREAD_BYTES for each thread, counting at least two, and CPU_CHUNK_BYTES in
# all. But each chunk reads all of W and adds to all of dW: with fewer rows than CPU_PART_OF_HIDDEN of H, that traffic
# takes longer than the logits'. On two cores, 1024 × 128256 × 2048 in float32 takes 13.4, 11.8, 10.5 and 10.3 s with
# chunks of 64, 128, 256 and 512, and twice as many tokens 24.8, 21.2 and 22.7 s with chunks of 256, 512 and 1024.
CPU_THREAD_BYTES, CPU_FEWEST_THREADS = 16 * 2**20, 2
CPU_CHUNK_BYTES = 512 * 2**20
CPU_PART_OF_HIDDEN = 1 / 4
CPU_SMALLEST_CHUNK = 64

# Without a memory budget, a call whose backward would compute logits again saves them while it takes no more than
# SAVED_LOGITS_BYTES and PART_OF_MEMORY. Free memory does not count: plans must not depend on when they are made. Saving
# the logits of fewer than an eighth of the tokens avoids less than 3% of the matmuls.
SAVED_LOGITS_BYTES = 4 * 2**30
SMALLEST_SAVED_PART = 1 / 8

# Time that dividing the tokens into chunks costs beside the traffic of dW: fitted to 4096 × 152064 × 3584 on an H200,
# where two chunks take 5% longer than one; the traffic alone would be 1%.
DIVISION_SECONDS = 0.85e-3
# Part of the traffic of a sum over chunks that is not hidden by the matmul that adds to it, measured on an H100.
SUM_PART = 1 / 3
# Time of a matmul in float32 and float64, by itemsize, relative to one in 16 bits; rough.
SLOWER_MATMULS = {4: 8.0, 8: 16.0}
# To skip ignored rows, the host waits for the number of valid rows, which pays if the matmuls take at least this long.
# The wait takes 0.2 to 0.6 ms, but then the host is no longer ahead of the device. In steps of small models it may stay
# behind: four layers of Qwen 2.5 0.5B with 2048 tokens, 2.5 ms of matmuls, took 11.1 ms with the wait (H100), and 8.6
# by torch.compile.
WAIT_SECONDS = 8e-3

_warned: set[tuple[object, ...]] = set()


def choose(call: Call, options: Options, device: Device) -> Plan:
    """Returns the plan of a call of specs: the fastest within the memory budget, without one the smallest that pays.

    Ranks that divide the vocabulary get the same plan from the same `device`.

    Raises:
        ValueError: if the chosen strategy cannot give the requested gradients, if the chosen row kernels or
            `batch_invariant` do not run here, or if the budget is a fraction of an unknown amount of memory.
    """
    return _Choice(call.largest_part, options, device).plan()


def strategy_of(call: Call, options: Options) -> str:
    """Returns the strategy for any number of tokens: "save_logits" only if the options ask for it. It ignores sizes.

    Raises:
        ValueError: as `choose`.
    """
    logits_dtype = torch.float32 if options.has_float32_logits(call.dtype) else call.dtype
    check_available(options.row_kernels, dtype=logits_dtype, device_type=call.device.type)
    if not call.needs_grad:
        return LOSS_ONLY
    strategy, loss = options.strategy, call.loss
    # Upstream gradients of one number a row must be known before a sum over rows. dW and db are such sums; a frozen
    # head's dX is, row by row, the upstream gradient times a vector (with further terms there is more than one dX).
    is_frozen = call.needs_grad == ("input",) and len(call.linears) == 1
    has_gradients_of_targets = call.targets_per_token is not None and "log_prob" in loss.differentiable_outputs
    is_parallel = loss.has_parallel_row_gradients and not has_gradients_of_targets
    needs_later_sums = loss.has_row_gradients and not (is_frozen and is_parallel)
    if strategy == GRADIENTS_IN_FORWARD and needs_later_sums:
        raise ValueError(
            'strategy "gradients_in_forward" needs reduction "mean" or "sum" and no differentiable outputs, because it '
            "sums gradients over tokens before the upstream gradient of each token is known: leave strategy=None, or "
            "freeze the weight and bias, and use no further terms, label smoothing, z_loss or gradient of "
            '"entropy", "log_sum_exp" or "mean_logit"'
        )
    if strategy == SAVE_LOGITS and loss.divergence is not None:
        raise ValueError(
            'strategy "save_logits" is for a cross-entropy, because a divergence would have to save the logits of '
            'student and teacher: leave strategy=None, or use "recompute_logits"'
        )
    # float16 gradients must be multiplied by the upstream gradient (the loss scale) before rounding, or they underflow.
    is_scaled = options.expected_gradient is not None or "expected_gradient" in call.tensors
    has_loss_scale = call.dtype is not torch.float16 or is_scaled
    if loss.token_loss and (strategy not in (None, GRADIENTS_IN_FORWARD) or not has_loss_scale):
        raise ValueError(
            "token_loss needs its gradients computed in the forward: leave strategy=None and, for float16, give "
            "expected_gradient, such as a GradScaler's scale"
        )
    waits = needs_later_sums or not (has_loss_scale or loss.has_row_gradients)
    return strategy or (RECOMPUTE_LOGITS if waits else GRADIENTS_IN_FORWARD)


def alternatives(call: Call, plan: Plan, device: Device) -> list[Plan]:
    """Returns other plans for a call: with half and twice the chunk, and the other strategies with chunks of their own.

    They keep the plan's treatment of ignored rows and its row kernels, and ignore the memory budget.
    """
    base = Options(
        ignored_rows=plan.ignored_rows, row_kernels=plan.row_kernels, batch_invariant=plan.batch_invariant,
        logits_dtype="float32" if plan.float32_logits else "input",
    )  # fmt: skip
    variants = [replace(base, strategy=strategy) for strategy in STRATEGIES if call.needs_grad]
    if plan.strategy != SAVE_LOGITS:
        same_strategy = base if plan.strategy == LOSS_ONLY else replace(base, strategy=plan.strategy)
        sizes = {plan.chunk_rows // 2, min(2 * plan.chunk_rows, call.tokens)} - {0}
        variants = [*(replace(same_strategy, chunk_rows=rows) for rows in sorted(sizes)), *variants]
    plans = {plan: None}
    for options in variants:
        with suppress(ValueError):  # Not every loss can have every strategy.
            plans[choose(call, options, device)] = None
    return [*plans][1:]


# Time and memory.


def matmul_seconds(call: Call, device: Device) -> float:
    """The predicted time of the matmuls for logits, dX and dW."""
    logits = sum(spec.shape[-1] for name, spec in call.tensors.items() if argument(name).role == HIDDEN)
    gradients = sum(_hidden_sizes(call, HIDDEN)) + sum(_hidden_sizes(call, COLUMN))
    operations = 2.0 * call.vocab * call.tokens * (logits + gradients)
    return operations * SLOWER_MATMULS.get(call.dtype.itemsize, 1.0) / device.matmul_rate


def division_seconds(call: Call, plan: Plan, device: Device) -> float:
    """The predicted time that a plan's chunks take longer than a single chunk of all tokens."""
    columns, itemsize, is_wide = sum(_hidden_sizes(call, COLUMN)), call.dtype.itemsize, plan.float32_accumulator
    chunks = -(-call.tokens // plan.chunk_rows)
    if chunks == 1 or not columns:
        return 0.0
    sums = 2.0 * (chunks - 1) * (4 if is_wide else itemsize) * SUM_PART + is_wide * (4 + itemsize)
    return DIVISION_SECONDS + call.weight_rows * columns * sums / device.bandwidth


def temporary_bytes(call: Call, plan: Plan, device: Device | None = None) -> int:
    """The peak memory that forward and backward of a call of specs take beside inputs and gradients.

    Vectors of one number a token are left out. `device` is where the call runs, by default the call's device. If
    gradients are finished in the backward, the forward takes less memory than the backward.
    """
    device, shard, itemsize = device or Device.of(call.device), call.shard, call.dtype.itemsize
    dx_sizes, dw_sizes = _hidden_sizes(call, HIDDEN), _hidden_sizes(call, COLUMN)
    is_divided, has_units = plan.first_rows(call.tokens) < call.tokens, plan.saves_unit_gradients(call)

    # `fixed`: bytes beside the chunk's memory. `least`: bytes at the end, when the chunk's memory is freed.
    fixed = least = frequent_columns = 0
    for hidden in reversed(dw_sizes):
        if plan.sum_dtype(call, hidden, rows=call.tokens) != call.dtype:
            # At the end, the float32 sum and the rounded dW exist beside the sums that are rounded later.
            elements = call.weight_rows * hidden
            least = max(least, 4 * elements + fixed)
            fixed += (4 - itemsize) * elements
        else:
            frequent_columns += hidden
    frequent_rows = min(plan.float32_rows, call.vocab) if is_divided and frequent_columns else 0
    fixed += 4 * frequent_rows * frequent_columns + 4 * call.bias_grad * call.weight_rows
    if has_units and itemsize < 4:
        # dX for an upstream gradient of 1 is float32; the backward multiplies its rows by factors into new memory.
        fixed += (4 - itemsize) * call.own_tokens * call.hidden
        least = max(least, 4 * call.own_tokens * call.hidden)

    # Bytes for each row of a chunk, beside its logits.
    per_row = _dlogits_bytes(call, plan) + frequent_rows * itemsize
    if shard is not None and shard.reduces_input_grad and dx_sizes:
        # This rank's part of dX before the sum over ranks and, if ranks divide the tokens, this rank's rows of the sum.
        part = max(dx_sizes) * (call.row_dtype.itemsize if shard.float32_input_grad else itemsize)
        per_row += part + (part // shard.ranks if shard.sequence_parallel else 0)
    if shard is not None and shard.sequence_parallel:
        # x of this chunk and of the next one, whose all-gather runs ahead.
        per_row += call.hidden * itemsize * (2 if is_divided else 1)
    elif plan.ignored_rows == "skip" and call.ignores_rows:
        # Copies of the valid rows of each input, unless they are gathered into the memory of its dX.
        for name, x in call.tensors.items():
            if argument(name).role == HIDDEN and (has_units or name not in call.needs_grad):
                per_row += x.shape[-1] * x.dtype.itemsize

    def beside_logits(rows: int) -> int:
        return rows * per_row + _scratch_bytes(call, plan, device, rows)

    saved, logits_bytes = plan.rows_saved(call.tokens), _logits_bytes(call, plan)
    rows = min(plan.chunk_rows, call.tokens - saved)
    chunks = rows * logits_bytes + beside_logits(rows)
    if saved:
        chunks = max(chunks, beside_logits(saved))
    return saved * logits_bytes + max(fixed + chunks, least)


def _hidden_sizes(call: Call, role: str) -> list[int]:
    """The hidden size of each dX that is needed, for the role `HIDDEN`, or of each dW, for `COLUMN`."""
    shapes = [call.tensors[name].shape for name in call.needs_grad if argument(name).role == role]
    return [shape[-1] for shape in shapes if len(shape) > 1]


def _logits_bytes(call: Call, plan: Plan) -> int:
    """Bytes of a row of logits, with a teacher's."""
    inputs = [call.tensors[name] for name in ("input", "teacher_input") if name in call.tensors]
    return sum(_row_bytes(call, plan.logits_dtype(x.dtype)) for x in inputs)


def _dlogits_bytes(call: Call, plan: Plan) -> int:
    """Bytes of a row of dlogits; 0 if they overwrite the logits."""
    is_apart = call.needs_grad and plan.logits_dtype(call.dtype) is not call.dtype
    return _row_bytes(call, call.dtype) if is_apart else 0


def _row_bytes(call: Call, dtype: torch.dtype) -> int:
    return row_stride(call.vocab, dtype=dtype, device_type=call.device.type) * dtype.itemsize


def _scratch_bytes(call: Call, plan: Plan, device: Device, rows: int) -> int:
    """A bound of the bytes that a matmul of a chunk of `rows` rows takes for float32 results and copies of operands."""
    if call.dtype.itemsize > 2:
        return 0
    hidden, columns, shard = max(call.tensors[linear.x].shape[-1] for linear in call.linears), call.vocab, call.shard
    has_wide_dx = plan.saves_unit_gradients(call) if shard is None else shard.float32_input_grad
    # The last columns of such a V have a matmul of their own, and its rows are padded: see `matmul`.
    is_odd = device.kind == "cuda" and columns % ROW_MULTIPLE > 0
    # M, N, K, whether the result is float32, and whether it is summed in float32 and then rounded.
    matmuls = [
        (rows, min(columns, FLOAT32_COLUMNS), hidden, plan.float32_logits, is_odd and "linear_bias" in call.tensors),
        *((rows, size, columns, has_wide_dx, is_odd) for size in _hidden_sizes(call, HIDDEN)),
        *((columns, size, rows, plan.sum_dtype(call, size, rows=call.tokens) != call.dtype, False)
          for size in _hidden_sizes(call, COLUMN)),
    ]  # fmt: skip
    converts = not device.multiplies_into_float32(call.dtype)
    return torch.float32.itemsize * max(
        m * n * (is_rounded and not is_wide) + (m + n) * k * (converts and (is_wide or is_rounded))
        for m, n, k, is_wide, is_rounded in matmuls
    )


# The choice.


class _Choice:
    """The choice of a plan for one call, its options and a device; each method decides one thing."""

    def __init__(self, call: Call, options: Options, device: Device):
        self.call, self.options, self.device, self.tokens = call, options, device, call.tokens
        self.is_on_cpu, self.has_teacher = device.kind == "cpu", call.loss.divergence is not None
        self.smallest = CPU_SMALLEST_CHUNK if self.is_on_cpu else SMALLEST_CHUNK
        # A rank's logits are narrower by the number of ranks, so its chunks need as many times more rows.
        balance, h200_balance = (each.matmul_rate / each.bandwidth for each in (device, ABSENT_DEVICE))
        bound_rows = int(CHUNK_ROWS * 2.0 ** max(min(round(log2(balance / h200_balance)), 1), -1))
        self.compute_bound_rows = bound_rows * (1 if call.shard is None else call.shard.ranks)
        # If ranks divide the tokens, a chunk has at least one row of each rank's part.
        self.chosen_rows = None if options.chunk_rows is None else max(options.chunk_rows, call.token_parts)
        budget = options.memory_budget
        if isinstance(budget, float):
            if device.memory is None:
                raise ValueError(
                    "memory_budget is a fraction of the device's memory, but how much memory the device has is not "
                    f"known on {device.kind!r}: give the budget in bytes, as an int"
                )
            budget = int(budget * device.memory)
        self.limit = budget
        # On a CPU, other processes share the memory: by default, none is spent on saved logits or a single chunk.
        self.most_by_default = 0 if self.is_on_cpu else inf if device.memory is None else PART_OF_MEMORY * device.memory
        is_tuned = device.is_hopper if options.tune_products is None else options.tune_products and device.is_nvidia
        ignored_rows = options.ignored_rows
        if ignored_rows == "auto":
            # Whether skipping ignored rows can save more time than the wait for the number of valid rows costs.
            skipping_pays = self.is_on_cpu or matmul_seconds(call, device) >= WAIT_SECONDS
            ignored_rows = "skip" if skipping_pays or not call.ignores_rows else "compute"
        self.common = Plan(
            strategy=strategy_of(call, options), float32_logits=options.has_float32_logits(call.dtype),
            ignored_rows=ignored_rows, row_kernels=options.row_kernels, batch_invariant=options.batch_invariant,
            tune_products=is_tuned and call.dtype.itemsize == 2,
        )  # fmt: skip
        self.row_bytes = max(_logits_bytes(call, self.common) + _dlogits_bytes(call, self.common), 1)
        # The hidden size of each dW, except for small adapters, whose dW is always summed in float32.
        self.dw_sizes = [size for size in _hidden_sizes(call, COLUMN) if not is_small(call, size)]

    def plan(self) -> Plan:
        """Returns the plan, and warns if it takes more memory than the budget."""
        if self.options.batch_invariant:
            _check_batch_invariant(self.call, self.common, self.device)
        if self.common.strategy == LOSS_ONLY:
            plan = self._plan_with_largest_chunk(self._default_rows, self._plan_in_16_bits)
        elif self.common.strategy == SAVE_LOGITS:
            plan = self._plan_of(max(self.tokens, 1))
        else:
            plan = self._choose_saved_logits() or self._choose_sum()
        if self.limit is not None and (needed := self._bytes(plan)) > 1.01 * self.limit:
            cure = '; accumulate="parameter" takes less, with a larger error of dW' if plan.float32_accumulator else ""
            self._warn(
                "budget",
                f"memory_budget is {self.limit / 1e6:.0f} MB, but up to {self.tokens} tokens take "
                f"{needed / 1e6:.0f} MB: {plan.describe()}{cure}",
            )
        return plan

    def _plan_of(self, rows: int, **fields: Any) -> Plan:
        return replace(self.common, chunk_rows=rows, **fields)

    def _bytes(self, plan: Plan) -> int:
        return temporary_bytes(self.call, plan, self.device)

    def _warn(self, kind: str, text: str) -> None:
        """Warns once a process for each kind of text, options and call, whatever its number of tokens."""
        key = (kind, self.options, self.call.specs(tokens=0))
        if key in _warned:
            return
        _warned.add(key)
        # The warning is about the first line outside of this package and PyTorch: the user's, in an eager call.
        level, frame = 1, sys._getframe()
        while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(("thunder_flce.", "torch.")):
            level, frame = level + 1, frame.f_back
        warnings.warn(text, stacklevel=level)

    # Chunks.

    @cached_property
    def _default_rows(self) -> int:
        """Rows of a chunk without a memory budget: as many as pay, within the memory that calls may take by default."""
        call, device = self.call, self.device
        if self.is_on_cpu:
            threads = max(device.multiprocessors, CPU_FEWEST_THREADS)
            allowed = min(threads * CPU_THREAD_BYTES, CPU_CHUNK_BYTES) // self.row_bytes
            return max(allowed, int(call.hidden * CPU_PART_OF_HIDDEN), self.smallest)
        fewest = rows = max(self.compute_bound_rows, self.tokens if self.tokens <= ONE_CHUNK_ROWS else 0)
        if self.has_teacher and self.compute_bound_rows // 2 < self.tokens <= ONE_CHUNK_ROWS:
            # Of two heads, the logits of all these tokens would take more memory than in an unfused program, which has
            # no dW yet. Half as many rows take 2% longer (H200, 2048 × 128256 × 2048, 2500 × 128256 × 4096), or 4%
            # (2048 × 151936 × 896).
            fewest = rows = self.compute_bound_rows // 2
        enough = int(CHUNK_SECONDS * device.matmul_rate / (6 * max(call.hidden, 1) * max(call.vocab, 1)))
        rows_of_part = -(-self.tokens // (FEWEST_CHUNKS * TILE_ROWS)) * TILE_ROWS
        rows = max(rows, min(enough, CHUNK_BYTES // self.row_bytes, rows_of_part))
        is_frozen = "input" in call.needs_grad and not self.dw_sizes
        if self.common.strategy == GRADIENTS_IN_FORWARD and is_frozen and rows == fewest:
            # Half as many rows, if their dX keeps the device busy: see FULL_WAVE.
            tiles = -(-self._balanced(rows // 2) // TILE[0]) * -(-call.tensors["input"].shape[-1] // TILE[1])
            in_waves = -(-tiles // device.multiprocessors) * device.multiprocessors
            rows = rows // 2 if tiles >= FULL_WAVE * in_waves else rows
        return self._rows_within(self.most_by_default, rows, self._plan_in_16_bits)

    def _rows_within(self, limit: float, most: int, plan_with: Callable[[int], Plan]) -> int:
        """Rows of the largest chunk, up to `most`, whose plan takes at most `limit` bytes, or of the smallest chunk."""

        def bytes_with(rows: int) -> int:
            return self._bytes(plan_with(rows))

        return most if bytes_with(most) <= limit else max(bisect(range(1, most), limit, key=bytes_with), self.smallest)

    def _balanced(self, largest: int) -> int:
        """Rows of a chunk that make all chunks about equal, in whole tiles of the matmul, and none above `largest`."""
        is_tiled = self.tokens > largest and not self.is_on_cpu
        return balanced(self.tokens, largest, tile=min(TILE_ROWS, largest) if is_tiled else 1)

    def _plan_with_largest_chunk(self, default: int, plan_with: Callable[[int], Plan]) -> Plan:
        """Returns the plan with the chosen chunk size, else with the largest in the budget, else with the default."""
        if self.chosen_rows is not None:
            return plan_with(self.chosen_rows)
        largest = default if self.limit is None else self._rows_within(self.limit, max(self.tokens, 1), plan_with)
        return plan_with(self._balanced(largest))

    # The sum of dW over chunks.

    def _plan_in_16_bits(self, rows: int) -> Plan:
        """Returns a plan that sums dW in 16 bits and, if there are several chunks, its frequent rows in float32."""
        has_targets = not self.has_teacher or self.call.loss.ignores_rows or "label_weights" in self.call.tensors
        if not self._rounds_sums(rows) or not has_targets:
            return self._plan_of(rows)
        frequent = min(FREQUENT_ROWS, FREQUENT_BYTES // (4 * sum(self.dw_sizes)))
        return self._plan_of(rows, float32_rows=frequent * (FREQUENT_OF_SEVERAL if self.call.targets_per_token else 1))

    def _plan_in_float32(self, rows: int) -> Plan:
        return self._plan_of(rows, float32_accumulator=rows < self.tokens)

    def _rounds_sums(self, rows: int) -> bool:
        """Whether a sum of dW over chunks of `rows` rows would be rounded in each chunk."""
        return bool(self.dw_sizes) and self.call.dtype.itemsize == 2 and rows < self.tokens

    @property
    def _exact_rows(self) -> int:
        """Rows of the smallest chunk for which the error of a sum in the parameter's dtype is small enough.

        All rows if the options ask for a sum in float32.
        The K targets of `target_weights` count as one, though each adds to a row of dW. A sum in float32, or a
        compensated one, would take the memory of dW once more, and fewer chunks more memory for logits.
        """
        if self.options.accumulate == "parameter" or not self._rounds_sums(0):
            return 0
        if self.options.accumulate == "float32":
            return self.tokens
        has_few_targets = self.tokens <= self.call.whole_vocab * EXACT_TOKENS_PER_COLUMN
        return -(-self.tokens // (EXACT_CHUNKS if has_few_targets else 1))

    def _choose_sum(self) -> Plan:
        """Returns the plan that sums gradients over chunks, with the chunk size and the dtype in which dW is summed.

        A sum in 16 bits is exact enough with few chunks. Otherwise either chunks are larger, so that there are few of
        them, or dW is summed in a float32 accumulator.
        """
        call = self.call
        if self.options.accumulate == "float32" and self._rounds_sums(0):
            return self._choose_float32_sum()
        plan = self._plan_with_largest_chunk(self._default_rows, self._plan_in_16_bits)
        is_exact = plan.chunk_rows >= self._exact_rows
        if self.chosen_rows is not None or self.limit is not None:
            if is_exact:
                return plan
            in_float32 = self._choose_float32_sum()
            if self.limit is None or self._bytes(in_float32) <= self.limit:
                return in_float32
            self._warn(
                "sum",
                f"within a memory_budget of {self.limit / 1e6:.0f} MB, dW is summed over chunks in {call.dtype}, with "
                f"more than 1.25 times the error of a single matmul: {self._bytes(in_float32) / 1e6:.0f} MB have room "
                'for a sum in float32; accumulate="parameter" accepts the error without this warning',
            )
            return plan
        if not is_exact:
            in_16_bits = self._plan_in_16_bits(self._balanced(self._exact_rows))
            plan = min(in_16_bits, self._choose_float32_sum(), key=self._bytes)
        # One chunk of all tokens, if their logits take little memory.
        one_chunk = self._plan_in_16_bits(max(self.tokens, 1))
        most_bytes = max(0 if self.has_teacher else ONE_CHUNK * call.gradient_bytes, ONE_CHUNK_BYTES)
        fits = self.row_bytes * self.tokens <= min(most_bytes, self.most_by_default)
        if self.common.strategy == GRADIENTS_IN_FORWARD and fits:
            # The logits are written once by the matmul, then read and overwritten: three times their bytes.
            one_seconds = matmul_seconds(call, self.device) + 3.0 * self.row_bytes * self.tokens / self.device.bandwidth
            if division_seconds(call, plan, self.device) > WORTH_MEMORY * one_seconds:
                return one_chunk
        return plan

    def _choose_float32_sum(self) -> Plan:
        """Returns a plan that sums dW in float32, with as many rows in a chunk as pay.

        A chunk may be as large as the rounded dW, which takes its memory afterwards. A float32 sum moves twice the
        bytes of one in 16 bits: chunks that are only as large as the matmuls need are doubled, if memory allows.
        """
        rows = default = self._default_rows
        if not self.is_on_cpu:
            elements = self.call.weight_rows * sum(_hidden_sizes(self.call, COLUMN))
            rows = max(default, self.call.dtype.itemsize * elements // self.row_bytes)
            if default <= self.compute_bound_rows:
                rows = max(rows, self._rows_within(self.most_by_default, 2 * rows, self._plan_in_float32))
        return self._plan_with_largest_chunk(rows, self._plan_in_float32)

    # Saved logits.

    def _choose_saved_logits(self) -> Plan | None:
        """Returns a plan that saves the logits of all rows or of some; None if too few fit, or none may be saved."""
        allowed, shard = self.limit, self.call.shard
        if allowed is None:
            # If the device's memory is unknown, no logits are saved by default.
            allowed = min(SAVED_LOGITS_BYTES, int(self.most_by_default)) if self.most_by_default < inf else 0
        may_save = self.options.strategy is None and not self.has_teacher
        if not allowed or self.common.strategy != RECOMPUTE_LOGITS or not may_save:
            return None
        all_saved = self._plan_of(max(self.tokens, 1), strategy=SAVE_LOGITS)
        if self._bytes(all_saved) <= allowed:
            return all_saved
        if shard is not None and shard.sequence_parallel:
            return None
        largest = min(self._default_rows, max(allowed // (4 * self.row_bytes), self.smallest))
        # Other logits are saved, so the rest is never all rows, and dW is a sum.
        rows = min(self.chosen_rows or self._balanced(largest), max(self.tokens - TILE_ROWS, 1))
        chunked = (self._plan_in_16_bits if rows >= self._exact_rows else self._plan_in_float32)(rows)

        def plan_saving(tiles: int) -> Plan:
            return replace(chunked, strategy=SAVE_LOGITS, saved_rows=tiles * TILE_ROWS)

        tiles = bisect(
            range(1, self.tokens // TILE_ROWS + 1), allowed, key=lambda count: self._bytes(plan_saving(count))
        )
        return plan_saving(tiles) if tiles * TILE_ROWS >= max(SMALLEST_SAVED_PART * self.tokens, 1) else None


def _check_batch_invariant(call: Call, plan: Plan, device: Device) -> None:
    """Checks that rows can have the same bits in any batch.

    Raises:
        ValueError: if they cannot; the text says why.
    """
    reason = ""
    if device.kind == "cuda":
        if backend(plan.row_kernels, dtype=plan.logits_dtype(call.dtype), device_type="cuda") != "triton":
            reason = 'on CUDA it needs Triton and row_kernels="auto" or "triton"'
        elif device.is_nvidia and device.capability < BFLOAT16_CAPABILITY:
            reason = "it needs a GPU of compute capability 8.0 or newer"
        for name in ("input", "teacher_input"):
            if name in call.tensors and (dtype := call.tensors[name].dtype).itemsize != 2:
                reason = f"on CUDA it needs bfloat16 or float16, but {name} is {dtype}"
    elif device.kind != "cpu":
        reason = f"it runs on CUDA and on a CPU, but the input is on {device.kind!r}"
    if reason:
        raise ValueError(f"batch_invariant=True: {reason}")
