"""What is known of a loss region before it runs: shapes, dtypes and the loss; no tensor."""

from dataclasses import dataclass, replace

import torch

from thunder_flce.operation.loss import Loss
from thunder_flce.operation.shard import Shard


@dataclass(frozen=True, kw_only=True)
class TermShape:
    """One of the linears that the logits are a sum of: x (T, H) times W (V, H) transposed."""

    hidden: int
    """H"""
    input_grad: bool
    weight_grad: bool


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A call of `linear_cross_entropy`, for which a plan is made. Legend: T tokens, H hidden size, V vocabulary."""

    tokens: int
    """T"""
    terms: tuple[TermShape, ...]
    """The head, then what is added to it, such as a low-rank adapter."""
    vocab: int
    """Columns of the logits."""
    dtype: torch.dtype
    device_type: str
    loss: Loss
    weight_rows: int | None = None
    """Rows of the weights, if they are more than the columns of the logits."""
    has_bias: bool = False
    bias_grad: bool = False
    has_class_weight: bool = False
    has_num_items: bool = False
    has_token_weights: bool = False
    targets_per_token: int | None = None
    """K, with target weights; None for one target without"""
    token_inputs: int = 0
    """Tensors that `Loss.token_loss` reads."""
    has_expected_gradient: bool = False
    """Whether gradients in the forward are finished for another upstream gradient than 1."""
    teacher_dtype: torch.dtype | None = None
    """The dtype of a teacher's operands, whose logits are computed beside the student's; None without a teacher"""
    teacher_hidden: int = 0
    float32_logits: bool = False
    """Whether logits of 16-bit operands stay in float32."""
    shard: Shard | None = None
    """Where ranks divide the vocabulary: a rank's part, to which `vocab` and `weight_rows` belong, too. A plan is made
    for the largest."""

    @property
    def largest_part(self) -> "Problem":
        """The problem of the rank with the largest part of a divided vocabulary; it is the same on all ranks."""
        if self.shard is None:
            return self
        largest = self.shard.largest
        shard = replace(self.shard, rank=0, start=0, columns=largest)
        return replace(self, vocab=largest, weight_rows=largest, shard=shard)

    @property
    def hidden(self) -> int:
        """The hidden sizes of all terms together: what a logit is a sum of."""
        return sum(term.hidden for term in self.terms)

    @property
    def whole_vocab(self) -> int:
        """Columns of the logits of all ranks, among which targets are spread."""
        return self.vocab if self.shard is None else self.shard.vocab

    @property
    def needs_grad(self) -> bool:
        """Whether anything requires a gradient."""
        return self.bias_grad or any(term.input_grad or term.weight_grad for term in self.terms)

    @property
    def has_unit_gradients(self) -> bool:
        """Whether each row's gradient is its upstream gradient times a vector that does not depend on it.

        That is dX of a frozen head. dW and db are sums over rows, and with further terms there is more than one dX.
        """
        is_frozen = not (self.bias_grad or self.weight_grad_columns)
        return is_frozen and len(self.terms) == 1 and self.loss.has_parallel_row_gradients

    @property
    def weight_grad_columns(self) -> int:
        """The hidden sizes of the terms whose weight needs a gradient, together."""
        return sum(term.hidden for term in self.terms if term.weight_grad)

    @property
    def input_grad_columns(self) -> int:
        """The hidden sizes of the terms whose input needs a gradient, together."""
        return sum(term.hidden for term in self.terms if term.input_grad)

    @property
    def logits_dtype(self) -> torch.dtype:
        """What the logits are rounded to."""
        return torch.float32 if self.float32_logits else self.dtype

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients that are needed: what every method has to write."""
        rows = self.weight_rows or self.vocab
        elements = self.tokens * self.input_grad_columns + rows * (self.weight_grad_columns + self.bias_grad)
        return elements * self.dtype.itemsize
