"""Numbers of the rows, findings, measured numbers, and the forms of a report."""

import builtins
import io
import json
import math
import re

import pytest
import torch
import torch.nn as nn

import varprop as vp
from varprop.inspection import run


def unit(*shape):
    return vp.Moments(torch.zeros(shape), torch.ones(shape))


def mlp(activation, width=32, depth=3):
    torch.manual_seed(0)
    layers = [module for _ in range(depth) for module in (nn.Linear(width, width), activation())]
    return nn.Sequential(*layers, nn.Linear(width, 4))


def normal_cdf(z):
    return 0.5 * math.erfc(-z / math.sqrt(2))


def kinds(report, *severities):
    return {finding.kind for finding in report.findings if finding.severity in (severities or ("error", "warning"))}


def test_spreads_are_those_of_the_propagated_moments():
    model = mlp(nn.Tanh)
    found, report = vp.propagate(model, unit(1, 32))["2"], vp.inspect(model, unit(1, 32))
    row = report["2"]
    quartiles = torch.quantile(found.std.detach().double(), torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0]).double())
    seen = [row.std.least, row.std.lower, row.std.median, row.std.upper, row.std.most]
    assert seen == pytest.approx(quartiles.tolist(), rel=1e-6)
    assert row.mean.average == pytest.approx(float(found.mean.detach().mean()), rel=1e-5)
    square, var = float(found.mean.detach().square().mean()), float(found.var.detach().mean())
    assert row.numbers["shift"] == pytest.approx(square / (square + var), rel=1e-5)
    assert row.numbers["std"] == row.growth == pytest.approx(math.sqrt(var), rel=1e-5)


@pytest.mark.parametrize(
    ("activation", "edge"), [(nn.Hardtanh(), 1.0), (nn.Tanh(), 2.1783), (nn.Sigmoid(), 4.3566), (nn.Hardsigmoid(), 3.0)]
)
def test_probability_of_the_flat_part(activation, edge):
    mean, std = 0.7, 2.5
    moments = vp.Moments(torch.tensor([[mean]]).double(), torch.tensor([[std**2]]).double())
    flat = normal_cdf((-edge - mean) / std) + normal_cdf((mean - edge) / std)
    row = vp.inspect(nn.Sequential(activation), moments)["0"]
    assert row.numbers["flat"] == pytest.approx(flat, abs=2e-5)
    assert row.numbers["saturated"] == float(flat > 0.5)


def test_smooth_functions_are_flat_where_a_twentieth_of_the_slope_is_left():
    for function, edge in ((torch.tanh, 2.1783), (torch.sigmoid, 4.3566), (torch.erf, 1.73082)):
        x = torch.tensor([0.0, edge], dtype=torch.float64, requires_grad=True)
        (slope,) = torch.autograd.grad(function(x).sum(), x)
        assert float(slope[1] / slope[0]) == pytest.approx(0.05, rel=1e-3)


def test_dead_and_always_on_units_are_counted():
    mean = torch.tensor([[-3.2, -3.0, 0.0, 3.0, 3.2]])  # the quantiles of 1/1000 lie at -+3.09
    row = vp.inspect(nn.Sequential(nn.ReLU()), vp.Moments(mean, torch.ones(1, 5)))["0"]
    assert (row.numbers["dead"], row.numbers["always_on"]) == pytest.approx((0.2, 0.2))


def test_smooth_rectifiers_are_dead_and_linear_only_far_out():
    for activation, edge in ((nn.GELU(), 2.35), (nn.SiLU(), 4.1), (nn.Hardswish(), 3.0)):
        x = torch.tensor([-edge, edge], dtype=torch.float64, requires_grad=True)
        (slope,) = torch.autograd.grad(activation(x).sum(), x)
        assert slope.tolist() == pytest.approx([0.0, 1.0], abs=0.0501)
        mean = torch.tensor([[-edge - 4, -1.0, 1.0, edge + 4]])
        row = vp.inspect(nn.Sequential(activation), vp.Moments(mean, torch.full((1, 4), 0.01)))["0"]
        assert (row.numbers["dead"], row.numbers["always_on"]) == (0.25, 0.25)


def test_several_findings_of_a_kind_are_told_as_one():
    model = mlp(nn.ReLU, depth=7)
    vp.init_(model, unit(1, 32))
    for layer in model[::2]:
        layer.bias.data[:4] = -30.0
    (found,) = [f for f in vp.inspect(model, unit(1, 32)).findings if (f.severity, f.kind) == ("note", "dead")]
    assert "such layers: 1, 3, " in found.text and found.text.endswith(", ...)")


def test_operations_that_only_move_are_rows_but_not_shown():
    class Moves(nn.Module):
        def forward(self, x):
            return x.t().reshape(1, -1).relu()

    report = vp.inspect(Moves(), unit(1, 4))
    assert [row.op for row in report.rows if row.moves] and "[relu]" in report.text()
    assert not any(f"[{row.op}]" in report.text() for row in report.rows if row.moves)


def test_casts_to_whole_numbers_and_products_with_oneself_are_marked():
    class Odd(nn.Module):
        def forward(self, x):
            return (x @ x).long().float() + x.float()

    report = vp.inspect(Odd(), vp.Moments(torch.zeros(3, 3), torch.ones(3, 3)))
    (product,) = [row for row in report.rows if row.op == "matmul"]
    assert product.status == "approximate" and "independence" in product.reasons[0]
    casts = [row for row in report.rows if row.op == "_to_copy"]
    assert any("whole numbers" in reason for row in casts for reason in row.reasons)


def test_a_good_network_raises_no_alarm():
    for activation in (nn.ReLU, nn.Tanh, nn.GELU):
        model = mlp(activation)
        vp.init_(model, unit(1, 32))
        report = vp.inspect(model, unit(1, 32))
        assert kinds(report) == set(), report.text()
        assert report.errors == ()


def test_huge_weights_are_found():
    model = mlp(nn.ReLU)
    for layer in model[::2]:
        layer.weight.data.mul_(200)
    report = vp.inspect(model, unit(1, 32))
    assert {"growth", "explode"} <= kinds(report, "error")
    first = next(finding for finding in report.findings if finding.kind == "growth")
    assert first.where == "0" and "vp.init_" in first.advice and "vp.normalize" in first.advice
    assert first.text.startswith(f"std has grown to {float(format(report['0'].growth, '.2g')):.0f} times that of the")


def test_saturated_sigmoids_are_found_where_they_are():
    model = mlp(nn.Sigmoid)
    model[2].weight.data.mul_(500)
    report = vp.inspect(model, unit(1, 32))
    (found,) = [finding for finding in report.findings if finding.kind == "saturated"]
    assert (found.severity, found.where) == ("error", "3") and found.value > 0.5
    assert f"{found.value:.0%} of its units saturate" in found.text


def test_dead_rectifiers_are_found_where_they_are():
    model = mlp(nn.ReLU)
    model[2].bias.data[:20] = -20.0
    report = vp.inspect(model, unit(1, 32))
    (found,) = [finding for finding in report.errors if finding.kind == "dead"]
    assert (found.where, found.value) == ("3", pytest.approx(20 / 32))
    assert report["3"].numbers["dead"] == pytest.approx(20 / 32)


def test_a_deep_sigmoid_network_loses_the_signal():
    report = vp.inspect(mlp(nn.Sigmoid, depth=6), unit(1, 32))
    assert {"shift", "decay", "vanish"} <= kinds(report)


def test_constant_units_are_found():
    model = mlp(nn.Tanh)
    model[2].weight.data[3] = 0
    assert "constant" in kinds(vp.inspect(model, unit(1, 32)), "warning")


def test_errors_come_first():
    model = mlp(nn.ReLU)
    model[0].bias.data[:3] = -20.0
    model[2].bias.data[:20] = -20.0
    severities = [finding.severity for finding in vp.inspect(model, unit(1, 32)).findings]
    assert severities == sorted(severities, key=["error", "warning", "note"].index) and len(set(severities)) > 1


def test_rows_follow_the_tree_of_modules():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.line, self.act = nn.Linear(4, 4), nn.ReLU()

        def forward(self, x):
            return x + self.act(self.line(self.act(x)))

    rows = vp.inspect(nn.Sequential(nn.Linear(4, 4), Block()), unit(1, 4)).rows
    labels = ["(model)", "0", "1", "1.act", "1.line", "1.act #2", "1 [add]"]
    assert [row.label for row in rows] == labels
    assert [row.depth for row in rows] == [0, 1, 1, 2, 2, 2, 2]
    assert [row.leaf for row in rows] == [False, True, False, True, True, True, True]


def test_ranges_are_per_channel_and_within_what_can_be():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Sigmoid())
    moments = unit(1, 3, 1, 1)
    found = vp.propagate(model, moments, torch.zeros(1, 3, 8, 8))["0"]
    report = vp.inspect(model, moments, example=torch.zeros(1, 3, 8, 8), k=3.0)
    ranges = report["0"].ranges
    assert ranges["axis"] == 1
    assert ranges["low"] == pytest.approx((found.mean - 3 * found.std).flatten().tolist(), rel=1e-5)
    assert ranges["high"] == pytest.approx((found.mean + 3 * found.std).flatten().tolist(), rel=1e-5)
    assert report["1"].ranges["low"] == [0.0] * 5
    assert max(report["2"].ranges["high"]) <= 1.0
    sequence = vp.inspect(nn.Sequential(nn.Linear(4, 6), nn.ReLU()), unit(1, 1, 4), example=torch.zeros(1, 9, 4))
    assert [len(sequence[path].ranges["low"]) for path in "01"] == [6, 6]
    last = vp.inspect(nn.Sequential(nn.Linear(4, 6), nn.GELU()), unit(1, 1, 1, 4), example=torch.zeros(1, 9, 9, 4))
    assert [(last[path].ranges["axis"], len(last[path].ranges["low"])) for path in "01"] == [(3, 6), (3, 6)]


def test_ranges_know_the_bounds_of_clamps():
    model = nn.Sequential(nn.Hardtanh(-0.5, 2.0))
    ranges = vp.inspect(model, vp.Moments(torch.zeros(1, 3), torch.full((1, 3), 100.0)))["0"].ranges
    assert (ranges["low"], ranges["high"]) == ([-0.5] * 3, [2.0] * 3)


def test_progress_counts_every_step():
    seen = []
    vp.inspect(
        mlp(nn.ReLU),
        unit(1, 32),
        example=torch.zeros(4, 32),
        check="gaussian",
        samples=10,
        progress=lambda *step: seen.append(step),
    )
    assert [done for _, done, _ in seen] == list(range(6)) and {total for *_, total in seen} == {6}
    assert [text for text, *_ in seen][-3:] == ["running data"] * 3


def test_progress_goes_on_within_a_long_step(monkeypatch):
    monkeypatch.setattr(run, "SECONDS", 0.0)
    seen = []
    vp.inspect(mlp(nn.ReLU), unit(1, 32), progress=lambda *step: seen.append(step))
    texts, done, _ = zip(*seen, strict=True)
    assert list(done) == sorted(done) and any(1 < value < 2 for value in done)
    assert any("propagating moments (1 of" in text for text in texts)


def test_several_inputs_go_in_as_a_tuple():
    class Two(nn.Module):
        def forward(self, x, y):
            return x + 2 * y

    report = vp.inspect(Two(), (unit(1, 4), unit(1, 4)), check="gaussian", samples=200)
    row = report["(model)"]
    assert row.numbers["std"] == pytest.approx(5**0.5)
    assert row.measured["std"]["value"] == pytest.approx(5**0.5, rel=0.15)
    assert len(report.inputs) == 2


def test_measured_numbers_agree_within_their_errors():
    model = mlp(nn.Tanh, depth=1)
    report = vp.inspect(model, unit(1, 32), example=torch.zeros(8, 32), check="gaussian", samples=4000)
    row = report["0"]  # of a linear layer on Gaussian inputs everything is known exactly
    for what in ("mean", "std", "shift"):
        seen = row.measured[what]
        assert 0 < seen["error"] < 0.05
        assert abs(seen["value"] - row.numbers[what]) < 5 * seen["error"], what
    assert row.measured["gradient"]["value"] == pytest.approx(row.numbers["gradient"], rel=0.1)
    assert report["1"].measured["flat"]["value"] == pytest.approx(report["1"].numbers["flat"], abs=0.01)
    assert report.check == "gaussian" and "+-" in report.text()


def test_measured_on_data_as_tensor_and_as_batches():
    model = mlp(nn.ReLU, depth=1)
    torch.manual_seed(1)
    data = torch.randn(96, 32) * 2 + 1
    loader = [(data[:50], torch.zeros(50)), (data[50:], torch.zeros(46))]
    moments, example = vp.input_moments(data), torch.zeros(8, 32)
    whole, batches = (vp.inspect(model, moments, example=example, check=source) for source in (data, loader))
    assert whole.check == "data"
    assert whole["0"].measured == batches["0"].measured
    expected = model[0](data).detach()
    assert whole["0"].measured["mean"]["value"] == pytest.approx(float(expected.mean()), rel=1e-5)
    spread = expected.var(0).mean().sqrt()
    assert whole["0"].measured["std"]["value"] == pytest.approx(float(spread), rel=1e-5)


def test_data_far_from_the_assumptions_is_noted():
    column = torch.randn(400, 1, generator=torch.Generator().manual_seed(0)).expand(400, 32).contiguous()
    model = nn.Sequential(nn.Linear(32, 8))
    nn.init.constant_(model[0].weight, 0.2)
    report = vp.inspect(model, vp.input_moments(column), check=column)  # fully correlated: std is sqrt(32) times larger
    (found,) = [finding for finding in report.findings if finding.kind == "disagreement"]
    assert found.severity == "warning" and found.value == pytest.approx(math.sqrt(32), rel=0.05)
    assert found.advice == "trust the measured numbers, by which the findings are judged"


def test_positions_apart_agree_behind_an_average_where_positions_alike_do_not():
    """Borders count as noise while positions are alike, and an average does not bring it down as fast as it should."""
    torch.manual_seed(0)
    convolutions = [nn.Conv2d(3, 16, 3, padding=1), *(nn.Conv2d(16, 16, 3, padding=1) for _ in range(4))]
    model = nn.Sequential(*(m for c in convolutions for m in (c, nn.ReLU())), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    example = torch.zeros(8, 3, 8, 8)
    alike, apart = (
        vp.inspect(model, unit(1, 3, extent, extent), example=example, check="gaussian", samples=800)
        for extent in (1, 8)
    )
    (found,) = [finding for finding in alike.findings if finding.kind == "disagreement"]
    assert "--positions" in found.advice and found.where == "10"
    assert not [finding for finding in apart.findings if finding.kind == "disagreement"]


@pytest.mark.parametrize(
    ("check", "words"), [("uniform", "gaussian"), (torch.zeros(64, 31), "shape"), (torch.zeros(1, 32), "at least two")]
)
def test_unfit_checks_are_refused(check, words):
    with pytest.raises((ValueError, vp.VarpropError), match=words):
        vp.inspect(mlp(nn.ReLU), unit(1, 32), check=check)


def test_the_model_is_left_as_it_was():
    model = mlp(nn.ReLU).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.random.get_rng_state()
    vp.inspect(model, unit(1, 32), check="gaussian", samples=16)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert model.training and all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_tokens_go_in():
    model = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 3))
    report = vp.inspect(model, vp.Tokens.uniform(11), example=torch.zeros(1, 5, dtype=torch.long), check="gaussian")
    assert report["0"].numbers["std"] == pytest.approx(report["0"].measured["std"]["value"], rel=0.05)
    assert report["1"].growth is None


def test_json_holds_every_row_and_no_nan(tmp_path):
    model = mlp(nn.ReLU)
    report = vp.inspect(model, unit(1, 32), check="gaussian", samples=16)
    report.to_json(tmp_path / "out.json")
    loaded = json.loads((tmp_path / "out.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert [row["label"] for row in loaded["rows"]] == [row.label for row in report.rows]
    assert loaded["rows"][1]["std"]["median"] == report["0"].std.median
    assert loaded["findings"] == [finding.to_dict() for finding in report.findings]


def without(monkeypatch, package):
    real = builtins.__import__

    def blocked(name, *args, **kwargs):
        if name.split(".")[0] == package:
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", blocked)
    monkeypatch.setitem(__import__("sys").modules, package, None)


def test_show_with_and_without_rich(monkeypatch, capsys):
    report = vp.inspect(mlp(nn.ReLU), unit(1, 32))
    report.show()
    assert "ReLU" in capsys.readouterr().out
    without(monkeypatch, "rich")
    report.show()
    assert capsys.readouterr().out == report.text() + "\n"


def test_a_missing_pandas_is_said_in_a_sentence(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    with pytest.raises(vp.VarpropError, match="pip install pandas"):
        vp.inspect(mlp(nn.ReLU), unit(1, 32)).to_dataframe()


def test_a_dataframe_has_a_line_for_every_row(monkeypatch):
    pandas = type("pandas", (), {"DataFrame": staticmethod(list)})
    monkeypatch.setitem(__import__("sys").modules, "pandas", pandas)
    report = vp.inspect(mlp(nn.ReLU), unit(1, 32))
    lines = report.to_dataframe()
    assert len(lines) == len(report.rows)
    assert lines[1]["std_median"] == report["0"].std.median and lines[1]["std"] == report["0"].numbers["std"]


def test_html_escapes_and_holds_the_findings():
    class Odd(nn.Module):
        def forward(self, x):
            return torch.relu(x - 50)

    Odd.__name__ = Odd.__qualname__ = "<b>"
    text = vp.inspect(nn.Sequential(Odd()), unit(1, 4))._repr_html_()
    assert "<table>" in text and "dead" in text and "<td><b>" not in text


def test_unknown_rows_are_named():
    with pytest.raises(KeyError, match="no row 'x'"):
        vp.inspect(mlp(nn.ReLU), unit(1, 32))["x"]


def test_values_without_elements_are_passed_over():
    class Prefixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x):
            x = self.first(x)
            return self.last(torch.cat([x[:, :0], x], 1))

    report = vp.inspect(Prefixed(), unit(1, 5, 8))
    assert report["first"].gradient_total == pytest.approx(0.388 * 5**0.5, rel=0.3)


def test_a_model_that_returns_one_number():
    """Its loss, say: it ended in an IndexError."""

    class WithLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def forward(self, x):
            return self.layer(x).square().mean()

    report = vp.inspect(WithLoss(), unit(1, 8), check="gaussian")
    assert report[""].extents == () and report[""].gradient_total == pytest.approx(1.0)
    assert "layer" in report.text()


class Nested(nn.Module):
    """Blocks with long names, several levels deep."""

    def __init__(self):
        super().__init__()
        self.a_stage_with_a_name_that_nobody_should_cut = nn.Sequential(
            nn.Sequential(nn.Linear(32, 32), nn.ReLU()), nn.Sequential(nn.Linear(32, 32), nn.Tanh())
        )
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        return self.head(self.a_stage_with_a_name_that_nobody_should_cut(x))


@pytest.mark.parametrize("check", [None, "gaussian"])
def test_the_text_fits_a_terminal_explains_itself_and_ends_with_a_verdict(check):
    torch.manual_seed(0)
    report = vp.inspect(Nested(), vp.Moments(0.0, 1.0), example=(4, 32), check=check, samples=64)
    lines = report.text().splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[-1].startswith("Verdict: nothing to worry about was found")
    assert "a_stage_with_a_name_that_nobody_should_cut" in report.text()
    words = " ".join(report.text().split())
    assert "gradient: expected scale" in words and "exact if units are independent" in words
    shallow = report.text(depth=1)
    assert "head" in shallow and len(lines) - len(shallow.splitlines()) == 6  # two stages with two layers each
    with io.StringIO() as file:
        report.show(file, depth=1)
        assert file.getvalue().strip() == shallow.strip()


def test_the_verdict_names_where_to_begin():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    nn.init.zeros_(model[0].weight)
    text = vp.inspect(model, vp.Moments(0.0, 1.0), example=(1, 32)).text()
    assert re.search(r"\nVerdict: 1 error.*; begin with 0 \(constant\)\.$", text)


def test_data_that_are_not_finite_are_refused():
    data = torch.randn(64, 8)
    data[40, 3] = torch.nan
    with pytest.raises(ValueError, match="`check` holds NaN or infinity"):
        vp.inspect(nn.Linear(8, 4), vp.Moments(0.0, 1.0), example=(8, 8), check=data)
