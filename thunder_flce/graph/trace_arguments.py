"""What a region's symbols take, as the operators do: settings, in plain values that a trace prints, and a call."""

from collections.abc import Mapping
from typing import Any

import torch
from thunder.core import devices, dtypes
from thunder.core.proxies import NumberProxy, StringProxy, TensorProxy
from torch.utils._pytree import tree_map

from thunder_flce.operation.call import Call, Spec
from thunder_flce.operators import Settings, written


def settings_of(values: Mapping[str, Any]) -> Settings:
    """The settings whose values are a symbol's arguments by name."""
    text = written(values)
    return Settings.parse(written(plain(values)) if "Proxy" in text else text)


def plain(values: Any) -> Any:
    """Without the proxies that thunder has for numbers and strings among its symbolic values: others compile anew."""

    def value(given: Any) -> Any:
        if isinstance(given, NumberProxy):
            given.make_static_constrained()
        return given.value if isinstance(given, NumberProxy | StringProxy) else given

    return tree_map(value, values)


def specs(call: Call) -> Call:
    """The same without proxies, and without the numbers that are given in place of tensors."""
    like = spec_of(call.tensors["input"])
    number = Spec((), torch.float64 if like.dtype is torch.float64 else torch.float32, like.device)
    return call.map(lambda _, value: spec_of(value) if isinstance(value, TensorProxy) else number)


def spec_of(proxy: TensorProxy) -> Spec:
    """What is known of a tensor."""
    return Spec(tuple(map(int, proxy.shape)), dtypes.to_torch_dtype(proxy.dtype), devices.to_torch_device(proxy.device))
