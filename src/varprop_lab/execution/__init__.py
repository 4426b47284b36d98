"""Running an experiment: searching learning rates, training, resuming, several processes."""
