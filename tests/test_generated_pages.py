"""Pages of the site that are written from the code: all commands, all rules, all reasons for approximations."""

import importlib.util
from pathlib import Path

import pytest

from varprop.cli.main import make_parser
from varprop.engine import reasons
from varprop.rules import registry

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture(scope="module")
def generate():
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
    assert generate.escaped(reasons.INDEPENDENCE) in limits


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
