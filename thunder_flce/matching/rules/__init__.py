"""What each operation makes of what is known of its operands: one rule for each way that PyTorch has.

A rule is called with the arguments of the operation: the description of an operand where its annotation is that of a
description, and otherwise the tensor. It returns the description of its result, or of each of them. Where an operand
is not what the annotation says, there is no rule, and a rule raises `Unknown` for what else cannot be described.
`interpreter` then asks for the operands themselves.
"""

from thunder_flce.matching.rules import arithmetic, joins, losses, picks, reductions, shapes
from thunder_flce.matching.rules.linears import LINEARS
from thunder_flce.matching.rules.registry import RULES, rule

__all__ = ["LINEARS", "RULES", "arithmetic", "joins", "losses", "picks", "reductions", "rule", "shapes"]
