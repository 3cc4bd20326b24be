"""Losses beside the mean over tokens: GRPO, preferences, weighted tokens, distillation, log-probabilities alone.

Each loss is written once, as a function of one number per token. It is measured forward and backward, beside the
matmuls that its results need: by this project, by peers that have the loss or log-probabilities of tokens, by
torch.compile and in eager PyTorch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module

import torch
import torch.nn.functional as F
from torch import Tensor

from thunder_flce.bench.measure import MATMULS, Run, Unavailable
from thunder_flce.bench.methods import COMPILERS, LOG_PROBS, Method
from thunder_flce.bench.regions import Results, add, add_matmuls, make_reference, prepared, row_slices, run_step
from thunder_flce.bench.shapes import Inputs, Shape
from thunder_flce.functional import linear_cross_entropy
from thunder_flce.kl_divergence import linear_kl_divergence

SEQUENCES = 8
"""Number of sequences of a preference loss: the first half are chosen, the second half rejected."""


def _log_probs(logits: Tensor, target: Tensor, *extras: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, target[:, None]).squeeze(-1)


def _weights(inputs: Inputs) -> tuple[Tensor, ...]:
    """Returns random weights of tokens, between 0.1 and 1.1."""
    target = inputs.target
    generator = torch.Generator(target.device).manual_seed(1)
    return (torch.rand(target.shape, device=target.device, generator=generator) + 0.1,)


def _sequence_weights(inputs: Inputs) -> tuple[Tensor, ...]:
    """Returns the same weights, if the tokens can be divided into sequences."""
    if len(inputs.x) % SEQUENCES:
        raise Unavailable(f"{len(inputs.x)} tokens cannot be divided into {SEQUENCES} sequences of one length")
    return _weights(inputs)


@dataclass(frozen=True, kw_only=True)
class Loss:
    """A loss, and the implementations of it."""

    reduce: Callable[..., Tensor]  # the loss, from one number per token (T,) and the extra tensors
    per_token: Callable[..., Tensor] = _log_probs  # these numbers, from logits, targets and extras of some tokens
    make_extras: Callable[[Inputs], tuple[Tensor, ...]] = _weights
    token_extras: int = 1  # how many of the extra tensors, the first ones, have a row per token
    matmuls: int = 3  # logits, dX, dW, a teacher's logits; no gradients with 1
    own: Mapping[str, Method] = field(default_factory=dict)  # our "function" and Liger's, "liger"; they take extras

    @property
    def ways(self) -> tuple[str, ...]:
        """Names of the implementations. Our compilers are measured if we have no function for the loss."""
        ours = () if "function" in self.own else ("flce", "flce backend")
        peers = LOG_PROBS if self.per_token is _log_probs else ()
        return (*ours, *self.own, *peers, "torch.compile", "eager")

    def method(self, way: str, extras: tuple[Tensor, ...]) -> Method:
        """Returns the implementation that one of `ways` names."""
        reduce, per_token = self.reduce, self.per_token

        def written(x: Tensor, weight: Tensor, target: Tensor, *extras: Tensor) -> Tensor:
            # In float32, as users write it: sums of log-probabilities in bfloat16 are off by whole units.
            return reduce(per_token(F.linear(x, weight).float(), target, *extras), *extras)

        if way in self.own:
            program = self.own[way]
        elif way in LOG_PROBS:
            log_probs = LOG_PROBS[way]()
            program = lambda x, weight, target, *extras: reduce(log_probs(x, weight, target), *extras)  # noqa: E731
        else:
            program = COMPILERS[way](written)
        return lambda x, weight, target: program(x, weight, target, *extras)


def _mean(log_probs: Tensor, *extras: Tensor) -> Tensor:
    return -log_probs.mean()


def _preference(log_probs: Tensor, weights: Tensor) -> Tensor:
    """DPO (arXiv:2305.18290) with β = 0.1; the reference model's log-probabilities would be constants."""
    chosen, rejected = log_probs.view(SEQUENCES, -1).sum(-1).chunk(2)
    return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


def _grpo(log_probs: Tensor, weights: Tensor) -> Tensor:
    """GRPO (arXiv:2402.03300): ratios from 0.8 to 1.3, half of them clipped, and a divergence from a reference."""
    advantages = weights - 0.6
    old, reference = log_probs.detach() + 0.5 * advantages, log_probs.detach() + 0.2 * advantages
    ratio = torch.exp(log_probs - old)
    gains = torch.min(ratio * advantages, ratio.clamp(0.9, 1.1) * advantages)
    divergence = torch.exp(reference - log_probs) - (reference - log_probs) - 1
    return (0.04 * divergence - gains).mean()


def _liger_preference(x: Tensor, weight: Tensor, target: Tensor, _: Tensor) -> Tensor:
    """Liger's DPO, with a chunk for each pair of sequences."""
    fused = import_module("liger_kernel.chunked_loss").LigerFusedLinearDPOLoss(beta=0.1, use_ref_model=False)
    return fused(weight, x.view(SEQUENCES, -1, x.shape[1]), target.view(SEQUENCES, -1))[0]


@torch.no_grad()
def _teacher(inputs: Inputs) -> tuple[Tensor, ...]:
    """Returns random hidden states (T, H) and a random head (V, H), with the student's distributions."""
    generator = torch.Generator(inputs.x.device).manual_seed(2)
    x, weight = (
        torch.randn(like.shape, dtype=like.dtype, device=like.device, generator=generator)
        for like in (inputs.x, inputs.weight)
    )
    return x, weight.mul_(weight.shape[1] ** -0.5)


@torch.no_grad()
def _teacher_top_k(inputs: Inputs) -> tuple[Tensor, ...]:
    """Returns the columns (T, 64) of the teacher's largest probabilities, and these probabilities."""
    x, weight = _teacher(inputs)
    parts = [F.linear(x[rows], weight).float().softmax(-1).topk(64) for rows in row_slices(x)]
    return torch.cat([part.indices for part in parts]), torch.cat([part.values for part in parts])


def _top_k_log_prob(logits: Tensor, target: Tensor, columns: Tensor, probabilities: Tensor) -> Tensor:
    return (logits.log_softmax(-1).gather(-1, columns) * probabilities).sum(-1)


def _minus_divergence(logits: Tensor, target: Tensor, *teacher: Tensor) -> Tensor:
    with torch.no_grad():
        teacher_log_probs = F.linear(*teacher).to(logits.dtype).log_softmax(-1)
    return -F.kl_div(logits.log_softmax(-1), teacher_log_probs, reduction="none", log_target=True).sum(-1)


def _half_of_both(logits: Tensor, target: Tensor, *teacher: Tensor) -> Tensor:
    return (_log_probs(logits, target) + _minus_divergence(logits, target, *teacher)) / 2


def _liger_half_of_both(x: Tensor, weight: Tensor, target: Tensor, *teacher: Tensor) -> Tensor:
    """Liger's Jensen-Shannon divergence beside the cross-entropy, half of each; the forward KL at β = 0."""
    return import_module("liger_kernel.chunked_loss").LigerFusedLinearJSDLoss(beta=0.0)(x, weight, *teacher, target)


def _liger_divergence(x: Tensor, weight: Tensor, _: Tensor, *teacher: Tensor) -> Tensor:
    """Liger's Jensen-Shannon divergence, which is the forward KL at β = 0."""
    function = import_module("liger_kernel.transformers.functional").liger_fused_linear_jsd
    return function(x, weight, *teacher, jsd_beta=0.0)


LOSSES = {
    "mean": Loss(reduce=_mean, own={"function": lambda x, weight, target, _: linear_cross_entropy(x, weight, target)}),
    "GRPO": Loss(reduce=_grpo),
    "DPO": Loss(reduce=_preference, make_extras=_sequence_weights, own={"liger": _liger_preference}),
    "weighted tokens": Loss(reduce=lambda log_probs, weights: -(log_probs * weights).sum() / weights.sum()),
    "log-probabilities alone": Loss(
        reduce=lambda log_probs, _: log_probs, matmuls=1,
        own={"function": lambda x, weight, target, _: -linear_cross_entropy(x, weight, target, reduction="none")},
    ),
    "top-64 teacher": Loss(
        reduce=_mean, per_token=_top_k_log_prob, make_extras=_teacher_top_k, token_extras=2,
        own={"function": lambda x, weight, _, top, shares: linear_cross_entropy(x, weight, top, target_weights=shares)},
    ),
    "KL from a teacher": Loss(
        reduce=_mean, per_token=_minus_divergence, make_extras=_teacher, matmuls=4,
        own={
            "function": lambda x, weight, _, *teacher: linear_kl_divergence(x, weight, *teacher),
            "liger": _liger_divergence,
        },
    ),
    "KL and labels": Loss(
        reduce=_mean, per_token=_half_of_both, make_extras=_teacher, matmuls=4, own={"liger": _liger_half_of_both}
    ),
}  # fmt: skip

METHODS = {f"{name}, {way}": loss for name, loss in LOSSES.items() for way in loss.ways}


# Most programs are one function with different constants; by default, Dynamo stops compiling it after eight of them.
@torch._dynamo.config.patch(recompile_limit=4 * len(LOSSES))
def measure(shape: Shape, names: list[str], run: Run) -> None:
    """Measures losses, by names of `METHODS`, on one shape."""
    inputs = prepared(shape, run)
    for count in MATMULS:
        add_matmuls(run, inputs, count)
    for loss_name, loss in LOSSES.items():
        if not (ways := [way for way in loss.ways if f"{loss_name}, {way}" in names]):
            continue
        loss_inputs = inputs.map(Tensor.detach) if loss.matmuls == 1 else inputs
        matmuls = max(loss.matmuls - shape.frozen, 1)
        # A reference is as large as the gradients, so only one exists at a time.
        reference = Results()
        with run.attempt(loss_name):
            extras = loss.make_extras(inputs)
            with run.attempt(f"{loss_name}, reference"):
                reference = make_reference(
                    loss_inputs, loss.per_token, loss.reduce, extras=extras, token_extras=loss.token_extras
                )
            for way in ways:
                with run.attempt(name := f"{loss_name}, {way}"):
                    step = partial(run_step, loss_inputs, loss.method(way, extras))
                    add(run, name, step, reference=reference, matmuls=matmuls)
        del reference
    run.report()
