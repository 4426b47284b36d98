"""The tables of docs/predict.md against the records they come from."""

import json
from pathlib import Path

import torch
from benchmarks import error_bars, error_marks

from varprop.predict import reliability

DOCS = Path(__file__).parents[2] / "docs"


def records(name):
    return [json.loads(line) for line in (DOCS / "results" / name).read_text("utf-8").splitlines()]


def tables(text):
    """Runs of lines that are rows, as lists."""
    found, rows = [], []
    for line in [*text.splitlines(), ""]:
        if line.startswith("| ") or line.startswith("|---"):
            rows.append(line)
        elif rows:
            found.append(rows)
            rows = []
    return found


def test_every_table_is_that_of_the_records():
    shown = [error_bars.show(records("error_bars.jsonl")), error_marks.table(records("error_marks.jsonl")).markdown()]
    expected = tables("\n\n".join(shown))
    measured = [rows for rows in tables((DOCS / "predict.md").read_text("utf-8")) if "---:" in rows[1]]
    assert len(measured) >= 6
    for rows in measured:
        assert rows in expected, rows[0]


def test_all_tables_stand_on_their_page():
    assert (DOCS / "results" / "error_bars.md").read_text("utf-8") == error_bars.page(records("error_bars.jsonl"))


def test_limits_of_marks_stand_on_the_page():
    text = (DOCS / "predict.md").read_text("utf-8")
    for limit in (reliability.CURVED, reliability.SHARED, reliability.DROPPED):
        assert f"over {100 * limit:.0f} % of the variance" in text
    assert f"over {reliability.RELATIVE:g} times the fifth root" in text
    assert f"over {reliability.RELATIVE_OF_ATTENTION:g} times" in text


def test_the_page_says_how_often_a_vision_transformer_is_flagged():
    cases = [r for r in records("error_marks.jsonl") if r["network"] == "ViT on MNIST" and r["noise"] != "dropout"]
    flagged, off = (torch.cat(marks) for marks in zip(*map(error_marks.marked, cases), strict=True))
    text = " ".join((DOCS / "predict.md").read_text("utf-8").split())
    found, least = int(off.sum()), int((off & flagged).sum())
    assert f"of {found} samples of the ViT that were off under noisy inputs or weights {least} were flagged" in text


def test_related_work_says_how_near_the_medians_are():
    measured = [record for record in records("error_bars.jsonl") if "adjoint" in record]
    computed, diagonal = (sorted(round(case[rule][0], 2) for case in measured) for rule in ("adjoint", "diagonal"))
    near = [ratio for ratio in computed if 0.95 <= ratio <= 1.05]
    others = [ratio for ratio in computed if ratio not in near]
    text = " ".join((DOCS / "related.md").read_text("utf-8").split())
    assert (len(measured), len(near)) == (20, 17) and "Of twenty cases" in text and "in seventeen (medians)" in text
    assert f"at {others[0]} to {others[-1]} of it in the other three" in text
    assert f"diagonal rules are at {diagonal[0]} to {diagonal[-1]} " in text
