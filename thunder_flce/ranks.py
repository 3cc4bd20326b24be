"""Calls of several ranks: who has which part of them, before the part of this rank runs."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from thunder_flce.calls import loss_of, run
from thunder_flce.operation.call import INTEGERS, has_tokens, named_tensors
from thunder_flce.operation.loss import Loss
from thunder_flce.operators import is_traced
from thunder_flce.options import Options
from thunder_flce.vocab_parallel import (
    ONLY_EAGER,
    Agreement,
    VocabParallel,
    agree,
    as_literal,
    has_dtensor,
    is_dtensor,
    refuse,
    settings_of,
)

_INTEGERS = tuple(getattr(torch, name) for name in INTEGERS)


def run_on_ranks(
    arguments: Mapping[str, Any], loss: Loss, options: Options, *, vocab_parallel: Any
) -> Sequence[Tensor]:
    """The loss and its outputs, from the arguments of `linear_cross_entropy` by name.

    Raises:
        TypeError, ValueError: for what differs between ranks, or what one of them refuses; on all ranks.
    """
    if vocab_parallel is None:
        from thunder_flce.dtensor import run_divided

        return run_divided(named_tensors(arguments), loss, options)
    parallel = VocabParallel.of(vocab_parallel)
    if is_traced(arguments["input"]):
        if has_dtensor([*arguments.values()]):
            raise NotImplementedError(ONLY_EAGER)
        # They agree, and the arguments are checked, when the operator runs.
        return run(named_tensors(arguments), loss, options, ranks=as_literal(**settings_of(parallel)))
    try:
        tensors = named_tensors(arguments)
        divided = {name: value for name, value in tensors.items() if is_dtensor(value)}
        if divided:
            from thunder_flce.dtensor import local_weight, whole

            tensors |= {name: local_weight(name, value, parallel) for name, value in divided.items()}
    except (TypeError, ValueError) as error:
        refuse(parallel, error)
    agreement = agree(parallel, tensors, loss=loss, options=options)
    if is_dtensor(tensors.get("weight")):
        # Not before all ranks have come so far.
        tensors["weight"] = whole(tensors["weight"])
    if parallel.data_parallel:
        return _run_averaged(tensors, loss, options, agreement)
    return run(tensors, loss, options, ranks=agreement)


def _run_averaged(tensors: Mapping[str, Any], loss: Loss, options: Options, agreement: Agreement) -> tuple[Tensor, ...]:
    """The loss and its outputs with `VocabParallel.data_parallel`, of what the ranks have agreed on.

    What comes before averages a rank's gradients over the ranks, as FSDP and DDP do, so what is differentiated is the
    mean over ranks of their losses. That is a call with `sequence_parallel`, once all ranks have as many tokens: to
    those with fewer, ignored ones are added. `tensors` are by name, not checked yet; what is wrong stays so.
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
