"""Regions of a millisecond or so, where the host has as much to do as the device: forward and backward, and its calls.

Steps follow each other without waiting for the device. Every seventh target is ignored. The first four methods give the
mean loss, the others what they are named after, from the same logits.
"""

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from thunder_flce.bench.measuring import (
    ERROR,
    TOTAL,
    Outcome,
    Schedule,
    Session,
    TimedRow,
    column,
    release,
    synchronize,
)
from thunder_flce.bench.methods import Method, build, ours
from thunder_flce.bench.reference import make_reference, relative_error
from thunder_flce.bench.shapes import Inputs, Shape
from thunder_flce.options import Options

_SIZES = (
    (128, 32000, 768),
    (512, 32000, 768),
    (2048, 32000, 768),
    (512, 50257, 768),
    (2048, 50304, 768),
    (2048, 32000, 2048),
    (512, 151936, 896),
    (2048, 151936, 896),
    (1024, 32000, 1024),
    (4096, 50257, 1024),
    (8192, 32000, 768),
    (1024, 128256, 2048),
    (4096, 128256, 2048),
    (8192, 50304, 768),
)
SHAPES = {"cuda": ["tokens={},vocab={},hidden={}".format(*sizes) for sizes in _SIZES], "cpu": ["tiny"]}
"""What is measured on a device where nothing else is asked for."""

SCHEDULE = Schedule(rounds=5, calls=200)

WARM_UP = 5
"""Steps before the first turn: what is compiled or measured for them is no part of it."""

IGNORED_EVERY = 7


@dataclass(frozen=True, kw_only=True)
class Row(TimedRow):
    """A mean step of one method; medians over the turns."""

    shape: Shape
    time_ms: float | None = column("step, ms", "{:.3f}")
    host_ms: float | None = column("host, ms", "{:.3f}")
    """Until the host has asked for everything. On a CPU, where it waits for each operation, as time_ms."""
    host_ms_p20: float | None = None
    host_ms_p80: float | None = None
    operations: int | None = column("operations")
    """Kernels, copies and fills on the device; None on a CPU."""
    calls: int | None = column("Python calls")
    """Of functions, Python's and those in C."""
    dx_error: float | None = column("dX error", ERROR)
    """Of the methods that give the mean loss, as in `regions`."""
    dw_error: float | None = column("dW error", ERROR)


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


def _without_gradients(inputs: Inputs) -> Method:
    method = ours()

    def forward(inputs: Inputs) -> Tensor:
        with torch.no_grad():
            return method(inputs)

    return forward


METHODS: dict[str, Callable[[Inputs], Method]] = {
    "eager": lambda inputs: build("eager"),
    "torch.compile": lambda inputs: build("torch.compile"),
    "flce": lambda inputs: ours(),
    "flce, compute": lambda inputs: ours(Options(ignored_rows="compute")),
    "flce, none": lambda inputs: ours(reduction="none"),
    "flce, token weights": lambda inputs: ours(token_weights=_numbers(inputs)),
    "flce, log-probabilities": _log_probs,
    "flce, token loss": _token_loss,
    "flce, no_grad": _without_gradients,
}
"""From the inputs, a function of them whose result is () or (T,)."""

MEANS = {"eager", "torch.compile", "flce", "flce, compute"}
"""Those whose gradients are compared with the reference."""


def measure(shape: Shape, methods: list[str], session: Session) -> None:
    """Measures methods on one shape.

    Args:
        shape: what to measure.
        methods: names from `METHODS`.
        session: where, for how long (`Schedule.calls` are the steps of a turn), and who is told.
    """
    device, session = session.device, replace(session, row=partial(Row, shape=shape))
    torch.compiler.reset()
    with session.attempt("inputs") as tried:
        release(device)
        inputs = Inputs.random(shape, device)
        inputs.target[::IGNORED_EVERY] = -100
        upstream, reference = _numbers(inputs), make_reference(inputs)
    if tried.failed:
        return
    steps: dict[str, Callable[[], None]] = {}
    numbers: dict[str, dict[str, Any]] = {}
    for name in methods:
        session.progress(f"{name}: first calls")
        with session.attempt(name):
            step = partial(run_step, METHODS[name](inputs), inputs, upstream)
            for _ in range(WARM_UP):
                step()
            found: dict[str, Any] = {
                "operations": _device_operations(step, device=device),
                "calls": _python_calls(step),
            }
            if name in MEANS:
                for gradient, operand in (("dx", inputs.x), ("dw", inputs.weight)):
                    assert operand.grad is not None
                    found[f"{gradient}_error"] = relative_error(operand.grad, reference.gradients[gradient])
            numbers[name], steps[name] = found, step
    del reference
    for name, laps_ms in session.rounds(steps, _turn).items():
        session.report(method=name, **Outcome(laps_ms).spread("host"), **numbers[name])


def run_step(method: Method, inputs: Inputs, upstream: Tensor) -> None:
    """Forward and, where the result asks for it, backward; `upstream` is (T,), for a result of one number a token."""
    inputs.x.grad = inputs.weight.grad = None
    loss = method(inputs)
    if loss.requires_grad:
        loss.backward(upstream if loss.ndim else None)


def _turn(step: Callable[[], None], schedule: Schedule, device: str) -> dict[str, float]:
    step()
    synchronize(device)
    start = time.perf_counter()
    for _ in range(schedule.calls):
        step()
    host = time.perf_counter()
    synchronize(device)
    end = time.perf_counter()
    return {TOTAL: (end - start) / schedule.calls * 1e3, "host": (host - start) / schedule.calls * 1e3}


def _device_operations(run: Callable[[], object], *, device: str) -> int | None:
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
