"""The page of a report: complete, self-contained, escaped, and its data those of the report."""

import functools
import json
import math
import os
import re
import sys
from html.parser import HTMLParser

import pytest
import torch
import torch.nn as nn

import varprop as vp
from varprop.cli.main import main
from varprop.inspection.page import (
    _environment,
    axis_of,
    count,
    ends,
    groups,
    number,
    percent,
    rough,
    sentence,
    signed_axis,
    with_code,
)


def unit(*shape):
    return vp.Moments(torch.zeros(shape), torch.ones(shape))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.line, self.act = nn.Linear(8, 8), nn.ReLU()

    def forward(self, x):
        return x + self.act(self.line(x))


def network():
    torch.manual_seed(0)
    return nn.Sequential(Block(), nn.Sequential(Block(), Block()), nn.Sigmoid(), nn.Linear(8, 4))


@functools.cache
def report(check=None):
    return vp.inspect(network(), unit(1, 8), example=torch.zeros(4, 8), check=check, samples=64)


class Elements(HTMLParser):
    """Every start tag with its attributes, and the text inside scripts of JSON."""

    def __init__(self, text):
        super().__init__()
        self.found, self.data, self._json = [], "", False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        self._json = tag == "script" and dict(attrs).get("type") == "application/json"

    def handle_data(self, data):
        self.data += data if self._json else ""

    def handle_endtag(self, tag):
        self._json = False

    def named(self, tag):
        return [attributes for name, attributes in self.found if name == tag]


@pytest.fixture(scope="module")
def checked():
    made = report("gaussian")
    return made, Elements(made.to_html())


NUMBERS = [
    (0.0, "0"),
    (0.3, "0.300"),
    (-1.23456, "−1.23"),
    (99.96, "100."[:-1]),
    (1234.5, "1230"),
    (12345.0, "1.23×10⁴"),
    (0.00012, "1.20×10⁻⁴"),
    (-3e-12, "−3.00×10⁻¹²"),
    (0.0009999, "0.00100"),
    (math.inf, "∞"),
    (None, ""),
    (math.nan, ""),
]


@pytest.mark.parametrize(("value", "text"), NUMBERS)
def test_numbers_have_three_digits(value, text):
    assert number(value) == text


def test_errors_shares_and_counts_are_short():
    assert [rough(value) for value in (0.0123, 0.96, 3.4, 250.0, 0.0)] == ["0.01", "1.0", "3", "200", "0"]
    shares = (0.0, 0.004, 0.256, 0.996, 1.0, None)
    assert [percent(share) for share in shares] == ["0 %", "< 1 %", "26 %", "> 99 %", "100 %", ""]
    assert [count(value) for value in (950, 11_689_512, 7_000_000_000)] == ["950", "11.7 million", "7 billion"]


def test_sentences_for_terminals_are_set_for_print():
    assert sentence("reaches 2.4e+06 times (0.1 +- 0.02) <x>") == "reaches 2.40×10⁶ times (0.1 ± 0.02) &lt;x&gt;"
    assert with_code("try vp.init_(model, m) <b>") == "try <code>vp.init_(model, m)</code> &lt;b&gt;"


def test_axes_are_logarithmic_where_values_span_decades():
    assert [axis_of(values) for values in ([1.0, 2.0, None], [0.1, 30.0], [0.0, 1.0], [])] == [
        "linear",
        "log",
        "linear",
        "linear",
    ]
    assert [signed_axis(values) for values in ([-1.0, 1.0, 2.0], [0.1, -0.1, 0.1, 500.0])] == ["linear", "both"]


def test_every_row_is_in_the_table_and_in_the_tree(checked):
    made, page = checked
    lines = [row["id"] for row in page.named("tr") if "id" in row]
    entries = [link["id"] for link in page.named("a") if link.get("id", "").startswith("tree-")]
    assert lines == [f"row-{index}" for index in range(len(made.rows))]
    assert entries == [f"tree-{index}" for index in range(len(made.rows))]


def test_the_tree_folds_what_has_rows_inside(checked):
    made, page = checked
    folding = [index for index in range(len(made.rows)) if ends(made.rows, index) > index + 1]
    labels = [made.rows[index].label for index in folding]
    assert labels == ["(model)", "0", "1", "1.0", "1.1"]
    in_tree = [details for details in page.named("details") if "class" not in details]
    assert len(in_tree) == len(folding) + 1  # and the one of the terms


def test_rows_belong_to_the_parts_of_the_model():
    deep = nn.Sequential(nn.Sequential(*(nn.Linear(4, 4) for _ in range(5))))
    rows = vp.inspect(deep, unit(1, 4)).rows
    assert groups(rows)[2:] == ["0.0", "0.1", "0.2", "0.3", "0.4"]
    assert groups(report().rows)[1] == "0"


def test_the_data_of_the_plots_are_those_of_the_rows(checked):
    made, page = checked
    data = json.loads(page.data)
    assert [row[0] for row in data["rows"]] == [row.label for row in made.rows]
    main, seen = data["figures"]["std"]["series"]
    for index, row in enumerate(made.rows):
        known = [main[name][index] for name in ("y", "low", "high", "least", "most")]
        wanted = [row.numbers["std"], row.std.lower, row.std.upper, row.std.least, row.std.most]
        assert known == pytest.approx(wanted, rel=1e-4)
        assert seen["y"][index] == pytest.approx(row.measured["std"]["value"], rel=1e-4)
        assert seen["error"][index] == pytest.approx(row.measured["std"]["error"], rel=1e-4)
    total = data["figures"]["gradient"]["series"][0]["y"]
    assert total == pytest.approx([row.gradient_total for row in made.rows], rel=1e-4)
    (dead,) = [one for one in data["figures"]["units"]["series"] if one["name"] == "dead"]
    assert dead["y"] == [
        pytest.approx(100 * row.numbers["dead"]) if "dead" in row.numbers else None for row in made.rows
    ]


def test_the_check_brings_scatter_plots_and_columns(checked):
    made, page = checked
    plots = [box["data-figure"] for box in page.named("div") if "data-figure" in box]
    assert plots == ["std", "gradient", "mean", "units", "check-std", "check-mean", "check-gradient"]
    scatter = json.loads(page.data)["figures"]["check-std"]["series"][0]
    row = made.rows[2]
    assert scatter["x"][2] == pytest.approx(row.measured["std"]["value"], rel=1e-4)
    assert scatter["y"][2] == pytest.approx(row.numbers["std"], rel=1e-4)
    plain = report().to_html()
    assert "check-std" not in plain and "measured std" not in plain
    assert "measured std" in made.to_html()


def test_nothing_is_loaded_from_elsewhere(checked):
    made, page = checked
    text = made.to_html()
    assert set(re.findall(r"https?://[^\"'\s]+", text)) == {"http://www.w3.org/2000/svg"}  # a name, not a link
    assert not any("src" in attributes for _, attributes in page.found)
    assert all(link["href"].startswith("#") for link in page.named("a"))
    assert page.named("link") == [] and "@import" not in text and "url(" not in text.replace("url(#", "")
    assert "default-src 'none'" in text


def test_links_lead_to_rows_that_exist(checked):
    _, page = checked
    ids = {attributes["id"] for _, attributes in page.found if "id" in attributes}
    assert {link["href"][1:] for link in page.named("a")} <= ids


class Hostile(nn.Module):
    def forward(self, x):
        return torch.relu(x - 50)


def test_names_of_the_user_stay_text():
    Hostile.__name__ = Hostile.__qualname__ = "</script><img src=x onerror=alert(1)>"
    model = nn.Sequential()
    model.add_module("<i>&\"'", Hostile())
    text = vp.inspect(model, unit(1, 4)).to_html()
    page = Elements(text)
    assert page.named("img") == [] and len(page.named("script")) == 2
    assert not any("onerror" in attributes for _, attributes in page.found)
    assert "&lt;/script&gt;&lt;img" in text
    assert any("</script>" in row[1] for row in json.loads(page.data)["rows"])


def test_findings_come_first_with_what_to_do():
    model = network()
    model[0].line.bias.data.fill_(-40.0)
    model[3].weight.data.mul_(50)
    made = vp.inspect(model, unit(1, 8))
    text = made.to_html()
    assert text.index('<ul class="findings">') < text.index('class="plot"') < text.index("<table")
    first = re.search(r'<li class="error"><span class="badge">error</span>.*?</li>', text).group()
    assert '<a class="place" href="#row-' in first and "<code>vp.init_(model, moments)</code>" in first
    order = re.findall(r'<li class="(error|warning|note)">', text)
    assert order == [finding.severity for finding in made.findings] and order[0] == "error"
    assert re.search(r'<tr id="row-\d+" class="layer error">', text)


def test_a_good_network_says_so():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    vp.init_(model, unit(1, 8))
    text = vp.inspect(model, unit(1, 8)).to_html()
    assert "Nothing to worry about was found." in text and 'class="badge">error' not in text


@pytest.mark.filterwarnings("ignore")
def test_infinite_numbers_are_said_and_drawn():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in model:
        layer.weight.data.fill_(1e30)
    text = vp.inspect(model, unit(1, 4)).to_html()
    data = Elements(text).data
    assert '"inf"' in data and "NaN" not in data and "Infinity" not in data
    assert 'data-key="Infinity">∞' in text


def test_tokens_and_single_operations_have_pages():
    words = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 3))
    made = vp.inspect(words, vp.Tokens.uniform(11), example=torch.zeros(1, 5, dtype=torch.long))
    assert "1×5" in made.to_html()
    assert 'id="row-0"' in vp.inspect(nn.ReLU(), unit(1, 3)).to_html()


def test_the_page_needs_no_extra(monkeypatch):
    for package in ("matplotlib", "rich", "numpy", "pandas"):  # jinja2 comes with torch
        monkeypatch.setitem(sys.modules, package, None)
    assert report().to_html().startswith("<!doctype html>")


def test_a_missing_jinja2_is_named(monkeypatch):
    _environment.cache_clear()
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(vp.VarpropError, match=r"needs jinja2.*\.\[report\]"):
        report().to_html()


def test_the_file_is_written_whole(tmp_path):
    made = report()
    assert made.to_html(tmp_path / "page.html") == (tmp_path / "page.html").read_text("utf-8")
    assert [file.name for file in tmp_path.iterdir()] == ["page.html"]
    with pytest.raises(vp.VarpropError, match="cannot be written: No such file or directory"):
        made.to_html(tmp_path / "missing" / "page.html")
    (tmp_path / "folder").mkdir()
    with pytest.raises(vp.VarpropError, match="cannot be written"):
        made.to_html(tmp_path / "folder")
    with pytest.raises(vp.VarpropError, match="cannot be written"):
        made.to_html(tmp_path / ("x" * 250))  # a draft with a longer name than the system takes
    made.to_html(os.devnull)
    assert not os.path.isfile(os.devnull)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["folder", "page.html"]


def test_a_notebook_shows_findings_and_rows_in_its_own_colours():
    made = report("gaussian")
    text = made._repr_html_()
    style = re.search(r"<style>(.*?)</style>", text, re.DOTALL).group(1)
    selectors = [part.strip() for rule in re.findall(r"([^{}]+)\{", style) for part in rule.split(",")]
    assert all(selector.startswith(".varprop-report") for selector in selectors)
    assert "background: none" in style and "color: inherit" in style
    assert text.count("<tr>") == 1 + sum(row.kind == "module" or not row.moves for row in made.rows)
    assert all(sentence(finding.text) in text for finding in made.findings)


MODELS = """
import torch
from torch import nn

def good():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
"""


@pytest.fixture
def run(capfd, tmp_path):
    (tmp_path / "models.py").write_text(MODELS)

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            main(["inspect", f"{tmp_path / 'models.py'}:good", "--input-shape", "8", *map(str, arguments)])
        captured = capfd.readouterr()
        return ended.value.code or 0, captured.out, captured.err

    return run


def test_the_command_writes_the_page(run, tmp_path):
    code, out, err = run("--html", tmp_path / "out.html", "--check", "--samples", "16")
    assert code == 0 and "ReLU" in out and "out.html" in err
    assert 'data-figure="check-std"' in (tmp_path / "out.html").read_text("utf-8")


def test_json_on_standard_output_stays_clean_beside_a_page(run, tmp_path):
    _, out, _ = run("--html", tmp_path / "out.html", "--json", "-")
    assert json.loads(out)["model"] == "Sequential" and (tmp_path / "out.html").is_file()


def test_a_missing_folder_is_said_before_the_work(run, tmp_path):
    code, out, err = run("--html", tmp_path / "nowhere" / "out.html")
    assert code == 2 and out == "" and "There is no folder" in err and len(err.strip().splitlines()) == 1
