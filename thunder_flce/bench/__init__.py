"""Benchmarks against every peer that is installed: `python -m thunder_flce bench`.

Reading order: `shapes` (what is measured), `methods` (who is measured), `measuring` (how), then the subsets `regions`,
`sweep`, `against` (another checkout, or a method), `predictions`, `models`, `convergence`, `soak`, `lengths`, `small`,
`kernels`, `losses` and `distributed`, which `records` writes down, `terminal` and `figures` show, and `cli` puts
together.
"""
