"""Where the logits of many tokens lie while dW's memory is still free for them.

dW (V, H) takes as much memory as the logits of H tokens, and nothing is written there before the first chunk of tokens
has its logits. So those of L tokens go there, in blocks of w columns of the vocabulary, but for the last few blocks:

    dW's memory   | free | block 0 | block 1 | … | block m-1 |        own memory   | block m | … | block k-1 |

A block is (L, w), contiguous; the last one may be a little wider. First dX is summed over the blocks, in float32, in
the free part. Then each block, in order, becomes w rows of dW, which are written where memory is free or held blocks
that are used up: the free part must be large enough for that. With L = H it is for m = k - 1.
"""

from dataclasses import dataclass

# As many as the programs that may share a row in `row_kernels.triton_rows`.
MOST_BLOCKS = 15
# What TMA asks of 16-bit rows. Nothing larger: blocks of one width share what is measured about cuBLAS's algorithms.
_WIDTH_MULTIPLE = 8


@dataclass(frozen=True, kw_only=True)
class BlockLayout:
    """How the logits of L tokens are divided and where they lie; everything is counted in elements of their dtype."""

    rows: int
    """L"""

    vocab: int
    """V"""

    count: int
    """k, at least 2"""

    row_room: int
    """How many elements the memory of a row of dW has: H, or 2 H where dW of 16-bit operands is summed in float32."""

    @property
    def width(self) -> int:
        """w, columns of a block but the last."""
        return self.vocab // (self.count * _WIDTH_MULTIPLE) * _WIDTH_MULTIPLE

    @property
    def block_elements(self) -> int:
        """From one block to the next, in dW's memory and in own memory alike: L·w."""
        return self.rows * self.width

    @property
    def columns(self) -> list[slice]:
        """The columns of each block."""
        ends = [*(number * self.width for number in range(1, self.count)), self.vocab]
        return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]

    @property
    def borrowed(self) -> int:
        """m, how many blocks lie in dW's memory: as many as are used up before they are overwritten.

        Block i begins at V·H - (m - i)·L·w; the rows of dW that it becomes end at (i + 1)·w·H. If it lies behind these
        for i = 0, it does for all: the distance grows with i where L > H, and elsewhere it is at least w·H - L·w, since
        m < k.
        """
        room = (self.vocab - self.width) * self.row_room
        return min(self.count - 1, room // max(self.block_elements, 1))

    @property
    def free_elements(self) -> int:
        """What is free in front of block 0, in dW's memory."""
        return self.vocab * self.row_room - self.borrowed * self.block_elements

    def own_elements(self, last_stride: int) -> int:
        """What lies elsewhere, with so many elements from one row of the last block to the next."""
        return (self.count - self.borrowed - 1) * self.block_elements + self.rows * last_stride
