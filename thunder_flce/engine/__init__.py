"""Runs a fused linear and loss: a plan, a loop over chunks of tokens, and the operations in it."""
