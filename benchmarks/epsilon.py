"""What the epsilon beside a variance changes in training: the paper's network for MNIST from its random weights.

python -m benchmarks.epsilon [--data DIR] [--epochs 5] [--images 20000] [--seeds 3] [--json FILE]

With logistic units and torch's first weights almost all variance behind the deeper layers is epsilon. AP2 starts there
with the function of the random weights (``init="preserve"``) and is trained by Adam at every learning rate of the list,
with the epsilon of varprop and with one that is nothing beside any variance, on the same batches.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import varprop as vp

from .forms import ACTIVATIONS, RATES, images, network, options_of, train, write

EPSILONS = (1e-6, 1e-18)
READERS = ("layers", "fold.reference", "backends.torch")  # of `varprop.norm`, who import the constant


@contextmanager
def epsilon(value: float) -> Iterator[None]:
    """Fold with another epsilon."""
    with ExitStack() as stack:
        for reader in READERS:
            stack.enter_context(mock.patch(f"varprop.norm.{reader}.EPS", value))
        yield


def main() -> None:
    """Train all, print a line for each, and write JSON if asked."""
    options = options_of(__doc__, epochs=5)
    data = images(options.data, options.images)
    moments = vp.input_moments(data[0])
    runs: list[dict[str, float]] = []
    for value, rate, seed in itertools.product(EPSILONS, RATES, range(options.seeds)):
        with epsilon(value):
            model = vp.normalize(network(ACTIVATIONS["logistic"], seed), moments, form="paper", init="preserve")
            found = train(model, rate, seed, data, options.epochs)
        runs.append({"epsilon": value, "rate": rate, "seed": seed, **found})
        print(runs[-1], flush=True)
    for value, rate in itertools.product(EPSILONS, RATES):
        losses = [one["training loss"] for one in runs if (one["epsilon"], one["rate"]) == (value, rate)]
        print(f"epsilon {value:g}, rate {rate:g}: training loss {statistics.mean(losses):.4f}")
    write(options.json, "python -m benchmarks.epsilon", {"runs": runs})


if __name__ == "__main__":
    main()
