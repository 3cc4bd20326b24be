"""From a function that a program gives as `token_loss` to its text, by thunder's interpreter.

It runs the function on stand-ins as it runs the program, so that what the function reads is checked by the prologue.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from thunder.core import dtypes
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol

from thunder_flce.graph.reading import carries_grad, loss_dtype
from thunder_flce.graph.thunder_private import (
    INTERPRETER_SIGNALS,
    do_raise,
    get_tracectx,
    interpret_call,
    unwrap,
    wrap_const,
)
from thunder_flce.matching.sums import CASTS
from thunder_flce.operation.pointwise import (
    VARIABLES,
    Handle,
    NotOfTokens,
    Recorder,
    TokenLoss,
    called,
    input_name,
    names_asked_for,
    not_of_tokens,
)


def interpreted_token_loss(
    function: Any, input: TensorProxy, target: TensorProxy, *, inputs: Sequence[TensorProxy]
) -> Any:
    """What `thunder_flce.token_losses.token_loss_of` gives, of a wrapped function, and wrapped; or a signal."""
    of_rows = loss_dtype(input)
    of_inputs = [of_rows if dtypes.is_float_dtype(each.dtype) else each.dtype for each in inputs]
    trace = get_tracectx()
    steps: list[BoundSymbol] = []

    def stand_in(dtype: dtypes.dtype = of_rows, *, requires_grad: bool = False) -> TensorProxy:
        return TensorProxy(shape=tuple(target.shape), device=input.device, dtype=dtype, requires_grad=requires_grad)

    trace.push_scope(steps)
    try:
        by_name = names_asked_for(unwrap(function), len(inputs))
        given = {name: stand_in(requires_grad=True) for name in (*VARIABLES[:2], *by_name)}
        given |= {input_name(number): stand_in(dtype) for number, dtype in enumerate(of_inputs)}
        wrapped = {name: wrap_const(proxy) for name, proxy in given.items()}
        result = called(lambda *args, **kwargs: interpret_call(function, *args, **kwargs), wrapped, by_name)
        if result is INTERPRETER_SIGNALS.EXCEPTION_RAISED:
            return result
        names = {proxy.name: Handle(name) for name, proxy in given.items()}
        recorder = Recorder([*map(dtypes.to_torch_dtype, of_inputs)])
        return wrap_const(_recorded(recorder, steps, unwrap(result), names))
    except NotOfTokens as problem:
        return do_raise(not_of_tokens(problem))
    except TypeError as problem:
        return do_raise(problem)
    finally:
        trace.pop_scope()


def _recorded(recorder: Recorder, steps: Sequence[BoundSymbol], result: Any, names: Mapping[str, Handle]) -> TokenLoss:
    known = dict(names)

    def handle(argument: Any) -> Any:
        if not isinstance(argument, TensorProxy):
            return argument
        if argument.name not in known:
            raise NotOfTokens("a tensor that is not among its arguments; give it to token_inputs")
        return known[argument.name]

    for bsym in steps:
        name, out = bsym.sym.name, bsym.output
        if out is None:
            continue  # Turns gradients off or on, which the results say.
        if not isinstance(out, TensorProxy):
            raise NotOfTokens(name)
        if name in CASTS and name != "clone":
            found = recorder.cast(handle(bsym.flat_proxy_args[0]), dtypes.to_torch_dtype(out.dtype))
            found = found if carries_grad(out) else recorder.detached(found)
        else:
            args, kwargs = [*map(handle, bsym.args)], {key: handle(each) for key, each in bsym.kwargs.items()}
            found = recorder.write(name, args, kwargs, has_gradient=carries_grad(out))
        known[out.name] = found
    if not isinstance(result, TensorProxy):
        raise NotOfTokens(f"{type(result).__name__} as its result")
    return recorder.finish(handle(result))
