"""Small programs whose traces are printed, and their arguments."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import thunder_flce


def litgpt(hidden, weight, labels):
    """Loss as in training scripts for litgpt's models: the logits keep the model's dtype."""
    logits = F.linear(hidden, weight)
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))


def reduction_none(hidden, weight, labels):
    """One loss per token: the upstream gradient is a vector, so the gradients have to wait for the backward."""
    logits = F.linear(hidden, weight)
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1), reduction="none")


def logits_returned(hidden, weight, labels):
    """Loss and logits: since the logits are returned, cross-entropy is not fused with the linear."""
    logits = F.linear(hidden, weight)
    return F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), labels.view(-1)), logits


def functional(hidden, weight, labels):
    """Loss by a call of `linear_cross_entropy`."""
    return thunder_flce.linear_cross_entropy(hidden, weight, labels)


EXAMPLES: dict[str, Callable] = {each.__name__: each for each in (litgpt, reduction_none, logits_returned, functional)}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a loss; by default those of Llama 3 8B with two sequences of 4096 tokens."""

    batch: int = 2
    sequence: int = 4096
    hidden: int = 4096
    vocab: int = 128256
    rank: int = 4
    """Rank of a low-rank adapter"""

    @property
    def tokens(self) -> int:
        """Number of rows of the logits."""
        return self.batch * self.sequence


SHAPES = {
    "hidden": ("batch", "sequence", "hidden"),
    "weight": ("vocab", "hidden"),
    "second_weight": ("vocab", "hidden"),
    "matrix": ("hidden", "vocab"),
    "square": ("hidden", "hidden"),
    "bias": ("vocab",),
    "adapter_down": ("rank", "hidden"),
    "adapter_up": ("vocab", "rank"),
    "class_weight": ("vocab",),
    "temperature": (),
    "tokens": ("batch", "sequence"),
    "labels": ("batch", "sequence"),
    "token_weights": ("batch", "sequence"),
    "advantages": ("batch",),
    "num_items": (),
}
"""Names of arguments that a program may have, and their shapes in terms of `Sizes`."""


def arguments(program: Callable, sizes: Sizes, *, device: str, dtype: torch.dtype) -> list[Tensor]:
    """Returns tensors for a program's arguments by name; parameters and hidden states need a gradient."""

    def tensor(name: str) -> Tensor:
        shape = [getattr(sizes, size) for size in SHAPES[name]]
        if name in ("tokens", "labels"):
            return torch.randint(sizes.vocab, shape, device=device)
        if name == "num_items":
            return torch.tensor(sizes.tokens, device=device)
        if name == "temperature":
            return torch.tensor(0.7, device=device, dtype=dtype)
        if name in ("class_weight", "token_weights", "advantages"):
            return torch.rand(shape, device=device, dtype=dtype)
        return torch.randn(shape, device=device, dtype=dtype, requires_grad=True)

    return [tensor(name) for name in inspect.signature(program).parameters]
