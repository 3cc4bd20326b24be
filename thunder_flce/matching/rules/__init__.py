"""Rules of PyTorch's operations: see `thunder_flce.matching.interpreter.rule`."""

from thunder_flce.matching.rules import (
    arithmetic,
    distributions,
    joins,
    linears,
    losses,
    reductions,
    selections,
    shapes,
)

__all__ = ["arithmetic", "distributions", "joins", "linears", "losses", "reductions", "selections", "shapes"]
