"""docs/experiments.md says of every claim what the records say, and no number that they do not have."""

import json
import re
from pathlib import Path

import pytest

from varprop_lab.paper.verdicts.evidence import Evidence
from varprop_lab.paper.verdicts.judge import as_in_the_paper
from varprop_lab.protocol.experiments import PAPER_LR_MAX
from varprop_lab.protocol.records import STARTS, TRAIN_LOSS, VALID_LOSS, grouped
from varprop_lab.seed_statistics import HOLDS, Sample, final, final_error, lower
from varprop_lab.store.tables import read_runs

DOCS = Path(__file__).parents[4] / "docs"
HEADINGS = {
    "What holds:": "holds",
    "What does not hold:": "does not hold",
    "What three seeds do not decide, or decide in part:": "within noise",
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


def test_the_readme_says_no_more_than_the_records():
    outcomes = tuple(outcome for run in read_runs(DOCS / "results") for outcome in as_in_the_paper(run))
    evidence = Evidence(outcomes, PAPER_LR_MAX)

    def leads(method, other, metric):
        pairs = [[evidence.sample("noisy-cifar10", m, start, metric) for m in (method, other)] for start in STARTS]
        return ("none", "one", "two", "three")[sum(lower(*pair) == HOLDS for pair in pairs)]

    def rises(size, metric):
        usual, small = (evidence.sample("small-batches", "batch", "bn", metric, batch_size=b) for b in (128, size))
        return lower(usual, small) == HOLDS

    text = " ".join((DOCS.parent / "README.md").read_text("utf-8").split())
    trains, validates = leads("analytic", "batch", final(TRAIN_LOSS)), leads("batch", "analytic", final(VALID_LOSS))
    assert f"AP2 has a lower training loss than batch norm from {trains} of three starts" in text
    assert f"batch norm a lower validation loss from {validates}" in text
    assert leads("batch", "analytic", final_error) == leads("analytic", "batch", final_error) == "none"
    assert "in validation error the differences are within noise" in text
    assert [rises(size, final(TRAIN_LOSS)) for size in (4, 16)] == [True, True]
    assert [rises(size, final_error) for size in (4, 16)] == [True, False]
    assert "With small batches batch norm's training loss rises, and with batches of 4, not of 16" in text
