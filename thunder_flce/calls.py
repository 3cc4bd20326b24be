"""From the tensors of a call, by name, to one that is checked and planned, and runs.

What was found out about a call is kept for all that differ from it in the number of tokens alone, as far as plans do
not depend on that (`operators.planned_tokens`): these are neither checked nor planned again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from thunder_flce.autograd import differentiable_forward, requires_grad
from thunder_flce.engine.choose import strategy_of
from thunder_flce.engine.plan import LOSS_ONLY, SAVE_LOGITS, Plan
from thunder_flce.operation.call import Call, Shard, are_of_tokens, operand_names
from thunder_flce.operation.checks import check_call, check_scalar
from thunder_flce.operation.loss import Loss
from thunder_flce.operators import Settings, is_traced, is_watched, plan_for, planned_tokens
from thunder_flce.options import Options, plain

_known: dict[Any, Settings] = {}
"""Of direct calls, by what those have in common that run alike, and the number of tokens that their plan is for. The
address of the loss is in the key; the settings keep it alive."""
_MOST_KNOWN = 4096
_PLAIN = (Tensor, torch.nn.Parameter)
"""Classes of tensors that nobody else has something to say about"""


def run(
    arguments: Mapping[str, Any], loss: Loss, options: Options, *, ranks: Shard | str | None = None
) -> Sequence[Tensor]:
    """The loss and its outputs.

    Args:
        arguments: tensors by name, as `named_tensors` has them, not checked yet; num_items and expected_gradient may be
            numbers.
        loss: from `loss_of`.
        options: choices about time and memory.
        ranks: what those that divide the vocabulary have agreed on; or, in a program that is traced, who is going to
            agree, by `as_literal`.
    """
    tensors = with_tensors(arguments)
    # Inside of transforms of torch.func, a tensor does not say whether an outer one needs its gradient.
    key = None if torch._C._are_functorch_transforms_active() else _kind(tensors)
    if key is not None:
        # A loss that is equal may have a number of another type, which is to be checked.
        key = (key, id(loss), options, ranks, torch.is_grad_enabled())
    settings = _known.get(key)
    if settings is None:
        settings = _prepared(tensors, loss, options, ranks=ranks)
        if settings.options is not None:  # The operator makes the plan.
            key = None
        if key is not None:
            if len(_known) >= _MOST_KNOWN:
                _known.clear()
            _known[key] = settings
    is_direct = key is not None and not is_watched()
    return differentiable_forward(settings, [*tensors.values()], is_direct=is_direct)[: 1 + len(loss.outputs)]


def _kind(tensors: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """What tensors have in common that differ in their number of tokens alone, but are planned for the same number.

    None where the engine cannot run without the dispatcher: where something is no tensor, has no values, is a view that
    PyTorch negates when it is read, nested, of a class of its own, or of other tokens than the input.
    """
    input = tensors.get("input")
    if input is None or type(input) not in _PLAIN or input.is_nested:
        return None
    names, dimensions = tuple(tensors), input.ndim - 1
    tokens = input.shape[:dimensions]
    found = [names, dimensions, planned_tokens(tokens.numel())]
    for value, is_of_tokens in zip(tensors.values(), are_of_tokens(names), strict=True):
        if type(value) not in _PLAIN or value.is_nested or value.is_meta or value.is_neg():
            return None
        shape = value.shape
        if is_of_tokens:
            if shape[:dimensions] != tokens:
                return None
            shape = shape[dimensions:]
        found += (shape, value.dtype, value.device, value.layout, value.requires_grad)
    return tuple(found)


def _prepared(tensors: Mapping[str, Any], loss: Loss, options: Options, *, ranks: Shard | str | None) -> Settings:
    """Checks and plans a call."""
    if isinstance(ranks, str):  # They agree, and check the call, when the operator runs.
        call = Call(tensors=tensors, loss=loss, needs_grad=needed(tensors))
        return unplanned(call, options, vocab_parallel=ranks)
    call = Call(tensors=tensors, loss=loss, shard=ranks)
    check_call(call)
    call = replace(call, needs_grad=needed(tensors))
    if ranks is None and is_traced(call.tensors["input"]):
        return unplanned(call, options)
    return settings_of_call(call, plan_for(call, options))


def settings_of_call(call: Call, plan: Plan, **others: Any) -> Settings:
    """The operators' settings of a call and its plan, and other fields of them."""
    return Settings(
        names=tuple(call.tensors), loss=call.loss, needs_grad=call.needs_grad, plan=plan, shard=call.shard, **others
    )


def unplanned(call: Call, options: Options, *, vocab_parallel: str | None = None) -> Settings:
    """Those for any number of tokens: the operator makes the plan when it runs.

    Raises:
        ValueError: see `engine.choose`; and for logits to save, of columns that only all ranks together know.
    """
    strategy = strategy_of(call, options)
    if strategy == SAVE_LOGITS and vocab_parallel is not None and call.loss.vocab_size is not None:
        raise ValueError(
            'strategy must not be "save_logits" with vocab_size and vocab_parallel in a program to be compiled, '
            "which has to know how many columns of the logits this rank saves"
        )
    if strategy != LOSS_ONLY:
        options = replace(options, strategy=strategy)
    plan = Plan(strategy=strategy, float32_logits=options.has_float32_logits(call.dtype))
    return settings_of_call(call, plan, options=options, vocab_parallel=vocab_parallel)


def needed(tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
    """The names of the tensors whose gradient is needed."""
    if not torch.is_grad_enabled():
        return ()
    return tuple(name for name in operand_names(tensors) if requires_grad(tensors[name]))


def with_tensors(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments, with tensors in place of the numbers among them.

    Raises:
        TypeError, ValueError: for a number that the argument can't be.
    """
    found = arguments
    for name in ("num_items", "expected_gradient"):
        if name not in arguments or isinstance(number := arguments[name], Tensor):
            continue
        check_scalar(name, number)
        if isinstance(input := arguments.get("input"), Tensor):
            dtype = torch.float64 if input.dtype is torch.float64 else torch.float32
            # Of a symbol, a program is compiled once for all numbers: `full` would take it for the one that it is now.
            is_symbol = isinstance(number, torch.SymInt | torch.SymFloat)
            tensor = torch.full((), 1 if is_symbol else plain(number), dtype=dtype, device=input.device)
            found = {**found, name: tensor * number if is_symbol else tensor}
    return found


_loss = lru_cache(maxsize=_MOST_KNOWN, typed=True)(Loss)
_AS_THEY_ARE = frozenset((int, float, bool, str, tuple, type(None)))


def loss_of(**fields: Any) -> Loss:
    """The loss with these fields: the same object for the same ones, of the same types."""
    if not _AS_THEY_ARE.issuperset(map(type, fields.values())):
        fields = {name: plain(value) for name, value in fields.items()}
    try:
        return _loss(**fields)
    except TypeError:  # Not hashable: the checks say what is wrong.
        return Loss(**fields)


def autocast(operands: tuple[Any, ...]) -> tuple[Any, ...]:
    """Under `torch.autocast`, the linears' operands in its dtype, but for float64, as `torch.nn.functional.linear`."""
    device_type = operands[0].device.type if isinstance(operands[0], Tensor) else "cpu"
    if not torch.amp.is_autocast_available(device_type) or not torch.is_autocast_enabled(device_type):
        return operands
    dtype = torch.get_autocast_dtype(device_type)

    def cast(operand: Any) -> Any:
        if isinstance(operand, list | tuple):
            return tuple(map(cast, operand))
        is_cast = isinstance(operand, Tensor) and operand.is_floating_point() and operand.dtype is not torch.float64
        return operand.to(dtype) if is_cast else operand

    return cast(operands)
