"""Small programs to print the traces of, and their arguments."""

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
    """One loss a token: the upstream gradient is a vector, so the gradients have to wait for the backward."""
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


@dataclass(frozen=True)
class _Maker:
    """Makes the tensors that programs take."""

    sizes: Sizes
    device: str
    dtype: torch.dtype

    def integers(self, *shape: int) -> Tensor:
        return torch.randint(self.sizes.vocab, shape, device=self.device)

    def floats(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype, requires_grad=True)


_RANK = 4
_ARGUMENTS: dict[str, Callable[[_Maker, Sizes], Tensor]] = {
    "hidden": lambda make, sizes: make.floats(sizes.batch, sizes.sequence, sizes.hidden),
    "weight": lambda make, sizes: make.floats(sizes.vocab, sizes.hidden),
    "second_weight": lambda make, sizes: make.floats(sizes.vocab, sizes.hidden),
    "matrix": lambda make, sizes: make.floats(sizes.hidden, sizes.vocab),
    "square": lambda make, sizes: make.floats(sizes.hidden, sizes.hidden),
    "bias": lambda make, sizes: make.floats(sizes.vocab),
    "adapter_down": lambda make, sizes: make.floats(_RANK, sizes.hidden),
    "adapter_up": lambda make, sizes: make.floats(sizes.vocab, _RANK),
    "class_weight": lambda make, sizes: torch.rand(sizes.vocab, device=make.device, dtype=make.dtype),
    "temperature": lambda make, sizes: torch.tensor(0.7, device=make.device, dtype=make.dtype),
    "tokens": lambda make, sizes: make.integers(sizes.batch, sizes.sequence),
    "labels": lambda make, sizes: make.integers(sizes.batch, sizes.sequence),
    "num_items": lambda make, sizes: torch.tensor(sizes.tokens, device=make.device),
}
ARGUMENTS = frozenset(_ARGUMENTS)


def arguments(program: Callable, sizes: Sizes, *, device: str, dtype: torch.dtype) -> list[Tensor]:
    """Tensors for a program, by the names of its arguments, out of `ARGUMENTS`; trainable ones need a gradient."""
    make = _Maker(sizes, device, dtype)
    return [_ARGUMENTS[name](make, sizes) for name in inspect.signature(program).parameters]
