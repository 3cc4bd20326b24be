"""Calls of several ranks: who has which part of them, before the part of this rank runs."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from thunder_flce.calls import loss_of, run
from thunder_flce.operation.call import OF_TOKENS, argument
from thunder_flce.operation.checks import check_call
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
)


def run_on_ranks(
    tensors: Mapping[str, Any], loss: Loss, options: Options, *, parallel: VocabParallel | None
) -> Iterator[Any]:
    """As `vocab_parallel.agree`: first None, then the loss and its outputs, from tensors by name, not checked yet."""
    if parallel is None:
        from thunder_flce.dtensor import run_divided

        yield from run_divided(tensors, loss, options)
        return
    if is_traced(tensors.get("input")) and all(is_traced(it) for it in tensors.values() if isinstance(it, Tensor)):
        if has_dtensor([*tensors.values()]):
            raise NotImplementedError(ONLY_EAGER)
        # They agree, and the arguments are checked, when the operator runs.
        literal = as_literal(parallel)
        yield None
        yield run(tensors, loss, options, ranks=literal)
        return
    divided = {name: value for name, value in tensors.items() if is_dtensor(value)}
    if divided:
        from thunder_flce.dtensor import local_weight

        tensors = {**tensors, **{name: local_weight(name, value, parallel) for name, value in divided.items()}}
    agreeing = agree(parallel, tensors, loss=loss, options=options)
    yield next(agreeing)
    agreement = next(agreeing)
    if is_dtensor(weight := tensors.get("weight")):
        tensors = {**tensors, "weight": weight.full_tensor()}
    if parallel.data_parallel:
        yield _run_averaged(tensors, loss, options, agreement)
    else:
        yield run(tensors, loss, options, ranks=agreement)


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
