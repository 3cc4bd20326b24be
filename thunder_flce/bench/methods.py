"""This project and its peers, each behind a function of the inputs that returns the mean loss, ready for backward.

All do the same for their user: one loss from x, weight, bias and target, and after `loss.backward()` all gradients in
`.grad`. A peer whose default leaves out part of the work has a second entry that does all of it.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from thunder_flce.bench.chunked_loop import chunked_loop
from thunder_flce.bench.measuring import Unavailable
from thunder_flce.bench.shapes import Inputs

Method = Callable[[Inputs], Tensor]


def _program(x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight, bias).float(), target)


def _compiled(compile_program: Callable) -> Method:
    program = compile_program(_program)
    return lambda inputs: program(inputs.x, inputs.weight, inputs.bias, inputs.target)


def _thunder() -> Method:
    return _compiled(import_module("thunder").jit)


def _ours(**options) -> Method:
    thunder_flce = import_module("thunder_flce")
    return _compiled(partial(thunder_flce.jit, options=thunder_flce.Options(**options)))


def _auto_chunker() -> Method:
    if find_spec("torch._inductor.fx_passes.auto_chunker") is None:
        raise Unavailable(f"torch {torch.__version__} has no auto chunker")
    from torch._inductor import config, metrics

    # By default it chunks only what makes its operands eight times as large, which few language models' heads do.
    options = {"auto_chunker.enable": True, "auto_chunker.amplify_ratio_threshold": 0}
    program = torch.compile(_program, options=options, dynamic=False)
    chunked = False

    def method(inputs: Inputs) -> Tensor:
        nonlocal chunked
        arguments = (inputs.x, inputs.weight, inputs.bias, inputs.target)
        if chunked:
            return program(*arguments)
        # It declines without a word. What comes out of a cache has not been seen to be chunked.
        before = metrics.num_auto_chunking
        with config.patch(force_disable_caches=True):
            loss = program(*arguments)
        chunked = metrics.num_auto_chunking > before
        if not chunked:
            raise Unavailable("declined by the auto chunker")
        return loss

    return method


def _liger(**settings) -> Method:
    liger = _peer("liger_kernel.transformers.functional")
    return lambda inputs: liger.liger_fused_linear_cross_entropy(
        inputs.x, inputs.weight, inputs.target, bias=inputs.bias, **settings
    )


def _cut_cross_entropy(**settings) -> Method:
    cut_cross_entropy = _peer("cut_cross_entropy")

    def method(inputs: Inputs) -> Tensor:
        _reject_bias(inputs)
        return cut_cross_entropy.linear_cross_entropy(inputs.x, inputs.weight, inputs.target, **settings)

    return method


def _quack(**settings) -> Method:
    quack = _peer("quack.linear_cross_entropy")

    def method(inputs: Inputs) -> Tensor:
        _reject_bias(inputs)
        return quack.chunked_linear_cross_entropy(inputs.x, inputs.weight, inputs.target, **settings)

    return method


def _torch_linear_cross_entropy() -> Method:
    if not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        raise Unavailable(f"torch {torch.__version__} has no chunked linear_cross_entropy")
    options = torch.nn.LinearCrossEntropyOptions()
    return lambda inputs: F.linear_cross_entropy(
        inputs.x, inputs.weight, inputs.target, linear_bias=inputs.bias, options=options
    )


def _peer(module: str) -> ModuleType:
    try:
        return import_module(module)
    except ImportError as error:
        raise Unavailable(str(error)) from None


def _reject_bias(inputs: Inputs) -> None:
    if inputs.bias is not None:
        raise Unavailable("no bias in this version")


METHODS: dict[str, Callable[[], Method]] = {
    "eager": lambda: _compiled(lambda program: program),
    "torch.compile": lambda: _compiled(partial(torch.compile, dynamic=False)),
    "thunder": _thunder,
    "flce": _ours,
    "flce, 512 rows": partial(_ours, chunk_rows=512),
    "flce, 4096 rows": partial(_ours, chunk_rows=4096),
    "flce, save_logits": partial(_ours, strategy="save_logits"),
    "flce, recompute_logits": partial(_ours, strategy="recompute_logits"),
    "flce, skip_on_device": partial(_ours, ignored_rows="skip_on_device"),
    "grad_and_value loop": chunked_loop,
    "grad_and_value loop, compiled": partial(chunked_loop, compiled=True),
    "torch linear_cross_entropy": _torch_linear_cross_entropy,
    "auto chunker": _auto_chunker,
    "liger": _liger,
    "liger, chunk 8": partial(_liger, chunk_mem_const=8),
    "liger, chunk 8, float32": partial(_liger, chunk_mem_const=8, accum_dtype=torch.float32),
    "cut-cross-entropy": _cut_cross_entropy,
    # Without this, gradients below eps / 32 of their dtype are never computed: nearly all of them here.
    "cut-cross-entropy, exact": partial(_cut_cross_entropy, filter_eps=None),
    # Not its default of 4096 tokens, at which quack 0.6.5 fails where the hidden size is as large.
    "quack": partial(_quack, tuned=False, chunk_size=2048),
    "quack, tuned": partial(_quack, use_scaled_exp=False),
}
"""What each name stands for; called once per shape, so that nothing compiled is shared between shapes.

Those that may leave the device unusable come last.
"""

SLOW_TO_START = {"quack, tuned"}
"""These search for minutes before their first result, and are measured only when they are named."""

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
        return _ours(memory_budget=parse_budget(name.removeprefix(BUDGET)))
    return METHODS[name]()


def parse_budget(text: str) -> int | float:
    """Reads "5e8" as 500000000 bytes and "0.01" as a hundredth of the device's memory.

    Raises:
        ValueError: where it is not a positive number.
    """
    value = float(text)
    if not value > 0:
        raise ValueError(f"a memory budget must be a positive number, but got {text!r}")
    return value if value < 1 else int(value)


def is_method(name: str) -> bool:
    """Whether `build` knows the name."""
    return name in METHODS or name.startswith(BUDGET)
