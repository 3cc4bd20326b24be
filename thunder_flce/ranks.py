"""Calls of several ranks: who has which part of them, before the part of this rank runs."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from thunder_flce.calls import loss_of, run
from thunder_flce.operation.call import OF_TOKENS, argument, named_tensors
from thunder_flce.operation.checks import check_call, check_not_nested
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
)


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
        return run(named_tensors(arguments), loss, options, ranks=as_literal(parallel))
    try:
        tensors = named_tensors(arguments)
        for name, value in tensors.items():
            check_not_nested(name, value)
        divided = {name: value for name, value in tensors.items() if is_dtensor(value)}
        if divided:
            from thunder_flce.dtensor import local_weight

            tensors |= {name: local_weight(name, value, parallel) for name, value in divided.items()}
    except (TypeError, ValueError) as error:
        refuse(parallel, error)
    agreement = agree(parallel, tensors, loss=loss, options=options)
    if is_dtensor(weight := tensors.get("weight")):
        # Not before all ranks have come so far.
        tensors["weight"] = weight.full_tensor()
    if parallel.data_parallel:
        return _run_averaged(tensors, loss, options, agreement)
    return run(tensors, loss, options, ranks=agreement)


def _run_averaged(tensors: Mapping[str, Any], loss: Loss, options: Options, agreement: Agreement) -> tuple[Tensor, ...]:
    """The loss and its outputs with `VocabParallel.data_parallel`, of what the ranks have agreed on.

    What comes before averages a rank's gradients over the ranks, as FSDP and DDP do, so what is differentiated is the
    mean over ranks of their losses. That is a call with `sequence_parallel`, once all ranks have as many tokens: to
    those with fewer, ignored ones are added.
    """
    check_call(tensors, loss=loss, vocab=agreement.weight_rows)
    shape, ranks = tensors["input"].shape[:-1], agreement.shard.ranks
    count, most = shape.numel(), agreement.most_tokens

    def padded(name: str, tensor: Any) -> Any:
        """(most, ...) where the tensor has this rank's tokens."""
        if argument(name).role not in OF_TOKENS:
            return tensor
        # A narrow dtype may not hold ignore_index.
        given, fill = (tensor.long(), loss.ignore_index) if name == "target" else (tensor, 0)
        flat = given.reshape(count, *given.shape[len(shape) :])
        return torch.cat([flat, flat.new_full((most - count, *flat.shape[1:]), fill)]) if count < most else flat

    changed = {name: padded(name, tensor) for name, tensor in tensors.items()}
    # The mean over the ranks divides by their number, too.
    if loss.reduction == "sum":
        loss, changed["num_items"] = loss_of(**asdict(loss) | {"reduction": "mean"}), float(ranks)
    elif (number := changed.get("num_items")) is not None:
        changed["num_items"] = (number.double() if isinstance(number, Tensor) else number) * ranks

    def own(result: Tensor) -> Tensor:
        """Of a result with one number a token, those of this rank's tokens."""
        if not result.ndim:
            return result
        if result.requires_grad:
            result.register_hook(lambda grad: grad / ranks)
        return result[:count].reshape(shape)

    return tuple(map(own, run(changed, loss, options, ranks=agreement)))
