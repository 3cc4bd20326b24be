"""Selects the rows of a region that are computed, and derives their weights and factors from all targets at once.

Rows whose target is ignore_index, or whose token weight is 0, contribute neither to the loss nor to a gradient. A plan
skips them, for which the host needs the number of valid rows, or computes them with a gradient of 0. Legend: T tokens,
N rows computed, C rows in a chunk, K targets a token, H hidden size.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from thunder_flce.device import TILE_ROWS
from thunder_flce.engine.kernels.interface import PER_TOKEN, TokenVectors
from thunder_flce.engine.plan import balanced
from thunder_flce.operation.call import Call

# Number of rows that `Rows.scatter_` copies at a time.
_MOVED_ROWS = 2048


def token_vectors(call: Call, *, upstream: Tensor | None) -> TokenVectors:
    """Checks targets, counts valid rows, and computes each row's factor and s, by PyTorch's operations.

    A row is valid if its target is not `ignore_index` and its token weight is not 0. A target that is not
    `ignore_index` is wrong outside [0, V).

    Args:
        call: a flat call.
        upstream: () or (T,) the upstream gradient of the loss; None for 1.
    """
    loss, target, row_dtype = call.loss, call.tensors["target"].long(), call.row_dtype
    token_weights = call.tensors.get("token_weights")
    # The targets are int64: in a narrower dtype, V and ignore_index would wrap around before the comparison.
    is_label, column = target != loss.ignore_index, target.clamp(0, call.whole_vocab - 1)
    is_wrong = is_label & (target != column)
    valid = is_label if target.ndim == 1 else is_label.any(1)
    if token_weights is not None:
        valid = valid & (token_weights != 0)
    counts = torch.stack([valid.sum(), (is_wrong if target.ndim == 1 else is_wrong.any(1)).sum()])
    is_counted = valid if target.ndim == 1 else is_label & valid[:, None]
    target, target_weights = torch.where(is_counted, column, 0), call.tensors.get("target_weights")
    if target_weights is not None:
        target_weights = torch.where(is_counted, target_weights, 0)
    row_factor = valid.to(row_dtype) if token_weights is None else torch.where(valid, token_weights, 0)
    at_target, divisors = None, None
    if (class_weights := call.tensors.get("weight")) is not None:
        at_target = class_weights.to(row_dtype)[target]
    if loss.reduction == "mean":
        num_items = call.tensors.get("num_items")
        if num_items is not None:
            num_items = torch.where(num_items == 0, float("inf"), num_items)
            divisors = (num_items, num_items)
        else:
            divisor = z_divisor = row_factor.sum()
            if at_target is not None:
                divisor = torch.where(valid, row_factor * at_target, 0).sum()
            divisors = (divisor, z_divisor)
    s = row_factor if upstream is None else torch.where(valid, row_factor * upstream, 0)
    if divisors is not None:
        s = torch.where(valid, s / divisors[0], 0)
    return TokenVectors(target, row_factor, s, at_target, target_weights, divisors, counts, is_right=None)


class Rows:
    """The rows that are computed, in order."""

    def __init__(self, vectors: TokenVectors, count: int, *, order: Tensor | None = None):
        """Selects `count` rows from `vectors`.

        `order` is (T,): the N tokens of the rows, then the other tokens; None if row t is token t for all T tokens.
        """
        self.count, self.total, self.order = count, vectors.target.shape[0], order
        # (N,) the token of each row; None without an order.
        self.index: Any = None if order is None else order[:count]
        of_rows: Any = vectors[:PER_TOKEN]
        if order is not None:
            of_rows = [None if vector is None else vector[self.index] for vector in of_rows]
        # (N,) or (N, K) each, as in `TokenVectors`. In a forward, s is for the expected upstream gradient.
        self.target, self.row_factor, self.s, self.at_target, self.target_weights = of_rows
        self.divisors, self._counts = vectors.divisors, vectors.counts

    @property
    def valid_count(self) -> Tensor:
        """() int64 number of valid rows."""
        return self._counts[0]

    def chunks(self, largest: int, first: int = 0) -> Iterator[slice]:
        """Yields slices that cover all rows: one of `first` rows, unless 0, then about equal ones up to `largest`."""
        first = min(first, self.count)
        if first:
            yield slice(0, first)
        if first == self.count:
            return
        rows = balanced(self.count - first, largest, tile=1 if largest % TILE_ROWS else TILE_ROWS)
        for start in range(first, self.count, rows):
            yield slice(start, min(start + rows, self.count))

    def gather_chunk(self, tensor: Tensor, chunk: slice, out: Tensor | None = None) -> Tensor:
        """Returns the rows of `chunk` from `tensor` (T, H): a view if no rows are skipped, else a copy."""
        if self.order is None:
            return tensor if chunk.start == 0 and chunk.stop == self.total else tensor[chunk]
        return torch.index_select(tensor, 0, self.index[chunk], out=out)

    def of_chunk(self, vector: Tensor, chunk: slice) -> Tensor:
        """Returns the entries of a vector (N,) that belong to the rows of a chunk, (C,)."""
        return vector if chunk.stop - chunk.start == self.count else vector[chunk]

    def gather(self, vector: Tensor) -> Tensor:
        """Returns the entries of a vector (T,) that belong to the rows, (N,)."""
        return vector if self.order is None else vector[self.index]

    def scatter(self, vector: Tensor, fill: float = 0) -> Tensor:
        """Returns numbers of rows, (N, …), as those of all tokens, (T, …), with `fill` for skipped tokens."""
        if self.order is None:
            return vector
        return vector.new_full((self.total, *vector.shape[1:]), fill).index_copy_(0, self.index, vector)

    def own_slice(self, chunk: slice) -> slice:
        """Returns where a chunk is in this rank's dX: the same slice, unless ranks divide the tokens."""
        return chunk

    # The same for vectors over the caller's tokens, which are fewer if ranks divide the tokens.
    returned, received = scatter, gather

    def scatter_(self, tensor: Tensor) -> None:
        """Moves the first N rows of `tensor` (T, H) to their tokens, in place, and writes 0 to all other rows."""
        if self.order is None:
            return
        positions = torch.arange(self.count, device=tensor.device)
        source = torch.zeros(self.total, dtype=torch.int64, device=tensor.device).index_copy_(0, self.index, positions)
        # Blocks are written from the end. The i-th valid row belongs to token i or a later one, so a block's source
        # rows have not been overwritten yet, unless they lie in the block itself, whose rows are copied first.
        for start in reversed(range(0, self.total, _MOVED_ROWS)):
            block = slice(start, start + _MOVED_ROWS)
            tensor[block] = tensor.index_select(0, source[block])
        tensor.index_fill_(0, self.order[self.count :], 0)

    def masked(self, vector: Tensor, fill: float = 0) -> Tensor:
        """Returns a vector (N,) with `fill` in ignored rows."""
        return torch.where(self.row_factor != 0, vector, fill)


def valid_first(vectors: TokenVectors) -> Tensor:
    """Returns (T,) int64 the tokens: valid ones first, then ignored ones, both ascending."""
    return torch.argsort(vectors.row_factor != 0, descending=True, stable=True)


# Number of rows that a forward has computed, by the storage of `computed_rows`, so that its backward need not wait for
# the device. A weak reference keeps the address of a storage from being reused, so the key stands for one storage.
_known_counts: dict[StorageWeakRef, int] = {}


def remember(count: Tensor, value: int) -> None:
    """Records that `count`, () int64, holds `value`; nobody may overwrite `count` while its storage lives."""
    for storage in list(_known_counts):  # Another thread may add to it.
        if storage.expired():
            _known_counts.pop(storage, None)
    _known_counts[StorageWeakRef(count.untyped_storage())] = value


def recalled(count: Tensor) -> int | None:
    """Returns the number in `count` if it was recorded for this storage, else None, as for a copy."""
    return _known_counts.get(StorageWeakRef(count.untyped_storage()))
