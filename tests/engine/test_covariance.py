"""Propagation with the covariance of all units, against Monte Carlo and where it is exact."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import varprop as vp

DRAWS = 100_000


class Net(nn.Module):
    """Two layers and a function of both."""

    def __init__(self, function: Callable[[Net, Tensor], Tensor], width: int = 20) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, width), nn.Linear(6, width), nn.Linear(width, 3)
        self.wide, self.function = nn.Linear(2 * width, 3), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def layers(*modules: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 20), *modules, nn.Linear(20, 3))


# Networks in which nothing but Gaussian values enters a function, so that covariances are exact.
EXACT: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(6, 3),
    "relu": lambda: layers(nn.ReLU()),
    "leaky relu": lambda: layers(nn.LeakyReLU(0.3)),
    "prelu": lambda: layers(nn.PReLU(20)),
    "tanh": lambda: layers(nn.Tanh()),
    "gelu": lambda: layers(nn.GELU()),
    "dropout before": lambda: layers(nn.Dropout(0.3), nn.ReLU()),
    "dropout behind": lambda: layers(nn.ReLU(), nn.Dropout(0.3)),
    "skip": lambda: Net(lambda net, x: net.last(net.first(x) + torch.relu(net.second(x)))),
    "two rectifiers": lambda: Net(lambda net, x: net.last(torch.relu(net.first(x)) - torch.relu(net.second(x)))),
    "two halves": lambda: Net(lambda net, x: net.wide(torch.cat([F.relu(h := net.first(x)), F.relu(-h)], -1))),
    "gated": lambda: Net(lambda net, x: net.last(net.first(x) * net.second(x))),
    "split": lambda: Net(lambda net, x: net.last(sum(net.wide.weight.new_ones(1) * h for h in _halves(net, x)))),
    "broadcast": lambda: Net(lambda net, x: net.last(torch.relu(net.first(x)[:, :1] + net.second(x)))),
}


def _halves(net: Net, x: Tensor) -> list[Tensor]:
    both = torch.cat([net.first(x), net.second(x)], -1)
    return [torch.relu(half) for half in both.chunk(2, -1)]


def correlated(count: int, shape: tuple[int, ...]) -> tuple[vp.Moments, Tensor]:
    """Moments of strongly correlated elements, and a factor of their covariance."""
    factor = torch.randn(count, count, dtype=torch.float64) / math.sqrt(count) + 0.3
    mean = 0.5 * torch.randn(1, *shape, dtype=torch.float64)
    return vp.Moments(mean, covariance=factor @ factor.mT), factor


def assert_as_drawn(model: nn.Module, moments: vp.Moments, factor: Tensor, result: vp.Moments) -> None:
    """Mean and covariance within five standard errors of those of real draws."""
    noise = torch.randn(DRAWS, factor.shape[0], dtype=torch.float64) @ factor.mT
    with torch.no_grad():
        values = model(moments.mean + noise.view(-1, *moments.shape[1:])).flatten(1)
    centred = values - values.mean(0)
    covariance = centred.mT @ centred / DRAWS
    spread = (centred.square().mT @ centred.square() / DRAWS - covariance.square()).sqrt()  # of a product of two
    assert result.covariance is not None
    mean_error = (values.mean(0) - result.mean.flatten()).abs() / (values.std(0) / math.sqrt(DRAWS))
    error = (covariance - result.covariance).abs() / (spread / math.sqrt(DRAWS))
    assert float(mean_error.max()) < 5
    assert float(error.max()) < 5


@pytest.mark.parametrize("name", EXACT)
def test_exact_where_functions_read_gaussian_values(name: str) -> None:
    torch.manual_seed(3)
    model = EXACT[name]().double()
    moments, factor = correlated(6, (6,))
    result = vp.propagate(model, moments, covariance="full")
    assert_as_drawn(model, moments, factor, result.output)
    reasons = {reason for entry in result.approximations for reason in entry.reasons}
    assert all("variances exact, covariances by eight terms of a series" in reason for reason in reasons)


def test_convolutions() -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(4)
    norm.running_mean, norm.running_var = torch.randn(4), torch.rand(4) + 0.5
    front = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), norm, nn.ReLU(), nn.AvgPool2d(2))
    model = nn.Sequential(front, nn.Conv2d(4, 2, 3), nn.Flatten(), nn.Linear(2, 2)).double().eval()
    moments, factor = correlated(72, (2, 6, 6))
    result = vp.propagate(model, moments, covariance="full")
    assert_as_drawn(model[:1], moments, factor, result["0"])
    assert result.output.covariance is not None
    assert result.output.covariance.shape == (2, 2)


def test_every_layer_has_a_symmetric_positive_covariance_with_the_variances_on_its_diagonal() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(32, 32), nn.ReLU())], nn.Linear(32, 4), nn.GELU())
    result = vp.propagate(model, vp.Moments(0.0, 1.0), (1, 32), covariance="full")
    for moments in result.by_module().values():
        matrix = moments.covariance
        assert matrix is not None
        assert torch.equal(matrix, matrix.mT)
        assert torch.equal(matrix.diagonal(), moments.var.flatten())
        assert float(torch.linalg.eigvalsh(matrix.double()).min()) > -1e-6 * float(matrix.diagonal().max())


def test_deep_network_is_far_closer_than_with_independent_units() -> None:
    torch.manual_seed(0)
    width = 64
    model = nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(width, width, bias=False), nn.ReLU())])
    for layer in model[::2]:
        nn.init.normal_(layer.weight, std=math.sqrt(2 / width))
    with torch.no_grad():
        drawn = model(torch.randn(DRAWS, width)).mean(0)
    full, diagonal = (vp.propagate(model, vp.Moments(0.0, 1.0), (1, width), covariance=c) for c in ("full", None))
    errors = [float((result.output.mean - drawn).square().mean()) for result in (full, diagonal)]
    assert errors[0] < 0.2 * errors[1]


def test_gradients() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    program, factor = vp.capture(model, (1, 3)), torch.randn(3, 3, dtype=torch.float64)

    def output(mean: Tensor, root: Tensor) -> tuple[Tensor, Tensor]:
        moments = vp.Moments(mean, covariance=root @ root.mT + torch.eye(3, dtype=torch.float64))
        result = vp.propagate(program, moments, covariance="full").output
        return result.mean, result.covariance

    inputs = (torch.randn(1, 3, dtype=torch.float64, requires_grad=True), factor.requires_grad_())
    assert torch.autograd.gradcheck(output, inputs)


def test_other_operations_count_to_first_order_and_say_so() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3), nn.Softmax(-1)).double()
    result = vp.propagate(model, vp.Moments(0.0, 1.0), (1, 6), covariance="full")
    first = "covariances to first order"
    marked = {entry.op for entry in result.approximations if any(first in reason for reason in entry.reasons)}
    assert marked == {"aten.layer_norm.default", "aten.softmax.int"}
    assert result.output.covariance is not None
    # probabilities add up to one, so every row of their covariance to little beside its variance
    rows = result.output.covariance.sum(1) / result.output.var.flatten()
    assert float(rows.abs().max()) < 0.3


def test_batch_norm_in_training_divides_by_constants() -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(6)
    nn.init.uniform_(norm.weight, -1, 1)
    moments, _ = correlated(6, (6,))
    output = vp.propagate(norm.double(), moments, covariance="full").output
    scale = norm.weight.detach() / (moments.var.flatten() + norm.eps).sqrt()
    torch.testing.assert_close(output.covariance, scale[:, None] * moments.covariance * scale)


def test_independent_inputs_stay_independent() -> None:
    model = Net(lambda net, x: net.first(x[:, :6]) * 2 + net.second(x[:, 6:]))
    result = vp.propagate(model, vp.Moments(0.0, 1.0), (1, 12), covariance="full")
    first, second = (layer.weight.detach() for layer in (model.first, model.second))
    torch.testing.assert_close(result.output.covariance, 4 * first @ first.mT + second @ second.mT)


def test_too_many_units_are_refused_with_the_number() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 33_000))
    with pytest.raises(vp.VarpropError, match=r"1\.1e\+09 numbers .* 1 alone has 33\D?000 units"):
        vp.propagate(model, vp.Moments(0.0, 1.0), (1, 2), covariance="full")


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match='covariance must be "full"'):
        vp.propagate(nn.Linear(2, 2), vp.Moments(0.0, 1.0), (1, 2), covariance="diagonal")  # type: ignore[arg-type]
    with pytest.raises(vp.VarpropError, match=r"vp.Tokens have no covariance"):
        vp.propagate(nn.Embedding(5, 2), vp.Tokens.uniform(5), (1, 3), covariance="full")
    with pytest.raises(ValueError, match="a row and a column for each of the 2 elements"):
        vp.Moments(torch.zeros(1, 2), covariance=torch.eye(3))
    with pytest.raises(ValueError, match=r"at \(0, 1\) it is 2"):
        vp.Moments(torch.zeros(1, 2), covariance=torch.tensor([[1.0, 2.0], [2.0, 1.0]]))
    with pytest.raises(TypeError, match="and not both"):
        vp.Moments(torch.zeros(1, 2), 1.0, covariance=torch.eye(2))


def test_moments_carry_their_covariance_along() -> None:
    moments = vp.Moments(torch.zeros(1, 2), covariance=torch.tensor([[1.0, 0.5], [0.5, 2.0]]))
    for twin in (moments.clone(), moments.detach(), copy.deepcopy(moments), pickle.loads(pickle.dumps(moments))):
        assert torch.equal(twin.covariance, moments.covariance)
    assert moments.to(torch.float64).covariance.dtype == torch.float64
    assert moments.var.tolist() == [[1.0, 2.0]]


def test_table_says_under_which_assumption_numbers_are_exact() -> None:
    result = vp.propagate(nn.Linear(2, 2), vp.Moments(0.0, 1.0), (1, 2), covariance="full")
    assert "exact if units are jointly Gaussian" in result.table()
    assert "exact if units are independent" in vp.propagate(nn.Linear(2, 2), vp.Moments(0.0, 1.0), (1, 2)).table()


def test_covariance_of_one_input_does_not_fit_a_batch() -> None:
    moments = vp.Moments(torch.zeros(1, 2), covariance=torch.eye(2))
    with pytest.raises(vp.CaptureError, match=r"covariance of one input .* the model sees \(4, 2\)"):
        vp.propagate(nn.Linear(2, 2), moments, (4, 2), covariance="full")


def test_dropout_of_everything_leaves_a_constant() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(1.0), nn.Tanh(), nn.Linear(3, 2))
    output = vp.propagate(model, vp.Moments(0.0, 1.0), (1, 3), covariance="full").output
    assert torch.equal(output.covariance, torch.zeros(2, 2))


def test_a_mixture_is_followed_component_by_component():
    """Exact for linear networks as one Gaussian is; behind a rectifier two far clusters are no Gaussian."""
    torch.manual_seed(0)
    labels = torch.arange(4000) % 2
    data = torch.randn(4000, 24, dtype=torch.float64) @ torch.randn(24, 24, dtype=torch.float64)
    data += 10 * (labels[:, None] - 0.5) * torch.randn(24, dtype=torch.float64)
    mixture = vp.input_moments(data, labels=labels, covariance=True)
    whole = vp.input_moments(data, covariance=True)
    torch.testing.assert_close(mixture.covariance, whole.covariance)
    torch.testing.assert_close(mixture.mean, whole.mean)
    layers = [nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)]
    model = nn.Sequential(*layers).double().requires_grad_(False)
    linear = vp.propagate(model[:1], mixture, covariance="full").output
    torch.testing.assert_close(linear.covariance, vp.propagate(model[:1], whole, covariance="full").output.covariance)
    truth = model(data).std(0, correction=0)
    off = {
        name: (vp.propagate(model, m, covariance="full").output.std / truth - 1).abs().max()
        for name, m in (("mixture", mixture), ("whole", whole))
    }
    assert off["mixture"] < 0.05
    assert off["whole"] > 0.15
    expected = vp.propagate(model, mixture, covariance="full").output
    report = vp.inspect(model, mixture, covariance="full")
    assert report.rows[-1].std.average == pytest.approx(float(expected.std.mean()), rel=1e-6)


def test_a_mixture_without_covariances_obeys_the_law_of_total_variance():
    components = [vp.Moments(torch.full((1, 2), m), v) for m, v in ((-1.0, 1.0), (3.0, 2.0))]
    mixture = vp.Mixture(components, [3, 1])
    torch.testing.assert_close(mixture.var, torch.full((1, 2), 0.75 * 1 + 0.25 * 2 + 3 / 16 * 16))
    results = [vp.propagate(nn.ReLU(), component).output for component in components]
    mean = 0.75 * results[0].mean + 0.25 * results[1].mean
    square = sum(p * (r.var + r.mean.square()) for p, r in zip((0.75, 0.25), results, strict=True))
    found = vp.propagate(nn.ReLU(), mixture).output
    torch.testing.assert_close(found.mean, mean)
    torch.testing.assert_close(found.var, square - mean.square())
    assert pickle.loads(pickle.dumps(mixture)).shares == [0.75, 0.25]


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: vp.Mixture([], []), "a positive share for each"),
        (lambda: vp.Mixture([vp.Moments(torch.zeros(1, 2), 1.0)], [-1]), "a positive share for each"),
        (lambda: vp.Mixture([vp.Moments(torch.zeros(1, n), 1.0) for n in (2, 3)], [1, 1]), "must have one shape"),
        (lambda: vp.input_moments(torch.zeros(4, 2), labels=torch.zeros(3)), "the class of every item"),
        (lambda: vp.input_moments([torch.zeros(4, 2)], labels=torch.zeros(4)), "the class of every item"),
    ],
)
def test_a_mixture_refuses_what_it_cannot_be(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()


@pytest.mark.parametrize(("model", "named"), [(nn.Conv2d(3, 64, 3), r"\(model\)"), (nn.MaxPool2d(8), "the input")])
def test_what_has_most_units_is_named(model, named):
    with pytest.raises(vp.VarpropError, match=f"{named} alone has"):
        vp.propagate(model, vp.Moments(0.0, 1.0), example=(1, 3, 128, 128), covariance="full")
