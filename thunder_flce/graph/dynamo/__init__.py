"""Fusion in Dynamo's graphs: the region of each loss becomes a trace, is transformed, and is written back."""
