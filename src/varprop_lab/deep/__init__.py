"""Normalizations in deep networks: ResNets on CIFAR-10 and a GPT, each method with a rate searched for it."""
