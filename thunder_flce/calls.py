"""Checks, plans and runs a call, given its tensors by name.

The settings of a call are kept. Calls with the same planned number of tokens (`operators.planned_tokens`) that differ
in nothing but the number of tokens reuse them, and are neither checked nor planned again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from thunder_flce.autograd import differentiable_forward, names_needing_grad
from thunder_flce.operation.call import COLUMN, HIDDEN, Call, argument, have_token_dimensions, is_traced
from thunder_flce.operation.checks import check_call, check_scalar
from thunder_flce.operators import Settings, plan_for, planned_tokens
from thunder_flce.options import Options, plain

_settings_cache: dict[Any, Settings] = {}
"""Settings of direct calls that were checked and planned before. The key is `_cache_key` of the tensors, the loss's id,
the options, the ranks and the grad mode. The settings keep the loss alive, so that no other object gets its id."""
_MOST_CACHED = 4096
_PLAIN_TENSORS = (Tensor, torch.nn.Parameter)
"""Tensor types that the engine may take without the dispatcher; subclasses may have a `__torch_dispatch__`"""


def run(call: Call, options: Options) -> Sequence[Tensor]:
    """Runs a call; returns the loss and its outputs.

    Args:
        call: not checked yet, with tensors from `named_tensors` and a loss from `loss_of`; num_items and
            expected_gradient may be numbers.
        options: choices about time and memory.
    """
    tensors, loss = scalars_as_tensors(call.tensors), call.loss
    # Inside transforms of torch.func, `requires_grad` does not tell whether an outer transform needs the gradient.
    key = None if torch._C._are_functorch_transforms_active() else _cache_key(tensors)
    if key is not None:
        # By id, since an equal loss may have a number of another type, which has to be checked.
        key = (key, id(loss), options, call.shard, call.vocab_parallel, torch.is_grad_enabled())
    settings = _settings_cache.get(key)
    if settings is None:
        settings = _settings_for(replace(call, tensors=tensors), options)
        if settings.options is not None:  # The operator makes the plan.
            key = None
        if key is not None:
            if len(_settings_cache) >= _MOST_CACHED:
                _settings_cache.clear()
            _settings_cache[key] = settings
    is_direct = key is not None and not _is_watched()
    return differentiable_forward(settings, [*tensors.values()], is_direct=is_direct)[: 1 + len(loss.outputs)]


def _is_watched() -> bool:
    """Whether a mode or a profiler is active, which has to see the operator."""
    stacks = torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack()
    return stacks > 0 or torch.autograd._profiler_enabled()


def _cache_key(tensors: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """Returns a key of a call's tensors: their names, dtypes, devices and sizes, with the planned number of tokens.

    None if the engine cannot run without the dispatcher: if a value is not a tensor, or is a meta, a nested or a
    negated tensor, or a subclass; and None if a tensor does not have the input's tokens.
    """
    input = tensors.get("input")
    if input is None or type(input) not in _PLAIN_TENSORS or input.is_nested:
        return None
    names, dimensions = tuple(tensors), input.ndim - 1
    tokens = input.shape[:dimensions]
    key = [names, dimensions, planned_tokens(tokens.numel())]
    for value, has_tokens in zip(tensors.values(), have_token_dimensions(names), strict=True):
        if type(value) not in _PLAIN_TENSORS or value.is_nested or value.is_meta or value.is_neg():
            return None
        shape = value.shape
        if has_tokens:
            if shape[:dimensions] != tokens:
                return None
            shape = shape[dimensions:]
        key += (shape, value.dtype, value.device, value.layout, value.requires_grad)
    return tuple(key)


def _settings_for(call: Call, options: Options) -> Settings:
    """Checks and plans a call; returns its settings."""
    if call.vocab_parallel is None:  # Otherwise the ranks agree, and check the call, when the operator runs.
        check_call(call)
    call = replace(call, needs_grad=names_needing_grad(call.tensors))
    if call.vocab_parallel is not None or (call.shard is None and is_traced(call.tensors["input"])):
        return Settings.unplanned(call, options)
    return Settings.planned(call, plan_for(call, options))


def scalars_as_tensors(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the arguments with num_items and expected_gradient as tensors.

    Raises:
        TypeError, ValueError: if such an argument is a number that it must not be.
    """
    tensors = arguments
    for name in ("num_items", "expected_gradient"):
        if name not in arguments or isinstance(number := arguments[name], Tensor):
            continue
        check_scalar(name, number)
        if isinstance(input := arguments.get("input"), Tensor):
            tensors = {**tensors, name: scalar_tensor(number, like=input)}
    return tensors


def scalar_tensor(number: Any, *, like: Tensor) -> Tensor:
    """Returns a number as a tensor, in the row dtype and on the device of the operand `like`."""
    dtype = torch.float64 if like.dtype is torch.float64 else torch.float32
    # `full` would specialise a symbol; multiplied, it stays one, and a program is compiled once for all values.
    is_symbol = isinstance(number, torch.SymInt | torch.SymFloat)
    tensor = torch.full((), 1 if is_symbol else plain(number), dtype=dtype, device=like.device)
    return tensor * number if is_symbol else tensor


def autocast(tensors: dict[str, Any]) -> dict[str, Any]:
    """Casts the linears' operands as `torch.autocast` does for `torch.nn.functional.linear`: all but float64 ones."""
    if not torch._C._is_any_autocast_enabled():  # Which takes the host less time than the next lines.
        return tensors
    device_type = tensors["input"].device.type if isinstance(tensors.get("input"), Tensor) else "cpu"
    if not torch.amp.is_autocast_available(device_type) or not torch.is_autocast_enabled(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)

    def is_cast(name: str, tensor: Any) -> bool:
        is_operand = argument(name).role in (HIDDEN, COLUMN) and isinstance(tensor, Tensor)
        return is_operand and tensor.is_floating_point() and tensor.dtype is not torch.float64

    return {name: tensor.to(dtype) if is_cast(name, tensor) else tensor for name, tensor in tensors.items()}
