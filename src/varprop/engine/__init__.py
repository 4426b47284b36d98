"""Moments through a graph: Program -> Result."""
