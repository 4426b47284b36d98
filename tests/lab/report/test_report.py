"""The report: one file with nothing outside it, that shows what is there and says what is not."""

from __future__ import annotations

import html
import json
import math
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser

import pytest

import varprop as vp
from varprop_lab import figures
from varprop_lab.figures import figures_of, rounded
from varprop_lab.paper import report
from varprop_lab.protocol import METHODS, TRAIN_LOSS, Cell
from varprop_lab.report import answer, write_one
from varprop_lab.store import read_runs

from .. import synthetic

NASTY = "<img src=x onerror=alert(1)>"


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """Figures are only noted, not drawn, which has tests of its own; the repository's documentation is out of sight."""
    monkeypatch.chdir(tmp_path)
    noted = []
    monkeypatch.setattr(figures, "draw", lambda figure, stem, heading="": noted.append(stem))
    return noted


class Page(HTMLParser):
    """The tags of a page, and the text of its scripts."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.scripts, self.inside = [], [], None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        self.inside = None

    def handle_data(self, data):
        if self.inside == "script":
            self.scripts[-1] += data

    @property
    def data(self):
        return json.loads(self.scripts[0], parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def written(tmp_path, outcomes, experiments=()):
    synthetic.write(tmp_path, outcomes)
    return report.write(tmp_path, experiments).read_text("utf-8")


def text_of(page):
    return html.unescape(re.sub(r"<[^>]+>", "", re.sub(r"(?s)<(style|script).*?</\1>", "", page)))


def test_everything_is_written_where_it_belongs(tmp_path, drawn):
    outcomes = synthetic.everything()
    page = written(tmp_path, outcomes, ["relu"])
    for name in {outcome.cell.experiment for outcome in outcomes}:
        assert {file.name for file in (tmp_path / name).glob("*.csv")} == {"runs.csv", "curves.csv", "searches.csv"}
    assert {file.name for file in tmp_path.iterdir() if file.is_file()} == {"report.html", "claims.json", "claims.md"}
    shown = Page(page).data
    assert len(shown) == len(drawn) == sum(len(figures_of(run)) for run in read_runs(tmp_path, ["relu"]))
    assert tmp_path / "relu" / "figures" / "relu" in drawn
    assert not list(tmp_path.rglob(".*"))


def outside(page):
    """Addresses that a page asks for, or leads to, beyond itself."""
    found = [value for _, attrs in page.tags for name, value in attrs.items() if name in ("src", "href", "action")]
    return [address for address in found if not address.startswith(("#", "data:image/png;base64,"))]


def test_the_page_asks_for_nothing_outside_itself(tmp_path, drawn):
    page = Page(written(tmp_path, synthetic.grid("mnist")))
    assert not [tag for tag, _ in page.tags if tag in ("link", "img", "iframe", "base", "object", "embed", "form")]
    assert outside(page) == []
    policy = [attrs["content"] for _, attrs in page.tags if attrs.get("http-equiv") == "Content-Security-Policy"]
    assert policy == ["default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"]
    assert "fetch(" not in page.scripts[1] and "innerHTML" not in page.scripts[1]


def test_one_comparison_has_a_page_of_its_own_with_the_answer_first_and_no_claims(tmp_path, drawn):
    outcomes = synthetic.grid("compare", seeds=(0,))
    synthetic.write(tmp_path, [*outcomes, *synthetic.grid("mnist")])
    page = write_one(tmp_path, "compare").read_text("utf-8")
    text = " ".join(text_of(page).split())
    found = answer(outcomes)
    assert found.startswith("Which method has the lowest training loss is undecided") and found in text
    assert text.index(found) < text.index("Training loss (")
    assert "claim" not in text.lower() and "MNIST" not in text and not (tmp_path / "claims.json").exists()


@pytest.mark.parametrize(
    ("methods", "sentence"),
    [
        (METHODS, "Every method starts from the same function. The learning rate"),
        (
            (*METHODS, "layer"),
            "starts from the same function but LN, which cannot compute it and start from the nearest",
        ),
    ],
)
def test_the_page_says_which_methods_start_from_another_function(tmp_path, drawn, methods, sentence):
    synthetic.write(tmp_path, synthetic.grid("compare", seeds=(0,), methods=methods))
    assert sentence in " ".join(text_of(write_one(tmp_path, "compare").read_text("utf-8")).split())


def test_a_comparison_is_called_by_its_model_and_data_where_they_are_known(tmp_path, drawn):
    synthetic.write(tmp_path, synthetic.grid("compare", seeds=(0,)))
    assert "Comparison: normalizations" in write_one(tmp_path, "compare").read_text("utf-8")
    known = {**synthetic.manifest("compare"), "configuration": {"model": "a/mine.py:make", "dataset": "digits"}}
    (tmp_path / "compare" / "manifest.json").write_text(json.dumps(known))
    assert "mine.py:make on digits: normalizations" in write_one(tmp_path, "compare").read_text("utf-8")


def test_the_page_carries_its_figures(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "draw", lambda figure, stem, heading="": written_bytes(stem.with_suffix(".png")))
    synthetic.write(tmp_path, synthetic.grid("compare", seeds=(0,)))
    page = Page(write_one(tmp_path, "compare").read_text("utf-8"))
    pictures = [attrs["src"] for tag, attrs in page.tags if tag == "img"]
    assert pictures == ["data:image/png;base64,UE5H"] * len(page.data) and outside(page) == []


def written_bytes(file):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"PNG")


def test_every_link_inside_the_page_leads_somewhere(tmp_path, drawn):
    page = Page(written(tmp_path, synthetic.everything(), ["relu", "nothing"]))
    places = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(places) == len(set(places))
    links = {attrs["href"][1:] for _, attrs in page.tags if attrs.get("href", "").startswith("#")}
    assert links <= set(places)
    plots = [attrs["data-figure"] for _, attrs in page.tags if "data-figure" in attrs]
    assert set(plots) == set(page.data)


def test_the_embedded_values_are_those_of_the_records(tmp_path, drawn):
    outcomes = synthetic.grid("mnist", seeds=(7,))
    data = Page(written(tmp_path, outcomes)).data
    panel = data["e-mnist-training"]["panels"][1]
    (series,) = [series for series in panel["series"] if series["label"] == "AP2"]
    (outcome,) = [o for o in outcomes if (o.cell.method, o.cell.start) == ("analytic", "bn")]
    assert series["y"] == pytest.approx(outcome.curves[TRAIN_LOSS], rel=1e-4)


def test_the_table_shows_every_run_with_flags_explained(tmp_path, drawn):
    outcomes = synthetic.grid("mnist")
    broken = synthetic.outcome(outcomes[3].cell, diverged=True)
    lowest = replace(outcomes[0], search=replace(outcomes[0].search, lr=1.1e-6, at_bound=True))
    page = written(tmp_path, [*outcomes, broken, lowest])
    body = page[page.index('<table class="sortable">') :]
    body = body[: body.index("</table>")]
    assert body.count("<tr") == 1 + len(outcomes)
    assert body.count('class="diverged"') == 1
    assert body.count(">at bound<") == sum(o.search.at_bound for o in outcomes)
    assert body.count(">at lower bound<") == 1
    assert "run again with --lr-max 0.1 to search further" in page
    assert "which is a result" in page
    assert "all rates tried gave nearly the same loss" not in page


def test_missing_experiments_and_cells_are_shown_as_missing(tmp_path, drawn):
    outcomes = [o for o in synthetic.grid("mnist") if (o.cell.method, o.cell.start) != ("weight", "none")]
    text = text_of(written(tmp_path, outcomes, ["noisy-mnist"]))
    assert "no finished cell of weight from none" in text
    assert "no finished cells" in text
    assert "noisy-mnist/validation-accuracy: no data" in text
    assert "No manifest: how this was run is unknown." in text


def test_an_empty_folder_gives_a_page_that_says_so(tmp_path, drawn):
    text = text_of(report.write(tmp_path / "new").read_text("utf-8"))
    assert "Nothing was run in this folder yet." in text
    assert "None of the experiments they rest on lies in this folder" in text


def test_a_corrupt_file_is_named_on_the_page(tmp_path, drawn):
    synthetic.write(tmp_path, synthetic.grid("mnist"))
    (tmp_path / "mnist" / "cells" / "broken.json").write_text('{"cell": ')
    text = text_of(report.write(tmp_path).read_text("utf-8"))
    assert re.search(r"broken\.json is damaged: .*; delete it and run the command again with --resume", text)


def test_what_comes_from_files_is_escaped(tmp_path, drawn):
    outcomes = [
        replace(o, cell=replace(o.cell, experiment=NASTY, variant=NASTY)) for o in synthetic.grid("mnist", (0,))
    ]
    synthetic.write(tmp_path, outcomes)
    manifest = {
        **synthetic.manifest(NASTY),
        "command": f"</script>{NASTY}",
        "hardware": {"gpu": NASTY},
        "git": {"commit": NASTY},
    }
    (tmp_path / NASTY / "manifest.json").write_text(json.dumps(manifest))
    page = report.write(tmp_path).read_text("utf-8")
    assert NASTY not in page
    assert page.count("</script>") == 2
    assert not [tag for tag, _ in Page(page).tags if tag == "img"]
    assert text_of(page).count(NASTY) > 5


def test_manifest_is_shown(tmp_path, drawn):
    text = text_of(written(tmp_path, synthetic.grid("mnist")))
    for value in (
        "varprop reproduce mnist --seeds 3",
        "synthetic, no hardware",
        "torch 2.13.0",
        "0123456789abcdef",
        "83.2 s",
    ):
        assert value in text


def test_infinite_and_missing_values_stay_valid_json(tmp_path, drawn):
    odd = replace(synthetic.outcome(Cell("odd", "batch", "bn", 0)), test_loss=math.nan, start_gap=math.inf)
    odd = replace(odd, curves={TRAIN_LOSS: [1.0, math.nan, math.inf]}, diverged=True)
    assert Page(written(tmp_path, [odd])).data
    assert rounded({"a": (math.nan, [-math.inf], 1 / 3, 2, "x")}) == {"a": [None, [None], 0.33333, 2, "x"]}


def test_without_jinja_one_sentence_says_what_to_install(tmp_path, drawn, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(vp.VarpropError, match=r"needs jinja2.*\.\[report\]"):
        report.write(synthetic.write(tmp_path, synthetic.grid("mnist")))
    assert (tmp_path / "mnist" / "runs.csv").exists() and (tmp_path / "claims.md").exists()
