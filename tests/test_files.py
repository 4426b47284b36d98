"""Files from anywhere: what is wrong with one is told in a sentence, nothing in it is run, and it stays as it is."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import pickle
import random
import socket
import struct
import zlib
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import varprop as vp
from tests.lab.store.test_folder import outcome
from varprop.cli.main import main
from varprop_lab import datasets
from varprop_lab.paper.verdicts.judge import judge
from varprop_lab.store import Store, read_run

pytestmark = pytest.mark.filterwarnings("ignore:Detected pickle protocol")
RAN = "ran"


class Code:
    """Unpickled, it makes a file of that name."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> Any:
        return Path.touch, (self.place / RAN,)


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def numpy_file(values: Any, **settings: Any) -> bytes:
    buffer = io.BytesIO()
    numpy.save(buffer, values, **settings)
    return buffer.getvalue()


def png(width: int, height: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")
    )


IDX = b"\0\0\x08\x03" + struct.pack(">3I", 2, 3, 3) + bytes(18)
LAYER = nn.Linear(3, 2)


def layer() -> nn.Module:
    return nn.Linear(3, 2)


def picture_layer() -> nn.Module:
    return nn.Conv2d(1, 2, 3)


def inspect(maker: Callable[[], nn.Module], shape: str, option: str, file: Path) -> None:
    """`varprop inspect` of the model with what the file holds; the sentence on what is wrong is raised."""
    error = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(error), pytest.raises(SystemExit) as end:
        main(["inspect", f"{__name__}:{maker.__name__}", "--input-shape", shape, option, str(file)])
    if end.value.code not in (0, 1):
        assert error.getvalue().startswith("varprop: ") and "unexpected" not in error.getvalue()
        raise vp.VarpropError(error.getvalue().removesuffix("\n"))


# name of the file, a good content, and who reads it
READERS: dict[str, tuple[str, bytes, Callable[[Path], Any]]] = {
    "weights": ("w.pt", saved(LAYER.state_dict()), lambda file: inspect(layer, "3", "--weights", file)),
    "safetensors": (
        "w.safetensors",
        (lambda head: struct.pack("<Q", len(head)) + head + bytes(32))(
            b'{"weight":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},'
            b'"bias":{"dtype":"F32","shape":[2],"data_offsets":[24,32]}}'
        ),
        lambda file: inspect(layer, "3", "--weights", file),
    ),
    "saved tensor": ("x.pt", saved(torch.zeros(4, 3)), lambda file: inspect(layer, "3", "--data", file)),
    "numpy": ("x.npy", numpy_file(numpy.zeros((4, 3))), lambda file: inspect(layer, "3", "--data", file)),
    "checkpoint": ("partial/p.pt", saved({"x": torch.zeros(3)}), lambda file: Store(file.parents[1]).load_partial("p")),
    "cell": ("cells/c.json", json.dumps(asdict(outcome())).encode(), lambda file: Store(file.parents[1]).outcomes()),
    "manifest": ("manifest.json", b'{"seconds": 1.5, "x": "y"}', lambda file: Store(file.parent).manifest()),
    "idx": ("images-idx3-ubyte", IDX, datasets.read_idx),
    "compressed": (
        "images-idx3-ubyte.gz",
        gzip.compress(IDX),
        lambda file: datasets.read_idx(file.with_suffix("")),
    ),
    "cifar": ("data_batch_1.bin", bytes(3073), datasets._cifar10_batch),
}
DAMAGES: dict[str, Callable[[bytes, Path], bytes]] = {
    "empty": lambda good, place: b"",
    "truncated": lambda good, place: good[: 2 * len(good) // 3],
    "one byte short": lambda good, place: good[:-1],
    "another kind": lambda good, place: b"%PDF-1.7" + good[8:],
    "noise": lambda good, place: random.Random(0).randbytes(997),
    "pickle with code": lambda good, place: pickle.dumps({"x": Code(place)}),
    "torch file with code": lambda good, place: saved({"x": Code(place)}),
    "numpy with code": lambda good, place: numpy_file(numpy.array([Code(place)], dtype=object), allow_pickle=True),
    "brackets": lambda good, place: b"[" * 200_000,
}


def written(tmp_path: Path, name: str, content: bytes) -> Path:
    file = tmp_path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    return file


@pytest.mark.parametrize("reader", READERS)
def test_good_files_are_read(reader: str, tmp_path: Path) -> None:
    name, good, read = READERS[reader]
    read(written(tmp_path, name, good))


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("reader", READERS)
def test_damaged_files_are_named_and_run_nothing(reader: str, damage: str, tmp_path: Path) -> None:
    name, good, read = READERS[reader]
    content = DAMAGES[damage](good, tmp_path)
    if damage == "another kind" and reader == "cifar":
        content = b"\xff" + good[1:]  # it has no magic, but labels end at 9
    file = written(tmp_path, name, content)
    with pytest.raises(vp.VarpropError) as caught:
        read(file)
    assert file.name.removesuffix(".gz") in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / RAN).exists()
    assert file.read_bytes() == content


@pytest.mark.parametrize("damage", ("empty", "truncated", "noise", "brackets", "pickle with code"))
def test_reports_name_what_they_cannot_read(damage: str, tmp_path: Path) -> None:
    for name in ("cells/c.json", "manifest.json", "overhead.json"):
        good = READERS["cell"][1]
        written(tmp_path, name, DAMAGES[damage](good, tmp_path))
    problems = " ".join(read_run(tmp_path).problems)
    assert "c.json is damaged" in problems and "manifest.json is damaged" in problems
    verdicts = {verdict.name: verdict for verdict in judge([], [tmp_path / "overhead.json"])}
    assert "was not understood" in verdicts["overhead"].measured[0]
    assert not (tmp_path / RAN).exists()


def test_a_small_file_that_unpacks_to_a_large_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "_LARGEST", 1 << 20)
    written(tmp_path, "images.gz", gzip.compress(bytes(1 << 22)))
    with pytest.raises(datasets.DataError, match="more than 1048576 bytes"):
        datasets.read_idx(tmp_path / "images")


@pytest.mark.parametrize(
    "content", (b"", b"GIF89a", png(60_000, 60_000), png(3, 3)[:40]), ids=("empty", "gif", "huge", "cut")
)
def test_pictures_that_cannot_be_read_are_named(content: bytes, tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    for name in ("a.png", "b.png"):
        written(tmp_path, name, content)
    with pytest.raises(vp.VarpropError, match=r"a\.png cannot be read as a picture"):
        inspect(picture_layer, "1,3,3", "--data", tmp_path)


@pytest.mark.parametrize("state", ("text", None, {"a": 1}, torch.zeros(2, 2), torch.full((3,), float("nan"))))
def test_an_extra_state_of_another_kind_is_refused(state: Any) -> None:
    plain = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    model = vp.normalize(plain, vp.Moments(torch.zeros(1, 3), torch.ones(1, 3)))
    saved_state = model.state_dict()
    key = next(name for name in saved_state if name.endswith("_extra_state"))
    with pytest.raises(ValueError, match="checkpoint"):
        model.load_state_dict({**saved_state, key: state})


def test_nothing_is_fetched_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def refuse(*args: Any, **_: Any) -> None:
        asked.append(args)
        raise OSError("no network here")

    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    for variable in ("VARPROP_DATA", "http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("mnist", "cifar10"):
        with pytest.raises(datasets.DataError, match="varprop data get"):
            datasets.load(name, tmp_path)
    vp.inspect(nn.Linear(3, 2), vp.Moments(torch.zeros(1, 3), torch.ones(1, 3)))
    assert not asked
    with pytest.raises(datasets.DataError, match="could not be fetched"):
        datasets.get("mnist", tmp_path)
    assert asked


def test_pages_escape_the_names_of_modules(tmp_path: Path) -> None:
    name, plain = "</script><img src=x onerror=alert(1)>", nn.Sequential()
    plain.add_module(name, nn.Linear(3, 4))
    plain.add_module("after", nn.ReLU())
    report = vp.inspect(plain, vp.Moments(torch.zeros(1, 3), torch.ones(1, 3)))
    report.to_html(tmp_path / "page.html")
    for page in (report._repr_html_(), (tmp_path / "page.html").read_text("utf-8")):
        assert "onerror=alert(1)" in page and "<img src=x" not in page and "</script><img" not in page
