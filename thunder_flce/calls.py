"""From arguments by name to a call that is checked and planned, and runs; what was found out about it is kept.

A call of a signature that is known, the shapes, dtypes and settings of an earlier one, is neither checked nor planned
again.
"""

from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thunder_flce.autograd import differentiable_forward, requires_grad
from thunder_flce.engine.choose import strategy_of
from thunder_flce.engine.plan import LOSS_ONLY, SAVE_LOGITS, Plan
from thunder_flce.operation.call import Call, named_tensors, operand_names
from thunder_flce.operation.checks import check_call, check_pairs, check_scalar, check_token_inputs
from thunder_flce.operation.divergence import Divergence
from thunder_flce.operation.loss import Loss
from thunder_flce.operation.shard import Shard
from thunder_flce.operators import Settings, is_traced, plan_for
from thunder_flce.options import Options


class _Known(NamedTuple):
    """What is known of calls of one signature."""

    settings: Settings
    is_direct: bool
    """Whether the engine may run without the dispatcher, unless something listens to that."""


_known: dict[Any, _Known] = {}
_MOST_KNOWN = 4096
_PLAIN = (Tensor, torch.nn.Parameter)


def run(
    arguments: dict[str, Any], loss: tuple[Any, ...], options: Options, *, divergence: Divergence | None = None
) -> Sequence[Tensor]:  # fmt: skip
    """The loss and its outputs. What is checked, and the plan, are kept for further calls of the same signature.

    Args:
        arguments: of `linear_cross_entropy` or `linear_kl_divergence`, by name.
        loss: the fields of a `Loss`, in order.
        options: choices about time and memory.
        divergence: of a student from a teacher.
    """
    is_plain, names, tensors = True, [], []
    specs: list[Any] = []
    try:
        if arguments.get("token_inputs") or arguments.get("terms"):
            arguments = named_tensors(arguments)
        for name, value in arguments.items():
            if type(value) in _PLAIN:
                names.append(name)
                tensors.append(value)
                specs.append((value.shape, value.dtype, value.device, value.requires_grad, value.is_neg()))
            elif type(value) in (int, float):
                names.append(name)
                tensors.append(_as_tensor(value, arguments["input"]))
                specs.append(type(value))
                check_scalar(name, value)
            elif value is not None and value != ():
                is_plain = False
        key = (*names, *specs, *loss, *map(type, loss), options, divergence, torch.is_grad_enabled())
        known = _known.get(key) if is_plain else None
    except (TypeError, ValueError, AttributeError, RuntimeError, OverflowError):
        # Something that is no tensor or not hashable: the checks say what is wrong.
        is_plain = False
    if not is_plain:
        return _run_anew(arguments, loss, options, divergence=divergence)
    if known is None:
        known = _prepared(arguments, loss, options, divergence=divergence)
        if known.is_direct:
            if len(_known) >= _MOST_KNOWN:
                _known.clear()
            _known[key] = known
    is_direct = known.is_direct and not _is_watched()
    results = differentiable_forward(known.settings, tensors, is_direct=is_direct)
    return results[: 1 + len(known.settings.loss.outputs)]


def _is_watched() -> bool:
    """Whether a mode, a profiler or a transform of torch.func has to see the operator."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or torch.autograd._profiler_enabled()
    )


def _run_anew(
    arguments: dict[str, Any], loss: tuple[Any, ...], options: Options, *, divergence: Divergence | None
) -> Sequence[Tensor]:
    """A call whose signature is not kept: of a program that is traced, or of subclasses of tensors."""
    check_pairs(arguments.get("terms", ()))
    check_token_inputs(arguments.get("token_inputs", ()))
    known = _prepared(arguments, loss, options, divergence=divergence)
    return finish(known.settings, arguments, is_direct=known.is_direct)


def finish(settings: Settings, arguments: Mapping[str, Any], *, is_direct: bool) -> Sequence[Tensor]:
    """The results of a call that is checked and planned."""
    tensors = [*named_tensors(with_tensors(arguments)).values()]
    is_plain = is_direct and not _is_watched() and not any(tensor.is_neg() for tensor in tensors)
    results = differentiable_forward(settings, tensors, is_direct=is_plain)
    return results[: 1 + len(settings.loss.outputs)]


def loss_of(fields: tuple[Any, ...]) -> Loss:
    """The loss with such fields; numbers become Python's own."""
    reduction, *numbers, outputs, detached, token_loss, target_rest = fields
    names = ("ignore_index", "label_smoothing", "logit_scale", "softcap", "z_loss", "vocab_size")
    given = dict(zip(names, map(plain, numbers), strict=True))
    return Loss(
        reduction=reduction, outputs=outputs, detached=detached, token_loss=token_loss, target_rest=target_rest, **given
    )


def _prepared(
    arguments: Mapping[str, Any], loss: tuple[Any, ...], options: Options, *, divergence: Divergence | None
) -> _Known:
    """Checks a call, and plans it."""
    found = loss_of(loss)
    check_call(arguments, loss=found, divergence=divergence)
    tensors = named_tensors(with_tensors(arguments))
    call = Call(tensors=tensors, loss=found, needs_grad=needed(tensors), divergence=divergence)
    is_direct = all(type(t) in _PLAIN and not t.is_meta and not t.is_neg() for t in tensors.values())
    if is_traced(call.tensors["input"]):
        return _Known(unplanned(call, options), False)
    return _Known(settings_of_call(call, plan_for(call, options)), is_direct)


def settings_of_call(call: Call, plan: Plan, *, shard: Shard | None = None) -> Settings:
    """The operators' settings of a call that is planned."""
    return Settings(
        names=tuple(call.tensors), loss=call.loss, needs_grad=call.needs_grad, plan=plan, divergence=call.divergence,
        shard=shard,
    )  # fmt: skip


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
        options = _with_strategy(options, strategy)
    plan = Plan(strategy=strategy, float32_logits=options.has_float32_logits(call.dtype))
    return Settings(
        names=tuple(call.tensors), loss=call.loss, needs_grad=call.needs_grad, plan=plan, options=options,
        divergence=call.divergence, vocab_parallel=vocab_parallel,
    )  # fmt: skip


def _with_strategy(options: Options, strategy: str) -> Options:
    given = {name: plain(value) for name, value in options.non_defaults().items()}
    return Options(**{**given, "strategy": strategy})


def needed(tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
    """The names of the tensors whose gradient is needed."""
    if not torch.is_grad_enabled():
        return ()
    return tuple(name for name in operand_names(tensors) if requires_grad(tensors[name]))


def with_tensors(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments, with tensors in place of numbers."""
    found = {**arguments}
    for name in ("num_items", "expected_gradient"):
        if (number := arguments.get(name)) is not None and not isinstance(number, Tensor):
            found[name] = _as_tensor(number, arguments["input"])
    return found


def _as_tensor(number: float, input: Tensor) -> Tensor:
    dtype = torch.float64 if input.dtype is torch.float64 else torch.float32
    return torch.full((), number, dtype=dtype, device=input.device)


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


def plain(number: Any) -> Any:
    """A number as Python's own, which the operator's settings need: it may be NumPy's, or a compiler's symbol."""
    if number is None or type(number) in (int, float, bool):
        return number
    if isinstance(number, Integral | torch.SymInt):
        return int(number)
    return float(number) if isinstance(number, Real | torch.SymFloat) else number
