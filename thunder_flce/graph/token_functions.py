"""From a function that a program gives as `token_loss` to plain values, by thunder's interpreter.

It runs the function on stand-ins as it runs the program, so that what the function reads is checked by the prologue.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from thunder.core import dtypes
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol

from thunder_flce.graph.matching.logits_path import COPIES
from thunder_flce.graph.matching.trace_index import carries_grad, loss_dtype
from thunder_flce.graph.thunder_private import (
    INTERPRETER_SIGNALS,
    do_raise,
    get_tracectx,
    interpret_call,
    unwrap,
    wrap_const,
)
from thunder_flce.operation.token_loss import CASTS, VARIABLES, NotOfTokens, TokenLossWriter, input_name
from thunder_flce.token_functions import in_place, names_asked_for, not_of_tokens


def interpreted_token_loss(
    function: Any, input: TensorProxy, target: TensorProxy, *, inputs: Sequence[TensorProxy]
) -> Any:
    """What `thunder_flce.token_functions.token_loss_of` gives, of a wrapped function, and wrapped; or a signal."""
    positional = [*VARIABLES[:2], *map(input_name, range(len(inputs)))]
    of_inputs = {
        input_name(number): loss_dtype(input) if dtypes.is_float_dtype(each.dtype) else each.dtype
        for number, each in enumerate(inputs)
    }
    trace = get_tracectx()
    steps: list[BoundSymbol] = []

    def stand_in(name: str) -> TensorProxy:
        dtype = of_inputs.get(name, loss_dtype(input))
        return TensorProxy(shape=tuple(target.shape), device=input.device, dtype=dtype, requires_grad=name in VARIABLES)

    trace.push_scope(steps)
    try:
        by_name = names_asked_for(unwrap(function), positional)
        given = {name: stand_in(name) for name in (*positional, *by_name)}
        wrapped = {name: wrap_const(proxy) for name, proxy in given.items()}
        result = interpret_call(
            function, *(wrapped[name] for name in positional), **{name: wrapped[name] for name in by_name}
        )
        if result is INTERPRETER_SIGNALS.EXCEPTION_RAISED:
            return result
        names = {proxy.name: name for name, proxy in given.items()}
        writer = TokenLossWriter([*map(dtypes.to_torch_dtype, of_inputs.values())])
        return wrap_const(_written(writer, steps, unwrap(result), names))
    except NotOfTokens as problem:
        return do_raise(not_of_tokens(problem))
    except TypeError as problem:
        return do_raise(problem)
    finally:
        trace.pop_scope()


def _written(writer: TokenLossWriter, steps: Sequence[BoundSymbol], result: Any, names: Mapping[str, str]) -> Any:
    known, shared = dict(names), set(names)

    def name_of(argument: Any) -> Any:
        if not isinstance(argument, TensorProxy):
            return argument
        if argument.name not in known:
            raise NotOfTokens("a tensor that is not among its arguments; give it to token_inputs")
        return known[argument.name]

    for bsym in steps:
        out = bsym.output
        if out is None:
            continue  # Turns gradients off or on, which the results say.
        if not isinstance(out, TensorProxy):
            raise NotOfTokens(bsym.sym.name)
        is_copy = bsym.sym.id in COPIES or bsym.sym.name in CASTS
        if is_copy:
            name = writer.cast(name_of(bsym.flat_proxy_args[0]), dtypes.to_torch_dtype(out.dtype))
        else:
            args, kwargs = list(map(name_of, bsym.args)), {name: name_of(each) for name, each in bsym.kwargs.items()}
            name = writer.write(bsym.sym.name.removesuffix("_"), args, kwargs)
        if bsym.sym.name.endswith("_"):
            if bsym.args[0].name in shared:
                raise in_place(bsym.sym.name)
            if carries_grad(bsym.args[0]) and not carries_grad(out):
                raise NotOfTokens(f"{bsym.sym.name} in place without gradients, of a tensor that has some")
            # The tensor that was changed stands for the result from now on.
            known[bsym.args[0].name] = name
        elif is_copy or bsym.sym.name == "detach":
            shared |= {proxy.name for proxy in (*bsym.flat_proxy_args, out)}
        known[out.name] = name if carries_grad(out) else writer.detached(name)
    if not isinstance(result, TensorProxy):
        raise NotOfTokens(f"{type(result).__name__} as its result")
    return writer.finish(name_of(result))
