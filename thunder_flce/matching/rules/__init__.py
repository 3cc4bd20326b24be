"""Rules of PyTorch's operations: each describes an operation's result from the descriptions of its operands.

A rule is called with the operation's arguments. For a parameter that is annotated as a description, it gets the
operand's description, and otherwise the tensor. It returns the description of the result, or of each result. If an
operand's description is not of the annotated type, the rule is not called; if the result cannot be described, the rule
raises `Unknown`. In both cases, `interpreter` demands the operands themselves.
"""

from thunder_flce.matching.rules import arithmetic, joins, linears, losses, reductions, selections, shapes
from thunder_flce.matching.rules.registry import RULES, rule

__all__ = ["RULES", "arithmetic", "joins", "linears", "losses", "reductions", "rule", "selections", "shapes"]
