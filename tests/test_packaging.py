"""What a release consists of besides the code: extras, hints on them, the citation, templates of issues."""

import re
import tomllib
from pathlib import Path

import varprop as vp

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
HINT = re.compile(r"pip install '\.\[(\w+)\]'")
# "... needs scipy: pip install '.[lab]'"
NEED = re.compile(r"needs? (\w+)(?:, which comes with torch)?: pip install '\.\[(\w+)\]'")


def sources():
    files = [*(ROOT / "src").rglob("*.py"), ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    return {file: file.read_text("utf-8") for file in files}


def test_every_hint_names_an_extra_that_exists():
    named = {extra for text in sources().values() for extra in HINT.findall(text)}
    assert {"lab", "report", "opacus", "tracking"} <= named <= EXTRAS.keys()


def test_every_hint_names_an_extra_that_brings_what_is_missing():
    hints = [hint for text in sources().values() for hint in NEED.findall(text)]
    assert len(hints) >= 4
    for package, extra in hints:
        brought = [re.split(r"[<>=]", requirement)[0] for requirement in EXTRAS[extra]]
        assert package.lower() in brought, (package, extra)


def test_no_hint_names_a_release_that_does_not_exist():
    for file, text in sources().items():
        assert "pip install varprop" not in text and "pip install 'varprop" not in text, file


def test_the_citation_is_of_this_version():
    citation = (ROOT / "CITATION.cff").read_text("utf-8")
    assert re.search(r"^version: (.+)$", citation, re.MULTILINE)[1] == vp.__version__
    assert re.search(r"^license: (.+)$", citation, re.MULTILINE)[1] == PROJECT["license"]


def test_a_report_of_a_bug_asks_for_a_script_and_the_versions():
    form = (ROOT / ".github/ISSUE_TEMPLATE/bug.yml").read_text("utf-8")
    assert "A script" in form and "varprop doctor" in form
