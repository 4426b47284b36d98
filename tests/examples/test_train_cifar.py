"""The example trains with every normalization, and goes on from its checkpoint as if it had not stopped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from examples.train_cifar import Run, clip_for, parser

SMALL = ["--model", "tiny", "--width", "4", "--held-out", "4", "--batch", "4", "--epochs", "2", "--lr", "0.01"]


def run(data: str, *arguments: str) -> Run:
    return Run(parser().parse_args(["--data", data, *SMALL, *arguments]))


def losses(run: Run) -> list[float]:
    return [epoch["loss"] for epoch in run.history]


@pytest.mark.parametrize("norm", ["batch", "analytic", "renorm", "group", "group16-ws", "layer", "weight", "none"])
def test_every_normalization(data: str, norm: str) -> None:
    result = run(data, "--norm", norm).train()
    assert torch.tensor([epoch["loss"] for epoch in result["history"]]).isfinite().all()
    assert 0 <= result["held out"] <= 1 and result["clip"] == (16.0 if norm in ("analytic", "weight", "none") else 0.0)


def test_the_bound_of_the_gradient_is_scaled_as_its_noise() -> None:
    assert [clip_for("analytic", batch) for batch in (256, 64, 4)] == [2.0, 4.0, 16.0]


def test_it_goes_on_from_its_checkpoint(data: str, tmp_path: Path) -> None:
    whole, stopped = run(data), run(data)
    whole.train()
    stopped.history.append({"epoch": 1, "loss": stopped.epoch(0)})
    stopped.save(tmp_path / "run.pt")
    resumed = run(data, "--checkpoint", str(tmp_path / "run.pt"))
    resumed.train()
    assert losses(resumed) == losses(whole)
    assert all(torch.equal(a, b) for a, b in zip(resumed.model.parameters(), whole.model.parameters(), strict=True))


def test_the_test_images_are_looked_at_only_if_nothing_is_held_out(data: str) -> None:
    assert "test" in run(data, "--held-out", "0").train()
    assert "test" not in run(data).train()
