"""A loss of single tokens, such as GRPO's clipped ratio, made of what is known of each row.

    loss_t = f(log_prob_t, entropy_t, log_sum_exp_t, i0_t, i1_t, …)     i: further tensors of one number a token

Traces and operators carry it as plain values, operation by operation: the result's name, which of `OPERATIONS` it is,
and its arguments, which are names and numbers. The last result is the loss. A ratio of probabilities by an advantage:

    (("f0", "sub", ("log_prob", "i0")), ("f1", "exp", ("f0",)), ("f2", "mul", ("f1", "i1")))

Every operation works element by element and has its derivative beside it, so that a chunk of rows can be differentiated
where its logits are, without autograd and without the other rows. Derivatives are PyTorch's: a clamp has one at its
bounds, a maximum of equals half of each. The arguments may be whatever has arithmetic, as in `loss`.
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

VARIABLES = ("log_prob", "entropy", "log_sum_exp")
"""What is known of a row, and has a gradient: outputs of `loss.OUTPUTS`."""

_NOT_FINITE = {"plus_infinity": math.inf, "minus_infinity": -math.inf, "nan": math.nan}
"""Their names, since a literal cannot be one of these numbers."""

TokenLoss = tuple[tuple[str, str, tuple[Any, ...]], ...]
"""The plain values; () for the cross-entropy itself."""


class NotOfTokens(Exception):
    """Raised for what does not work element by element, or is not known here; names it."""


class _Operation(NamedTuple):
    value: Callable[..., Any]
    """From a module with PyTorch's functions and the arguments."""
    derivative: Callable[..., Any] | None = None
    """From that module, the result, the arguments and the derivative of each; None where it is 0."""


def input_name(number: int) -> str:
    """What the further tensors are called."""
    return f"i{number}"


def _written(argument: Any) -> Any:
    """An argument as a literal."""
    if not isinstance(argument, float) or math.isfinite(argument):
        return float(argument) if isinstance(argument, float) else argument
    if math.isnan(argument):
        return "nan"
    return "plus_infinity" if argument > 0 else "minus_infinity"


def uses(token_loss: TokenLoss, variable: str) -> bool:
    """Whether a loss depends on one of `VARIABLES`."""
    return any(variable in arguments for _, _, arguments in token_loss)


def evaluate(token_loss: TokenLoss, values: Mapping[str, Any], functions: Any) -> Any:
    """(...) the loss of each token, from the values of all names, by `functions`: torch, or thunder's module."""
    return _run(token_loss, values, functions, (), lambda name, value: value)[0]


def differentiate(
    token_loss: TokenLoss, values: Mapping[str, Any], functions: Any, let: Callable[[str, Any], Any]
) -> tuple[Any, dict[str, Any]]:
    """As `evaluate`, and the derivatives with respect to `VARIABLES`: tensors, or numbers where they are constant.

    `let` is told the name of every tensor: of f1 itself, and of its derivatives, such as f1_log_prob.
    """
    return _run(token_loss, values, functions, VARIABLES, let)


def _run(
    token_loss: TokenLoss, known: Mapping[str, Any], functions: Any, variables: Sequence[str],
    let: Callable[[str, Any], Any],
) -> tuple[Any, dict[str, Any]]:  # fmt: skip
    values, result = {**known, **_NOT_FINITE}, ""
    named = {id(value) for value in values.values()}

    def name_new(name: str, value: Any) -> Any:
        """A derivative may be another one, or a tensor that has a name."""
        value = value if id(value) in named else let(name, value)
        named.add(id(value))
        return value

    derivatives: dict[str, dict[str, Any]] = {of: {of: 1.0} for of in variables}
    for result, operation, names in token_loss:
        rule = OPERATIONS[operation]
        arguments = [values[name] if isinstance(name, str) else name for name in names]
        values[result] = value = name_new(result, rule.value(functions, *arguments))
        derivatives[result] = {}
        for variable in variables:
            given = [derivatives.get(name, {}).get(variable, 0.0) for name in names]
            if rule.derivative is not None and any(not _is(each, 0) for each in given):
                found = rule.derivative(functions, value, arguments, given)
                derivatives[result][variable] = name_new(f"{result}_{variable}", found)
    return values[result], {of: derivatives[result].get(of, 0.0) for of in variables}


def _is(value: Any, number: float) -> bool:
    return isinstance(value, float) and value == number


def _plus(a: Any, b: Any) -> Any:
    return b if _is(a, 0) else a if _is(b, 0) else a + b


def _times(a: Any, b: Any) -> Any:
    return 0.0 if _is(a, 0) or _is(b, 0) else b if _is(a, 1) else a if _is(b, 1) else a * b


def _of_one(derivative: Callable[[Any, Any, Any], Any]) -> Callable[..., Any]:
    """From the functions, the result and the argument to the derivative of an operation with one argument."""
    return lambda f, out, arguments, d: _times(d[0], derivative(f, out, arguments[0]))


def _of_power(f: Any, out: Any, arguments: Sequence[Any], d: Sequence[Any]) -> Any:
    x, exponent = arguments
    if exponent == 0:
        return 0.0
    return _times(d[0], x * 2.0 if exponent == 2 else exponent * x ** (exponent - 1))


def _chosen(f: Any, out: Any, condition: Any, x: Any, y: Any) -> Any:
    """x where a condition holds, else y; of two numbers in the dtype of `out` instead of PyTorch's default one."""
    if not (isinstance(x, float) and isinstance(y, float)):
        return f.where(condition, x, y)
    holds = f.where(condition, 1.0, 0.0).to(out.dtype)
    return _plus(_times(holds, x), _times(1.0 - holds, y))


def _of_smaller(f: Any, out: Any, a: Any, b: Any, d_a: Any, d_b: Any) -> Any:
    """d_a where a is smaller, d_b where b is, and half of each where they are equal."""
    return _chosen(f, out, a == b, _plus(d_a, d_b) * 0.5, _chosen(f, out, a < b, d_a, d_b))


def _largest(f: Any, x: Any, y: Any) -> Any:
    """The larger one, of which one may be a number."""
    if isinstance(y, int | float):
        return f.clamp(x, y, None)
    return f.clamp(y, x, None) if isinstance(x, int | float) else f.maximum(x, y)


def _smallest(f: Any, x: Any, y: Any) -> Any:
    """The smaller one, of which one may be a number."""
    if isinstance(y, int | float):
        return f.clamp(x, None, y)
    return f.clamp(y, None, x) if isinstance(x, int | float) else f.minimum(x, y)


def _bounded(f: Any, x: Any, low: Any, high: Any) -> Any:
    """Whether it is within the bounds, of which one may be None."""
    if low is None or high is None:
        return x <= high if low is None else x >= low
    return f.logical_and(x >= low, x <= high)


OPERATIONS: dict[str, _Operation] = {
    "add": _Operation(lambda f, x, y: x + y, lambda f, out, a, d: _plus(d[0], d[1])),
    "sub": _Operation(lambda f, x, y: x - y, lambda f, out, a, d: _plus(d[0], _times(d[1], -1.0))),
    "mul": _Operation(lambda f, x, y: x * y, lambda f, out, a, d: _plus(_times(d[0], a[1]), _times(d[1], a[0]))),
    "div": _Operation(lambda f, x, y: x / y, lambda f, out, a, d: _plus(d[0], _times(_times(d[1], -1.0), out)) / a[1]),
    "neg": _Operation(lambda f, x: -x, _of_one(lambda f, out, x: -1.0)),
    "pow": _Operation(lambda f, x, exponent: x**exponent, _of_power),
    "exp": _Operation(lambda f, x: f.exp(x), _of_one(lambda f, out, x: out)),
    "expm1": _Operation(lambda f, x: f.expm1(x), _of_one(lambda f, out, x: out + 1.0)),
    "log": _Operation(lambda f, x: f.log(x), _of_one(lambda f, out, x: 1.0 / x)),
    "log1p": _Operation(lambda f, x: f.log1p(x), _of_one(lambda f, out, x: 1.0 / (x + 1.0))),
    "sqrt": _Operation(lambda f, x: f.sqrt(x), _of_one(lambda f, out, x: 0.5 / out)),
    "abs": _Operation(lambda f, x: f.abs(x), _of_one(lambda f, out, x: f.sign(x))),
    "tanh": _Operation(lambda f, x: f.tanh(x), _of_one(lambda f, out, x: 1.0 - out * out)),
    "sigmoid": _Operation(lambda f, x: f.sigmoid(x), _of_one(lambda f, out, x: out * (1.0 - out))),
    "logsigmoid": _Operation(
        lambda f, x: f.clamp(x, None, 0.0) - f.log1p(f.exp(-f.abs(x))),
        _of_one(lambda f, out, x: f.sigmoid(-x)),
    ),
    "relu": _Operation(lambda f, x: f.clamp(x, 0.0, None), lambda f, out, a, d: _chosen(f, out, a[0] > 0.0, d[0], 0.0)),
    "clamp": _Operation(
        lambda f, x, low, high: f.clamp(x, low, high),
        lambda f, out, a, d: _chosen(f, out, _bounded(f, *a), d[0], 0.0),
    ),
    "minimum": _Operation(_smallest, lambda f, out, a, d: _of_smaller(f, out, *a, *d)),
    "maximum": _Operation(_largest, lambda f, out, a, d: _of_smaller(f, out, *a, *d[::-1])),
    "where": _Operation(lambda f, c, x, y: f.where(c, x, y), lambda f, out, a, d: _chosen(f, out, a[0], d[1], d[2])),
    "detach": _Operation(lambda f, x: x.detach()),
    "float": _Operation(lambda f, x, like: x.to(like.dtype)),
    "sign": _Operation(lambda f, x: f.sign(x)),
    "lt": _Operation(lambda f, x, y: x < y),
    "le": _Operation(lambda f, x, y: x <= y),
    "gt": _Operation(lambda f, x, y: x > y),
    "ge": _Operation(lambda f, x, y: x >= y),
    "eq": _Operation(lambda f, x, y: x == y),
    "ne": _Operation(lambda f, x, y: x != y),
    "logical_and": _Operation(lambda f, x, y: f.logical_and(x, y)),
    "logical_or": _Operation(lambda f, x, y: f.logical_or(x, y)),
    "logical_not": _Operation(lambda f, x: f.logical_not(x)),
}
_LOGICAL = ("lt", "le", "gt", "ge", "eq", "ne", "logical_and", "logical_or", "logical_not")
_OF_FRACTIONS = ("div", "exp", "expm1", "log", "log1p", "sqrt", "tanh", "sigmoid", "logsigmoid")
"""What gives fractions of integers, too."""
_OF_LOGICAL = {"add": "logical_or", "mul": "logical_and", "maximum": "logical_or", "minimum": "logical_and"}
"""What operations on True and False are."""


# Writing one down.


def _two(input: Any, other: Any, *, alpha: float = 1, rounding_mode: None = None) -> tuple[Any, ...]:
    if alpha != 1 or rounding_mode is not None:
        raise NotOfTokens("alpha or rounding_mode")
    return input, other


def _one(input: Any) -> tuple[Any, ...]:
    return (input,)


def _clamp(input: Any, min: Any = None, max: Any = None) -> tuple[Any, ...]:
    return input, None if min == -math.inf else min, None if max == math.inf else max


_ARGUMENTS: dict[str, tuple[str, Callable[..., tuple[Any, ...]]]] = {
    **dict.fromkeys(("add",), ("add", _two)),
    **dict.fromkeys(("sub", "subtract"), ("sub", _two)),
    "rsub": ("sub", lambda *args, **kwargs: _two(*args, **kwargs)[::-1]),
    **dict.fromkeys(("mul", "multiply"), ("mul", _two)),
    **dict.fromkeys(("div", "divide", "truediv", "true_divide"), ("div", _two)),
    **dict.fromkeys(("neg", "negative"), ("neg", _one)),
    "pow": ("pow", lambda input, exponent: (input, exponent)),
    "square": ("pow", lambda input: (input, 2)),
    "rsqrt": ("pow", lambda input: (input, -0.5)),
    "reciprocal": ("pow", lambda input: (input, -1.0)),
    "relu": ("relu", lambda input, inplace=False: (input,)),
    **dict.fromkeys(("clamp", "clip"), ("clamp", _clamp)),
    "clamp_min": ("clamp", lambda input, min: (input, min, None)),
    "clamp_max": ("clamp", lambda input, max: (input, None, max)),
    **dict.fromkeys(("minimum", "min"), ("minimum", _two)),
    **dict.fromkeys(("maximum", "max", "torch_max"), ("maximum", _two)),
    "where": ("where", lambda condition, input, other: (condition, input, other)),
    "masked_fill": ("where", lambda input, mask, value: (mask, value, input)),
    **dict.fromkeys(("and_", "bitwise_and", "logical_and"), ("logical_and", _two)),
    **dict.fromkeys(("or_", "bitwise_or", "logical_or"), ("logical_or", _two)),
    **dict.fromkeys(("xor", "bitwise_xor", "logical_xor"), ("ne", _two)),
    **dict.fromkeys(("inv", "invert", "bitwise_not", "logical_not"), ("logical_not", _one)),
    **{name: (name, _two) for name in ("lt", "le", "gt", "ge", "eq", "ne")},
    **{
        name: (name, _one)
        for name in ("exp", "expm1", "log", "log1p", "sqrt", "abs", "tanh", "sigmoid", "logsigmoid", "sign")
    },
    **dict.fromkeys(("detach", "stop_gradient"), ("detach", _one)),
}


_OF_BITS = ("and_", "bitwise_and", "or_", "bitwise_or", "xor", "bitwise_xor", "inv", "invert", "bitwise_not")
"""What is known of True and False alone; and so is logical_xor."""

CASTS = {
    **{"float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16},
    **{"bool": torch.bool, "int": torch.int32, "long": torch.int64},
}
"""Methods that change the dtype, beside those that are told which."""


class TokenLossWriter:
    """Writes a `TokenLoss` down, operation by operation, as a program calls them.

    Dtypes are promoted as PyTorch's: they say which casts lose nothing. All that have fractions are one, that of the
    variables, for which float32 stands here. `dtypes` are those of the further tensors.
    """

    def __init__(self, dtypes: Sequence[torch.dtype] = ()):
        self._operations: list[tuple[str, str, tuple[Any, ...]]] = []
        self._dtypes: dict[str, torch.dtype] = {}
        self._inputs = 0
        self._differentiable = {*VARIABLES}
        for dtype in dtypes:
            self.add_input(dtype)

    def copy(self) -> "TokenLossWriter":
        """Another one that goes on from here."""
        return copy.deepcopy(self)

    def add_input(self, dtype: torch.dtype) -> str:
        """The name of one more tensor."""
        name = input_name(self._inputs)
        self._inputs += 1
        self._dtypes[name] = dtype
        return name

    def write(self, called: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """The name of the result of a function or a method of PyTorch's, of which only the name is given.

        Raises:
            NotOfTokens: for one that is none of `OPERATIONS`, or has other arguments.
        """
        if called not in _ARGUMENTS:
            raise NotOfTokens(called)
        if called in (*_OF_BITS, "logical_xor") and not all(map(self._is_logical, (*args, *kwargs.values()))):
            raise NotOfTokens(f"{called} of numbers")
        operation, of = _ARGUMENTS[called]
        try:
            arguments = of(*args, **kwargs)
        except (TypeError, NotOfTokens) as error:
            raise NotOfTokens(f"{called} with such arguments") from error
        if called == "masked_fill" and self._is_logical(arguments[2]) and not isinstance(arguments[1], str):
            # The result has the dtype of what is filled.
            arguments = (arguments[0], bool(arguments[1]), arguments[2])
        has_dim = called in ("max", "min", "torch_max") and any(type(each) is int for each in arguments)
        if has_dim or (operation == "where" and not isinstance(arguments[0], str)):
            raise NotOfTokens(f"{called} with such arguments")
        if operation == "where" and not self._is_logical(arguments[0]):
            if self.dtype(arguments[0]) is not torch.uint8:
                raise NotOfTokens(f"{called} with a condition of {self.dtype(arguments[0])}")
            arguments = (self.cast(arguments[0], torch.bool), *arguments[1:])
        fixed = {"clamp": arguments[1:], "pow": arguments[1:]}.get(operation, ())
        are_plain = all(isinstance(each, str | bool | int | float | None) for each in arguments)
        is_bounded = operation != "clamp" or arguments[1:] != (None, None)
        if not are_plain or not isinstance(arguments[0], str | int | float) or not is_bounded:
            raise NotOfTokens(f"{called} with such arguments")
        if any(isinstance(each, str) for each in fixed) or (operation == "pow" and not isinstance(arguments[0], str)):
            raise NotOfTokens(f"{called} with tensors in place of numbers")
        if not all(math.isfinite(each) for each in fixed if each is not None):
            raise NotOfTokens(f"{called} with numbers that are not finite")
        kept, promoted = ((), arguments) if operation != "where" else (arguments[:1], arguments[1:])
        if operation in _OF_LOGICAL and all(map(self._is_logical, arguments)):
            operation = _OF_LOGICAL[operation]
        elif operation in _OF_FRACTIONS or self._promoted(promoted).is_floating_point:
            arguments = (*kept, *(self.as_float(each) if isinstance(each, str) else each for each in promoted))
        return self._append(operation, tuple(map(_written, arguments)))

    def dtype(self, name: str) -> torch.dtype:
        """That of a tensor."""
        dtype = self._dtypes.get(name, torch.float32)
        return torch.float32 if dtype.is_floating_point else dtype

    def cast(self, name: str, dtype: torch.dtype) -> str:
        """The name of a tensor in another dtype.

        Raises:
            NotOfTokens: for integers that may be others than the numbers they are made of.
        """
        if dtype.is_floating_point:
            return self.as_float(name)
        if dtype is torch.bool:
            return name if self._is_logical(name) else self._append("ne", (name, 0))
        if self._is_logical(name) and dtype in (torch.int32, torch.int64):
            return self._append("where", (name, 1, 0))
        if dtype is not self.dtype(name):
            raise NotOfTokens(f"a cast of {self.dtype(name)} to {dtype}")
        return name

    def as_float(self, name: str) -> str:
        """The name of a tensor as numbers with fractions."""
        return name if self.dtype(name).is_floating_point else self._append("float", (name, VARIABLES[0]))

    def detached(self, name: str) -> str:
        """The name of a tensor through which no gradient flows."""
        return self._append("detach", (name,)) if name in self._differentiable else name

    def _is_logical(self, argument: Any) -> bool:
        return isinstance(argument, str) and self.dtype(argument) is torch.bool

    def _promoted(self, arguments: Sequence[Any]) -> torch.dtype:
        """Of tensors and numbers together. A number makes a tensor's dtype only one that can hold its kind."""
        dtype = torch.bool
        for each in arguments:
            if isinstance(each, str):
                dtype = torch.promote_types(dtype, self.dtype(each))
        if any(isinstance(each, float) for each in arguments):
            return torch.promote_types(dtype, torch.float32)
        is_counted = any(type(each) is int for each in arguments)
        return torch.int64 if is_counted and dtype is torch.bool else dtype

    def _append(self, operation: str, arguments: tuple[Any, ...]) -> str:
        for name, *others in self._operations:
            if others == [operation, arguments] and repr(others[1]) == repr(arguments):
                return name
        name = f"f{len(self._operations)}"
        self._operations.append((name, operation, arguments))
        promoted = self._promoted(arguments[1:] if operation == "where" else arguments)
        self._dtypes[name] = torch.bool if operation in _LOGICAL else promoted
        if OPERATIONS[operation].derivative is not None and not self._differentiable.isdisjoint(arguments):
            self._differentiable.add(name)
        return name

    def finish(self, result: str) -> TokenLoss:
        """The loss whose result is given, with what it needs only.

        Raises:
            NotOfTokens: where it depends on none of `VARIABLES`.
        """
        needed, kept = {self.as_float(result)}, []
        if not self._operations or not any(name in needed for name, _, _ in self._operations):
            # A variable itself.
            needed = {self._append("mul", (result, 1.0))}
        for name, operation, arguments in reversed(self._operations):
            if name in needed:
                # Of the last argument, "float" has the dtype alone.
                read = arguments[:1] if operation == "float" else arguments
                needed |= {each for each in read if isinstance(each, str)}
                kept.append((name, operation, arguments))
        if needed.isdisjoint(VARIABLES):
            raise NotOfTokens(f"a result that depends on none of {', '.join(VARIABLES)}")
        return tuple(reversed(kept))


def numbered(token_loss: TokenLoss) -> tuple[TokenLoss, list[int]]:
    """The same with those further tensors alone that it reads, and which ones these are."""
    names = {name for _, _, arguments in token_loss for name in arguments if isinstance(name, str)}
    read = sorted(int(name[1:]) for name in names if name[0] == input_name(0)[0])
    given = {input_name(number): input_name(at) for at, number in enumerate(read)}
    return tuple(
        (name, operation, tuple(given.get(each, each) if isinstance(each, str) else each for each in arguments))
        for name, operation, arguments in token_loss
    ), read


def check(token_loss: Any, inputs: int) -> None:
    """Raises a TypeError for plain values that are no `TokenLoss` of so many further tensors."""
    known = {*VARIABLES, *map(input_name, range(inputs)), *_NOT_FINITE}
    for operation in token_loss:
        if not isinstance(operation, tuple) or len(operation) != 3 or operation[1] not in OPERATIONS:
            raise TypeError(f"token_loss has {operation!r}, which is none of `operation.token_loss.OPERATIONS`")
        name, _, arguments = operation
        if unknown := [each for each in arguments if isinstance(each, str) and each not in known]:
            raise TypeError(f"token_loss reads {unknown[0]}, which is neither in token_inputs nor computed before")
        known.add(name)
