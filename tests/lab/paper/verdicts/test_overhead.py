"""The claims on cost, by made-up files of the benchmark."""

from __future__ import annotations

import json

import pytest

from varprop_lab.paper.verdicts.comparisons import LITTLE, SIMILAR
from varprop_lab.paper.verdicts.judge import CLAIMS, judge_claim

BATCH = [1.0, 1.2, 1.1]


def found(name, content, folder):
    file = folder / "normalization.json"
    file.write_text(json.dumps(content))
    claim = next(claim for claim in CLAIMS if claim.name == name)
    return judge_claim(claim, [], [folder / "missing.json", file])


def cells(case="cifar", title="net", **rounds):
    about = {"case": case, "title": title, "batch": 8, "mode": "eager", "precision": "tf32"}
    return [{**about, "variant": variant, "rounds": seconds} for variant, seconds in rounds.items()]


def slower(share):
    """Than `BATCH`, in every round."""
    return [(1 + share) * seconds for seconds in BATCH]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"cells": cells(batch=BATCH, analytic=[0.9, 1.1, 1.0])}, "holds"),
        ({"cells": cells(batch=BATCH, analytic=[1.1, 1.1, 1.2])}, "within noise"),
        ({"cells": cells(batch=BATCH, analytic=[1.1, 1.3, 1.2])}, "does not hold"),  # more in every round
        ({"cells": cells(batch=[2.0], analytic=[1.0])}, "within noise"),  # one round says nothing
        (
            {
                "cells": [
                    *cells(title="a", batch=[2.0, 2.1], analytic=[1.0, 1.1]),
                    *cells(title="b", batch=BATCH, analytic=[2.0] * 3),
                ]
            },
            "does not hold",
        ),
        ({"cells": cells("mlp", batch=BATCH, analytic=[0.9, 1.1, 1.0])}, "no data"),  # the claims are on CNNs
        ({"cells": cells(batch=BATCH, analytic=[])}, "no data"),
        ({"cells": []}, "no data"),
        ({"other": 1}, "no data"),
        ([], "no data"),
    ],
)
def test_cost_is_compared_round_by_round(content, expected, tmp_path):
    assert found("overhead-bn", content, tmp_path).verdict == expected


@pytest.mark.parametrize(
    ("name", "variant", "against", "limit", "below", "above"),
    [
        ("overhead", "analytic", "none", LITTLE, "holds", "does not hold"),
        ("overhead-wn", "analytic", "weight", SIMILAR, "holds", "does not hold"),
        ("bn-overhead", "batch", "none", LITTLE, "does not hold", "holds"),
    ],
)
def test_cost_is_little_up_to_a_limit(name, variant, against, limit, below, above, tmp_path):
    for share, expected in ((0.8 * limit, below), (1.2 * limit, above)):
        content = {"cells": cells(**{against: BATCH, variant: slower(share)})}
        assert found(name, content, tmp_path).verdict == expected


def test_other_networks_are_given_and_not_judged(tmp_path):
    content = {"cells": [*cells(batch=BATCH, analytic=BATCH), *cells("mlp", "MLP", batch=BATCH, analytic=slower(1))]}
    verdict = found("overhead-bn", content, tmp_path)
    assert verdict.verdict == "holds"
    assert verdict.measured[-1].startswith("for comparison: MLP") and "100 % more" in verdict.measured[-1]
