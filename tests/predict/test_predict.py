"""Error bars in one pass against exact covariances where they are known, and against real draws elsewhere."""

import copy
import pickle
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import varprop as vp
from varprop.predict import api

DRAWS = 3000


@torch.no_grad()
def drawn(model, x):
    """Outputs under dropout, the rest in evaluation mode: (draws, batch, ...)."""
    model.eval()
    for module in model.modules():
        module.train(isinstance(module, nn.modules.dropout._DropoutNd))
    return model(x.repeat(DRAWS, *[1] * (x.ndim - 1))).unflatten(0, (DRAWS, len(x)))


@torch.no_grad()
def with_drawn_parameters(model, x, parameter_var):
    """Outputs of a model in evaluation mode with parameters drawn anew for every draw."""
    model.eval()
    parameters = dict(model.named_parameters())
    many = {
        name: parameters[name] + var**0.5 * torch.randn(DRAWS, *parameters[name].shape)
        for name, var in parameter_var.items()
    }
    return torch.vmap(lambda drawn: torch.func.functional_call(model, {**parameters, **drawn}, (x,)))(many)


def assert_like_draws(prediction, draws, std=0.05, mean=0.1):
    """Std within `std` in the median and twice that for 80 % of outputs, means within `mean` of a std."""
    ratio = (prediction.std / draws.std(0)).flatten()
    off = ((prediction.mean - draws.mean(0)) / draws.std(0)).abs()
    assert abs(ratio.median() - 1) < std, ratio.median()
    assert ((ratio - 1).abs() < 2 * std).float().mean() >= 0.8
    assert off.median() < mean


def mlp(p=0.3, width=64, outputs=5, act=nn.ReLU):
    torch.manual_seed(0)
    hidden = [nn.Linear(width, width), act(), nn.Dropout(p)]
    return nn.Sequential(nn.Linear(8, width), act(), nn.Dropout(p), *hidden, nn.Linear(width, outputs))


def test_a_linear_network_is_exact():
    """Var[W D x] = W diag(p/(1-p) x²) Wᵀ, and input noise goes through W."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Dropout(0.25), nn.Linear(6, 4)).double(), torch.randn(3, 6, dtype=torch.float64)
    weight = model[1].weight.detach()
    expected = torch.einsum("oi,bi,pi->bop", weight, x.square() / 3, weight)
    found = vp.predict(model, x)
    torch.testing.assert_close(found.covariance, expected)
    torch.testing.assert_close(found.mean, model.eval()(x).detach())
    noise = torch.rand(6, dtype=torch.float64)
    found = vp.predict(model[1], x, input_var=noise)
    torch.testing.assert_close(found.covariance, (weight * noise @ weight.T).expand(3, -1, -1))
    torch.testing.assert_close(found.input_variance.sum(-1), found.var)


def test_noise_that_a_skip_shares_is_counted_once():
    """x + x is 2x: the variance is four times that of x, not twice as for independent terms."""

    class Twice(nn.Module):
        def forward(self, x):
            x = F.dropout(x, 0.5, training=self.training)
            return x + x

    x = torch.ones(2, 3, dtype=torch.float64)
    found = vp.predict(Twice(), x, random=lambda path, module: True)
    torch.testing.assert_close(found.var, torch.full_like(x, 4.0))


def test_covariances_between_outputs_are_those_of_draws():
    model, x = mlp(), torch.randn(4, 8)
    found, draws = vp.predict(model, x), drawn(model, x)
    centred = draws - draws.mean(0)
    expected = torch.einsum("rbi,rbj->bij", centred, centred) / (DRAWS - 1)
    scale = draws.std(0).unsqueeze(-1) * draws.std(0).unsqueeze(-2)
    assert ((found.covariance - expected) / scale).abs().max() < 0.1


@pytest.mark.parametrize("act", [nn.ReLU, nn.GELU, nn.Tanh, nn.Hardswish])
def test_dropout_in_an_mlp(act):
    model, x = mlp(act=act), torch.randn(16, 8)
    assert_like_draws(vp.predict(model, x), drawn(model, x))


def convolutional(last_pool):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.2), nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(), nn.MaxPool2d(2), nn.Dropout2d(0.2), nn.Conv2d(16, 16, 3), nn.ReLU(), last_pool,
        nn.Flatten(), nn.Linear(16, 4),
    )  # fmt: skip


def test_dropout_in_a_convolutional_network_with_pooling():
    model, x = convolutional(nn.AvgPool2d(2)), torch.randn(6, 1, 8, 8)
    found = vp.predict(model, x)
    assert_like_draws(found, drawn(model, x))
    assert found.reliable.all()


def test_positions_of_a_channel_drop_together():
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    found = vp.predict(nn.Sequential(nn.Dropout2d(0.5), nn.AvgPool2d(4), nn.Flatten()), x)
    torch.testing.assert_close(found.var, x.mean((2, 3)).square())


def test_dropout_before_an_activation():
    """The activation reads a mixture; its correlation with what was before the dropout stays."""
    torch.manual_seed(0)
    hidden = [nn.Linear(64, 64), nn.Dropout(0.2), nn.ReLU(), nn.Linear(64, 64), nn.Dropout(0.2), nn.GELU()]
    model, x = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), *hidden, nn.Linear(64, 3)), torch.randn(16, 8)
    assert_like_draws(vp.predict(model, x), drawn(model, x))


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_maxima_over_what_drops_out(p):
    """The first of some values that stays; a second layer reads what varies already."""
    torch.manual_seed(0)
    first = [nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Dropout(p), nn.MaxPool2d(2)]
    second = [nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Dropout(p), nn.MaxPool2d(2, padding=1)]
    model, x = nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(72, 3)), torch.randn(8, 1, 12, 12)
    found = vp.predict(model, x)
    assert_like_draws(found, drawn(model, x), mean=0.15)  # which one is the largest varies, too
    assert found.reliable.all()
    one = nn.Sequential(nn.ReLU(), nn.Dropout(p), nn.MaxPool2d((1, 3)), nn.Flatten()).train()
    values = torch.tensor([[[[3.0, 1.0, 2.0]]]], dtype=torch.float64)
    kept = torch.tensor([1 - p, p * (1 - p), p * p * (1 - p)], dtype=torch.float64)
    largest = torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64) / (1 - p)
    exact = (kept * largest.square()).sum() - (kept * largest).sum().square()
    torch.testing.assert_close(vp.predict(one, values).var, exact.view(1, 1), rtol=1e-6, atol=0)


def test_maxima_over_what_drops_out_in_windows_that_overlap():
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Dropout(0.3), nn.MaxPool2d(3, 1, 1), nn.Flatten(), nn.Linear(800, 3)]
    model, x = nn.Sequential(*layers), torch.randn(8, 1, 12, 12)
    assert_like_draws(vp.predict(model, x), drawn(model, x))


def test_channels_drop_from_a_branch_beside_a_constant():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.drop, self.last = nn.Conv2d(3, 3, 3, padding=1), nn.Dropout2d(0.2), nn.Linear(48, 2)

        def forward(self, x):
            return self.last(torch.relu(x + self.drop(self.conv(x))).flatten(1))

    torch.manual_seed(0)
    model, x = Block(), torch.randn(8, 3, 4, 4)
    assert_like_draws(vp.predict(model, x), drawn(model, x))


@pytest.mark.parametrize("order", [[nn.ReLU(), nn.Dropout2d(0.3)], [nn.Dropout(0.3), nn.ReLU()]])
def test_maxima_over_what_drops_out_otherwise_are_doubtful(order):
    """Zero or not is no Gaussian: the largest of some such values is not what is computed for it."""
    x = torch.randn(4, 1, 8, 8)
    ends = nn.Conv2d(1, 4, 3), nn.Sequential(nn.Flatten(), nn.Linear(36, 3))
    assert not vp.predict(nn.Sequential(ends[0], *order, nn.MaxPool2d(2), ends[1]), x).reliable.any()
    assert vp.predict(nn.Sequential(ends[0], nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.3), ends[1]), x).reliable.all()


RANKS = {
    "amax": lambda h: h.amax((2, 3)),
    "max": lambda h: h.flatten(2).max(2).values,
    "max of rectified": lambda h: h.relu().flatten(2).max(2).values,
    "adaptive": lambda h: F.adaptive_max_pool2d(h, 1).flatten(1),
    "over one axis": lambda h: F.max_pool1d(h.flatten(2), 3, 2).mean(2),
    "median": lambda h: h.flatten(2).median(2).values,
    "least": lambda h: h.flatten(2).mT.min(1).values,
    "norm": lambda h: h.norm(dim=(2, 3)),
    "std": lambda h: h.flatten(2).std(2),
}


@pytest.mark.parametrize("rank", RANKS)
def test_ranks_and_norms_over_whole_axes(rank):
    class Ranked(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = nn.Conv2d(2, 8, 3), nn.Linear(8, 3)

        def forward(self, x):
            return self.head(RANKS[rank](self.layer(x)))

    torch.manual_seed(0)
    model, x = Ranked(), torch.randn(6, 2, 6, 6)
    with torch.no_grad():
        repeated = x.repeat(DRAWS, 1, 1, 1)
        draws = model(repeated + 0.5 * torch.randn_like(repeated)).unflatten(0, (DRAWS, len(x)))
    found = vp.predict(model, x, input_var=0.25)
    assert_like_draws(found, draws, mean=0.2)
    assert not found.linearized


@pytest.mark.parametrize("mask", [lambda x: ~(x.abs() == 0), lambda x: x != 0, lambda x: x > 0, lambda x: ~(x > 0)])
def test_masks_that_the_model_takes_from_a_random_input(mask):
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 3)

        def forward(self, x):
            return (self.layer(x) * mask(x.sum(-1, keepdim=True))).mean(1)

    torch.manual_seed(0)
    model, x = Masked(), torch.randn(6, 5, 8)
    with torch.no_grad():
        repeated = x.repeat(DRAWS, 1, 1)
        draws = model(repeated + 0.3 * torch.randn_like(repeated)).unflatten(0, (DRAWS, len(x)))
    assert_like_draws(vp.predict(model, x, input_var=0.09), draws)


def test_the_place_of_the_largest_is_doubtful():
    class Place(nn.Module):
        def forward(self, x):
            return x.argmax(-1).float()

    torch.manual_seed(0)
    model, x = nn.Sequential(mlp(p=0.2, outputs=3), Place()), torch.randn(6, 8)
    assert not vp.predict(model, x).reliable.any()


def test_the_largest_of_a_whole_image_that_drops_out_is_doubtful():
    torch.manual_seed(0)
    head = [nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(16, 3)]
    model = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Dropout(0.3), *head)
    assert not vp.predict(model, torch.randn(6, 1, 8, 8)).reliable.any()


def test_noise_that_is_small_beside_a_signal_is_reliable_and_large_noise_that_units_share_is_not():
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.ReLU())]
    model, x = nn.Sequential(*layers, nn.Linear(32, 5)), torch.randn(16, 32)
    assert vp.predict(model, x, input_var=1e-4).reliable.all()
    assert not vp.predict(model, x, input_var=4.0).reliable.any()
    assert vp.predict(model[-1], x, input_var=100.0).reliable.all()  # a linear network has nothing that could bend


def test_reliable_predictions_of_a_deep_network_are_right_for_the_most_part():
    """Deep and narrow: with much noise none counts as reliable, with little most do."""
    torch.manual_seed(0)
    layers = [layer for index in range(6) for layer in (nn.Linear(32 if index else 8, 32), nn.ReLU())]
    model, x = nn.Sequential(*layers, nn.Linear(32, 3)), torch.randn(32, 8)
    for layer in layers[::2]:
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    truth = model(x + 0.1 * torch.randn(1000, *x.shape)).detach()
    found = vp.predict(model, x, input_var=0.01)
    off = ((found.var.sum(1) / truth.var(0).sum(1)).sqrt() - 1).abs()
    assert found.reliable.float().mean() > 0.5
    assert (off[found.reliable] < 0.1).float().mean() > 0.75
    assert off[found.reliable].median() < 0.05
    assert not vp.predict(model, x, input_var=1.5**2).reliable.any()


class Attention(nn.Module):
    def __init__(self, width=16, p=0.1):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 32), nn.GELU(), nn.Dropout(p), nn.Linear(32, width)
        )
        self.dropout = nn.Dropout(p)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(self.dropout(x))).unflatten(-1, (3, 2, -1)).movedim(-3, 0).transpose(-2, -3)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(-2, -3).flatten(-2)
        x = x + self.dropout(self.out(mixed))
        return x + self.mlp(x)


def test_dropout_in_a_transformer():
    torch.manual_seed(0)
    model, x = nn.Sequential(Attention(), Attention(), nn.Flatten(), nn.Linear(96, 3)), torch.randn(8, 6, 16)
    found = vp.predict(model, x)
    assert_like_draws(found, drawn(model, x))
    assert "aten.scaled_dot_product_attention" in found.linearized.values()


def test_dropout_of_attention_weights_is_counted():
    """With equal keys the weights are 1/n, and dropout of them is that of an average."""

    class Averages(nn.Module):
        def forward(self, x):
            return F.scaled_dot_product_attention(
                torch.zeros_like(x), torch.zeros_like(x), x, dropout_p=0.5 if self.training else 0.0
            )[..., 0, :]

    x = torch.randn(2, 1, 4, 3, dtype=torch.float64)
    found = vp.predict(Averages(), x, random=lambda path, module: True, input_var=0.0)
    torch.testing.assert_close(found.var, x[:, 0].square().sum(1) / 16)


@pytest.mark.parametrize("bias_only", [False, True])
def test_random_weights_of_a_convolutional_network(bias_only):
    """A convolution's weights are shared by all positions: their noise is common to them."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2, groups=2),
        nn.BatchNorm2d(8), nn.GELU(), nn.Flatten(), nn.Linear(72, 3),
    )  # fmt: skip
    names = [name for name, _ in model.named_parameters() if not bias_only or name.endswith("bias")]
    parameter_var, x = {name: 0.03**2 for name in names}, torch.randn(8, 2, 8, 8)
    found = vp.predict(model, x, parameter_var=parameter_var)
    assert_like_draws(found, with_drawn_parameters(model, x, parameter_var))
    assert {name for name, kind, _ in found.sources() if kind == "parameter"} == set(names)


class Tokens(nn.Module):
    """Linear layers and a gain that all tokens share, and their average."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 16), nn.Linear(16, 16), nn.Linear(16, 3)
        self.gain = nn.Parameter(torch.ones(16))

    def forward(self, x):
        return self.head((self.second(self.first(x)) * self.gain).mean(1))


def linear_convolutions():
    convolutions = [nn.Conv2d(2, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16)]
    return nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 3))


@pytest.mark.parametrize(("network", "shape"), [(linear_convolutions, (2, 6, 6)), (Tokens, (12, 4))])
def test_strong_noise_of_parameters_that_positions_share(network, shape):
    """Products of their noise with that of what they read are common to all positions, and do not average out."""
    torch.manual_seed(0)
    model, x = network(), torch.randn(8, *shape)
    for noise in (0.03, 1.0):
        parameter_var = {
            name: noise * float(p.detach().var() if p.ndim > 1 else 0.3)
            for name, p in model.named_parameters()
            if name.endswith(("weight", "gain"))
        }
        found = vp.predict(model, x, parameter_var=parameter_var)
        assert_like_draws(found, with_drawn_parameters(model, x, parameter_var))
        assert bool(found.reliable.all()) is (noise < 0.1)
    again = vp.predict(model, x, parameter_var=parameter_var)
    torch.testing.assert_close(again.covariance, found.covariance)


def test_random_weights_of_embeddings_norms_and_tied_layers():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.norm, self.layer = nn.Embedding(6, 8), nn.LayerNorm(8), nn.Linear(8, 8)
            self.gain = nn.Parameter(torch.ones(8))

        def forward(self, tokens):
            x = self.layer(torch.tanh(self.layer(self.norm(self.table(tokens)) * self.gain)))
            return x.mean(1)

    torch.manual_seed(0)
    model, x = Tied(), torch.randint(6, (8, 5))
    parameter_var = {name: 0.05**2 for name, _ in model.named_parameters()}
    assert_like_draws(vp.predict(model, x, parameter_var=parameter_var), with_drawn_parameters(model, x, parameter_var))


def test_a_tied_parameter_is_random_by_each_of_its_names():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(6, 8), nn.Linear(8, 6)
            self.head.weight = self.table.weight  # by which torch.export reads both

        def forward(self, tokens):
            return self.head(torch.tanh(self.table(tokens)).mean(1))

    torch.manual_seed(0)
    model, x = Tied(), torch.randint(6, (4, 5))
    truth = with_drawn_parameters(model, x, {"table.weight": 0.01, "head.bias": 0.01})
    for name in ("table.weight", "head.weight"):
        assert_like_draws(vp.predict(model, x, parameter_var={name: 0.01, "head.bias": 0.01}), truth)
    both = {"table.weight": 0.01, "head.weight": torch.full((6, 8), 0.01)}
    assert vp.predict(model, x, parameter_var=both).std.isfinite().all()
    with pytest.raises(ValueError, match=r"gives 'head.weight' another variance than a parameter that is tied to it"):
        vp.predict(model, x, parameter_var={**both, "head.weight": 0.02})


class Gained(nn.Module):
    """A layer, and a parameter that a function reads beside it."""

    def __init__(self, read, shape=(8,)):
        super().__init__()
        self.layer, self.gain, self.read = nn.Linear(8, 8), nn.Parameter(torch.full(shape, 0.7)), read

    def forward(self, x):
        return self.layer(self.read(x, self.gain))


GAINS = {
    "one number": (lambda x, gain: torch.tanh(x * gain), ()),
    "two readers": (lambda x, gain: torch.tanh(x) * gain - x * gain, (8,)),
    "twice": (lambda x, gain: x * gain * gain, (8,)),
    "subtracted": (lambda x, gain: torch.tanh(x - gain), (8,)),
    "subtracted from": (lambda x, gain: torch.tanh(gain - x), (8,)),
    "scale of a norm of what is fixed": (lambda x, gain: F.layer_norm(x, (8,), gain), (8,)),
    "scale of a batch norm of what is fixed": (
        lambda x, gain: F.batch_norm(x, torch.zeros(8), torch.ones(8), gain), (8,)
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", GAINS)
def test_random_parameters_beside_what_is_fixed(case):
    torch.manual_seed(0)
    read, shape = GAINS[case]
    model, x, parameter_var = Gained(read, shape), torch.randn(8, 8), {"gain": 0.01, "layer.bias": 1e-4}
    assert_like_draws(vp.predict(model, x, parameter_var=parameter_var), with_drawn_parameters(model, x, parameter_var))


@pytest.mark.parametrize(
    ("read", "op"),
    [
        (lambda x, gain: x * (2 * gain), "mul"),
        (lambda x, gain: x * gain + x * (1 - gain), "rsub"),
        (lambda x, gain: x * (gain + 1), "add"),
        (lambda x, gain: torch.addcmul(x, x, gain), "addcmul"),
        (lambda x, gain: torch.einsum("bi,i->bi", x, gain), "einsum"),
        (lambda x, gain: F.layer_norm(x, (8,), gain, gain), "layer_norm"),
    ],
)
def test_random_parameters_that_are_read_otherwise_are_refused(read, op):
    parameter_var = {"gain": 0.04, "layer.bias": 1e-4}
    with pytest.raises(vp.VarpropError, match=f"parameter_var names 'gain', which aten.{op} in .* leave this one out"):
        vp.predict(Gained(read), torch.randn(4, 8), parameter_var=parameter_var)


@pytest.mark.parametrize(("noise", "share"), [(0.5, 0.6), (1.5, 0.85)])
def test_draws_mend_what_is_not_linear(noise, share):
    """Input noise bends the network; derivatives at 16 draws are unbiased and tighter than the draws alone."""
    model, x = mlp(p=0.0), torch.randn(64, 8)
    truth = model.eval()(x + noise * torch.randn(DRAWS, *x.shape)).detach()
    torch.manual_seed(1)
    found = vp.predict(model, x, input_var=noise**2, draws=16)
    by_derivatives = (found.std / truth.std(0)).log().square().mean().sqrt()
    alone = (truth[:16].std(0) / truth.std(0)).log().square().mean().sqrt()
    assert by_derivatives < share * alone
    assert abs((found.var / truth.var(0)).mean() - 1) < 0.05
    assert bool(found.reliable.float().mean() > 0.9) is (noise < 1)


def test_a_few_draws_of_a_noisy_image_are_enough():
    """Derivatives at 8 draws tell more of the covariance than 64 outputs, whose std are off by 9 %."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.MaxPool2d(2)]
    model, x = nn.Sequential(*layers, nn.Flatten(), nn.Linear(400, 5)), torch.randn(8, 2, 12, 12)
    truth = torch.stack([model(x + 0.5 * torch.randn_like(x)).detach() for _ in range(1500)])
    found = vp.predict(model, x, input_var=0.25, draws=8)
    assert (found.std / truth.std(0)).log().square().mean().sqrt() < (0.5 / 63) ** 0.5
    assert_like_draws(found, truth, mean=0.2)


def test_derivatives_at_draws_are_exact_in_a_linear_network():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4)).double(), torch.randn(3, 6, dtype=torch.float64)
    found = vp.predict(model, x, input_var=0.3, draws=4)
    torch.testing.assert_close(found.covariance, vp.predict(model, x, input_var=0.3).covariance)
    torch.testing.assert_close(found.mean, model(x).detach())


def test_draws_of_dropout_and_weights_agree_with_the_analytic_result():
    model, x = mlp(), torch.randn(16, 8)
    parameter_var = {name: 0.02**2 for name, _ in model.named_parameters()}
    analytic = vp.predict(model, x, parameter_var=parameter_var)
    found = vp.predict(model, x, parameter_var=parameter_var, draws=64)
    assert found.draws.shape == (64, 16, 5)
    assert (found.std / analytic.std).log().abs().median() < 0.05


def test_batches_of_a_captured_program_and_chosen_directions():
    model, x = mlp(), torch.randn(10, 8)
    model.eval()
    for module in model:
        module.train(isinstance(module, nn.Dropout))
    program = vp.capture(model, x[:4])
    whole, parts = vp.predict(model, x), vp.predict(program, x)
    torch.testing.assert_close(parts.covariance, whole.covariance)
    margin = torch.tensor([[1.0, -1.0, 0.0, 0.0, 0.0]])
    found, cov = vp.predict(model, x, outputs=margin), whole.covariance
    torch.testing.assert_close(found.var[:, 0], cov[:, 0, 0] + cov[:, 1, 1] - 2 * cov[:, 0, 1], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(vp.predict(model, x, outputs=[3, -1]).mean, whole.mean[:, [3, 4]])


def with_dropout(model):
    model.eval()
    for module in model.modules():
        module.train(isinstance(module, nn.Dropout))
    return model


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch's own use of torch
def test_compiled_predictions_are_the_same_and_follow_the_parameters():
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(64, 5)]
    model, x = (
        with_dropout(nn.Sequential(*layers, nn.GELU(), nn.Linear(5, 3)).double()),
        torch.randn(4, 2, 6, 6).double(),
    )
    program, settings = vp.capture(model, x), {"input_var": 0.1, "outputs": [0, 2]}
    for _ in range(2):
        plain, compiled = vp.predict(program, x, **settings), vp.predict(program, x, **settings, compile=True)
        for name in ("mean", "covariance", "input_variance", "diagonal_var", "reliable"):
            torch.testing.assert_close(getattr(compiled, name), getattr(plain, name), rtol=1e-9, atol=1e-12)
        with torch.no_grad():
            model[-1].weight.mul_(2)
        x = x.flip(0)
    (compiled,) = (
        fact for kind, fact in program.facts.items() if getattr(kind, "__name__", "") == "CompiledPredictions"
    )
    assert len(compiled.functions) == 1
    assert not copy.deepcopy(compiled).functions


def test_what_cannot_be_compiled_is_said_in_one_sentence():
    with pytest.raises(vp.VarpropError, match="cannot be compiled; leave out compile=True: noise of a fixed seed"):
        vp.predict(
            vp.capture(nn.Conv2d(1, 2, 3), x := torch.randn(2, 1, 5, 5)),
            x,
            input_var=1.0,
            parameter_var={"weight": 0.1},
            compile=True,
        )
    with pytest.raises(ValueError, match="compile=True needs a captured program"):
        vp.predict(nn.Dropout(), torch.randn(2, 4), compile=True)


def test_captured_programs_are_predicted_in_the_modes_that_are_advised():
    layers = [nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.3), nn.Linear(6, 2)]
    model, x = nn.Sequential(*layers), torch.randn(5, 4)
    with pytest.raises(ValueError, match="batch norm '1' was captured in training mode"):
        vp.predict(vp.capture(model, x), x)  # where nothing is random yet
    with pytest.raises(ValueError, match="or capture the model with these in training mode"):
        vp.predict(vp.capture(model.eval(), x), x)
    program = vp.capture(with_dropout(model), x)
    torch.testing.assert_close(vp.predict(program, x).std, vp.predict(model, x).std)
    images = with_dropout(nn.Sequential(nn.Conv2d(1, 3, 3), nn.InstanceNorm2d(3), nn.Dropout(0.3)))
    assert vp.predict(vp.capture(images, y := torch.randn(2, 1, 5, 5)), y, outputs=[0]).std.isfinite().all()


def test_the_model_is_left_as_it_was():
    model, x = mlp().train(), torch.randn(4, 8)
    before, modes = {k: v.clone() for k, v in model.state_dict().items()}, [m.training for m in model.modules()]
    state = torch.get_rng_state()
    vp.predict(model, x)
    assert [m.training for m in model.modules()] == modes
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_a_program_that_was_used_may_be_pickled():
    program, x = vp.capture(with_dropout(mlp()), torch.randn(4, 8)), torch.randn(4, 8)
    expected = vp.predict(program, x).covariance
    for again in (pickle.loads(pickle.dumps(program)), copy.deepcopy(program)):
        torch.testing.assert_close(vp.predict(again, x).covariance, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("draws", [0, 64])
def test_noise_of_inputs_and_weights_in_half_precision(dtype, draws):
    def predicted(model, x, **settings):
        torch.manual_seed(1)
        return vp.predict(model, x, input_var=0.01, draws=draws, **settings)

    model, x = convolutional(nn.AvgPool2d(2)), torch.randn(4, 1, 8, 8)
    half = copy.deepcopy(model).to(dtype)
    for settings in ({}, {"random": []}, {"parameter_var": {"0.weight": 1e-3, "12.weight": 1e-3}}):
        expected, found = predicted(model, x, **settings), predicted(half, x.to(dtype), **settings)
        assert found.std.dtype is torch.float32
        assert ((found.std / expected.std) - 1).abs().max() < 0.05


def test_threads_may_predict_by_one_model():
    model, x = mlp(), torch.randn(4, 8)
    model[2].eval()
    with ThreadPoolExecutor(6) as threads:
        found = list(threads.map(lambda _: vp.predict(model, x).covariance, range(12)))
    assert [module.training for module in model] == [True, True, False, *[True] * 4]
    assert all(torch.equal(covariance, found[0]) for covariance in found)


def test_predictions_may_be_looked_for_in_collections():
    first, second = (vp.Prediction(torch.zeros(2, 2), torch.zeros(2, 2, 2)) for _ in range(2))
    assert first in [second, first]
    assert first not in {second}


def test_shares_add_up_and_intervals_and_probabilities_fit():
    model, x = mlp(outputs=3), torch.randn(6, 8)
    found = vp.predict(model, x, input_var=0.01)
    assert sum(share for _, _, share in found.sources()) == pytest.approx(1, abs=1e-5)
    assert {kind for _, kind, _ in found.sources()} == {"input", "dropout", "relu"}
    torch.testing.assert_close(sum(share.variance for share in found.shares), found.var)
    low, high = found.interval(0.6827)
    torch.testing.assert_close((high - low) / 2, found.std, rtol=1e-3, atol=0)
    normal = torch.distributions.MultivariateNormal(found.mean, found.covariance)
    expected = torch.softmax(normal.sample((200_000,)), -1).mean(0)
    assert (found.probabilities() - expected).abs().max() < 0.005
    assert "share of the variance" in repr(found)


def test_only_named_modules_are_random():
    model, x = mlp(), torch.randn(4, 8)
    found = vp.predict(model, x, random="2")
    assert [name for name, kind, _ in found.sources() if kind == "dropout"] == ["2"]


class Nothing(nn.Module):
    def forward(self, x):
        return None


BAD = {
    "nothing": (lambda m, x: vp.predict(nn.Linear(8, 2), x), "Nothing that reaches the output is random"),
    "negative": (lambda m, x: vp.predict(m, x, input_var=-1.0), "input_var must be finite and not negative"),
    "negative weight": (lambda m, x: vp.predict(m, x, parameter_var={"0.bias": -1.0}), r"\['0.bias'\] must be finite"),
    "shape": (lambda m, x: vp.predict(m, x, input_var=torch.ones(3)), "does not broadcast"),
    "name": (lambda m, x: vp.predict(m, x, parameter_var={"0.w": 1.0}), "'0.w', which the model does not use"),
    "weight": (lambda m, x: vp.predict(m, x, parameter_var={"0.bias": torch.ones(3)}), r"parameter_var\['0.bias'\]"),
    "index": (lambda m, x: vp.predict(m, x, outputs=[7]), "a sample has 5 outputs"),
    "direction": (lambda m, x: vp.predict(m, x, outputs=torch.ones(1, 4)), "Directions must have shape"),
    "many": (lambda m, x: vp.predict(nn.Sequential(nn.Dropout(), nn.Linear(8, 300)), x), "choose some by outputs="),
    "no index": (lambda m, x: vp.predict(m, x, outputs="a"), "outputs takes flat indices"),
    "no outputs": (lambda m, x: vp.predict(m, x, outputs=[]), "outputs takes flat indices"),
    "module": (lambda m, x: vp.predict(m, x, random="9"), "random names '9', which is no module"),
    "no variance": (lambda m, x: vp.predict(m, x, input_var="a"), "input_var takes a number or a tensor, not str"),
    "tokens": (lambda m, x: vp.predict(m, x.long(), input_var=0.1), "input_var needs inputs of a floating point"),
    "draws": (lambda m, x: vp.predict(m, x, draws=2), "at least 4"),
    "part of a draw": (lambda m, x: vp.predict(m, x, draws=8.0), "whole number"),
    "no mapping": (lambda m, x: vp.predict(m, x, parameter_var=0.1), "takes variances by names of parameters"),
    "random": (lambda m, x: vp.predict(m, x, random=3), "random takes paths of modules or a function"),
    "a kind of module": (lambda m, x: vp.predict(m, x, random=nn.Dropout), "random takes paths of modules"),
    "a module": (lambda m, x: vp.predict(m, x, random=m), "random takes paths of modules"),
    "nothing returned": (lambda m, x: vp.predict(Nothing(), x), "this one returns none"),
    "captured": (lambda m, x: vp.predict(vp.capture(m, x), x, random="2"), "a captured program keeps its modes"),
    "mask": (lambda m, x: vp.predict(m, x, outputs=[True, False]), "outputs takes flat indices"),
    "no direction": (lambda m, x: vp.predict(m, x, outputs=torch.ones(0, 5)), "Directions must have shape"),
    "beyond memory": (
        lambda m, x: vp.predict(nn.Sequential(m, nn.Linear(5, 10**5)), x, outputs=range(10**5)), "ask for 10737 at a"
    ),
    "complex": (lambda m, x: vp.predict(m, x, input_var=torch.ones(8) * 1j), "input_var takes a number or a tensor"),
    "sparse": (lambda m, x: vp.predict(m, x.to_sparse()), "a dense tensor"),
    "no samples": (lambda m, x: vp.predict(nn.Sequential(m, nn.Flatten(0)), x), "with samples along its first axis"),
    "output": (lambda m, x: vp.predict(m, x).sources(5), "There is no output 5"),
    "output by name": (lambda m, x: vp.predict(m, x).sources("0"), "There is no output '0'"),
    "probability": (lambda m, x: vp.predict(m, x).interval(90), "between 0 and 1"),
    "empty": (lambda m, x: vp.predict(m, x[:0]), "a batch of inputs"),
    "wrong dtype": (
        lambda m, x: vp.predict(vp.capture(m, x), x.double(), input_var=0.1),
        "captured with 'x' of torch.float32, and it has torch.float64 now",
    ),
    "changed dtype": (
        lambda m, x: (program := vp.capture(m, x), m.double(), vp.predict(program, x, input_var=0.1)),
        "captured with '0.weight' of torch.float32, and it has torch.float64 now",
    ),
    "wrong sample": (lambda m, x: vp.predict(vp.capture(m, x), x[:, :4]), "captured with samples of shape"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_gets_one_sentence(case):
    call, sentence = BAD[case]
    with pytest.raises(ValueError, match=sentence):
        call(mlp(), torch.randn(4, 8))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_an_input_of_another_dtype_than_the_model_is_refused(dtype):
    with pytest.raises(vp.CaptureError, match=f"could not be run on x of {dtype}"):
        vp.predict(mlp(), torch.ones(4, 8, dtype=dtype))


def test_a_function_is_no_model():
    with pytest.raises(vp.CaptureError, match=r"A model is a torch.nn.Module, not a function"):
        vp.predict(lambda x: x, torch.ones(2, 3))


@pytest.mark.parametrize(("name", "model"), [("0.running_mean", nn.BatchNorm1d(4)), ("0.weight_ih_l0", nn.GRU(4, 3))])
def test_a_random_parameter_that_is_not_followed_is_named(name, model):
    class First(nn.Sequential):
        def forward(self, x):
            result = self[0](x)
            return result[0] if isinstance(result, tuple) else result

    with pytest.raises(vp.VarpropError, match=f"parameter_var names '{name}', which aten.*leave this one out"):
        vp.predict(
            First(model), torch.randn(5, 4) if "running" in name else torch.randn(2, 5, 4), parameter_var={name: 0.1}
        )


def test_of_several_random_parameters_the_statistic_is_named():
    torch.manual_seed(0)
    with pytest.raises(vp.VarpropError, match=r"parameter_var names '1.running_mean', which"):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        vp.predict(model, torch.randn(5, 4), parameter_var={"1.weight": 0.1, "1.running_mean": 0.1})


ODD_USE = {
    "half precision": lambda m, x: vp.predict(m.half(), x.half()),
    "autocast": lambda m, x: within(torch.autocast("cpu", torch.bfloat16), m, x),
    "no_grad": lambda m, x: within(torch.no_grad(), m, x),
    "inference_mode": lambda m, x: within(torch.inference_mode(), m, x),
    "a tensor of inference_mode": lambda m, x: vp.predict(m, made_in_inference_mode(x)),
    "channels last": lambda m, x: vp.predict(
        m.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
    ),
    "not contiguous": lambda m, x: vp.predict(m, x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)),
    "one at a time": lambda m, x: api._joined([vp.predict(m, one) for one in x.split(1)]),
    "double precision": lambda m, x: vp.predict(m.double(), x.double()),
    "gradients": lambda m, x: vp.predict(m, x.clone().requires_grad_()),
}


def within(context, model, x):
    with context:
        return vp.predict(model, x)


def made_in_inference_mode(x):
    with torch.inference_mode():
        return x.clone()


@pytest.mark.parametrize("use", ODD_USE)
def test_odd_use_gives_the_same_prediction(use):
    model, x = convolutional(nn.AvgPool2d(2)), torch.randn(6, 1, 8, 8)
    expected, found = vp.predict(model, x), ODD_USE[use](model, x)
    tolerance = 5e-3 if use == "half precision" else 1e-5
    scale = expected.covariance.abs().max()
    assert found.covariance.dtype is (torch.float64 if use == "double precision" else torch.float32)
    assert (found.covariance - expected.covariance).abs().max() < tolerance * scale
    assert not found.covariance.requires_grad


@pytest.mark.parametrize("outputs", [slice(1, 3), range(1, 3), torch.tensor([0, 1, 1, 0, 0]).bool(), [-4, 2]])
def test_outputs_by_indices_slices_and_masks(outputs):
    model, x = mlp(), torch.randn(4, 8)
    torch.testing.assert_close(vp.predict(model, x, outputs=outputs).mean, vp.predict(model, x).mean[:, 1:3])


def test_an_output_without_axes_of_its_own_and_a_dropout_of_everything():
    model, x = nn.Sequential(mlp(outputs=1), nn.Flatten(0)), torch.randn(4, 8)
    torch.testing.assert_close(vp.predict(model, x).var, vp.predict(model[0], x).var)
    found = vp.predict(nn.Sequential(nn.Dropout(1.0), nn.Linear(8, 2)), x, draws=4)
    torch.testing.assert_close(found.var, torch.zeros(4, 2))


def test_an_operation_without_a_rule_is_named():
    class Inverse(nn.Module):
        def forward(self, x):
            return torch.linalg.inv(F.dropout(x, 0.1, self.training)).flatten(1)

    with pytest.raises(vp.MissingRule, match="linalg_inv"):
        vp.predict(Inverse(), torch.eye(3).expand(2, 3, 3), random=lambda path, module: True)


def test_too_many_outputs_for_memory_names_what_fits(monkeypatch):
    monkeypatch.setattr(api, "MEMORY", 30_000)
    model, x = mlp(), torch.randn(8, 8)
    with pytest.raises(ValueError, match=r"(\d+) outputs fit, or (\d+) samples at a time") as raised:
        vp.predict(model, x)
    outputs, samples = map(int, re.findall(r"(\d+) (?:outputs fit|samples at a time\.)", str(raised.value)))
    assert 1 <= outputs < 5
    assert vp.predict(model, x, outputs=list(range(outputs))).mean.shape == (8, outputs)
    assert vp.predict(model, x[:samples]).mean.shape == (samples, 5)
    with pytest.raises(ValueError, match="outputs fit"):
        vp.predict(model, x, outputs=list(range(outputs + 1)))
