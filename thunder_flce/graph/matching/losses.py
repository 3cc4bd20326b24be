"""The losses of a trace: cross_entropy and nll_loss, with their arguments by name."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import thunder.torch as ltorch
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol

_CROSS_ENTROPY = "logits target weight size_average ignore_index reduce reduction label_smoothing".split()
_NLL_LOSS = "logits target weight ignore_index reduction".split()


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
    def call(cls, *args: Any, names: Sequence[str] = _CROSS_ENTROPY, **kwargs: Any) -> "CrossEntropy":
        """From the arguments of a loss, as thunder passes them on, and the names of those by position."""
        given = dict(zip(names, args, strict=False)) | kwargs
        # Where nll_loss has no ignore_index, thunder keeps None, and takes that for another value than torch.
        given = {name: value for name, value in given.items() if value is not None}
        deprecated = [given.pop(name) for name in ("size_average", "reduce") if name in given]
        return cls(**given, is_deprecated=bool(deprecated))

    @classmethod
    def of(cls, loss: BoundSymbol) -> "CrossEntropy":
        """From a bound symbol that `is_loss`."""
        names = _NLL_LOSS if loss.sym.id == ltorch.nll_loss.id else _CROSS_ENTROPY
        return cls.call(*loss.args, names=names, **loss.kwargs)

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
