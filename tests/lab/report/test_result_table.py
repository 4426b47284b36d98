"""The small table of text: seeds together, the order of the paper, what diverged."""

import math
from dataclasses import replace

from varprop_lab.protocol import Cell, Outcome, Search
from varprop_lab.report import result_table


def outcome(method="analytic", start="ap2", seed=0, accuracy=0.5, **changes):
    cell = Cell("digits", method, start, seed)
    curves = {"train_loss": [2.0, 0.25 + 0.1 * seed], "valid_accuracy": [0.4, 0.9]}
    search = Search(1e-2, 0.3, [(1e-2, 0.3)], at_bound=True)
    return replace(Outcome(cell, search, curves, 0.1, accuracy, False, 0.0, 1.0), **changes)


def test_it_averages_seeds_and_keeps_the_order_of_the_paper():
    runs = [outcome("analytic"), outcome("batch", seed=1), outcome("batch"), outcome("standard", start="none")]
    lines = result_table(runs).splitlines()
    assert lines[0].split() == ["experiment", "start", "method", "lr", "training", "loss", "validation", "test"]
    assert [line.split()[4] for line in lines[1:]] == ["Standard", "BN", "AP2", "lies"]
    assert lines[-1] == "* the best rate lies next to the bound of the search, which --lr-max widens"
    assert lines[2].split()[5:] == ["0.01*", *["0.3", "±", "0.071", "90.00%", "±", "0.00%", "50.00%", "±", "0.00%"]]


def test_it_shows_what_diverged():
    row = result_table([outcome(curves={}, diverged=True), outcome(seed=1)]).splitlines()[1]
    assert row.split()[6:] == ["0.35", "90.00%", "1", "of", "2", "diverged"]
    row = result_table([outcome(curves={}, diverged=True)]).splitlines()[1]
    assert row.split()[6:] == ["-", "-", "1", "of", "1", "diverged"]


def test_targets_that_are_no_classes_have_no_accuracy():
    row = result_table([outcome(accuracy=math.nan, curves={"train_loss": [0.5]})]).splitlines()[1]
    assert row.split()[6:] == ["0.5", "-", "-"] and result_table([]) == ""
