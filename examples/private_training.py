"""DP-SGD on MNIST with the analytic normalization and Opacus.

    python examples/private_training.py --root DATA [--epsilon 1] [--epochs 2]

Prints the test accuracy and the epsilon that Opacus charges. Needs `varprop[opacus,lab]`. Other normalizations, with
rates and clipping bounds searched for each, are compared by `python -m benchmarks.deep.private`.
"""

from __future__ import annotations

import argparse
import warnings

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import varprop as vp
from varprop.opacus import PrivacyEngine
from varprop_lab import datasets

MEAN, STD = 0.1307, 0.3081  # of MNIST's pixels, as published: public numbers, which the guarantee needs them to be
DELTA = 1e-5


def make_model() -> nn.Module:
    """A small convolutional network, normalized; the deep form suits private training."""
    plain = nn.Sequential(
        nn.Conv2d(1, 8, 5, stride=2),
        nn.ReLU(),
        nn.Conv2d(8, 16, 4, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 25, 32),
        nn.ReLU(),
        nn.Linear(32, 10),
    )
    moments = vp.Moments(torch.zeros(1, 1, 1, 1), torch.ones(1, 1, 1, 1))  # of standardized pixels
    return vp.normalize(plain, moments, example=(1, 1, 28, 28), form="deep")


def train(x: Tensor, y: Tensor, settings: argparse.Namespace) -> tuple[nn.Module, float]:
    """A privately trained model, and the epsilon that it cost."""
    torch.manual_seed(0)
    model = make_model()
    engine = PrivacyEngine(accountant="rdp")
    private, optimizer, criterion, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), settings.rate, momentum=0.9),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=settings.batch),
        target_epsilon=settings.epsilon,
        target_delta=DELTA,
        epochs=settings.epochs,
        max_grad_norm=1.0,
        grad_sample_mode="ghost",
        criterion=nn.CrossEntropyLoss(),
    )
    for _ in range(settings.epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            criterion(private(images), labels).backward()
            optimizer.step()
    return model, engine.get_epsilon(DELTA)


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """In percent."""
    folded = vp.fold(model.eval())
    right = sum(int((folded(a).argmax(1) == b).sum()) for a, b in zip(x.split(2000), y.split(2000), strict=True))
    return 100 * right / len(x)


def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", help="where MNIST lies; else $VARPROP_DATA or the cache directory")
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--rate", type=float, default=0.2)
    settings = parser.parse_args()
    warnings.simplefilter("ignore")  # Opacus' notes on secure mode
    data = datasets.load("mnist", settings.root)
    train_x, test_x = ((images.float() / 255 - MEAN) / STD for images in (data.train_x, data.test_x))
    model, epsilon = train(train_x, data.train_y, settings)
    print(f"test accuracy {accuracy(model, test_x, data.test_y):.2f} %, epsilon {epsilon:.2f}, delta {DELTA:g}")


if __name__ == "__main__":
    main()
