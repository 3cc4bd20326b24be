"""The matrix products of a region."""
