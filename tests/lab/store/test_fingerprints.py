"""Fingerprints change with what they are of."""

from dataclasses import replace

from varprop_lab.store import fingerprints

from .. import tiny


def of_data(data):
    return fingerprints(tiny.network, data)["data"]


def test_the_fingerprint_follows_every_part_of_the_data():
    data = tiny.dataset()
    known = {of_data(data)}
    for name in ("train_x", "train_y", "test_x", "test_y"):
        part = getattr(data, name).clone()
        part.view(-1)[-1] += 1
        known.add(of_data(replace(data, **{name: part})))
    assert len(known) == 5
    assert of_data(tiny.dataset()) in known
