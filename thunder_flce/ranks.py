"""Calls of several ranks: who has which part of them, before the part of this rank runs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from thunder_flce.calls import loss_of, run
from thunder_flce.operation.call import OF_TOKENS, Call, argument
from thunder_flce.operation.checks import check_call
from thunder_flce.operation.loss import Loss
from thunder_flce.operators import is_traced
from thunder_flce.options import Options
from thunder_flce.vocab_parallel import (
    ONLY_EAGER,
    VocabParallel,
    agreement_on,
    as_literal,
    has_dtensor,
    is_dtensor,
)


def on_ranks(
    tensors: Mapping[str, Any], loss: Loss, options: Options, *, parallel: VocabParallel | None
) -> Callable[[], Sequence[Tensor]]:
    """What runs a call, from tensors by name, not checked yet, and gives the loss and its outputs.

    Errors that are raised here are of this rank alone, and `tell` tells the others; what is returned begins with the
    agreement of the ranks.
    """
    if parallel is None:
        from thunder_flce.dtensor import on_mesh

        return on_mesh(tensors, loss, options)
    if is_traced(tensors.get("input")) and all(is_traced(it) for it in tensors.values() if isinstance(it, Tensor)):
        if has_dtensor([*tensors.values()]):
            raise NotImplementedError(ONLY_EAGER)
        # They agree, and the arguments are checked, when the operator runs.
        return partial(run, tensors, loss, options, ranks=as_literal(parallel))
    own = dict(tensors)
    for name, value in tensors.items():
        if is_dtensor(value):
            from thunder_flce.dtensor import local_weight

            own[name] = local_weight(name, value, parallel)
    agree = agreement_on(parallel, Call(tensors=own, loss=loss), options)

    def run_agreed() -> Sequence[Tensor]:
        shard = agree()
        if is_dtensor(weight := own.get("weight")):
            own["weight"] = weight.full_tensor()
        if parallel.data_parallel:
            return _run_averaged(Call(tensors=own, loss=loss, shard=shard), options)
        return run(own, loss, options, ranks=shard)

    return run_agreed


def _run_averaged(call: Call, options: Options) -> tuple[Tensor, ...]:
    """The loss and its outputs with `VocabParallel.data_parallel`, of a call that the ranks have agreed on.

    What comes before averages a rank's gradients over the ranks, as FSDP and DDP do, so what is differentiated is the
    mean over ranks of their losses. That is a call with `sequence_parallel`, once all ranks have as many tokens: to
    those with fewer, ignored ones are added.
    """
    check_call(call)
    assert call.shard is not None
    loss, shape, count = call.loss, call.shape, call.own_tokens
    ranks, most = call.shard.ranks, call.shard.most_tokens
    # What is known of one number of tokens holds for others.
    shard = replace(call.shard, most_tokens=0)

    def padded(name: str, tensor: Any) -> Any:
        """(most, ...) where the tensor has this rank's tokens."""
        if argument(name).role not in OF_TOKENS:
            return tensor
        # A narrow dtype may not hold ignore_index.
        given, fill = (tensor.long(), loss.ignore_index) if name == "target" else (tensor, 0)
        flat = given.reshape(count, *given.shape[len(shape) :])
        return torch.cat([flat, flat.new_full((most - count, *flat.shape[1:]), fill)]) if count < most else flat

    changed = {name: padded(name, tensor) for name, tensor in call.tensors.items()}
    # The mean over the ranks divides by their number, too.
    if loss.reduction == "sum":
        loss, changed["num_items"] = loss_of(**asdict(loss) | {"reduction": "mean"}), float(ranks)
    elif (number := changed.get("num_items")) is not None:
        changed["num_items"] = (number.double() if isinstance(number, Tensor) else number) * ranks

    def own(result: Tensor) -> Tensor:
        """Of a result with one number a token, those of this rank's tokens."""
        if not result.ndim:
            return result
        # What the user may change in place must not be a view.
        mine = result[:count].reshape(shape).clone()
        # Of `result`, it would be called without a gradient, too, where another result has one.
        if mine.requires_grad:
            mine.register_hook(lambda grad: grad / ranks)
        return mine

    return tuple(map(own, run(changed, loss, options, ranks=shard)))
