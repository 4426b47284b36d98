"""docs/experiments.md says of every claim what the records say, and no number that they do not have."""

import json
import re
from pathlib import Path

import pytest

from varprop_lab.protocol import TRAIN_LOSS, grouped
from varprop_lab.seed_statistics import Sample, final, final_error
from varprop_lab.store import read_runs

DOCS = Path(__file__).parents[4] / "docs"
HEADINGS = {
    "What holds:": "holds",
    "What does not hold:": "does not hold",
    "What the seeds do not decide, or decide in part:": "within noise",
}
pytestmark = pytest.mark.skipif(not DOCS.is_dir(), reason="the documentation is not there")


def results():
    _, _, text = (DOCS / "experiments.md").read_text("utf-8").partition("## Results")
    return text.partition("### What the paper leaves open")[0]


def test_every_claim_stands_in_the_list_of_its_verdict():
    listed, verdict = {}, None
    for line in results().splitlines():
        verdict = HEADINGS.get(line, verdict)
        for names in re.findall(r"<!-- (.*?) -->", line):
            listed |= dict.fromkeys(names.split(), verdict)
    claims = json.loads((DOCS / "results" / "claims.json").read_text("utf-8"))["claims"]
    assert listed == {claim["name"]: claim["verdict"] for claim in claims}


def test_the_counts_of_verdicts_are_those_of_the_claims():
    claims = json.loads((DOCS / "results" / "claims.json").read_text("utf-8"))["claims"]
    holds, fails, noise = (sum(claim["verdict"] == v for claim in claims) for v in HEADINGS.values())
    sentence = f"Of {len(claims)} claims, {holds} hold, {fails} do not hold, and the seeds do not decide {noise};"
    assert sentence in results()
    evidence = (DOCS / "evidence.md").read_text("utf-8")
    assert f"of {len(claims)}: {holds} hold, {fails} do not, {noise} are within noise" in evidence


def test_means_with_their_deviations_are_on_the_page_of_results():
    page = (DOCS / "results" / "experiments.md").read_text("utf-8")
    found = re.findall(r"\d[\d.]* ± \d[\d.]*\d", results())
    assert found and not [number for number in found if number not in page]


def test_what_other_settings_change_is_on_the_page_of_results_or_in_their_records():
    """`docs/results/converted-weights` and `plain-borders` are runs with one setting changed."""
    text = (DOCS / "experiments.md").read_text("utf-8").partition("## Where we differ")[2]
    known = (DOCS / "results" / "experiments.md").read_text("utf-8")
    for out in ("converted-weights", "plain-borders"):
        for run in read_runs(DOCS / "results" / out):
            for cells in grouped(run.outcomes, lambda cell: (cell.method, cell.start)).values():
                losses, errors = (Sample(tuple(map(metric, cells))) for metric in (final(TRAIN_LOSS), final_error))
                known += f"{losses.text()} {errors.percent()}"
    found = re.findall(r"\d[\d.]* ± \d[\d.]*\d", text)
    assert found and not [number for number in found if number not in known]
