"""Grids of trainings that share a GPU: the deep form beside what is taken in its place, and private training."""
