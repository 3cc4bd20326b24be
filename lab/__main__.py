"""`python -m lab`, run in the repository's root: benchmarks for developers of this package."""

import sys

from lab import against, kernels, lean, lengths, peaked
from thunder_flce.bench.cli import main

SUBSETS = {
    "against": against.SUBSET,
    "kernels": kernels.SUBSET,
    "lean": lean.SUBSET,
    "lengths": lengths.SUBSET,
    "peaked": peaked.SUBSET,
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], SUBSETS, "python -m lab"))
