"""The report in headless Chromium: it draws, answers to pointer and clicks, and fits phone and desktop."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from varprop_lab import figures
from varprop_lab.paper import report
from varprop_lab.protocol import ALL_METHODS
from varprop_lab.report import write_one

from ...chromium import SIZES, count, keep
from .. import synthetic

pytestmark = pytest.mark.browser
FIRST = '#headline [data-figure="e-mnist-training"]'


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    out = tmp_path_factory.mktemp("out")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "draw", lambda *_: None)
        page = report.write(synthetic.write(out, synthetic.everything()), ["relu", "nothing"])
    return page.as_uri()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_it_loads_without_errors_or_requests_and_fits(browser, address, size, dark):
    browser.open(address, *SIZES[size], dark=dark)
    assert browser.run("document.documentElement.dataset.ready") == "yes"
    assert browser.errors() == []
    assert browser.requests() == [address]
    assert browser.run("document.documentElement.scrollWidth <= innerWidth")
    background = browser.run("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(27, 29, 31)" if dark else "rgb(255, 255, 255)")
    keep(browser, f"{size}-{'dark' if dark else 'light'}")
    browser.run("document.querySelector('#headline').scrollIntoView({behavior: 'instant'})")
    keep(browser, f"{size}-{'dark' if dark else 'light'}-headline")


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """The page of `varprop compare`, with its pictures, alone in a folder as if it had been mailed."""
    out, mailed = tmp_path_factory.mktemp("out"), tmp_path_factory.mktemp("mailed")
    page = write_one(synthetic.write(out, synthetic.grid("compare", seeds=(0, 1), methods=ALL_METHODS)), "compare")
    return Path(shutil.copy(page, mailed)).as_uri()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1440, 390])
def test_the_page_of_a_comparison_fits_and_begins_with_the_answer(browser, compared, width, dark):
    browser.open(compared, width, 900, dark=dark)
    assert browser.errors() == [] and browser.requests() == [compared]
    assert browser.run("document.documentElement.scrollWidth <= innerWidth")
    assert browser.run("document.querySelector('.answer').getBoundingClientRect().bottom") < 600
    beyond = "[...document.querySelectorAll('.scroll')].map(box => box.scrollWidth - box.clientWidth)"
    assert max(browser.run(beyond)) == 0  # no number lies outside the screen
    assert count(browser, "img") == 0 and count(browser, "a[download$='.png']") == count(browser, ".plot")
    keep(browser, f"compare-{width}-{'dark' if dark else 'light'}")


def test_colours_can_be_switched_by_hand(browser, compared):
    browser.open(compared)
    background = "getComputedStyle(document.body).backgroundColor"
    light = browser.run(background)
    browser.click("button[data-theme=dark]")
    assert (light, browser.run(background)) == ("rgb(255, 255, 255)", "rgb(27, 29, 31)")
    assert browser.run("document.querySelector('button[data-theme=dark]').getAttribute('aria-pressed')") == "true"


def test_without_scripts_the_pictures_are_there(browser, compared):
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.open(compared)
        widths = browser.call("DOM.getDocument", depth=-1)
        assert str(widths).count("'nodeName': 'IMG'") >= 4
    finally:
        browser.call("Emulation.setScriptExecutionDisabled", value=False)


def test_every_figure_has_its_panels_and_lines(browser, address):
    browser.open(address)
    assert count(browser, ".plot") == count(browser, ".plot .panels") > 30
    assert count(browser, f"{FIRST} .panels > svg") == 3
    assert count(browser, f"{FIRST} path.c-line[d^=M]") == 3 * 5 + 5  # a line a method, and the legend
    assert browser.run("[...document.querySelectorAll('.plot path')].every(p => !p.getAttribute('d').includes('NaN'))")


def test_dark_pages_use_the_colours_for_dark(browser, address):
    stroke = f"getComputedStyle(document.querySelector('{FIRST} .series path')).stroke"
    browser.open(address)
    light = browser.run(stroke)
    browser.open(address, dark=True)
    assert (light, browser.run(stroke)) == ("rgb(74, 77, 80)", "rgb(224, 227, 230)")


def test_pointing_at_a_panel_shows_the_values_there(browser, address):
    browser.open(address)
    panel = f"{FIRST} .panels > svg"
    browser.run(f"document.querySelector({panel!r}).scrollIntoView({{block: 'center', behavior: 'instant'}})")
    assert browser.run("document.getElementById('tooltip').hidden")
    browser.point(*browser.middle(panel))
    shown = browser.run("document.getElementById('tooltip').innerText")
    assert "init = None, epoch" in shown
    assert [name in shown for name in ("Standard:", "WN:", "BN:", "BN eval:", "AP2:")] == [True] * 5
    assert count(browser, f"{FIRST} .hover circle") == 5
    keep(browser, "tooltip")
    browser.point(1, 1)
    assert browser.run("document.getElementById('tooltip').hidden")


def test_arrow_keys_move_along_the_curves(browser, address):
    browser.open(address)
    browser.run(f"document.querySelector('{FIRST} .panels > svg').focus()")
    for _ in range(2):
        browser.call("Input.dispatchKeyEvent", type="keyDown", key="ArrowRight", code="ArrowRight")
    assert "epoch 2" in browser.run("document.getElementById('tooltip').innerText")


def test_the_legend_hides_and_shows_a_method(browser, address):
    browser.open(address)
    lines = f"{FIRST} .panels > svg .series"
    before = count(browser, lines)
    button = f"{FIRST} .controls button:nth-child(3)"
    assert browser.run(f"document.querySelector({button!r}).textContent") == "BN"
    browser.click(button)
    assert (before, count(browser, lines)) == (15, 12)
    assert browser.run(f"document.querySelector({button!r}).getAttribute('aria-pressed')") == "false"
    browser.click(button)
    assert count(browser, lines) == before


def test_the_axis_switches_between_log_and_linear(browser, address):
    browser.open(address)
    ticks = (
        f"[...document.querySelectorAll('{FIRST} .panels > svg:first-child .tick')].map(t => t.textContent).join(' ')"
    )
    logarithmic = browser.run(ticks)
    browser.click(f"{FIRST} .axis")
    linear = browser.run(ticks)
    assert "0.01" in logarithmic.split() and "0.01" not in linear.split()
    browser.click(f"{FIRST} .axis")
    assert browser.run(ticks) == logarithmic
    assert browser.errors() == []
    assert count(browser, '[data-figure="e-relu-relu"] .axis') == 0  # it has values below zero


def test_the_table_sorts_by_number_both_ways(browser, address):
    browser.open(address)
    table = "#e-noisy-mnist table.sortable"
    loss = f"{table} th:nth-child(7) button"
    keys = f"[...document.querySelectorAll('{table} tbody tr')].map(r => r.cells[6].dataset.key)"
    browser.click(loss)
    rising = [float(key) for key in browser.run(keys)]
    assert rising == sorted(rising) and rising[-1] == float("inf")
    browser.click(loss)
    assert [float(key) for key in browser.run(keys)] == rising[::-1]
    assert browser.run(f"document.querySelector('{table} th:nth-child(7)').getAttribute('aria-sort')") == "descending"
    assert browser.run(f"document.querySelector('{table} tbody tr').textContent.includes('diverged')")


def test_a_hostile_name_stays_text(browser, tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "draw", lambda *_: None)
    name = "<img src=x onerror=document.title=1>"
    page = report.write(synthetic.write(tmp_path, synthetic.grid(name, seeds=(0,))))
    browser.open(page.as_uri())
    assert browser.errors() == []
    assert count(browser, "img") == 0
    assert browser.run("document.title") == "varprop: comparison of normalizations"
    assert name in browser.run("document.querySelector('h2 ~ *, main').innerText")
