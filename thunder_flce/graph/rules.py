"""How thunder's interpreter traces a call of `linear_cross_entropy`."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from thunder import clang
from thunder.core.interpreter import INTERPRETER_SIGNALS, do_raise, unwrap
from thunder.core.jit_ext import (
    get_jit_ctx,
    interpreter_needs_wrap,
    record_source_loc_in_symbol_header,
    recursively_proxy,
    register_general_jit_lookaside,
    should_register_for_prologue,
)
from thunder.core.prims import OpTags
from thunder.core.proxies import AnyProxy, StringProxy, TensorProxy
from thunder.extend import get_executor
from thunder.torch import _torch_to_thunder_function_map as torch_to_thunder_functions

from thunder_flce import functional
from thunder_flce.graph import symbols, thunder_fixes
from thunder_flce.graph.token_functions import interpreted_token_loss
from thunder_flce.operators import Settings
from thunder_flce.options import Options
from thunder_flce.token_losses import check_function
from thunder_flce.vocab_parallel import ONLY_EAGER, as_literal

UNGUARDED = (
    "thunder does not notice when vocab_parallel changes if the jitted function itself makes it, such as by "
    "mesh.get_group() or VocabParallel(group=group): make it outside the function"
)

_RECORDED = vars(functional.linear_cross_entropy)["__wrapped__"]
"""The function in Dynamo's graphs."""


# `torchsymbol` alone is not enough: thunder copies its table of functions at its import.
@register_general_jit_lookaside(functional.linear_cross_entropy)
@register_general_jit_lookaside(_RECORDED)
def _lookaside(*args: Any, **kwargs: Any) -> Any:
    """Called by thunder's interpreter, with wrapped values, in place of `functional.linear_cross_entropy`."""
    thunder_fixes.apply()
    try:
        return _traced(*args, **kwargs)
    except (NotImplementedError, TypeError, ValueError) as error:
        return do_raise(error)


def _traced(*args: Any, **kwargs: Any) -> Any:
    if any(hasattr(wrapped.value, "device_mesh") for wrapped in (*args, *kwargs.values())):
        raise NotImplementedError(ONLY_EAGER)
    for string in (wrapped.value for wrapped in kwargs.values() if isinstance(wrapped.value, StringProxy)):
        # With symbolic values, thunder itself adds no check of a string.
        get_jit_ctx().add_constraint((clang.check_string_value, string, string.value))
    token_loss = kwargs.get("token_loss")
    if token_loss is not None and token_loss.value is not None:
        check_function(token_loss.value)
    kwargs.pop("autocast", None)  # In Dynamo's graphs.
    vocab_parallel = _guarded_literal(kwargs.pop("vocab_parallel", None))
    # In a sequence, recursively_proxy stops after the first item that holds a tensor.
    for item in _wrapped_items(kwargs.get("terms")):
        recursively_proxy(item, *_wrapped_items(item))
    recursively_proxy(*args, *_wrapped_items(kwargs.get("token_inputs")), **kwargs)
    if token_loss is not None and callable(token_loss.value):
        named = dict(zip(("input", "linear_weight", "target"), args, strict=False)) | kwargs
        inputs = list(map(unwrap, _wrapped_items(named.get("token_inputs"))))
        for number, value in enumerate(inputs):
            if not isinstance(value, TensorProxy):
                raise TypeError(f"token_inputs[{number}] must be a tensor, but got {type(value).__name__}")
        result = interpreted_token_loss(token_loss, unwrap(named["input"]), unwrap(named["target"]), inputs=inputs)
        if result is INTERPRETER_SIGNALS.EXCEPTION_RAISED:
            return result
        kwargs = {**kwargs, "token_loss": result}
    region = partial(symbols.linear_cross_entropy, vocab_parallel=vocab_parallel)
    return interpreter_needs_wrap(record_source_loc_in_symbol_header(region))(*args, **kwargs)


@register_general_jit_lookaside(torch.ops.thunder_flce.linear_cross_entropy.default)
def _operator_lookaside(tensors: Any, settings: Any) -> Any:
    """Traces the operator that `thunderfx` has written into Dynamo's graph as the region's symbol, with its plan."""
    recursively_proxy(*_wrapped_items(tensors))
    return interpreter_needs_wrap(record_source_loc_in_symbol_header(_region_of_operator))(tensors, settings)


def _region_of_operator(tensors: Sequence[TensorProxy], settings: str) -> tuple[TensorProxy, ...]:
    """Adds the operator's region to the trace; returns the loss and its outputs, as the operator does."""
    parsed = Settings.parse(settings)
    return symbols.add_region(parsed.call(tensors), parsed.options or Options())[0]


torch_to_thunder_functions[torch.ops.thunder_flce.linear_cross_entropy.default] = _region_of_operator
# thunder calls this entry to find out whether it can run the call in a Dynamo graph.
torch_to_thunder_functions[_RECORDED] = lambda *args, autocast=None, **kwargs: symbols.linear_cross_entropy(
    *args, **kwargs
)


def _guarded_literal(wrapped: Any) -> str | None:
    """Returns a wrapped vocab_parallel as a string, and has thunder recompile if it changes."""
    if wrapped is None:
        return None
    if isinstance(wrapped.value, str):  # In Dynamo's graphs.
        return wrapped.value
    literal = _literal(wrapped.value)
    if should_register_for_prologue(wrapped.provenance):
        proxy = AnyProxy(wrapped.value, history=wrapped.provenance)
        get_jit_ctx().add_constraint((_check_vocab_parallel, proxy, literal))
    elif literal is not None:
        raise NotImplementedError(UNGUARDED)
    return literal


def _literal(vocab_parallel: Any) -> str | None:
    """Returns a `VocabParallel`, or a group in its place, as a string; None for None."""
    return None if vocab_parallel is None else as_literal(vocab_parallel)


def _check_vocab_parallel_impl(vocab_parallel: Any, literal: str | None) -> None:
    if _literal(vocab_parallel) != literal:
        raise RuntimeError(f"vocab_parallel is not {literal} any more")


_check_vocab_parallel = get_executor("python").register_operator(
    "check_vocab_parallel",
    meta=lambda vocab_parallel, literal: None,
    fn=_check_vocab_parallel_impl,
    tags=(OpTags.DONT_DCE,),
)


def _wrapped_items(wrapped: Any) -> Sequence[Any]:
    """Returns the wrapped items of a wrapped list or tuple; nothing for other values."""
    if wrapped is None or not isinstance(wrapped.value, list | tuple):
        return ()
    wrapped.track_items()
    return wrapped.item_wrappers
