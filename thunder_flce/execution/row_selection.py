"""Which rows of the region are computed.

Rows whose target is ignore_index contribute nothing, neither to the loss nor to a gradient, so they are dropped before
the first matmul. Their number must then be known on the host, which on CUDA takes one device synchronisation. It is
overlapped: valid rows are put first on the device, and the first logits are launched before the host asks.

Legend: T tokens, N rows computed, C rows in a chunk, H hidden size.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from thunder_flce.device import TILE_ROWS, on_device
from thunder_flce.execution import host_counts
from thunder_flce.execution.record import Value, as_value
from thunder_flce.execution.region import Region

# Rows that are copied at a time where a tensor is rearranged in place.
_MOVED_ROWS = 2048


@dataclass(frozen=True)
class Rows:
    """The rows that are computed, in order."""

    count: int
    """N"""

    total: int
    """T"""

    target: Tensor
    """(N,) int64, every one in [0, V); 0 in ignored rows. With target weights (N, K), 0 where ignored"""

    valid_count: Tensor
    """() int64, the number of targets that are not ignore_index"""

    order: Tensor | None = None
    """(T,) int64, the tokens: the N that the rows stand for, ascending, then the others; None where all T are computed,
    in their order"""

    valid: Tensor | None = None
    """(T,) bool, False in ignored rows; None where none of the rows is ignored"""

    target_weights: Tensor | None = None
    """(N, K) the weight of each of a row's targets, 0 for ignored ones; None where a row has one target"""

    first_targets: Tensor | None = None
    """(N, K) 1 for the first of a row's targets in a column, 0 for further and ignored ones; with `Loss.target_rest`"""

    @property
    def index(self) -> Tensor:
        """(N,) the tokens that the rows stand for, where there is an order."""
        assert self.order is not None
        return self.order[: self.count]

    def chunks(self, largest: int, first: int = 0) -> Iterator[slice]:
        """Slices that cover all rows: `first` of them, if any, then about equal ones of at most `largest`.

        Equal, because a small last chunk would read all of W and dW for the sake of a few rows.
        """
        first = min(first, self.count)
        if first:
            yield slice(0, first)
        rest = self.count - first
        if not rest:
            return
        rows = -(-rest // -(-rest // largest))
        if largest % TILE_ROWS == 0:
            rows = -(-rows // TILE_ROWS) * TILE_ROWS
        for start in range(first, self.count, rows):
            yield slice(start, min(start + rows, self.count))

    def gather_chunk(self, tensor: Tensor, chunk: slice, out: Tensor | None = None) -> Tensor:
        """The rows of `chunk` from a tensor (T, H) over all tokens: a view where all are taken, in order.

        Otherwise a copy, in `out` if that is given.
        """
        if self.order is None:
            return tensor[chunk]
        return torch.index_select(tensor, 0, self.index[chunk], out=out)

    def gather(self, vector: Tensor) -> Tensor:
        """(T,) to (N,)."""
        return vector if self.order is None else vector[self.index]

    def scatter(self, vector: Tensor, fill: float = 0) -> Tensor:
        """(N,) to (T,), `fill` for tokens that were left out."""
        if self.order is None:
            return vector
        return vector.new_full((self.total,), fill).index_copy_(0, self.index, vector)

    def of_part(self, chunk: slice) -> slice:
        """Where the rows of a chunk are in this rank's dX: in the same place, unless ranks divide the tokens."""
        return chunk

    def returned(self, vector: Tensor, fill: float = 0) -> Tensor:
        """What the caller gets of a vector (N,): one number for each of its tokens, `fill` for those left out."""
        return self.scatter(vector, fill)

    def received(self, vector: Tensor) -> Tensor:
        """(N,) of a vector that the caller has, one number for each of its tokens."""
        return self.gather(vector)

    def scatter_(self, tensor: Tensor) -> None:
        """Moves the first N rows of `tensor` (T, H) to their tokens, in place; 0 in all others."""
        if self.order is None:
            return
        numbers = torch.arange(self.count, device=tensor.device)
        source = torch.zeros(self.total, dtype=torch.int64, device=tensor.device).index_copy_(0, self.index, numbers)
        # From the end: the i-th valid row belongs to token i or a later one, so what a block is taken from has not been
        # written over yet, unless it is a part of the block itself.
        for start in reversed(range(0, self.total, _MOVED_ROWS)):
            block = slice(start, start + _MOVED_ROWS)
            tensor[block] = tensor.index_select(0, source[block])
        tensor.index_fill_(0, self.order[self.count :], 0)

    def mask_ignored(self, vector: Tensor, fill: float = 0) -> Tensor:
        """(N,) or (N, K) with `fill` in ignored rows."""
        return vector if self.valid is None else masked(self.valid, vector, fill)


class PlannedRows(Rows):
    """Rows while a run is written down: how many targets are ignored is not known, so all are counted."""

    def gather_chunk(self, tensor: Tensor, chunk: slice, out: Tensor | None = None) -> Tensor:
        """The rows that `select_rows` has named x; whether they are copies is not known."""
        return tensor[chunk]

    def scatter(self, vector: Tensor, fill: float = 0) -> Tensor:
        """(N,) to (T,), `fill` for tokens that were left out."""
        if self.order is None:
            return vector
        words = f"scatter({vector}, {fill})" if fill else f"scatter({vector})"
        return Value(as_value(vector).tape, words, shape=vector.shape, dtype=vector.dtype)

    def scatter_(self, tensor: Tensor) -> None:
        """Writes down that the rows of `tensor` are moved to their tokens."""
        if self.order is not None:
            as_value(tensor).tape.write(tensor, f"scatter({tensor})")


def _host_waits(region: Region) -> bool:
    """Whether the host waits for what the device finds out about the targets: how many are valid, and if any is wrong.

    It never does while a CUDA graph is captured. A CPU has nothing to wait for.
    """
    target = region.operands.target
    if not target.is_cuda or region.plan.ignored_rows != "skip":
        return not target.is_cuda
    # Streams are asked for by the current device, which need not be the target's.
    with on_device(target.device):
        return not torch.cuda.is_current_stream_capturing()


def are_valid(region: Region, target: Tensor) -> Tensor:
    """(T,) bool, False in rows that are ignored."""
    valid, token_weights = _in_any(target != region.loss.ignore_index), region.operands.token_weights
    return valid if token_weights is None else valid & (token_weights != 0)


def _in_any(of_targets: Tensor) -> Tensor:
    """(T,) bool, whether it holds for any of a row's targets, from (T,) or (T, K)."""
    return of_targets if of_targets.ndim == 1 else of_targets.any(1)


def masked(valid: Tensor, tensor: Tensor, fill: float = 0) -> Tensor:
    """(N,) or (N, K) with `fill` in rows that are not valid, (N,)."""
    return torch.where(valid if tensor.ndim == 1 else valid.unsqueeze(-1), tensor, fill)


def with_target_weights(region: Region, rows: Rows) -> Rows:
    """The rows with the weights of their targets, if a row has several; ignored ones become 0, as their weights do."""
    weights = region.operands.target_weights
    if weights is None:
        return rows
    counts = rows.target != region.loss.ignore_index
    weights = torch.where(counts, rows.mask_ignored(rows.gather(weights)), 0)
    first = _first_in_column(rows.target, counts).to(weights.dtype) if region.loss.target_rest else None
    return replace(rows, target=torch.where(counts, rows.target, 0), target_weights=weights, first_targets=first)


def _first_in_column(target: Tensor, counts: Tensor) -> Tensor:
    """(N, K) bool, True for the first of a row's targets in a column, of those that count."""
    columns, order = torch.where(counts, target, -1).sort(dim=1, stable=True)
    is_first = torch.ones_like(counts)
    is_first[:, 1:] = columns[:, 1:] != columns[:, :-1]
    return torch.zeros_like(counts).scatter(1, order, is_first) & counts


def _ignores_rows(region: Region) -> bool:
    """Whether rows can be ignored at all."""
    return region.loss.ignores_rows or region.operands.token_weights is not None


def _are_skipped(region: Region) -> bool:
    """Whether ignored rows are left out, where the host knows how many there are."""
    return region.plan.ignored_rows == "skip" and _ignores_rows(region) and not region.loss.needs_every_row


class RowSelection:
    """Checks the targets of a region and chooses the rows to compute."""

    def __init__(self, region: Region):
        self._region = region
        # In a narrow dtype, V and ignore_index would wrap around before they are compared with.
        self._target = target = region.operands.target.long()
        is_label = target != region.loss.ignore_index
        self._is_wrong = is_label & (target != target.clamp(0, region.operands.whole_vocab - 1))
        self._valid = are_valid(region, target)
        self._counts = torch.stack([self._valid, _in_any(self._is_wrong)]).sum(1)
        self._host_waits = _host_waits(region)
        self._valid_first = self._arrived = None
        if self._host_waits and target.is_cuda:
            if _are_skipped(region):
                self._valid_first = _valid_first(self._valid)
            self._host_counts = self._counts.to("cpu", non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(target.device))

    def first_rows(self, largest: int, outs: Sequence[Tensor | None]) -> list[Tensor] | None:
        """Up to `largest` rows of each term's x that a matmul can start with before `rows` is called.

        Views, or copies in the first rows of `outs`, (T, H) for each term, or in new memory where one is None. None
        where there is nothing to wait for.
        """
        if self._arrived is None:
            return None
        count = _first_count(self._target.shape[0], largest)
        xs = [term.x for term in self._region.terms]
        if self._valid_first is None:
            return [x[:count] for x in xs]
        index = self._valid_first[:count]
        return [
            torch.index_select(x, 0, index, out=None if out is None else out[:count])
            for x, out in zip(xs, outs, strict=True)
        ]

    def rows(self) -> Rows:
        """The rows to compute.

        Raises:
            IndexError: where a target is neither in [0, V) nor ignore_index. Where the host may not wait for the
                device, a device-side assertion instead, as in PyTorch.
        """
        target, vocab, ignore_index = self._target, self._region.operands.whole_vocab, self._region.loss.ignore_index
        valid_count = self._counts[0]
        if not self._host_waits:
            message = f"target is neither in [0, {vocab}) nor ignore_index ({ignore_index})"
            torch._assert_async(self._counts[1] == 0, message)
            # The replacement only matters to a kernel that runs before the assertion stops the device.
            target = torch.where(self._is_wrong, 0, target)
            return with_target_weights(self._region, _all_rows(self._region, target, valid_count, self._valid))
        if self._arrived is None:
            count, wrong = self._counts.tolist()
        else:
            self._arrived.synchronize()
            count, wrong = self._host_counts.tolist()
        if wrong:
            what = "values" if target.ndim == 1 else "rows with values"
            raise IndexError(
                f"target has {wrong} of {target.shape[0]} {what} that are neither in [0, {vocab}), the "
                f"vocabulary, nor ignore_index ({ignore_index}); the first is {target[self._is_wrong][0].item()}"
            )
        if _are_skipped(self._region):
            host_counts.remember(valid_count, count)
            rows = _valid_rows(target, valid_count, self._valid, count, self._valid_first)
        else:
            rows = _all_rows(self._region, target, valid_count, self._valid)
        return with_target_weights(self._region, rows)


def _first_count(tokens: int, largest: int) -> int:
    """How many rows a matmul starts with: a quarter in whole tiles at most, since more would often be ignored ones."""
    return min(largest, -(-tokens // (4 * TILE_ROWS)) * TILE_ROWS)


class PlannedSelection:
    """In place of `RowSelection` while a run is written down."""

    def __init__(self, region: Region):
        self._region = region
        waits = "the host waits for their number while the first logits are computed"
        self._rows = _planned_rows(region, are_skipped=_are_skipped(region), waits=waits)

    def first_rows(self, largest: int, outs: Sequence[Tensor | None]) -> None:
        """Counts the memory of the rows that are copied for the first logits.

        The matmul of these logits is counted with the first chunk.
        """
        region, rows = self._region, self._rows
        if not region.is_cuda or rows.order is None:
            return
        count = _first_count(rows.total, largest)
        copied = sum(term.x[:count].nbytes for term, out in zip(region.terms, outs, strict=True) if out is None)
        # It is free again when the first logits are there.
        region.written_to.allocate(copied)

    def rows(self) -> Rows:
        """The rows to compute."""
        return self._rows


Selection = RowSelection | PlannedSelection


def select_rows(region: Region) -> Selection:
    """Starts to choose the rows to compute, without waiting for the device."""
    return PlannedSelection(region) if region.tape else RowSelection(region)


def reselect_rows(region: Region, valid_count: Tensor) -> Rows:
    """The rows that `select_rows` chose in the forward, for the backward; the targets were checked there.

    The host waits for `valid_count` only where it is not the tensor that the forward returned, but a copy.
    """
    if region.tape is not None:
        return _planned_rows(region, are_skipped=_are_skipped(region))
    target = region.operands.target.long()
    valid = are_valid(region, target)
    if _are_skipped(region) and _host_waits(region):
        rows = _valid_rows(target, valid_count, valid, host_counts.value_of(valid_count), None)
    else:
        rows = _all_rows(region, target, valid_count, valid)
    return with_target_weights(region, rows)


def every_row(region: Region, valid_count: Tensor) -> Rows:
    """All rows, whichever of them the forward computed: the host does not wait for their number.

    Without target weights: those are in the gradient for an upstream gradient of 1.
    """
    if region.tape is not None:
        return _planned_rows(region, are_skipped=False)
    target = region.operands.target.long()
    return _all_rows(region, target, valid_count, are_valid(region, target))


def _planned_rows(region: Region, *, are_skipped: bool, waits: str = "") -> PlannedRows:
    """All rows; `waits` is a note that the host waits for the number of valid ones, where it does."""
    tape, target, target_weights = region.written_to, region.operands.target, region.operands.target_weights
    is_label = f"y != {region.loss.ignore_index}"
    if _ignores_rows(region):
        labelled = "" if not region.loss.ignores_rows else is_label if target_weights is None else f"any_k({is_label})"
        weighted = "w_t != 0" if region.operands.token_weights is not None else ""
        words = " & ".join(f"({part})" if labelled and weighted else part for part in (labelled, weighted) if part)
        tape.write("valid, valid_count", f"{words}, sum({words})")
    valid = Value(tape, "valid", shape=target.shape[:1], dtype=torch.bool)
    if are_skipped:
        names = [str(term.x) for term in region.terms] + ["y"] + ["q"] * (target_weights is not None)
        words = ", ".join(f"{name}[valid]" for name in names)
        tape.write(", ".join(names), words, note=waits if region.is_cuda else "")
    elif _ignores_rows(region) and target_weights is None:
        tape.write("y", "where(valid, y, 0)")
    first_targets = None
    if target_weights is not None and region.loss.target_rest:
        first_targets = Value(tape, "first", shape=target.shape, dtype=target_weights.dtype)
        tape.write(first_targets, f"first_in_column(y, {is_label})")
    if target_weights is not None and region.loss.ignores_rows:
        tape.write("q, y", f"where({is_label}, q, 0), where({is_label}, y, 0)")
    return PlannedRows(
        count=target.shape[0],
        total=target.shape[0],
        target=Value(tape, "y", shape=target.shape, dtype=torch.int64),
        valid_count=Value(tape, "valid_count", dtype=torch.int64),
        order=valid if are_skipped else None,
        valid=valid if _ignores_rows(region) and not are_skipped else None,
        target_weights=target_weights,
        first_targets=first_targets,
    )


def _valid_first(valid: Tensor) -> Tensor:
    """The tokens, valid ones first: a stable sort knows their order without their number."""
    return torch.argsort(valid, descending=True, stable=True)


def _all_rows(region: Region, target: Tensor, valid_count: Tensor, valid: Tensor) -> Rows:
    total = target.shape[0]
    if not _ignores_rows(region):
        return Rows(total, total, target, valid_count)
    return Rows(total, total, masked(valid, target), valid_count, valid=valid)


def _valid_rows(target: Tensor, valid_count: Tensor, valid: Tensor, count: int, valid_first: Tensor | None) -> Rows:
    total = target.shape[0]
    if count == total:
        return Rows(total, total, target, valid_count)
    order = _valid_first(valid) if valid_first is None else valid_first
    return Rows(count, total, target.index_select(0, order[:count]), valid_count, order)
