"""Grids of trainings of a ResNet on CIFAR-10 that share a GPU: the deep form beside what is taken in its place."""
