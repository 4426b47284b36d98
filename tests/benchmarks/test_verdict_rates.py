"""Verdicts by chance alone: rare, and on the page as the rules give them."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.verdict_rates import COMPARISONS, rates

from varprop_lab.seed_statistics import FAILS, HOLDS

PAGE = Path(__file__).parents[2] / "docs" / "results" / "verdict_rates.md"


@pytest.mark.parametrize("name", ["robust", "bn-generalizes"])
def test_hardly_anything_is_decided_where_there_is_nothing_to_decide(name: str) -> None:
    found = rates(name, 150)
    assert found[HOLDS] == 0 and found[FAILS] < 0.07  # 2.4 % in 4,000 draws


def test_the_page_has_a_row_for_every_comparison() -> None:
    rows = [line for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| ")][2:]
    assert {row.split("|")[1].strip() for row in rows} == set(COMPARISONS)
