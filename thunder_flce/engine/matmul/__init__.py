"""The matmuls of the engine: `matmul` runs them, in cuBLAS by an algorithm that `algorithms` chooses."""
