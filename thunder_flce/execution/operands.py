"""What a region takes and gives. Legend: T tokens, H hidden size, V vocabulary."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from thunder_flce.execution.row_kernels.torch_rows import statistics_dtype
from thunder_flce.operation.loss import Loss
from thunder_flce.operation.shard import Shard


@dataclass(frozen=True, kw_only=True)
class Term:
    """One of the linears that the logits are a sum of: x Wᵀ."""

    x: Tensor
    """(T, H)"""
    weight: Tensor
    """(V, H), x's dtype; of its rows, only the first `Operands.vocab` are used"""
    input_grad: bool = False
    weight_grad: bool = False


@dataclass(frozen=True, kw_only=True)
class Operands:
    """A region's inputs, and which of them need a gradient."""

    terms: tuple[Term, ...]
    """The head first, then what is added to it. All have the same T, V, dtype and device; each has its own H."""
    bias: Tensor | None
    """(V,), the terms' dtype"""
    target: Tensor
    """(T,) integers in [0, V), or ignore_index; (T, K) with target weights"""
    loss: Loss
    target_weights: Tensor | None = None
    """(T, K) the weight of each of a row's targets"""
    class_weight: Tensor | None = None
    """(V,) floating point"""
    token_weights: Tensor | None = None
    """(T,) what multiplies each row's loss; a row where it is 0 is ignored"""
    token_inputs: tuple[Tensor, ...] = ()
    """(T,) each, what `Loss.token_loss` reads beside the row: in the dtype of the loss, or bool"""
    num_items: Tensor | None = None
    """() what "mean" divides by, in place of the number of valid targets"""
    expected_gradient: Tensor | None = None
    """() the upstream gradient that gradients in the forward are finished for; None for 1"""
    bias_grad: bool = False
    shard: Shard | None = None
    """The part of the vocabulary that weights and bias belong to; targets and class weights are those of the whole
    vocabulary. None: no part, but all of it"""

    @property
    def weight_rows(self) -> int:
        """V, rows of the weights."""
        return self.terms[0].weight.shape[0]

    @property
    def vocab(self) -> int:
        """Columns of the logits that are computed here: V, `Loss.vocab_size`, or those of the shard."""
        return self.whole_vocab if self.shard is None else self.shard.columns

    @property
    def whole_vocab(self) -> int:
        """Columns of the logits, those of other ranks included."""
        return (self.loss.vocab_size or self.weight_rows) if self.shard is None else self.shard.vocab

    @property
    def tokens(self) -> int:
        """T."""
        return self.target.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of x and W."""
        return self.terms[0].x.dtype

    @property
    def row_dtype(self) -> torch.dtype:
        """The dtype of the loss and of everything that is one number a row."""
        return statistics_dtype(self.dtype)

    @property
    def device(self) -> torch.device:
        """The device of all operands."""
        return self.terms[0].x.device


class Gradients(NamedTuple):
    """None for what needs no gradient."""

    inputs: tuple[Tensor | None, ...]
    """Of each term, (T, H)"""
    weights: tuple[Tensor | None, ...]
    """Of each term, (V, H)"""
    bias: Tensor | None
    """(V,)"""

    def in_order(self) -> tuple[Tensor | None, ...]:
        """Those of the head's input and weight, of the bias, then of each further term's input and weight."""
        pairs = [gradient for pair in zip(self.inputs, self.weights, strict=True) for gradient in pair]
        return (*pairs[:2], self.bias, *pairs[2:])

    def needed(self) -> list[Tensor]:
        """The gradients that are needed, in the same order."""
        return [gradient for gradient in self.in_order() if gradient is not None]


class UpstreamGradients(NamedTuple):
    """The upstream gradients of the region's results; None for a result that has none."""

    loss: Tensor | None
    """() or, for reduction "none", (T,)"""
    log_prob: Tensor | None = None
    """(T,)"""
    entropy: Tensor | None = None
    """(T,)"""
    log_sum_exp: Tensor | None = None
    """(T,)"""


class SavedStatistics(NamedTuple):
    """What the forward saves for the backward, beside its inputs."""

    row_max: Tensor
    """(T,) 0 in ignored rows"""
    row_log_sum: Tensor
    """(T,) log Σ exp(logit - row_max); 0 in ignored rows"""
    valid_count: Tensor
    """() int64, the number of targets that are not ignore_index"""
    entropy: Tensor | None = None
    """(T,) 0 in ignored rows; only where it is one of the loss's outputs"""


class ForwardResult(NamedTuple):
    """What the forward returns; everything but the loss may be saved for the backward."""

    loss: Tensor
    """() or, for reduction "none", (T,)"""
    outputs: tuple[Tensor, ...]
    """What `Loss.outputs` names, in its order: (T,), or () for the accuracy"""
    statistics: SavedStatistics
    kept: Tensor | None = None
    """What the backward goes on with: (S, row stride) logits of the first S rows that are computed, of plans that save
    them, or (T, H) dX for an upstream gradient of 1 at each row, of `GradientsInForward`"""
    gradients: Gradients | None = None
    """For the expected upstream gradient, of `GradientsInForward` where that is one number for all rows"""
