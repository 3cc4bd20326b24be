"""This project and its peers, each behind a function of the inputs that returns the mean loss, ready for backward.

All do the same for their user: one loss from x, weight, bias and target, and after `loss.backward()` all gradients in
`.grad`. A peer whose default leaves out part of the work has a second entry that does all of it.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import thunder_flce
from thunder_flce.bench.chunked_loop import chunked_loop
from thunder_flce.bench.measuring import Unavailable
from thunder_flce.bench.other_copy import load
from thunder_flce.bench.shapes import Inputs

Method = Callable[[Inputs], Tensor]


def _program(x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *adapter: Tensor) -> Tensor:
    logits = F.linear(x, weight, bias)
    if adapter:
        logits = logits + F.linear(*adapter)
    return F.cross_entropy(logits.float(), target)


def _compiled(compile_program: Callable[[Callable[..., Tensor]], Callable[..., Tensor]]) -> Method:
    program = compile_program(_program)
    return lambda inputs: program(inputs.x, inputs.weight, inputs.bias, inputs.target, *chain(*inputs.terms))


def _jitted(**options: Any) -> Method:
    ours = thunder_flce.Options(**options)
    program = _compiled(partial(thunder_flce.jit, options=ours))
    function = _function(thunder_flce.linear_cross_entropy, ours)
    # A sum of linears is given to the function as such: there is nothing to find in a trace.
    return lambda inputs: function(inputs) if inputs.terms else program(inputs)


def our_function(name: str, folder: Path | None = None) -> Method:
    """A method of ours as a call of `linear_cross_entropy`, without thunder, so that two versions take the same way.

    Args:
        name: one of `OURS`, or a `budget_method`.
        folder: the folder that holds another version of the package; None for this one.

    Raises:
        Unavailable: where that version does not have an option.
        FileNotFoundError: where there is no package in the folder.
    """
    function, options = (thunder_flce.linear_cross_entropy, thunder_flce.Options) if folder is None else load(folder)
    try:
        return _function(function, options(**_our_options(name)))
    except TypeError as error:
        raise Unavailable(f"no such option in this version: {error}") from None


def _function(linear_cross_entropy: Callable[..., Any], options: Any, **settings: Any) -> Callable[[Inputs], Any]:
    given = {"options": options, **settings}

    def method(inputs: Inputs) -> Any:
        terms = {"terms": inputs.terms} if inputs.terms else {}
        return linear_cross_entropy(inputs.x, inputs.weight, inputs.target, linear_bias=inputs.bias, **terms, **given)

    return method


def ours(options: thunder_flce.Options | None = None, **settings: Any) -> Method:
    """A call of `linear_cross_entropy` with other arguments than the methods have: the loss, (), (T,), or a tuple."""
    return _function(thunder_flce.linear_cross_entropy, options, **settings)


def _our_options(name: str) -> dict[str, Any]:
    return {"memory_budget": parse_budget(name.removeprefix(BUDGET))} if name.startswith(BUDGET) else OURS[name]


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


def _entropy(**options: Any) -> Method:
    settings = {"reduction": "none", "outputs": ("entropy",)}
    function = _function(thunder_flce.linear_cross_entropy, thunder_flce.Options(**options), **settings)
    return _one_linear(lambda inputs: _mean(inputs, *function(inputs)))


def liger_per_token(*, entropy: bool) -> Callable[[Tensor, Tensor, Tensor], Any]:
    """Liger's losses of single tokens, (T,), from x, weight and target; with their entropies, if these are asked for.

    Raises:
        Unavailable: where Liger is not installed.
    """
    function = peer("liger_kernel.ops").LigerFusedLinearScaledCrossEntropyFunction
    temperature, ignore_index, tiles = 1.0, -100, 1
    return lambda x, weight, target: function.apply(x, weight, target, temperature, ignore_index, tiles, entropy)


def _liger_entropy() -> Method:
    function = liger_per_token(entropy=True)
    return _one_linear(
        lambda inputs: _mean(inputs, *function(inputs.x, inputs.weight, inputs.target)), takes_bias=False
    )


def _mean(inputs: Inputs, losses: Tensor, entropies: Tensor) -> Tensor:
    """The mean loss. The entropies get gradients of 0: all is computed for them, and the results stay the same."""
    return (losses.sum() + 0 * entropies.sum()) / (inputs.target != -100).sum()


def trl_log_probs() -> Callable[[Tensor, Tensor, Tensor | None, Tensor], Tensor]:
    """The head of TRL's trainers without the model around it: log-probabilities from x, weight, bias and target.

    At the width of their blocks of the vocabulary.

    Raises:
        Unavailable: where TRL is not installed.
    """
    function = peer("trl.kernels").ChunkedLogProbFunction
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


def _liger_cutile() -> Method:
    module = peer("liger_kernel.ops.cutile.ops.fused_linear_cross_entropy")
    function = module.LigerFusedLinearCrossEntropyFunction
    return _without_bias(lambda *operands: function.apply(*operands)[0])


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


def _chunked_loop(**settings: Any) -> Method:
    return _one_linear(chunked_loop(**settings))


def peer(module: str, *, extra: str | None = None) -> ModuleType:
    """A module of a peer, or of a library that has models.

    Args:
        module: its name.
        extra: the extra of this project that installs it, which the error names.

    Raises:
        Unavailable: where it cannot be imported.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise Unavailable(str(error) if extra is None else f"{error}; it is in the extra {extra!r}") from None


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


OURS: dict[str, dict[str, Any]] = {
    "flce": {},
    "flce, 512 rows": {"chunk_rows": 512},
    "flce, 4096 rows": {"chunk_rows": 4096},
    "flce, save_logits": {"strategy": "save_logits"},
    "flce, recompute_logits": {"strategy": "recompute_logits"},
    "flce, untuned": {"tune_products": False},
    "flce, batch_invariant": {"batch_invariant": True},
    "flce, nvfuser": {"row_kernels": "nvfuser"},
    "flce, triton": {"row_kernels": "triton"},
    "flce, torch": {"row_kernels": "torch"},
}
"""This project's methods: the arguments of `Options`."""

METHODS: dict[str, Callable[[], Method]] = {
    "eager": lambda: _compiled(lambda program: program),
    "torch.compile": lambda: _compiled(partial(torch.compile, dynamic=False)),
    "torch.compile, dynamic": lambda: _compiled(partial(torch.compile, dynamic=True)),
    "thunder": lambda: _compiled(import_module("thunder").jit),
    **{name: partial(_jitted, **options) for name, options in OURS.items()},
    "flce, entropy": _entropy,
    "flce, entropy in 0.27 GB": partial(_entropy, memory_budget=270_000_000),
    "function": partial(our_function, "flce"),
    "function, torch.compile": lambda: torch.compile(our_function("flce"), fullgraph=True, dynamic=False),
    "grad_and_value loop": _chunked_loop,
    "grad_and_value loop, compiled": partial(_chunked_loop, compiled=True),
    "torch linear_cross_entropy": _torch_linear_cross_entropy,
    "torch linear_cross_entropy, 2048 rows": partial(_torch_linear_cross_entropy, batch_chunk_size=2048),
    "auto chunker": _auto_chunker,
    "liger": _liger,
    "liger, chunk 8": partial(_liger, chunk_mem_const=8),
    "liger, chunk 8, float32": partial(_liger, chunk_mem_const=8, accum_dtype=torch.float32),
    "cut-cross-entropy": _cut_cross_entropy,
    # Without this, gradients below eps / 32 of their dtype are never computed: nearly all of them here.
    "cut-cross-entropy, exact": partial(_cut_cross_entropy, filter_eps=None),
    "trl": _trl,
    "liger, hopper": _liger_hopper,
    "liger, cutile": _liger_cutile,
    "liger, entropy": _liger_entropy,
    # Not its default of 4096 tokens, at which quack 0.6.5 fails where the hidden size is as large.
    "quack": partial(_quack, tuned=False, chunk_size=2048),
    "quack, tuned": partial(_quack, use_scaled_exp=False),
}
"""What each name stands for; called once per shape, so that nothing compiled is shared between shapes.

Those that may leave the device unusable come last.
"""

ONLY_WHEN_NAMED = {
    "quack, tuned",
    "torch.compile, dynamic",
    "flce, untuned",
    "flce, batch_invariant",
    "flce, entropy in 0.27 GB",
    "flce, nvfuser",
    "flce, triton",
    "flce, torch",
}
"""Measured only when they are named: the first searches for minutes before its first result, and the others are of
interest to this project alone."""

BUDGET = "flce, budget "


def budget_method(budget: int | float) -> str:
    """The name of this project within a memory budget: bytes (int), or a fraction of the device's memory (float)."""
    return f"{BUDGET}{budget}"


def build(name: str) -> Method:
    """The method of that name.

    Raises:
        Unavailable: where a peer is not installed.
        KeyError: where there is no such method.
    """
    if name.startswith(BUDGET):
        return _jitted(**_our_options(name))
    return METHODS[name]()


def build_without_thunder(name: str) -> Method:
    """The method of that name; one of this project's is called without thunder."""
    return our_function(name) if is_ours(name) else build(name)


def parse_budget(text: str) -> int | float:
    """Reads "5e8" as 500000000 bytes and "0.01" as a hundredth of the device's memory.

    Raises:
        ValueError: where it is not a positive number.
    """
    value = float(text)
    if not value > 0:
        raise ValueError(f"a memory budget must be a positive number, but got {text!r}")
    return value if value < 1 else int(value)


def is_ours(name: str) -> bool:
    """Whether `our_function` knows the name."""
    return name in OURS or name.startswith(BUDGET)


def is_method(name: str) -> bool:
    """Whether `build` knows the name."""
    return name in METHODS or name.startswith(BUDGET)
