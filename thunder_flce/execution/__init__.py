"""Runs a region on tensors."""
