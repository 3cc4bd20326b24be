"""The operation: calls and their arguments, checks, and formulas of the losses; imports neither thunder nor Triton."""
