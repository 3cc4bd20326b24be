"""What a plan runs, before it runs: a run of the engine, written down. Everything else here is read off that.

The number of valid targets is not known when a plan is made, so all tokens are counted.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from thunder_flce.execution import engine
from thunder_flce.execution.operands import Gradients, Operands, Term, UpstreamGradients
from thunder_flce.execution.plan import LossOnly, Plan
from thunder_flce.execution.record import Stage, Step, Tape, Value, on_values
from thunder_flce.execution.row_kernels.torch_rows import statistics_dtype
from thunder_flce.operation.problem import Problem
from thunder_flce.operation.token_loss import input_name


@dataclass(frozen=True, kw_only=True)
class Program:
    """What a region runs with a plan, and the memory that takes."""

    forward: tuple[Stage, ...]
    backward: tuple[Stage, ...]

    peak_bytes: int
    """The most that is allocated at a time, in forward and backward together, beside the region's inputs."""

    temporary_bytes: int
    """The same above the gradients that it returns.

    It leaves out vectors of one number a token, or one for each of its targets, and, where rows are ignored, copies of
    rows of x: of a chunk, or of all rows in a backward that computes logits again.
    """

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Of both directions."""
        return (*self.forward, *self.backward)

    @property
    def steps(self) -> list[Step]:
        """Every step of every stage, in the order in which they run."""
        return [step for stage in self.stages for step in stage.every_step()]

    @property
    def directions(self) -> dict[str, tuple[Stage, ...]]:
        """The stages by direction; no backward where no gradient is needed."""
        directions = {"forward": self.forward, "backward": self.backward}
        return {name: stages for name, stages in directions.items() if stages}


@lru_cache(maxsize=4096)
@on_values()
def program(problem: Problem, plan: Plan) -> Program:
    """Writes down a run of the engine."""
    tape = Tape(torch.device(problem.device_type))
    operands = _operands(problem, tape)
    result = engine.forward(operands, plan)
    forward = tape.take_stages()
    # What is bound to `kept` is alive until the program is made.
    kept: Gradients | tuple[Tensor | None, ...] | None = None
    if result.gradients is not None:
        grad, gradients = _value(tape, "grad", operands.row_dtype), result.gradients.in_order()
        expected = operands.expected_gradient
        kept = engine.scale_gradients(grad, result.statistics.valid_count, *gradients, expected_gradient=expected)
    elif not isinstance(plan, LossOnly):
        upstream = _upstream(problem, tape, operands.row_dtype)
        statistics, saved = result.statistics, result.kept
        del result
        kept = engine.backward(operands, plan, statistics, saved, upstream)
        del saved
    backward = tape.take_stages()
    del kept
    return Program(
        forward=forward,
        backward=backward,
        peak_bytes=tape.peak_bytes,
        temporary_bytes=max(tape.peak_bytes - problem.gradient_bytes, 0),
    )


def term_names(number: int) -> tuple[str, str]:
    """What the input and the weight of a term are called: x and W for the head, x1 and W1 for the next."""
    return (f"x{number or ''}", f"W{number or ''}")


def _value(tape: Tape, name: str, dtype: torch.dtype, *shape: int) -> Value:
    return Value(tape, name, shape=shape, dtype=dtype)


def _operands(problem: Problem, tape: Tape) -> Operands:
    dtype, rows = problem.dtype, problem.weight_rows or problem.vocab
    tokens = problem.tokens // (1 if problem.shard is None else problem.shard.token_parts)
    terms = []
    for number, term in enumerate(problem.terms):
        x, weight = term_names(number)
        terms.append(
            Term(
                x=_value(tape, x, dtype, tokens, term.hidden),
                weight=_value(tape, weight, dtype, rows, term.hidden),
                input_grad=term.input_grad,
                weight_grad=term.weight_grad,
            )
        )
    several = () if problem.targets_per_token is None else (problem.targets_per_token,)
    return Operands(
        terms=tuple(terms),
        bias=_value(tape, "b", dtype, rows) if problem.has_bias else None,
        target=_value(tape, "y", torch.int64, problem.tokens, *several),
        loss=problem.loss,
        target_weights=_value(tape, "q", torch.float32, problem.tokens, *several) if several else None,
        class_weight=_value(tape, "w", dtype, rows) if problem.has_class_weight else None,
        token_weights=_value(tape, "w_t", torch.float32, problem.tokens) if problem.has_token_weights else None,
        token_inputs=tuple(
            _value(tape, input_name(number), statistics_dtype(dtype), problem.tokens)
            for number in range(problem.token_inputs)
        ),
        num_items=_value(tape, "num_items", dtype) if problem.has_num_items else None,
        expected_gradient=_value(tape, "expected_gradient", dtype) if problem.has_expected_gradient else None,
        bias_grad=problem.bias_grad,
        shard=problem.shard,
    )


def _upstream(problem: Problem, tape: Tape, dtype: torch.dtype) -> UpstreamGradients:
    shape = (problem.tokens,) if problem.loss.reduction == "none" else ()
    outputs = {
        name: _value(tape, f"{name}_grad", dtype, problem.tokens) for name in problem.loss.differentiable_outputs
    }
    return UpstreamGradients(_value(tape, "grad", dtype, *shape), **outputs)
