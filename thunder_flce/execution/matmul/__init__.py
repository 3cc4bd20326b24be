"""The matmuls of a region: `matmul` runs them, by cuBLAS with an algorithm that `tuning` chose."""
