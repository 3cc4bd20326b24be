"""Fusion in Dynamo's graphs, for torch.compile: a graph is read as a program, matched, and written to. No thunder."""
