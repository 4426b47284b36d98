"""Fifteen small models against the golden file of the whole sweep."""

from __future__ import annotations

import json
from typing import Any

import pytest
from benchmarks.zoo.measure import study
from benchmarks.zoo.models import all_names, drawn_names
from benchmarks.zoo.normalized import RESULTS
from benchmarks.zoo.table import GOLDEN, golden

BASIC = [name for name in all_names() if name.startswith("basic/")]
VISION = [
    f"torchvision/{name}"
    for name in (
        "alexnet", "squeezenet1_1", "mobilenet_v3_small", "shufflenet_v2_x0_5", "mnasnet0_5", "resnet18",
        "regnet_x_400mf", "lraspp_mobilenet_v3_large",
    )
]  # fmt: skip
SAMPLES = 24


@pytest.fixture(scope="module")
def stored() -> dict[str, dict[str, Any]]:
    return {record["model"]: record for record in json.loads(GOLDEN.read_text())}


def test_the_golden_file_has_all_models_in_the_order_of_the_list(stored: dict[str, dict[str, Any]]) -> None:
    assert list(stored) == all_names()
    assert len(BASIC) + len(VISION) == 15


def test_no_model_that_was_drawn_is_left_out_of_the_record() -> None:
    recorded = [record["model"] for record in json.loads(RESULTS.read_text())]
    assert [name for name in recorded if name.startswith("drawn/")] == drawn_names()
    assert not {name.partition("/")[2] for name in drawn_names()} & {name.partition("/")[2] for name in all_names()}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*BASIC, *(pytest.param(name, marks=pytest.mark.zoo) for name in VISION)])
def test_a_model_gives_what_the_golden_file_says(name: str, stored: dict[str, dict[str, Any]]) -> None:
    (found,), expected = golden(list(study(name, SAMPLES))[-1:]), stored[name]
    differing = ("median_error", "good_layers", "apart_error", "apart_good_layers", "why", "torch")
    assert {key: v for key, v in found.items() if key not in differing} == {
        key: v for key, v in expected.items() if key not in differing
    }
    assert found["median_error"] == pytest.approx(expected["median_error"], abs=0.01)
    assert found.get("apart_error") == pytest.approx(expected.get("apart_error"), abs=0.01)
