"""Noise of every kind that networks draw, against real draws: right, doubtful, or refused in one sentence."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import varprop as vp

from .test_predict import assert_like_draws

DRAWS = 2000


class Network(nn.Module):
    """A function of its modules and an input."""

    def __init__(self, forward, **modules):
        super().__init__()
        self.f = forward
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, x):
        return self.f(self, x)


class DropPath(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.draw = draw

    def forward(self, x):
        return x * self.draw(x, (len(x), *[1] * (x.ndim - 1))) if self.training else x


def heads(m, x, count=2):
    return m.qkv(x).unflatten(-1, (3, count, -1)).movedim(-3, 0).transpose(-2, -3)


def fused(m, x, **settings):
    attended = F.scaled_dot_product_attention(*heads(m, x), dropout_p=0.3 if m.training else 0.0, **settings)
    return m.out(attended.transpose(-2, -3).flatten(-2)).mean(1)


def written_out(m, x):
    q, k, v = heads(m, x)
    return m.out((m.drop(torch.softmax(q @ k.mT / 8**0.5, -1)) @ v).transpose(-2, -3).flatten(-2)).mean(1)


def grouped(m, x):
    q, (k, v) = m.q(m.drop(x)).unflatten(-1, (4, -1)).transpose(1, 2), heads(m, m.drop(x))[:2]
    p = 0.2 if m.training else 0.0
    attended = F.scaled_dot_product_attention(q, k[..., :4], v[..., :4], dropout_p=p, is_causal=True, enable_gqa=True)
    return m.out(attended.transpose(1, 2).flatten(2)).mean(1)


def hidden(change):
    """One hidden layer whose values are changed."""
    return lambda: Network(
        lambda m, x: m.out(change(m, torch.relu(m.enter(x)))), enter=nn.Linear(8, 32), out=nn.Linear(32, 3)
    )


def attention(forward, **more):
    return lambda: Network(forward, qkv=nn.Linear(16, 48), out=nn.Linear(16, 3), drop=nn.Dropout(0.2), **more)


def whole(module, last=16, read=lambda m, x: m.inner(x, x, x)[0].mean(1)):
    return lambda: Network(lambda m, x: m.out(read(m, x)), inner=module(), out=nn.Linear(last, 3))


def recurrent(cell, layers=2, last=16, **settings):
    make = lambda: getattr(nn, cell)(8, 16, layers, dropout=0.3, batch_first=True, **settings)  # noqa: E731
    return whole(make, last, lambda m, x: m.inner(x)[0].mean(1))


def images(*layers):
    return lambda: nn.Sequential(nn.Conv2d(2, 16, 3), *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 3))


def deep(dimensions, dropout):
    convolution = getattr(nn, f"Conv{dimensions}d")
    between = [nn.ReLU(), dropout, convolution(64, 16, 3), nn.ReLU(), nn.Flatten()]
    return lambda: nn.Sequential(convolution(2, 64, 3), *between, nn.Linear(16 * 2**dimensions, 3))


def residual(draw):
    class Block(nn.Sequential):
        def forward(self, x):
            return x + super().forward(x)

    def block():
        return Block(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), DropPath(draw))

    return lambda: nn.Sequential(nn.Linear(8, 32), *[block() for _ in range(3)], nn.Flatten(), nn.Linear(160, 3))


def encoder():
    return nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True)


def zoneout(m, x):
    state = torch.zeros(len(x), 16)
    for step in x.unbind(1):
        new = torch.tanh(m.enter(step) + m.again(state))
        keeps = torch.bernoulli(torch.full_like(state, 0.2)) if m.training else 0.2
        state = keeps * state + (1 - keeps) * new
    return m.out(state)


def thirds():
    def forward(m, x):
        h = torch.relu(m.enter(x))
        return m.out(torch.where(m.one(m.drop(h)) > m.two(m.drop(h)), m.three(m.drop(h)), 0.5))

    layers = {name: nn.Linear(64, 64) for name in ("one", "two", "three")}
    return Network(forward, enter=nn.Linear(8, 64), drop=nn.Dropout(0.2), out=nn.Linear(64, 3), **layers)


TOKENS, VECTORS, SEQUENCES, IMAGES = (6, 5, 16), (6, 8), (6, 5, 8), (6, 2, 7, 7)
EVERYTHING = {"random": lambda path, module: True}
CASES = {
    "attention": (attention(fused), TOKENS, EVERYTHING),
    "causal attention of what varies": (
        attention(lambda m, x: fused(m, m.drop(x), is_causal=True)), TOKENS, EVERYTHING
    ),
    "grouped queries": (attention(grouped, q=nn.Linear(16, 16)), TOKENS, EVERYTHING),
    "attention written out": (attention(written_out), TOKENS, {}),
    "nn.MultiheadAttention": (whole(lambda: nn.MultiheadAttention(16, 2, 0.3, batch_first=True)), TOKENS, {}),
    "nn.MultiheadAttention without weights": (
        whole(
            lambda: nn.MultiheadAttention(16, 2, 0.3, batch_first=True),
            read=lambda m, x: m.inner(x, x, x, need_weights=False)[0].mean(1),
        ), TOKENS, {},
    ),
    "nn.MultiheadAttention, sequence first": (
        whole(
            lambda: nn.MultiheadAttention(16, 2, 0.3), read=lambda m, x: m.inner(*[x.transpose(0, 1)] * 3)[0].mean(0)
        ), TOKENS, {},
    ),
    "nn.TransformerEncoderLayer": (whole(encoder, read=lambda m, x: m.inner(x).mean(1)), TOKENS, {}),
    "nn.LSTM": (recurrent("LSTM"), SEQUENCES, {}),
    "nn.LSTM, both directions": (recurrent("LSTM", 3, 32, bidirectional=True), SEQUENCES, {}),
    "nn.GRU": (recurrent("GRU"), SEQUENCES, {}),
    "nn.RNN": (recurrent("RNN"), SEQUENCES, {}),
    "nn.RNN, rectified": (recurrent("RNN", nonlinearity="relu"), SEQUENCES, {}),
    "the last state of a recurrent layer": (
        whole(lambda: nn.LSTM(8, 16, 2, dropout=0.3, batch_first=True), read=lambda m, x: m.inner(x)[1][0][-1]),
        SEQUENCES, {},
    ),
    "zoneout": (
        lambda: Network(zoneout, enter=nn.Linear(8, 16), again=nn.Linear(16, 16), out=nn.Linear(16, 3)),
        SEQUENCES, EVERYTHING,
    ),
    "F.dropout": (hidden(lambda m, h: F.dropout(h, 0.3, m.training)), VECTORS, {}),
    "F.alpha_dropout": (hidden(lambda m, h: F.alpha_dropout(h, 0.2, m.training)), VECTORS, {}),
    "nn.AlphaDropout": (
        lambda: nn.Sequential(
            nn.Linear(8, 32), nn.SELU(), nn.AlphaDropout(0.2), nn.Linear(32, 32), nn.SELU(), nn.AlphaDropout(0.2),
            nn.Linear(32, 3),
        ), VECTORS, {},
    ),
    "nn.FeatureAlphaDropout of vectors": (
        lambda: nn.Sequential(nn.Linear(8, 32), nn.SELU(), nn.FeatureAlphaDropout(0.2), nn.Linear(32, 3)), VECTORS, {},
    ),
    "nn.FeatureAlphaDropout": (images(nn.SELU(), nn.FeatureAlphaDropout(0.2)), IMAGES, {}),
    "nn.FeatureAlphaDropout of what varies": (
        images(nn.SELU(), nn.Dropout(0.2), nn.Conv2d(16, 16, 3), nn.SELU(), nn.FeatureAlphaDropout(0.2)), IMAGES, {},
    ),
    "nn.Dropout1d": (deep(1, nn.Dropout1d(0.2)), (6, 2, 6), {}),
    "nn.Dropout2d": (deep(2, nn.Dropout2d(0.2)), (6, 2, 6, 6), {}),
    "nn.Dropout3d": (deep(3, nn.Dropout3d(0.2)), (6, 2, 6, 6, 6), {}),
    "nn.Dropout2d before a rectifier": (images(nn.Dropout2d(0.2), nn.ReLU()), IMAGES, {}),
    "nn.Dropout2d of what varies, before GELU": (
        images(nn.ReLU(), nn.Dropout(0.2), nn.Conv2d(16, 16, 3), nn.Dropout2d(0.3), nn.GELU()), IMAGES, {},
    ),
    "rows of tokens": (
        lambda: Network(
            lambda m, x: m.out(m.drop(m.enter(x).mT).mT.mean(1)),
            enter=nn.Linear(8, 32), drop=nn.Dropout1d(0.3), out=nn.Linear(32, 3),
        ), SEQUENCES, {},
    ),
    "drop path by bernoulli_": (residual(lambda x, shape: x.new_empty(shape).bernoulli_(0.8) / 0.8), SEQUENCES, {}),
    "drop path by rand": (residual(lambda x, shape: (0.8 + torch.rand(shape)).floor() / 0.8), SEQUENCES, {}),
    "gaussian dropout": (
        hidden(lambda m, h: h * (1 + 0.3 * torch.randn_like(h) if m.training else 1)), VECTORS, EVERYTHING
    ),
    "one mask for all steps": (
        hidden(lambda m, h: (h * F.dropout(h.new_ones(len(h), 1, 32), 0.3, m.training)).mean(1)), SEQUENCES, {},
    ),
    "a quotient": (
        lambda: Network(
            lambda m, x: m.out(m.top(m.drop(x)) / (1 + m.below(m.drop(x)).exp())),
            top=nn.Linear(8, 32), below=nn.Linear(8, 32), drop=nn.Dropout(0.2), out=nn.Linear(32, 3),
        ), VECTORS, {},
    ),
    "shares of a sum": (
        hidden(lambda m, h: (w := F.softplus(F.dropout(h, 0.3, m.training))) / w.sum(1, keepdim=True)), VECTORS, {},
    ),
    "the larger of two": (
        hidden(lambda m, h: torch.maximum(F.dropout(h, 0.2, m.training), F.dropout(h.flip(1), 0.2, m.training))),
        VECTORS, {},
    ),
    "one of two by the sign of a third": (thirds, VECTORS, {}),
    "a mask by comparison": (
        hidden(lambda m, h: h * (torch.rand_like(h) > 0.3) / 0.7 if m.training else h), VECTORS, EVERYTHING
    ),
    "a mask by where": (
        hidden(lambda m, h: torch.where(torch.rand_like(h) > 0.3, h / 0.7, 0 * h) if m.training else h),
        VECTORS, EVERYTHING,
    ),
    "nn.RReLU": (
        lambda: nn.Sequential(nn.Linear(8, 32), nn.RReLU(0.1, 0.9), nn.Linear(32, 3)), VECTORS, {"random": "1"}
    ),
    "nn.RReLU of what varies": (
        lambda: nn.Sequential(
            nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 32), nn.RReLU(0.1, 0.9), nn.Linear(32, 3)
        ), VECTORS, {"random": ["2", "4"]},
    ),
}  # fmt: skip


CURVED = ("zoneout",)  # what bends its steps counts as independent


def made(case):
    torch.manual_seed(0)
    make, shape, settings = CASES[case]
    return make().eval(), torch.randn(shape), settings  # as trained networks are


@torch.no_grad()
def drawn(model, x):
    """Outputs with every draw at work; the models have no statistics that training would change."""
    outputs = [model.train()(x.repeat(100, *[1] * (x.ndim - 1))).unflatten(0, (100, -1)) for _ in range(DRAWS // 100)]
    return torch.cat(outputs)


@pytest.mark.parametrize("case", CASES)
def test_noise_is_that_of_draws(case):
    """Std of single outputs, and of their sum and differences: noise that outputs share is counted as such."""
    model, x, settings = made(case)
    found, draws = vp.predict(model, x, **settings), drawn(model, x)
    off = 0.08 if case in CURVED else 0.05
    assert_like_draws(found, draws, off)
    turned = torch.tensor([[1.0, 1.0, 1.0], [1.0, -1.0, 0.0], [0.0, 1.0, -1.0]])
    assert_like_draws(vp.predict(model, x, outputs=turned, **settings), draws @ turned.T, 1.2 * off)


@pytest.mark.parametrize(
    "case", ["attention", "nn.LSTM", "nn.FeatureAlphaDropout", "nn.Dropout2d before a rectifier", "nn.AlphaDropout"]
)
def test_draws_agree_with_the_analytic_result(case):
    model, x, settings = made(case)
    found, analytic = vp.predict(model, x, draws=64, **settings), vp.predict(model, x, **settings)
    assert (found.std / analytic.std).log().abs().median() < 0.12  # 64 draws alone leave 9 %


def test_the_kind_of_noise_inside_operations_is_dropout():
    for case in ("attention", "nn.LSTM"):
        model, x, settings = made(case)
        (_, kind, share), *others = vp.predict(model, x, **settings).sources()
        assert kind == "dropout" and share > 0.998
        assert {kind for _, kind, share in others if share > 1e-6} <= {"recurrent"}


def test_a_dropout_of_everything_inside_an_operation():
    torch.manual_seed(0)
    model, x = recurrent("LSTM")(), torch.randn(SEQUENCES)
    model.inner.dropout = 1.0
    found = vp.predict(model, x)
    torch.testing.assert_close(found.var, torch.zeros(6, 3))
    torch.testing.assert_close(found.mean, model.train()(x).detach(), atol=1e-5, rtol=1e-4)


def test_functional_dropout_is_at_work_and_nothing_else_of_its_module():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.out = nn.BatchNorm1d(8), nn.Linear(8, 2)

        def forward(self, x):
            return self.out(F.dropout(self.norm(x), 0.3, self.training))

    torch.manual_seed(0)
    model, x = Own(), torch.randn(5, 8)
    found = vp.predict(model, x)
    before = x / (1 + 1e-5) ** 0.5
    expected = before.square() @ model.out.weight.detach().square().T * (0.3 / 0.7)
    torch.testing.assert_close(found.var, expected)
    with pytest.raises(ValueError, match="Nothing that reaches the output is random"):
        vp.predict(model, x, random=[])


def test_functional_dropout_that_cannot_be_captured_is_named():
    class Layers(nn.Module):
        def forward(self, x):
            if self.training and torch.rand([]) < 0.1:
                return x
            return F.dropout(x, 0.3, self.training)

    with pytest.raises(vp.CaptureError, match=r"calls a dropout that is idle in evaluation.*by random="):
        vp.predict(nn.Sequential(nn.Linear(8, 8), Layers()), torch.randn(5, 8))


def test_places_drawn_at_random_are_refused():
    model = hidden(lambda m, h: h[:, torch.randperm(5)[:3]].mean(1) if m.training else h.mean(1))()
    with pytest.raises(vp.VarpropError, match=r"reads at random positions \(aten.randperm\), a noise that cannot"):
        vp.predict(model, torch.randn(SEQUENCES), random="")


class Votes(nn.Module):
    """Numbers chosen by which of two random values is larger."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(64, 32), nn.Linear(64, 32), nn.Linear(32, 2)

    def forward(self, x):
        return self.head(torch.where(self.first(x) > self.second(x), 1.0, -1.0))


def test_numbers_chosen_by_a_random_comparison_vary_as_draws_do():
    torch.manual_seed(0)
    model, x = Votes(), torch.randn(3, 64)
    found = vp.predict(model, x, input_var=0.25)
    with torch.no_grad():
        drawn = torch.stack([model(x + 0.5 * torch.randn_like(x)) for _ in range(3000)])
    ratio = found.std / drawn.std(0)
    assert float(ratio.min()) > 0.8 and float(ratio.max()) < 1.2
