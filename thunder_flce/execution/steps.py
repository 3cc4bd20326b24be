"""The steps of a region: each launches something, or writes down what it would launch.

A step's words stand beside its call, so that what is printed, counted and predicted is what runs. See `record` for the
words. Legend: T tokens, N rows computed, C rows in a chunk, H hidden size, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from thunder_flce.execution import gradient_scaling, shards
from thunder_flce.execution.layout import VocabLayout
from thunder_flce.execution.matmul import matmul
from thunder_flce.execution.record import Value, as_value
from thunder_flce.execution.region import Region
from thunder_flce.execution.row_kernels.dispatch import RowWork, bytes_moved, library
from thunder_flce.execution.row_kernels.interface import (
    LogitsBuffer,
    LogitsInBlocks,
    RowStatistics,
    TargetColumns,
)
from thunder_flce.operation.loss import LogitsAtColumns, Row, RowCoefficients, logits_gradient
from thunder_flce.operation.moments import MOMENTS

EVERYTHING = slice(None)


class Targets(NamedTuple):
    """Where the targets of some rows are in a buffer of logits; all (C, K) with target weights."""

    column: Tensor
    """(C,) columns of the buffer"""
    is_here: Tensor | None = None
    """(C,) False in rows whose target is in another vocabulary block; `column` is then any column"""
    z: Tensor | None = None
    """(C,) the linear's output in these columns, where it is known"""


def let(region: Region, name: str, tensor: Tensor) -> Tensor:
    """The tensor; where a run is written down, by this name from here on."""
    if not isinstance(tensor, Value) or tensor.text == name:
        return tensor
    named = tensor.named(name)
    region.written_to.write(named, tensor)
    return named


def named(tensor: Tensor, name: str) -> Tensor:
    """The tensor, under another name where a run is written down."""
    return tensor.named(name) if isinstance(tensor, Value) else tensor


def logits_buffer(region: Region, rows: int, columns: int | None = None) -> LogitsBuffer:
    """Memory for the logits of `rows` rows, over the vocabulary or `columns` columns of it."""
    layout = region.layout(columns or region.operands.vocab)
    return LogitsBuffer(_padded_rows(region, logits_name(region), rows, layout, region.logits_dtype), layout)


def _padded_rows(region: Region, name: str, rows: int, layout: VocabLayout, dtype: torch.dtype) -> Tensor:
    """(rows, row stride) uninitialised memory. Words leave the padding out: there it is (rows, V)."""
    memory = region.empty(name, (rows, layout.row_stride), dtype)
    return memory.view(rows, layout.vocab) if isinstance(memory, Value) else memory


def first_rows(buffer: LogitsBuffer, count: int, name: str | None = None) -> LogitsBuffer:
    """The first rows of a buffer that is as large as the largest chunk; in words, its logits without the padding."""
    if not isinstance(buffer.padded, Value):
        return buffer.rows(slice(0, count))
    logits = buffer.padded.view(count, buffer.layout.vocab)
    return LogitsBuffer(logits.named(name or str(buffer.padded)), VocabLayout.contiguous(buffer.layout.vocab))


def logits_name(region: Region) -> str:
    """What the linears give: z, which is the logits themselves where no scale or softcap follows."""
    return "logits" if region.loss.logit_scale == 1 and region.loss.softcap is None else "z"


# The matmuls.


def logits_(region: Region, buffer: LogitsBuffer, xs: Sequence[Tensor], *, columns: slice = EVERYTHING) -> None:
    """Fills the buffer with z (C, V) = Σ x Wᵀ + b over the terms, over the vocabulary or a block of its columns.

    `xs` are (C, H), of each term. The smallest term is written first, and the head's matmul adds to it: at 2048 ×
    128256 × 4096 and a rank of 16 that takes 0.14 ms more than the head alone (H200), the other way round 0.36 ms.
    """
    for number, at in enumerate(sorted(range(len(xs)), key=lambda at: xs[at].shape[1])):
        bias, weight = None if number else region.bias, region.terms[at].weight
        if columns is not EVERYTHING:
            bias, weight = None if bias is None else bias[columns], weight[columns]
        matmul_(region, "logits", buffer.logits, xs[at], weight, bias=bias, accumulate=number > 0)
    if isinstance(buffer.padded, Value) and "[:, block]" not in buffer.padded.text:
        name_logits(region, buffer)


def matmul_(
    region: Region, kind: matmul.Kind, out: Tensor, a: Tensor, b: Tensor, *, bias: Tensor | None = None,
    accumulate: bool = False, parts: int = 1,
) -> None:  # fmt: skip
    """One of the region's matmuls, in `out`, added to what that holds if `accumulate`; see `matmul`.

    "logits" (C, V) = a (C, H) @ b (V, H)ᵀ + bias (V,), "dX" (C, H) = a (C, V) @ b (V, H), "dW" (V, H) = a (C, V)ᵀ @
    b (C, H). So many `parts` are summed in out before it is rounded.
    """
    is_invariant = region.plan.batch_invariant and kind == "logits"
    tuned = region.plan.tune_products and not is_invariant
    if region.tape is None:
        settings = {"accumulate": accumulate, "tune": tuned}
        if not region.operands.vocab:
            # A rank without columns: its dX is a sum over no columns, and its logits and dW are empty.
            if not accumulate:
                out.zero_()
        elif kind == "logits":
            matmul.logits_(out, a, b, bias=bias, batch_invariant=is_invariant, **settings)
        elif kind == "dX":
            matmul.input_gradient_(out, a, b, **settings)
        else:
            matmul.weight_gradient_(out, a, b, **settings)
        return
    work = matmul.MatmulWork.of(kind, out, a, b, tune=tuned, parts=parts)
    if bias is not None and region.layout(work.columns).padding and not is_invariant:
        work = work._replace(pads_biased_rows=True)
    notes = [f"the last {work.tail} columns apart"] if work.tail else []
    notes += ["in an order that no number of rows changes"] if is_invariant else []
    words = {"logits": f"{a} @ {b}.t()", "dX": f"{a} @ {b}", "dW": f"{a}.t() @ {b}"}[kind]
    region.written_to.write(
        out,
        words if bias is None else f"{words} + {bias}",
        note=", ".join(notes),
        runs_in=work.library,
        adds=accumulate,
        operations=work.operations,
        bytes=_bytes_beside_operations(work, out, adds=accumulate, has_bias=bias is not None),
        scratch=work.scratch_bytes,
    )


def weight_gradient_of_parts_(region: Region, out: Tensor, parts: list[tuple[Tensor, Tensor]]) -> None:
    """out (V, H) = the sum of dlogitsᵀ @ x over the parts (dlogits, x), rounded once."""
    if region.tape is None:
        matmul.weight_gradient_of_parts_(out, parts, tune=region.plan.tune_products)
        return
    for number, (dlogits, x) in enumerate(parts):
        matmul_(region, "dW", out, dlogits, x, accumulate=number > 0, parts=len(parts))


def _bytes_beside_operations(work: matmul.MatmulWork, out: Tensor, *, adds: bool, has_bias: bool) -> int:
    """What a matmul moves that the time of its operations does not cover.

    A sum reads and writes what it adds to once more. A third of that shows where the algorithm is measured: 0.15 of
    0.51 ms for dW of 512 × 128256 × 4096 (traces/h200/regions.jsonl). With a bias, logits take as much longer as half
    of them take to be written (4096 × 128256 × 768: 1.33 ms in place of 1.17). A small H leaves the matmul to memory.
    """
    if work.hidden < _MEMORY_BOUND_HIDDEN:
        return work.rows * work.columns * (2 if work.kind == "logits" and adds else 1) * 2
    if not adds:
        return out.nbytes // 2 if has_bias else 0
    moved = 2 * out.nbytes
    return moved // 3 if work.tune and work.kind != "dX" else moved


# Below so many multiplications for each logit, a matmul on an H200 takes as long as the logits take to be read: 660e12
# operations and 4.1e12 bytes a second.
_MEMORY_BOUND_HIDDEN = 160


# The row work.


def whole_rows(region: Region, buffer: LogitsBuffer, targets: Targets) -> tuple[shards.PartOfRows, Targets]:
    """What the loss needs of each row except its moments, and the targets with z at them; the logits are not changed.

    Where ranks divide the vocabulary, the results are those of the whole row, with the same bits on all ranks.
    """
    shard = region.shard
    if shard is not None and region.tape is None and not buffer.layout.vocab:
        dtype = region.operands.row_dtype
        part = shards.part_without_columns(targets.column, dtype, has_argmax=region.loss.needs_argmax)
        return shards.combined(shard, part), targets
    entry = target_entry(region, buffer, targets)
    targets = targets._replace(z=entry)
    part = shards.PartOfRows(*statistics(region, buffer), entry, argmax(region, buffer))
    if shard is None:
        return part, targets
    if region.tape is not None:
        has_several = entry.ndim > 1
        found = [vector for vector in part if vector is not None and not (has_several and vector is entry)]
        if has_several:
            _write_exchange(region, str(entry), f"summed({entry})", [entry])
        names = ", ".join(map(str, found))
        _write_exchange(region, names, f"combined({names})", found)
        return part, targets
    assert targets.is_here is not None
    part = part._replace(target_entry=torch.where(targets.is_here, entry.to(part.row_max.dtype), 0))
    if part.argmax is not None:
        largest = buffer.logits.gather(1, part.argmax[:, None]).squeeze(1).to(part.row_max.dtype)
        largest = largest if region.loss.logit_scale > 0 else -largest
        part = part._replace(argmax=part.argmax + shard.start, argmax_entry=largest)
    return shards.combined(shard, part), targets


def statistics(region: Region, buffer: LogitsBuffer) -> RowStatistics:
    """The maximum and the log of the sum of exponentials of each row."""
    if region.tape is None:
        of_parts = [region.kernels.statistics(buffer.rows(rows)) for rows in _rows_at_a_time(region, buffer)]
        return RowStatistics(*(joined(vectors) for vectors in zip(*of_parts, strict=True)))
    found = _statistics_values(region, buffer)
    _write(
        region, "row_max, row_log_sum", found[0], _statistics_words(region, buffer), RowWork.of("statistics", buffer)
    )
    return found


def _rows_at_a_time(region: Region, buffer: LogitsBuffer) -> list[slice]:
    """All rows at once or, where they must have the same bits in any batch, each alone on a CPU.

    There, PyTorch divides the sum over a row among threads only where there is a single row.
    """
    count, is_alone = buffer.padded.shape[0], region.plan.batch_invariant and not region.is_cuda
    return [slice(row, row + 1) for row in range(count)] if is_alone else [slice(0, count)]


def joined(parts: list[Tensor] | tuple[Tensor, ...]) -> Tensor:
    """The vectors, one after another."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def moments(
    region: Region, buffer: LogitsBuffer, found: RowStatistics, class_weight: Tensor | None
) -> dict[str, Tensor]:
    """The sums over each row that the loss and its outputs need: `Loss.moments`."""
    names, shard = region.loss.moments, region.shard
    if not names:
        return {}
    if region.tape is None:
        sums = dict.fromkeys(names, torch.zeros_like(found.row_max))
        if buffer.layout.vocab:
            of_parts = [
                region.kernels.moments(buffer.rows(rows), found.rows(rows), class_weight, names)
                for rows in _rows_at_a_time(region, buffer)
            ]
            sums = {name: joined([of_part[name] for of_part in of_parts]) for name in names}
        if shard is None:
            return sums
        return dict(zip(names, shards.summed(shard, [sums[name] for name in names]), strict=True))
    shifted = _u(region, buffer) - found.row_max
    probability = torch.exp(shifted - found.row_log_sum)
    weight = 1 if class_weight is None else class_weight
    words = [f"sum_v({MOMENTS[name].term(shifted, probability, weight)})" for name in names]
    work = RowWork.of("moments", buffer, class_weight=class_weight, names=names)
    _write(region, ", ".join(names), found.row_max, ", ".join(words), work)
    values: dict[str, Tensor] = {name: _row_value(region, name, buffer) for name in names}
    if shard is not None:
        _write_exchange(region, ", ".join(names), f"summed({', '.join(names)})", list(values.values()))
    return values


def argmax(region: Region, buffer: LogitsBuffer) -> Tensor | None:
    """(C,) int64, the columns of the largest logits; None where nobody asks for them."""
    if not region.loss.needs_argmax:
        return None
    # Of z: its map to the logits keeps the order, or turns it round.
    find = torch.argmax if region.loss.logit_scale > 0 else torch.argmin
    if region.tape is None:
        return find(buffer.logits, 1)
    found = _row_value(region, "argmax", buffer, dtype=torch.int64)
    region.written_to.write(found, f"{find.__name__}_v({buffer.logits})", bytes=buffer.padded.nbytes)
    return found


def target_entry(region: Region, buffer: LogitsBuffer, targets: Targets) -> Tensor:
    """z at each row's target, in the shape of the columns."""
    if region.tape is None:
        return _at(buffer.logits, targets.column)
    return let(region, f"{logits_name(region)}_y", as_value(buffer.logits).entry(as_value(targets.column)))


def statistics_and_gradient_(
    region: Region, logits: LogitsBuffer | LogitsInBlocks, target: Tensor, coefficients: RowCoefficients
) -> tuple[RowStatistics, Tensor]:
    """The statistics, and z at each row's target; the logits become their gradient in place."""
    if region.tape is None and target.ndim > 1:
        return _gradient_of_several_targets_(region, logits, target, coefficients)
    if region.tape is None:
        return region.kernels.statistics_and_gradient(logits, target, coefficients)
    whole = _whole(region, logits)
    if isinstance(logits, LogitsInBlocks):
        name_logits(region, whole)
    found, z_y = _statistics_values(region, whole), _row_value(region, f"{logits_name(region)}_y", whole)
    work = RowWork.of("statistics_and_gradient", logits, dtype=region.logits_dtype)
    at_target, words = as_value(whole.logits).entry(as_value(target)), _statistics_words(region, whole)
    dlogits = as_value(whole.logits).named("dlogits")
    gradient = _gradient_words(region, whole, found, coefficients, target)
    if target.ndim > 1:
        z_y = as_value(let(region, str(z_y), at_target))
        _write(region, "row_max, row_log_sum", found[0], words, work)
        at_targets = RowWork(method="target_gradient", dtype=region.logits_dtype, out_dtype=region.logits_dtype)
        note = "in place, then the targets' columns"
        _write(region, "dlogits", dlogits, gradient, *[at_targets] * len(logits.buffers), note=note)
        return found, z_y
    runs_in = _write(region, f"row_max, row_log_sum, {z_y}", found[0], f"{words}, {at_target}", work)
    note = "in place, same kernel" if runs_in == "Triton" else "in place"
    region.written_to.write(dlogits, gradient, note=note, runs_in=runs_in)
    return found, z_y


def _gradient_of_several_targets_(
    region: Region, logits: LogitsBuffer | LogitsInBlocks, target: Tensor, coefficients: RowCoefficients
) -> tuple[RowStatistics, Tensor]:
    """`statistics_and_gradient_` for targets (C, K): the kernel's pass, then their columns, from z as it was before."""
    blocks, z = [], torch.zeros_like(target, dtype=region.logits_dtype)
    for buffer, columns in zip(logits.buffers, logits.columns, strict=True):
        column, is_here = TargetColumns.of(target, columns)
        here = _at(buffer.logits, column)
        z = torch.where(is_here, here, z)
        blocks.append((buffer, Targets(column, is_here, here)))
    # The kernel writes the entry of one target, too, of which any gradient will do: it is written over.
    of_one = coefficients._replace(one_hot=coefficients.probability)
    found, _ = region.kernels.statistics_and_gradient(logits, target[:, 0], of_one)
    for buffer, targets in blocks:
        _write_at_targets_(region, buffer.logits, found, coefficients, targets)
    return found, z


def gradient_(
    region: Region,
    buffer: LogitsBuffer,
    found: RowStatistics,
    coefficients: RowCoefficients,
    targets: Targets,
    class_weight: Tensor | None = None,
    *,
    name: str = "dlogits",
) -> tuple[LogitsBuffer, Tensor | None]:
    """dz of some rows (C, V), in x's dtype, and its sum over the rows, (V,), if the bias needs a gradient.

    It takes the place of the logits where they have x's dtype, and new memory otherwise. The target's entry is written
    last, from z as it was before: (p − 1) in float32 keeps the digits that p, rounded to 16 bits, has lost near 1.
    """
    operands = region.operands
    if not buffer.layout.vocab:
        sums = region.zeros("", (0,), operands.row_dtype) if operands.bias_grad else None
        return buffer.in_dtype(operands.dtype), sums
    if coefficients.uniform is None:
        class_weight = None
    if region.tape is not None:
        return _written_gradient(region, buffer, found, coefficients, targets, class_weight, name)
    if targets.z is None:
        targets = targets._replace(z=target_entry(region, buffer, targets))
    dlogits, column_sums = region.kernels.gradient(
        buffer, found, coefficients, class_weight, dtype=operands.dtype, column_sums=operands.bias_grad
    )
    one_hot = _write_at_targets_(region, dlogits.logits, found, coefficients, targets, class_weight)
    if column_sums is not None:
        assert targets.z is not None
        logit_map = region.logit_map
        slope = None if logit_map.softcap is None else logit_map.slope(logit_map(targets.z.to(one_hot.dtype)))
        at_targets = one_hot if slope is None else one_hot * slope
        column_sums.index_add_(0, targets.column.reshape(-1), at_targets.reshape(-1), alpha=-1)
    return dlogits, column_sums


def _at(matrix: Tensor, column: Tensor) -> Tensor:
    """The entries of each row of a matrix in its column, (C,), or in its columns, (C, K)."""
    return matrix.gather(1, column) if column.ndim > 1 else matrix.gather(1, column[:, None]).squeeze(1)


def _write_at_targets_(
    region: Region, dlogits: Tensor, found: RowStatistics, coefficients: RowCoefficients, targets: Targets,
    class_weight: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Writes the gradient at the targets, with its one_hot term, and returns that, in the shape of the columns."""
    column, is_here, z = targets
    assert z is not None
    one_hot = coefficients.one_hot if is_here is None else torch.where(is_here, coefficients.one_hot, 0)
    at_target = None if class_weight is None else class_weight[column]
    index, of_each = column[:, None], coefficients._replace(one_hot=one_hot)
    if column.ndim > 1:
        # A row for each target. Those in one column write the same number, so that their order does not matter.
        index, count, total = column, column.shape[1], _summed_by_column(column, one_hot)
        found = RowStatistics(*(vector.repeat_interleave(count) for vector in found))
        vectors = coefficients._replace(one_hot=None)
        of_each = RowCoefficients(*(None if v is None else v.repeat_interleave(count) for v in vectors))
        of_each = of_each._replace(one_hot=total.reshape(-1))
    entry = region.kernels.target_gradient(z.reshape(-1), found, of_each, at_target, dtype=dlogits.dtype)
    dlogits.scatter_(1, index, entry.view(index.shape))
    return one_hot


def _summed_by_column(column: Tensor, values: Tensor) -> Tensor:
    """(C, K) for each of a row's columns, the sum of the row's values in the same column."""
    first = torch.searchsorted(column.sort(1).values, column)
    return torch.zeros_like(values).scatter_add_(1, first, values).gather(1, first)


def _written_gradient(
    region: Region, buffer: LogitsBuffer, found: RowStatistics, coefficients: RowCoefficients, targets: Targets,
    class_weight: Tensor | None, name: str,
) -> tuple[LogitsBuffer, Tensor | None]:  # fmt: skip
    dtype, sums, out = region.operands.dtype, region.operands.bias_grad, named(buffer.padded, name)
    note = "in place"
    if region.logits_dtype != dtype:
        out, note = _padded_rows(region, name, buffer.padded.shape[0], buffer.layout, dtype), "in new memory"
    dlogits = LogitsBuffer(out, buffer.layout)
    work = RowWork.of("gradient", buffer, coefficients, class_weight=class_weight, dtype=dtype, column_sums=sums)
    entry = replace(work, method="target_gradient", layouts=(), column_sums=False)
    words = _gradient_words(region, buffer, found, coefficients, targets.column, class_weight)
    note += ", with its sums over the rows" if sums else ""
    _write(region, name, dlogits.logits, words, work, entry, note=note)
    if not sums:
        return dlogits, None
    return dlogits, Value(
        region.written_to, f"sum_t({name})", shape=(buffer.layout.vocab,), dtype=region.operands.row_dtype
    )


def _gradient_words(
    region: Region, buffer: LogitsBuffer, found: RowStatistics, coefficients: RowCoefficients, target: Tensor,
    class_weight: Tensor | None = None,
) -> str:  # fmt: skip
    u = _u(region, buffer)
    is_target = Value(region.written_to, f"[v == {target}]", shape=(*u.shape, *target.shape[1:]))
    row = Row(max=found.row_max, log_sum=found.row_log_sum, target_logit=None, moments={})
    at = LogitsAtColumns(u=u, is_target=is_target, class_weight=class_weight)
    return str(logits_gradient(region.logit_map, at, row, coefficients))


def _statistics_words(region: Region, buffer: LogitsBuffer) -> str:
    u = _u(region, buffer)
    shifted = u - Value(region.written_to, "row_max", shape=u.shape[:1])
    return f"max_v({u}), log(sum_v({torch.exp(shifted)}))"


def name_logits(region: Region, buffer: LogitsBuffer) -> None:
    """Writes down how the logits u follow from z, where they are not the same."""
    if region.tape is None or _u(region, buffer).text != "u":
        return
    u = as_value(buffer.logits).named("u").to(region.operands.row_dtype)
    region.written_to.write(u, region.logit_map(buffer.logits), note="wherever they are read", runs_in="")


def _u(region: Region, buffer: LogitsBuffer) -> Value:
    """The logits: z itself, or its map."""
    z = as_value(buffer.logits)
    return z if region.logit_map(z) is z else Value(region.written_to, "u", shape=z.shape)


def _whole(region: Region, logits: LogitsBuffer | LogitsInBlocks) -> LogitsBuffer:
    """The logits as one buffer, which the words name, also where they are staged in blocks."""
    if isinstance(logits, LogitsBuffer):
        return logits
    rows, vocab = logits.buffers[0].padded.shape[0], region.operands.vocab
    value = Value(region.written_to, logits_name(region), shape=(rows, vocab), dtype=region.logits_dtype)
    return LogitsBuffer(value, region.layout(vocab))


def _statistics_values(region: Region, buffer: LogitsBuffer) -> RowStatistics:
    return RowStatistics(_row_value(region, "row_max", buffer), _row_value(region, "row_log_sum", buffer))


def _row_value(region: Region, name: str, buffer: LogitsBuffer, dtype: torch.dtype | None = None) -> Value:
    dtype = dtype or region.operands.row_dtype
    return Value(region.written_to, name, shape=buffer.padded.shape[:1], dtype=dtype)


def _write(region: Region, result: str, like: Tensor, words: str, work: RowWork, *more: RowWork, note: str = "") -> str:
    """Writes down a call of the row kernels, with others that belong to it; returns the library."""
    choice, device_type = region.plan.row_kernels, region.device_type
    runs_in = library(choice, work, device_type)
    fused = (work, *more) if runs_in == "nvFuser" else ()
    nbytes = bytes_moved(work, like.shape[0], runs_in)
    region.written_to.write(
        as_value(like).named(result), words, note=note, runs_in=runs_in, fusions=fused, is_row_work=True, bytes=nbytes
    )
    return runs_in


# What ranks tell each other.


def start_input_gradient(region: Region, dlogits: Tensor, weight: Tensor) -> Callable[[Tensor], None]:
    """Starts dX (C, H) = dlogits (C, V) @ weight (V, H), summed over the ranks that divide the vocabulary.

    Returns what puts it into memory (C, H), and only then computes it where there is nothing to sum.
    """
    if not region.sums_input_grad:
        return lambda out: matmul_(region, "dX", out, dlogits, weight)
    part = region.empty("dX_part", (dlogits.shape[0], weight.shape[1]), region.input_grad_dtype)
    matmul_(region, "dX", part, dlogits, weight)
    return start_sum_over_ranks(region, part)


def start_sum_over_ranks(region: Region, part: Tensor) -> Callable[[Tensor], None]:
    """Starts to sum dX of some rows, of which `part` (C, H) is what the columns of this rank contribute.

    Returns what waits for the sum and puts it, times `Shard.input_grad_factor`, into memory (C, H), rounded once.
    """
    shard = region.shard
    assert shard is not None
    part = rounded(region, part, region.input_grad_dtype)
    pending = None if region.tape is not None else shards.start_sum(shard, part)

    def finish(out: Tensor) -> None:
        if pending is None:
            _write_exchange(region, str(part), f"summed({part})", [part])
        copy_(region, out, part if pending is None else pending.wait(), factor=shard.input_grad_factor)

    return finish


def _write_exchange(region: Region, result: str, words: str, vectors: Sequence[Tensor]) -> None:
    """Writes down that ranks exchange vectors, which each then has for the whole vocabulary."""
    runs_in = "NCCL" if region.is_cuda else "gloo"
    moved = sum(vector.nbytes for vector in vectors)
    if vectors[0].ndim == 1 and region.shard is not None:
        # Those of all ranks arrive, packed in the dtype of rows.
        moved = region.shard.ranks * len(vectors) * vectors[0].nbytes
    region.written_to.write(result, words, note="over the ranks", runs_in=runs_in, bytes=moved)


# Rows and sums.


def add_(region: Region, out: Tensor, addend: Tensor) -> None:
    """out += addend, a vector over columns of the vocabulary."""
    if region.tape is None:
        out.add_(addend)
    else:
        region.written_to.write(out, addend, adds=True)


def copy_(region: Region, out: Tensor, source: Tensor, *, factor: int = 1, note: str = "rounded once") -> None:
    """out = source, or its product with a number, in out's dtype."""
    if region.tape is not None:
        words = source if factor == 1 else source * factor
        region.written_to.write(out, words, note=note, bytes=out.nbytes + source.nbytes)
    elif factor == 1:
        out.copy_(source)
    else:
        torch.mul(source, factor, out=out)


def rounded(region: Region, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in another dtype: itself, or new memory."""
    if region.tape is None or tensor.dtype == dtype:
        return tensor.to(dtype)
    out = region.empty(str(tensor), tensor.shape, dtype)
    copy_(region, out, tensor)
    return out


def scaled(gradient: Tensor, factor: Tensor) -> Tensor:
    """A finished gradient times the upstream gradient, (); in its place, unless autograd will read it again."""
    if not isinstance(gradient, Value):
        return gradient_scaling.scale_gradient(gradient, factor, may_overwrite=not gradient_scaling.graph_is_kept())
    runs_in = gradient_scaling.library(gradient.dtype, gradient.device)
    note = "skipped on the device where that is 1" if runs_in == "Triton" else "skipped where that is 1"
    gradient.tape.write(gradient, gradient * factor, note=note, runs_in=runs_in)
    return gradient


def scaled_rows(region: Region, gradient: Tensor, factors: Tensor) -> Tensor:
    """dX (T, H) for an upstream gradient of 1 at each row, times the rows' factors, (T,), in new memory."""
    dtype = region.operands.dtype
    if region.tape is None:
        # Both are float32 or float64, so that it is rounded once.
        return torch.mul(gradient, factors[:, None], out=torch.empty_like(gradient, dtype=dtype))
    out = region.empty("dX", tuple(gradient.shape), dtype)
    region.written_to.write(out, f"{gradient} * {factors}", note="each row", bytes=gradient.nbytes + out.nbytes)
    return out


def targets(region: Region, target: Tensor, block: slice | None = None) -> Targets:
    """Where targets are in the columns that are computed here, or in a block of them."""
    shard = region.shard
    if region.tape is not None or (shard is None and block is None):
        return Targets(target)
    first, block = 0 if shard is None else shard.start, block or slice(0, region.operands.vocab)
    return Targets(*TargetColumns.of(target, slice(first + block.start, first + block.stop)))
