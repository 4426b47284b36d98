"""Variances of weights from other libraries: predictions against draws from the posteriors of these libraries."""

import importlib.util

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import varprop as vp
from varprop.predict import posteriors

from .test_predict import assert_like_draws, with_drawn_parameters


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3))


def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 4, generator=generator)
    return x, (x[:, :3].argmax(1)).long()


def fit(model, optimizer, steps=60):
    x, y = data()
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        yield


def test_snapshots_of_sgd():
    """SWAG-diagonal: Welford's sums are mean and variance over the snapshots."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
    states = [{k: v.clone() for k, v in model.state_dict().items()} for _ in fit(model, optimizer)][20:]
    means, variances = posteriors.from_snapshots(iter(states))
    values = torch.stack([state["2.weight"] for state in states])
    torch.testing.assert_close(means["2.weight"], values.mean(0))
    torch.testing.assert_close(variances["2.weight"], values.var(0, correction=0))
    model.load_state_dict(means)
    x = torch.randn(12, 4)
    found = vp.predict(model, x, parameter_var=variances)
    assert_like_draws(found, with_drawn_parameters(model, x, variances))


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: posteriors.from_snapshots([{}]), "at least two snapshots"),
        (lambda: posteriors.from_snapshots([network().state_dict(), {"a": torch.ones(1)}]), "Snapshot 2 has other"),
        (lambda: posteriors.from_snapshots([nn.Linear(2, 1).state_dict()] * 3), "share their memory"),
        (lambda: posteriors.from_laplace(network()), "hessian_structure='diag'"),
        (lambda: posteriors.from_ivon(torch.optim.SGD(network().parameters()), network()), "reads ivon.IVON"),
        (lambda: posteriors.from_mean_field(network()), "no mean-field layer"),
    ],
)
def test_bad_input_gets_one_sentence(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()


@pytest.mark.uncertainty
@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_diagonal_laplace(subset):
    if importlib.util.find_spec("torchvision"):  # which torchmetrics imports where it is there
        importlib.import_module("tests.torchvision_on_cpu")
    laplace = importlib.import_module("laplace")
    model = network()
    for _ in fit(model, torch.optim.Adam(model.parameters(), 0.01)):
        pass
    fitted = laplace.Laplace(model, "classification", subset_of_weights=subset, hessian_structure="diag")
    fitted.fit(DataLoader(TensorDataset(*data()), 50))
    variances = posteriors.from_laplace(fitted)
    assert set(variances) == {n for n, _ in model.named_parameters() if subset == "all" or n.startswith("4.")}
    x = torch.randn(12, 4)
    if subset == "all":  # drawn by laplace-torch itself
        start = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        draws = []
        with torch.no_grad():
            for sample in fitted.sample(1500):
                nn.utils.vector_to_parameters(sample, model.parameters())
                draws.append(model(x))
        nn.utils.vector_to_parameters(start, model.parameters())
    else:
        draws = [*with_drawn_parameters(model, x, variances)]
    assert_like_draws(vp.predict(model, x, parameter_var=variances), torch.stack(draws))


@pytest.mark.uncertainty
def test_ivon():
    ivon = importlib.import_module("ivon")
    model, (x, y) = network(), data()
    optimizer = ivon.IVON(model.parameters(), lr=0.1, ess=len(x), hess_init=0.5, weight_decay=1e-2)
    for _ in range(60):
        with optimizer.sampled_params(train=True):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
    draws = []
    with torch.no_grad():
        for _ in range(1500):  # drawn by IVON itself
            with optimizer.sampled_params():
                draws.append(model(x[:12]))
    found = vp.predict(model, x[:12], parameter_var=posteriors.from_ivon(optimizer, model))
    assert_like_draws(found, torch.stack(draws))


@pytest.mark.uncertainty
@pytest.mark.parametrize("kind", ["Reparameterization", "Flipout"])
def test_mean_field_layers_of_bayesian_torch(kind):
    converter = importlib.import_module("bayesian_torch.models.dnn_to_bnn")
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 6, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(54, 16), nn.Tanh(), nn.Linear(16, 3)]
    model = nn.Sequential(*layers)
    settings = {"prior_mu": 0.0, "prior_sigma": 1.0, "posterior_mu_init": 0.0, "posterior_rho_init": -3.0,
                "type": kind, "moped_enable": True, "moped_delta": 0.1}  # fmt: skip
    converter.dnn_to_bnn(model, settings)
    plain, variances = posteriors.from_mean_field(model)
    assert {type(layer) for layer in plain} == {type(layer) for layer in layers}
    assert len(variances) == 6
    x = torch.randn(8, 1, 8, 8)
    with torch.no_grad():
        draws = torch.stack([model(x) for _ in range(1500)])  # drawn by bayesian-torch itself
    assert_like_draws(vp.predict(plain, x, parameter_var=variances), draws)


@pytest.mark.uncertainty
def test_mean_field_layers_of_torch_uncertainty():
    if importlib.util.find_spec("torchvision"):
        importlib.import_module("tests.torchvision_on_cpu")
    layers = pytest.importorskip("torch_uncertainty.layers.bayesian", exc_type=ImportError)
    torch.manual_seed(0)
    model = nn.Sequential(layers.BayesConv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), layers.BayesLinear(144, 3))
    plain, variances = posteriors.from_mean_field(model)
    assert set(variances) == {"0.weight", "0.bias", "3.weight", "3.bias"}
    x = torch.randn(4, 1, 8, 8)
    with torch.no_grad():
        draws = torch.stack([model(x) for _ in range(1500)])  # drawn by torch-uncertainty itself
    assert_like_draws(vp.predict(plain, x, parameter_var=variances), draws)
