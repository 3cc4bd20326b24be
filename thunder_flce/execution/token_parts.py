"""Which rows are computed where each rank has a part of the tokens, besides its part of the vocabulary.

All ranks compute the same rows: from the part of each rank as many as the part with the most valid targets has. A rank
with fewer adds some of its ignored rows, so that all give the same number to a collective. A chunk has the same rows of
every part, one part after the other, as an all-gather and a reduce-scatter have them.

Legend: T tokens of all ranks, R ranks, P = T / R tokens of a rank, M rows from each rank, N = R·M rows, C rows in a
chunk, H hidden size.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from thunder_flce.execution import row_selection, shards
from thunder_flce.execution.record import Value
from thunder_flce.execution.region import Region
from thunder_flce.execution.row_selection import PlannedRows, Rows
from thunder_flce.operation.shard import Shard


@dataclass(frozen=True, kw_only=True)
class RowsOfParts(Rows):
    """The rows that are computed, in the order of chunks, in a chunk in the order of ranks; `order` is (N,)."""

    shard: Shard
    own: Rows
    """(M,) those of this rank's part, in its tokens"""
    part_chunk: int
    """How many rows of each part a chunk has, but for the last"""
    _ahead: dict[tuple[int, int], shards.Pending] = field(default_factory=dict)
    """By the tensor and the first row, the rows of a chunk that are on their way"""

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

    def _start(self, tensor: Tensor, chunk: slice) -> shards.Pending:
        return shards.start_gathering(self.shard, self.own.gather_chunk(tensor, self.of_part(chunk)))

    def scatter_(self, tensor: Tensor) -> None:
        """Moves the first M rows of `tensor` (P, H) to their tokens, in place; 0 in all others."""
        self.own.scatter_(tensor)

    def returned(self, vector: Tensor, fill: float = 0) -> Tensor:
        """(N,) to (P,), `fill` for tokens that were left out."""
        start = self.shard.rank * self.own.total
        return self.scatter(vector, fill)[start : start + self.own.total]

    def received(self, vector: Tensor) -> Tensor:
        """(P,) of all ranks to (N,)."""
        return self.gather(shards.start_gathering(self.shard, vector).wait())


class PlannedRowsOfParts(PlannedRows):
    """While a run is written down."""

    def gather_chunk(self, tensor: Tensor, chunk: slice, out: Tensor | None = None) -> Tensor:
        """(C, H), in new memory for this chunk and for the next."""
        assert isinstance(tensor, Value)
        tape, shape = tensor.tape, (chunk.stop - chunk.start, tensor.shape[1])
        text = str(tensor[chunk])
        chunks = 1 if chunk.stop - chunk.start == self.count else 2
        nbytes = chunks * shape[0] * shape[1] * tensor.dtype.itemsize
        gathered = Value(tape, text, shape=shape, dtype=tensor.dtype, storage=tape.allocate(nbytes))
        note = "over the ranks, while the chunk before is computed"
        runs_in = "NCCL" if tape.device.type == "cuda" else "gloo"
        tape.write(gathered, f"all_gather({text})", note=note, runs_in=runs_in, bytes=gathered.nbytes)
        return gathered


def every_row(region: Region, valid_count: Tensor) -> Rows:
    """As `row_selection.every_row`; in the order of tokens."""
    rows = row_selection.every_row(region, valid_count)
    shard = region.shard
    if shard is None or not shard.sequence_parallel or isinstance(rows, PlannedRows):
        return rows
    tokens = rows.total // shard.ranks
    own = Rows(tokens, tokens, rows.target[:0], valid_count)
    return RowsOfParts(**vars(rows), shard=shard, own=own, part_chunk=tokens)


def of_all_parts(region: Region, rows: Rows, chunk_rows: int | None = None) -> Rows:
    """The rows of all parts, from those chosen as if the tokens were not divided; these where they are not.

    Chunks have at most `chunk_rows` rows of all parts together; without it, there is one chunk.
    """
    shard = region.shard
    if shard is None or not shard.sequence_parallel:
        return rows
    if isinstance(rows, PlannedRows):
        return PlannedRowsOfParts(**vars(rows))
    target = region.operands.target.long()
    tokens = target.shape[0] // shard.ranks
    valid = target.new_ones(target.shape[:1], dtype=torch.bool) if rows.valid is None else rows.valid
    if rows.order is not None:
        valid = valid.index_fill(0, rows.order[rows.count :], False)
    of_parts = valid.view(shard.ranks, tokens)
    # Without an order, either none is ignored or ignored rows are computed.
    count = tokens if rows.order is None else int(of_parts.sum(1).max())
    valid_first = torch.argsort(of_parts, dim=1, descending=True, stable=True)
    # Ascending, as `Rows.scatter_` needs it.
    order = torch.cat([valid_first[:, :count].sort(1).values, valid_first[:, count:]], 1)
    largest = max((chunk_rows or target.shape[0]) // shard.ranks, 1)
    part_chunk = max(-(-count // max(-(-count // largest), 1)), 1)
    offsets = torch.arange(shard.ranks, device=target.device)[:, None] * tokens
    chosen = (order[:, :count] + offsets).split(part_chunk, 1)
    index = torch.cat([part.reshape(-1) for part in chosen])
    of_rows = valid[index]
    own = Rows(count, tokens, target[:0], rows.valid_count, None if count == tokens else order[shard.rank])
    found = RowsOfParts(
        count=shard.ranks * count,
        total=target.shape[0],
        target=row_selection.masked(of_rows, target[index]),
        valid_count=rows.valid_count,
        order=index,
        valid=of_rows,
        shard=shard,
        own=own,
        part_chunk=part_chunk,
    )
    return row_selection.with_target_weights(region, found)
