"""docs/experiments.md says of every claim what the records say, and no number that they do not have."""

import json
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[3] / "docs"
HEADINGS = {
    "What holds:": "holds",
    "What does not hold:": "does not hold",
    "What three seeds do not decide, or decide in part:": "within noise",
    "What was not recorded:": "no data",
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
