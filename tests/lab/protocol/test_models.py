import pytest
import torch
from torch import nn

import varprop as vp
from varprop.norm.fold.layout import EPS
from varprop_lab import protocol


@pytest.mark.parametrize(
    ("name", "shape", "layers"),
    [("digits", (1, 8, 8), 4), ("mnist", (1, 28, 28), 7), ("cifar10", (3, 32, 32), 9), ("rows", (1, 28, 28), 3)],
)
def test_every_network_takes_its_images_and_gives_ten_scores(name, shape, layers):
    model = protocol.build(name, seed=0)
    assert model(torch.rand(2, *shape)).shape == (2, 10)
    assert sum(isinstance(m, (nn.Linear, nn.Conv2d)) for m in model.modules()) == layers


def test_hidden_layers_of_the_paper():
    linear = [m for m in protocol.build("mnist", 0) if isinstance(m, nn.Linear)]
    assert [m.out_features for m in linear] == [20] * 6 + [10]
    convolutions = [m for m in protocol.build("cifar10", 0) if isinstance(m, nn.Conv2d)]
    assert [m.out_channels for m in convolutions] == [96, 96, 96, 192, 192, 192, 192, 192, 10]
    assert [m.kernel_size[0] for m in convolutions] == [3] * 7 + [1, 1]
    assert [m.stride[0] for m in convolutions] == [1, 1, 2, 1, 1, 2, 1, 1, 1]


def test_no_activation_after_the_last_convolution():
    last = list(protocol.build("cifar10", 0))[-2:]
    assert isinstance(last[0], nn.Conv2d) and isinstance(last[1], protocol.GlobalAverage)


def test_activation_of_the_paper():
    x = torch.tensor([-2.0, 0.0, 3.0])
    assert torch.allclose(protocol.LeakyRelu()(x), torch.tensor([-0.06, 0.0, 3.09]))


def test_rows_are_read_from_top_to_bottom():
    model = protocol.RowByRow(columns=4, rows=2, units=3, classes=2).double()
    images = torch.rand(5, 1, 6, 4, dtype=torch.float64)
    state = torch.tanh(model.input(images[:, 0, :2].flatten(1)))
    for row in (2, 4):
        state = torch.tanh(model.input(images[:, 0, row : row + 2].flatten(1)) + model.state(state))
    assert torch.allclose(model(images), model.output(state))


def test_weights_depend_on_the_seed_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, second, other = (protocol.build("digits", seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first[1].weight, second[1].weight)
    assert not torch.equal(first[1].weight, other[1].weight)


def test_a_factory_that_makes_no_module_is_refused():
    with pytest.raises(TypeError, match=r"must return an nn\.Module, not int"):
        protocol.build(lambda: 3, seed=0)


def test_epsilon_outweighs_the_variance_of_deep_logistic_layers_with_random_weights():
    """What docs/experiments.md says of it."""
    torch.manual_seed(0)
    found = vp.propagate(protocol.logistic(784, 6), vp.Moments(0.13, 0.067), example=(1, 784))
    shares = [float((EPS / (found[str(2 * n)].var.detach() + EPS)).mean()) for n in range(1, 7)]
    assert shares == pytest.approx([0.0007, 0.04, 0.67, 0.99, 1.0, 1.0], abs=0.05)
