"""The inspector on trained networks, whose units are far from independent."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import varprop as vp


@pytest.fixture(scope="module")
def trained() -> tuple[nn.Module, torch.Tensor]:
    """A network trained on four classes of correlated Gaussian data, and the data."""
    torch.manual_seed(0)
    x = torch.randn(600, 16) @ torch.randn(16, 16) / 4
    labels = (x @ torch.randn(16, 4)).argmax(1)
    model = nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 4))
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), labels).backward()
        optimizer.step()
    return model.eval(), x


def test_std_of_every_layer_is_near_the_measured_one(trained: tuple[nn.Module, torch.Tensor]) -> None:
    model, x = trained
    full = vp.inspect(model, vp.input_moments(x, covariance=True), check=x, samples=600, covariance="full")
    diagonal = vp.inspect(model, vp.input_moments(x), check=x, samples=600)
    assert [finding.kind for finding in diagonal.findings if finding.severity != "note"] == ["disagreement"]
    assert not [finding for finding in full.findings if finding.severity != "note"]
    result = vp.propagate(model, vp.input_moments(x, covariance=True), covariance="full")
    for index, layer in enumerate(model):
        with torch.no_grad():
            x = layer(x)
        if isinstance(layer, nn.Linear):
            ratios = result[str(index)].std.flatten() / x.std(0, correction=0)
            assert 0.9 < float(ratios.median()) < 1.1


def test_report_says_that_covariances_were_followed() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    moments = vp.input_moments(torch.randn(50, 4), covariance=True)
    report = vp.inspect(model, moments, covariance="full")
    assert report.to_dict()["covariance"] == "full"
    assert "exact if units are jointly Gaussian" in " ".join(report.text().split())
    assert "independent and Gaussian" in " ".join(vp.inspect(model, moments).text().split())
    with pytest.raises(ValueError, match='covariance must be "full"'):
        vp.inspect(model, moments, covariance="some")  # type: ignore[arg-type]


def test_random_inputs_have_the_covariance_of_the_data() -> None:
    torch.manual_seed(0)
    shared = torch.randn(1000, 1)
    moments = vp.input_moments(shared + 0.1 * torch.randn(1000, 32), covariance=True)
    model = nn.Linear(32, 1, bias=False)
    nn.init.ones_(model.weight)
    report = vp.inspect(model, moments, check="gaussian", covariance="full")
    (row,) = [row for row in report.rows if row.kind != "module" or row.path == ""][:1]
    assert abs(row.measured["std"]["value"] / (32 * float(shared.std())) - 1) < 0.15
