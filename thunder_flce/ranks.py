"""Calls of several ranks: the agreement of the ranks and the part of this rank, before that part runs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from thunder_flce.agreement import agreement_on
from thunder_flce.calls import loss_of, run
from thunder_flce.operation.call import TOKEN_ROLES, Call, argument
from thunder_flce.operation.checks import check_call
from thunder_flce.operation.loss import Loss
from thunder_flce.operators import is_traced
from thunder_flce.options import Options
from thunder_flce.vocab_parallel import ONLY_EAGER, VocabParallel, as_literal, has_dtensor, is_dtensor


def on_ranks(
    tensors: Mapping[str, Any], loss: Loss, options: Options, *, parallel: VocabParallel | None
) -> Callable[[], Sequence[Tensor]]:
    """Returns a function that runs a call of several ranks, and returns the loss and its outputs.

    The tensors are not checked yet. The returned function begins with the agreement of the ranks; errors that are
    raised before it is called are errors of this rank alone, so the caller has to `share_error`.
    """
    if parallel is None:
        from thunder_flce.dtensor import on_mesh

        return on_mesh(tensors, loss, options)
    if is_traced(tensors.get("input")) and all(is_traced(t) for t in tensors.values() if isinstance(t, Tensor)):
        if has_dtensor([*tensors.values()]):
            raise NotImplementedError(ONLY_EAGER)
        # The ranks agree, and the arguments are checked, when the operator runs.
        return partial(run, tensors, loss, options, ranks=as_literal(parallel))
    local_tensors = dict(tensors)
    for name, value in tensors.items():
        if is_dtensor(value):
            from thunder_flce.dtensor import local_weight

            local_tensors[name] = local_weight(name, value, parallel)
    agree = agreement_on(parallel, Call(tensors=local_tensors, loss=loss), options)

    def run_agreed() -> Sequence[Tensor]:
        shard = agree()
        if is_dtensor(weight := local_tensors.get("weight")):
            local_tensors["weight"] = weight.full_tensor()
        if parallel.data_parallel:
            return _run_averaged(Call(tensors=local_tensors, loss=loss, shard=shard), options)
        return run(local_tensors, loss, options, ranks=shard)

    return run_agreed


def _run_averaged(call: Call, options: Options) -> tuple[Tensor, ...]:
    """Runs a call with `VocabParallel.data_parallel` that the ranks have agreed on; returns the loss and its outputs.

    FSDP and DDP average gradients over the ranks, so the loss to differentiate is the mean over ranks of their losses.
    A call with `sequence_parallel` computes it if all ranks have equally many tokens, so ranks with fewer tokens are
    padded with ignored ones.
    """
    check_call(call)
    assert call.shard is not None
    loss, shape, count = call.loss, call.shape, call.own_tokens
    ranks, most = call.shard.ranks, call.shard.most_tokens
    # Without the number of tokens, calls that differ only in it share their settings.
    shard = replace(call.shard, most_tokens=0)

    def padded(name: str, tensor: Any) -> Any:
        """Pads a tensor of this rank's tokens to (most, ...); returns others as they are."""
        if argument(name).role not in TOKEN_ROLES:
            return tensor
        # A narrow dtype might not hold ignore_index.
        values, fill = (tensor.long(), loss.ignore_index) if name == "target" else (tensor, 0)
        flat = values.reshape(count, *values.shape[len(shape) :])
        return torch.cat([flat, flat.new_full((most - count, *flat.shape[1:]), fill)]) if count < most else flat

    changed = {name: padded(name, tensor) for name, tensor in call.tensors.items()}
    # The mean over ranks also divides by their number, so num_items includes it.
    if loss.reduction == "sum":
        loss, changed["num_items"] = loss_of(**asdict(loss) | {"reduction": "mean"}), float(ranks)
    elif (number := changed.get("num_items")) is not None:
        changed["num_items"] = (number.double() if isinstance(number, Tensor) else number) * ranks

    def unpadded(result: Tensor) -> Tensor:
        """Drops the padding of a result with one number per token."""
        if not result.ndim:
            return result
        # The user may change the result in place, so it must not be a view.
        rank_result = result[:count].reshape(shape).clone()
        # A hook on `result` would be called even without a gradient of it, if another result has one.
        if rank_result.requires_grad:
            rank_result.register_hook(lambda grad: grad / ranks)
        return rank_result

    return tuple(map(unpadded, run(changed, loss, options, ranks=shard)))
