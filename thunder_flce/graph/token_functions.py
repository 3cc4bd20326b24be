"""Converts a function that a program passes as `token_loss` to its text.

thunder's interpreter runs the function on stand-in proxies, as it runs the program. The prologue therefore checks the
values that the function reads.
"""

from collections.abc import Sequence
from typing import Any

from thunder.core import dtypes
from thunder.core.interpreter import INTERPRETER_SIGNALS, do_raise, unwrap, wrap_const
from thunder.core.interpreter import _interpret_call as interpret_call
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import get_tracectx

from thunder_flce.graph.reading import is_static, loss_dtype
from thunder_flce.operation.pointwise import (
    VARIABLES,
    NotPointwise,
    call_function,
    input_name,
    keyword_variables,
    not_pointwise_error,
    text_of,
)

_SYMBOLIC = (
    "token_loss needs thunder's constant values, the default: with cache='symbolic values', thunder does not notice "
    "when a number changes that the function reads"
)


def interpreted_token_loss(
    function: Any, input: TensorProxy, target: TensorProxy, *, inputs: Sequence[TensorProxy]
) -> Any:
    """Returns the result of `pointwise.text_of` for a wrapped function, wrapped too; or the signal of an exception."""
    if not is_static(input, target):
        return do_raise(NotImplementedError(_SYMBOLIC))
    of_rows = loss_dtype(input)
    of_inputs = [of_rows if dtypes.is_float_dtype(each.dtype) else each.dtype for each in inputs]
    trace = get_tracectx()
    steps: list[BoundSymbol] = []

    def stand_in(dtype: dtypes.dtype = of_rows, *, requires_grad: bool = False) -> TensorProxy:
        return TensorProxy(shape=tuple(target.shape), device=input.device, dtype=dtype, requires_grad=requires_grad)

    trace.push_scope(steps)
    try:
        by_name = keyword_variables(unwrap(function), len(inputs))
        given = {name: stand_in(requires_grad=True) for name in (*VARIABLES[:2], *by_name)}
        given |= {input_name(number): stand_in(dtype) for number, dtype in enumerate(of_inputs)}
        wrapped = {name: wrap_const(proxy) for name, proxy in given.items()}
        result = call_function(lambda *args, **kwargs: interpret_call(function, *args, **kwargs), wrapped, by_name)
        if result is INTERPRETER_SIGNALS.EXCEPTION_RAISED:
            return result
        known = {proxy.name for proxy in given.values()}
        for bsym in steps:
            if any(arg.name not in known for arg in bsym.flat_proxy_args):
                raise not_pointwise_error(
                    NotPointwise("a tensor that is not among its arguments; give it to token_inputs")
                )
            known |= {out.name for out in bsym.flat_proxy_outs}
        return wrap_const(text_of(unwrap(function), [*map(dtypes.to_torch_dtype, of_inputs)]))
    except TypeError as problem:
        return do_raise(problem)
    finally:
        trace.pop_scope()
