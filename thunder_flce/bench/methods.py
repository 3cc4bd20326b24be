"""This project and its peers, each behind a function of the inputs that returns the mean loss, ready for backward.

All do the same for their user: one loss from x, weight, bias and target, and after `loss.backward()` all gradients in
`.grad`. A peer whose default leaves out part of the work has a second entry that does all of it.
"""

import ast
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import chain
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import thunder_flce
from thunder_flce.backend import compile_graph
from thunder_flce.bench.measuring import Unavailable
from thunder_flce.bench.shapes import Inputs
from thunder_flce.options import Options

Method = Callable[[Inputs], Tensor]


def _program(x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *adapter: Tensor) -> Tensor:
    logits = F.linear(x, weight, bias)
    if adapter:
        logits = logits + F.linear(*adapter)
    return F.cross_entropy(logits.float(), target)


def compiled(compile_program: Callable[[Callable[..., Tensor]], Callable[..., Tensor]]) -> Method:
    """The mean loss as it is written in PyTorch, compiled by a function."""
    program = compile_program(_program)
    return lambda inputs: program(inputs.x, inputs.weight, inputs.bias, inputs.target, *chain(*inputs.terms))


def _jitted(options: Options) -> Method:
    program = compiled(partial(thunder_flce.jit, options=options))
    function = ours(options)
    # A sum of linears is given to the function as such: there is nothing to find in a trace.
    return lambda inputs: function(inputs) if inputs.terms else program(inputs)


def _by_backend(options: Options) -> Method:
    given = {**options.non_defaults(), "strict": True}
    return compiled(partial(torch.compile, dynamic=False, backend=compile_graph, options=given))


def ours(options: Options | None = None, **settings: Any) -> Method:
    """A call of `linear_cross_entropy`, whose result is (), (T,), or a tuple, as its other arguments ask for it."""
    return calling(thunder_flce.linear_cross_entropy, options=options, **settings)


def calling(linear_cross_entropy: Callable[..., Any], **settings: Any) -> Method:
    """A call of the function, of any version of this package."""

    def method(inputs: Inputs) -> Any:
        given = {**settings, "linear_bias": inputs.bias, **({"terms": inputs.terms} if inputs.terms else {})}
        return linear_cross_entropy(inputs.x, inputs.weight, inputs.target, **given)

    return method


def _auto_chunker() -> Method:
    if find_spec("torch._inductor.fx_passes.auto_chunker") is None:
        raise Unavailable(f"torch {torch.__version__} has no auto chunker")
    from torch._inductor import config, metrics

    # By default, the auto chunker takes only operations whose result is eight times as large as their operands, which
    # few language models' heads are.
    options: dict[str, Any] = {"auto_chunker.enable": True, "auto_chunker.amplify_ratio_threshold": 0}
    program = torch.compile(_program, options=options, dynamic=False)
    chunked = False

    def method(inputs: Inputs) -> Tensor:
        nonlocal chunked
        arguments = (inputs.x, inputs.weight, inputs.bias, inputs.target)
        if chunked:
            return program(*arguments)
        # The auto chunker declines without a message, and does not count what comes out of a cache.
        before = metrics.num_auto_chunking  # type: ignore[attr-defined]
        with config.patch(force_disable_caches=True):
            loss = program(*arguments)
        chunked = metrics.num_auto_chunking > before  # type: ignore[attr-defined]
        if not chunked:
            raise Unavailable("declined by the auto chunker")
        return loss

    return _one_linear(method)


def liger_per_token() -> Callable[[Tensor, Tensor, Tensor], Any]:
    """Liger's losses of single tokens, (T,), from x, weight and target.

    Raises:
        Unavailable: where Liger is not installed.
    """
    function = peer("liger_kernel.ops").LigerFusedLinearScaledCrossEntropyFunction
    temperature, ignore_index, tiles, entropy = 1.0, -100, 1, False
    return lambda x, weight, target: function.apply(x, weight, target, temperature, ignore_index, tiles, entropy)


def trl_log_probs() -> Callable[[Tensor, Tensor, Tensor | None, Tensor], Tensor]:
    """The head of TRL's trainers without the model around it: log-probabilities from x, weight, bias and target.

    At the width of their blocks of the vocabulary.

    Raises:
        Unavailable: where TRL is not installed.
    """
    function = peer("trl.kernels", extra=None).ChunkedLogProbFunction
    temperature, columns, softcap, scale, outputs = 1.0, 32768, None, 1.0, ()
    return lambda *operands: function.apply(*operands, temperature, columns, softcap, scale, outputs)[0]


def _trl() -> Method:
    log_probs = trl_log_probs()

    def method(inputs: Inputs) -> Tensor:
        valid = inputs.target != -100
        return -log_probs(inputs.x[valid], inputs.weight, inputs.bias, inputs.target[valid]).sum() / valid.sum()

    return _one_linear(method)


def _liger(**settings: Any) -> Method:
    function = peer("liger_kernel.transformers.functional").liger_fused_linear_cross_entropy
    return _one_linear(lambda inputs: function(inputs.x, inputs.weight, inputs.target, bias=inputs.bias, **settings))


def _liger_hopper() -> Method:
    module = peer("liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90")
    return _without_bias(module.LigerFusedLinearCrossEntropySM90Function.apply)


def _cut_cross_entropy(**settings: Any) -> Method:
    return _without_bias(partial(peer("cut_cross_entropy").linear_cross_entropy, **settings))


def _quack(**settings: Any) -> Method:
    return _without_bias(partial(peer("quack.linear_cross_entropy").chunked_linear_cross_entropy, **settings))


def _torch_linear_cross_entropy(**settings: Any) -> Method:
    if not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        raise Unavailable(f"torch {torch.__version__} has no chunked linear_cross_entropy")
    function: Callable[..., Tensor] = F.linear_cross_entropy  # type: ignore[attr-defined]
    options = torch.nn.LinearCrossEntropyOptions(**settings)
    return _one_linear(
        lambda inputs: function(inputs.x, inputs.weight, inputs.target, linear_bias=inputs.bias, options=options)
    )


def peer(module: str, *, extra: str | None = "peers") -> ModuleType:
    """A module of a peer, or of a library that has models.

    Args:
        module: its name.
        extra: the extra of this project that installs it; None where it has to be installed by its own name.

    Raises:
        Unavailable: where it cannot be imported.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        cure = f"pip install {module.partition('.')[0]}" if extra is None else f"it is in the extra {extra!r}"
        raise Unavailable(f"{error}; {cure}") from None
    except ImportError as error:
        raise Unavailable(str(error)) from None


def _without_bias(function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Method:
    """A function of x, weight and target."""
    return _one_linear(lambda inputs: function(inputs.x, inputs.weight, inputs.target), takes_bias=False)


def _one_linear(method: Method, *, takes_bias: bool = True) -> Method:
    """The method, which says so where it gets an adapter, or a bias that it does not take."""

    def checked(inputs: Inputs) -> Tensor:
        if inputs.terms:
            raise Unavailable("takes one linear, and no adapter beside it")
        if inputs.bias is not None and not takes_bias:
            raise Unavailable("no bias in this version")
        return method(inputs)

    return checked


OURS: dict[str, Callable[[Options], Method]] = {"flce": _jitted, "flce backend": _by_backend, "function": ours}
"""This project by thunder, by the backend of torch.compile and as a function."""

METHODS: dict[str, Callable[[], Method]] = {
    "eager": lambda: compiled(lambda program: program),
    "torch.compile": lambda: compiled(partial(torch.compile, dynamic=False)),
    "torch.compile, dynamic": lambda: compiled(partial(torch.compile, dynamic=True)),
    "thunder": lambda: compiled(import_module("thunder").jit),
    **{name: partial(make, Options()) for name, make in OURS.items()},
    "flce, 512 rows": partial(_jitted, Options(chunk_rows=512)),
    "torch linear_cross_entropy": _torch_linear_cross_entropy,
    "torch linear_cross_entropy, 2048 rows": partial(_torch_linear_cross_entropy, batch_chunk_size=2048),
    "auto chunker": _auto_chunker,
    "liger": _liger,
    "liger, chunk 8": partial(_liger, chunk_mem_const=8),
    "cut-cross-entropy": _cut_cross_entropy,
    # Without this, gradients below eps / 32 of their dtype are never computed: nearly all of them here.
    "cut-cross-entropy, exact": partial(_cut_cross_entropy, filter_eps=None),
    "trl": _trl,
    "liger, hopper": _liger_hopper,
    # Not its default of 4096 tokens, at which quack 0.6.5 fails where the hidden size is as large.
    "quack": partial(_quack, tuned=False, chunk_size=2048),
    "quack, tuned": partial(_quack, use_scaled_exp=False),
}
"""What each name stands for; called once per shape, so that nothing compiled is shared between shapes.

One of `OURS` may also have options behind it, as in "flce, chunk_rows=1024, strategy=save_logits". Those that may leave
the device unusable come last.
"""

DEFAULT = [name for name in METHODS if name not in ("torch.compile, dynamic", "quack, tuned")]
"""Measured where none is named. What is left out compiles or searches for minutes before its first result."""


def build(name: str) -> Method:
    """The method of that name.

    Raises:
        Unavailable: where a peer is not installed.
        ValueError: where there is no such method, or an option is none of `Options`.
    """
    if name in METHODS:
        return METHODS[name]()
    ours, options = with_options(name)
    return OURS[ours](options)


def with_options(name: str) -> tuple[str, Options]:
    """Reads "flce, chunk_rows=1024" as "flce" and its options.

    Raises:
        ValueError: where the first part is none of `OURS`, or the others are no options.
    """
    ours, *given = name.split(", ")
    pairs = dict(part.split("=", 1) for part in given if "=" in part)
    if ours not in OURS or len(pairs) < len(given):
        names = f"{'; '.join(METHODS)}; and {', '.join(OURS)} with options, as in 'flce, chunk_rows=1024'"
        raise ValueError(f"a method must be one of {names}, but got {name!r}")
    try:
        return ours, Options(**{option: _value(text) for option, text in pairs.items()})
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name!r}: {error}") from None


def check_method(name: str) -> None:
    """Raises a ValueError where `build` does not know the name."""
    if name not in METHODS:
        with_options(name)


def _value(text: str) -> Any:
    """A number, True, False or None, or the text itself."""
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text
