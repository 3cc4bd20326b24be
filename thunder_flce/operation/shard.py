"""A vocabulary that is divided among the ranks of a process group; plain values, which an operator's settings carry."""

from dataclasses import dataclass

from thunder_flce.options import PlainValues


@dataclass(frozen=True, kw_only=True)
class Shard(PlainValues):
    """This rank's columns of the logits. They follow each other over the ranks, in any order of these."""

    group: str
    """The process group, by the name under which torch.distributed registers it."""
    ranks: int
    rank: int
    start: int
    """The first of this rank's columns."""
    columns: int
    """How many it has; may be 0."""
    largest: int
    """How many the rank with the most has."""
    vocab: int
    """How many all ranks have together."""
    reduces_input_grad: bool = True
    """Whether dX is summed over the ranks; otherwise each returns what its columns contribute."""
    float32_input_grad: bool = True
    """Whether it is summed in float32 (float64 for float64) and rounded once."""
    sequence_parallel: bool = False
    """Whether each rank has a part of the tokens, too: equal parts, in the order of ranks."""
    input_grad_factor: int = 1
    """What the sum of dX over the ranks is multiplied by: their number, where others will average it."""

    @property
    def token_parts(self) -> int:
        """Among how many ranks the tokens are divided."""
        return self.ranks if self.sequence_parallel else 1
