"""Two states of one model: factors, findings, and the forms of a comparison."""

import copy
import functools
import json
import sys
from dataclasses import replace

import pytest
import torch
import torch.nn as nn

import varprop as vp
from varprop.cli.main import main
from varprop.inspection.findings import Finding, differences, severity_change


def unit(*shape):
    return vp.Moments(torch.zeros(shape), torch.ones(shape))


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


def changed(change):
    model = network()
    change(model)
    return model


def nothing(model):
    pass


def emptied(model):
    model[4].weight.data.zero_()


@functools.cache
def compared(change, names=("before", "after")):
    first, second = (vp.inspect(model, unit(1, 8)) for model in (network(), changed(change)))
    return first.compare(second, names)


def larger(model):
    model[2].weight.data.mul_(4)
    model[2].bias.data.mul_(4)


def dead(model):
    model[2].bias.data.fill_(-30.0)


def finding(severity, kind, where):
    return Finding(severity, kind, where, "text", "advice", 1.0)


def test_factors_are_those_of_the_weights():
    found = {change.label: change for change in compared(larger).changes}
    # a rectifier passes a factor on: forward to what follows, backward to what comes before
    assert [found[label].std_factor for label in "0123"] == pytest.approx([1, 1, 4, 4], rel=1e-5)
    assert [found[label].gradient_factor for label in "0123"] == pytest.approx([4, 4, 1, 1], rel=1e-4)
    assert found["2"].size == pytest.approx(2.0, rel=1e-5)


def test_the_largest_change_comes_first():
    comparison = compared(larger)
    sizes = [change.size for change in comparison.largest()]
    assert sizes == sorted(sizes, reverse=True) and len(sizes) == 5
    assert len(comparison.largest(2)) == 2


def test_equal_states_have_no_change():
    comparison = compared(nothing)
    assert {change.size for change in comparison.changes} == {0.0}
    assert comparison.new == comparison.gone == ()


def test_a_layer_that_stops_is_an_infinite_change():
    comparison = compared(emptied)
    assert comparison.largest(1)[0].label != "3" and comparison.largest(1)[0].size == float("inf")
    assert "null" in comparison.to_json() and "Infinity" not in comparison.to_json()


def test_findings_are_new_gone_or_stayed():
    comparison = compared(dead)
    assert ("dead", "3") in {(new.kind, new.where) for new in comparison.new}
    back = comparison.after.compare(comparison.before)
    assert back.gone == comparison.new and back.new == comparison.gone
    same = comparison.after.compare(comparison.after)
    assert same.new == same.gone == () and len(same.findings.stayed) == len(comparison.after.findings)


def test_a_finding_that_moved_is_the_same_finding():
    before = [finding("warning", "dead", "1"), finding("error", "growth", "2"), finding("note", "shift", "0")]
    after = [finding("error", "dead", "3"), finding("warning", "growth", "2"), finding("error", "constant", "5")]
    found = differences(before, after)
    assert [one.kind for one in found.new] == ["constant"] and [one.kind for one in found.gone] == ["shift"]
    assert {pair[1].kind: severity_change(pair) for pair in found.stayed} == {"dead": "worse", "growth": "milder"}


def test_the_same_place_goes_before_the_same_kind():
    before = [finding("error", "dead", "1"), finding("error", "dead", "3")]
    found = differences(before, [finding("error", "dead", "3")])
    assert [one.where for one in found.gone] == ["1"]


def test_repeated_labels_are_paired_in_order():
    class Twice(nn.Module):
        def forward(self, x):
            return (x.relu() + 3.0).relu()

    first, second = vp.inspect(Twice(), unit(1, 4)), vp.inspect(Twice(), vp.Moments(torch.ones(1, 4), torch.ones(1, 4)))
    pairs = [(change.before.node, change.after.node) for change in first.compare(second).changes]
    assert len(pairs) == len(first.rows) and all(one == other for one, other in pairs)


def test_rows_of_one_state_alone_are_named():
    first = vp.inspect(network(), unit(1, 8))
    longer = nn.Sequential(*network(), nn.Tanh())
    comparison = first.compare(vp.inspect(longer, unit(1, 8)), ("short", "long"))
    assert comparison.only_after == ("5",) and comparison.only_before == ()
    assert "1 row only in long, such as 5." in comparison.to_html()


def test_different_models_are_refused():
    other = vp.inspect(nn.ModuleDict({"a": nn.Linear(8, 8)})["a"], unit(1, 8))
    with pytest.raises(vp.VarpropError, match="different models, Sequential and Linear: no layer has the same name"):
        vp.inspect(network(), unit(1, 8)).compare(other)


def test_text_and_dict_say_the_same(capsys):
    comparison = compared(dead, ("epoch 0", "epoch 50"))
    comparison.show()
    text = capsys.readouterr().out
    assert text == comparison.text() + "\n"
    assert "epoch 0 -> epoch 50" in text and "new error: 3: 100% of its units are dead" in text
    assert "dead 0% -> 100%" in text
    loaded = json.loads(comparison.to_json())
    assert loaded["names"] == ["epoch 0", "epoch 50"]
    assert [change["label"] for change in loaded["changes"]] == [change.label for change in comparison.changes]
    assert loaded["findings"]["new"] == [one.to_dict() for one in comparison.new]


def test_json_goes_to_a_file(tmp_path):
    comparison = compared(larger)
    assert comparison.to_json(tmp_path / "diff.json") + "\n" == (tmp_path / "diff.json").read_text()


def test_the_page_holds_both_states(tmp_path):
    comparison = compared(dead, ("<first>", "second"))
    text = comparison.to_html(tmp_path / "diff.html")
    assert text == (tmp_path / "diff.html").read_text("utf-8")
    data = json.loads(text.partition('id="data">')[2].partition("</script>")[0])
    first, second = data["figures"]["std"]["series"]
    assert first["y"] == pytest.approx([change.before.numbers["std"] for change in comparison.changes], rel=1e-4)
    assert second["y"] == pytest.approx([change.after.numbers["std"] for change in comparison.changes], rel=1e-4)
    assert (first["name"], second["name"]) == ("<first>", "second") and "<first>" not in text
    assert "<h3>New</h3>" in text and text.count("data-first") == 2  # the column, and the script that looks for it


def test_gone_findings_give_no_advice():
    comparison = compared(dead)
    text = comparison.after.compare(comparison.before).to_html()
    gone = text.partition("<h3>Gone</h3>")[2].partition("</ul>")[0]
    assert 'class="gone"' in gone and "was error" in gone and "What to do" not in gone


def test_a_notebook_shows_the_comparison():
    text = compared(dead)._repr_html_()
    assert "<b>new error</b>" in text and "before → after" in text and text.count("<tr>") == 1 + 5


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_one_picture(tmp_path, ending):
    pytest.importorskip("matplotlib")
    file = compared(larger).figure(tmp_path / f"diff.{ending}")
    assert file.read_bytes()[:5] in (b"\x89PNG\r", b"<?xml", b"%PDF-")


def test_a_picture_that_cannot_be_is_refused_in_a_sentence(tmp_path, monkeypatch):
    comparison = compared(larger)
    with pytest.raises(vp.VarpropError, match=r"must end in \.png, \.svg or \.pdf"):
        comparison.figure(tmp_path / "diff.docx")
    with pytest.raises(vp.VarpropError, match="cannot be written"):
        comparison.figure(tmp_path / "nowhere" / "diff.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(vp.VarpropError, match="needs matplotlib"):
        comparison.figure(tmp_path / "diff.png")


def test_a_dead_layer_can_be_drawn(tmp_path):
    comparison = compared(emptied)
    assert comparison.figure(tmp_path / "diff.png").is_file()


def test_reports_are_not_changed_by_comparing():
    report = vp.inspect(network(), unit(1, 8))
    before = copy.deepcopy(report.to_dict())
    report.compare(replace(report)).to_html()
    assert report.to_dict() == before


MODELS = """
import torch
from torch import nn

def make():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
"""


@pytest.fixture
def run(capfd, tmp_path):
    (tmp_path / "models.py").write_text(MODELS)
    torch.save(network().state_dict(), tmp_path / "first.pt")
    torch.save(changed(dead).state_dict(), tmp_path / "second.pt")

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            main(["inspect", f"{tmp_path / 'models.py'}:make", "--input-shape", "8", *map(str, arguments)])
        captured = capfd.readouterr()
        return ended.value.code or 0, captured.out, captured.err

    return run


def test_the_command_compares_two_files(run, tmp_path):
    files = ("--weights", tmp_path / "second.pt", "--against", tmp_path / "first.pt")
    code, out, _ = run(*files, "--html", tmp_path / "diff.html", "--figure", tmp_path / "diff.png")
    assert code == 1 and "first.pt -> second.pt" in out and "new error: 3" in out
    assert "first.pt → second.pt" in (tmp_path / "diff.html").read_text("utf-8")
    assert (tmp_path / "diff.png").is_file()


def test_the_exit_status_is_that_of_the_state_looked_at(run, tmp_path):
    files = ("--weights", tmp_path / "first.pt", "--against", tmp_path / "second.pt", "--json", "-")
    code, out, _ = run(*files)
    assert code == 0 and json.loads(out)["findings"]["gone"][0]["severity"] == "error"


def test_files_of_one_name_are_told_apart(run, tmp_path):
    (tmp_path / "old").mkdir()
    (tmp_path / "second.pt").rename(tmp_path / "old" / "first.pt")
    _, out, _ = run("--weights", tmp_path / "first.pt", "--against", tmp_path / "old" / "first.pt", "--json", "-")
    assert json.loads(out)["names"] == [str(tmp_path / "old" / "first.pt"), str(tmp_path / "first.pt")]


def test_against_the_model_as_built(run, tmp_path):
    code, out, _ = run("--weights", tmp_path / "second.pt", "--against", "fresh")
    assert code == 1 and "as built -> second.pt" in out


def test_against_the_same_weights_after_init(run, tmp_path):
    _, out, _ = run("--weights", tmp_path / "first.pt", "--against", "init", "--json", "-")
    loaded = json.loads(out)
    first = next(change for change in loaded["changes"] if change["label"] == "0")
    assert loaded["names"] == ["first.pt", "vp.init_"]
    assert first["after"]["std"] == pytest.approx(1.0, rel=1e-4) and first["before"]["std"] < 0.9


MISTAKES = {
    "fresh alone": (["--against", "fresh"], "give the other state by --weights"),
    "no file": (["--against", "nowhere.pt"], "there is no file nowhere.pt"),
    "one state": (["--figure", "x.png"], "name the other by --against"),
    "no weights": (["--against", "{models}"], "cannot be read as weights"),
}


@pytest.mark.parametrize(("arguments", "words"), MISTAKES.values(), ids=MISTAKES.keys())
def test_every_mistake_gets_one_sentence(run, tmp_path, monkeypatch, arguments, words):
    """Before any work, of which a slow machine would show the progress."""
    monkeypatch.setattr(vp, "inspect", lambda *_, **__: pytest.fail("inspected before the mistake was found"))
    code, out, err = run(*(argument.format(models=tmp_path / "models.py") for argument in arguments))
    assert (code, out) == (2, "") and words in err and len(err.strip().splitlines()) == 1
