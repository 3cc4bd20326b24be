"""Selects the rows that are computed if each rank has a part of the tokens, besides its part of the vocabulary.

All ranks compute the same rows. Each part gives as many rows as the part with the most valid rows has; parts with fewer
add some of their ignored rows, so that every rank passes the same number of rows to a collective. A chunk has the same
number of rows from every part, one part after the other, in the layout of an all-gather and a reduce-scatter.

Legend: T tokens of all ranks, R ranks, P = T / R tokens of a rank, M rows from each rank, N = R·M rows, C rows in a
chunk, H hidden size.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from thunder_flce.engine import collectives
from thunder_flce.engine.kernels.interface import TokenVectors
from thunder_flce.engine.plan import balanced
from thunder_flce.engine.rows import Rows
from thunder_flce.operation.call import Shard


class RowsOfParts(Rows):
    """The rows that are computed, ordered by chunk and, in a chunk, by rank; `order` is (N,)."""

    def __init__(self, shard: Shard, vectors: TokenVectors, *, chunk_rows: int, count: int):
        """Selects the rows of all parts.

        Args:
            shard: this rank's shard.
            vectors: `TokenVectors` from the targets of all ranks.
            chunk_rows: the largest number of rows in a chunk, of all parts together.
            count: the number of rows to compute, of all parts together.
        """
        tokens, own_count = vectors.target.shape[0] // shard.ranks, count // shard.ranks
        valid_first = torch.argsort(_valid_by_part(vectors, shard.ranks), dim=1, descending=True, stable=True)
        # Ascending, as `Rows.scatter_` needs it.
        order = torch.cat([valid_first[:, :own_count].sort(1).values, valid_first[:, own_count:]], 1)
        # A chunk has this many rows of each part, the last one fewer.
        self.part_chunk = balanced(own_count, max(chunk_rows // shard.ranks, 1))
        offsets = torch.arange(shard.ranks, device=vectors.target.device)[:, None] * tokens
        chunks = (order[:, :own_count] + offsets).split(self.part_chunk, 1)
        super().__init__(vectors, count, order=torch.cat([chunk.reshape(-1) for chunk in chunks]))
        # This rank's M rows, which only tell where these are in its x and dX; their other vectors are not used.
        self.own_rows = Rows(vectors, own_count, order=None if own_count == tokens else order[shard.rank])
        self.own_rows.total = tokens
        self.shard = shard
        # Gathers that were started ahead; the key is the id of the tensor with the chunk's first row.
        self._ahead: dict[tuple[int, int], collectives.Pending] = {}

    def chunks(self, largest: int, first: int = 0) -> Iterator[slice]:
        """Yields slices that cover all rows, in the chunk size for which the order was made."""
        step = self.part_chunk * self.shard.ranks
        return (slice(start, min(start + step, self.count)) for start in range(0, self.count, step))

    def own_slice(self, chunk: slice) -> slice:
        """Returns the slice of this rank's rows that belongs to a chunk."""
        return slice(chunk.start // self.shard.ranks, chunk.stop // self.shard.ranks)

    def gather_chunk(self, tensor: Tensor, chunk: slice, out: Tensor | None = None) -> Tensor:
        """Returns the rows of `chunk`, (C, H), from all ranks' (P, H); starts to gather those of the next chunk."""
        for start in (chunk.start, chunk.stop):
            if start < self.count and (key := (id(tensor), start)) not in self._ahead:
                stop = min(start + self.part_chunk * self.shard.ranks, self.count)
                part = self.own_rows.gather_chunk(tensor, self.own_slice(slice(start, stop)))
                self._ahead[key] = collectives.start_gathering(self.shard, part)
        return self._ahead.pop((id(tensor), chunk.start)).wait()

    def scatter_(self, tensor: Tensor) -> None:
        """Moves the first M rows of `tensor` (P, H) to their tokens, in place, and writes 0 to all other rows."""
        self.own_rows.scatter_(tensor)

    def returned(self, vector: Tensor, fill: float = 0) -> Tensor:
        """Returns a vector (N,) as one over this rank's tokens, (P,), with `fill` for skipped tokens."""
        start = self.shard.rank * self.own_rows.total
        return self.scatter(vector, fill)[start : start + self.own_rows.total]

    def received(self, vector: Tensor) -> Tensor:
        """Gathers a vector (P,) from all ranks, and returns the entries that belong to the rows, (N,)."""
        return self.gather(collectives.start_gathering(self.shard, vector).wait())


def most_valid(shard: Shard, vectors: TokenVectors) -> Tensor:
    """Returns () int64 number of rows to compute: from each part as many as the part with the most valid rows has."""
    return _valid_by_part(vectors, shard.ranks).sum(1).max() * shard.ranks


def _valid_by_part(vectors: TokenVectors, ranks: int) -> Tensor:
    """Returns (R, P) bool: which tokens of each part are valid."""
    return (vectors.row_factor != 0).view(ranks, vectors.row_factor.shape[0] // ranks)
