"""What is compared: experiments, their cells and results, networks, starting points, names."""
