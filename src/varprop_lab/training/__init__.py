"""Training steps: one network, or many stacked into one ensemble; traced and captured to make them fast."""
