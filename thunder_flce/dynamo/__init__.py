"""Fusion in Dynamo's graphs, for torch.compile: reads a graph as a program, matches it, and writes regions into it."""
