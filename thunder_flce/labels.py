"""Labels for training on several ranks: counting the valid ones, and shifting them by one token."""

import torch
import torch.distributed as dist
from torch import Tensor

from thunder_flce.operation.checks import dtype_name
from thunder_flce.vocab_parallel import group_of


def count_items(
    target: Tensor, ignore_index: int = -100, group: "dist.ProcessGroup | dist.DeviceMesh | None" = None
) -> Tensor:
    """Computes the `num_items` with which data parallel training takes the mean of the loss over all ranks' tokens.

    DDP and FSDP average gradients over ranks. If each rank took the mean over its own tokens, the tokens of a rank with
    few of them would weigh more. With num_items = (valid tokens on all ranks) / (number of ranks), the averaged
    gradient is that of the mean over all tokens, and the average of the ranks' losses is that mean.

    With gradient accumulation, add the counts of all micro-batches, and pass the sum with each micro-batch.

    Args:
        target: (...) integers; if labels are shifted, the labels after the shift.
        ignore_index: targets with this value do not count.
        group: the ranks whose gradients are averaged: the data parallel and context parallel ranks of a mesh, not those
            that divide the vocabulary. All of them must call this function. None: one rank.

    Returns:
        () float32 on target's device; the host never waits for its value. It is 0 if no target counts, and then the
        loss and its gradients are 0.

    Raises:
        TypeError, ValueError: if target is not a tensor of integers, or is a DTensor although group is given; if
            ignore_index is not an int, or group is not a group of ranks.
    """
    _check("target", target, ignore_index)
    # A narrow dtype might not hold ignore_index, which would wrap around.
    count = (target.long() != ignore_index).sum()
    if group is None:
        return count.float()
    if hasattr(target, "device_mesh"):
        raise TypeError("target must be a plain tensor with group, this rank's labels, but got a DTensor")
    ranks = group_of("group", group)
    dist.all_reduce(count, group=ranks)
    return count.float() / dist.get_world_size(ranks)


def shift_labels(labels: Tensor, ignore_index: int = -100) -> Tensor:
    """Shifts labels by one token: each token gets the label of the next one, which a language model predicts there.

    Call it before tokens are divided among ranks, as by context parallelism: a rank does not have the first label of
    the next rank. Then pass the shifted labels to the loss with all hidden states, without another shift.

    Args:
        labels: (..., T) integers.
        ignore_index: label of the last token of each sequence.

    Returns:
        (..., T) of labels' dtype.

    Raises:
        TypeError: if labels is not a tensor of integers, or ignore_index is not an int.
        ValueError: if labels has no dimension, or its dtype cannot hold ignore_index.
    """
    _check("labels", labels, ignore_index)
    limits = torch.iinfo(getattr(torch, dtype_name(labels.dtype)))
    if not limits.min <= ignore_index <= limits.max:
        raise ValueError(
            f"labels are {labels.dtype}, which cannot hold ignore_index, {ignore_index}; pass labels.long()"
        )
    if not labels.ndim:
        raise ValueError("labels must have at least one dimension, (..., T), but got a tensor without any")
    last = labels[..., -1:]
    return torch.cat([labels[..., 1:], torch.full_like(last, ignore_index)], -1)


def _check(name: str, tensor: Tensor, ignore_index: int) -> None:
    if not isinstance(tensor, Tensor) or "int" not in dtype_name(tensor.dtype):
        kind = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise TypeError(f"{name} must be a tensor of integers, but got {kind}")
    if not isinstance(ignore_index, int) and not hasattr(ignore_index, "__index__"):
        raise TypeError(f"ignore_index must be an int, but got {type(ignore_index).__name__}")
