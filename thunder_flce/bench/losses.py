"""Losses other than the mean over tokens: GRPO's, preferences, weighted tokens, distillation, log-probabilities alone.

Each is measured as we run it, as peers do that have log-probabilities of tokens, by torch.compile and in eager PyTorch,
forward and backward, beside the matmuls that its results need.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import thunder_flce
from thunder_flce.backend import compile_graph
from thunder_flce.bench.distillation import DISTILLATIONS, Distillation
from thunder_flce.bench.measuring import ERROR, GB, TOTAL, Mark, Schedule, Session, Step, TimedRow, column, release
from thunder_flce.bench.methods import liger_per_token, peer, trl_log_probs
from thunder_flce.bench.reference import Reference, matmuls, row_slices, summed
from thunder_flce.bench.regions import first_calls
from thunder_flce.bench.shapes import Inputs, Shape
from thunder_flce.functional import linear_cross_entropy

SHAPES = {"cuda": ["qwen3-8b"], "cpu": ["tiny"]}
"""What is measured on a device where nothing else is asked for."""

SCHEDULE = Schedule(rounds=3, turn_ms=300)

SEQUENCES = 8
"""Of a preference loss: the first half are the chosen ones, the second half the rejected ones."""

Program = Callable[[Tensor, Tensor, Tensor, Any], Tensor]
"""The loss from x (T, H), weight (V, H), target (T,) and what else is given: a weight for each token, or a teacher."""

Reduce = Callable[[Tensor, Tensor], Tensor]
"""From the log-probabilities of the targets (T,) and the weights of the tokens (T,)."""

LogProbs = Callable[[Tensor, Tensor, Tensor], Tensor]
"""The log-probabilities of the targets (T,) from x (T, H), weight (V, H) and target (T,)."""

FROZEN_HEAD_PEERS = ("trl", "cut-cross-entropy")
"""Peers that leave out dW where the head is frozen."""

PER_TOKEN = (*FROZEN_HEAD_PEERS, "liger, per token")
"""Peers that have log-probabilities of tokens, under which any loss runs."""


@dataclass(frozen=True, kw_only=True)
class Row(TimedRow):
    """What one loss takes, run in one way; None for what was not measured."""

    shape: Shape
    matmuls: int | None = column("matmuls")
    """How many its results need, over all tokens: the logits, dX and dW are one each."""
    ratio: float | None = column("× matmuls", "{:.3f}")
    """Time over that of so many matmuls alone."""
    memory_gb: float | None = column("peak − gradients, GB", GB)
    """Peak above the inputs and the gradients, in 10⁹ bytes."""
    loss_error: float | None = column("loss error", ERROR)
    """‖loss − reference‖ / ‖reference‖, the reference being float32 (float64 for float32 and float64 inputs)."""
    dx_error: float | None = column("dX error", ERROR)
    dw_error: float | None = column("dW error", ERROR)
    first_call_s: float | None = column("first call, s", "{:.1f}")
    """The first forward + backward, with all that is compiled for it."""


@dataclass(frozen=True, kw_only=True)
class Loss:
    """A loss, and how we run it."""

    reduce: Reduce
    ours: str
    """From `WAYS`."""
    gradients: tuple[str, ...] = ("dx", "dw")
    weighted: float = 1.0
    """The fraction of the tokens whose weight is not 0."""
    peers: tuple[str, ...] = PER_TOKEN
    """From `WAYS`, of others."""
    parts: int = 1
    """How many times the head is called, each time for a part of the tokens, as torchtune and litgpt do it."""

    @property
    def ways(self) -> tuple[str, ...]:
        """Who computes it."""
        return (self.ours, *self.peers, "torch.compile", "eager")

    @property
    def matmuls(self) -> int:
        """How many its results need."""
        return len(self.gradients) + 1

    def given(self, inputs: Inputs) -> Tensor:
        """The weights of the tokens, (T,)."""
        target = inputs.target
        generator = torch.Generator(target.device).manual_seed(1)
        drawn, kept = torch.rand(2, *target.shape, device=target.device, generator=generator)
        return torch.where(kept < self.weighted, drawn + 0.1, 0)

    def program(self, way: str) -> Program:
        """The loss as it is computed in one of `ways`."""
        return WAYS[way](self.reduce, self.parts)

    def reference(self, inputs: Inputs, weights: Tensor) -> Reference:
        """The loss and its gradients, some rows at a time: first all log-probabilities, then what each contributes."""
        wide = inputs.widened()

        def log_probs(rows: slice) -> Tensor:
            return -F.cross_entropy(wide.logits(rows), wide.target[rows], reduction="none")

        with torch.no_grad():
            of_all = torch.cat([log_probs(rows) for rows in row_slices(wide.x)])
        of_all.requires_grad_()
        value = self.reduce(of_all, weights.to(of_all.dtype))
        if not self.gradients:
            return Reference(value.detach(), {})
        (upstream,) = torch.autograd.grad(value, of_all)
        return replace(summed(wide, lambda rows: log_probs(rows) @ upstream[rows]), loss=value.detach())


def _mean(log_probs: Tensor, weights: Tensor) -> Tensor:
    return -log_probs.mean()


def _squares(log_probs: Tensor, weights: Tensor) -> Tensor:
    return log_probs.square().mean()


def _weighted(log_probs: Tensor, weights: Tensor) -> Tensor:
    return -(log_probs * weights).sum() / weights.sum()


def _preference(log_probs: Tensor, weights: Tensor) -> Tensor:
    """DPO (arXiv:2305.18290) with β = 0.1; the reference model's log-probabilities would be constants."""
    chosen, rejected = log_probs.view(SEQUENCES, -1).sum(-1).chunk(2)
    return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


def _grpo(log_probs: Tensor, weights: Tensor) -> Tensor:
    """GRPO (arXiv:2402.03300): ratios from 0.8 to 1.3, of which half are clipped, and a divergence from a reference."""
    advantages = weights - 0.6
    old, reference = log_probs.detach() + 0.5 * advantages, log_probs.detach() + 0.2 * advantages
    ratio = torch.exp(log_probs - old)
    gains = torch.min(ratio * advantages, ratio.clamp(0.9, 1.1) * advantages)
    divergence = torch.exp(reference - log_probs) - (reference - log_probs) - 1
    return (0.04 * divergence - gains).mean()


def _log_probs(log_probs: Tensor, weights: Tensor) -> Tensor:
    return log_probs


LOSSES: dict[str, Loss | Distillation] = {
    "mean": Loss(reduce=_mean, ours="function"),
    "mean, head in 8 parts": Loss(reduce=_mean, ours="backend", peers=("jit",), parts=8),
    "GRPO by the backend": Loss(reduce=_grpo, ours="backend", peers=()),
    "GRPO": Loss(reduce=_grpo, ours="jit", peers=("liger", *PER_TOKEN)),
    "DPO": Loss(reduce=_preference, ours="jit", peers=("liger", *PER_TOKEN)),
    "DPO, frozen head": Loss(reduce=_preference, ours="jit", gradients=("dx",), peers=("liger", *FROZEN_HEAD_PEERS)),
    "none, frozen head": Loss(reduce=_squares, ours="function", gradients=("dx",), peers=FROZEN_HEAD_PEERS),
    "weighted tokens": Loss(reduce=_weighted, ours="jit"),
    "weighted tokens, half of them 0": Loss(reduce=_weighted, ours="jit", weighted=0.5),
    "log-probabilities alone": Loss(reduce=_log_probs, ours="function", gradients=()),
    **DISTILLATIONS,
}


def _eager_log_probs(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """As people write it, with logits in float32: sums of log-probabilities in bfloat16 are off by whole units."""
    return F.linear(x, weight).float().log_softmax(-1).gather(-1, target[:, None]).squeeze(-1)


def _our_log_probs(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return -linear_cross_entropy(x, weight, target, reduction="none")


def _trl_log_probs() -> LogProbs:
    function = trl_log_probs()
    return lambda x, weight, target: function(x, weight, None, target)


def _liger_log_probs() -> LogProbs:
    function = liger_per_token(entropy=False)
    return lambda x, weight, target: -function(x, weight, target)


def _cut_cross_entropy_log_probs() -> LogProbs:
    """With all gradients: by default it leaves out the small ones."""
    function = peer("cut_cross_entropy").linear_cross_entropy
    return lambda x, weight, target: -function(x, weight, target, reduction="none", filter_eps=None)


LOG_PROBS: dict[str, Callable[[], LogProbs]] = {
    "eager": lambda: _eager_log_probs,
    "function": lambda: _our_log_probs,
    "trl": _trl_log_probs,
    "liger, per token": _liger_log_probs,
    "cut-cross-entropy": _cut_cross_entropy_log_probs,
}
"""From ways to log-probabilities, under which the same lines make every loss."""


def _written(reduce: Reduce, parts: int, *, way: str = "eager") -> Program:
    log_probs = LOG_PROBS[way]()

    def of_parts(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        pairs = zip(x.chunk(parts), target.chunk(parts), strict=True)
        return torch.cat([log_probs(of_x, weight, of_target) for of_x, of_target in pairs])

    of_all = log_probs if parts == 1 else of_parts
    return lambda x, weight, target, weights: reduce(of_all(x, weight, target), weights)


def _function(reduce: Reduce, parts: int) -> Program:
    """Our function, whose own mean needs no log-probabilities."""
    if reduce is _mean:
        return lambda x, weight, target, weights: linear_cross_entropy(x, weight, target)
    return _written(reduce, parts, way="function")


def _liger_grpo(reduce: Reduce) -> Program:
    """Liger's GRPO, which has an advantage for each sequence: every token is one, and `SEQUENCES` chunks are made."""
    module = peer("liger_kernel.chunked_loss").LigerFusedLinearGRPOLoss
    constants: list[Tensor] = []

    def program(x: Tensor, weight: Tensor, target: Tensor, weights: Tensor) -> Tensor:
        advantages = weights - 0.6
        if not constants:
            # Given with the batch, as in training.
            with torch.no_grad():
                log_probs = _our_log_probs(x, weight, target)
            constants.extend((log_probs + factor * advantages)[:, None] for factor in (0.2, 0.5))
        settings = {"beta": 0.04, "epsilon_low": 0.1, "epsilon_high": 0.1, "loss_type": "grpo"}
        fused = module(**settings, chunk_size=x.shape[0] // SEQUENCES)
        reference, old = constants
        mask = torch.ones_like(old)
        given = {"ref_per_token_logps": reference, "old_per_token_logps": old}
        return fused(x[:, None], weight, target[:, None], mask, advantages, **given)[0]

    return program


def _liger_preference(reduce: Reduce) -> Program:
    """Liger's DPO, a chunk for each pair of sequences."""
    module = peer("liger_kernel.chunked_loss").LigerFusedLinearDPOLoss
    fused = module(beta=0.1, use_ref_model=False)

    def program(x: Tensor, weight: Tensor, target: Tensor, weights: Tensor) -> Tensor:
        loss, *_ = fused(weight, x.view(SEQUENCES, -1, x.shape[1]), target.view(SEQUENCES, -1))
        return loss

    return program


WAYS: dict[str, Callable[[Reduce, int], Program]] = {
    "function": _function,
    # Strict: what is not fused fails, and is not measured as if it were ours.
    "jit": lambda reduce, parts: thunder_flce.jit(_written(reduce, parts), strict=True),
    "backend": lambda reduce, parts: torch.compile(
        _written(reduce, parts), backend=compile_graph, fullgraph=True, dynamic=False, options={"strict": True}
    ),
    "torch.compile": lambda reduce, parts: torch.compile(_written(reduce, parts), fullgraph=True, dynamic=False),
    "liger": lambda reduce, parts: _liger_grpo(reduce) if reduce is _grpo else _liger_preference(reduce),
    **{way: partial(_written, way=way) for way in ("eager", *PER_TOKEN)},
}

METHODS = {f"{name}, {way}": (name, way) for name, loss in LOSSES.items() for way in loss.ways}

_FLOORS = {1: "one matmul", 2: "two matmuls", 3: "three matmuls", 4: "four matmuls"}


def check_shape(shape: Shape) -> None:
    """Raises a ValueError for a shape with what the losses have not, or with tokens that are no whole sequences."""
    if shape.bias or shape.ignored or shape.frozen or shape.rank:
        raise ValueError(f"losses take shapes of tokens, vocab, hidden, dtype and data alone, but got {shape}")
    if shape.tokens % SEQUENCES:
        raise ValueError(f"tokens must be divisible by {SEQUENCES}, the number of sequences, but got {shape}")


def measure(shape: Shape, names: list[str], session: Session) -> None:
    """Measures some losses on one shape.

    Args:
        shape: its tokens are divided into `SEQUENCES`.
        names: from `METHODS`.
        session: where, for how long, and who is told.
    """
    device, session = session.device, replace(session, row=partial(Row, shape=shape))
    torch.compiler.reset()
    release(device)
    inputs = Inputs.random(shape, device)
    steps: dict[str, Step] = {}
    numbers: dict[str, dict[str, Any]] = {}
    counts = {LOSSES[METHODS[name][0]].matmuls for name in names} | {3}
    for count in sorted(counts):
        with session.attempt(_FLOORS[count]):
            steps[_FLOORS[count]] = matmuls(inputs, count)
            numbers[_FLOORS[count]] = {"matmuls": count}
    # A reference is as large as the gradients; one at a time.
    for loss_name, group in groupby(sorted(names, key=list(METHODS).index), lambda name: METHODS[name][0]):
        loss = LOSSES[loss_name]
        given = loss.given(inputs)
        session.progress(f"{loss_name}: reference")
        reference = None
        with session.attempt(f"{loss_name}, reference"):
            # A teacher is what the loss has chosen itself.
            reference = loss.reference(inputs, given)  # type: ignore[arg-type]
        for name in group:
            session.progress(f"{name}: first call")
            with session.attempt(name):
                step = partial(_run, loss.program(METHODS[name][1]), (loss, inputs, given))
                first, peaks, gradient_bytes = first_calls(step, reference, device)
                memory = (peaks[TOTAL] - gradient_bytes) / 1e9
                numbers[name] = {"matmuls": loss.matmuls, **first, "memory_gb": memory}
                steps[name] = step
        del reference
    outcomes = session.take_turns(steps)
    for name, outcome in outcomes.items():
        floor, times = outcomes.get(_FLOORS[numbers[name]["matmuls"]]), outcome.spread()
        ratio = None if floor is None else times["time_ms"] / floor.median(TOTAL)
        session.report(method=name, **times, ratio=ratio, **numbers[name])


def _run(
    program: Program, arguments: tuple[Loss | Distillation, Inputs, Any], mark: Mark
) -> tuple[Tensor, dict[str, Tensor]]:
    loss, inputs, given = arguments
    operands = {name: tensor for name, tensor in inputs.named_operands().items() if name in loss.gradients}
    x, weight = (operands.get(name, tensor.detach()) for name, tensor in (("dx", inputs.x), ("dw", inputs.weight)))
    value = program(x, weight, inputs.target, given)
    mark("forward")
    gradients: tuple[Tensor, ...] = ()
    if operands:
        gradients = torch.autograd.grad(value, tuple(operands.values()))
        mark("backward")
    return value.detach(), dict(zip(operands, gradients, strict=True))
