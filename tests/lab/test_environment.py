"""What a manifest says of the sources."""

import hashlib

import pytest

from varprop_lab import environment

COMMIT = "0123456789abcdef"


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ({"rev-parse": None}, {}),
        ({"rev-parse": COMMIT, "diff": ""}, {"commit": COMMIT, "dirty": False}),
        (
            {"rev-parse": COMMIT, "diff": "-a\n+b"},
            {"commit": COMMIT, "dirty": True, "diff": hashlib.sha256(b"-a\n+b").hexdigest()},
        ),
    ],
)
def test_the_state_of_the_sources_is_a_commit_or_the_hash_of_what_differs(monkeypatch, answers, expected):
    monkeypatch.setattr(environment, "_git", lambda name, *rest: answers[name])
    assert environment.git_state() == expected


@pytest.mark.parametrize(
    ("program", "expected"), [("/usr/bin/varprop", "varprop demo"), ("varprop/__main__.py", "python -m varprop demo")]
)
def test_the_command_is_what_was_typed_without_folders(monkeypatch, program, expected):
    monkeypatch.setattr("sys.argv", [program, "demo"])
    assert environment.command_line() == expected
