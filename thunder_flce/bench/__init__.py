"""Benchmarks against every peer that is installed: `python -m thunder_flce bench`.

Reading order: `shapes` (what is measured), `methods` (who is measured), `measuring` (how), then the subsets `regions`,
`losses`, `models`, `small` and `distributed`, which `records` writes down, `showing` makes tables and pictures of, and
`cli` puts together; and `rates`, a report on a device.
"""
