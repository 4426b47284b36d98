"""Figures: the values they show are those of the records, and every method looks the same everywhere."""

from __future__ import annotations

import itertools
import math
import statistics
import sys
from dataclasses import replace
from xml.etree import ElementTree

import pytest
import torch

import varprop as vp
from varprop_lab import figures
from varprop_lab.figures import DOUBLE_COLOUR, METHOD_COLOURS, figures_of, relu_figure, search_panel
from varprop_lab.protocol import ALL_METHODS, TRAIN_EVAL_LOSS, TRAIN_LOSS, TRAIN_STILL_LOSS, Cell, method_label
from varprop_lab.store import Run, read_runs

from .. import synthetic

MNIST = Run("mnist", synthetic.grid("mnist"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return read_runs(synthetic.write(tmp_path_factory.mktemp("out"), synthetic.everything()), ["relu"])


def figure_named(run, name):
    (found,) = [figure for figure in figures_of(run) if figure.name == name]
    return found


def series_named(panel, label):
    (found,) = [series for series in panel.series if series.label == label]
    return found


def test_training_has_a_panel_a_start_and_a_line_a_method():
    figure = figure_named(MNIST, "training")
    assert [panel.title for panel in figure.panels] == ["init = None", "init = BN", "init = AP2"]
    for panel in figure.panels:
        assert [series.label for series in panel.series] == ["Standard", "WN", "BN", "BN eval", "AP2"]
    assert figure.y_log
    assert "3 seeds: the line is their median, the band reaches from the smallest to the largest" in figure.caption


@pytest.mark.parametrize(("label", "curve"), [("BN", TRAIN_LOSS), ("BN eval", TRAIN_EVAL_LOSS)])
def test_lines_are_medians_and_bands_reach_from_smallest_to_largest(label, curve):
    series = series_named(figure_named(MNIST, "training").panels[1], label)
    columns = list(zip(*(o.curves[curve] for o in MNIST.select(method="batch", start="bn")), strict=True))
    assert series.y == tuple(map(statistics.median, columns))
    assert series.low == tuple(map(min, columns))
    assert series.high == tuple(map(max, columns))
    assert series.x == tuple(range(1, len(columns) + 1))
    assert series.seeds == 3
    assert series.dash == ("dashed" if "eval" in label else "solid")


def test_a_diverged_run_ends_in_a_cross_and_the_others_go_on():
    outcomes = synthetic.grid("mnist", starts=("bn",), methods=("batch",))
    broken = synthetic.outcome(outcomes[0].cell, epochs=12, diverged=True)
    run = Run("mine", [broken, *outcomes[1:]])
    figure = figure_named(run, "training")
    series = series_named(figure.panels[0], "BN")
    (mark,) = series.marks
    assert (mark.kind, mark.x, mark.y) == ("diverged", 4, broken.curves[TRAIN_LOSS][-1])
    assert series.y[-1] == statistics.median([o.curves[TRAIN_LOSS][-1] for o in outcomes[1:]])
    assert "cross" in figure.caption


def test_every_evaluation_of_the_search_is_shown_and_the_choice_marked():
    panel = figure_named(MNIST, "learning-rate").panels[1]
    outcomes = MNIST.select(start="bn", method="analytic")
    series = series_named(panel, "AP2")
    shown = {(x, y) for x, y in zip(series.x, series.y, strict=True) if y is not None}
    assert shown == {pair for o in outcomes for pair in o.search.trace if math.isfinite(pair[1])}
    assert [(m.x, m.y) for m in series.marks if m.kind == "at bound"] == [
        (o.search.lr, o.search.loss) for o in outcomes
    ]
    standard = series_named(panel, "Standard")
    infinite = [
        rate for o in MNIST.select(start="bn", method="standard") for rate, loss in o.search.trace if loss > 1e9
    ]
    assert [m.x for m in standard.marks if m.kind == "diverged"] == infinite
    assert all(m.y is None for m in standard.marks if m.kind == "diverged")
    assert panel.bounds == (1e-2,)


def test_a_loss_far_above_the_others_lies_at_the_edge_and_leaves_them_room():
    outcome = MNIST.select(start="bn", method="analytic")[0]
    *others, (last, _) = sorted(outcome.search.trace)
    high = replace(outcome, search=replace(outcome.search, trace=[*others, (last, 2.1 * others[0][1])]))
    series = series_named(search_panel("init = BN", [high]), "AP2")
    assert [y for x, y in zip(series.x, series.y, strict=True) if x == last and y is not None] == []
    assert [(m.x, m.y) for m in series.marks if m.kind == "diverged"] == [(last, None)]


def test_missing_methods_and_starts_are_named():
    outcomes = [
        o for o in MNIST.outcomes if o.cell.start != "ap2" and (o.cell.method, o.cell.start) != ("weight", "bn")
    ]
    panels = figure_named(Run("mnist", outcomes), "training").panels
    assert [panel.missing for panel in panels[:2]] == [(), ("WN",)]
    assert panels[2].series == ()


def test_a_method_has_one_look_in_all_figures(runs):
    looks = {}
    everyone = Run("compare", synthetic.grid("compare", seeds=(0,), methods=ALL_METHODS))
    for figure in itertools.chain.from_iterable(map(figures_of, [*runs, everyone])):
        if figure.name == "relu":
            continue
        for series in itertools.chain.from_iterable(panel.series for panel in figure.panels):
            looks.setdefault(series.label, set()).add((series.colour, series.dash, series.marker, series.rank))
    assert {len(found) for found in looks.values()} == {1}
    colours = {label: next(iter(found))[0] for label, found in looks.items()}
    assert {colours[method_label(method)] for method in METHOD_COLOURS} == {pair[0] for pair in METHOD_COLOURS.values()}
    assert colours["BN eval"] == colours["BN"]


# How red, green and blue are seen without one kind of cone (Machado, Oliveira and Fernandes 2009, severity 1).
BLINDNESS = {
    "none": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152, 1.053, -0.205), (0.115, 0.786, 0.099), (-0.004, -0.048, 1.052)),
    "deuteranopia": ((0.367, 0.861, -0.228), (0.280, 0.673, 0.047), (-0.012, 0.043, 0.969)),
    "tritanopia": ((1.256, -0.077, -0.179), (-0.078, 0.931, 0.148), (0.005, 0.691, 0.304)),
}


def lab(colour, matrix):
    """CIE L*a*b* (D65) of a colour as seen through the matrix."""
    parts = [int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    seen = [min(1.0, max(0.0, sum(a * b for a, b in zip(row, linear, strict=True)))) for row in matrix]
    rows = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    white = (0.9505, 1.0, 1.089)
    scaled = [sum(a * b for a, b in zip(row, seen, strict=True)) / w for row, w in zip(rows, white, strict=True)]
    x, y, z = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in scaled)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("dark", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("blindness", BLINDNESS)
def test_methods_stay_apart_for_colour_blind_readers(blindness, dark):
    colours = [pair[dark] for pair in (*METHOD_COLOURS.values(), DOUBLE_COLOUR)]
    seen = [lab(colour, BLINDNESS[blindness]) for colour in colours]
    assert min(math.dist(a, b) for a, b in itertools.combinations(seen, 2)) > 15


def test_naive_shows_all_methods_in_one_panel():
    figure = figure_named(Run("naive", synthetic.naive()), "naive-training")
    (panel,) = figure.panels
    assert [series.label for series in panel.series] == ["Standard", "Standard, w = 2w'", "WN", "BN", "BN eval", "AP2"]
    assert panel.title == "lr = 0.001"


def test_batch_sizes_get_a_figure_of_their_own():
    run = Run("small-batches", synthetic.grid("small-batches", starts=("bn",), batch_sizes=(4, 16, 128)))
    series = series_named(figure_named(run, "batch-size-training").panels[0], "AP2")
    assert series.x == (4, 16, 128)
    for size, value in zip(series.x, series.y, strict=True):
        ends = [o.curves[TRAIN_LOSS][-1] for o in run.select(method="analytic", batch_size=size)]
        assert value == statistics.median(ends)
    assert not [figure for figure in figures_of(MNIST) if figure.name.startswith("batch-size")]


def test_other_bounds_and_batch_sizes_have_their_own_names():
    run = Run("mnist", synthetic.grid("mnist", seeds=(0,), bounds=(1e-2, 1e-1), batch_sizes=(16, 128)))
    names = [figure.name for figure in figures_of(run)]
    assert len(names) == len(set(names))
    assert {"training", "training-lr1e-01", "training-b16", "training-lr1e-01-b16"} <= set(names)
    assert "One seed." in figure_named(run, "training").caption


def test_without_a_search_there_is_no_figure_of_one():
    fixed = [replace(o, search=replace(o.search, trace=[])) for o in synthetic.grid("mine", seeds=(0,))]
    assert [figure.name for figure in figures_of(Run("mine", fixed))] == [
        "training",
        "validation-loss",
        "validation-accuracy",
    ]
    assert "lr\u00a0=\u00a0" in figures_of(Run("mine", fixed))[0].title  # nothing is below a bound


def test_losses_on_images_as_validation_has_them_are_drawn_where_they_are_recorded():
    run = Run("overfitting", [replace(o, curves={**o.curves, TRAIN_STILL_LOSS: [0.2, 0.1]}) for o in MNIST.outcomes])
    found = figure_named(run, "training-still")
    assert found.headline and series_named(found.panels[0], "AP2").y == (0.2, 0.1)
    assert "training-still" not in [figure.name for figure in figures_of(MNIST)]


def test_relu_agrees_with_the_formula_of_the_paper():
    panel = relu_figure().panels[0]
    exact = series_named(panel, "propagated: mean ± 3 std")
    mean = torch.tensor(exact.x, dtype=torch.float64)
    density, below = torch.exp(-mean.square() / 2) / math.sqrt(2 * math.pi), torch.special.ndtr(mean)
    expected = mean * below + density
    variance = mean * density + (mean.square() + 1) * below - expected.square()
    torch.testing.assert_close(torch.tensor(exact.y, dtype=torch.float64), expected, rtol=1e-9, atol=1e-9)
    spread = (torch.tensor(exact.high, dtype=torch.float64) - expected) / 3
    torch.testing.assert_close(spread.square(), variance, rtol=1e-6, atol=1e-9)
    linear = [series for series in panel.series if series.label == "linearised at the mean"]
    assert sorted(series.y[-1] for series in linear) == pytest.approx([exact.x[-1] - 3, exact.x[-1], exact.x[-1] + 3])


def labels_of(figure):
    return [label for label, _ in figures.legend_entries(figure)]


def test_the_legend_says_how_many_seeds_where_lines_differ_in_them():
    one = {("standard", "none"), ("standard", "bn"), ("standard", "ap2")}
    two = {("batch", "ap2")}
    kept = [
        o
        for o in MNIST.outcomes
        if o.cell.seed < (1 if (pair := (o.cell.method, o.cell.start)) in one else 2 if pair in two else 3)
    ]
    labels = labels_of(figure_named(Run("mnist", kept), "validation-accuracy"))
    assert labels == ["Standard (1 seed)", "WN (3 seeds)", "BN (2 to 3 seeds)", "AP2 (3 seeds)"]
    assert labels_of(figure_named(MNIST, "validation-accuracy")) == ["Standard", "WN", "BN", "AP2"]


def axis_of(low, high, figure):
    """An empty pair of axes of that height, scaled and labelled as the figure's."""
    axis = pytest.importorskip("matplotlib.figure").Figure().subplots()
    if figure.y_log:
        axis.set_yscale("log")
    if figures.is_accuracy(figure):
        figures.stretch_accuracies(axis)
    axis.set_ylim(low, high)
    figures.set_ticks(axis, figure)
    return axis


@pytest.mark.parametrize(("low", "high"), [(0.52, 2.1), (0.21, 2.2), (0.7, 2.05), (1.04, 2.3), (0.004, 2.3)])
def test_a_loss_can_be_read_off_at_three_places_or_more(low, high):
    ticks = axis_of(low, high, figure_named(MNIST, "training")).get_yticks()
    inside = [tick for tick in ticks if low <= tick <= high]
    assert 3 <= len(inside) <= 9
    assert min(inside) / low < 2.6


@pytest.mark.parametrize(("low", "high"), [(25, 75), (20, 97.4), (65, 98.2), (69, 88), (96.5, 100.2), (5, 100.1)])
def test_an_accuracy_is_stretched_by_its_error_and_can_be_read_off(low, high):
    axis = axis_of(low, high, figure_named(MNIST, "validation-accuracy"))
    places = axis.transAxes.inverted().transform(axis.transData.transform([(0, tick) for tick in axis.get_yticks()]))
    heights = [height for _, height in places]
    assert 3 <= len(heights) <= 10
    assert all(after - before > 0.1 for before, after in itertools.pairwise(heights))
    assert axis.get_ylim() == pytest.approx((low, high))


def test_equal_ratios_of_the_error_are_equal_steps_of_the_axis():
    axis = axis_of(20, 97, figure_named(MNIST, "validation-accuracy"))
    errors = (64, 32, 16, 8, 4)
    heights = [axis.transData.transform((0, figures.PERFECT - error))[1] for error in errors]
    steps = [after - before for before, after in itertools.pairwise(heights)]
    assert steps == pytest.approx([steps[0]] * 4)
    assert steps[0] > 0


def test_files_are_png_and_svg_and_the_same_every_time(tmp_path):
    figure = figure_named(Run("mine", synthetic.grid("mine", seeds=(0,), starts=("bn",))), "learning-rate")
    figures.draw(figure, tmp_path / "one", "Mine")
    figures.draw(figure, tmp_path / "two", "Mine")
    for kind in ("png", "svg"):
        assert (tmp_path / f"one.{kind}").read_bytes() == (tmp_path / f"two.{kind}").read_bytes()
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")
    assert ElementTree.parse(tmp_path / "one.svg").getroot().tag.endswith("svg")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["one.png", "one.svg", "two.png", "two.svg"]


ODD = {
    "all diverged at once": [
        replace(synthetic.outcome(Cell("odd", "batch", "bn", 0)), curves={TRAIN_LOSS: [math.nan]}, diverged=True)
    ],
    "no curves": [replace(synthetic.outcome(Cell("odd", "batch", "bn", 0)), curves={})],
    "a loss of zero": [replace(synthetic.outcome(Cell("odd", "weight", "none", 0)), curves={TRAIN_LOSS: [0.0, 0.0]})],
    "one epoch": [synthetic.outcome(Cell("odd", "analytic", "ap2", 0), epochs=1)],
    "unknown start and variant": [synthetic.outcome(Cell("odd", "standard", "own", 0, variant="new"))],
}


@pytest.mark.parametrize("outcomes", ODD.values(), ids=ODD.keys())
def test_odd_outcomes_are_drawn_all_the_same(outcomes, tmp_path):
    for figure in (figure_named(Run("odd", outcomes), "training"), figure_named(Run("odd", outcomes), "learning-rate")):
        figures.draw(figure, tmp_path / figure.name)
        assert (tmp_path / f"{figure.name}.png").stat().st_size > 1000


def test_without_matplotlib_one_sentence_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(vp.VarpropError, match=r"^A figure needs matplotlib: pip install '\.\[lab\]' in a checkout of"):
        figures.draw(relu_figure(), tmp_path / "relu")
