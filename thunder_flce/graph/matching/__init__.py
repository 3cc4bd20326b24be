"""Finds linear + cross-entropy in a trace."""
