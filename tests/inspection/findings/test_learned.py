"""What is judged by whether it is learned: fixed transforms of the data, class tokens, inner products."""

import pytest
import torch
from torch import nn

import varprop as vp

UNIT = vp.Moments(torch.zeros(1, 64), torch.ones(1, 64))
TOKENS = vp.Moments(torch.zeros(1, 16, 32), torch.ones(1, 16, 32))


def alarms(report):
    return [(finding.kind, finding.where) for finding in report.findings if finding.severity != "note"]


class Prepared(nn.Module):
    """The input times a factor, which is a constant or learned, and a layer of a given gain."""

    def __init__(self, factor, learned, layer_scale):
        super().__init__()
        factor = torch.tensor(factor)
        if learned:
            self.factor = nn.Parameter(factor)
        else:
            self.register_buffer("factor", factor)
        self.first, self.head = nn.Linear(64, 64, bias=False), nn.Linear(64, 8)
        nn.init.normal_(self.first.weight, std=layer_scale / 8)

    def forward(self, x):
        y = x * self.factor
        return self.head(self.first(y + y.flip(-1)).relu())


@pytest.mark.parametrize(
    ("factor", "learned", "layer_scale", "found"),
    [
        (50.0, False, 0.01, []),  # large data, brought down by the first layer
        (50.0, True, 0.01, ["growth"]),  # the same by a parameter
        (50.0, False, 10.0, ["growth"]),  # large data made larger yet
        (0.01, False, 1.0, []),  # small data that stay as they are
        (0.01, False, 0.01, ["decay"]),  # and that get smaller yet
    ],
)
def test_data_are_judged_from_the_first_parameter_on(factor, learned, layer_scale, found):
    torch.manual_seed(0)
    report = vp.inspect(Prepared(factor, learned, layer_scale), UNIT)
    assert [kind for kind, _ in alarms(report)] == found
    assert {row.role for row in report.rows if row.name == "add"} == {"stream" if learned else "data"}


def test_a_model_without_parameters_is_judged_all_the_same():
    class Buffers(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("weight", 100 * torch.eye(64))

        def forward(self, x):
            return nn.functional.linear(x, self.weight).relu()

    assert [kind for kind, _ in alarms(vp.inspect(Buffers(), UNIT))] == ["growth"]


class ClassToken(nn.Module):
    """A learned token to which blocks add what they read from the others, scaled by learned factors or by weights."""

    def __init__(self, scaled):
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 32))
        self.scales = nn.ParameterList(torch.full((32,), 1e-5 if scaled else 1.0) for _ in range(2))
        self.stem, self.values = nn.Linear(32, 32), nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        if not scaled:
            for value in self.values:
                value.weight.data.mul_(1e-5)
        self.norm, self.head, self.scaled = nn.LayerNorm(32), nn.Linear(32, 8), scaled

    def forward(self, x):
        x, token = self.stem(x), self.token.expand(len(x), -1, -1)
        for value, scale in zip(self.values, self.scales, strict=True):
            read = nn.functional.scaled_dot_product_attention(token, x, value(x))
            token = token + (scale * read if self.scaled else read)
        return self.head(self.norm(token))[:, 0]


def test_a_class_token_may_start_as_the_constant_it_is():
    torch.manual_seed(0)
    report = vp.inspect(ClassToken(scaled=True), TOKENS)
    assert [row.role for row in report.rows if row.name == "add"] == ["token", "token"]
    assert report["stem"].role == "in branch" and report["head"].growth < 1e-4
    assert alarms(report) == []


def test_a_class_token_that_weights_keep_constant_gets_a_finding():
    torch.manual_seed(0)
    report = vp.inspect(ClassToken(scaled=False), TOKENS)
    assert "decay" in {kind for kind, _ in alarms(report)}


class Correlation(nn.Module):
    """Inner products of the tokens of one set with those of another, which a layer reads; or averages by attention."""

    def __init__(self, weights):
        super().__init__()
        self.first, self.read, self.head, self.weights = (
            nn.Linear(32, 256),
            nn.Linear(16, 16),
            nn.Linear(16, 8),
            weights,
        )

    def forward(self, x, y):
        x, y = self.first(x).relu() + 1, self.first(y).relu() + 1
        product = (x @ y.mT / 16).softmax(-1) @ y if self.weights else x @ y.mT
        return self.head(self.read(product[..., :16] / 16).relu())


@pytest.mark.parametrize(("weights", "role"), [(False, "similarity"), (True, "")])
def test_inner_products_hardly_vary_but_what_attention_averages_does(weights, role):
    torch.manual_seed(0)
    report = vp.inspect(Correlation(weights), (TOKENS, TOKENS))
    assert report["read"].role == role and report["read"].numbers["shift"] > 0.99
    assert ("shift" in {kind for kind, _ in alarms(report)}) == weights


class MaximumInside(nn.Module):
    """A branch that weighs its channels by a maximum over them."""

    def __init__(self):
        super().__init__()
        self.small, self.head = nn.Linear(64, 64), nn.Linear(64, 8)
        self.small.weight.data.mul_(0.01)

    def forward(self, x):
        y = self.small(x)
        return self.head(x + y * y.amax(-1, keepdim=True).sigmoid())


def test_a_maximum_within_a_branch_does_not_end_it():
    torch.manual_seed(0)
    report = vp.inspect(MaximumInside(), UNIT)
    assert report["small"].role == "in branch" and report["small"].growth < 1 / 30
    assert alarms(report) == []


class TokenAmongPositions(nn.Module):
    """A learned token joined to the others; one position is read behind attention, by a layer before the head."""

    def __init__(self, position):
        super().__init__()
        self.token, self.places = nn.Parameter(torch.randn(1, 1, 32)), nn.Parameter(torch.randn(1, 17, 32))
        self.norm, self.value, self.project = nn.LayerNorm(32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.read, self.head, self.position = nn.Linear(32, 32), nn.Linear(32, 8), position

    def forward(self, x):
        x = torch.cat([self.token.expand(len(x), -1, -1), 0.03 * x], 1) + self.places
        y = self.norm(x)
        x = x + self.project(nn.functional.scaled_dot_product_attention(y, y, self.value(y)))
        return self.head(self.read(x[:, self.position]).relu())


@pytest.mark.parametrize(("position", "role", "found"), [(0, "head", []), (1, "", ["shift"])])
def test_what_is_read_at_a_class_token_hardly_varies_but_not_at_the_other_positions(position, role, found):
    torch.manual_seed(0)
    report = vp.inspect(TokenAmongPositions(position), TOKENS)
    assert report["read"].role == role
    assert report["read"].growth < 1 / 30 and report["read"].numbers["shift"] > 0.99
    assert [kind for kind, where in alarms(report) if where == "read"] == found


class Refined(nn.Module):
    """A prediction that is corrected step by step, by one small layer or by one that goes on to another layer."""

    def __init__(self, reads_on):
        super().__init__()
        self.first, self.step, self.predict = nn.Linear(64, 64), nn.Linear(68, 64), nn.Linear(64, 4)
        self.reader, self.reads_on = nn.Linear(4, 4), reads_on
        self.predict.weight.data.mul_(0.01)

    def forward(self, x):
        y, predicted = self.first(x), []
        for _ in range(3):
            predicted.append(self.predict(y.tanh()))
            y = self.step(torch.cat([y, predicted[-1]], -1))
        return [self.reader(one) for one in predicted] if self.reads_on else predicted


@pytest.mark.parametrize(("reads_on", "found"), [(False, []), (True, ["decay"])])
def test_a_layer_that_predicts_in_its_last_call_may_be_small_in_all(reads_on, found):
    torch.manual_seed(0)
    report = vp.inspect(Refined(reads_on), UNIT)
    assert report["predict"].growth < 1 / 30
    assert [kind for kind, where in alarms(report) if where == "predict" and kind == "decay"] == found


def test_every_layer_that_no_other_reads_may_start_small():
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.small, self.large = nn.Linear(64, 64), nn.Linear(64, 8), nn.Linear(64, 8)
            self.small.weight.data.mul_(0.01)

        def forward(self, x):
            y = self.body(x).relu()
            return self.small(y), self.large(y)

    torch.manual_seed(0)
    report = vp.inspect(Heads(), UNIT)
    assert report["small"].growth < 1 / 30 and alarms(report) == []


def test_a_model_of_one_recurrent_layer_may_be_small():
    torch.manual_seed(0)
    model = nn.LSTM(32, 32, 2, batch_first=True)
    for parameter in model.parameters():
        parameter.data.mul_(0.5)
    report = vp.inspect(model, TOKENS)
    assert min(row.growth for row in report.rows) < 1 / 30 and alarms(report) == []
