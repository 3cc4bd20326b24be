"""dX, dW and db of every term while chunks of tokens add to them.

Legend: T tokens, N rows computed, C rows in a chunk, H hidden size, V vocabulary.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from thunder_flce.execution import steps
from thunder_flce.execution.operands import Gradients, Operands
from thunder_flce.execution.plan import GradientsInForward, Plan
from thunder_flce.execution.record import Value
from thunder_flce.execution.region import Region
from thunder_flce.execution.row_kernels.interface import LogitsBuffer, LogitsInBlocks
from thunder_flce.execution.row_selection import Rows

# A further term of at most this part of the head's hidden size is summed in float32.
_SMALL_TERM = 8


class StagedLogits(NamedTuple):
    """Memory for logits where those of the first chunk are staged in the memory of dW."""

    logits: LogitsInBlocks
    """Of the first chunk"""
    rest: LogitsBuffer
    """Of a later chunk"""


def input_memory(region: Region, at: int, dtype: torch.dtype) -> Tensor | None:
    """(T, H) for dX of a term; None where that is not needed."""
    term = region.terms[at]
    return region.empty(f"dX{at or ''}", tuple(term.x.shape), dtype) if term.input_grad else None


def weight_memory(region: Region, at: int, dtype: torch.dtype) -> Tensor | None:
    """(V, H) for dW of a term, 0 in rows that are no columns of the logits; None where that is not needed."""
    term, rows = region.terms[at], region.operands.weight_rows
    if not term.weight_grad:
        return None
    memory = region.empty(f"dW{at or ''}", (rows, term.x.shape[1]), dtype)
    zero_unused_rows(memory, region.operands)
    return memory


class GradientSums:
    """dX, dW and db while chunks of tokens add to them; no memory for those that are not needed.

    Where the rows that are computed are not known yet, `begin` takes them later.
    """

    def __init__(self, region: Region, plan: Plan, rows: Rows | None = None):
        operands = region.operands
        self._region = region
        self._is_first = True
        self._plan = plan if isinstance(plan, GradientsInForward) else GradientsInForward(chunk_rows=operands.tokens)
        # dX for an upstream gradient of 1 is rounded to 16 bits after it is multiplied by that of its row. Rounded
        # before, too, its error was up to 1.4 times that of PyTorch (DPO, 8192 × 128256 × 4096).
        is_unit = isinstance(plan, GradientsInForward) and region.loss.has_row_gradients
        input_dtype = operands.row_dtype if is_unit else operands.dtype
        self.inputs: list[Tensor | None] = []
        """Of each term, memory for dX"""
        self._weights: list[Tensor | None] = []
        for at in range(len(region.terms)):
            self.inputs.append(input_memory(region, at, input_dtype))
            self._weights.append(weight_memory(region, at, self._sum_dtype(at)))
        self._bias = None
        if operands.bias_grad:
            self._bias = region.zeros("db", (operands.weight_rows,), operands.row_dtype)
            zero_unused_rows(self._bias, operands)
        self._frequent: FrequentRows | None = None
        if rows is not None:
            self.begin(rows)

    def _sum_dtype(self, at: int) -> torch.dtype:
        """The dtype in which dW of a term is summed over the chunks.

        A low-rank adapter's takes little memory in float32. In 16 bits its error is 2.1 times that of a single matmul
        (rank 16, 8192 × 128256 in four chunks).
        """
        operands, terms = self._region.operands, self._region.terms
        is_sum = operands.dtype.itemsize == 2 and self._plan.chunk_rows < operands.tokens
        is_small = terms[at].x.shape[1] * _SMALL_TERM <= terms[0].x.shape[1]
        return torch.float32 if self._plan.float32_accumulator or (is_sum and is_small) else operands.dtype

    @property
    def room_for_x(self) -> list[Tensor | None]:
        """Of each term, (T, H) the memory of dX, for copies of rows of x until it takes their place.

        None where there is none, or it has another dtype.
        """
        dtype = self._region.operands.dtype
        return [None if memory is None or memory.dtype != dtype else memory for memory in self.inputs]

    def begin(self, rows: Rows) -> None:
        """Takes the rows that are computed, when their number is known."""
        self._rows = rows
        has_sums_in_16_bits = any(map(_is_in_16_bits, self._weights))
        if self._plan.float32_rows and has_sums_in_16_bits and self._region.operands.vocab:
            targets = steps.targets(self._region, rows.target)
            self._frequent = FrequentRows(self._region, targets, self._plan.float32_rows, weights=rows.target_weights)

    def staged_logits(self) -> StagedLogits | None:
        """Memory for logits of which those of the first chunk are staged in dW's, if the plan says so."""
        region, operands = self._region, self._region.operands
        tokens, hidden = region.terms[0].x.shape
        itemsize = operands.dtype.itemsize
        blocks = self._plan.staged_logits(hidden=hidden, vocab=operands.vocab, itemsize=itemsize)
        if blocks is None:
            return None
        name, layout, last = steps.logits_name(region), region.layout(operands.vocab), blocks.columns[-1]
        last_layout = region.layout(last.stop - last.start)
        rows = min(self._plan.chunk_rows, tokens - blocks.rows)
        elements = max(blocks.own_elements(last_layout.row_stride), rows * layout.row_stride)
        own = region.empty(name, (elements,), region.logits_dtype)
        rest = own[: rows * layout.row_stride].view(rows, layout.row_stride)
        weight = self._weights[0]
        assert weight is not None, "logits are staged in the memory of dW"
        borrowed = weight[: operands.vocab].view(-1).view(region.logits_dtype)
        staged = LogitsInBlocks.lay_out(blocks, borrowed, own, last_layout)
        if region.tape is not None:
            # Words leave the padding out, and call each block what it is a part of.
            rest = steps.named(rest.view(rows, operands.vocab), name)
            buffers = [steps.first_rows(buffer, blocks.rows, f"{name}[:, block]") for buffer in staged.buffers]
            staged = replace(staged, buffers=tuple(buffers))
        return StagedLogits(staged, LogitsBuffer(rest, layout))

    def gather(self, chunk: slice) -> list[Tensor]:
        """The rows of each term's x that belong to `chunk` of the rows, (C, H).

        Where rows are skipped, these are copies, in the memory that takes dX of the chunk afterwards if they fit.
        """
        outs = [None if memory is None else memory[chunk] for memory in self.room_for_x]
        return self._gathered(chunk, outs)

    def gather_staged(self, chunk: slice) -> list[Tensor]:
        """As `gather`, for the chunk whose logits are staged: dX of its rows is written before dW reads x.

        Copies are in the last rows of dX's memory, which that dX leaves alone, or in new memory if these are too few.
        """
        tokens = self._rows.total
        has_room = 2 * chunk.stop <= tokens
        outs = [memory[tokens - chunk.stop :] if has_room and memory is not None else None for memory in self.inputs]
        return self._gathered(chunk, outs)

    def _gathered(self, chunk: slice, outs: list[Tensor | None]) -> list[Tensor]:
        terms = zip(self._region.terms, outs, strict=True)
        return [self._rows.gather_chunk(term.x, chunk, out) for term, out in terms]

    def add(self, dlogits: LogitsBuffer, xs: list[Tensor], chunk: slice, bias_grad: Tensor | None) -> None:
        """Adds what the rows of `chunk` contribute, with dlogits (C, V) and their sum over the rows, (V,), for db.

        `xs` are (C, H), of each term, as gathered; used up.
        """
        region, matrix, frequent = self._region, dlogits.logits, self._frequent
        frequent_columns = None if frequent is None else frequent.columns_of(matrix)
        for at, (term, x) in enumerate(zip(region.terms, xs, strict=True)):
            of_input, of_weight, finish_input = self.inputs[at], self._weights[at], None
            if of_input is not None:
                # The matmul of dW hides the sum of dX over the ranks.
                finish_input = steps.start_input_gradient(region, matrix, term.weight)
            if of_weight is not None:
                out, again = of_weight[: matrix.shape[1]], not self._is_first
                steps.matmul_(region, "dW", out, matrix, x, accumulate=again)
                if frequent is not None and frequent_columns is not None and _is_in_16_bits(of_weight):
                    frequent.add(at, frequent_columns, x)
            if of_input is not None and finish_input is not None:
                finish_input(of_input[self._rows.of_part(chunk)])
        if self._bias is not None and bias_grad is not None:
            steps.add_(region, self._bias[: region.operands.vocab], bias_grad)
        self._is_first = False

    def add_staged(self, dlogits: LogitsInBlocks, xs: list[Tensor], chunk: slice) -> None:
        """As `add`, for the chunk whose logits are staged.

        dX comes first, summed where dW begins in memory, because dW is written over the logits.
        """
        region, operands = self._region, self._region.operands
        (term,), (of_input,), (weight,), (x,) = region.terms, self.inputs, self._weights, xs
        assert weight is not None, "logits are staged in the memory of dW"
        if of_input is not None:
            out = total = of_input[chunk]
            if out.dtype != operands.row_dtype:
                free = weight[: operands.vocab].view(-1).view(operands.row_dtype)
                total = steps.named(free[: out.numel()].view(out.shape), "dX_sum")
            for block, buffer in zip(region.loop(dlogits.columns, "block"), dlogits.buffers, strict=True):
                matrix = steps.named(buffer.logits, "dlogits[:, block]")
                steps.matmul_(region, "dX", total, matrix, term.weight[block], accumulate=block.start > 0)
            if total is not out:
                steps.copy_(region, out, total)
        for block, buffer in zip(region.loop(dlogits.columns, "block"), dlogits.buffers, strict=True):
            matrix = steps.named(buffer.logits, "dlogits[:, block]")
            steps.matmul_(region, "dW", weight[block], matrix, x)
        if self._frequent is not None:
            self._frequent.begin(weight)
        self._is_first = False

    def finish(self) -> Gradients:
        """The gradients in the dtypes of what they belong to; zeros where no chunk was added."""
        region, operands = self._region, self._region.operands
        weights: list[Tensor | None] = []
        for at, of_input in enumerate(self.inputs):
            weight, self._weights[at] = self._weights[at], None
            if weight is not None:
                if self._is_first:
                    weight[:] = 0
                elif self._frequent is not None and _is_in_16_bits(weight):
                    self._frequent.write(at, weight)
                weight = steps.rounded(region, weight, operands.dtype)
            weights.append(weight)
            if of_input is not None:
                self._rows.scatter_(of_input)
        return Gradients(tuple(self.inputs), tuple(weights), rounded_bias(self._bias, operands))


def _is_in_16_bits(weight_grad: Tensor | None) -> bool:
    return weight_grad is not None and weight_grad.dtype.itemsize == 2


class SavedPart(NamedTuple):
    """The gradient of the logits that were saved."""

    rows: slice
    """The first of the rows that are computed"""
    dlogits: Tensor
    """(S, V)"""
    bias_grad: Tensor | None
    """(V,) the sum of dlogits over the rows"""


class BlockSums:
    """dX and dW of one term while blocks of the vocabulary add to them.

    Each row of dW belongs to one block, so it is written once and needs no accumulator. dX is summed over blocks in
    float32: in its own memory if that is wide enough, or where dW of the first block will be, if there is room.

    `x` (N, H) are the term's `rows` that are computed; those whose logits were `saved` come first.
    """

    def __init__(self, region: Region, at: int, x: Tensor, *, rows: Rows, saved: SavedPart | None, first: slice):
        operands, self._region, self._saved, self._rows = region.operands, region, saved, rows
        self._at, self._term, self._x = at, region.terms[at], x
        self._others = slice(0 if saved is None else saved.rows.stop, x.shape[0])
        self._input: Tensor | None = None
        self._total: Tensor | None = None
        self._is_first = True
        self.weight = weight_memory(region, at, operands.dtype)
        self.needs_first_block = False
        """Whether dX is summed in the memory of the first block of dW, so that this block has to come last."""
        if self._term.input_grad:
            self._total = self._memory_for_sum(first)
            if region.tape is None and not operands.vocab:
                self._total.zero_()
            if saved is not None and self._input is not None:
                finish_input = steps.start_input_gradient(region, saved.dlogits, self._term.weight)
                finish_input(self._input[saved.rows])

    def _memory_for_sum(self, first: slice) -> Tensor:
        """(N - S, H) what dX is summed in."""
        region, operands = self._region, self._region.operands
        is_wide = operands.dtype == operands.row_dtype and not region.sums_input_grad
        if is_wide or self._saved is not None:
            self._input = input_memory(region, self._at, operands.dtype)
        if is_wide and self._input is not None:
            return self._input[self._others]
        shape, name = (self._others.stop - self._others.start, self._x.shape[1]), f"dX{self._at or ''}_sum"
        enough = columns_that_hold_input_sum(shape[0], operands.dtype)
        if self.weight is None or region.sums_input_grad or not 0 < enough <= first.stop:
            return region.empty(name, shape, operands.row_dtype)
        self.needs_first_block = True
        borrowed = self.weight.view(-1)[: enough * shape[1]].view(operands.row_dtype)
        return steps.named(borrowed.view(shape), name)

    @property
    def x(self) -> Tensor:
        """(N - S, H) the rows whose logits are computed again."""
        return self._x[self._others]

    def add(self, block: slice, dlogits: Tensor, *, is_last: bool) -> None:
        """Adds what a block contributes: dlogits (N - S, K), of the rows of `x`."""
        region, saved = self._region, self._saved
        if self._total is not None:
            weight = self._term.weight[block]
            steps.matmul_(region, "dX", self._total, dlogits, weight, accumulate=not self._is_first)
        self._is_first = False
        if is_last and self.needs_first_block:
            self._round_sum()
        if self.weight is not None:
            parts = [(dlogits, self.x)]
            if saved is not None:
                parts.append((saved.dlogits[:, block], self._x[saved.rows]))
            steps.weight_gradient_of_parts_(region, self.weight[block], parts)

    def _round_sum(self) -> None:
        region, total, self._total = self._region, self._total, None
        if total is None:
            return
        if self._input is None:
            self._input = input_memory(region, self._at, region.operands.dtype)
        assert self._input is not None
        others = self._input[self._rows.of_part(self._others)]
        if region.sums_input_grad:
            steps.start_sum_over_ranks(region, total)(others)
        elif total.dtype != self._input.dtype:
            note = "rounded once; dW takes its memory" if self.needs_first_block else "rounded once"
            steps.copy_(region, others, total, note=note)

    def finish_input(self) -> Tensor | None:
        """(T, H) dX."""
        self._round_sum()
        if self._input is not None:
            self._rows.scatter_(self._input)
        return self._input


def columns_that_hold_input_sum(rows: int, dtype: torch.dtype) -> int:
    """Of how many columns dW, in a dtype, takes the memory of a sum of dX in float32 over so many rows."""
    return rows * torch.float32.itemsize // dtype.itemsize


def rounded_bias(bias_grad: Tensor | None, operands: Operands) -> Tensor | None:
    """db in the bias's dtype."""
    return None if bias_grad is None or operands.bias is None else bias_grad.to(operands.bias.dtype)


def zero_unused_rows(gradient: Tensor, operands: Operands) -> None:
    """Zeros for the rows of a weight's gradient, or of a bias's, that are no columns of the logits."""
    if operands.vocab < gradient.shape[0]:
        gradient[operands.vocab :] = 0


class FrequentRows:
    """The rows of dW with the most targets, summed in float32 beside a dW that is summed in 16 bits.

    Token frequencies are Zipfian: a few rows of dW receive most updates, and most of the rounding error. With
    Zipf-distributed targets, 8192 × 128256 × 4096 and four chunks, the error of dW is 2.4e-3 without them, against
    1.5e-3 of a single matmul.

    At most `count` rows of dW, by the targets of the rows that are computed, (N,), each of which counts as much as its
    weight, or 1.
    """

    def __init__(self, region: Region, targets: steps.Targets, count: int, *, weights: Tensor | None = None):
        self._region, target = region, targets.column
        vocab = region.operands.vocab
        self._count = min(count, vocab)
        self._sums: list[Tensor | None] = [None] * len(region.terms)
        if isinstance(target, Value):
            of_targets = str(target) if weights is None else f"{target}, {weights}"
            columns = Value(target.tape, f"most_frequent({of_targets}, {self._count})", shape=(self._count,))
            self._columns = steps.let(region, "frequent", columns.to(torch.int64))
            return
        counted = torch.ones_like(target, dtype=torch.float32) if targets.is_here is None else targets.is_here.float()
        if weights is not None:
            counted = counted * weights.abs().float()
        occurrences = torch.zeros(vocab, dtype=torch.float32, device=target.device)
        occurrences.scatter_add_(0, target.reshape(-1), counted.reshape(-1))
        self._columns = occurrences.topk(self._count, sorted=False).indices

    def begin(self, weight_grad: Tensor) -> None:
        """Starts from what the first chunk has written to the head's dW (V, H), which was rounded once."""
        self._sums[0] = steps.let(self._region, "dW_frequent", weight_grad[self._columns].to(torch.float32))

    def columns_of(self, dlogits: Tensor) -> Tensor:
        """Of dlogits (C, V), the columns of these rows of dW."""
        rows = dlogits.shape[0]
        if isinstance(dlogits, Value):
            return Value(dlogits.tape, f"{dlogits}[:, frequent]", shape=(rows, self._count), dtype=dlogits.dtype)
        # gather, since index_select takes three times as long along this dimension.
        return dlogits.gather(1, self._columns.expand(rows, -1))

    def add(self, at: int, columns: Tensor, x: Tensor) -> None:
        """Adds what a chunk contributes to the dW of a term: `columns_of` dlogits, and x (C, H)."""
        region, total = self._region, self._sums[at]
        is_first = total is None
        if total is None:
            name, shape = f"dW{at or ''}_frequent", (self._count, x.shape[1])
            total = self._sums[at] = region.empty(name, shape, torch.float32)
        steps.matmul_(region, "dW", total, columns, x, accumulate=not is_first)

    def write(self, at: int, weight_grad: Tensor) -> None:
        """Puts the sums of a term into its dW (V, H), rounded once."""
        total = self._sums[at]
        assert total is not None
        if isinstance(weight_grad, Value):
            weight_grad[self._columns] = total
        else:
            weight_grad.index_copy_(0, self._columns, total.to(weight_grad.dtype))
