"""Predicted against measured: peak memory and time of every way to run a region."""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thunder_flce.bench.measuring import GB, TIME, TOTAL, Session, Step, TimedRow, column, peak_bytes, release
from thunder_flce.bench.regions import run_step
from thunder_flce.bench.shapes import Inputs, Shape
from thunder_flce.execution.operands import Operands, Term
from thunder_flce.functional import linear_cross_entropy
from thunder_flce.operation.loss import Loss
from thunder_flce.operators import plan_for, problem_of
from thunder_flce.options import Options
from thunder_flce.planning import cost
from thunder_flce.planning.program import program

SHAPES = {"cuda": ["S1", "S1a", "S2", "U2"], "cpu": ["tiny", "tiny-a"]}
"""Without and with an adapter, with a bias, and with an odd vocabulary."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to run a region."""

    options: dict[str, Any] = field(default_factory=dict)
    """The arguments of `Options`."""

    reduction: str = "mean"
    needs_grad: bool = True

    budget: float | None = None
    """`memory_budget` as a fraction of what all logits take; None for none."""

    def options_for(self, shape: Shape) -> Options:
        """The options at one shape."""
        if self.budget is None:
            return Options(**self.options)
        logits_bytes = shape.tokens * shape.vocab * shape.dtype.itemsize
        return Options(**self.options, memory_budget=int(self.budget * logits_bytes))


WAYS = {
    "gradients_in_forward": Way(),
    "gradients_in_forward, float32 dW": Way(options={"accumulate": "float32"}),
    "gradients_in_forward, 512 rows": Way(options={"chunk_rows": 512}),
    "save_logits": Way(options={"strategy": "save_logits"}),
    "save_logits, some rows": Way(reduction="none", budget=0.5),
    "recompute_logits": Way(options={"strategy": "recompute_logits"}),
    "loss_only": Way(needs_grad=False),
}


@dataclass(frozen=True, kw_only=True)
class Row(TimedRow):
    """What was predicted and measured of one way to run a region, which `method` names."""

    shape: Shape
    time_ms: float | None = column("measured, ms", TIME)
    predicted_ms: float | None = column("predicted", TIME)
    """None where the device's rates are not known."""
    ratio: float | None = column("ratio", "{:.3f}")
    """Predicted over measured."""
    predicted_gb: float | None = column("predicted peak, GB", GB)
    """Peak above the inputs, in 10⁹ bytes."""
    memory_gb: float | None = column("measured", GB)
    memory_ratio: float | None = column("ratio", "{:.3f}")


class Prediction(NamedTuple):
    """What a region is predicted to take."""

    bytes: int
    """The peak of memory above the inputs, the gradients included."""

    seconds: float | None
    """Forward and backward; None where the device's rates are not known."""


def predicted(inputs: Inputs, options: Options, *, reduction: str) -> Prediction:
    """The prediction for the plan that `linear_cross_entropy` would make for the same arguments."""
    pairs, bias = ((inputs.x, inputs.weight), *inputs.terms), inputs.bias
    operands = Operands(
        terms=tuple(
            Term(x=x, weight=weight, input_grad=x.requires_grad, weight_grad=weight.requires_grad)
            for x, weight in pairs
        ),
        bias=bias,
        target=inputs.target,
        loss=Loss(reduction=reduction),
        bias_grad=bias is not None and bias.requires_grad,
    )
    problem, plan = problem_of(operands, options), plan_for(operands, options)
    name = cost.device_name(operands.device.type)
    return Prediction(program(problem, plan).peak_bytes, cost.predicted_seconds(problem, plan, name))


def measure(shape: Shape, ways: list[str], session: Session) -> None:
    """Predicts and measures ways to run one shape.

    Args:
        shape: what to measure.
        ways: names from `WAYS`.
        session: where, for how long, and who is told.
    """
    device, session = session.device, replace(session, row=partial(Row, shape=shape))
    steps: dict[str, Step] = {}
    numbers: dict[str, dict[str, Any]] = {}
    with session.attempt("inputs") as tried:
        release(device)
        inputs = Inputs.random(shape, device)
    if tried.failed:
        return
    for name in ways:
        session.progress(f"{name}: first call")
        way = WAYS[name]
        with session.attempt(name):
            options = way.options_for(shape)
            used = inputs if way.needs_grad else inputs.without_gradients()
            step = partial(run_step, used, partial(_loss, way.reduction, options))
            # Before anything runs: what is free then decides about the plan, which is kept.
            prediction = predicted(used, options, reduction=way.reduction)
            step(lambda phase: None)
            peak = peak_bytes(step, device)[TOTAL]
            numbers[name] = {
                "predicted_ms": None if prediction.seconds is None else prediction.seconds * 1e3,
                "predicted_gb": prediction.bytes / 1e9,
                "memory_gb": peak / 1e9,
                "memory_ratio": prediction.bytes / peak,
            }
            steps[name] = step
    for name, outcome in session.take_turns(steps).items():
        spread, predicted_ms = outcome.spread(), numbers[name]["predicted_ms"]
        ratio = None if predicted_ms is None else predicted_ms / spread["time_ms"]
        session.report(method=name, **spread, ratio=ratio, **numbers[name])


def _loss(reduction: str, options: Options, inputs: Inputs) -> Tensor:
    settings = {"linear_bias": inputs.bias, "terms": inputs.terms, "reduction": reduction, "options": options}
    loss = linear_cross_entropy(inputs.x, inputs.weight, inputs.target, **settings)
    # Another upstream gradient for each row, as where a loss has weights.
    return torch.dot(loss, torch.rand_like(loss)) if reduction == "none" else loss
