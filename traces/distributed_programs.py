"""Models that thunder distributes, to print the traces of: see `regenerate.py`."""

import inspect

import thunder.distributed
import torch
import torch.nn.functional as F
from thunder.core.module import ThunderModule
from torch import Tensor, nn

CPU = torch.device("cpu")


class Model(nn.Module):
    """A layer, and the head with its loss."""

    def __init__(self, hidden: int, vocab: int):
        super().__init__()
        self.layer = nn.Linear(hidden, hidden, bias=False)
        self.lm_head = nn.Linear(hidden, vocab, bias=False)

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """The loss."""
        logits = self.lm_head(self.layer(hidden))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))


def column_parallel(step: ThunderModule) -> ThunderModule:
    """The head's vocabulary divided among ranks."""
    return thunder.distributed.column_parallel(step, ["lm_head"], device=torch.device("cpu", 0))


def ddp(step: ThunderModule) -> ThunderModule:
    """Each rank with a batch of its own: dW is averaged in its memory, while the backward of the layer runs."""
    return thunder.distributed.ddp(step, broadcast_from=None)


def fsdp(step: ThunderModule) -> ThunderModule:
    """The same with parameters divided among ranks."""
    return thunder.distributed.fsdp(step, device=CPU)


PROGRAMS = (column_parallel, ddp, fsdp)


def source(program) -> str:
    """The text of a program and of its model."""
    return f"{inspect.getsource(Model.forward)}\n{inspect.getsource(program)}"
