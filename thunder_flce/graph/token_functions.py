"""Converts a function that a program passes as `token_loss` to its text.

thunder's interpreter runs the function on stand-in proxies, as it runs the program. The prologue therefore checks the
values that the function reads.
"""

from collections.abc import Sequence
from typing import Any

from thunder.core import dtypes
from thunder.core.interpreter import INTERPRETER_SIGNALS, unwrap, wrap_const
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
        raise NotImplementedError(_SYMBOLIC)
    row_dtype = loss_dtype(input)
    input_dtypes = [row_dtype if dtypes.is_float_dtype(tensor.dtype) else tensor.dtype for tensor in inputs]
    trace = get_tracectx()
    bsyms: list[BoundSymbol] = []

    def stand_in(dtype: dtypes.dtype = row_dtype, *, requires_grad: bool = False) -> TensorProxy:
        return TensorProxy(shape=tuple(target.shape), device=input.device, dtype=dtype, requires_grad=requires_grad)

    trace.push_scope(bsyms)
    try:
        keywords = keyword_variables(unwrap(function), len(inputs))
        stand_ins = {name: stand_in(requires_grad=True) for name in (*VARIABLES[:2], *keywords)}
        stand_ins |= {input_name(number): stand_in(dtype) for number, dtype in enumerate(input_dtypes)}
        wrapped = {name: wrap_const(proxy) for name, proxy in stand_ins.items()}
        result = call_function(lambda *args, **kwargs: interpret_call(function, *args, **kwargs), wrapped, keywords)
        if result is INTERPRETER_SIGNALS.EXCEPTION_RAISED:
            return result
        names = {proxy.name for proxy in stand_ins.values()}
        for bsym in bsyms:
            if any(arg.name not in names for arg in bsym.flat_proxy_args):
                raise not_pointwise_error(
                    NotPointwise("a tensor that is not among its arguments; give it to token_inputs")
                )
            names |= {out.name for out in bsym.flat_proxy_outs}
        return wrap_const(text_of(unwrap(function), [*map(dtypes.to_torch_dtype, input_dtypes)]))
    finally:
        trace.pop_scope()
