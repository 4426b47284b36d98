"""Data sets: reading, fetching, augmenting and batching them."""
