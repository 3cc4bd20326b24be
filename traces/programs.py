"""The small programs whose traces are printed in this folder."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import thunder_flce


def litgpt(hidden, weight, labels):
    """The usual training loop around litgpt's models: the logits keep the model's dtype."""
    logits = F.linear(hidden, weight)
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))


def transformers_llama(hidden, weight, labels):
    """The loss of transformers' causal language models, with the labels shifted after the linear."""
    logits = F.linear(hidden, weight).float()
    labels = F.pad(labels, (0, 1), value=-100)
    labels = labels[..., 1:].contiguous()
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1), ignore_index=-100)


def reduction_none(hidden, weight, labels):
    """One loss a token: the incoming gradient is a vector, so the gradients have to wait for the backward."""
    logits = F.linear(hidden, weight)
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1), reduction="none")


def logits_returned(hidden, weight, labels):
    """The caller wants the logits as well, so cross-entropy stands alone."""
    logits = F.linear(hidden, weight)
    return F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), labels.view(-1)), logits


def bias_and_sum(hidden, weight, bias, labels):
    """A linear with bias, and the sum over tokens."""
    logits = F.linear(hidden, weight, bias)
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1), reduction="sum")


def functional(hidden, weight, labels):
    """The operation called by name; without the executor its decomposition runs."""
    return thunder_flce.linear_cross_entropy(hidden, weight, labels)


PROGRAMS: tuple[Callable, ...] = (
    litgpt,
    transformers_llama,
    reduction_none,
    logits_returned,
    bias_and_sum,
    functional,
)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Shapes of a loss; the defaults are those of a Llama 3 8B with two sequences of 4096 tokens."""

    batch: int = 2
    sequence: int = 4096
    hidden: int = 4096
    vocab: int = 128256

    @property
    def tokens(self) -> int:
        """Rows of the logits."""
        return self.batch * self.sequence


def arguments(program: Callable, sizes: Sizes, *, device: str, dtype: torch.dtype) -> list[Tensor]:
    """Tensors for a program, by the names of its arguments. All with a floating-point dtype need a gradient."""

    def integers(*shape: int) -> Tensor:
        return torch.randint(sizes.vocab, shape, device=device)

    def floats(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype, requires_grad=True)

    rank = 4
    tensors = {
        "hidden": lambda: floats(sizes.batch, sizes.sequence, sizes.hidden),
        "weight": lambda: floats(sizes.vocab, sizes.hidden),
        "second_weight": lambda: floats(sizes.vocab, sizes.hidden),
        "matrix": lambda: floats(sizes.hidden, sizes.vocab),
        "square": lambda: floats(sizes.hidden, sizes.hidden),
        "bias": lambda: floats(sizes.vocab),
        "adapter_down": lambda: floats(rank, sizes.hidden),
        "adapter_up": lambda: floats(sizes.vocab, rank),
        "class_weight": lambda: torch.rand(sizes.vocab, device=device, dtype=dtype),
        "temperature": lambda: torch.tensor(0.7, device=device, dtype=dtype),
        "tokens": lambda: integers(sizes.batch, sizes.sequence),
        "labels": lambda: integers(sizes.batch, sizes.sequence),
        "num_items": lambda: torch.tensor(sizes.tokens, device=device),
    }
    return [tensors[name]() for name in inspect.signature(program).parameters]
