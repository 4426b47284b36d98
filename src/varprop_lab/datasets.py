"""MNIST, CIFAR-10 and scikit-learn's digits: fetched, checked, and read as tensors on a device."""

from __future__ import annotations

import gzip
import hashlib
import http.client
import io
import math
import os
import struct
import tarfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

import torch
from torch import Tensor

import varprop as vp
from varprop.cli import progress
from varprop.cli.models import unknown

from .environment import write_atomically

NAMES = ("mnist", "cifar10", "digits")
DATA_VARIABLE = "VARPROP_DATA"
MNIST_FOLDER = "MNIST/raw"
CIFAR10_FOLDER = "cifar-10-batches-bin"

_MARKS = {  # by which a data set is recognised
    "mnist": (MNIST_FOLDER, "train-images-idx3-ubyte"),
    "cifar10": (CIFAR10_FOLDER, "data_batch_1.bin"),
}
_CIFAR10_SHAPE = (3, 32, 32)
_LARGEST = 1 << 28  # bytes in a compressed file: a few kilobytes of zeros may unpack to more than there is memory
_DIGITS_SEED = 0  # of the one permutation that decides which digits are for testing


class DataError(vp.VarpropError):
    """A data set is missing, damaged, or could not be fetched; the message says which and what to do."""


@dataclass(frozen=True)
class Dataset:
    """Images and labels, whole, on one device."""

    name: str  # ``mnist``, ``cifar10`` or ``digits``; whatever a data set of one's own is called
    # images (N, C, H, W): bytes, or float32 in [0, 1]; of one's own also other floats (N, ...) or tokens
    train_x: Tensor
    train_y: Tensor  # labels (N), int64; of one's own also targets (N, ...) of any kind, with a loss for them
    test_x: Tensor  # the official test images
    test_y: Tensor  # their labels
    classes: int  # how many there are; 0 where the targets are none


def load(name: str, root: Path | str | None = None, device: torch.device | str = "cpu") -> Dataset:
    """Read a data set (``mnist``, ``cifar10`` or ``digits``) and put it on the device.

    It is looked for in `root`, then in `$VARPROP_DATA`, then in the cache directory of the user; a DataError says that
    it is in none of these, or not what it should be.
    """
    if name not in NAMES:
        raise DataError(unknown("data set", name, NAMES))
    if name == "digits":
        tensors = _load_digits()
    else:
        folder = _found(name, root)
        read = _idx_pair if name == "mnist" else _cifar10_pair
        tensors = *read(folder, "train"), *read(folder, "t10k")
    train_x, train_y, test_x, test_y = (tensor.to(device) for tensor in tensors)
    return Dataset(name, train_x, train_y, test_x, test_y, classes=10)


def on_device(dataset: Dataset, device: torch.device) -> Dataset:
    """A data set with its tensors on a device."""
    names = ("train_x", "train_y", "test_x", "test_y")
    return replace(dataset, **{name: getattr(dataset, name).to(device) for name in names})


def split(dataset: Dataset, seed: int) -> tuple[Tensor, Tensor]:
    """Indices of the training part of `train_x` and of a tenth for validation, at random, each in rising order.

    The draw is made on the CPU, so that every device gets the same one.
    """
    order = torch.randperm(len(dataset.train_x), generator=torch.Generator().manual_seed(seed))
    held_out = round(0.1 * len(order))
    device = dataset.train_x.device
    return order[held_out:].sort().values.to(device), order[:held_out].sort().values.to(device)


def cache_folder() -> Path:
    """Where data lies if nothing else is said: ``$XDG_CACHE_HOME/varprop`` or ``~/.cache/varprop``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "varprop"


def places(root: Path | str | None = None) -> list[Path]:
    """All folders where data is looked for, in order; downloads go to the first."""
    named = [root, os.environ.get(DATA_VARIABLE)]
    return [*(Path(folder).expanduser() for folder in named if folder), cache_folder()]


def find_folder(name: str, root: Path | str | None = None) -> Path | None:
    """The folder with the files of ``mnist`` or ``cifar10``, None if there is none.

    It is the official place under one of the roots, or such a root itself.
    """
    folder, mark = _MARKS[name]
    candidates = (candidate for root_folder in places(root) for candidate in (root_folder / folder, root_folder))
    return next(
        (candidate for candidate in candidates if _is_file(candidate / mark) or _is_file(candidate / f"{mark}.gz")),
        None,
    )


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except PermissionError:  # a folder one may not look into holds nothing
        return False


def _found(name: str, root: Path | str | None) -> Path:
    folder = find_folder(name, root)
    if folder is None:
        looked = ", ".join(str(folder) for folder in places(root))
        raise DataError(
            f"{name} was not found (looked in {looked}); run `varprop data get {name}`, "
            f"or say where it is by --root or ${DATA_VARIABLE}."
        )
    return folder


def _idx_pair(folder: Path, subset: str) -> tuple[Tensor, Tensor]:
    images = read_idx(folder / f"{subset}-images-idx3-ubyte")
    labels = read_idx(folder / f"{subset}-labels-idx1-ubyte")
    if images.dim() != 3 or labels.dim() != 1 or len(images) != len(labels):
        shapes = f"{tuple(images.shape)} and {tuple(labels.shape)}"
        raise DataError(f"Images and labels of {subset} in {folder} do not fit together: their extents are {shapes}.")
    return images[:, None], _labels(labels, folder)


def read_idx(path: Path) -> Tensor:
    """A file of bytes in IDX form, plain or, with ``.gz`` after its name, compressed.

    Raises a DataError if it is missing, or its header and its length do not fit.
    """
    content = _bytes_of(path)
    axes = content[3] if len(content) > 3 else 0
    start = 4 + 4 * axes
    if content[:3] != b"\0\0\x08" or axes == 0 or len(content) < start:
        raise _damaged(path, "it does not begin like an IDX file of bytes")
    extents = struct.unpack(f">{axes}I", content[4:start])
    if len(content) != start + math.prod(extents):
        raise _damaged(path, f"its header promises {math.prod(extents)} bytes, it has {len(content) - start}")
    return _tensor(content)[start:].view(extents)


def _bytes_of(path: Path) -> bytes:
    packed = path.with_name(f"{path.name}.gz")
    try:
        if path.is_file():
            return path.read_bytes()
        with gzip.open(packed) as file:
            content = file.read(_LARGEST + 1)
    except FileNotFoundError:
        raise DataError(f"{path} is missing; run `varprop data get` for this data set again.") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise _damaged(packed, f"it cannot be decompressed ({error})") from error
    except OSError as error:
        raise DataError(f"{path} could not be read: {error.strerror or error}.") from error
    if len(content) > _LARGEST:
        raise _damaged(packed, f"it holds more than {_LARGEST} bytes")
    return content


def _damaged(path: Path, why: str) -> DataError:
    return DataError(f"{path} is damaged: {why}; delete it and run `varprop data get` for this data set again.")


def _tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _labels(values: Tensor, source: Path) -> Tensor:
    if len(values) and int(values.max()) > 9:
        raise DataError(f"The labels in {source} go up to {int(values.max())}; ten classes, 0 to 9, were expected.")
    return values.long()


def _cifar10_pair(folder: Path, subset: str) -> tuple[Tensor, Tensor]:
    names = [f"data_batch_{number}" for number in range(1, 6)] if subset == "train" else ["test_batch"]
    images, labels = zip(*(_cifar10_batch(folder / f"{name}.bin") for name in names), strict=True)
    return torch.cat(images), torch.cat(labels)


def _cifar10_batch(path: Path) -> tuple[Tensor, Tensor]:
    """Records of a label byte and the red, green and blue planes."""
    content = _bytes_of(path)
    record = 1 + math.prod(_CIFAR10_SHAPE)
    if not content or len(content) % record:
        raise _damaged(path, f"its length {len(content)} is not a multiple of {record} bytes")
    records = _tensor(content).view(-1, record)
    return records[:, 1:].reshape(-1, *_CIFAR10_SHAPE), _labels(records[:, 0], path)


def _load_digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """1797 images of 8 x 8 with values 0 to 16; the last fifth of a fixed permutation is for testing."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError("The digits come with scikit-learn: pip install '.[lab]' in a checkout of varprop.") from error
    values, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(values), generator=torch.Generator().manual_seed(_DIGITS_SEED))
    images = torch.as_tensor(values, dtype=torch.float32).div(16).view(-1, 1, 8, 8)[order]
    targets = torch.as_tensor(labels, dtype=torch.int64)[order]
    test = len(order) // 5
    return images[:-test], targets[:-test], images[-test:], targets[-test:]


TIMEOUT = 30.0  # seconds without a byte after which a source is given up
_LARGEST_MEMBER = 1 << 26  # bytes of one file in an archive; the largest, the images of MNIST, have 47 million
_PIECE = 1 << 20  # bytes, read at once

Say = Callable[[str], None]


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
    """Fetch ``mnist`` or ``cifar10``, unless it is there, whole and right; returns the root, as `load` takes it.

    It goes to `root`, by default `$VARPROP_DATA` or the cache directory of the user; `say` gets a line for each file.
    Raises a DataError if no source gives the right files.
    """
    if name not in ARCHIVES:
        raise DataError(unknown("data set", name, ARCHIVES))
    target = places(root)[0]
    for archive in ARCHIVES[name]:
        folder = target / archive.folder
        files = ((folder / file, expected) for file, expected in archive.contents.items())
        if all(path.is_file() and _digest(path.read_bytes()) == expected for path, expected in files):
            say(f"{archive.name}: already in {folder}")
        else:
            _install(name, archive, folder)
            say(f"{archive.name}: checked, in {folder}")
    return target


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
        raise DataError(
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
        if archive.name.endswith(".tar.gz"):
            contents = _untar(io.BytesIO(packed), archive)
        else:
            with gzip.open(io.BytesIO(packed)) as file:
                contents = {name: file.read(_LARGEST_MEMBER) for name in archive.contents}  # there is one
    except (gzip.BadGzipFile, EOFError, zlib.error, tarfile.TarError) as error:
        raise _SourceFailed(f"{url} is no such archive") from error
    for name, digest in archive.contents.items():
        if name not in contents:
            raise _SourceFailed(f"{url} has no {name} in it")
        if _digest(contents[name]) != digest:
            raise _SourceFailed(f"{url} has another SHA-256 in {name} than the official file")
    return contents


def _untar(packed: BinaryIO, archive: Archive) -> dict[str, bytes]:
    """The expected members, if they are plain files; nothing else in it is looked at, and nothing is extracted."""
    expected = {f"{archive.folder}/{name}": name for name in archive.contents}
    contents = {}
    with tarfile.open(fileobj=packed, mode="r:gz") as tar:
        for member in tar:
            stream = tar.extractfile(member) if member.isreg() and member.name in expected else None
            if stream is not None:
                contents[expected[member.name]] = stream.read(_LARGEST_MEMBER)
    return contents


_MNIST_SOURCES = (
    "https://storage.googleapis.com/cvdf-datasets/mnist",
    "https://ossci-s3.amazonaws.com/mnist",
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
        Archive(tuple(f"{source}/{name}.gz" for source in _MNIST_SOURCES), MNIST_FOLDER, {name: digest})
        for name, digest in _MNIST.items()
    ),
    "cifar10": (Archive((_CIFAR10_SOURCE,), CIFAR10_FOLDER, _CIFAR10),),
}
