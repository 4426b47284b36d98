"""What the pages name exists: files and headings that are linked to, names of varprop, options of its commands."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import inspect
import re
import runpy
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

import varprop as vp
from varprop.cli.main import make_parser
from varprop_lab.commands import expanded

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
PAGES += [file for folder in ("docs", "docs/howto", "docs/tutorials") for file in sorted((ROOT / folder).glob("*.md"))]
RESULTS = sorted((ROOT / "docs" / "results").glob("*.md"))
PROGRAMS = [f for folder in ("benchmarks", "examples", "tools") for f in sorted((ROOT / folder).rglob("*.py"))]
WRITTEN_WITH_THE_SITE = ROOT / "docs" / "reference"


def anchors(page: Path) -> set[str]:
    """The names by which a page's headings are linked to, as on GitHub and on the site."""
    headings = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, *RESULTS], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8")):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if "://" not in link and WRITTEN_WITH_THE_SITE not in target.parents:
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", [*PAGES, *RESULTS], ids=lambda page: str(page.relative_to(ROOT)))
def test_files_tests_and_targets_of_make_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    for code in re.findall(r"`+([^`]+)`+", page.read_text("utf-8")):
        assert set(re.findall(r"^make ([a-z-]+)", code, re.MULTILINE)) <= targets, code
        for name in re.findall(r"(?<![\w/.])(?:tests|examples|benchmarks|tools)/[\w./-]*\w", code):
            assert (ROOT / name).exists(), name
        for name in re.findall(r"\btest_\w+", code if "\n" not in code else ""):  # blocks have variables of such names
            assert name in names_of_tests(), name


@functools.cache
def names_of_tests() -> set[str]:
    """All test functions, and the files that they are in."""
    files = list((ROOT / "tests").rglob("test_*.py"))
    return {name for file in files for name in re.findall(r"def (test_\w+)", file.read_text())} | {
        f.stem for f in files
    }


def outermost(arguments: str) -> str:
    """The arguments of a call, up to its closing bracket, without what stands in brackets of their own."""
    depth, kept = 0, ""
    for letter in arguments:
        depth -= letter in ")]}"
        if depth < 0:
            break
        kept += letter if depth == 0 else ""
        depth += letter in "([{"
    return kept


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_names_exist_and_take_the_arguments_they_are_given(page: Path) -> None:
    text = page.read_text("utf-8")
    for use in re.finditer(r"\bvp((?:\.\w+)+)(\(?)", text):
        public = functools.reduce(getattr, use[1].split(".")[1:], vp)
        if use[2] and callable(public):
            parameters = inspect.signature(public).parameters
            named = set(re.findall(r"(?:^|,)\s*(\w+)=", outermost(text[use.end() :])))
            assert named <= parameters.keys(), use[0]


def commands(page: Path) -> list[str]:
    """Lines of blocks, and code in the text, that call varprop."""
    lines = re.findall(r"^ *(varprop .*)$|`(varprop [^`]*)`", page.read_text("utf-8"), re.MULTILINE)
    found = [(whole or inline).partition("#")[0].strip() for whole, inline in lines]
    return [line for line in found if " --" in line and "..." not in line and not line.endswith("\\")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_have_the_options_they_are_given(page: Path) -> None:
    for line in commands(page):
        if "--help" not in line:
            options = make_parser().parse_args(shlex.split(line)[1:])  # ends with status 2 at what it does not know
            if line.startswith("varprop reproduce"):
                expanded(options.names)


def programs(text: str) -> set[str]:
    """Calls of this project's own programs, each with all its options in brackets.

    How a record was made ("Command: ...", "Sitting 1: ...") stays as it was.
    """
    text = re.sub(r"^- (?:Command|Sitting \d+): .*$", "", text.replace("\\\n", " "), flags=re.MULTILINE)
    program = r"(?:python|torchrun [^`\n]*?) (?:-m varprop\b|(?:-m )?(?:benchmarks|docs|examples|tests|tools)[./])"
    found = re.findall(rf"(?:^ *|^\t@.*/bin/)({program}[^`\n#]*)|`({program}[^`]*)`", text, re.MULTILINE)
    calls = (re.split("  |[(]", " ".join((line or inline).split("\n")))[0] for line, inline in found)
    calls = (re.sub(r"\[(--\w+ \.\.\.|options of .*)\]|[][]|,?\.\.\.", "", call) for call in calls)
    return {re.sub(r"\bN\b", "1", call).strip() for call in calls}


CALLED = {
    call for file in [*PAGES, *RESULTS, *PROGRAMS, ROOT / "Makefile"] for call in programs(file.read_text("utf-8"))
}


class Understood(BaseException):
    """A program has read its arguments."""


@pytest.mark.filterwarnings("ignore:.* found in sys.modules")
@pytest.mark.parametrize("call", sorted(CALLED))
def test_programs_exist_and_take_the_arguments_they_are_given(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, name = re.search(r"(-m )?((?:benchmarks|docs|examples|tests|tools|varprop)\b\S*)", call).groups()
    arguments = shlex.split(call.partition(name)[2])
    assert importlib.util.find_spec(name) if module else (ROOT / name).exists()
    if name.endswith("private_training.py"):
        pytest.importorskip("opacus")

    def until_understood(*given: Any) -> Any:
        options, unknown = parse(*given)
        if not unknown:
            raise Understood
        return options, unknown

    parse = argparse.ArgumentParser.parse_known_args
    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", until_understood)
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    if arguments:
        with pytest.raises(Understood):
            (runpy.run_module if module else runpy.run_path)(name, run_name="__main__")
