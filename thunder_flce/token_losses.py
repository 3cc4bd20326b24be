"""Turns a token loss, a Python function of one token's numbers, into the text that the engine runs.

`operation.pointwise` writes the text. In a program that Dynamo traces, the function is called with stand-ins that
record its operations. Dynamo traces into that call as into any other, so it adds guards for everything that the
function reads, such as a global number. The recorded operations are then repeated with tensors.
"""

import operator
from collections.abc import Callable, Sequence
from functools import partial
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from thunder_flce.importing import when_imported, without_dynamo
from thunder_flce.operation import pointwise
from thunder_flce.operation.call import checked_token_inputs
from thunder_flce.operation.pointwise import VARIABLES, Handle, NotPointwise, Recorder, TokenLoss, input_name


def check_function(token_loss: Any) -> None:
    """Raises a TypeError if a token loss is neither a function nor the text of one."""
    is_text = isinstance(token_loss, str) and "; loss = " in token_loss
    if not callable(token_loss) and not is_text:
        raise TypeError(f"token_loss must be a function, but got {type(token_loss).__name__}")


def token_loss_of(token_loss: Any, inputs: Sequence[Any]) -> TokenLoss:
    """Returns the text of a token loss, by `pointwise.text_of` and with its errors; a text is returned as it is."""
    if torch.compiler.is_dynamo_compiling():
        _have_dynamo_trace_functions()
    if not hasattr(token_loss, "__self__"):
        # If torch.compile has wrapped the function, take the function itself.
        token_loss = getattr(token_loss, "_torchdynamo_inline", token_loss)
    check_function(token_loss)
    if not callable(token_loss):
        return token_loss
    checked_token_inputs(inputs)
    if not torch.compiler.is_dynamo_compiling():
        return pointwise.text_of(token_loss, [getattr(tensor, "dtype", torch.float32) for tensor in inputs])
    keywords = pointwise.keyword_variables(token_loss, len(inputs))
    names = [*VARIABLES[:2], *keywords, *map(input_name, range(len(inputs)))]
    steps: list[tuple[Any, ...]] = []
    try:
        result = pointwise.call_function(token_loss, {name: _StandIn(steps, name) for name in names}, keywords)
        if not isinstance(result, _StandIn):
            raise NotPointwise(f"{type(result).__name__} as its result")
        text, problem = _recorded(tuple(steps), result._name, tuple([tensor.dtype for tensor in inputs]))
        if problem:
            raise NotPointwise(problem)
        return text
    except NotPointwise as error:
        raise pointwise.not_pointwise_error(error) from error


@without_dynamo
def _recorded(steps: tuple[Any, ...], result: str, dtypes: tuple[torch.dtype, ...]) -> tuple[TokenLoss, str]:
    """Returns the text of the loss, or that of an error: Dynamo would take an error raised here for one of its own."""

    def value(argument: Any) -> Any:
        return handles.get(argument[1], Handle(argument[1])) if isinstance(argument, tuple) else argument

    handles: dict[str, Handle] = {}
    recorder = Recorder(dtypes)
    try:
        for number, (name, args, kwargs, has_gradient) in enumerate(steps):
            keywords = {key: value(argument) for key, argument in kwargs}
            handles[str(number)] = recorder.write(name, [*map(value, args)], keywords, has_gradient=has_gradient)
        return recorder.finish(value(("", result))), ""
    except NotPointwise as problem:
        return "", str(problem)


class _StandIn:
    """Stand-in for a tensor of one number per token, in plain Python that Dynamo can trace.

    It appends each call to `steps`; a call's result is named by the index of the step.
    """

    def __init__(self, steps: list[tuple[Any, ...]], name: str):
        self._steps, self._name = steps, name

    def _record(self, name: str, *args: Any, **kwargs: Any) -> "_StandIn":
        """Records a call that has this stand-in among its arguments; returns a stand-in for the result."""
        keywords = tuple([(key, _encoded(value)) for key, value in kwargs.items()])
        self._steps.append((name, tuple(map(_encoded, args)), keywords, torch.is_grad_enabled()))
        return _StandIn(self._steps, str(len(self._steps) - 1))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> "_StandIn":
        kwargs = kwargs or {}
        stand_ins = [argument for argument in (*args, *kwargs.values()) if isinstance(argument, _StandIn)]
        if not stand_ins:
            raise NotPointwise(f"{func.__name__} of several tensors")
        return stand_ins[0]._record(func.__name__, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in ("dtype", "device"):
            return self._record(name, self)
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "where":
            return lambda condition, other: self._record(name, condition, self, other)
        return lambda *args, **kwargs: self._record(name, self, *args, **kwargs)

    def __bool__(self) -> bool:
        raise NotPointwise("control flow that depends on a tensor, or a function of numbers, as those of math")

    def __getitem__(self, key: Any) -> Any:
        raise NotPointwise("indexing, item assignment, iteration or len(), but its tensors have one number per token")

    def __setitem__(self, key: Any, value: Any) -> None:
        self[key]

    def __len__(self) -> int:
        return self[0]

    __float__ = __int__ = __index__ = __bool__
    __iter__ = __len__
    __hash__ = object.__hash__


def _operator(name: str, *, is_reflected: bool = False) -> Callable[..., _StandIn]:
    if is_reflected:
        return lambda self, other: self._record(name, other, self)
    return lambda self, *others: self._record(name, self, *others)


for _method in ("add", "sub", "mul", "truediv", "pow", "floordiv", "mod", "and", "or", "xor"):
    _name = f"bitwise_{_method}" if _method in ("and", "or", "xor") else _method
    setattr(_StandIn, f"__{_method}__", _operator(_name))
    setattr(_StandIn, f"__r{_method}__", _operator(_name, is_reflected=True))
    setattr(_StandIn, f"__i{_method}__", _operator(f"{_name}_"))
for _method in ("lt", "le", "gt", "ge", "eq", "ne", "neg", "abs", "invert"):
    setattr(_StandIn, f"__{_method}__", _operator(_method))


def _encoded(argument: Any) -> Any:
    if isinstance(argument, _StandIn):
        return ("", argument._name)
    if isinstance(argument, Tensor):
        # A compiled program has no guard on the values of such a tensor.
        raise NotPointwise("a tensor that is not among its arguments; give it to token_inputs")
    # Specialises Dynamo's symbolic numbers, and converts NumPy's to Python's.
    if isinstance(argument, int):
        return argument if isinstance(argument, bool) else operator.index(argument)
    return argument.__float__() if isinstance(argument, float | Real) else argument


def _have_dynamo_trace_functions() -> None:
    """Adds to Dynamo, if its version lacks them as in torch 2.10: `~` of stand-ins, hasattr of compiled functions."""
    from torch._dynamo.variables import ConstantVariable, VariableTracker, WrapperUserFunctionVariable
    from torch._dynamo.variables.builtin import BuiltinVariable
    from torch._dynamo.variables.user_defined import UserDefinedObjectVariable

    def call_invert(self: Any, tx: Any, operand: Any) -> Any:
        is_ours = isinstance(operand, UserDefinedObjectVariable) and operand.python_type() is _StandIn
        # For None, Dynamo tries its other handlers.
        return operand.call_method(tx, "__invert__", [], {}) if is_ours else None

    def has_attribute(self: Any, tx: Any, name: str) -> Any:
        return ConstantVariable.create(hasattr(self.wrapper_obj, name))

    if not hasattr(BuiltinVariable, "call_invert"):
        BuiltinVariable.call_invert = call_invert  # type: ignore[attr-defined]
    if WrapperUserFunctionVariable.call_obj_hasattr is VariableTracker.call_obj_hasattr:
        WrapperUserFunctionVariable.call_obj_hasattr = has_attribute  # type: ignore[method-assign]


for _constant in (_recorded, _have_dynamo_trace_functions):
    when_imported("torch._dynamo", partial(torch.compiler.assume_constant_result, _constant))
