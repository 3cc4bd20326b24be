"""The losses of a trace: cross_entropy and nll_loss, with their arguments by name."""

from dataclasses import dataclass, fields
from typing import Any

import thunder.torch as ltorch
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol


@dataclass(frozen=True, eq=False)
class CrossEntropy:
    """The arguments of a `torch.nn.functional.cross_entropy`, or of an nll_loss, in a trace."""

    logits: TensorProxy
    """(N, V), (V,) or (B, V, …); log-probabilities for nll_loss"""
    target: TensorProxy
    """(N,), () or (B, …), or class probabilities in the logits' shape"""
    weight: TensorProxy | None = None
    """(V,)"""
    ignore_index: int = -100
    reduction: str = "mean"
    label_smoothing: float = 0.0
    is_deprecated: bool = False
    """Whether it has the argument size_average or reduce."""

    @classmethod
    def call(
        cls,
        logits: TensorProxy,
        target: TensorProxy,
        weight: TensorProxy | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> "CrossEntropy":
        """From the arguments of `torch.nn.functional.cross_entropy`, as thunder passes them on."""
        is_deprecated = size_average is not None or reduce is not None
        return cls(logits, target, weight, ignore_index, reduction, label_smoothing, is_deprecated)

    @classmethod
    def call_nll_loss(
        cls,
        logits: TensorProxy,
        target: TensorProxy,
        weight: TensorProxy | None = None,
        ignore_index: int | None = None,
        reduction: str = "mean",
    ) -> "CrossEntropy":
        """From the arguments of `torch.nn.functional.nll_loss`, as thunder passes them on."""
        # Where ignore_index is left out, thunder keeps None, and takes that for another value than torch.
        return cls(logits, target, weight, -100 if ignore_index is None else ignore_index, reduction)

    @classmethod
    def of(cls, loss: BoundSymbol) -> "CrossEntropy":
        """From a bound symbol that `is_loss`."""
        call = cls.call_nll_loss if loss.sym.id == ltorch.nll_loss.id else cls.call
        return call(*loss.args, **loss.kwargs)

    def in_place_of(self, loss: BoundSymbol, output: TensorProxy) -> BoundSymbol:
        """A bound symbol like `loss`, with these arguments and another output, and without a decomposition."""
        arguments = {field.name: getattr(self, field.name) for field in fields(self)[2:-1]}
        if loss.sym.id == ltorch.nll_loss.id:
            del arguments["label_smoothing"]
        return loss.from_bsym(args=(self.logits, self.target), kwargs=arguments, output=output, subsymbols=[])

    @property
    def values(self) -> tuple[Any, ...]:
        """All arguments in order."""
        return tuple(getattr(self, field.name) for field in fields(self))

    @property
    def class_dimension(self) -> int:
        """Where the classes are in the logits' shape."""
        return min(1, self.logits.ndim - 1)

    @property
    def has_probabilities(self) -> bool:
        """Whether the targets are class probabilities."""
        return tuple(self.logits.shape) == tuple(self.target.shape)


def is_loss(bsym: BoundSymbol) -> bool:
    """Whether a bound symbol is a cross-entropy or an nll_loss."""
    return bsym.sym.id in (ltorch.cross_entropy.id, ltorch.nll_loss.id)
