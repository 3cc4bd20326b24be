"""Benchmarks against every installed peer: `python -m thunder_flce bench`.

Reading order: `shapes` (sizes and inputs), `methods` (this project and its peers), `measure` (timing and memory), then
the subsets `regions`, `losses`, `models`, `distributed` and `rates`; `output` writes their rows, `cli` runs them.
"""
