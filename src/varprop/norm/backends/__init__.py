"""The fold of a whole network in three ways that agree: a plain reference, torch by hand, Triton kernels."""
