"""This project and its peers, each behind a function of the inputs that returns the mean loss, ready for backward.

All do the same for their user: one loss from x, weight, bias and target, and after `loss.backward()` all gradients in
`.grad`. A peer whose default leaves out part of the work has a second entry that does all of it.
"""

import ast
from collections.abc import Callable
from functools import partial
from importlib import import_module
from itertools import chain
from operator import attrgetter
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import thunder_flce
from thunder_flce.backend import compile_graph
from thunder_flce.bench.measure import Unavailable
from thunder_flce.bench.shapes import Inputs
from thunder_flce.options import Options

Method = Callable[[Inputs], Tensor]


def _program(x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *adapter: Tensor) -> Tensor:
    logits = F.linear(x, weight, bias)
    if adapter:
        logits = logits + F.linear(*adapter)
    return F.cross_entropy(logits.float(), target)


def _compiled(compile_program: Callable[..., Callable[..., Tensor]], **settings: Any) -> Method:
    """The mean loss as it is written in PyTorch, compiled by a function."""
    program = compile_program(_program, **settings)
    return lambda inputs: program(inputs.x, inputs.weight, inputs.bias, inputs.target, *chain(*inputs.terms))


def ours(
    options: Any = None, *, function: Callable[..., Any] = thunder_flce.linear_cross_entropy, **settings: Any
) -> Method:
    """A call of `linear_cross_entropy`, whose result is (), (T,), or a tuple, as its other arguments ask for it."""

    def method(inputs: Inputs) -> Any:
        given = {**settings, "linear_bias": inputs.bias, **({"terms": inputs.terms} if inputs.terms else {})}
        return function(inputs.x, inputs.weight, inputs.target, options=options, **given)

    return method


def _jitted(options: Options) -> Method:
    program, function = _compiled(thunder_flce.jit, options=options), ours(options)
    # A sum of linears is given to the function as such: there is nothing to find in a trace.
    return lambda inputs: function(inputs) if inputs.terms else program(inputs)


def _by_backend(options: Options) -> Method:
    given = {**options.non_defaults(), "strict": True}
    return _compiled(torch.compile, dynamic=False, backend=compile_graph, options=given)


def peer(module: str, *, extra: str | None = "peers") -> ModuleType:
    """A module of another library, which the extra installs, or its own name; `Unavailable` where it is not there."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        cure = f"pip install {module.partition('.')[0]}" if extra is None else f"it is in the extra {extra!r}"
        raise Unavailable(f"{error}; {cure}") from None
    except ImportError as error:
        raise Unavailable(str(error)) from None


def _one_linear(function: Callable[..., Tensor], *, takes_bias: bool = True) -> Method:
    """A function of x, weight, target and, where it takes one, bias=; it says so where there is more than it takes."""

    def method(inputs: Inputs) -> Tensor:
        if inputs.terms:
            raise Unavailable("takes one linear, and no adapter beside it")
        if inputs.bias is not None and not takes_bias:
            raise Unavailable("no bias in this version")
        bias = {"bias": inputs.bias} if takes_bias else {}
        return function(inputs.x, inputs.weight, inputs.target, **bias)

    return method


def _peer(path: str, **settings: Any) -> Method:
    """A peer's function, as in "module:name", which takes no bias."""
    module, name = path.split(":")
    return _one_linear(partial(attrgetter(name)(peer(module)), **settings), takes_bias=False)


def _liger(**settings: Any) -> Method:
    function = peer("liger_kernel.transformers.functional").liger_fused_linear_cross_entropy
    return _one_linear(partial(function, **settings))


def _torch_linear_cross_entropy(**settings: Any) -> Method:
    if not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        raise Unavailable(f"torch {torch.__version__} has no chunked linear_cross_entropy")
    function: Callable[..., Tensor] = F.linear_cross_entropy  # type: ignore[attr-defined]
    options = torch.nn.LinearCrossEntropyOptions(**settings)
    return _one_linear(lambda x, weight, target, bias: function(x, weight, target, linear_bias=bias, options=options))


def _trl_log_probs() -> Callable[..., Tensor]:
    """The head of TRL's trainers without the model around it, at the width of their blocks of the vocabulary."""
    function = peer("trl.kernels", extra=None).ChunkedLogProbFunction
    settings = 1.0, 32768, None, 1.0, ()  # temperature, columns, softcap, scale, outputs
    return lambda x, weight, target, bias=None: function.apply(x, weight, bias, target, *settings)[0]


def _liger_log_probs() -> Callable[..., Tensor]:
    function = peer("liger_kernel.ops").LigerFusedLinearScaledCrossEntropyFunction
    settings = 1.0, -100, 1, False  # temperature, ignore_index, tiles, entropy
    return lambda x, weight, target: -function.apply(x, weight, target, *settings)


def _cut_cross_entropy_log_probs() -> Callable[..., Tensor]:
    """With all gradients: by default it leaves out the small ones."""
    function = peer("cut_cross_entropy").linear_cross_entropy
    return lambda x, weight, target: -function(x, weight, target, reduction="none", filter_eps=None)


LOG_PROBS = {
    "trl": _trl_log_probs,
    "cut-cross-entropy": _cut_cross_entropy_log_probs,
    "liger, per token": _liger_log_probs,
}
"""Peers that have log-probabilities of tokens: each gives a function of x, weight and target, whose result is (T,)."""


def _trl() -> Method:
    log_probs = _trl_log_probs()

    def function(x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None) -> Tensor:
        valid = target != -100
        return -log_probs(x[valid], weight, target[valid], bias).sum() / valid.sum()

    return _one_linear(function)


OURS: dict[str, Callable[[Options], Method]] = {"flce": _jitted, "flce backend": _by_backend, "function": ours}
"""This project by thunder, by the backend of torch.compile and as a function."""

_HOPPER = "liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90:LigerFusedLinearCrossEntropySM90Function.apply"
_CUT = "cut_cross_entropy:linear_cross_entropy"
_QUACK = "quack.linear_cross_entropy:chunked_linear_cross_entropy"

METHODS: dict[str, Callable[[], Method]] = {
    "eager": partial(_compiled, lambda program: program),
    "torch.compile": partial(_compiled, torch.compile, dynamic=False),
    "torch.compile, dynamic": partial(_compiled, torch.compile, dynamic=True),
    "thunder": lambda: _compiled(import_module("thunder").jit),
    **{name: partial(make, Options()) for name, make in OURS.items()},
    "torch linear_cross_entropy": _torch_linear_cross_entropy,
    "torch linear_cross_entropy, 2048 rows": partial(_torch_linear_cross_entropy, batch_chunk_size=2048),
    "liger": _liger,
    "liger, chunk 8": partial(_liger, chunk_mem_const=8),
    "cut-cross-entropy": partial(_peer, _CUT),
    # Without this, gradients below eps / 32 of their dtype are never computed: nearly all of them here.
    "cut-cross-entropy, exact": partial(_peer, _CUT, filter_eps=None),
    "trl": _trl,
    "liger, hopper": partial(_peer, _HOPPER),
    # Not its default of 4096 tokens, at which quack 0.6.5 fails where the hidden size is as large.
    "quack": partial(_peer, _QUACK, tuned=False, chunk_size=2048),
    "quack, tuned": partial(_peer, _QUACK, use_scaled_exp=False),
}
"""What each name stands for; called once per shape, so that nothing compiled is shared between shapes.

One of `OURS` may also have options behind it, as in "flce, chunk_rows=1024, strategy=save_logits". Those that may leave
the device unusable come last.
"""

DEFAULT = [name for name in METHODS if name not in ("torch.compile, dynamic", "quack, tuned")]
"""Measured where none is named. What is left out compiles or searches for minutes before its first result."""


def maker(name: str) -> Callable[[], Method]:
    """What makes the method of that name, or raises `Unavailable` where a peer is not installed.

    Raises:
        ValueError: where there is no such method, or an option is none of `Options`.
    """
    if name in METHODS:
        return METHODS[name]
    ours, options = with_options(name)
    return partial(OURS[ours], options)


def with_options(name: str) -> tuple[str, Options]:
    """Reads "flce, chunk_rows=1024" as one of `OURS` and its options; raises a ValueError where it is not that."""

    def value(text: str) -> Any:
        try:
            return ast.literal_eval(text)
        except (SyntaxError, ValueError):
            return text

    ours, *given = name.split(", ")
    pairs = dict(part.split("=", 1) for part in given if "=" in part)
    if ours not in OURS or len(pairs) < len(given):
        names = f"{'; '.join(METHODS)}; and {', '.join(OURS)} with options, as in 'flce, chunk_rows=1024'"
        raise ValueError(f"a method must be one of {names}, but got {name!r}")
    try:
        return ours, Options(**{option: value(text) for option, text in pairs.items()})
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name!r}: {error}") from None
