"""What goes with training: moments of the data, the learning rate, states saved and put back."""
