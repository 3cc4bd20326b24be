"""How a row of logits is laid out in memory."""

from dataclasses import dataclass

import torch

from thunder_flce.device import PADDED_ROW_MULTIPLE, ROW_MULTIPLE


@dataclass(frozen=True, kw_only=True)
class VocabLayout:
    """A row of V logits in memory."""

    vocab: int

    row_stride: int
    """Elements from one row of the logits to the next."""

    @property
    def padding(self) -> int:
        """Elements at the end of each row that belong to no column of the vocabulary."""
        return self.row_stride - self.vocab

    @classmethod
    def contiguous(cls, vocab: int) -> "VocabLayout":
        """V elements, no padding."""
        return cls(vocab=vocab, row_stride=vocab)

    @classmethod
    def aligned(cls, vocab: int) -> "VocabLayout":
        """Without padding wherever V allows it."""
        multiple = 1 if vocab % ROW_MULTIPLE == 0 else PADDED_ROW_MULTIPLE
        return cls(vocab=vocab, row_stride=-(-vocab // multiple) * multiple)


def layout_for(vocab: int, *, dtype: torch.dtype, device_type: str) -> VocabLayout:
    """The layout that the row kernels for this dtype and device read fastest."""
    if device_type == "cuda" and dtype is not torch.float64:
        return VocabLayout.aligned(vocab)
    return VocabLayout.contiguous(vocab)
