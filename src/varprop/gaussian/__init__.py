"""Expectations of functions of Gaussian variables: pure mathematics on tensors, no op names.

Every function takes means and standard deviations (or variances, where the name says so) and returns
``(mean, variance)`` in the dtype it was given; inside, everything is computed in float64.
"""
