"""A model as a graph of operations on tensors: module -> Program."""
