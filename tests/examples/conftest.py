"""Images for the examples."""

from __future__ import annotations

import pytest

from tests.lab.data.test_datasets import write_cifar10


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a few in the layout of CIFAR-10."""
    folder = tmp_path_factory.mktemp("data")
    write_cifar10(folder / "cifar-10-batches-bin")
    return str(folder)
