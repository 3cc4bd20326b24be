"""The vocabulary divided among the ranks of data parallel training: a call with tokens of each rank's own.

Each rank computes a loss of its tokens, and what comes before averages its gradients over the ranks, as FSDP and DDP
do. So what is differentiated is the mean over ranks of their losses. That is a call with `sequence_parallel`, once all
ranks have as many tokens: to those with fewer, ignored ones are added.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thunder_flce.dtensor import local_weights
from thunder_flce.operation.arguments import FLOATS, INTEGERS, dtype_name
from thunder_flce.operation.loss import Loss
from thunder_flce.vocab_parallel import VocabParallel


@dataclass(frozen=True, kw_only=True)
class AveragedCall:
    """A call of `linear_cross_entropy` with `VocabParallel.data_parallel`, as one whose ranks have as many tokens."""

    arguments: dict[str, Any]
    loss: Loss
    ranks: int
    shape: torch.Size
    """(...) of this rank's tokens"""

    @classmethod
    def of(cls, arguments: Mapping[str, Any], loss: Loss, parallel: VocabParallel) -> "AveragedCall":
        """The call. All ranks tell each other how many tokens they have, for which the host waits.

        Args:
            arguments: of `linear_cross_entropy`, by name; not checked yet. What is wrong with them stays so, until
                the ranks find out together.
            loss: the loss.
            parallel: the ranks.

        Raises:
            TypeError, ValueError: see `local_weights`; on all ranks where it is on one of them.
        """
        input, refused = arguments["input"], None
        shape = input.shape[:-1] if isinstance(input, Tensor) else torch.Size()
        count, ranks = shape.numel(), dist.get_world_size(parallel.process_group)
        try:
            arguments = local_weights(arguments, parallel)
        except (TypeError, ValueError) as error:
            refused = error
        most = _largest(count, parallel, arguments, refused=refused)

        def padded(tensor: Any, fill: float = 0) -> Any:
            """(most, ...) where the tensor has this rank's tokens. Ranks find out together where it has not."""
            if not isinstance(tensor, Tensor) or tensor.shape[: len(shape)] != shape:
                return tensor
            flat = tensor.reshape(count, *tensor.shape[len(shape) :])
            return torch.cat([flat, flat.new_full((most - count, *flat.shape[1:]), fill)]) if count < most else flat

        target = arguments["target"]
        if isinstance(target, Tensor) and dtype_name(target) in INTEGERS:
            # A narrow dtype may not hold ignore_index.
            is_index = type(loss.ignore_index) is int and -(2**63) <= loss.ignore_index < 2**63
            target = padded(target.long(), loss.ignore_index if is_index else 0)
        changed = {"input": padded(input), "target": target}
        changed["terms"] = tuple((padded(x), weight) for x, weight in arguments["terms"])
        changed["token_inputs"] = tuple(map(padded, arguments["token_inputs"]))
        changed |= {name: padded(arguments[name]) for name in ("token_weights", "target_weights")}
        # The mean over the ranks divides by their number, too.
        if loss.reduction == "sum" and arguments["num_items"] is None:
            loss, changed["num_items"] = replace(loss, reduction="mean"), float(ranks)
        elif loss.reduction == "mean" and arguments["num_items"] is not None:
            changed["num_items"] = _times(arguments["num_items"], ranks)
        return cls(arguments={**arguments, **changed}, loss=loss, ranks=ranks, shape=shape)

    def own(self, results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """This rank's results: those with one number a token, of its tokens."""
        return tuple(self._own(result) if result.ndim else result for result in results)

    def _own(self, result: Tensor) -> Tensor:
        if result.requires_grad:
            ranks = self.ranks  # Not self, whose arguments would live as long as the result.
            result.register_hook(lambda grad: grad / ranks)
        return result[: self.shape.numel()].reshape(self.shape)


def _times(number: Any, factor: int) -> Any:
    """A number, or a tensor of one in a dtype that may be too narrow, times a factor; anything else as it is."""
    if not isinstance(number, Tensor):
        return number * factor if isinstance(number, Real) and not isinstance(number, bool) else number
    if dtype_name(number) not in (*INTEGERS, *FLOATS):
        return number
    wide = torch.promote_types(number.dtype, torch.float32) if number.is_floating_point() else torch.int64
    return number.to(wide) * factor


def _largest(count: int, parallel: VocabParallel, arguments: Mapping[str, Any], *, refused: Exception | None) -> int:
    """The largest count of all ranks, none of which has refused its arguments."""
    # Any tensor of theirs is on the device that the ranks communicate on; one that is refused may be none.
    devices = (value.device for value in arguments.values() if isinstance(value, Tensor))
    found = torch.tensor([count, int(refused is not None)], device=next(devices, None))
    dist.all_reduce(found, dist.ReduceOp.MAX, group=parallel.process_group)
    largest, is_refused = found.tolist()
    if refused is not None:
        raise refused
    if is_refused:
        raise ValueError("another rank of vocab_parallel has refused its arguments; its own error says why")
    return int(largest)
