import errno
import json
import math
import os
import subprocess
import sys
from dataclasses import asdict

import pytest
import torch

from varprop_lab import environment
from varprop_lab.environment import StoreError, write_atomically
from varprop_lab.protocol import Cell, Outcome, Search
from varprop_lab.store import Store


def outcome(method="analytic", loss=0.5):
    search = Search(1e-3, loss, [(1e-3, loss), (1e-2, math.inf)], at_bound=True)
    curves = {"train_loss": [1.0, loss], "valid_loss": [1.1]}
    return Outcome(Cell("mnist", method, "ap2", 0), search, curves, 0.1, 0.9, False, 1e-6, 2.5)


def test_outcomes_come_back_as_they_were(tmp_path):
    store = Store(tmp_path / "mnist")
    written = [outcome("analytic"), outcome("batch", loss=math.inf)]
    assert store.outcomes() == [] and not store.has(written[0].cell)
    for one in written:
        store.write_outcome(one)
    assert store.outcomes() == written
    assert store.has(written[0].cell) and not store.has(outcome("weight").cell)


def test_an_outcome_replaces_the_one_before(tmp_path):
    store = Store(tmp_path)
    store.write_outcome(outcome(loss=0.5))
    store.write_outcome(outcome(loss=0.25))
    assert [one.search.loss for one in store.outcomes()] == [0.25]


def test_nan_stays_nan(tmp_path):
    Store(tmp_path).write_outcome(outcome(loss=math.nan))
    assert math.isnan(Store(tmp_path).outcomes()[0].search.loss)


def test_manifest(tmp_path):
    store = Store(tmp_path / "new" / "folder")
    assert store.manifest() == {}
    store.write_manifest({"command": "varprop reproduce mnist", "seconds": 1.5})
    assert store.manifest() == {"command": "varprop reproduce mnist", "seconds": 1.5}


def test_partial_states(tmp_path):
    store = Store(tmp_path)
    state = {"weights": [torch.randn(3, 4), torch.arange(3)], "epoch": 7, "nested": {"rng": torch.get_rng_state()}}
    assert store.load_partial("search") is None
    store.save_partial("search", state)
    found = store.load_partial("search")
    assert found["epoch"] == 7 and torch.equal(found["nested"]["rng"], state["nested"]["rng"])
    assert all(torch.equal(a, b) for a, b in zip(found["weights"], state["weights"], strict=True))
    store.drop_partial("search")
    store.drop_partial("search")
    assert store.load_partial("search") is None


def test_partial_files_run_no_code(tmp_path):
    """Pickles can call anything on loading; only tensors and plain values are let in."""

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "evil"),)

    (tmp_path / "partial").mkdir()
    torch.save({"x": Evil()}, tmp_path / "partial" / "bad.pt")
    with pytest.raises(StoreError, match=r"bad\.pt is damaged"):
        Store(tmp_path).load_partial("bad")
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "a\\b"])
def test_names_stay_inside_the_folder(tmp_path, name):
    with pytest.raises(StoreError, match="cannot be the name of a file"):
        Store(tmp_path).save_partial(name, {})


DAMAGES = [b"", b"{", b"[]", b"{}", b'{"cell": 1, "search": 2}', b"\xff\xfe\x00"]


@pytest.mark.parametrize("content", DAMAGES)
def test_a_damaged_cell_is_named(tmp_path, content):
    store = Store(tmp_path)
    store.write_outcome(outcome())
    path = tmp_path / "cells" / f"{outcome().cell.key}.json"
    path.write_bytes(content)
    with pytest.raises(StoreError, match=r"is damaged.*delete it and run the command again with --resume") as caught:
        store.outcomes()
    assert str(path) in str(caught.value)


def test_a_cell_with_unknown_fields_is_named(tmp_path):
    values = {**asdict(outcome()), "colour": "red"}
    (tmp_path / "cells").mkdir()
    (tmp_path / "cells" / "x.json").write_text(json.dumps(values))
    with pytest.raises(StoreError, match=r"x\.json is damaged"):
        Store(tmp_path).outcomes()


@pytest.mark.parametrize("cut", [0, 1, 100])
def test_a_cut_partial_is_named(tmp_path, cut):
    store = Store(tmp_path)
    store.save_partial("p", {"x": torch.zeros(100)})
    path = tmp_path / "partial" / "p.pt"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(StoreError, match="is damaged") as caught:
        store.load_partial("p")
    assert str(path) in str(caught.value)


def test_a_damaged_manifest_is_named(tmp_path):
    (tmp_path / "manifest.json").write_text("[1]")
    with pytest.raises(StoreError, match=r"manifest\.json is damaged"):
        Store(tmp_path).manifest()


def test_a_full_disk_says_what_and_where_and_keeps_what_was_there(tmp_path, monkeypatch):
    store = Store(tmp_path)
    store.write_outcome(outcome(loss=0.5))

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(environment.os, "fsync", full)
    with pytest.raises(StoreError, match=r"no space left on the disk.*--resume") as caught:
        store.write_outcome(outcome(loss=0.25))
    assert str(tmp_path / "cells") in str(caught.value)
    assert [one.search.loss for one in store.outcomes()] == [0.5]
    assert [path.name for path in (tmp_path / "cells").iterdir()] == [f"{outcome().cell.key}.json"]


def test_a_folder_that_is_a_file_is_one_sentence(tmp_path):
    (tmp_path / "out").write_text("")
    with pytest.raises(StoreError, match="could not be written"):
        Store(tmp_path / "out").write_manifest({})


def test_processes_that_write_the_same_file_do_not_meet(tmp_path, monkeypatch):
    """The second begins and ends while the first is writing: both contents were whole when they got their name."""
    file, through = tmp_path / "file", environment._write_through
    seen = []

    def interrupted(path, content):
        through(path, content)
        if content == b"first":
            write_atomically(file, b"second")
            seen.append(file.read_bytes())

    monkeypatch.setattr(environment, "_write_through", interrupted)
    write_atomically(file, b"first")
    assert seen == [b"second"] and file.read_bytes() == b"first"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


ENTER = """
import sys
from pathlib import Path
from varprop_lab.environment import StoreError, locked

for _ in sys.stdin:
    try:
        with locked(Path(sys.argv[1])):
            print("inside", flush=True)
    except StoreError as error:
        print(error, flush=True)
"""


def test_one_process_at_a_time(tmp_path):
    command = [sys.executable, "-c", ENTER, tmp_path / "run"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as other:

        def entered():
            other.stdin.write("\n")
            return other.stdout.readline()

        with environment.locked(tmp_path / "run"):
            refused = f"Another process is writing to {tmp_path / 'run'}: wait for it, or choose another --out.\n"
            assert entered() == refused
        assert entered() == "inside\n"


KILLED = """
import os, random, signal, sys, time
from pathlib import Path
from varprop_lab.environment import write_atomically

file = Path(sys.argv[1])

def write_for_ever():
    number = 0
    while True:
        number += 1
        write_atomically(file, str(number % 10).encode() * 2_000_000)

for wait in random.Random(0).choices(range(1, 60), k=30):
    child = os.fork() or write_for_ever()
    time.sleep(wait / 1000)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    content = file.read_bytes()
    print(len(content), len(set(content)))
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_while_writing_the_file_is_whole(tmp_path):
    write_atomically(tmp_path / "file", b"0" * 2_000_000)
    run = subprocess.run([sys.executable, "-c", KILLED, tmp_path / "file"], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == ["2000000 1"] * 30
    environment.remove_unfinished(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
