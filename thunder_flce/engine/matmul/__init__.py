"""The matmuls of the engine: `matmul` runs them, `algorithms` chooses cuBLASLt's algorithm for large ones."""
