"""Calls of several ranks: who has which part of them, before the part of this rank runs."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from thunder_flce.calls import run
from thunder_flce.operation.call import named_tensors
from thunder_flce.operation.loss import Loss
from thunder_flce.operators import is_traced
from thunder_flce.options import Options
from thunder_flce.vocab_parallel import (
    ONLY_EAGER,
    VocabParallel,
    agree,
    as_literal,
    has_dtensor,
    is_dtensor,
    refuse,
    settings_of,
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
        if parallel.data_parallel or has_dtensor([*arguments.values()]):
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
    if not parallel.data_parallel:
        return run(tensors, loss, options, ranks=agreement)
    from thunder_flce.data_parallel import run_averaged

    return run_averaged(tensors, loss, options, agreement)
