"""Which rows of the region are computed.

Rows whose target is ignore_index contribute nothing, neither to the loss nor to a gradient, so they can leave before
the first product. How many stay must then be known on the host, which on CUDA means waiting for the device once. The
wait is hidden: valid rows are packed first on the device, and the first products are launched before asking.

Where the host may not wait, all rows keep their place in a chunk, but valid rows are packed first all the same, and
zeros follow. Then products can end after the valid rows, whose number the device knows.

Legend: T tokens, N rows computed, C rows in a chunk, H hidden size, V vocabulary.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from thunder_flce.planning.plan import TILE_ROWS, triton_available

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

    def chunks(self, first: int, largest: int):
        """Slices that cover all rows: `first` of them, then about equal ones of at most `largest`.

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

    def take(self, tensor: Tensor, chunk: slice, out: Tensor | None = None) -> Tensor:
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
        return everywhere.index_copy_(0, self.index, self.only_valid(tensor, fill))

    def spread_(self, tensor: Tensor) -> None:
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

    def only_valid(self, tensor: Tensor, fill: float = 0) -> Tensor:
        """(N, …) with `fill` in ignored rows."""
        return tensor if self.valid is None else torch.where(_beside(self.valid, tensor), tensor, fill)


@dataclass(frozen=True, kw_only=True)
class RowPolicy:
    """What may be done about ignored rows."""

    ignored_rows: str = "skip"
    """As `Options.ignored_rows`."""

    every_row: bool = False
    """Whether ignored rows are computed whatever the user wants."""

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
        target: (T,) integers.
        vocab: V.
        ignore_index: the target that marks a row as ignored; may lie in [0, V).
        policy: what may be done about ignored rows.
    """

    def __init__(self, target: Tensor, vocab: int, ignore_index: int, policy: RowPolicy):
        # In a narrow dtype, V and ignore_index would wrap around before they are compared with.
        self._target = target = target.long()
        self._vocab = vocab
        self._ignore_index = ignore_index
        self._valid = target != ignore_index
        self._is_wrong = self._valid & (target != target.clamp(0, vocab - 1))
        self._counts = torch.stack([self._valid, self._is_wrong]).sum(1)
        self._waits = policy.waits_for(target)
        self._skips = policy.skips(target)
        self._packed = self._arrived = None
        if self._waits and target.is_cuda:
            if self._skips:
                # A stable sort puts the valid rows first, in order, without knowing their number.
                self._packed = _valid_first(self._valid)
            self._host_counts = self._counts.to("cpu", non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(target.device))

    def first_rows(self, x: Tensor, largest: int, out: Tensor | None = None) -> Tensor | None:
        """Up to `largest` rows of x (T, H) that a product can start with before `rows` is called, packed.

        A quarter of all rows, in whole tiles, at most: more would often be ignored ones. None where there is nothing to
        wait for. They are a view, or a copy: in the first rows of `out` (T, H), if that is given.
        """
        if self._arrived is None:
            return None
        quarter = -(-self._target.shape[0] // (4 * TILE_ROWS)) * TILE_ROWS
        count = min(largest, quarter)
        if self._packed is None:
            return x[:count]
        return torch.index_select(x, 0, self._packed[:count], out=None if out is None else out[:count])

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
        return _valid_rows(target, valid_count, self._valid, count, self._packed)


def reselect_rows(target: Tensor, ignore_index: int, valid_count: Tensor, policy: RowPolicy) -> Rows:
    """The rows that a `RowSelection` chose in the forward, for the backward.

    Args:
        target: (T,) as in the forward, and checked there.
        ignore_index: as in the forward.
        valid_count: () saved by the forward.
        policy: as in the forward.
    """
    target = target.long()
    valid = target != ignore_index
    if not (policy.skips(target) and policy.waits_for(target)):
        return _rows_without_waiting(target, valid_count, valid, policy.skips(target))
    return _valid_rows(target, valid_count, valid, int(valid_count), None)


def _valid_first(valid: Tensor) -> Tensor:
    return torch.argsort(valid, descending=True, stable=True)


def _take_rows(tensor: Tensor, index: Tensor, out: Tensor | None = None) -> Tensor:
    """See `triton_take.take_rows`."""
    if tensor.is_cuda and triton_available():
        from thunder_flce.execution import triton_take

        return triton_take.take_rows(tensor, index, out)
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


def _valid_rows(target: Tensor, valid_count: Tensor, valid: Tensor, count: int, packed: Tensor | None) -> Rows:
    total = target.shape[0]
    if count == total:
        return Rows(count=total, total=total, target=target, valid_count=valid_count, index=None, valid=None)
    index = (_valid_first(valid) if packed is None else packed)[:count]
    target = target.index_select(0, index)
    return Rows(count=count, total=total, target=target, valid_count=valid_count, index=index, valid=None)
