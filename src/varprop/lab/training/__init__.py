"""Training steps: one network, or many stacked into one ensemble; CUDA graphs and fusion to make them fast."""
