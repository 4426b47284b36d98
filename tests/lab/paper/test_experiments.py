import pytest

from varprop_lab.paper.experiments import EXPERIMENTS
from varprop_lab.protocol import DOUBLE, PAPER_LR_MAX, WIDE_LR_MAX, SettingError


def test_experiments_are_adapted():
    adapted = EXPERIMENTS["mnist"].adapted(seeds=3, epochs=2, lr_max=(PAPER_LR_MAX, WIDE_LR_MAX))
    assert len(adapted.cells()) == 72
    assert adapted.protocol.search_epochs == 2
    assert len(EXPERIMENTS["naive"].adapted(methods=("standard",)).cells()) == 2
    with pytest.raises(ValueError, match="seeds must be at least 1"):
        EXPERIMENTS["mnist"].adapted(seeds=0)
    with pytest.raises(ValueError, match="largest learning rate"):
        EXPERIMENTS["mnist"].adapted(lr_max=(1e-9,))


def test_experiments_keep_only_the_methods_and_starts_asked_for():
    adapted = EXPERIMENTS["mnist"].adapted(methods=("batch", "analytic"), starts=("bn",))
    assert [(cell.method, cell.start) for cell in adapted.cells()] == [("batch", "bn"), ("analytic", "bn")]
    with pytest.raises(SettingError, match="There is no start 'zero'; known are none, bn, ap2, orthogonal"):
        EXPERIMENTS["mnist"].adapted(starts=("zero",))
    with pytest.raises(SettingError, match="naive has no cells with the methods analytic from the starts none"):
        EXPERIMENTS["naive"].adapted(methods=("analytic",), starts=("none",))


def test_the_naive_comparison_has_own_starts_one_rate_and_other_units():
    cells = EXPERIMENTS["naive"].cells()
    assert {cell.method: cell.start for cell in cells} == {
        "standard": "none", "weight": "wn", "batch": "bn", "analytic": "ap2",
    }  # fmt: skip
    assert {cell.variant for cell in cells} == {"", DOUBLE}
    assert len({cell.lr_max for cell in cells}) == 1 and not EXPERIMENTS["naive"].search


def test_borders_are_pooled_or_plain():
    assert EXPERIMENTS["noisy-cifar10"].borders == "pooled"
    assert EXPERIMENTS["noisy-cifar10"].adapted(borders="plain").configuration()["borders"] == "plain"
    with pytest.raises(SettingError, match="borders must be one of pooled, plain, got 'none'"):
        EXPERIMENTS["noisy-cifar10"].adapted(borders="none")
