"""Pages of the site that are written from the code: all commands, all rules, all reasons for approximations."""

import importlib.util
import math
from pathlib import Path

import pytest

from varprop.cli.main import make_parser
from varprop.rules import registry

DOCS = Path(__file__).parents[1] / "docs"


def loaded(file):
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def generate():
    return loaded(DOCS / "generate.py")


def test_every_command_and_option_is_on_the_page(generate):
    page = generate.commands_page()
    for command in ("inspect", "doctor", "demo", "compare", "reproduce", "bench", "data get"):
        assert f"## varprop {command}\n" in page
    for parser in generate.parsers(make_parser()):
        for action in parser._actions:
            if action.help != "==SUPPRESS==" and action.dest != "help":
                assert all(f"`{name}" in page for name in action.option_strings)


def test_every_rule_and_every_reason_is_on_a_page(generate):
    rules, limits = generate.rules_page(), generate.limitations_page()
    for key, rule in registry.registered().items():
        name = f"`{generate.name_of(key)}`"
        assert name in rules
        if rule.approximate is not None:
            assert name in limits, "its reason is not found"
    assert "assumes independence of operands that share a random ancestor" in limits


def test_texts_of_functions_and_of_what_they_call_are_found(generate):
    def inner():
        return "inner functions say something as well"

    def outer(flag):
        return "this is said of some arguments" if flag else inner()

    inner.__module__ = "varprop.rules.linear"
    assert generate.sentences(outer) == {
        "this is said of some arguments",
        "inner functions say something as well",
    }


def test_text_is_escaped_but_for_code(generate):
    assert generate.escaped("a_b `c|d_e` |x| $5") == r"a\_b `c\|d_e` \|x\| \$5"


def test_the_page_has_no_default_of_a_switch(generate):
    assert "`False`" not in generate.commands_page()


def test_links_that_lead_nowhere_are_named(tmp_path):
    broken_links = loaded(DOCS.parent / "tools" / "check_site.py").broken_links
    assert len(list(broken_links(tmp_path))) == 1, "a site without pages"
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.html").write_text('<a href="sub/b.html#here">b</a> <a href="https://example.org/x">out</a>')
    (tmp_path / "sub" / "b.html").write_text(
        '<h1 id="here">B</h1> <a href="../a.html?x=1">a</a> <a href="#here">up</a>'
    )
    assert list(broken_links(tmp_path)) == []
    (tmp_path / "a.html").write_text('<a href="sub/b.html#gone">b</a> <img src="c.png">')
    assert list(broken_links(tmp_path)) == [
        "a.html: sub/b.html#gone has no such anchor",
        "a.html: c.png does not exist",
    ]


@pytest.mark.slow
def test_activations_are_on_a_page_with_what_they_do_in_deep_chains(generate):
    """For ReLU in closed form; chi is never below 1 (Poincare), and at the depth shown no error of scale grows."""
    page = generate.activations_page()
    rows = {
        cells[1].strip(" `"): [float(cell) for cell in cells[2:-1]]
        for line in page.splitlines()
        if line.startswith("| `") and (cells := line.split("|"))
    }
    assert {"ReLU", "GELU", "SiLU", "Tanh", "Sigmoid", "ELU", "LeakyReLU", "Softplus", "Hardswish"} <= rows.keys()
    variance = 0.5 - 0.5 / math.pi
    expected = [math.sqrt(0.5 / math.pi), variance, 1.0, 0.5 / variance]
    assert rows["ReLU"][:4] == pytest.approx(expected, abs=1e-3)
    angle = math.acos(0.5)
    product = (math.sin(angle) + (math.pi - angle) * 0.5) / (2 * math.pi)  # Cho and Saul 2009
    assert rows["ReLU"][4] == pytest.approx((product - 0.5 / math.pi) / variance, abs=1e-3)
    for name, row in rows.items():
        assert row[3] >= 0.9995 or name == "Hardshrink", name  # which jumps
    for name in ("ReLU", "GELU", "SiLU", "Tanh", "ELU", "Softplus"):
        assert rows[name][12] <= 1.0005 and rows[name][15] <= 1.0005, name
