"""Calls of several ranks: the agreement of the ranks and the part of this rank, before that part runs."""

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from thunder_flce.agreement import agreement_on
from thunder_flce.operation.call import TOKEN_ROLES, Call, RankPart, is_traced
from thunder_flce.operation.checks import check_call
from thunder_flce.operation.loss import loss_of
from thunder_flce.options import Options
from thunder_flce.vocab_parallel import ONLY_EAGER, VocabParallel, as_literal, has_dtensor, is_dtensor


def on_ranks(call: Call, options: Options, parallel: VocabParallel | None) -> Callable[[], RankPart]:
    """Returns the function that has the ranks agree on a call; in a traced program, they agree when the operator runs.

    The call is not checked yet. Errors that are raised before the returned function is called are errors of this rank
    alone, so the caller has to `share_error`.
    """
    if parallel is None:
        from thunder_flce.dtensor import on_mesh

        return on_mesh(call, options)
    has_dtensors = has_dtensor([*call.tensors.values()])
    tensors = [value for value in call.tensors.values() if isinstance(value, Tensor)]
    if is_traced(call.tensors.get("input")) and all(map(is_traced, tensors)):
        if has_dtensors:
            raise NotImplementedError(ONLY_EAGER)
        traced = replace(call, vocab_parallel=as_literal(parallel))
        return lambda: (traced, tuple)
    if has_dtensors:
        from thunder_flce.dtensor import with_local_weights

        call = with_local_weights(call, parallel)
    agree = agreement_on(parallel, call, options)

    def agreed_part() -> RankPart:
        part = replace(call, shard=agree())
        if is_dtensor(weight := call.tensors.get("weight")):
            part = replace(part, tensors={**call.tensors, "weight": weight.full_tensor()})
        return _averaged(part) if parallel.data_parallel else (part, tuple)

    return agreed_part


def _averaged(call: Call) -> RankPart:
    """Returns this rank's part of a call with `VocabParallel.data_parallel` that the ranks have agreed on.

    FSDP and DDP average gradients over the ranks, so the loss to differentiate is the mean over ranks of their losses.
    A call with `sequence_parallel` computes it if all ranks have equally many tokens, so ranks with fewer tokens are
    padded with ignored ones.
    """
    check_call(call)
    assert call.shard is not None
    loss, shape, count = call.loss, call.shape, call.own_tokens
    ranks, most = call.shard.ranks, call.shard.most_tokens

    def padded(name: str, tensor: Any) -> Any:
        """Pads a tensor of this rank's tokens to (most, ...); returns others as they are."""
        if call.roles[name] not in TOKEN_ROLES:
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
        rank_result = result[:count].reshape((*shape, *result.shape[1:])).clone()
        # A hook on `result` would be called even without a gradient of it, if another result has one.
        if rank_result.requires_grad:
            rank_result.register_hook(lambda grad: grad / ranks)
        return rank_result

    # Without the number of tokens, calls that differ only in it share their settings.
    part = Call(tensors=changed, loss=loss, shard=replace(call.shard, most_tokens=0))
    return part, lambda results: tuple(map(unpadded, results))
