"""By how much the moments of MNIST change when the validation images of a seed count too.

python -m benchmarks.held_out_moments --data DIR
"""

from __future__ import annotations

import argparse

import torch

from varprop_lab import batches, datasets
from varprop_lab.paper.experiments import EXPERIMENTS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", help="folder with MNIST; by default the places where varprop looks")
    data = datasets.load("mnist", parser.parse_args().data)
    chosen = [torch.arange(len(data.train_x)), *(datasets.split(data, seed)[0] for seed in range(3))]
    both, *parts = (batches.statistics(data, images, EXPERIMENTS["mnist"].augmentation) for images in chosen)
    print(f"largest variance of a pixel: {both.var.max():.2g}")
    for seed, part in enumerate(parts):
        mean, var = (part.mean - both.mean).abs().max(), (part.var - both.var).abs().max()
        print(f"seed {seed}: no mean changes by more than {mean:.2g}, no variance by more than {var:.2g}")


if __name__ == "__main__":
    main()
