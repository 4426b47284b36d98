"""Findings on models that are known to train, which get no error, and on broken ones, which get the right one."""

import copy
import re

import pytest
import torch
import torch.nn as nn

import varprop as vp
from varprop.inspection.findings import times

# Freshly built. In their published initialization they get no warning; PyTorch's own is none that was published.
STANDARD = {
    "resnet18": set(),
    "alexnet": {"decay"},  # PyTorch's initialization shrinks by sqrt(3) a layer
    "squeezenet1_1": set(),
    "vgg11": set(),
    "mobilenet_v3_small": set(),
}
LARGER = (
    "mobilenet_v2",
    "resnet50",
    "vgg11_bn",
    "densenet121",
    "efficientnet_b0",
    "regnet_y_400mf",
    "shufflenet_v2_x1_0",
    "convnext_tiny",
    "swin_t",
)


def pixels():
    return vp.Moments(torch.zeros(1, 3, 1, 1), torch.ones(1, 3, 1, 1))


def check_standard(model, expected):
    report = vp.inspect(model.eval(), pixels(), example=torch.zeros(1, 3, 64, 64))
    assert report.errors == (), report.text()
    assert {finding.kind for finding in report.findings if finding.severity == "warning"} == expected


@pytest.mark.zoo
@pytest.mark.parametrize("name", STANDARD)
def test_standard_models_get_no_error(name):
    from ...torchvision_on_cpu import torchvision

    torch.manual_seed(0)
    check_standard(torchvision.models.get_model(name, weights=None), STANDARD[name])


@pytest.mark.zoo
@pytest.mark.slow
@pytest.mark.parametrize("name", LARGER)
def test_larger_standard_models_get_no_error(name):
    from ...torchvision_on_cpu import torchvision

    torch.manual_seed(0)
    check_standard(torchvision.models.get_model(name, weights=None), set())


@pytest.mark.zoo
def test_a_transformer_whose_head_starts_at_zero_gets_no_error():
    from ...torchvision_on_cpu import torchvision

    torch.manual_seed(0)
    model = torchvision.models.VisionTransformer(64, 16, 2, 3, 48, 96)
    check_standard(model, set())
    report = vp.inspect(model.eval(), pixels(), example=torch.zeros(1, 3, 64, 64))
    (found,) = [finding for finding in report.findings if finding.kind == "constant"]
    assert (found.severity, found.where) == ("note", "heads.head")


def chain(activation=nn.ReLU, depth=6, width=64):
    layers = [module for _ in range(depth) for module in (nn.Linear(width, width), activation())]
    return nn.Sequential(*layers, nn.Linear(width, 8))


def normalized():
    layers = [module for _ in range(3) for module in (nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(64, 8)).eval()


def scaled(model, factor, *which):
    for index, layer in enumerate(m for m in model if isinstance(m, nn.Linear)):
        if not which or index in which:
            layer.weight.data.mul_(factor)
    return model


def biased(model, index, value):
    model[index].bias.data.fill_(value)
    return model


def zeroed(model, index):
    for parameter in model[index].parameters():
        parameter.data.zero_()
    return model


def narrow():
    """Batch norms that were trained on nearly constant batches."""
    model = settled()
    for norm in (m for m in model if isinstance(m, nn.BatchNorm1d)):
        norm.running_var.fill_(1e-8)
    return model


BROKEN = {
    "weights far too large": (lambda: scaled(chain(), 30), {"growth", "explode"}),
    "weights far too small": (lambda: scaled(chain(), 0.1), {"decay", "vanish"}),
    "deep sigmoids": (lambda: chain(nn.Sigmoid, 8), {"vanish"}),
    "saturated tanh": (lambda: scaled(chain(nn.Tanh), 100, 1), {"saturated"}),
    "saturated sigmoid": (lambda: scaled(chain(nn.Sigmoid, 2), 300, 1), {"saturated"}),
    "shifted far down": (lambda: biased(chain(), 2, -50.0), {"dead"}),
    "a layer of zeros": (lambda: zeroed(chain(), 4), {"constant"}),
    "dead behind a new batch norm's shift": (lambda: biased(normalized(), 4, -10.0), {"dead"}),
    "statistics of constant batches": (narrow, {"growth"}),
    "one layer too large among batch norms": (lambda: scaled(settled(), 3000, 1), {"growth"}),
    "a residual stream that grows": (lambda: stream(30.0, 1.0), {"growth"}),
    "a residual stream that fades": (lambda: stream(0.01, 0.1), {"decay"}),
}


class Block(nn.Module):
    """A residual block whose branch and stream are multiplied by constants."""

    def __init__(self, branch, kept):
        super().__init__()
        self.branch, self.kept, self.line = branch, kept, nn.Linear(64, 64)

    def forward(self, x):
        return self.kept * x + self.branch * self.line(x).relu()


def stream(branch, kept):
    return nn.Sequential(*(Block(branch, kept) for _ in range(5)), nn.Linear(64, 8))


class Encoder(nn.Module):
    """BERT in small, as published: embeddings, layers that normalize behind their sums, weights of std 0.02."""

    def __init__(self, width=256, tokens=500):
        super().__init__()
        self.table, self.norm = nn.Embedding(tokens, width), nn.LayerNorm(width)
        self.layers = nn.Sequential(
            *(nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True) for _ in range(2))
        )
        self.pooler = nn.Linear(width, width)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens):
        return self.pooler(self.layers(self.norm(self.table(tokens)))[:, 0]).tanh()


def test_a_small_bert_gets_no_warning():
    torch.manual_seed(0)
    report = vp.inspect(Encoder().eval(), vp.Tokens.uniform(500), example=(1, 16))
    assert [str(finding) for finding in report.findings if finding.severity != "note"] == []


def test_factors_are_written_as_people_do():
    assert [times(f) for f in (2.44, 12345.0, 1 / 29.6, 0.97, 970_400.0)] == [
        "2.4 times",
        "12,000 times",
        "1/30 of",
        "0.97 times",
        "970,000 times",
    ]


def test_advice_for_several_findings_stands_once():
    report = vp.inspect(scaled(chain(), 30), vp.Moments(torch.zeros(1, 64), torch.ones(1, 64)))
    text = report.text().replace("\n    ", " ")  # lines that belong together
    lines = [line for line in text.splitlines() if line.startswith("error")]
    assert len(lines) > 1 and sum("vp.normalize" in line for line in lines) == 1


def settled():
    """Batch norms that have seen data."""
    model = normalized().train()
    with torch.no_grad():
        for _ in range(50):
            model(torch.randn(64, 64))
    return model.eval()


@pytest.mark.parametrize(("make", "kinds"), BROKEN.values(), ids=BROKEN.keys())
def test_broken_networks_get_the_right_error(make, kinds):
    torch.manual_seed(0)
    report = vp.inspect(make(), vp.Moments(torch.zeros(1, 64), torch.ones(1, 64)))
    assert kinds <= {finding.kind for finding in report.errors}, report.text()


CALL = re.compile(r"vp\.\w+\((?:[^()]|\([^()]*\))*\)")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["weights far too large", "saturated tanh", "shifted far down"])
def test_the_advice_can_be_followed_as_printed(name):
    """With moments that need no example, and with some that do."""
    torch.manual_seed(0)
    for model, moments, example in (
        (BROKEN[name][0](), vp.Moments(torch.zeros(1, 64), torch.ones(1, 64)), None),
        (BROKEN[name][0](), vp.Moments(0.0, 1.0), (1, 64)),
    ):
        report = vp.inspect(model, moments, example=example)
        calls = {call for finding in report.findings for call in CALL.findall(finding.advice)}
        assert calls
        for call in calls:
            eval(call, {"vp": vp, "model": copy.deepcopy(model), "moments": moments})


HEALTHY = {
    "rectifiers": lambda: chain(depth=3),
    "tanh": lambda: chain(nn.Tanh, 3),
    "new batch norms": normalized,
    "settled batch norms": settled,
    "a last layer of zeros": lambda: zeroed(chain(depth=2), 4),
}


@pytest.mark.parametrize("make", HEALTHY.values(), ids=HEALTHY.keys())
def test_healthy_networks_get_none(make):
    torch.manual_seed(0)
    report = vp.inspect(make(), vp.Moments(torch.zeros(1, 64), torch.ones(1, 64)))
    assert report.errors == (), report.text()


def test_batch_norms_that_have_seen_nothing_are_taken_as_in_training():
    unit = vp.Moments(torch.zeros(1, 64), torch.ones(1, 64))
    model = scaled(normalized(), 0.1)
    report = vp.inspect(model, unit)
    (told,) = [finding for finding in report.findings if finding.kind == "unsettled"]
    assert (told.severity, told.value) == ("note", 3.0) and report.errors == ()
    assert report["1"].numbers["std"] == pytest.approx(1.0, rel=0.02)
    assert not any(module.training for module in model.modules())
    assert vp.inspect(model.train(), unit)["1"].numbers["std"] == report["1"].numbers["std"]
    for norm in (model[1], model[4], model[7]):
        norm.running_var.fill_(0.9)
    assert "decay" in {f.kind for f in vp.inspect(model.eval(), unit).findings}


class Residual(nn.Module):
    """x + branch(x), then a last layer."""

    def __init__(self, *branch, width=64):
        super().__init__()
        self.branch, self.head = nn.Sequential(*branch), nn.Linear(width, 8)

    def forward(self, x):
        return self.head(x + self.branch(x))


class Context(nn.Module):
    """What all positions have in common, from their average, joined to each of them again."""

    def __init__(self):
        super().__init__()
        self.stem, self.context, self.head = nn.Conv2d(3, 32, 3), nn.Conv2d(32, 16, 1), nn.Conv2d(48, 8, 1)

    def forward(self, x):
        x = self.stem(x).relu()
        common = self.context(x.mean((2, 3), keepdim=True)).relu()
        return self.head(torch.cat([x, nn.functional.interpolate(common, x.shape[2:], mode="bilinear")], 1))


def small(layer, factor=0.01):
    layer.weight.data.mul_(factor)
    return layer


def narrow_and_dead():
    """5 of 8 units dead, which happens by chance where means are large."""
    model = nn.Sequential(nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 8))
    model[0].weight.data.mul_(0.5)
    model[0].bias.data.copy_(torch.tensor([-1.0] * 5 + [1.0] * 3))
    return model


BY_DESIGN = {
    "a small layer inside a branch": lambda: Residual(
        small(nn.Linear(64, 64), 0.1), nn.GELU(), small(nn.Linear(64, 64), 0.1), nn.GELU(), nn.Linear(64, 64)
    ),
    "a branch that ends with zeros": lambda: Residual(nn.Linear(64, 64), nn.ReLU(), small(nn.Linear(64, 64), 0.0)),
    "a nearly constant branch": lambda: Residual(small(nn.Linear(64, 64)), nn.Tanh(), small(nn.Linear(64, 64))),
    "more units dead than always on, by chance": narrow_and_dead,
}


def alarms(report):
    return [str(finding) for finding in report.findings if finding.severity != "note"]


@pytest.mark.parametrize("make", BY_DESIGN.values(), ids=BY_DESIGN.keys())
def test_what_is_so_by_design_gets_no_warning(make):
    torch.manual_seed(0)
    assert alarms(vp.inspect(make(), vp.Moments(torch.zeros(1, 64), torch.ones(1, 64)))) == []


def test_what_is_common_to_all_positions_may_be_nearly_constant():
    torch.manual_seed(0)
    report = vp.inspect(Context(), pixels(), example=(1, 3, 64, 64))
    assert report["context"].role == "gate" and report["context"].numbers["shift"] > 0.99
    assert alarms(report) == []


def test_a_constant_before_a_batch_norm_is_no_matter():
    torch.manual_seed(0)
    model = biased(normalized(), 3, 100.0)
    report = vp.inspect(model, vp.Moments(torch.zeros(1, 64), torch.ones(1, 64)))
    assert report["3"].numbers["shift"] > 0.999 and alarms(report) == []


def test_a_branch_all_of_zeros_gets_a_warning():
    """No weight of it would ever get a gradient."""
    branch = small(nn.Linear(64, 64), 0.0), nn.ReLU(), small(nn.Linear(64, 64), 0.0)
    report = vp.inspect(Residual(*branch), vp.Moments(torch.zeros(1, 64), torch.ones(1, 64)))
    assert ("warning", "constant", "branch.0") in {(f.severity, f.kind, f.where) for f in report.findings}


def separable_and_small_head():
    """A depthwise convolution that shrinks before a pointwise one and its batch norm, and a head behind an average."""
    body = nn.Conv2d(3, 16, 3), small(nn.Conv2d(16, 16, 3, groups=16)), nn.Conv2d(16, 32, 1), nn.BatchNorm2d(32)
    head = nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8)
    return nn.Sequential(*body, *head).eval()


def test_half_of_a_layer_and_a_head_may_be_small():
    torch.manual_seed(0)
    report = vp.inspect(separable_and_small_head(), pixels(), example=(1, 3, 32, 32))
    assert (report["1"].role, report["7"].role) == ("normalized", "head")
    assert max(report["1"].growth, report["7"].growth) < 0.03 and alarms(report) == []


class Tower(nn.Module):
    """Blocks with batch norms, whose gradients grow from the last to the first."""

    def __init__(self, depth=12):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)) for _ in range(depth))
        self.head = nn.Linear(64, 8)

    def forward(self, x):
        for block in self.blocks:
            x = (x + block(x)).relu()
        return self.head(x)


def test_gradients_are_judged_on_the_residual_stream():
    """The scale of weights before a batch norm is no matter, and turns the gradient there by as much."""
    torch.manual_seed(0)
    model = Tower()
    model.blocks[0][0].weight.data.mul_(0.01)
    report = vp.inspect(model.eval(), vp.Moments(torch.zeros(1, 64), torch.ones(1, 64)))
    assert report["blocks.0.0"].gradient_total > 50 * report["blocks.1.0"].gradient_total
    assert report.gradient_ratio < 100 and alarms(report) == []


class Language(nn.Module):
    """A residual block over tokens."""

    def __init__(self, scale):
        super().__init__()
        self.table, self.norm, self.line = nn.Embedding(100, 32), nn.LayerNorm(32), nn.Linear(32, 32)
        self.table.weight.data.mul_(scale)

    def forward(self, tokens):
        x = self.table(tokens)
        return nn.functional.layer_norm(x + self.line(self.norm(x)), (32,))


@pytest.mark.parametrize(("scale", "found"), [(0.02, []), (1.0, []), (50.0, ["growth"])])
def test_embeddings_may_be_small_but_not_large(scale, found):
    torch.manual_seed(0)
    report = vp.inspect(Language(scale), vp.Tokens.uniform(100), example=(1, 8))
    assert [f.kind for f in report.findings if f.severity != "note"] == found


class Summed(nn.Module):
    """A branch that is a sum itself."""

    def __init__(self):
        super().__init__()
        self.first, self.second = small(nn.Linear(64, 64)), small(nn.Linear(64, 64))
        self.last, self.head = nn.Linear(64, 64), nn.Linear(64, 8)

    def forward(self, x):
        return self.head(x + self.last(self.first(x).relu() + self.second(x)))


def test_a_sum_within_a_branch_is_part_of_it():
    torch.manual_seed(0)
    report = vp.inspect(Summed(), vp.Moments(torch.zeros(1, 64), torch.ones(1, 64)))
    roles = [row.role for row in report.rows if row.name == "add"]
    assert sorted(roles) == ["in branch", "stream"] and alarms(report) == []


class NormInside(nn.Module):
    """A branch whose small first layer meets a sum of the branch's own, and then a normalization."""

    def __init__(self):
        super().__init__()
        self.first, self.inner = small(nn.Linear(64, 64)), small(nn.Linear(64, 64), 1e-4)
        self.norm, self.last, self.head = nn.LayerNorm(64), small(nn.Linear(64, 64), 1e-3), nn.Linear(64, 8)

    def forward(self, x):
        y = self.first(x)
        y = y + self.inner(y)
        return self.head(x + self.last(self.norm(y)))


def test_a_normalization_within_a_branch_does_not_end_it():
    torch.manual_seed(0)
    report = vp.inspect(NormInside(), vp.Moments(torch.zeros(1, 64), torch.ones(1, 64)))
    assert report["first"].growth < 0.03 and report["first"].role == "in branch"
    assert [row.role for row in report.rows if row.name == "add"] == ["in branch", "stream"]
    assert alarms(report) == []


class ReadByHeads(nn.Module):
    """The small state within a branch is normalized, averaged and read by a head of its own."""

    def __init__(self):
        super().__init__()
        self.stem, self.state, self.back = nn.Conv2d(3, 32, 1), small(nn.Conv2d(32, 32, 1)), nn.Conv2d(32, 32, 1)
        self.norm, self.head, self.other = nn.BatchNorm2d(32), nn.Linear(32, 8), nn.Linear(32, 8)

    def forward(self, x):
        x = self.stem(x)
        state = self.state(x)
        x = x + self.back(state)
        return self.head(x.mean((2, 3))) + self.other(self.norm(state).mean((2, 3)))


def test_what_a_head_reads_from_a_branch_does_not_end_it():
    torch.manual_seed(0)
    report = vp.inspect(ReadByHeads().eval(), pixels(), example=(1, 3, 16, 16))
    assert report["state"].growth < 0.03 and report["state"].role == "in branch" and alarms(report) == []


@pytest.mark.parametrize(("kept", "role", "found"), [(True, "rectified stream", []), (False, "", ["always_on"])])
def test_a_rectifier_may_pass_all_of_what_is_rectified_already(kept, role, found):
    """A bias of four standard deviations: behind a rectifier it is that one's matter, before it that of this one."""

    class Rectified(nn.Module):
        def __init__(self):
            super().__init__()
            self.branch, self.last, self.head = small(nn.Linear(64, 64)), nn.ReLU(), nn.Linear(64, 8)
            self.bias = nn.Parameter(torch.full((64,), 4.0))

        def forward(self, x):
            return self.head(self.last((x + self.bias).relu() + self.branch(x) if kept else x + self.bias))

    torch.manual_seed(0)
    report = vp.inspect(Rectified(), vp.Moments(torch.zeros(1, 64), torch.ones(1, 64)))
    assert report["last"].role == role and report["last"].numbers["always_on"] == 1.0
    assert ("always_on", "last") in {(f.kind, f.where) for f in report.findings}
    assert [f.kind for f in report.findings if f.severity != "note" and f.where == "last"] == found


def batch_normalized_chain(depth):
    layers = [module for _ in range(depth) for module in (nn.Linear(32, 32, bias=False), nn.BatchNorm1d(32), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(32, 8)).eval()


@pytest.mark.parametrize(("depth", "severity"), [(48, "note"), pytest.param(60, "warning", marks=pytest.mark.slow)])
def test_gradients_that_batch_norms_let_grow_are_one_severity_milder(depth, severity):
    """They grow by sqrt(pi / (pi - 1)) a layer (Yang et al. 2019), and weights before a batch norm grow out of it."""
    torch.manual_seed(0)
    report = vp.inspect(batch_normalized_chain(depth), vp.Moments(torch.zeros(1, 32), torch.ones(1, 32)))
    (found,) = [finding for finding in report.findings if finding.kind == "explode"]
    assert found.severity == severity and 1e3 < found.value < 1e6


class AttentionPool(nn.Module):
    """A learned query that looks at all tokens, and a head that reads what it found; or a query of their own."""

    def __init__(self, learned):
        super().__init__()
        self.query, self.learned = nn.Parameter(torch.randn(1, 1, 1, 32)), learned
        self.value, self.proj, self.head = nn.Linear(32, 32), small(nn.Linear(32, 32), 0.3), nn.Linear(32, 8)

    def forward(self, x):
        value = self.value(x).unsqueeze(1)
        query = self.query if self.learned else value
        pooled = nn.functional.scaled_dot_product_attention(query, value, value)
        return self.head(self.proj(pooled[:, 0, 0]))


@pytest.mark.parametrize(("learned", "role", "found"), [(True, "head", []), (False, "", ["decay"])])
def test_a_learned_query_averages_over_all_positions(learned, role, found):
    torch.manual_seed(0)
    report = vp.inspect(AttentionPool(learned), vp.Moments(torch.zeros(1, 256, 32), torch.ones(1, 256, 32)))
    assert report["proj"].role == role and report["proj"].growth < 1 / 30
    assert [finding.kind for finding in report.findings if finding.severity != "note"] == found


def test_a_rectifier_that_is_dead_is_named_and_not_the_layers_that_read_its_zeros():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU())
    model.append(nn.Linear(16, 4))
    with torch.no_grad():
        model[2].bias.sub_(1000)
    report = vp.inspect(model, vp.Moments(0.0, 1.0), example=(1, 8))
    assert [(f.kind, f.where) for f in report.findings if f.severity == "error"] == [("dead", "3")]
