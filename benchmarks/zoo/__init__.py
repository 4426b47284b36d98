"""Which models of the public collections propagate, how fast, and how near to Monte Carlo; see `__main__`."""
