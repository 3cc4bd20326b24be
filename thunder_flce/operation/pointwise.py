"""Token losses: pointwise functions, such as GRPO's clipped ratio, that replace the cross-entropy.

    loss_t = f(log_prob_t, entropy_t, log_sum_exp_t, mean_logit_t, i0_t, …)    i: further tensors, one number per token

f is a Python function of such tensors, made of PyTorch's pointwise operations. It is traced on tensors of a few tokens.
The operations of its value and of autograd's derivatives become a line of text, which operators carry and traces print.
For a ratio of probabilities times an advantage:

    f0 = aten.sub(log_prob, i0); f1 = aten.exp(f0); f2 = aten.mul(f1, i1); loss = f2; d_log_prob = f2

With this text, a chunk of rows is differentiated while its logits exist, below autograd. All floating-point dtypes
become one, the dtype of the rows. The text calls it `row`; while a function is traced, it is float64.
"""

import copy
import inspect
import math
import operator
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.weak import WeakIdRef

from thunder_flce.importing import without_dynamo

VARIABLES = ("log_prob", "entropy", "log_sum_exp", "mean_logit")
"""Variables of a token loss: the outputs in `loss.OUTPUTS` that have a gradient."""

TokenLoss = str
"""Text of a token loss; "" for the cross-entropy."""


class NotPointwise(Exception):
    """Raised if a function is not made of pointwise operations; the message names the cause."""


class Handle(str):
    """Name of a tensor in the text."""


def input_name(number: int) -> str:
    """Returns the name of a further tensor, by its index in token_inputs."""
    return f"i{number}"


def not_pointwise_error(problem: Exception) -> TypeError:
    """Returns the error for a function that is not made of pointwise operations."""
    needed = "must be made of PyTorch's operations on single tokens, since it runs on one chunk of tokens at a time"
    return TypeError(f"token_loss {needed}, but it has: {problem}")


def keyword_variables(function: Callable[..., Any], inputs: int) -> list[str]:
    """Returns the variables that a function takes by name; raises a TypeError if its signature does not fit."""
    if torch.compiler.is_dynamo_compiling() and isinstance(function, FunctionType):
        # Dynamo has no signature of a function that the program defines.
        while hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        code = function.__code__
        return [name for name in VARIABLES[2:] if name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]]
    try:
        signature = inspect.signature(function)
        keywords = [name for name in VARIABLES[2:] if name in signature.parameters]
        signature.bind(*range(2 + inputs), **dict.fromkeys(keywords))
    except (TypeError, ValueError) as error:  # A builtin function may have no signature.
        expected = f"log_prob, entropy and the {inputs} tensors of token_inputs"
        raise TypeError(f"token_loss is called with {expected}: {error}") from None
    return keywords


def call_function(function: Callable[..., Any], arguments: Mapping[str, Any], keywords: Sequence[str]) -> Any:
    """Calls a function with arguments given by name, of which it takes `keywords` by keyword; returns its result."""
    positional = [value for name, value in arguments.items() if name not in VARIABLES[2:]]
    return function(*positional, **{name: arguments[name] for name in keywords})


# Tracing a function to its text.

_TEXTS: dict[Any, TokenLoss] = {}


@without_dynamo
def text_of(function: Callable[..., Any], input_dtypes: Sequence[torch.dtype]) -> TokenLoss:
    """Returns the text of a function of (log_prob, entropy, *inputs), and of log_sum_exp or mean_logit if it has these.

    The text is cached by everything that the function reads: numbers, tensors and functions, in globals, closures and
    defaults, and PyTorch's default dtype. A function that reads other objects, such as a method's `self`, is traced
    again at each call.

    Raises:
        TypeError: if the function takes other arguments, or has an operation that is not pointwise.
    """
    try:
        key = (*input_dtypes, torch.get_default_dtype(), _cache_key(function, ()))
    except (ValueError, RuntimeError):
        key = None
    if key in _TEXTS:
        return _TEXTS[key]
    try:
        text = _traced(function, input_dtypes)
    except NotPointwise as problem:
        raise not_pointwise_error(problem) from problem
    if len(_TEXTS) >= 256:
        _TEXTS.clear()
    return text if key is None else _TEXTS.setdefault(key, text)


def _traced(function: Callable[..., Any], dtypes: Sequence[torch.dtype]) -> TokenLoss:
    keywords, texts = keyword_variables(function, len(dtypes)), []
    for tokens in (1, 2):
        recorder = Recorder(dtypes, tokens=tokens)
        try:
            with recorder.recording():
                result = call_function(function, recorder.values, keywords)
        except RuntimeError as error:
            raise NotPointwise(error) from error
        texts.append(recorder.finish(result))
    if texts[0] != texts[1]:
        raise NotPointwise("a number that depends on the tokens, or on how many there are")
    return texts[0]


def _cache_key(value: Any, names: Sequence[str], depth: int = 8) -> Any:
    """Returns everything that a function reads, as a hashable key; raises a ValueError for objects that may change.

    `names` are the globals and attributes that its code names.
    """
    kind = type(value)
    if kind in (bool, int, float, str, type(None), torch.dtype):
        return kind, repr(value)
    if isinstance(value, Tensor):
        if value.device.type != "cpu" or value.numel() != 1:
            return WeakIdRef(value), value._version
        with _isolated():
            return value.dtype, value.shape, value.requires_grad, repr(value.item())
    library = value.__name__ if kind is ModuleType else getattr(value, "__module__", None) or ""
    is_library = kind in (FunctionType, ModuleType, type) and library.partition(".")[0] in ("torch", "math", "numpy")
    if is_library or (kind is BuiltinFunctionType and isinstance(value.__self__, ModuleType | type)):
        return value
    if kind in (tuple, list, dict) and depth:
        return kind, *(_cache_key(item, names, depth - 1) for item in (value.items() if kind is dict else value))
    if kind is ModuleType and depth:
        return value, *(_cache_key(vars(value)[name], names, depth - 1) for name in names if name in vars(value))
    if kind is FunctionType and depth and not vars(value):
        names, namespace = _names(value.__code__), value.__globals__
        read = [*(namespace[name] for name in names if name in namespace), value.__defaults__, value.__kwdefaults__]
        read += [cell.cell_contents for cell in value.__closure__ or ()]
        return value.__code__, *(_cache_key(item, names, depth - 1) for item in read)
    raise ValueError(value)


@lru_cache(1024)
def _names(code: CodeType) -> tuple[str, ...]:
    """Returns the globals and attributes that are named in a code object and in the functions that it defines."""
    inner = (name for constant in code.co_consts if isinstance(constant, CodeType) for name in _names(constant))
    return tuple(dict.fromkeys((*code.co_names, *inner)))


_NAME = re.compile(r"(?<![\w.'\"])[a-z_]\w*\b(?![\w.('\"=])")
_COPIES = ("_to_copy", "clone", "detach", "alias", "lift_fresh", "lift_fresh_copy")
_UNTAGGED = ("masked_fill", "where", "rsub", "floor_divide", "_local_scalar_dense")
"""Pointwise operations that lack PyTorch's tag `pointwise`"""
_FACTORY = re.compile(r"(new_)?(full|zeros|ones)(_like)?|scalar_tensor|fill|zero")
"""Operations that return the same number for all tokens"""
_IGNORED = ("device", "layout", "pin_memory", "memory_format", "non_blocking", "implicit")
_WITH_NUMBER = ("where", "masked_fill", "add", "sub", "mul", "div", "pow", "eq", "ne", "lt", "le", "gt", "ge")
"""Operations that take a number in place of their last tensor"""
_NEUTRAL = {"mul": 1, "div": 1, "pow": 1, "add": 0, "sub": 0}


class Recorder(TorchDispatchMode):
    """Records operations on tensors of a few tokens, forward and backward, and writes them as a `TokenLoss`.

    `dtypes` are the dtypes of the further tensors.
    """

    def __init__(self, dtypes: Iterable[torch.dtype] = (), *, tokens: int = 2):
        super().__init__()
        self.values: dict[str, Any] = {}
        """Tensors (tokens,) and other results of `write`, by handle."""
        self._tokens, self._is_backward = tokens, False
        self._lines: dict[str, Handle] = {}
        """Names of results, by expression."""
        self._named: dict[int, tuple[Tensor, Any]] = {}
        """By id of a tensor: the tensor, kept alive so that no other gets its id, and its name or constant value."""
        self._attached: dict[str, Handle] = {}
        """Names of tensors before `detach`, by their names after it."""
        for name in VARIABLES:
            self._add(name, torch.float64)
        for dtype in dtypes:
            self.add_input(dtype)

    def copy(self) -> "Recorder":
        """Returns a recorder that continues from this state."""
        other = copy.copy(self)
        for name in ("values", "_lines", "_named", "_attached"):
            setattr(other, name, dict(getattr(self, name)))
        return other

    def add_input(self, dtype: torch.dtype) -> Handle:
        """Adds a further tensor; returns its name."""
        return self._add(input_name(sum(name[0] == "i" for name in self.values)), dtype)

    def _add(self, name: str, dtype: torch.dtype) -> Handle:
        with _isolated():
            tensor = self._tokens * torch.arange(1, self._tokens + 1)
            tensor = tensor.to(torch.float64 if dtype.is_floating_point else dtype)
            # A clone, since for leaves PyTorch would raise errors of its own.
            self.values[name] = tensor.requires_grad_().clone() if name in VARIABLES else tensor
        self._named[id(self.values[name])] = self.values[name], Handle(name)
        return Handle(name)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records operations while the context lasts."""
        with _isolated(), self:
            yield

    def write(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], *, has_gradient: bool = True) -> Handle:
        """Runs a function, method or attribute on arguments whose tensors are `Handle`s; returns the result's handle.

        `has_gradient` says whether gradients are enabled. Raises `NotPointwise` if the function is not pointwise.
        """
        values = [self.values[arg] if isinstance(arg, Handle) else arg for arg in args]
        keywords = {key: self.values[arg] if isinstance(arg, Handle) else arg for key, arg in kwargs.items()}
        handle = Handle(f"r{len(self.values)}")
        try:
            with self.recording(), torch.set_grad_enabled(has_gradient):
                self.values[handle] = _result_of(name, values, keywords)
        except (TypeError, ValueError, RuntimeError, IndexError) as error:
            raise NotPointwise(f"{name} with such arguments") from error
        return handle

    def detached(self, handle: Handle) -> Handle:
        """Detaches a tensor; returns the handle of the result."""
        return self.write("detach", (handle,), {})

    def finish(self, result: Any) -> TokenLoss:
        """Returns the text of the loss with this handle or tensor; raises `NotPointwise` if it is not pointwise."""
        value = self.values[result] if isinstance(result, Handle) else result
        if not isinstance(value, Tensor):
            raise NotPointwise(f"{type(value).__name__} as its result")
        with self.recording():
            loss = self._name(value)
            if self._reached([loss]).isdisjoint(VARIABLES):
                raise NotPointwise(f"a result that depends on none of {', '.join(VARIABLES)}")
            if value.shape != (self._tokens,):
                raise NotPointwise("a result of another shape")
            derivatives = self._derivatives(value)
        outputs = {"loss": self._line(f"aten.clone({loss})") if loss in self.values else loss}
        for name, grad in derivatives.items():
            if grad != 0:
                is_handle = isinstance(grad, Handle)
                outputs[f"d_{name}"] = grad if is_handle else self._line(f"aten.full_like({loss}, {grad!r})")
        value_names, needed = self._reached([outputs["loss"]]), self._reached(outputs.values())
        lines: list[tuple[str, Any]] = [(name, text) for text, name in self._lines.items() if name in needed]
        # The lines that the value needs come first, so that it can be computed without the derivatives.
        lines.sort(key=lambda line: line[0] not in value_names)
        numbers = {name: f"f{number}" for number, (name, _) in enumerate(lines)}
        lines.insert(len(value_names.intersection(numbers)), ("loss", outputs.pop("loss")))
        text = "; ".join(f"{name} = {text}" for name, text in (*lines, *outputs.items()))
        return _NAME.sub(lambda match: numbers.get(match[0], match[0]), text)

    def _derivatives(self, value: Tensor) -> dict[str, Any]:
        """Returns the derivatives by variable: names, or numbers if they are constant."""
        if not value.requires_grad:
            return {}
        variables, ones = [self.values[name] for name in VARIABLES], torch.ones_like(value)
        self._is_backward = True
        try:
            grads = torch.autograd.grad(value, variables, ones, allow_unused=True, retain_graph=True)
            return {name: self._name(grad) for name, grad in zip(VARIABLES, grads, strict=True) if grad is not None}
        finally:
            self._is_backward = False

    def _reached(self, names: Iterable[Any]) -> set[str]:
        """Returns all names on which some names depend, including these."""
        needed = set(names)
        for text, name in reversed(self._lines.items()):
            if name in needed:
                needed.update(_NAME.findall(text))
        return needed

    def _line(self, text: str) -> Handle:
        return self._lines.setdefault(text, Handle(f"t{len(self._lines)}"))

    def _name(self, tensor: Tensor) -> Any:
        """Returns a tensor's name, or its value if that is constant."""
        if id(tensor) in self._named:
            name = self._named[id(tensor)][1]
            return self._attached.get(name, name) if self._is_backward else name
        if tensor.numel() != 1 or tensor.requires_grad:
            raise NotPointwise("a tensor that is not among its arguments; give it to token_inputs")
        return tensor.item()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, is_mutable = func._opname, func._schema.is_mutable
        inputs = {key: value for key, value in (kwargs or {}).items() if key not in _IGNORED and value is not None}
        inputs = dict(enumerate(args)) | inputs
        names = {key: self._name(value) for key, value in inputs.items() if isinstance(value, Tensor)}
        is_number = not any(isinstance(value, Handle) for value in names.values())
        if name == "_local_scalar_dense" and not is_number:
            raise NotPointwise("control flow that depends on a tensor, or a function of numbers, as those of math")
        if is_mutable and not self._is_backward:
            raise NotPointwise(f"{name}, which changes a tensor in place")
        name = name.removesuffix("_") if is_mutable else name
        # The derivatives of some operations compute 1 - tensor by empty_like, fill_ and sub_.
        is_factory = _FACTORY.fullmatch(name) or (name == "empty_like" and self._is_backward)
        is_pointwise = torch.Tag.pointwise in func.tags and torch.Tag.nondeterministic_seeded not in func.tags
        if func.namespace != "aten" or not (is_pointwise or name in (*_COPIES, *_UNTAGGED) or is_factory):
            return self._decomposed(func, args, kwargs or {})
        if "dtype" in inputs and inputs["dtype"].is_floating_point:
            inputs["dtype"] = torch.float64
        inputs |= {key: inputs[key].cpu() for key in names}  # A constant may be on another device.
        out = func(*map(inputs.get, range(len(args))), **{key: inputs[key] for key in inputs if isinstance(key, str)})
        if not isinstance(out, Tensor):
            if name == "_local_scalar_dense":
                return out
            raise NotPointwise(name)
        if is_number or is_factory:
            result: Any = out.flatten()[0].item()
        else:
            is_same = name in _COPIES and out.dtype == inputs[0].dtype
            result = names[0] if is_same else self._expression(name, inputs, inputs | names, out.dtype)
            if out.is_floating_point() and out.dtype != torch.float64:  # Integers give PyTorch's default dtype.
                result, out = self._line(f"aten._to_copy({result}, dtype=row)"), out.double()
            if not self._is_backward and (name == "detach" or not torch.is_grad_enabled()):
                detached = self._line(f"aten.detach({result})")
                self._attached[detached], result = result, detached
        self._named[id(out)] = out, result
        return out

    def _decomposed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs an operation by its decomposition, which may be pointwise though the operation is not tagged so."""
        from torch._decomp import decomposition_table

        try:
            with self:
                result = decomposition_table.get(func, func.decompose)(*args, **kwargs)
        except NotPointwise as error:
            raise NotPointwise(func._opname) from error
        if result is NotImplemented:
            raise NotPointwise(func._opname)
        return result

    def _expression(self, name: str, inputs: Any, operands: dict[Any, Any], dtype: torch.dtype) -> Handle:
        """Adds a line for an operation, unless there is an equal one; returns the name of the result."""
        if name in ("add", "mul") and not isinstance(operands[0], Handle) and list(operands) == [0, 1]:
            # A number needs no tensor as the last operand.
            operands, inputs = ({0: values[1], 1: values[0]} for values in (operands, inputs))
        is_neutral = not isinstance(operands.get(1), Handle) and operands.get(1) == _NEUTRAL.get(name, math.nan)
        if is_neutral and len(operands) == 2 and isinstance(operands[0], Handle) and inputs[0].dtype == dtype:
            return operands[0]
        handles = [key for key, operand in operands.items() if isinstance(operand, Handle)]
        like, has_fractions = handles[0], any(inputs[key].is_floating_point() for key in handles)
        for key, operand in operands.items():
            if key in handles or not isinstance(inputs[key], Tensor):
                continue
            is_last = key == len(operands) - 1 or (name == "where" and key == 1 and 2 in handles)
            # With a float, integers become PyTorch's default dtype.
            keeps_dtype = has_fractions or not inputs[key].is_floating_point()
            if not (name in _WITH_NUMBER and is_last and keeps_dtype):
                dtype_text = _literal(inputs[key].dtype)
                cast = "" if dtype_text == _literal(inputs[like].dtype) else f", dtype={dtype_text}"
                operands[key] = self._line(f"aten.full_like({operands[like]}, {operand!r}{cast})")
        texts = (f"{key}=" * isinstance(key, str) + _literal(operand) for key, operand in operands.items())
        return self._line(f"aten.{name}({', '.join(texts)})")


def _literal(value: Any) -> str:
    if isinstance(value, torch.dtype):
        return "row" if value.is_floating_point else str(value)
    if not isinstance(value, bool | int | float | str | None):
        raise NotPointwise(f"{type(value).__name__} among the arguments of an operation")
    return str(value) if isinstance(value, Handle) else repr(value)


# PyTorch has one flag for all threads that says whether a dispatch mode is active. If two threads have a mode at once,
# the flag may stay set, and nothing is compiled any more.
_lock = threading.RLock()


@contextmanager
def _isolated() -> Iterator[None]:
    """Disables the caller's modes, hooks and transforms, and excludes other threads, while the context lasts."""
    without_modes, autocast = _disable_current_modes(), torch.autocast("cpu", enabled=False)
    without_hooks = torch._C._autograd._saved_tensors_hooks_set_tracing
    # Function modes: of a default device, and torch.export's, which records calls that enable or disable gradients.
    without_functions = torch._C.DisableTorchFunction()
    without_transforms, grad_mode = temporarily_clear_interpreter_stack(), torch.enable_grad()
    with _lock, without_functions, without_modes, without_transforms, torch.inference_mode(False), grad_mode, autocast:
        before = without_hooks(True)
        try:
            yield
        finally:
            without_hooks(before)


_PYTORCH_NAMES = {
    "truediv": "true_divide", "truediv_": "true_divide_", "floordiv": "floor_divide", "mod": "remainder",
    "and_": "bitwise_and", "or_": "bitwise_or", "xor": "bitwise_xor", "invert": "bitwise_not",
    "log_sigmoid": "logsigmoid",
}  # fmt: skip


def _result_of(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if name in ("dtype", "device"):
        return getattr(args[0], name)
    name = _PYTORCH_NAMES.get(name, name)
    is_tensor_operation = kwargs or len(args) != 2 or isinstance(args[0], Tensor)
    for place in (F, torch, torch.special, Tensor) if is_tensor_operation else (operator, torch):
        function = getattr(place, name, None)
        if callable(function) and not isinstance(function, ModuleType | type):
            return function(*args, **kwargs)
    raise NotPointwise(name)


# Running a text.

_STATEMENT = re.compile(r"(f\d+|loss|d_[a-z_]+) = (aten\.\w+[^\W_]\([\w .,=+'-]*\)|\w+)")


@lru_cache(256)
def renumber_inputs(token_loss: TokenLoss) -> tuple[TokenLoss, list[int]]:
    """Renumbers the further tensors that a loss reads from 0 on; returns the text and their previous numbers."""
    read = sorted({int(name[1:]) for name in _NAME.findall(token_loss) if name[0] == "i" and name[1:].isdigit()})
    names = {input_name(number): input_name(at) for at, number in enumerate(read)}
    return _NAME.sub(lambda match: names.get(match[0], match[0]), token_loss), read


def check(token_loss: Any, inputs: int) -> None:
    """Raises a TypeError if a text is not from this module, or reads more than `inputs` further tensors."""
    is_text = isinstance(token_loss, str) and "loss = " in token_loss
    if not is_text or not all(map(_STATEMENT.fullmatch, token_loss.split("; "))):
        raise TypeError(f"token_loss must be a function, or the text of one in a trace, but got {token_loss!r}")
    for number in renumber_inputs(token_loss)[1]:
        if number >= inputs:
            raise TypeError(f"token_loss reads token_inputs[{number}], but token_inputs has {inputs} tensors")


def _value_text(token_loss: TokenLoss) -> TokenLoss:
    """Returns the part of the text that computes the value."""
    before, loss, after = token_loss.partition("loss = ")
    return before + loss + after.partition(";")[0]


@lru_cache(1024)
def uses(token_loss: TokenLoss, variable: str) -> bool:
    """Whether a loss depends on one of `VARIABLES`."""
    return variable in _NAME.findall(_value_text(token_loss))


def evaluate(token_loss: TokenLoss, values: Mapping[str, Tensor]) -> Tensor:
    """Returns the loss of each token, (...), from the values of all names that the text reads."""
    return _compiled(_value_text(token_loss))(values)[0]


def value_and_derivatives(token_loss: TokenLoss, values: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Any]]:
    """Returns the loss of each token, as `evaluate`, and its derivatives by variable; None for a derivative of 0."""
    return _compiled(token_loss)(values)


@lru_cache(256)
def _compiled(token_loss: TokenLoss) -> Callable[[Mapping[str, Tensor]], Any]:
    # The text is not differentiated, so `detach` is dropped. torch's own bindings choose an overload in less time.
    text = re.sub(r"aten\.detach\((\w+)\)", r"\1", token_loss)
    operations = re.findall(r"aten\.(\w+)", text)
    aten = SimpleNamespace(
        **{name: getattr(torch if hasattr(torch, name) else torch.ops.aten, name) for name in operations}
    )
    statements = text.split("; ")
    names = {statement.partition(" = ")[0] for statement in statements}
    read = sorted(set(_NAME.findall(text)) - names - {"row", "inf", "nan"})
    derivatives = (f"{name!r}: {f'd_{name}.to(row)' if f'd_{name}' in names else None}" for name in VARIABLES)
    body = [
        *(f"{name} = values[{name!r}]" for name in read),
        f"row = {next(name for name in VARIABLES if name in read)}.dtype",
        *statements,
        f"return loss.to(row), {{{', '.join(derivatives)}}}",
    ]
    scope: dict[str, Any] = {"aten": aten, "torch": torch, "inf": math.inf, "nan": math.nan}
    exec("def run(values):\n    " + "\n    ".join(body), scope)  # noqa: S102 (`check` has read it)
    return scope["run"]
