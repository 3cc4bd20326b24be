"""Which rows are computed where each rank has a part of the tokens, besides its part of the vocabulary.

All ranks compute the same rows: from the part of each rank as many as the part with the most valid targets has. A rank
with fewer adds some of its ignored rows, so that all give the same number to a collective. A chunk has the same rows of
every part, one part after the other, as an all-gather and a reduce-scatter have them.

Legend: T tokens of all ranks, R ranks, P = T / R tokens of a rank, M rows from each rank, N = R·M rows, C rows in a
chunk, H hidden size.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from thunder_flce.engine import collectives
from thunder_flce.engine.rows import Prepared, Rows
from thunder_flce.operation.call import Call, Shard


class RowsOfParts(Rows):
    """The rows that are computed, in the order of chunks, in a chunk in the order of ranks; `order` is (N,)."""

    def __init__(self, found: Prepared, index: Tensor, *, shard: Shard, own: Rows, part_chunk: int):
        """`own` are (M,), this rank's, in its tokens; chunks have `part_chunk` rows of each part, but for the last."""
        super().__init__(found, shard.ranks * own.count, index=index, order=index)
        self.shard, self.own, self.part_chunk = shard, own, part_chunk
        # By the tensor and the first row, the rows of a chunk that are on their way.
        self._ahead: dict[tuple[int, int], collectives.Pending] = {}

    def chunks(self, largest: int, first: int = 0) -> Iterator[slice]:
        """Slices that cover all rows, in the sizes that the order was made for."""
        step = self.part_chunk * self.shard.ranks
        return (slice(start, min(start + step, self.count)) for start in range(0, self.count, step))

    def of_part(self, chunk: slice) -> slice:
        """Of the rows of this rank's part, those of a chunk."""
        return slice(chunk.start // self.shard.ranks, chunk.stop // self.shard.ranks)

    def gather_chunk(self, tensor: Tensor, chunk: slice, out: Tensor | None = None) -> Tensor:
        """(C, H) the rows of `chunk` of all ranks, of whose tensors each is (P, H); starts to gather the next ones."""
        found = self._ahead.pop((id(tensor), chunk.start), None) or self._start(tensor, chunk)
        if chunk.stop < self.count:
            size = self.part_chunk * self.shard.ranks
            following = slice(chunk.stop, min(chunk.stop + size, self.count))
            self._ahead[id(tensor), following.start] = self._start(tensor, following)
        return found.wait()

    def _start(self, tensor: Tensor, chunk: slice) -> collectives.Pending:
        return collectives.start_gathering(self.shard, self.own.gather_chunk(tensor, self.of_part(chunk)))

    def scatter_(self, tensor: Tensor) -> None:
        """Moves the first M rows of `tensor` (P, H) to their tokens, in place; 0 in all others."""
        self.own.scatter_(tensor)

    def returned(self, vector: Tensor, fill: float = 0) -> Tensor:
        """(N,) to (P,), `fill` for tokens that were left out."""
        start = self.shard.rank * self.own.total
        return self.scatter(vector, fill)[start : start + self.own.total]

    def received(self, vector: Tensor) -> Tensor:
        """(P,) of all ranks to (N,)."""
        return self.gather(collectives.start_gathering(self.shard, vector).wait())


def most_valid(call: Call, found: Prepared) -> Tensor:
    """() int64 how many rows are computed: as many of each part as the one with the most has valid ones."""
    assert call.shard is not None
    return _valid(found, call.shard.ranks).sum(1).max() * call.shard.ranks


def _valid(found: Prepared, ranks: int) -> Tensor:
    """(R, P) which tokens are valid."""
    return (found.weight != 0).view(ranks, found.weight.shape[0] // ranks)


def rows_of_parts(call: Call, found: Prepared, *, chunk_rows: int, count: int) -> Rows:
    """The rows of all parts.

    Args:
        call: a flat one, with the targets of all ranks.
        found: what follows from these.
        chunk_rows: the most rows of a chunk, those of all parts together; 0: there is one chunk.
        count: how many rows are computed, of all parts together.
    """
    shard, total = call.shard, found.target.shape[0]
    assert shard is not None
    tokens, count = total // shard.ranks, count // shard.ranks
    valid_first = torch.argsort(_valid(found, shard.ranks), dim=1, descending=True, stable=True)
    # Ascending, as `Rows.scatter_` needs it.
    order = torch.cat([valid_first[:, :count].sort(1).values, valid_first[:, count:]], 1)
    largest = max((chunk_rows or total) // shard.ranks, 1)
    part_chunk = max(-(-count // max(-(-count // largest), 1)), 1)
    offsets = torch.arange(shard.ranks, device=found.target.device)[:, None] * tokens
    chosen = (order[:, :count] + offsets).split(part_chunk, 1)
    index = torch.cat([part.reshape(-1) for part in chosen])
    # Of these, only where they are in x and dX is asked for.
    own = Rows(found, count, order=None if count == tokens else order[shard.rank])
    own.total = tokens
    return RowsOfParts(found, index, shard=shard, own=own, part_chunk=part_chunk)
