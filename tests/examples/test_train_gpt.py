"""The example learns with every normalization from the same text, and its analytic form is folded the fast way."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from examples.train_gpt import Run, parse, windows

import varprop as vp

SMALL = [
    *("--layers", "2", "--width", "32", "--heads", "2", "--context", "16", "--batch", "8", "--bytes", "300000"),
    *("--steps", "30", "--every", "15", "--warmup", "5", "--windows", "32"),
]
ASKED = ["--residual", "0.5", "--logits", "0.1", "--width", "64"]


def run(*arguments: str) -> Run:
    return Run(parse([*SMALL, *arguments]))


@pytest.fixture(scope="module")
def analytic() -> Run:
    """One that has not been trained."""
    return run("--norm", "analytic", *ASKED)


@pytest.mark.parametrize(
    "norm",
    ["analytic", *(pytest.param(norm, marks=pytest.mark.slow) for norm in ("layer", "rms", "dyt", "derf", "none"))],
)
def test_every_normalization_learns(norm: str) -> None:
    first, last = run("--norm", norm, "--lr", "0.003").train()["history"]
    assert last["loss"] < first["loss"] - 0.05 and last["validation"] < 5.5  # log 256 is 5.55


def test_equal_seeds_see_the_same_text() -> None:
    runs = run("--norm", "layer"), run("--norm", "dyt"), run("--norm", "layer", "--seed", "1")
    draws = [torch.randint(1000, (8,), generator=one.order) for one in runs]
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])
    assert runs[0].text.hash == runs[1].text.hash and torch.equal(runs[0].text.judged, runs[2].text.judged)


def test_validation_and_test_are_other_bytes_than_those_trained_on() -> None:
    judged, tested = run("--norm", "none").text, run("--norm", "none", "--test").text
    assert len(judged.train) + len(judged.judged) + len(tested.judged) == 300_000
    assert not torch.equal(judged.judged, tested.judged) and torch.equal(judged.train, tested.train)


def test_a_run_that_diverges_ends_with_no_loss() -> None:
    result = run("--norm", "none", "--lr", "1e30", "--clip", "1e30").train()
    assert result["held out"] is None and len(result["history"]) == 1


def test_all_layers_are_folded_together(analytic: Run) -> None:
    layers = vp.fold_report(analytic.model).layers
    assert len(layers) == 2 * 4 + 2 and all(layer.how == "together" and layer.centred for layer in layers)


def test_first_scales_are_what_is_asked_for(analytic: Run) -> None:
    for path, scale in {"head": 0.1, "blocks.1.proj": 0.5, "blocks.0.down": 0.5, "blocks.0.up": 1.0}.items():
        found = analytic.model.get_submodule(path).scale
        assert torch.equal(found, torch.full_like(found, scale))


@torch.no_grad()
def test_the_first_size_of_weights_changes_no_output(analytic: Run) -> None:
    other = run("--norm", "analytic", *ASKED, "--weights", "0.2")
    x = F.one_hot(windows(analytic.text.judged, torch.arange(8), 16)[0], 256).float()
    assert other.model.head.weight.std() == pytest.approx(0.2, rel=1e-3)
    assert torch.allclose(analytic.model(x), other.model(x), atol=1e-5)


@torch.no_grad()
def test_predicted_spreads_are_those_of_text(analytic: Run) -> None:
    """Before attention within a few per cent; behind it, where tokens count as alike, at most what is predicted."""
    found: dict[str, float] = {}
    for path, layer in analytic.model.named_modules():
        if hasattr(layer, "scale"):
            layer.register_forward_hook(
                lambda layer, x, out, path=path: found.update(
                    {path: float((out / layer.scale).flatten(0, 1).var(0).mean().sqrt())}
                )
            )
    x, _ = windows(analytic.text.train, torch.arange(0, 200_000, 200), 16)
    analytic.model(F.one_hot(x, 256).float())
    assert found["embedding"] == pytest.approx(1, abs=0.08) and found["blocks.0.qkv"] == pytest.approx(1, abs=0.1)
    assert 0.3 < found["blocks.0.proj"] < 1 and all(0.6 < found[path] < 1.05 for path in found if path[-4:] != "proj")


@pytest.mark.slow
def test_the_normalized_gpt_compiles() -> None:
    """As far as Inductor, whose C++ compiler takes minutes here."""
    eager, compiled = run("--norm", "analytic"), run("--norm", "analytic")
    compiled.call = torch.compile(compiled.model, backend="aot_eager", fullgraph=True)
    assert compiled.steps(3) == pytest.approx(eager.steps(3), rel=1e-4)
