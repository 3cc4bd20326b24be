"""The arguments of a region's symbols as a `Call`, of thunder's proxies or of what is known of them.

`region` is the same everywhere: the arguments of `symbols.linear_cross_entropy`, or of a symbol that it becomes, by
name.
"""

from collections.abc import Mapping
from dataclasses import fields
from inspect import signature
from typing import Any

from thunder.core import devices, dtypes
from thunder.core.proxies import NumberProxy, StringProxy, TensorProxy

from thunder_flce.functional import linear_cross_entropy
from thunder_flce.graph.reading import loss_dtype
from thunder_flce.matching.decisions import PlannedRegion
from thunder_flce.operation.call import Call, Spec, named_tensors, pairs
from thunder_flce.operation.loss import DIFFERENTIABLE_OUTPUTS, Loss
from thunder_flce.operation.shard import Shard

POSITIONAL = ("input", "linear_weight", "target", "linear_bias")
OUTPUT_GRADS = tuple(f"{name}_grad" for name in DIFFERENTIABLE_OUTPUTS)
"""Arguments of the backward, by name: the upstream gradients of outputs"""


def region_arguments(*tensors: Any, **settings: Any) -> dict[str, Any]:
    """The region: tensors that are given by position are the `POSITIONAL` ones; any after these are passed over."""
    return {**dict(zip(POSITIONAL, tensors, strict=False)), **settings}


def in_sequences(region: Mapping[str, Any]) -> dict[str, Any]:
    """The region with `terms` and `token_inputs` as sequences, where their items are arguments of their own."""
    found = {name: value for name, value in region.items() if "[" not in name}
    items = [value for name, value in region.items() if name.startswith("terms[")]
    inputs = tuple(value for name, value in region.items() if name.startswith("token_inputs["))
    return {**found, "terms": tuple(pairs(items)), "token_inputs": inputs}


# Of the settings: None says that there is none.
_MAY_BE_NONE = {name for name, each in signature(linear_cross_entropy).parameters.items() if each.default is None}


def call_of(region: Mapping[str, Any], needs_grad: tuple[str, ...] | None = None) -> Call:
    """The call, of the tensors and numbers of a region; needs_grad, if given, in place of what the region says."""
    given = {each.name: _plain(region[each.name]) for each in fields(Loss) if each.name in region}
    loss = Loss(**{name: value for name, value in given.items() if value is not None or name not in _MAY_BE_NONE})
    shard = Shard(**region["shard"]) if region.get("shard") else None
    needs_grad = (region.get("needs_grad") or ()) if needs_grad is None else needs_grad
    return Call(tensors=named_tensors(region), loss=loss, shard=shard, needs_grad=needs_grad)


def _plain(value: Any) -> Any:
    """A value that thunder has a proxy for among its symbolic values; another one compiles anew."""
    if not isinstance(value, NumberProxy | StringProxy):
        return value
    if isinstance(value, NumberProxy):
        value.make_static_constrained()
    return value.value


def specs(call: Call) -> Call:
    """The same without proxies."""
    like = call.tensors["input"]
    number = Spec((), dtypes.to_torch_dtype(loss_dtype(like)), devices.to_torch_device(like.device))
    return call.map(lambda name, value: spec_of(value) if isinstance(value, TensorProxy) else number)


def spec_of(proxy: TensorProxy) -> Spec:
    """What is known of a tensor."""
    return Spec(tuple(map(int, proxy.shape)), dtypes.to_torch_dtype(proxy.dtype), devices.to_torch_device(proxy.device))


def plan_arguments(planned: PlannedRegion) -> dict[str, Any]:
    """The plan and the shard as arguments of a region: the fields that differ from their defaults."""
    shard = planned.call.shard
    return {"plan": planned.plan.non_defaults(), **({"shard": shard.non_defaults()} if shard else {})}
