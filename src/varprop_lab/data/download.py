"""Fetches MNIST and CIFAR-10: sources in turn, contents checked before they count."""

from __future__ import annotations

import gzip
import hashlib
import http.client
import io
import math
import tarfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

import varprop as vp
from varprop.cli import progress
from varprop.cli.models import unknown

from ..store.folder import write_atomically
from . import datasets

TIMEOUT = 30.0  # seconds without a byte after which a source is given up
_LARGEST = 1 << 26  # bytes of one file in an archive; the largest, the images of MNIST, have 47 million
_PIECE = 1 << 20  # bytes, read at once

Say = Callable[[str], None]


class DownloadError(vp.VarpropError):
    """A data set could not be fetched; the message says why from each source and what to do."""


class _SourceFailed(Exception):
    """A source does not answer, or what came is not what it should be."""


@dataclass(frozen=True)
class Archive:
    """A file to fetch and what is in it."""

    urls: tuple[str, ...]  # the sources, in the order in which they are tried
    folder: str  # where the contents go, under the root; also their folder inside a tar file
    # SHA-256 of every file in it, by name. They are of the files themselves, so that it does not matter how a mirror
    # compresses them
    contents: dict[str, str]

    @property
    def name(self) -> str:
        """The name of the archive's file."""
        return self.urls[0].rsplit("/", 1)[-1]


def get(name: str, root: Path | str | None = None, say: Say = print) -> Path:
    """Fetch a data set, unless it is there already, whole and right.

    Args:
        name: ``mnist`` or ``cifar10``.
        root: Where it goes; by default `$VARPROP_DATA`, or the cache directory of the user.
        say: Gets a line for each file.

    Returns:
        The root, as `datasets.load` takes it.

    Raises:
        DownloadError: If no source gives the right files.
    """
    if name not in ARCHIVES:
        raise DownloadError(unknown("data set", name, ARCHIVES))
    target = datasets.places(root)[0]
    for archive in ARCHIVES[name]:
        folder = target / archive.folder
        if _is_installed(archive, folder):
            say(f"{archive.name}: already in {folder}")
        else:
            _install(name, archive, folder)
            say(f"{archive.name}: checked, in {folder}")
    return target


def _is_installed(archive: Archive, folder: Path) -> bool:
    files = ((folder / name, expected) for name, expected in archive.contents.items())
    return all(path.is_file() and _digest(path.read_bytes()) == expected for path, expected in files)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _install(name: str, archive: Archive, folder: Path) -> None:
    """Fetch the contents from the first source that has them, and write them."""
    reasons = []
    for url in archive.urls:
        try:
            contents = _checked_contents(_fetched(url, archive.name), archive, url)
            break
        except _SourceFailed as error:
            reasons.append(str(error))
    else:
        raise DownloadError(
            f"{archive.name} of {name} could not be fetched ({'; '.join(reasons)}). Without a network, put the "
            f"official files into {folder}; otherwise run the command again."
        )
    for file, content in contents.items():
        write_atomically(folder / file, content, then="run the command again")


def _fetched(url: str, name: str) -> bytes:
    chunks = []
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT) as response:
            pieces = math.ceil(int(response.headers.get("Content-Length", 0)) / _PIECE)
            with progress.show(pieces, f"{name}, MiB") as bar:
                while chunk := response.read(_PIECE):
                    chunks.append(chunk)
                    bar.advance()
    except (OSError, http.client.HTTPException) as error:
        raise _SourceFailed(f"{urlsplit(url).netloc}: {_reason(error)}") from error
    return b"".join(chunks)


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP {error.code} {error.reason}"
    inner = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(inner, TimeoutError):
        return "no answer in time"
    if isinstance(inner, OSError) and inner.strerror:
        return f"no connection ({inner.strerror})"
    return str(inner) or type(inner).__name__


def _checked_contents(packed: bytes, archive: Archive, url: str) -> dict[str, bytes]:
    try:
        unpack = _untar if archive.name.endswith(".tar.gz") else _gunzip
        contents = unpack(io.BytesIO(packed), archive)
    except (gzip.BadGzipFile, EOFError, zlib.error, tarfile.TarError) as error:
        raise _SourceFailed(f"{url} is no such archive") from error
    for name, digest in archive.contents.items():
        if name not in contents:
            raise _SourceFailed(f"{url} has no {name} in it")
        if _digest(contents[name]) != digest:
            raise _SourceFailed(f"{url} has another SHA-256 in {name} than the official file")
    return contents


def _gunzip(packed: BinaryIO, archive: Archive) -> dict[str, bytes]:
    (name,) = archive.contents
    with gzip.open(packed) as file:
        return {name: file.read(_LARGEST)}


def _untar(packed: BinaryIO, archive: Archive) -> dict[str, bytes]:
    """The expected members, if they are plain files; nothing else in it is looked at, and nothing is extracted."""
    expected = {f"{archive.folder}/{name}": name for name in archive.contents}
    contents = {}
    with tarfile.open(fileobj=packed, mode="r:gz") as tar:
        for member in tar:
            stream = tar.extractfile(member) if member.isreg() and member.name in expected else None
            if stream is not None:
                contents[expected[member.name]] = stream.read(_LARGEST)
    return contents


_MNIST_SOURCES = (
    "https://storage.googleapis.com/cvdf-datasets/mnist",
    "https://ossci-datasets.s3.amazonaws.com/mnist",
    "http://yann.lecun.com/exdb/mnist",
)
_CIFAR10_SOURCE = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
_MNIST = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}
_CIFAR10 = {
    "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}
ARCHIVES: dict[str, tuple[Archive, ...]] = {
    "mnist": tuple(
        Archive(tuple(f"{source}/{name}.gz" for source in _MNIST_SOURCES), datasets.MNIST_FOLDER, {name: digest})
        for name, digest in _MNIST.items()
    ),
    "cifar10": (Archive((_CIFAR10_SOURCE,), datasets.CIFAR10_FOLDER, _CIFAR10),),
}
