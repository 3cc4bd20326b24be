"""Kernels on logits, row by row, in several backends, and kernels on vectors of one number a row."""
