"""Fine-tuning begins with the function of the batch-norm network, whatever becomes of its batch norms."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from finetune_cifar import imported, options_of
from train_cifar import Run, parser

from tests.lab.data.test_datasets import write_cifar10

SMALL = ["--model", "tiny", "--width", "4", "--batch", "2", "--epochs", "2", "--lr", "0.01", "--images", "8"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With images, and a network that has seen those of the first five classes."""
    folder = tmp_path_factory.mktemp("data")
    write_cifar10(folder / "cifar-10-batches-bin", count=20)
    start = ["--norm", "batch", "--classes", "0", "4", "--held-out", "2", "--checkpoint", str(folder / "start.pt")]
    Run(parser().parse_args([*SMALL, *start, "--data", str(folder)])).train()
    return folder


def test_every_way_begins_with_the_same_function_and_trains(folder: Path) -> None:
    first, x = {}, torch.randn(4, 3, 32, 32)
    for how in ("live", "frozen", "analytic"):
        arguments = [str(folder / "start.pt"), "--how", how, "--held-out", "2", "--data", str(folder), *SMALL]
        run = Run(options_of(arguments), imported)
        with torch.no_grad():
            first[how] = run.model.eval()(x)
        run.model.train()
        assert 0 <= run.train()["held out"] <= 1
    torch.testing.assert_close(first["frozen"], first["live"])
    torch.testing.assert_close(first["analytic"], first["live"], rtol=1e-4, atol=1e-4)
