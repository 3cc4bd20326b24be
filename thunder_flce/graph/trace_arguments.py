"""The operators' settings as arguments of a symbol: plain values, spelled out, which a trace prints and hashes."""

from collections.abc import Mapping
from dataclasses import fields
from functools import lru_cache
from typing import Any

import torch
from thunder.core import devices, dtypes
from thunder.core.proxies import TensorProxy

from thunder_flce.engine.plan import Plan
from thunder_flce.operation.call import Call, Spec
from thunder_flce.operation.loss import Loss
from thunder_flce.operation.shard import Shard
from thunder_flce.operators import Settings
from thunder_flce.options import Options


def arguments_of(settings: Settings) -> dict[str, Any]:
    """The names of the tensors and of those that need a gradient; the fields of the loss and the plan that matter."""
    found = {"names": settings.names, "needs_grad": settings.needs_grad}
    found |= {**settings.loss.non_defaults(), **settings.plan.non_defaults()}
    for name in ("options", "shard"):
        if (value := getattr(settings, name)) is not None:
            found[name] = value.non_defaults()
    return found if settings.vocab_parallel is None else found | {"vocab_parallel": settings.vocab_parallel}


def settings_of(arguments: Mapping[str, Any]) -> Settings:
    """The settings that `arguments_of` has spelled out."""
    return _settings_of(tuple([(k, tuple(v.items()) if type(v) is dict else v) for k, v in arguments.items()]))


@lru_cache(maxsize=1024)
def _settings_of(arguments: tuple[tuple[str, Any], ...]) -> Settings:
    given = dict(arguments)
    loss = Loss(**{each.name: given[each.name] for each in fields(Loss) if each.name in given})
    kinds = {"options": Options, "shard": Shard}
    others = {name: kind(**dict(given[name])) for name, kind in kinds.items() if name in given}
    return Settings(
        names=given["names"], needs_grad=given["needs_grad"], loss=loss, plan=Plan.of(given),
        vocab_parallel=given.get("vocab_parallel"), **others,
    )  # fmt: skip


def specs(call: Call) -> Call:
    """The same without proxies, and without the numbers that are given in place of tensors."""
    like = spec_of(call.tensors["input"])
    number = Spec((), torch.float64 if like.dtype is torch.float64 else torch.float32, like.device)
    return call.map(lambda _, value: spec_of(value) if isinstance(value, TensorProxy) else number)


def spec_of(proxy: TensorProxy) -> Spec:
    """What is known of a tensor."""
    return Spec(tuple(map(int, proxy.shape)), dtypes.to_torch_dtype(proxy.dtype), devices.to_torch_device(proxy.device))
