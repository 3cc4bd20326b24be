"""The vocabulary divided among the ranks of data parallel training: a call with tokens of each rank's own.

Each rank computes a loss of its tokens, and what comes before averages its gradients over the ranks, as FSDP and DDP
do. So what is differentiated is the mean over ranks of their losses. That is a call with `sequence_parallel`, once all
ranks have as many tokens: to those with fewer, ignored ones are added.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from thunder_flce.calls import loss_of
from thunder_flce.operation.call import INTEGERS, has_tokens
from thunder_flce.operation.loss import Loss
from thunder_flce.vocab_parallel import Agreement

_INTEGERS = tuple(getattr(torch, name) for name in INTEGERS)


@dataclass(frozen=True, kw_only=True)
class AveragedCall:
    """A call of `linear_cross_entropy` with `VocabParallel.data_parallel`, as one whose ranks have as many tokens."""

    tensors: dict[str, Any]
    loss: Loss
    ranks: int
    shape: torch.Size
    """(...) of this rank's tokens"""

    @classmethod
    def of(cls, tensors: Mapping[str, Any], loss: Loss, agreement: Agreement) -> "AveragedCall":
        """The call, of what the ranks have agreed on; what is wrong with it on all of them stays so.

        Args:
            tensors: by name, not checked yet.
            loss: the loss.
            agreement: the ranks'.
        """
        input, ranks = tensors.get("input"), agreement.shard.ranks
        shape = input.shape[:-1] if isinstance(input, Tensor) else torch.Size()
        count, most = shape.numel(), agreement.most_tokens

        def padded(name: str, tensor: Any) -> Any:
            """(most, ...) where the tensor has this rank's tokens."""
            if not isinstance(tensor, Tensor) or not has_tokens(name, tensor.shape, shape):
                return tensor
            flat, fill = tensor.reshape(count, *tensor.shape[len(shape) :]), 0
            if name == "target" and tensor.dtype in _INTEGERS:
                # A narrow dtype may not hold ignore_index.
                is_index = type(loss.ignore_index) is int and -(2**63) <= loss.ignore_index < 2**63
                flat, fill = flat.long(), loss.ignore_index if is_index else 0
            return torch.cat([flat, flat.new_full((most - count, *flat.shape[1:]), fill)]) if count < most else flat

        changed = {name: padded(name, tensor) for name, tensor in tensors.items()}
        # The mean over the ranks divides by their number, too.
        if loss.reduction == "sum" and "num_items" not in tensors:
            loss, changed["num_items"] = loss_of(**asdict(loss) | {"reduction": "mean"}), float(ranks)
        elif loss.reduction == "mean" and "num_items" in tensors:
            changed["num_items"] = _times(tensors["num_items"], ranks)
        return cls(tensors=changed, loss=loss, ranks=ranks, shape=shape)

    def own(self, results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """This rank's results: those with one number a token, of its tokens."""
        return tuple(self._own(result) if result.ndim else result for result in results)

    def _own(self, result: Tensor) -> Tensor:
        if result.requires_grad:
            ranks = self.ranks  # Not self, whose tensors would live as long as the result.
            result.register_hook(lambda grad: grad / ranks)
        return result[: self.shape.numel()].reshape(self.shape)


def _times(number: Any, factor: int) -> Any:
    """A number, or a tensor of one in a dtype that may be too narrow, times a factor; anything else as it is."""
    if not isinstance(number, Tensor):
        return number * factor if isinstance(number, Real) and not isinstance(number, bool) else number
    if number.is_floating_point():
        return number.to(torch.promote_types(number.dtype, torch.float32)) * factor
    return number.long() * factor if number.dtype in _INTEGERS else number
