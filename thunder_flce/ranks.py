"""Calls of several ranks: who has which part of them, before the part of this rank runs."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from thunder_flce.calls import finish, needed, settings_of_call, unplanned, with_tensors
from thunder_flce.operation.call import Call, named_tensors
from thunder_flce.operation.checks import check_call
from thunder_flce.operation.loss import Loss
from thunder_flce.operators import is_traced, plan_for
from thunder_flce.options import Options
from thunder_flce.vocab_parallel import (
    ONLY_EAGER,
    Agreement,
    VocabParallel,
    agree,
    as_literal,
    flat_tensors,
    has_dtensor,
    is_dtensor,
    refuse,
    settings_of,
)


def run_on_ranks(
    arguments: Mapping[str, Any], loss: Loss, options: Options, *, vocab_parallel: Any
) -> Sequence[Tensor]:
    """The loss and its outputs, from the arguments of `linear_cross_entropy` by name."""
    is_dtensors = has_dtensor(tuple(arguments.values()))
    if vocab_parallel is None:
        from thunder_flce.dtensor import DividedCall

        divided, agreement = DividedCall.of(flat_tensors(arguments), loss), None
        if divided.vocab_parallel is not None:
            # Before `parts`, which redistributes.
            agreement = agree(divided.vocab_parallel, divided.tensors, loss=loss, options=options)
        return divided.whole(_run(divided.parts(), loss, options, agreement))
    parallel = VocabParallel.of(vocab_parallel)
    if is_traced(arguments["input"]):
        if parallel.data_parallel or is_dtensors:
            raise NotImplementedError(ONLY_EAGER)
        # They agree, and the arguments are checked, when the operator runs.
        tensors = with_tensors(flat_tensors(arguments))
        call = Call(tensors=named_tensors(tensors), loss=loss, needs_grad=needed(tensors))
        literal = as_literal(**settings_of(parallel))
        return finish(unplanned(call, options, vocab_parallel=literal), tensors, is_direct=False)
    found, agreement = _agreed_parts(parallel, arguments, loss=loss, options=options)
    if not parallel.data_parallel:
        return _run(found, loss, options, agreement)
    from thunder_flce.data_parallel import AveragedCall

    averaged = AveragedCall.of(found, loss, agreement)
    return averaged.own(tuple(_run(averaged.tensors, averaged.loss, options, agreement)))


def _run(tensors: Mapping[str, Any], loss: Loss, options: Options, agreement: Agreement | None) -> Sequence[Tensor]:
    """The results of this rank's part, by flat names."""
    check_call(tensors, loss=loss, vocab=None if agreement is None else agreement.weight_rows)
    tensors = with_tensors(tensors)
    shard, memory = (None, None) if agreement is None else (agreement.shard, agreement.memory)
    call = Call(tensors=named_tensors(tensors), loss=loss, needs_grad=needed(tensors), shard=shard)
    settings = settings_of_call(call, plan_for(call, options, memory=memory), shard=shard)
    return finish(settings, tensors, is_direct=True)


def _agreed_parts(
    parallel: VocabParallel, arguments: Mapping[str, Any], *, loss: Loss, options: Options
) -> tuple[dict[str, Any], Agreement]:
    """This rank's tensors by name, weights that are DTensors among them as plain ones, and what all ranks agree on.

    Raises:
        TypeError, ValueError: for what differs, or what a rank refuses; on all ranks.
    """
    try:
        tensors = flat_tensors(arguments)
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
    return tensors, agreement
