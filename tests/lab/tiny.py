"""A data set, networks and experiments small enough for tests."""

from dataclasses import replace

import torch
from torch import nn

from varprop_lab.batches import Augmentation
from varprop_lab.datasets import Dataset
from varprop_lab.protocol import Experiment, Protocol
from varprop_lab.training import Task

SIDE, CLASSES = 6, 3


def dataset(train=90, test=30, channels=1):
    """Blobs of brightness at a place that depends on the class, in bytes."""
    generator = torch.Generator().manual_seed(0)

    def part(count):
        labels = torch.randint(0, CLASSES, (count,), generator=generator)
        images = torch.randint(0, 120, (count, channels, SIDE, SIDE), generator=generator)
        for image, label in zip(images, labels, strict=True):
            image[:, 2 * int(label) : 2 * int(label) + 2] += 100
        return images.to(torch.uint8), labels

    return Dataset("tiny", *part(train), *part(test), classes=CLASSES)


def network():
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(SIDE * SIDE, 5),
        nn.Sigmoid(),
        nn.Linear(5, 5),
        nn.ReLU(),
        nn.Linear(5, CLASSES),
    )


def experiment(**changes):
    protocol = Protocol(epochs=3, search_epochs=1, evaluations=3, grids=(), checkpoint_epochs=1)
    base = Experiment(
        "tiny",
        "tiny",
        "tiny",
        Augmentation(shift=1, flip=True, noise_variance=0.05),
        starts=("ap2",),
        batch_sizes=(16,),
        protocol=protocol,
    )
    return replace(base, **changes)


def task(dtype=torch.float64, factory=network, data=None, **changes):
    return Task(experiment(**changes), data or dataset(), factory, dtype)
