"""Which rows of the region are computed.

Rows whose target is ignore_index contribute nothing, neither to the loss nor to a gradient, so they are dropped before
the first matmul. Their number must then be known on the host, which on CUDA takes one device synchronisation. It is
overlapped: valid rows are put first on the device, and the first logits are launched before the host asks.

Where the host may not wait, all rows keep their place in a chunk, but valid rows come first all the same, and zeros
follow. Then matmuls can end after the valid rows, whose number the device knows.

Legend: T tokens, N rows computed, C rows in a chunk, H hidden size, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from thunder_flce.device import TILE_ROWS
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
    """(N,) int64, every one in [0, V); 0 in ignored rows"""

    valid_count: Tensor
    """() int64, the number of targets that are not ignore_index"""

    index: Tensor | None
    """(N,) int64, the tokens that the rows stand for, those of valid rows ascending; None where the rows are all T"""

    valid: Tensor | None
    """(N,) bool, False in ignored rows, which come last where there is an index; None where there are none"""

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

    def valid_rows(self, chunk: slice) -> Tensor | None:
        """() int32, how many rows of `chunk` are valid, if those come first and only the device knows their number."""
        if self.index is None or self.valid is None:
            return None
        start, stop, _ = chunk.indices(self.count)
        return (self.valid_count - start).clamp(0, stop - start).to(torch.int32)

    def gather_chunk(self, tensor: Tensor, chunk: slice, out: Tensor | None = None) -> Tensor:
        """The rows of `chunk` from a tensor (T, H) over all tokens: a view where all are taken, in order.

        Otherwise a copy, in `out` if that is given, with zeros in place of rows that come last because they are
        ignored.
        """
        if self.index is None:
            return tensor[chunk]
        if self.valid is None:
            return torch.index_select(tensor, 0, self.index[chunk], out=out)
        return _take_rows(tensor, torch.where(self.valid[chunk], self.index[chunk], -1), out)

    def gather(self, tensor: Tensor) -> Tensor:
        """(T, …) to (N, …)."""
        return tensor if self.index is None else tensor.index_select(0, self.index)

    def scatter(self, tensor: Tensor, fill: float = 0) -> Tensor:
        """(N, …) to (T, …), `fill` for tokens that were left out."""
        if self.index is None:
            return tensor
        everywhere = tensor.new_full((self.total, *tensor.shape[1:]), fill)
        return everywhere.index_copy_(0, self.index, self.mask_ignored(tensor, fill))

    def scatter_(self, tensor: Tensor) -> None:
        """Moves the valid ones of the first N rows of `tensor` (T, H) to their tokens, in place; 0 in all others."""
        if self.index is None:
            return
        numbers = torch.arange(self.count, device=tensor.device)
        numbers = numbers if self.valid is None else torch.where(self.valid, numbers, -1)
        source = torch.full((self.total,), -1, device=tensor.device).index_copy_(0, self.index, numbers)
        # From the end: the i-th valid row belongs to token i or a later one, so what a block is taken from has not been
        # written over yet, unless it is a part of the block itself.
        for start in reversed(range(0, self.total, _MOVED_ROWS)):
            block = slice(start, min(start + _MOVED_ROWS, self.total))
            tensor[block] = _take_rows(tensor, source[block])

    def mask_ignored(self, tensor: Tensor, fill: float = 0) -> Tensor:
        """(N, …) with `fill` in ignored rows."""
        return tensor if self.valid is None else torch.where(_beside(self.valid, tensor), tensor, fill)


@dataclass(frozen=True)
class PlannedRows(Rows):
    """Rows while a run is written down: how many targets are ignored is not known, so all are counted."""

    on_device: bool = False
    """Whether only the device will know how many are valid."""

    def valid_rows(self, chunk: slice) -> Tensor | None:
        """Something, where the device would know the number."""
        return self.valid_count if self.on_device else None

    def gather_chunk(self, tensor: Tensor, chunk: slice, out: Tensor | None = None) -> Tensor:
        """What `select_rows` has written down. Its memory counts where it is certain that rows are copied."""
        rows = as_value(tensor)[chunk]
        if not self.on_device or out is not None:
            return rows
        return Value(rows.tape, str(rows), shape=rows.shape, dtype=rows.dtype, storage=rows.tape.allocate(rows.nbytes))

    def gather(self, tensor: Tensor) -> Tensor:
        """(T, …) to (N, …)."""
        return tensor if self.index is None else tensor[self.index]

    def scatter(self, tensor: Tensor, fill: float = 0) -> Tensor:
        """(N, …) to (T, …), `fill` for tokens that were left out."""
        if self.index is None:
            return tensor
        words = f"scatter({tensor}, {fill})" if fill else f"scatter({tensor})"
        return Value(as_value(tensor).tape, words, shape=tensor.shape, dtype=tensor.dtype)

    def scatter_(self, tensor: Tensor) -> None:
        """Writes down that the rows of `tensor` are moved to their tokens."""
        if self.index is not None:
            as_value(tensor).tape.write(tensor, f"scatter({tensor})")

    def mask_ignored(self, tensor: Tensor, fill: float = 0) -> Tensor:
        """(N, …) with `fill` in ignored rows."""
        return tensor if self.valid is None else torch.where(self.valid, tensor, fill)


@dataclass(frozen=True, kw_only=True)
class RowPolicy:
    """What may be done about ignored rows."""

    ignored_rows: str = "skip"
    """As `Options.ignored_rows`."""

    every_row: bool = False
    """Whether ignored rows are computed whatever the user wants."""

    @classmethod
    def of(cls, region: Region) -> "RowPolicy":
        """What a region's plan and loss ask for."""
        return cls(ignored_rows=region.plan.ignored_rows, every_row=region.loss.needs_every_row)

    def waits_for(self, target: Tensor) -> bool:
        """Whether the host waits for what the device finds out about `target`: how many are valid, and if any is wrong.

        It never does while a CUDA graph is captured.
        """
        if target.is_cuda:
            # Streams are asked for by the current device, which need not be the target's.
            with torch.cuda.device(target.device):
                return self.ignored_rows == "skip" and not torch.cuda.is_current_stream_capturing()
        return self.ignored_rows == "skip"

    def skips(self, target: Tensor) -> bool:
        """Whether ignored rows are left out."""
        is_possible = self.waits_for(target) or self.ignored_rows == "skip_on_device"
        return is_possible and not self.every_row


class RowSelection:
    """Checks the targets and chooses the rows to compute.

    Args:
        region: whose targets are (T,) integers.
        policy: what may be done about ignored rows.
    """

    def __init__(self, region: Region, policy: RowPolicy):
        self._region = region
        # In a narrow dtype, V and ignore_index would wrap around before they are compared with.
        self._target = target = region.operands.target.long()
        self._vocab = region.operands.vocab
        self._ignore_index = region.loss.ignore_index
        self._valid = target != self._ignore_index
        self._is_wrong = self._valid & (target != target.clamp(0, self._vocab - 1))
        self._counts = torch.stack([self._valid, self._is_wrong]).sum(1)
        self._waits = policy.waits_for(target)
        self._skips = policy.skips(target)
        self._valid_first = self._arrived = None
        if self._waits and target.is_cuda:
            if self._skips:
                # A stable sort puts the valid rows first, in order, without knowing their number.
                self._valid_first = _valid_first(self._valid)
            self._host_counts = self._counts.to("cpu", non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(target.device))

    def first_rows(self, largest: int, outs: Sequence[Tensor | None]) -> list[Tensor] | None:
        """Up to `largest` rows of each term's x that a matmul can start with before `rows` is called.

        Args:
            largest: how many rows at most.
            outs: memory for each term's rows, (T, H), or None where there is none.

        Returns:
            None where there is nothing to wait for. Otherwise views, or copies in the first rows of `outs`.
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
        target, vocab, ignore_index = self._target, self._vocab, self._ignore_index
        valid_count = self._counts[0]
        if not self._waits:
            message = f"target is neither in [0, {vocab}) nor ignore_index ({ignore_index})"
            torch._assert_async(self._counts[1] == 0, message)
            # The clamp only matters to a kernel that runs before the assertion stops the device.
            return _rows_without_waiting(target.clamp(0, vocab - 1), valid_count, self._valid, self._skips)
        if self._arrived is None:
            count, wrong = self._counts.tolist()
        else:
            self._arrived.synchronize()
            count, wrong = self._host_counts.tolist()
        if wrong:
            raise IndexError(
                f"target has {wrong} of {target.shape[0]} values that are neither in [0, {vocab}), the "
                f"vocabulary, nor ignore_index ({ignore_index}); the first is {target[self._is_wrong][0].item()}"
            )
        if not self._skips:
            return _all_rows(target, valid_count, self._valid)
        return _valid_rows(target, valid_count, self._valid, count, self._valid_first)


def _first_count(tokens: int, largest: int) -> int:
    """How many rows a matmul starts with: a quarter in whole tiles at most, since more would often be ignored ones."""
    return min(largest, -(-tokens // (4 * TILE_ROWS)) * TILE_ROWS)


class PlannedSelection:
    """In place of `RowSelection` while a run is written down."""

    def __init__(self, region: Region):
        self._region = region
        self._rows = _planned_rows(region, "the host waits for their number while the first logits are computed")

    def first_rows(self, largest: int, outs: Sequence[Tensor | None]) -> None:
        """Nothing: the matmul that hides the wait for the device is counted with the first chunk's.

        What counts is the memory of rows that are copied for it.
        """
        region, rows = self._region, self._rows
        if not region.is_cuda or rows.index is None or rows.on_device:
            return
        count = _first_count(rows.total, largest)
        copied = sum(term.x[:count].nbytes for term, out in zip(region.terms, outs, strict=True) if out is None)
        # It is free again when the first logits are there.
        region.written_to.allocate(copied)

    def rows(self) -> Rows:
        """The rows to compute."""
        return self._rows


def select_rows(region: Region, policy: RowPolicy | None = None) -> RowSelection | PlannedSelection:
    """Starts to choose the rows to compute, by the region's policy if none is given, without waiting for the device."""
    return PlannedSelection(region) if region.tape else RowSelection(region, policy or RowPolicy.of(region))


def reselect_rows(region: Region, valid_count: Tensor) -> Rows:
    """The rows that `select_rows` chose in the forward, for the backward; the targets were checked there.

    Args:
        region: as in the forward.
        valid_count: () saved by the forward.
    """
    if region.tape is not None:
        return _planned_rows(region, "the host waits for their number")
    policy, target = RowPolicy.of(region), region.operands.target.long()
    valid = target != region.loss.ignore_index
    if not (policy.skips(target) and policy.waits_for(target)):
        return _rows_without_waiting(target, valid_count, valid, policy.skips(target))
    return _valid_rows(target, valid_count, valid, int(valid_count), None)


def _planned_rows(region: Region, waits: str) -> PlannedRows:
    """All rows.

    Args:
        region: the region.
        waits: a note that the host waits for the number of valid rows, where it does.
    """
    tape, operands = region.written_to, region.operands
    target, ignore_index = operands.target, region.loss.ignore_index

    def row_value(text: str, dtype: torch.dtype) -> Value:
        return Value(tape, text, shape=target.shape, dtype=dtype)

    tape.write("valid, valid_count", f"y != {ignore_index}, sum(y != {ignore_index})")
    valid, y = row_value("valid", torch.bool), row_value("y", torch.int64)
    skips = region.plan.ignored_rows != "compute" and not region.loss.needs_every_row
    if skips:
        names = [str(term.x) for term in region.terms] + ["y"]
        on_device = region.plan.ignored_rows == "skip_on_device"
        note = "zeros follow" if on_device else waits
        words = ", ".join(f"{name}[valid]" for name in names)
        tape.write(", ".join(names), words, note=note if region.is_cuda else "")
    else:
        tape.write("y", "where(valid, y, 0)")
    return PlannedRows(
        count=target.shape[0],
        total=target.shape[0],
        target=y,
        valid_count=Value(tape, "valid_count", dtype=torch.int64),
        index=valid if skips else None,
        valid=None if skips else valid,
        on_device=skips and region.plan.ignored_rows == "skip_on_device",
    )


def _valid_first(valid: Tensor) -> Tensor:
    return torch.argsort(valid, descending=True, stable=True)


def _take_rows(tensor: Tensor, index: Tensor, out: Tensor | None = None) -> Tensor:
    """(N, H) rows of a tensor (T, H), and zeros for a negative index."""
    taken = torch.index_select(tensor, 0, index.clamp(min=0), out=out)
    return taken.masked_fill_(_beside(index < 0, taken), 0)


def _beside(vector: Tensor, tensor: Tensor) -> Tensor:
    """(N,) as (N, 1, …), to go with a tensor (N, …)."""
    return vector.view(-1, *[1] * (tensor.dim() - 1))


def _rows_without_waiting(target: Tensor, valid_count: Tensor, valid: Tensor, skips: bool) -> Rows:
    rows = _all_rows(target, valid_count, valid)
    if not skips:
        return rows
    index = _valid_first(valid)
    is_valid = torch.arange(rows.count, device=target.device) < valid_count
    return replace(rows, target=rows.target[index], index=index, valid=is_valid)


def _all_rows(target: Tensor, valid_count: Tensor, valid: Tensor) -> Rows:
    total = target.shape[0]
    target = torch.where(valid, target, 0)
    return Rows(count=total, total=total, target=target, valid_count=valid_count, index=None, valid=valid)


def _valid_rows(target: Tensor, valid_count: Tensor, valid: Tensor, count: int, valid_first: Tensor | None) -> Rows:
    total = target.shape[0]
    if count == total:
        return Rows(count=total, total=total, target=target, valid_count=valid_count, index=None, valid=None)
    index = (_valid_first(valid) if valid_first is None else valid_first)[:count]
    target = target.index_select(0, index)
    return Rows(count=count, total=total, target=target, valid_count=valid_count, index=index, valid=None)
