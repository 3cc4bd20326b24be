"""Predicted against measured peak memory of every way to run a region: within 5%."""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from thunder_flce.bench.measuring import GB, TOTAL, Session, Step, column, peak_bytes, release
from thunder_flce.bench.regions import run_step
from thunder_flce.bench.shapes import Inputs, Shape
from thunder_flce.calls import needed
from thunder_flce.engine.choose import temporary_bytes
from thunder_flce.functional import linear_cross_entropy
from thunder_flce.operation.call import Call, named_tensors
from thunder_flce.operation.loss import Loss
from thunder_flce.operators import plan_for
from thunder_flce.options import Options

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
class Row:
    """What was predicted and measured of one way to run a region, which `method` names."""

    method: str
    shape: Shape
    plan: str | None = column("plan")
    predicted_gb: float | None = column("predicted peak, GB", GB)
    """Peak above the inputs, in 10⁹ bytes, the gradients included."""
    memory_gb: float | None = column("measured", GB)
    memory_ratio: float | None = column("ratio", "{:.3f}")
    """Predicted over measured."""
    failed: str | None = None
    """Why nothing was measured; None where it was."""


def predicted(inputs: Inputs, options: Options, *, reduction: str) -> tuple[str, int]:
    """The plan of `linear_cross_entropy` for the same arguments, in words, and the peak above the inputs, in bytes."""
    given = {"input": inputs.x, "linear_weight": inputs.weight, "target": inputs.target, "linear_bias": inputs.bias}
    tensors = named_tensors({**given, "terms": inputs.terms})
    call = Call(tensors=tensors, loss=Loss(reduction=reduction), needs_grad=needed(tensors))
    plan = plan_for(call, options)
    return plan.describe(), temporary_bytes(call, plan) + call.gradient_bytes


def measure(shape: Shape, ways: list[str], session: Session) -> None:
    """Predicts and measures ways to run one shape.

    Args:
        shape: what to measure.
        ways: names from `WAYS`.
        session: where, and who is told.
    """
    device, session = session.device, replace(session, row=partial(Row, shape=shape))
    with session.attempt("inputs") as tried:
        release(device)
        inputs = Inputs.random(shape, device)
    if tried.failed:
        return
    for name in ways:
        session.progress(name)
        way = WAYS[name]
        with session.attempt(name):
            options = way.options_for(shape)
            used = inputs if way.needs_grad else inputs.without_gradients()
            step: Step = partial(run_step, used, partial(_loss, way.reduction, options))
            plan, size = predicted(used, options, reduction=way.reduction)
            step(lambda phase: None)
            peak = peak_bytes(step, device)[TOTAL]
            sizes = {"predicted_gb": size / 1e9, "memory_gb": peak / 1e9, "memory_ratio": size / peak}
            session.report(method=name, plan=plan, **sizes)


def _loss(reduction: str, options: Options, inputs: Inputs) -> Tensor:
    settings = {"linear_bias": inputs.bias, "terms": inputs.terms, "reduction": reduction, "options": options}
    loss = linear_cross_entropy(inputs.x, inputs.weight, inputs.target, **settings)
    # Another upstream gradient for each row, as where a loss has weights.
    return torch.dot(loss, torch.rand_like(loss)) if reduction == "none" else loss
