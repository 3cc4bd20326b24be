"""The vocabulary divided among the ranks of data parallel training: a call with tokens of each rank's own.

Each rank computes a loss of its tokens, and what comes before averages its gradients over the ranks, as FSDP and DDP
do. So what is differentiated is the mean over ranks of their losses. That is a call with `sequence_parallel`, once all
ranks have as many tokens: to those with fewer, ignored ones are added.
"""

from collections.abc import Mapping
from dataclasses import asdict
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from thunder_flce.calls import loss_of, run
from thunder_flce.operation.call import INTEGERS, has_tokens
from thunder_flce.operation.loss import Loss
from thunder_flce.options import Options
from thunder_flce.vocab_parallel import Agreement

_INTEGERS = tuple(getattr(torch, name) for name in INTEGERS)


def run_averaged(tensors: Mapping[str, Any], loss: Loss, options: Options, agreement: Agreement) -> tuple[Tensor, ...]:
    """The loss and its outputs, of what the ranks have agreed on; what is wrong with it on all of them stays so.

    `tensors` are by name, not checked yet.
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

    def own(result: Tensor) -> Tensor:
        """Of a result with one number a token, those of this rank's tokens."""
        if not result.ndim:
            return result
        if result.requires_grad:
            result.register_hook(lambda grad: grad / ranks)
        return result[:count].reshape(shape)

    return tuple(map(own, run(changed, loss, options, ranks=agreement)))


def _times(number: Any, factor: int) -> Any:
    """A number, or a tensor of one in a dtype that may be too narrow, times a factor; anything else as it is."""
    if not isinstance(number, Tensor):
        return number * factor if isinstance(number, Real) and not isinstance(number, bool) else number
    if number.is_floating_point():
        return number.to(torch.promote_types(number.dtype, torch.float32)) * factor
    return number.long() * factor if number.dtype in _INTEGERS else number
