"""Losses other than the mean over tokens: GRPO's, preferences, weighted tokens, distillation, log-probabilities alone.

Each is measured as we run it, as peers do that have it or log-probabilities of tokens, by torch.compile and in eager
PyTorch, forward and backward, beside the matmuls that its results need.
"""

import math
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
from thunder_flce.bench.measuring import Mark, Schedule, Session
from thunder_flce.bench.methods import liger_per_token, peer, trl_log_probs
from thunder_flce.bench.reference import Reference, row_slices, summed
from thunder_flce.bench.regions import Comparison, RegionStep
from thunder_flce.bench.shapes import Inputs, Shape, parse_shape
from thunder_flce.functional import linear_cross_entropy
from thunder_flce.kl_divergence import linear_kl_divergence

SHAPES = {"cuda": ["qwen3-8b"], "cpu": ["tiny"]}
"""What is measured on a device where nothing else is asked for."""

SCHEDULE = Schedule(rounds=3, turn_ms=300)

SEQUENCES = 8
"""Of a preference loss: the first half are the chosen ones, the second half the rejected ones."""

Given = tuple[Tensor, ...]
"""What a loss takes beside x, weight and target: the weights of the tokens (T,), or a teacher."""

Program = Callable[[Tensor, Tensor, Tensor, Given], Tensor]
"""The loss from x (T, H), weight (V, H), target (T,) and what is given."""

LogProbs = Callable[[Tensor, Tensor, Tensor], Tensor]
"""The log-probabilities of the targets (T,) from x (T, H), weight (V, H) and target (T,)."""

FROZEN_HEAD_PEERS = ("trl", "cut-cross-entropy")
"""Peers that leave out dW where the head is frozen."""

PER_TOKEN = (*FROZEN_HEAD_PEERS, "liger, per token")
"""Peers that have log-probabilities of tokens, under which any loss runs."""


def _log_probs_of(logits: Tensor, target: Tensor, *given: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, target[:, None]).squeeze(-1)


def _weights(inputs: Inputs) -> Given:
    """Between 0.1 and 1.1."""
    target = inputs.target
    generator = torch.Generator(target.device).manual_seed(1)
    return (torch.rand(2, *target.shape, device=target.device, generator=generator)[0] + 0.1,)


@dataclass(frozen=True, kw_only=True)
class Loss:
    """A loss, and who computes it."""

    reduce: Callable[..., Tensor]
    """From a number for each token (T,), and what is given."""
    of_rows: Callable[..., Tensor] = _log_probs_of
    """These numbers from logits, target, and what is given, of some tokens."""
    given: Callable[[Inputs], Given] = _weights
    of_tokens: int = 1
    """How many of the given ones have a row for each token; they come first."""
    gradients: tuple[str, ...] = ("dx", "dw")
    matmuls: int = 3
    """How many its results need: the logits, dX and dW are one each, and so are a teacher's logits."""
    function: Program | None = None
    """A call of ours."""
    liger: Callable[[], Program] | None = None
    """Liger's own function for it."""
    compiled: tuple[str, ...] = ("jit",)
    """How else we run it, from `WAYS`."""
    per_token: tuple[str, ...] = PER_TOKEN
    """Peers under whose log-probabilities it runs."""

    @property
    def ways(self) -> tuple[str, ...]:
        """Who computes it, from `WAYS`."""
        ours = self.compiled if self.function is None else ("function",)
        liger = () if self.liger is None else ("liger",)
        return (*ours, *liger, *self.per_token, "torch.compile", "eager")

    def written(self, log_probs: LogProbs | None = None) -> Program:
        """The loss in PyTorch's operations, over somebody's log-probabilities."""
        reduce, of_rows = self.reduce, self.of_rows
        if log_probs is not None:
            return lambda x, weight, target, given: reduce(log_probs(x, weight, target), *given)

        def program(x: Tensor, weight: Tensor, target: Tensor, given: Given) -> Tensor:
            # In float32, as people write it: sums of log-probabilities in bfloat16 are off by whole units.
            return reduce(of_rows(F.linear(x, weight).float(), target, *given), *given)

        return program

    def reference(self, inputs: Inputs, given: Given) -> Reference:
        """The loss and its gradients, some rows at a time: first all numbers of tokens, then what each contributes."""
        wide = inputs.widened()
        given = tuple(each.to(wide.x.dtype) if each.is_floating_point() else each for each in given)

        def of_rows(rows: slice) -> Tensor:
            of_tokens = (each[rows] for each in given[: self.of_tokens])
            return self.of_rows(wide.logits(rows), wide.target[rows], *of_tokens, *given[self.of_tokens :])

        with torch.no_grad():
            of_all = torch.cat([of_rows(rows) for rows in row_slices(wide.x)])
        of_all.requires_grad_()
        value = self.reduce(of_all, *given)
        if not self.gradients:
            return Reference(value.detach(), {})
        (upstream,) = torch.autograd.grad(value, of_all)
        return replace(summed(wide, lambda rows: of_rows(rows) @ upstream[rows]), loss=value.detach())


def _mean(log_probs: Tensor, *given: Tensor) -> Tensor:
    return -log_probs.mean()


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


def _liger_grpo() -> Program:
    """Liger's GRPO, which has an advantage for each sequence: every token is one, and `SEQUENCES` chunks are made."""
    module = peer("liger_kernel.chunked_loss").LigerFusedLinearGRPOLoss
    constants: list[Tensor] = []

    def program(x: Tensor, weight: Tensor, target: Tensor, given: Given) -> Tensor:
        advantages = given[0] - 0.6
        if not constants:
            # Given with the batch, as in training.
            with torch.no_grad():
                log_probs = _our_log_probs(x, weight, target)
            constants.extend((log_probs + factor * advantages)[:, None] for factor in (0.2, 0.5))
        settings = {"beta": 0.04, "epsilon_low": 0.1, "epsilon_high": 0.1, "loss_type": "grpo"}
        fused = module(**settings, chunk_size=x.shape[0] // SEQUENCES)
        reference, old = constants
        mask = torch.ones_like(old)
        policies = {"ref_per_token_logps": reference, "old_per_token_logps": old}
        return fused(x[:, None], weight, target[:, None], mask, advantages, **policies)[0]

    return program


def _liger_preference() -> Program:
    """Liger's DPO, a chunk for each pair of sequences."""
    fused = peer("liger_kernel.chunked_loss").LigerFusedLinearDPOLoss(beta=0.1, use_ref_model=False)

    def program(x: Tensor, weight: Tensor, target: Tensor, given: Given) -> Tensor:
        return fused(weight, x.view(SEQUENCES, -1, x.shape[1]), target.view(SEQUENCES, -1))[0]

    return program


@torch.no_grad()
def _teacher(inputs: Inputs) -> Given:
    """Hidden states (T, H) and head (V, H) that are random, as the student's are."""
    generator = torch.Generator(inputs.x.device).manual_seed(2)
    x, weight = (
        torch.randn(like.shape, dtype=like.dtype, device=like.device, generator=generator)
        for like in (inputs.x, inputs.weight)
    )
    return x, weight.mul_(weight.shape[1] ** -0.5)


@torch.no_grad()
def _largest(inputs: Inputs) -> Given:
    """The columns (T, 64) of the teacher's largest probabilities, and these."""
    x, weight = _teacher(inputs)
    found = [F.linear(x[rows], weight).float().softmax(-1).topk(64) for rows in row_slices(x)]
    return torch.cat([each.indices for each in found]), torch.cat([each.values for each in found])


def _of_largest(logits: Tensor, target: Tensor, columns: Tensor, probabilities: Tensor) -> Tensor:
    return (logits.log_softmax(-1).gather(-1, columns) * probabilities).sum(-1)


def _minus_divergence(divergence: str, logits: Tensor, target: Tensor, *teacher: Tensor) -> Tensor:
    """By the definition, and as TRL's GKD has the mixture."""
    log_p = logits.log_softmax(-1)
    with torch.no_grad():
        log_q = F.linear(*teacher).to(log_p.dtype).log_softmax(-1)
    if divergence == "forward":
        return -_kl(log_q, log_p)
    if divergence == "reverse":
        return -_kl(log_p, log_q)
    log_m = torch.logaddexp(log_p, log_q) - math.log(2)
    return -(_kl(log_q, log_m) + _kl(log_p, log_m)) / 2


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """(N,) KL(p‖q) of the rows of log-probabilities."""
    return F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)


def _liger_divergence(beta: float) -> Program:
    function = peer("liger_kernel.transformers.functional").liger_fused_linear_jsd
    return lambda x, weight, target, teacher: function(x, weight, *teacher, jsd_beta=beta)


def _distillation(divergence: str, beta: float) -> Loss:
    return Loss(
        reduce=_mean,
        of_rows=partial(_minus_divergence, divergence),
        given=_teacher,
        matmuls=4,
        function=lambda x, weight, target, teacher: linear_kl_divergence(x, weight, *teacher, divergence=divergence),
        liger=partial(_liger_divergence, beta),
        per_token=(),
    )


def _our_log_probs(x: Tensor, weight: Tensor, target: Tensor, given: Given = ()) -> Tensor:
    return -linear_cross_entropy(x, weight, target, reduction="none")


LOSSES = {
    "mean": Loss(reduce=_mean, function=lambda x, weight, target, given: linear_cross_entropy(x, weight, target)),
    "GRPO": Loss(reduce=_grpo, compiled=("jit", "backend"), liger=_liger_grpo),
    "DPO": Loss(reduce=_preference, liger=_liger_preference),
    "DPO, frozen head": Loss(
        reduce=_preference, gradients=("dx",), matmuls=2, liger=_liger_preference, per_token=FROZEN_HEAD_PEERS
    ),
    "weighted tokens": Loss(reduce=_weighted),
    "log-probabilities alone": Loss(
        reduce=lambda log_probs, weights: log_probs, gradients=(), matmuls=1, function=_our_log_probs
    ),
    "top-64 teacher": Loss(
        reduce=_mean,
        of_rows=_of_largest,
        given=_largest,
        of_tokens=2,
        function=lambda x, weight, _, top: linear_cross_entropy(x, weight, top[0], target_weights=top[1]),
        per_token=(),
    ),
    "KL from a teacher": _distillation("forward", 0.0),
    "reverse KL": _distillation("reverse", 1.0),
    "Jensen-Shannon": _distillation("jensen_shannon", 0.5),
}


def _trl_log_probs() -> LogProbs:
    function = trl_log_probs()
    return lambda x, weight, target: function(x, weight, None, target)


def _liger_log_probs() -> LogProbs:
    function = liger_per_token()
    return lambda x, weight, target: -function(x, weight, target)


def _cut_cross_entropy_log_probs() -> LogProbs:
    """With all gradients: by default it leaves out the small ones."""
    function = peer("cut_cross_entropy").linear_cross_entropy
    return lambda x, weight, target: -function(x, weight, target, reduction="none", filter_eps=None)


def _compiled(loss: Loss, **settings: Any) -> Program:
    return torch.compile(loss.written(), fullgraph=True, dynamic=False, **settings)


WAYS: dict[str, Callable[[Any], Program]] = {
    "function": lambda loss: loss.function,
    # Strict: what is not fused fails, and is not measured as if it were ours.
    "jit": lambda loss: thunder_flce.jit(loss.written(), strict=True),
    "backend": partial(_compiled, backend=compile_graph, options={"strict": True}),
    "torch.compile": _compiled,
    "eager": lambda loss: loss.written(),
    "liger": lambda loss: loss.liger(),
    "trl": lambda loss: loss.written(_trl_log_probs()),
    "liger, per token": lambda loss: loss.written(_liger_log_probs()),
    "cut-cross-entropy": lambda loss: loss.written(_cut_cross_entropy_log_probs()),
}
"""The program of a loss."""

METHODS = {f"{name}, {way}": (name, way) for name, loss in LOSSES.items() for way in loss.ways}


def parse(text: str) -> Shape:
    """A shape of tokens, vocab, hidden and dtype alone.

    Raises:
        ValueError: for a shape with more, or with tokens that are no whole sequences.
    """
    shape = parse_shape(text)
    if shape.bias or shape.ignored or shape.frozen or shape.rank:
        raise ValueError(f"losses take shapes of tokens, vocab, hidden and dtype alone, but got {shape}")
    if shape.tokens % SEQUENCES:
        raise ValueError(f"tokens must be divisible by {SEQUENCES}, the number of sequences, but got {shape}")
    return shape


# Most programs are one function with other constants, which Dynamo would give up to compile after eight of them.
@torch._dynamo.config.patch(recompile_limit=4 * len(LOSSES))
def measure(shape: Shape, names: list[str], session: Session) -> None:
    """Measures some losses, names from `METHODS`, on one shape, whose tokens are divided into `SEQUENCES`."""
    compared = Comparison(shape, session)
    inputs = compared.inputs
    for count in sorted({LOSSES[METHODS[name][0]].matmuls for name in names} | {3}):
        compared.add_floor(count)
    # A reference is as large as the gradients; one at a time.
    for loss_name, group in groupby(sorted(names, key=list(METHODS).index), lambda name: METHODS[name][0]):
        loss, reference = LOSSES[loss_name], None
        given = loss.given(inputs)
        session.progress(f"{loss_name}: reference")
        with compared.session.attempt(f"{loss_name}, reference"):
            reference = loss.reference(inputs, given)
        for name in group:
            make = partial(_step, loss, METHODS[name][1], (loss, inputs, given))
            compared.add(name, make, reference=reference, matmuls=loss.matmuls)
        del reference
    compared.report()


def _step(loss: Loss, way: str, arguments: tuple[Loss, Inputs, Given]) -> RegionStep:
    return partial(_run, WAYS[way](loss), arguments)


def _run(program: Program, arguments: tuple[Loss, Inputs, Given], mark: Mark) -> tuple[Tensor, dict[str, Tensor]]:
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
