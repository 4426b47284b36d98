import io
import re
from types import SimpleNamespace

import pytest

from varprop.cli import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """Time that stands still unless it is moved."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock.now)
    return clock


def test_a_terminal_gets_a_bar_with_rate_and_remaining_time(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    stream = Terminal()
    with progress.show(10, "mnist", stream=stream) as bar:
        bar.advance(4, "epoch 2, loss [0.5]")
        bar.advance(6)
    shown = stream.getvalue()
    assert "mnist" in shown and "100%" in shown and "/s" in shown and "left" in shown
    assert "epoch 2, loss [0.5]" in shown


def test_on_a_narrow_terminal_only_the_text_is_cut(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    stream = Terminal()
    with progress.show(1000, "noisy-cifar10", stream=stream) as bar:
        bar.advance(500, "a long text " * 10)
    last = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue()).strip().splitlines()[-1]
    assert re.search(r"noisy-cifar10 .* 50% +\S+/s +\d:\d\d:\d\d left +-?[\d:-]+ a long", last)
    assert len(last) <= 80


def test_elsewhere_at_most_one_line_in_ten_seconds(clock):
    stream = io.StringIO()
    bar = progress.Progress(1000, "mnist", stream)
    for _ in range(100):
        clock.now += 0.5
        bar.advance(2, "training")
    lines = stream.getvalue().splitlines()
    assert len(lines) == 5
    assert lines[-1] == "mnist:  20 % (200/1000), 4/s, 0:50 elapsed, 3:20 left, training"


def test_the_last_line_always_comes_even_when_it_ends_in_an_error():
    stream = io.StringIO()
    with pytest.raises(RuntimeError), progress.show(3, "mnist", stream=stream) as bar:
        bar.advance(1)
        raise RuntimeError
    assert stream.getvalue().startswith("mnist:  33 % (1/3)")


def test_slow_work_has_a_rate_by_the_minute(clock):
    stream = io.StringIO()
    bar = progress.Progress(50, "slow", stream)
    clock.now = 20.0
    bar.advance(10)
    assert stream.getvalue() == "slow:  20 % (10/50), 30/min, 0:20 elapsed, 1:20 left\n"


def test_a_search_that_takes_longer_than_expected_is_not_called_done(clock):
    stream = io.StringIO()
    bar = progress.Progress(50, "compare", stream)
    clock.now = 20.0
    bar.advance(60)
    assert stream.getvalue() == "compare: 60, more than the 50 expected, 3/s, 0:20 elapsed\n"
    terminal = Terminal()
    with progress.show(50, "compare", stream=terminal) as bar:
        bar.advance(60)
    assert "100%" not in terminal.getvalue()


def test_nothing_to_do_divides_by_nothing():
    stream = io.StringIO()
    with progress.show(0, "empty", stream=stream):
        pass
    assert stream.getvalue().startswith("empty:   0 % (0/0), 0/s")


def test_without_rich_a_terminal_gets_plain_lines(monkeypatch):
    monkeypatch.setattr(progress, "find_spec", lambda name: None)
    stream = Terminal()
    with progress.show(1, "plain", stream=stream) as bar:
        bar.advance(1)
    assert stream.getvalue().startswith("plain: 100 % (1/1)")


def test_by_default_it_goes_to_standard_error(capsys):
    with progress.show(1, "here") as bar:
        bar.advance(1)
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("here: 100 %")


def test_without_a_stream_nothing_is_said(capsys, clock):
    bar = progress.Progress(10, "nowhere")
    clock.now = 20.0
    bar.advance(5, "x")
    assert capsys.readouterr() == ("", "")


def test_long_times_have_hours():
    assert [progress._clock(s) for s in (59.6, 3599, 3600, 7325)] == ["1:00", "59:59", "1:00:00", "2:02:05"]


def test_rates_from_slow_to_fast():
    assert [progress._rate(r) for r in (0, 0.1, 1.234, 12345)] == ["0/s", "6/min", "1.23/s", "12,345/s"]
