"""Small regions: time of host and device, and number of calls; and the least time that a region costs the host.

"lean" is this least region: one chunk, three small kernels, no checks and no choices. Steps follow each other without
synchronisation. Every seventh target is ignored. The first methods compute the mean loss, the others the result that
they are named after, from the same logits.
"""

import math
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from thunder_flce.bench.cli import SUBSETS
from thunder_flce.bench.measure import TOTAL, Laps, Run, Step, Unavailable, no_mark, synchronize
from thunder_flce.bench.methods import Method, maker, ours
from thunder_flce.bench.output import COLUMNS
from thunder_flce.bench.regions import add, mean_reference, prepared, run_step
from thunder_flce.bench.shapes import Inputs, Shape
from thunder_flce.options import Options

_BLOCK = 4096
_SCALED = 8192


@triton.jit
def _count(target, scale, tokens, BLOCK: tl.constexpr):
    """Writes 1 / the number of valid targets."""
    counts = tl.zeros([BLOCK], tl.float32)
    for start in range(0, tokens, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        counts += (tl.load(target + rows, mask=rows < tokens, other=-100) != -100).to(tl.float32)
    tl.store(scale, 1.0 / tl.sum(counts, 0))


@triton.jit
def _row(logits, target, scale, losses, vocab, BLOCK: tl.constexpr):
    """Writes a row's share of the mean loss, and overwrites the row's logits by their gradient."""
    row = tl.program_id(0).to(tl.int64)
    z, y = logits + row * vocab, tl.load(target + row)
    largest, total = tl.full([BLOCK], float("-inf"), tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        u = tl.load(z + columns, mask=columns < vocab, other=float("-inf")).to(tl.float32)
        larger = tl.maximum(largest, u)
        # Lanes beyond the vocabulary keep a maximum of -inf and a sum of 0.
        shift = tl.where(larger == float("-inf"), 0.0, larger)
        total = total * tl.exp(largest - shift) + tl.exp(u - shift)
        largest = larger
    of_row = tl.max(largest, 0)
    log_sum = of_row + tl.log(tl.sum(total * tl.exp(largest - of_row), 0))
    share = tl.where(y == -100, 0.0, tl.load(scale))
    tl.store(losses + row, (log_sum - tl.load(z + tl.maximum(y, 0)).to(tl.float32)) * share)
    # All threads have read the target's logit before one overwrites it.
    tl.debug_barrier()
    for start in range(0, vocab, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        u = tl.load(z + columns, mask=columns < vocab, other=float("-inf")).to(tl.float32)
        gradient = (tl.exp(u - log_sum) - (columns == y).to(tl.float32)) * share
        tl.store(z + columns, gradient.to(logits.dtype.element_ty), mask=columns < vocab)


@triton.jit
def _scale(gradient, upstream, size, BLOCK: tl.constexpr):
    factor = tl.load(upstream)
    if factor == 1.0:
        return
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    scaled = tl.load(gradient + places, mask=places < size).to(tl.float32) * factor
    tl.store(gradient + places, scaled.to(gradient.dtype.element_ty), mask=places < size)


class _Lean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        tokens, vocab = x.shape[0], weight.shape[0]
        z = torch.mm(x, weight.t())
        scale, losses = x.new_empty((), dtype=torch.float32), x.new_empty(tokens, dtype=torch.float32)
        _count[(1,)](target, scale, tokens, 1024, num_warps=8)
        _row[(tokens,)](z, target, scale, losses, vocab, _BLOCK, num_warps=8)
        ctx.save_for_backward(torch.mm(z, weight), torch.mm(z.t(), x))
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        for gradient in ctx.saved_tensors:
            blocks = triton.cdiv(gradient.numel(), _SCALED)
            _scale[(blocks,)](gradient, grad, gradient.numel(), _SCALED, num_warps=8)
        return *ctx.saved_tensors, None


def lean(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Returns the mean loss, (), of x (T, H), weight (V, H) and target (T,) int64 on a GPU; -100 is ignored."""
    return _Lean.apply(x, weight, target)


def _method(inputs: Inputs) -> Method:
    if not inputs.x.is_cuda:
        raise Unavailable("runs on GPUs only")
    if inputs.bias is not None:
        raise Unavailable("takes no bias")
    return lean


IGNORED_EVERY = 7


def _numbers(inputs: Inputs) -> Tensor:
    """Returns random numbers (T,) between 0.1 and 1.1."""
    generator = torch.Generator(inputs.x.device).manual_seed(1)
    return torch.rand(inputs.x.shape[0], device=inputs.x.device, generator=generator) + 0.1


def _grpo(log_prob: Tensor, entropy: Tensor, old: Tensor, advantage: Tensor) -> Tensor:
    ratio = torch.exp(log_prob - old)
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)


def _token_loss(inputs: Inputs) -> Method:
    advantages = _numbers(inputs) - 0.6
    old = torch.full_like(advantages, -math.log(inputs.weight.shape[0])) + 0.2 * advantages
    return ours(token_loss=_grpo, token_inputs=(old, advantages))


def _log_probs(inputs: Inputs) -> Method:
    method = ours(outputs=("log_prob",), detached=("log_prob",))
    return lambda *operands, **bias: method(*operands, **bias)[0]


NO_GRAD = "flce, no_grad"
METHODS: dict[str, Callable[[Inputs], Method]] = {
    "eager": lambda inputs: maker("eager")(),
    "torch.compile": lambda inputs: maker("torch.compile")(),
    "flce": lambda inputs: ours(),
    "flce, compute": lambda inputs: ours(Options(ignored_rows="compute")),
    "lean": _method,
    "flce, none": lambda inputs: ours(reduction="none"),
    "flce, token weights": lambda inputs: ours(token_weights=_numbers(inputs)),
    "flce, log-probabilities": _log_probs,
    "flce, token loss": _token_loss,
    NO_GRAD: lambda inputs: torch.no_grad()(ours()),
}
"""Makers of methods: called with the inputs, they return a function of the operands whose result is () or (T,)"""

MEANS = {"eager", "torch.compile", "flce", "flce, compute", "lean"}
"""Methods whose results are compared with the reference"""


def measure(shape: Shape, methods: list[str], run: Run) -> None:
    """Measures methods, by names of `METHODS`, on one shape; a turn has `run.calls` steps."""
    inputs = prepared(shape, run)
    inputs.target[::IGNORED_EVERY] = -100
    upstream, reference = _numbers(inputs), mean_reference(inputs)
    for name in methods:
        given = inputs.map(Tensor.detach) if name == NO_GRAD else inputs
        with run.attempt(name):
            step = partial(run_step, given, METHODS[name](inputs), upstream=upstream)
            numbers = add(run, name, step, reference=reference if name in MEANS else {})
            numbers |= _counts(step, run.device)
    del reference
    run.report(partial(_turn, run))


def _turn(run: Run, step: Step) -> Laps:
    """Returns the mean time of a call, and the mean time that the host needs to launch it."""
    step(no_mark)
    synchronize(run.device)
    start = time.perf_counter()
    for _ in range(run.calls):
        step(no_mark)
    host = time.perf_counter()
    synchronize(run.device)
    end = time.perf_counter()
    return [{TOTAL: (end - start) / run.calls * 1e3, "host": (host - start) / run.calls * 1e3}]


def _counts(step: Step, device: str) -> dict[str, Any]:
    for _ in range(3):  # Exclude compilation and the tuning of matmuls from the counts.
        step(no_mark)
    call = partial(step, no_mark)
    return {"operations": _device_operations(call) if device == "cuda" else None, "calls": _python_calls(call)}


def _device_operations(call: Callable[[], object]) -> int:
    """Number of kernels, copies and fills that a call launches; the call has run before."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    # An annotation is no operation: it spans other events. Device types compare equal, but are not the same object.
    events = profiler.events() or ()
    return sum(1 for event in events if event.device_type == DeviceType.CUDA and not event.is_user_annotation)


def _python_calls(call: Callable[[], object]) -> int:
    """Number of function calls by Python, of Python and C functions, in the forward and backward of a call."""
    calls = 0

    def seen(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    # Otherwise, the backward on a GPU runs on a thread of its own, without this profile function.
    with torch.autograd.set_multithreading_enabled(False):
        sys.setprofile(seen)
        try:
            call()
        finally:
            sys.setprofile(before)
    # The last counted call is that of sys.setprofile.
    return calls - 1


SUBSET = replace(
    SUBSETS["small"],
    help="small regions: time, number of calls, and the least time that a region costs",
    measure=measure,
    methods=METHODS,
    check_method=None,
    columns={
        **COLUMNS,
        "operations": ("operations", "{}"),  # kernels, copies and fills on the device
        "calls": ("Python calls", "{}"),  # of Python and C functions
    },
)
