"""Labels of training on several ranks: how many count, and which token is predicted where."""

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from thunder_flce.operation.checks import dtype_name
from thunder_flce.vocab_parallel import group_of

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh, ProcessGroup


def count_items(target: Tensor, ignore_index: int = -100, group: "ProcessGroup | DeviceMesh | None" = None) -> Tensor:
    """The `num_items` of `linear_cross_entropy` with which data parallel training takes the mean over all tokens.

    Data parallel training averages gradients over its ranks, as DDP and FSDP do. With the mean over each rank's own
    tokens, those of a rank with few of them would weigh more. With the number of all ranks' tokens over the number of
    ranks, the averaged gradient is that of the mean over all tokens, and the loss averaged over ranks is that mean.

    With gradient accumulation, add the counts of all micro-batches, and give each of them the sum.

    Args:
        target: (...) integers. Of labels that are shifted, those after the shift.
        ignore_index: targets of this value do not count.
        group: the ranks whose gradients are averaged: of a mesh, the data parallel and context parallel ones, not those
            that divide the vocabulary. All of them must call this. None: one rank.

    Returns:
        () float32 on target's device, for which the host never waits; 0 where no target counts, for which the loss and
        its gradients are 0.

    Raises:
        TypeError, ValueError: where target is not a tensor of integers, or with group a DTensor; where
            ignore_index is not an int, or group not a group of ranks.
    """
    _check("target", target, ignore_index)
    # In a narrow dtype, ignore_index would wrap around.
    count = (target.long() != ignore_index).sum()
    if group is None:
        return count.float()
    if hasattr(target, "device_mesh"):
        raise TypeError("target must be a plain tensor with group, this rank's labels, but got a DTensor")
    ranks = group_of("group", group)
    dist.all_reduce(count, group=ranks)
    return count.float() / dist.get_world_size(ranks)


def shift_labels(labels: Tensor, ignore_index: int = -100) -> Tensor:
    """The token after each token, which is what a language model predicts there.

    To be called before tokens are divided among ranks, as context parallelism does: a part does not know the first
    token of the next one. The loss then takes these labels and all hidden states, without another shift.

    Args:
        labels: (..., T) integers.
        ignore_index: what the last token of each sequence gets.

    Returns:
        (..., T) of labels' dtype.

    Raises:
        TypeError: where labels is not a tensor of integers, or ignore_index is no int.
        ValueError: where it has no dimension, or its dtype cannot hold ignore_index.
    """
    _check("labels", labels, ignore_index)
    limits = torch.iinfo(getattr(torch, dtype_name(labels)))
    if not limits.min <= ignore_index <= limits.max:
        raise ValueError(
            f"labels are {labels.dtype}, which cannot hold ignore_index, {ignore_index}; pass labels.long()"
        )
    if not labels.ndim:
        raise ValueError("labels must be (..., T), but has no dimension")
    last = labels[..., -1:]
    return torch.cat([labels[..., 1:], torch.full_like(last, ignore_index)], -1)


def _check(name: str, tensor: Tensor, ignore_index: int) -> None:
    if not isinstance(tensor, Tensor) or "int" not in dtype_name(tensor):
        found = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise TypeError(f"{name} must be a tensor of integers, but got {found}")
    if not isinstance(ignore_index, int) and not hasattr(ignore_index, "__index__"):
        raise TypeError(f"ignore_index must be an int, but got {type(ignore_index).__name__}")
