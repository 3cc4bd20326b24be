"""A small model under `thunder.distributed.ddp`, with the early reduction of dW and without it."""

from functools import partial
from typing import Any

import thunder
import thunder.distributed
import torch.nn.functional as F
from thunder.core.trace import TraceCtx
from thunder.core.transform_common import Transform
from torch import Tensor, nn

from thunder_flce.graph.plugin import jit, with_fusion
from thunder_flce.graph.transform import FuseLinearCrossEntropy

LAYERS = 8


class LayersAndHead(nn.Module):
    """Linear layers, whose backward the reduction of dW can run beside, then a head and its loss.

    The layers multiply by the identity. So the head gets the input, and the input the gradient of the head's.

    Args:
        weight: (V, H) of the head.
    """

    def __init__(self, weight: Tensor):
        super().__init__()
        vocab, hidden = weight.shape
        layer = partial(nn.Linear, hidden, hidden, bias=False, device=weight.device, dtype=weight.dtype)
        self.layers = nn.Sequential(*(layer() for _ in range(LAYERS)))
        for identity in self.layers.parameters():
            nn.init.eye_(identity)
        self.head = nn.Linear(hidden, vocab, bias=False, device="meta")
        self.head.weight = nn.Parameter(weight)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """The mean loss of (T, H) inputs."""
        return F.cross_entropy(self.head(self.layers(x)).float(), target)


class _FuseFirst(Transform):
    """The fusion before thunder distributes the program, which then reduces dW with all other gradients."""

    def __init__(self) -> None:
        self._fusion = FuseLinearCrossEntropy(strict=True)

    def transform_traces_pre_prologue(
        self, prologue_trace: TraceCtx, computation_trace: TraceCtx, epilogue_trace: TraceCtx | None, **kwargs: Any
    ) -> tuple[TraceCtx, TraceCtx, TraceCtx | None]:
        """Called by thunder once per compiled trace."""
        return prologue_trace, self._fusion.fuse(computation_trace), epilogue_trace


def ddp(model: nn.Module, *, reduces_early: bool) -> nn.Module:
    """The model in data parallel training; dW is reduced right after the region's backward, or at the end."""
    if reduces_early:
        return thunder.distributed.ddp(jit(model, strict=True))
    first: Any = _FuseFirst()
    return thunder.distributed.ddp(thunder.jit(model, **with_fusion(first, None, None)))
