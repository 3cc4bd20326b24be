"""Benchmarks of the loss region against every peer that is installed: `python -m thunder_flce bench`."""
