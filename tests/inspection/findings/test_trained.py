"""Findings on trained networks, whose units are far from independent, and advice that is followed."""

import copy
import itertools
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import varprop as vp

STANDARD = vp.Moments(0.0, 1.0)


def chain(depth=6, width=64, inputs=64, outputs=10, act=nn.ReLU):
    torch.manual_seed(0)
    sizes = [inputs, *[width] * depth]
    hidden = [layer for pair in itertools.pairwise(sizes) for layer in (nn.Linear(*pair), act())]
    return nn.Sequential(*hidden, nn.Linear(width, outputs))


def digits():
    loaded = pytest.importorskip("sklearn.datasets").load_digits()
    x = torch.tensor(loaded.data, dtype=torch.float32)
    return (x - x.mean()) / x.std(), torch.tensor(loaded.target)


@pytest.fixture(scope="module")
def trained():
    """A healthy network of six layers after 300 steps, with its data."""
    model, (x, y) = chain(), digits()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(300):
        chosen = torch.randint(0, 1500, (64,))
        optimizer.zero_grad()
        F.cross_entropy(model(x[chosen]), y[chosen]).backward()
        optimizer.step()
    with torch.no_grad():
        assert (model(x[1500:]).argmax(1) == y[1500:]).float().mean() > 0.8
    return model, x[torch.randperm(len(x))]


def alarms(report):
    return [finding.kind for finding in report.findings if finding.severity != "note"]


def test_a_trained_network_raises_no_alarm_without_data(trained):
    """By the computed numbers alone most units of its last layers would be constant or always on."""
    model, _ = trained
    report = vp.inspect(model, STANDARD, example=(1, 64))
    assert max(row.numbers.get("always_on", 0.0) for row in report.rows) > 0.5
    assert not alarms(report), report.text()
    notes = {finding.kind: finding for finding in report.findings}
    assert "not on random inputs" in notes["always_on"].text and "check=data" in notes["always_on"].advice
    assert notes["dependence"].where == "12" and notes["dependence"].value > 10
    assert report["12"].trial_ratio > 10 and report["0"].trial_ratio is None


def test_measured_numbers_decide_where_there_is_data(trained):
    model, x = trained
    report = vp.inspect(model, STANDARD, example=(1, 64), check=x)
    assert alarms(report) == ["disagreement"], report.text()
    (finding,) = [one for one in report.findings if one.kind == "disagreement"]
    off = {row.label: row.measured["std"]["value"] / row.numbers["std"] for row in report.rows if row.is_layer}
    assert finding.where == max(off, key=off.get) and finding.value == pytest.approx(max(off.values()))
    assert f"1/{float(f'{finding.value:.2g}'):.0f} of" in finding.text


def test_what_the_data_shows_is_found_though_the_computed_numbers_do_not_have_it():
    """Rectifiers that are off for all of the data, which lies where the moments do not say."""
    model = chain(2, 16, 16)
    with torch.no_grad():
        model[2].weight.copy_(-model[2].weight.abs())
        model[2].bias.fill_(-0.1)
    column = torch.randn(400, 1, generator=torch.Generator().manual_seed(0)).abs().expand(400, 16).contiguous()
    with torch.no_grad():
        model[0].weight.copy_(model[0].weight.abs())
    assert "dead" in alarms(vp.inspect(model, vp.input_moments(column), check=column))


def test_data_of_another_scale_is_answered_by_its_moments():
    model, data = chain(2), 5 * torch.randn(256, 64, generator=torch.Generator().manual_seed(0))
    report = vp.inspect(model, STANDARD, example=(1, 64), check=data)
    (finding,) = [one for one in report.findings if one.kind == "disagreement"]
    assert finding.severity == "warning" and "vp.input_moments(data)" in finding.advice
    again = vp.inspect(model, vp.input_moments(data), check=data)
    assert "disagreement" not in {one.kind for one in again.findings}


def rank_one(model):
    with torch.no_grad():
        weight = model[2].weight
        weight.copy_(torch.outer(torch.randn(len(weight)), torch.randn(weight.shape[1])) / 8)


def zeros(model):
    for parameter in model[2].parameters():
        nn.init.zeros_(parameter)


def large(model):
    with torch.no_grad():
        for layer in model[::2]:
            layer.weight.mul_(30)


def small(model):
    with torch.no_grad():
        for layer in model[::2]:
            layer.weight.mul_(0.01)


def negative(model):
    with torch.no_grad():
        model[2].bias.fill_(-50.0)


def positive(model):
    with torch.no_grad():
        model[2].bias.fill_(1000.0)


DAMAGES = {
    "rank": (rank_one, nn.ReLU),
    "constant": (zeros, nn.ReLU),
    "growth": (large, nn.ReLU),
    "decay": (small, nn.ReLU),
    "dead": (negative, nn.ReLU),
    "always_on": (positive, nn.ReLU),
    "shift": (positive, nn.ReLU),
    "saturated": (large, nn.Tanh),
    "explode": (large, nn.ReLU),
    "vanish": (small, nn.ReLU),
}


def followed(model, finding):
    """The model after what a finding advises: weights to fill by name, then a call."""
    model = copy.deepcopy(model)
    for name in re.findall(r"[\w.]+\.weight", finding.advice):
        nn.init.kaiming_normal_(model.get_parameter(name))
    if call := re.search(r"vp\.init_\(model, moments, example=(\(.*?\))\)", finding.advice):
        vp.init_(model, STANDARD, example=eval(call.group(1)))
    assert "kaiming" in finding.advice or call, finding.advice
    return model


@pytest.mark.parametrize("kind", DAMAGES)
def test_advice_removes_its_finding(kind):
    damage, act = DAMAGES[kind]
    model = chain(4, act=act)
    damage(model)
    report = vp.inspect(model, STANDARD, example=(1, 64))
    finding = next(one for one in report.findings if one.kind == kind and one.severity != "note")
    after = vp.inspect(followed(model, finding), STANDARD, example=(1, 64))
    assert kind not in alarms(after), after.text()


def test_a_layer_of_zeros_comes_before_what_follows_from_it():
    model = chain()
    zeros(model)
    report = vp.inspect(model, STANDARD, example=(1, 64))
    assert report.findings[0].kind == "constant" and report.findings[0].where == "2"
    assert "2.weight" in report.findings[0].advice
    assert not {"dead", "always_on", "shift"} & {finding.kind for finding in report.findings}


def even(model):
    """Every unit of variance 1, and gradients that grow at every layer."""
    vp.init_(model, STANDARD, example=(1, 64), shift="first", orthogonal=False)


def as_torch(model):
    """As torch.nn makes it: what a chain passes on shrinks at every layer."""


@torch.no_grad()
def eightfold(model):
    for parameter in model.parameters():
        parameter.mul_(8)


DEEP = [
    (("vanish", "decay"), as_torch, nn.ReLU, 16),
    *[
        pytest.param(kinds, damage, act, depth, marks=pytest.mark.slow)
        for kinds, damage, act, depth in (
            (("explode",), eightfold, nn.ReLU, 16),
            (("vanish",), as_torch, nn.GELU, 16),
            (("vanish",), as_torch, nn.Tanh, 24),
            (("vanish",), as_torch, nn.ReLU, 30),
            (("explode",), eightfold, nn.ReLU, 30),
            (("vanish",), as_torch, nn.GELU, 30),
            (("vanish",), as_torch, nn.Tanh, 60),
            (("explode",), even, nn.ReLU, 100),
            (("explode",), even, nn.GELU, 100),
            (("explode",), even, nn.Tanh, 100),
            (("decay",), as_torch, nn.Tanh, 100),
        )
    ],
]
IN_BATCHES = (8, 64)  # the inputs that are tried run in batches of the example's: an eighth of the operations


@pytest.mark.parametrize(("kinds", "damage", "act", "depth"), DEEP)
def test_advice_for_a_deep_chain_leaves_nothing_to_worry_about(kinds, damage, act, depth):
    """Findings of several kinds in one chain advise the same, which is followed once."""
    model = chain(depth, act=act)
    damage(model)
    report = vp.inspect(model, STANDARD, example=IN_BATCHES)
    found = [next(one for one in report.findings if one.kind == kind and one.severity != "note") for kind in kinds]
    (call,) = {one.advice.partition("vp.init_(")[2].partition("))")[0] for one in found}
    assert call
    after = vp.inspect(followed(model, found[0]), STANDARD, example=IN_BATCHES)
    assert not alarms(after), after.text()


@pytest.mark.slow
def test_skip_connections_help_where_a_chain_explodes():
    model = chain(100, 16, 16)
    vp.init_(model, STANDARD, example=(1, 16), shift="first", orthogonal=False)
    report = vp.inspect(model, STANDARD, example=(8, 16))
    (finding,) = [one for one in report.findings if one.kind == "explode"]
    assert "vp.init_" in finding.advice and "skip connections" in finding.advice
    skipped = vp.inspect(WithSkips(model), STANDARD, example=(8, 16))
    assert not {"explode", "vanish"} & set(alarms(skipped))


class WithSkips(nn.Module):
    """A chain whose layers are added to what they read."""

    def __init__(self, model):
        super().__init__()
        self.layers, self.last = model[:-1], model[-1]

    def forward(self, x):
        for linear, act in zip(self.layers[::2], self.layers[1::2], strict=True):
            x = x + 0.1 * linear(act(x))
        return self.last(x)


class Blocks(nn.Module):
    """Residual blocks behind an embedding, with a normalization in front of each branch, or also behind each sum."""

    def __init__(self, factor, behind=False, width=32, tokens=100):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) if behind else nn.Identity() for _ in range(5))
        self.embedding = nn.Embedding(tokens, width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.branches = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width)) for _ in range(4)
        )
        for branch in self.branches:
            nn.init.normal_(branch[1].weight, std=0.1)
            nn.init.normal_(branch[3].weight, std=0.02 * factor)

    def forward(self, x):
        x = self.norms[-1](self.embedding(x))
        for branch, norm in zip(self.branches, self.norms, strict=False):
            x = norm(x + branch(x))
        return x


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize(("factor", "found"), [(1.0, []), (100.0, ["branch"])])
def test_branches_are_judged_by_the_stream_they_are_added_to(factor, found, behind):
    """Whatever its scale: that of embeddings is small, and one behind a normalization is 1."""
    torch.manual_seed(0)
    report = vp.inspect(Blocks(factor, behind), vp.Tokens.uniform(100), example=(1, 8))
    assert [kind for kind in alarms(report) if kind != "growth"] == found, report.text()


def test_one_branch_among_others_is_found_by_the_layer_that_amplifies():
    """Behind its sum all scales are gone again, and what it adds is only a few times as large as the stream."""
    torch.manual_seed(0)
    model = Blocks(1.0, behind=True)
    with torch.no_grad():
        model.branches[2][3].weight.mul_(100)
    report = vp.inspect(model, vp.Tokens.uniform(100), example=(1, 8))
    (finding,) = (finding for finding in report.findings if finding.kind == "branch")
    sums = [row for row in report.rows if row.branch is not None]
    assert finding.where == sums[2].label and 1 < finding.value == sums[2].branch < 30
    assert sums[2].branch_gain == pytest.approx(report["branches.2.3"].gain)
    assert "multiplies the std by" in finding.text and "others have" in finding.text


class Softmax(nn.Module):
    """Written by hand, its largest value taken off first: numerator and denominator share exp and max."""

    def __init__(self):
        super().__init__()
        self.scores, self.last = nn.Linear(16, 32), nn.Linear(32, 16)
        nn.init.normal_(self.scores.weight, std=0.7)

    def forward(self, x):
        scores = self.scores(x)
        terms = (scores - scores.amax(-1, keepdim=True)).exp()
        return self.last(terms / terms.sum(-1, keepdim=True))


def test_a_softmax_by_hand_is_no_error():
    torch.manual_seed(0)
    report = vp.inspect(Softmax(), STANDARD, example=(1, 16))
    assert not report.errors and "growth" not in alarms(report), report.text()


def test_the_effective_rank_is_that_of_the_singular_values():
    model = chain(2)
    shares = torch.linalg.svdvals(model[2].weight.detach().double())
    shares = shares / shares.sum()
    row = vp.inspect(model, STANDARD, example=(1, 64))["2"]
    assert row.rank == pytest.approx(float((-(shares * shares.log()).sum()).exp()), rel=1e-6)
    assert row.full_rank == 64 and row.weight == "2.weight"
    assert vp.inspect(model, STANDARD, example=(1, 64))["1"].rank is None


def test_a_model_that_was_not_tried_says_so():
    """Batch norms in training mode need a batch, which the example may not have."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    model(torch.randn(32, 8))
    kinds = {
        mode: {finding.kind for finding in vp.inspect(model.train(mode), STANDARD, example=(2, 8)).findings}
        for mode in (True, False)
    }
    assert "untried" in kinds[True] and "untried" not in kinds[False]


def test_a_model_of_too_much_work_is_not_tried(monkeypatch):
    monkeypatch.setattr("varprop.inspection.measure.TOO_MUCH", 1.0)
    report = vp.inspect(chain(1), STANDARD, example=(1, 64))
    assert "untried" in {finding.kind for finding in report.findings} and not report["0"].trial
