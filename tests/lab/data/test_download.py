import errno
import gzip
import hashlib
import io
import random
import socket
import tarfile
from dataclasses import replace

import pytest

import varprop as vp
from varprop_lab import datasets
from varprop_lab.datasets import DataError

from .loopback import Site, serving

CONTENT = random.Random(0).randbytes(300_000)  # does not compress: the archive is as long
NAME = "train-images-idx3-ubyte"
PACKED = gzip.compress(CONTENT, mtime=0)
FILE = f"MNIST/raw/{NAME}"


def sha256(content):
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def fetched(tmp_path, monkeypatch):
    """Fetches the one file of a small data set from the given sources into `tmp_path`."""
    monkeypatch.delenv("VARPROP_DATA", raising=False)

    def get(*urls):
        archive = replace(datasets.ARCHIVES["mnist"][0], urls=urls, contents={NAME: sha256(CONTENT)})
        monkeypatch.setattr(datasets, "ARCHIVES", {"mnist": (archive,)})
        return datasets.get("mnist", tmp_path, say=lambda _: None)

    return get


def source(site, name=f"{NAME}.gz"):
    return f"{site.url}/{name}"


def good_site(**how):
    return Site({f"/{NAME}.gz": PACKED}, **how)


def closed_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def leftovers(tmp_path):
    return sorted(path.name for path in (tmp_path / "MNIST/raw").glob("*"))


def test_it_arrives_checked_and_is_not_fetched_twice(tmp_path, fetched):
    with serving(good_site()) as site:
        assert fetched(source(site)) == tmp_path
        assert (tmp_path / FILE).read_bytes() == CONTENT
        assert leftovers(tmp_path) == [NAME]
        fetched(source(site))
    assert len(site.requests) == 1


def test_a_file_that_is_not_right_is_fetched_anew(tmp_path, fetched):
    (tmp_path / "MNIST/raw").mkdir(parents=True)
    (tmp_path / FILE).write_bytes(CONTENT[:-1])
    with serving(good_site()) as site:
        fetched(source(site))
    assert (tmp_path / FILE).read_bytes() == CONTENT


@pytest.mark.parametrize("port_is_closed", [True, False])
def test_the_first_source_down_the_second_serves(tmp_path, fetched, port_is_closed):
    with serving(Site({})) as empty, serving(good_site()) as site:
        down = f"http://127.0.0.1:{closed_port()}" if port_is_closed else empty.url
        fetched(f"{down}/{NAME}.gz", source(site))
    assert (tmp_path / FILE).read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (gzip.compress(CONTENT[:-1] + b"x"), "another SHA-256"),
        (gzip.compress(CONTENT[:-1]), "another SHA-256"),
        (b"<html>Log in to the hotel's network</html>", "is no such archive"),
        (PACKED[:-20], "is no such archive"),
        (b"", "is no such archive|another SHA-256"),
    ],
)
def test_wrong_content_never_counts(tmp_path, fetched, wrong, why):
    with serving(Site({f"/{NAME}.gz": wrong})) as bad, serving(good_site()) as good:
        with pytest.raises(DataError, match=why):
            fetched(source(bad))
        assert leftovers(tmp_path) == []
        fetched(source(bad), source(good))
    assert (tmp_path / FILE).read_bytes() == CONTENT


def test_offline_is_one_clear_sentence_with_every_source(tmp_path, fetched):
    ports = closed_port(), closed_port()
    with pytest.raises(DataError) as caught:
        fetched(*(f"http://127.0.0.1:{port}/{NAME}.gz" for port in ports))
    message = str(caught.value)
    assert all(f"127.0.0.1:{port}: no connection (Connection refused)" in message for port in ports)
    assert "Without a network, put the official files into" in message and str(tmp_path / "MNIST/raw") in message
    assert "\n" not in message


def test_unknown_hosts_and_names(fetched):
    with pytest.raises(DataError, match=r"nowhere\.invalid: no connection"):
        fetched(f"http://nowhere.invalid/{NAME}.gz")
    with pytest.raises(DataError, match="no data set 'svhn'"):
        datasets.get("svhn")


def test_a_silent_server_times_out(fetched, monkeypatch):
    monkeypatch.setattr(datasets, "TIMEOUT", 0.2)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        with pytest.raises(DataError, match="no answer in time"):
            fetched(f"http://127.0.0.1:{listening.getsockname()[1]}/{NAME}.gz")


def test_a_transfer_that_breaks_off_does_not_count_and_the_next_source_serves(tmp_path, fetched):
    with serving(good_site(break_after=[100_000, 100_000])) as broken, serving(good_site()) as whole:
        with pytest.raises(DataError, match=r"is no such archive|IncompleteRead"):
            fetched(source(broken))
        assert leftovers(tmp_path) == []
        fetched(source(broken), source(whole))
    assert (tmp_path / FILE).read_bytes() == CONTENT


def test_a_full_disk_says_which_file(tmp_path, fetched, monkeypatch):
    def full(path, content):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("varprop_lab.environment._write_through", full)
    with serving(good_site()) as site, pytest.raises(vp.VarpropError, match=f"no space left.*{NAME}.*run the command"):
        fetched(source(site))
    assert leftovers(tmp_path) == []


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path, fetched):
    (tmp_path / "MNIST").write_text("a file")
    with serving(good_site()) as site, pytest.raises(vp.VarpropError, match="could not be written"):
        fetched(source(site))


# --- the tar file of CIFAR-10 ---

BATCHES = {name: name.encode() * 100 for name in [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]}


def tar_of(members):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for info, content in members:
            tar.addfile(info, io.BytesIO(content) if content is not None else None)
    return buffer.getvalue()


def member(name, content, **fields):
    info = tarfile.TarInfo(name)
    info.size = len(content or b"")
    for field, value in fields.items():
        setattr(info, field, value)
    return info, content


def official():
    return [member(f"cifar-10-batches-bin/{name}", content) for name, content in BATCHES.items()]


@pytest.fixture
def cifar10(tmp_path, monkeypatch):
    def get(members):
        with serving(Site({"/cifar-10-binary.tar.gz": tar_of(members)})) as site:
            contents = {name: sha256(content) for name, content in BATCHES.items()}
            urls = (f"{site.url}/cifar-10-binary.tar.gz",)
            archive = replace(datasets.ARCHIVES["cifar10"][0], urls=urls, contents=contents)
            monkeypatch.setattr(datasets, "ARCHIVES", {"cifar10": (archive,)})
            return datasets.get("cifar10", tmp_path / "data", say=lambda _: None)

    return get


def test_the_tar_file_is_laid_down_in_the_official_layout(tmp_path, cifar10):
    root = cifar10([*official(), member("cifar-10-batches-bin/readme.html", b"not needed")])
    assert {path.name: path.read_bytes() for path in (root / "cifar-10-batches-bin").iterdir()} == BATCHES


def test_nothing_else_leaves_the_tar_file(tmp_path, cifar10):
    strange = [
        member("../../escaped", b"x"),
        member(str(tmp_path / "absolute"), b"x"),
        member("cifar-10-batches-bin/../../up", b"x"),
        member("cifar-10-batches-bin/link", None, type=tarfile.SYMTYPE, linkname="/etc"),
        member("cifar-10-batches-bin/link/inside", b"x"),
    ]
    cifar10([*strange, *official()])
    assert {path.name for path in tmp_path.iterdir()} == {"data"}
    assert {path.name for path in (tmp_path / "data").rglob("*")} == {"cifar-10-batches-bin", *BATCHES}


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE])
def test_an_expected_name_that_is_no_plain_file_does_not_count(tmp_path, cifar10, kind):
    posing = member(
        "cifar-10-batches-bin/test_batch.bin", None, type=kind, linkname="cifar-10-batches-bin/data_batch_1"
    )
    with pytest.raises(DataError, match=r"has no test_batch\.bin in it"):
        cifar10([*official()[:-1], posing])
    assert not list((tmp_path / "data").rglob("*.bin"))


# --- the official sources ---


def test_the_official_archives_fill_the_layouts_that_are_read():
    assert {archive.folder for archive in datasets.ARCHIVES["mnist"]} == {datasets.MNIST_FOLDER}
    assert len(datasets.ARCHIVES["mnist"]) == 4 and all(len(a.urls) == 3 for a in datasets.ARCHIVES["mnist"])
    for archives in datasets.ARCHIVES.values():
        for archive in archives:
            assert all(len(digest) == 64 and int(digest, 16) for digest in archive.contents.values())
            assert all(url.endswith(archive.name) for url in archive.urls)
