"""This project and its peers, each as a function of the operands that returns the mean loss, ready for backward.

All methods do the same work: one loss from x, weight, bias and target, and after `loss.backward()` all gradients in
`.grad`. A peer that skips part of the work by default has a second entry that does all of it.
"""

import ast
from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import thunder_flce
from thunder_flce.backend import compile_graph
from thunder_flce.options import Options

Method = Callable[..., Tensor]
"""Computes a loss from x (T, H), weight (V, H), target (T,) and, for shapes with a bias, the keyword bias (V,)."""


def _program(x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.cross_entropy(F.linear(x, weight, bias).float(), target)


def _backend(program: Callable[..., Tensor], *, options: Options | None = None) -> Callable[..., Tensor]:
    settings = {**(options or Options()).non_defaults(), "strict": True}
    return torch.compile(program, fullgraph=True, dynamic=False, backend=compile_graph, options=settings)


# Ours are strict: a loss that is not fused fails, and is not measured as if it were ours.
COMPILERS: dict[str, Callable[..., Callable[..., Tensor]]] = {
    "eager": lambda program: program,
    "torch.compile": partial(torch.compile, fullgraph=True, dynamic=False),
    "thunder": lambda program: import_module("thunder").jit(program),
    "flce": lambda program, **settings: thunder_flce.jit(program, strict=True, **settings),
    "flce backend": _backend,
}
"""Compilers of a program in PyTorch; ours also accept `options`, an `Options`"""


def ours(options: Options | None = None, **settings: Any) -> Method:
    """Returns a method that calls `linear_cross_entropy`; its result is (), (T,) or a tuple, as `settings` demand."""
    return lambda x, weight, target, bias=None: thunder_flce.linear_cross_entropy(
        x, weight, target, linear_bias=bias, options=options, **settings
    )


def _peer(path: str, **settings: Any) -> Method:
    """Makes a method of a peer's function, given as "module:name"."""
    module, name = path.split(":")
    return partial(attrgetter(name)(import_module(module)), **settings)


def _torch_linear_cross_entropy(**settings: Any) -> Method:
    # Only newer versions of torch have the function and its options.
    options = torch.nn.LinearCrossEntropyOptions(**settings)  # type: ignore[attr-defined]
    function = partial(F.linear_cross_entropy, options=options)  # type: ignore[attr-defined]
    return lambda x, weight, target, bias=None: function(x, weight, target, linear_bias=bias)


def _trl_log_probs() -> Callable[..., Tensor]:
    """Returns the head of TRL's trainers without a model, with the trainers' number of columns per block."""
    function = import_module("trl.kernels").ChunkedLogProbFunction
    settings = 1.0, 32768, None, 1.0, ()  # temperature, columns, softcap, scale, outputs
    return lambda x, weight, target, bias=None: function.apply(x, weight, bias, target, *settings)[0]


def _liger_log_probs() -> Callable[..., Tensor]:
    function = import_module("liger_kernel.ops").LigerFusedLinearScaledCrossEntropyFunction
    settings = 1.0, -100, 1, False  # temperature, ignore_index, tiles, entropy
    return lambda x, weight, target: -function.apply(x, weight, target, *settings)


def _cut_cross_entropy_log_probs() -> Callable[..., Tensor]:
    """Returns cut-cross-entropy with all gradients; by default, it skips small ones."""
    function = import_module("cut_cross_entropy").linear_cross_entropy
    return lambda x, weight, target: -function(x, weight, target, reduction="none", filter_eps=None)


LOG_PROBS = {
    "trl": _trl_log_probs,
    "cut-cross-entropy": _cut_cross_entropy_log_probs,
    "liger, per token": _liger_log_probs,
}
"""Peers that compute log-probabilities of tokens: each entry returns a function of x, weight and target to (T,)."""


def _trl() -> Method:
    log_probs = _trl_log_probs()

    def function(x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None) -> Tensor:
        valid = target != -100
        return -log_probs(x[valid], weight, target[valid], bias).sum() / valid.sum()

    return function


OURS = "flce", "flce backend", "function"
"""This project, by thunder, by the backend of torch.compile and as a function"""

_HOPPER = "liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90:LigerFusedLinearCrossEntropySM90Function.apply"
_LIGER = "liger_kernel.transformers.functional:liger_fused_linear_cross_entropy"
_CUT = "cut_cross_entropy:linear_cross_entropy"
_QUACK = "quack.linear_cross_entropy:chunked_linear_cross_entropy"

METHODS: dict[str, Callable[..., Method]] = {
    **{name: partial(compiler, _program) for name, compiler in COMPILERS.items()},
    "function": ours,
    "torch linear_cross_entropy": _torch_linear_cross_entropy,
    "torch linear_cross_entropy, 2048 rows": partial(_torch_linear_cross_entropy, batch_chunk_size=2048),
    "liger": partial(_peer, _LIGER),
    "liger, chunk 8": partial(_peer, _LIGER, chunk_mem_const=8),
    "cut-cross-entropy": partial(_peer, _CUT),
    # By default, it skips gradients below eps / 32 of their dtype, which here are nearly all.
    "cut-cross-entropy, exact": partial(_peer, _CUT, filter_eps=None),
    "trl": _trl,
    "liger, hopper": partial(_peer, _HOPPER),
    # With its default of 4096 tokens, quack 0.6.5 fails if the hidden size is as large.
    "quack": partial(_peer, _QUACK, tuned=False, chunk_size=2048),
    "quack, tuned": partial(_peer, _QUACK, use_scaled_exp=False),
}
"""Makers of methods by name; called once per shape, so that shapes share no compiled code.

Names of `OURS` may be followed by options, as in "flce, chunk_rows=1024, strategy=save_logits". Methods that may leave
the device unusable come last.
"""


def maker(name: str) -> Callable[[], Method]:
    """Returns the maker of a method; the maker raises an ImportError if a peer is not installed.

    Raises:
        ValueError: if there is no such method, or an option is not a field of `Options`.
    """
    if name in METHODS:
        return METHODS[name]
    method, options = with_options(name, METHODS)
    return partial(METHODS[method], options=options)


def with_options(name: str, known: Iterable[str] = OURS) -> tuple[str, Options]:
    """Reads "flce, chunk_rows=1024" as one of `OURS` and its options; a ValueError lists the `known` methods."""

    def value(text: str) -> Any:
        try:
            return ast.literal_eval(text)
        except (SyntaxError, ValueError):
            return text

    method, *settings = name.split(", ")
    pairs = dict(part.split("=", 1) for part in settings if "=" in part)
    if method not in OURS or len(pairs) < len(settings):
        names = f"{'; '.join(known)}; and {', '.join(OURS)} with options, as in 'flce, chunk_rows=1024'"
        raise ValueError(f"a method must be one of {names}, but got {name!r}")
    try:
        return method, Options(**{option: value(text) for option, text in pairs.items()})
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name!r}: {error}") from None
