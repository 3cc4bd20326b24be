"""Benchmarks against every peer that is installed: `python -m thunder_flce bench`.

Reading order: `shapes` (what is measured), `methods` (who is measured), `measure` (how), then the subsets `regions`,
`losses`, `models`, `distributed` and `rates`, whose rows `output` writes down, and `cli`, which puts them together.
"""
