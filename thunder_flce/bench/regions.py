"""Loss regions: forward, backward and both; time, peak memory and error of all methods in one run."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from thunder_flce.bench.measuring import (
    ERROR,
    GB,
    TOTAL,
    Mark,
    PhasedRow,
    Schedule,
    Session,
    Step,
    column,
    no_mark,
    peak_bytes,
    release,
    synchronize,
    timed_turn,
)  # fmt: skip
from thunder_flce.bench.methods import Method, build
from thunder_flce.bench.reference import Reference, make_reference, matmuls, relative_error
from thunder_flce.bench.shapes import Inputs, Shape
from thunder_flce.engine.matmul.algorithms import tunings

FLOORS = {1: "one matmul", 2: "two matmuls", 3: "three matmuls", 4: "four matmuls"}
"""What times are compared with: the matmuls that the results need, alone."""

SCHEDULE = Schedule(calls=200, turn_ms=1000)

RegionStep = Callable[[Mark], tuple[Tensor, dict[str, Tensor]]]
"""As `measuring.Step`; returns the loss and the gradients by the names of `Inputs.named_operands`."""


@dataclass(frozen=True, kw_only=True)
class Row(PhasedRow):
    """What was measured of one method on one shape; errors are ‖result − reference‖ / ‖reference‖."""

    shape: Shape
    ratio: float | None = column("× matmuls", "{:.3f}")
    """Time over that of `matmuls` matmuls alone."""
    matmuls: int | None = None
    tflops: float | None = column("TFLOP/s", "{:.4g}")
    """10¹² operations a second, counting `Shape.operations` and nothing else."""
    memory_gb: float | None = column("peak, GB", GB)
    """Peak above the inputs, in 10⁹ bytes."""
    above_outputs_gb: float | None = column("peak − gradients, GB", GB)
    """The peak less the gradients themselves."""
    forward_memory_gb: float | None = None
    """As memory_gb, of the forward alone."""
    backward_memory_gb: float | None = None
    loss_error: float | None = column("loss error", ERROR)
    dx_error: float | None = column("dX error", ERROR)
    dw_error: float | None = column("dW error", ERROR)
    dbias_error: float | None = column("dbias error", ERROR)
    dy_error: float | None = column("dy error", ERROR)
    """Of the gradients of an adapter: y (tokens, rank) and B (vocab, rank)."""
    db_error: float | None = column("dB error", ERROR)
    first_call_s: float | None = column("first call, s", "{:.1f}")
    """The first forward + backward, with all that is compiled for it."""
    tuned_products: list[dict[str, Any]] | None = None
    """The matmuls whose algorithm was chosen during the first call: `algorithms.Tuning`."""
    host_ms: float | None = column("host, ms", "{:.3f}")
    """Until the host has asked for everything; of `small`, as the next two."""
    host_ms_p20: float | None = None
    host_ms_p80: float | None = None
    operations: int | None = column("operations")
    """Kernels, copies and fills on the device; None on a CPU."""
    calls: int | None = column("Python calls")
    """Of functions, Python's and those in C."""


class Comparison:
    """Methods that are compared on one shape: first each is called, then all are timed in turns."""

    def __init__(self, shape: Shape, session: Session):
        # What was compiled for an earlier shape would make torch.compile try symbolic sizes, or give up.
        torch.compiler.reset()
        release(session.device)
        self.shape, self.session = shape, replace(session, row=partial(Row, shape=shape))
        self.inputs = Inputs.random(shape, session.device)
        self._steps, self._numbers = dict[str, Step](), dict[str, dict[str, Any]]()

    def add_floor(self, count: int) -> None:
        """So many matmuls, which come first."""
        name = FLOORS[count]
        with self.session.attempt(name):
            self._steps[name] = matmuls(self.inputs, count)
            self._numbers[name] = {"matmuls": count}

    def add(
        self, name: str, make: Callable[[], RegionStep], *, reference: Reference | None, matmuls: int | None = None,
        others: Callable[[RegionStep], dict[str, Any]] = lambda step: {},
    ) -> None:  # fmt: skip
        """A method: what is compiled for it, its errors and its memory are measured at once.

        Args:
            name: of the method.
            make: gives its step.
            reference: what results are compared with; None where there is none.
            matmuls: of the floor that its time is compared with, if that is one.
            others: gives more fields of its row.
        """
        self.session.progress(f"{name}: first call")
        with self.session.attempt(name):
            known, step, start = tunings(), make(), time.perf_counter()
            loss, gradients = step(no_mark)
            synchronize(self.session.device)
            numbers: dict[str, Any] = {"matmuls": matmuls, "first_call_s": time.perf_counter() - start}
            if reference is not None:
                numbers["loss_error"] = relative_error(loss, reference.loss)
                for of, gradient in gradients.items():
                    numbers[f"{of}_error"] = relative_error(gradient, reference.gradients[of])
            outputs = sum(gradient.nbytes for gradient in gradients.values())
            del loss, gradients
            peaks = peak_bytes(step, self.session.device)
            numbers |= {"memory_gb": peaks[TOTAL] / 1e9, "above_outputs_gb": (peaks[TOTAL] - outputs) / 1e9}
            numbers |= {f"{phase}_memory_gb": peaks[phase] / 1e9 for phase in ("forward", "backward") if phase in peaks}
            if tuned := [tuning.to_dict() for tuning in tunings() if tuning not in known]:
                numbers["tuned_products"] = tuned
            self._numbers[name], self._steps[name] = numbers | others(step), step

    def report(self, *phases: str, turn: Callable[..., Any] = timed_turn, operations: int | None = None) -> None:
        """Times all in turns, and reports a row for each: phases of a step, and how much is computed a second."""
        outcomes = self.session.take_turns(self._steps, turn)
        for name, outcome in outcomes.items():
            numbers, times = self._numbers[name], outcome.spread(*phases)
            if (floor := outcomes.get(FLOORS.get(numbers["matmuls"], ""))) is not None:
                times["ratio"] = times["time_ms"] / floor.median(TOTAL)
            if operations is not None:
                times["tflops"] = operations / times["time_ms"] / 1e9
            self.session.report(method=name, **times, **numbers)


def measure(shape: Shape, methods: list[str], session: Session) -> None:
    """Measures methods, by names that `methods.build` knows, on one shape."""
    compare(Comparison(shape, session), methods)


def compare(compared: Comparison, methods: list[str]) -> None:
    """The same of inputs that are there."""
    inputs, reference = compared.inputs, None
    compared.session.progress("reference")
    with compared.session.attempt("reference"):
        reference = make_reference(inputs)
    compared.add_floor(3)
    for name in methods:
        compared.add(name, partial(_step, inputs, name), reference=reference, matmuls=3)
    del reference
    compared.report("forward", "backward", operations=compared.shape.operations)


def _step(inputs: Inputs, name: str) -> RegionStep:
    return partial(run_step, inputs, build(name))


def run_step(inputs: Inputs, method: Method, mark: Mark) -> tuple[Tensor, dict[str, Tensor]]:
    """Forward and backward; returns the loss and the gradients by name, which it takes away from the inputs.

    Raises:
        RuntimeError: where an operand got no gradient.
    """
    operands: Mapping[str, Tensor] = inputs.named_operands()
    try:
        loss = method(inputs)
        mark("forward")
        if operands:
            loss.backward()
        mark("backward")
        gradients = {name: tensor.grad for name, tensor in operands.items() if tensor.grad is not None}
    finally:
        for tensor in operands.values():
            tensor.grad = None
    if missing := operands.keys() - gradients.keys():
        raise RuntimeError(f"no {' and no '.join(sorted(missing))} came of the backward")
    return loss.detach(), gradients
