"""Arguments of a region's symbols: settings, as plain values that a trace can print, and the specs of a call."""

from collections.abc import Mapping
from typing import Any

from thunder import clang
from thunder.core import devices, dtypes
from thunder.core.jit_ext import get_jit_ctx
from thunder.core.proxies import NumberProxy, StringProxy, TensorProxy
from thunder.core.trace import get_tracectx
from torch.utils._pytree import tree_map

from thunder_flce.operation.call import Call, Spec
from thunder_flce.operators import Settings, settings_text


def settings_of(values: Mapping[str, Any]) -> Settings:
    """Returns the `Settings` that a symbol's keyword arguments describe."""
    text = settings_text(values)
    return Settings.parse(settings_text(plain(values)) if "Proxy" in text else text)


def plain(values: Any) -> Any:
    """Replaces thunder's proxies of symbolic numbers and strings by their values; other values will recompile."""

    def plain_value(item: Any) -> Any:
        if isinstance(item, NumberProxy):
            if item.value is None:
                raise TypeError(
                    "linear_cross_entropy takes no number that a compiled program reads from a tensor, such as by "
                    ".item(): compute the number outside the program"
                )
            item.make_static_constrained()
            _check_origins(item)
        return item.value if isinstance(item, NumberProxy | StringProxy) else item

    return tree_map(plain_value, values)


def _check_origins(number: NumberProxy) -> None:
    """Has thunder check, in each call, that a number is unchanged, or the sizes and numbers it is computed from.

    By itself, thunder checks no sizes, and checks only numbers that an operation reads. A region has plain values
    instead.
    """
    if number.history is not None:
        get_jit_ctx().add_constraint((clang.check_number_type_and_value, number, number.value))
        return
    for bsym in get_tracectx().bound_symbols:
        if any(out is number for out in bsym.flat_proxy_outs):
            for arg in bsym.flat_proxy_args:
                if isinstance(arg, NumberProxy):
                    _check_origins(arg)


def specs(call: Call) -> Call:
    """Returns a call with specs in place of proxies, and of numbers that were given in place of tensors."""
    call = call.map(lambda _, value: spec_of(value) if isinstance(value, TensorProxy) else value)
    number = Spec((), call.row_dtype, call.device)
    return call.map(lambda _, value: value if isinstance(value, Spec) else number)


def spec_of(proxy: TensorProxy) -> Spec:
    """Returns the shape, dtype and device of a proxy."""
    return Spec(tuple(map(int, proxy.shape)), dtypes.to_torch_dtype(proxy.dtype), devices.to_torch_device(proxy.device))
