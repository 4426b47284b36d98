import gzip
import struct

import pytest
import torch

from varprop_lab import datasets
from varprop_lab.datasets import DataError, Dataset, load, split


def idx(values):
    return b"\0\0\x08" + bytes([values.dim()]) + struct.pack(f">{values.dim()}I", *values.shape) + content(values)


def content(values):
    return bytes(values.flatten().tolist())


def pixels(*shape):
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def labels(count):
    return torch.arange(count, dtype=torch.uint8) % 10


def write_mnist(folder, packed=False, train=30, test=12):
    folder.mkdir(parents=True, exist_ok=True)
    for part, count in (("train", train), ("t10k", test)):
        for kind, values in (("images-idx3", pixels(count, 28, 28)), ("labels-idx1", labels(count))):
            name = f"{part}-{kind}-ubyte"
            if packed:
                (folder / f"{name}.gz").write_bytes(gzip.compress(idx(values)))
            else:
                (folder / name).write_bytes(idx(values))


def write_cifar10(folder, count=4):
    folder.mkdir(parents=True)
    for name in [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]:
        records = torch.cat([labels(count)[:, None], pixels(count, 3072)], 1)
        (folder / name).write_bytes(content(records))


@pytest.fixture(autouse=True)
def empty_home(tmp_path, monkeypatch):
    monkeypatch.delenv("VARPROP_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("folder", ["MNIST/raw", "."])
def test_mnist_plain_and_packed_in_both_places(tmp_path, packed, folder):
    write_mnist(tmp_path / "data" / folder, packed)
    found = load("mnist", tmp_path / "data")
    assert torch.equal(found.train_x, pixels(30, 28, 28)[:, None]) and found.train_x.dtype == torch.uint8
    assert torch.equal(found.test_x, pixels(12, 28, 28)[:, None])
    assert torch.equal(found.train_y, labels(30).long()) and torch.equal(found.test_y, labels(12).long())
    assert found.classes == 10


def test_cifar10_planes_and_labels(tmp_path):
    write_cifar10(tmp_path / "cifar-10-batches-bin")
    found = load("cifar10", tmp_path)
    assert found.train_x.shape == (20, 3, 32, 32) and found.test_x.shape == (4, 3, 32, 32)
    planes = pixels(4, 3072)
    assert torch.equal(found.train_x[5, 1].flatten(), planes[1, 1024:2048])
    assert torch.equal(found.train_y[4:8], labels(4).long())


def test_digits_are_split_once_and_for_all():
    first, second = load("digits"), load("digits")
    assert first.train_x.shape == (1438, 1, 8, 8) and first.test_x.shape == (359, 1, 8, 8)
    assert first.train_x.dtype == torch.float32 and first.train_x.min() == 0 and first.train_x.max() == 1
    assert first.train_y.dtype == torch.int64 and first.train_y.unique().tolist() == list(range(10))
    assert torch.equal(first.test_x, second.test_x) and torch.equal(first.train_y, second.train_y)


def test_places_in_their_order(tmp_path, monkeypatch):
    assert datasets.places() == [tmp_path / "cache" / "varprop"]
    monkeypatch.setenv("VARPROP_DATA", str(tmp_path / "variable"))
    assert datasets.places("given")[:2] == [datasets.Path("given"), tmp_path / "variable"]
    write_mnist(tmp_path / "cache/varprop/MNIST/raw", train=1)
    assert len(load("mnist", tmp_path / "given").train_x) == 1
    write_mnist(tmp_path / "variable/MNIST/raw", train=2)
    assert len(load("mnist", tmp_path / "given").train_x) == 2
    write_mnist(tmp_path / "given/MNIST/raw", train=3)
    assert len(load("mnist", tmp_path / "given").train_x) == 3


def test_without_xdg_the_cache_is_in_the_home(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(datasets.Path, "home", lambda: tmp_path)
    assert datasets.cache_folder() == tmp_path / ".cache" / "varprop"


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_missing_data_names_the_command_and_the_places(tmp_path, name):
    with pytest.raises(DataError) as caught:
        load(name, tmp_path / "nowhere")
    message = str(caught.value)
    assert f"`varprop data get {name}`" in message
    assert str(tmp_path / "nowhere") in message and str(tmp_path / "cache") in message


def test_unknown_name_lists_the_known():
    with pytest.raises(DataError, match="mnist, cifar10, digits"):
        load("svhn")


def damaged(name, change):
    def damage(folder):
        path = folder / name
        path.write_bytes(change(path.read_bytes()))
        return path

    return damage


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (damaged("train-images-idx3-ubyte", lambda x: x[:-1]), "promises 23520 bytes, it has 23519"),
        (damaged("train-images-idx3-ubyte", lambda x: b"<html>" + x), "does not begin like an IDX file"),
        (damaged("t10k-labels-idx1-ubyte", lambda _: b""), "does not begin like an IDX file"),
        (damaged("t10k-labels-idx1-ubyte", lambda x: x[:5]), "does not begin like an IDX file"),
    ],
)
def test_damaged_mnist_names_the_file(tmp_path, damage, why):
    write_mnist(tmp_path)
    path = damage(tmp_path)
    with pytest.raises(DataError, match=why) as caught:
        load("mnist", tmp_path)
    assert str(path) in str(caught.value)


def test_damaged_gzip_names_the_file(tmp_path):
    write_mnist(tmp_path, packed=True)
    path = damaged("t10k-images-idx3-ubyte.gz", lambda x: x[: len(x) // 2])(tmp_path)
    with pytest.raises(DataError, match="cannot be decompressed") as caught:
        load("mnist", tmp_path)
    assert str(path) in str(caught.value)


def test_missing_file_images_without_labels_and_wild_labels(tmp_path):
    write_mnist(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(idx(labels(11)))
    with pytest.raises(DataError, match="do not fit together"):
        load("mnist", tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(idx(labels(12) + 20))
    with pytest.raises(DataError, match="go up to 29"):
        load("mnist", tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(DataError, match="t10k-labels-idx1-ubyte is missing"):
        load("mnist", tmp_path)


def test_damaged_cifar10_names_the_file(tmp_path):
    write_cifar10(tmp_path / "cifar-10-batches-bin")
    path = damaged("data_batch_3.bin", lambda x: x[:-7])(tmp_path / "cifar-10-batches-bin")
    with pytest.raises(DataError, match="not a multiple of 3073") as caught:
        load("cifar10", tmp_path)
    assert str(path) in str(caught.value)


def test_split_holds_a_tenth_out_at_random():
    images = torch.zeros(1005, 1, 1, 1)
    data = Dataset("own", images, torch.zeros(1005), images, torch.zeros(1005), 1)
    train, valid = split(data, seed=0)
    assert len(valid) == 100 and len(train) == 905
    assert torch.equal(torch.cat([train, valid]).sort().values, torch.arange(1005))
    assert torch.equal(split(data, seed=0)[1], valid) and not torch.equal(split(data, seed=1)[1], valid)
    assert valid.max() > 900 and valid.min() < 105
