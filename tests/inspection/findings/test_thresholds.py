"""Findings on models that are known to train, which get no error, and on broken ones, which get the right one."""

import copy
import re

import pytest
import torch
import torch.nn as nn

import varprop as vp
from varprop.inspection.findings.finding import times

# Freshly built. In their published initialization they get no warning; PyTorch's own is none that was published.
STANDARD = {
    "resnet18": set(),
    "alexnet": {"decay", "shift"},  # PyTorch's initialization shrinks by sqrt(3) a layer
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
    lines = [line for line in report.text().splitlines() if line.startswith("error")]
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
@pytest.mark.filterwarnings("ignore::varprop.DepthWarning")
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


def test_a_branch_of_zeros_is_no_error():
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.branch, self.head = nn.Linear(8, 8), nn.Linear(8, 4)
            nn.init.zeros_(self.branch.weight)

        def forward(self, x):
            return self.head(x + self.branch(x))

    report = vp.inspect(Residual(), vp.Moments(torch.zeros(1, 8), torch.ones(1, 8)))
    assert [(f.severity, f.where) for f in report.findings if f.kind == "constant"] == [("warning", "branch")]
