"""Regions of a millisecond or so, where the host has as much to do as the device: forward and backward, and its calls.

Steps follow each other without waiting for the device. Every seventh target is ignored. The first four methods give the
mean loss, the others what they are named after, from the same logits.
"""

import math
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from thunder_flce.bench.measuring import TOTAL, Mark, Schedule, Session, Step, no_mark, synchronize
from thunder_flce.bench.methods import Method, build, ours
from thunder_flce.bench.reference import make_reference
from thunder_flce.bench.regions import Comparison, RegionStep
from thunder_flce.bench.shapes import Inputs, Shape
from thunder_flce.options import Options

_SIZES = (
    *((tokens, 32000, 768) for tokens in (128, 512, 2048, 8192)), (1024, 32000, 1024), (2048, 32000, 2048),
    (512, 50257, 768), (2048, 50304, 768), (8192, 50304, 768), (4096, 50257, 1024),
    (512, 151936, 896), (2048, 151936, 896), (1024, 128256, 2048), (4096, 128256, 2048),
)  # fmt: skip
SHAPES = {"cuda": ["tokens={},vocab={},hidden={}".format(*sizes) for sizes in _SIZES], "cpu": ["tiny"]}
"""What is measured on a device where nothing else is asked for."""

SCHEDULE = Schedule(rounds=5, calls=200)

IGNORED_EVERY = 7


def _numbers(inputs: Inputs) -> Tensor:
    """(T,) between 0.1 and 1.1."""
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
    return lambda inputs: method(inputs)[0]


METHODS: dict[str, Callable[[Inputs], Method]] = {
    "eager": lambda inputs: build("eager"),
    "torch.compile": lambda inputs: build("torch.compile"),
    "flce": lambda inputs: ours(),
    "flce, compute": lambda inputs: ours(Options(ignored_rows="compute")),
    "flce, none": lambda inputs: ours(reduction="none"),
    "flce, token weights": lambda inputs: ours(token_weights=_numbers(inputs)),
    "flce, log-probabilities": _log_probs,
    "flce, token loss": _token_loss,
    "flce, no_grad": lambda inputs: torch.no_grad()(ours()),
}
"""From the inputs, a function of them whose result is () or (T,)."""

MEANS = {"eager", "torch.compile", "flce", "flce, compute"}
"""Those whose results are compared with the reference."""


def measure(shape: Shape, methods: list[str], session: Session) -> None:
    """Measures methods, names from `METHODS`, on one shape; `Schedule.calls` are the steps of a turn."""
    compared = Comparison(shape, session)
    inputs, device = compared.inputs, session.device
    inputs.target[::IGNORED_EVERY] = -100
    upstream, reference = _numbers(inputs), make_reference(inputs)
    for name in methods:

        def make(name: str = name) -> RegionStep:
            return partial(run_step, METHODS[name](inputs), inputs, upstream)

        compared.add(name, make, reference=reference if name in MEANS else None, others=partial(_counts, device=device))
    del reference
    compared.report("host", turn=_turn)


def run_step(method: Method, inputs: Inputs, upstream: Tensor, mark: Mark) -> tuple[Tensor, dict[str, Tensor]]:
    """Forward and, where the result asks for it, backward; `upstream` is (T,), for a result of one number a token."""
    loss = method(inputs)
    mark("forward")
    if loss.requires_grad:
        loss.backward(upstream if loss.ndim else None)
    mark("backward")
    gradients = {name: tensor.grad for name, tensor in inputs.named_operands().items() if tensor.grad is not None}
    inputs.x.grad = inputs.weight.grad = None
    return loss.detach(), gradients


def _turn(step: Step, schedule: Schedule, device: str) -> list[dict[str, float]]:
    step(no_mark)
    synchronize(device)
    start = time.perf_counter()
    for _ in range(schedule.calls):
        step(no_mark)
    host = time.perf_counter()
    synchronize(device)
    end = time.perf_counter()
    return [{TOTAL: (end - start) / schedule.calls * 1e3, "host": (host - start) / schedule.calls * 1e3}]


def _counts(step: RegionStep, device: str) -> dict[str, Any]:
    for _ in range(3):  # What is compiled or measured for them is no part of a turn.
        step(no_mark)
    run = partial(step, no_mark)
    return {"operations": _device_operations(run, device), "calls": _python_calls(run)}


def _device_operations(run: Callable[[], object], device: str) -> int | None:
    """How many kernels, copies and fills something starts, which has run before; None on a CPU."""
    if device != "cuda":
        return None
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    # An annotation spans kernels of others. Device types are equal, but not the same object.
    events = profiler.events() or ()
    return sum(1 for event in events if event.device_type == DeviceType.CUDA and not event.is_user_annotation)


def _python_calls(run: Callable[[], object]) -> int:
    """How many functions Python calls, its own and those in C, in the forward and the backward of something."""
    calls = 0

    def seen(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    # Otherwise the backward of a GPU runs on a thread of its own, which nobody would watch.
    with torch.autograd.set_multithreading_enabled(False):
        sys.setprofile(seen)
        try:
            run()
        finally:
            sys.setprofile(before)
    # The last is sys.setprofile.
    return calls - 1
