"""What the analytic normalization costs in a training step, beside its peers: time, memory, kernels."""
