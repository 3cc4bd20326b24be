"""From a Python function of one token's numbers to the plain values that the engine runs: `operation.token_loss`.

The function is called with stand-ins, which note down what is done with them. Dynamo looks into that call as into any
other, so that what the function reads, such as a global number, is guarded.
"""

import inspect
import operator
from collections.abc import Callable, Sequence
from numbers import Real
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thunder_flce.operation.arguments import check_token_inputs
from thunder_flce.operation.token_loss import CASTS, VARIABLES, NotOfTokens, TokenLoss, TokenLossWriter, input_name

# What may give the same tensor, or one that shares its memory.
_ALIASES = ("detach", "to", "type_as", *CASTS)


class _Name(NamedTuple):
    """The name of a stand-in, as an argument of a step."""

    text: str


class _Step(NamedTuple):
    """One operation that a function calls."""

    called: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    is_detached: bool
    """Whether gradients are off"""


class _Numbers:
    """Stands for a tensor of one number a token. Plain Python, which Dynamo traces.

    Args:
        steps: where operations are noted down; the result of each is named by its number.
        name: of the tensor.
        is_shared: whether others may see a change in place: it is given, or shares its memory.
    """

    def __init__(self, steps: list[_Step], name: str, *, is_shared: bool = False):
        self._steps, self._name, self._is_shared = steps, name, is_shared

    def _then(self, called: str, *args: Any, **kwargs: Any) -> "_Numbers":
        """Notes down an operation, of which this is an operand."""
        if called.endswith("_") or kwargs.get("inplace"):
            if called == "relu" or self._is_shared or args[0] is not self:
                raise in_place(called)
            if not torch.is_grad_enabled() and not self._steps[int(self._name)].is_detached:
                raise NotOfTokens(f"{called} in place without gradients, of a tensor that has some")
            called = called[:-1]
            self._name = self._then(called, *args, **kwargs)._name
            return self
        noted = tuple(map(_noted, args)), tuple((name, _noted(value)) for name, value in kwargs.items())
        self._steps.append(_Step(called, *noted, is_detached=not torch.is_grad_enabled()))
        if called in _ALIASES:
            self._is_shared = True
        return _Numbers(self._steps, str(len(self._steps) - 1), is_shared=called in _ALIASES)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> "_Numbers":
        kwargs = kwargs or {}
        found = [each for each in (*args, *kwargs.values()) if isinstance(each, _Numbers)]
        if not found:
            raise NotOfTokens(f"{func.__name__} of several tensors")
        return found[0]._then(func.__name__, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "dtype":
            return self._then(name, self)
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "where":
            return lambda condition, other: self._then(name, condition, self, other)
        return lambda *args, **kwargs: self._then(name, self, *args, **kwargs)

    def __bool__(self) -> bool:
        raise NotOfTokens("control flow that depends on a tensor; use torch.where")

    def __float__(self) -> float:
        raise NotOfTokens("a function of numbers, such as those of math; use that of torch")

    __int__ = __index__ = __float__

    def __getitem__(self, key: Any) -> Any:
        raise NotOfTokens("indexing, but there is one number a token")

    def __setitem__(self, key: Any, value: Any) -> None:
        raise NotOfTokens("item assignment; use torch.where")

    def __iter__(self) -> Any:
        raise NotOfTokens("iteration over tokens")

    __len__ = __iter__
    __hash__ = object.__hash__


def _operator(called: str, *, is_reflected: bool = False) -> Callable[..., _Numbers]:
    if is_reflected:
        return lambda self, other: self._then(called, other, self)
    return lambda self, *others: self._then(called, self, *others)


for _called in ("add", "sub", "mul", "truediv", "pow", "floordiv", "mod"):
    setattr(_Numbers, f"__{_called}__", _operator(_called))
    setattr(_Numbers, f"__r{_called}__", _operator(_called, is_reflected=True))
    setattr(_Numbers, f"__i{_called}__", _operator(f"{_called}_"))
for _called in ("and", "or", "xor"):
    setattr(_Numbers, f"__{_called}__", _operator(f"bitwise_{_called}"))
    setattr(_Numbers, f"__r{_called}__", _operator(f"bitwise_{_called}", is_reflected=True))
    setattr(_Numbers, f"__i{_called}__", _operator(f"bitwise_{_called}_"))
for _called in ("lt", "le", "gt", "ge", "eq", "ne", "neg", "abs", "invert"):
    setattr(_Numbers, f"__{_called}__", _operator(_called))


def _noted(argument: Any) -> Any:
    if isinstance(argument, _Numbers):
        return _Name(argument._name)
    if isinstance(argument, Tensor):
        # In a program that is compiled, nobody would notice that it changes.
        is_traced = torch.compiler.is_dynamo_compiling()
        if argument.numel() == 1 and not argument.requires_grad and not is_traced:
            return argument.item() if argument.dtype is torch.bool else float(argument)
        raise NotOfTokens("a tensor that is not among its arguments; give it to token_inputs")
    # Symbolic numbers of Dynamo's become those that they are, and NumPy's Python's.
    if isinstance(argument, int):
        return argument if isinstance(argument, bool) else operator.index(argument)
    return argument.__float__() if isinstance(argument, float | Real) else argument


def check_function(token_loss: Any) -> None:
    """Raises a TypeError for what is neither a function nor the plain values that one has become."""
    if not callable(token_loss) and not isinstance(token_loss, tuple):
        raise TypeError(f"token_loss must be a function, but got {type(token_loss).__name__}")


def token_loss_of(function: Callable[..., Any], inputs: Sequence[Any]) -> TokenLoss:
    """The loss that a function computes of (log_prob, entropy, *inputs), and of log_sum_exp where it has that argument.

    It is called once, with stand-ins for its arguments.

    Raises:
        TypeError: where it takes other arguments, or does what is no operation on single tokens.
    """
    check_token_inputs(inputs)
    steps: list[_Step] = []
    if torch.compiler.is_dynamo_compiling():
        _have_dynamo_invert()
    names = [*VARIABLES[:2], *map(input_name, range(len(inputs)))]
    by_name = names_asked_for(function, names)
    try:
        with torch.enable_grad():
            given = {name: _Numbers(steps, name, is_shared=True) for name in (*names, *by_name)}
            result = function(*(given[name] for name in names), **{name: given[name] for name in by_name})
        if not isinstance(result, _Numbers):
            raise NotOfTokens(f"{type(result).__name__} as its result")
        dtypes = tuple(getattr(each, "dtype", torch.float32) for each in inputs)
        written = _written(tuple(steps), result._name, dtypes)
        if isinstance(written, str):
            raise NotOfTokens(written)
        return written
    except (NotOfTokens, NotImplementedError) as problem:
        raise not_of_tokens(problem) from problem


def in_place(called: str) -> NotOfTokens:
    """The error for an operation that changes a tensor in place where others might see the change."""
    return NotOfTokens(f"{called}, which changes a tensor in place that is given or may be shared")


def not_of_tokens(problem: Exception) -> TypeError:
    """The error for a function that is not made of operations on single tokens."""
    return TypeError(
        "token_loss must be made of PyTorch's operations on single tokens, since a chunk of tokens at a time is "
        f"computed, but it has: {problem}"
    )


def names_asked_for(function: Callable[..., Any], names: Sequence[str]) -> list[str]:
    """Which of the variables a function is given by their names, beside those by position.

    Raises:
        TypeError: where it does not take these.
    """
    if torch.compiler.is_dynamo_compiling() and isinstance(function, FunctionType):
        # Of a function that is made in the program, Dynamo knows no signature.
        code = function.__code__
        return [name for name in VARIABLES[2:] if name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]]
    signature = inspect.signature(function)
    by_name = [name for name in VARIABLES[2:] if name in signature.parameters]
    try:
        signature.bind(*names, **dict.fromkeys(by_name))
    except TypeError as error:
        raise TypeError(
            f"token_loss is called with log_prob, entropy and the {len(names) - 2} of token_inputs: {error}"
        ) from None
    return by_name


@torch.compiler.assume_constant_result
def _have_dynamo_invert() -> None:
    """Has Dynamo, of torch 2.10 and others, trace `~mask` of stand-ins as it traces `-ratio`."""
    from torch._dynamo.variables.builtin import BuiltinVariable
    from torch._dynamo.variables.user_defined import UserDefinedObjectVariable

    def call_invert(self: Any, tx: Any, operand: Any) -> Any:
        is_ours = isinstance(operand, UserDefinedObjectVariable) and operand.python_type() is _Numbers
        # None leaves it to what else there is.
        return operand.call_method(tx, "__invert__", [], {}) if is_ours else None

    if not hasattr(BuiltinVariable, "call_invert"):
        BuiltinVariable.call_invert = call_invert  # type: ignore[attr-defined]


@torch.compiler.assume_constant_result
def _written(steps: tuple[_Step, ...], result: str, dtypes: tuple[torch.dtype, ...]) -> TokenLoss | str:
    """The loss, or an error's text: Dynamo would take an error raised in here for one of its own.

    `result` is the name of one; as a `_Name`, it would arrive without its text from Dynamo of torch 2.15.
    """
    values: dict[str, Any] = {}

    def value(argument: Any) -> Any:
        return values.get(argument.text, argument.text) if isinstance(argument, _Name) else argument

    try:
        writer = TokenLossWriter(dtypes)
        for number, step in enumerate(steps):
            args, kwargs = [*map(value, step.args)], {name: value(each) for name, each in step.kwargs}
            found = write(writer, step.called, args, kwargs)
            values[str(number)] = writer.detached(found) if step.is_detached and isinstance(found, str) else found
        return writer.finish(values.get(result, result))
    except (NotOfTokens, NotImplementedError) as problem:
        return str(problem)


def write(writer: TokenLossWriter, called: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """The name of the result of a function or a method, as `TokenLossWriter.write`; of casts, too, and dtypes."""
    if called == "dtype":
        return writer.dtype(args[0])
    if called in ("to", "type_as", *CASTS):
        given = [each for each in (*args[1:], *kwargs.values()) if isinstance(each, torch.dtype | str)]
        dtype = CASTS.get(called, given[0] if given else None)
        if isinstance(dtype, str):
            # That of a tensor.
            dtype = writer.dtype(dtype)
        if dtype is not None:
            return writer.cast(args[0], dtype)
    return writer.write("logsigmoid" if called == "log_sigmoid" else called, args, kwargs)
