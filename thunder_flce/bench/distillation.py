"""Losses of distillation, for `bench losses`: a teacher's largest probabilities, and divergences from all of them."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from thunder_flce.bench.methods import peer
from thunder_flce.bench.reference import Reference, row_slices, summed
from thunder_flce.bench.shapes import Inputs
from thunder_flce.functional import linear_cross_entropy
from thunder_flce.kl_divergence import linear_kl_divergence

Pair = tuple[Tensor, Tensor]
"""Of a teacher: hidden states (T, H) and head (V, H), or columns (T, K) and probabilities (T, K)."""

LIGER_BETAS = {"forward": 0.0, "reverse": 1.0, "jensen_shannon": 0.5}


@dataclass(frozen=True, kw_only=True)
class Distillation:
    """The mean divergence of a student from a teacher, and who computes it."""

    divergence: str
    """Of `linear_kl_divergence`; or "top", the cross-entropy with the largest probabilities."""
    gradients: tuple[str, ...] = ("dx", "dw")
    ours: str = "function"

    @property
    def ways(self) -> tuple[str, ...]:
        """Who can compute it."""
        return (self.ours, "torch.compile", "eager", *(["liger"] if self.divergence != "top" else []))

    @property
    def matmuls(self) -> int:
        """How many it needs: the teacher's logits are one, too, where they are not given."""
        return 3 if self.divergence == "top" else 4

    @torch.no_grad()
    def given(self, inputs: Inputs) -> Pair:
        """A teacher that is random, as the student is."""
        generator = torch.Generator(inputs.x.device).manual_seed(2)
        x, weight = (
            torch.randn(like.shape, dtype=like.dtype, device=like.device, generator=generator)
            for like in (inputs.x, inputs.weight)
        )
        weight.mul_(weight.shape[1] ** -0.5)
        if self.divergence != "top":
            return x, weight
        largest = [F.linear(x[rows], weight).float().softmax(-1).topk(64) for rows in row_slices(x)]
        return torch.cat([each.indices for each in largest]), torch.cat([each.values for each in largest])

    def program(self, way: str) -> Callable[..., Tensor]:
        """The loss from x (T, H), weight (V, H), target (T,) and the teacher."""
        if way == "torch.compile":
            return torch.compile(self._eager, fullgraph=True, dynamic=False)
        return {"function": self._function, "eager": self._eager, "liger": self._liger}[way]

    def _function(self, x: Tensor, weight: Tensor, target: Tensor, teacher: Pair) -> Tensor:
        if self.divergence == "top":
            return linear_cross_entropy(x, weight, teacher[0], target_weights=teacher[1])
        return linear_kl_divergence(x, weight, *teacher, divergence=self.divergence)

    def _eager(self, x: Tensor, weight: Tensor, target: Tensor, teacher: Pair) -> Tensor:
        logits = F.linear(x, weight)
        return self._of_rows(logits if logits.dtype == torch.float64 else logits.float(), teacher).mean()

    def _liger(self, x: Tensor, weight: Tensor, target: Tensor, teacher: Pair) -> Tensor:
        function = peer("liger_kernel.transformers.functional").liger_fused_linear_jsd
        return function(x, weight, *teacher, jsd_beta=LIGER_BETAS[self.divergence])

    def _of_rows(self, logits: Tensor, teacher: Pair) -> Tensor:
        """By the definition, and as TRL's GKD has the mixture."""
        log_p = logits.log_softmax(-1)
        if self.divergence == "top":
            return -(log_p.gather(-1, teacher[0]) * teacher[1]).sum(-1)
        with torch.no_grad():
            log_q = F.linear(*teacher).to(log_p.dtype).log_softmax(-1)
        if self.divergence == "forward":
            return _kl(log_q, log_p)
        if self.divergence == "reverse":
            return _kl(log_p, log_q)
        log_m = torch.logaddexp(log_p, log_q) - math.log(2)
        return (_kl(log_q, log_m) + _kl(log_p, log_m)) / 2

    def reference(self, inputs: Inputs, teacher: Pair) -> Reference:
        """The loss and its gradients, a few rows at a time."""
        wide = inputs.widened()

        def loss_of(rows: slice) -> Tensor:
            first, second = teacher[0][rows], teacher[1]
            if self.divergence == "top":
                of_rows = first, second[rows]
            else:
                of_rows = first.to(wide.x.dtype), second.to(wide.x.dtype)
            return self._of_rows(wide.logits(rows), of_rows).sum() / wide.x.shape[0]

        return summed(wide, loss_of)


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """(N,) KL(p‖q) of the rows of log-probabilities."""
    return F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)


DISTILLATIONS = {
    "top-64 teacher": Distillation(divergence="top"),
    "KL from a teacher": Distillation(divergence="forward"),
    "reverse KL": Distillation(divergence="reverse"),
    "Jensen-Shannon": Distillation(divergence="jensen_shannon"),
}
